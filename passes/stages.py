"""Assign the calls to pipeline stages, and record the values that cross between them.

    call embed    = embed(ids; …) -> embed      call embed    = embed(ids; …) -> embed
    call blocks.0 = block(embed; …) -> out      call blocks.0 = block(embed; …) -> out
    call blocks.1 = block(out; …) -> out_2  ->  call blocks.1 = block(out; …) -> out_2 stage 1
    call head     = head(out_2, …) -> loss      call head     = head(out_2, …) -> loss stage 1
                                                transfer out 0 -> 1 gradient

Stages are runs of consecutive calls. The slowest stage is as fast as possible, by predicted seconds of one rank,
embedding and head included. Among equally fast cuts, the stage that holds most bytes holds as few as possible: its
weights and, as 1F1B keeps them, the activations of as many microbatches as stages follow.

Values that depend on inputs or constants only are computed in every stage that reads them. A value that a later stage
reads is sent there directly from the stage that computes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from partc.cost.roofline import seconds
from partc.errors import PartcError
from partc.ir.gradients import arriving, gradient_inputs, input_only
from partc.ir.mesh import PIPELINE_AXIS
from partc.ir.program import VIEWS, Call, Program, Region, Transfer

_ROUNDING = 1e-9  # relative, below which two loads are equal


def stages(
    program: Program, *, places: tuple[int, ...] = (), held_by: Mapping[str, Sequence[int]] | None = None
) -> Program:
    """Set every call's stage and the program's transfers.

    `places` holds the pipeline coordinate of every stage, if there are more stages than coordinates. `held_by` has the
    stages that hold each parameter already: calls go to their parameters. Raises PartcError P0403 (too many stages) and
    P0420 (a call reads parameters of several stages, or of an earlier one).
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
    if held_by is None:
        cuts = balanced(_loads(program, main), count, program.microbatches)
        stage_of = {call.name: stage for stage, (start, end) in enumerate(cuts) for call in main[start:end]}
    else:
        stage_of = _beside(main, held_by)
    calls = _placed(program, stage_of)
    return replace(program, calls=calls, transfers=_transfers(program, calls, pure), places=own)


def _beside(calls: Sequence[Call], held_by: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The stage of each call: one that holds its parameters, and none before that of an earlier call."""
    found: dict[str, int] = {}
    least = 0
    for call in calls:
        held = [set(held_by.get(name, ())) for name in call.params]
        possible = set.intersection(*held) if held else {least}
        least = min((stage for stage in possible if stage >= least), default=-1)
        if least < 0:
            raise PartcError(
                "P0420",
                f"{call.name} of evaluate() reads parameters that no stage of the training holds, in this order",
                help="run the model's parts in the order of training, or evaluate on a mesh without pp",
            )
        found[call.name] = least
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLoad:
    """The load of a call on one rank: seconds for a microbatch, bytes of weights, bytes kept for a microbatch."""

    seconds: float
    weights: float = 0.0
    activations: float = 0.0


def _loads(program: Program, calls: Sequence[Call]) -> list[CallLoad]:
    regions = {region.name: region for region in program.regions}
    read = {call.region for call in calls}
    time = {name: _seconds(regions[name], program) for name in read}
    kept = {name: _activations(regions[name], program) for name in read}
    stored = _stored(program)
    return [
        CallLoad(
            seconds=time[call.region], weights=sum(stored[name] for name in call.params), activations=kept[call.region]
        )
        for call in calls
    ]


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
    dynamic programming over (runs left, first load), once for each objective.
    """
    spent = _between([load.seconds for load in loads])
    weights, kept = _between([load.weights for load in loads]), _between([load.activations for load in loads])
    held = [weights + kept * min(runs, microbatches) for runs in range(count + 1)]
    allowed = np.triu(np.ones_like(spent, dtype=bool), 1)  # a run holds at least one load
    time = [np.where(allowed, spent, np.inf)] * (count + 1)
    slowest = _least(time, np.maximum)[0]
    fast = time[0] <= slowest * (1 + _ROUNDING)
    most = _least([np.where(fast, each, np.inf) for each in held], np.maximum)[0]
    small = [fast & (each <= most * (1 + _ROUNDING)) for each in held]
    ends = _least([np.where(each, spent * spent, np.inf) for each in small], np.add)[1]
    return tuple(zip((0, *ends[:-1]), ends, strict=True))


def _between(loads: Sequence[float]) -> np.ndarray:
    """The sum of the loads of each run, by its first load and the one behind its last."""
    sums = np.concatenate([[0.0], np.cumsum(loads)])
    return np.asarray(sums[None, :] - sums[:, None])


def _least(prices: Sequence[np.ndarray], join: np.ufunc) -> tuple[float, tuple[int, ...]]:
    """The least joined price of all runs, with their ends; `prices` are those of the run before which `runs` are left,
    itself included.
    """
    length = len(prices[0]) - 1
    rest = np.full(length + 1, np.inf)  # the price from each load on
    rest[length] = 0.0
    steps = []
    for price in prices[1:]:
        joined = join(price, rest[None, :])
        steps.append(np.argmin(joined, axis=1))
        rest = joined.min(axis=1)
    ends, start = [], 0
    for step in reversed(steps):
        start = int(step[start])
        ends.append(start)
    return float(rest[0]), tuple(ends)


def _placed(program: Program, stage_of: dict[str, int]) -> tuple[Call, ...]:
    """Every call with its stage; calls that only read inputs are repeated in each stage that reads their results."""
    readers: dict[str, set[int]] = {name: {max(stage_of.values())} for name in program.returned}
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
