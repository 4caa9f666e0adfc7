"""Start gathers one call early and wait for scatters one call late, so that ranks compute meanwhile.

    start gather blocks.0          schedule: 0UNSHARD>0F 0F0>0F …     start gather blocks.0     before 0F
    wait gather blocks.0                                              wait gather blocks.0
    run F blocks.0                               ->                   start gather blocks.1
    free gather blocks.0                                              run F blocks.0
    start gather blocks.1                                             free gather blocks.0
    wait gather blocks.1                                              wait gather blocks.1
    run F blocks.1                                                    start gather ahead 1
    free gather blocks.1                                              run F blocks.1
                                                                      free gather blocks.1

The last call of an action starts the first gather of the next action (`ahead`), which the schedule names. If this would
raise the rank's peak memory, the gather starts between the two actions (UNSHARD). Gathers that cross nodes start two
calls ahead, and their second level, inside nodes, one call ahead.

Parameters that stay whole (ZeRO 1 and 2) are gathered as a step begins, all at once in the order of their use. The
forward pass waits for each call's gathers before it runs the call; in later microbatches these waits return at once.

    action 0REFRESH:                               action 0REFRESH:
      start refresh blocks.0                         start refresh blocks.0
      wait refresh blocks.0                          start refresh blocks.1
      start refresh blocks.1                       action 0F:
      wait refresh blocks.1             ->           wait refresh blocks.0
    action 0F:                                       run F blocks.0
      run F blocks.0                                 wait refresh blocks.1
      run F blocks.1                                 run F blocks.1

A scatter is waited for when the next scatter of its stage starts, in the same action or in a later one. If a backward
pass has two halves, each half first waits for the scatters that earlier actions have left.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from partc import fuel
from partc.communication.exchanges import Exchanges
from partc.ir.program import Action, ActionStatement, Body, Program, Subject, Verb

_Statements = Sequence[ActionStatement]


def prefetch(program: Program, *, late: frozenset[str] = frozenset()) -> Program:
    """Move starts and waits apart. The gathers of actions named in `late` (0B) do not start ahead."""
    depth = program.derived(Exchanges).levels
    bodies = {**program.named_bodies}
    stages = [stage for stage in range(program.stages) if fuel.may_rewrite("prefetch", f"stage {stage}")]
    for stage in stages:
        computing = [body for kind in ("F", "B", "I", "W") if (body := bodies.get(f"{stage}{kind}")) is not None]
        most = max((len(_Exchanges.of(body.statements, "scatter").names) for body in computing), default=0)
        for body in computing:
            bodies[body.name] = replace(body, statements=tuple(_spread_statements(body, depth, most)))
        if (body := bodies.get(f"{stage}REFRESH")) is not None:
            forward = bodies[f"{stage}F"]
            starts = tuple(each for each in body.statements if each.verb == "start")
            bodies[body.name] = replace(body, statements=starts)
            statements = tuple(_before_use(forward.statements, _Exchanges.of(body.statements, "refresh")))
            bodies[forward.name] = replace(forward, statements=statements)
        if most:
            old = bodies.get(f"{stage}REDUCE_GRAD", Body(kind="REDUCE_GRAD", index=stage, statements=()))
            bodies[old.name] = replace(old, statements=(*_remaining_waits(depth, most), *old.statements))
    known = {name: body for name, body in bodies.items() if body.index in stages}
    schedule = tuple(tuple(_with_gathers_ahead(row, known, late, depth)) for row in program.schedule)
    return replace(program, bodies=tuple(bodies.values()), schedule=schedule)


@dataclass(frozen=True)
class _Exchanges:
    """The exchanges of a kind in a body, in order."""

    statements: Mapping[tuple[Verb, str], ActionStatement]

    @classmethod
    def of(cls, statements: Iterable[ActionStatement], subject: Subject) -> _Exchanges:
        return cls({(each.verb, each.of): each for each in statements if each.subject == subject and each.of})

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple([name for verb, name in self.statements if verb == "start"])

    def some(self, verb: Verb, indices: Iterable[int]) -> Iterator[ActionStatement]:
        """The statements with this verb of the exchanges with these indices; none for indices out of range."""
        names = self.names
        found = (self.statements.get((verb, names[index])) for index in indices if 0 <= index < len(names))
        yield from (each for each in found if each is not None)


def gathers(statements: _Statements) -> int:
    """The number of calls for which an action gathers."""
    return [(each.verb, each.subject) for each in statements].count(("wait", "gather"))


def _spread_statements(body: Body, depth: int, most: int) -> Iterator[ActionStatement]:
    """The statements of a body, with starts and waits of exchanges `depth` calls apart.

    `most` is the largest number of scatters in a body of the stage.
    """
    statements = body.statements
    gathered, scattered = (_Exchanges.of(statements, subject) for subject in _MOVED)
    half = body.kind in ("I", "W")
    yield from (replace(each, when="early") for each in gathered.some("start", range(depth)))
    yield from (replace(each, when="early") for each in gathered.some("advance", range(depth - 1)))
    if half and scattered.names:
        yield from _remaining_waits(depth, most)
    taken = given = 0
    for each in statements:
        match each.verb, each.subject:
            case "wait", "gather":
                yield each
                if depth > 1:
                    yield from _coming(gathered, "advance", taken + depth - 1)
                yield from _coming(gathered, "start", taken + depth)
                taken += 1
            case "start", "scatter":
                before = _earlier_scatters(scattered, given, depth, most)
                yield from (statement for statement in before if not (half and statement.behind))
                yield each
                given += 1
            case (("start" | "advance"), "gather"):
                continue
            case (("advance" | "wait"), "scatter"):
                continue
            case _:
                yield each
    if depth > 1:
        yield from (replace(each, when="late") for each in scattered.some("advance", [given - 1]))


_MOVED: tuple[Subject, Subject] = "gather", "scatter"


def _coming(gathered: _Exchanges, verb: Verb, index: int) -> Iterator[ActionStatement]:
    """A statement on the gather with this index in a body, or on a gather of later actions."""
    later = index - len(gathered.names)
    if later >= 0:
        yield ActionStatement(verb=verb, subject="gather", ahead=later + 1)
    yield from gathered.some(verb, [index])


def _earlier_scatters(scattered: _Exchanges, index: int, depth: int, most: int) -> Iterator[ActionStatement]:
    """Waits for and advances of earlier scatters, before one starts; those of earlier actions come before the body's
    own.
    """
    if len(scattered.names) < depth:
        yield from _remaining_waits(depth, most)
        return
    going: tuple[tuple[Verb, int], ...] = (("wait", index - depth), ("advance", index - 1))
    for verb, number in going[:depth]:
        if number < 0:
            yield ActionStatement(verb=verb, subject="scatter", behind=-number)
        yield from scattered.some(verb, [number])


def _remaining_waits(depth: int, most: int) -> Iterator[ActionStatement]:
    """Waits for all scatters that earlier actions have left in progress: up to `depth`."""
    wait = ActionStatement(verb="wait", subject="scatter", behind=1)
    yield from [replace(wait, behind=2)] if min(depth, most) > 1 else []
    yield from [replace(wait, verb="advance")] if depth > 1 else []
    yield wait


def _before_use(statements: _Statements, refreshed: _Exchanges) -> Iterator[ActionStatement]:
    """A forward pass in which each call first waits for the refresh of its parameters."""
    names = refreshed.names
    first = True
    for each in statements:
        if each.verb == "run" and each.of in names:
            at = names.index(each.of)
            coming = [*refreshed.some("advance", [at] if first else []), *refreshed.some("wait", [at])]
            coming += refreshed.some("advance", [at + 1])
            yield from (replace(found, when="first") for found in coming)
            first = False
        yield each


def _with_gathers_ahead(
    row: Sequence[Action], bodies: Mapping[str, Body], late: frozenset[str], depth: int
) -> Iterator[Action]:
    """A row of the schedule in which each action names the later actions whose gathers it starts.

    An UNSHARD precedes an action whose gather no earlier action starts.
    """
    by_name = {name: gathers(bodies[name].statements) for name in {*map(_name, row)} if name in bodies}
    counts = [by_name.get(_name(action), 0) for action in row]
    places = [index for index, count in enumerate(counts) if count]

    def following(position: int) -> tuple[str, ...]:
        """The actions from `position` on that read the next `depth` gathers, up to a late action."""
        names: list[str] = []
        found = 0
        for index in places[position:]:
            names.append(_name(row[index]))
            found += counts[index]
            if found >= depth or names[-1] in late:
                break
        return tuple(names)

    if places:
        yield Action(stage=row[places[0]].stage, kind="UNSHARD", ahead=following(0))
    opening = False  # whether the gathers of the next action are still to be started
    for index, action in enumerate(row):
        if not counts[index]:
            yield action
            continue
        position = bisect_left(places, index)
        if opening:
            yield Action(stage=action.stage, kind="UNSHARD", ahead=following(position))
        opening = _name(action) in late
        yield replace(action, ahead=() if opening else following(position + 1))


def gathering_ahead(program: Program, row: Sequence[Action], some: Sequence[Action]) -> Iterator[Action]:
    """Some actions of a row of this pass, with gathers ahead as if the row had no others. Late actions stay late."""
    if not any(action.ahead for action in row):
        yield from some
        return
    bodies = program.named_bodies
    gathering = {name for name in {*map(_name, row)} if name in bodies and gathers(bodies[name].statements)}
    reads = [action for action in row if _name(action) in gathering]
    late = frozenset(_name(action) for action in reads[:-1] if not action.ahead)
    yield from _with_gathers_ahead(some, bodies, late, program.derived(Exchanges).levels)


def _name(action: Action) -> str:
    return f"{action.stage}{action.kind}"
