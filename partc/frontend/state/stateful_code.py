"""The user's code that may keep state between calls of forward, by its syntax.

self.n += 1                       an attribute, an item or a global is assigned
self.seen.append(x)               a method of an object that outlives the call
next(self.numbers)                an iterator advances
outs = []; outs.append(x)         no state: the list is new in each call
x = x.view(4, -1).relu()          no state: methods of tensors are in the graph
"""

from __future__ import annotations

import ast
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from partc.errors import Source
from partc.frontend.statements import tree_of

# Names in the user's code whose values may differ from step to step.
CLOCKS = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time")
FICKLE = frozenset({*CLOCKS, "random", "datetime", "now", "today", "urandom", "uuid1", "uuid4", "secrets", "ctime"})
_PREPARES = frozenset({"__init__", "reset_parameters", "model", "batch", "data", "optimizer"})  # run outside of forward
_FUNCTIONS = frozenset({"next", "setattr", "delattr", "exec", "eval", "open", "globals", "vars"})
# Methods of other objects than tensors that change nothing.
_PURE = frozenset({
    "items", "keys", "values", "get", "index", "count", "copy", "join", "format", "split", "startswith", "endswith",
    "lower", "upper", "strip", "replace", "named_parameters", "parameters", "named_buffers", "buffers", "modules",
    "named_modules", "children", "named_children",
})  # fmt: skip
_CHANGES = frozenset({"add", "copy_", "set_"})  # methods of tensors by name, but also of sets and the user's objects
_FRESH = (
    ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp, ast.Call, ast.BinOp,
    ast.Constant, ast.Compare, ast.JoinedStr, ast.Tuple, ast.UnaryOp,
)  # fmt: skip


def user_modules(homes: Iterable[types.ModuleType], is_users: Callable[[Any], bool]) -> tuple[types.ModuleType, ...]:
    """These modules, and the user's modules to which their globals lead."""
    found: dict[str, types.ModuleType] = {}
    waiting = deque(homes)
    while waiting:
        home = waiting.popleft()
        if home.__name__ in found:
            continue
        found[home.__name__] = home
        for value in [*vars(home).values()]:
            other = value if isinstance(value, types.ModuleType) else sys.modules.get(_module_name(value))
            if other is not None and other.__name__ not in found and is_users(other):
                waiting.append(other)
    return tuple(found.values())


def _module_name(value: Any) -> str:
    name = getattr(value, "__module__", "") if isinstance(value, type | types.FunctionType) else ""
    return name if isinstance(name, str) else ""


def may_keep_state(modules: Iterable[types.ModuleType]) -> bool:
    """Whether code may keep state, or names clocks or random numbers in any function, also in constructors."""
    modules = tuple(modules)
    if next(stateful_lines(modules), None) is not None:
        return True
    trees = (tree_of(str(home.__file__)) for home in modules)
    return any(_names_fickle(tree) for tree in trees if tree is not None)


@functools.lru_cache(maxsize=64)
def _names_fickle(tree: ast.Module) -> bool:
    """Whether any function names clocks or random numbers."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return any(_is_fickle(node) for function in functions for node in ast.walk(function))


def stateful_lines(modules: Iterable[types.ModuleType]) -> Iterator[Source]:
    """The lines that may keep state, module by module; those that name clocks or random numbers come first."""
    for home in modules:
        file = getattr(home, "__file__", None)
        tree = tree_of(file) if isinstance(file, str) else None
        if tree is None or not tree.body:  # unknown code
            yield Source(file=str(file), line=0)
            continue
        imported = frozenset(name for name, value in vars(home).items() if isinstance(value, types.ModuleType))
        yield from (Source(file=str(file), line=line) for line in _stateful_lines(tree, imported))


@functools.lru_cache(maxsize=64)
def _stateful_lines(tree: ast.Module, imported: frozenset[str]) -> tuple[int, ...]:
    """The numbers of a module's lines that may keep state. `imported` has the names of globals that are modules."""
    found = [node for function in _functions(tree) for node in _Function(function, imported).stateful()]
    return tuple(node.lineno for node in sorted(found, key=lambda node: (not _is_fickle(node), node.lineno)))


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """The functions that forward may run. Functions within others belong to them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            if node.name not in _PREPARES:
                yield node
            else:  # it may define functions that forward runs
                yield from _functions(node)
        else:
            yield from _functions(node)


class _Function:
    """A function with the names of objects that are new in each of its calls."""

    def __init__(self, function: ast.FunctionDef, imported: frozenset[str]) -> None:
        self._body, self._imported = function.body, imported
        values: dict[str, list[ast.AST | None]] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    for name in _names(target):
                        values.setdefault(name, []).append(node.value if isinstance(target, ast.Name) else None)
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and isinstance(node.target, ast.Name):
                values.setdefault(node.target.id, []).append(node.value)
            elif isinstance(node, ast.For | ast.comprehension):
                values.update((name, [None]) for name in _names(node.target))
        parameters = {arg.arg for arg in ast.walk(function) if isinstance(arg, ast.arg)}
        self._new = {
            name
            for name, assigned in values.items()
            if name not in parameters and all(isinstance(value, _FRESH) for value in assigned)
        }

    def stateful(self) -> Iterator[ast.stmt | ast.expr]:
        """The nodes that may keep state."""
        for statement in self._body:
            for node in ast.walk(statement):
                if isinstance(node, ast.stmt | ast.expr) and (_is_fickle(node) or self._may_keep_state(node)):
                    yield node

    def _may_keep_state(self, node: ast.AST) -> bool:
        match node:
            case ast.Global() | ast.Nonlocal():
                return True
            case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
                return not self._is_new(node)
            case ast.Call(func=ast.Name(id=name)):
                return name in _FUNCTIONS
            case ast.Call(func=ast.Attribute(value=owner, attr=name)):
                return self._may_change(owner, name)
        return False

    def _may_change(self, owner: ast.AST, method: str) -> bool:
        """Whether a call of a method may change its object."""
        root = _root(owner)
        if self._is_new(owner) or (isinstance(root, ast.Name) and root.id in self._imported):
            return False
        if isinstance(owner, ast.Name) and owner.id == "self":  # a module or a method, whose own code is read
            return False
        if isinstance(root, ast.Call):  # super().forward(x), x.view(2).relu()
            return False
        return method in _CHANGES or not (hasattr(Tensor, method) or method in _PURE)

    def _is_new(self, node: ast.AST) -> bool:
        root = _root(node)
        return isinstance(root, ast.Name) and root.id in self._new


def _is_fickle(node: ast.AST) -> bool:
    """Whether a node names or imports a clock or random numbers."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
            return not FICKLE.isdisjoint(name.split("."))
        case ast.ImportFrom(module=str(name)):
            return not FICKLE.isdisjoint(name.split("."))
    return False


def _names(target: ast.AST) -> Iterator[str]:
    """The names that an assignment binds."""
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Tuple | ast.List):
        for each in target.elts:
            yield from _names(each)
    elif isinstance(target, ast.Starred):
        yield from _names(target.value)


def _root(node: ast.AST) -> ast.AST:
    """The object at which a chain of attributes and items starts."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node
