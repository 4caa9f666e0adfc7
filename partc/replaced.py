"""Attributes of classes and modules that have other values for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """A context in which attributes of a class, a module or an instance have these values.

    Afterwards the owner has its own ones again; those that it only inherits are deleted.
    """
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            elif name in vars(owner):
                delattr(owner, name)


@contextmanager
def all_replaced(places: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """A context in which attributes of several owners have other values: (owner, name, value)."""
    with ExitStack() as stack:
        for owner, name, value in [*places]:
            stack.enter_context(replaced(owner, **{name: value}))
        yield
