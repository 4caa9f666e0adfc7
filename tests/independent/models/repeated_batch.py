"""Two views of each sample predicted from one context, which is repeated for the second view, as I-JEPA's predictor is
fed: `tp` may cut the copies, of which a rank then has one.
"""

import torch
from torch import Tensor, nn


class Predictor(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(6, width), nn.LayerNorm(width), nn.Linear(width, 3)
        self.mask = nn.Parameter(torch.zeros(1, 1, width))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, 16, 0.0, batch_first=True) for _ in range(2))

    def forward(self, context: Tensor, places: Tensor, target: Tensor) -> Tensor:
        views = torch.cat([places[:, 0], places[:, 1]]) + self.mask
        z = torch.cat([self.norm(self.embed(context)).repeat(2, 1, 1), views], 1)
        for layer in self.layers:
            z = layer(z)
        found = self.head(z[:, context.shape[1] :])
        return nn.functional.smooth_l1_loss(found, torch.cat([target[:, 0], target[:, 1]]))


def model() -> nn.Module:
    return Predictor()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    shapes = {"context": (12, 7, 6), "places": (12, 2, 5, 8), "target": (12, 2, 5, 3)}
    return {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
