"""The sequence dimensions of a graph's values, and the attention operations that are cut along them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from partc.ir.mesh import CONTEXT_AXIS
from partc.ir.program import ATTENTION, Op, TensorType
from partc.rules import OpRule, flops, resolve
from partc.rules.rule import Dims, integers
from partc.rules.strided_cuts import tensors
from partc.sharding.pins import Pin
from partc.sharding.placements import prefers_rows

ROWS = 2  # their dimension in attention
Place = tuple[str, int, int]  # a value, one of its dimensions, and the elements of that before the sequence
_UNEQUAL = 1.1  # scores of the second half of the rows, per score of the first
# Operations whose sums do not depend on the order of what they add.
SUMS = frozenset({"linear", "matmul", "mm", "bmm", "einsum", "sum", "mean", "amax", "amin", "any", "all"})
ORDERED = frozenset({"argmax", "argmin", "sort", "argsort", "topk", "scan", "arange", "index_put"})


def is_causal(op: Op, types: Mapping[str, TensorType]) -> bool:
    """Whether an attention's rows read no later positions."""
    if op.name not in ATTENTION or op.args[4] is not True:
        return False
    q, k = (types[name].shape for name in list(op.refs())[:2])
    return q[ROWS] == k[ROWS]


def reads_more(op: Op, types: Mapping[str, TensorType]) -> bool:
    """Whether later rows of an attention read more than earlier ones."""
    if op.name in ATTENTION and (reads := integers(dict(op.attrs).get("reads", ()))):
        q, k = (types[name].shape for name in list(op.refs())[:2])
        return q[ROWS] == k[ROWS] and reads[1] > _UNEQUAL * reads[0]
    return is_causal(op, types) and not (len(op.args) > 6 and op.args[6])


def is_by_rows(op: Op, types: Mapping[str, TensorType], n: int, heads: int, pins: Sequence[Pin]) -> bool:
    """Whether a pin cuts an attention's rows of scores over `n` ranks, or without a pin their price."""
    pinned = [pin for pin in pins if pin.decides(CONTEXT_AXIS)]
    if pinned:
        return any(pin.form for pin in pinned)
    q, k, v = (types[name] for name in list(op.refs())[:3])
    rule = resolve(op, types)
    work = 0 if rule is None else flops(op, rule)
    return q.shape[1] % heads > 0 or k.shape[1] % heads > 0 or prefers_rows(q, k, v, work, n)


def factor_at(rule: OpRule, dims: Dims, dim: int, outer: int, size: int) -> tuple[str, int] | None:
    """The factor that holds a sequence of this size, and the elements of the factor before the sequence."""
    before = 1
    for name in dims[dim]:
        here = rule.factor(name).size
        if outer % before == 0 and before * here % (outer * size) == 0:
            return name, outer // before
        before *= here
    return None


def carriers(op: Op, rule: OpRule, names: Sequence[str], inside: int) -> Iterator[Place]:
    """The places of a sequence in everything that carries one of these factors."""
    for value, dims in tensors(op, rule):
        for dim, parts in enumerate(dims):
            for index, part in enumerate(parts):
                if part in names:
                    yield value, dim, inside * math.prod(rule.factor(name).size for name in parts[:index])


def draws_by_position(op: Op, dim: int, outer: int, size: int) -> bool:
    """Whether the positions of a sequence number the random numbers of an operation along this dimension."""
    return outer == 1 and op.results[0].type.shape[dim] == size


def numbered(op: Op, dims: Iterable[int], size: int, parts: int = 0) -> Op:
    """The operation, whose random numbers have true positions along these dimensions; `parts` are those of a zigzag.

    `order="1 zigzag 4 of 31"`: dimension 1 is in that order, and its first 31 positions are the model's.
    """
    known = dict(each.split(" ", 1) for each in str(dict(op.attrs).get("order", "")).split(", ") if each)
    for dim in dims:
        true = known[str(dim)].removeprefix("of ") if str(dim) in known else str(size)
        known[str(dim)] = f"zigzag {parts} of {true}" if parts else f"of {true}"
    order = ", ".join(f"{dim} {known[dim]}" for dim in sorted(known))
    return replace(op, attrs=(*(item for item in op.attrs if item[0] != "order"), ("order", order)))


def drawn_dims(op: Op, dims: Iterable[int]) -> list[int]:
    """The dimensions, of those given, along which an operation draws a number for each element of its first result."""
    count = op.args[2] if op.name == "dropout" else len(op.results[0].type.shape)
    return [dim for dim in dims if isinstance(count, int) and dim < count]
