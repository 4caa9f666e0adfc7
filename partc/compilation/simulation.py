"""Predictions for many plans of one model on a cluster, which share its trace and passes.

Passes run once for all plans with equal inputs. Layouts depend on the axes that cut weights and sequences, and on
whether the batch is cut at all. So one program serves all sizes of dp and all numbers of microbatches, since local
sizes follow from layouts. Its regions are differentiated, recomputed and fused once. Stages, ZeRO's parts, buckets,
schedules and actions are computed for each plan. Nothing is emitted or proved; `partc compile` does this for the chosen
plan.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from partc import passes
from partc.cluster.cluster import Cluster
from partc.compilation.coupling import apart_if_coupled
from partc.compilation.lowering import AHEAD, SAVING, budgeted, prefetched
from partc.compilation.options import DEFAULT, Options, as_compile_errors
from partc.compilation.plan import FP8, ParallelPlan, json_lines, normalised_document
from partc.cost.calibration import Calibration
from partc.cost.failures import Failures
from partc.cost.footprint import Footprint
from partc.cost.forecast import Forecast
from partc.cost.local_costs import LocalCosts
from partc.cost.rates import SAVED_IN_EIGHT_BITS, ClusterRates
from partc.errors import PartcError, first_line
from partc.frontend.captured_program import Batches
from partc.frontend.origin import Functions, trace
from partc.frontend.trace import Traced
from partc.ir.gradients import input_only
from partc.ir.mesh import BATCH_AXIS, EXPERT_AXIS, PIPELINE_AXIS, Mesh, is_batch_axis, is_tensor_axis
from partc.ir.program import ITEMSIZE, Program
from partc.passes.batch import check_divisible
from partc.passes.differentiate import Derivatives
from partc.passes.fuse import Fusions
from partc.passes.tables import table_cut
from partc.passes.tables.lookups import Cut, calls_of_tables
from partc.runtime.documents import Malformed, decoded, parsed
from partc.runtime.optimizer.recipe import Recipe
from partc.sharding.choices import axis_order
from partc.sharding.placements import large_parts

_Key = tuple[object, ...]
_ROUNDING = 1e-9  # relative rounding error of sums of seconds in different orders
_NO_MODEL = ("P0201", "P0202", "P0203")
# Memory of a process on a GPU besides tensors: CUDA's context and libraries' workspaces; and for each NCCL communicator
# its channels' buffers.
CONTEXT = 800 << 20
COMMUNICATOR = 150 << 20
# The share by which the caching allocator exceeds the allocated memory at the peak, because of blocks of other sizes.
FRAGMENTS = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted step of a plan. Times are seconds of a step, as means over pipeline ranks."""

    step_seconds: float
    memory_bytes: int  # of the rank that holds most, including the process' memory besides tensors
    fits: bool
    compute: float
    exposed: float  # waiting for communication
    bubble: float  # waiting for other stages
    # The parts of `exposed`: a collective and its axes -> seconds.
    causes: Mapping[str, float] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {"error": None}


