"""Traceable forms, such as that of connectionist temporal classification, against torch's functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partc
from partc import passes
from partc.errors import PartcError
from partc.frontend.trace import trace_model
from partc.frontend.traceable_forms.alignments import ctc_loss
from partc.frontend.traceable_forms.functions import (
    affine_grid,
    circular_padding,
    combinations,
    correlation,
    covariance,
    dense_by_places,
    dense_by_rows,
    fake_quantized,
    least_squares,
    one_hot,
    traceable_form,
)
from partc.ir.interpreter import evaluate_program
from partc.ir.mesh import Mesh

MODEL = """
import torch
from torch import nn

class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.out = nn.Conv1d(5, 8, 3, padding=1), nn.Linear(8, 7)
        self.loss = nn.CTCLoss(zero_infinity=True)
    def forward(self, x, labels, frames, lengths):
        scores = self.out(self.up(x).relu().transpose(1, 2)).log_softmax(-1)
        return self.loss(scores.transpose(0, 1), labels, frames, lengths)

def model(): return Speech()
def batch():
    return {"x": torch.randn(8, 5, 12), "labels": torch.randint(1, 7, (8, 4)),
            "frames": torch.randint(6, 13, (8,)), "lengths": torch.randint(0, 5, (8,))}
"""


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("form", ["padded", "in a row", "numbers", "impossible", "no logarithms"])
def test_losses_and_gradients_equal_those_of_torch(form: str, reduction: str) -> None:
    torch.manual_seed(0)
    scores = torch.randn(9, 6, 5, dtype=torch.float64)
    scores = scores if form == "no logarithms" else scores.log_softmax(-1)
    lengths = torch.tensor([3, 0, 1, 4, 2, 3])
    frames = torch.tensor([9, 5, 7, 9, 6, 1 if form == "impossible" else 8])
    labels = torch.randint(1, 5, (6, 4))
    labels[0, :2] = 1  # a repeated label, between which a blank must stand
    if form == "in a row":
        labels = torch.cat([row[:length] for row, length in zip(labels, lengths, strict=True)])
    given = (frames.tolist(), lengths.tolist()) if form == "numbers" else (frames, lengths)
    found: list[tuple[Tensor, Tensor]] = []
    for function in (F.ctc_loss, ctc_loss):
        x = scores.clone().requires_grad_()
        loss = function(x, labels, *given, reduction=reduction, zero_infinity=form == "impossible")
        (slope,) = torch.autograd.grad(loss.sum(), x)
        found.append((loss, slope))
    for mine, torchs in zip(*found, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-11, atol=1e-12)


def test_a_label_that_fits_no_alignment_is_infinite() -> None:
    scores = torch.zeros(2, 1, 3, dtype=torch.float64).log_softmax(-1)
    given = (scores, torch.tensor([[1, 1]]), torch.tensor([2]), torch.tensor([2]))
    assert ctc_loss(*given).isinf() and F.ctc_loss(*given).isinf()


class Aligned(nn.Module):
    def __init__(self, frames: int) -> None:
        super().__init__()
        self.out, self.frames = nn.Linear(4, 5), frames

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scores = self.out(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, labels, torch.full((2,), self.frames), [3, 2])


@pytest.mark.parametrize(("frames", "guards"), [(9, 0), (10, 1)])
def test_constant_lengths_that_fit_are_no_guard(frames: int, guards: int) -> None:
    batch = {"x": torch.randn(2, 9, 4), "labels": torch.ones(2, 3, dtype=torch.long)}
    traced = trace_model(lambda: Aligned(frames), lambda: batch, name="m", mesh=Mesh.parse("1"))
    assert len(traced.assumed) == guards


@pytest.mark.parametrize("a", [(6, 3), (4, 4), (2, 5), (2, 6, 3)])
@pytest.mark.parametrize("columns", [(), (2,)])
def test_least_squares(a: tuple[int, ...], columns: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    given = [torch.randn(a, dtype=torch.float64), torch.randn(*a[:-1], *columns, dtype=torch.float64)]
    found = []
    for function in (torch.linalg.lstsq, least_squares):
        operands = [x.clone().requires_grad_() for x in given]
        result = function(*operands)
        slopes = torch.autograd.grad(result.solution.sin().sum(), operands)
        found.append((result.solution, result.residuals, result.rank.long(), result.singular_values, *slopes))
    for mine, torchs in zip(*found, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-11, atol=1e-11)


def test_sparse_matrices() -> None:
    """Two values of one place are added; a vector may stand at each place of the matrix."""
    places, starts, columns = torch.tensor([[0, 2, 2], [1, 0, 0]]), torch.tensor([0, 1, 1, 3]), torch.tensor([1, 0, 1])
    x = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    wide = x[:, None] * torch.ones(2)
    assert torch.equal(dense_by_places(places, x, (3, 2)), torch.sparse_coo_tensor(places, x, (3, 2)).to_dense())
    assert torch.equal(
        dense_by_places(places, wide, (3, 2, 2)), torch.sparse_coo_tensor(places, wide, (3, 2, 2)).to_dense()
    )
    assert torch.equal(
        dense_by_rows(starts, columns, x, (3, 2)), torch.sparse_csr_tensor(starts, columns, x, (3, 2)).to_dense()
    )


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.weights = nn.Linear(2, 3), nn.Parameter(torch.tensor([0.5, 2.0, 1.0, -1.0]))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        edges = torch.sparse_coo_tensor(ends, self.weights, (4, 4)).coalesce()
        return torch.sparse.mm(edges, self.line(x)).sin().sum() + (edges @ x).square().sum()


def test_a_graph_s_edges() -> None:
    net, x, ends = Graph().double(), torch.randn(4, 2).double(), torch.tensor([[0, 1, 2, 2], [3, 0, 0, 0]])
    batch = {"x": x, "ends": ends}
    traced = trace_model(Graph, lambda: batch, name="m", mesh=Mesh.parse("1"), precision="fp64")
    program = passes.run(traced.program, {}, until="normalize")[-1].program
    assert evaluate_program(program, batch, dict(net.named_parameters())).item() == pytest.approx(net(x, ends).item())


@pytest.mark.parametrize("labels", ["padded", "in a row"])
def test_a_package_aligns_like_one_device(labels: str, tmp_path: Path) -> None:
    text = MODEL
    if labels == "in a row":
        text = MODEL.replace("labels, frames, lengths)\n\n", "labels.masked_select(kept), frames, kept.sum(-1))\n\n")
        text = text.replace("        scores =", "        kept = labels > 2\n        scores =")
    (tmp_path / "speech.py").write_text(text)
    package = partc.compile(str(tmp_path / "speech.py"), mesh="dp=2,tp=2", precision="fp64")
    assert sum(op.name == "scan" for region in package.program.regions for op in region.forward.ops) == 1
    assert package.verify(steps=2).ok


def test_covariances_equal_those_of_torch() -> None:
    x = torch.randn(4, 9, dtype=torch.float64)
    for each in (x, x[0]):
        torch.testing.assert_close(covariance(each), torch.cov(each))
        torch.testing.assert_close(correlation(each), torch.corrcoef(each))
    torch.testing.assert_close(covariance(x, correction=0), torch.cov(x, correction=0))


@pytest.mark.parametrize("size", [(2, 3, 4, 5), (2, 3, 1, 4), (2, 1, 3, 2, 4)])
@pytest.mark.parametrize("align_corners", [True, False])
def test_grids_equal_those_of_torch(size: tuple[int, ...], align_corners: bool) -> None:
    dims = len(size) - 2
    theta = torch.randn(2, dims, dims + 1, dtype=torch.float64)
    found = []
    for function in (F.affine_grid, affine_grid):
        leaf = theta.clone().requires_grad_()
        made = function(leaf, list(size), align_corners=align_corners)
        found += [made, *torch.autograd.grad(made.sin().sum(), leaf)]
    torch.testing.assert_close(found[:2], found[2:], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(("r", "again"), [(2, False), (3, False), (2, True), (7, False), (0, False)])
def test_combinations_equal_those_of_torch(r: int, again: bool) -> None:
    x = torch.randn(6, dtype=torch.float64)
    assert torch.equal(combinations(x, r, with_replacement=again), torch.combinations(x, r, with_replacement=again))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fake_quantization_equals_that_of_torch(dtype: torch.dtype) -> None:
    x = torch.linspace(-3, 12, 301, dtype=dtype)
    found: list[Tensor] = []
    for function in (torch.fake_quantize_per_tensor_affine, fake_quantized):
        leaf = x.clone().requires_grad_()
        made = function(leaf, 0.05, 3, 0, 200)
        made.square().sum().backward()
        assert leaf.grad is not None
        found += [made.detach(), leaf.grad]
    torch.testing.assert_close(found[:2], found[2:], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("shape", "pad"), [((2, 3, 5), (2, 5)), ((2, 3, 5, 4), (1, 2, 0, 3)), ((2, 3, 2, 5, 4), (4, 0, 0, 0, 1, 2))]
)
def test_circular_padding_equals_that_of_torch(shape: tuple[int, ...], pad: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    found: list[Tensor] = []
    for function in (F.pad, circular_padding):
        leaf = x.clone().requires_grad_()
        made = function(leaf, pad, mode="circular")
        found += [made, *torch.autograd.grad(made.sin().sum(), leaf)]
    torch.testing.assert_close(found[:2], found[2:], rtol=0, atol=0)
    assert circular_padding(x, (1, 1)) is NotImplemented
    assert circular_padding(x, (9, 0, *pad[2:]), "circular") is NotImplemented, "torch says what is wrong"


def test_the_first_classes_of_one_hot_need_no_number_of_classes() -> None:
    """With a tensor for this number, torch reads its value."""
    labels = torch.randint(0, 9, (3, 4), generator=torch.Generator().manual_seed(2))
    made = one_hot(labels, torch.tensor(9))
    for count in (1, 5, 9):
        torch.testing.assert_close(made[..., :count], F.one_hot(labels, torch.tensor(9))[..., :count])
    assert one_hot(labels) is one_hot(labels, 9) is NotImplemented


class Counted(nn.Module):
    def __init__(self, read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.up, self.read = nn.Linear(6, 6), read

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        chosen = h.argmax(-1)
        return (h * self.read(F.one_hot(chosen, max(chosen.max() + 1, 6)))).square().mean()


def test_all_classes_of_one_hot_need_a_number() -> None:
    """The error named a branch, and advised torch.where."""
    batch = lambda: {"x": torch.rand(8, 6)}  # noqa: E731
    traced = trace_model(lambda: Counted(lambda x: x[..., :6]), batch, name="counted", mesh=Mesh.parse("dp=2"))
    [sentence] = traced.assumed
    assert "`tensor < num_classes" in sentence
    for read in (lambda x: x, lambda x: x.float(), lambda x: x[0], lambda x: x[0, :6], lambda x: x[..., 2:6]):
        with pytest.raises(PartcError, match="number of classes of one_hot") as caught:
            trace_model(lambda read=read: Counted(read), batch, name="counted", mesh=Mesh.parse("dp=2"))
        assert caught.value.code == "P0206" and caught.value.source is not None


CALLS = {
    "bincount": (torch.bincount, {"input": torch.tensor([1, 2, 1]), "weights": torch.rand(3), "minlength": 4}),
    "combinations": (torch.combinations, {"input": torch.rand(4), "r": 3, "with_replacement": True}),
    "corrcoef": (torch.corrcoef, {"input": torch.rand(2, 5)}),
    "cov": (torch.cov, {"input": torch.rand(2, 5), "correction": 0}),
    "fake_quantize_per_tensor_affine": (
        torch.fake_quantize_per_tensor_affine,
        {"input": torch.rand(9), "scale": 0.1, "zero_point": 3, "quant_min": 0, "quant_max": 9},
    ),
    "gaussian_nll_loss": (F.gaussian_nll_loss, {"input": torch.rand(3), "target": torch.rand(3), "var": torch.ones(3)}),
    "linalg_lstsq": (torch.linalg.lstsq, {"input": torch.rand(4, 2), "b": torch.rand(4, 1)}),
    "multi_margin_loss": (F.multi_margin_loss, {"input": torch.rand(3, 4), "target": torch.tensor([1, 0, 2])}),
    "multilabel_margin_loss": (
        F.multilabel_margin_loss,
        {"input": torch.rand(1, 4), "target": torch.tensor([[1, 0, -1, 2]])},
    ),
    "pad": (F.pad, {"input": torch.rand(1, 2, 5), "pad": (1, 2), "mode": "circular"}),
    "sparse_coo_tensor": (
        torch.sparse_coo_tensor,
        {"indices": torch.tensor([[0, 1]]), "values": torch.rand(2), "size": (3,)},
    ),
    "sparse_csr_tensor": (
        torch.sparse_csr_tensor,
        {
            "crow_indices": torch.tensor([0, 1, 2]), "col_indices": torch.tensor([1, 0]),
            "values": torch.rand(2), "size": (2, 2),
        },
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", CALLS)
def test_forms_take_the_keywords_of_torch(name: str) -> None:
    function, named = CALLS[name]
    found, expected = traceable_form(name, (), named), function(**named)  # type: ignore[operator]
    if isinstance(found, tuple):
        found, expected = found[0], expected[0]
    torch.testing.assert_close(found, expected.to_dense() if expected.layout is not torch.strided else expected)
