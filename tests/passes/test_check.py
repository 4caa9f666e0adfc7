"""The static proof holds for plans of real programs, and finds every mutant that behaves differently."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import partc
from partc.communication.events import CommunicationPlan, Entered, Event, Message, events
from partc.communication.execution import Execution
from partc.errors import InternalError
from partc.ir.mesh import Mesh
from partc.ir.program import ActionStatement
from partc.passes.check import check, prove

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def plan() -> CommunicationPlan:
    """A small model on every axis: collectives over dp and tp, transfers, gradient reductions."""
    options = {"depth": 1, "width": 16, "hidden": 32, "batch": 8}
    package = partc.compile(EXAMPLES / "mlp.py", mesh="2x2x2", microbatches=2, options=options)
    return events(package.program)


def _sequences(plan: CommunicationPlan) -> dict[int, tuple[Event, ...]]:
    return {rank: plan.events_of(rank) for rank in range(plan.mesh.size)}


def _mutants(sequence: tuple[Event, ...]) -> Iterator[tuple[str, tuple[Event, ...]]]:
    """Every sequence that differs from this one by one communication."""
    for index, event in enumerate(sequence):
        before, after = sequence[:index], sequence[index + 1 :]
        yield f"drop {event}", (*before, *after)
        yield f"duplicate {event}", (*before, event, event, *after)
        yield f"reshape {event}", (*before, replace(event, shape=(*event.shape, 3)), *after)
        yield f"retype {event}", (*before, replace(event, dtype="bf16"), *after)
        if isinstance(event, Message):
            yield f"retarget {event}", (*before, replace(event, place=1 - event.place), *after)
            yield f"mislabel {event}", (*before, replace(event, microbatch=event.microbatch + 1), *after)
        elif event.axes == ("dp",):
            yield f"regroup {event}", (*before, replace(event, axes=("tp",)), *after)
        if after and not _commute(event, after[0]):
            yield f"swap {event} and {after[0]}", (*before, after[0], event, *after[1:])


def _commute(first: Event, second: Event) -> bool:
    """Neighbours whose order nobody can observe.

    Equal communications; collectives over different axes, since no other rank is in both groups, so that the ranks of
    the second group do not wait for the first; a posted send or receive and whatever follows or precedes it, unless
    that is another on the same channel or the wait for it; waits, if nothing is posted between them.
    """
    if isinstance(first, Message) and isinstance(second, Message):
        if first.kind == second.kind != "wait":
            return first.link != second.link or first.content == second.content
        if {first.kind, second.kind} == {"recv", "wait"}:
            return first.link != second.link or first.content != second.content
        return True
    if isinstance(first, Entered) and isinstance(second, Entered):
        apart = bool(first.axes and second.axes) and {*first.axes}.isdisjoint(second.axes)
        return apart or (first.content, first.axes, first.places) == (second.content, second.axes, second.places)
    return True


@pytest.mark.parametrize("rank", range(8))
def test_every_mutant_is_caught(plan: CommunicationPlan, rank: int) -> None:
    missed = []
    tried = 0
    for what, sequence in _mutants(plan.events_of(rank)):
        tried += 1
        try:
            prove(plan.mesh, _sequences(plan) | {rank: sequence})
        except InternalError:
            continue
        missed.append(what)
    assert tried > 20
    assert not missed


def test_a_plan_of_all_ranks_holds(plan: CommunicationPlan) -> None:
    prove(Mesh.parse("pp=2"), dict(enumerate(plan.places)))
    prove(plan.mesh, _sequences(plan))


def test_errors_name_rank_action_and_line(plan: CommunicationPlan) -> None:
    sequence = plan.events_of(5)
    index = next(i for i, event in enumerate(sequence) if isinstance(event, Entered) and event.source)
    wrong = replace(sequence[index], dtype="f64")
    with pytest.raises(InternalError, match=r"rank \d.*\dF0.*mlp\.py:\d+"):
        prove(plan.mesh, _sequences(plan) | {5: (*sequence[:index], wrong, *sequence[index + 1 :])})


@pytest.mark.parametrize(
    "options",
    [
        {"zero": 3, "schedule": "gpipe"},
        {"zero": 1, "bucket": "0B"},
        {"zero": 2, "compress_grads": "int8"},
        {"bucket": "0B", "compress_grads": "int8"},
    ],
    ids=str,
)
def test_every_exchange_is_what_types_need_and_is_waited_for(options: dict[str, Any]) -> None:
    """A statement that is left out, is there twice, or states another collective is found."""
    sizes = {"depth": 2, "width": 16, "hidden": 32, "batch": 16}
    program = partc.compile(
        EXAMPLES / "mlp.py", mesh="1x4x1", nodes=2, microbatches=2, options=sizes, **options
    ).program
    check(program)
    steps = list(Execution(program, 0).step())
    exchanges = {"gather", "refresh", "scatter", "bucket", "result"}
    tried, missed = 0, []
    for body in program.bodies:
        for index, each in enumerate(body.statements):
            if each.subject not in exchanges:
                continue
            for what, instead in _statement_mutants(each):
                statements = (*body.statements[:index], *instead, *body.statements[index + 1 :])
                others = tuple(
                    replace(body, statements=statements) if other is body else other for other in program.bodies
                )
                tried += 1
                mutant = replace(program, bodies=others)
                try:
                    check(mutant)
                    unlike = (
                        list(Execution(mutant, 0).step()) != steps
                    )  # else no action of this schedule runs the statement
                except InternalError:
                    continue
                missed.extend([f"{what}: {each} in {body.name}"] if unlike else [])
    assert tried > 20
    assert not missed


def _statement_mutants(each: ActionStatement) -> Iterator[tuple[str, tuple[ActionStatement, ...]]]:
    yield "left out", ()
    yield from [("twice", (each, each))] if each.when not in ("early", "late") else []
    for at, one in enumerate(each.collectives):
        others = [] if one is None else [replace(one, shape=(7,)), replace(one, dtype="i8"), replace(one, axes=("dp",))]
        for other in others:
            moved = (*each.collectives[:at], other, *each.collectives[at + 1 :])
            yield "another collective", (replace(each, collectives=moved),)


def test_two_stages_that_both_receive_first_deadlock() -> None:
    def wait(place: int) -> Message:
        return replace(post(place), kind="wait")

    def post(place: int) -> Message:
        link = (place, 1 - place)
        return Message(kind="recv", value="x", link=link, place=place, microbatch=0, shape=(2,), dtype="f32")

    def give(place: int) -> Message:
        link = (1 - place, place)
        return Message(kind="send", value="x", link=link, place=place, microbatch=0, shape=(2,), dtype="f32")

    mesh = Mesh.parse("pp=2")
    prove(mesh, {0: (post(1), give(1), wait(1)), 1: (post(0), give(0), wait(0))})
    with pytest.raises(InternalError, match="deadlock, 2 ranks wait"):
        prove(mesh, {0: (post(1), wait(1), give(1)), 1: (post(0), wait(0), give(0))})


def test_a_schedule_that_skips_a_microbatch_is_refused() -> None:
    package = partc.compile(EXAMPLES / "mlp.py", mesh="pp=2", microbatches=2)
    first, second = package.program.schedule
    with pytest.raises(InternalError, match="microbatch 1"):
        check(replace(package.program, schedule=(first, tuple(a for a in second if a.microbatch != 1))))
    with pytest.raises(InternalError, match="microbatch 0"):
        check(replace(package.program, schedule=(tuple(a for a in first if str(a) != "0SEND_F0"), second)))


def test_many_ranks_are_proved_as_fast_as_few() -> None:
    options = {"depth": 64, "batch": 4096}
    package = partc.compile(EXAMPLES / "mlp.py", mesh="16x128x8", microbatches=32, options=options)
    start = time.process_time()
    check(package.program)
    assert package.program.mesh.size == 16_384
    assert time.process_time() - start < 10  # a second on an idle machine; ranks by themselves would take hours
