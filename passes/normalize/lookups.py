"""Table lookups: embeddings, embedding bags and one-hot vectors."""

from __future__ import annotations

from partc.ir.program import DTypeArg, Op, Ref
from partc.passes.normalize.writer import Writer, argument, number, ref


def embedding(w: Writer, op: Op) -> None:
    """embedding(w, ids, padding_idx): the row `padding_idx` gets no gradient."""
    padding = argument(op, 2, "padding_idx", -1)
    if padding is not None and padding != -1:
        w.add(op, "embedding", (*op.args[:2], padding))
    else:
        w.add(op, "embedding", op.args[:2])


def embedding_bag(w: Writer, op: Op) -> None:
    """A bag for every row of two-dimensional ids: the sum or the mean of its rows."""
    table, ids = op.args[:2]
    mode, weights = number(argument(op, 4, "mode", 0)), argument(op, 6, "per_sample_weights")
    padding = argument(op, 8, "padding_idx", -1)
    made = w.made.get(ref(ids).name)
    two = made.args[0] if made is not None and made.name == "reshape" else None
    offsets = w.made.get(ref(argument(op, 2, "offsets")).name)
    plain = mode != 2 and weights is None and padding in (None, -1)
    steps: tuple[object, ...] = () if offsets is None or offsets.name != "arange" else offsets.args
    if plain and steps in ((0, *w.shape(ids)), (0, *w.shape(ids), 1)):  # bags of one
        w.add(op, "embedding", (table, ids), op.results[0])
        return
    if not plain or two is None or len(w.shape(two)) != 2:
        w.keep(op)
        return
    (bags, each), width = w.shape(two), w.shape(table)[1]
    if steps != (0, bags * each, each):
        w.keep(op)
        return
    out, dtype = op.results[0], op.results[0].type.dtype
    rows = w.add(op, "embedding", (table, two), w.value(f"{out.name}_rows", (bags, each, width), dtype))
    if mode == 0:
        w.add(op, "sum", (rows, (1,), False), out)
        return
    total = w.add(op, "sum", (rows, (1,), False), w.value(f"{out.name}_sum", (bags, width), dtype))
    w.add(op, "div", (total, each), out)


def take_along(w: Writer, op: Op) -> None:
    """take_along_dim(x, index, dim): a gather by an index as long as x along every other dimension."""
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


def one_hot(w: Writer, op: Op) -> None:
    """1 at the index, 0 elsewhere."""
    shape = op.result.type.shape
    column = w.value(f"{op.result.name}_column", (*shape[:-1], 1), w.types[ref(op.args[0]).name].dtype)
    w.add(op, "reshape", (op.args[0], column.type.shape), column)
    places = w.add(op, "arange", (shape[-1],), w.value(f"{op.result.name}_places", shape[-1:], "i64"))
    same = w.add(op, "eq", (Ref(column.name), places), w.value(f"{op.result.name}_same", shape, "bool"))
    w.add(op, "to", (same, DTypeArg("i64")))
