"""A rank's step, composed from the effects of its actions on memory.

    played:     0F0 0B0 0F1 0B1                       what each action allocates and frees, in which circumstances
    composed:   0F0 0F1 0F2 0B0 0F3 0B1 … 0B511       the same effects, in the order of the whole schedule

Actions of one kind in equal circumstances have equal effects, for every microbatch and for each of several equal
stages. The circumstances are: the earlier actions of the microbatch, the exchanges that the action starts and waits
for, whether it releases sent gradients, and whether it is among the first or the last of its kind. So a rank plays only
the microbatches that show all circumstances of its schedule, and equal ranks play them once. An action that releases
the gradients of several microbatches has the effect of an action that releases one microbatch's, with more releases.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from partc.communication.execution import Execution, StatementRun
from partc.cost.memory import Moment, RankMemory, StepPosition, grouped_by_name
from partc.ir.naming import gradient_owner, numbered
from partc.ir.program import Action, ActionStatement, Bucket, Program
from partc.passes.prefetch import gathering_ahead
from partc.rehearsal.ledger import RELEASED, Entry, Label, Ledger

Key = tuple[object, ...]
_ATTEMPTS = 4  # to find the microbatches that show all circumstances
_UNLIKE = 2  # first actions of a kind that allocate differently from later ones: the second frees results of the first
_NEIGHBOURS = 2  # the most actions before and after one, whose microbatches are played with it
_DRAINED = "the last transfers of the step"


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of an action on memory. Bytes are relative to its start; a call is its position among its stage's
    calls.
    """

    entries: tuple[tuple[str, Label | Key, int, str, str], ...]  # sign, what, call, line, operation
    change: int
    high: int
    reach: int | None  # the most bytes that are allocated at once, and the entry at which they are
    at: int
    calls: tuple[tuple[int, int], ...]  # the same, for each call

    @classmethod
    def of(cls, entries: Iterable[Entry], calls: Mapping[str, int]) -> Effect:
        number = defaultdict(lambda: -1, calls)
        return cls.made(
            [(sign, what.label, number[call], line, op) for sign, what, (call, line, op) in entries if what]
        )

    @classmethod
    def made(cls, entries: Sequence[tuple[Any, ...]]) -> Effect:
        now = high = at = 0
        reach: int | None = None
        most: dict[int, int] = {}
        for index, (sign, what, number, _, _) in enumerate(entries):
            if sign == "^":
                here = now + what[0]
            else:
                here = now = now + (what[2] if sign == "+" else -what[2])
            if here > high:
                high = here
            if sign != "-":
                if number not in most or here > most[number]:
                    most[number] = here
                if reach is None or here > reach:
                    reach, at = here, index
        return cls(tuple(entries), now, high, reach, at, tuple(most.items()))

    def releasing(self, before: int, after: int) -> Effect | None:
        """The effect with the releases of `after` microbatches in place of `before`; None if the releases are not
        equal.
        """
        places = [index for index, (*_, op) in enumerate(self.entries) if op == RELEASED[-1]]
        if before == after or not places:
            return self
        first, last = places[0], places[-1] + 1
        one, rest = divmod(last - first, before)
        released = self.entries[first:last]
        if rest or len(released) > len(places) or released != released[:one] * before:
            return None
        return Effect.made((*self.entries[:first], *released[:one] * after, *self.entries[last:]))

    def counted(self, end: int | None = None) -> Counter[Label]:
        """The bytes that the entries before `end` allocate, less the bytes that they free. If the last entry is a
        surge, it counts.
        """
        found: Counter[Label] = Counter()
        for sign, what, *_ in self.entries[:end]:
            if sign != "^":
                found[what] += 1 if sign == "+" else -1  # type: ignore[index]
        if end is not None and self.entries[end - 1][0] == "^":
            found.update(self.entries[end - 1][1][1:])  # type: ignore[arg-type]
        return found


