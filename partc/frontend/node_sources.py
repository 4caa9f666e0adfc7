"""The line of the user's code and the module that created a node of a trace."""

from __future__ import annotations

import re

from torch import fx

from partc.errors import Source
from partc.installed import is_machinery, shortened


def module_of(node: fx.Node) -> str:
    """The path of the module that ran a node."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed([path for path, _ in stack.values()]), "").removeprefix("model").removeprefix(".")
    return re.sub(r"@\d+$", "", path)


def source_of(node: fx.Node) -> Source | None:
    """The innermost line of model code that created a node, and the module that ran it."""
    module = module_of(node)
    frames = re.findall(r'(?m)^\s*File "(.+)", line (\d+), in ', node.meta.get("stack_trace") or "")
    chosen = next(((f, n) for f, n in reversed(frames) if not is_machinery(f)), None)
    if chosen is None:
        return Source(file="", line=0, module=module) if module else None
    return Source(file=shortened(chosen[0]), line=int(chosen[1]), module=module)
