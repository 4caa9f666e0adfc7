"""The compiler as a function: `partc.compile(model, batch, mesh=...)` returns a Package."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partc import passes
from partc.compilation.coupling import apart_if_coupled, coupling_sentence
from partc.compilation.given_options import BUCKET, DEFAULTS
from partc.compilation.lowering import UNPROVED, Lowered, PassRuns
from partc.compilation.options import TABLE, Options, as_compile_errors
from partc.compilation.phase_notes import (
    count_text,
    made_dense,
    padding_sentences,
    phase_note,
    sentence,
    size,
)
from partc.compilation.plan import AUTO, GIVEN_TO_SEARCH, check_undecided, check_unplanned
from partc.cost.accounting import ReplicatedOp, communication, replicated_ops
from partc.cost.flops import model_flops
from partc.cost.memory import Account
from partc.cost.saved_tensors import most_saved
from partc.garbage_collection import rare_collections
from partc.ir.index_limit import IndexLimit
from partc.ir.mesh import Mesh
from partc.ir.printer import readable
from partc.ir.program import Program
from partc.package.output import write
from partc.rules.coverage import Coverage, coverage
from partc.settings import EMITTED, tell

if TYPE_CHECKING:
    from partc.cluster.cluster import Cluster
    from partc.codegen.package import Modules
    from partc.compilation.fitting import Compiled
    from partc.frontend.captured_program import Batches
    from partc.frontend.results import Purpose
    from partc.frontend.trace import Traced
    from partc.package.comparison import VerifyResult
    from partc.rehearsal.rehearsal import KnownSteps

PhaseObserver = Callable[["Phase"], None]
OriginKey = tuple[str, int, str]  # (precision, number of parts of the batch, purpose)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A finished phase of a compile: its label, its seconds, and a remark."""

    label: str
    seconds: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Phases:
    """The seconds of finished phases by label; `observe` receives each phase when it ends."""

    observe: PhaseObserver
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, label: str, seconds: float, note: str) -> None:
        self.seconds[label] = seconds
        self.observe(Phase(label=label, seconds=seconds, note=note))

    def ended(self, label: str, start: float, note: str) -> None:
        """Add a phase that ends now and began at `start`."""
        self.add(label, time.perf_counter() - start, note)


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A compiled model: the finished program and all inputs of its folder."""

    program: Program
    model_source: str
    model_options: Mapping[str, Any]
    options: Options
    phases: Mapping[str, float]
    replicated_ops: tuple[ReplicatedOp, ...] = ()
    flops: int = 0  # for one batch, forward and backward, without recomputation
    coverage: Coverage = field(default_factory=lambda: Coverage(ops=1.0, flops=1.0))
    evaluation: Program | None = None
    constants: Mapping[str, str] = field(default_factory=dict)  # entries of the batch that are not tensors
    limits: Mapping[str, Sequence[IndexLimit]] = field(default_factory=dict)  # of integer entries that are indices
    extra: Mapping[str, bytes] = field(default_factory=dict)  # files that model_source reads
    warnings: tuple[str, ...] = ()
    modules: Modules | None = None
    memory: Account | None = None  # the memory account; None if it depends on values in the batch
    planned: Mapping[str, Any] | None = None  # the prediction for a plan that partc has chosen

    @property
    def communication(self) -> dict[str, int]:
        """The bytes that one rank receives per step over each axis, on the busiest stage."""
        return communication(self.program)

    @property
    def padded(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """For each parameter that is padded with zeros, the model's shape and the padded shape."""
        return {item.name: (item.holds, item.type.shape) for item in self.program.parameters if item.holds}

    @property
    def report(self) -> dict[str, Any]:
        """The document that `partc compile --json` prints."""
        return {
            "ranks": self.program.mesh.size,
            "stages": self.program.stages,
            "regions": [region.name for region in self.program.regions],
            "phases": dict(self.phases),
            "communication": self.communication,
            "forward_only": self.options.forward_only,
            "recompute": self.options.recompute,
            "saved": list(most_saved(self.program)),
            "memory": None if self.memory is None else {"worst": str(self.memory), **self.memory.summary},
            "warnings": list(self.warnings),
            "flops": self.flops,
            "rules": {"ops": self.coverage.ops, "flops": self.coverage.flops},
            "padded": {name: [list(shape) for shape in shapes] for name, shapes in self.padded.items()},
            "replicated_ops": [
                {
                    "op": item.op,
                    "place": item.place,
                    "axis": item.axis,
                    "flops": item.flops,
                    "rule": item.rule,
                    "source": str(item.source) if item.source else None,
                }
                for item in self.replicated_ops
            ],
        }

    def files(self) -> Iterator[tuple[str, str | bytes]]:
        """All files by their paths in the folder, rendered one at a time."""
        from partc.codegen.package import files

        yield from files(
            self.program,
            model_source=self.model_source,
            options=self.model_options,
            seed=self.options.seed,
            precision=self.options.precision,
            report=[*self.warnings, *padding_sentences(self.padded), *(sentence(item) for item in self.replicated_ops)],
            command=self.options.command,
            flops=self.flops,
            modules=self.modules,
            memory=self.memory,
            constants=self.constants,
            limits=self.limits,
            evaluation=self.evaluation,
            planned=self.planned,
        )
        yield from self.extra.items()
        if self.options.table is not None:
            yield TABLE, self.options.table.text

    def write(self, directory: str | Path, *, on_phase: PhaseObserver = lambda phase: None) -> Path:
        """Write the folder and return its path; an older package is replaced as a whole. Raises PartcError P0601, P0602
        and P0606.
        """
        count = 0

        def reported() -> Iterator[tuple[str, str | bytes]]:
            nonlocal count
            for item in self.files():
                if item[0].startswith(("regions/", "stages/")):
                    tell(EMITTED, f"# {item[0]}\n{item[1]!s}")
                count += 1
                yield item

        start = time.perf_counter()
        path = write(reported(), Path(directory))
        total = time.perf_counter() - start
        on_phase(Phase(label="Written", seconds=total, note=f"{count_text(count, 'file')} in {directory}"))
        return path

    def verify(self, *, steps: int = 3, virtual: bool = True, arguments: Sequence[str] = ()) -> VerifyResult:
        """Train the package and the single-device model from the same seed and compare: see `partc verify`.

        `arguments` are options of train.py: ("--optimizer", "sgd", "--weight-decay", "0.1").
        """
        from partc.package.verify import verify

        with tempfile.TemporaryDirectory(prefix="partc-package-") as folder:
            return verify(self.write(Path(folder) / "build"), steps=steps, virtual=virtual, arguments=arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """A program with the steps that led to it; `partc inspect` reads it."""

    traced: Program
    steps: tuple[passes.PassResult, ...]
    model_source: str
    model_options: Mapping[str, Any]
    options: Options
    phases: Mapping[str, float]
    evaluation: Program | None = None  # the program of the model file's `evaluate`
    constants: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, bytes] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()  # differences from the whole batch on one device
    again: Compiled | None = None  # compiles the same model with other options, up to the proof
    rehearsed: KnownSteps = ()  # steps of programs, of which one may be the finished one

    @property
    def program(self) -> Program:
        return self.steps[-1].program if self.steps else self.traced

    def after(self, name: str) -> Program:
        """The program after a pass that has run, or before the first pass for `trace`. Raises PartcError P0604."""
        if passes.known(name) == passes.FIRST:
            return self.traced
        done = passes.NAMES[: passes.NAMES.index(name) + 1]
        return next((step.program for step in reversed(self.steps) if step.name in done), self.traced)


