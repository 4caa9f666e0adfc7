"""Watches forward while it is traced, and lets a further trace begin where one has ended."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from partc.errors import Source
from partc.frontend.state.caches import caches
from partc.frontend.state.change_sources import change_source
from partc.frontend.state.generator_states import KeptStates
from partc.frontend.state.kept_attributes import Contents
from partc.frontend.state.snapshots import Change, State, holds_tensors
from partc.installed import line_of, user_frame
from partc.replaced import replaced
from partc.torch_private import FakeTensor


class _Seeds:
    """Torch's generator, which records every seeding, even one that sets the same seed or is undone later, and the
    states to which forward returns.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator, self.given = generator, False
        self._kept = KeptStates()
        self.source: Source | None = None

    def _note(self) -> None:
        frame = user_frame(sys._getframe(2))
        if frame is not None and not self.given:
            self.source = line_of(frame)
        self.given = True

    def manual_seed(self, seed: int) -> torch.Generator:
        self._note()
        return self._generator.manual_seed(seed)

    def get_state(self) -> Tensor:
        return self._kept.keep(self._generator.get_state())

    def set_state(self, state: Tensor) -> torch.Generator:
        if self._kept.come_back(state):
            return self._generator
        self._note()
        return self._generator.set_state(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


@dataclass(slots=True)
class StateWatch:
    """Records the changes that forward makes while it is traced; an export undoes those of attributes."""

    model: nn.Module
    named: Mapping[str, nn.Module]  # its modules
    loss: Any
    changes: dict[tuple[str, str], Change] = field(default_factory=dict)
    # (store, name, value) of attributes as forward left them.
    ends: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    contents: Contents = field(default_factory=lambda: Contents.reached(()))  # of lists and dicts among them
    first: State | None = None  # before the first trace
    changed: set[tuple[str, str]] = field(default_factory=set)  # the keys of all traces' changes
    state: State | None = None
    modules: tuple[types.ModuleType, ...] = ()  # the user's own
    again: bool = False  # whether the next trace starts where the last one ended

    @contextmanager
    def watching(self) -> Iterator[None]:
        # Tensors that an earlier trace cached have no values here, unless this one tries what they do.
        before = State.of(self.model, self.loss, self.named, clear_caches=not self.again)
        self.first = self.first or before
        self.modules = before.modules
        seeds = _Seeds(torch.default_generator)
        with replaced(torch.random, default_generator=seeds):  # which torch.manual_seed seeds
            yield
        self.state = State.of(self.model, self.loss, self.named)
        if seeds.given:
            self.state.values["torch", "generator"] = "another seed"
        for change in before.changes(self.state):
            seeding = seeds.given and change.key == ("torch", "generator")
            self.changes[change.key] = replace(change, source=seeds.source) if seeding else change
        self.changed.update(self.changes)
        for where, name in self.changes:
            if where.split(" ")[0] == "self" and name != "training":
                module = self.named[where.removeprefix("self").removeprefix(" of ")]
                store: Any = module._buffers if name in module._buffers else vars(module)
                if name in store:
                    self.ends.append((store, name, store[name]))
        self.contents = Contents.reached(value for _, _, value in self.ends)

    def left(self) -> dict[tuple[str, str], Any]:
        """The Python values that forward has changed, as it left them; None for tensors.

        Functions' caches, whose objects differ between traces, are left out: `check` tries what they do.
        """
        assert self.state is not None
        kept = ((key, change) for key, change in self.changes.items() if key[0] != "cache")
        return {key: None if change.tensors else self.state.value(key) for key, change in kept}

    def forget(self) -> None:
        """Empty functions' caches, and give globals and attributes of classes their old values, without the tensors of
        the traces, which have no values.
        """
        if self.first is None:
            return
        for key in self.changed:
            owner, old = self.first.owners.get(key), self.first.objects.get(key)
            if isinstance(owner, types.ModuleType | type):
                if vars(owner).get(key[1]) is not old:
                    setattr(owner, key[1], old)
                Contents.reached((old,)).remove(_is_fake)
        for cache in caches(self.named.values(), self.modules):
            cache.cache_clear()

    def line_of(self, name: str) -> Source | None:
        """The user's line that assigns to an attribute."""
        change = Change(key=("members", "buffers"), what="", owner=None, name=name, tensors=True)
        return None if self.state is None else change_source(change, self.state)

    def has_tensors(self, key: tuple[str, str]) -> bool:
        """Whether a value has tensors after the last trace."""
        return self.state is not None and holds_tensors(self.state.value(key))

    def settled(self, attribute: str) -> bool:
        """Whether the last trace has left an attribute of this path as it was."""
        owner, _, name = attribute.rpartition(".")
        return (f"self of {owner}" if owner else "self", name) not in self.changes

    def go_on(self) -> None:
        """Restore the attributes that forward left, with fake tensors in place of its new ones, and keep its caches."""
        self.again = True
        for store, name, value in self.ends:
            store[name] = _renewed(value)
        self.contents.restore(_renewed)
        self.ends.clear()
        self.changes.clear()


def _is_fake(value: Any) -> bool:
    """Whether a value is a traced tensor, or has one in tuples and lists."""
    return isinstance(value, FakeTensor) or (isinstance(value, tuple | list) and any(map(_is_fake, value)))


def _renewed(value: Any) -> Any:
    """A new tensor for a tensor; for a tuple, one with new tensors; other values unchanged."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype)
    return tuple(map(_renewed, value)) if type(value) is tuple else value
