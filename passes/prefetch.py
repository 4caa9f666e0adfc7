"""Start gathers ahead and wait for scatters one call late, so that ranks compute meanwhile.

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
forward pass waits for those of each call before it runs; the waits in later microbatches are for nothing.

    action 0REFRESH:                               action 0REFRESH:
      start refresh blocks.0                         start refresh blocks.0
      wait refresh blocks.0                          start refresh blocks.1
      start refresh blocks.1                       action 0F:
      wait refresh blocks.1             ->           wait refresh blocks.0
    action 0F:                                       run F blocks.0
      run F blocks.0                                 wait refresh blocks.1
      run F blocks.1                                 run F blocks.1

A scatter is waited for when the next scatter of its stage starts, in the same action or in a later one. If both halves
of a backward pass scatter, each half first waits for the scatters of the other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from partc import fuel
from partc.communication.exchanges import Exchanges
from partc.ir.program import Action, ActionStatement, Body, BodyKind, Program, Verb

_OTHER_HALF: Mapping[BodyKind, BodyKind] = {"I": "W", "W": "I"}


def prefetch(program: Program, *, late: frozenset[str] = frozenset()) -> Program:
    """Put starts and waits apart. Actions named in `late` (0B) gather nothing ahead."""
    depth = Exchanges(program).levels
    bodies = {body.name: body for body in program.bodies}
    stages = [stage for stage in range(program.stages) if fuel.allowed("prefetch", f"stage {stage}")]
    for stage in stages:
        computing = [body for kind in ("F", "B", "I", "W") if (body := bodies.get(f"{stage}{kind}")) is not None]
        for body in computing:
            other = bodies.get(f"{stage}{_OTHER_HALF[body.kind]}") if body.kind in _OTHER_HALF else None
            apart = tuple(_apart(body.statements, depth))
            waits = _waits(_last_scatters(other, depth) if _of(apart, "start", "scatter") else ())
            bodies[body.name] = replace(body, statements=(*waits, *apart))
        halves = [bodies.get(f"{stage}{kind}") for kind in ("I", "W")]  # one without statements has no body
        if f"{stage}B" in bodies and any(halves):
            inputs, weights = (() if half is None else half.statements for half in halves)
            bodies[f"{stage}B"] = replace(bodies[f"{stage}B"], statements=_both(inputs, weights))
        if (body := bodies.get(f"{stage}REFRESH")) is not None:
            forward = bodies[f"{stage}F"]
            names = _of(body.statements, "wait", "refresh")
            starts = tuple(each for each in body.statements if each.verb == "start")
            bodies[body.name] = replace(body, statements=starts)
            bodies[forward.name] = replace(forward, statements=tuple(_before_use(forward.statements, names, depth)))
        left = [name for kind in ("B", "I", "W") for name in _last_scatters(bodies.get(f"{stage}{kind}"), depth)]
        if left:
            bodies[f"{stage}REDUCE_GRAD"] = _settled(bodies.get(f"{stage}REDUCE_GRAD"), stage, left)
    known = {name: body for name, body in bodies.items() if body.index in stages and body.kind != "END"}
    schedule = tuple(tuple(_ahead(row, known, late, depth)) for row in program.schedule)
    return replace(program, bodies=tuple(bodies.values()), schedule=schedule)


def gathers(statements: Sequence[ActionStatement]) -> tuple[str, ...]:
    """The calls that an action gathers for, in order."""
    return tuple(each.of for each in statements if (each.verb, each.subject) == ("wait", "gather"))


def _both(inputs: tuple[ActionStatement, ...], weights: tuple[ActionStatement, ...]) -> tuple[ActionStatement, ...]:
    """The body of a whole backward pass: its two halves, one after the other."""
    taken = gathers(weights)

    def bound(each: ActionStatement) -> ActionStatement:
        if not each.ahead:
            return each
        later = each.ahead - len(taken)
        return replace(each, of=taken[each.ahead - 1] if later <= 0 else "", ahead=max(0, later))

    return (*map(bound, inputs), *weights)


def _apart(statements: Sequence[ActionStatement], depth: int) -> Iterator[ActionStatement]:
    """The statements of a body with its exchanges `depth` calls apart from their waits."""
    gathered, scattered = gathers(statements), _of(statements, "start", "scatter")
    taken = given = 0
    for each in statements:
        match each.verb, each.subject:
            case "wait", "gather":
                yield each
                if depth > 1:
                    yield _coming("relay", gathered, taken + depth - 1)
                yield _coming("start", gathered, taken + depth)
                taken += 1
            case "start", "scatter":
                yield from _before(scattered, given, depth)
                yield each
                given += 1
            case ("start", "gather") | ("wait", "scatter"):
                continue
            case _:
                yield each


def _before_use(statements: Sequence[ActionStatement], names: Sequence[str], depth: int) -> Iterator[ActionStatement]:
    """A forward pass in which each call waits for the gather of its parameters that stay whole."""
    following = dict(zip_longest(names, names[1:]))
    for each in statements:
        if each.verb == "run" and each.of in following:
            yield ActionStatement(verb="wait", subject="refresh", of=each.of)
            if depth > 1 and (coming := following[each.of]):
                yield ActionStatement(verb="relay", subject="refresh", of=coming)
        yield each


def _coming(verb: Verb, names: Sequence[str], index: int) -> ActionStatement:
    """A statement on the gather at an index of a body's gathers, or on a gather of later actions."""
    later = index - len(names)
    return ActionStatement(verb=verb, subject="gather", of="" if later >= 0 else names[index], ahead=max(0, later + 1))


