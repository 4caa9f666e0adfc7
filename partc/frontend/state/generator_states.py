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
    """Mark the current state of the generator; returns its number, with this sign. See `idle_states`."""
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


def idle_states(graph: fx.Graph) -> set[int]:
    """The states with negative numbers to which nothing returns after a draw.

    `returning` and checkpoints keep states with negative numbers. A state that forward reads itself is never idle.
    """
    kept: dict[int, int] = {}  # a state -> the number of draws before it
    read, draws = set[int](), 0
    for node in _in_order(graph):
        if node.target is torch.ops.partc.generator_kept.default:
            kept[_number(node)] = draws
        elif node.target is torch.ops.partc.generator_returned.default:
            read |= {_number(node)} if kept.get(_number(node)) != draws else set()
        else:
            draws += torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return {number for number in kept if number < 0} - read


def _in_order(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes of a graph, with the operations of contexts that switch gradients off in their places."""
    for node in graph.nodes:
        yield node
        inside = getattr(graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(inside, fx.GraphModule):
            yield from _in_order(inside.graph)


def _number(mark: fx.Node) -> int:
    _, number = mark.args
    assert isinstance(number, int)
    return number


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
