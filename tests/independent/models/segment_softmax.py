"""Attention of edges by segments: maxima and sums scattered per node, graphs of one size in a batch."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Segments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.score, self.leave = nn.Linear(4, 8), nn.Linear(16, 2), nn.Linear(8, 1)

    def forward(self, nodes: Tensor, source: Tensor, target: Tensor, y: Tensor) -> Tensor:
        h = self.enter(nodes)
        from_ = h.gather(1, source.unsqueeze(-1).expand(-1, -1, 8))
        to = h.gather(1, target.unsqueeze(-1).expand(-1, -1, 8))
        scores = F.leaky_relu(self.score(torch.cat([from_, to], -1)), 0.2)
        at = target.unsqueeze(-1).expand_as(scores)
        most = scores.new_full((nodes.shape[0], nodes.shape[1], 2), float("-inf"))
        most = most.scatter_reduce(1, at, scores, "amax", include_self=True)
        powers = (scores - most.gather(1, at).detach()).exp()
        sums = torch.zeros(nodes.shape[0], nodes.shape[1], 2).scatter_add(1, at, powers)
        weights = (powers / sums.gather(1, at)).repeat_interleave(4, -1)
        got = torch.zeros_like(h).scatter_reduce(1, target.unsqueeze(-1).expand(-1, -1, 8), weights * from_, "sum")
        mean = torch.zeros_like(h).scatter_reduce(1, target.unsqueeze(-1).expand(-1, -1, 8), from_, "mean")
        return F.mse_loss(self.leave(F.elu(h + got + 0.3 * mean)).sum((1, 2)), y)


def model() -> nn.Module:
    return Segments()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "nodes": torch.randn(16, 5, 4, generator=generator),
        "source": torch.randint(0, 5, (16, 9), generator=generator),
        "target": torch.randint(0, 5, (16, 9), generator=generator),
        "y": torch.randn(16, generator=generator),
    }
