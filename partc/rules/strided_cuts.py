"""The strided cuts of a dimension that are worth considering: those that become contiguous in some view or split."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from partc.ir.program import Graph, Op, TensorType
from partc.rules.rule import Dims, OpRule

Cuts = Mapping[str, tuple[frozenset[int], ...]]  # value name -> per dimension, values of Shard.outer
MOST_CUTS = 12  # per dimension


def propagate_cuts(
    graph: Graph,
    types: Mapping[str, TensorType],
    resolve: Callable[[Op, Mapping[str, TensorType]], OpRule | None],
    halved: Collection[int] = (),
) -> Cuts:
    """For each value and dimension, the `outer` values at which a cut is contiguous for some operation.

    Example: the result of a fused projection, viewed as [3, heads, size] later, gets {1, 3, 3 * heads}, and so does the
    weight's dimension. Dimensions of the sizes `halved` may be cut in each half. Iterates forward and backward over the
    graph until nothing changes.
    """
    resolved = [(op, resolve(op, types)) for op in graph.ops]
    known = [(list(tensors(op, rule)), rule) for op, rule in resolved if rule is not None]
    every = {**types} | {value.name: value.type for op in graph.ops for value in op.results}
    cuts: dict[str, list[set[int]]] = {
        name: [{1, 2} if size in halved else {1} for size in type.shape] for name, type in every.items()
    }
    changed = True
    while changed:
        changed = False
        for places, rule in (*known, *reversed(known)):
            changed |= _exchange(places, rule, cuts)
    return {name: tuple(map(frozenset, found)) for name, found in cuts.items()}


def factor_cuts(op: Op, rule: OpRule, cuts: Cuts) -> dict[str, frozenset[int]]:
    """The cuts of an operation's factors that follow from the cuts of its operands and results."""
    found: dict[str, set[int]] = {}
    for name, dim, before, factor, size in _places(tensors(op, rule), rule):
        inside = found.setdefault(factor, {1})
        inside.update(_inner_cuts(cuts[name][dim], before, size))
    return {factor: frozenset(inside) for factor, inside in found.items()}


def tensors(op: Op, rule: OpRule) -> Iterator[tuple[str, Dims]]:
    """The operands in the order of `op.refs()`, then the results, each with the factors of its dimensions."""
    yield from zip(op.refs(), rule.operands, strict=True)
    yield from ((value.name, dims) for value, dims in zip(op.results, rule.results, strict=True))


def _places(tensors: Iterable[tuple[str, Dims]], rule: OpRule) -> Iterator[tuple[str, int, int, str, int]]:
    """For every factor that may be cut: value, dimension, product of the more major sizes, factor and size."""
    sizes = {factor.name: factor.size for factor in rule.factors}
    free = {factor.name for factor in rule.factors if factor.kind != "blocked"}.union(rule.normalized)
    for name, dims in tensors:
        for dim, factors in enumerate(dims):
            before = 1
            for factor in factors:
                if factor in free:
                    yield name, dim, before, factor, sizes[factor]
                before *= sizes[factor]


def _inner_cuts(outers: Collection[int], before: int, size: int) -> set[int]:
    """The cuts of a dimension that fall inside a factor, relative to the factor."""
    found = {outer // before for outer in outers if outer % before == 0}
    return {outer for outer in found if size % outer == 0 and outer < size}


def _exchange(places: list[tuple[str, Dims]], rule: OpRule, cuts: dict[str, list[set[int]]]) -> bool:
    """Spread the known cuts of each factor over every dimension that carries it; return whether anything changed."""
    spots = list(_places(places, rule))
    inside: dict[str, set[int]] = {}
    for name, dim, before, factor, size in spots:
        inside.setdefault(factor, {1}).update(_inner_cuts(cuts[name][dim], before, size))
    changed = False
    for name, dim, before, factor, _ in spots:
        at = cuts[name][dim]
        new = sorted(before * outer for outer in inside[factor] if before * outer not in at)
        room = max(0, MOST_CUTS - len(at))
        at.update(new[:room])
        changed |= bool(new[:room])
    return changed
