"""Traces with other values in place of those that forward changes in each step."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import CodeType
from typing import Any

import torch
from torch import nn

from partc.errors import PartcError
from partc.frontend.state.change_sources import change_source
from partc.frontend.state.comparable import parts
from partc.frontend.state.kept_attributes import Contents
from partc.frontend.state.opposite_numbers import Uses, numbers_in
from partc.frontend.state.snapshots import Change, State
from partc.frontend.state.state_watch import StateWatch
from partc.frontend.state.trace_comparison import TracedNode, effects_signature, first_difference
from partc.frontend.state.value_places import LATE, Key, Put, ValuePlace, ValuePlaces, part_put, value_places
from partc.replaced import all_replaced

_NEXT = 8  # steps, and numbers of code, that are tried one by one


_Moved = Mapping[Key, tuple[ValuePlace, ValuePlace]]  # each value before and behind the second trace


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The outcome of a trace that is equal to the first one, or fails."""

    tried: frozenset[Key]  # the values in whose places others were
    kept: frozenset[int]  # the identities of the values that forward left
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterTraces:
    """Traces with other values in place of those that forward changes in each step."""

    plain: tuple[TracedNode, ...]  # the first trace
    known: Set[str]
    watch: StateWatch  # behind the second trace, which was equal
    again: Callable[[], torch.export.ExportedProgram]
    changes: Sequence[Change]
    stops: tuple[type[Exception], ...]
    ends: tuple[tuple[dict[str, Any], str, Any], ...]
    contents: Contents

    def check(self, begun: ValuePlaces) -> Iterator[str]:
        """Refuse changes whose later values affect the trace, and yield a sentence for each assumption: where forward
        fails with values of a later step, as past the end of a schedule, and where later values are not known.

        `begun` are the values with which the second trace began. Raises PartcError P0225.
        """
        with self._second_step():
            ended = value_places(places_of(self.watch, self.changes))
            moved = {
                key: (begun[key], now) for key, now in ended.items() if key in begun and begun[key].state != now.state
            }
        if not moved:
            return
        uses = {root: Uses() for root, *_ in moved}
        hook = partial(_length, [*uses.values()])
        with all_replaced((home, "len", hook) for home in self.watch.modules if "len" not in vars(home)):
            first = self._trace(moved, lambda key, before, now: now.oppose(before, uses[key[0]]), late=False)
        last = self._trace(moved, lambda key, before, now: now.advance(before, LATE))
        if last.failure:
            yield f"Packages repeat the first step. With a later value of {self._named(moved)}, {last.failure}."
        for root, each in uses.items():
            own = {key: pair for key, pair in moved.items() if key[0] == root}
            lines = each.unseen(first.kept)
            exact = frozenset(key for key, (_, now) in own.items() if now.exact)
            known = all(_lies_below(key, exact & first.tried & last.tried) for key in own)
            if lines or not known:
                self._try_numbers(own, lines.values())
            for line in lines:
                yield f"Packages repeat the first step. A later value of {self._named(own)} may matter at {line}."
            if not lines and not last.failure and not known:
                yield f"Packages repeat the first step. Later values of {self._named(own)} are not all known."

    def _try_numbers(self, moved: _Moved, code: Iterable[CodeType]) -> None:
        """Try the values of the next steps, and the numbers in the code that reads them."""
        for steps in range(1, _NEXT):
            self._trace(moved, lambda key, before, now, n=steps: now.advance(before, n))  # type: ignore[misc]
        numbers = dict.fromkeys(number for each in code for number in numbers_in(each.co_consts))
        for number in islice(numbers, _NEXT):
            for ahead in (True, False):  # forward reads a number before or behind its change
                self._trace(moved, lambda key, before, now, n=number, a=ahead: now.reach(before, n, a))  # type: ignore[misc]

    def _trace(
        self, moved: _Moved, put: Callable[[Key, ValuePlace, ValuePlace], bool], *, late: bool = True
    ) -> _Outcome:
        """Trace with other values. Raises PartcError P0225 if the trace differs."""
        failure, other = "", None
        tried, kept = frozenset[Key](), frozenset[int]()
        with self._second_step():
            try:
                tried = frozenset(key for key, (before, now) in moved.items() if put(key, before, now))
                if tried:
                    other = effects_signature(self.again(), self.known)
                    left = [(value, None) for _, _, value in self.watch.ends]
                    found = value_places([*left, *places_of(self.watch, self.changes)])
                    kept = frozenset(id(each.value) for each in found.values())
            except self.stops:
                raise
            except Exception as error:  # such as a report of values: the branch's code cannot be traced
                if isinstance(error, PartcError) and error.code == "P0225":
                    raise
                failure = str(getattr(error, "cause", error))
            finally:
                for _, now in moved.values():
                    now.restore()
        node = None if other is None else first_difference(self.plain, other, filled=True)
        always = any(change.always for change in self.watch.changes.values())
        if node is not None or (other is not None and always):
            does = "computes something else in a later step: a package would repeat the first step"
            if not late:
                does = "compares it: a package would have the first step's outcome"
            change = self._change(moved)
            raise PartcError(
                "P0225",
                f"forward changes {change.what}, and {does}",
                help="keep the number in a registered buffer, and choose between results with torch.where",
                source=change_source(change, self._state) or (None if node is None else node.source),
            )
        return _Outcome(tried, kept, failure)

    @contextmanager
    def _second_step(self) -> Iterator[None]:
        """A context in which the model is as the second trace has left it."""
        with attributes_restored(self.watch.model):
            self.watch.ends[:], self.watch.contents = self.ends, self.contents
            self.watch.go_on()
            yield

    def _change(self, moved: Iterable[Key]) -> Change:
        """The first of the changes, if possible one whose line is known."""
        found: list[Change] = [self.changes[root] for root in dict.fromkeys(key[0] for key in moved)]
        return next((change for change in found if change_source(change, self._state) is not None), found[0])

    def _named(self, moved: Iterable[Key]) -> str:
        change = self._change(moved)
        source = change_source(change, self._state)
        return change.what if source is None else f"{change.what} ({source})"

    @property
    def _state(self) -> State:
        assert self.watch.state is not None
        return self.watch.state


