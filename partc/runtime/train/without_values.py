"""Constructors that run on tensors without values, and may catch the error of a function that needs them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]


class WithoutValues(TorchFunctionMode):
    """Keeps the first error of a function that needs values.

    Tensors are not on the meta device for code outside torch: constructors that leave out a computation there, as
    torchtune's scaled rotary embeddings do, compute it as on a device with values.
    """

    error: Exception | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _IS_META and sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] != "torch":
            return False
        try:
            return self.call(func, args, kwargs or {})
        except Exception as error:
            if self.error is None and self.needs_values(error):
                self.error = error
            raise

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return func(*args, **named)

    def needs_values(self, error: Exception) -> bool:
        """Whether the error says that a tensor on the meta device has no values, or cannot get those of another."""
        said = str(error).lower()
        known = "meta" in said or "set_data" in said  # `weight.data = torch.Tensor(numbers)`
        return known and isinstance(error, NotImplementedError | RuntimeError | TypeError)


def built_without_values(build: Callable[[], Any], mode: WithoutValues) -> Any:
    """The model. Raises the error of a function that needs values, also if the constructor caught it.

    A constructor that catches this error, as `register_parametrization` does, builds a model that differs from the
    eager one, or fails by another error.
    """
    try:
        with mode:
            model = build()
    except Exception:
        if mode.error is None:
            raise
    if mode.error is not None:
        raise mode.error
    return model
