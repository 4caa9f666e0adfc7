"""The module of one pipeline stage: its tables, and the Stage class line by line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from partc.codegen.source import Line, RegionCode, imported
from partc.codegen.stage_ends import StageEnds
from partc.codegen.stage_facts import StageFacts
from partc.codegen.steps import BackwardWriter, ForwardWriter
from partc.codegen.weights import Entry, Repeated, Weights, strings
from partc.communication.exchanges import Exchanges
from partc.ir.mesh import TIME_AXIS
from partc.ir.naming import listed
from partc.ir.program import Phase
from partc.quoting import literal


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCode:
    """The fields of the template of a stage module."""

    index: int
    title: str
    regions: tuple[str, ...]  # the lines that import the regions
    tables: tuple[tuple[str, tuple[Entry, ...]], ...]
    parameters: tuple[Entry | Repeated, ...]
    inputs: tuple[Entry, ...]
    sends: tuple[Entry, ...]
    gradients_from: tuple[Entry, ...]
    receives: tuple[Entry, ...]
    loss: str
    loss_partial: str
    results: tuple[Entry, ...]
    methods: Mapping[str, tuple[Line, ...]]  # the lines of each method; a method without lines is inherited
    split: bool  # whether there is a separate method for gradients of weights
    ahead: Mapping[str, str]  # method -> its parameters for gathers of later actions
    lookahead: int
    refreshes: bool  # whether the first forward pass waits for parameters that stay whole
    buckets: tuple[Entry, ...]
    scatters: bool  # whether some buckets are scattered
    shared: tuple[Entry, ...]
    shared_note: str
    compiled: bool
    uses: frozenset[str]  # modules and classes that it reads


def stage_code(exchanges: Exchanges, index: int, regions: Mapping[str, RegionCode], prefix: str = "") -> StageCode:
    """The code of a stage. `regions` has the code of every region of the program; module names start with `prefix`."""
    facts = StageFacts(exchanges, index, regions)
    program, weights, ends = facts.program, Weights(facts), StageEnds(facts)
    backward = BackwardWriter(facts)
    methods = {
        "init": (*weights.init(), *ends.init()),
        "setup": _single_run_calls(facts, "setup"),
        "prepare": _single_run_calls(facts, "step"),
        "forward": tuple(ForwardWriter(facts).lines()),
        "backward": () if program.results else tuple(backward.lines()),
        "weight": () if program.results else tuple(backward.weight()),
        "reduce": tuple(ends.reduce()),
        "refresh": tuple(ends.refresh()),
    }
    tables, parameters = weights.tables()
    ahead = ends.ahead()
    loss = program.loss if facts.makes(program.loss) and not program.results else ""
    partial = facts.types[program.loss].layout.partial if loss else ()
    results = _results(facts)
    uses = {name for lines in methods.values() for line in lines for name in line.uses}
    uses |= {"Unit"} if any(ahead.values()) else set()
    uses |= {"Shard"} if parameters or tables or results or _inputs(facts) else set()
    held = {name for call in facts.calls for name in call.params}
    uses |= {"Sectioned"} if any(program.parameter(name).sectioned for name in held) else set()
    uses |= {*(["Received"] if facts.received else []), *(["Returned"] if results else [])}
    return StageCode(
        index=index,
        title=listed(run.title for run in facts.runs["microbatch"] if run.region.params)
        or listed(run.prefix for run in facts.runs["microbatch"]),
        regions=tuple(
            imported(f"{prefix}regions.{code.module}", code.imported)
            for code in sorted(facts.codes.values(), key=lambda code: code.module)
        ),
        tables=tables,
        parameters=parameters,
        inputs=tuple(
            Entry(key=name, value=f"Shard({literal(str(program.step_input(name)))})") for name in _inputs(facts)
        ),
        sends=_targets(facts, gradient=False),
        gradients_from=_targets(facts, gradient=True),
        receives=_receives(facts),
        loss=literal(loss) if loss else "",
        loss_partial=strings(axis for axis in partial if axis != TIME_AXIS and program.sizes[axis] > 1),
        results=results,
        methods=methods,
        split=facts.split,
        ahead=ahead,
        lookahead=ends.lookahead,
        refreshes=ends.refreshes,
        buckets=weights.buckets(),
        scatters=weights.scatters,
        shared=weights.shared(),
        shared_note=weights.shared_note(),
        compiled=program.kernels == "inductor",
        uses=frozenset(uses),
    )


def _results(facts: StageFacts) -> tuple[Entry, ...]:
    def value(name: str) -> str:
        type, sizes = facts.types[name], facts.program.sizes
        axes = [axis for axis in type.layout.partial if sizes.get(axis, 1) > 1]
        partial = f", partial={strings(axes)}" if axes else ""
        return f"Returned({literal(name)}, Shard({literal(str(type))}){partial})"

    return tuple(Entry(key=path, value=value(name)) for path, name in facts.program.results if facts.makes(name))


def _inputs(facts: StageFacts) -> list[str]:
    """The entries of the batch that this stage reads."""
    read = {name for call in facts.calls for name in call.args}
    return [name for name in facts.program.inputs if name in read]


def _targets(facts: StageFacts, *, gradient: bool) -> tuple[Entry, ...]:
    targets: dict[str, list[int]] = {}
    for transfer in facts.sent:
        if transfer.gradient or not gradient:
            targets.setdefault(transfer.value, []).append(transfer.target)
    return tuple(Entry(key=name, value=str(tuple(stages))) for name, stages in targets.items())


def _receives(facts: StageFacts) -> tuple[Entry, ...]:
    entries = []
    for transfer in facts.received:
        type = facts.types[transfer.value]
        shape = type.layout.local_shape(facts.program.sizes)
        gradient = "" if transfer.gradient else ", gradient=False"
        value = f"Received(source={transfer.source}, shape={shape}, dtype={literal(type.dtype)}{gradient})"
        entries.append(Entry(key=transfer.value, value=value))
    return tuple(entries)


def _single_run_calls(facts: StageFacts, phase: Phase) -> tuple[Line, ...]:
    """The calls of a phase that runs once, such as setup; the stage keeps their results as attributes."""
    lines = []
    for run in facts.runs[phase]:
        function = facts.codes[run.region.name].forward
        for call in run.calls:
            arguments = facts.arguments(function, run, [facts.given[name] for name in call.args])
            results = ", ".join(facts.given[name] for name in call.results)
            lines.append(Line(code=f"{results} = {function.name}({arguments})"))
    return tuple(lines)
