"""Sorting by expert is taken out of a model, and products by expert equal a loop over the experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.runtime.comm.comm import Axis, Comm
from partc.runtime.errors import UsageError
from partc.runtime.ops import experts
from partc.runtime.plan import PlanRouter


def _case(rows: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    w = torch.randn(4, 5, 3, generator=generator, dtype=torch.float64)
    chosen = torch.randint(4, (rows,), generator=generator)
    return x, chosen.masked_fill(chosen == 2, 3), w  # expert 2 has no rows


@pytest.mark.parametrize("rows", [1, 11])
def test_products_by_expert_and_their_gradients(rows: int) -> None:
    x, chosen, w = _case(rows)
    x.requires_grad_(), w.requires_grad_()
    expected = torch.stack([row @ w[expert] for row, expert in zip(x, chosen, strict=True)])
    grad = torch.randn_like(expected)
    expected.backward(grad)
    with torch.no_grad():
        torch.testing.assert_close(experts.expert_matmul(x, chosen, w), expected)
        torch.testing.assert_close(experts.expert_matmul_grad_rows(grad, chosen, w), x.grad)
        torch.testing.assert_close(experts.expert_matmul_grad_weight(grad, chosen, x, 4), w.grad)


def test_rows_without_an_expert_stay_and_are_zero() -> None:
    x, chosen, w = _case()
    none = torch.arange(len(x)) % 3 == 0
    order, _, own, counts = experts.route(chosen.masked_fill(none, 4), 4, Axis(), stay=True)
    assert counts.sum(1).tolist() == [len(x) - int(none.sum())] * 2 == [len(own)] * 2
    made = experts.expert_matmul(x, chosen.masked_fill(none, 4), w)
    torch.testing.assert_close(made, experts.expert_matmul(x, chosen, w).masked_fill(none[:, None], 0))
    assert none[order[len(own) :]].all()


def test_loads_of_no_layers_take_no_collective() -> None:
    assert Comm({}, {}).loads.spreads(Comm({}, {}), pipeline=True) == {}


@pytest.mark.parametrize("number", [4, 7])
def test_an_expert_that_does_not_exist_is_an_error_of_its_layer(number: int) -> None:
    comm = Comm({"ep": Axis()}, {})
    router = PlanRouter(name="layers.3.mlp", experts=4, over=(), stage=2)
    comm.loads.expect([router], [2], torch.device("cpu"), counted=True)
    axis = Axis()
    axis.loads = comm.loads
    comm.loads.enter(2)
    comm.loads.count(torch.tensor([0, number]))
    with pytest.raises(UsageError, match=f"P0552: the router of layers.3.mlp chose number {number}"):
        experts.route(torch.tensor([0, number]), 4, axis)


class Sorted(nn.Module):
    """Two experts for each token, whose rows are sorted, multiplied in groups and put back."""

    def __init__(self, *, mixes: bool = False, biased: bool = False) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4, 8) / 3) if biased else None
        self.router = nn.Linear(6, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, 6, 8) / 3)
        self.down = nn.Parameter(torch.randn(4, 8, 6) / 3)
        self.mixes = mixes

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        scores, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        order = chosen.reshape(-1).sort()
        numbers = torch.histc(order.values.float(), bins=4, min=0, max=3)
        ends = torch.cumsum(numbers, 0, dtype=torch.int32)
        rows = x[order.indices // 2]
        hidden = torch._grouped_mm(rows, self.up, offs=ends).relu()
        if self.bias is not None:  # and a gate whose columns alternate with the others'
            hidden = hidden + self.bias[order.values]
            hidden = (hidden[..., ::2].clamp(max=1.0) * hidden[..., 1::2].sigmoid()).repeat(1, 2)
        if self.mixes:
            hidden = hidden + hidden.cumsum(0)
        out = torch._grouped_mm(hidden, self.down, offs=ends) * scores.reshape(-1)[order.indices].unsqueeze(-1)
        back = torch.empty_like(order.indices)
        back[order.indices] = torch.arange(order.indices.shape[0])
        y = out[back].view(x.shape[0], 2, 6).sum(1)
        return nn.functional.mse_loss(y, target)


def _batch() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 6), "target": torch.randn(8, 6)}


def sorted_experts() -> nn.Module:
    return Sorted()


def biased_experts() -> nn.Module:
    return Sorted(biased=True)


def mixing_experts() -> nn.Module:
    return Sorted(mixes=True)


@pytest.mark.parametrize(("mesh", "microbatches"), [("2x2", 2), ("tp=2", 1), ("pp=1,dp=4,tp=1", 2)])
def test_sorted_experts_equal_one_device(mesh: str, microbatches: int) -> None:
    package = partc.compile(sorted_experts, _batch(), mesh=mesh, microbatches=microbatches, precision="fp64")
    ops = {op.name for region in package.program.regions for op in region.forward.ops}
    assert "expert_matmul" in ops and not {"sort", "histc", "index_put"} & ops
    assert package.verify(steps=2).ok


def test_biases_and_strided_gates_of_sorted_experts() -> None:
    package = partc.compile(biased_experts, _batch(), mesh="2x2", microbatches=2, precision="fp64")
    ops = {op.name for region in package.program.regions for op in region.forward.ops}
    assert "expert_matmul" in ops and not {"sort", "histc"} & ops
    assert package.verify(steps=2).ok


def test_what_mixes_rows_keeps_its_sort() -> None:
    package = partc.compile(mixing_experts, _batch(), mesh="1", precision="fp64")
    ops = {op.name for region in package.program.regions for op in region.forward.ops}
    assert "sort" in ops and "expert_matmul" not in ops
