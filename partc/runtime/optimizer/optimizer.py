"""Optimizers on this rank's shards; all are elementwise, so shards need no communication."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Optimizer(Protocol):
    """The interface of an optimizer for updates."""

    def begin(self, rate: float) -> None:
        """Before a step: send the host's numbers to the device. The step itself does not depend on the host."""

    def step(self) -> None:
        """Update the parameters from their gradients."""

    def kept(self, name: str) -> Mapping[str, Tensor]:
        """The state of a parameter, under torch's names."""

    def restore(self, name: str, key: str, value: Tensor) -> None:
        """Restore one entry of the state."""

    def copy_to(self, read: Mapping[str, Tensor]) -> frozenset[str]:
        """Make updates also write these low-precision copies of parameters; returns the names that they do write."""


class TorchOptimizer:
    """One of torch's optimizers; it reads `.grad` of parameters, and the learning rate at `rate` if given."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], rate: Tensor | None = None
    ) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._rate: Tensor | float = 0.0 if rate is None else rate

    def begin(self, rate: float) -> None:
        if isinstance(self._rate, Tensor):
            self._rate.fill_(rate)
        else:
            self._rate = rate

    def step(self) -> None:
        on_gpu = isinstance(self._rate, Tensor) and self._rate.is_cuda
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate
            if "capturable" in group:  # torch requires it in a capture, and warns at other times
                group["capturable"] = on_gpu and torch.cuda.is_current_stream_capturing()
        self._optimizer.step()

    def kept(self, name: str) -> Mapping[str, Tensor]:
        found: Mapping[str, Tensor] = self._optimizer.state.get(self._parameters[name], {})
        return found

    def restore(self, name: str, key: str, value: Tensor) -> None:
        parameter = self._parameters[name]
        self._optimizer.state[parameter][key] = value.to(parameter.device)

    def copy_to(self, read: Mapping[str, Tensor]) -> frozenset[str]:
        return frozenset()


def make_optimizer(
    name: str,
    parameters: Mapping[str, Tensor],
    lr: float,
    *,
    weight_decay: float | None = None,
    no_decay: Sequence[str] = (),
) -> torch.optim.Optimizer:
    """`adamw` or `sgd` with torch's defaults; fused, so that a step reads and writes each tensor once.

    Parameters whose names match a pattern of `no_decay` have no weight decay.
    """
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    if name not in kinds:
        raise ValueError(f"no optimizer {name!r}: there are {', '.join(kinds)}")
    optimizer: torch.optim.Optimizer = _undecorated(kinds[name])(
        list(_groups(parameters, weight_decay, no_decay)), lr=lr, fused=True
    )
    return optimizer


def spared(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """The names that match one of the patterns."""
    return {name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}


def _groups(parameters: Mapping[str, Tensor], decay: float | None, no_decay: Sequence[str]) -> Iterator[dict[str, Any]]:
    free = spared(parameters, no_decay)
    kept = [x for name, x in parameters.items() if name not in free]
    if kept:
        yield {"params": kept} | ({} if decay is None else {"weight_decay": decay})
    if free:
        yield {"params": [parameters[name] for name in parameters if name in free], "weight_decay": 0.0}


def rate_on(device: torch.device) -> Tensor:
    """A tensor from which torch's optimizers read the learning rate: fp32 on GPUs."""
    return torch.zeros((), dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)


def attach_gradients(parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Make each gradient buffer its parameter's `.grad`; returns the parameters that have one."""
    for name, gradient in gradients.items():
        parameters[name].grad = gradient
    return {name: parameters[name] for name in gradients}


def _undecorated(kind: type[Any]) -> type[Any]:
    """The class without the guards of its methods against torch.compile.

    The guards import the compiler at their first call: nearly a second, on every rank.
    """
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in ("step", "add_param_group")}
    return type(kind.__name__, (kind,), methods)
