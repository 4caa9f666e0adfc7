"""The ordered list of passes, and the runner that times, verifies and dumps them.

Every pass is a function `name(program, **options) -> Program` in the file of its name. Earlier passes ensure the facts
that it requires; the runner refuses an order in which a required fact is missing.
"""

from __future__ import annotations

import importlib
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from partc import fuel
from partc.errors import InternalError, PartcError
from partc.ir.printer import print_program
from partc.ir.program import Program
from partc.ir.repetitions import UnlikeError, restore_units
from partc.settings import IR, OP_COUNTS, PASSES, settings, tell

if __name__ != "partc.passes":
    raise InternalError(f"import partc.passes, not {__name__}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A pass as the runner sees it; `name` names both its file and its function."""

    name: str
    label: str  # the name of its progress line
    does: str
    requires: tuple[str, ...] = ()
    ensures: tuple[str, ...] = ()
    after: tuple[str, ...] = ()  # passes that run before this one unless they are left out
    options: tuple[str, ...] = ()  # the compile options that it takes
    reads: tuple[str, ...] = ("mesh", "microbatches")  # the facts about the compile that it reads from the program
    optional: bool = False  # the program still compiles, and trains the same, without it

    @property
    def run(self) -> Callable[..., Program]:
        """The pass's function. Its module is imported only here, so that listing the passes does not import torch."""
        found: Callable[..., Program] = getattr(importlib.import_module(f"partc.passes.{self.name}"), self.name)
        return found


PIPELINE: tuple[Pass, ...] = (
    Pass(
        name="normalize",
        label="Normalized",
        does="canonical operations: views, casts and composites each in one form, no-ops dropped",
        requires=("traced",),
        ensures=("canonical",),
        options=("forward_only",),
        reads=(),
    ),
    Pass(
        name="route",
        label="Routed",
        does="rows that masks select keep their places; loops over experts become expert products",
        requires=("canonical",),
        ensures=("routed",),
        reads=(),
    ),
    Pass(
        name="scan",
        label="Scanned",
        does="unrolled loops over time become scans, with one step each",
        requires=("canonical",),
        ensures=("scans",),
        reads=(),
        optional=True,
    ),
    Pass(
        name="simplify",
        label="Simplified",
        does="constant masks are evaluated, written-out composites are recognised",
        requires=("canonical",),
        ensures=("simple",),
        after=("scan",),
        options=("forward_only",),
        reads=(),
        optional=True,
    ),
    Pass(
        name="capacity",
        label="Bounded",
        does="with `--expert-capacity`, results of rows beyond the capacity of their expert are zero",
        requires=("canonical",),
        ensures=("bounds",),
        after=("route", "simplify"),
        options=("expert_capacity", "expert_axes"),
        reads=(),
    ),
    Pass(
        name="pad",
        label="Padded",
        does="vocabularies are padded to multiples of the tensor axes and of cache lines",
        requires=("canonical",),
        ensures=("padded",),
        after=("simplify",),
        options=("kernels",),
        reads=("mesh",),
        optional=True,
    ),
    Pass(
        name="heads",
        label="Repeated",
        does="key and value heads are repeated, and query heads padded, where the tensor axes do not divide them",
        requires=("canonical",),
        ensures=("heads",),
        after=("simplify",),
        reads=("mesh",),
        optional=True,
    ),
    Pass(
        name="extend",
        label="Extended",
        does="sequences that cp does not divide are extended inside; added positions count nothing",
        requires=("canonical",),
        ensures=("extents",),
        after=("simplify", "pad", "heads"),
        options=("pins",),
        reads=("mesh",),
        optional=True,
    ),
    Pass(
        name="zigzag",
        label="Ordered",
        does="sequences of causal attention get an order in which equal parts over cp are equal work",
        requires=("canonical",),
        ensures=("order",),
        after=("simplify", "pad", "heads", "extend"),
        reads=("mesh",),
        optional=True,
    ),
    Pass(
        name="dense",
        label="By row",
        does="products of tokens with the matrices of their experts become expert products",
        requires=("canonical",),
        ensures=("by row",),
        after=("simplify", "pad", "heads", "extend", "zigzag"),
        options=("expert_axes",),
        reads=(),
    ),
    Pass(
        name="balance",
        label="Counted",
        does="with `--router-bias-rate`, rows are counted by expert for the update of the router's bias",
        requires=("canonical",),
        ensures=("loads",),
        after=("route", "simplify", "zigzag", "dense"),
        options=("router_bias_rate",),
        reads=(),
        optional=True,
    ),
    Pass(
        name="reach",
        label="Reached",
        does="rows are counted by expert, where a step may leave out parameters that no row reaches",
        requires=("canonical",),
        ensures=("reach",),
        after=("route", "simplify", "zigzag", "dense", "balance"),
        options=("forward_only", "compress"),
        reads=(),
    ),
    Pass(
        name="outline",
        label="Outlined",
        does="repeated bodies become regions, called once per repetition",
        requires=("canonical", "reach"),
        ensures=("regions",),
        after=("simplify", "pad", "heads", "extend", "zigzag", "dense", "balance", "reach"),
        options=("places",),
        reads=(),
    ),
    Pass(
        name="stack",
        label="Stacked",
        does="parameters that are only read side by side, such as experts in modules, become rows of one",
        requires=("regions",),
        ensures=("stacks",),
        reads=(),
    ),
    Pass(
        name="precision",
        label="Mixed",
        does="matrix products in bf16 or fp16, sensitive operations in fp32",
        requires=("regions",),
        ensures=("precision",),
        options=("low", "casts"),
        reads=(),
    ),
    Pass(
        name="uses",
        label="Split by use",
        does="with `--batch-over`, axes of weights cut the batch of some calls, in regions of their own",
        requires=("regions",),
        ensures=("uses",),
        after=("stack", "precision"),
        options=("batch_over",),
        reads=(),
    ),
    Pass(
        name="sections",
        label="Sectioned",
        does="rows of fused projections of unequal widths get an order that equal cuts over tp divide by sections",
        requires=("regions", "uses"),
        ensures=("sections",),
        options=("pins", "orders"),
        reads=("mesh",),
        optional=True,
    ),
    Pass(
        name="batch",
        label="Batched",
        does="the batch is cut over dp and over microbatches",
        requires=("regions", "uses"),
        ensures=("batch layouts",),
    ),
    Pass(
        name="annotate",
        label="Sharded",
        does="every value gets its layout over cp and tp, by exact optimisation",
        requires=("batch layouts",),
        ensures=("layouts",),
        options=("pins", "expert_axes"),
    ),
    Pass(
        name="tables",
        label="Tables cut",
        does="embedding tables are cut over dp, cp and ep, or each lies whole on one rank; vectors are exchanged",
        requires=("layouts",),
        ensures=("tables",),
        options=("zero", "pins", "optimizer", "group", "cut_tables", "sparse_tables", "stacks"),
        optional=True,
    ),
    Pass(
        name="norms",
        label="Norms cut",
        does="norms whose rows are cut over tp are written out, with sums over the ranks",
        requires=("layouts",),
        ensures=("norms",),
        after=("tables",),
    ),
    Pass(
        name="experts",
        label="Dispatched",
        does="experts are cut over ep: rows travel to the ranks of their experts, and back",
        requires=("layouts",),
        ensures=("experts",),
        after=("tables",),
        options=("expert_axes", "pins", "expert_capacity", "expert_rows"),
    ),
    Pass(
        name="partition",
        label="Partitioned",
        does="collectives where layouts differ, local sizes, gradient reductions",
        requires=("layouts", "norms"),
        ensures=("local",),
    ),
    Pass(
        name="outermost",
        label="Transposed",
        does="sequences precede the batch around gathers and scatters, so that nothing is copied twice",
        requires=("local",),
        ensures=("sequence-first",),
        optional=True,
    ),
    Pass(
        name="sort",
        label="Sorted",
        does="rows are sorted by expert once around a layer's expert products, not within each product",
        requires=("local",),
        ensures=("sorted rows",),
        optional=True,
    ),
    Pass(
        name="differentiate",
        label="Differentiated",
        does="every region gets its backward graph and its saved values",
        requires=("local",),
        ensures=("backward",),
        options=("optimizer", "group", "forward_only", "derivatives"),
    ),
    Pass(
        name="expand",
        label="Expanded",
        does="composites that communicate are expanded",
        requires=("backward",),
        ensures=("plain",),
    ),
    Pass(
        name="stages",
        label="Staged",
        does="calls are assigned to pipeline stages; values that cross stages are sent",
        requires=("local",),
        ensures=("stages",),
        options=("places", "stage_calls", "held_by", "home"),
    ),
    Pass(
        name="chunk",
        label="Chunked",
        does="with `--loss-chunks`, logits are computed in chunks of rows, one in memory at a time",
        requires=("plain",),
        ensures=("chunked",),
        options=("loss_chunks",),
        optional=True,
    ),
    Pass(
        name="recompute",
        label="Recomputed",
        does="backward recomputes values that forward does not save",
        requires=("plain", "stages"),
        ensures=("saved",),
        options=("recompute", "times", "frontiers"),
        optional=True,
    ),
    Pass(
        name="trim",
        label="Trimmed",
        does="saved parts of a larger value are copied, so that its memory is freed",
        requires=("plain",),
        after=("recompute",),
        reads=(),
        optional=True,
    ),
    Pass(
        name="split",
        label="Split",
        does="gradients of inputs and of weights are separated, so that those of inputs are sent first",
        requires=("plain",),
        ensures=("split",),
        after=("recompute",),
        options=("halves", "zero", "budget", "as_written"),
    ),
    Pass(
        name="bias",
        label="Biased",
        does="biases move into the products before them",
        requires=("plain", "split"),
        ensures=("biases",),
        optional=True,
    ),
    Pass(
        name="narrow",
        label="Narrowed",
        does="16-bit values are read themselves, where fp32 copies of them are only rounded back",
        requires=("plain", "split"),
        ensures=("narrow",),
        reads=(),
        optional=True,
    ),
    Pass(
        name="fuse",
        label="Fused",
        does="operations that one Triton kernel computes in one pass over memory are grouped",
        requires=("plain", "split"),
        ensures=("fused",),
        after=("recompute", "bias", "narrow"),
        options=("kernels", "fusions"),
        optional=True,
    ),
    Pass(
        name="wide",
        label="Summed",
        does="fp32 sums of 16-bit operands read them directly, without an fp32 copy",
        requires=("plain", "split"),
        ensures=("wide sums",),
        after=("fuse",),
        reads=(),
        optional=True,
    ),
    Pass(
        name="overlap",
        label="Overlapped",
        does="collectives start early and are waited for late, with operations between",
        requires=("plain", "split"),
        ensures=("waits",),
        optional=True,
    ),
    Pass(
        name="zero",
        label="ZeRO",
        does="ZeRO: parameters, gradients and optimizer state are sharded over dp",
        requires=("local",),
        ensures=("parts",),
        options=("zero", "zero_axes", "whole"),
        optional=True,
    ),
    Pass(
        name="bucket",
        label="Bucketed",
        does="gradients are summed over ranks in buckets, during backward",
        requires=("stages", "split"),
        ensures=("buckets",),
        after=("zero",),
        options=("bucket", "halves", "near", "wire", "compress"),
    ),
    Pass(
        name="schedule",
        label="Scheduled",
        does="every rank's actions are put in order",
        requires=("stages", "split"),
        ensures=("schedule",),
        options=("kind", "table", "forward_only"),
    ),
    Pass(
        name="actions",
        label="Written out",
        does="the statements behind every action: calls, gathers, scatters, sums, sends and receives",
        requires=("schedule", "buckets"),
        ensures=("actions",),
    ),
    Pass(
        name="prefetch",
        label="Prefetched",
        does="gathers start one call ahead, or as the step begins; scatters are waited for one call late",
        requires=("actions",),
        ensures=("prefetched",),
        options=("late",),
        optional=True,
    ),
    Pass(
        name="check",
        label="Checked",
        does="a proof that all communication matches and nothing can deadlock",
        requires=("plain", "actions"),
        ensures=("proved",),
    ),
)
NAMES = tuple(entry.name for entry in PIPELINE)
FIRST = "trace"  # the pipeline's input, under its name for `--after` and `--dump-after`


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """The result of one pass: the program after it and the time that it took."""

    name: str
    label: str
    program: Program
    seconds: float


Observer = Callable[[PassResult], None]
Verify = Callable[[Program, frozenset[str], str], None]


@dataclass(frozen=True, slots=True)
class Shared:
    """Results of passes over traced programs. Runs share the passes for which their options and inputs are equal."""

    # Key of a pass and its input -> the result, with its number.
    _steps: dict[Hashable, tuple[int, PassResult]] = field(default_factory=dict)
    _traced: list[Program] = field(default_factory=list)

    def start(self, traced: Program) -> int:
        """The number of a traced program, whatever its mesh and microbatches."""
        for number, other in enumerate(self._traced):
            if other.regions is traced.regions:
                return -1 - number
        self._traced.append(traced)
        return -len(self._traced)

    def step(
        self, entry: Pass, before: int, program: Program, given: Mapping[str, Any], apply: Callable[[], PassResult]
    ) -> tuple[int, PassResult]:
        """The result of a pass on `program`, which is result number `before`, and the new result's number."""
        facts = {**given, **{name: getattr(program, name) for name in entry.reads}}
        key = before, entry.name, tuple((name, _hashable(value)) for name, value in facts.items())
        if key not in self._steps:
            self._steps[key] = len(self._steps), apply()
        number, found = self._steps[key]
        if (found.program.mesh, found.program.microbatches) == (program.mesh, program.microbatches):
            return number, found
        here = replace(found.program, mesh=program.mesh, microbatches=program.microbatches)
        return number, replace(found, program=here)


def _hashable(value: Any) -> Hashable:
    return tuple(sorted(value.items())) if isinstance(value, Mapping) else value


def run(
    program: Program,
    options: Mapping[str, Any],
    *,
    until: str | None = None,
    behind: str | None = None,
    verify: Verify | None = None,
    observe: Observer = lambda step: None,
    shared: Shared | None = None,
) -> tuple[PassResult, ...]:
    """Run the passes in order, up to and including `until`, and report every step to `observe`.

    `behind` names a pass that has already run on the given program: only later passes run. `verify(program, facts,
    name)` runs after each pass. `shared` has the results of earlier runs, which replace passes that this run would
    repeat; `program` must then be a traced one. Raises PartcError P0604 for an unknown pass, and P0702 for one that
    cannot be left out.
    """
    if until == FIRST:
        return ()
    try:
        return _run(program, options, until, behind, verify, observe, shared)
    except UnlikeError as error:
        tell(PASSES, f"{error.repetition.units[0][0]} and modules like it are no longer equal: passes get all of them")
        return _run(restore_units(program), options, until, behind, verify, observe, shared)


def _run(
    program: Program,
    options: Mapping[str, Any],
    until: str | None,
    behind: str | None,
    verify: Verify | None,
    observe: Observer,
    shared: Shared | None,
) -> tuple[PassResult, ...]:
    skipped = disabled()
    fuel.restart()
    facts = {"traced"}
    steps: list[PassResult] = []
    done = 0 if behind is None else 1 + NAMES.index(behind)
    number = 0 if shared is None else shared.start(program)
    for entry in PIPELINE[:done]:
        facts.update(() if entry.name in skipped else entry.ensures)
    for entry in up_to(until)[done:]:
        if entry.name in skipped:
            tell(PASSES, f"{entry.name:<14} disabled")
            continue
        missing = set(entry.requires) - facts
        if missing:
            raise InternalError(
                f"pass {entry.name} needs {', '.join(sorted(missing))}, which nothing before it ensures"
            )
        facts.update(entry.ensures)
        given = {name: options[name] for name in entry.options if name in options}
        apply = partial(apply_pass, entry, program, given, frozenset(facts), verify)
        if shared is None:
            step = apply()
        else:
            number, step = shared.step(entry, number, program, given, apply)
        observe(step)
        steps.append(step)
        program = step.program
    return tuple(steps)


def apply_pass(
    entry: Pass, program: Program, given: Mapping[str, Any], facts: frozenset[str], verify: Verify | None
) -> PassResult:
    """Run a pass, and verify the program that it returns."""
    start = time.perf_counter()
    after = entry.run(program, **given)
    seconds = time.perf_counter() - start
    if verify is not None:
        verify(after, facts, entry.name)
    step = PassResult(name=entry.name, label=entry.label, program=after, seconds=seconds)
    _report(program, step)
    return step


def between(behind: str | None, until: str, program: Program, options: Mapping[str, Any]) -> Program:
    """The program after the passes that follow `behind`, up to and including `until`."""
    steps = run(program, options, until=until, behind=behind)
    return steps[-1].program if steps else program


def up_to(name: str | None) -> tuple[Pass, ...]:
    """The passes up to and including `name`; all passes for None."""
    return PIPELINE if name is None else PIPELINE[: NAMES.index(known(name)) + 1]


def before(name: str) -> tuple[str, ...]:
    """The names of the passes that run before `name`, with `trace` first."""
    return (FIRST, *NAMES[: NAMES.index(name)])


def known(name: str) -> str:
    """Return the name if a pass has it. Raises PartcError P0604 otherwise."""
    if name not in (FIRST, *NAMES):
        raise PartcError("P0604", f"there is no pass {name!r}", help=f"the passes are {', '.join((FIRST, *NAMES))}")
    return name


def disabled() -> frozenset[str]:
    """The passes that PARTC_DISABLE leaves out. Raises PartcError P0604 and P0702."""
    names = frozenset(map(known, settings().disabled))
    if not names:
        return names
    facts = {fact for entry in PIPELINE if entry.name not in names for fact in entry.ensures}
    for entry in PIPELINE:
        needing = [
            other.name for other in PIPELINE if other.name not in names and {*other.requires} & {*entry.ensures} - facts
        ]
        if entry.name in names and (needing or not entry.optional):
            possible = [other.name for other in PIPELINE if other.optional]
            raise PartcError(
                "P0702",
                f"PARTC_DISABLE cannot leave out {entry.name!r}: "
                + (f"{needing[0]!r} requires {' and '.join(entry.ensures)}" if needing else "it is not optional"),
                help=f"these can be left out: {', '.join(possible) or 'none yet'}",
            )
    return names


def provenance(traced: Program, steps: tuple[PassResult, ...]) -> dict[str, str]:
    """The pass that created each value: "region.value" -> name of the pass, or `trace`."""
    found: dict[str, str] = {}
    for name, program in ((FIRST, traced), *((step.name, step.program) for step in steps)):
        for region in program.regions:
            for graph in region.graphs:
                for op in graph.ops:
                    for value in op.results:
                        found.setdefault(f"{region.name}.{value.name}", name)
    return found


def _counts(program: Program) -> Counter[str]:
    graphs = (graph for region in program.regions for graph in region.graphs)
    return Counter(op.name for graph in graphs for op in graph.ops)


def _difference(before: Program, after: Program) -> tuple[tuple[str, int], ...]:
    old, new = _counts(before), _counts(after)
    return tuple((name, new[name] - old[name]) for name in sorted({*old, *new}) if new[name] != old[name])


def _report(before: Program, step: PassResult) -> None:
    tell(PASSES, f"{step.name:<14} {step.seconds:8.3f} s")
    if settings().debug >= OP_COUNTS and (added := _difference(before, step.program)):
        tell(OP_COUNTS, "  " + ", ".join(f"{name} {count:+d}" for name, count in added))
    if settings().debug >= IR:
        tell(IR, print_program(step.program))
