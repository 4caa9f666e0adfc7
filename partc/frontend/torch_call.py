"""Calls of torch's functions, as the modes of a trace receive them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TorchCall:
    """A call of a function of torch by the traced model."""

    func: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def given(self) -> Any:
        """The first argument."""
        return self.args[0] if self.args else None

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    def run(self) -> Any:
        """The result of the function itself."""
        return self.func(*self.args, **self.kwargs)

    def run_on(self, x: Tensor) -> Any:
        """The result of the function with another tensor as its first argument."""
        return self.func(x, *self.args[1:], **self.kwargs)
