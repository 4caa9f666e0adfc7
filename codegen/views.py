"""Removal of redundant views: reshapes to the same shape, chains of views, permutations that cancel."""

from __future__ import annotations

from dataclasses import replace

from partc.errors import InternalError
from partc.ir.layout import Sizes
from partc.ir.program import Graph, Op, Ref, needed


def without_idle_views(graph: Graph, sizes: Sizes) -> Graph:
    """The graph with views composed, and without identities and unread operations.

    Shapes are local: a reshape that only restates a global shape is an identity on one rank. An output that was an
    identity becomes its operand, at the same position.
    """
    local = {name: value.type.layout.local_shape(sizes) for name, value in graph.definitions().items()}
    made: dict[str, Op] = {}
    same: dict[str, str] = {}
    ops: list[Op] = []
    for op in graph.ops:
        op = _composed(op.renamed(same), made)
        if _is_identity(op, local):
            same[op.result.name] = _operand(op)
            continue
        made.update((value.name, op) for value in op.results)
        ops.append(op)
    outputs = tuple(same.get(name, name) for name in graph.outputs)
    return replace(graph, ops=needed(ops, outputs), outputs=outputs)


def _operand(op: Op) -> str:
    first = op.args[0]
    if not isinstance(first, Ref):
        raise InternalError(f"{op.name} of {first!r}, which is not a value")
    return first.name


def _is_identity(op: Op, local: dict[str, tuple[int, ...]]) -> bool:
    if op.name in ("reshape", "expand"):
        return local.get(_operand(op)) == local[op.result.name]
    return op.name == "permute" and op.args[1] == tuple(range(len(local[op.result.name])))


def _composed(op: Op, made: dict[str, Op]) -> Op:
    """A view of a view of the same kind, as one view."""
    if op.name not in ("reshape", "permute"):
        return op
    before = made.get(_operand(op))
    if before is None or before.name != op.name:
        return op
    if op.name == "reshape":
        return replace(op, args=(before.args[0], op.args[1]))
    first, second = before.args[1], op.args[1]
    if not isinstance(first, tuple) or not isinstance(second, tuple):
        raise InternalError(f"permute by {first!r} and {second!r}")
    return replace(op, args=(before.args[0], tuple(first[dim] for dim in second if isinstance(dim, int))))