@rare_collections()
def compile(
    model: Any,
    batch: Any = None,
    *,
    mesh: str | Mesh,
    experts: str | None = None,
    microbatches: int = 1,
    schedule: str | Path = "1f1b",
    virtual_stages: int | None = None,
    stage_calls: str | Sequence[int] | None = None,
    precision: str = "fp32",
    seed: int = 0,
    shard: Sequence[str] = (),
    batch_over: str | None = None,
    zero: str | int = "0",
    recompute: str = "none",
    bucket: str = BUCKET,
    nodes: int | None = None,
    grad_reduce: str = "fp32",
    compress_grads: str = "none",
    loss_chunks: int = 1,
    expert_capacity: str | float | None = None,
    expert_rows: float | None = None,
    router_bias_rate: float = 0.0,
    cuda_graphs: bool = False,
    optimizer: str | None = None,
    group: Sequence[str] = (),
    lr: float | None = None,
    casts: Sequence[str] = (),
    kernels: str = "auto",
    loss: Callable[..., Any] | None = None,
    evaluate: Callable[..., Any] | None = None,
    eval_every: int = 0,
    infer: Callable[..., Any] | None = None,
    forward_only: bool = False,
    memory_limit: str | None = None,
    options: Mapping[str, Any] | None = None,
    cluster: str | Cluster | None = None,
    ranks: int | None = None,
    global_batch: str | None = None,
    memory: str | None = None,
    fix: str = "",
    per_layer: bool = False,
    max_seconds: float | None = 30.0,
    on_phase: PhaseObserver = lambda phase: None,
) -> Package:
    """Compile a model for a mesh.

    `model` is a model file (a path, or `hf:PATH/config.json`) with `options` as for `-D`. Or it is an nn.Module or a
    function that builds one; then `batch` is one global batch (a dict, list, tuple or dataclass, possibly nested), and
    `loss(model, batch)` and `evaluate(model, batch)` are optional.

    `mesh` is a mesh or its text ("2x2x2"); `experts` ("ep=4@dp", "ep=8@dp,cp") cuts experts over some ranks.
    `microbatches` is the number of microbatches of a global batch. `schedule` is a name or the path of a CSV file.
    `stage_calls` (9, 8, 8, 9) are the numbers of calls of the stages; by default stages are balanced. `shard` pins
    layouts ("*.wq.weight=[@tp, _]"). `batch_over` ("tp=embed,blocks.0-15") names the calls whose batch tp cuts, rather
    than their weights. `zero` is the ZeRO stage, 0 to 3; `"3@dp_in"` names the axes. `recompute` is none,
    selective, full, operations by name ("softmax,all_gather"), or the largest number of bytes that a rank may hold
    ("18GB"); "full*2/none*6" differs by stage. `memory_limit` ("80GB") raises an error with remedies if a rank holds
    more.

    `precision` is fp32, bf16, fp16 or fp64; `casts` overrides the precision of operations ("softmax=bf16"). `bucket` is
    the size of a gradient bucket in bytes. `nodes` is the number of ranks on a node; gradients are then summed inside
    nodes first. `grad_reduce` is the precision of these sums, fp32 or bf16. `compress_grads` is the format of gradients
    that cross nodes: none, bf16 or int8, with error feedback. `loss_chunks` is the number of chunks of logits, of which
    one is in memory at a time. `expert_capacity` (1.25, "1.25@microbatch") bounds the rows that an expert takes of a
    sequence or a microbatch. The memory account assumes `expert_rows` times the mean number of rows for a rank's
    experts. `router_bias_rate` is the size of the update of routers' biases by the load of their experts. `kernels` is
    auto, triton, aten, or inductor. `cuda_graphs` makes the package record its steps on GPUs. `optimizer`
    ("sgd:momentum=0.9"), `group` ("*.bias:weight_decay=0") and `lr` are train.py's defaults, which the memory account
    assumes; by default the model file's optimizer() decides, else AdamW. `eval_every` is another default of train.py:
    steps between evaluations; a model without `evaluate` then evaluates its loss. `forward_only` makes a package for
    inference of whole batches: its infer.py writes the results of `infer(model, batch)`, or else of the model.

    With `mesh="auto"` the planner decides the mesh, microbatches, schedule, virtual stages, ZeRO, recomputation and
    loss chunks for a `cluster` ("16x8xH100-80GB", "mine.toml"), of which `ranks` devices are used. `global_batch`
    ("512", "4M tokens"), `memory` of a rank ("80GB"), `fix` ("tp=8,zero=1|2"), `per_layer` and `max_seconds` are as in
    `partc plan`. The package's `planned` has the prediction.

    Raises PartcError for invalid arguments.
    """
    given = {name: value for name, value in locals().items() if name in ("mesh", *DEFAULTS)}
    functions = {"loss": loss, "evaluate": evaluate, "infer": infer}
    wanted: dict[str, Any] = {"ranks": ranks, "global_batch": global_batch, "memory": memory, "fix": fix}
    wanted |= {"per_layer": True} if per_layer else {}
    planned: dict[str, Any] | None = None
    if mesh == AUTO:
        from partc.planner.automatic import choose, decisions, record
        from partc.planner.planning import Request

        check_undecided((name for name, value in given.items() if value != DEFAULTS.get(name)), cluster)
        assert cluster is not None
        start = time.perf_counter()
        request = Request.checked(
            model,
            cluster,
            batch=batch,
            functions=functions,
            options=options or {},
            max_seconds=max_seconds,
            **{name: given[name] for name in GIVEN_TO_SEARCH},
            **wanted,
        )
        choice = choose(request)
        options, planned = choice.best.plan.options, record(choice)
        given |= decisions(choice.best.plan)
        on_phase(Phase(label="Planned", seconds=time.perf_counter() - start, note=choice.best.plan.flags))
    else:
        check_unplanned({"cluster": cluster, **wanted})
    checked = Options.checked(**given)
    done = compilation(model, batch, checked, functions=functions, model_options=options or {}, on_phase=on_phase)
    return package(done, planned=planned, on_phase=on_phase)


