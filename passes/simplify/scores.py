"""Multiply rows by their experts' scores before the last product, where rows are narrower.

    y = expert_matmul(x, experts, w)    # f32[128, 64]      x_scored = mul(x, scores)                    # f32[128, 16]
    z = mul(y, scores)                  # f32[128, 64]  ->  z        = expert_matmul(x_scored, experts, w)

The gradient of the scores is then a sum over the narrow rows, so that the wide ones are not saved for it.
"""

from __future__ import annotations

from dataclasses import replace

from partc import fuel
from partc.ir.naming import unique
from partc.ir.patterns import Match, matches
from partc.ir.program import Op, Ref, Region, TensorType, Value

_SCORED = "mul(expert_matmul(x, experts, w), scores)"


def narrow_scores(region: Region) -> Region:
    """Move products of experts' results with one score a row to the products' operands, if these are narrower."""
    types, graph = region.types(region.forward), region.forward
    makers, readers = graph.makers(), graph.readers()
    taken = set(types)
    ops: list[Op] = []
    for op in graph.ops:
        for bound in matches(_SCORED, op, makers):
            match = Match(root=op, bound=bound, types=types, makers=makers, readers=readers, outputs=graph.outputs)
            product = next(makers[name] for name in op.refs() if makers.get(name, op).name == "expert_matmul")
            if _pays(match, product) and fuel.may_rewrite("narrow scores", op.source):
                scored = _scored(match, unique(f"{match['x'].name}_scored", taken))
                args = (Ref(scored.result.name), *product.args[1:])
                ops.append(scored)
                op = replace(product, args=args, results=op.results)
            break
        ops.append(op)
    return replace(region, forward=replace(graph, ops=tuple(ops)))


def _pays(match: Match, product: Op) -> bool:
    """Whether the scores are one number a row, nothing else reads the product, and its operand is narrower."""
    rows, scores, made = match.shape("x"), match.shape("scores"), product.result
    if rows is None or scores != (rows[0], 1) or rows[1] >= made.type.shape[1]:
        return False
    alone = made.name not in match.outputs and len(match.readers[made.name]) == 1
    dtypes = {match.types[name].dtype for name in (match["x"].name, match["scores"].name, made.name)}
    return alone and dtypes == {match.root.result.type.dtype}


def _scored(match: Match, name: str) -> Op:
    x = match["x"]
    value = Value(name=name, type=TensorType.replicated(match.types[x.name].dtype, match.types[x.name].shape))
    return replace(match.root, args=(x, match["scores"]), results=(value,))
