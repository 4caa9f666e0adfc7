"""Decide what every pipeline rank does, in order.

    2 stages, 3 microbatches, 1f1b:
    0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2 0REDUCE_GRAD
    1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2 1REDUCE_GRAD

The order of computations is the schedule's own (partc.schedules). Sends come right after what they
send, receives right before what reads them; what passes between two stages of one rank is neither
sent nor received. Sends don't wait, so a receive that comes late delays nobody else. Gradients are
reduced at the end, when no rank waits for another's computation any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from partc.mesh import PIPELINE_AXIS
from partc.program import Action, ActionKind, Program
from partc.schedules import SCHEDULES, Compute, ComputeKind, compute_order, stage_ranks


def schedule(program: Program, *, kind: str = "1f1b") -> Program:
    """Set the actions of every pipeline rank. Raises PartcError P0406 if the schedule can't take so many stages."""
    ranks = program.mesh.axis(PIPELINE_AXIS)
    chosen = SCHEDULES[kind]
    places = stage_ranks(chosen, ranks, program.stages)
    actions = tuple(
        (
            *_with_transfers(program, places, order),
            *(Action(stage=stage, kind="REDUCE_GRAD") for stage, place in enumerate(places) if place == rank),
        )
        for rank, order in enumerate(compute_order(chosen, ranks, program.microbatches, program.stages))
    )
    return replace(program, schedule=actions)


def _with_transfers(program: Program, places: Sequence[int], order: Sequence[Compute]) -> Iterator[Action]:
    """The computations with the sends and receives around them."""
    travelling = [item for item in program.transfers if places[item.source] != places[item.target]]
    leaving, entering = {item.source for item in travelling}, {item.target for item in travelling}
    owed, owing = (
        {item.source for item in travelling if item.gradient},
        {item.target for item in travelling if item.gradient},
    )
    around: Mapping[ComputeKind, tuple[Literal["F", "B"], set[int], set[int]]] = {
        "F": ("F", entering, leaving), "B": ("B", owed, owing), "I": ("B", owed, owing), "W": ("B", set(), set())
    }  # fmt: skip
    for compute in order:
        what, receivers, senders = around[compute.kind]
        if compute.stage in receivers:
            yield Action(stage=compute.stage, kind=_named("RECV", what), microbatch=compute.microbatch)
        yield Action(stage=compute.stage, kind=compute.kind, microbatch=compute.microbatch)
        if compute.stage in senders:
            yield Action(stage=compute.stage, kind=_named("SEND", what), microbatch=compute.microbatch)


def _named(what: Literal["SEND", "RECV"], kind: Literal["F", "B"]) -> ActionKind:
    names: Mapping[tuple[str, str], ActionKind] = {
        ("SEND", "F"): "SEND_F", ("SEND", "B"): "SEND_B", ("RECV", "F"): "RECV_F", ("RECV", "B"): "RECV_B"
    }  # fmt: skip
    return names[what, kind]
