"""The steps that traces may take only if a model does not trace without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class Permission:
    """Whether traces may take a step, and whether one has asked for it."""

    allowed: bool = False
    asked: bool = False

    def may(self) -> bool:
        self.asked = True
        return self.allowed


LARGEST_NUMBERS: ContextVar[Permission] = ContextVar("largest numbers")  # to read them as constants of the trace
BOTH_OUTCOMES: ContextVar[Permission] = ContextVar("both outcomes")  # to follow branches on values both ways
UNKNOWN_NUMBERS: ContextVar[Permission] = ContextVar("unknown numbers")  # to compute with numbers of tensors


@contextmanager
def permission(step: ContextVar[Permission]) -> Iterator[Permission]:
    """A context in which the step is not allowed yet, and traces may ask for it."""
    found = Permission()
    before = step.set(found)
    try:
        yield found
    finally:
        step.reset(before)


def permitted(step: ContextVar[Permission]) -> Permission:
    """The permission of the innermost context; outside of contexts nothing is allowed."""
    return step.get(Permission())
