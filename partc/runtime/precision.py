"""Run a model's own code in double precision throughout: its casts to float32 stay in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Double(TorchFunctionMode):
    """Replaces float32, wherever a function is told to use it, by float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        if getattr(func, "__name__", "") == "_grouped_mm":
            return _grouped_matmul(*args, **(kwargs or {}))
        wide = lambda arg: torch.float64 if arg is torch.float32 else arg  # noqa: E731
        return func(*map(wide, args), **{key: wide(arg) for key, arg in (kwargs or {}).items()})


def _grouped_matmul(x: Tensor, w: Tensor, offs: Tensor, bias: None = None, out_dtype: None = None) -> Tensor:
    """Rows of each group times its matrix, x[s, i] w[g, i, o] -> [s, o]; torch's own has no double precision."""
    ends = offs.tolist()
    return torch.cat([x[start:end] @ w[group] for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False))])


@contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` the default; in float64, also what code that asks for float32 gets.

    A model that computes its norms or its loss in float32 whatever its parameters are would otherwise
    round there, and could not be compared to 1e-10.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        if dtype == torch.float64:
            with _Double():
                yield
        else:
            yield
    finally:
        torch.set_default_dtype(before)
