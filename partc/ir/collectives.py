"""Collectives as operations: the transpose of each, and the bytes that each rank sends."""

from __future__ import annotations

from collections.abc import Mapping

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


def cost(op: str, n: int, bytes: int) -> int:
    """Bytes each of `n` ranks sends, by ring algorithms, for an operand of `bytes` per rank."""
    match op:
        case "all_gather" | "unshard":
            return bytes * (n - 1)
        case "reduce_scatter" | "all_to_all" | "dispatch" | "combine" | "exchange":
            return bytes * (n - 1) // n
        case "all_reduce":
            return 2 * bytes * (n - 1) // n
        case _:
            return 0


def backward_cost(op: str, n: int, bytes: int) -> int:
    """Bytes each rank sends in the transpose of `op`, whose forward operand had `bytes` per rank."""
    result = bytes * n if op in _GROWING else bytes // n if op in _SHRINKING else bytes
    return cost(TRANSPOSES[op], n, result)
