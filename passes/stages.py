"""Assign calls to pipeline stages, and record the values that cross stages.

    call embed    = embed(ids; …) -> embed      call embed    = embed(ids; …) -> embed
    call blocks.0 = block(embed; …) -> out      call blocks.0 = block(embed; …) -> out
    call blocks.1 = block(out; …) -> out_2  ->  call blocks.1 = block(out; …) -> out_2 stage 1
    call head     = head(out_2, …) -> loss      call head     = head(out_2, …) -> loss stage 1
                                                transfer out 0 -> 1 gradient

Stages are runs of consecutive calls. They minimise the largest number of floating-point operations of a stage, or have
the user's numbers of calls. Calls that depend on inputs or constants only, and change no buffer, are repeated in every
stage that reads their results. Any other value that a later stage reads is sent there directly from the stage that
computes it. Calls that read a buffer are in the stage of the call that changes it; calls after that one read a copy
(partc.passes.outline.updates).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from partc.errors import PartcError
from partc.ir.gradients import arguments_with_gradients, gradient_inputs, input_only
from partc.ir.mesh import PIPELINE_AXIS
from partc.ir.naming import unique
from partc.ir.program import Call, Graph, Op, Phase, Program, Ref, Region, Transfer, Value
from partc.rules import flops, resolve


def stages(
    program: Program,
    *,
    places: tuple[int, ...] = (),
    stage_calls: tuple[int, ...] = (),
    held_by: Mapping[str, Sequence[int]] | None = None,
    home: int = 0,
) -> Program:
    """Set every call's stage and the program's transfers.

    `places` holds the pipeline coordinate of every stage, if there are more stages than coordinates. `stage_calls` are
    the user's numbers of calls, in place of balanced ones. `held_by` maps parameters to the stages that already hold
    them, in a program without gradients; calls are then placed with their parameters, results on the stage `home`, and
    a parameter of an earlier stage is sent. Stages of such a program may have no calls. Raises PartcError P0217 (no
    call at all), P0403 (too many stages), P0421 (numbers of calls that do not fit) and P0420 (parameters that no stage
    holds, or that cannot be sent).
    """
    count = len(places) or program.mesh.axis(PIPELINE_AXIS)
    own = () if places == tuple(range(count)) else places
    main, runs = staged_calls(program)
    names = {call.name for call in main}
    pure = frozenset(call.name for call in program.calls if call.name not in names)
    if held_by is None and not runs:
        raise PartcError(
            "P0217",
            "the loss is a constant: no operation is left that reads parameters or the batch",
            help="check the batch's sizes: the mean over no elements, for example, is not a number",
        )
    if held_by is None and count > len(runs):
        raise _too_many_stages_error(program, main, count, len(runs), "fewer stages" if own else "")
    if held_by is None:
        cut = (
            _given_cuts(program, main, runs, stage_calls, count)
            if stage_calls
            else cuts(call_work(program, main), runs, count)
        )
        stage_of = {call.name: stage for stage, (start, end) in enumerate(cut) for call in main[start:end]}
    else:
        stage_of = _stage_by_parameters(program, main, held_by, home)
    calls = _placed(program, stage_of, max(stage_of.values()) if held_by is None else home)
    program = replace(program, calls=calls)
    if held_by is not None:
        program = _SentParameters(program, held_by).sent()
    return replace(program, transfers=_transfers(program, program.calls, pure), places=own)


def _too_many_stages_error(program: Program, main: Sequence[Call], count: int, most: int, instead: str) -> PartcError:
    """The error for more stages than runs of calls, of which there are `most`; `instead` is the remedy, if not pp."""
    shared = _inseparable(program)
    buffer = max(shared, key=lambda name: len(shared[name]), default="")
    users = [call.name for call in main if call.name in shared.get(buffer, ())]
    updates = dict(program.updates)
    why = "which forward changes" if buffer in updates else "the numbers of rows that reach their parameters"
    because = f"; {users[0]} to {users[-1]} share {buffer}, {why}" if users else ""
    instead = instead or (f"pp={most} or less" if most > 1 else "pp=1")
    return PartcError(
        "P0403",
        f"{count} pipeline stages need as many calls, and there {'are' if most > 1 else 'is'} {most}",
        help=f"use {instead}; the calls are {', '.join(call.name for call in main[:8])}{because}",
        source=program.source_of(updates[buffer]) if buffer in updates else None,
    )


def staged_calls(program: Program) -> tuple[list[Call], list[tuple[int, int]]]:
    """The calls to be divided among stages, in order, and the runs of them that must not be cut.

    Calls that depend on inputs alone are repeated in every stage that reads them, unless they change a buffer: two
    stages of one rank would change it twice.
    """
    users = tuple(_inseparable(program).values())
    updates = {value for _, value in program.updates}
    changing = {call.name for call in program.calls if not updates.isdisjoint(call.results)}
    pure = input_only(program) - changing.union(*users)
    main = [call for call in program.calls if call.name not in pure]
    return main, _runs(main, users)


def call_links(program: Program, calls: Sequence[Call]) -> dict[tuple[int, int], bool]:
    """For each pair of calls, by index, of which the second reads the first: whether gradients return."""
    names = {call.name for call in calls}
    pure = frozenset(call.name for call in program.calls if call.name not in names)
    found: dict[tuple[int, int], bool] = {}
    numbered = tuple(replace(call, stage=index) for index, call in enumerate(calls))
    for each in _transfers(program, numbered, pure):
        found[each.source, each.target] = found.get((each.source, each.target), False) or each.gradient
    return found


def cuts(work: Sequence[float], runs: Sequence[tuple[int, int]], count: int) -> tuple[tuple[int, int], ...]:
    """For each stage, the index of its first call and the index after its last."""
    found = balanced_runs([sum(work[start:end]) for start, end in runs], count)
    return tuple((runs[first][0], runs[last - 1][1]) for first, last in found)


def _given_cuts(
    program: Program, calls: Sequence[Call], runs: Sequence[tuple[int, int]], numbers: Sequence[int], count: int
) -> tuple[tuple[int, int], ...]:
    """The cuts by given numbers of calls. Raises PartcError P0421."""
    ends = tuple(accumulate(numbers))
    text = ",".join(map(str, numbers))
    if len(numbers) != count or ends[-1] != len(calls):
        fits = ",".join(str(end - start) for start, end in cuts(call_work(program, calls), runs, count))
        raise PartcError(
            "P0421",
            f"--stage-calls {text} has {len(numbers)} stages and {ends[-1]} calls, but there are {count} stages and "
            f"{len(calls)} calls",
            help=f"these are balanced: {fits}; the calls are {', '.join(call.name for call in calls)}",
        )
    wrong = next(({start, end} for start, end in runs for cut in ends if start < cut < end), None)
    if wrong is not None:
        first, last = calls[min(wrong)].name, calls[max(wrong) - 1].name
        raise PartcError(
            "P0421",
            f"--stage-calls {text} puts {first} and {last} on different stages, and they share a buffer that forward "
            "changes, or counts of rows",
            help="put them on one stage",
        )
    return tuple(zip((0, *ends), ends, strict=False))


def _inseparable(program: Program) -> dict[str, frozenset[str]]:
    """The calls that must be in one stage, by the reason: for each buffer that forward changes, the calls that use it;
    for each counter of rows, the calls that use it or a parameter that it counts, if some use such a parameter alone.
    """
    buffers = {
        buffer: frozenset(call.name for call in program.calls if buffer in call.params or value in call.results)
        for buffer, value in program.updates
    }
    found = {buffer: names for buffer, names in buffers.items() if len(names) > 1}
    counters = {name: item.name for item in program.parameters for counted in item.counts for name in counted}
    stacked = {item.name for item in program.parameters if item.stacked}
    alone: dict[str, set[str]] = {}
    for call in program.calls if counters else ():
        for name in call.params:
            counter = counters.get(name.replace("*", "0") if name in stacked else name)
            if counter is not None and counter not in call.params:
                alone.setdefault(counter, set()).add(call.name)
    for counter, names in alone.items():
        found[counter] = frozenset(names).union(call.name for call in program.calls if counter in call.params)
    return found


def _runs(calls: Sequence[Call], users: Sequence[frozenset[str]]) -> list[tuple[int, int]]:
    """The smallest runs of calls that must not be cut: all users of a buffer or counter are in the same run."""
    runs = [(index, index + 1) for index in range(len(calls))]
    for names in users:
        places = [index for index, call in enumerate(calls) if call.name in names]
        inside = [run for run in runs if run[0] <= places[-1] and run[1] > places[0]]
        at = runs.index(inside[0])
        runs[at : at + len(inside)] = [(inside[0][0], inside[-1][1])]
    return runs


def _stage_by_parameters(
    program: Program, main: Sequence[Call], held_by: Mapping[str, Sequence[int]], home: int
) -> dict[str, int]:
    """The stage of each call: the first one that holds its parameters, else one that they can be sent to.

    A call comes after those whose results it reads, and returned values are computed on the stage `home`. Parameters of
    calls on inputs alone count for the calls that read the results, with which they are repeated.
    """
    placed = {call.name for call in main}
    read: dict[str, set[str]] = {}  # the parameters behind each result of a call on inputs alone
    made: dict[str, int] = {}
    found: dict[str, int] = {}
    for call in program.calls:
        params = set(call.params).union(*(read.get(name, ()) for name in call.args))
        if call.name not in placed:
            read.update(dict.fromkeys(call.results, params))
            continue
        least = max((made[name] for name in call.args if name in made), default=0)
        if not set(program.returned).isdisjoint(call.results):
            least = max(least, home)
        held = [held_by[name] for name in params if held_by.get(name)]
        common = set.intersection(*map(set, held)) if held else {least}
        sent = max(least, *map(min, held)) if held else least
        found[call.name] = min((stage for stage in common if stage >= least), default=sent)
        made.update(dict.fromkeys(call.results, found[call.name]))
    return found


class _SentParameters:
    """Lets calls read copies of the parameters that their stage does not hold; calls on a stage that does make them.

    call norm = norm(h; mean) -> out stage 1   ->   call mean = held(; mean) -> mean_held
                                                    call norm = norm_2(h, mean_held; ) -> out stage 1
    """

    def __init__(self, program: Program, held_by: Mapping[str, Sequence[int]]) -> None:
        self._program, self._held_by = program, held_by
        self._regions, self._values = {region.name: region for region in program.regions}, [*program.values]
        self._taken = {*program.value_types(), *(call.name for call in program.calls), *self._regions}
        self._changed = {value: buffer for buffer, value in program.updates}
        self._copies: dict[tuple[str, int], str] = {}  # (parameter, stage) -> its copy
        self._copying: list[Call] = []
        self._variants: dict[tuple[str, frozenset[int], Phase], str] = {}
        # The new phases of results of setup calls. A call whose operands may be gathered runs in every step; a call
        # whose operands are sent runs for every microbatch.
        self._dependent: dict[tuple[int, str], Phase] = {}

    def sent(self) -> Program:
        found = [self._reading_copies(call) for call in self._program.calls]
        calls = (*self._copying, *found)  # copies come first: a call reads a buffer's value before its change
        used = {call.region for call in calls}
        kept = tuple(region for region in self._regions.values() if region.name in used)
        return replace(self._program, regions=kept, values=tuple(self._values), calls=calls)

    def _reading_copies(self, call: Call) -> Call:
        region = self._regions[call.region]
        away = frozenset(
            at
            for at, name in enumerate(call.params)
            if self._held_by.get(name) and call.stage not in self._held_by[name]
        )
        before = region.phase == "setup"
        phases = {name: self._dependent.get((call.stage, name)) for name in call.args}
        late = [call.params[at] for at in sorted(away)] + [name for name in phases if phases[name] == "microbatch"]
        if region.phase == "step" and late:
            raise _unheld_error(late[0], call)
        if not away and not (before and (call.params or any(phases.values()))):
            return call
        phase: Phase = "microbatch" if late or not before else "step"
        self._dependent.update(((call.stage, name), phase) for name in call.results if before)
        copies = [self._copy(call.params[at], region.params[at], call) for at in sorted(away)]
        if (region.name, away, phase) not in self._variants:
            name = unique(region.name, self._taken)
            self._regions[name] = replace(_reading_values(region, name, away), phase=phase)
            self._variants[region.name, away, phase] = name
        return replace(
            call,
            region=self._variants[region.name, away, phase],
            params=tuple(name for at, name in enumerate(call.params) if at not in away),
            args=(*call.args, *copies),
        )

    def _copy(self, name: str, param: Value, reader: Call) -> str:
        """The copy of a parameter that a call reads. Raises PartcError P0420 if no earlier stage has one."""
        source = max((stage for stage in self._held_by[name] if stage < reader.stage), default=-1)
        if source < 0 or name in map(self._changed.get, reader.results):
            raise _unheld_error(name, reader)
        if (name, source) not in self._copies:
            value = replace(param, name=unique(f"{name}_held", self._taken))
            region = _copying(unique("held", self._taken), param)
            call = unique(name, self._taken)
            self._regions[region.name], self._copies[name, source] = region, value.name
            self._values.append(value)
            made = Call(name=call, region=region.name, params=(name,), args=(), results=(value.name,), stage=source)
            self._copying.append(made)
        return self._copies[name, source]


def _unheld_error(name: str, call: Call) -> PartcError:
    return PartcError(
        "P0420",
        f"evaluate() reads or changes {name} in stage {call.stage}, which does not hold it in training",
        help="use it in the part of the model that uses it in training, or evaluate on a mesh without pp",
    )


def _copying(name: str, param: Value) -> Region:
    """A region whose result is a copy of its parameter."""
    copy = replace(param, name=unique(f"{param.name}_held", {param.name}))
    op = Op(name="clone", args=(Ref(param.name),), results=(copy,))
    return Region(name=name, params=(param,), forward=Graph(inputs=(), ops=(op,), outputs=(copy.name,)))


def _reading_values(region: Region, name: str, moved: Collection[int]) -> Region:
    """The region with some of its parameters as inputs behind its own."""
    inputs = tuple(value for at, value in enumerate(region.params) if at in moved)
    params = tuple(value for at, value in enumerate(region.params) if at not in moved)
    forward = replace(region.forward, inputs=(*region.forward.inputs, *inputs))
    return replace(region, name=name, params=params, forward=forward, backward=None, saved=())


def call_work(program: Program, calls: Sequence[Call]) -> list[float]:
    """The work of calls, by which stages are balanced."""
    work = {region.name: _forward_work(region) for region in program.regions}
    return [work[call.region] for call in calls]


def _forward_work(region: Region) -> float:
    """The floating-point operations of a call's forward pass, with a small cost for other operations, so that none is
    free.
    """
    types = region.types(region.forward)
    total = 1.0
    for op in region.forward.ops:
        rule = resolve(op, types) if all(name in types for name in op.refs()) else None
        if rule is not None:
            total += flops(op, rule)
        total += 1e-3 * sum(math.prod(value.type.shape) for value in op.results)
    return total


def balanced_runs(work: Sequence[float], count: int) -> tuple[tuple[int, int], ...]:
    """Cut a sequence of work into `count` non-empty runs: the least maximum, then the least sum of squares.

    Exact, by dynamic programming over (items left, runs left). Ties go to the cut with the shortest first run, then the
    shortest second run, and so on.
    """
    items = len(work)
    sums = np.concatenate(([0.0], np.cumsum(np.asarray(work, dtype=np.float64))))
    run = sums[np.newaxis, :] - sums[:, np.newaxis]  # work by (start, end)
    run[np.tril_indices(items + 1)] = np.inf  # runs are not empty
    # Of the best cut of the items from each start on; at first into one run.
    most, squares = run[:, items], run[:, items] ** 2
    chosen = []
    for _ in range(count - 1):
        high = np.maximum(run, most)
        low = high.min(axis=1, keepdims=True)
        total = np.where(high == low, run * run + squares, np.inf)
        ends = total.argmin(axis=1)
        most, squares = low[:, 0], np.take_along_axis(total, ends[:, np.newaxis], axis=1)[:, 0]
        chosen.append(ends)
    cuts = [0]
    for ends in reversed(chosen):
        cuts.append(int(ends[cuts[-1]]))
    return tuple(zip(cuts, (*cuts[1:], items), strict=True))


def _placed(program: Program, stage_of: Mapping[str, int], last: int) -> tuple[Call, ...]:
    """Every call with its stage; calls on inputs alone are repeated in each stage that reads their results, which is
    the `last` for returned values.
    """
    readers: dict[str, set[int]] = {name: {last} for name in program.returned}
    placed: list[list[Call]] = []
    for call in reversed(program.calls):
        if call.name in stage_of:
            where = {stage_of[call.name]}
        else:
            where = set().union(*(readers.get(name, set()) for name in call.results)) or {0}
        for name in call.args:
            readers.setdefault(name, set()).update(where)
        placed.append([replace(call, stage=stage) for stage in sorted(where)])
    return tuple(call for group in reversed(placed) for call in group)


def _transfers(program: Program, calls: tuple[Call, ...], pure: frozenset[str]) -> tuple[Transfer, ...]:
    made = {name: call.stage for call in calls if call.name not in pure for name in call.results}
    needs, back = gradient_inputs(program), arguments_with_gradients(replace(program, calls=calls))
    found: dict[tuple[str, int], bool] = {}
    for call in calls:
        for value, name in zip(program.region(call.region).forward.inputs, call.args, strict=True):
            if name in made and made[name] != call.stage:
                owed = value.name in needs[call.region] and (call.name, name, call.stage) in back
                owed = owed and _carries(program, name)
                found[name, call.stage] = found.get((name, call.stage), False) or owed
    # The transfers of a value are consecutive: a stage sends each value to all its readers before the next value, and
    # two stages receive in the order of the sends.
    order = list(dict.fromkeys(name for name, _ in found))
    return tuple(
        Transfer(value=name, source=made[name], target=target, gradient=found[name, target])
        for name, target in sorted(found, key=lambda item: order.index(item[0]))
    )


def _carries(program: Program, name: str) -> bool:
    return program.value_types()[name].differentiable
