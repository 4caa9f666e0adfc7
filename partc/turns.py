"""When what ranks hold in parts moves: the starts of collectives and the waits for them, call by call.

It says of `runtime.parts` what that does. Where some of the ranks share a node, a move takes two turns: what is
gathered crosses nodes and then goes around inside, what is scattered the other way. The second turn starts where
something else is waited for or started anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby

from partc.parts import Kind, Move, Parts
from partc.program import Action, Call, Program
from partc.reductions import Reductions

Key = tuple[object, ...]
_ON_THEIR_WAY = 4  # keys of batches that are scattered: there are three at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A collective that starts; or, without `move`, the wait for the one that has started under its key."""

    key: Key
    move: Move | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """A run of a call, and what starts and is waited for before and after it."""

    kind: Kind
    call: Call
    before: tuple[Turn, ...] = ()
    after: tuple[Turn, ...] = ()


@dataclass(frozen=True, slots=True)
class _Batch:
    """Moves that start together, those of the first turn and those of the second."""

    key: Key
    moves: tuple[Move, ...]
    why: str

    def start(self, turn: int = 0) -> Iterator[Turn]:
        for index, move in enumerate(move for move in self.moves if move.turn == turn):
            if turn:
                yield Turn(key=(*self.key, turn - 1, index))
            yield Turn(key=(*self.key, turn, index), move=move, why=self.why)

    @property
    def turns(self) -> int:
        return 1 + max((move.turn for move in self.moves), default=0)

    def wait(self) -> Iterator[Turn]:
        last = self.turns - 1
        for index, _ in enumerate(move for move in self.moves if move.turn == last):
            yield Turn(key=(*self.key, last, index))


class Scatters:
    """Of one stage, the sums that have been started."""

    def __init__(self) -> None:
        self.going: list[tuple[_Batch, int]] = []  # and the turn that each is in
        self._count = 0

    def scatter(self, moves: Iterable[Move], why: str) -> Iterator[Turn]:
        """Start some; of those before, what was summed inside nodes goes on, and the others are waited for."""
        going, self.going = self.going, []
        for batch, turn in going:
            if turn + 1 < batch.turns:
                yield from batch.start(turn + 1)
                self.going.append((batch, turn + 1))
            else:
                yield from batch.wait()
        self._count = (self._count + 1) % _ON_THEIR_WAY  # so that one microbatch is like another
        batch = _Batch(("scatter", self._count), tuple(moves), why)
        yield from batch.start()
        self.going.append((batch, 0))

    def go_on(self) -> Iterator[Turn]:
        going, self.going = self.going, []
        for batch, turn in going:
            if turn + 1 < batch.turns:
                yield from batch.start(turn + 1)
            self.going.append((batch, min(turn + 1, batch.turns - 1)))

    def settle(self) -> Iterator[Turn]:
        yield from self.go_on()
        for batch, _ in self.going:
            yield from batch.wait()
        self.going.clear()


@dataclass(frozen=True, slots=True)
class Unit:
    """What one gather brings, and how many calls in a row read it."""

    moves: tuple[Move, ...]
    why: str
    times: int = 1


def ahead(units: Sequence[Unit | None], turns: int) -> tuple[tuple[Turn, ...], Iterator[tuple[int, tuple[Turn, ...]]]]:
    """What starts before all; and for every call, whose unit's number comes first, what happens as it takes that.

    What comes after None is not started before it is taken.
    """
    batches: list[list[tuple[_Batch, int]]] = [[]]
    number = 0
    for unit in units:
        if unit is None:
            batches.append([])
            continue
        batches[-1].append((_Batch(("gather", number), unit.moves, unit.why), unit.times))
        number += 1
    groups = [group for group in batches if group]
    opening = tuple(turn for batch, _ in (groups[0] if groups else [])[:turns] for turn in batch.start())
    return opening, _taken(groups, turns)


