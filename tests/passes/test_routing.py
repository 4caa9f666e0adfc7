"""Sorting by expert is removed from a model, and products by expert equal a loop over experts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.errors import PartcError
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
@pytest.mark.parametrize("ordered", [False, True])
def test_products_by_expert_and_their_gradients(rows: int, ordered: bool) -> None:
    x, chosen, w = _case(rows)
    chosen = chosen.sort().values if ordered else chosen
    x.requires_grad_(), w.requires_grad_()
    expected = torch.stack([row @ w[expert] for row, expert in zip(x, chosen, strict=True)])
    grad = torch.randn_like(expected)
    expected.backward(grad)
    with torch.no_grad():
        how = {"ordered": ordered}
        torch.testing.assert_close(experts.expert_matmul(x, chosen, w, **how), expected)
        torch.testing.assert_close(experts.expert_matmul_grad_rows(grad, chosen, w, **how), x.grad)
        torch.testing.assert_close(experts.expert_matmul_grad_weight(grad, chosen, x, 4, **how), w.grad)


def test_rows_without_an_expert_stay_and_are_zero() -> None:
    x, chosen, w = _case()
    none = torch.arange(len(x)) % 3 == 0
    order, _, own, counts = experts.route(chosen.masked_fill(none, 4), 4, Axis(), stay=True)
    assert counts.sum(1).tolist() == [len(x) - int(none.sum())] * 2 == [len(own)] * 2
    made = experts.expert_matmul(x, chosen.masked_fill(none, 4), w)
    torch.testing.assert_close(made, experts.expert_matmul(x, chosen, w).masked_fill(none[:, None], 0))
    assert none[order[len(own) :]].all()


def test_loads_of_no_layers_take_no_collective() -> None:
    assert Comm({}, {}).loads.spreads(lambda x, axis: x, pipeline=True) == {}


@pytest.mark.parametrize("number", [4, 7])
def test_an_expert_that_does_not_exist_is_an_error_of_its_layer(number: int) -> None:
    comm = Comm({"ep": Axis()}, {})
    router = PlanRouter(name="layers.3.mlp", experts=4, over=(), stage=2)
    comm.loads.expect([router], [2], torch.device("cpu"), counted=True)
    axis = Axis()
    axis.loads = comm.loads
    comm.loads.enter(2)
    comm.loads.count(torch.tensor([0, number]))
    with pytest.raises(UsageError, match=f"P0552: a row of layers.3.mlp is for number {number}, and its 4 experts"):
        experts.route(torch.tensor([0, number]), 4, axis)


class Sorted(nn.Module):
    """Two experts for each token, whose rows are sorted, multiplied in groups and put back."""

    def __init__(self, *, mixes: bool = False, biased: bool = False, width: int = 8) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4, 8) / 3) if biased else None
        self.router = nn.Linear(6, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, 6, width) / 3)
        self.down = nn.Parameter(torch.randn(4, width, 6) / 3)
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


def narrow_experts() -> nn.Module:
    return Sorted(width=4)


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


@pytest.mark.parametrize("mesh", ["dp=2,ep=2", "dp=2,tp=2"])
def test_scores_multiply_rows_where_they_are_narrow(mesh: str) -> None:
    """The gradient of the scores then needs no wide results of the experts."""
    package = partc.compile(narrow_experts, _batch(), mesh=mesh, precision="fp64")
    (region,) = (each for each in package.program.regions if each.backward is not None)
    products = [op for op in region.forward.ops if op.name == "expert_matmul"]
    makers, rows = region.forward.makers(), next(products[-1].refs())
    assert makers[rows].name == "mul"
    wide = [name for name in region.saved if name in makers and makers[name].name in ("combine", "expert_matmul")]
    assert all(region.types(region.forward)[name].shape[1] == 4 for name in wide)
    assert package.verify(steps=2).ok


PARTS = Path(__file__).parents[1] / "models" / "parts.py"


@pytest.mark.parametrize(
    "style",
    [
        "split",
        pytest.param("ones", marks=pytest.mark.slow),
        pytest.param("scattered", marks=pytest.mark.slow),
        "placed",
        "listed",
        "ends",
        "ends of all",
    ],
)
def test_rows_that_counts_divide_are_experts(style: str) -> None:
    """Experts on parts of sorted rows, whose sizes a model lists: x.split(counts.tolist()), x[start : start + count]."""
    package = partc.compile(PARTS, mesh="dp=2,ep=2", microbatches=2, precision="fp64", options={"style": style})
    ops = {op.name for region in package.program.regions for op in region.forward.ops}
    assert {"expert_matmul", "route"} <= ops and not {"sort", "argsort", "repeat_interleave", "index_put"} & ops
    assert package.verify(steps=2).ok


WRITTEN = PARTS.with_name("written_experts.py")


@pytest.mark.parametrize(
    "style", ["batched", "hashed", "selected", "einsum", "broadcast", "first", "grouped", "added", "cast", "written"]
)
def test_experts_as_libraries_write_them_travel(style: str) -> None:
    package = partc.compile(WRITTEN, mesh="dp=2,ep=2", microbatches=2, precision="fp64", options={"style": style})
    ops = [op.name for region in package.program.regions for op in region.forward.ops]
    moved = ops.count("dispatch"), ops.count("expert_matmul"), ops.count("combine")
    assert moved == (1, 2, 1) and not {"sort", "argsort", "index", "gather", "scatter_add", "index_put"} & {*ops}
    assert package.verify(steps=2).ok


@pytest.mark.parametrize("mesh", ["1", "ep=2"])
def test_rows_of_two_choices_meet_in_their_own_places(mesh: str) -> None:
    package = partc.compile(WRITTEN, mesh=mesh, precision="fp64", options={"style": "crossed"})
    assert package.verify(steps=2).ok


@pytest.mark.parametrize("style", ["guarded", "limited", "skipping"])
def test_guards_against_experts_that_no_row_has_are_dropped(style: str) -> None:
    options = {"style": style}
    package = partc.compile(WRITTEN, mesh="dp=2", experts="ep=2@dp", microbatches=2, precision="fp64", options=options)
    ops = [op.name for region in package.program.regions for op in region.forward.ops]
    moved = ops.count("dispatch"), ops.count("expert_matmul"), ops.count("combine")
    assert moved == (1, 2, 1) and not {"sort", "ge", "clamp"} & {*ops}
    assert ops.count("masked_fill") == (2 if style == "skipping" else 0)
    assert package.verify(steps=2).ok


@pytest.mark.parametrize("style", ["batched", "selected", "einsum"])
def test_no_matrix_is_copied_for_each_row(style: str) -> None:
    package = partc.compile(WRITTEN, mesh="1", options={"style": style})
    shapes = [
        value.type.shape for region in package.program.regions for op in region.forward.ops for value in op.results
    ]
    assert max(math.prod(shape) for shape in shapes) < 64 * 8 * 16


@pytest.mark.parametrize("style", ["grouped", "cast"])
def test_grouped_products_compile_in_bf16(style: str) -> None:
    """The trace holds fp32, which torch's operation does not take."""
    package = partc.compile(WRITTEN, mesh="ep=2", precision="bf16", options={"style": style})
    operands = {
        region.types(region.forward)[name].dtype
        for region in package.program.regions
        for op in region.forward.ops
        if op.name == "expert_matmul"
        for name in op.refs()
    }
    assert operands == {"bf16", "i64"} and package.verify(steps=2).ok


