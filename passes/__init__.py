"""The passes, one file each, in the order in which they run; the runner times, verifies and dumps.

Every pass is `name(program, **options) -> Program` in the file of its name. What it requires has
been ensured by those before it: moving one up breaks the first requirement that is not met yet.
"""

from __future__ import annotations

import importlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from partc import fuel
from partc.errors import InternalError, PartcError
from partc.printer import print_program
from partc.program import Program
from partc.settings import IR, OP_COUNTS, PASSES, settings, tell

if __name__ != "partc.passes":
    raise InternalError(f"import partc.passes, not {__name__}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A pass as the runner sees it: its name is its file and its function."""

    name: str
    label: str  # of its line while compiling
    does: str
    requires: tuple[str, ...] = ()
    ensures: tuple[str, ...] = ()
    options: tuple[str, ...] = ()  # which of the compile's options it takes
    changes_numerics: bool = False  # beyond the order of a sum
    optional: bool = False  # the program still compiles, and trains the same, without it

    @property
    def run(self) -> Callable[..., Program]:
        """The function; its module loads now, so that listing the passes imports no torch."""
        found: Callable[..., Program] = getattr(importlib.import_module(f"partc.passes.{self.name}"), self.name)
        return found


PIPELINE: tuple[Pass, ...] = (
    Pass(
        name="normalize",
        label="Normalized",
        does="canonical operations: views, casts and composites each in one form, no-ops dropped",
        requires=("traced",),
        ensures=("canonical",),
    ),
    Pass(
        name="simplify",
        label="Simplified",
        does="masks of constants are evaluated, composites that models spell out are recognised",
        requires=("canonical",),
        ensures=("simple",),
        optional=True,
    ),
    Pass(
        name="pad",
        label="Padded",
        does="vocabularies are rounded up to what the tensor axes divide and kernels read at a time",
        requires=("canonical", "simple"),
        ensures=("padded",),
        options=("kernels",),
        optional=True,
    ),
    Pass(
        name="outline",
        label="Outlined",
        does="repeated bodies become regions, called once per repetition",
        requires=("canonical", "simple"),
        ensures=("regions",),
        options=("places",),
    ),
    Pass(
        name="precision",
        label="Mixed",
        does="matrix products in few bits, what is delicate in fp32",
        requires=("regions",),
        ensures=("precision",),
        options=("low", "casts"),
        changes_numerics=True,
    ),
    Pass(
        name="batch",
        label="Batched",
        does="the batch is spread over dp and over microbatches",
        requires=("regions",),
        ensures=("batch layouts",),
    ),
    Pass(
        name="annotate",
        label="Sharded",
        does="every value gets its layout over tp, by exact optimisation",
        requires=("batch layouts",),
        ensures=("layouts",),
        options=("pins",),
    ),
    Pass(
        name="partition",
        label="Partitioned",
        does="collectives where layouts differ, local sizes, gradient reductions",
        requires=("layouts",),
        ensures=("local",),
    ),
    Pass(
        name="outermost",
        label="Turned",
        does="sequences stand before the batch where they are gathered and scattered, so that nothing is copied twice",
        requires=("local",),
        ensures=("turned",),
        optional=True,
    ),
    Pass(
        name="zero",
        label="Parted",
        does="what parameters, gradients and the optimizer hold is spread over dp",
        requires=("local",),
        ensures=("parts",),
        options=("zero", "zero_axes"),
        optional=True,
    ),
    Pass(
        name="stages",
        label="Staged",
        does="calls are dealt to pipeline stages; what crosses between them is sent",
        requires=("local",),
        ensures=("stages",),
        options=("places",),
    ),
    Pass(
        name="differentiate",
        label="Differentiated",
        does="every region's backward graph, with what it saves",
        requires=("local",),
        ensures=("backward",),
    ),
    Pass(
        name="expand",
        label="Expanded",
        does="composites that talk to other ranks are spelled out",
        requires=("backward",),
        ensures=("plain",),
    ),
    Pass(
        name="chunk",
        label="Chunked",
        does="logits in chunks of rows, with `--loss-chunks`, of which one is in memory at a time",
        requires=("plain",),
        ensures=("chunked",),
        options=("loss_chunks",),
        optional=True,
    ),
    Pass(
        name="recompute",
        label="Recomputed",
        does="what backward makes again, in place of what forward would save for it",
        requires=("plain",),
        ensures=("saved",),
        options=("recompute", "kind", "table", "times", "frontiers"),
        optional=True,
    ),
    Pass(
        name="split",
        label="Split",
        does="gradients of inputs and of weights apart, where the schedule runs them apart",
        requires=("plain", "saved"),
        ensures=("split",),
        options=("halves",),
    ),
    Pass(
        name="bias",
        label="Biased",
        does="biases are added in the products before them",
        requires=("plain", "split"),
        ensures=("biases",),
        optional=True,
    ),
    Pass(
        name="fuse",
        label="Fused",
        does="operations that one kernel does in one pass over memory, where kernels are Triton's",
        requires=("plain", "saved", "split"),
        ensures=("fused",),
        options=("kernels",),
        optional=True,
    ),
    Pass(
        name="overlap",
        label="Overlapped",
        does="collectives and the waits for them apart, with operations between",
        requires=("plain", "split"),
        ensures=("waits",),
        optional=True,
    ),
    Pass(
        name="bucket",
        label="Bucketed",
        does="gradients are summed over ranks in buckets, while backward goes on",
        requires=("stages", "split"),
        ensures=("buckets",),
        options=("bucket", "halves", "near", "wire", "compress"),
    ),
    Pass(
        name="schedule",
        label="Scheduled",
        does="what every rank does, in order",
        requires=("stages", "split"),
        ensures=("schedule",),
        options=("kind", "table", "early"),
    ),
    Pass(
        name="check",
        label="Checked",
        does="a proof that all communication matches and nothing can deadlock",
        requires=("plain", "schedule"),
        ensures=("proved",),
    ),
)
NAMES = tuple(entry.name for entry in PIPELINE)
FIRST = "trace"  # what the pipeline starts from, under the name that `--after` and `--dump-after` know


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One pass done: the program after it, and what it took."""

    name: str
    label: str
    program: Program
    seconds: float
    added: tuple[tuple[str, int], ...] = ()  # operation -> how many more there are than before


Observer = Callable[[Step], None]


def run(
    program: Program,
    options: Mapping[str, Any],
    *,
    until: str | None = None,
    behind: str | None = None,
    verify: Callable[[Program, frozenset[str], str], None] | None = None,
    observe: Observer = lambda step: None,
) -> tuple[Step, ...]:
    """Run the passes in order, up to and including `until`; every step is told to `observe` as it ends.

    `behind` names a pass that has left the program as it is given: those after it run. `verify(program, facts, name)`
    runs after each pass. Raises PartcError P0604 for a pass that
    doesn't exist, P0702 for one that can't be left out.
    """
    if until == FIRST:
        return ()
    skipped = disabled()
    fuel.refill()
    facts = {"traced"}
    steps: list[Step] = []
    done = 0 if behind is None else 1 + NAMES.index(behind)
    for entry in PIPELINE[:done]:
        facts.update(entry.ensures)
    for entry in up_to(until)[done:]:
        if entry.name in skipped:
            tell(PASSES, f"{entry.name:<14} disabled")
            facts.update(entry.ensures)
            continue
        missing = set(entry.requires) - facts
        if missing:
            raise InternalError(
                f"pass {entry.name} needs {', '.join(sorted(missing))}, which nothing before it ensures"
            )
        start = time.perf_counter()
        after = entry.run(program, **{name: options[name] for name in entry.options if name in options})
        seconds = time.perf_counter() - start
        facts.update(entry.ensures)
        if verify is not None:
            verify(after, frozenset(facts), entry.name)
        step = Step(
            name=entry.name, label=entry.label, program=after, seconds=seconds, added=_difference(program, after)
        )
        _report(step)
        observe(step)
        steps.append(step)
        program = after
    return tuple(steps)


def up_to(name: str | None) -> tuple[Pass, ...]:
    """The passes up to and including a named one; all of them for None."""
    return PIPELINE if name is None else PIPELINE[: NAMES.index(known(name)) + 1]


def before(name: str) -> tuple[str, ...]:
    """The names of what runs before a pass, the trace included."""
    return (FIRST, *NAMES[: NAMES.index(name)])


def known(name: str) -> str:
    """The name itself, where a pass has it. Raises PartcError P0604."""
    if name not in (FIRST, *NAMES):
        raise PartcError("P0604", f"there is no pass {name!r}", help=f"the passes are {', '.join((FIRST, *NAMES))}")
    return name


def disabled() -> frozenset[str]:
    """The passes that PARTC_DISABLE leaves out. Raises PartcError P0604 and P0702."""
    names = frozenset(map(known, settings().disabled))
    fixed = sorted(names - {entry.name for entry in PIPELINE if entry.optional})
    if fixed:
        possible = [entry.name for entry in PIPELINE if entry.optional]
        raise PartcError(
            "P0702",
            f"PARTC_DISABLE cannot leave out {fixed[0]!r}: later passes need what it does",
            help=f"these can be left out: {', '.join(possible) or 'none yet'}",
        )
    return names


def provenance(traced: Program, steps: tuple[Step, ...]) -> dict[str, str]:
    """Which pass first made each value: "region.value" -> pass, or `trace`."""
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


def _report(step: Step) -> None:
    tell(PASSES, f"{step.name:<14} {step.seconds:8.3f} s")
    if step.added:
        tell(OP_COUNTS, "  " + ", ".join(f"{name} {count:+d}" for name, count in step.added))
    if settings().debug >= IR:
        tell(IR, print_program(step.program))
