"""A map from tensors to facts about them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor

Fact = TypeVar("Fact")


class ByTensor(Generic[Fact]):
    """A map from tensors, by identity. It keeps no tensor alive; a new tensor with a reused id has no entry."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[weakref.ref[Tensor], Fact]] = {}

    def __setitem__(self, x: Tensor, fact: Fact) -> None:
        self._held[id(x)] = weakref.ref(x), fact

    def get(self, x: Any) -> Fact | None:
        """The fact about a tensor; None for other things."""
        held = self._held.get(id(x))
        return held[1] if held is not None and held[0]() is x else None

    def __contains__(self, x: Any) -> bool:
        held = self._held.get(id(x))
        return held is not None and held[0]() is x

    def __bool__(self) -> bool:
        """Whether a fact has been set and not popped; its tensor may be gone."""
        return bool(self._held)

    def pop(self, x: Tensor) -> None:
        """Forget the fact about a tensor."""
        self._held.pop(id(x), None)

    def drop(self, wanted: Callable[[Fact], bool]) -> None:
        """Forget the facts of this kind."""
        self._held = {key: held for key, held in self._held.items() if not wanted(held[1])}

    def clear(self) -> None:
        """Forget all facts."""
        self._held.clear()
