"""Collectives as operations: the transpose of each, and the bytes that each rank sends."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from partc.ir.layout import Sizes
from partc.ir.program import DType, Op, TensorType

TRANSPOSES: Mapping[str, str] = {
    "vary": "all_reduce",
    "settle": "div",
    "spread": "alias",
    "all_reduce": "alias",
    "all_gather": "reduce_scatter",
    "unshard": "take",
    "shard": "all_gather",
    "take": "put",
    "reduce_scatter": "all_gather",
    "put": "take",
    "all_to_all": "all_to_all",
    "dispatch": "combine",
    "combine": "dispatch",
}
_GROWING = frozenset({"all_gather", "unshard", "put"})
_SHRINKING = frozenset({"shard", "take", "reduce_scatter"})


def parts(op: Op, sizes: Sizes) -> int:
    """The number of blocks of keys and values that an operation reads: the ranks of its ring, or 1."""
    ring = dict(op.attrs).get("ring")
    return sizes[ring] if isinstance(ring, str) else 1


def inside(op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> Iterator[tuple[str, str, int, DType]]:
    """The collectives that an operation consists of: name, axis, local elements and their type.

    Attention over a ring: keys and values visit every rank, and in backward their gradients travel home behind them.
    """
    ring = dict(op.attrs).get("ring")
    if not isinstance(ring, str):
        return
    backward = op.name.endswith("_backward")
    keys, values = [types[name] for name in op.refs()][1 + backward : 3 + backward]
    size = sum(math.prod(type.layout.local_shape(sizes)) for type in (keys, values))
    for step in range(sizes[ring]):
        if step + 1 < sizes[ring]:
            yield "shift", ring, size, keys.dtype
        if backward:
            yield "shift", ring, size, "f64" if keys.dtype == "f64" else "f32"


def cost(op: str, n: int, bytes: int) -> int:
    """Bytes each of `n` ranks sends, by ring algorithms, for an operand of `bytes` per rank."""
    match op:
        case "all_gather" | "unshard":
            return bytes * (n - 1)
        case "reduce_scatter" | "all_to_all" | "dispatch" | "combine" | "exchange":
            return bytes * (n - 1) // n
        case "shift":
            return bytes
        case "all_reduce":
            return 2 * bytes * (n - 1) // n
        case _:
            return 0


def backward_cost(op: str, n: int, bytes: int) -> int:
    """Bytes each rank sends in the transpose of `op`, whose forward operand had `bytes` per rank."""
    result = bytes * n if op in _GROWING else bytes // n if op in _SHRINKING else bytes
    return cost(TRANSPOSES[op], n, result)
