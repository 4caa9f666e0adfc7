"""Branches on random numbers, such as dropped layers: both outcomes are traced, and the number chooses at run time.

    for layer in layers:                          u = rand(())
        if torch.rand(()) < 0.1:                  t = lt(u, 0.1)
            continue                     ->       y = layer(x)
        x = layer(x)                              x_1 = where(t, x, y)

The program has the operations of the longer outcome. Traces in which some branches have the other outcome lack some of
them, and show which values replace the missing ones in later operations: here x for y. A buffer that a branch changes
keeps its old value where the branch is not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice, pairwise, takewhile

from partc.errors import PartcError, Source, untraced
from partc.frontend.branches.changes import before_changes, changed_by, changed_outside, changed_tensor
from partc.frontend.branches.outcomes import (
    ABOVE,
    BELOW,
    FIRST_BELOW,
    PARTLY_BELOW,
    SECOND_BELOW,
    Outcomes,
    one_unlike,
    told_apart,
)
from partc.ir.gradients import reached
from partc.ir.naming import unique
from partc.ir.operations import RANDOM, memory_owner, shares_memory
from partc.ir.program import Arg, Graph, Op, Ref, TensorType, Value, is_change


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomBranch:
    """A branch on a test of a random number: the test's value and number, its outcome in this trace, and the number of
    operations before it.

    Branches on one comparison of one random number have one test, and so the same outcome. `of_values` says whether
    the test reads other values than random numbers and flags.
    """

    test: str
    number: int
    outcome: bool
    of_values: bool
    position: int
    source: Source | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Branching:
    """The graph of one trace, its branches in order, and the types of the parameters and buffers that it reads."""

    graph: Graph
    states: Mapping[str, TensorType]
    branches: tuple[RandomBranch, ...]

    def with_later(self, place: int, count: int) -> Branching:
        """The trace with a branch behind `count` of the operations that follow it."""
        branch = self.branches[place]
        positions = (at for at, op in enumerate(self.graph.ops) if at >= branch.position and op.name != "constant")
        position = next(islice(positions, count - 1, None)) + 1 if count else branch.position
        before, behind = self.branches[:place], self.branches[place + 1 :]
        return replace(self, branches=(*before, replace(branch, position=position), *behind))

    def parts(self) -> Iterator[tuple[Op, ...]]:
        """The operations before the first branch, then those behind each branch."""
        ends = (0, *(branch.position for branch in self.branches), len(self.graph.ops))
        for start, end in pairwise(ends):
            yield tuple(op for op in self.graph.ops[start:end] if op.name != "constant")


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The graph that chooses between the outcomes of every branch, and the outcomes of its operations."""

    graph: Graph
    outcomes: Outcomes
    choices: frozenset[str] = frozenset()  # the values that are chosen


def join_outcomes(found: Branching, trace: Callable[[Outcomes], Branching]) -> Joined:
    """Join the traces of all outcomes.

    `found` is the trace of ABOVE. Raises PartcError P0206 if the outcomes differ in more than left-out operations.
    """
    first = trace(FIRST_BELOW)
    if len(first.graph.ops) <= len(found.graph.ops):
        return _joined(found, first, ABOVE, trace)
    if not any(branch.of_values for branch in found.branches):
        return _joined(trace(BELOW), first, BELOW, trace)
    try:
        return _joined(found, first, ABOVE, trace)
    except PartcError as error:
        if error.code != "P0206":
            raise
        refusal = error
    try:  # values that no operation of this trace tells apart, such as a sum to which no branch adds
        return _joined(trace(BELOW), first, BELOW, trace)
    except PartcError:
        raise refusal from None


