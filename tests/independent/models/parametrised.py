"""torch's own parametrisations and masks of pruning: weight norms, spectral norms, orthogonal maps, symmetric by hand."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


class Parametrised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(6, 8))
        self.second = parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="cayley")
        self.third = nn.Linear(8, 8)
        parametrize.register_parametrization(self.third, "weight", Symmetric())
        self.pruned = nn.Linear(8, 4)
        prune.l1_unstructured(self.pruned, name="weight", amount=0.3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.second(F.relu(self.first(x))))
        return F.cross_entropy(self.pruned(h + self.third(h)), y)


def model() -> nn.Module:
    return Parametrised()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 6, generator=generator), "y": torch.randint(0, 4, (16,), generator=generator)}
