"""This rank's gradients before the update: their squares, and their scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..comm.comm import runs

_SMALL = 1e-6  # torch.nn.utils.clip_grad_norm_'s


class Gradients:
    """Gradients by parameter, and the buffers that contain them; scaling happens in the buffers."""

    def __init__(self, buffers: Sequence[Tensor], named: Mapping[str, Tensor]) -> None:
        self._buffers = buffers
        self._named = named

    def begin(self, divisor: float | Tensor) -> None:
        """Divide the complete gradients by the divisor; it is a tensor if it may change from step to step."""
        if isinstance(divisor, Tensor) or divisor != 1:
            for buffer in self._buffers:
                buffer.div_(divisor)

    def squares(self, names: Iterable[str]) -> Tensor | float:
        """The sum of the squares of some gradients, in fp64."""
        norms = (torch.linalg.vector_norm(self._named[name], dtype=torch.float64) for name in names)
        return sum((norm.square() for norm in norms), start=0.0)

    def clip(self, norm: Tensor, most: float) -> None:
        """Scale the gradients down to the norm `most`, if `norm` (over all ranks) is larger."""
        factor = _clipping(norm, most)
        for buffer in self._buffers:
            buffer.mul_(factor)

    def copy(self, name: str) -> Tensor:
        """A copy of one gradient in its present state."""
        return self._named[name].clone()


class Scaled(Gradients):
    """Gradients that the update itself multiplies by a factor on the device.

    `sum_of_squares` is the package's kernel: of a flat tensor, in fp64.
    """

    def __init__(
        self, buffers: Sequence[Tensor], named: Mapping[str, Tensor], sum_of_squares: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(buffers, named)
        self._sum_of_squares = sum_of_squares
        self.factor = torch.ones((), dtype=torch.float64, device=buffers[0].device)  # of unscaled gradients

    def begin(self, divisor: float | Tensor) -> None:
        if isinstance(divisor, Tensor):
            torch.reciprocal(divisor, out=self.factor)
        else:
            self.factor.fill_(1 / divisor)

    def squares(self, names: Iterable[str]) -> Tensor | float:
        pieces = runs([x for x in map(self._named.__getitem__, names) if x.numel()])
        return sum(map(self._sum_of_squares, pieces), start=0.0) * self.factor.square()

    def clip(self, norm: Tensor, most: float) -> None:
        self.factor.mul_(_clipping(norm, most))

    def copy(self, name: str) -> Tensor:
        found = self._named[name]
        return found * self.factor.to(found.dtype)


def _clipping(norm: Tensor, most: float) -> Tensor:
    """The factor for gradients of this norm; 1 if the norm is not a number."""
    return torch.where(norm > most, most / (norm + _SMALL), torch.ones_like(norm))
