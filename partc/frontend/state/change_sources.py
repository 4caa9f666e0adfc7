"""The user's lines that change a value, and the refusals that name them."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from partc.errors import PartcError, Source
from partc.frontend.state.snapshots import Change, State
from partc.frontend.state.stateful_code import stateful_lines
from partc.installed import shortened


def refusal(change: Change | None, state: State, source: Source | None = None) -> PartcError:
    """P0225 for a change that affects the traced program, or at a line that computes something else in each trace.

    The line of forward says more than one of a function that it calls.
    """
    if change is not None:
        what = f"forward changes {change.what}"
        helped = (
            "keep state in a registered buffer and update it with tensor operations; decide options before training"
        )
        if change.always:
            helped = "do so in the constructor, or in model() before it returns"
        if change.key[1] == "parameters":
            helped = (
                "make parameters in the constructor, and change their values in place, as weight.data.copy_(values) "
                "does: an optimizer does not know a parameter that forward makes"
            )
        if change.key[0] in ("random", "numpy.random") or change.key == ("torch", "generator"):
            what = f"forward takes {change.what}" if change.key[0] != "torch" else f"forward sets {change.what}"
            helped = "draw with torch.rand, torch.randn or dropout, which packages draw anew in every step"
        if source is None or not change.key[0].startswith("function "):
            source = change_source(change, state) or source
        return PartcError(
            "P0225",
            f"{what}{'' if change.always else ', and then computes something else'}:"
            " a package would repeat the first step",
            help=helped,
            source=source,
        )
    return PartcError(
        "P0225",
        "forward computes something else each time it is traced, though no state of the model has changed",
        help="clocks, Python's random numbers, iterators and counters would be frozen: draw with torch.rand, keep state"
        " in a registered buffer, or pass the values in the batch",
        source=source if source is not None and source.line else next(stateful_lines(state.modules), None),
    )


def change_source(change: Change, state: State) -> Source | None:
    """The first line of the user's code that makes the change."""
    if change.source is not None:
        return change.source
    code = getattr(change.owner, "__code__", None)
    if change.key[0] == "cache" and code is not None:
        return Source(file=shortened(code.co_filename), line=code.co_firstlineno)
    name = change.name
    members = change.key[0].startswith("members ") and change.key[1] != "requires_grad"
    if not members and (change.always or change.key[0] in ("random", "numpy.random", "torch")):
        words = {
            "requires_grad": {"requires_grad_", "requires_grad"},
            "default dtype": {"set_default_dtype"},
        }.get(name, {change.key[0].split(".")[0]})
        return next(
            _lines(state, lambda node: isinstance(node, ast.Attribute | ast.Name) and _word(node) in words), None
        )

    variables = change.key[0].startswith(("module ", "function "))

    def names(node: ast.AST) -> bool:
        return name in _words(node, variables)

    def changes(node: ast.AST) -> bool:
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            return any(names(each) for target in targets for each in _targets(target))
        if isinstance(node, ast.Call) and any(_word(given.value) == name for given in node.keywords):
            return True  # a generator
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("train", "eval"):
                return name == "training"
            if node.func.attr in ("register_parameter", "register_buffer", "add_module", "register_module"):
                return any(isinstance(arg, ast.Constant) and arg.value == name for arg in node.args)
            return names(node.func.value) or node.func.attr == name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called = node.args[:1] if node.func.id == "next" else [node.func]  # an iterator, or an object
            if any(map(names, called)):
                return True
        if isinstance(node, ast.Call) and _word(node.func) == "setattr":
            return any(map(names, node.args[:2]))
        if isinstance(node, ast.FunctionDef):
            return node.name == name and "cached_property" in map(_word, node.decorator_list)
        return False

    return next(_lines(state, changes), None)


def _targets(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Tuple | ast.List):
        for each in node.elts:
            yield from _targets(each)
    else:
        yield node


def _words(node: ast.AST, variables: bool) -> Iterator[str]:
    """The attributes and keys of a chain such as `self.known["n"].value`; with `variables`, also its first name."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            yield str(node.slice.value)
        node = node.value
    if isinstance(node, ast.Constant):
        yield str(node.value)
    elif isinstance(node, ast.Name) and variables:
        yield node.id


def _word(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _lines(state: State, wanted: Any) -> Iterator[Source]:
    """The lines of the user's functions (without constructors) that contain a wanted syntax node."""
    homes = dict.fromkeys((*state.modules, *(m for m in map(_home, state.model.modules()) if m is not None)))
    for home in homes:
        file = getattr(home, "__file__", None)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(home)))
        except (OSError, TypeError, SyntaxError):
            continue
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and function.name not in ("__init__", "model", "batch", "data"):
                yield from (
                    Source(file=str(file), line=node.lineno)
                    for node in ast.walk(function)
                    if isinstance(node, ast.stmt | ast.expr) and wanted(node)
                )


def _home(module: nn.Module) -> types.ModuleType | None:
    home = sys.modules.get(type(module).__module__)
    return None if home is None or home.__name__.partition(".")[0] == "torch" else home
