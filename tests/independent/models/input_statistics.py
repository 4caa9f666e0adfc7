"""A loss with weights, thresholds and denominators that are statistics of the whole batch's inputs."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("prior", torch.tensor([0.5, 1.0, 2.0, 4.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.enter(x)))


def model() -> nn.Module:
    return Classifier()


def loss(model: Classifier, batch: dict[str, Tensor]) -> Tensor:
    scores = model(batch["x"])
    labels, kept, weight, tags = batch["labels"], batch["kept"], batch["weight"], batch["tags"]
    each = F.cross_entropy(scores, labels, reduction="none")
    counts = torch.bincount(labels, minlength=4)
    seldom = 1 / ((1 - 0.9 ** F.one_hot(labels, 4).sum(0)) / 0.1 + 1e-3)
    high = weight > weight.mean()
    return (
        (each * kept).sum() / kept.sum().clamp(min=1)
        + F.binary_cross_entropy_with_logits(
            scores, tags, pos_weight=(len(tags) - tags.sum(0)) / tags.sum(0).clamp(min=1)
        )
        + each.mean() * kept.to(weight.dtype).mean().sqrt()
        + (each * (weight / weight.sum())).sum()
        + F.cross_entropy(scores, labels, weight=model.prior / counts.clamp(min=1))
        + (each * (weight - weight.mean()) / weight.std()).mean()
        + (each * high).sum() / high.sum()
        + (each * weight.softmax(0)).sum()
        + (each * weight / weight.max()).mean()
        + (each * (seldom / seldom.sum())[labels]).mean()
    )


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(16, 6, generator=generator),
        "labels": torch.randint(0, 4, (16,), generator=generator),
        "kept": torch.rand(16, generator=generator) < 0.6,
        "weight": torch.rand(16, generator=generator),
        "tags": torch.randint(0, 2, (16, 4), generator=generator).double(),
    }
