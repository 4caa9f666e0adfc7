"""A recogniser with torch's own connectionist temporal classification, lengths of inputs and targets as data."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Recogniser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Conv1d(4, 12, 3, stride=2, padding=1)
        self.body = nn.GRU(12, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 6)

    def forward(self, sound: Tensor, text: Tensor, heard: Tensor, written: Tensor) -> Tensor:
        h, _ = self.body(F.gelu(self.front(sound)).transpose(1, 2))
        chances = self.head(h).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(chances, text, heard, written, zero_infinity=True)


def model() -> nn.Module:
    return Recogniser()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "sound": torch.randn(16, 4, 24, generator=generator),
        "text": torch.randint(1, 6, (16, 4), generator=generator),
        "heard": torch.randint(9, 13, (16,), generator=generator),
        "written": torch.randint(1, 5, (16,), generator=generator),
    }
