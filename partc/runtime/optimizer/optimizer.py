"""Optimizers on this rank's shards. Most are elementwise, so that shards need no communication (see whole.py)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ..ops.row_gradients import RowGradient
from .kinds import Kind
from .recipe import UpdateRule


class Optimizer(Protocol):
    """The interface of an optimizer for updates."""

    def begin(self, rate: float) -> None:
        """Before a step: send the host's numbers to the device. `step` itself does not depend on the host."""

    def step(self, without: Collection[str] = ()) -> None:
        """Update the parameters from their gradients, except those `without` a gradient."""

    def state_of(self, name: str) -> Mapping[str, Tensor]:
        """The state of a parameter, under torch's names."""

    def uncut(self, name: str) -> Collection[str]:
        """The entries of a parameter's state that are not cut like the parameter: every rank has them whole."""

    def by_rows(self, name: str) -> Collection[str]:
        """The entries of a parameter's state with one number for each of its rows."""

    def restore(self, name: str, key: str, value: Tensor) -> None:
        """Restore one entry of the state."""

    def copy_to(self, read: Mapping[str, Tensor]) -> frozenset[str]:
        """Make updates also write these low-precision copies of parameters; returns the names of the copies that they
        will write.
        """


class TorchOptimizer:
    """One of torch's optimizers; it reads `.grad` of parameters.

    The learning rate is on `device` if given. Groups scale it by their `lr_scale`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, Tensor],
        device: torch.device | None = None,
        sparse: Mapping[str, RowGradient] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._sparse = sparse or {}
        scales = {group.get("lr_scale", 1.0) for group in optimizer.param_groups}
        self._rates: dict[float, Tensor | float] = {
            scale: 0.0 if device is None else rate_on(device) for scale in scales
        }

    def begin(self, rate: float) -> None:
        for scale, there in self._rates.items():
            if isinstance(there, Tensor):
                there.fill_(rate * scale)
            else:
                self._rates[scale] = rate * scale

    def step(self, without: Collection[str] = ()) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate = self._rates[group.get("lr_scale", 1.0)]
            # Torch requires it in a capture, and warns otherwise.
            if isinstance(rate, Tensor) and "capturable" in group:
                group["capturable"] = rate.is_cuda and torch.cuda.is_current_stream_capturing()
        for name, rows in self._sparse.items():
            self._parameters[name].grad = rows.sparse()
        left = {name: self._parameters[name] for name in without if name in self._parameters}
        gradients = {name: x.grad for name, x in left.items()}
        for x in left.values():
            x.grad = None
        self._optimizer.step()
        for name, x in left.items():
            x.grad = gradients[name]
        for name in self._sparse:
            self._parameters[name].grad = None

    def state_of(self, name: str) -> Mapping[str, Tensor]:
        found = self._optimizer.state.get(self._parameters[name], {})
        return {key: value for key, value in found.items() if isinstance(value, Tensor)}

    def uncut(self, name: str) -> Collection[str]:
        shape = self._parameters[name].shape
        return [key for key, value in self.state_of(name).items() if value.shape != shape]

    def by_rows(self, name: str) -> Collection[str]:
        found: Collection[str] = getattr(self._optimizer, "by_rows", ())
        return found

    def restore(self, name: str, key: str, value: Tensor) -> None:
        parameter = self._parameters[name]
        there = self.state_of(name).get(key)
        device = parameter.device if there is None else there.device
        self._optimizer.state[parameter][key] = value.to(device)

    def copy_to(self, read: Mapping[str, Tensor]) -> frozenset[str]:
        return frozenset()


class Several:
    """Several optimizers of disjoint parameters as one."""

    def __init__(self, parts: Sequence[tuple[Optimizer, Collection[str]]]) -> None:
        self._parts = [part for part, _ in parts]
        self._of = {name: part for part, names in parts for name in names}

    def begin(self, rate: float) -> None:
        for part in self._parts:
            part.begin(rate)

    def step(self, without: Collection[str] = ()) -> None:
        for part in self._parts:
            part.step(without)

    def state_of(self, name: str) -> Mapping[str, Tensor]:
        return self._of[name].state_of(name)

    def uncut(self, name: str) -> Collection[str]:
        return self._of[name].uncut(name)

    def by_rows(self, name: str) -> Collection[str]:
        return self._of[name].by_rows(name)

    def restore(self, name: str, key: str, value: Tensor) -> None:
        self._of[name].restore(name, key, value)

    def copy_to(self, read: Mapping[str, Tensor]) -> frozenset[str]:
        return frozenset()


def make_optimizers(
    settings: Mapping[str, UpdateRule],
    parameters: Mapping[str, Tensor],
    lr: float,
    sparse: Collection[str] = (),
    *,
    partly: bool = False,
) -> Iterator[tuple[Kind, torch.optim.Optimizer, dict[str, Tensor]]]:
    """A torch optimizer for each choice of options, with its parameters; parameters with equal learning rates form a
    group.

    The parameters in `sparse` have sparse gradients. Steps may update parameters `partly`.
    """
    found: dict[tuple[UpdateRule, bool], dict[float, dict[str, Tensor]]] = {}
    for name, x in parameters.items():
        mine = settings[name]
        scales = found.setdefault((replace(mine, lr_scale=1.0), name in sparse), {})
        scales.setdefault(mine.lr_scale, {})[name] = x
    for (options, by_rows), scales in found.items():
        groups = [{"params": list(some.values()), "lr_scale": scale} for scale, some in scales.items()]
        given = {**options.kind.implementation(sparse=by_rows, partly=partly), **dict(options.options)}
        yield (
            options.kind,
            options.kind.for_gradients(sparse=by_rows)(groups, lr=lr, **given),
            {name: x for some in scales.values() for name, x in some.items()},
        )


def rate_on(device: torch.device) -> Tensor:
    """A tensor from which torch's optimizers read the learning rate: fp32 on GPUs."""
    return torch.zeros((), dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)


def attach_gradients(parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Make each gradient buffer its parameter's `.grad`; returns the parameters that have a gradient."""
    for name, gradient in gradients.items():
        if not isinstance(gradient, RowGradient):
            parameters[name].grad = gradient
    return {name: parameters[name] for name in gradients}
