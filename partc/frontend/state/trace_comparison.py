"""Whether two traces of a model compute the same, and the first line at which they differ."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx

from partc.errors import Source
from partc.frontend.node_sources import source_of
from partc.frontend.returned_operands import returned
from partc.ir.fx_calls import named_arguments, operation
from partc.ir.program import MODULE_MARK
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
    changing: set[fx.Node] = set()
    while True:
        constants, found = _constants(exported, known, changing)
        if found <= changing:
            break
        changing |= found
    output = next(node for node in module.graph.nodes if node.op == "output").args[0][0]
    named = {*exported.graph_signature.inputs_to_parameters, *exported.graph_signature.user_inputs}
    return tuple(_nodes(module, constants, named, output))


def _constants(
    exported: torch.export.ExportedProgram, known: Set[str] | None, changing: Set[fx.Node]
) -> tuple[dict[fx.Node, Any], set[fx.Node]]:
    """The constants in comparable form, and the starts of tensors that are changed in place with other values.

    A tensor's start is the first operand of its first operand, and so on, so that a view has the start of its base.
    Tensors whose start is in `changing` are not constants. A constant that the graph computes stays one if only
    constants change it in place.
    """
    signature = exported.graph_signature
    lifted, buffers = signature.inputs_to_lifted_tensor_constants, signature.inputs_to_buffers
    constants: dict[fx.Node, Any] = {}
    starts: dict[fx.Node, fx.Node] = {}
    found: set[fx.Node] = set()
    for node in exported.graph_module.graph.nodes:
        operands = node.all_input_nodes
        start = starts[node] = starts[operands[0]] if operands else node
        constant = start not in changing and all(x in constants for x in operands)
        if node.op == "placeholder" and constant and node.name in lifted:
            constants[node] = _content_of(exported.constants[lifted[node.name]])
        elif node.op == "placeholder" and constant and node.name in buffers:
            name = buffers[node.name]
            constants[node] = f"buffer {name}" if known is None or name in known else _FILLED
        elif constant and (operand := returned(node)) is not node:
            constants[node] = constants[operand]
        elif node.op == "call_function" and constant and not _has_effects(node):
            args = fx.node.map_arg((node.args, dict(node.kwargs)), lambda x: str(constants[x]))
            kept = any(constants[x] == _FILLED for x in operands)
            constants[node] = _FILLED if kept else hash((str(node.target), repr(args), _type(node)))
        written = _written(node)
        if written and (node not in constants or written != operands[:1] or start.op != "call_function"):
            found.update(starts[x] for x in written)
        elif written:
            for x in constants:
                if starts[x] is start and x is not node:
                    constants[x] = _FILLED if constants[node] == _FILLED else hash((constants[x], constants[node]))
    return constants, found


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
    """Whether a node's result depends on more than its operands."""
    if node.target is operator.getitem:  # one of several results
        return False
    schema = getattr(node.target, "_schema", None)
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return schema is None or random or "::empty" in schema.name  # a value that is left out


def _written(node: fx.Node) -> list[fx.Node]:
    """The operands that an operation changes in place, or that its subgraph changes, such as code under `no_grad`."""
    if (inside := _subgraph(node)) is not None:
        return _written_inside(*inside)
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable or schema.name == "aten::detach_":
        return []
    names = {x.name for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write}
    found: list[fx.Node] = []
    fx.node.map_arg([x for name, x in named_arguments(node).items() if name in names], found.append)
    return found


def _changes(node: fx.Node) -> bool:
    """Whether a node changes a tensor in place, or its subgraph one of its operands."""
    schema = getattr(node.target, "_schema", None)
    return bool(_written(node)) if schema is None else schema.is_mutable


def _subgraph(node: fx.Node) -> tuple[fx.Graph, tuple[Any, ...]] | None:
    """The graph that a node runs, as `wrap_with_set_grad_enabled` does, and the operands for its inputs."""
    for place, given in enumerate(node.args if node.op == "call_function" else ()):
        if isinstance(given, fx.Node) and given.op == "get_attr":
            module = getattr(node.graph.owning_module, str(given.target), None)
            if isinstance(module, fx.GraphModule):
                return module.graph, node.args[place + 1 :]
    return None


def _written_inside(graph: fx.Graph, operands: Sequence[Any]) -> list[fx.Node]:
    """The operands that a subgraph changes in place, directly or through views."""
    starts: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        starts[node] = starts[node.all_input_nodes[0]] if node.all_input_nodes else node
    written = {starts[x] for node in graph.nodes for x in _written(node)}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    if len(inputs) != len(operands):  # several graphs, as torch.cond has, which the graph's reader refuses
        return []
    given = (operand for inner, operand in zip(inputs, operands, strict=True) if inner in written)
    return [operand for operand in given if isinstance(operand, fx.Node)]


def _is_mark(node: fx.Node) -> bool:
    return operation(node) == MODULE_MARK


def _type(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return (tuple(value.shape), str(value.dtype)) if isinstance(value, Tensor) else ()


def _nodes(
    module: fx.GraphModule, constants: Mapping[fx.Node, Any], named: Set[Any], *outputs: Any
) -> Iterator[TracedNode]:
    """The nodes from which the outputs and all changes in place are computed, and the outputs that are constants.

    Inputs are compared by name if they are in `named`. The names of all others depend on how much a trace has made
    before.
    """
    needed: set[fx.Node] = set()
    waiting = [node for node in outputs if isinstance(node, fx.Node)]
    waiting += [node for node in module.graph.nodes if _changes(node)]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting.extend(node.all_input_nodes)
            if operation(node).startswith("empty"):  # which may stand for the result of a call that is not traced
                waiting.extend(islice(filter(_is_mark, node.users), 1))
    numbers: dict[fx.Node, str] = {}
    for node in module.graph.nodes:
        mutates = node.op == "output" and not outputs
        if node in constants or (outputs and node not in needed and not mutates):
            continue
        numbers[node] = f"%{len(numbers)}"
        if node.op == "get_attr" and isinstance(getattr(module, str(node.target), None), fx.GraphModule):
            inner = _nodes(getattr(module, str(node.target)), {}, frozenset())
            yield TracedNode(tuple((each.facts, tuple(each.constants)) for each in inner), [], source_of(node))
            continue
        read = [constants[x] for x in node.all_input_nodes if x in constants]
        given = (node.args[0], node.args[2]) if _is_mark(node) else node.args  # calls have numbers of their own
        args = fx.node.map_arg((given, dict(node.kwargs)), lambda x: numbers.get(x, str(_type(x))))
        kind = str(node.target) if node.op.startswith("call") or node.target in named else ""
        yield TracedNode((node.op, kind, repr(args), _type(node)), read, source_of(node))
    yield TracedNode((), [constants[x] for x in outputs if x in constants], None)