def _taken(groups: Sequence[Sequence[tuple[_Batch, int]]], turns: int) -> Iterator[tuple[int, tuple[Turn, ...]]]:
    number = -1
    for group in groups:
        late = number >= 0
        for index, (batch, times) in enumerate(group):
            number += 1
            here = [turn for coming, _ in group[:turns] for turn in coming.start()] if late and index == 0 else []
            here += [*(batch.start(1) if index == 0 and batch.turns > 1 else ()), *batch.wait()]
            for left in range(times, 0, -1):
                if left == 1:
                    for coming, _ in group[index + 1 : index + turns]:
                        here.extend(coming.start(1))
                    for coming, _ in group[index + turns : index + turns + 1]:
                        here.extend(coming.start())
                yield number, tuple(here)
                here = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What the ranks at one pipeline coordinate do in a step."""

    opening: tuple[Turn, ...]  # as the step begins
    actions: Mapping[Action, tuple[Around, ...]]
    left: Mapping[int, Scatters]  # by stage: what is on its way after the last action


@dataclass(frozen=True)
class Turns:
    """The actions of a program's stages."""

    program: Program

    @cached_property
    def parts(self) -> Parts:
        return Parts(self.program)

    def course(self, place: int) -> Course:
        """Gathers go through all actions; what one starts ahead for the next has been there for that from the start."""
        row = self.program.schedule[place] if self.program.schedule else ()
        computing = [action for action in row if action.kind in ("F", "B", "I", "W")]
        opening, taken = ahead(list(self._units(computing)), self.parts.turns)
        scatters = {stage: Scatters() for stage in self.program.stages_at(place)}
        actions = {each: tuple(self._action(each, taken, scatters[each.stage])) for each in computing}
        return Course(opening=opening, actions=actions, left=scatters)

    def _units(self, actions: Iterable[Action]) -> Iterator[Unit | None]:
        """What the calls of these actions gather, in their order."""
        gathering: list[tuple[Call, Kind] | None] = []
        for action in actions:
            here = [(call, run) for run, call in self._calls(action) if self.parts.gathers(call, run)]
            gathering.extend(here)
            if here and not self.parts.early(action.stage, action.kind):
                gathering.append(None)
        for _, same in groupby(gathering, key=lambda item: item and (item[0].stage, item[0].name)):
            first, *others = same
            if first is None:
                yield None
                continue
            call, run = first
            why = f"{call.name} needs its parameters whole"
            yield Unit(tuple(self.parts.before(call, run)), why, 1 + len(others))

    def _calls(self, action: Action) -> Iterator[tuple[Kind, Call]]:
        for run, order in self.parts.runs(action.stage, action.kind):
            for call in order:
                yield run, call

    def _action(
        self, action: Action, taken: Iterator[tuple[int, tuple[Turn, ...]]], scatters: Scatters
    ) -> Iterator[Around]:
        first: int | None = None  # units count from the first of the action: so one microbatch is like another
        for run, call in self._calls(action):
            before: tuple[Turn, ...] = ()
            if self.parts.gathers(call, run):
                number, before = next(taken)
                first = number if first is None else first
                before = tuple(replace(turn, key=_counted(turn.key, first)) for turn in before)
            why = f"{call.name}: each rank keeps its part of the gradients"
            moves = self.parts.after(call, run)
            after = tuple(scatters.scatter(moves, why)) if self.parts.scattered(call, run) else ()
            yield Around(kind=run, call=call, before=before, after=after)

    def kept(self, stage: int) -> Iterator[Turn]:
        """At the start: what every rank keeps whole, each call's waited for at once."""
        for moves in self.parts.kept(stage):
            yield from _flat([Unit(moves, "")], self.parts.turns)

    def refreshed(self, stage: int) -> Iterator[Turn]:
        """The same after the optimizer's update, one ahead."""
        units = [Unit(moves, "every rank keeps the updated parameters whole") for moves in self.parts.kept(stage)]
        yield from _flat(units, self.parts.turns)


def _flat(units: Sequence[Unit], turns: int) -> Iterator[Turn]:
    opening, taken = ahead(units, turns)
    yield from opening
    for _, here in taken:
        yield from here


def _counted(key: Key, first: int) -> Key:
    kind, number, *rest = key
    assert isinstance(number, int)
    return (kind, number - first, *rest)


def moves_of_step(program: Program, place: int) -> Iterator[Move]:
    """All that the ranks at a pipeline coordinate do in a step."""
    turns = Turns(program)
    course = turns.course(place)
    around = (turn for action in course.actions.values() for each in action for turn in (*each.before, *each.after))
    once: list[Iterable[Turn]] = [course.opening, around]
    for stage, scatters in course.left.items():
        once.append(scatters.settle())
        for bucket in Reductions(program, stage).buckets:
            if bucket.scattered:
                once.extend((scatters.scatter(turns.parts.scattered_sums(bucket.parameters), ""), scatters.settle()))
        once.append(turns.refreshed(stage))
    return (turn.move for turn in chain.from_iterable(once) if turn.move is not None)
