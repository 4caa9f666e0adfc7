"""What `--precision` means while a model runs: in fp64, everything is computed in double precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

PRECISIONS: Mapping[str, torch.dtype] = {"fp32": torch.float32, "fp64": torch.float64}


class _Doubles(TorchFunctionMode):
    """Asks for double precision wherever the model's code asks for single.

    Models cast to float32 where training in half precision calls for it (norms, losses). In a run
    that compares in doubles these casts would round, and tiny differences would grow to 1e-7.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        widened = {key: _widened(value) for key, value in (kwargs or {}).items()}
        return func(*map(_widened, args), **widened)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Run a model's forward pass in this precision; parameters and inputs are cast by the caller."""
    if dtype is not torch.float64:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _Doubles():
            yield
    finally:
        torch.set_default_dtype(before)
