"""Shard parameters, gradients and optimizer states over dp (ZeRO).

    parameter w: f32[64@tp, 64] vary(dp) reduce(dp,tp)  ->  parameter w: f32[64@tp,dp, 64] reduce(tp) gather(dp) zero 3

    region block(x; w: f32[64@tp, 64]):                           region block(x; w: f32[64@tp, 64]):
      …                                                             …

Regions stay as they are: they read whole parameters, and their gradients are reduce-scattered to the ranks that hold
the shards (Rajbhandari et al. 2020, ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, section 5).
The parameter's `zero` is its ZeRO stage. Stage 1 scatters gradients at a step's end and gathers parameters after the
update. Stage 2 scatters gradients after each backward of a call. Stage 3 also gathers parameters for each call, forward
and backward. The pass `actions` inserts these gathers and scatters, and `prefetch` moves them ahead.

A parameter is cut in its first dimension that the axes divide; without such a dimension (a scalar) it stays whole.
"""

from __future__ import annotations

import math
from dataclasses import replace

from partc.ir.layout import Layout, Sizes, SubDim
from partc.ir.program import FLOATING, Parameter, Program


def zero(program: Program, *, zero: int = 0, zero_axes: tuple[str, ...] = ()) -> Program:
    """Cut parameters further, over `zero_axes`, as far as level `zero` goes."""
    axes = tuple(axis for axis in program.mesh.names if axis in zero_axes and program.sizes[axis] > 1)
    if not zero or not axes:
        return program
    usable = _gathered_for_microbatches(program)
    parameters = tuple(
        _cut(parameter, axes, program.sizes, zero)
        if parameter.name in usable and (parameter.trainable or zero == 3) and not parameter.sparse
        else parameter
        for parameter in program.parameters
    )
    return replace(program, parameters=parameters)


def _gathered_for_microbatches(program: Program) -> set[str]:
    """Parameters that microbatches' calls alone read, and none writes."""
    phases = {region.name: region.phase for region in program.regions}
    inside = {name for call in program.calls if phases[call.region] == "microbatch" for name in call.params}
    outside = {name for call in program.calls if phases[call.region] != "microbatch" for name in call.params}
    whole = {item.name for item in program.parameters if item.balance}  # few numbers, compared with each other
    return inside - outside - whole - {buffer for buffer, _ in program.updates}


def _cut(parameter: Parameter, axes: tuple[str, ...], sizes: Sizes, zero: int) -> Parameter:
    """The parameter in parts, over those of `axes` over which its gradient is a sum."""
    layout = parameter.type.layout
    axes = tuple(axis for axis in axes if axis in parameter.reduce or not parameter.trainable)
    if parameter.type.dtype not in FLOATING or not axes:
        return parameter
    ways = math.prod(sizes[axis] for axis in axes)
    for dim, subs in enumerate(layout.dims):
        for index, sub in enumerate(subs):
            if sub.size // math.prod(sizes[axis] for axis in sub.axes) % ways == 0:
                finer = (*subs[:index], SubDim(sub.size, (*sub.axes, *axes)), *subs[index + 1 :])
                dims = (*layout.dims[:dim], finer, *layout.dims[dim + 1 :])
                held = Layout(dims, layout.partial, tuple(axis for axis in layout.varying if axis not in axes))
                return replace(
                    parameter,
                    type=replace(parameter.type, layout=held),
                    reduce=tuple(axis for axis in parameter.reduce if axis not in axes),
                    gather=axes,
                    zero=zero,
                )
    return parameter
