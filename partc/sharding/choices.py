"""Layouts of an operation's operands and results under its choices, on all axes at once."""

from __future__ import annotations

from collections.abc import Mapping

from partc.errors import InternalError
from partc.ir.layout import Layout, Placement, Replicated, Sizes, Varying
from partc.ir.mesh import PIPELINE_AXIS, TIME_AXIS, cuts_batch, holds_weights_whole, is_batch_axis
from partc.ir.program import FLOATING, Choice, Op, TensorType
from partc.rules import OpRule, fits, placements


def axis_order(sizes: Sizes) -> tuple[str, ...]:
    """The axes of layouts, in the order in which they cut a sub-dimension, major first.

    The batch is cut over ranks before microbatches, so a rank's microbatches are rows of its own part of the batch.
    """
    space = [axis for axis, size in sizes.items() if size > 1 and axis not in (PIPELINE_AXIS, TIME_AXIS)]
    batch = [axis for axis in space if is_batch_axis(axis)]
    time = [TIME_AXIS] if sizes.get(TIME_AXIS, 1) > 1 else []
    return (*batch, *time, *(axis for axis in space if axis not in batch))


def batch_axes(sizes: Sizes) -> tuple[str, ...]:
    """The axes that cut the batch: data-parallel axes, and microbatches."""
    return tuple(axis for axis in axis_order(sizes) if cuts_batch(axis))


def placed_axes(sizes: Sizes) -> tuple[str, ...]:
    """The axes whose factors are chosen operation by operation: cp and tp."""
    return tuple(axis for axis in axis_order(sizes) if axis not in batch_axes(sizes))


def weight_axes(sizes: Sizes) -> tuple[str, ...]:
    """The axes over which weights are cut."""
    return tuple(axis for axis in placed_axes(sizes) if not holds_weights_whole(axis))


def choice_on(op: Op, axis: str) -> Choice | None:
    return next((choice for choice in op.choices if choice.axis == axis), None)


def layouts(
    op: Op, rule: OpRule | None, types: Mapping[str, TensorType], sizes: Sizes
) -> tuple[tuple[Layout, ...], tuple[Layout, ...]] | None:
    """The required layouts of the operands (in the order of `op.refs()`) and the layouts of the results.

    Returns None if the sizes do not divide. An operation without a rule runs on replicated operands.
    """
    if rule is not None and not fits(rule, op.choices, sizes):
        return None
    operands = [types[name] for name in op.refs()]
    results = [value.type for value in op.results]
    wanted: list[dict[str, Placement]] = [{} for _ in operands]
    made: list[dict[str, Placement]] = [{} for _ in results]
    for axis in axis_order(sizes):
        choice = choice_on(op, axis)
        if rule is None:
            if choice is not None and choice.factor is not None:
                raise InternalError(f"{op.name} has no rule, yet a choice on {axis}")
            still: Placement = Replicated() if choice is None else Varying()
            asked, given = (still,) * len(operands), (still,) * len(results)
        else:
            asked, given = placements(op, rule, choice)
        for where, type, placement in zip((*wanted, *made), (*operands, *results), (*asked, *given), strict=True):
            where[axis] = _without_gradient(placement) if type.dtype not in FLOATING else placement
    built = [
        Layout.build(type.shape, where, sizes)
        for where, type in zip((*wanted, *made), (*operands, *results), strict=True)
    ]
    if any(layout is None for layout in built):
        return None
    found = tuple(layout for layout in built if layout is not None)
    return found[: len(operands)], found[len(operands) :]


def _without_gradient(placement: Placement) -> Placement:
    return Replicated() if isinstance(placement, Varying) else placement