def _lies_below(key: Key, keys: Set[Key]) -> bool:
    return any(key[:n] in keys for n in range(1, len(key) + 1))


def _length(uses: Sequence[Uses], x: Any, /) -> int:
    """Python's `len`, opposite for containers that forward changes in each step."""
    return next((each for each in uses if id(x) in each.lengths), uses[0]).length(x, sys._getframe(1))


def places_of(watch: StateWatch, changes: Iterable[Change]) -> Iterator[tuple[Any, Put | None]]:
    """Each changed value, and the function that puts another one in its place."""
    for change in changes:
        kind, _, path = change.key[0].partition(" ")
        owner = watch.named.get(path.removeprefix("of ")) if kind == "self" else change.owner
        yield _place(owner, change.name) if kind in ("self", "class", "module", "function") else (None, None)


def _place(owner: Any, name: str) -> tuple[Any, Put | None]:
    """The value that a module, a class or a function has under a name, and the function that replaces it."""
    if isinstance(owner, types.ModuleType | type | nn.Module):
        own = vars(owner)
        return own.get(name), partial(setattr, owner, name) if isinstance(owner, type) else partial(
            own.__setitem__, name
        )
    return parts(owner).get(name), part_put(owner, name)


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """A context after which the attributes and buffers of the model's modules are the objects that they were, and lists
    and dicts among them have the contents that they had.
    """
    stores = (store for module in model.modules() for store in (vars(module), module._buffers))
    before = [(store, dict(store)) for store in stores if isinstance(store, dict)]
    contents = Contents.reached(value for _, held in before for value in held.values())
    try:
        yield
    finally:
        contents.restore()
        for store, held in before:
            store.clear()
            store.update(held)
