"""Table lookups: embeddings, embedding bags and one-hot vectors."""

from __future__ import annotations

import math
from dataclasses import replace

from partc.errors import PartcError
from partc.ir.program import Arg, Call, DType, DTypeArg, Op, Parameter, Ref, Region, Value
from partc.passes.normalize.writer import Writer, ref
from partc.rules.rule import argument, number

_MEAN, _MAX = 1, 2  # modes of bags; 0 is the sum


def embedding(w: Writer, op: Op) -> None:
    """embedding(w, ids, padding_idx): the row `padding_idx` gets no gradient.

    With scale_grad_by_freq, an id's gradients are divided by how often the ids name it:

        y = own_gradient((rows,), (rows,), (incoming_gradient(rows) / times[ids],))
    """
    ids, padding, out = op.args[1], argument(op, 2, "padding_idx", -1), op.result
    args = op.args[:2] if padding in (None, -1) else (*op.args[:2], padding)
    if argument(op, 3, "scale_grad_by_freq", False) is not True:
        w.add(op, "embedding", args)
        return

    def new(word: str, shape: tuple[int, ...], dtype: DType = out.type.dtype) -> Value:
        return w.value(f"{out.name}_{word}", shape, dtype)

    shape, column = out.type.shape, (*w.shape(ids), 1)
    looked = w.add(op, "embedding", args, new("looked_up", shape))
    times = w.add(op, "index", (_times(w, op, ids, out), (ids,)), new("each", w.shape(ids), "i64"))
    numbers = w.add(op, "to", (times, DTypeArg(out.type.dtype)), new("numbers", w.shape(ids)))
    divisor = w.add(op, "reshape", (numbers, column), new("occurrences", column))
    rows = w.add(op, "detach", (looked,), new("rows", shape))
    incoming = w.add(op, "incoming_gradient", (rows,), new("incoming", shape))
    gradient = w.add(op, "div", (incoming, divisor), new("by_frequency", shape))
    w.add(op, "own_gradient", ((rows,), (looked,), (gradient,)))


def _times(w: Writer, op: Op, ids: Arg, like: Value) -> Ref:
    """The number of times that `ids` name each row of the operation's table."""
    rows, count = w.shape(op.args[0])[0], math.prod(w.shape(ids))

    def new(word: str, size: int, dtype: DType = "i64") -> Value:
        return w.value(f"{like.name}_{word}", (size,), dtype)

    flat = w.add(op, "reshape", (ids, (count,)), new("row_ids", count, w.types[ref(ids).name].dtype))
    ones = w.add(op, "full", ((count,), 1), new("ones", count), dtype=DTypeArg("i64"))
    zeros = w.add(op, "full", ((rows,), 0), new("zeros", rows), dtype=DTypeArg("i64"))
    return w.add(op, "index_add", (zeros, 0, flat, ones), new("times", rows))


def embedding_renorm(w: Writer, op: Op) -> None:
    """embedding_renorm(table, ids, most, order): the rows at `ids` are scaled to a norm of at most `most`.

    named = index_add(zeros, 0, ids, ones) > 0
    y     = where(named and norm(table) > most, table * most / (norm(table) + 1e-7), table)
    """
    table, ids, most, order = op.args
    (rows, _), out = op.result.type.shape, op.result

    def new(word: str, shape: tuple[int, ...], dtype: DType = out.type.dtype) -> Value:
        return w.value(f"{out.name}_{word}", shape, dtype)

    norm = w.add(op, "linalg_vector_norm", (table, order, (1,), False), new("norm", (rows,)))
    long = w.add(op, "gt", (norm, most), new("long", (rows,), "bool"))
    named = w.add(op, "gt", (_times(w, op, ids, out), 0), new("named", (rows,), "bool"))
    both = w.add(op, "logical_and", (long, named), new("scaled_rows", (rows,), "bool"))
    more = w.add(op, "add", (norm, 1e-7), new("divisor", (rows,)))
    inverse = w.add(op, "reciprocal", (more,), new("inverse", (rows,)))
    factor = w.add(op, "mul", (inverse, most), new("factor", (rows,)))
    column = w.add(op, "reshape", (factor, (rows, 1)), new("column", (rows, 1)))
    scaled = w.add(op, "mul", (table, column), new("scaled", out.type.shape))
    mask = w.add(op, "reshape", (both, (rows, 1)), new("mask", (rows, 1), "bool"))
    w.add(op, "where", (mask, scaled, table), out)


