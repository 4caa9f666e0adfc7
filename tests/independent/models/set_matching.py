"""Set prediction with scipy's Hungarian assignment, imported by its own name and by another; some objects are padding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from scipy.optimize import linear_sum_assignment as matching
from torch import Tensor, nn

EXAMPLES, QUERIES, OBJECTS, CLASSES = 8, 6, 4, 3


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(QUERIES, 12))
        self.decoder = nn.TransformerDecoderLayer(12, 3, 24, 0.0, batch_first=True)
        self.classes, self.boxes = nn.Linear(12, CLASSES + 1), nn.Linear(12, 4)
        self.register_buffer("rarity", torch.tensor([1.0, 1.0, 1.0, 0.1]))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        found = self.decoder(self.queries.expand(len(features), -1, -1), features)
        return self.classes(found), self.boxes(found).sigmoid()


def model() -> nn.Module:
    return Detector()


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "features": torch.randn(EXAMPLES, 5, 12, generator=generator),
        "labels": torch.randint(CLASSES, (EXAMPLES, OBJECTS), generator=generator),
        "boxes": torch.rand(EXAMPLES, OBJECTS, 4, generator=generator),
        "there": torch.rand(EXAMPLES, OBJECTS, generator=generator) > 0.3,  # the others are padding
    }


def batch() -> dict[str, Tensor]:
    return data(0)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores, boxes = model(batch["features"])
    with torch.no_grad():
        chance = scores.softmax(-1).gather(2, batch["labels"][:, None].expand(-1, QUERIES, -1))
        cost = 5 * torch.cdist(boxes, batch["boxes"], p=1) - chance
        cost = cost.masked_fill(~batch["there"][:, None], 100.0).cpu()
        pairs = [linear_sum_assignment(each) for each in cost]
        spare = [matching(each.T[:2], maximize=True) for each in cost]
    terms = []
    for example, (rows, columns) in enumerate(pairs):
        rows, columns = torch.as_tensor(rows), torch.as_tensor(columns)
        there = batch["there"][example, columns]
        target = torch.full((QUERIES,), CLASSES)
        target[rows] = torch.where(there, batch["labels"][example, columns], CLASSES)
        rarity = model.rarity
        assert isinstance(rarity, Tensor)
        terms.append(F.cross_entropy(scores[example], target, rarity))
        near = F.l1_loss(boxes[example, rows], batch["boxes"][example, columns], reduction="none").sum(-1)
        far = boxes[example, torch.as_tensor(spare[example][1])].square()
        terms.append((near * there).sum() / there.sum().clamp(min=1) + 0.1 * far.mean())
    return torch.stack(terms).sum() / len(pairs)
