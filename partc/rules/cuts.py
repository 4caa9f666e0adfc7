"""Which strided cuts of a dimension are worth considering: those that some view or split makes contiguous."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from partc.program import Graph, Op, TensorType
from partc.rules.rule import Dims, OpRule

Cuts = Mapping[str, tuple[frozenset[int], ...]]  # value name -> per dimension, values of Shard.outer
MOST_CUTS = 12  # per dimension


def propagate_cuts(
    graph: Graph,
    types: Mapping[str, TensorType],
    resolve: Callable[[Op, Mapping[str, TensorType]], OpRule | None],
) -> Cuts:
    """Per value and dimension, the `outer` values at which a cut is contiguous for some operation.

    A fused projection's result, seen as [3, heads, size] later, gets {1, 3, 3 * heads}; so does the
    weight's dimension. Goes through the graph forwards and backwards until nothing changes.
    """
    tensors = [(op, resolve(op, types)) for op in graph.ops]
    known = [(list(_tensors(op, rule)), rule) for op, rule in tensors if rule is not None]
    cuts: dict[str, list[set[int]]] = {name: [{1} for _ in type.shape] for name, type in types.items()}
    for op in graph.ops:
        cuts.update((value.name, [{1} for _ in value.type.shape]) for value in op.results)
    changed = True
    while changed:
        changed = False
        for places, rule in (*known, *reversed(known)):
            changed |= _exchange(places, rule, cuts)
    return {name: tuple(map(frozenset, found)) for name, found in cuts.items()}


def factor_cuts(op: Op, rule: OpRule, cuts: Cuts) -> dict[str, frozenset[int]]:
    """The cuts of an operation's factors that follow from those of its operands' and results' dimensions."""
    found: dict[str, set[int]] = {}
    for name, dim, before, factor, size in _places(_tensors(op, rule), rule):
        inside = found.setdefault(factor, {1})
        inside.update(_inside(cuts[name][dim], before, size))
    return {factor: frozenset(inside) for factor, inside in found.items()}


def _tensors(op: Op, rule: OpRule) -> Iterator[tuple[str, Dims]]:
    yield from zip(op.refs(), rule.operands, strict=True)
    yield from ((value.name, dims) for value, dims in zip(op.results, rule.results, strict=True))


def _places(tensors: Iterable[tuple[str, Dims]], rule: OpRule) -> Iterator[tuple[str, int, int, str, int]]:
    """Value, dimension, elements before the factor in it, factor and its size, wherever a factor may be cut."""
    sizes = {factor.name: factor.size for factor in rule.factors}
    free = {factor.name for factor in rule.factors if factor.kind != "blocked"}
    for name, dims in tensors:
        for dim, factors in enumerate(dims):
            before = 1
            for factor in factors:
                if factor in free:
                    yield name, dim, before, factor, sizes[factor]
                before *= sizes[factor]


def _inside(outers: Collection[int], before: int, size: int) -> set[int]:
    """Those cuts of a dimension that fall inside a factor, seen from the factor."""
    found = {outer // before for outer in outers if outer % before == 0}
    return {outer for outer in found if size % outer == 0 and outer < size}


def _exchange(places: list[tuple[str, Dims]], rule: OpRule, cuts: dict[str, list[set[int]]]) -> bool:
    """Spread what is known of each factor over every dimension that carries it."""
    spots = list(_places(places, rule))
    inside: dict[str, set[int]] = {}
    for name, dim, before, factor, size in spots:
        inside.setdefault(factor, {1}).update(_inside(cuts[name][dim], before, size))
    changed = False
    for name, dim, before, factor, _ in spots:
        at = cuts[name][dim]
        new = sorted(before * outer for outer in inside[factor] if before * outer not in at)
        room = max(0, MOST_CUTS - len(at))
        at.update(new[:room])
        changed |= bool(new[:room])
    return changed
