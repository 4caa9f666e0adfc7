"""Expand composites that communicate, after differentiation.

    nll, nll_lse = cross_entropy(mask_classes, …, axis="tp")
  ->
    nll_max_partial = shard_max(mask_classes)
    nll_max         = all_reduce(nll_max_partial, op="max", axis="tp")
    …               = sum_exp(mask_classes, nll_max)
    nll_sums        = all_reduce(…, axis="tp")
    …               = pick(mask_classes, labels, axis="tp")
    nll_picked      = all_reduce(…, axis="tp")
    nll_lse         = log_sum_exp(nll_max, nll_sums)
    nll             = cross_entropy_rows(nll_lse, nll_picked, labels, …)

Logits whose classes are cut over an axis are never gathered: each rank contributes its maximum, its sum of exponentials
and the label's logit, one number a row each (Shoeybi et al. 2019, section 3). In regions without gradients, reshards
become the collectives that move the same data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from partc.ir.collectives import COLLECTIVES
from partc.ir.layout import Sizes
from partc.ir.program import Arg, Graph, Op, Program, Ref, TensorType, Value


def expand(program: Program) -> Program:
    """Replace every composite in the table by its operations, in forward graphs."""
    return replace(
        program,
        regions=tuple(
            replace(region, forward=_expanded(region.forward, {v.name: v.type for v in region.params}, program.sizes))
            for region in program.regions
        ),
    )


def _expanded(graph: Graph, params: Mapping[str, TensorType], sizes: Sizes) -> Graph:
    types = graph.types() | dict(params)
    ops: list[Op] = []
    same: dict[str, str] = {}
    for op in graph.ops:
        op = op.with_operands(same)
        rewrite = _REWRITES.get(op.name)
        if op.name in _NO_MOVEMENT:
            same[op.result.name] = next(op.refs())
        elif rewrite is not None and dict(op.attrs).get("axis"):
            ops.extend(rewrite(op, types, sizes))
        else:
            ops.append(op)
    return graph.rewritten(ops, same)


def _same_movement(name: str) -> Callable[[Op, Mapping[str, TensorType], Sizes], tuple[Op, ...]]:
    """The expansion of a reshard without a gradient: the collective that moves the same data."""
    return lambda op, types, sizes: (replace(op, name=name),)


def _spread(op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> tuple[Op, ...]:
    axis = dict(op.attrs)["axis"]
    assert isinstance(axis, str)
    return (replace(op, name="div", args=(*op.args, sizes[axis]), attrs=()),)


def _cross_entropy(op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> tuple[Op, ...]:
    logits, labels, weight, ignore, smoothing = op.args
    nll, lse = op.results
    axis = dict(op.attrs)["axis"]
    assert isinstance(logits, Ref) and isinstance(axis, str)
    num_classes = types[logits.name].shape[-1]
    partial = replace(lse.type, layout=replace(lse.type.layout, partial=(*lse.type.layout.partial, axis)))
    ops: list[Op] = []

    def add(name: str, args: tuple[Arg, ...], made: str, type: TensorType = lse.type, **attrs: Arg) -> Ref:
        result = Value(name=made, type=type)
        ops.append(Op(name=name, args=args, attrs=tuple(attrs.items()), results=(result,), source=op.source))
        return Ref(made)

    def complete(name: str, args: tuple[Arg, ...], made: str, **attrs: Arg) -> Ref:
        part = add(name, args, f"{made}_partial", partial, **attrs)
        return add("all_reduce", (part,), made, axis=axis)

    most = add("shard_max", (logits,), f"{nll.name}_max_partial", partial)
    largest = add("all_reduce", (most,), f"{nll.name}_max", op="max", axis=axis)
    sums = complete("sum_exp", (logits, largest), f"{nll.name}_sums")
    picked = complete("pick", (logits, labels), f"{nll.name}_picked", axis=axis)
    smooth: Arg = complete("smooth_sum", (logits, weight), f"{nll.name}_smooth", axis=axis) if smoothing else None
    total = add("log_sum_exp", (largest, sums), lse.name)
    rows = (total, picked, labels, weight, ignore, smoothing, smooth, num_classes)
    add("cross_entropy_rows", rows, nll.name, nll.type)
    return tuple(ops)


_NO_MOVEMENT = frozenset({"vary", "settle"})
_REWRITES: Mapping[str, Callable[[Op, Mapping[str, TensorType], Sizes], tuple[Op, ...]]] = {
    "cross_entropy": _cross_entropy,
    "cross_entropy_shard": _cross_entropy,
    "mask_classes_shard": _same_movement("mask_classes"),
    **{name: _same_movement(row.runs_as) for name, row in COLLECTIVES.items() if row.runs_as},
    "spread": _spread,
}
