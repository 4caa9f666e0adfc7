"""Decide what every pipeline stage does, in order.

    2 stages, 3 microbatches, 1f1b:
    0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2 0REDUCE_GRAD
    1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2 1REDUCE_GRAD

GPipe runs all forwards, then all backwards (Huang et al. 2019). 1F1B starts a stage's backwards as
soon as its first one can run, so that at most as many microbatches are in flight as stages follow
(Narayanan et al. 2019, PipeDream-Flush in their 2021 paper). Sends come right after what they send,
receives right before what reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

from partc.program import Action, ActionKind, Program

Kind = Literal["gpipe", "1f1b"]
Compute = tuple[Literal["F", "B"], int]


def schedule(program: Program, *, kind: Kind = "1f1b") -> Program:
    """Set the actions of every stage."""
    order = SCHEDULES[kind]
    actions = tuple(
        tuple(_with_transfers(program, stage, order(stage, program.stages, program.microbatches)))
        for stage in range(program.stages)
    )
    return replace(program, schedule=actions)


def gpipe(stage: int, stages: int, microbatches: int) -> list[Compute]:
    forwards: list[Compute] = [("F", index) for index in range(microbatches)]
    return [*forwards, *(("B", index) for index in range(microbatches))]


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> list[Compute]:
    ahead = min(microbatches, stages - stage)
    order: list[Compute] = [("F", index) for index in range(ahead)]
    for index in range(microbatches):
        order.append(("B", index))
        if ahead + index < microbatches:
            order.append(("F", ahead + index))
    return order


SCHEDULES: Mapping[str, Callable[[int, int, int], list[Compute]]] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def _with_transfers(program: Program, stage: int, order: list[Compute]) -> Iterator[Action]:
    """The computations with the sends and receives that this stage has."""
    out = [transfer for transfer in program.transfers if transfer.source == stage]
    into = [transfer for transfer in program.transfers if transfer.target == stage]
    around: Mapping[str, tuple[bool, bool]] = {
        "F": (bool(into), bool(out)),
        "B": (any(transfer.gradient for transfer in out), any(transfer.gradient for transfer in into)),
    }
    for kind, index in order:
        receives, sends = around[kind]
        if receives:
            yield Action(stage=stage, kind=_named("RECV", kind), microbatch=index)
        yield Action(stage=stage, kind=kind, microbatch=index)
        if sends:
            yield Action(stage=stage, kind=_named("SEND", kind), microbatch=index)
    yield Action(stage=stage, kind="REDUCE_GRAD")


def _named(what: Literal["SEND", "RECV"], kind: Literal["F", "B"]) -> ActionKind:
    names: Mapping[tuple[str, str], ActionKind] = {
        ("SEND", "F"): "SEND_F", ("SEND", "B"): "SEND_B", ("RECV", "F"): "RECV_F", ("RECV", "B"): "RECV_B"
    }  # fmt: skip
    return names[what, kind]
