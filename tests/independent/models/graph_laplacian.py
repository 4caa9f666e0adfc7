"""A batch of dense graphs: normalised adjacencies, Chebyshev's filters, a pooled assignment, a cut as a loss."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Cut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.ModuleList(nn.Linear(4, 6) for _ in range(3))
        self.assign, self.out = nn.Linear(6, 2), nn.Linear(6, 1)

    def forward(self, nodes: Tensor, edges: Tensor, y: Tensor) -> Tensor:
        a = torch.maximum(edges, edges.transpose(1, 2)) * (1 - torch.eye(edges.shape[1]))
        degree = a.sum(-1)
        root = degree.clamp(min=1).pow(-0.5)
        lap = torch.diag_embed(torch.ones_like(degree)) - root[:, :, None] * a * root[:, None, :]
        terms = [nodes, lap @ nodes]
        terms.append(2 * torch.bmm(lap, terms[-1]) - terms[-2])
        h = F.relu(sum(f(t) for f, t in zip(self.filters, terms, strict=True)))
        s = self.assign(h).softmax(-1)
        pooled = s.transpose(1, 2) @ h
        top = torch.einsum("bik,bij,bjk->b", s, a, s)
        bottom = torch.einsum("bik,bi,bik->b", s, degree, s).clamp(min=1e-6)
        ss = s.mT @ s
        even = (ss / ss.norm(dim=(1, 2), keepdim=True) - torch.eye(2) / 2**0.5).norm(dim=(1, 2))
        return F.mse_loss(self.out(pooled.amax(1)).squeeze(-1), y) - (top / bottom).mean() + even.mean()


def model() -> nn.Module:
    return Cut()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "nodes": torch.randn(16, 5, 4, generator=generator),
        "edges": (torch.rand(16, 5, 5, generator=generator) < 0.5).float(),
        "y": torch.randn(16, generator=generator),
    }
