"""A speech model in its common form: the length of the longest sequence is a Python number."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

BATCH, LENGTH, WIDTH = 8, 9, 8
FIXED = 3  # the number of steps with a sequence of LENGTH


def padding(lengths: Tensor) -> Tensor:
    return torch.arange(int(torch.max(lengths).item())) >= lengths.unsqueeze(1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Conv1d(WIDTH, WIDTH, 3, stride=2)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        assert lengths.max() <= x.shape[1]
        shorter = torch.div(lengths - 3, 2, rounding_mode="floor") + 1
        x = self.short(x.transpose(1, 2)).transpose(1, 2)
        packed = pack_padded_sequence(x, shorter.cpu(), batch_first=True, enforce_sorted=False)
        made, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        made = self.head(made).masked_fill(padding(shorter).unsqueeze(-1), 0.0)
        return F.mse_loss(made, target[:, : max(shorter)])


def model() -> nn.Module:
    return Model()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    lengths = torch.randint(3, LENGTH, (BATCH,), generator=g)
    lengths[step % BATCH] = LENGTH if step < FIXED else LENGTH - 1
    return {
        "x": torch.randn(BATCH, LENGTH, WIDTH, generator=g),
        "lengths": lengths,
        "target": torch.randn(BATCH, LENGTH, WIDTH, generator=g),
    }
