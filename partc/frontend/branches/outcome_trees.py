"""Branches that decide which other branches are reached, or whose outcomes change state: every path is traced.

    if loss.isnan():                    t_1 = …                        both outcomes of t_2 are within one of t_1
        loss = a                        if t_1: y = a
    elif count == 0:             ->     else:   t_2 = …
        loss = b                                if t_2: y_1 = b
    else:                                       else:   y_2 = c
        loss = c                                y_3 = where(t_2, y_1, y_2)
                                        y_4 = where(t_1, y, y_3)

The program runs the operations of all paths. Operations that two outcomes have in common run once: those at the
beginning, and those at the end, on the chosen values. The memory that an outcome changes has its old values again
before the other outcome runs, and has the values of the chosen one behind both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from partc.errors import PartcError, Source, untraced
from partc.frontend.branches.changes import before_changes, changed_by, changed_outside, changed_tensor
from partc.frontend.branches.outcomes import Outcomes, on_path
from partc.frontend.branches.random_branches import Branching, RandomBranch, alike_at_end, behind_functions
from partc.frontend.trace_errors import RaisedError
from partc.ir.gradients import reached
from partc.ir.naming import unique
from partc.ir.operations import memory_owner
from partc.ir.program import Arg, Graph, Op, Ref, TensorType, Value

MOST_PATHS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    """The trace of one path. `names` has the joined program's names of its values, as far as these are joined."""

    traced: Branching
    outcomes: Outcomes
    names: dict[str, str] = field(default_factory=dict)

    @property
    def paths(self) -> tuple[_Path, ...]:
        return (self,)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fork:
    """The paths behind a branch, by its outcome; `place` is its place among the branches of each of them."""

    branch: RandomBranch
    place: int
    usual: _Path | _Fork  # the branch's outcome in the trace in which all numbers are at least their limit
    other: _Path | _Fork

    @property
    def paths(self) -> tuple[_Path, ...]:
        return (*self.usual.paths, *self.other.paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedPaths:
    """The joined program: its graph, its chosen values, the traces of its paths, and the lines of branches with an
    outcome for which forward raises.
    """

    graph: Graph
    choices: frozenset[str]
    paths: tuple[Outcomes, ...]
    assumed: tuple[Source, ...]


def join_paths(trace: Callable[[Outcomes], Branching], *, complete: bool) -> JoinedPaths:
    """Trace every path, and join the traces. Unless they have to be `complete`, outcomes behind which forward raises
    are left out.

    Raises PartcError P0206 if there are too many paths, or their results differ in type.
    """
    explored = _Explored(trace, complete)
    tree = explored.from_here(())
    joining = _Joining(tree.paths)
    ops, outputs = joining.behind(tree, None)
    usual = tree.paths[0].traced.graph
    return JoinedPaths(
        graph=replace(usual, ops=(*joining.constants.values(), *ops), outputs=outputs),
        choices=frozenset(joining.choices),
        paths=tuple(path.outcomes for path in tree.paths),
        assumed=tuple(explored.assumed),
    )


@dataclass(slots=True)
class _Explored:
    """The traces of paths so far."""

    trace: Callable[[Outcomes], Branching]
    complete: bool
    count: int = 0
    assumed: dict[Source, None] = field(default_factory=dict)

    def from_here(self, decided: tuple[bool, ...]) -> _Path | _Fork:
        """All paths whose first tests have the outcomes `decided`: True if the tested number is below its limit.

        Raises RaisedError if forward raises on each of them.
        """
        self.count += 1
        given = on_path(decided)
        found: _Path | _Fork | None = None
        raised: RaisedError | None = None
        try:
            traced = self.trace(given)
        except RaisedError as error:  # with another outcome of a further test, forward may not raise
            raised, numbers = error, [*range(error.tests)]
        else:
            found, numbers = _Path(traced=traced, outcomes=given), sorted({each.number for each in traced.branches})
        for number in reversed([number for number in numbers if number >= len(decided)]):
            if self.count == MOST_PATHS:
                raise untraced(
                    f"its branches on values have over {MOST_PATHS} paths",
                    help="choose between results with torch.where",
                    source=_branch(found, number)[1].source if found is not None else None,
                )
            try:
                other = self.from_here((*decided, *(False,) * (number - len(decided)), True))
            except RaisedError as error:
                if found is not None:
                    self._assume(_branch(found, number)[1], error)
                continue
            if found is None:
                assert raised is not None
                self._assume(_branch(other, number)[1], raised)
                found = other
            else:
                place, branch = _branch(found, number)
                found = _Fork(branch=branch, place=place, usual=found, other=other)
        if found is None:
            assert raised is not None
            raise raised
        return found

    def _assume(self, branch: RandomBranch, raised: RaisedError) -> None:
        """Note a branch of which forward raises on each path behind one outcome, as it does eagerly.

        Raises P0206 instead if a step may have this outcome: if the branch tests a random number, a flag or a counter,
        if the trace itself may have caused the error, or if no outcome may be left out.
        """
        if self.complete or raised.doubtful or not branch.of_values:
            raise PartcError(raised.code, raised.cause, help=raised.help, source=raised.source) from raised
        if branch.source is not None:
            self.assumed[branch.source] = None


def _branch(tree: _Path | _Fork, number: int) -> tuple[int, RandomBranch]:
    """The first branch on a test, and its place among the branches of each path."""
    branches = tree.paths[0].traced.branches
    return next((place, branch) for place, branch in enumerate(branches) if branch.number == number)


Outcome = tuple[list[Op], tuple[str, ...]]  # the operations of an outcome, and the outputs of the program


class _Joining:
    """The joined program so far."""

    def __init__(self, paths: Sequence[_Path]) -> None:
        self.states = {name: type for path in paths for name, type in path.traced.states.items()}
        self.types: dict[str, TensorType] = dict(self.states)
        for value in paths[0].traced.graph.inputs:
            self.types[value.name] = value.type
        self.taken = {*self.types}
        self.choices: set[str] = set()
        self.constants: dict[object, Op] = {}
        self.makers: dict[str, Op] = {}
        self._trained: set[str] = set()  # values that a gradient reaches
        self._own_constants = {
            id(path): {op.result.name: op for op in path.traced.graph.ops if op.name == "constant"} for path in paths
        }

    def behind(self, tree: _Path | _Fork, place: int | None) -> Outcome:
        """The operations of a tree's paths behind the branch at `place`."""
        first = tree.paths[0]
        ops = self._shared(tree.paths, place, tree.place if isinstance(tree, _Fork) else None)
        if isinstance(tree, _Path):
            return ops, tuple(self._named(first, name) for name in first.traced.graph.outputs)
        usual, other = (self.behind(each, tree.place) for each in (tree.usual, tree.other))
        test = self._named(first, tree.branch.test)
        joined, outputs = _JoinedOutcomes(self, replace(tree.branch, test=test), usual, other).join()
        return [*ops, *joined], outputs

    def _shared(self, paths: Sequence[_Path], start: int | None, stop: int | None) -> list[Op]:
        """The operations between two branches, which are the same in all of these paths."""
        parts = [_between(path.traced, start, stop) for path in paths]
        if any([op.form for op in part] != [op.form for op in parts[0]] for part in parts):
            source = paths[0].traced.branches[0].source
            raise untraced(
                "two traces differ before the first branch that tells them apart",
                help="choose between results with torch.where",
                source=source,
            )
        ops = []
        for same in zip(*parts, strict=True):
            op = same[0].renamed({name: self._named(paths[0], name) for name in same[0].refs()})
            op = replace(op, results=tuple(replace(x, name=unique(x.name, self.taken)) for x in op.results))
            for path, own in zip(paths, same, strict=True):
                path.names.update((x.name, made.name) for x, made in zip(own.results, op.results, strict=True))
            ops.append(self.added(op))
        for path in paths:
            live = reached(path.traced.graph, path.traced.states)
            self._trained.update(path.names[name] for name in live if name in path.names)
        return ops

    def added(self, op: Op) -> Op:
        for value in op.results:
            self.types[value.name] = value.type
            self.makers[value.name] = op
            if value.type.differentiable and not self._trained.isdisjoint(op.refs()):
                self._trained.add(value.name)
        return op

    def _named(self, path: _Path, name: str) -> str:
        """The joined program's name of a value of a path. A constant of a path becomes one of the program."""
        if name in path.names:
            return path.names[name]
        op = self._own_constants[id(path)].get(name)
        if op is None:
            return name
        key = op.form, name
        if key not in self.constants:
            value = replace(op.result, name=unique(name, self.taken))
            self.constants[key] = self.added(replace(op, results=(value,)))
        path.names[name] = self.constants[key].result.name
        return path.names[name]

    def owner(self, name: str) -> str:
        """The value in whose memory another one may be."""
        return memory_owner(name, self.makers)

    def is_trained(self, name: str) -> bool:
        return name in self._trained or name in self.states


class _JoinedOutcomes:
    """The two outcomes of a branch, in one list of operations."""

    def __init__(self, program: _Joining, branch: RandomBranch, usual: Outcome, other: Outcome) -> None:
        self._program, self._branch = program, branch
        self._usual, self._other = usual, other
        self._ops: list[Op] = []

    def join(self) -> Outcome:
        self._share_beginning()
        (usual, usual_outputs), (other, other_outputs) = self._usual, self._other
        shared = alike_at_end(usual, other, lambda one, two: one.form == two.form)
        while isinstance(found := self._pairs(shared), int):
            shared = behind_functions(usual, shared - found - 1)
        bodies = usual[: len(usual) - shared], other[: len(other) - shared]
        changed = [dict.fromkeys(changed_outside(body)) for body in bodies]
        every = changed[0] | changed[1]
        before = {name: self._op("clone", self._memory(name), f"{name}_before", self._type(name)) for name in every}
        self._run(bodies[0], every, usual=True)
        after = {name: self._op("clone", self._memory(name), f"{name}_after", self._type(name)) for name in changed[0]}
        for name in changed[0]:
            self._write(name, before[name])
        self._run(bodies[1], every, usual=False)
        for name in every:
            self._write(name, self._choice(after.get(name, before[name]), self._memory(name)))
        names = {pair: self._choice(*pair) if name is None else name for pair, name in found.items()}
        for pair in zip(usual[len(usual) - shared :], other[len(other) - shared :], strict=True):
            read = [names[refs] for refs in zip(*(op.refs() for op in pair), strict=True)]
            self._ops.append(self._program.added(pair[0].reading(read)))
        return self._ops, tuple(names[pair] for pair in zip(usual_outputs, other_outputs, strict=True))

    def _share_beginning(self) -> None:
        """Run the operations once with which both outcomes begin, up to a result in memory that changes later."""
        (usual, usual_outputs), (other, other_outputs) = self._usual, self._other
        names: dict[str, str] = {}  # value of the other outcome -> of the usual one
        count = 0
        for one, two in zip(usual, other, strict=False):
            if one.form != two.form or [*one.refs()] != [names.get(name, name) for name in two.refs()]:
                break
            names.update((b.name, a.name) for a, b in zip(one.results, two.results, strict=True))
            count += 1
        count = before_changes(count, [(ops, self._program.owner) for ops in (usual, other)])
        behind = {value.name for op in other[count:] for value in op.results}
        names = {its: mine for its, mine in names.items() if its not in behind}
        self._ops.extend(usual[:count])
        self._usual = usual[count:], usual_outputs
        renamed = [self._program.added(op.with_operands(names)) for op in other[count:]]
        self._other = renamed, tuple(names.get(name, name) for name in other_outputs)

    def _pairs(self, shared: int) -> dict[tuple[str, str], str | None] | int:
        """The operands of the last `shared` operations and the outputs, by their names in the two outcomes, each with
        the name of the value that is both, or None for a choice; or the place of an operation that the outcomes cannot
        share.
        """
        usual, other = ((ops[len(ops) - shared :], outputs) for ops, outputs in (self._usual, self._other))
        same: dict[str, str] = {}  # value of the other outcome -> of the usual one
        own = {value.name for op in (*usual[0], *other[0]) for value in op.results}
        found: dict[tuple[str, str], str | None] = {}
        changes: list[tuple[int, str]] = []  # the changing operations, with the changed values

        def pair(one: str, two: str) -> bool:
            name: str | None = one
            if one != two and same.get(two) != one:
                name = changed_tensor(one, self._program.makers)
                if name != changed_tensor(two, self._program.makers):
                    if one in own or two in own or self._type(one) != self._type(two):
                        return False
                    name = None
            found[one, two] = name
            return True

        for place, (one, two) in enumerate(zip(usual[0], other[0], strict=True)):
            if not all(pair(*names) for names in zip(one.refs(), two.refs(), strict=True)):
                return place
            same.update((b.name, a.name) for a, b in zip(one.results, two.results, strict=True))
            changes.extend((place, name) for name in changed_by(one))
        if len(usual[1]) != len(other[1]):
            raise self._refusal("it decides which results are the same")
        for names in zip(usual[1], other[1], strict=True):
            if not pair(*names):
                raise self._refusal(f"its outcomes are {self._type(names[0])} and {self._type(names[1])}")
        # A choice is a copy: a later change would be missing in the chosen value, or in the copy.
        chosen = {self._program.owner(name) for names, name in found.items() if name is None for name in names}
        return next((place for place, name in reversed(changes) if self._program.owner(name) in chosen), found)

    def _run(self, ops: Sequence[Op], changed: Collection[str], *, usual: bool) -> None:
        """Add the operations of one outcome. Gradients pass to values outside only where it is taken: elsewhere they
        may be infinite.
        """
        made = {value.name for op in ops for value in op.results}
        owners = {*map(self._program.owner, changed)}  # a copy of their memory would keep its old values
        gates: dict[str, str] = {}
        for name in dict.fromkeys(name for op in ops for name in op.refs()):
            type = self._type(name)
            if name in made or not type.differentiable or not self._program.is_trained(name):
                continue
            if self._program.owner(name) in owners:
                continue
            still = self._op("detach", name, f"{name}_still", type)
            gates[name] = self._where(*((name, still) if usual else (still, name)), f"{name}_gated")
        self._ops.extend(self._program.added(op.with_operands(gates)) for op in ops)

    def _memory(self, name: str) -> str:
        """A value whose memory a branch changes; for a parameter or buffer, its detached value."""
        return self._op("detach", name, f"{name}_data", self._type(name)) if name in self._program.states else name

    def _write(self, name: str, values: str) -> None:
        written = Value(name=unique(f"{name}_written", self._program.taken), type=self._type(name))
        self._add("copy_", (Ref(self._memory(name)), Ref(values)), written)

    def _choice(self, usual: str, other: str) -> str:
        chosen = self._where(usual, other, f"{usual}_chosen")
        self._program.choices.add(chosen)
        return chosen

    def _where(self, usual: str, other: str, stem: str) -> str:
        made = Value(name=unique(stem, self._program.taken), type=self._type(usual))
        operands = (usual, other) if self._branch.outcome else (other, usual)
        return self._add("where", (Ref(self._branch.test), *map(Ref, operands)), made)

    def _op(self, kind: str, operand: str, stem: str, type: TensorType) -> str:
        return self._add(kind, (Ref(operand),), Value(name=unique(stem, self._program.taken), type=type))

    def _add(self, kind: str, args: tuple[Arg, ...], made: Value) -> str:
        op = Op(name=kind, args=args, results=(made,), source=self._branch.source)
        self._ops.append(self._program.added(op))
        return made.name

    def _type(self, name: str) -> TensorType:
        return self._program.types[name]

    def _refusal(self, cause: str) -> PartcError:
        return untraced(
            f"a branch depends on values, and {cause}",
            help="choose between two results with torch.where",
            source=self._branch.source,
        )


def _between(traced: Branching, start: int | None, stop: int | None) -> list[Op]:
    """The operations behind one branch, up to another, without constants."""
    first = 0 if start is None else traced.branches[start].position
    last = len(traced.graph.ops) if stop is None else traced.branches[stop].position
    return [op for op in traced.graph.ops[first:last] if op.name != "constant"]