def _before(names: Sequence[str], index: int, depth: int) -> Iterator[ActionStatement]:
    """Waits and relays of earlier scatters before one starts; the body's first follows those of a former action."""
    if len(names) < depth:
        yield from _waits([names[index - 1]])
        return
    yield from _waits([names[index - depth]])
    if depth > 1:  # a call has one scatter under way
        verb: Verb = "wait" if names[index - 1] == names[index] else "relay"
        yield ActionStatement(verb=verb, subject="scatter", of=names[index - 1])


def _waits(names: Iterable[str]) -> tuple[ActionStatement, ...]:
    return tuple(ActionStatement(verb="wait", subject="scatter", of=name) for name in names)


def _last_scatters(body: Body | None, depth: int) -> tuple[str, ...]:
    """The scatters that may be under way when an action ends."""
    return _of(body.statements, "start", "scatter")[-depth:] if body is not None else ()


def _settled(body: Body | None, stage: int, names: Iterable[str]) -> Body:
    """The body of REDUCE_GRAD, which waits for scatters first."""
    unique = tuple(dict.fromkeys(names))
    old = body.statements if body is not None else ()
    return Body(kind="REDUCE_GRAD", index=stage, statements=(*_waits(unique), *old))


def _of(statements: Sequence[ActionStatement], verb: str, subject: str) -> tuple[str, ...]:
    return tuple(each.of for each in statements if (each.verb, each.subject) == (verb, subject))


def _ahead(row: Sequence[Action], bodies: dict[str, Body], late: frozenset[str], depth: int) -> Iterator[Action]:
    """A row of the schedule in which each action names those that it gathers for in advance.

    An UNSHARD stands before an action whose gather no earlier action starts.
    """
    counts = [len(gathers(body.statements)) if (body := bodies.get(_name(action))) else 0 for action in row]
    places = [index for index, count in enumerate(counts) if count]

    def following(position: int) -> tuple[str, ...]:
        """The actions, from a place on, that read the next `depth` gathers, up to a late action."""
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
    opening = False  # whether the next action that gathers has no gather ahead
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
    """Some actions of a row that this pass has made, with gathers ahead as if they were all; late ones stay late."""
    if not any(action.ahead for action in row):
        yield from some
        return
    bodies = {body.name: body for body in program.bodies if body.kind != "END"}
    reads = [action for action in row if (body := bodies.get(_name(action))) and gathers(body.statements)]
    late = frozenset(_name(action) for action in reads[:-1] if not action.ahead)
    yield from _ahead(some, bodies, late, Exchanges(program).levels)


def _name(action: Action) -> str:
    return f"{action.stage}{action.kind}"
