"""A model that returns a dictionary of tensors, and a separate loss function that reads parts, parameters and a buffer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"a b": nn.Linear(4, 8), "key": nn.Linear(8, 8), "2": nn.Linear(8, 3)})
        self.register_buffer("balance", torch.tensor([0.2, 0.3, 0.5]))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body["a b"](x).exp2().log1p()
        return {"hidden": h, "logits": self.body["2"](self.body["key"](h).square().rsqrt().clamp(max=3))}


def loss(module: nn.Module, given: dict[str, Tensor]) -> Tensor:
    out = module(given["x"])
    plain = F.cross_entropy(out["logits"], given["y"], weight=module.balance)
    size = sum(weight.square().sum() for name, weight in module.named_parameters() if name.endswith("weight"))
    return plain + 1e-3 * size + 1e-2 * out["hidden"].var(0).sum()


def model() -> nn.Module:
    return Parts()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 4, generator=generator), "y": torch.randint(0, 3, (16,), generator=generator)}
