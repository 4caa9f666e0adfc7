"""Calls of torch's operators in an fx graph: the operation's name, and the arguments by their names in its schema."""

from __future__ import annotations

from typing import Any

from torch import fx

from partc.torch_private import OpOverload


def operation(node: fx.Node) -> str:
    """The name of a node's operation, with a namespace unless it is torch's or partc's; empty for other nodes."""
    if not isinstance(node.target, OpOverload):
        return ""
    namespace, name = node.target._schema.name.split("::")
    return name if namespace in ("aten", "partc") else f"{namespace}::{name}"


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments that a call of an operator gives, by name."""
    assert isinstance(node.target, OpOverload)
    names = (argument.name for argument in node.target._schema.arguments)
    return dict(zip(names, node.args, strict=False)) | node.kwargs
