"""The squares and the scaling of this rank's gradients before the update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.comm import runs
from ..ops.row_gradients import RowGradient

_SMALL = 1e-6  # torch.nn.utils.clip_grad_norm_'s


class Gradients:
    """Gradients by parameter, and the buffers that contain them; scaling happens in the buffers."""

    def __init__(self, buffers: Sequence[Tensor], named: Mapping[str, Tensor]) -> None:
        self._buffers: list[Any] = [*buffers, *(x for x in named.values() if isinstance(x, RowGradient))]
        self._named = named

    def begin(self, divisor: float | Tensor) -> None:
        """Divide the complete gradients by a divisor, which is a tensor if it may change between steps."""
        if isinstance(divisor, Tensor) or divisor != 1:
            for buffer in self._buffers:
                buffer.div_(divisor)

    @property
    def names(self) -> Iterable[str]:
        return self._named

    def squares(self, names: Iterable[str]) -> Tensor | float:
        """The sum of the squares of some gradients, in fp64."""
        norms = (_norm(self._named[name]) for name in names)
        return sum((norm.square() for norm in norms), start=0.0)

    def clip(self, norm: Tensor, most: float) -> None:
        """Scale the gradients down to the norm `most` if `norm` (over all ranks) is larger."""
        factor = _clipping(norm, most)
        for buffer in self._buffers:
            buffer.mul_(factor)

    def copy(self, name: str) -> Tensor:
        """A copy of a gradient in its current state."""
        found = self._named[name]
        return found.dense() if isinstance(found, RowGradient) else found.clone()


class Scaled(Gradients):
    """Gradients that the update kernel multiplies by a factor on the device.

    `sum_of_squares` is the package's kernel: flat tensor -> sum of squares in fp64.
    """

    def __init__(
        self, buffers: Sequence[Tensor], named: Mapping[str, Tensor], sum_of_squares: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(buffers, named)
        self._sum_of_squares = sum_of_squares
        self._rows = [x for x in self._buffers if isinstance(x, RowGradient)]
        self.factor = torch.ones((), dtype=torch.float64, device=buffers[0].device)  # the factor of unscaled gradients

    def begin(self, divisor: float | Tensor) -> None:
        for rows in self._rows:
            rows.div_(divisor)
        if isinstance(divisor, Tensor):
            torch.reciprocal(divisor, out=self.factor)
        else:
            self.factor.fill_(1 / divisor)

    def squares(self, names: Iterable[str]) -> Tensor | float:
        found = [self._named[name] for name in names]
        rows = sum((x.norm().square() for x in found if isinstance(x, RowGradient)), start=0.0)
        pieces = runs([x for x in found if not isinstance(x, RowGradient) and x.numel()])
        return sum(map(self._sum_of_squares, pieces), start=0.0) * self.factor.square() + rows

    def clip(self, norm: Tensor, most: float) -> None:
        factor = _clipping(norm, most)
        for rows in self._rows:
            rows.mul_(factor)
        self.factor.mul_(factor)

    def copy(self, name: str) -> Tensor:
        found = self._named[name]
        if isinstance(found, RowGradient):
            return found.dense()
        return found * self.factor.to(found.dtype)


def _norm(gradient: Tensor | RowGradient) -> Tensor:
    if isinstance(gradient, RowGradient):
        return gradient.norm()
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    return norm


def _clipping(norm: Tensor, most: float) -> Tensor:
    """torch.nn.utils.clip_grad_norm_'s factor for gradients of this norm: NaN if the norm is NaN."""
    return torch.clamp(most / (norm + _SMALL), max=1.0)
