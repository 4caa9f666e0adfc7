"""Norms whose rows tp cuts: sums of rows over the ranks instead of rows that move."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partc
from partc.ir.program import Op, Program
from partc.runtime.ops import functional

NORMS = {
    "rms": lambda width: nn.RMSNorm(width),
    "layer": lambda width: nn.LayerNorm(width),
    "plain": lambda width: nn.LayerNorm(width, elementwise_affine=False),
}
WIDTH = 24


class Gated(nn.Module):
    """A feed-forward layer with a norm of its hidden values, behind a norm of the residual stream."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.before, self.hidden = nn.LayerNorm(WIDTH), NORMS[kind](4 * WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        return x + self.down(self.hidden(self.up(y) * F.silu(self.gate(y))))


class Net(nn.Module):
    """Two such layers between a table of words and a head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16)
        self.blocks = nn.ModuleList(Gated(kind) for _ in range(2))

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).transpose(1, 2), words.roll(-1, 1))


def _compiled(mesh: str, kind: str, *, precision: str = "fp64", **more: Any) -> partc.Package:
    torch.manual_seed(0)
    return partc.compile(Net(kind), {"words": torch.randint(16, (8, 12))}, mesh=mesh, precision=precision, **more)


def _block(program: Program) -> tuple[Op, ...]:
    """The operations of a layer's forward graph."""
    (block,) = (region for region in program.regions if len(program.calls_to(region.name)) == 2)
    return block.forward.ops


@pytest.mark.parametrize(("kind", "sums"), [("rms", 1), ("layer", 2), ("plain", 2)])
def test_rows_stay_where_they_are(kind: str, sums: int) -> None:
    program = _compiled("tp=2", kind).program
    ops = Counter(op.name for op in _block(program))
    assert ops["all_reduce"] == sums and not ops["all_to_all"]
    assert ops["all_gather"] == ops["reduce_scatter"] == ops["layer_norm"] == 1  # as without the norm of hidden values
    weights = {item.name: str(item.type.layout) for item in program.parameters if ".hidden." in item.name}
    assert set(weights.values()) <= {"[96@tp]"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mesh", "how"),
    [
        ("rms", "tp=3", {}),
        ("layer", "dp=2,tp=2", {"zero": 3, "microbatches": 2, "recompute": "selective"}),
        ("plain", "pp=2,tp=2", {"microbatches": 2, "recompute": "full"}),
        ("layer", "cp=2,tp=2", {}),
        ("rms", "tp=2", {"kernels": "triton"}),
    ],
)
def test_packages_train_like_one_device(kind: str, mesh: str, how: dict[str, Any]) -> None:
    result = _compiled(mesh, kind, **how).verify()
    assert result.ok, result.worst


def test_statistics_are_fp32() -> None:
    """The sums of 16-bit values, and all that follows up to the result."""
    program = _compiled("tp=2", "layer", precision="bf16").program
    sums = [op.result.type for op in _block(program) if op.name == "sum"]
    assert [(type.dtype, type.shape[-1]) for type in sums] == [("f32", 1)] * 2


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32), ("fp64", torch.float64)]
)
def test_a_missing_epsilon_is_torchs(precision: str, dtype: torch.dtype) -> None:
    """Torch adds that of fp32 to statistics of 16-bit rows, which small rows show."""
    x = torch.linspace(1e-5, 1e-4, 8, dtype=dtype).view(1, 8)
    (added,) = ((x.double() / F.rms_norm(x, (8,)).double()).square() - x.double().square().mean()).mean(1)
    program = _compiled("tp=2", "rms", precision=precision).program
    found = [arg for op in _block(program) if op.name == "add" for arg in op.args if isinstance(arg, float)]
    assert [number for number in found if abs(number - float(added)) < 0.02 * number + 1e-18], (found, added)
    own, _ = functional.rms_norm(x, (8,), None, None)
    assert torch.allclose(own, F.rms_norm(x, (8,)), rtol=0.02)


def test_a_pin_cuts_the_rows_of_a_norm() -> None:
    package = _compiled("tp=2", "rms", shard=["block.before=[_, _, @tp]"])
    assert [op.name for op in _block(package.program)].count("all_reduce") == 3
    assert package.verify().ok
