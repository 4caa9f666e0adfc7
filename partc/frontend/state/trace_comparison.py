"""Whether two traces of a model compute the same, and the first line at which they differ."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from partc.errors import Source
from partc.frontend.node_sources import source_of
from partc.torch_private import without_modes

_FILLED = "filled"  # replaces the values of a tensor that the first trace kept


@dataclass(frozen=True, slots=True)
class TracedNode:
    """A node in comparable form."""

    facts: tuple[Any, ...]  # its operation, its arguments and the type of its result
    constants: list[Any]  # the constants that it reads
    source: Source | None


def effects_signature(exported: torch.export.ExportedProgram, known: Set[str] | None = None) -> tuple[TracedNode, ...]:
    """The nodes that compute the loss and the changes in place, with the constants that they read, in comparable form.

    Buffers that forward does not change count as constants. Constants that are not `known` are tensors that the first
    trace kept.
    """
    module = exported.graph_module
    lifted = exported.graph_signature.inputs_to_lifted_tensor_constants
    constants: dict[fx.Node, Any] = {}
    changing = {*_changed(module.graph)}
    buffers = exported.graph_signature.inputs_to_buffers
    for node in module.graph.nodes:
        operands = node.all_input_nodes
        if node in changing:
            continue
        if node.op == "placeholder" and node.name in lifted:
            constants[node] = _content_of(exported.constants[lifted[node.name]])
        elif node.op == "placeholder" and node.name in buffers:
            name = buffers[node.name]
            constants[node] = f"buffer {name}" if known is None or name in known else _FILLED
        elif node.op == "call_function" and not _has_effects(node) and all(x in constants for x in operands):
            args = fx.node.map_arg((node.args, dict(node.kwargs)), lambda x: str(constants[x]))
            kept = any(constants[x] == _FILLED for x in operands)
            constants[node] = _FILLED if kept else hash((str(node.target), repr(args), _type(node)))
    output = next(node for node in module.graph.nodes if node.op == "output").args[0][0]
    return tuple(_nodes(module, constants, output))


def first_difference(
    plain: tuple[TracedNode, ...], other: tuple[TracedNode, ...], *, filled: bool
) -> TracedNode | None:
    """The first node of a trace that another trace lacks or computes from other constants; None if there is none.

    With `filled`, the second may read constants that the first computed. A trace that has nothing in common with the
    other differs in its last node.
    """
    for one, two in zip(plain, other, strict=False):
        read = zip(one.constants, two.constants, strict=False)
        same = one.facts == two.facts and len(one.constants) == len(two.constants)
        if not same or not all(x == y or (filled and y == _FILLED) for x, y in read):
            return one
    return None if len(plain) == len(other) else plain[min(len(plain) - 1, len(other))]


def _content_of(constant: Any) -> Any:
    if not isinstance(constant, Tensor) or hasattr(constant, "fake_mode"):
        return _FILLED
    if constant.is_meta:  # the graph's reader refuses it
        return str(constant.dtype), tuple(constant.shape)
    with without_modes():
        return hash((str(constant.dtype), tuple(constant.shape), repr(constant.flatten().tolist())))


def _has_effects(node: fx.Node) -> bool:
    if node.target is operator.getitem:  # one of several results
        return False
    schema = getattr(node.target, "_schema", None)
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if schema is None or random or "::empty" in schema.name:  # a value that is left out
        return True
    return bool(schema.is_mutable and schema.name != "aten::detach_")


def _changed(graph: fx.Graph) -> Iterator[fx.Node]:
    """The tensors that operations change in place, and the tensors of which these may be views."""
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable and schema.name != "aten::detach_":
            written: Any = node.args[0]
            while isinstance(written, fx.Node):
                yield written
                written = next(iter(written.all_input_nodes), None)


def _type(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return (tuple(value.shape), str(value.dtype)) if isinstance(value, Tensor) else ()


def _nodes(module: fx.GraphModule, constants: Mapping[fx.Node, Any], *outputs: Any) -> Iterator[TracedNode]:
    """The nodes from which the outputs and all changes in place are computed, and the outputs that are constants."""
    needed: set[fx.Node] = set()
    waiting = [node for node in outputs if isinstance(node, fx.Node)]
    waiting += [
        node for node in module.graph.nodes if getattr(getattr(node.target, "_schema", None), "is_mutable", False)
    ]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting.extend(node.all_input_nodes)
    numbers: dict[fx.Node, str] = {}
    for node in module.graph.nodes:
        mutates = node.op == "output" and not outputs
        if node in constants or (outputs and node not in needed and not mutates):
            continue
        numbers[node] = f"%{len(numbers)}"
        if node.op == "get_attr" and isinstance(getattr(module, str(node.target), None), fx.GraphModule):
            inner = _nodes(getattr(module, str(node.target)), {})
            yield TracedNode(tuple((each.facts, tuple(each.constants)) for each in inner), [], source_of(node))
            continue
        read = [constants[x] for x in node.all_input_nodes if x in constants]
        args = fx.node.map_arg((node.args, dict(node.kwargs)), lambda x: numbers.get(x, str(_type(x))))
        kind = "" if node.op in ("placeholder", "get_attr", "output") else str(node.target)
        yield TracedNode((node.op, kind, repr(args), _type(node)), read, source_of(node))
    yield TracedNode((), [constants[x] for x in outputs if x in constants], None)