def _joined(kept: Branching, first: Branching, longer: Outcomes, trace: Callable[[Outcomes], Branching]) -> Joined:
    """The traces of all outcomes, joined to the trace `kept` of the outcomes `longer`: ABOVE or BELOW. `first` is the
    trace of FIRST_BELOW.
    """
    others: list[Outcomes] = [FIRST_BELOW]
    tests = {branch.number: branch.source for branch in kept.branches}
    if any(branch.of_values for branch in kept.branches) and len(tests) > 2:
        others = [*(one_unlike(longer, number) for number in range(len(tests))), *others]
    if len(tests) > 1:
        others.append(SECOND_BELOW)
    elif longer is BELOW:
        others = [ABOVE]
    bits = told_apart(len(tests), tests.values())
    others.extend(PARTLY_BELOW[: max(0, 2 * bits - 2)])
    known: Mapping[Outcomes, Branching] = {longer: kept, FIRST_BELOW: first}
    _Join(kept).check_branches(first)
    kept, *traces = _with_late_branches(
        [kept, *(known[outcomes] if outcomes in known else trace(outcomes) for outcomes in others)]
    )
    merged = _Join(kept)
    for outcomes, other in zip(others, traces, strict=True):
        shortened = [(each.number in outcomes.below) != (each.number in longer.below) for each in kept.branches]
        merged.compare(other, shortened)
    joined = _JoinedGraph(merged)
    return Joined(graph=joined.written(), outcomes=longer, choices=frozenset(joined.choices))


def _with_late_branches(traces: Sequence[Branching]) -> list[Branching]:
    """The traces with each branch on a flag or counter behind the operations that all traces have in common after it.

    Code may read a flag long before the first difference, which would repeat all that lies between in both outcomes.
    """
    found = list(traces)
    if len({len(each.branches) for each in found}) > 1:
        return found
    drawn = _drawn(found[0])
    for place, branch in enumerate(found[0].branches):
        if not branch.of_values and branch.test not in drawn:
            shared = _common(found, place)
            found = [each.with_later(place, shared) for each in found]
    return found


def _common(traces: Sequence[Branching], place: int) -> int:
    """The number of equal operations behind a branch in all traces, up to a result in memory that changes later."""
    parts = [[*each.parts()][place + 1 :] for each in traces]
    ops = zip(*(part[0] for part in parts), strict=False)
    equal = sum(1 for _ in takewhile(lambda each: all(op == each[0] for op in each), ops))
    makers = [each.graph.makers() for each in traces]
    bodies = ([*chain(*part)] for part in parts)
    return before_changes(
        equal, [(ops, partial(memory_owner, made=known)) for ops, known in zip(bodies, makers, strict=True)]
    )


def _drawn(traced: Branching) -> set[str]:
    """The values that depend on random numbers."""
    found: set[str] = set()
    for op in traced.graph.ops:
        if op.name in RANDOM or not found.isdisjoint(op.refs()):
            found.update(value.name for value in op.results)
    return found