@dataclass(frozen=True, slots=True)
class Frame:
    """The surroundings of a schedule's actions: memory at the step's start, and effects before and after the actions.

    `rest` is the effect after all transfers have ended, when the memory `left` is still held.
    """

    base: Counter[Label]
    before: tuple[tuple[str, Effect], ...]
    after: tuple[tuple[str, Effect], ...]
    left: Counter[Label]
    rest: tuple[tuple[str, Effect], ...]


@dataclass(frozen=True)
class Course:
    """The composed step of a rank. It answers the same queries as the ledger of a whole step."""

    frame: Frame
    row: tuple[tuple[Action, Effect], ...]
    calls: Mapping[int, Sequence[str]]  # of stages

    def _actions(self) -> Iterator[tuple[str, int, Effect]]:
        yield from ((name, -1, effect) for name, effect in self.frame.before)
        yield from ((action.name, action.stage, effect) for action, effect in self.row)
        yield from ((name, -1, effect) for name, effect in self.frame.after)

    def _rest(self) -> Iterator[tuple[str, int, Effect]]:
        yield from ((name, -1, effect) for name, effect in self.frame.rest)

    def _call(self, stage: int, number: int) -> str:
        return self.calls[stage][number] if number >= 0 else ""

    @cached_property
    def _begins(self) -> tuple[tuple[str, int, Effect, int], ...]:
        """Every action, with the bytes held at its start."""
        now, found = _bytes(self.frame.base), []
        for name, stage, effect in self._actions():
            found.append((name, stage, effect, now))
            now += effect.change
        drained = Effect((), _bytes(self.frame.left) - now, 0, None, 0, ())
        found.append((_DRAINED, -1, drained, now))
        now = _bytes(self.frame.left)
        for name, stage, effect in self._rest():
            found.append((name, stage, effect, now))
            now += effect.change
        return tuple(found)

    @property
    def peaks(self) -> dict[tuple[str, str], int]:
        """The most bytes in every action and call."""
        found = {("", ""): _bytes(self.frame.base)}
        for name, stage, effect, now in self._begins:
            for number, most in effect.calls:
                key = name, self._call(stage, number)
                found[key] = max(now + most, found.get(key, now + most))
        return found

    def base(self) -> Counter[Label]:
        """Everything held at the step's start."""
        return self.frame.base

    @property
    def peak(self) -> int:
        reached = (now + effect.reach for _, _, effect, now in self._begins if effect.reach is not None)
        return max((_bytes(self.frame.base), *reached))

    def rank(self, place: int, stages: tuple[int, ...], host: int) -> RankMemory:
        peak, at = _bytes(self.frame.base), -1
        for index, (_, _, effect, now) in enumerate(self._begins):
            if effect.reach is not None and now + effect.reach > peak:
                peak, at = now + effect.reach, index
        position = StepPosition(action="")
        if at >= 0:
            name, stage, effect, _ = self._begins[at]
            _, _, number, line, op = effect.entries[effect.at]
            position = StepPosition(action=name, call=self._call(stage, number), line=line, op=op)
        return RankMemory(
            place=place,
            stages=stages,
            peak=peak,
            at=position,
            alive=grouped_by_name(self._bytes_alive(at)),
            timeline=tuple(
                Moment(action=name, peak=now + effect.high, after=now + effect.change)
                for name, _, effect, now in self._begins
            ),
            host=host,
        )

    def _bytes_alive(self, at: int) -> Counter[Label]:
        """The bytes that are alive where an action reaches its peak."""
        if at < 0:
            return self.frame.base
        drained = next(index for index, (name, *_) in enumerate(self._begins) if name == _DRAINED)
        start = 0 if at <= drained else drained + 1
        found = Counter(self.frame.base if at <= drained else self.frame.left)
        times: dict[int, int] = {}
        effects: dict[int, Effect] = {}
        for _, _, effect, _ in self._begins[start:at]:
            effects[id(effect)] = effect
            times[id(effect)] = times.get(id(effect), 0) + 1
        for key, effect in effects.items():
            for held, count in effect.counted().items():
                found[held] += count * times[key]
        _, _, effect, _ = self._begins[at]
        found.update(effect.counted(effect.at + 1))
        return found

    def kinds(self) -> Iterator[tuple[str, Mapping[str, int]]]:
        """For each action, its peak bytes by category."""
        now = _by_category(self.frame.base)
        known: dict[int, tuple[Counter[str], Counter[str]]] = {}
        for name, _, effect, _ in self._begins:
            if name == _DRAINED:
                yield name, +now
                now = _by_category(self.frame.left)
                continue
            if id(effect) not in known:
                known[id(effect)] = _at_height(effect), _by_category(effect.counted())
            height, change = known[id(effect)]
            most = Counter(now)
            most.update(height)
            yield name, +most
            now.update(change)


