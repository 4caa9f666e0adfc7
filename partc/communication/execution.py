"""The execution of a rank's step: the actions of its schedule, and their statements, in order.

The proof of communication, the accounts of bytes and time, and the reports all read a program's actions through this
module. All ranks at a pipeline coordinate run the same statements, so one rank stands for its coordinate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from partc.communication.exchanges import Exchanges
from partc.communication.statement_proof import Key, StatementProof
from partc.errors import InternalError
from partc.ir.program import Action, ActionStatement, Body, BodyKind, Collective, GraphKind, Program


@dataclass(frozen=True, slots=True)
class StatementRun:
    """A statement of a stage that a rank runs; `key` is unique among the exchanges in progress."""

    stage: int
    statement: ActionStatement
    key: Key = ()

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives that start here."""
        return tuple([each for each in self.statement.collectives if each is not None])


@dataclass(slots=True)
class _UnderWay:
    """The exchanges of a rank that are in progress between two statements. Equal states lead to equal steps."""

    # (stage, call) -> remaining uses of its gathered parameters.
    holds: dict[tuple[int, str], int] = field(default_factory=dict)
    whole: tuple[tuple[int, str], ...] = ()  # (stage, call) whose parameters stay whole for the next use
    # Exchange -> the number of its advances, in the order of their starts.
    under_way: dict[Key, int] = field(default_factory=dict)

    def key(self) -> Key:
        return tuple(self.holds.items()), self.whole, tuple(self.under_way.items())

    def copy(self) -> _UnderWay:
        return _UnderWay(dict(self.holds), self.whole, dict(self.under_way))

    def scatters(self, stage: int) -> list[Key]:
        """The scatters of a stage, the last one first."""
        return [key for key in reversed(self.under_way) if key[:2] == ("scatter", stage)]


@dataclass(frozen=True)
class _Shared:
    """The steps of actions that all executions of a program share: equal actions in equal states have equal steps."""

    program: Program
    steps: dict[Key, tuple[tuple[StatementRun, ...], _UnderWay]] = field(default_factory=dict)