@dataclass(slots=True)
class _Join:
    """The values of the longer outcome, each with its replacement where its branch goes the other way.

    `otherwise` has the operations that only the other outcome has.
    """

    kept: Branching
    otherwise: dict[int, tuple[Op, ...]] = field(default_factory=dict)  # by branch
    made_otherwise: dict[str, int] = field(default_factory=dict)  # the branch of each value of these operations
    constants: list[Op] = field(default_factory=list)  # of other outcomes
    replaced: dict[int, dict[str, str]] = field(default_factory=dict)  # by branch
    places: dict[str, tuple[int, str]] = field(default_factory=dict)  # replaced value -> branch, replacement
    left_out: dict[int, int] = field(default_factory=dict)  # the number of operations behind each branch
    makers: Mapping[str, Op] = field(init=False)
    taken: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.makers = self.kept.graph.makers()
        self.taken = {*self.kept.graph.definitions(), *self.kept.states}

    def check_branches(self, other: Branching) -> None:
        if len(other.branches) != len(self.kept.branches):
            raise self.refusal(0, "it decides whether another branch is reached")

    def compare(self, other: Branching, shortened: Sequence[bool]) -> None:
        self.check_branches(other)
        constants = _constants(self.kept.graph), _constants(other.graph)
        same: dict[str, str] = {}  # value of the other trace -> value of the kept one
        missing: dict[str, int] = {}
        for place, (mine, its) in enumerate(zip(self.kept.parts(), other.parts(), strict=True)):
            branch = place - 1
            count, others = 0, 0
            if place and shortened[branch]:
                alike = alike_at_end(mine, its, _comparison(mine, same, {*missing, *constants[0]}))
                count, others = len(mine) - alike, len(its) - alike
                self.left_out[branch] = count
                self.replaced.setdefault(branch, {})
            missing.update((value.name, branch) for op in mine[:count] for value in op.results)
            if others:
                self._add_otherwise(its[:others], branch, shortened, same, missing, constants[1])
            for one, two in zip(mine[count:], its[others:], strict=False):
                self._pair(one, two, branch, same, missing, constants)
            if len(mine) - count != len(its) - others:
                raise self.refusal(max(branch, 0), "it changes more than one place")
        for wanted, given in zip(self.kept.graph.outputs, other.graph.outputs, strict=True):
            last = len(self.kept.branches) - 1
            if given in constants[1] and wanted in missing:
                self._import(given, same, constants[1])
            self._match(wanted, given, last, same, missing, "it decides which value is the loss")

    def _pair(
        self,
        one: Op,
        two: Op,
        branch: int,
        same: dict[str, str],
        missing: Mapping[str, int],
        constants: tuple[Mapping[str, Op], Mapping[str, Op]],
    ) -> None:
        mine, its = list(one.refs()), list(two.refs())
        if one.form != two.form:
            raise self.refusal(max(branch, 0), f"it changes {one.name}, which runs in both cases")
        for wanted, given in zip(mine, its, strict=True):
            if wanted in constants[0] and given in constants[1]:
                if (constants[0][wanted].args, constants[0][wanted].attrs) != (
                    constants[1][given].args, constants[1][given].attrs,
                ):  # fmt: skip
                    raise self.refusal(max(branch, 0), f"it changes a constant of {one.name}")
            else:
                if given in constants[1] and wanted in missing:
                    self._import(given, same, constants[1])
                self._match(wanted, given, branch, same, missing, f"it changes the order of the operands of {one.name}")
        same.update((b.name, a.name) for a, b in zip(one.results, two.results, strict=True))

    def _import(self, name: str, same: dict[str, str], constants: Mapping[str, Op]) -> None:
        """Add a constant of another outcome."""
        if same.get(name) in self.taken:
            return
        op = constants[name]
        value = replace(op.result, name=unique(f"{name}_otherwise", self.taken))
        same[name] = value.name
        self.constants.append(replace(op, results=(value,)))

    def _add_otherwise(
        self,
        ops: Sequence[Op],
        branch: int,
        shortened: Sequence[bool],
        same: dict[str, str],
        missing: Mapping[str, int],
        constants: Mapping[str, Op],
    ) -> None:
        """Add the operations of the other outcome of a branch, under names of their own."""
        numbers = {each.number for each, other in zip(self.kept.branches, shortened, strict=True) if other}
        if branch in self.otherwise:
            known = self.otherwise[branch]
            if [op.form for op in known] != [op.form for op in ops]:
                raise self.refusal(branch, "its operations depend on another branch")
            for one, two in zip(known, ops, strict=True):
                for wanted, given in zip(one.refs(), two.refs(), strict=True):
                    if given not in constants:
                        self._match(wanted, given, branch, same, missing, "its operations depend on another branch")
                same.update((b.name, a.name) for a, b in zip(one.results, two.results, strict=True))
            return
        if len(numbers) > 1 or any(map(is_change, ops)):
            raise self.refusal(branch, "each of its outcomes has operations of its own")
        added = []
        for op in ops:
            for name in op.refs():
                if name in constants:
                    self._import(name, same, constants)
            values = tuple(replace(x, name=unique(f"{x.name}_otherwise", self.taken)) for x in op.results)
            added.append(replace(op.renamed(same), results=values))
            self.made_otherwise.update((value.name, branch) for value in values)
            same.update((x.name, value.name) for x, value in zip(op.results, values, strict=True))
        self.otherwise[branch] = tuple(added)

    def _match(
        self, wanted: str, given: str, branch: int, same: dict[str, str], missing: Mapping[str, int], otherwise: str
    ) -> None:
        """Note that a value of the other trace replaces one that it leaves out, unless both are the same."""
        instead = same.get(given, given)
        if instead == wanted:
            return
        if wanted not in missing or instead in missing:
            raise self.refusal(max(branch, 0), otherwise)
        # The last of the values that this trace leaves out, each of which replaces the one before.
        last = wanted
        while last in missing and last in self.replaced[missing[last]]:
            last = self.replaced[missing[last]][last]
        if last in missing:
            # Several branches may have one test, and a later one may make the replacement.
            place = max(missing[last], self.made_otherwise.get(instead, 0))
            if self.places.setdefault(last, (place, instead)) != (place, instead):
                raise self.refusal(missing[wanted], "one value replaces several")
            self.replaced[place][last] = instead
        elif last != instead:
            raise self.refusal(missing[wanted], "one value replaces several")

    def refusal(self, branch: int, cause: str) -> PartcError:
        of_values = self.kept.branches and self.kept.branches[branch].of_values
        tested = "the values of a tensor" if of_values else "a random number, flag or counter"
        return untraced(
            f"a branch depends on {tested}, and {cause}",
            help="choose between two results with torch.where, or let the branch leave a part of the model out",
            source=self.kept.branches[branch].source if self.kept.branches else None,
        )