def _bytes(labels: Counter[Label]) -> int:
    return sum(size * count for (_, _, size), count in labels.items())


def _by_category(labels: Counter[Label]) -> Counter[str]:
    found: Counter[str] = Counter()
    for (category, _, size), count in labels.items():
        found[category] += size * count
    return found


def _at_height(effect: Effect) -> Counter[str]:
    """By category, the bytes above the action's start, at the point where the action holds most."""
    now = 0
    for index, (sign, what, *_) in enumerate(effect.entries):
        size: Any = what[0] if sign == "^" else what[2]
        here = now + (size if sign in "+^" else -size)
        if here == effect.high and effect.high:
            return _by_category(effect.counted(index + 1))
        now = now if sign == "^" else here
    return Counter()


# -- circumstances -----------------------------------------------------------------------------


@dataclass(slots=True)
class _Equal:
    """The effects of actions, shared by ranks that are equal except for names."""

    frames: dict[Key, Frame] = field(default_factory=dict)  # by the circumstances in which the step begins
    effects: dict[Key, Effect] = field(default_factory=dict)
    doubtful: bool = False  # one circumstance showed two effects: these ranks must play whole steps
    histories: dict[Key, int] = field(default_factory=dict)  # interned
    releasing: dict[tuple[Key, int], Effect] = field(default_factory=dict)

    def effect(self, key: Key, releases: int) -> Effect:
        """The effect in a circumstance, with the releases of `releases` microbatches."""
        if releases == 1:
            return self.effects[key]
        if (key, releases) not in self.releasing:
            found = self.effects[key].releasing(1, releases)
            assert found is not None  # a single release equals itself
            self.releasing[key, releases] = found
        return self.releasing[key, releases]


@dataclass(frozen=True, slots=True)
class _Circumstances:
    """The circumstances of an action, on which its effect depends.

    `releases` is the number of microbatches whose sent gradients the action releases. `before` is the kind of the
    computation before it, whose results may be freed when those of the action replace them.
    """

    key: Key
    releases: int
    before: Key


