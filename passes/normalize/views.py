"""Views, joins and slices with explicit, non-negative sizes and dimensions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from partc.ir.program import Arg, DTypeArg, Op, Ref
from partc.passes.normalize.identities import IDENTITIES
from partc.passes.normalize.writer import Rewrite, Writer, ref
from partc.rules.rule import argument, integers, number


def reshape(w: Writer, op: Op) -> None:
    if w.shape(op.args[0]) == op.result.type.shape:
        w.drop(op)
    else:
        w.add(op, "reshape", (op.args[0], op.result.type.shape))


def permute(order: Callable[[Op, int], tuple[int, ...]]) -> Rewrite:
    def rewrite(w: Writer, op: Op) -> None:
        rank = len(op.result.type.shape)
        dims = order(op, rank) if rank else ()
        if dims == tuple(range(rank)):
            w.drop(op)
        elif (back := unpermuted(w, ref(op.args[0]), dims, op.module)) is not None:
            w.alias(op.result.name, back.name)
        else:
            w.add(op, "permute", (op.args[0], dims))

    return rewrite


def unpermuted(w: Writer, x: Ref, dims: tuple[int, ...], module: str | None = None) -> Ref | None:
    """The value behind the permutations that made `x`, if they and a further one by `dims` cancel each other.

    With a module, only permutations of that module count, so that equal layers stay equal whatever surrounds them.
    """
    while (made := w.made.get(x.name)) is not None and made.name == "permute" and module in (None, made.module):
        x, before = ref(made.args[0]), integers(made.args[1])
        dims = tuple(before[dim] for dim in dims)
        if dims == tuple(range(len(dims))):
            return x
    return None


def swapped(op: Op, rank: int) -> tuple[int, ...]:
    order = list(range(rank))
    a, b = (number(arg) % rank for arg in op.args[1:3])
    order[a], order[b] = order[b], order[a]
    return tuple(order)


def moved(op: Op, rank: int) -> tuple[int, ...]:
    sources, targets = (
        tuple(number(dim) % rank for dim in (arg if isinstance(arg, tuple) else (arg,))) for arg in op.args[1:3]
    )
    order = [dim for dim in range(rank) if dim not in sources]
    for target, source in sorted(zip(targets, sources, strict=True)):
        order.insert(target, source)
    return tuple(order)


def expand(w: Writer, op: Op) -> None:
    if w.shape(op.args[0]) == op.result.type.shape:
        w.drop(op)
    else:
        w.add(op, "expand", (op.args[0], op.result.type.shape))


def broadcast(w: Writer, op: Op) -> None:
    operands = op.args[0] if isinstance(op.args[0], tuple) else op.args
    for operand, value in zip(operands, op.results, strict=True):
        if w.shape(operand) == value.type.shape:
            w.alias(value.name, ref(operand).name)
        else:
            w.add(op, "expand", (operand, value.type.shape), value)


def meshgrid(w: Writer, op: Op) -> None:
    """Each result is one operand, expanded; it has no gradient for the other operands."""
    operands = op.args[0] if isinstance(op.args[0], tuple) else op.args
    crossed = dict(op.attrs).get("indexing") == "xy" or op.args[-1] == "xy"
    for index, (operand, value) in enumerate(zip(operands, op.results, strict=False)):
        shape = value.type.shape
        dim = 1 - index if crossed and index < 2 <= len(shape) else index
        column = tuple(size if place == dim else 1 for place, size in enumerate(shape))
        placed = w.add(op, "reshape", (operand, column), w.value(f"{value.name}_column", column, value.type.dtype))
        w.add(op, "expand", (placed, shape), value)


def split(w: Writer, op: Op) -> None:
    dim = argument(op, 1 if op.name == "unbind" else 2, "dim", 0)
    rank = len(w.shape(op.args[0]))
    dim = number(dim) % rank
    if len(op.results) == 1:
        w.add(op, "reshape", (op.args[0], op.result.type.shape))
        return
    if op.name == "unbind":
        shape = w.shape(op.args[0])
        parts = tuple(w.value(f"{v.name}_part", (*shape[:dim], 1, *shape[dim + 1 :]), v.type.dtype) for v in op.results)
        split = replace(op, name="split", args=(op.args[0], (1,) * len(parts), dim), attrs=(), results=parts)
        w.keep(split)
        for part, value in zip(parts, op.results, strict=True):
            w.add(op, "reshape", (Ref(part.name), value.type.shape), value)
        return
    full = tuple(value for value in op.results if 0 not in value.type.shape)
    for value in op.results:
        if value not in full:
            w.add(op, "full", (value.type.shape, 0), value, dtype=DTypeArg(value.type.dtype))
    if len(full) == 1:
        w.alias(full[0].name, ref(op.args[0]).name)
        return
    sizes = tuple(value.type.shape[dim] for value in full)
    w.keep(replace(op, name="split", args=(op.args[0], sizes, dim), attrs=(), results=full))


def select(w: Writer, op: Op) -> None:
    shape = w.shape(op.args[0])
    dim, index = number(op.args[1]) % len(shape), number(op.args[2])
    if shape[dim] == 1:
        w.add(op, "reshape", (op.args[0], op.result.type.shape))
        return
    index %= shape[dim]
    part = w.step(op, "slice", (op.args[0], dim, index, index + 1, 1), "row", (*shape[:dim], 1, *shape[dim + 1 :]))
    w.add(op, "reshape", (part, op.result.type.shape))


def slice_(w: Writer, op: Op) -> None:
    shape = w.shape(op.args[0])
    dim = number(argument(op, 1, "dim", 0)) % len(shape)
    start, end, step = argument(op, 2, "start") or 0, argument(op, 3, "end"), argument(op, 4, "step", 1)
    size = shape[dim]
    first, last, stride = slice(start, end, step).indices(size)
    if (first, last, stride) == (0, size, 1):
        w.drop(op)
    else:
        w.add(op, "slice", (op.args[0], dim, first, max(first, last), stride))


def narrow(w: Writer, op: Op) -> None:
    """narrow(x, dim, start, length) as a slice."""
    shape = w.shape(op.args[0])
    dim, start, length = (number(arg) for arg in op.args[1:4])
    start %= shape[dim]
    slice_(w, replace(op, name="slice", args=(op.args[0], dim, start, start + length, 1), attrs=()))


def cat(w: Writer, op: Op) -> None:
    """Drop parts without elements, such as an empty cache."""
    dim = number(argument(op, 1, "dim", 0)) % len(op.result.type.shape)
    assert isinstance(op.args[0], tuple)
    parts = tuple(part for part in op.args[0] if 0 not in w.shape(part))
    if len(parts) == 1:
        w.alias(op.result.name, ref(parts[0]).name)
    else:
        w.add(op, "cat", (parts, dim))


def stack(w: Writer, op: Op) -> None:
    shape = op.result.type.shape
    dim = number(argument(op, 1, "dim", 0)) % len(shape)
    assert isinstance(op.args[0], tuple)
    if len(op.args[0]) == 1:
        w.add(op, "reshape", (op.args[0][0], shape))
        return
    single = (*shape[:dim], 1, *shape[dim + 1 :])
    parts = []
    for part in op.args[0]:
        value = w.value(f"{ref(part).name}_layer", single, op.result.type.dtype)
        parts.append(w.add(op, "reshape", (part, single), value))
    w.add(op, "cat", (tuple(parts), dim))


def pad_sequence(w: Writer, op: Op) -> None:
    """Rows of different lengths, each padded to the longest one, in a stack."""
    assert isinstance(op.args[0], tuple)
    first, value, side = (
        argument(op, 1, "batch_first"),
        argument(op, 2, "padding_value", 0.0),
        argument(op, 3, "padding_side"),
    )
    longest = op.result.type.shape[1 if first else 0]
    rows = []
    for row in op.args[0]:
        size, *rest = w.shape(row)
        if missing := longest - size:
            pads = (*(0, 0) * len(rest), *((missing, 0) if side == "left" else (0, missing)))
            padded = w.value(f"{ref(row).name}_padded", (longest, *rest), op.result.type.dtype)
            row = w.add(op, "constant_pad_nd", (row, pads, value), padded)
        rows.append(row)
    stack(w, replace(op, args=(tuple(rows), 0 if first else 1), attrs=()))


def tile(w: Writer, op: Op) -> None:
    """tile(x, times) as a repeat; missing leading counts are 1."""
    times = op.args[1]
    assert isinstance(times, tuple)
    whole = (*(1 for _ in w.shape(op.args[0])[len(times) :]), *times)
    IDENTITIES["repeat"](w, replace(op, name="repeat", args=(op.args[0], whole), attrs=()))


def slice_scatter(w: Writer, op: Op) -> None:
    """A slice put into a tensor: the part before it, the slice, and the part after it."""
    shape = op.result.type.shape
    dim = number(argument(op, 2, "dim", 0)) % len(shape)
    step = argument(op, 5, "step", 1)
    first, last, _ = slice(argument(op, 3, "start"), argument(op, 4, "end"), step).indices(shape[dim])
    if step == 1:
        _write_part(w, op, op.args[1], dim, first, max(first, last))
    else:
        w.keep(op)


def select_scatter(w: Writer, op: Op) -> None:
    shape = op.result.type.shape
    dim, index = number(op.args[2]) % len(shape), number(op.args[3])
    index %= shape[dim]
    row = w.step(op, "reshape", (op.args[1], (*shape[:dim], 1, *shape[dim + 1 :])), "row", None, op.result.type.dtype)
    _write_part(w, op, row, dim, index, index + 1)


def _write_part(w: Writer, op: Op, part: Arg, dim: int, first: int, last: int) -> None:
    """Write a part into a tensor; `writes` later turns chains of these into joins."""
    if last - first == op.result.type.shape[dim]:
        w.alias(op.result.name, ref(part).name)
    elif first == last:
        w.drop(op)
    else:
        w.add(op, "slice_scatter", (op.args[0], part, dim, first, last, 1))
