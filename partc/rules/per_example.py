"""Rules of operations that may be cut along the batch only: they treat examples alike, or sum over them."""

from __future__ import annotations

from collections.abc import Sequence

from partc.ir.program import Op
from partc.rules.rule import Dims, OpRule, argument, integers, make
from partc.rules.shapes import Builder, Types, named_dims


def examples(
    *slots: int, dims: Sequence[tuple[int, str, int]] = (), least: int = 1, of_result: bool = False
) -> Builder:
    """The rule of operations that treat the examples along their first dimension alike, in the operands at `slots`.

    An operand at the first of these slots of fewer than `least` dimensions is a single example.

    `dims` are the arguments that name the dimensions along which they work, as (position, name, default): the first
    dimension may not be among these. They are dimensions of the first operand, or `of_result`.
    """

    def build(op: Op, types: Types) -> OpRule | None:
        first = types[slots[0]].shape
        rank = len(op.results[0].type.shape if of_result else types[0].shape)
        if len(first) < least:
            return None
        for position, name, default in dims:
            given = argument(op, position, name, default)
            named = integers(given) if given is not None else (0,)
            if any(dim % rank == 0 for dim in named):
                return None
        known: dict[str, int] = {"b": first[0]} if first else {}
        cut = [
            index for index, type in enumerate(types) if index in slots and type.shape[:1] == first[:1] and type.shape
        ]
        if slots[0] not in cut or any(not value.type.shape or value.type.shape[0] != first[0] for value in op.results):
            return None

        def named_from(shape: tuple[int, ...], prefix: str, *, batch: bool) -> Dims:
            known.update((f"{prefix}{i}", size) for i, size in enumerate(shape) if not (batch and i == 0))
            return tuple(("b",) if batch and i == 0 else (f"{prefix}{i}",) for i in range(len(shape)))

        operands = [(named_from(t.shape, f"x{i}_", batch=i in cut), t) for i, t in enumerate(types)]
        results = [named_from(value.type.shape, f"y{i}_", batch=True) for i, value in enumerate(op.results)]
        return make(operands, results, known, blocked={name for name in known if name != "b"})

    return build


def undivided(op: Op, types: Types) -> OpRule:
    """The rule of operations whose results depend on their operands as a whole."""
    sizes: dict[str, int] = {}

    def dims(shape: tuple[int, ...], prefix: str) -> Dims:
        sizes.update((f"{prefix}{i}", size) for i, size in enumerate(shape))
        return tuple((f"{prefix}{i}",) for i in range(len(shape)))

    operands = [(dims(type.shape, f"x{i}_"), type) for i, type in enumerate(types)]
    results = [dims(value.type.shape, f"y{i}_") for i, value in enumerate(op.results)]
    return make(operands, results, sizes, blocked=set(sizes))


def histogram(op: Op, types: Types) -> OpRule | None:
    """histc(x, bins, min, max): each rank counts its own elements; the counts are partial sums.

    No rule if min and max are equal: torch then takes the range of the data, and a rank sees only a part of them.
    """
    if argument(op, 2, "min", 0) == argument(op, 3, "max", 0):
        return None
    dims, sizes = named_dims(types[0].shape)
    bins = op.results[0].type.shape[0]
    return make([(dims, types[0])], [(("n",),)], {**sizes, "n": bins}, blocked={"n"})


def scatter_add(op: Op, types: Types) -> OpRule | None:
    """scatter_add(x, dim, index, src): along the first dimension of x, rows of index and src are summed."""
    dim, (x, index, src) = argument(op, 1, "dim"), types
    if dim != 0 or index.shape != src.shape:
        return examples(0, 1, 2, dims=((1, "dim", 0),))(op, types)
    sizes = {"n": x.shape[0], "s": index.shape[0]}
    sizes |= {f"{letter}{i}": size for letter, type in (("x", x), ("i", index)) for i, size in enumerate(type.shape)}
    into: Dims = (("n",), *((f"x{i}",) for i in range(1, len(x.shape))))
    rows: Dims = (("s",), *((f"i{i}",) for i in range(1, len(index.shape))))
    blocked = {name for name in sizes if name != "s"}
    return make([(into, x), (rows, index), (rows, src)], [into], sizes, blocked=blocked, linear=[(0, 2)], added=(0,))


def recurrent(op: Op, types: Types) -> OpRule | None:
    """lstm(x, (h, c), weights, …), gru(x, h, weights, …): only the batch of x, states and results may be cut."""
    if len(types[0].shape) < 3:  # one example
        return None
    first = bool(argument(op, 8, "batch_first", False))
    states = len(op.args[1]) if isinstance(op.args[1], tuple) else 1
    known: dict[str, int] = {"b": types[0].shape[0 if first else 1]}

    def named_from(shape: tuple[int, ...], prefix: str, at: int | None) -> Dims:
        known.update((f"{prefix}{i}", size) for i, size in enumerate(shape) if i != at)
        return tuple(("b",) if i == at else (f"{prefix}{i}",) for i in range(len(shape)))

    places = [0 if first else 1, *[1] * states, *[None] * (len(types) - 1 - states)]
    operands = [(named_from(t.shape, f"x{i}_", at), t) for i, (t, at) in enumerate(zip(types, places, strict=True))]
    results = [named_from(value.type.shape, f"y{i}_", 1 if i or not first else 0) for i, value in enumerate(op.results)]
    return make(operands, results, known, blocked={name for name in known if name != "b"})