@dataclass(frozen=True)
class _Names:
    """The numbers that replace the names of a rank's stages, calls and values, so that equal ranks compare equal."""

    program: Program
    place: int

    @cached_property
    def stages(self) -> Mapping[int, int]:
        return {stage: number for number, stage in enumerate(self.program.stages_at(self.place))}

    @cached_property
    def calls(self) -> Mapping[int, Mapping[str, int]]:
        found: dict[int, dict[str, int]] = {stage: {} for stage in self.stages}
        for call in self.program.calls:
            if call.stage in found:
                found[call.stage][call.name] = len(found[call.stage])
        return found

    @cached_property
    def values(self) -> dict[str, int]:
        return {}

    def value(self, name: str) -> Key:
        if name in self.program.inputs:
            return ("input", name)
        bare = gradient_owner(name)
        gradient = bare != name and bare in self._types
        plain = bare if gradient else name
        return self.values.setdefault(plain, len(self.values)), gradient, self._types.get(plain)

    @cached_property
    def _types(self) -> Mapping[str, object]:
        return self.program.value_types()

    @cached_property
    def _first_ranks(self) -> dict[tuple[str | None, ...], tuple[int, ...]]:
        return {}

    def path(self, name: str) -> Key:
        """The name of a module or parameter, with its numbers relative to the first similar name's."""
        alike, numbers = numbered(name)
        first = self._first_ranks.setdefault(alike, numbers)
        return alike, *[a - b for a, b in zip(numbers, first, strict=True)]

    def peer(self, stage: int | None) -> object:
        return stage if stage is None else self.stages.get(stage, "elsewhere")

    def signature(self) -> Key:
        """Everything that determines the rank's memory, except for its schedule."""
        program, holders = self.program, self.program.holders()
        here = [call for call in program.calls if call.stage in self.stages]
        calls = [
            (
                self.stages[call.stage],
                call.region,
                self.path(call.name),
                tuple([self.path(name) for name in call.params]),
                tuple([self.value(name) for name in call.args]),
                tuple([self.value(name) for name in call.results]),
                call.random is not None,
            )
            for call in here
        ]
        read = dict.fromkeys([name for call in here for name in call.params])
        held = [
            (
                self.path(name),
                program.parameter(name).facts,
                tuple([self._bucket(program.bucket(each)) for each in program.parameter(name).buckets]),
                len({*map(program.place, holders[name])}) if len(holders[name]) > 1 else 1,
            )
            for name in read
        ]
        transfers = [
            (self.value(each.value), self.peer(each.source), self.peer(each.target), each.gradient)
            for each in program.transfers
            if {each.source, each.target} & self.stages.keys()
        ]
        bodies = [
            (
                body.kind,
                self.stages.get(body.index) if body.kind != "END" else None,
                tuple(self._statement(body.index, each) for each in body.statements),
            )
            for body in program.bodies
            if (body.index == self.place if body.kind == "END" else body.index in self.stages)
        ]
        updates = [(self.path(buffer), self.value(value)) for buffer, value in program.updates if buffer in read]
        made = {name for call in program.calls for name in call.results}
        returned = tuple(self.value(name) for name in program.returned if name in made)
        return tuple(calls), tuple(held), tuple(transfers), tuple(bodies), tuple(updates), returned

    def _bucket(self, bucket: Bucket) -> Key:
        if bucket.name not in self._buckets:
            names = self.path(bucket.name), self.path(bucket.after)
            self._buckets[bucket.name] = (self.peer(bucket.stage), *names, bucket.over, bucket.scattered)
        return self._buckets[bucket.name]

    @cached_property
    def _buckets(self) -> dict[str, Key]:
        return {}

    def steps(self, steps: tuple[StatementRun, ...]) -> Key:
        if id(steps) not in self._steps:
            self._steps[id(steps)] = (
                steps,
                tuple([(self._statement(step.stage, step.statement), step.key[3:]) for step in steps]),
            )
        return self._steps[id(steps)][1]

    @cached_property
    def _steps(self) -> dict[int, tuple[tuple[StatementRun, ...], Key]]:
        """The steps of actions so far, by identity, each with its names as numbers."""
        return {}

    def _statement(self, stage: int, each: ActionStatement) -> Key:
        name = (self.stages[stage], self.calls[stage][each.of]) if each.of in self.calls.get(stage, ()) else each.of
        of: object = self.value(each.of) if each.subject == "value" else name
        if each.subject == "bucket":
            of = self._bucket(self.program.bucket(each.of))
        elif each.subject in ("shared", "result"):
            of = self.path(each.of)
        moved = tuple([one and (one.op, one.axes, one.shape, one.dtype, len(one.places)) for one in each.collectives])
        return each.verb, each.subject, of, moved, each.ahead, each.behind, self.peer(each.peer), each.when


@dataclass(frozen=True)
class _Signatures:
    """The names of a program's ranks, and their signatures."""

    program: Program
    by_place: dict[int, tuple[_Names, Key]] = field(default_factory=dict)

    def at(self, place: int) -> tuple[_Names, Key]:
        """The names of the ranks at a place, and their signature. It numbers the names, so it is made first."""
        if place not in self.by_place:
            names = _Names(self.program, place)
            self.by_place[place] = names, names.signature()
        return self.by_place[place]


Acks = Mapping[tuple[int, int], Sequence[int]]  # see `runtime.execution.executor.acknowledged_by`
Played = Callable[[int, Sequence[Action], Acks], Ledger]


