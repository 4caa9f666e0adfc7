"""Equal dimensions of the tensors of a function whose gradients the model defines itself.

    y = own_gradient((sum,), (x, w), (grad_x, grad_w))   # x[8, 4], w[4], y[8, 4]
  ->
    y = own_gradient((sum,), (x, w), (grad_x, grad_w), dims=((0, 1), (0, 1), (1,)))

Dimensions are equal if the rules of the function's operations, forward and backward, give them the same factor. `dims`
has the factors' numbers for the results, then for the operands. `alone` numbers the operands whose gradients depend on
no incoming one, and `mixed` those whose gradients depend on incoming ones without being proportional to them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from partc.ir.program import Graph, Op, TensorType
from partc.rules import resolve

Dim = tuple[str | int, str | int]  # (value, dimension), or (operation, factor)


def with_dims(graph: Graph, types: Mapping[str, TensorType]) -> Graph:
    ops = list(graph.ops)
    stopped: dict[str, int] = {}  # a value -> where it was last detached
    incoming: set[str] = set()  # values that depend on incoming gradients
    mixed: set[str] = set()  # incoming values that are not proportional to incoming gradients
    for place, op in enumerate(ops):
        if op.name == "incoming_gradient" or (op.name != "own_gradient" and not incoming.isdisjoint(op.refs())):
            made = [value.name for value in op.results]
            incoming.update(made)
            mixed.update(made if not mixed.isdisjoint(op.refs()) or not _is_linear(op, incoming, types) else ())
        if op.name == "detach":
            stopped[next(op.refs())] = place
        if op.name == "own_gradient":
            results, operands, gradients = _names(op)
            start = min((stopped[name] for name in operands if name in stopped), default=place)
            equal = _EqualDims()
            for each in ops[start:place]:
                equal.join(each, types)
            for name, gradient in zip(operands, gradients, strict=True):
                for dim in range(len(types[name].shape)):
                    equal.same((name, dim), (gradient, dim))
            dims = equal.numbers(results, operands, types)
            alone = tuple(index for index, name in enumerate(gradients) if name not in incoming)
            other = tuple(index for index, name in enumerate(gradients) if name in mixed)
            named = (("alone", alone), ("mixed", other))
            ops[place] = replace(op, attrs=(("dims", dims), *(each for each in named if each[1])))
    return replace(graph, ops=tuple(ops))


def _is_linear(op: Op, incoming: Collection[str], types: Mapping[str, TensorType]) -> bool:
    """Whether an operation's results are proportional to its operands that depend on incoming gradients."""
    if op.name == "incoming_gradient":
        return True
    rule = resolve(op, types)
    dependent = {place for place, name in enumerate(op.refs()) if name in incoming}
    return rule is not None and any(dependent == set(group) for group in rule.linear)


def _names(op: Op) -> list[list[str]]:
    names = op.refs()
    return [[next(names) for _ in each] for each in op.args if isinstance(each, tuple)]


class _EqualDims:
    """Sets of equal dimensions."""

    def __init__(self) -> None:
        self._parents: dict[Dim, Dim] = {}

    def same(self, one: Dim, other: Dim) -> None:
        self._parents[self._root(one)] = self._root(other)

    def join(self, op: Op, types: Mapping[str, TensorType]) -> None:
        """Join the dimensions that share a factor of an operation."""
        rule = resolve(op, types) if op.name != "own_gradient" else None
        if rule is None:
            return
        tensors = (*op.refs(), *(value.name for value in op.results))
        for name, dims in zip(tensors, (*rule.operands, *rule.results), strict=True):
            for dim, factors in enumerate(dims):
                if len(factors) == 1:
                    self.same((name, dim), (id(op), factors[0]))

    def numbers(
        self, results: Sequence[str], operands: Sequence[str], types: Mapping[str, TensorType]
    ) -> tuple[tuple[int, ...], ...]:
        """The number of each dimension. Without other evidence, tensors of equal shape have equal dimensions."""
        shape = types[results[0]].shape
        for name in (*results[1:], *operands):
            for dim in range(len(shape)) if types[name].shape == shape else ():
                mine = {self._root((name, other)) for other in range(len(shape))}
                first = {self._root((results[0], other)) for other in range(len(shape))}
                if self._root((name, dim)) not in first and self._root((results[0], dim)) not in mine:
                    self.same((name, dim), (results[0], dim))
        found: dict[Dim, int] = {}
        ranks = ((name, len(types[name].shape)) for name in (*results, *operands))
        return tuple(
            tuple(found.setdefault(self._root((name, dim)), len(found)) for dim in range(rank)) for name, rank in ranks
        )

    def _root(self, dim: Dim) -> Dim:
        while (parent := self._parents.get(dim, dim)) != dim:
            dim = parent
        return dim
