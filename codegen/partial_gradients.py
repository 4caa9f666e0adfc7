"""Gradients of weights as a kernel's partial sums, one for each program, added to their buffers directly.

grad_x, parts = kernels.layer_norm_backward_add(…, summed=False)
functional.add_sums((g.weight, g.bias), parts)
del parts
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from partc.codegen.expressions import summed_by_programs
from partc.codegen.names import Names
from partc.codegen.source import Line
from partc.ir.program import Graph, Op, Value

Buffers = Mapping[str, list[str]]  # value -> the gradients to which it is added


def partial_sums(op: Op, uses: Mapping[str, int], graph: Graph, buffers: Buffers) -> frozenset[str]:
    """The partial sums of a kernel, if all are added to buffers and nothing else reads them; else empty."""
    sums = summed_by_programs(op)
    kept = {name for name in sums if uses.get(name, 0) or name in graph.outputs or len(buffers.get(name, ())) != 1}
    return frozenset() if kept else sums


def sum_statements(op: Op, sums: Collection[str], buffers: Buffers, names: Names) -> tuple[list[str], list[Line]]:
    """The names of the partial sums, and the lines that add them: sums of one type share a tensor."""
    alike: dict[str, list[Value]] = {}
    for value in op.results:
        if value.name in sums:
            alike.setdefault(value.type.dtype, []).append(value)
    targets: list[str] = []
    lines: list[Line] = []
    for values in alike.values():
        into = [buffers[value.name][0] for value in values]
        name = names[values[0].name] if len(values) == 1 else names.fresh("parts")
        add = f"add_sum({into[0]}, {name})" if len(values) == 1 else f"add_sums(({', '.join(into)}), {name})"
        targets.append(name)
        lines += [Line(code=f"functional.{add}", uses=frozenset({"functional", "g"})), Line(code=f"del {name}")]
    return targets, lines
