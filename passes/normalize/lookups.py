"""Table lookups: embeddings, embedding bags and one-hot vectors."""

from __future__ import annotations

import math
from dataclasses import replace

from partc.errors import PartcError
from partc.ir.program import Arg, Call, DTypeArg, Op, Parameter, Ref, Region
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
    looked = w.step(op, "embedding", args, "looked_up", out.type.shape)
    times = w.step(op, "index", (_times(w, op, ids), (ids,)), "each", w.shape(ids))
    numbers = w.step(op, "to", (times, DTypeArg(out.type.dtype)), "numbers")
    divisor = w.step(op, "reshape", (numbers, (*w.shape(ids), 1)), "occurrences")
    rows = w.step(op, "detach", (looked,), "rows")
    incoming = w.step(op, "incoming_gradient", (rows,), "incoming")
    gradient = w.step(op, "div", (incoming, divisor), "by_frequency")
    w.add(op, "own_gradient", ((rows,), (looked,), (gradient,)))


def _times(w: Writer, op: Op, ids: Arg) -> Ref:
    """The number of times that `ids` name each row of the operation's table."""
    rows, count = w.shape(op.args[0])[:1], (math.prod(w.shape(ids)),)
    flat = w.step(op, "reshape", (ids, count), "row_ids")
    ones = w.step(op, "full", (count, 1), "ones", count, dtype=DTypeArg("i64"))
    zeros = w.step(op, "full", (rows, 0), "zeros", rows, dtype=DTypeArg("i64"))
    return w.step(op, "index_add", (zeros, 0, flat, ones), "times", rows)


def embedding_renorm(w: Writer, op: Op) -> None:
    """embedding_renorm(table, ids, most, order): the rows at `ids` are scaled to a norm of at most `most`.

    named = index_add(zeros, 0, ids, ones) > 0
    y     = where(named and norm(table) > most, table * most / (norm(table) + 1e-7), table)
    """
    table, ids, most, order = op.args
    rows, _ = op.result.type.shape
    norm = w.step(op, "linalg_vector_norm", (table, order, (1,), False), "norm", (rows,))
    long = w.step(op, "gt", (norm, most), "long")
    named = w.step(op, "gt", (_times(w, op, ids), 0), "named")
    both = w.step(op, "logical_and", (long, named), "scaled_rows")
    inverse = w.step(op, "reciprocal", (w.step(op, "add", (norm, 1e-7), "divisor"),), "inverse")
    factor = w.step(op, "mul", (inverse, most), "factor")
    column = w.step(op, "reshape", (factor, (rows, 1)), "column")
    scaled = w.step(op, "mul", (table, column), "scaled")
    w.add(op, "where", (w.step(op, "reshape", (both, (rows, 1)), "mask"), scaled, table))


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
        two = w.step(op, "reshape", (ids, shape), "ids")
    _bags(w, op, two, weights, number(padding) if padded else None)


def _bags(w: Writer, op: Op, two: Arg, weights: Arg, padding: int | None) -> None:
    """Bags of equal length; ids equal to `padding` do not count."""
    mode = number(argument(op, 4, "mode", 0))
    (bags, each), width = w.shape(two), w.shape(op.args[0])[1]
    out, dtype, wide = op.results[0], op.results[0].type.dtype, (bags, each, 1)
    args: tuple[Arg, ...] = (op.args[0], two) if padding is None else (op.args[0], two, padding)
    rows = w.step(op, "embedding", args, "rows", (bags, each, width))
    if weights is not None:
        column = w.step(op, "reshape", (_unflattened(w, weights, (bags, each)), wide), "weights", None, dtype)
        rows = w.step(op, "mul", (rows, column), "weighed")
    empty = None
    if padding is not None:
        outside = w.step(op, "eq", (two, padding), "outside")
        mask = w.step(op, "reshape", (outside, wide), "mask")
        rows = w.step(op, "masked_fill", (rows, mask, -math.inf if mode == _MAX else 0), "inside")
        members = w.step(op, "logical_not", (outside,), "members")
        numbers = w.step(op, "to", (members, DTypeArg(dtype)), "numbers")
        count = w.step(op, "sum", (numbers, (1,), True), "count", (bags, 1))
        if mode == _MAX:
            empty = w.step(op, "eq", (count, 0), "empty")
        divisor: Arg = w.step(op, "clamp_min", (count, 1), "divisor") if mode == _MEAN else 1
    else:
        divisor = each
    if mode == _MAX and empty is not None:
        most = w.step(op, "amax", (rows, (1,), False), "most", (bags, width))
        w.add(op, "masked_fill", (most, empty, 0), out)
    elif mode == _MAX:
        w.add(op, "amax", (rows, (1,), False), out)
    elif mode == _MEAN:
        total = w.step(op, "sum", (rows, (1,), False), "sum", (bags, width))
        w.add(op, "div", (total, divisor), out)
    else:
        w.add(op, "sum", (rows, (1,), False), out)


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
    if argument(op, 7, "include_last_offset", False):
        starts = w.step(op, "slice", (offsets, 0, 0, bags, 1), "starts", (bags,))
        ends = w.step(op, "slice", (offsets, 0, 1, bags + 1, 1), "ends", (bags,))
    else:
        rest = w.step(op, "slice", (offsets, 0, 1, bags, 1), "rest", (bags - 1,))
        last = w.step(op, "full", ((1,), count), "last", (1,), dtype=DTypeArg(of_offsets))
        starts, ends = ref(offsets), w.step(op, "cat", ((rest, last), 0), "ends", (bags,), of_offsets)
    looked_up = (table, ids) if padding is None else (table, ids, padding)
    rows = w.step(op, "embedding", looked_up, "rows", (count, width))
    if weights is not None:
        column = w.step(op, "reshape", (weights, (count, 1)), "weights", None, dtype)
        rows = w.step(op, "mul", (rows, column), "weighed")
    if padding is not None:
        mask = w.step(op, "reshape", (w.step(op, "eq", (ids, padding), "outside"), (count, 1)), "mask")
        rows = w.step(op, "masked_fill", (rows, mask, -math.inf if mode == _MAX else 0), "inside")
    if mode != _MEAN:
        w.add(op, "bag_max" if mode == _MAX else "bag_sum", (rows, starts, ends), out)
        return
    total = w.step(op, "bag_sum", (rows, starts, ends), "sum", (bags, width))
    if padding is None:
        members = w.step(op, "full", ((count, 1), 1), "members", (count, 1), dtype=DTypeArg(dtype))
    else:
        members = w.step(op, "to", (w.step(op, "logical_not", (mask,), "members"), DTypeArg(dtype)), "numbers")
    numbers = w.step(op, "bag_sum", (members, starts, ends), "count", (bags, 1))
    w.add(op, "div", (total, w.step(op, "clamp_min", (numbers, 1), "divisor")), out)