def compilation(
    model: Any,
    batch: Any,
    options: Options,
    *,
    functions: Mapping[str, Callable[..., Any] | None] | None = None,
    model_options: Mapping[str, Any],
    until: str | None = None,
    observe: passes.Observer = lambda step: None,
    on_phase: PhaseObserver = lambda phase: None,
) -> Compilation:
    """Trace the model and run the passes, up to `until`; `observe` receives every step with its program.

    `functions` belong to a model that is given as an object.
    """
    given = _GivenModel(model=model, batch=batch, functions=functions or {}, options=model_options)
    return _compiled(given, options, until=until, observe=observe, on_phase=on_phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class _GivenModel:
    """A model with its traces and passes so far, which compiles with different options share."""

    model: Any
    batch: Any
    functions: Mapping[str, Callable[..., Any] | None]
    options: Mapping[str, Any]  # of the model file
    pass_runs: PassRuns = field(default_factory=PassRuns)
    _origins: dict[OriginKey, Traced] = field(default_factory=dict)

    def origin(self, options: Options, batches: Batches, purpose: Purpose) -> Traced:
        """The traced program for these options."""
        from partc.frontend.origin import Functions, trace

        key = options.precision, batches.parts, purpose
        if key not in self._origins:
            self._origins[key] = trace(
                self.model,
                self.batch,
                Functions(**self.functions),
                options=self.options,
                mesh=options.mesh,
                batches=batches,
                precision=options.precision,
                purpose=purpose,
            )
        program = replace(self._origins[key].program, mesh=options.mesh, microbatches=options.microbatches)
        return replace(self._origins[key], program=program)


def _compiled(
    model: _GivenModel,
    options: Options,
    *,
    until: str | None,
    observe: passes.Observer = lambda step: None,
    on_phase: PhaseObserver = lambda phase: None,
    ahead: bool = True,
) -> Compilation:
    """Compile, as `compilation` does. Without `ahead`, ZeRO 3 gathers nothing ahead: enough to determine memory."""
    phases = _Phases(on_phase)
    start = time.perf_counter()
    import torch

    from partc.frontend.captured_program import Batches

    phases.ended("Loaded", start, f"torch {torch.__version__}")

    def traced(purpose: Purpose, *, separate: bool = False) -> Traced:
        start = time.perf_counter()
        found = model.origin(options, Batches(microbatches=options.microbatches, separate=separate), purpose)
        phases.ended("Traced", start, size(found.program))
        observe(passes.PassResult(name=passes.FIRST, label="Traced", program=found.program, seconds=0.0))
        return found

    def stepped(step: passes.PassResult) -> None:
        observe(step)
        phases.add(step.label, step.seconds, phase_note(step))

    def lower(program: Program) -> Lowered:
        return model.pass_runs.lower(program, options, until=until, observe=stepped, ahead=ahead)

    def again(other: Options, *, ahead: bool = True) -> Program:
        return _compiled(model, other, until=UNPROVED, ahead=ahead).program

    def finished(origin: Traced, lowered: Lowered, *warnings: str, evaluation: Program | None = None) -> Compilation:
        return Compilation(
            traced=origin.program,
            steps=lowered.steps,
            model_source=origin.model_source,
            model_options=origin.options,
            options=options,
            phases=phases.seconds,
            evaluation=evaluation,
            constants=origin.constants,
            extra=origin.extra,
            warnings=(*warnings, *origin.assumed),
            again=again,
            rehearsed=lowered.rehearsed,
        )

    if options.forward_only:
        from partc.compilation.evaluation import forward_only

        origin = traced("infer")
        steps = forward_only(origin.program, options.for_passes, until=until, observe=stepped)
        return replace(finished(origin, Lowered(steps)), again=None)
    origin = traced("loss")
    if origin.optimizer is not None and not options.chosen:
        own = origin.optimizer
        rate = own.lr if options.lr is None else options.lr
        options = replace(options, optimizer=own.optimizer, group=own.groups, lr=rate)

    def made(separate: bool) -> tuple[Traced, Lowered]:
        found = traced("loss", separate=True) if separate else origin
        return found, lower(found.program)

    (origin, lowered), coupling = apart_if_coupled(made)
    warnings = () if coupling is None else (coupling_sentence(coupling, options.microbatches),)
    if until is not None or not (origin.evaluates or options.eval_every):
        return finished(origin, lowered, *warnings)
    from partc.compilation.evaluation import evaluation

    start = time.perf_counter()
    evaluated, said = evaluation(
        lambda batches: model.origin(options, batches, "evaluate").program, lowered.steps[-1].program, options
    )
    phases.ended("Evaluation", start, size(evaluated))
    return finished(origin, lowered, *warnings, *said, evaluation=evaluated)


def package(
    done: Compilation, *, planned: Mapping[str, Any] | None = None, on_phase: PhaseObserver = lambda phase: None
) -> Package:
    """The package of a finished compilation.

    Raises PartcError P0416 if a rank holds too much, P0419 if `cuda_graphs` is set and a step cannot be recorded.
    """
    from partc.codegen.attentions import without_kernel
    from partc.codegen.cuda_graphs import check_recordable
    from partc.codegen.package import emit
    from partc.compilation.fitting import check_evaluation, check_limit
    from partc.frontend.index_limits import index_limits
    from partc.passes.chunk import left_whole
    from partc.passes.zigzag import kept_order
    from partc.rehearsal.rehearsal import rehearsed, with_evaluation
    from partc.rules.updates import model_dims
    from partc.runtime.optimizer.recipe import Recipe

    phases = _Phases(on_phase, dict(done.phases))
    if done.options.cuda_graphs:
        check_recordable(done.program)
    start = time.perf_counter()
    modules = emit(done.program)
    phases.ended("Emitted", start, count_text(len(modules.stages), "stage module"))
    start = time.perf_counter()
    with as_compile_errors():
        dims = model_dims(done.program)
        recipe = Recipe.of(done.options.optimizer, groups=done.options.group)
        recipe.check(dims)
        rules = recipe.all_settings(dims)
    how: dict[str, Any] = {"optimizer": done.options.optimizer, "groups": done.options.group}
    memory, courses = rehearsed(done.program, **how, modules=modules, known=done.rehearsed)
    phases.ended("Rehearsed", start, f"a rank holds {readable(memory.worst.peak)} at most")
    if done.options.memory_limit is not None and done.again is not None:
        check_limit(memory, done.options.memory_limit, done.options, done.again)
    if done.evaluation is not None:
        memory = with_evaluation(memory, courses, done.evaluation)
        check_evaluation(memory, done.options.memory_limit)
    return Package(
        modules=modules,
        memory=memory,
        program=done.program,
        model_source=done.model_source,
        model_options=done.model_options,
        options=done.options,
        phases=phases.seconds,
        replicated_ops=replicated_ops(done.after("annotate")),
        coverage=coverage(done.after("annotate")),
        flops=model_flops(done.after("annotate")),
        evaluation=done.evaluation,
        constants=done.constants,
        limits=index_limits(done.traced),
        extra=done.extra,
        planned=planned,
        warnings=(
            *done.warnings,
            *left_whole(done.after("expand"), loss_chunks=done.options.loss_chunks),
            *kept_order(done.after("extend")),
            *made_dense(done.after("normalize"), done.program, rules),
            *without_kernel(done.program),
        ),
    )
