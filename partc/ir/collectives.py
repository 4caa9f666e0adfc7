"""The table of collectives and of local reshards (which move nothing): one line each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from partc.ir.attention import Attention
from partc.ir.layout import Sizes
from partc.ir.program import Collective, Op, TensorType

_CUT = ("dim", "outer", "axis")
_TWO_CUTS = ("split_dim", "split_outer", "concat_dim", "concat_outer", "axis")
Bytes = Callable[[int, int], int]  # (number of ranks, bytes of a rank's operand) -> bytes


def _no_bytes(n: int, bytes: int) -> int:
    return 0


def _gathered(n: int, bytes: int) -> int:
    return bytes * (n - 1)


def _exchanged(n: int, bytes: int) -> int:
    return bytes * (n - 1) // n


def _reduced(n: int, bytes: int) -> int:
    return 2 * bytes * (n - 1) // n


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """An operation that changes the layout of a value.

    `transpose` is the operation on its gradient. On n ranks its result has n times (`grows`) or 1/n of (`shrinks`) the
    elements of its operand. `sends` gives the bytes that a rank sends, by ring algorithms. `attrs` names its attributes
    in the order of its torch operator. `runs_as` is the operation that the package runs, where this one only differs in
    its gradient.
    """

    transpose: str
    size: Literal["same", "grows", "shrinks"] = "same"
    sends: Bytes = _no_bytes
    attrs: tuple[str, ...] = ("axis",)
    runs_as: str = ""
    title: str = ""  # in comments


COLLECTIVES: Mapping[str, CollectiveRow] = {
    "vary": CollectiveRow(transpose="all_reduce"),
    "settle": CollectiveRow(transpose="div"),
    "spread": CollectiveRow(transpose="alias"),
    "all_reduce": CollectiveRow(transpose="alias", sends=_reduced, title="all-reduce"),
    "all_gather": CollectiveRow(
        transpose="reduce_scatter", size="grows", sends=_gathered, attrs=_CUT, title="all-gather"
    ),
    "unshard": CollectiveRow(transpose="take", size="grows", sends=_gathered, attrs=_CUT, runs_as="all_gather"),
    "shard": CollectiveRow(transpose="all_gather", size="shrinks", attrs=_CUT, runs_as="take"),
    "take": CollectiveRow(transpose="put", size="shrinks", attrs=_CUT),
    "reduce_scatter": CollectiveRow(
        transpose="all_gather", size="shrinks", sends=_exchanged, attrs=_CUT, title="reduce-scatter"
    ),
    "put": CollectiveRow(transpose="take", size="grows", attrs=_CUT),
    "all_to_all": CollectiveRow(transpose="all_to_all", sends=_exchanged, attrs=_TWO_CUTS, title="all-to-all"),
    "dispatch": CollectiveRow(transpose="combine", sends=_exchanged, title="dispatch"),
    "combine": CollectiveRow(transpose="dispatch", sends=_exchanged, title="combine"),
}
# Collectives of compiled graphs. If a `wait` reads the result, the operation only starts the collective.
MOVING = frozenset(name for name, row in COLLECTIVES.items() if row.title)
# Exchanges of rows with the ranks that hold their experts, and `route`, which plans them. The number of rows depends on
# the data; the first dimension of the results' types is its mean.
ROUTED = frozenset({"route", "dispatch", "combine"})
# `divide_rows` gives each of several tables the rows received for it, in turn; `join_rows` is its transpose.
BY_TABLE = frozenset({"divide_rows", "join_rows"})
# Messages that are parts of operations: rows of experts, and keys and values around a ring.
_MESSAGES: Mapping[str, Bytes] = {"exchange": _exchanged, "shift": lambda n, bytes: bytes}


def num_blocks(op: Op, sizes: Sizes) -> int:
    """The number of blocks of keys and values that an attention reads in turn: the ranks of its ring, or 1."""
    attention = Attention.of(op)
    return sizes[attention.ring] if attention is not None and attention.ring else 1


def collectives_of(op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> Iterator[Collective]:
    """The collectives of an operation in a graph; none for most operations.

    Attention over a ring: keys and values visit every rank, and in backward their gradients travel home behind them.
    The number of rows that an exchange moves depends on the data; its mean stands for it.
    """
    attention = Attention.of(op)
    if attention is not None and attention.ring:
        dtype = types[attention.k].dtype
        size = sum(types[name].local_elements(sizes) for name in (attention.k, attention.v))
        pair = Collective(op="shift", axes=(attention.ring,), shape=(size,), dtype=dtype)
        for step in range(sizes[attention.ring]):
            if step + 1 < sizes[attention.ring]:
                yield pair
            if attention.backward:
                yield replace(pair, dtype="f64" if dtype == "f64" else "f32")
    elif op.name in MOVING:
        operand, axis = types[next(op.refs())], str(dict(op.attrs)["axis"])
        name = "exchange" if op.name in ROUTED else op.name
        yield Collective(op=name, axes=(axis,), shape=operand.layout.local_shape(sizes), dtype=operand.dtype)


def cost(op: str, n: int, bytes: int) -> int:
    """The bytes that each of `n` ranks sends, by ring algorithms, for an operand of `bytes` per rank."""
    row = COLLECTIVES.get(op)
    return _MESSAGES.get(op, _no_bytes)(n, bytes) if row is None else row.sends(n, bytes)


def received(collective: Collective, sizes: Sizes) -> int:
    """The bytes that one rank receives, with ring algorithms."""
    return cost(collective.op, collective.ways(sizes), collective.bytes)


def backward_cost(op: str, n: int, bytes: int) -> int:
    """Bytes each rank sends in the transpose of `op`, whose forward operand had `bytes` per rank."""
    return cost(COLLECTIVES[op].transpose, n, resized(op, n, bytes))


def resized(op: str, n: int, size: int) -> int:
    """The size of a collective's result on a rank whose operand has `size`."""
    return {"same": size, "grows": size * n, "shrinks": size // n}[COLLECTIVES[op].size]