class _JoinedGraph:
    """Writes the operations of the longer outcome, with choices behind those of each branch."""

    def __init__(self, join: _Join) -> None:
        self._join, self._kept = join, join.kept
        self._types = self._kept.graph.types()
        self._types |= {value.name: value.type for ops in join.otherwise.values() for op in ops for value in op.results}
        self._types |= {op.result.name: op.result.type for op in join.constants}
        self._live = reached(self._kept.graph, self._kept.states)
        self._current: dict[str, str] = {}  # value -> the choice that replaces it
        self._ops = [op for op in self._kept.graph.ops if op.name == "constant"] + join.constants
        self.choices: set[str] = set()

    def written(self) -> Graph:
        first, *parts = self._kept.parts()
        self._write(first, self._current)
        for branch, part in enumerate(parts):
            count = self._join.left_out.get(branch, 0)
            self._check_memory(branch, [*part[count:], *chain.from_iterable(parts[branch + 1 :])])
            self._write_both(branch, part[:count])
            self._write(part[count:], self._current)
        return self._kept.graph.rewritten(self._ops, self._current)

    def _write(self, ops: Iterable[Op], names: Mapping[str, str]) -> None:
        """Write operations that read values under these names."""
        self._ops.extend(op.with_operands(names) for op in ops)

    def _write_both(self, branch: int, ops: Sequence[Op]) -> None:
        """Write the operations of both outcomes of a branch (`ops` are those of this trace), then the choices."""
        others = self._join.otherwise.get(branch, ())
        changed = tuple(dict.fromkeys(changed_outside(ops)))
        gates, other_gates = dict[str, str](), dict[str, str]()
        if self._kept.branches[branch].of_values:
            owners = {*map(self._owner, changed)}  # a copy of their memory would keep its old values
            gates = self._gates(branch, ops, {name for name in self._live if self._owner(name) not in owners}, own=True)
        before = [self._op("clone", branch, (self._memory(name, branch),), f"{name}_before", name) for name in changed]
        self._write(ops, {**self._current, **gates})
        for name, kept in zip(changed, before, strict=True):
            target = self._memory(name, branch)
            stems = f"{name}_after", f"{name}_after_kept"
            after, written = (unique(stem, self._join.taken) for stem in stems)
            self._choose(branch, target, kept, after, self._type(name))
            self._add("copy_", branch, (target, Ref(after)), written, self._type(name))
        if others and self._kept.branches[branch].of_values:
            other_gates = self._gates(branch, others, self._live, own=False)
        self._write(others, {**self._current, **other_gates})
        self._write_choices(branch)

    def _gates(self, branch: int, ops: Sequence[Op], outside: Collection[str], *, own: bool) -> dict[str, str]:
        """Let gradients of a branch's operations pass to values outside only where it is taken: elsewhere they may be
        infinite. Returns the names of the gated values. `own` is whether these are the operations of the outcome in
        this trace.
        """
        test = self._kept.branches[branch]
        made = {value.name for op in ops for value in op.results}
        gates: dict[str, str] = {}
        for name in dict.fromkeys(name for op in ops for name in op.refs()):
            if name not in outside or name in made:
                continue
            given = Ref(self._current.get(name, name))
            still = self._op("detach", branch, (given,), f"{name}_still", name)
            both = (given, still) if test.outcome is own else (still, given)
            gates[name] = self._op("where", branch, (Ref(test.test), *both), f"{name}_gated", name).name
        return gates

    def _memory(self, name: str, branch: int) -> Ref:
        """The value through which a branch changes memory; for a parameter or buffer, its detached value."""
        if name in self._kept.states:
            return self._op("detach", branch, (Ref(name),), f"{name}_data", name)
        return Ref(self._current.get(name, name))

    def _write_choices(self, branch: int) -> None:
        makers = self._join.makers
        for made, instead in self._join.replaced.get(branch, {}).items():
            if changed_tensor(made, makers) == changed_tensor(instead, makers):
                self._current[made] = self._current.get(instead, instead)
                continue
            type, other = self._types[made], self._types.get(instead)
            if other is not None and type != other:
                raise self._join.refusal(branch, f"its outcomes are {type} and {other}")
            both = Ref(self._current.get(made, made)), Ref(self._current.get(instead, instead))
            chosen = unique(f"{made}_chosen", self._join.taken)
            self._choose(branch, *both, chosen, type)
            self._current[made] = chosen

    def _choose(self, branch: int, here: Ref, instead: Ref, result: str, type: TensorType) -> None:
        """Write the choice between the value of this trace's outcome and the value of the other one."""
        test = self._kept.branches[branch]
        self.choices.add(result)
        both = (here, instead) if test.outcome else (instead, here)
        self._add("where", branch, (Ref(test.test), *both), result, type)

    def _op(self, kind: str, branch: int, args: tuple[Arg, ...], stem: str, like: str) -> Ref:
        """Write an operation whose result has the type of a value."""
        made = unique(stem, self._join.taken)
        self._add(kind, branch, args, made, self._type(like))
        return Ref(made)

    def _add(self, kind: str, branch: int, args: tuple[Arg, ...], result: str, type: TensorType) -> None:
        source = self._kept.branches[branch].source
        self._ops.append(Op(name=kind, args=args, results=(Value(name=result, type=type),), source=source))

    def _type(self, name: str) -> TensorType:
        return self._types[name] if name in self._types else self._kept.states[name]

    def _owner(self, name: str) -> str:
        """The value in whose memory another one may be."""
        return memory_owner(name, self._join.makers)

    def _check_memory(self, branch: int, behind: Sequence[Op]) -> None:
        """Refuse changes in place behind a branch that only a choice, or only the chosen values, would see: a choice is
        a copy.
        """
        for made, instead in self._join.replaced.get(branch, {}).items():
            if changed_tensor(made, self._join.makers) == changed_tensor(instead, self._join.makers):
                continue
            owners = {self._owner(made), self._owner(instead)}
            shared = {made: True}  # values in the memory of the choice (True) or of a chosen value
            changed: set[bool] = set()
            for op in behind:
                for name in op.refs():
                    if name not in shared and self._owner(name) in owners:
                        shared[name] = False
                if any(name in shared and (not shared[name]) in changed for name in op.refs()):
                    raise self._join.refusal(branch, f"{op.name} reads values that change in place behind it")
                changed.update(shared[name] for name in changed_by(op) if name in shared)
                first = next(op.refs(), "")
                if first in shared and (shares_memory(op) or is_change(op)):
                    shared.update((value.name, shared[first]) for value in op.results)


