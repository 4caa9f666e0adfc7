"""Assign the calls to pipeline stages, and record the values that cross between them.

    call embed    = embed(ids; …) -> embed      call embed    = embed(ids; …) -> embed
    call blocks.0 = block(embed; …) -> out      call blocks.0 = block(embed; …) -> out
    call blocks.1 = block(out; …) -> out_2  ->  call blocks.1 = block(out; …) -> out_2 stage 1
    call head     = head(out_2, …) -> loss      call head     = head(out_2, …) -> loss stage 1
                                                transfer out 0 -> 1 gradient

Stages are runs of consecutive calls. The slowest stage is as fast as possible, by predicted seconds of one rank,
embedding and head included. Among equally fast ones the stage that holds most bytes holds as few as possible: its
weights and, as 1F1B keeps them, the activations of as many microbatches as stages follow.

Values that depend on inputs or constants only are computed in every stage that reads them. A value that a later stage
reads is sent there directly from the stage that computes it.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from partc.cost.roofline import seconds
from partc.errors import PartcError
from partc.ir.gradients import arriving, gradient_inputs, input_only
from partc.ir.mesh import PIPELINE_AXIS
from partc.ir.program import VIEWS, Call, Program, Region, Transfer


def stages(program: Program, *, places: tuple[int, ...] = ()) -> Program:
    """Set every call's stage and the program's transfers.

    `places` holds the pipeline coordinate of every stage, if there are more stages than coordinates. Raises PartcError
    P0403 (too many stages).
    """
    count = len(places) or program.mesh.axis(PIPELINE_AXIS)
    own = () if places == tuple(range(count)) else places
    pure = input_only(program)
    main = [call for call in program.calls if call.name not in pure]
    if count > len(main):
        raise PartcError(
            "P0403",
            f"{count} pipeline stages for {len(main)} calls: a stage holds at least one",
            help=f"use {'fewer stages' if own else f'pp={len(main)} or less'};"
            f" the calls are {', '.join(call.name for call in main[:8])}",
        )
    regions = {region.name: region for region in program.regions}
    work = {name: _seconds(region, program) for name, region in regions.items()}
    saved = {name: _activations(region, program) for name, region in regions.items()}
    stored = _stored(program)
    loads = [
        CallLoad(
            seconds=work[call.region],
            weights=sum(stored[name] for name in call.params),
            activations=saved[call.region],
        )
        for call in main
    ]
    cuts = balanced(loads, count, program.microbatches)
    stage_of = {call.name: stage for stage, (start, end) in enumerate(cuts) for call in main[start:end]}
    calls = _placed(program, stage_of)
    return replace(program, calls=calls, transfers=_transfers(program, calls, pure), places=own)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLoad:
    """The load of a call on one rank: seconds for a microbatch, bytes of weights, bytes kept for a microbatch."""

    seconds: float
    weights: float = 0.0
    activations: float = 0.0


def _seconds(region: Region, program: Program) -> float:
    """The predicted seconds of a microbatch's forward pass; backward takes twice as many wherever it is long."""
    types = region.types(region.forward)
    return 1e-9 + sum(seconds(op, types, program.sizes) for op in region.forward.ops)


def _activations(region: Region, program: Program) -> float:
    """The bytes that the forward pass makes, of which backward needs a like share in every stage."""
    made = (value for op in region.forward.ops if op.name not in VIEWS for value in op.results)
    return float(sum(value.type.local_bytes(program.sizes) for value in made))


def _stored(program: Program) -> dict[str, float]:
    """By parameter: the bytes that a rank holds of its weight, gradient and two moments."""
    found = {}
    for parameter in program.parameters:
        part = parameter.type.local_bytes(program.sizes)
        whole = part * math.prod(program.sizes[axis] for axis in parameter.gather)
        zero = parameter.zero
        found[parameter.name] = float((part if zero > 2 else whole) + (part if zero > 1 else whole) + 2 * part)
    return found


def balanced(loads: Sequence[CallLoad], count: int, microbatches: int = 1) -> tuple[tuple[int, int], ...]:
    """Cut a sequence of loads into `count` non-empty runs.

    In order: the least maximum of seconds, the least maximum of bytes, the least sum of squared seconds. Exact, by
    dynamic programming over (first load, runs left), once for each objective.
    """
    time, weights, kept = (list(itertools.accumulate(each, initial=0.0)) for each in _columns(loads))

    def spent(start: int, end: int, runs: int) -> float:
        return time[end] - time[start]

    def held(start: int, end: int, runs: int) -> float:
        return weights[end] - weights[start] + (kept[end] - kept[start]) * min(runs, microbatches)

    slowest = _least(len(loads), count, spent, max, ())[0]
    limits = [(spent, slowest)]
    limits.append((held, _least(len(loads), count, held, max, limits)[0]))

    def squares(start: int, end: int, runs: int) -> float:
        return spent(start, end, runs) * spent(start, end, runs)

    ends = _least(len(loads), count, squares, operator.add, limits)[1]
    return tuple(zip((0, *ends[:-1]), ends, strict=True))


def _columns(loads: Sequence[CallLoad]) -> tuple[list[float], list[float], list[float]]:
    return [x.seconds for x in loads], [x.weights for x in loads], [x.activations for x in loads]


Measure = Callable[[int, int, int], float]


def _least(
    length: int,
    count: int,
    measure: Measure,
    joined: Callable[[float, float], float],
    limits: Sequence[tuple[Measure, float]],
) -> tuple[float, tuple[int, ...]]:
    """The least joined measure of `count` runs, with their ends; no run exceeds a limit by more than rounding."""

    def allowed(start: int, end: int, runs: int) -> bool:
        return all(limit(start, end, runs) <= most * (1 + 1e-9) for limit, most in limits)

    @cache
    def best(start: int, runs: int) -> tuple[float, tuple[int, ...]]:
        if runs == 1:
            return (measure(start, length, 1) if allowed(start, length, 1) else math.inf), (length,)
        options = [(math.inf, (*range(start + 1, start + runs), length))]
        for end in range(start + 1, length - runs + 2):
            if allowed(start, end, runs):
                more, ends = best(end, runs - 1)
                options.append((joined(measure(start, end, runs), more), (end, *ends)))
        return min(options)

    return best(0, count)


def _placed(program: Program, stage_of: dict[str, int]) -> tuple[Call, ...]:
    """Every call with its stage; calls that only read inputs are repeated in each stage that reads their results."""
    readers: dict[str, set[int]] = {}
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
    regions = {region.name: region for region in program.regions}
    needs, back = gradient_inputs(program), arriving(replace(program, calls=calls))
    found: dict[tuple[str, int], bool] = {}
    for call in calls:
        for value, name in zip(regions[call.region].forward.inputs, call.args, strict=True):
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
