"""FNet: a block mixes tokens by the real part of a Fourier transform over the sequence and over the channels."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mixed, self.fed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mixed(x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real)
        return self.fed(x + self.down(nn.functional.gelu(self.up(x))))


class Mixer(nn.Module):
    def __init__(self, words: int = 20, width: int = 12, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model() -> nn.Module:
    return Mixer()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"ids": torch.randint(0, 20, (8, 10), generator=generator)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["ids"])
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())
