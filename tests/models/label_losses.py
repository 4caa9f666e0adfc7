"""A small head whose loss is spelled in one of several ways: -D kind=NAME."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 11


def picked(x: Tensor, labels: Tensor) -> Tensor:
    return -F.log_softmax(x, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1).mean()


def picked_in_the_middle(x: Tensor, labels: Tensor) -> Tensor:
    return -F.log_softmax(x.transpose(1, 2), 1).gather(1, labels.unsqueeze(1)).squeeze(1).mean()


def focal(x: Tensor, labels: Tensor) -> Tensor:
    """The log-probability is read twice, and as it is."""
    one = x.log_softmax(dim=-1).gather(-1, labels[..., None])[..., 0]
    return -((1 - one.exp()) ** 2 * one).mean()


def of_negatives(x: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(x.flatten(0, 1), dim=1), labels.flatten())


def of_images(x: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(x.transpose(1, 2), 1), labels, weight=torch.linspace(0.5, 2, CLASSES).to(x.dtype))


def smoothed(x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.log_softmax(x, -1).flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def entropy(x: Tensor, labels: Tensor) -> Tensor:
    """All log-probabilities are read too: they stay."""
    p = F.log_softmax(x, -1)
    return -p.gather(-1, labels.unsqueeze(-1)).mean() + (p.exp() * p).sum(-1).mean()


def several(x: Tensor, labels: Tensor) -> Tensor:
    """Two of each row: not what a loss picks."""
    both = torch.stack([labels, (labels + 1) % CLASSES], -1)
    return -F.log_softmax(x, -1).gather(-1, both).mean()


def z_loss(x: Tensor, labels: Tensor) -> Tensor:
    sums = torch.logsumexp(x, -1)
    return F.cross_entropy(x.flatten(0, 1), labels.flatten()) + 0.01 * sums.square().mean()


def z_loss_first(x: Tensor, labels: Tensor) -> Tensor:
    """In another order, and kept."""
    return 0.01 * x.logsumexp(-1, keepdim=True).square().mean() + F.cross_entropy(x.flatten(0, 1), labels.flatten())


def distilled(x: Tensor, labels: Tensor) -> Tensor:
    teacher = (x.detach().roll(1, -1) * 0.5).softmax(-1)
    return F.kl_div(F.log_softmax(x, -1), teacher, reduction="batchmean") + F.cross_entropy(
        x.flatten(0, 1), labels.flatten()
    )


class Head(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, CLASSES)
        self.loss = globals()[kind]

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.body(x).relu()), labels)


def model(kind: str = "picked") -> nn.Module:
    return Head(kind)


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 3, 6), "labels": torch.randint(CLASSES, (8, 3))}
