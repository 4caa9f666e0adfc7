"""Gradients of logits that overwrite the logits.

    grad_logits = fused(logits, …)    ->    grad_logits = fused(logits, …, over=(0, 0))

These are the largest two tensors of many models, equal in size and type. If nothing reads the logits any more, the
gradient takes their memory: a kernel reads each element before it writes it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from partc import fuel
from partc.cost.saved_tensors import memory_of
from partc.ir.layout import Sizes
from partc.ir.program import Graph, Op, Program, Ref, Region
from partc.rules import kernels
from partc.rules.strides import dense


def mark_overwrites(program: Program) -> Program:
    """Mark every kernel that may overwrite logits: `over` holds the indices of the argument and of the result."""
    known = dense(program)
    return replace(
        program, regions=tuple(_region(region, known[region.name], program.sizes) for region in program.regions)
    )


def _region(region: Region, dense: Collection[str], sizes: Sizes) -> Region:
    if region.backward is None:
        return region
    own = _owners(region.forward, region.forward.outputs, region.saved) & set(region.saved)
    own |= _owners(region.backward, region.backward.outputs, ())
    ops = tuple(
        _marked(op, place, region.backward, own & set(dense), sizes) for place, op in enumerate(region.backward.ops)
    )
    return replace(region, backward=replace(region.backward, ops=ops))


def _owners(graph: Graph, outputs: Collection[str], saved: Collection[str]) -> set[str]:
    """Values that own their memory and of which no alias leaves the graph."""
    memory = memory_of(graph)
    shared = {memory.get(name, name) for name in outputs}
    sights = [memory.get(name, name) for name in saved]
    return {
        value.name
        for op in graph.ops
        if op.name in kernels.CONTIGUOUS
        for value in op.results
        if value.name not in shared and sights.count(value.name) <= 1
    }


def _marked(op: Op, place: int, graph: Graph, own: Collection[str], sizes: Sizes) -> Op:
    if not any(step.name == "cross_entropy_backward" for step in op.body):
        return op
    memory = memory_of(graph)
    read = [*(name for other in graph.ops[place + 1 :] for name in other.refs()), *graph.outputs]
    later = {memory.get(name, name) for name in read}
    values = graph.definitions()
    for number, arg in enumerate(op.args):
        if not isinstance(arg, Ref) or arg.name not in own or arg.name in later:
            continue
        type = values[arg.name].type
        seen = any(kernels.kind(step) == "view" for step in op.body if arg.name in step.refs())
        for value in op.results if not seen else ():
            same = value.type.layout.local_shape(sizes) == type.layout.local_shape(sizes)
            once = same and value.type.dtype == type.dtype and [*op.refs()].count(arg.name) == 1
            if once and fuel.may_rewrite("gradient over logits", op.source):
                return replace(op, attrs=(*op.attrs, ("over", (number, op.results.index(value)))))
    return op
