"""One trunk and four losses: classes with weights, a regression, labels of many kinds, and a ranking."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(7, 12), nn.Mish(), nn.Linear(12, 12), nn.Mish())
        self.classes, self.value, self.kinds, self.rank = (nn.Linear(12, n) for n in (4, 2, 5, 1))
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 0.5, 1.5]))
        self.uncertain = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor, label: Tensor, value: Tensor, kinds: Tensor) -> Tensor:
        h = self.trunk(x)
        losses = [
            F.cross_entropy(self.classes(h), label, weight=self.weights),
            F.mse_loss(self.value(h), value) / 2,
            F.binary_cross_entropy_with_logits(self.kinds(h), kinds),
            F.softplus(-self.rank(h).squeeze(-1) * (label * 2 - 3)).mean(),
        ]
        return sum((-s).exp() * each + s for s, each in zip(self.uncertain.unbind(), losses, strict=True))


def model() -> nn.Module:
    return Heads()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(16, 7, generator=draw)
    kinds = torch.randint(0, 2, (16, 5), generator=draw).float()
    return {"x": x, "label": torch.randint(0, 4, (16,), generator=draw), "value": x[:, :2], "kinds": kinds}
