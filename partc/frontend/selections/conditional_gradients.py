"""The outcomes of random branches under which a gradient reaches a parameter.

    u       = rand(())
    t       = lt(u, 0.1)
    y       = linear(x, layer.weight)       ->       reached = sum(logical_not(t))
    y_1     = where(t, x, y)                         reach layer.weight if reached

Eagerly a dropped layer has no gradient, and the optimizer leaves its parameters alone. `where` would give it zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from partc.ir.gradients import reached
from partc.ir.operations import effects, memory_owner
from partc.ir.program import NO_GRAD, Graph, Op, Ref, is_change

Outcome = tuple[str, bool]  # the value of a test, and the outcome
Condition = frozenset[frozenset[Outcome]]  # any of these conjunctions
ALWAYS: Condition = frozenset({frozenset()})
_MOST = 16  # conjunctions; a condition of more counts as always


def conditions(graph: Graph, choices: Collection[str], parameters: Sequence[str]) -> dict[str, Condition]:
    """The parameters that the gradient of the first output reaches only under a condition.

    `choices` are the results of `where` that choose between the outcomes of branches. The gradient reaches a change in
    place if it reaches a later read of the changed memory, under any name.
    """
    live, made = reached(graph, parameters), graph.makers()
    sharing: dict[str, set[str]] = {}  # the names of values in one memory
    for name in made:
        owner = memory_owner(name, made)
        sharing.setdefault(owner, {owner}).add(name)
    found: dict[str, Condition] = {graph.outputs[0]: ALWAYS}
    for op in reversed(graph.ops):
        silent = (NO_GRAD, True) in op.attrs or not effects(op.name).differentiable
        if silent or live.isdisjoint(op.refs()):
            continue
        names = {value.name for value in op.results}
        later = sharing[memory_owner(op.result.name, made)] if is_change(op) else names
        over = _union(found.get(name, frozenset()) for name in later)
        chosen = not names.isdisjoint(choices)
        for place, name in _operands(op):
            if name in live:
                here = _with(over, (next(op.refs()), place == 1)) if chosen else over
                found[name] = _union((found.get(name, frozenset()), here))
    return {name: found[name] for name in parameters if found.get(name, ALWAYS) not in (ALWAYS, frozenset())}


def _operands(op: Op) -> Iterable[tuple[int, str]]:
    return (
        ((place, ref.name) for place, ref in enumerate(op.args) if isinstance(ref, Ref))
        if op.name == "where"
        else ((0, name) for name in op.refs())
    )


def _with(condition: Condition, outcome: Outcome) -> Condition:
    test, value = outcome
    return frozenset(each | {outcome} for each in condition if (test, not value) not in each)


def _union(given: Iterable[Condition]) -> Condition:
    """Any of the conditions, in the fewest conjunctions that steps of absorbing and joining find."""
    each: Condition = frozenset().union(*given)
    while True:
        joined = {one - {outcome} for one in each for outcome in one if _flipped(one, outcome) in each}
        every = each | joined
        fewest = frozenset(one for one in every if not any(other < one for other in every))
        if fewest == each:
            return each if len(each) <= _MOST else ALWAYS
        each = fewest


def _flipped(conjunction: frozenset[Outcome], outcome: Outcome) -> frozenset[Outcome]:
    test, value = outcome
    return conjunction - {outcome} | {(test, not value)}