class Simulator:
    """Predicts plans of one model on one cluster."""

    def __init__(
        self,
        model: Any,
        cluster: Cluster,
        constants: Calibration,
        *,
        batch: Any = None,
        functions: Functions = Functions(),  # noqa: B008
    ) -> None:
        """`batch` and `functions` belong to a model that is given as an object."""
        self.model = model
        self.batch = batch
        self.functions = functions
        self.cluster = cluster
        self.rates = ClusterRates(cluster, constants)
        self._known: dict[_Key, Any] = {}
        self._derivatives: Derivatives = {}
        self.fusions: Fusions = {}
        self._numbers: dict[_Key, int] = {}
        self._costs: dict[_Key, LocalCosts] = {}

    def on(self, cluster: Cluster, constants: Calibration) -> Simulator:
        """The simulator for another cluster. It shares this one's programs, which only depend on plans."""
        found = copy(self)
        found.cluster, found.rates = cluster, ClusterRates(cluster, constants)
        found._costs = {}
        return found

    def scale_factor(self, plan: ParallelPlan, step_seconds: float) -> float:
        """The plan's throughput as a share of the throughput of n single devices: T_n / (n T).

        A single device computes the same microbatches one after the other, whatever memory this takes.
        """
        plan = plan.emitted
        mesh = plan.compile_options().mesh
        ways = math.prod(size for axis, size in mesh.axes if is_batch_axis(axis))
        batch = ",".join(f"{axis}={size}" for axis, size in mesh.axes if is_batch_axis(axis) and axis != EXPERT_AXIS)
        alone = replace(
            plan, mesh=batch or "dp=1", experts=None, schedule="1f1b", virtual_stages=None, zero=0, nodes=None
        )
        own = plan.microbatches * ways // Mesh.parse(alone.mesh).size
        forecast = Forecast(self.program(replace(alone, microbatches=own)), self.rates)
        compute, _, _ = forecast.split()
        single = (compute - forecast.update_seconds) * Mesh.parse(alone.mesh).size + forecast.update_seconds
        return single / (mesh.size * step_seconds)

    def predict(self, plan: ParallelPlan, *, everywhere: bool = False) -> Prediction:
        """The prediction for a plan. Raises PartcError if it cannot be compiled.

        With `everywhere`, regions are shared by more plans (see `differentiated`). A plan in fp8 is predicted by its
        program in bf16, with linear products at the device's rate for fp8, gradients in bf16, `tp_overlap` and
        `ep_by_node`. With `tp_overlap`, collectives of tp run in pieces that overlap with adjacent products; without
        `dp_overlap`, gathers of parameters and sums of gradients do not overlap. `attention` is computed by the named
        kernel. With `ep_by_node`, a token's row goes once to a node with some of its experts. Gradients may be held and
        summed in bf16, and weights and the optimizer's states held in bf16. With `offload`, a share of the saved values
        waits in the host's memory; computation hides the copies.
        """
        rates = rates_of(plan, self.rates)
        program = self.program(plan.emitted, everywhere=everywhere)
        if plan.cuda_graphs:
            from partc.codegen.cuda_graphs import check_recordable

            check_gpus(self.cluster)
            check_recordable(program)
        kind = rates.fp8, rates.attention, rates.pieces, rates.by_node, rates.gradient, rates.recorded
        costs = self._costs.setdefault(kind, LocalCosts())
        return prediction(program, rates, optimizer=plan.optimizer or DEFAULT, costs=costs, offload=plan.offload)

    def program(self, plan: ParallelPlan, *, everywhere: bool = False) -> Program:
        """The plan's program with its actions; it equals the compiled program except for literal sizes in operations.

        Raises PartcError.
        """
        options = plan.on(self.cluster).compile_options()
        made = lambda separate: self._program(plan, options, separate=separate, everywhere=everywhere)  # noqa: E731
        return apart_if_coupled(made)[0]

    def annotated(self, plan: ParallelPlan) -> Program:
        """The program with layouts, in shapes of the whole batch, for a plan without microbatches."""
        options = plan.on(self.cluster).compile_options()
        _, found, _ = self._placed(plan, options, separate=False)
        return replace(found, mesh=options.mesh, microbatches=options.microbatches)

    def differentiated(self, plan: ParallelPlan, *, everywhere: bool = True) -> tuple[_Key, Program]:
        """The plan's program before stages, with a key of everything on which its regions depend. Raises PartcError.

        With `everywhere`, plans share regions if they agree on whether ranks, and whether microbatches, cut the batch,
        and if their layouts on tp and ep are equal; the mesh then has dp.
        """
        options = plan.on(self.cluster).compile_options()

        def found(separate: bool) -> tuple[_Key, Program, Program]:
            return self._unsplit_program(plan, options, separate=separate, everywhere=everywhere)

        return apart_if_coupled(found)[0][:2]

    def couples_examples(self, plan: ParallelPlan, *, everywhere: bool) -> bool:
        """Whether microbatches cannot share a batch, as under batch norms. This is found before regions are
        differentiated.
        """
        if plan.microbatches == 1:
            return False
        options = plan.on(self.cluster).compile_options()
        try:
            self._unsplit_program(plan, options, separate=False, everywhere=everywhere)
        except PartcError as error:
            return error.code == "P0402"
        return False

    def _placed(
        self, plan: ParallelPlan, options: Options, *, separate: bool, everywhere: bool = False
    ) -> tuple[_Key, Program, Program]:
        """A key, the program with layouts, and the program on the mesh on which it is lowered; with `everywhere`, for
        all sizes of the batch's axes, and all sizes of tp and ep with equal layouts.
        """
        parts = options.microbatches if separate else 1
        trace_key = (*plan.definitions.items(), options.precision, parts)
        given = options.for_passes
        mesh = options.mesh

        def ready(program: Program) -> Program:
            return replace(program, mesh=mesh, microbatches=options.microbatches)

        def canonical() -> Program:
            batches = Batches(microbatches=options.microbatches, separate=separate)
            traced = self._origin(plan, options, batches).program
            return passes.between(None, "simplify", traced, given)

        start = self._memoized(("simplify", *trace_key), canonical)
        over = {use.axis for use in options.batch_uses}
        for axes in ((), *((axis,) for axis in over)):
            check_divisible(ready(start), axes)
        cut = ready(start)
        if everywhere and separate and options.microbatches == 1:  # more microbatches would separate the examples
            cut = _halved_batch(cut, over)
        elif everywhere:
            cut = self._cut((*trace_key, options.batch_uses), cut, given, over)
        # Layouts do not depend on the size of ep.
        placed = _halved_batch(cut, over, experts=True) if everywhere else cut

        def outlined(places: tuple[int, ...]) -> Program:
            sized = replace(start, mesh=placed.mesh, microbatches=placed.microbatches)
            return passes.between("simplify", "outline", sized, given | {"places": places})

        # Their order on the links does not matter.
        used = (axis for axis in axis_order(placed.mesh.sizes) if not _holds_alike(axis))
        weights = tuple((axis, placed.mesh.axis(axis)) for axis in used)
        widths: _Key = (*trace_key, weights, options.expert_axes, options.kernels, options.batch_uses)

        calls = self._memoized(("outline", *widths), lambda: outlined((0,)))
        stages = options.places
        if len(calls.calls) - len(input_only(calls)) < len(stages):
            calls = self._memoized(("outline", *widths, len(stages)), lambda: outlined(stages))
            widths = (*widths, len(stages))
        sized = replace(calls, mesh=placed.mesh, microbatches=placed.microbatches)
        large = self._memoized(("large", *widths, sized.mesh, sized.microbatches), lambda: large_parts(sized))
        sizes: _Key = (_local(sized), large)

        def annotated() -> tuple[Program, int]:
            laid = passes.between("outline", "annotate", sized, given)
            return laid, self._number((laid.regions, laid.calls, laid.values, laid.parameters))

        laid, layouts = self._memoized(("annotate", *widths, *sizes), annotated)
        shape: _Key = (*trace_key, options.kernels, layouts)
        if everywhere:  # the first sizes of tp and ep with these layouts serve all others
            others = tuple((axis, 0 if _scales(axis) else size) for axis, size in _local(cut))
            first = dict(self._memoized(("widths", *shape, others), lambda: _local(cut)))
            cut = replace(cut, mesh=Mesh(axes=tuple((name, first.get(name, size)) for name, size in cut.mesh.axes)))
        return (*shape, _local(cut)), laid, cut

    def _cut(self, key: _Key, program: Program, given: Mapping[str, Any], over: Collection[str]) -> Program:
        """The program on the common mesh of all plans that share its regions: a whole batch counts as cut over ranks or
        microbatches, unless the model's calls differ if it is cut. `over` are further axes that cut the batch.
        """
        cut, kept = _halved_batch(program, over, uncut=True), _halved_batch(program, over)
        whole = tuple(axis for axis, size in cut.sizes.items() if size > kept.sizes[axis])
        if not whole:
            return kept

        def operations(sized: Program) -> _Key:
            mesh = Mesh(axes=tuple(axis for axis in sized.mesh.axes if _is_data(axis[0])))
            regions = passes.between("simplify", "batch", replace(sized, mesh=mesh), given).regions
            return tuple((region.name, *(op.name for op in region.forward.ops)) for region in regions)

        def same_layouts() -> bool:
            try:
                return operations(cut) == operations(kept)
            except PartcError:
                return False

        return cut if self._memoized(("cut", *key, whole), same_layouts) else kept

    def _unsplit_program(
        self, plan: ParallelPlan, options: Options, *, separate: bool, everywhere: bool = False
    ) -> tuple[_Key, Program, Program]:
        """A key, the program before stages, and the program on the mesh on which it is lowered; with `everywhere`, for
        all sizes of the batch's axes.
        """
        shape, laid, cut = self._placed(plan, options, separate=separate, everywhere=everywhere)
        given = options.for_passes
        mesh = with_batch_axis(options.mesh) if everywhere else options.mesh

        def on_cut_mesh(program: Program) -> Program:
            return replace(program, mesh=cut.mesh, microbatches=cut.microbatches)

        def tabled(program: Program) -> Program:
            sized = replace(program, mesh=mesh, microbatches=options.microbatches)
            return passes.between("annotate", "tables", sized, given)

        def few() -> Program:
            return calls_of_tables(replace(laid, mesh=mesh))

        level = max(1, options.zero)  # tables do not distinguish 0 and 1
        key = *shape, mesh, options.microbatches, level, plan.optimizer
        whole = partial(self._memoized, ("tables", *key), lambda: tabled(laid))
        if everywhere:
            used = tuple(name for name, size in mesh.axes if size > 1)
            reading = self._memoized(("calls of tables", *shape, used), few)
            found = self._memoized(("cuts", *key), lambda: tabled(reading))
        else:
            found = whole()
        cuts: dict[str, Cut] = {}
        if found.regions != laid.regions:  # tables cut by rows change their regions
            if everywhere and not any(item.members for item in found.parameters):
                known = {id(item) for item in laid.parameters}
                cuts = {item.name: table_cut(item, found.sizes) for item in found.parameters if id(item) not in known}
                names = tuple(op.name for region in found.regions for op in region.forward.ops)
                shape = (*shape, names, *((name, cut) for name, cut in cuts.items() if cut))
            else:
                shape = (*shape, self._number((whole().regions, whole().parameters)))

        def differentiated() -> Program:
            known = given | {"derivatives": self._derivatives}
            again = known | {"cut_tables": cuts}
            spread = passes.between("annotate", "tables", on_cut_mesh(laid), again) if cuts else on_cut_mesh(whole())
            return passes.between("tables", "expand", spread, known)

        return shape, self._memoized(("expand", *shape), differentiated), cut

    def _program(self, plan: ParallelPlan, options: Options, *, separate: bool, everywhere: bool = False) -> Program:
        everywhere = everywhere and options.budget is None  # a budget depends on local batch sizes
        shape, whole, cut = self._unsplit_program(plan, options, separate=separate, everywhere=everywhere)
        given, stages = options.for_passes, options.places
        mesh = with_batch_axis(options.mesh) if everywhere else options.mesh

        def ready(program: Program) -> Program:
            return replace(program, mesh=mesh, microbatches=options.microbatches)

        kept: _Key = (*shape, options.loss_chunks, options.recompute)
        on = replace(whole, mesh=cut.mesh, microbatches=cut.microbatches)
        piped: _Key = (mesh.axis(PIPELINE_AXIS), stages, options.stage_calls, everywhere, _local(on))
        staged = self._memoized(("stages", *shape, *piped), lambda: passes.between("expand", "stages", on, given))
        if options.budget is not None:
            return _within_budget(passes.between("stages", SAVING, ready(staged), given), options, self.fusions)
        recomputed = self._memoized(
            ("recompute", *kept, *piped), lambda: passes.between("stages", "recompute", staged, given)
        )
        key: _Key = (*kept, *piped, options.zero >= 2, options.split_backward)
        known = given | {"fusions": self.fusions}
        overlapped = self._memoized(
            ("overlap", *key), lambda: passes.between("recompute", "overlap", recomputed, known)
        )
        return passes.between("overlap", "prefetch", ready(overlapped), given)

    def _number(self, facts: _Key) -> int:
        """A number for some facts, equal for equal facts; numbers are cheaper in keys."""
        return self._numbers.setdefault(facts, len(self._numbers))

    def _memoized(self, key: _Key, make: Any) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _origin(self, plan: ParallelPlan, options: Options, batches: Batches) -> Traced:
        return trace(
            self.model,
            self.batch,
            self.functions,
            options=plan.definitions,
            mesh=Mesh(axes=(("dp", 1),)),
            batches=batches,
            precision=options.precision,
        )


