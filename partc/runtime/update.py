"""One update of the parameters: gradients unscaled, their norm over all ranks, clipping, the rate of this step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .comm import Comm
from .layout import Shard, cutting

Decline = Literal["constant", "linear", "cosine"]

FIRST_SCALE, GROWTH, BACKOFF, PATIENCE = 2.0**16, 2.0, 0.5, 2000  # torch.amp.GradScaler's


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The learning rate by step: a linear warm-up, then constant or down to `least` at the last step.

    A function of the step alone, so that a continued run needs nothing more. Cosine: Loshchilov and
    Hutter 2017, SGDR, equation 5 without restarts.
    """

    base: float
    warmup: int = 0
    decline: Decline = "constant"
    least: float = 0.0
    steps: int = 0

    def at(self, step: int) -> float:
        """The rate of the step of this number, from 0."""
        if step < self.warmup:
            return self.base * (step + 1) / self.warmup
        if self.decline == "constant":
            return self.base
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        left = 1 - done if self.decline == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.least + (self.base - self.least) * left


class LossScale:
    """What the loss of an fp16 model is multiplied by, so that small gradients don't vanish.

    Halved when a gradient overflows, and that update is skipped; doubled after 2000 without
    (Micikevicius et al. 2018, Mixed Precision Training, section 3.2; constants of torch.amp.GradScaler).
    """

    def __init__(self, first: float = FIRST_SCALE) -> None:
        self.value = first
        self.good = 0  # updates since it changed
        self.skipped = 0

    def after(self, finite: bool) -> None:
        if not finite:
            self.value, self.good, self.skipped = self.value * BACKOFF, 0, self.skipped + 1
        else:
            self.good += 1
            if self.good == PATIENCE:
                self.value, self.good = self.value * GROWTH, 0

    def state(self) -> Tensor:
        return torch.tensor([self.value, self.good], dtype=torch.float64)

    def restore(self, state: Tensor) -> None:
        self.value, self.good = float(state[0]), int(state[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """What an update was."""

    rate: float
    norm: float | None  # of all gradients, before clipping; None where nobody asked
    skipped: bool = False


class Update:
    """The optimizer's step on one rank; every rank takes it together."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        buffers: Sequence[Tensor],
        gradients: Mapping[str, tuple[Shard, Tensor]],
        comm: Comm,
        sizes: Mapping[str, int],
        rate: Rate,
        *,
        clip: float | None = None,
        scale: LossScale | None = None,
        norms: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._buffers = buffers
        self._groups = tuple(_by_copies(gradients, sizes))
        self._axes = tuple(axis for axis, size in sizes.items() if size > 1)
        self._comm = comm
        self._rate = rate
        self._clip = clip
        self._scale = scale
        self._norms = norms or clip is not None or scale is not None

    def unscale(self, batches: int = 1) -> None:
        """Make gradients that were summed over some batches, of a scaled loss, those of the mean loss."""
        divisor = batches * (1.0 if self._scale is None else self._scale.value)
        if divisor != 1:
            for buffer in self._buffers:
                buffer.div_(divisor)

    def step(self, step: int) -> Updated:
        """Update the parameters."""
        norm = self._norm() if self._norms else None
        rate = self._rate.at(step)
        if self._scale is not None and norm is not None:
            self._scale.after(math.isfinite(norm))
            if not math.isfinite(norm):
                return Updated(rate=rate, norm=norm, skipped=True)
        if self._clip is not None and norm is not None and norm > self._clip:
            for buffer in self._buffers:
                buffer.mul_(self._clip / (norm + 1e-6))
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        return Updated(rate=rate, norm=norm)

    def _norm(self) -> float:
        """The norm of the whole model's gradient: every element once, whoever holds copies of it."""
        total = torch.zeros((), dtype=torch.float64, device=self._comm.device)
        for copies, gradients in self._groups:
            for gradient in gradients:
                total += torch.linalg.vector_norm(gradient, dtype=torch.float64).square() / copies
        for name in self._axes:
            total = self._comm.group((name,)).all_reduce(total)
        return float(total.sqrt())


def _by_copies(
    gradients: Mapping[str, tuple[Shard, Tensor]], sizes: Mapping[str, int]
) -> Iterator[tuple[int, list[Tensor]]]:
    """Gradients by how many ranks hold the same part."""
    found: dict[int, list[Tensor]] = {}
    for shard, gradient in gradients.values():
        cut = cutting(shard.dims)
        equal = math.prod(size for axis, size in sizes.items() if axis not in cut and axis != "pp")
        found.setdefault(equal * max(1, len(shard.shared)), []).append(gradient)
    yield from found.items()