def _unflattened(w: Writer, x: Arg, shape: tuple[int, ...]) -> Arg:
    """The value of this shape that `x` is a reshape of; else `x`."""
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
        index = w.step(op, "expand", (index, shape), "index")
    w.add(op, "gather", (x, place, index))


def take(w: Writer, op: Op) -> None:
    """take(x, index): elements by their index in the flattened x; the IR's own `take` is a reshard."""
    w.add(op, "index", (_row(w, op), (op.args[1],)))


def put(w: Writer, op: Op) -> None:
    """put(x, index, source, accumulate): writes elements by their index in the flattened x; the IR's own `put` is a
    reshard.
    """
    index, source = op.args[1:3]
    if w.shape(source) != w.shape(index):
        source = w.step(op, "reshape", (source, w.shape(index)), "source", None, op.result.type.dtype)
    row = _row(w, op)
    written = (row, (index,), source, argument(op, 3, "accumulate", False))
    w.add(op, "reshape", (w.step(op, "index_put", written, "changed", w.shape(row)), w.shape(op.args[0])))


def _row(w: Writer, op: Op) -> Ref:
    return w.step(op, "reshape", (op.args[0], (math.prod(w.shape(op.args[0])),)), "row")


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
    shape, count = op.result.type.shape, math.prod(w.shape(source))

    def viewed(word: str, arg: Arg, shape: tuple[int, ...]) -> Ref:
        return ref(arg) if w.shape(arg) == shape else w.step(op, "reshape", (arg, shape), word)

    def grown(word: str, arg: Arg, shape: tuple[int, ...]) -> Ref:
        return ref(arg) if w.shape(arg) == shape else w.step(op, "expand", (arg, shape), word)

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
        index = w.step(op, "selected_places", (number, by_example[1]), "places", flat, "i64")
        wide = grown("index", viewed("column", index, (*flat, 1)), (*flat, width))
        found = viewed("rows", source, by_example)
        picked = w.step(op, "gather", (found, 1, wide), "picked", (*flat, width))
    else:
        row = (math.prod(places),)
        number = w.step(op, "to", (viewed("flat", selected, row), DTypeArg("i64")), "one")
        last = w.step(op, "sub", (w.step(op, "cumsum", (number, 0), "sum"), 1), "last")
        index = w.step(op, "mul", (last, number), "places")
        found = viewed("rows", source, (rows, width))
        picked = w.step(op, "index_select", (found, 0, index), "picked", (*row, width))
    chosen = viewed("chosen", selected, (*places, *(1 for _ in shape[lead:])))
    w.add(op, "where", (chosen, viewed("values", picked, shape), grown("x", x, shape)))


def one_hot(w: Writer, op: Op) -> None:
    """1 at the index, 0 elsewhere."""
    shape = op.result.type.shape
    column = w.step(op, "reshape", (op.args[0], (*shape[:-1], 1)), "column")
    places = w.step(op, "arange", (shape[-1],), "places", shape[-1:], "i64")
    w.add(op, "to", (w.step(op, "eq", (column, places), "same"), DTypeArg("i64")))
