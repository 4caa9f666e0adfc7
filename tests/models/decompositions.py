"""Weight norms, matrix functions and decompositions of each example, bags of words, and pools of films."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv3d(4, 4, 3, padding=1), dim=1)
        self.bag = nn.EmbeddingBag(10, 8, mode="mean")
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, words: Tensor, film: Tensor) -> Tensor:
        z = self.layer(x) + self.bag(words)
        squares = z[:, :, None] * z[:, None] / 8 + torch.eye(8, dtype=z.dtype)
        values = torch.linalg.svdvals(squares) + torch.linalg.det(squares)[:, None]
        turned = torch.matrix_exp(squares / 8).sum(-1)
        seen = self.conv(film.flatten(1).reshape_as(film))
        pooled = torch.concatenate([F.max_pool3d(seen, 2), F.adaptive_avg_pool3d(seen, 2)], 1).mean((2, 3, 4))
        return self.head(values + turned + pooled)


def model() -> nn.Module:
    return Net()


def batch(batch: int = 8) -> dict[str, Tensor]:
    return {
        "x": torch.randn(batch, 8),
        "words": torch.randint(10, (batch, 3)),
        "film": torch.randn(batch, 4, 4, 4, 4),
        "target": torch.randint(4, (batch,)),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["words"], batch["film"]), batch["target"])
