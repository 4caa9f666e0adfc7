"""Masks of spans that models draw with NumPy, as random numbers of the trace."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partc.frontend.trace import trace_model
from partc.frontend.traceable_forms.masked_spans import masked_spans
from partc.ir.mesh import Mesh
from partc.package.reference import loss_of


def _compute_mask_indices(shape: tuple[int, int], mask_prob: float, mask_length: int) -> np.ndarray:
    """One span for each row, drawn as the speech models of transformers draw it."""
    starts = np.random.choice(np.arange(shape[1] - mask_length + 1), shape[0])
    places = np.arange(shape[1])
    return (places >= starts[:, None]) & (places < starts[:, None] + mask_length)


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.hidden = nn.Linear(4, 4), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.up(x)
        chosen = torch.tensor(_compute_mask_indices((x.shape[0], x.shape[1]), 0.5, 2), dtype=torch.bool)
        x[chosen] = self.hidden
        return F.mse_loss(x, y)


def test_spans_are_drawn_in_every_step() -> None:
    batch = {"x": torch.randn(4, 6, 4), "y": torch.randn(4, 6, 4)}
    found = trace_model(Speech, lambda: batch, name="net", mesh=Mesh.parse("2"), precision="fp64")
    assert sum(op.name == "rand" for op in found.program.regions[0].forward.ops) == 2
    model, losses = Speech(), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        losses.append(loss_of(SimpleNamespace(), model, {}, batch).item())
    assert losses[0] == losses[1] != losses[2]  # the reference draws with torch as well
    assert _compute_mask_indices.__module__ == __name__


def test_spans_have_numbers_and_lengths_by_row() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([12, 7, 2, 0]).repeat(50)
    valid = torch.arange(12) < lengths[:, None]
    drawn = torch.stack([masked_spans((200, 12), 0.3, 1, valid, min_masks=1) for _ in range(20)])
    numbers = {n: drawn[:, lengths == n].sum(-1).unique().tolist() for n in (12, 7, 2, 0)}
    assert numbers == {12: [3, 4], 7: [2, 3], 2: [1], 0: [0]}  # 0.3 of the length, rounded at random; at least one
    assert not (drawn & ~valid).any()
    assert abs(drawn[:, lengths == 12].sum(-1).double().mean() - 3.6) < 0.4
    longer = masked_spans((200, 12), 0.3, 3, valid)
    gaps = F.pad(longer.long(), (1, 1)).diff(dim=1)
    runs = (gaps == -1).nonzero()[:, 1] - (gaps == 1).nonzero()[:, 1]
    assert runs.min() >= 3 and not (longer & ~valid).any()
    assert masked_spans((2, 12), 1.0, 12).all()
