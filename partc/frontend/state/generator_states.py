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
from torch import Tensor, fx

KEPT, RETURNED = "generator_kept", "generator_returned"  # the marks in a traced graph; their argument is a number
_library = torch.library.Library("partc", "FRAGMENT")
for _name in (KEPT, RETURNED):
    _library.define(f"{_name}(Tensor[] none, int number) -> ()")
    _library.impl(_name, lambda none, number: None, "CompositeExplicitAutograd")
torch.fx.node.has_side_effect(torch.ops.partc.generator_kept.default)
torch.fx.node.has_side_effect(torch.ops.partc.generator_returned.default)
_last = ContextVar("last", default=0)  # the number of the last state that a trace has kept


def keep(sign: int = 1) -> int:
    """Mark the current state of the generator; returns its number, with this sign."""
    number = _last.get() + 1
    _last.set(number)
    torch.ops.partc.generator_kept.default([], sign * number)
    return sign * number


def come_back(number: int) -> None:
    """Return to a state that was kept."""
    torch.ops.partc.generator_returned.default([], number)


@contextmanager
def returning() -> Iterator[None]:
    """A context behind which the generator has the state that it had before. Nothing else returns to that state."""
    number = keep(-1)
    try:
        yield
    finally:
        come_back(number)


def is_idle(kept: fx.Node) -> bool:
    """Whether a state is kept only by a context in which nothing is drawn, or that does not return to it."""
    node, number, drawn = kept.next, kept.args[1], False
    while node.op != "output":
        if node.target is torch.ops.partc.generator_returned.default and node.args[1] == number:
            break
        drawn |= _draws(node)
        node = node.next
    return isinstance(number, int) and number < 0 and not (drawn and node.op != "output")


def _draws(node: fx.Node) -> bool:
    if node.op == "get_attr":  # the operations of a context that switches gradients off
        inside = getattr(node.graph.owning_module, str(node.target))
        return isinstance(inside, fx.GraphModule) and any(map(_draws, inside.graph.nodes))
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


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
