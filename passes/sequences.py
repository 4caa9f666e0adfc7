"""The sequence dimensions of a graph's values, and the attention operations that are cut along them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from partc.ir.attention import HEADS, ROWS, Attention
from partc.ir.mesh import CONTEXT_AXIS
from partc.ir.operations import RANDOM
from partc.ir.program import Op, TensorType
from partc.rules import OpRule, flops, resolve
from partc.rules.rule import Dims
from partc.rules.strided_cuts import tensors
from partc.runtime.positions import Order, Orders
from partc.sharding.pins import Pin
from partc.sharding.placements import prefers_rows

Place = tuple[str, int, int]  # (value, dimension, elements of the dimension before the sequence)
_UNEQUAL = 1.1  # the least ratio of scores in the second half of the rows to those in the first
# Operations that sum in any order.
SUMS = frozenset({"linear", "matmul", "mm", "bmm", "einsum", "sum", "mean", "amax", "amin", "any", "all"})
ORDERED = frozenset({"argmax", "argmin", "sort", "argsort", "topk", "scan", "arange", "index_put"})


def is_causal(attention: Attention, types: Mapping[str, TensorType]) -> bool:
    """Whether an attention's rows read no later positions."""
    return attention.causal and types[attention.q].shape[ROWS] == types[attention.k].shape[ROWS]


def reads_more(attention: Attention, types: Mapping[str, TensorType]) -> bool:
    """Whether later rows of an attention read more than earlier ones."""
    if reads := attention.reads:
        return types[attention.q].shape[ROWS] == types[attention.k].shape[ROWS] and reads[1] > _UNEQUAL * reads[0]
    return is_causal(attention, types) and not attention.window


def with_form(op: Op, types: Mapping[str, TensorType], n: int, heads: int, pins: Sequence[Pin]) -> Op:
    """The operation; attention with unequal work per row gets `by_rows=True` if cp cuts its rows.

    A pin decides or, without one, the price over `n` ranks; heads are cut `heads` times.
    """
    attention, rule = Attention.of(op), resolve(op, types)
    if attention is None or rule is None or not reads_more(attention, types):
        return op
    pinned = [pin for pin in pins if pin.decides(CONTEXT_AXIS)]
    by_rows = any(pin.form for pin in pinned)
    if not pinned:
        q, k, v = (types[name] for name in (attention.q, attention.k, attention.v))
        apart = q.shape[HEADS] % heads == 0 and k.shape[HEADS] % heads == 0
        by_rows = not apart or prefers_rows(q, k, v, flops(op, rule), n)
    return replace(op, attrs=(*op.attrs, ("by_rows", True))) if by_rows else op


def factor_at(rule: OpRule, dims: Dims, dim: int, outer: int, size: int) -> tuple[str, int] | None:
    """The factor that contains a sequence of this size, and the number of the factor's elements before the sequence."""
    before = 1
    for name in dims[dim]:
        here = rule.factor(name).size
        if outer % before == 0 and before * here % (outer * size) == 0:
            return name, outer // before
        before *= here
    return None


def carriers(op: Op, rule: OpRule, names: Sequence[str], inside: int) -> Iterator[Place]:
    """The places of a sequence in all operands and results that carry one of these factors."""
    for value, dims in tensors(op, rule):
        for dim, parts in enumerate(dims):
            for index, part in enumerate(parts):
                if part in names:
                    yield value, dim, inside * math.prod(rule.factor(name).size for name in parts[:index])


def draws_apart(op: Op, type: TensorType, dim: int, outer: int, size: int) -> bool:
    """Whether an operation draws random numbers that positions along a dimension of one of its values cannot number,
    because the dimension also counts other things.
    """
    return op.name in RANDOM and (outer != 1 or type.shape[dim] != size)


def numbered(op: Op, dims: Iterable[int], size: int, parts: int = 0) -> Op:
    """The operation with random draws numbered by true positions along these dimensions; `parts`: of a zigzag order.

    `order="1 zigzag 4 of 31"`: dimension 1 is in zigzag order with 4 parts, and 31 of its positions are the model's.
    """
    known = dict(Orders.parse(str(dict(op.attrs).get("order", ""))).dims)
    known |= {dim: Order(parts, known[dim].true if dim in known else size) for dim in dims}
    order = str(Orders(tuple(sorted(known.items()))))
    return replace(op, attrs=(*(item for item in op.attrs if item[0] != "order"), ("order", order)))


def drawn_dims(op: Op, dims: Iterable[int]) -> list[int]:
    """The given dimensions along which an operation draws a random number for each element of its first result."""
    count = op.args[2] if op.name == "dropout" else len(op.results[0].type.shape)
    return [dim for dim in dims if isinstance(count, int) and dim < count]
