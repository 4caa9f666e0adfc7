"""Layers with one elementwise function each; `functions` says which, by name, with + between."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KNOWN = {
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "elu": lambda x: F.elu(x, 1.3),
    "celu": lambda x: F.celu(x, 1.3),
    "selu": F.selu,
    "softplus": lambda x: F.softplus(x, 2.0, 5.0),
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 2.0),
    "log_sigmoid": F.logsigmoid,
    "log1p": lambda x: torch.log1p(x * x),
    "expm1": torch.expm1,
    "floor": lambda x: x * torch.floor(x),
    "ceil": lambda x: x * torch.ceil(x),
    "round": lambda x: x * torch.round(x),
    "trunc": lambda x: x - torch.trunc(x),
    "sign": lambda x: x * torch.sign(x),
    "nan_to_num": torch.nan_to_num,
    "odd": lambda x: torch.where((x > 0) ^ ~(x < 1), x, x * 0.5),
    "bounded": lambda x: torch.clamp(x, x.detach() - 1, x * x),
    "clamp_min": lambda x: x.clamp_min(0.1),
    "xlogy": lambda x: torch.xlogy(x * x, x * x + 1),
    "softshrink": lambda x: F.softshrink(x, 0.3),
    "lerp": lambda x: torch.lerp(x, x * x, torch.sigmoid(x)),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.3),
    "logaddexp": lambda x: torch.logaddexp(x, x * x),
    "modulo": lambda x: x * ((x * 100).long() % 7),
}


class Layers(nn.Module):
    def __init__(self, names: list[str], width: int) -> None:
        super().__init__()
        self.names = names
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in names)
        self.prelu = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        for name, layer in zip(self.names, self.layers, strict=True):
            h = layer(x) * 2.0
            x = (x + (self.prelu(h) if name == "prelu" else KNOWN[name](h))) * 0.5
        return x


def model(functions: str = "leaky_relu+prelu", width: int = 16) -> nn.Module:
    names = [*KNOWN, "prelu"] if functions == "all" else functions.split("+")
    return Layers(names, width)


def batch(batch: int = 4, width: int = 16) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, 6, width), "target": torch.randn(batch, 6, width)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["target"])
