"""One pipeline stage of a program: what its module holds, and the Stage class line by line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from partc.codegen.calls import Run, place_of, runs
from partc.codegen.functions import region_code
from partc.codegen.names import Names, identifier, region_names
from partc.codegen.source import Argument, Function, Line, RegionCode
from partc.codegen.steps import Steps
from partc.codegen.weights import Entry, Repeated, Weights, strings
from partc.layout import SubDim
from partc.mesh import TIME_AXIS
from partc.parts import Parts
from partc.program import Phase, Program
from partc.quoting import literal, masked
from partc.strides import dense


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """A tuple class of a region's parameters."""

    name: str
    fields: tuple[Argument, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCode:
    """All that the template of a stage module lays out."""

    index: int
    title: str
    units: tuple[tuple[Params | None, tuple[Function, ...]], ...]
    tables: tuple[tuple[str, tuple[Entry, ...]], ...]
    parameters: tuple[Entry | Repeated, ...]
    inputs: tuple[Entry, ...]
    sends: tuple[Entry, ...]
    gradients_from: tuple[Entry, ...]
    receives: tuple[Entry, ...]
    loss: str
    loss_partial: str
    init: tuple[Line, ...]
    setup: tuple[Line, ...]
    prepare: tuple[Line, ...]
    forward: tuple[Line, ...]
    backward: tuple[Line, ...]
    weight: tuple[Line, ...]
    split: bool  # backward is of the inputs alone, weight of the weights
    reduce: tuple[Line, ...]
    refresh: tuple[Line, ...]
    buckets: tuple[str, ...]
    shared: tuple[Entry, ...]
    shared_note: str
    imports: frozenset[str]
    compiled: frozenset[str]  # functions that torch.compile makes kernels of


def stage_code(program: Program, index: int) -> StageCode:
    return _Builder(program, index).build()


class _Builder:
    """Names and places of everything in one stage."""

    def __init__(self, program: Program, index: int) -> None:
        self.program = program
        self.index = index
        self.calls = [call for call in program.calls if call.stage == index]
        self.regions = {region.name: region for region in program.regions}
        self.dense = dense(program)
        self.runs: dict[Phase, list[Run]] = {
            phase: runs(program, [call for call in self.calls if self.regions[call.region].phase == phase])
            for phase in ("setup", "step", "microbatch")
        }
        self.types = program.value_types()
        self.parts = Parts(program)
        self.codes = self._region_codes()
        self.attributes = Names(_STAGE_ATTRIBUTES)
        every = [run for phase in self.runs.values() for run in phase]
        self.weights = Weights(program, index, every, self.codes, self.attributes, self.parts)
        self.attribute = self.weights.attribute
        self.starts, self.started = self.weights.starts, self.weights.started
        self.places = {name: f"batch[{literal(name)}]" for name in program.inputs}
        # A schedule may ask for the halves of a stage that has no weights.
        halves = any(a.stage == index and a.kind == "I" for actions in program.schedule for a in actions)
        self.split = halves or any(code.weight for code in self.codes.values())
        self.sent = [t for t in program.transfers if t.source == index]
        self.received = [t for t in program.transfers if t.target == index]
        self.places.update((t.value, f"received[{literal(t.value)}]") for t in self.received)

    def build(self) -> StageCode:
        init = self.weights.init()
        setup = self._once("setup")
        prepare = self._once("step")
        locals_ = Steps(self)
        forward = locals_.forward()
        backward = locals_.backward()
        weight = locals_.weight()
        tables, parameters = self.weights.tables()
        regions = list(dict.fromkeys(call.region for call in self.calls))
        units = tuple(
            (
                Params(name=code.params_class, fields=code.fields) if code.params_class else None,
                tuple(function for function in (code.forward, code.backward, code.weight) if function),
            )
            for code in (self.codes[name] for name in regions)
        )
        lines = [*init, *setup, *prepare, *forward, *backward, *weight, *self.weights.reduce()]
        text = "\n".join(masked(line.code)[0] for _, functions in units for f in functions for line in f.lines)
        text += "\n".join(masked(line.code)[0] for line in lines)
        compiled = {
            function.name
            for run in (self.runs["microbatch"] if self.program.compiled else ())
            for code in (self.codes[run.region.name],)
            for function in (code.forward, code.backward, code.weight)
            if function
        }
        loss = self.program.loss if self.makes(self.program.loss) else ""
        partial = self.types[self.program.loss].layout.partial if loss else ()
        return StageCode(
            index=self.index,
            title=_listed(self._title(run) for run in self.runs["microbatch"] if self._has_parameters(run))
            or _listed(run.prefix for run in self.runs["microbatch"]),
            units=units,
            tables=tables,
            parameters=parameters,
            inputs=tuple(Entry(key=name, value=f"Shard({literal(self._input_type(name))})") for name in self._inputs()),
            sends=self._targets(gradient=False),
            gradients_from=self._targets(gradient=True),
            receives=self._receives(),
            loss=literal(loss) if loss else "None",
            loss_partial=strings(axis for axis in partial if axis != TIME_AXIS and self.program.sizes[axis] > 1),
            init=(*init, *locals_.reads()),
            setup=tuple(setup),
            prepare=tuple(prepare),
            forward=tuple(forward),
            backward=tuple(backward),
            weight=tuple(weight),
            split=self.split,
            reduce=tuple(self.weights.reduce()),
            refresh=tuple(self.weights.refresh()),
            buckets=self.weights.buckets(),
            shared=self.weights.shared(),
            shared_note=self.weights.shared_note(),
            compiled=frozenset(compiled),
            imports=frozenset(
                name
                for name in ("torch", "F", "functional", "kernels", "math", "Parts", "Sums")
                if re.search(rf"(?<![\w.]){name}[.(]", text)
            ),
        )

    def _region_codes(self) -> dict[str, RegionCode]:
        codes: dict[str, RegionCode] = {}
        called = region_names(dict.fromkeys(call.region for call in self.calls))
        for phase_runs in self.runs.values():
            for run in phase_runs:
                region = run.region
                if region.name in codes:
                    continue
                same = [other for other in phase_runs if other.region.name == region.name]
                what = _listed(map(self._title, same)) if region.params else _PHASES[region.phase]
                prefix = next(call.name for call in self.program.calls if call.region == region.name)
                codes[region.name] = region_code(
                    region,
                    self.program.sizes,
                    prefix,
                    f"{what}{place_of(region)}.",
                    called[region.name],
                    self._updated(run),
                    gives=self.program.zero >= 2 and self.parts.has_parts(run.calls[0]),
                    dense=self.dense[region.name],
                )
        return codes

    def _updated(self, run: Run) -> dict[int, str]:
        """The outputs that are next values of buffers: position -> the buffer's name in the region."""
        call, local = (
            run.calls[0],
            {name: value.name for name, value in zip(run.calls[0].params, run.region.params, strict=True)},
        )
        buffers = {value: buffer for buffer, value in self.program.updates}
        return {index: local[buffers[name]] for index, name in enumerate(call.results) if name in buffers}

    def _title(self, run: Run) -> str:
        return f"{run.calls[0].name} to {run.calls[-1].name}" if run.loop else run.calls[0].name

    def _has_parameters(self, run: Run) -> bool:
        return bool(run.region.params)

    def makes(self, name: str) -> bool:
        return any(name in call.results for call in self.calls)

    def _input_type(self, name: str) -> str:
        """The type of a whole step's entry; microbatches that are batches of their own follow each other in it."""
        type = self.types[name]
        if self.program.repeated and name in self.program.batch_entries:
            first, *rest = type.layout.dims
            every = SubDim(self.program.microbatches, (TIME_AXIS,))
            return f"{type.dtype}{replace(type.layout, dims=((every, *first), *rest))}"
        return str(type)

    def _inputs(self) -> list[str]:
        """Entries of the batch that this stage reads."""
        read = {name for call in self.calls for name in call.args}
        return [name for name in self.program.inputs if name in read]

    def _targets(self, gradient: bool) -> tuple[Entry, ...]:
        targets: dict[str, list[int]] = {}
        for transfer in self.sent:
            if transfer.gradient or not gradient:
                targets.setdefault(transfer.value, []).append(transfer.target)
        return tuple(Entry(key=name, value=str(tuple(stages))) for name, stages in targets.items())

    def _receives(self) -> tuple[Entry, ...]:
        entries = []
        for transfer in self.received:
            type = self.types[transfer.value]
            shape = type.layout.local_shape(self.program.sizes)
            gradient = "" if transfer.gradient else ", gradient=False"
            value = f"Received(source={transfer.source}, shape={shape}, dtype={literal(type.dtype)}{gradient})"
            entries.append(Entry(key=transfer.value, value=value))
        return tuple(entries)

    def _once(self, phase: Phase) -> list[Line]:
        """Calls whose results are kept for all that follows."""
        lines = []
        for run in self.runs[phase]:
            for call in run.calls:
                targets = []
                for name in call.results:
                    self.places[name] = f"self.{self.attributes.fresh(identifier(name))}"
                    targets.append(self.places[name])
                arguments = self.arguments(self.codes[call.region].forward, run, self.placed(call.args), "self.comm")
                lines.append(Line(code=f"{', '.join(targets)} = {self.codes[call.region].forward.name}({arguments})"))
        return lines

    def arguments(self, function: Function, run: Run, args: Iterable[str], comm: str, p: str = "", g: str = "") -> str:
        """What a region's function is called with: comm, p, g and number if it takes them, then values."""
        given = {"comm": comm, "p": p or self.attribute(run), "g": g or self.attribute(run, "grad ")}
        given["number"] = "number" if run.loop else str(run.calls[0].random)
        common = [given[argument.name] for argument in function.arguments if argument.name in function.passes]
        return ", ".join((*common, *args))

    def placed(self, names: Iterable[str]) -> list[str]:
        """Where program values are to be read."""
        return [self.places[name] for name in names]


_STAGE_ATTRIBUTES = [
    "comm",
    "parts",
    "sums",
    "buckets",
    "refresh",
    "reads",
    "parameters",
    "gradients",
    "inputs",
    "sends",
    "gradients_from",
    "receives",
    "loss",
    "loss_partial",
    "shared",
    "setup",
    "prepare",
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "reduce_gradients",
]
_PHASES: dict[Phase, str] = {
    "setup": "A constant of the model",
    "step": "Counted over the batch, once per step",
    "microbatch": "Made from the batch alone",
}


def _listed(items: Iterable[str]) -> str:
    words = list(dict.fromkeys(items))
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)
