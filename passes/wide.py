"""Sum 16-bit operands in fp32 without an fp32 copy of them.

    tables_summed_wide_2 = to(tables_summed, <f32>)                    # f32[16, 3, 4]
    summed_sum           = sum(tables_summed_wide_2, (1,))             # f32[16, 4]
  ->
    summed_sum           = sum(tables_summed, (1,), dtype=<f32>)       # f32[16, 4]

Fused kernels convert in registers. This pass handles sums outside of fused kernels, such as the sum over a token's
experts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from partc import fuel
from partc.ir.program import Graph, Op, Program, Region


def wide(program: Program) -> Program:
    """Rewrite every such pair in all graphs of all regions."""
    return program.mapped(_graph)


def _graph(region: Region, graph: Graph) -> Graph:
    types = region.types(graph)
    kept = region.read_outside(graph)
    reads = Counter(name for op in graph.ops for name in op.refs())
    casts = {
        op.result.name: op
        for op in graph.ops
        if op.name == "to"
        and reads[op.result.name] == 1
        and op.result.name not in kept
        and (types[next(op.refs())].dtype, op.result.type.dtype) in (("bf16", "f32"), ("f16", "f32"))
    }
    instead: dict[int, tuple[Op, ...]] = {}
    for op in graph.ops:
        cast = casts.get(next(op.refs(), "")) if op.name == "sum" and not op.attrs else None
        summed = len(op.args) > 1 and op.args[1] != ()  # without dimensions, nothing is added
        if cast is None or not summed or op.result.type.dtype != "f32" or not fuel.may_rewrite("wide sum", op.source):
            continue
        instead[id(cast)] = ()
        instead[id(op)] = (replace(op, args=(cast.args[0], *op.args[1:]), attrs=(("dtype", cast.args[1]),)),)
    return replace(graph, ops=tuple(step for op in graph.ops for step in instead.get(id(op), (op,))))