def test_grouped_products_of_other_dtypes_are_refused_as_in_torch() -> None:
    with pytest.raises(PartcError, match="rows and matrices must have the same type") as caught:
        partc.compile(WRITTEN, mesh="ep=2", options={"style": "mixed"})
    assert caught.value.code == "P0206" and caught.value.source is not None


@pytest.mark.parametrize("style", ["first rows", "summed", "turned"])
def test_counts_that_are_no_sizes_of_parts_are_refused(style: str) -> None:
    with pytest.raises(PartcError, match="number of rows that a mask selects, or from listed counts") as caught:
        partc.compile(PARTS, mesh="1", options={"style": style})
    assert caught.value.code == "P0206" and caught.value.source is not None
    assert "parts.py" in caught.value.source.file


@pytest.mark.slow
def test_a_counter_of_the_parts_with_rows_is_refused() -> None:
    with pytest.raises(PartcError, match="where a mask selects nothing it changes mul") as caught:
        partc.compile(PARTS, mesh="1", options={"style": "counted", "layers": 1})
    assert caught.value.code == "P0206"


class Attended(nn.Module):
    """Queries of each token's experts attend to each other before the experts' second products (Shen et al. 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 4, bias=False)
        self.query, self.out = (nn.Parameter(torch.randn(4, 6, 6) / 3) for _ in range(2))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        tokens = x.reshape(-1, 6)
        scores, chosen = self.router(tokens).softmax(-1).topk(2, dim=-1)
        queries = torch.zeros(*chosen.shape, 6)
        for expert in range(4):
            token, slot = torch.where(chosen == expert)
            queries[token, slot] = tokens[token] @ self.query[expert]
        queries = queries.view(x.shape[0], -1, 6)
        mixed = nn.functional.scaled_dot_product_attention(queries, queries, queries).reshape(-1, 2, 6)
        found = torch.zeros_like(tokens)
        for expert in range(4):
            token, slot = torch.where(chosen == expert)
            found.index_add_(0, token, mixed[token, slot] @ self.out[expert] * scores[token, slot, None])
        return nn.functional.mse_loss(found.view_as(x), target)


def test_rows_return_where_products_of_experts_are_mixed_between() -> None:
    batch = {"x": torch.randn(4, 3, 6), "target": torch.randn(4, 3, 6)}
    package = partc.compile(Attended, batch, mesh="ep=2", precision="fp64")
    ops = [op.name for region in package.program.regions for op in region.forward.ops]
    assert ops.count("dispatch") == ops.count("combine") == 2
    assert package.verify(steps=2).ok


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_what_mixes_rows_keeps_its_sort(mesh: str) -> None:
    """Each row's expert follows from the ends of the groups."""
    package = partc.compile(mixing_experts, _batch(), mesh=mesh, precision="fp64")
    ops = [op.name for region in package.program.regions for op in region.forward.ops]
    assert "sort" in ops and ops.count("expert_matmul") == 2 and not any("grouped" in name for name in ops)
    assert package.verify(steps=2).ok
