"""Write down the statements of each action: calls, gathers, scatters, sums, sends and receives.

    schedule 0: 0F0 0B0 0REDUCE_GRAD     ->     action 0F:
                                                  start gather blocks.0: all_gather(f32[27168] over dp)
                                                  wait gather blocks.0
                                                  run F blocks.0
                                                  free gather blocks.0

This pass inserts ZeRO's gathers and scatters, by the `zero` of each parameter. The wait for an exchange follows its
start directly; `prefetch` puts the two apart. The sum of a bucket starts after the call that completes it, and is
waited for in REDUCE_GRAD. If it runs inside nodes first, its collective between nodes starts one call later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from partc.communication.exchanges import Chains, Exchanges, GradientSums, graph_of, in_turn
from partc.ir.mesh import PIPELINE_AXIS
from partc.ir.naming import gradient_name
from partc.ir.program import (
    ActionStatement,
    Body,
    BodyKind,
    Bucket,
    Call,
    GraphKind,
    Phase,
    Program,
    Subject,
    Verb,
    When,
)


def actions(program: Program) -> Program:
    """Set the bodies of a scheduled program."""
    exchanges = program.derived(Exchanges)
    bodies = [body for stage in range(program.stages) for body in _BodyWriter(exchanges, stage).bodies()]
    ends = [_end(exchanges, place) for place in range(program.mesh.axis(PIPELINE_AXIS))]
    return replace(program, bodies=tuple(body for body in (*bodies, *ends) if body.statements))


def _exchange(subject: Subject, of: str, chains: Chains, when: When = "") -> Iterator[ActionStatement]:
    """The statements of a whole exchange."""
    first, *rest = in_turn(chains) or ((),)
    yield ActionStatement(verb="start", subject=subject, of=of, collectives=first, when=when)
    for each in rest:
        yield ActionStatement(verb="advance", subject=subject, of=of, collectives=each, when=when)
    yield ActionStatement(verb="wait", subject=subject, of=of, when=when)


def _end(exchanges: Exchanges, place: int) -> Body:
    """The statements of a rank after its last action."""
    subjects: tuple[tuple[Subject, Mapping[str, Chains]], ...] = (
        ("shared", exchanges.shared_sums(place)),
        ("result", exchanges.result_sums(place)),
    )
    sums = (_exchange(subject, name, chains) for subject, found in subjects for name, chains in found.items())
    statements = [each for exchange in sums for each in exchange]
    return Body(kind="END", index=place, statements=(*statements, ActionStatement(verb="run", subject="update")))


@dataclass(frozen=True)
class _BodyWriter:
    exchanges: Exchanges
    index: int

    @property
    def program(self) -> Program:
        return self.exchanges.program

    @property
    def sums(self) -> GradientSums:
        return self.exchanges.sums(self.index)

    def bodies(self) -> Iterator[Body]:
        kinds = self.program.kinds(self.index)
        trained = not self.program.results
        written: Mapping[BodyKind, Iterable[ActionStatement]] = {
            "INIT": () if trained else self._refreshes(),
            "SETUP": self._phase_statements("setup"), "PREPARE": self._phase_statements("step"),
            "F": self._compute("F"), "B": self._compute("B"), "I": self._compute("I"), "W": self._compute("W"),
            "SEND_F": self._transfers("SEND_F"), "RECV_F": self._transfers("RECV_F"),
            "SEND_B": self._transfers("SEND_B"), "RECV_B": self._transfers("RECV_B"),
            "REDUCE_GRAD": self._reduce(), "REFRESH": self._refreshes() if trained else (),
        }  # fmt: skip
        always = ("INIT", "SETUP", "PREPARE", "REDUCE_GRAD", "REFRESH")
        for kind, statements in written.items():
            if kind in kinds or kind in always:
                yield Body(kind=kind, index=self.index, statements=tuple(statements))

    def _in_phase(self, phase: Phase) -> list[Call]:
        calls = self.program.calls_of(self.index)
        return [call for call in calls if self.program.region(call.region).phase == phase]

    def _refreshes(self) -> Iterator[ActionStatement]:
        """The gathers of parameters that stay whole."""
        for name, names in self.exchanges.whole_copies(self.index).items():
            if chains := self.exchanges.gather(names):
                yield from _exchange("refresh", name, chains)

    def _phase_statements(self, phase: Phase) -> Iterator[ActionStatement]:
        for call in self._in_phase(phase):
            yield ActionStatement(verb="run", subject="F", of=call.name)

    def _transfers(self, kind: Literal["SEND_F", "RECV_F", "SEND_B", "RECV_B"]) -> Iterator[ActionStatement]:
        verb: Verb = "send" if kind.startswith("SEND") else "receive"
        forward = kind.endswith("_F")
        leaving = (verb == "send") == forward  # the stage that computes a value sends it and receives its gradient
        found = [
            transfer
            for transfer in self.program.sent
            if self.index == (transfer.source if leaving else transfer.target) and (forward or transfer.gradient)
        ]
        if leaving:  # a stage sends a value to all its readers, and receives all its gradients, before the next
            names = list(dict.fromkeys(transfer.value for transfer in found))
            found.sort(key=lambda transfer: names.index(transfer.value))
        for transfer in found:
            name = transfer.value if forward else gradient_name(transfer.value)
            peer = transfer.target if leaving else transfer.source
            yield ActionStatement(verb=verb, subject="value", of=name, peer=peer)

    def _compute(self, kind: GraphKind) -> Iterator[ActionStatement]:
        if kind != "W":
            yield from (replace(each, verb="wait") for each in self._transfers("RECV_F" if kind == "F" else "RECV_B"))
        started: list[Bucket] = []
        for call in self._playing(kind):
            yield from self._call(call, kind)
            if kind == self._completing:
                yield from (self._bucket(each)[1] for each in started if self._in_two(each))
                started = self._after.get(call.name, [])
                yield from (self._bucket(each)[0] for each in started)

    def _playing(self, kind: GraphKind) -> list[Call]:
        """The calls with a graph of this kind, in the order in which an action plays them."""
        calls = self._in_phase("microbatch")
        playing = [call for call in calls if graph_of(self.program.region(call.region), kind) is not None]
        return playing[::-1] if kind in ("B", "I") else playing

    @property
    def _completing(self) -> GraphKind:
        """The kind of graph that completes gradients of weights."""
        return "W" if "W" in self.program.kinds(self.index) else "B"

    def _call(self, call: Call, kind: GraphKind) -> Iterator[ActionStatement]:
        gathers = self.exchanges.gathers(call, kind)
        if gathers:
            yield from _exchange("gather", call.name, self.exchanges.gather(call.params))
        yield ActionStatement(verb="run", subject=kind, of=call.name)
        if gathers:
            yield ActionStatement(verb="free", subject="gather", of=call.name)
        if self.exchanges.scatters(call, kind):
            yield from _exchange("scatter", call.name, self.exchanges.scatter(call, kind))

    def _bucket(self, bucket: Bucket) -> list[ActionStatement]:
        return self._of_buckets[bucket.name]

    @cached_property
    def _of_buckets(self) -> Mapping[str, list[ActionStatement]]:
        chains = ((each.name, self.exchanges.bucket_collectives(each)) for each in self.sums.buckets)
        return {name: list(_exchange("bucket", name, each, when="last")) for name, each in chains}

    @cached_property
    def _after(self) -> Mapping[str, list[Bucket]]:
        """The buckets that each call completes."""
        found: dict[str, list[Bucket]] = {}
        for bucket in self.sums.buckets:
            found.setdefault(bucket.after, []).append(bucket)
        return found

    def _in_two(self, bucket: Bucket) -> bool:
        """Whether a sum runs inside nodes and between them."""
        return all(self.program.transport.levels(bucket.over))

    def _reduce(self) -> Iterator[ActionStatement]:
        """The ends of sums that have started; then the other sums, which may read the results of scatters."""
        order = [call.name for call in self._playing(self._completing)]
        early = sorted((each for each in self.sums.buckets if each.after), key=lambda each: order.index(each.after))
        left = {each.name: self._bucket(each)[1 + (self._in_two(each) and each.after != order[-1]) :] for each in early}
        scattered = [left[each.name] for each in early if each.scattered]
        yield from (each for statements in scattered for each in statements[:-1])
        yield from (statements[-1] for statements in scattered)
        axes = list(dict.fromkeys(each.over for each in early))
        sums = [each for over in axes for each in early if each.over == over and not each.scattered]
        yield from (each for bucket in sums for each in left[bucket.name])
        rest = [each for each in self.sums.buckets if not each.after]
        yield from (each for bucket in rest if bucket.scattered for each in self._bucket(bucket))
        late = [self._bucket(bucket) for bucket in rest if not bucket.scattered]
        yield from (statements[0] for statements in late)
        yield from (each for statements in late for each in statements[1:])
