"""Derivatives of norms with wide rows as two kernels: the input's gradient row by row, the weight's by columns.

    grad_x, grad_w = rms_norm_backward(grad, x, (16384,), w, rstd)
        ->   grad_x = rms_norm_grad_input(grad, x, (16384,), w, rstd)
             grad_w = rms_norm_grad_weight(grad, x, (16384,), rstd)

A program that holds such a long row, together with the sums of earlier rows, exceeds a processor's registers. As two
kernels, the first runs along one row and the second down a few columns; both read x and the gradient. These two
operations exist only here and are spelled out inside their kernels (partc.passes.fuse.composites).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from partc import fuel
from partc.ir.program import FLOATING, Graph, Op, Ref, TensorType
from partc.passes.fuse.iteration_spaces import MOST_COLUMNS, MOST_SUMMED

_PARTS = {
    "rms_norm_backward": ("rms_norm_grad_input", "rms_norm_grad_weight"),
    "layer_norm_backward": ("layer_norm_grad_input", "layer_norm_grad_weight"),
}

HALVES = frozenset(name for names in _PARTS.values() for name in names)


def with_norm_halves(
    graph: Graph, types: Mapping[str, TensorType], shapes: Mapping[str, tuple[int, ...]], kept: Collection[str]
) -> Graph:
    """The graph with derivatives of wide norms as two operations, each only if its result is read."""
    read = {name for op in graph.ops for name in op.refs()}.union(kept)
    return replace(graph, ops=tuple(part for op in graph.ops for part in _parts(op, types, shapes, read)))


def _parts(
    op: Op, types: Mapping[str, TensorType], shapes: Mapping[str, tuple[int, ...]], read: Collection[str]
) -> Iterator[Op]:
    if op.name not in _PARTS or not _is_wide(op, types, shapes) or not fuel.may_rewrite("halves of a norm", op.source):
        yield op
        return
    across, down = _PARTS[op.name]
    grad, x, shape, weight, *statistics = op.args
    if op.results[0].name in read:
        yield replace(op, name=across, results=op.results[:1])
    if weight is not None and any(value.name in read for value in op.results[1:]):
        yield replace(op, name=down, args=(grad, x, shape, *statistics), results=op.results[1:])


def _is_wide(op: Op, types: Mapping[str, TensorType], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a program can hold only one such row."""
    x, along = op.args[1], op.args[2]
    if not isinstance(x, Ref) or not isinstance(along, tuple) or types[x.name].dtype not in FLOATING:
        return False
    shape = shapes[x.name]
    return (
        len(along) < len(shape)
        and MOST_SUMMED < math.prod(shape[len(shape) - len(along) :]) <= MOST_COLUMNS
        and 0 not in shape
    )