class Execution:
    """The execution of the ranks at one pipeline coordinate, by the program's schedule or another `row` of actions.

    Raises InternalError if a statement waits for an exchange that has not started, starts one again before it was
    waited for, or frees or reads parameters that have not been gathered. With `proving`, it also checks that the
    statements are the ones that the types need.
    """

    def __init__(
        self, program: Program, place: int, row: tuple[Action, ...] | None = None, *, proving: bool = False
    ) -> None:
        self.program = program
        self.place = place
        self.row = row if row is not None else program.schedule[place] if program.schedule else ()
        self.exchanges = program.derived(Exchanges)
        self._proof = StatementProof(self.exchanges, place) if proving else None
        self.stages = program.stages_at(place)
        self._bodies = program.named_bodies
        # A proof checks every step of its coordinate itself; what it finds serves all other executions.
        self._known = program.derived(_Shared).steps
        self._steps = {} if proving else self._known

    def before_first_step(self) -> Iterator[tuple[str, tuple[StatementRun, ...]]]:
        """The actions before the first step."""
        yield "start", tuple(self._of_stages("INIT", _UnderWay()))
        yield "setup", tuple(self._of_stages("SETUP", _UnderWay()))

    def step(self, *, updates: bool = True) -> Iterator[tuple[Action | str, tuple[StatementRun, ...]]]:
        """The actions of a step in order, each with its steps; `prepare` and `refresh` come first, `end` last.

        Without `updates`, the step only accumulates the gradients of a batch other than the first. Microbatches
        with equal steps share one tuple.
        """
        state = _UnderWay()
        opening = 0
        while opening < len(self.row) and self.row[opening].kind == "UNSHARD":
            yield self.row[opening], tuple(self._unshard(self.row[opening], state))
            opening += 1
        yield "prepare", tuple(self._of_stages("PREPARE", state))
        if updates:
            yield "refresh", tuple(self._of_stages("REFRESH", state))
        begun: set[int] = set()
        final = {action.stage: action for action in self.row if action.kind in ("B", "W")}
        known = self._steps
        for action in self.row[opening:]:
            first = updates and action.kind == "F" and action.stage not in begun
            begun.update({action.stage} if action.kind == "F" else ())
            last = updates and (action.kind == "REDUCE_GRAD" or action == final.get(action.stage))
            key = (action.stage, action.kind, action.ahead, first, last, state.key())
            if key not in known:
                found = tuple(self._action(action, state := state.copy(), first=first, last=last))
                known[key] = self._known[key] = found, state
            steps, state = known[key]
            yield action, steps
        self._check_ended(state)
        if updates:
            state = state.copy()
            yield "end", tuple(self._statements(self._bodies.get(f"{self.place}END"), state))
            self._check_ended(state)
            if self._proof is not None:
                self._proof.step()

    def _check_ended(self, state: _UnderWay) -> None:
        if state.holds or state.under_way:
            raise InternalError(f"pipeline rank {self.place} ends a step with something under way: {state}")

    def _of_stages(self, kind: BodyKind, state: _UnderWay) -> Iterator[StatementRun]:
        for stage in self.stages:
            yield from self._statements(self._bodies.get(f"{stage}{kind}"), state)

    def _action(self, action: Action, state: _UnderWay, *, first: bool, last: bool) -> Iterator[StatementRun]:
        if action.kind == "UNSHARD":
            yield from self._unshard(action, state)
            return
        when = {"", *(["first"] if first else []), *(["last"] if last else [])}
        yield from self._statements(self._bodies.get(f"{action.stage}{action.kind}"), state, when, action.ahead)

    def _unshard(self, action: Action, state: _UnderWay) -> Iterator[StatementRun]:
        """Start the first gathers of later actions, and advance the first of them."""
        following = self._following(action.ahead)[: self.exchanges.levels]
        for each in following:
            yield from self._gather(*each[:2], state)
        for stage, _, advance in following[:1]:
            yield from self._advance_gather(stage, advance, state)

    def _following(self, ahead: Iterable[str]) -> list[tuple[int, ActionStatement, ActionStatement | None]]:
        """The early gathers of the actions `ahead`: (stage, its start, its advance to the next level)."""
        return [each for name in ahead for each in self._early(self._bodies[name])]

    def _early(self, body: Body) -> list[tuple[int, ActionStatement, ActionStatement | None]]:
        early = [replace(each, when="") for each in body.statements if each.when == "early"]
        advances = {each.of: each for each in early if each.verb == "advance"}
        return [(body.index, each, advances.get(each.of)) for each in early if each.verb == "start"]

    def _statements(
        self, body: Body | None, state: _UnderWay, when: Iterable[str] = ("",), ahead: Iterable[str] = ()
    ) -> Iterator[StatementRun]:
        if body is None:
            return
        following, left = self._following(ahead), state.scatters(body.index)
        for each in body.statements:
            if each.ahead:
                for stage, start, advance in following[each.ahead - 1 : each.ahead]:
                    if each.verb == "start":
                        yield from self._gather(stage, start, state)
                    else:
                        yield from self._advance_gather(stage, advance, state)
            elif each.behind:
                for key in left[each.behind - 1 : each.behind]:
                    yield from self._continued_scatter(each, body.index, key, state)
            elif each.when in when:
                yield from self._statement(each, body, state)

    def _statement(self, each: ActionStatement, body: Body, state: _UnderWay) -> Iterator[StatementRun]:
        stage, held = body.index, (body.index, each.of)
        key: Key = (each.subject, stage, each.of)
        match each.verb, each.subject:
            case "run", ("F" | "B" | "I" | "W"):
                self._check_read(stage, each.of, each.subject, state)
                yield StatementRun(stage, each)
            case "start", "gather":
                if held in state.holds:
                    raise InternalError(f"the parameters of {each.of} are gathered again before they are freed")
                yield from self._gather(stage, each, state)
            case "advance", "gather" if held in state.whole:
                return
            case "wait", "gather" if held in state.whole:
                state.whole = tuple(other for other in state.whole if other != held)
            case "free", "gather":
                if held not in state.holds or key in state.under_way:
                    raise InternalError(f"the parameters of {each.of} are freed before they are gathered")
                state.holds[held] -= 1
                if state.holds[held]:
                    state.whole = (*state.whole, held)
                else:
                    del state.holds[held]
                    yield StatementRun(stage, each)
            case (("start" | "advance" | "wait"), "scatter"):
                yield from self._exchange(each, stage, (*key, body.kind), state)
            case (("start" | "advance" | "wait"), ("gather" | "refresh" | "bucket" | "shared" | "result")):
                yield from self._exchange(each, stage, key, state)
            case (("send" | "receive" | "wait"), "value") | ("run", "update"):
                yield StatementRun(stage, each)
            case _:
                raise InternalError(f"an action cannot {each}")

    def _gather(self, stage: int, start: ActionStatement, state: _UnderWay) -> Iterator[StatementRun]:
        """Gather parameters unless they are whole, and hold them for one more use in any case."""
        held = stage, start.of
        state.holds[held] = state.holds.get(held, 0) + 1
        if state.holds[held] == 1:
            yield from self._exchange(start, stage, ("gather", *held), state)

    def _advance_gather(self, stage: int, advance: ActionStatement | None, state: _UnderWay) -> Iterator[StatementRun]:
        key = ("gather", stage, advance.of if advance is not None else "")
        if advance is not None and key in state.under_way:
            yield from self._exchange(advance, stage, key, state)

    def _continued_scatter(
        self, each: ActionStatement, stage: int, key: Key, state: _UnderWay
    ) -> Iterator[StatementRun]:
        """Advance or wait for a scatter that an earlier action has left in progress."""
        _, _, name, kind = key
        if each.verb == "wait":
            yield from self._exchange(replace(each, of=name, behind=0), stage, key, state)
            return
        statements = self._bodies[f"{stage}{kind}"].statements
        for advance in [other for other in statements if other.when == "late" and other.of == name]:
            yield from self._exchange(replace(advance, when=""), stage, key, state)

    def _exchange(self, each: ActionStatement, stage: int, key: Key, state: _UnderWay) -> Iterator[StatementRun]:
        shown = f"{each.subject} {each.of}".rstrip()
        if each.verb == "start":
            if key in state.under_way:
                raise InternalError(f"{shown} starts again before it was waited for")
            state.under_way[key] = 0
        elif key not in state.under_way:
            raise InternalError(f"{shown} has not started, and something waits for it")
        elif each.verb == "advance":
            state.under_way[key] += 1
        if self._proof is not None:
            self._proof.exchange(each, key, state.under_way[key])
        if each.verb == "wait":
            del state.under_way[key]
        yield StatementRun(stage, each, key)

    def _check_read(self, stage: int, name: str, kind: GraphKind, state: _UnderWay) -> None:
        """Raise InternalError if a call reads parameters that are not gathered."""
        there = (stage, name) in state.holds and ("gather", stage, name) not in state.under_way
        call = self.program.call(stage, name)
        coming = any(("refresh", stage, first) in state.under_way for first in self.exchanges.refreshed(call))
        if coming or (not there and self.exchanges.gathers(call, kind)):
            raise InternalError(f"{name} reads its parameters before they are gathered")
