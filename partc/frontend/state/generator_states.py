"""States of torch's generator that forward keeps, and to which it returns: random numbers are then drawn once more.

    state = torch.get_rng_state()          generator_kept(0)
    a = F.dropout(x)                       a = dropout(x, 0.5)
    torch.set_rng_state(state)        ->   generator_returned(0)
    b = F.dropout(y)                       b = dropout(y, 0.5)      # with the same mask

Packages number random operations; those behind a return have the numbers of those behind the state that was kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

KEPT, RETURNED = "generator_kept", "generator_returned"  # the marks in a traced graph; their argument is a number
_library = torch.library.Library("partc", "FRAGMENT")
for _name in (KEPT, RETURNED):
    _library.define(f"{_name}(Tensor[] none, int number) -> ()")
    _library.impl(_name, lambda none, number: None, "CompositeExplicitAutograd")
torch.fx.node.has_side_effect(torch.ops.partc.generator_kept.default)
torch.fx.node.has_side_effect(torch.ops.partc.generator_returned.default)
_last = ContextVar("last", default=0)  # the number of the last state that a trace has kept


def keep() -> int:
    """Mark the current state of the generator; returns its number."""
    number = _last.get() + 1
    _last.set(number)
    torch.ops.partc.generator_kept.default([], number)
    return number


def come_back(number: int) -> None:
    """Return to a state that was kept."""
    torch.ops.partc.generator_returned.default([], number)


@contextmanager
def returning() -> Iterator[None]:
    """A context behind which the generator has the state that it had before."""
    number = keep()
    try:
        yield
    finally:
        come_back(number)


@dataclass(slots=True)
class KeptStates:
    """The states that forward has read from the generator in a trace, which numbers them from 1."""

    _found: list[tuple[Tensor, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        _last.set(0)

    def keep(self, state: Tensor) -> Tensor:
        self._found.append((state, keep()))
        return state

    def come_back(self, state: Tensor) -> bool:
        """Return to a state; False if forward has not read it."""
        number = next((number for each, number in self._found if each is state), None)
        if number is not None:
            come_back(number)
        return number is not None
