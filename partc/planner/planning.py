"""The choice of a plan for a model on a cluster, as `partc plan` makes it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from partc.cluster.cluster import Cluster, fitted
from partc.cluster.files import cluster_of
from partc.compilation.given_options import BUCKET
from partc.compilation.options import DEFAULT
from partc.compilation.plan import REDUCED, ParallelPlan, Scalar
from partc.compilation.simulation import Prediction, Simulator, check_gpus, resident_bytes, states_of
from partc.cost.calibration import Calibration, calibration
from partc.cost.saved_tensors import parse_bytes
from partc.errors import PartcError
from partc.frontend.origin import Functions
from partc.ir.mesh import BATCH_AXIS, PIPELINE_AXIS, TENSOR_AXIS
from partc.ir.printer import readable
from partc.ir.program import DType, Program
from partc.passes.stages import staged_calls
from partc.planner.batches import batch_size, check_batch, samples, sequence_length
from partc.planner.bounds import Bounds
from partc.planner.estimates import Estimates
from partc.planner.lowering import RegionBodies
from partc.planner.model_sizes import expert_count, largest_product
from partc.planner.search import Failure, Outcome, Played, search
from partc.planner.space import (
    FITTED,
    MIXED,
    NODE,
    Family,
    Fixed,
    Space,
    divisors,
    inner_axes,
    mesh_of,
    parse_fixed,
    sizes_of,
    stages_of,
)
from partc.planner.tables import Tables
from partc.schedules.per_stage import RECOMPUTE, stage_kinds

_COMPUTED: Mapping[str, DType] = {"bf16": "bf16", "fp16": "f16", "fp32": "f32", "fp64": "f64"}
LONG = 16_384  # tokens of a sequence from which context parallelism is tried
LARGE = 0.05  # share of a rank's memory: if a sample's logits are larger, computing the loss in chunks is tried
_SOME = 4  # the most numbers of microbatches, and the most schedules, of a family that are tried first
_STARTS = 4  # plans that are tried first
_NEARLY = 1.05  # as a multiple of the least estimate
OWN_SIZES = 200  # the most plans of a space in which each plan's regions are lowered for its own sizes
# The neighbours of the best plan that are tried next: this many that share its regions, and this many others.
_NEIGHBOURS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A model on a cluster, and the user's decisions; `limit` is the memory of a rank in bytes.

    A request that continues a training has `kept`: the decisions in `fixed` that are part of the training, as its batch
    is.

    A model that is a Python object comes with a batch and functions, as for partc.compile.
    """

    model: Any
    cluster: Cluster
    ranks: int
    limit: int
    batch: Any = None
    functions: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Scalar] = field(default_factory=dict)
    global_batch: str | None = None
    fixed: Fixed = field(default_factory=dict)
    kept: Fixed | None = None
    per_layer: bool = False
    precision: str = "bf16"
    kernels: str = "auto"
    cuda_graphs: bool = False
    optimizer: str | None = None
    bucket: str = BUCKET
    grad_reduce: str = "fp32"
    compress_grads: str = "none"
    max_seconds: float | None = None
    constants: Calibration | None = None

    @classmethod
    def checked(
        cls,
        model: Any,
        cluster: str | Cluster,
        *,
        ranks: int | None = None,
        memory: str | None = None,
        fix: str = "",
        max_seconds: float | None = None,
        **others: Any,
    ) -> Request:
        """The request of a command line. Raises PartcError P0004, P0419, P0801, P0802 and P0811 for wrong values."""
        found = cluster_of(cluster) if isinstance(cluster, str) else cluster
        wanted = found.size if ranks is None else ranks
        if wanted < 1:
            raise PartcError("P0004", f"--ranks {wanted} is out of range", help="give 1 or more")
        limit = found.device.memory if memory is None else parse_bytes(memory)
        if not limit:
            raise PartcError("P0004", f"--memory {memory} is not a size", help="for example 80GB or 64GiB")
        if others.get("cuda_graphs"):
            check_gpus(found)
        if max_seconds is not None and not max_seconds > 0:
            raise PartcError("P0004", f"--max-seconds {max_seconds} is out of range", help="give more than 0")
        return cls(
            model=model,
            cluster=found,
            ranks=wanted,
            limit=limit,
            fixed=parse_fixed(fix),
            max_seconds=max_seconds,
            **others,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoice:
    """The outcome of a search, and the space that it searched."""

    request: Request
    space: Space
    outcome: Outcome
    tokens: int | None  # per sample
    single: Outcome | None = None  # with plans by layer: the search among the plans in which each axis has one use

    @property
    def best(self) -> Played:
        """The best plan. Raises PartcError P0813 if no plan fits."""
        if self.outcome.best is None:
            raise self.nothing_fits()
        return self.outcome.best

    def nothing_fits(self) -> PartcError:
        """The error P0813, which names the plan that comes closest."""
        outcome, limit = self.outcome, self.request.limit
        compiled = [played for played in outcome.others if played.error is None]
        if not outcome.complete:
            cause = f"no plan that fits {readable(limit)} was found in {outcome.seconds:.0f} s, of {outcome.space:,}"
            if outcome.others and not compiled:
                cause += f"; those that were tried do not compile: {outcome.others[0].error}"
            return PartcError(
                "P0813",
                cause,
                help="give more --max-seconds, or restrict the space with --fix, such as recompute=full",
            )
        if not compiled and outcome.closest is None:
            first = outcome.others[0].error if outcome.others else "the space is empty"
            return PartcError("P0813", f"none of {outcome.space:,} plans compiles: {first}", help="try one with --fix")
        nearest = min(compiled, key=lambda played: played.bytes, default=None)
        if nearest is not None:
            least, plan, words = nearest.bytes, nearest.plan, "holds"
            help = f"devices of {readable(least)} would hold it"
        else:
            assert outcome.closest is not None
            plan, bound = outcome.closest
            least, words = bound.bytes, "holds at least"
            help = f"no plan fits devices of less than {readable(least)}"
        ranks = self.space.ranks
        return PartcError(
            "P0813",
            f"no plan of {outcome.space:,} fits {readable(limit)} on {ranks:,} ranks; the closest {words} "
            f"{readable(least)}: {plan.flags}",
            help=help,
        )


class Planner:
    """The search for one request. Predictions and tables are kept for further searches.

    It can share programs with the `simulator` of another request for the same model. Raises PartcError P0803 and P0814,
    and the errors of tracing.
    """

    def __init__(self, request: Request, simulator: Simulator | None = None) -> None:
        self.request = request
        cluster = fitted(request.cluster, request.ranks)
        constants = request.constants or calibration(cluster)
        kernels = request.kernels
        if kernels == "auto":
            kernels = "triton" if cluster.device.kind == "gpu" else "aten"
        self.simulator = (
            Simulator(request.model, cluster, constants, batch=request.batch, functions=Functions(**request.functions))
            if simulator is None
            else simulator.on(cluster, constants)
        )
        base = ParallelPlan(
            mesh="dp=1",
            precision=request.precision,
            kernels=kernels,
            cuda_graphs=request.cuda_graphs,
            optimizer=request.optimizer,
            options=dict(request.options),
            **{name: getattr(request, name) for name in REDUCED},
        )
        base, annotated = _batched(self.simulator, base, request.global_batch)
        rates = replace(self.simulator.rates, recorded=request.cuda_graphs)
        rate = max(cluster.device.peak_of(_COMPUTED[request.precision]), cluster.device.peak_of("f32"))
        rate /= rates.slowest
        self._calls = len(staged_calls(annotated)[0])
        self.tokens = sequence_length(annotated)
        self.space = Space(
            ranks=request.ranks,
            batch=batch_size(annotated),
            calls=len(staged_calls(annotated)[1]),
            nodes=-(-request.ranks // cluster.near),
            sequences=(self.tokens or 0) >= LONG,
            logits=largest_product(annotated) >= LARGE * request.limit * batch_size(annotated),
            experts=expert_count(annotated),
            near=cluster.near,
            per_layer=request.per_layer,
            fixed=request.fixed,
            base=base,
        )
        self._single_uses = replace(self.space, per_layer=False)
        self._everywhere = self.space.has_more_than(OWN_SIZES)
        tables = Tables(
            bodies=RegionBodies(self.simulator, self._calls, everywhere=self._everywhere),
            rates=rates,
            cluster=cluster,
            states=states_of(request.optimizer or DEFAULT),
        )
        self.bounds = Bounds(
            annotated=annotated,
            peak=rate * constants.products,
            least=partial(rates.least, peak=rate),
            states=tables.states,
            tables=tables,
            filled_tiles=tables.on(replace(rates, filled=True)),
            linkless=tables.on(replace(rates, filled=True, linkless=True)),
            resident=self._resident,
        )
        self.estimates = Estimates.of(annotated, self.bounds, rates, rates.host)
        self._hopes: dict[tuple[object, ...], tuple[bool, float]] = {}
        self._promises: dict[tuple[object, ...], tuple[bool, float]] = {}
        self._predictions: dict[ParallelPlan, Prediction | Failure] = {}
        self._own_predictions: dict[ParallelPlan, Prediction | Failure] = {}

    def couples_examples(self) -> bool:
        """Whether the model couples the examples of a batch, so that each of several microbatches is a batch of its
        own.
        """
        count = next(iter(divisors(self.space.batch)[1:]), 1)
        return self.simulator.couples_examples(replace(self.space.base, microbatches=count), everywhere=False)

    def starting_plans(self) -> Iterator[ParallelPlan]:
        """The plans that are tried first.

        They are: the customary plan with the fewest pipeline ranks among the nearly quickest ones; for each choice of
        the axes' sizes, the plan with the least estimate; plans that hold little, until one fits.
        """
        customary: list[ParallelPlan] = []
        found: dict[tuple[object, ...], ParallelPlan] = {}
        thrifty: dict[tuple[object, ...], ParallelPlan] = {}
        by_node = any(NODE in level for level in self.space.fixed.get("zero", ()))
        space = self._single_uses
        space = space if by_node else replace(space, nodes=1)  # one order of the axes suffices
        for family in space.families():
            plans, sizes = [*_reduced_family(family).plans()], (*sizes_of(family.base).values(), family.base.experts)
            customary += filter(_is_customary, plans)
            quick, small = min(plans, key=self.hope), max(plans, key=_memory_order)
            found[sizes] = min(found.get(sizes, quick), quick, key=self.hope)
            thrifty[sizes] = max(thrifty.get(sizes, small), small, key=_memory_order)
        if customary:
            over, seconds = min(map(self.hope, customary))
            near = [plan for plan in customary if self.hope(plan) <= (over, _NEARLY * seconds)]
            yield min(near, key=lambda plan: (sizes_of(plan)[PIPELINE_AXIS], self.hope(plan)))
        yield from sorted(found.values(), key=self.hope)[:_STARTS]
        for plan in sorted(thrifty.values(), key=lambda plan: (sizes_of(plan)["pp"], sizes_of(plan)["tp"]))[:_STARTS]:
            fits = any(isinstance(each, Prediction) and self._fits(each) for each in self._predictions.values())
            if not fits:
                yield plan

    def promise(self, family: Family) -> tuple[bool, float]:
        """The least `hope` among some plans of a family."""
        base, decided = family.base, (family.microbatches, family.schedules, family.levels)
        alike = *sizes_of(base).values(), base.experts, base.recompute, base.stage_calls, base.loss_chunks
        key: tuple[object, ...] = (*alike, *decided)  # orders of the axes count as equal
        if key not in self._promises:
            self._promises[key] = min(map(self.hope, _reduced_family(family).plans()))
        return self._promises[key]

    def nearest(self, plan: ParallelPlan) -> list[ParallelPlan]:
        """The neighbours of a plan with the least estimated times; first those that cut regions as this plan does."""
        alike: list[ParallelPlan] = []
        others: list[ParallelPlan] = []
        for each in sorted(dict.fromkeys(self._single_uses.neighbours(plan)), key=self.hope):
            (alike if self._cut(each) == self._cut(plan) else others).append(each)
        return [*alike[:_NEIGHBOURS], *others[:_NEIGHBOURS]]

    def _turned(self, plan: ParallelPlan) -> list[ParallelPlan]:
        """The plans in which one call has the other use of tp, if the space has such plans."""
        fits = sizes_of(plan)[TENSOR_AXIS] > 1 and plan.experts is None
        fits = fits and plan.stage_calls is None and plan.recompute in RECOMPUTE
        ways = math.prod(sizes_of(plan)[axis] for axis in (BATCH_AXIS, TENSOR_AXIS)) * plan.microbatches
        return [*self.bounds.turned(plan)] if fits and self.space.batch % ways == 0 else []

    def _cut(self, plan: ParallelPlan) -> tuple[object, ...]:
        """The decisions by which a plan's regions are outlined, cut and recomputed. Plans with other decisions are
        lowered anew.
        """
        several = plan.microbatches > 1, sizes_of(plan)[BATCH_AXIS] > 1
        return (
            inner_axes(plan),
            plan.batch_over,
            *several,
            plan.recompute,
            plan.loss_chunks,
            max(stages_of(plan), self._calls),
        )

    def hope(self, plan: ParallelPlan) -> tuple[bool, float]:
        """A key that orders plans for trying: whether the plan probably does not fit, and its estimated seconds."""
        ways: Iterable[str] = (plan.recompute,)
        if plan.stage_calls is not None:  # stages recompute as little as memory allows
            ways = plan.recompute.split("|") if plan.stage_calls == FITTED else stage_kinds(plan.recompute)
        decided = plan.microbatches, plan.schedule, plan.virtual_stages, plan.zero, plan.loss_chunks
        alike = *sizes_of(plan).values(), plan.experts, *decided  # orders of the axes count as equal
        least = True, math.inf
        for way in ways:
            key: tuple[object, ...] = (way, *alike)
            if key not in self._hopes:
                one = replace(plan, stage_calls=None, recompute=way) if plan.stage_calls is not None else plan
                over = self.estimates.bytes(one) > self.request.limit
                self._hopes[key] = over, self.estimates.seconds(one)
            least = min(least, self._hopes[key])
        return least

    def _fits(self, prediction: Prediction) -> bool:
        return prediction.memory_bytes <= self.request.limit

    def _resident(self, plan: ParallelPlan, tensors: int) -> int:
        return resident_bytes(tensors, mesh_of(plan), self.request.cluster)

    def predicted(self, plan: ParallelPlan) -> Prediction | Failure:
        """The simulator's prediction for a plan of the space."""
        if plan not in self._predictions:
            self._predictions[plan] = self._simulated(plan, everywhere=self._everywhere)
        return self._predictions[plan]

    def _refined(self, plan: ParallelPlan) -> Prediction | Failure:
        """The prediction with regions lowered for the plan's own sizes, as a compile lowers them."""
        if plan not in self._own_predictions:
            self._own_predictions[plan] = self._simulated(plan, everywhere=False)
        return self._own_predictions[plan]

    def _simulated(self, plan: ParallelPlan, *, everywhere: bool) -> Prediction | Failure:
        try:
            return self.simulator.predict(plan, everywhere=everywhere)
        except PartcError as error:
            return Failure(error=f"{error.code}: {error.cause}")

    def plans(self, limit: int | None = None) -> Iterator[ParallelPlan]:
        """Yields the plans of the space that are compared for ranks of at most `limit` bytes."""
        for plan in self.space.plans():
            found = self.suited(plan, self.request.limit if limit is None else limit)
            if found is not None:
                yield found

    def suited(self, plan: ParallelPlan, limit: int) -> ParallelPlan | None:
        """A plan of the space with stages that fit ranks of `limit` bytes; None if no stages do.

        Unless the user asks for it, losses are not computed in chunks if the plan fits without.
        """
        if plan.loss_chunks > 1 and "loss_chunks" not in self.space.fixed:
            whole = self.bounds.fitted(replace(plan, loss_chunks=1), limit)
            fits = whole is not None and self.bounds.filled(whole, self.bounds.simple(whole)).bytes <= limit
            if fits or not self.bounds.known(plan):
                return None
        if plan.batch_over in MIXED:
            return self.bounds.mixed(plan, limit)
        return self.bounds.fitted(plan, limit)

    def choice(
        self,
        *,
        limit: int | None = None,
        max_seconds: float | None = None,
    ) -> PlanChoice:
        """The best plan that holds at most `limit` bytes on a rank. Raises PartcError P0812.

        The request's own time limit still lets the search try its first plans; `max_seconds` may end it earlier. With
        plans by layer, the first half of the time is for those in which each axis has one use.
        """
        request = self.request if limit is None else replace(self.request, limit=limit)
        seconds, patient = (request.max_seconds, True) if max_seconds is None else (max_seconds, False)

        def searched(space: Space, seconds: float | None, starts: Iterable[ParallelPlan]) -> Outcome:
            return search(
                space.families(),
                self.predicted,
                self.bounds,
                refined=self._refined if self._everywhere else None,
                suited=lambda plan: self.suited(plan, request.limit),
                limit=request.limit,
                starts=starts,
                near=self.nearest,
                variants=self._turned if space.per_layer else lambda plan: (),
                ordered=space.nodes > 1,
                hope=self.hope,
                promise=self.promise,
                max_seconds=seconds,
                patient=patient,
            )

        single: Outcome | None = None
        starts: Iterable[ParallelPlan] = self.starting_plans()
        if self.space.per_layer:
            single = searched(self._single_uses, None if seconds is None else seconds / 2, starts)
            seconds = None if seconds is None else max(seconds - single.seconds, seconds / 2)
            starts = [] if single.best is None else [single.best.plan]
        outcome = searched(self.space, seconds, starts)
        return PlanChoice(request=request, space=self.space, outcome=outcome, tokens=self.tokens, single=single)


def _reduced_family(family: Family) -> Family:
    """The family, reduced to some numbers of microbatches and some schedules."""
    counts = family.microbatches
    spread = {counts[index * (len(counts) - 1) // max(1, _SOME - 1)] for index in range(_SOME)}
    return replace(family, microbatches=tuple(sorted(spread)), schedules=family.schedules[:_SOME])


def _is_customary(plan: ParallelPlan) -> bool:
    """Whether practitioners would try this plan first: 1F1B with one stage on each rank, and whole parameters."""
    return plan.schedule == "1f1b" and plan.level < 2


def _memory_order(plan: ParallelPlan) -> tuple[int, ...]:
    """A key that orders the plans of a mesh by memory: the plan with the largest key probably holds least."""
    kind = RECOMPUTE.index(plan.recompute) if plan.recompute in RECOMPUTE else 0
    return plan.microbatches, plan.level, kind, plan.loss_chunks


def _batched(simulator: Simulator, base: ParallelPlan, wanted: str | None) -> tuple[ParallelPlan, Program]:
    """The plan of one rank with the requested batch, and its program with the shapes of the whole batch."""
    annotated = simulator.annotated(base)
    count = batch_size(annotated) if wanted is None else samples(wanted, annotated)
    if count == batch_size(annotated):
        return base, annotated
    if "batch" in base.options:
        raise PartcError("P0814", "-D batch and --global-batch differ", help="leave one of them out")
    base = replace(base, options={**base.options, "batch": count})
    try:
        annotated = simulator.annotated(base)
    except PartcError as error:
        if error.code != "P0204":
            raise
        size = batch_size(annotated)
        raise PartcError(
            "P0814",
            f"the batch has {size:,} samples, and batch() has no option to change that",
            help=f"give it one, def batch(batch: int = {size}), or leave --global-batch out",
        ) from None
    check_batch(base.options, batch_size(annotated))
    return base, annotated
