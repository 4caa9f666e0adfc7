"""The starts of random streams in the device's memory: a word for each random operation, rewritten for each batch.

So no arguments of kernels or operations depend on seed and step (runtime/random.py defines a word).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..random import GOLDEN, mix, mixed, signed
from .sending import send

ROW = 2  # table entries per word: kernels assume pointers aligned to 16 bytes
BLOCK = 64  # rows per allocation, unless a number was reserved


class Words:
    """The words of one rank. A word keeps its address once it has been requested."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.blocks: list[Tensor] = []  # [rows, ROW]; all but the last one are full
        self._keys: list[tuple[int, int]] = []  # row -> (operation, element) of its word
        self._places: dict[tuple[int, int], Tensor] = {}
        self._written: tuple[int, int] | None = None

    def reserve(self, rows: int) -> None:
        """Allocate rows if none are left."""
        if rows:
            self.blocks.append(torch.zeros((rows, ROW), dtype=torch.int64, device=self._device))

    def write(self, seed: int, step: int) -> None:
        """Set all words for a seed and a step."""
        if self._written == (seed, step):
            return
        self._written = seed, step
        done = 0
        for block in self.blocks:
            keys = self._keys[done : done + len(block)]
            if keys:
                send(_computed(seed, step, keys), block[: len(keys)])
            done += len(keys)

    def at(self, seed: int, step: int, number: int, index: int) -> Tensor:
        """The word, i64[], of operation `number` for an element of its whole tensor; -1 is the start of the stream."""
        self.write(seed, step)
        key = number, index
        if key not in self._places:
            self._places[key] = self._new(key)
        return self._places[key]

    def _new(self, key: tuple[int, int]) -> Tensor:
        if len(self._keys) == sum(map(len, self.blocks)):
            self.reserve(BLOCK)
        here = self.blocks[-1][len(self._keys) - sum(map(len, self.blocks[:-1]))]
        self._keys.append(key)
        assert self._written is not None
        send(_computed(*self._written, [key])[0], here)
        return here[0]


def _computed(seed: int, step: int, keys: list[tuple[int, int]]) -> Tensor:
    """[keys, ROW]: the start of each operation's stream, advanced to the element's output."""
    numbers, indices = torch.tensor(keys, dtype=torch.int64).unbind(1)
    state = mixed((mixed(seed % (1 << 64)) + GOLDEN * (step + 1)) % (1 << 64))
    starts = mix((numbers + 1).mul_(signed(GOLDEN)).add_(signed(state)))
    words = starts.add_((indices + 1).mul_(signed(GOLDEN)))
    return torch.stack([words, torch.zeros_like(words)], 1)
