"""The traces of a model for both outcomes of its branches, joined to one program.

Branches are those on random numbers and, with a permission, on values of tensors. A test whether a mask selects
anything is such a branch if its body does more than to write the selected rows; otherwise traces in which masks select
nothing only prove that the program needs no test.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from partc.errors import PartcError, Source
from partc.frontend.branches.outcome_trees import JoinedPaths, join_paths
from partc.frontend.branches.outcomes import (
    ABOVE,
    EMPTY,
    HALF_THE_ROWS,
    ONE_ROW,
    PARTLY_EMPTY,
    Outcomes,
    told_apart,
)
from partc.frontend.branches.random_branches import Branching, Joined, RandomBranch, join_outcomes
from partc.frontend.capture import Captured
from partc.frontend.repeats.marks import Excluded
from partc.frontend.repeats.module_rows import UnequalError, WholeTrace, container_of
from partc.frontend.selections.conditional_gradients import conditions
from partc.frontend.selections.empty_selections import ChangedError, check_empty, without_tests
from partc.frontend.selections.reached_parameters import Reached, sometimes_reached, with_counts
from partc.frontend.selections.row_counts import check_numbers
from partc.frontend.trace_errors import RaisedError
from partc.ir.program import BY_PATH, Graph, Program, is_change
from partc.settings import PASSES, tell

MOST_JOINED = 4  # the most lines on which tests of masks are branches

OneTrace = tuple[Captured, Program, tuple[RandomBranch, ...]]
# A trace with some groups of equal modules excluded, of these outcomes, in which tests on these lines are branches.
Trace = Callable[[Excluded | None, Outcomes, Collection[str]], OneTrace]


def trace_every_outcome(trace: Trace, excluded: Excluded | None, *, complete: bool = False) -> tuple[Captured, Program]:
    """Trace a model, and both outcomes of its branches. If the traces have to be `complete`, an outcome behind which
    forward raises is not left out. Raises PartcError.
    """
    joined: set[str] = set()
    refusal: ChangedError | None = None
    while True:
        traces = _Traces(lambda outcomes: trace(excluded, outcomes, joined), complete)
        try:
            return _joined_traces(traces)
        except ChangedError as error:
            if len(joined) == MOST_JOINED or error.line in {"", *joined}:
                raise (refusal or error) from error
            refusal = refusal or error
            joined.add(error.line)
        except PartcError as error:
            if refusal is None:
                raise
            raise refusal from error


@dataclass(slots=True)
class _Traces:
    """The traces of a model by their outcomes, each made once."""

    anew: Callable[[Outcomes], OneTrace]
    complete: bool
    first: Outcomes = ABOVE
    paths: JoinedPaths | None = None  # the traces of every path, if the first one raises
    made: dict[Outcomes, tuple[Captured, Program]] = field(default_factory=dict)
    _branching: dict[Outcomes, Branching] = field(default_factory=dict)

    def start(self) -> Branching:
        """The first trace. If forward raises in it, but not with another outcome of a test, every path is traced."""
        try:
            return self.of(self.first)
        except RaisedError as error:
            if not error.tests:
                raise
        self.paths = self.every_path()
        self.first = self.paths.paths[0]
        return self.of(self.first)

    def every_path(self) -> JoinedPaths:
        return join_paths(self.of, complete=self.complete)

    def of(self, outcomes: Outcomes) -> Branching:
        if outcomes not in self._branching:
            tried = frozenset(next(iter(self.made.values()))[0].left) if self.made else frozenset()
            captured, program, branches = self.anew(replace(outcomes, tried=tried))
            if branches and program.repetitions:
                raise UnequalError(container_of(program.repetitions[0]))
            (region,) = program.regions
            states = {value.name: value.type for value in region.params}
            self.made[outcomes] = captured, program
            self._branching[outcomes] = Branching(graph=region.forward, states=states, branches=branches)
        return self._branching[outcomes]

    def where_some_select_nothing(self, outcomes: Outcomes) -> Graph:
        """The graph of a trace in which some masks select nothing. Raises WholeTrace if it passes other tests."""
        graph = self.of(outcomes).graph
        full, partly = self.made[self.first][0].passed, self.made[outcomes][0].passed
        if any(not values <= full.get(path, values) for path, values in partly.items()):
            raise WholeTrace  # a whole trace numbers the tests of all calls differently
        return graph


def _joined_traces(traces: _Traces) -> tuple[Captured, Program]:
    """The program that chooses between the outcomes at run time, with the facts about its capture."""
    found = traces.start()
    reached = _compared_selections(traces, found)
    captured, program = traces.made[traces.first]
    graph = found.graph
    if found.branches:
        both, program, assumed = _joined(traces, found)
        _check_python_values(traces, found.branches)
        captured, graph = traces.made[both.outcomes][0], both.graph
        captured = replace(captured, assumed=(*captured.assumed, *assumed))
        requiring = {name for name, x in captured.model.named_parameters(remove_duplicate=False) if x.requires_grad}
        reached = reached.joined(graph, conditions(graph, both.choices, _own_names(program, requiring)))
        program = _with_trained(program, reached.conditions)
        marked = (replace(op, attrs=(*op.attrs, (BY_PATH, True))) if is_change(op) else op for op in graph.ops)
        graph = replace(graph, ops=tuple(marked))
    tests = traces.made[traces.first][0].tests
    source = next(iter(tests), found.branches[0].source if found.branches else None)
    program = with_counts(replace(program, regions=(replace(program.regions[0], forward=graph),)), reached)
    skipped = _skipped(program, [one for _, one in traces.made.values()], source)
    captured = replace(captured, assumed=(*captured.assumed, *skipped))
    (region,) = program.regions
    return captured, replace(program, regions=(replace(region, forward=without_tests(region.forward)),))


def _compared_selections(traces: _Traces, found: Branching) -> Reached:
    """The parameters that only some steps reach, by traces with other numbers of selected rows.

    Raises PartcError P0206 and ChangedError if the program of the first trace is wrong for these numbers.
    """
    captured, program = traces.made[traces.first]
    reached, tests = Reached(), captured.tests
    if tests:
        try:
            empty = traces.where_some_select_nothing(EMPTY)
        except RaisedError as error:
            changed = ChangedError("P0206", error.cause, help=error.help, source=error.source)
            changed.line = str(tests[0])
            raise changed from error
        tested = check_empty(found.graph, empty, found.states, tests[0])
        reached = sometimes_reached(found.graph, empty, _trained(program), tested)
    for outcomes in (ONE_ROW, HALF_THE_ROWS) if captured.numbers else ():
        try:
            with _unlogged():
                other = traces.of(outcomes).graph
        except PartcError:
            other = None
        check_numbers(found.graph, other, captured.numbers[0])
    if tests:  # last, because earlier checks most often end in another trace of the whole model
        for outcomes in PARTLY_EMPTY[: 2 * told_apart(captured.most_tests, tests)]:
            try:
                with _unlogged():
                    partly = traces.where_some_select_nothing(outcomes)
            except RaisedError:
                continue  # if these outcomes occur at all, they also raise eagerly
            check_empty(found.graph, partly, found.states, tests[0])
    return reached


def _joined(traces: _Traces, found: Branching) -> tuple[Joined, Program, tuple[str, ...]]:
    """The joined outcomes of all branches, a program with all parameters that they read, and assumptions. If the
    outcomes differ in more than left-out operations, each path is traced.
    """
    if traces.paths is not None:
        return _of_paths(traces, traces.paths)
    try:
        both = join_outcomes(found, traces.of)
        return both, traces.made[both.outcomes][1], ()
    except PartcError as error:
        if error.code != "P0206":
            raise
        refusal = error
    tell(PASSES, "every path through the branches is traced")
    try:
        with _unlogged():
            paths = traces.every_path()
    except PartcError:
        raise refusal from None
    return _of_paths(traces, paths)


def _of_paths(traces: _Traces, paths: JoinedPaths) -> tuple[Joined, Program, tuple[str, ...]]:
    """The results of `_joined`, by the traces of every path."""
    both = Joined(graph=paths.graph, outcomes=paths.paths[0], choices=paths.choices)
    assumed = tuple(
        f"Packages never take the outcome of a test after which forward raises ({x})." for x in paths.assumed
    )
    return both, _with_all_parameters([traces.made[path][1] for path in paths.paths]), assumed


def _check_python_values(traces: _Traces, branches: Sequence[RandomBranch]) -> None:
    """Raise PartcError P0225 if the outcomes of a branch on values of tensors leave different Python values."""
    first = traces.made[traces.first][0]
    if all(one.left == first.left for one, _ in traces.made.values()):
        return
    for branch in branches:
        if branch.of_values:
            raise PartcError(
                "P0225",
                "a branch on the values of a tensor changes Python values, of which a package has only one",
                help="keep state in a registered buffer, and choose between its values with torch.where",
                source=branch.source,
            )


def _with_all_parameters(programs: Sequence[Program]) -> Program:
    """The first of several programs, with the parameters and branches of all; what one of them trains is trained."""
    first = programs[0]
    params = {
        value.name: (value, name)
        for program in programs
        for value, name in zip(program.regions[0].params, program.calls[0].params, strict=True)
    }
    values, names = zip(*params.values(), strict=True) if params else ((), ())
    trained = {parameter.name for program in programs for parameter in program.parameters if parameter.trainable}
    return replace(
        first,
        branches=tuple(dict.fromkeys(place for program in programs for place in program.branches)),
        parameters=tuple(replace(item, trainable=item.name in trained) for item in first.parameters),
        regions=(replace(first.regions[0], params=values),),
        calls=(replace(first.calls[0], params=names),),
    )


def _trained(program: Program) -> list[str]:
    """The trained parameters of the traced region, by its own names."""
    return _own_names(program, {item.name for item in program.parameters if item.trainable})


def _own_names(program: Program, names: Container[str]) -> list[str]:
    """The names of parameters within the traced region."""
    (call,), (region,) = program.calls, program.regions
    return [value.name for value, name in zip(region.params, call.params, strict=True) if name in names]


def _with_trained(program: Program, own_names: Container[str]) -> Program:
    """The program that also trains these parameters: in this trace, a later layer that reads none of them runs."""
    (call,), (region,) = program.calls, program.regions
    more = {name for value, name in zip(region.params, call.params, strict=True) if value.name in own_names}
    parameters = (replace(item, trainable=item.trainable or item.name in more) for item in program.parameters)
    return replace(program, parameters=tuple(parameters))


def _skipped(program: Program, others: Sequence[Program], source: Source | None) -> Iterator[str]:
    """A warning about trained parameters that some outcomes of branches do not read, if a step does not count the
    reads.
    """
    always: set[str] = set.intersection(*map(_read_parameters, others))
    sometimes = _read_parameters(program) - always - {name for name, _ in program.reached}
    skipped = [item.name for item in program.parameters if item.trainable and item.name in sometimes]
    if skipped:
        more = f" and {len(skipped) - 1} more" if len(skipped) > 1 else ""
        yield (
            f"Packages update {skipped[0]}{more} with a gradient of zero in a step in which no example reaches them "
            f"({source}); eagerly they have none, and the optimizer leaves their moments and weight decay out."
        )


def _read_parameters(program: Program) -> set[str]:
    """The names of the parameters that operations of the traced region read."""
    (call,), (region,) = program.calls, program.regions
    read = {name for op in region.forward.ops for name in op.refs()}
    return {name for name, value in zip(call.params, region.params, strict=True) if value.name in read}


@contextmanager
def _unlogged() -> Iterator[None]:
    """A context without torch's log messages about failing operations, such as on sizes that do not fit."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
