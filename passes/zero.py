"""Shard parameters, gradients and optimizer states over dp (ZeRO).

    parameter blocks.0.up.weight: f32[32@tp, 8] reduce(dp)
    parameter blocks.0.down.bias: f32[8] reduce(dp,tp)
  ->
    parameter blocks.0.up.weight: f32[32@tp,dp, 8] gather(dp) zero 3
    parameter blocks.0.down.bias: f32[8@dp] reduce(tp) gather(dp) zero 3

Regions stay as they are: they read whole parameters, and their gradients are reduce-scattered to the ranks that hold
the shards (Rajbhandari et al. 2020, ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, section 5).
The parameter's `zero` is its ZeRO stage. Stage 1 scatters gradients at a step's end and gathers updated parameters as
the next step begins. Stage 2 scatters gradients after each backward of a call. Stage 3 also gathers parameters for each
call, forward and backward. The pass `actions` inserts these gathers and scatters, and `prefetch` moves them ahead.

A parameter is cut in its first dimension that the axes divide. If they divide none, the parts are equal nevertheless:
the last ones end with spare elements, which are padding. The cut is then in the dimension with the fewest spare
elements.

    parameter head.weight: f32[14@tp, 7] reduce(dp) holds(13,7)
  ->
    parameter head.weight: f32[2@tp · 7@dp, 7] gather(dp) zero 3 holds(13,7)

A scalar stays whole, as does a small parameter that would have more spare elements than elements.
"""

from __future__ import annotations

import math
from dataclasses import replace

from partc.ir.layout import Layout, Sizes, SubDim
from partc.ir.program import FLOATING, Parameter, Program, TensorType

FEW = 16384  # the most elements of a parameter that stays whole if its parts would have more spare elements than that


def zero(
    program: Program, *, zero: int = 0, zero_axes: tuple[str, ...] = (), whole: frozenset[str] = frozenset()
) -> Program:
    """Shard parameters over `zero_axes`, at ZeRO level `zero`; those named in `whole` stay whole."""
    axes = tuple(axis for axis in program.mesh.names if axis in zero_axes and program.sizes[axis] > 1)
    if not zero or not axes:
        return program
    usable = _gathered_for_microbatches(program) - whole
    held: dict[object, tuple[TensorType, tuple[str, ...]] | None] = {}  # layers that are equal share types
    parameters = tuple(
        _cut(parameter, axes, program.sizes, zero, held)
        if parameter.name in usable and (parameter.trainable or zero == 3) and not parameter.sparse
        else parameter
        for parameter in program.parameters
    )
    return replace(program, parameters=parameters)


def explain(program: Program, name: str) -> str:
    """A description of a parameter's parts after this pass; empty without ZeRO, or if `name` is not a parameter."""
    cut = next((item for item in program.parameters if item.gather), None)
    item = next((item for item in program.parameters if item.name == name), None)
    if cut is None or item is None:
        return ""
    over = ",".join(f"{axis}={program.sizes[axis]}" for axis in item.gather or cut.gather)
    if not item.gather:
        few = item.trainable and {*cut.gather} & {*item.reduce} and item.type.local_elements(program.sizes) <= FEW
        why = ": it has few elements, and its parts would have more spare ones" if few and item.type.shape else ""
        return f"{name} is {item.type}, whole on the ranks of {over}{why}"
    sub = next(sub for dim in item.type.layout.dims for sub in dim if item.gather[0] in sub.axes)
    spare = sub.spare(program.sizes)
    share = f", each with {sub.part(program.sizes)} of {sub.size}, where {spare} at the end are spare" if spare else ""
    return f"{name} is {item.type}, in parts over {over} (ZeRO {item.zero}){share}"


def _gathered_for_microbatches(program: Program) -> set[str]:
    """Parameters that only microbatch calls read and none writes."""
    inside, outside = set[str](), set[str]()
    for call in program.calls:
        (inside if program.region(call.region).phase == "microbatch" else outside).update(call.params)
    # Small ones stay whole: biases of routers, which are compared with each other, and counts, which every rank reads.
    whole = {item.name for item in program.parameters if item.balance or item.counts}
    return inside - outside - whole - {buffer for buffer, _ in program.updates}


def _cut(
    parameter: Parameter,
    axes: tuple[str, ...],
    sizes: Sizes,
    zero: int,
    held: dict[object, tuple[TensorType, tuple[str, ...]] | None],
) -> Parameter:
    """The parameter in parts, over the `axes` over which its gradient is summed."""
    key = id(parameter.type), parameter.reduce, parameter.trainable, parameter.stacked
    if key not in held:
        held[key] = _cut_type(parameter, axes, sizes)
    found = held[key]
    if found is None:
        return parameter
    type, over = found
    reduce = tuple(axis for axis in parameter.reduce if axis not in over)
    return parameter.replaced(type=type, reduce=reduce, gather=over, zero=zero)


def _cut_type(parameter: Parameter, axes: tuple[str, ...], sizes: Sizes) -> tuple[TensorType, tuple[str, ...]] | None:
    """The type of a parameter in parts and the axes over which it is cut, or None."""
    layout = parameter.type.layout
    whole = () if parameter.trainable else {*axes}.difference(layout.sharded_axes)
    axes = tuple(axis for axis in axes if axis in parameter.reduce or axis in whole)
    if parameter.type.dtype not in FLOATING or not axes:
        return None
    cut = _equal_parts(layout, axes, sizes) or _parts_with_spare(parameter, axes, sizes)
    if cut is None:
        return None
    dim, factors = cut
    dims = (*layout.dims[:dim], factors, *layout.dims[dim + 1 :])
    varying = tuple(axis for axis in layout.varying if axis not in axes)
    return replace(parameter.type, layout=Layout(dims, layout.partial, varying)), axes


_Cut = tuple[int, tuple[SubDim, ...]]  # (dimension, its new sub-dimensions)


def _equal_parts(layout: Layout, axes: tuple[str, ...], sizes: Sizes) -> _Cut | None:
    """The first cut that the axes divide."""
    ways = math.prod(sizes[axis] for axis in axes)
    for dim, factors in enumerate(layout.dims):
        for index, sub in enumerate(factors):
            if sub.part(sizes) % ways == 0:
                return dim, (*factors[:index], SubDim(sub.size, (*sub.axes, *axes)), *factors[index + 1 :])
    return None


def _parts_with_spare(parameter: Parameter, axes: tuple[str, ...], sizes: Sizes) -> _Cut | None:
    """The cut with the fewest spare elements. Rows of a stack are parameters, so they are not padded."""
    found: list[tuple[float, _Cut]] = []
    for dim, factors in enumerate(parameter.type.layout.dims):
        for index, sub in enumerate(factors):
            part = SubDim(sub.part(sizes), axes)
            outside = (SubDim(sub.size // part.size, sub.axes),) if part.size < sub.size else ()
            cut = dim, (*factors[:index], *outside, part, *factors[index + 1 :])
            if dim or not parameter.stacked:
                found.append((part.spare(sizes) / part.size, cut))
    spare, best = min(found, key=lambda item: item[0], default=(0.0, None))
    few = parameter.type.local_elements(sizes) <= FEW
    return None if few and spare > 1 else best
