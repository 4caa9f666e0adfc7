"""Estimates of a plan's step, by which the search chooses the plans that it simulates first.

They need only the model's flops, parameters and values between calls, and no lowered region, so that all meshes can be
compared quickly. Estimates only order the plans: bounds prove, and the simulator predicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from partc.compilation.plan import ParallelPlan
from partc.cost.rates import Rates
from partc.ir.expert_products import ExpertMatmul
from partc.ir.mesh import (
    BATCH_AXIS,
    CONTEXT_AXIS,
    PIPELINE_AXIS,
    TENSOR_AXIS,
    holds_weights_whole,
    is_tensor_axis,
)
from partc.ir.operations import VIEWS
from partc.ir.program import Program, Region
from partc.passes.stages import staged_calls
from partc.planner.bounds import Bounds
from partc.planner.model_sizes import expert_parameters, floating_bytes
from partc.planner.space import expert_axes_of, expert_parts, mesh_of, sharded_over, sizes_of
from partc.schedules import SCHEDULES

# How often a value is moved: written and read forward, read again backward, and its gradient written and read.
_PASSED: Mapping[str, int] = {"none": 5, "full": 7}
_KEPT: Mapping[str, float] = {"none": 0.6, "selective": 0.4}  # the share of a call's bytes that it saves
# As a share of 1F1B's idle time.
_BUBBLE: Mapping[str, float] = {"zero-bubble": 1 / 3, "zbv": 1 / 6, "dualpipe-v": 1 / 6}
_PASSES = 3  # a backward pass has two products for each of the forward pass
_TENSOR_MOVES = 8  # collectives over tp in a call: two gathers and two scatters, forward and backward
_STREAMED = 3  # times an expert's weights: 16 bits forward and backward, gradients read and written in 32
_HIDDEN = 0.6  # the share of computation that can overlap with the gradients' collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """The facts about a model and a cluster's links from which steps are estimated."""

    bounds: Bounds
    rates: Rates
    launch: float  # the least seconds of an operation
    between: int  # bytes of the values between calls, for the whole batch
    made: int  # bytes of all values
    parameters: int  # bytes of the trained parameters, without experts
    experts: int  # bytes of the experts' parameters
    rows: int  # bytes of the rows that travel to experts, over all calls
    mixtures: int  # number of calls with experts
    calls: int
    operations: int
    known: dict[tuple[object, ...], float] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, bounds: Bounds, rates: Rates, launch: float) -> Estimates:
        """The facts of a program with shapes of the whole batch."""
        types, calls = program.value_types(), staged_calls(program)[0]
        ops = [op for call in calls for op in program.region(call.region).forward.ops if op.name not in VIEWS]
        trained = {item.name: floating_bytes(item.type) for item in program.parameters if item.trainable}
        experts = sum(trained.get(name, 0) for name in set(expert_parameters(program)))
        rows = [found for call in calls if (found := _rows(program.region(call.region)))]
        return cls(
            bounds=bounds,
            rates=rates,
            launch=launch,
            between=sum(floating_bytes(types[name]) for call in calls for name in call.results),
            made=sum(floating_bytes(value.type) for op in ops for value in op.results),
            parameters=sum(trained.values()) - experts,
            experts=experts,
            rows=sum(rows),
            mixtures=len(rows),
            calls=len(calls),
            operations=len(ops),
        )

    def seconds(self, plan: ParallelPlan) -> float:
        """The seconds of a step: computation, the pipeline's idle time, and collectives that do not overlap with
        computation.
        """
        sizes, times = sizes_of(plan), plan.microbatches
        ranks = sizes[PIPELINE_AXIS]
        devices, passed = math.prod(sizes.values()), _PASSED.get(plan.recompute, 6)
        work = self.bounds.computed(again=plan.recompute == "full") / devices
        work += self.rates.streamed(passed * self.made / devices)
        work = max(work, _PASSES * self.operations / ranks * times * self.launch)
        # With few rows for each expert, its weights and gradients are streamed once for each microbatch.
        if self.experts:
            work += times * self.rates.streamed(_STREAMED * self.experts / (ranks * expert_parts(plan)))
        each = plan.virtual_stages or SCHEDULES[plan.schedule].stages_per_rank
        idle = work * (ranks - 1) / (times * each) * _BUBBLE.get(plan.schedule, 1.0)
        full = plan.recompute == "full"
        moved = self._memoized(("moved", plan.mesh, plan.experts, times, full), self._exchange_seconds, plan)
        repeated = times if plan.level > 1 else 1
        summed = self._memoized(("summed", plan.mesh, plan.experts, repeated, plan.zero), self._gradients, plan)
        return work + idle + moved + max(0.0, summed - _HIDDEN * work)

    def _memoized(self, key: tuple[object, ...], made: Callable[[ParallelPlan], float], plan: ParallelPlan) -> float:
        if key not in self.known:
            self.known[key] = made(plan)
        return self.known[key]

    def _exchange_seconds(self, plan: ParallelPlan) -> float:
        return self.tensor_seconds(plan) + self._routed(plan)

    def tensor_seconds(self, plan: ParallelPlan) -> float:
        """The seconds in which activations are gathered over the axes that cut tensors and sequences."""
        sizes = sizes_of(plan)
        names = mesh_of(plan).names  # experts may have a piece of tp
        axes = tuple(filter(is_tensor_axis, names)), tuple(axis for axis in names if axis == CONTEXT_AXIS)
        parts = math.prod(size for axis, size in sizes.items() if axis != PIPELINE_AXIS) * plan.microbatches
        size = self.between // (self.calls * parts)
        count = _TENSOR_MOVES * self.calls / sizes[PIPELINE_AXIS] * plan.microbatches
        return sum(count * self._moved(plan, "all_gather", each, size) for each in axes if each)

    def _routed(self, plan: ParallelPlan) -> float:
        """The seconds in which rows travel to their experts and back, forward and backward, over one axis after the
        other.
        """
        if plan.experts is None:
            return 0.0
        sizes, axes = sizes_of(plan), expert_axes_of(plan)
        parts = sizes[BATCH_AXIS] * sizes[CONTEXT_AXIS] * plan.microbatches
        if any(is_tensor_axis(axis) for axis in axes):
            parts *= sizes[TENSOR_AXIS]
        size = self.rows // (self.mixtures * parts)
        count = (6 if plan.recompute == "full" else 4) * self.mixtures / sizes[PIPELINE_AXIS] * plan.microbatches
        return sum(count * self._moved(plan, "dispatch", (axis,), size) for axis in axes)

    def _gradients(self, plan: ParallelPlan) -> float:
        sizes = sizes_of(plan)
        ranks = sizes[PIPELINE_AXIS]
        spread = tuple(name for name, size in mesh_of(plan).axes if size > 1 and holds_weights_whole(name))
        rest = tuple(name for name in spread if name not in expert_axes_of(plan))
        dense = self._summed(plan, self.parameters // (ranks * sizes[TENSOR_AXIS]), spread)
        return dense + self._summed(plan, self.experts // (ranks * expert_parts(plan)), rest)

    def _summed(self, plan: ParallelPlan, size: int, axes: tuple[str, ...]) -> float:
        """The seconds in which gradients of `size` bytes are summed over axes, and parameters are gathered over
        them.
        """
        if not axes or not size:
            return 0.0
        over = tuple(axis for axis in axes if axis in sharded_over(plan))
        rest = tuple(axis for axis in axes if axis not in over)
        part = size // math.prod(mesh_of(plan).axis(axis) for axis in over)
        summed = self.rates.collective("all_reduce", mesh_of(plan), rest, (), part) if rest else 0.0
        if not over:
            return summed
        half = 1 if plan.precision in ("fp32", "fp64") else 2
        gather = self.rates.collective("all_gather", mesh_of(plan), over, (), part // half)
        scatter = self.rates.collective("reduce_scatter", mesh_of(plan), over, (), size)
        times = plan.microbatches
        return summed + {3: times * (2 * gather + scatter), 2: times * scatter + gather}.get(
            plan.level, scatter + gather
        )

    def _moved(self, plan: ParallelPlan, op: str, axes: tuple[str, ...], size: int) -> float:
        return self.rates.collective(op, mesh_of(plan), axes, (), size)

    def bytes(self, plan: ParallelPlan) -> int:
        """The bytes of parameters, gradients and states, and of the values that the first pipeline rank saves."""
        sizes, times = sizes_of(plan), plan.microbatches
        ranks = sizes[PIPELINE_AXIS]
        spread = sizes[BATCH_AXIS] * sizes[CONTEXT_AXIS]
        shares = plan.span * sizes[CONTEXT_AXIS] if plan.span else spread
        own, others = expert_parts(plan), shares * sizes[TENSOR_AXIS]
        held = self.bounds.lasting_bytes(plan, self.parameters // (ranks * sizes[TENSOR_AXIS]), shares)
        held += self.bounds.lasting_bytes(plan, self.experts // (ranks * own), max(1, others // own))
        parts = spread * sizes[TENSOR_AXIS] * times
        saved = self.between / parts if plan.recompute == "full" else _KEPT.get(plan.recompute, 0.5) * self.made / parts
        flights = min(times, ranks) / ranks
        once = self.made / self.calls / parts  # the call that is computed again
        return self.bounds.resident(plan, held + int(saved * flights + once))


def _rows(region: Region) -> int:
    """The bytes of the rows that a call's experts get, for the whole batch."""
    types = region.types(region.forward)
    products = [product for op in region.forward.ops if (product := ExpertMatmul.of(op))]
    # The first product of each choice of experts.
    first = {product.chosen: product.rows for product in reversed(products)}
    return sum(floating_bytes(types[rows]) for rows in first.values())
