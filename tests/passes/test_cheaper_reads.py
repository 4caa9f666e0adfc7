"""Values that kernels on both sides of a collective read: each kernel makes them from the same 16-bit operands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import partc
from tests.passes.test_norms import Net


class Batched(nn.Module):
    """Batch norms over examples on several ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu().mean((2, 3))).square().mean()


def _wide(package: partc.Package) -> list[str]:
    """The fp32 activations that forward kernels write."""
    ops = [op for region in package.program.regions for op in region.forward.ops if op.name == "fused"]
    made = [value for op in ops for value in op.results if len(value.type.shape) > 2]
    return [value.name for value in made if value.type.dtype == "f32" and value.type.shape[-1] > 1]


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_over_cut_rows_write_no_fp32_rows(kind: str) -> None:
    words = {"words": torch.randint(16, (8, 12))}
    package = partc.compile(Net(kind), words, mesh="tp=2", precision="bf16", kernels="triton")
    block = package.program.region("block")
    assert any(op.name == "all_reduce" for op in block.forward.ops)
    assert not _wide(package)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_batch_norms(precision: str) -> None:
    torch.manual_seed(0)
    package = partc.compile(
        Batched(), {"x": torch.randn(4, 3, 6, 6)}, mesh="dp=2", precision=precision, kernels="triton"
    )
    assert len([op for region in package.program.regions for op in region.forward.ops if op.name == "all_reduce"]) >= 2
    assert _wide(package) == ["norm_mul"] * (precision == "bf16")  # the squares, which no kernel sums
    result = package.verify()
    assert result.ok, result.worst
