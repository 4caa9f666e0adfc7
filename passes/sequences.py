"""The sequence dimensions of a graph's values, and the attention operations that are cut along them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from partc.ir.attention import HEADS, ROWS, Attention
from partc.ir.mesh import CONTEXT_AXIS
from partc.ir.program import Op, TensorType
from partc.rules import OpRule, flops, resolve
from partc.rules.rule import Dims
from partc.rules.strided_cuts import tensors
from partc.runtime.positions import Order, Orders
from partc.sharding.pins import Pin
from partc.sharding.placements import prefers_rows

Place = tuple[str, int, int]  # a value, one of its dimensions, and the elements of that before the sequence
_UNEQUAL = 1.1  # scores of the second half of the rows, per score of the first
# Operations whose sums do not depend on the order of what they add.
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
    """An operation that, if it is attention whose rows are unequal work, says whether cp cuts them: `by_rows=True`.

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
    known = dict(Orders.parse(str(dict(op.attrs).get("order", ""))).dims)
    known |= {dim: Order(parts, known[dim].true if dim in known else size) for dim in dims}
    order = str(Orders(tuple(sorted(known.items()))))
    return replace(op, attrs=(*(item for item in op.attrs if item[0] != "order"), ("order", order)))


def drawn_dims(op: Op, dims: Iterable[int]) -> list[int]:
    """The dimensions, of those given, along which an operation draws a number for each element of its first result."""
    count = op.args[2] if op.name == "dropout" else len(op.results[0].type.shape)
    return [dim for dim in dims if isinstance(count, int) and dim < count]
