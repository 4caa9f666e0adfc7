"""Counter-based random numbers: an element's number depends on its position in the whole tensor, not on the rank.

Every random operation of a model has a number. Seed, step and that number determine a stream; element i of the whole
tensor takes the stream's i-th output. Ranks draw the numbers of their shards only, and every mesh draws the same. The
generator is SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", figure 16): a
counter times an odd constant, and a mixing function. It uses integers only, so that CPUs and GPUs agree bitwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio, odd
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, None))
_WORD = 1 << 64
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def mixed(word: int) -> int:
    """SplitMix64's mixing function on one 64-bit word."""
    for shift, factor in _MIX:
        word ^= word >> shift
        word = word * factor % _WORD if factor else word
    return word


def mix(words: Tensor) -> Tensor:
    """The mixing function on i64 words, in place; i64 arithmetic wraps like that of 64-bit words."""
    for shift, factor in _MIX:
        words.bitwise_xor_((words >> shift).bitwise_and_((1 << (64 - shift)) - 1))
        if factor:
            words.mul_(signed(factor))
    return words


def signed(word: int) -> int:
    """The word as i64."""
    return word - _WORD if word >= _WORD // 2 else word


def stream(seed: int, step: int, number: int) -> int:
    """The initial state of a stream."""
    state = mixed(seed % _WORD)
    for part in (step, number):
        state = mixed((state + GOLDEN * (part + 1)) % _WORD)
    return state


@dataclass(frozen=True, slots=True)
class Draw:
    """The random numbers of one tensor: its stream, and its elements' indices in the whole tensor, by dimension."""

    start: int | Tensor
    places: tuple[tuple[Tensor, int], ...]  # indices along a dimension, and that dimension's whole size
    whole: tuple[int, ...]
    device: torch.device

    @classmethod
    def everything(cls, start: int, shape: Sequence[int], device: torch.device) -> Draw:
        """The draw of a whole tensor."""
        places = tuple((torch.arange(size, device=device), size) for size in shape)
        return cls(start, places, tuple(shape), device)

    def part(self, *cuts: slice) -> Draw:
        """The draw of a part."""
        places = tuple((place[cut], size) for (place, size), cut in zip(self.places, cuts, strict=True))
        return replace(self, places=places)

    def bits(self, offset: int = 0, per_element: int = 1) -> Tensor:
        """64 random bits for every element, as i64. Element i takes output `per_element * i + offset`."""
        index: Tensor | None = None
        stride = math.prod(self.whole)
        for dim, (place, size) in enumerate(self.places):
            stride //= max(size, 1)
            along = (place * (stride * per_element)).reshape(-1, *(1 for _ in self.places[dim + 1 :]))
            index = along if index is None else index + along
        if index is None:
            index = torch.zeros((), dtype=torch.int64, device=self.device)
        start = self.start if isinstance(self.start, Tensor) else signed(self.start)
        return mix(index.add(offset + 1).mul_(signed(GOLDEN)).add_(start))

    def below(self, probability: float) -> Tensor:
        """True with this probability, by the upper 53 bits."""
        return (self.bits() >> 11).bitwise_and_((1 << 53) - 1) < math.ceil(probability * (1 << 53))

    def uniform(self, dtype: torch.dtype, offset: int = 0, per_element: int = 1) -> Tensor:
        """Multiples of 2^-digits in [0, 1), with the dtype's number of digits, so that none is rounded up to 1."""
        digits = _DIGITS[dtype]
        word = (self.bits(offset, per_element) >> (64 - digits)).bitwise_and_((1 << digits) - 1)
        return word.to(torch.float64).mul_(2.0**-digits).to(dtype)

    def normal(self, dtype: torch.dtype) -> Tensor:
        """Standard normal numbers, from two uniform ones each (Box and Muller 1958)."""
        radius = 1 - self.uniform(torch.float64, 0, 2)
        angle = self.uniform(torch.float64, 1, 2)
        return ((-2 * radius.log()).sqrt_() * (2 * math.pi * angle).cos_()).to(dtype)


def dropout(x: Tensor, p: float, draw: Draw) -> tuple[Tensor, Tensor]:
    """x with elements zeroed with probability p and the others scaled by 1 / (1 - p); and the mask of kept ones.

    The draw may have fewer dimensions than x; its decisions apply to all following dimensions.
    """
    kept = draw.below(1 - p)
    kept = kept.reshape(*kept.shape, *(1 for _ in range(x.dim() - kept.dim())))
    return dropout_backward(x, kept, p), kept


def dropout_backward(grad: Tensor, kept: Tensor, p: float) -> Tensor:
    """The gradient of x: the same elements are kept, with the same scale."""
    return grad * kept.to(grad.dtype).div_(1 - p)
