"""A linear-chain random field over tags: a partition function by recursion, lengths as data, transitions learned."""

import torch
from torch import Tensor, nn


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.read = nn.Embedding(20, 8), nn.LSTM(8, 6, batch_first=True)
        self.tags = nn.Linear(6, 5)
        self.move = nn.Parameter(torch.randn(5, 5) * 0.2)
        self.begin, self.end = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(5))

    def forward(self, words: Tensor, tags: Tensor, length: Tensor) -> Tensor:
        scores = self.tags(self.read(self.table(words))[0])
        valid = torch.arange(words.shape[1])[None] < length[:, None]
        rows = torch.arange(words.shape[0])
        path = self.begin[tags[:, 0]] + scores[rows, 0, tags[:, 0]]
        total = self.begin + scores[:, 0]
        for t in range(1, words.shape[1]):
            step = self.move[tags[:, t - 1], tags[:, t]] + scores[:, t].gather(1, tags[:, t : t + 1]).squeeze(1)
            path = path + step * valid[:, t]
            onward = (total.unsqueeze(2) + self.move + scores[:, t].unsqueeze(1)).logsumexp(1)
            total = torch.where(valid[:, t : t + 1], onward, total)
        last = tags.gather(1, (length - 1).unsqueeze(1)).squeeze(1)
        return ((total + self.end).logsumexp(1) - path - self.end[last]).mean()


def model() -> nn.Module:
    return Field()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "words": torch.randint(0, 20, (16, 6), generator=generator),
        "tags": torch.randint(0, 5, (16, 6), generator=generator),
        "length": torch.randint(2, 7, (16,), generator=generator),
    }
