"""Values that a model file's `data` sets from step to step, and that forward reads: a trace would keep the first ones.

def data(step):
    global TEMPERATURE
    TEMPERATURE = 0.99 ** step            refused, if forward reads TEMPERATURE
    SCHEDULE["rate"] = step / 100         refused, if forward reads an item or an attribute rate
    if TABLE is None: TABLE = load()      allowed: the value stays
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterable, Iterator, Mapping

from partc.errors import PartcError, Source
from partc.frontend.statements import tree_of

_CHANGING = frozenset({"append", "add", "update", "extend", "pop", "insert", "clear", "remove", "setdefault", "fill"})


def check_data(modules: Iterable[types.ModuleType]) -> None:
    """Raises PartcError P0225 for a value that the data of a model file sets and that its forward or loss reads."""
    for home in modules:
        tree = tree_of(str(home.__file__)) if hasattr(home, "data") and hasattr(home, "model") else None
        if tree is None:
            continue
        functions = _functions(tree)
        own = {node.name: [node] for node in tree.body if isinstance(node, ast.FunctionDef)}
        data = functions.pop("data", [])
        read = {name for each in _called(functions, ["forward", "loss"]) for name in _read(each)}
        held = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        held |= {name for each in functions.get("model", ()) for name in _globals(each)}  # the model itself
        for each in _called(own, ["data"]) if data else ():
            for root, name, node in _set(each):
                if name in read and root in read | held:
                    raise PartcError(
                        "P0225",
                        f"data sets {name}, which forward reads: a package would keep its first value",
                        help="pass the value in the batch, as a tensor",
                        source=Source(file=str(home.__file__), line=node.lineno),
                    )


def _functions(tree: ast.Module) -> dict[str, list[ast.FunctionDef]]:
    """The functions of a file by name. A class stands for its methods, and functions within others belong to them."""
    found: dict[str, list[ast.FunctionDef]] = {}
    for node in tree.body:
        own = [each for each in ast.walk(node) if isinstance(each, ast.FunctionDef)]
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.ClassDef):
            found.setdefault(node.name, []).extend(own)
            for each in own:
                found.setdefault(each.name, []).append(each)
    return found


def _called(functions: Mapping[str, list[ast.FunctionDef]], names: list[str]) -> set[ast.FunctionDef]:
    """The functions of these names, and all that they name."""
    found: set[ast.FunctionDef] = set()
    waiting = [each for name in names for each in functions.get(name, ())]
    while waiting:
        function = waiting.pop()
        if function not in found:
            found.add(function)
            waiting.extend(each for name in _read(function) for each in functions.get(name, ()))
    return found


def _globals(function: ast.FunctionDef) -> set[str]:
    return {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}


def _read(function: ast.FunctionDef) -> Iterator[str]:
    """The names of variables, attributes and items that a function reads."""
    for node in ast.walk(function):
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Load):
            yield _name(node)


def _set(function: ast.FunctionDef) -> Iterator[tuple[str, str, ast.expr]]:
    """The globals that a function assigns or changes in each call, each with the last name of the target and its node.

    The last name of `SCHEDULE["rate"]` is rate.
    """
    shared = _globals(function)
    stored = (node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    own = {node.id for node in stored} | {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    tested = {
        name
        for node in ast.walk(function)
        if isinstance(node, ast.If)
        for each in ast.walk(node.test)
        for name in (_name(each), *([str(each.value)] if isinstance(each, ast.Constant) else ()))
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
            target: ast.expr = node.func.value
        elif isinstance(node, ast.Call) and _name(node.func) == "setattr" and isinstance(node.args[1], ast.Constant):
            target = ast.copy_location(ast.Attribute(node.args[0], str(node.args[1].value), ast.Store()), node)
        elif isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            target = node
        else:
            continue
        root: ast.expr = target
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        if not isinstance(root, ast.Name) or _name(target) in tested:
            continue
        if root.id in shared or (root.id not in own and root is not node):
            yield root.id, _name(target), target


def _name(node: ast.AST) -> str:
    """The last name of a variable, an attribute or an item."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(slice=ast.Constant(value=key)):
            return str(key)
        case ast.Subscript(value=value):
            return _name(value)
    return ""