def _within_budget(start: Program, options: Options, fusions: Fusions) -> Program:
    """The program with as little recomputation as its budget allows, and with gathers ahead as `partc compile` has."""
    steps = budgeted(start, options, fusions=fusions)
    if options.zero < 3:
        return steps[-1].program
    (program,) = (step.program for step in steps if step.name == AHEAD)
    return prefetched(program, options).steps[-1].program


def _local(program: Program) -> tuple[tuple[str, int], ...]:
    """The sizes of axes that determine local shapes."""
    return tuple((axis, program.sizes[axis]) for axis in axis_order(program.sizes))


def _holds_alike(axis: str) -> bool:
    """Whether ranks along an axis differ only in their part of the batch, so that its size does not affect layouts."""
    return is_batch_axis(axis) and axis != EXPERT_AXIS


def _scales(axis: str) -> bool:
    """Whether programs with equal layouts on an axis of several ranks differ in local sizes alone: tp, ep and pieces of
    them. Where cp cuts sequences, rings have as many rounds as ranks.
    """
    return is_tensor_axis(axis) or axis.endswith(EXPERT_AXIS)


def _halved_batch(program: Program, over: Collection[str], *, uncut: bool = False, experts: bool = False) -> Program:
    """The program on a mesh in which ranks, and microbatches, cut the batch in two wherever the plan cuts it, if
    possible; with `uncut`, also where the plan does not; with `experts`, two ranks also cut experts. The axes `over`
    cut the batch further in some calls.
    """
    axes = with_batch_axis(program.mesh).axes
    alike = [
        name for name, size in axes if (_is_data(name) and (uncut or size > 1)) or (experts and name == EXPERT_AXIS)
    ]
    mesh = Mesh(axes=tuple((name, 2 if name in alike else size) for name, size in axes))
    found = replace(program, mesh=mesh, microbatches=2 if uncut else min(2, program.microbatches))
    try:
        check_divisible(found, over)
    except PartcError:
        return program
    return found


