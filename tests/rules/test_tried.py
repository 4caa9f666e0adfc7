"""Operations without a rule: those that treat examples alike are cut along the batch, others are not."""

from __future__ import annotations

from pathlib import Path

import pytest

import partc
from partc.rules import resolve
from partc.rules.table import TABLE
from partc.rules.tried import batch_operands
from tests.op_cases import Case, case, normal, whole

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, target):
        h = self.first(x)
        h = torch.hypot(h, x) + nn.functional.softshrink(h) + torch.channel_shuffle(h[..., None], 2)[..., 0]
        near = torch.bucketize(h.detach(), torch.linspace(-1, 1, 5, dtype=h.dtype))
        h = self.last(h * (1 + (near << 1)).to(h.dtype))
        return nn.functional.soft_margin_loss(h, target, reduction="none").mean()

def model():
    return Model()

def batch(batch: int = 8):
    return {"x": torch.randn(batch, 8), "target": torch.randn(batch, 8).sign()}
"""

ALIKE = [
    case("hypot", normal(8, 4), normal(8, 4)),
    case("hypot", normal(1, 4), normal(8, 4)),  # of one row and all others
    case("igamma", normal().abs(), normal(8, 4).abs()),
    case("softshrink", normal(8, 4), 0.5),
    case("channel_shuffle", normal(8, 6, 2), 3),
    case("__lshift__", whole(5, 8, 4), 2),
    case("i0", normal(8, 4)),
]
COUPLED = [
    case("renorm", normal(8, 4), 2, 1, 0.5),  # the norm of a column of all examples
    case("rot90", normal(8, 8)),
    case("flipud", normal(8, 4)),
    case("quantile", normal(8), 0.5),
]


@pytest.mark.parametrize("each", ALIKE, ids=str)
def test_examples_alike(each: Case) -> None:
    assert each.op.name not in TABLE
    assert batch_operands(each.op, each.types) is not None


@pytest.mark.parametrize("each", COUPLED, ids=str)
def test_coupled_examples(each: Case) -> None:
    assert each.op.name not in TABLE
    assert batch_operands(each.op, each.types) is None


def test_ranges_of_counts_that_all_elements_set_have_no_rule() -> None:
    whole_range, own_range = case("histc", normal(8), 8), case("histc", normal(8), 8, -1.0, 1.0)
    assert resolve(whole_range.op, whole_range.types) is None
    assert resolve(own_range.op, own_range.types) is not None


def test_a_package_cuts_its_batch(tmp_path: Path) -> None:
    file = tmp_path / "untold.py"
    file.write_text(MODEL)
    package = partc.compile(str(file), mesh="dp=2", microbatches=2, precision="fp64")
    assert set(package.coverage.tried) >= {"hypot", "softshrink", "channel_shuffle", "__lshift__"}
    result = package.verify(steps=2)
    assert result.ok, result
