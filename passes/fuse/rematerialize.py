"""Values that backward kernels recompute from their other operands, instead of saving them.

    forward:                                     forward:
      a = silu(gate)                               a = silu(gate)
      h = mul(a, up)                               h = mul(a, up)
    saved a, gate, up                      ->    saved gate, up
    backward:                                    backward:
      input grad_h, a, gate, up                    input grad_h, gate, up
                                                   a = silu(gate)
      grad_up = mul(grad_h, a)                     grad_up = mul(grad_h, a)

This applies to elementwise operations only, on values that are saved anyway or that take fewer bytes (logits before a
cast to fp32), and only if all readers are in kernels too. It costs a few operations in registers, and neither memory
nor a pass over it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from partc import fuel
from partc.cost.saved_tensors import memory_of
from partc.ir.layout import Sizes
from partc.ir.program import Graph, Op, Region
from partc.rules import kernels


def with_fewer_saved(region: Region, sizes: Sizes) -> Region:
    """The region with fewer saved values and equal gradients."""
    backward = region.backward
    if backward is None:
        return region
    makers = region.forward.makers()
    params = {value.name for value in region.params}
    given = {value.name for value in region.forward.inputs}
    made = {value.name for op in backward.ops for value in op.results}
    drawn = [op for op in backward.ops if op.name == "drawn"]
    there = set(region.saved) | params | {op.result.name for op in drawn}
    values = region.values(region.forward)
    memory = memory_of(region.forward)
    alive = {memory[name] for name in region.forward.outputs if name in memory}  # readers of these may save them
    again: dict[str, Op] = {}
    more: dict[str, None] = {}
    for op in region.forward.ops:
        name = op.results[0].name if len(op.results) == 1 else ""
        if name not in region.saved or name in given | made:
            continue
        if kernels.kind(op) != "pointwise" or not _read_by_kernels(name, backward):
            continue
        steps = _steps(name, makers, there | given | made | set(more))
        own = {step.result.name for step in steps}
        new = {item for step in steps for item in step.refs()} - own - there - set(more)
        size = sum(values[item].type.local_bytes(sizes) for item in new)
        fewer = size < values[name].type.local_bytes(sizes) and memory[name] not in alive
        if made.isdisjoint(own | new) and (fewer or not new) and fuel.may_rewrite("made again", op.source):
            more.update(dict.fromkeys(sorted(new)))
            again.update((step.result.name, step) for step in steps)
    graph = replace(
        backward,
        inputs=(
            *(value for value in backward.inputs if value.name not in again),
            *(values[name] for name in more),
        ),
        ops=(
            *drawn,
            *(op for op in region.forward.ops if any(op is step for step in again.values())),
            *(op for op in backward.ops if op.name != "drawn"),
        ),
    )
    return replace(region, saved=(*(name for name in region.saved if name not in again), *more), backward=graph)


def _steps(name: str, makers: Mapping[str, Op], there: Collection[str]) -> list[Op]:
    """The elementwise operations that recompute a value from saved or recomputed ones; masks are drawn again."""
    found = [makers[name]]
    for op in found:
        for other in op.refs():
            maker = makers.get(other)
            if other in there or maker is None or maker in found:
                continue
            if kernels.kind(maker) in ("pointwise", "constant"):
                found.append(maker)
    return found


def _read_by_kernels(name: str, graph: Graph) -> bool:
    """Whether only elementwise operations read a value, directly or through views."""
    seen = {name}
    for op in graph.ops:
        if seen.isdisjoint(op.refs()):
            continue
        if kernels.kind(op) == "view":
            seen.update(value.name for value in op.results)
        elif kernels.kind(op) != "pointwise" and (op.name, kernels.kind(op)) != ("cross_entropy_backward", "composite"):
            return False
    return seen.isdisjoint(graph.outputs)
