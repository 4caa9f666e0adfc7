"""Put the actions of every pipeline rank in order.

    call embed = embed(ids; embed.weight) -> embed
    call head = head(out_2, labels, count; head.weight) -> loss stage 1
    transfer out 0 -> 1 gradient
  ->
    transfer out 0 -> 1 gradient
    schedule 0: 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1 0REDUCE_GRAD
    schedule 1: 1RECV_F0 1F0 1RECV_F1 1I0 1SEND_B0 1W0 1F1 1I1 1SEND_B1 1W1 1REDUCE_GRAD

The order of computations is the schedule's own (partc.schedules), or that of the user's table. A stage's backward
passes are all whole, or all run in halves: if `split` has cut them, or the schedule runs some of them in halves. Then
the stage sends between the halves. A send follows the computation of its values directly, and
does not wait. A receive only posts a buffer, in the order of the sends; the computation that reads the values waits.
Receives are posted one computation ahead, so that values arrive meanwhile; a gradient is received after its value has
been sent. Values between two stages of one rank are neither sent nor received. Gradients are reduced at the end, when
no other rank waits for a computation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal

from partc.errors import PartcError
from partc.ir.mesh import PIPELINE_AXIS
from partc.ir.program import Action, ActionKind, Program
from partc.schedules import SCHEDULES, Compute, compute_order
from partc.schedules.table import Table

Way = Literal["F", "B"]  # values, or their gradients
SEND: Mapping[Way, ActionKind] = {"F": "SEND_F", "B": "SEND_B"}
RECV: Mapping[Way, ActionKind] = {"F": "RECV_F", "B": "RECV_B"}
# The direction of the transfers that a computation reads and sends.
WAYS: Mapping[str, Way] = {"F": "F", "B": "B", "I": "B"}


def schedule(
    program: Program, *, kind: str = "1f1b", table: Table | None = None, forward_only: bool = False
) -> Program:
    """Set the actions of every pipeline rank; with `forward_only`, only forward computations, in the schedule's order.

    Raises PartcError P0406 if the schedule does not support the number of stages, P0411 if a stage reads from two
    stages that don't send in the same order.
    """
    ranks = program.mesh.axis(PIPELINE_AXIS)
    rows = table.rows if table else compute_order(SCHEDULES[kind], ranks, program.microbatches, program.stages)
    if forward_only:
        rows = tuple(tuple(compute for compute in row if compute.kind == "F") for row in rows)
    links = _Links.of(program, rows)
    ends = [
        () if forward_only else tuple(Action(stage=stage, kind="REDUCE_GRAD") for stage in program.stages_at(rank))
        for rank in range(ranks)
    ]
    return replace(program, schedule=tuple((*links.around(row), *ends[rank]) for rank, row in enumerate(rows)))


@dataclass(frozen=True, slots=True)
class _Links:
    """The transfers between stages on different ranks: values from earlier stages, gradients from later ones."""

    arrivals: Mapping[tuple[int, Way], Sequence[int]]  # microbatches in the order of sending
    numbers: Mapping[tuple[int, Way], Mapping[int, int]]  # their places in this order
    senders: frozenset[tuple[int, Way]]
    split: frozenset[int]  # stages whose backward passes have two halves

    @classmethod
    def of(cls, program: Program, rows: Sequence[Sequence[Compute]]) -> _Links:
        turns: dict[tuple[int, Way], list[int]] = {}
        for compute in (compute for row in rows for compute in row if compute.kind in WAYS):
            turns.setdefault((compute.stage, WAYS[compute.kind]), []).append(compute.microbatch)
        sources: dict[tuple[int, Way], set[int]] = {}
        for transfer in program.sent:
            sources.setdefault((transfer.target, "F"), set()).add(transfer.source)
            if transfer.gradient:
                sources.setdefault((transfer.source, "B"), set()).add(transfer.target)
        arrivals = {}
        for (stage, way), found in sources.items():
            first, *others = sorted(found)
            arrivals[stage, way] = turns[first, way]
            for other in others:
                if turns[other, way] != turns[first, way]:
                    raise PartcError(
                        "P0411",
                        f"stage {stage} reads from stages {first} and {other}, whose orders of microbatches differ",
                        help=f"give {first} and {other} the same order of {way} in the table",
                    )
        senders = frozenset((source, way) for (_, way), found in sources.items() for source in found)
        numbers = {key: {index: number for number, index in enumerate(order)} for key, order in arrivals.items()}
        split = {compute.stage for row in rows for compute in row if compute.kind == "I"}
        return cls(arrivals, numbers, senders, program.split_stages | split)

    def around(self, row: Sequence[Compute]) -> Iterator[Action]:
        """The row's computations, with receives before and sends after them."""
        received: dict[tuple[int, Way], int] = {}  # the number of receives so far

        def receives(compute: Compute) -> Iterator[Action]:
            stage, way = compute.stage, WAYS.get(compute.kind)
            if way is not None and (stage, way) in self.arrivals:
                done, until = received.get((stage, way), 0), self.numbers[stage, way][compute.microbatch] + 1
                for index in self.arrivals[stage, way][done:until]:
                    yield Action(stage=stage, kind=RECV[way], microbatch=index)
                received[stage, way] = max(done, until)

        for compute, following in zip_longest(row, row[1:]):
            yield from receives(compute)
            ahead = list(receives(following)) if following is not None else []
            # The receives may include the gradient of a value that only this computation produces.
            late = any((each.stage, each.microbatch) == (compute.stage, compute.microbatch) for each in ahead)
            yield from () if late else ahead
            halves = compute.kind == "B" and compute.stage in self.split
            kind: ActionKind = "I" if halves else compute.kind
            yield Action(stage=compute.stage, kind=kind, microbatch=compute.microbatch)
            if WAYS.get(compute.kind) is not None and (compute.stage, WAYS[compute.kind]) in self.senders:
                yield Action(stage=compute.stage, kind=SEND[WAYS[compute.kind]], microbatch=compute.microbatch)
            if halves:
                yield Action(stage=compute.stage, kind="W", microbatch=compute.microbatch)
            yield from ahead if late else ()
