"""Numbers of the batch that select rows or classes: the limits found, and batches that break them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partc
from partc.runtime.errors import UsageError
from partc.runtime.train.data import fitting_batch

ROWS = 4  # of the table, and classes


USES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "embedding": lambda m, x, y: m.table(y).sum(),
    "embedding of a view": lambda m, x, y: m.table(y.t().reshape(-1)).sum(),
    "embedding of a column": lambda m, x, y: m.table(y[:, -1]).sum(),
    "embedding of a slice": lambda m, x, y: m.table(y[:, 1:]).sum(),
    "embedding bag": lambda m, x, y: m.bag(y).sum(),
    "classes": lambda m, x, y: F.cross_entropy(m.head(x), y[:, 1]),
    "classes with an ignored one": lambda m, x, y: F.cross_entropy(m.head(x), y[:, 1], ignore_index=-1),
    "classes of log-probabilities": lambda m, x, y: F.nll_loss(m.head(x).log_softmax(1), y[:, 2]),
    "gather": lambda m, x, y: m.head(x).gather(1, y[:, :1]).sum(),
    "one_hot": lambda m, x, y: (F.one_hot(y[:, 0], ROWS) * m.head(x)).sum(),
    "rows of a tensor": lambda m, x, y: m.head(m.table.weight[y[:, 1]]).sum(),
    "columns of a tensor": lambda m, x, y: m.head.weight.t()[:, y[:, 1:]].sum() + m.head(x).sum(),
    "a slice of a square transposed": lambda m, x, y: m.table(y[:3].t()[:, 1:]).sum(),
    "elements of rows": lambda m, x, y: m.head(x)[torch.arange(8), y[:, 2]].sum(),
    "rows behind a mask": lambda m, x, y: F.cross_entropy(m.head(x)[y[:, 0] >= 0], y[:, 0][y[:, 0] >= 0]),
    "a limited number": lambda m, x, y: m.table(y.clamp(0, ROWS - 1)).sum() + m.head(x).sum(),
}


class Selecting(nn.Module):
    def __init__(self, use: str) -> None:
        super().__init__()
        self.table, self.bag, self.head = nn.Embedding(ROWS, 6), nn.EmbeddingBag(ROWS, 6), nn.Linear(6, ROWS)
        self.use = use

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return USES[self.use](self, x, y)


@pytest.mark.parametrize("use", USES)
def test_numbers_that_select_nothing_are_refused_as_eager_torch_does(use: str) -> None:
    good = {"x": torch.randn(8, 6), "y": torch.randint(ROWS, (8, 3))}
    model = Selecting(use)
    package = partc.compile(model, good, mesh="tp=2")
    plan = json.loads(dict(package.files())["plan.json"])
    fitting_batch(good, plan, "batch 1")
    for place in range(3):
        for number in (-1, -100, ROWS):
            y = good["y"].clone()
            y[5, place] = number
            try:
                model(good["x"], y)
                stops = False
            except (IndexError, RuntimeError):
                stops = use != "rows behind a mask"  # whose numbers no limit of the entry describes
            if stops:
                with pytest.raises(UsageError, match=f"P0543.*'y' in batch 2 has the number {number}, which selects"):
                    fitting_batch({"x": good["x"], "y": y}, plan, "batch 2")
            else:
                fitting_batch({"x": good["x"], "y": y}, plan, "batch 2")