class Composer:
    """The steps of a program's ranks. `played(place, row, acks)` plays a row of actions on the ranks at a place."""

    def __init__(self, program: Program, acks: Acks, played: Played) -> None:
        self._program, self._acks, self._played = program, acks, played
        self._equal: dict[Key, _Equal] = {}

    def course(self, place: int) -> Course | Ledger:
        """The step of the ranks at a place, played as a whole if it cannot be composed."""
        row = self._program.schedule[place]
        names, signature = self._program.derived(_Signatures).at(place)
        equal = self._equal.setdefault(signature, _Equal())
        chosen: set[int] = set()
        start, found = self._circumstances(place, row, names, equal, self._acks)
        opening = _opening(row)
        for _ in range(_ATTEMPTS):
            unknown = [index for index, each in enumerate(found) if each.key not in equal.effects]
            missing = {(found[index].key, found[index].before): index + opening for index in reversed(unknown)}
            if equal.doubtful or (start in equal.frames and not missing):
                break
            more = self._fewest(place, row, names, equal, missing, chosen)
            if more == chosen:
                break
            chosen, some = more, self._restricted(row, more)
            if 2 * len(some) > len(row):
                if self._is_unique(place):
                    break
                chosen, some = {each.microbatch for each in row if each.microbatch is not None}, row
            acks = self._acks_of(chosen)
            self._learn(self._played(place, some, acks), place, some, acks, names, equal)
        if equal.doubtful or start not in equal.frames or any(each.key not in equal.effects for each in found):
            return self._played(place, row, self._acks)
        effects = zip(row[opening:], (equal.effect(each.key, each.releases) for each in found), strict=True)
        calls = {stage: tuple(numbers) for stage, numbers in names.calls.items()}
        return Course(equal.frames[start], tuple(effects), calls)

    def signature(self, place: int) -> Key:
        """A key that is equal for ranks which differ only in names and schedules."""
        return self._program.derived(_Signatures).at(place)[1]

    def _is_unique(self, place: int) -> bool:
        """Whether no other rank could share this rank's effects."""
        mine = self.signature(place)
        return all(self.signature(other) != mine for other in range(len(self._program.schedule)) if other != place)

    def _fewest(
        self,
        place: int,
        row: Sequence[Action],
        names: _Names,
        equal: _Equal,
        missing: Mapping[tuple[Key, Key], int],
        chosen: set[int],
    ) -> set[int]:
        """Few microbatches, with those `chosen` before, that show the `missing` circumstances, each behind the same
        computations: of the actions in which these occur, and of more and more of their neighbours.
        """
        near = dict.fromkeys(missing, 0)
        while True:
            showing = (self._showing(row, missing[key], count) for key, count in near.items())
            found = chosen.union(self._showing(row, _opening(row), 0), *showing)
            some = self._restricted(row, found)
            if 2 * len(some) > len(row):
                return found
            _, played = self._circumstances(place, some, names, equal, self._acks_of(found))
            shown = {(each.key, each.before) for each in played}
            lacking = [key for key in missing if key not in shown and near[key] < _NEIGHBOURS]
            if not lacking:
                return found
            near.update((key, near[key] + 1) for key in lacking)

    def _acks_of(self, microbatches: set[int]) -> Acks:
        """The acknowledgements among some microbatches."""
        acks = ((slot, found) for slot, found in self._acks.items() if slot[1] in microbatches)
        return {slot: tuple(microbatches.intersection(found)) for slot, found in acks}

    def _showing(self, row: Sequence[Action], index: int, neighbours: int) -> Iterator[int]:
        """The microbatches with which an action is played: those of its neighbours, and those whose gradients it
        releases.
        """
        for action in row[max(0, index - neighbours) : index + neighbours + 1]:
            if action.microbatch is not None:
                yield action.microbatch
        if row[index].kind == "F":
            for source in self._sources(row[index].stage):
                yield from self._acks.get((source, row[index].microbatch or 0), ())

    def _sources(self, stage: int) -> list[int]:
        return sorted({each.source for each in self._program.sent if each.target == stage})

    def _restricted(self, row: Sequence[Action], microbatches: set[int]) -> tuple[Action, ...]:
        """The row's actions on some microbatches, with the gathers ahead between them."""
        left = [
            replace(action, ahead=())
            for action in row
            if action.kind != "UNSHARD" and (action.microbatch is None or action.microbatch in microbatches)
        ]
        return tuple(gathering_ahead(self._program, row, left))

    def _circumstances(
        self, place: int, row: Sequence[Action], names: _Names, equal: _Equal, acks: Acks
    ) -> tuple[Key, list[_Circumstances]]:
        """The circumstances in which the row begins, and those of each action after its opening."""
        opening = _opening(row)
        start: list[Key] = []
        found: list[_Circumstances] = []
        done = 0
        histories: dict[int, int] = {}
        seen: Counter[tuple[int, str]] = Counter()
        sources = {stage: self._sources(stage) for stage in names.stages}
        final = {action.stage: index for index, action in enumerate(row) if action.kind in ("B", "W")}
        previous: Key = ()
        for action, steps in Execution(self._program, place, tuple(row)).step():
            if action == "end":
                continue
            if not isinstance(action, Action) or done < opening:
                start.append(names.steps(steps))
                done += isinstance(action, Action)
                continue
            stage, kind = names.stages[action.stage], action.kind
            history, count = -1, 1
            released: tuple[int, ...] = ()
            if action.microbatch is not None:
                before = histories.get(action.microbatch, 0)
                history = equal.histories.setdefault((before, stage, kind), len(equal.histories) + 1)
                histories[action.microbatch] = history
                if kind == "F":
                    counts = [len(acks.get((source, action.microbatch), ())) for source in sources[action.stage]]
                    if counts.count(0) == len(counts) - 1:  # from one source
                        count = max(counts)
                    released = tuple(each // count for each in counts)
            earlier = min(seen[stage, kind], _UNLIKE)
            seen[stage, kind] += 1
            last = final.get(action.stage) == done
            key = stage, kind, history, released, earlier, last, names.steps(steps)
            found.append(_Circumstances(key, count, previous))
            if kind in ("F", "B", "I", "W"):
                previous = stage, kind
            done += 1
        return tuple(start), found

    def _learn(
        self, ledger: Ledger, place: int, row: Sequence[Action], acks: Acks, names: _Names, equal: _Equal
    ) -> None:
        start, found = self._circumstances(place, row, names, equal, acks)
        actions = row[_opening(row) :]
        parts = _parts(ledger)
        calls: list[Mapping[str, int]] = [{}] * len(ledger.actions)
        begin = next(index for index, name in enumerate(ledger.actions) if name == actions[0].name)
        calls[begin : begin + len(actions)] = [names.calls[action.stage] for action in actions]
        effects = [Effect.of(part, numbers) for part, numbers in zip(parts, calls, strict=True)]
        named = tuple(zip(ledger.actions, effects, strict=True))
        drained = ledger.actions.index(_DRAINED)
        base = ledger.base()
        left = Counter(base)
        for effect in effects[: drained + 1]:
            left.update(effect.counted())
        frame = Frame(base, named[:begin], named[begin + len(actions) : drained], +left, named[drained + 1 :])
        equal.doubtful |= any(sign != "-" for sign, *_ in effects[drained].entries) or min(left.values(), default=0) < 0
        equal.doubtful |= equal.frames.setdefault(start, frame) != frame
        for each, effect in zip(found, effects[begin : begin + len(actions)], strict=True):
            one = effect.releasing(each.releases, 1)
            equal.doubtful |= one is None or equal.effects.setdefault(each.key, one) != one


def _opening(row: Sequence[Action]) -> int:
    return next((index for index, action in enumerate(row) if action.kind != "UNSHARD"), len(row))


def _parts(ledger: Ledger) -> list[list[Entry]]:
    """The step's tape, cut into the entries of each action."""
    tape = ledger.tape[ledger.begin :]
    starts = [index for index, (sign, *_) in enumerate(tape) if sign == "."]
    return [tape[start + 1 : end] for start, end in pairwise([*starts, len(tape)])]
