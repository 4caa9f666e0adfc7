"""What backward kernels make again from what they read anyway, in place of what forward would save for them.

    forward:                                     forward:
      a = silu(gate)                               a = silu(gate)
      h = mul(a, up)                               h = mul(a, up)
    saved a, gate, up                      ->    saved gate, up
    backward:                                    backward:
      input grad_h, a, gate, up                    input grad_h, gate, up
                                                   a = silu(gate)
      grad_up = mul(grad_h, a)                     grad_up = mul(grad_h, a)

Only elementwise operations on what is saved in any case, and only where all readers are in kernels too: then it
costs a few operations in registers, and neither memory nor a pass over it.
"""

from __future__ import annotations

from dataclasses import replace

from partc.program import Graph, Op, Region
from partc.rules import kernels


def lean(region: Region) -> Region:
    """The region saving less; what its backward pass makes is the same."""
    backward = region.backward
    if backward is None:
        return region
    makers = {value.name: op for op in region.forward.ops for value in op.results}
    params = {value.name for value in region.params}
    given = {value.name for value in region.forward.inputs}
    made = {value.name for op in backward.ops for value in op.results}
    there = set(region.saved) | params
    again: list[Op] = []
    for op in region.forward.ops:
        name = op.results[0].name if len(op.results) == 1 else ""
        if name not in region.saved or name in given | made or makers[name] is not op:
            continue
        if kernels.kind(op) == "pointwise" and set(op.refs()) <= there and _read_by_kernels(name, backward):
            again.append(op)
    left = {op.result.name for op in again}
    graph = replace(
        backward,
        inputs=tuple(value for value in backward.inputs if value.name not in left),
        ops=(*again, *backward.ops),
    )
    return replace(region, saved=tuple(name for name in region.saved if name not in left), backward=graph)


def _read_by_kernels(name: str, graph: Graph) -> bool:
    """Whether nothing but elementwise operations reads a value, through views or not."""
    seen = {name}
    for op in graph.ops:
        if seen.isdisjoint(op.refs()):
            continue
        if kernels.kind(op) == "view":
            seen.update(value.name for value in op.results)
        elif kernels.kind(op) != "pointwise":
            return False
    return seen.isdisjoint(graph.outputs)
