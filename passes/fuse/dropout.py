"""Dropouts whose masks kernels draw, and draw again in backward instead of saving them.

    forward:                                     forward:
      y, kept = dropout(x, 0.1, 3, 0)              kept = drawn(0.1, 0)
      z       = add(y, r)                          y    = drop(x, kept, 0.1)
    saved kept                             ->      z    = add(y, r)
    backward:                                    backward:
      input grad_z, kept                           input grad_z
      grad_x = dropout_backward(grad_z, kept, …)   kept   = drawn(0.1, 0)
                                                   grad_x = dropout_backward(grad_z, kept, …)

An element's random number depends on its position in the whole tensor (partc.runtime.random), so kernels can draw it
where they need it, and the mask is never stored. A mask that other operations read is still computed and saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from partc import fuel
from partc.ir.layout import Layout
from partc.ir.naming import unique
from partc.ir.program import Graph, Op, Ref, Region, TensorType, Value
from partc.rules import kernels


def with_drawn_masks(region: Region) -> Region:
    """The region with masks drawn by separate operations, in every graph that reads them."""
    if not any(op.name == "dropout" for graph in region.graphs for op in graph.ops):
        return region
    taken = set().union(*(region.types(graph) for graph in region.graphs))
    region = region.mapped(lambda graph: _split(graph, taken))
    forward, backward, weight = region.forward, region.backward, region.weight
    if backward is None:
        return region
    drawn = {op.result.name: op for graph in (backward, forward) for op in graph.ops if op.name == "drawn"}
    count = len(backward.outputs) - len(region.kept)
    results = {*backward.outputs[:count], *(weight.outputs if weight else ())}
    left = {
        name: op
        for name, op in drawn.items()
        if name not in results and all(_read_by_kernels(name, graph) for graph in (backward, weight) if graph)
    }
    kept = tuple(name for name in region.kept if name not in left)
    return replace(
        region,
        backward=_drawing(replace(backward, outputs=(*backward.outputs[:count], *kept)), left, drawn),
        weight=weight and _drawing(weight, left, drawn),
        saved=tuple(name for name in region.saved if name not in left),
        kept=kept,
    )


def _drawing(graph: Graph, again: Mapping[str, Op], drawn: Mapping[str, Op]) -> Graph:
    """The graph with some masks drawn at their use; other masks remain inputs."""
    inputs = tuple(
        drawn[value.name].result if value.name in drawn else value for value in graph.inputs if value.name not in again
    )
    first = tuple(again[value.name] for value in graph.inputs if value.name in again)
    return replace(graph, inputs=inputs, ops=(*first, *graph.ops))


def _split(graph: Graph, taken: set[str]) -> Graph:
    return replace(graph, ops=tuple(step for op in graph.ops for step in _steps(op, taken)))


def _steps(op: Op, taken: set[str]) -> Iterator[Op]:
    """A dropout as a mask and its application. In a region without backward, the mask gets a new name."""
    drops = op.name == "dropout" and isinstance(op.args[1], float) and 0 < op.args[1] < 1 and not op.attrs
    if not drops or not fuel.may_rewrite("drawn mask", op.source):
        yield op
        return
    x, p, dims, number = op.args
    made, *masks = op.results
    kept = masks[0].name if masks else unique(f"{made.name}_kept", taken)
    assert isinstance(dims, int)
    cut = made.type.layout.dims
    whole = Layout((*cut[:dims], *Layout.replicated((1,) * (len(cut) - dims)).dims))
    mask = Value(name=kept, type=TensorType(dtype="bool", layout=whole))
    yield Op(name="drawn", args=(p, number), results=(mask,), source=op.source)
    yield Op(name="drop", args=(x, Ref(kept), p), results=(made,), source=op.source)


def _read_by_kernels(name: str, graph: Graph) -> bool:
    """Whether only elementwise operations read a mask."""
    return all(kernels.kind(op) == "pointwise" for op in graph.ops if name in op.refs())
