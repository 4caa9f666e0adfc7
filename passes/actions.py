"""Write down the statements of each action: calls, gathers, scatters, sums, sends and receives.

    schedule 0: 0F0 0B0 0REDUCE_GRAD     ->     action 0F:
                                                  start gather blocks.0
                                                  wait gather blocks.0
                                                  run F blocks.0
                                                  free gather blocks.0

This pass inserts ZeRO's gathers and scatters, by the `zero` of each parameter. The wait for an exchange follows its
start directly; `prefetch` puts the two apart. A sum of gradients starts as soon as its bucket is complete, and is
waited for in REDUCE_GRAD.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from partc.communication.exchanges import Exchanges, graph_of
from partc.ir.mesh import PIPELINE_AXIS
from partc.ir.program import ActionKind, ActionStatement, Body, BodyKind, Call, GraphKind, Phase, Program, Verb


def actions(program: Program) -> Program:
    """Set the bodies of a scheduled program."""
    exchanges = Exchanges(program)
    bodies = [body for stage in range(program.stages) for body in _BodyWriter(exchanges, stage).bodies()]
    ends = [_end(exchanges, place) for place in range(program.mesh.axis(PIPELINE_AXIS))]
    return replace(program, bodies=tuple(body for body in (*bodies, *ends) if body.statements))


def _end(exchanges: Exchanges, place: int) -> Body:
    """The statements of a rank after its last action."""
    program = exchanges.program
    stages = program.stages_at(place)
    shared = any(exchanges.sums(stage).shared() for stage in stages)
    returned = set(program.returned)
    loss = any(returned.intersection(call.results) and call.stage in stages for call in program.calls)
    statements = [ActionStatement(verb="start", subject="shared")] if shared else []
    statements += [ActionStatement(verb="start", subject="loss")] if loss else []
    return Body(kind="END", index=place, statements=(*statements, ActionStatement(verb="run", subject="update")))


@dataclass(frozen=True)
class _BodyWriter:
    exchanges: Exchanges
    index: int

    @property
    def program(self) -> Program:
        return self.exchanges.program

    def bodies(self) -> Iterator[Body]:
        kinds = {*self._kinds}
        if self._split and "B" in kinds:
            kinds |= {"I", "W"}  # whose code a whole backward pass runs
        trained = not self.program.results
        written: Mapping[BodyKind, Iterable[ActionStatement]] = {
            "INIT": () if trained else self._kept(), "SETUP": self._once("setup"), "PREPARE": self._once("step"),
            "F": self._compute("F"), "B": self._compute("B"), "I": self._compute("I"), "W": self._compute("W"),
            "SEND_F": self._transfers("SEND_F"), "RECV_F": self._transfers("RECV_F"),
            "SEND_B": self._transfers("SEND_B"), "RECV_B": self._transfers("RECV_B"),
            "REDUCE_GRAD": self._reduce(), "REFRESH": self._kept() if trained else (),
        }  # fmt: skip
        always = ("INIT", "SETUP", "PREPARE", "REDUCE_GRAD", "REFRESH")
        for kind, statements in written.items():
            if kind in kinds or kind in always:
                yield Body(kind=kind, index=self.index, statements=tuple(statements))

    @cached_property
    def _kinds(self) -> frozenset[ActionKind]:
        return self.program.kinds(self.index)

    @cached_property
    def _calls(self) -> list[Call]:
        return [call for call in self.program.calls if call.stage == self.index]

    def _in_phase(self, phase: Phase) -> list[Call]:
        return [call for call in self._calls if self.exchanges.regions[call.region].phase == phase]

    def _kept(self) -> Iterator[ActionStatement]:
        """The gathers of parameters that stay whole. Calls of one region have equal statements."""
        kept = self.exchanges.kept(self.index)
        gathering = {call.region for call in self._calls if self.exchanges.gather(kept.get(call.name, ()))}
        for call in self._calls:
            if call.region in gathering:
                yield ActionStatement(verb="start", subject="refresh", of=call.name)
                yield ActionStatement(verb="wait", subject="refresh", of=call.name)

    def _once(self, phase: Phase) -> Iterator[ActionStatement]:
        for call in self._in_phase(phase):
            yield ActionStatement(verb="run", subject="F", of=call.name)

    def _transfers(self, kind: Literal["SEND_F", "RECV_F", "SEND_B", "RECV_B"]) -> Iterator[ActionStatement]:
        verb: Verb = "send" if kind.startswith("SEND") else "receive"
        forward = kind.endswith("_F")
        leaving = (verb == "send") == forward  # values leave where they are made; their gradients come back there
        found = [
            transfer
            for transfer in filter(self.program.travels, self.program.transfers)
            if self.index == (transfer.source if leaving else transfer.target) and (forward or transfer.gradient)
        ]
        if leaving:  # a stage sends a value to all its readers, and receives all its gradients, before the next
            names = list(dict.fromkeys(transfer.value for transfer in found))
            found.sort(key=lambda transfer: names.index(transfer.value))
        for transfer in found:
            name = transfer.value if forward else f"grad_{transfer.value}"
            peer = transfer.target if leaving else transfer.source
            yield ActionStatement(verb=verb, subject="value", of=name, peer=peer)

    def _compute(self, kind: GraphKind) -> Iterator[ActionStatement]:
        if kind != "W":
            yield from (replace(each, verb="wait") for each in self._transfers("RECV_F" if kind == "F" else "RECV_B"))
        for run, calls in self._runs(kind):
            for call in calls:
                yield from self._call(call, run)

    def _runs(self, kind: GraphKind) -> tuple[tuple[GraphKind, list[Call]], ...]:
        """The graphs that an action plays, in order."""
        calls = self._in_phase("microbatch")
        found: dict[GraphKind, tuple[tuple[GraphKind, list[Call]], ...]] = {
            "F": (("F", calls),),
            "I": (("I", calls[::-1]),),
            "W": (("W", calls),),
            "B": (("I", calls[::-1]), ("W", calls)) if self._split else (("B", calls[::-1]),),
        }
        return found[kind]

    @cached_property
    def _split(self) -> bool:
        """Whether the stage's backward passes have two halves, the second of which completes gradients."""
        return "I" in self._kinds or self.index in self.program.split_stages

    @cached_property
    def _summed(self) -> frozenset[str]:
        """Regions with a call after whose backward some sums start."""
        after = {bucket.after for bucket in self.exchanges.sums(self.index).buckets}
        return frozenset(call.region for call in self._calls if call.name in after)

    def _call(self, call: Call, kind: GraphKind) -> Iterator[ActionStatement]:
        graph = graph_of(self.exchanges.regions[call.region], kind)
        gathers = self.exchanges.gathers(call, kind)
        both: tuple[Verb, ...] = ("start", "wait")
        for verb in both if gathers else ():
            yield ActionStatement(verb=verb, subject="gather", of=call.name)
        if graph is None:
            return
        yield ActionStatement(verb="run", subject=kind, of=call.name)
        if gathers:
            yield ActionStatement(verb="free", subject="gather", of=call.name)
        for verb in both if self.exchanges.scatters(call, kind) else ():
            yield ActionStatement(verb=verb, subject="scatter", of=call.name)
        sums = self.exchanges.sums(self.index)
        if kind == ("W" if self._split else "B"):
            if sums.relays:
                yield ActionStatement(verb="relay", subject="sums", last=True)
            if call.region in self._summed:
                yield ActionStatement(verb="start", subject="sums", of=call.name, last=True)

    def _reduce(self) -> Iterator[ActionStatement]:
        sums = self.exchanges.sums(self.index)
        if sums.early:
            yield ActionStatement(verb="wait", subject="sums")
        if sums.after(""):
            yield ActionStatement(verb="start", subject="sums")
            yield ActionStatement(verb="wait", subject="sums")
