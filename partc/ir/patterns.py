"""Patterns of operations, and rewrites: a named pattern and its replacement.

    mul(w, mul(x, rsqrt(add(div(sum(pow(x, 2), dims, True), n), eps))))

A name matches any argument, and the same argument wherever it occurs; `_` matches any argument each time. A number
matches an equal number, and a tuple a tuple. `(e := exp(x))` also names the value, `(amax | max)(x, d)` matches either
operation, `(pow(x, 2) | mul(x, x))` either tree, and `*rest` matches the remaining arguments. Operands of `add` and
`mul` match in either order. Inside a pattern only operations without attributes match.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from partc import fuel
from partc.errors import InternalError
from partc.ir.program import Graph, Op, Ref, Region, TensorType

Bindings = Mapping[str, Any]
_COMMUTATIVE = frozenset({"add", "mul"})


def matches(pattern: str, root: Op, makers: Mapping[str, Op]) -> Iterator[Bindings]:
    """The arguments for which the names of the pattern stand, once for each way to match."""
    tree = _tree(pattern)
    if root.name in _names(tree.func):
        yield from _arguments(tree.args, root, makers, {})


@cache
def _tree(text: str) -> ast.Call:
    tree = ast.parse(text, mode="eval").body
    assert isinstance(tree, ast.Call)
    return tree


def _names(node: ast.expr) -> list[str]:
    """The operations that a call in a pattern accepts."""
    if isinstance(node, ast.BinOp):
        return [*_names(node.left), *_names(node.right)]
    assert isinstance(node, ast.Name)
    return [node.id]


def _arguments(nodes: list[ast.expr], op: Op, makers: Mapping[str, Op], bound: Bindings) -> Iterator[Bindings]:
    orders = [op.args]
    if op.name in _COMMUTATIVE and len(op.args) == 2:
        orders.append(op.args[::-1])
    for args in orders:
        yield from _match_arguments(nodes, args, makers, bound)


def _match_arguments(
    nodes: list[ast.expr], args: tuple[Any, ...], makers: Mapping[str, Op], bound: Bindings
) -> Iterator[Bindings]:
    if not nodes:
        if not args:
            yield bound
        return
    first, *others = nodes
    if isinstance(first, ast.Starred) and isinstance(first.value, ast.Name):
        yield {**bound, first.value.id: args}
    elif args:
        for found in _argument(first, args[0], makers, bound):
            yield from _match_arguments(others, args[1:], makers, found)


def _argument(node: ast.expr, arg: Any, makers: Mapping[str, Op], bound: Bindings) -> Iterator[Bindings]:
    match node:
        case ast.Name(id="_"):
            yield bound
        case ast.Name(id=name):
            if bound.get(name, arg) == arg:
                yield {**bound, name: arg}
        case ast.Constant(value=bool() as value):
            if arg is value:
                yield bound
        case ast.Constant(value=int() | float() as value):
            if isinstance(arg, int | float) and not isinstance(arg, bool) and math.isclose(arg, value, rel_tol=1e-9):
                yield bound
        case ast.NamedExpr(target=ast.Name(id=name), value=inner):
            for found in _argument(inner, arg, makers, bound):
                yield {**found, name: arg}
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            for either in (left, right):
                yield from _argument(either, arg, makers, bound)
        case ast.Tuple(elts=nodes):
            if isinstance(arg, tuple):
                yield from _match_arguments(nodes, arg, makers, bound)
        case ast.Call(func=func, args=nodes):
            op = makers.get(arg.name) if isinstance(arg, Ref) else None
            if op is not None and not op.attrs and op.name in _names(func):
                yield from _arguments(nodes, op, makers, bound)
        case _:
            raise InternalError(f"{ast.unparse(node)} in a pattern")


@dataclass(frozen=True, slots=True)
class Match:
    """A place where a pattern matches: the root, the arguments by name, and the graph around it."""

    root: Op
    bound: Bindings
    types: Mapping[str, TensorType]
    makers: Mapping[str, Op]
    readers: Mapping[str, Sequence[Op]]
    outputs: tuple[str, ...]

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of the value that a name of the pattern stands for; None for any other argument."""
        arg = self.bound[name]
        return self.types[arg.name].shape if isinstance(arg, Ref) else None

    def is_read_by(self, name: str, count: int) -> bool:
        """Whether exactly `count` operations read the value, and the graph does not return it."""
        value = self.bound[name].name
        return value not in self.outputs and len(self.readers[value]) == count


@dataclass(frozen=True, slots=True)
class Rewrite:
    """An optional rewrite, which costs fuel: the root is replaced by another operation, or stays if the replacement is
    None.
    """

    name: str
    pattern: str
    instead: Callable[[Match], Op | None]

    def apply(self, region: Region) -> Region:
        """The region with every match in its forward graph replaced, and without operations that are then dead."""
        graph: Graph = region.forward
        types, makers, readers = region.types(graph), graph.makers(), graph.readers()
        ops = []
        for op in graph.ops:
            bindings = matches(self.pattern, op, makers)
            found = (self.instead(Match(op, bound, types, makers, readers, graph.outputs)) for bound in bindings)
            new = next((each for each in found if each is not None), None)
            ops.append(new if new is not None and fuel.may_rewrite(self.name, op.source) else op)
        return replace(region, forward=replace(graph, ops=tuple(ops)).without_dead())
