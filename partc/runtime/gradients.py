"""This rank's gradients on their way to the update: their squares, and what they are multiplied by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from .comm import runs

_SMALL = 1e-6  # torch.nn.utils.clip_grad_norm_'s


class Gradients:
    """Gradients by parameter, and the buffers that they stand in: multiplied there."""

    def __init__(self, buffers: Sequence[Tensor], named: Mapping[str, Tensor]) -> None:
        self._buffers = buffers
        self._named = named

    def begin(self, divisor: float | Tensor) -> None:
        """Once they are whole: make them those of a loss that is smaller by so much; a tensor, if that may change."""
        if isinstance(divisor, Tensor) or divisor != 1:
            for buffer in self._buffers:
                buffer.div_(divisor)

    def squares(self, names: Iterable[str]) -> Tensor | float:
        """The sum of the squares of some of them, in fp64."""
        norms = (torch.linalg.vector_norm(self._named[name], dtype=torch.float64) for name in names)
        return sum((norm.square() for norm in norms), start=0.0)

    def clip(self, norm: Tensor, most: float) -> None:
        """Scale them down to a norm of `most`, if theirs over all ranks is larger."""
        factor = _clipping(norm, most)
        for buffer in self._buffers:
            buffer.mul_(factor)

    def copy(self, name: str) -> Tensor:
        """One of them as it is by now."""
        return self._named[name].clone()


class Scaled(Gradients):
    """Gradients that the update itself multiplies by a factor, of which the host knows nothing.

    `sum_of_squares` is the package's kernel: of a flat tensor, in fp64.
    """

    def __init__(
        self, buffers: Sequence[Tensor], named: Mapping[str, Tensor], sum_of_squares: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(buffers, named)
        self._sum_of_squares = sum_of_squares
        self.factor = torch.ones((), dtype=torch.float64, device=buffers[0].device)  # of gradients as they stand

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
    """What gradients of this norm are multiplied by; 1 where it is no number."""
    return torch.where(norm > most, most / (norm + _SMALL), torch.ones_like(norm))