def embedding_bag(w: Writer, op: Op) -> None:
    """The sum, mean or maximum of each bag's rows; zeros if it is empty. Bags are the rows of `ids`, or begin at
    `offsets`.
    """
    if argument(op, 3, "scale_grad_by_freq", False) is True:
        raise PartcError(
            "P0402",
            "scale_grad_by_freq=True of bags is not supported: PyTorch's kernel for CPUs divides by other rows' counts",
            help="take nn.Embedding(scale_grad_by_freq=True), and sum the rows of each bag",
            source=op.source,
        )
    table, ids = op.args[:2]
    weights = argument(op, 6, "per_sample_weights")
    padding = argument(op, 8, "padding_idx", -1)
    made = w.made.get(ref(ids).name)
    two = made.args[0] if made is not None and made.name == "reshape" else None
    offsets = w.made.get(ref(argument(op, 2, "offsets")).name)
    padded = padding not in (None, -1)
    steps: tuple[object, ...] = () if offsets is None or offsets.name != "arange" else offsets.args
    if weights is None and not padded and steps in ((0, *w.shape(ids)), (0, *w.shape(ids), 1)):  # every bag has one id
        w.add(op, "embedding", (table, ids), op.results[0])
        return
    (count,) = w.shape(ids)
    start, end, each = (*steps, 1)[:3] if len(steps) > 1 else (0, 0, 0)
    if start != 0 or end != count or not isinstance(each, int) or each < 1 or count % each:
        _ragged_bags(w, op, weights, number(padding) if padded else None)
        return
    shape = (count // each, each)
    if two is None or w.shape(two) != shape:
        two = w.add(
            op, "reshape", (ids, shape), w.value(f"{op.results[0].name}_ids", shape, w.types[ref(ids).name].dtype)
        )
    _bags(w, op, two, weights, number(padding) if padded else None)


def _bags(w: Writer, op: Op, two: Arg, weights: Arg, padding: int | None) -> None:
    """Bags of equal length; ids equal to `padding` do not count."""
    mode = number(argument(op, 4, "mode", 0))
    (bags, each), width = w.shape(two), w.shape(op.args[0])[1]
    out, dtype = op.results[0], op.results[0].type.dtype
    shape = (bags, each, width)
    wide = (bags, each, 1)

    def new(word: str, shape: tuple[int, ...], dtype: DType) -> Value:
        return w.value(f"{out.name}_{word}", shape, dtype)

    args: tuple[Arg, ...] = (op.args[0], two) if padding is None else (op.args[0], two, padding)
    rows = w.add(op, "embedding", args, new("rows", shape, dtype))
    if weights is not None:
        column = w.add(op, "reshape", (_unflattened(w, weights, (bags, each)), wide), new("weights", wide, dtype))
        rows = w.add(op, "mul", (rows, column), new("weighed", shape, dtype))
    empty = None
    if padding is not None:
        outside = w.add(op, "eq", (two, padding), new("outside", (bags, each), "bool"))
        mask = w.add(op, "reshape", (outside, wide), new("mask", wide, "bool"))
        rows = w.add(op, "masked_fill", (rows, mask, -math.inf if mode == _MAX else 0), new("inside", shape, dtype))
        members = w.add(op, "logical_not", (outside,), new("members", (bags, each), "bool"))
        numbers = w.add(op, "to", (members, DTypeArg(dtype)), new("numbers", (bags, each), dtype))
        count = w.add(op, "sum", (numbers, (1,), True), new("count", (bags, 1), dtype))
        if mode == _MAX:
            empty = w.add(op, "eq", (count, 0), new("empty", (bags, 1), "bool"))
        divisor: Arg = w.add(op, "clamp_min", (count, 1), new("divisor", (bags, 1), dtype)) if mode == _MEAN else 1
    else:
        divisor = each
    if mode == _MAX:
        most = w.add(op, "amax", (rows, (1,), False), out if empty is None else new("most", (bags, width), dtype))
        if empty is not None:
            w.add(op, "masked_fill", (most, empty, 0), out)
        return
    total = w.add(op, "sum", (rows, (1,), False), new("sum", (bags, width), dtype) if mode == _MEAN else out)
    if mode == _MEAN:
        w.add(op, "div", (total, divisor), out)


def _ragged_bags(w: Writer, op: Op, weights: Arg, padding: int | None) -> None:
    """Bags that begin at offsets and end where the next one begins; ids equal to `padding` do not count."""
    mode, (table, ids, offsets) = number(argument(op, 4, "mode", 0)), op.args[:3]
    if w.separate and ref(offsets).name in w.batched:
        raise PartcError(
            "P0402",
            "bags begin at offsets in the whole batch, and each microbatch would be a batch of its own",
            help="compile with microbatches=1, or let the number of ids differ from the number of bags",
            source=op.source,
        )
    (count,), width = w.shape(ids), w.shape(table)[1]
    out, dtype, of_offsets = op.results[0], op.results[0].type.dtype, w.types[ref(offsets).name].dtype
    bags = out.type.shape[0]

    def new(word: str, shape: tuple[int, ...], dtype: DType) -> Value:
        return w.value(f"{out.name}_{word}", shape, dtype)

    if argument(op, 7, "include_last_offset", False):
        starts = w.add(op, "slice", (offsets, 0, 0, bags, 1), new("starts", (bags,), of_offsets))
        ends = w.add(op, "slice", (offsets, 0, 1, bags + 1, 1), new("ends", (bags,), of_offsets))
    else:
        rest = w.add(op, "slice", (offsets, 0, 1, bags, 1), new("rest", (bags - 1,), of_offsets))
        last = w.add(op, "full", ((1,), count), new("last", (1,), of_offsets), dtype=DTypeArg(of_offsets))
        starts, ends = ref(offsets), w.add(op, "cat", ((rest, last), 0), new("ends", (bags,), of_offsets))
    rows = w.add(
        op, "embedding", (table, ids) if padding is None else (table, ids, padding), new("rows", (count, width), dtype)
    )
    if weights is not None:
        column = w.add(op, "reshape", (weights, (count, 1)), new("weights", (count, 1), dtype))
        rows = w.add(op, "mul", (rows, column), new("weighed", (count, width), dtype))
    if padding is not None:
        outside = w.add(op, "eq", (ids, padding), new("outside", (count,), "bool"))
        mask = w.add(op, "reshape", (outside, (count, 1)), new("mask", (count, 1), "bool"))
        fill = -math.inf if mode == _MAX else 0
        rows = w.add(op, "masked_fill", (rows, mask, fill), new("inside", (count, width), dtype))
    if mode == _MAX:
        w.add(op, "bag_max", (rows, starts, ends), out)
        return
    total = w.add(op, "bag_sum", (rows, starts, ends), new("sum", (bags, width), dtype) if mode == _MEAN else out)
    if mode != _MEAN:
        return
    if padding is None:
        members = w.add(op, "full", ((count, 1), 1), new("members", (count, 1), dtype), dtype=DTypeArg(dtype))
    else:
        inside = w.add(op, "logical_not", (mask,), new("members", (count, 1), "bool"))
        members = w.add(op, "to", (inside, DTypeArg(dtype)), new("numbers", (count, 1), dtype))
    numbers = w.add(op, "bag_sum", (members, starts, ends), new("count", (bags, 1), dtype))
    divisor = w.add(op, "clamp_min", (numbers, 1), new("divisor", (bags, 1), dtype))
    w.add(op, "div", (total, divisor), out)


def _unflattened(w: Writer, x: Arg, shape: tuple[int, ...]) -> Arg:
    """The value of this shape of which `x` is a reshape; else `x`."""
    made = w.made.get(ref(x).name)
    return made.args[0] if made is not None and made.name == "reshape" and w.shape(made.args[0]) == shape else x


def with_sparse(parameters: tuple[Parameter, ...], region: Region, call: Call) -> tuple[Parameter, ...]:
    """The parameters, with `sparse` set if their lookups ask for sparse gradients."""
    places = {"embedding": 4, "embedding_bag": 5}
    asking = {
        ref(op.args[0]).name
        for op in region.forward.ops
        if op.name in places and argument(op, places[op.name], "sparse", False) is True
    }
    names = {name for value, name in zip(region.params, call.params, strict=True) if value.name in asking}
    return tuple(replace(item, sparse=True) if item.name in names else item for item in parameters)


def take_along(w: Writer, op: Op) -> None:
    """take_along_dim(x, index, dim) as a gather, with the index expanded along the other dimensions."""
    x, index, dim = op.args[0], op.args[1], argument(op, 2, "dim")
    if dim is None:
        w.keep(op)
        return
    rank = len(w.shape(x))
    place = number(dim) % rank
    shape = tuple(w.shape(index)[place] if i == place else size for i, size in enumerate(op.result.type.shape))
    if shape != w.shape(index):
        wide = w.value(f"{op.result.name}_index", shape, w.types[ref(index).name].dtype)
        index = w.add(op, "expand", (index, shape), wide)
    w.add(op, "gather", (x, place, index))


def take(w: Writer, op: Op) -> None:
    """take(x, index): elements by their index in the flattened x; the IR's own `take` is a reshard."""
    w.add(op, "index", (_row(w, op), (op.args[1],)))


def put(w: Writer, op: Op) -> None:
    """put(x, index, source, accumulate): writes elements by their index in the flattened x; the IR's own `put` is a
    reshard.
    """
    index, source, name, shape = op.args[1], op.args[2], op.result.name, w.shape(op.args[0])
    if w.shape(source) != w.shape(index):
        source = w.add(
            op, "reshape", (source, w.shape(index)), w.value(f"{name}_source", w.shape(index), op.result.type.dtype)
        )
    row = _row(w, op)
    changed = w.value(f"{name}_changed", w.shape(row), op.result.type.dtype)
    made = w.add(op, "index_put", (row, (index,), source, argument(op, 3, "accumulate", False)), changed)
    w.add(op, "reshape", (made, shape))


def _row(w: Writer, op: Op) -> Arg:
    shape = (math.prod(w.shape(op.args[0])),)
    return w.add(op, "reshape", (op.args[0], shape), w.value(f"{op.result.name}_row", shape, op.result.type.dtype))


def masked_scatter(w: Writer, op: Op) -> None:
    """masked_scatter(x, mask, source): the elements of `source`, in order, where a mask selects elements of x.

    picked = gather(rows, 1, selected_places(mask))      # rows[example, the number of selected ones before this one]
    y      = where(mask, picked, x)

    If `source` depends on the batch and has equally many rows for each example, but fewer than an example of x, every
    example has to select that many, so that examples are independent; `selected_places` checks this. Otherwise the
    selected rows are counted through the whole batch. A mask that is constant along trailing dimensions selects whole
    rows.
    """
    x, mask, source = op.args
    name, shape, count = op.result.name, op.result.type.shape, math.prod(w.shape(source))

    def new(word: str, shape: tuple[int, ...], like: Arg) -> Value:
        return w.value(f"{name}_{word}", shape, w.types[ref(like).name].dtype)

    def viewed(word: str, arg: Arg, shape: tuple[int, ...]) -> Ref:
        return ref(arg) if w.shape(arg) == shape else w.add(op, "reshape", (arg, shape), new(word, shape, arg))

    def grown(word: str, arg: Arg, shape: tuple[int, ...]) -> Ref:
        return ref(arg) if w.shape(arg) == shape else w.add(op, "expand", (arg, shape), new(word, shape, arg))

    maker = w.made.get(ref(mask).name)
    if maker is not None and maker.name == "expand":
        mask = maker.args[0]
    equal = (*(1 for _ in shape[len(w.shape(mask)) :]), *w.shape(mask))
    lead = max((dim + 1 for dim, size in enumerate(equal) if size != 1), default=0)
    width = math.prod(shape[lead:])
    if count % width:
        lead, width = len(shape), 1
    places, rows = shape[:lead], count // width
    selected = grown("selected", viewed("mask", mask, equal[:lead]), places)
    fixed = 0 < rows < math.prod(places) and rows % shape[0] == 0
    if lead > 1 and shape[0] == w.batch and ref(source).name in w.batched and fixed:
        examples = shape[0]
        flat = (examples, math.prod(places[1:]))
        by_example = (examples, rows // examples, width)
        number = viewed("flat", selected, flat)
        index = w.add(op, "selected_places", (number, by_example[1]), w.value(f"{name}_places", flat, "i64"))
        wide = grown("index", viewed("column", index, (*flat, 1)), (*flat, width))
        found = viewed("rows", source, by_example)
        picked = w.add(op, "gather", (found, 1, wide), new("picked", (*flat, width), source))
    else:
        row = (math.prod(places),)
        number = w.add(op, "to", (viewed("flat", selected, row), DTypeArg("i64")), w.value(f"{name}_one", row, "i64"))
        before = w.add(op, "cumsum", (number, 0), w.value(f"{name}_sum", row, "i64"))
        last = w.add(op, "sub", (before, 1), w.value(f"{name}_last", row, "i64"))
        index = w.add(op, "mul", (last, number), w.value(f"{name}_places", row, "i64"))
        found = viewed("rows", source, (rows, width))
        picked = w.add(op, "index_select", (found, 0, index), new("picked", (*row, width), source))
    chosen = viewed("chosen", selected, (*places, *(1 for _ in shape[lead:])))
    w.add(op, "where", (chosen, viewed("values", picked, shape), grown("x", x, shape)))


def one_hot(w: Writer, op: Op) -> None:
    """1 at the index, 0 elsewhere."""
    shape = op.result.type.shape
    column = w.value(f"{op.result.name}_column", (*shape[:-1], 1), w.types[ref(op.args[0]).name].dtype)
    w.add(op, "reshape", (op.args[0], column.type.shape), column)
    places = w.add(op, "arange", (shape[-1],), w.value(f"{op.result.name}_places", shape[-1:], "i64"))
    same = w.add(op, "eq", (Ref(column.name), places), w.value(f"{op.result.name}_same", shape, "bool"))
    w.add(op, "to", (same, DTypeArg("i64")))