def with_batch_axis(mesh: Mesh) -> Mesh:
    """The mesh, with dp of size 1 added unless it has dp or pieces of it."""
    return mesh if any(map(_is_data, mesh.names)) else Mesh(axes=((BATCH_AXIS, 1), *mesh.axes))


def _is_data(axis: str) -> bool:
    """Whether an axis is dp, or a piece of it without experts."""
    return is_batch_axis(axis) and not axis.endswith(EXPERT_AXIS)


def check_gpus(cluster: Cluster) -> None:
    """Check that a cluster's devices have CUDA graphs. Raises PartcError P0419."""
    if cluster.device.kind != "gpu":
        help = "leave out --cuda-graphs"
        raise PartcError("P0419", f"--cuda-graphs: {cluster.device.name} is not a GPU", help=help)


def rates_of(plan: ParallelPlan, rates: ClusterRates) -> ClusterRates:
    """The rates of a plan's program, with the plan's fields that only affect predictions. Raises PartcError."""
    device = rates.cluster.device
    if plan.precision == FP8 and not device.fp8:
        raise PartcError("P0404", f"{device.name} has no products in fp8", help="give bf16")
    gradient, weight = (ITEMSIZE["bf16" if low else "f64"] for low in (plan.sums_in_bf16, plan.weights == "bf16"))
    return replace(
        rates,
        fp8=plan.precision == FP8,
        attention=plan.attention,
        pieces=plan.overlaps_tp,
        waits=not plan.dp_overlap,
        by_node=plan.sends_by_node,
        recorded=plan.cuda_graphs,
        gradient=gradient,
        weight=weight,
    )


