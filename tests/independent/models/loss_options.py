"""Cross entropies with every option: targets as probabilities, weights, smoothing, ignored classes, pictures, sums."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Options(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.grid = nn.Linear(6, 4), nn.Linear(6, 4 * 9)
        self.register_buffer("weight", torch.tensor([0.2, 1.0, 3.0, 0.7]))

    def forward(self, x: Tensor, y: Tensor, soft: Tensor, where: Tensor) -> Tensor:
        out, grid = self.body(x), self.grid(x).view(-1, 4, 3, 3)
        losses = [
            F.cross_entropy(out, soft.softmax(-1), weight=self.weight, label_smoothing=0.2),
            F.cross_entropy(out, y, weight=self.weight, label_smoothing=0.1, ignore_index=2),
            F.cross_entropy(grid, where, ignore_index=-1, weight=self.weight),
            F.cross_entropy(grid, where, ignore_index=-1, reduction="sum") / 100,
            F.nll_loss(grid.log_softmax(1), where.clamp(min=0), weight=self.weight, reduction="none")
            .mean((1, 2))
            .max(),
            F.kl_div(out.log_softmax(1), soft.log_softmax(1), log_target=True, reduction="batchmean"),
            F.binary_cross_entropy_with_logits(out, soft.sigmoid(), weight=self.weight, pos_weight=self.weight.flip(0)),
            F.multilabel_soft_margin_loss(out, soft.sigmoid().round(), weight=self.weight),
            F.smooth_l1_loss(out, soft, beta=0.3) + F.huber_loss(out, soft, reduction="sum") / 50,
        ]
        return sum(losses)


def model() -> nn.Module:
    return Options()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(16, 6, generator=generator),
        "y": torch.randint(0, 4, (16,), generator=generator),
        "soft": torch.randn(16, 4, generator=generator),
        "where": torch.randint(-1, 4, (16, 3, 3), generator=generator),
    }
