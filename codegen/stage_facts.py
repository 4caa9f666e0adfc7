"""The facts about one pipeline stage from which its module is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from partc.codegen.calls import Run, runs
from partc.codegen.names import Names, emitted_name
from partc.codegen.source import Function, RegionCode
from partc.communication.exchanges import Exchanges
from partc.errors import InternalError
from partc.ir.program import ActionStatement, BodyKind, Call, Phase, Program, TensorType, Transfer
from partc.quoting import literal

PHASES: tuple[Phase, ...] = ("setup", "step", "microbatch")
# The attributes of every stage.
_ATTRIBUTES = (
    "comm", "parts", "sums", "buckets", "refresh", "first_units", "lookahead", "refreshes", "scattering", "former",
    "parameters", "gradients", "inputs", "sends", "gradients_from", "receives", "loss", "loss_partial", "results",
    "compiled", "shared", "setup", "prepare", "forward", "backward", "backward_input", "backward_weight",
    "reduce_gradients",
)  # fmt: skip


@dataclass(frozen=True)
class StageFacts:
    """A stage of a program. `all_codes` has the code of every region of the program."""

    exchanges: Exchanges
    index: int
    all_codes: Mapping[str, RegionCode]

    def __post_init__(self) -> None:
        if not self.program.bodies:
            raise InternalError("a stage is emitted from the statements of its actions, which pass `actions` writes")

    @property
    def program(self) -> Program:
        return self.exchanges.program

    def body(self, kind: BodyKind) -> tuple[ActionStatement, ...]:
        return self.program.body(kind, self.index)

    @property
    def calls(self) -> tuple[Call, ...]:
        return self.program.calls_of(self.index)

    @cached_property
    def codes(self) -> Mapping[str, RegionCode]:
        """The code of the regions that this stage calls."""
        return {name: self.all_codes[name] for name in dict.fromkeys(call.region for call in self.calls)}

    @cached_property
    def runs(self) -> Mapping[Phase, list[Run]]:
        return {
            phase: runs(self.program, [call for call in self.calls if self.program.region(call.region).phase == phase])
            for phase in PHASES
        }

    @cached_property
    def every_run(self) -> list[Run]:
        return [run for phase in PHASES for run in self.runs[phase]]

    @cached_property
    def types(self) -> Mapping[str, TensorType]:
        return self.program.value_types()

    @cached_property
    def sent(self) -> list[Transfer]:
        return [transfer for transfer in self.program.transfers if transfer.source == self.index]

    @cached_property
    def received(self) -> list[Transfer]:
        return [transfer for transfer in self.program.transfers if transfer.target == self.index]

    @cached_property
    def split(self) -> bool:
        """Whether backward passes run in halves."""
        return "I" in self.program.kinds(self.index)

    def makes(self, name: str) -> bool:
        return any(name in call.results for call in self.calls)

    def attribute(self, run: Run, kind: str = "") -> str:
        """The attribute of a run's parameters, or (`grad `) of their gradients."""
        return f"self.{self._attributes[kind + self._called(run)]}"

    def _called(self, run: Run) -> str:
        """The name of a run. Runs over one module list that call different regions are numbered."""
        if not run.loop:
            return run.calls[0].name
        loops = [other for other in self.every_run if other.loop and other.prefix == run.prefix]
        return f"{run.prefix}{f'_{loops.index(run) + 1}' if run in loops[1:] else ''}"

    @cached_property
    def _attributes(self) -> Names:
        names = Names(_ATTRIBUTES)
        for run in self.every_run:
            for kind in ("", "grad ") if run.region.params else ():
                key = kind + self._called(run)
                names.bind(key, names.fresh(emitted_name(key)))
        return names

    @cached_property
    def given(self) -> Mapping[str, str]:
        """Expressions of the values that a microbatch's calls can read: from the batch, received, or computed once."""
        found = {name: f"batch[{literal(name)}]" for name in self.program.inputs}
        found.update((transfer.value, f"received[{literal(transfer.value)}]") for transfer in self.received)
        once = [call for phase in PHASES[:2] for run in self.runs[phase] for call in run.calls]
        made = [name for call in once for name in call.results]
        return found | {name: f"self.{self._attributes.fresh(emitted_name(name))}" for name in made}

    def arguments(self, function: Function, run: Run, args: Iterable[str], p: str = "", g: str = "") -> str:
        """The arguments of a region's function: comm, p, g and number if it takes them, then values."""

        def given(name: str) -> str:
            match name:
                case "comm":
                    return "self.comm"
                case "p":
                    return p or self.attribute(run)
                case "g":
                    return g or self.attribute(run, "grad ")
                case _:
                    return "number" if run.loop else str(run.calls[0].random)

        common = [given(argument.name) for argument in function.arguments if argument.name in function.passes]
        return ", ".join((*common, *args))
