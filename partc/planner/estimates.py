"""Estimates of a plan's step, by which the search chooses the plans that it simulates first.

They come from the model's flops, parameters and values between calls alone, without a body of a region, so that all
meshes can be compared in no time. Nothing is concluded from them: bounds prove, and the simulator predicts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from partc.compilation.plan import ParallelPlan
from partc.cost.rates import Rates
from partc.ir.mesh import BATCH_AXIS, CONTEXT_AXIS, PIPELINE_AXIS, TENSOR_AXIS
from partc.ir.program import FLOATING, ITEMSIZE, VIEWS, Program, TensorType
from partc.planner.bounds import Bounds
from partc.planner.space import mesh_of, sizes_of
from partc.planner.tables import staged_calls
from partc.schedules import SCHEDULES

_AGAIN: Mapping[str, float] = {"none": 1.0, "selective": 1.02, "full": 4 / 3}  # work with recomputation
_KEPT: Mapping[str, float] = {"none": 0.6, "selective": 0.4}  # of the bytes that a call makes, those that it saves
_BUBBLE: Mapping[str, float] = {"zero-bubble": 1 / 3, "zbv": 1 / 6, "dualpipe-v": 1 / 6}  # of that of 1F1B
_PASSES = 3  # a backward pass has two products for each of the forward pass
_TENSOR_MOVES = 8  # collectives over tp in a call: two gathers and two scatters, forward and backward
_HIDDEN = 0.6  # of computation that can run beside the gradients' collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Facts of a model and of a cluster's links, for estimates."""

    bounds: Bounds
    rates: Rates
    launch: float  # seconds that an operation takes at least
    between: int  # bytes of the values between calls, for the whole batch
    made: int  # bytes of all values
    parameters: int  # bytes of the trained ones
    calls: int
    operations: int

    @classmethod
    def of(cls, program: Program, bounds: Bounds, rates: Rates, launch: float) -> Estimates:
        """The facts of a program with shapes of the whole batch."""
        types, calls = program.value_types(), staged_calls(program)
        ops = [op for call in calls for op in program.region(call.region).forward.ops if op.name not in VIEWS]
        trained = [item.type for item in program.parameters if item.trainable]
        return cls(
            bounds=bounds,
            rates=rates,
            launch=launch,
            between=sum(_bytes(types[name]) for call in calls for name in call.results),
            made=sum(_bytes(value.type) for op in ops for value in op.results),
            parameters=sum(map(_bytes, trained)),
            calls=len(calls),
            operations=len(ops),
        )

    def seconds(self, plan: ParallelPlan) -> float:
        """Computation with the pipeline's idle time, and the collectives that nothing hides."""
        sizes, times = sizes_of(plan), plan.microbatches
        ranks = sizes[PIPELINE_AXIS]
        work = self.bounds.simple(plan).seconds * _AGAIN.get(plan.recompute, 1.1)
        work = max(work, _PASSES * self.operations / ranks * times * self.launch)
        each = plan.virtual_stages or SCHEDULES[plan.schedule].stages_per_rank
        idle = work * (ranks - 1) / (times * each) * _BUBBLE.get(plan.schedule, 1.0)
        return work + idle + self._tensor(plan) + max(0.0, self._gradients(plan) - _HIDDEN * work)

    def _tensor(self, plan: ParallelPlan) -> float:
        sizes = sizes_of(plan)
        axes = [axis for axis in (TENSOR_AXIS, CONTEXT_AXIS) if sizes[axis] > 1]
        parts = math.prod(size for axis, size in sizes.items() if axis != PIPELINE_AXIS) * plan.microbatches
        size = self.between // (self.calls * parts)
        count = _TENSOR_MOVES * self.calls / sizes[PIPELINE_AXIS] * plan.microbatches
        return sum(count * self._moved(plan, "all_gather", axis, size) for axis in axes)

    def _gradients(self, plan: ParallelPlan) -> float:
        sizes = sizes_of(plan)
        size = self.parameters // (sizes[PIPELINE_AXIS] * sizes[TENSOR_AXIS])
        if sizes[BATCH_AXIS] == 1:
            return 0.0
        part = size // sizes[BATCH_AXIS]
        gather = self._moved(plan, "all_gather", BATCH_AXIS, part // (1 if plan.precision in ("fp32", "fp64") else 2))
        scatter = self._moved(plan, "reduce_scatter", BATCH_AXIS, size)
        times = plan.microbatches
        return {3: times * (2 * gather + scatter), 2: times * scatter + gather}.get(plan.level, scatter + gather)

    def _moved(self, plan: ParallelPlan, op: str, axis: str, size: int) -> float:
        return self.rates.collective(op, mesh_of(plan.mesh), (axis,), (), size)

    def bytes(self, plan: ParallelPlan) -> int:
        """Parameters, gradients and states, and the values that the first pipeline rank has saved."""
        sizes, times = sizes_of(plan), plan.microbatches
        ranks = sizes[PIPELINE_AXIS]
        spread = sizes[BATCH_AXIS] * sizes[CONTEXT_AXIS]
        held = self.bounds.kept(plan, self.parameters // (ranks * sizes[TENSOR_AXIS]), spread)
        parts = spread * sizes[TENSOR_AXIS] * times
        saved = self.between / parts if plan.recompute == "full" else _KEPT.get(plan.recompute, 0.5) * self.made / parts
        flights = min(times, ranks) / ranks
        once = self.made / self.calls / parts  # the call that is computed again
        return self.bounds.resident(plan, held + int(saved * flights + once))


def _bytes(type: TensorType) -> int:
    return math.prod(type.shape) * ITEMSIZE[type.dtype] if type.dtype in FLOATING else 0
