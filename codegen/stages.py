"""The module of one pipeline stage: its tables, and the Stage class line by line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from partc.codegen.access import Units
from partc.codegen.calls import Run, listed, runs
from partc.codegen.names import Names, identifier
from partc.codegen.source import Function, Line, RegionCode, imported
from partc.codegen.steps import StepWriter
from partc.codegen.weights import Entry, Repeated, Weights, strings
from partc.communication.exchanges import Exchanges
from partc.errors import InternalError
from partc.ir.mesh import TIME_AXIS
from partc.ir.program import Phase
from partc.quoting import literal, masked


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCode:
    """The fields of the template of a stage module."""

    index: int
    title: str
    regions: tuple[str, ...]  # the lines that import them
    tables: tuple[tuple[str, tuple[Entry, ...]], ...]
    parameters: tuple[Entry | Repeated, ...]
    inputs: tuple[Entry, ...]
    sends: tuple[Entry, ...]
    gradients_from: tuple[Entry, ...]
    receives: tuple[Entry, ...]
    loss: str
    loss_partial: str
    results: tuple[Entry, ...]
    returns: bool  # whether the program has results, and no loss
    init: tuple[Line, ...]
    setup: tuple[Line, ...]
    prepare: tuple[Line, ...]
    forward: tuple[Line, ...]
    backward: tuple[Line, ...]
    weight: tuple[Line, ...]
    split: bool  # whether gradients of weights have a method of their own, `weight`
    ahead: Mapping[str, str]  # method -> its parameters for the units of later actions
    lookahead: int
    reduce: tuple[Line, ...]
    refresh: tuple[Line, ...]
    buckets: tuple[str, ...]
    scatters: bool  # whether some buckets are scattered
    shared: tuple[Entry, ...]
    shared_note: str
    imports: frozenset[str]
    compiled: bool


def stage_code(exchanges: Exchanges, index: int, regions: Mapping[str, RegionCode], prefix: str = "") -> StageCode:
    """`regions` has the code of every region of the program; their modules' names start with `prefix`."""
    return _Builder(exchanges, index, regions, prefix).build()


