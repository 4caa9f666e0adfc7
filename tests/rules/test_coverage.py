"""The share of a model that rules cover, and drafts of missing rules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.cli import main
from partc.rules.table import TABLE

MODEL = """
import torch
from torch import nn


class Tiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 8)

    def forward(self, x):
        return torch.kron(self.up(x), torch.ones(1, 2)).square().mean()


def model():
    return Tiled()


def batch():
    return {"x": torch.randn(4, 6)}
"""


class Tiling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.kron(self.up(x), torch.ones(1, 1)).square().mean()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "tiled.py").write_text(MODEL)
    return tmp_path / "tiled.py"


def test_covered_models_say_so() -> None:
    package = partc.compile(Path(__file__).parents[2] / "examples" / "gpt.py", mesh="tp=2")
    assert package.report["rules"] == {"ops": 1.0, "flops": 1.0}


def test_a_missing_rule_is_drafted(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rule", str(path), "--mesh", "tp=2"]) == 0
    out = capsys.readouterr().out
    assert 'partc.rule("aten::kron", "x0[b s], x1[d h] -> [b k]")' in out and re.search(r"tiled\.py:1\d", out)
    assert "rules cover" in out and "100.0% of operations" not in out


def test_a_rule_of_the_users_covers_torchs_own_operation() -> None:
    before = partc.compile(Tiling(), {"x": torch.randn(4, 6)}, mesh="tp=2")
    assert before.coverage.ops < 1
    partc.rule("aten::kron", "x[b d], y[p q] -> [b d]")
    try:
        after = partc.compile(Tiling(), {"x": torch.randn(4, 6)}, mesh="tp=2")
        assert after.coverage.ops == 1
    finally:
        TABLE.pop("kron")