def alike_at_end(mine: Sequence[Op], its: Sequence[Op], alike: Callable[[Op, Op], bool]) -> int:
    """The number of operations at the end of both lists that are alike."""
    pairs = zip(reversed(mine), reversed(its), strict=False)
    return behind_functions(mine, sum(1 for _ in takewhile(lambda pair: alike(*pair), pairs)))


def behind_functions(ops: Sequence[Op], count: int) -> int:
    """The number of operations at the end, at most `count`, that follow all functions which begin before them.

    The `own_gradient` of such a function has to read the same value as its `incoming_gradient`, not a choice.
    """
    first = len(ops) - count
    begun = {name for op in ops[:first] if op.name == "incoming_gradient" for name in op.refs()}
    ends = (place for place, op in enumerate(ops) if op.name == "own_gradient" and not begun.isdisjoint(op.refs()))
    return len(ops) - max(first, *(place + 1 for place in ends), 0)


def _comparison(mine: Sequence[Op], same: Mapping[str, str], free: Container[str]) -> Callable[[Op, Op], bool]:
    """A function that tells whether two operations are equal but for the names of values.

    Operands from before the operations `mine` are the same values, except those that are `free`.
    """
    own = {value.name for op in mine for value in op.results}

    def alike(one: Op, two: Op) -> bool:
        if one.form != two.form:
            return False
        operands = zip(one.refs(), two.refs(), strict=True)
        return all(wanted in own or wanted in free or same.get(given, given) == wanted for wanted, given in operands)

    return alike


def _constants(graph: Graph) -> dict[str, Op]:
    return {op.results[0].name: op for op in graph.ops if op.name == "constant"}