def prediction(
    program: Program,
    rates: ClusterRates,
    *,
    optimizer: str = DEFAULT,
    costs: LocalCosts | None = None,
    offload: float = 0.0,
) -> Prediction:
    """The prediction for a scheduled program. `costs`, if given, must belong to the same rates."""
    costs = LocalCosts() if costs is None else costs
    forecast = Forecast(program, rates, costs=costs)
    compute, exposed, bubble = forecast.split()
    eight_bits = SAVED_IN_EIGHT_BITS if rates.fp8 else frozenset()
    footprint = Footprint(program, states_of(optimizer), costs, eight_bits, rates.gradient, rates.weight, offload)
    memory = resident_bytes(footprint.peak, program.mesh, rates.cluster)
    return Prediction(
        step_seconds=forecast.seconds,
        memory_bytes=memory,
        fits=memory <= rates.cluster.device.memory,
        compute=compute,
        exposed=exposed,
        bubble=bubble if bubble > _ROUNDING * forecast.seconds else 0.0,
        causes=forecast.causes(),
    )


def states_of(optimizer: str) -> int:
    """The number of tensors in a matrix' shape that an optimizer (`sgd:momentum=0.9`) keeps for each matrix."""
    with as_compile_errors():
        rule = Recipe.of(optimizer).settings("", 2)
        return len(rule.states(2)) - len(rule.uncut((2, 2)))