class _Builder:
    """State that the writers of one stage module share."""

    def __init__(self, exchanges: Exchanges, index: int, codes: Mapping[str, RegionCode], prefix: str) -> None:
        program = exchanges.program
        if not program.bodies:
            raise InternalError("a stage is emitted from the statements of its actions, which pass `actions` writes")
        self.program = program
        self.index = index
        self.prefix = prefix
        self.calls = [call for call in program.calls if call.stage == index]
        self.regions = {region.name: region for region in program.regions}
        self.runs: dict[Phase, list[Run]] = {
            phase: runs(program, [call for call in self.calls if self.regions[call.region].phase == phase])
            for phase in ("setup", "step", "microbatch")
        }
        self.types = program.value_types()
        self.exchanges = exchanges
        self.codes = {name: codes[name] for name in dict.fromkeys(call.region for call in self.calls)}
        self.attributes = Names(_STAGE_ATTRIBUTES)
        every = [run for phase in self.runs.values() for run in phase]
        self.weights = Weights(program, index, every, self.codes, self.attributes, self.exchanges)
        self.attribute = self.weights.attribute
        self.started, self.late, self.refreshed = self.weights.started, self.weights.late, self.weights.refreshed
        self.places = {name: f"batch[{literal(name)}]" for name in program.inputs}
        # A schedule may ask for the halves of a stage that has no weights.
        self.split = "I" in program.kinds(index) or any(code.weight for code in self.codes.values())
        self.sent = [t for t in program.transfers if t.source == index]
        self.received = [t for t in program.transfers if t.target == index]
        self.places.update((t.value, f"received[{literal(t.value)}]") for t in self.received)

    def build(self) -> StageCode:
        init = self.weights.init()
        setup = self._once("setup")
        prepare = self._once("step")
        locals_ = StepWriter(self)
        forward = locals_.forward()
        backward = locals_.backward()
        weight = locals_.weight()
        tables, parameters = self.weights.tables()
        reduce, refresh = locals_.reduce(), locals_.refresh()
        opens = locals_.opens()
        lines = [*init, *setup, *prepare, *forward, *backward, *weight, *reduce, *refresh]
        text = "\n".join(masked(line.code)[0] for line in lines)
        loss = self.program.loss if self.makes(self.program.loss) and not self.program.results else ""
        partial = self.types[self.program.loss].layout.partial if loss else ()
        return StageCode(
            index=self.index,
            title=listed(run.title for run in self.runs["microbatch"] if run.region.params)
            or listed(run.prefix for run in self.runs["microbatch"]),
            regions=tuple(
                imported(f"{self.prefix}regions.{code.module}", code.imported)
                for code in sorted(self.codes.values(), key=lambda code: code.module)
            ),
            tables=tables,
            parameters=parameters,
            inputs=tuple(
                Entry(key=name, value=f"Shard({literal(str(self.program.step_input(name)))})")
                for name in self._inputs()
            ),
            sends=self._targets(gradient=False),
            gradients_from=self._targets(gradient=True),
            receives=self._receives(),
            loss=literal(loss) if loss else "None",
            loss_partial=strings(axis for axis in partial if axis != TIME_AXIS and self.program.sizes[axis] > 1),
            results=tuple(
                Entry(
                    key=path,
                    value=f"Returned({literal(name)}, Shard({literal(str(self.types[name]))}){self._sums(name)})",
                )
                for path, name in self.program.results
                if self.makes(name)
            ),
            returns=bool(self.program.results),
            init=(*init, *locals_.init()),
            setup=tuple(setup),
            prepare=tuple(prepare),
            forward=tuple(forward),
            backward=tuple(backward),
            weight=tuple(weight),
            split=self.split,
            ahead=locals_.ahead(),
            lookahead=self.exchanges.levels if opens else 0,
            reduce=tuple(reduce),
            refresh=tuple(refresh),
            buckets=self.weights.buckets(),
            scatters=self.weights.scatters,
            shared=self.weights.shared(),
            shared_note=self.weights.shared_note(),
            compiled=self.program.kernels == "inductor",
            imports=frozenset(
                name for name in ("torch", "kernels", "Parts", "Sums") if re.search(rf"(?<![\w.]){name}[.(]", text)
            )
            | ({"Unit"} if opens else frozenset())
            | ({"NOTHING"} if any("NOTHING" in line.code for line in lines) else frozenset()),
        )

    def _sums(self, name: str) -> str:
        """The axes over which a result is summed, as an argument."""
        axes = [axis for axis in self.types[name].layout.partial if self.program.sizes.get(axis, 1) > 1]
        return f", partial={strings(axes)}" if axes else ""

    def makes(self, name: str) -> bool:
        return any(name in call.results for call in self.calls)

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
        """Calls of a phase whose results the stage keeps."""
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
        """The arguments of a region's function: comm, p, g and number if it takes them, then values."""
        given = {"comm": comm, "p": p or self.attribute(run), "g": g or self.attribute(run, "grad ")}
        given["number"] = "number" if run.loop else str(run.calls[0].random)
        common = [given[argument.name] for argument in function.arguments if argument.name in function.passes]
        return ", ".join((*common, *args))

    def unit(self, call: str) -> str:
        """The attribute of a call's unit of parameters."""
        return Units(self).one(call)

    def placed(self, names: Iterable[str]) -> list[str]:
        """The expressions of program values."""
        return [self.places[name] for name in names]


_STAGE_ATTRIBUTES = [
    "comm",
    "parts",
    "sums",
    "buckets",
    "refresh",
    "opens",
    "lookahead",
    "parameters",
    "gradients",
    "inputs",
    "sends",
    "gradients_from",
    "receives",
    "loss",
    "loss_partial",
    "results",
    "shared",
    "setup",
    "prepare",
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "reduce_gradients",
]
