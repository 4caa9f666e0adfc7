"""Sums of compressed gradients with error feedback: each rank sends few bits, and remembers its error.

The error is added to the next gradient (error feedback: Seide et al. 2014, 1-Bit Stochastic Gradient Descent, section
3.2; Karimireddy et al. 2019, Error Feedback Fixes SignSGD, algorithm 1), both by the ranks that send parts of a
gradient and by the rank that sends their sum (Tang et al. 2021, 1-bit Adam, section 4.1). Sums are computed in fp32.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..torch_private import storage_key
from .comm import Axis, Pending

BLOCK = 256  # numbers of int8 that share a scale


def room(kind: str, size: int) -> int:
    """The number of elements sent for `size` numbers: the same for bf16; for int8, the bytes of whole blocks and their
    scales.
    """
    return size if kind == "bf16" else -(-size // BLOCK) * (BLOCK + 4)


def encode(kind: str, x: Tensor) -> Tensor:
    """[ways, size] of fp32 -> [ways, room(kind, size)] in the format that is sent."""
    if kind == "bf16":
        return x.to(torch.bfloat16)
    ways, size = x.shape
    blocks = torch.nn.functional.pad(x, (0, -size % BLOCK)).view(ways, -1, BLOCK)
    scales = blocks.abs().amax(2) / 127
    numbers = (blocks / scales.masked_fill(scales == 0, 1.0).unsqueeze(2)).round().to(torch.int8)
    return torch.cat([numbers.view(torch.uint8).flatten(1), scales.view(torch.uint8)], 1)


def decode(kind: str, x: Tensor, size: int) -> Tensor:
    """The inverse of `encode`."""
    if kind == "bf16":
        return x.float()
    count = -(-size // BLOCK)
    numbers, scales = x.split([count * BLOCK, count * 4], 1)
    blocks = numbers.contiguous().view(torch.int8).view(len(x), count, BLOCK)
    found: Tensor = blocks * scales.contiguous().view(len(x), count, 4).view(torch.float32)
    return found.flatten(1)[:, :size]


class Codec(Protocol):
    """The compression of gradients and its inverse, by the package's kernels or by PyTorch."""

    def encode(self, x: Tensor, left: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        """Encode x[ways, size] plus the earlier error; returns the encoded tensor and the new error, unscaled.

        The tensor of the earlier error may be reused for the new one.
        """

    def decode(self, coded: Tensor, size: int) -> Tensor:
        """[ways, size] in fp32."""

    def decode_sum(self, coded: Tensor, size: int) -> Tensor:
        """The sum over the ways, [size]."""


class TorchCodec:
    """A codec that uses PyTorch operations."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def encode(self, x: Tensor, left: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        x = x if left is None else x + left * scale
        coded = encode(self.kind, x)
        out = (x - decode(self.kind, coded, x.shape[1])) / scale
        return coded, out.nan_to_num_(0, 0, 0)  # a step with overflowing gradients is skipped, and leaves no error

    def decode(self, coded: Tensor, size: int) -> Tensor:
        return decode(self.kind, coded, size)

    def decode_sum(self, coded: Tensor, size: int) -> Tensor:
        return decode(self.kind, coded, size).sum(0)


def codec(compress: str | Codec) -> Codec:
    """The codec with this name, or the package's own kernels."""
    return TorchCodec(compress) if isinstance(compress, str) else compress


class Remembers(Protocol):
    """A sum whose compression error is added to the next sum."""

    @property
    def numbers(self) -> Mapping[str, int]:
        """The sizes of the errors, by kind."""

    @property
    def left_out(self) -> dict[str, Tensor]:
        """The errors, flat; empty before the first sum."""

    def restore(self, left: Mapping[str, Tensor]) -> bool:
        """Continue with these errors; False if they belong to other sums."""


class Compressed:
    """The sums of one flat buffer of a fixed size, step after step."""

    def __init__(self, kind: str | Codec, axis: Axis, numbers: int) -> None:
        self._codec, self._axis = codec(kind), axis
        self._size = -(-numbers // axis.size)
        self._sent: Tensor | None = None  # [ways, size]: this rank's compression errors
        self._summed: Tensor | None = None  # [1, size]: the error of its part of the sum

    @property
    def numbers(self) -> Mapping[str, int]:
        return {"sent": self._axis.size * self._size, "summed": self._size}

    @property
    def left_out(self) -> dict[str, Tensor]:
        found = {"sent": self._sent, "summed": self._summed}
        return {name: x.view(-1) for name, x in found.items() if x is not None}

    def restore(self, left: Mapping[str, Tensor]) -> bool:
        if {name: x.numel() for name, x in left.items()} != self.numbers:
            return False
        self._sent, self._summed = left["sent"].view(-1, self._size), left["summed"].view(1, -1)
        return True

    def sum(self, x: Tensor, scale: float = 1.0) -> Generator[Pending[Tensor], Tensor, Tensor]:
        """Sum a flat tensor over the group: yields the pending collectives, and receives their results.

        `scale` is the loss scale of this step's gradients.
        """
        codec, axis = self._codec, self._axis
        rows = padded(x.float(), axis.size).view(axis.size, -1)
        size = self._size
        coded, left = codec.encode(rows, self._sent, scale)
        self._sent = _in_memory_of(self._sent, left)
        del left
        parts = yield axis.start_all_to_all(coded.flatten(), split_dim=0, concat_dim=0)
        mine = codec.decode_sum(parts.view(axis.size, -1), size).view(1, -1)
        coded, left = codec.encode(mine, self._summed, scale)
        self._summed = _in_memory_of(self._summed, left)
        del left
        whole = yield axis.start_all_gather(coded.flatten(), dim=0)
        return codec.decode(whole.view(axis.size, -1), size).reshape(-1)[: x.numel()].to(x.dtype)


def _in_memory_of(before: Tensor | None, now: Tensor) -> Tensor:
    """Store the new error in the memory of the earlier one, where recorded graphs expect it."""
    if before is None:
        return now
    place = lambda x: (storage_key(x), x.storage_offset())  # noqa: E731
    return before if place(before) == place(now) else before.copy_(now)


def padded(x: Tensor, ways: int) -> Tensor:
    """The flat tensor, padded with zeros to a multiple of `ways`."""
    return x if x.numel() % ways == 0 else torch.nn.functional.pad(x, (0, -x.numel() % ways))


class Scattered:
    """A rank's errors of one reduce-scattered gradient, step after step: one for each receiving rank.

    The error belongs to the gradient, whatever other gradients travel with it.
    """

    def __init__(self, ways: int, size: int) -> None:
        self._ways, self._size = ways, size
        self._sent: Tensor | None = None  # [ways, size]

    @property
    def numbers(self) -> Mapping[str, int]:
        return {"sent": self._ways * self._size}

    @property
    def left_out(self) -> dict[str, Tensor]:
        return {} if self._sent is None else {"sent": self._sent.reshape(-1)}

    def restore(self, left: Mapping[str, Tensor]) -> bool:
        if {name: x.numel() for name, x in left.items()} != self.numbers:
            return False
        self._sent = left["sent"].view(self._ways, self._size)
        return True

    @staticmethod
    def start(
        compress: str | Codec, axis: Axis, gradients: Sequence[Scattered], x: Tensor, scale: float
    ) -> Pending[Tensor]:
        """Start the reduce-scatter of x, which has a row for each rank with several gradients in it."""
        coder, rows = codec(compress), x.view(axis.size, -1).float()
        left = [each._sent for each in gradients if each._sent is not None]
        assert len(left) in (0, len(gradients))
        before = left[0].contiguous() if len(left) == 1 else torch.cat(left, 1) if left else None
        coded, now = coder.encode(rows, before, scale)
        for each, sent in zip(gradients, now.split([each._size for each in gradients], 1), strict=True):
            each._sent = _in_memory_of(each._sent, sent)
        del now, before, left, sent
        size = rows.shape[1]
        coming = axis.start_all_to_all(coded.flatten(), split_dim=0, concat_dim=0)
        return coming.then(lambda parts: coder.decode_sum(parts.view(axis.size, -1), size))
