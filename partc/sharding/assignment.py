"""An exact choice of placements: one integer program over the distinct regions of a model.

Nodes are operations with alternatives. Wires carry values from producers to readers. A change of placement on a wire
has a price, which all readers of the changed value share. The wires use the local-marginal formulation of weighted
constraint satisfaction (Cooper et al. 2010, section 4), whose linear relaxation is nearly always integral on the graphs
of models.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from partc.errors import InternalError
from partc.sharding.integer_program import LinearConstraints, solve_integer_program

_TOLERANCE = 1e-6  # of the solver, for integers
Price = Mapping[str, float]  # criterion -> amount
Kept = tuple[tuple[np.ndarray, float], ...]  # costs of earlier objectives, and their minima, which must not rise


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One way to run an operation: the placements of its operands and results, and its costs."""

    label: Hashable
    wants: tuple[Hashable, ...] = ()
    makes: tuple[Hashable, ...] = ()
    price: Price = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A decision: an operation, or the placement of a value that crosses calls."""

    name: Hashable
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A value from result `output` of node `source` to the operands (node, index) that read it.

    `change` is the price of a change of placement (made, wanted), or None if the change is impossible. No change is
    free.
    """

    name: Hashable
    source: Hashable
    output: int
    readers: tuple[tuple[Hashable, int], ...]
    change: Callable[[Hashable, Hashable], Price | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    nodes: tuple[Node, ...]
    wires: tuple[Wire, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The chosen alternative of each node, by name, and the total of every objective."""

    chosen: Mapping[Hashable, Alternative]
    totals: Mapping[str, float]


def solve(
    problem: Problem,
    objectives: Sequence[Mapping[str, float]],
    *,
    forbid: frozenset[tuple[Hashable, Hashable]] = frozenset(),
) -> Solution | None:
    """Minimise the objectives (criterion -> weight) in order, each without worsening the ones before.

    `forbid` names (node, label) pairs that must not be chosen. Returns None if no choice remains.
    """
    model = _Model(problem, forbid)
    costs = [cost / np.max(cost) for cost in map(model.cost, objectives) if cost.any()]
    found = model.least(costs or [np.zeros(len(model.upper))], model.upper, ())
    return None if found is None else model.solution(found)


class _Model:
    """The integer program. Columns: one per alternative, per (wire reader, made, wanted) and per (wire, change)."""

    def __init__(self, problem: Problem, forbid: frozenset[tuple[Hashable, Hashable]]) -> None:
        self._problem = problem
        self._prices: dict[int, Price] = {}  # of the columns that are not free
        self._integral: list[int] = []
        self._upper: list[float] = []
        self._entries: list[tuple[int, int, float]] = []  # (row, column, value)
        self._low: list[float] = []
        self._high: list[float] = []
        self._columns: dict[Hashable, list[int]] = {}
        self._nodes = {node.name: node for node in problem.nodes}
        for node in problem.nodes:
            self._add_node(node, forbid)
        for wire in problem.wires:
            self._add_wire(wire)

    def _column(self, price: Price | None = None, *, integral: bool = False, upper: float = 1.0) -> int:
        number = len(self._upper)
        if price:
            self._prices[number] = price
        self._integral.append(int(integral))
        self._upper.append(upper)
        return number

    def _row(self, plus: Sequence[int], minus: Sequence[int], low: float, high: float) -> None:
        """Bound the sum of some columns less the sum of others."""
        number = len(self._low)
        self._entries += [(number, column, 1.0) for column in plus]
        self._entries += [(number, column, -1.0) for column in minus]
        self._low.append(low)
        self._high.append(high)

    def _add_node(self, node: Node, forbid: frozenset[tuple[Hashable, Hashable]]) -> None:
        columns = [
            self._column(choice.price, integral=True, upper=0.0 if (node.name, choice.label) in forbid else 1.0)
            for choice in node.alternatives
        ]
        self._columns[node.name] = columns
        self._row(columns, (), 1.0, 1.0)

    def _states(self, name: Hashable, pick: str, index: int) -> dict[Hashable, list[int]]:
        """Columns of a node's alternatives, grouped by the placement of one operand or result."""
        states: dict[Hashable, list[int]] = {}
        for column, choice in zip(self._columns[name], self._nodes[name].alternatives, strict=True):
            states.setdefault(getattr(choice, pick)[index], []).append(column)
        return states

    def _add_wire(self, wire: Wire) -> None:
        made = self._states(wire.source, "makes", wire.output)
        prices: dict[tuple[Hashable, Hashable], Price | None] = {}
        changed: dict[tuple[Hashable, Hashable], int] = {}
        for reader, index in wire.readers:
            wanted = self._states(reader, "wants", index)
            leaving: dict[Hashable, list[int]] = {source: [] for source in made}
            arriving: dict[Hashable, list[int]] = {target: [] for target in wanted}
            paid: dict[tuple[Hashable, Hashable], int] = {}
            for source, out in leaving.items():
                for target, into in arriving.items():
                    key = source, target
                    if key not in prices:
                        prices[key] = {} if source == target else wire.change(source, target)
                    price = prices[key]
                    if price is None:
                        continue
                    column = self._column()
                    out.append(column)
                    into.append(column)
                    if any(price.values()):
                        paid[key] = column
            for joint, states in ((leaving, made), (arriving, wanted)):
                for state, columns in states.items():
                    self._row(joint[state], columns, 0.0, 0.0)
            for key, column in paid.items():
                if key not in changed:
                    changed[key] = self._column(prices[key])
                self._row((changed[key],), (column,), 0.0, np.inf)

    def least(self, costs: Sequence[np.ndarray], upper: np.ndarray, kept: Kept) -> np.ndarray | None:
        """The columns with the least costs, in order; None if no choice remains. `kept` are earlier costs."""
        if not self._leaves_choices(upper):
            return None
        cost, *rest = costs
        # No price is negative, so that a choice without priced columns has the least cost.
        free = self.least(rest, np.where(cost > 0.0, 0.0, upper), kept) if rest else None
        if free is not None:
            return free
        found = self._minimized(cost, upper, kept)
        if found is None or not rest:
            return found
        better = self.least(rest, upper, (*kept, (cost, float(cost @ np.round(found, 9)))))
        return found if better is None else better

    def _minimized(self, cost: np.ndarray, upper: np.ndarray, kept: Kept) -> np.ndarray | None:
        """The columns with the least cost; None if none keep the earlier costs."""
        # The relaxation is nearly always integral once the few columns in earlier costs are.
        priced = np.any([old > 0.0 for old, _ in kept], axis=0)
        # Slack for the solver's tolerance, relative to the largest price; the first value nearly always suffices.
        for slack in (1e-6, 1e-5, 1e-4):
            bounds = [
                LinearConstraints.dense(old[np.newaxis], -np.inf, best + slack * max(1.0, abs(best)))
                for old, best in kept
            ]
            for integrality in (priced, self.integrality) if kept else (self.integrality,):
                result = solve_integer_program(
                    cost,
                    [self.constraints, *bounds],
                    integral=integrality,
                    upper=upper,
                    options={"mip_rel_gap": 1e-9},
                )
                if result.values is None or self._is_integral(result.values):
                    break
            if result.infeasible and kept:
                continue
            if result.values is None and not result.infeasible:
                raise InternalError(f"the placement solver stopped: {result.message}")
            return result.values
        return None

    def _is_integral(self, found: np.ndarray) -> bool:
        chosen = found[self.integrality > 0]
        return bool(np.all(np.abs(chosen - np.round(chosen)) < _TOLERANCE))

    def _leaves_choices(self, upper: np.ndarray) -> bool:
        """Whether each node has an alternative whose column has a positive upper bound."""
        return all(upper[columns].any() for columns in self._columns.values())

    @property
    def integrality(self) -> np.ndarray:
        return np.array(self._integral)

    @property
    def upper(self) -> np.ndarray:
        return np.array(self._upper)

    def cost(self, weights: Mapping[str, float]) -> np.ndarray:
        found = np.zeros(len(self._upper))
        for column, price in self._prices.items():
            found[column] = sum(weights.get(key, 0.0) * amount for key, amount in price.items())
        return found

    @cached_property
    def constraints(self) -> LinearConstraints:
        return LinearConstraints.sparse(self._entries, self._low, self._high, len(self._low))

    def solution(self, found: np.ndarray) -> Solution:
        chosen = {
            node.name: node.alternatives[int(np.argmax(found[self._columns[node.name]]))]
            for node in self._problem.nodes
        }
        totals: dict[str, float] = {}
        for column, price in self._prices.items():
            for key, value in price.items():
                totals[key] = totals.get(key, 0.0) + value * float(found[column])
        return Solution(chosen=chosen, totals=totals)
