"""Views that say nothing: reshapes to the shape a value has, chains of them, permutations that cancel."""

from __future__ import annotations

from dataclasses import replace

from partc.errors import InternalError
from partc.layout import Sizes
from partc.program import Graph, Op, Ref


def without_idle_views(graph: Graph, sizes: Sizes) -> Graph:
    """The same graph with views composed, and identities and unread operations gone.

    Looks at local shapes: a reshape that only restates a global shape is nothing on one rank.
    An output that was an identity is now called by its operand's name, at the same place.
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
    return replace(graph, ops=_read(ops, outputs), outputs=outputs)


def _operand(op: Op) -> str:
    first = op.args[0]
    if not isinstance(first, Ref):
        raise InternalError(f"{op.name} of {first!r}, which is no value")
    return first.name


def _is_identity(op: Op, local: dict[str, tuple[int, ...]]) -> bool:
    if op.name in ("reshape", "expand"):
        return local.get(_operand(op)) == local[op.result.name]
    return op.name == "permute" and op.args[1] == tuple(range(len(local[op.result.name])))


def _composed(op: Op, made: dict[str, Op]) -> Op:
    """A view of a view of the same kind as one view."""
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


def _read(ops: list[Op], outputs: tuple[str, ...]) -> tuple[Op, ...]:
    """Operations that some output depends on."""
    needed = set(outputs)
    kept: list[Op] = []
    for op in reversed(ops):
        if any(value.name in needed for value in op.results):
            needed.update(op.refs())
            kept.append(op)
    return tuple(reversed(kept))
