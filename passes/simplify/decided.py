"""Masks that are all true or all false by the bounds of the compared integers.

    s, chosen = topk(scores, 2)      # of 4 experts                 s, chosen = topk(scores, 2)
    beyond    = ge(chosen, 4)                                ->     y         = mul(x, w)
    y         = mul(masked_fill(x, beyond, 0.0), w)

Libraries mask rows that exist only in their own distributed runtime, such as rows for experts of other ranks. Here such
a mask has no effect, but would hide the masked operations from passes that match patterns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from partc import fuel
from partc.ir.program import Arg, DTypeArg, Op, Ref, Region, TensorType
from partc.rules.integer_bounds import OPPOSITE, BoundedCall, IntegerBounds, bounds_of

_CHOICES = frozenset({"where", "masked_fill"})
_LIMITS = frozenset({"clamp", "clamp_min", "clamp_max", "remainder"})


def decided_masks(region: Region) -> Region:
    """Replace decided comparisons by constants; drop selections that they decide, and clamps that change nothing."""
    types = region.types(region.forward)
    known: dict[str, IntegerBounds] = {}
    makers = region.forward.makers()
    # For an optimizer, a gradient of zeros differs from none: operands that depend on parameters stay.
    learned = {value.name for value in (*region.params, *region.forward.inputs) if value.type.differentiable}
    same: dict[str, str] = {}
    ops: list[Op] = []
    for op in region.forward.ops:
        op = op.with_operands(same)
        call = BoundedCall(op, types, known, makers)
        known |= bounds_of(call)
        left = _simpler(call, learned)
        if left is not None and fuel.may_rewrite("decided mask", op.source):
            if isinstance(left, str):
                same[op.result.name] = left
                continue
            op = left
        if op.name != "detach" and not learned.isdisjoint(op.refs()):
            learned.update(value.name for value in op.results if value.type.differentiable)
        ops.append(op)
    return replace(region, forward=region.forward.rewritten(ops, same))


def _simpler(call: BoundedCall, learned: set[str]) -> str | Op | None:
    """The operand that equals the result, or a simpler operation for it; None if the bounds decide nothing."""
    op = call.op
    if op.name in OPPOSITE:
        truth = call.of(Ref(op.result.name)).only
        return None if truth is None else _full(op, bool(truth))
    if op.name in _LIMITS:
        return _unlimited(call)
    if op.name not in _CHOICES or len(op.args) != 3:
        return None
    mask, yes, no = op.args if op.name == "where" else (op.args[1], op.args[2], op.args[0])
    truth = call.of(mask).only
    if truth is None:
        return None
    kept, dropped = (yes, no) if truth else (no, yes)
    return None if isinstance(dropped, Ref) and dropped.name in learned else _as_result(op, kept, call.types)


def _unlimited(call: BoundedCall) -> str | None:
    """The operand of a clamp or remainder that changes none of its numbers; None for other operations."""
    op = call.op
    x, limits = op.args[0], (*op.args[1:], *(arg for _, arg in op.attrs))
    if not isinstance(x, Ref) or call.types[x.name] != op.result.type or op.result.type.differentiable:
        return None
    fixed = all(limit is None or call.of(limit).only is not None for limit in limits)
    return x.name if fixed and call.of(Ref(op.result.name)) == call.of(x) else None


def _as_result(op: Op, kept: Arg, types: Mapping[str, TensorType]) -> str | Op | None:
    if not isinstance(kept, Ref):
        return _full(op, kept)
    type = types[kept.name]
    if type == op.result.type:
        return kept.name
    if type.dtype != op.result.type.dtype:
        return None
    return replace(op, name="expand", args=(kept, op.result.type.shape), attrs=())


def _full(op: Op, number: Arg) -> Op:
    type = op.result.type
    return replace(op, name="full", args=(type.shape, number), attrs=(("dtype", DTypeArg(type.dtype)),))