def resident_bytes(tensors: int, mesh: Mesh, cluster: Cluster) -> int:
    """The memory of a process whose tensors take at most `tensors` bytes."""
    if cluster.device.kind == "cpu":
        return tensors
    groups = sum(size > 1 for _, size in mesh.axes)
    return math.ceil(tensors * (1 + FRAGMENTS)) + CONTEXT + groups * COMMUNICATOR


def read_plans(path: Path) -> Iterator[ParallelPlan | PartcError]:
    """The plans of a file with one JSON object per line; an error for each invalid line. Raises PartcError P0804."""
    try:
        lines = json_lines(path)
    except Malformed as error:
        raise PartcError("P0804", f"{path} {error}", help="one JSON object a line") from None
    for number, line in lines:
        try:
            yield decoded(ParallelPlan, normalised_document(parsed(line)))
        except Malformed as error:
            yield PartcError(
                "P0804", f"line {number} of {path}: {error}", help='for example {"mesh": "pp=2,dp=4", "zero": 1}'
            )


def predictions(
    simulator: Simulator,
    plans: Sequence[ParallelPlan | PartcError],
    *,
    scale: bool = False,
    failures: Failures | None = None,
) -> Iterator[dict[str, Any]]:
    """A document for each plan, in order; plans that cannot be compiled have an `error`.

    With `scale`, each has its `scale_factor`; with `failures`, its `effective_seconds` and `checkpoint_interval`.
    Raises PartcError P0201 to P0203 for a model file that no plan can use.
    """
    for plan in plans:
        if isinstance(plan, PartcError):
            yield _failed(plan)
            continue
        try:
            found = simulator.predict(plan)
            further: dict[str, Any] = {}
            if scale:
                further["scale_factor"] = simulator.scale_factor(plan, found.step_seconds)
            if failures is not None:
                devices = plan.emitted.compile_options().mesh.size
                further["effective_seconds"] = failures.effective(found.step_seconds, devices)
                further["checkpoint_interval"] = failures.best_interval(devices)
                further = {name: value if math.isfinite(value) else None for name, value in further.items()}
            yield found.document() | further
        except PartcError as error:
            if error.code in _NO_MODEL:
                raise
            yield _failed(error)
        except Exception as error:  # other plans are still predicted
            yield _failed(PartcError("P0806", f"partc fails on this plan: {type(error).__name__}: {first_line(error)}"))


def _failed(error: PartcError) -> dict[str, Any]:
    empty: dict[str, Any] = dict.fromkeys(Prediction.__slots__)
    place = str(error.source) if error.source else None
    return empty | {"error": {"code": error.code, "cause": error.cause, "help": error.help, "source": place}}
