"""The effects of gathers and scatters on memory: recorded in separate runs, and replayed in a step.

    going = parts.gather(names)      start: + this rank's parts side by side, + room for those of all ranks
    whole = going.wait()             wait:  + whole parameters, - the room

Exchanges of equal tensors have equal effects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from partc.errors import InternalError
from partc.rehearsal.call_replay import Given, Key, New, Recordings, map_leaves, seen_as, stand_ins
from partc.rehearsal.ledger import NOWHERE, Block, Leaf, Ledger, Owned, sight
from partc.runtime.comm.comm import Pending
from partc.runtime.torch_private import storage_key

Start = Callable[[Sequence[Tensor]], Pending[Any]]


Entries = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class ExchangeEffects:
    """The effects of an exchange's start, of its advance to a second level, and of its wait.

    Entries are ("+", number, block, operation), ("-", number) and ("drop", numbers of given tensors). In the result of
    the wait, numbers stand for tensors.
    """

    start: Entries
    advance: Entries
    wait: Entries
    result: Any


class ReplayedExchange(Pending[Any]):
    """An exchange of tensors that changes memory by known effects."""

    __slots__ = ("_blocks", "_effects", "_given", "_ledger")

    def __init__(self, ledger: Ledger, effects: ExchangeEffects, tensors: Sequence[Tensor]) -> None:
        self._ledger = ledger
        self._effects: ExchangeEffects | None = effects
        self._given: list[Tensor | None] = [*tensors]
        self._blocks: dict[int, Owned] = {}
        self._replay(effects.start)

    def advance(self) -> None:
        if self._effects is not None:
            self._replay(self._effects.advance)

    def wait(self) -> Any:
        """The result of the exchange. Every call after the first returns it immediately."""
        effects, self._effects = self._effects, None
        if effects is None:
            return None
        self._replay(effects.wait)
        return map_leaves(effects.result, self._returned)

    def _replay(self, entries: Entries) -> None:
        for sign, what, *made in entries:
            if sign == "+":
                (category, name, size), op = made
                self._blocks[what] = self._ledger.owned(Block(size, category, name), op)
            elif sign == "-":
                del self._blocks[what]
            else:
                for number in what:
                    self._given[number] = None

    def _returned(self, item: Any) -> Leaf | Tensor:
        if isinstance(item, New):
            return Leaf(self._blocks[item.number], item.sight)
        return seen_as(self._given[item.number], item.sight)


def exchange_effects(
    recordings: Recordings, key: Key, start: Start, tensors: Sequence[Tensor], *, kept: bool = False
) -> ExchangeEffects:
    """The effects of an exchange of tensors. For equal keys `start` runs only once, separately and on stand-ins.

    `kept` tensors outlive the exchange.
    """
    seen, same = recordings.ledger.seen(tensors)
    key = (*key, seen, same)
    if key not in recordings.exchanges:
        recordings.exchanges[key] = _recorded_effects(recordings.ledger, start, tensors, same, kept)
    found: ExchangeEffects = recordings.exchanges[key]
    return found


def _recorded_effects(
    ledger: Ledger, start: Start, tensors: Sequence[Tensor], same: Sequence[int], kept: bool
) -> ExchangeEffects:
    """The effects of an exchange, from a separate run. An exchange without a second level has no advance."""
    with ledger.aside() as tape:
        if kept:
            given, numbers = tuple(tensors), {storage_key(x): number for number, x in enumerate(tensors)}
        else:
            end = lambda together: tape.append(("drop", together, NOWHERE))  # noqa: E731
            given, numbers = stand_ins(ledger, tuple(tensors), same, end)
        waiting = [given]
        del given
        going = start(waiting.pop())
        begun = len(tape)
        going.advance()
        advanced = len(tape)
        result = going.wait()
        blocks = {block: number for number, block in enumerate(what for sign, what, _ in tape if sign == "+")}

        def known(x: Any) -> Given | New:
            block = ledger.block(x)
            if block in blocks:
                return New(blocks[block], sight(x))
            if storage_key(x) not in numbers:
                raise InternalError("an exchange returns a tensor that it neither made nor was given")
            return Given(numbers[storage_key(x)], sight(x))

        result = map_leaves(result, known)
        entries = tuple(_numbered(entry, blocks) for entry in tape)
        del going
    return ExchangeEffects(entries[:begun], entries[begun:advanced], entries[advanced:], result)


def _numbered(entry: Any, blocks: dict[Any, int]) -> tuple[Any, ...]:
    sign, what, (_, _, op) = entry
    if sign == "+":
        return sign, blocks[what], what.label, op
    return sign, blocks[what] if sign == "-" else what
