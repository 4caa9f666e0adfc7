"""Logits in chunks: the text, the numbers against PyTorch's own loss, memory, and refusals."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.nn import functional as F

import partc
from partc.errors import PartcError
from partc.ir.printer import print_region
from partc.ir.program import Program
from partc.ir.verifier import verify_program
from partc.passes.chunk import chunk
from partc.runtime.ops import functional
from tests.cost.test_memory import TOLD, alone
from tests.programs import fused_graph
from tests.zoo import MODELS

SHIFTED = Path(__file__).parents[1] / "models" / "shifted.py"


def _text(program: Program) -> str:
    return print_region(program.regions[0])


def test_whole_losses(head: Program) -> None:
    done = chunk(head, loss_chunks=2)
    verify_program(done, frozenset({"plain"}), "chunk")
    assert_expected_inline(
        _text(done),
        """\
region main phase microbatch:
  param w: f32[6, 4]
  forward:
    input x: f32[8, 4]
    input labels: i64[8]
    nll_max, nll_sums, nll_picked = linear_cross_entropy(x, w, None, labels, None, chunks=2)             # f32[8] ; f32[8] ; f32[8]
    lse                           = log_sum_exp(nll_max, nll_sums)                                       # f32[8]
    nll                           = cross_entropy_rows(lse, nll_picked, labels, None, -100, 0.0, None, 6)  # f32[8]
    loss                          = sum(nll, (0,))                                                       # f32[]
    return loss
  saved x, labels, lse
  backward:
    input grad_loss: f32[]
    input x: f32[8, 4]
    input labels: i64[8]
    input lse: f32[8]
    g              = expand(grad_loss, (8,))                                                             # f32[8]
    grad_x, grad_w = linear_cross_entropy_backward(g, x, w, None, labels, lse, None, -100, 0.0, chunks=2)  # f32[8, 4] ; f32[6, 4]
    return grad_x, grad_w
""",
    )


@pytest.fixture
def head() -> Program:
    return fused_graph("""
  param w: f32[6, 4]
  forward:
    input x: f32[8, 4]
    input labels: i64[8]
    logits = linear(x, w)  # f32[8, 6]
    nll, lse = cross_entropy(logits, labels, None, -100, 0.0)  # f32[8] ; f32[8]
    loss = sum(nll, (0,))  # f32[]
    return loss
  saved logits, labels, lse, x
  backward:
    input grad_loss: f32[]
    input logits: f32[8, 6]
    input labels: i64[8]
    input lse: f32[8]
    input x: f32[8, 4]
    g = expand(grad_loss, (8,))  # f32[8]
    d = cross_entropy_backward(g, logits, labels, lse, None, -100, 0.0)  # f32[8, 6]
    grad_x = linear_grad_input(d, w)  # f32[8, 4]
    grad_w = linear_grad_weight(d, x)  # f32[6, 4]
    return grad_x, grad_w
""")


def test_a_loss_over_classes_that_are_cut() -> None:
    program = partc.compile(SHIFTED, mesh="tp=2", options={"bias": False, "smoothing": 0.0}, loss_chunks=4).program
    text = print_region(next(region for region in program.regions if "head" in region.name or region.params))
    assert_expected_inline(
        "\n".join(line[:100].rstrip() for line in text.splitlines() if "cross" in line or "nll" in line),
        """\
    nll_max_partial, nll_sums_partial_own, nll_picked_partial = linear_cross_entropy(add_full_rows,
    nll_max                          = all_reduce(nll_max_partial, op="max", axis="tp")
    nll_sums_partial_below           = sub(nll_max_partial, nll_max)
    nll_sums_partial_factor          = exp(nll_sums_partial_below)
    nll_sums_partial                 = mul(nll_sums_partial_own, nll_sums_partial_factor)
    nll_sums_and_nll_picked_partial  = cat((nll_sums_partial, nll_picked_partial), 0)
    nll_sums_and_nll_picked          = all_reduce(nll_sums_and_nll_picked_partial, axis="tp")
    nll_sums, nll_picked             = split(nll_sums_and_nll_picked, (8, 8), 0)
    nll_lse                          = log_sum_exp(nll_max, nll_sums)
    nll                              = cross_entropy_rows(nll_lse, nll_picked, slice_2, None, -100,
    nll_sum                          = sum(nll, (0, 1))
    loss                             = div(nll_sum, count)
  saved count, add_full_rows, slice_2, nll_lse, tanh, embed, ids
    input nll_lse: f32[8, 11]
    grad_nll_sum                     = div(grad_loss, count)
    grad_nll_1                       = reshape(grad_nll_sum, (1,))
    grad_nll_2                       = reshape(grad_nll_1, (1, 1))
    grad_nll                         = expand(grad_nll_2, (8, 11))
    grad_add_full_rows, grad_head.weight = linear_cross_entropy_backward(grad_nll, add_full_rows, he""",
    )


@pytest.mark.parametrize("chunks", [1, 3, 7, 50])
@pytest.mark.parametrize(
    ("smoothing", "weighted", "bias"), [(0.0, False, False), (0.1, False, True), (0.2, True, True)]
)
def test_chunks_make_what_whole_logits_do(chunks: int, smoothing: float, weighted: bool, bias: bool) -> None:
    torch.manual_seed(chunks)
    x = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    b = torch.randn(6, dtype=torch.float64, requires_grad=True) if bias else None
    classes = torch.rand(6, dtype=torch.float64) if weighted else None
    labels = torch.randint(0, 6, (3, 5))
    labels[1, 2] = -100
    logits = F.linear(x, w, b).view(-1, 6)
    expected = F.cross_entropy(logits, labels.view(-1), classes, reduction="none", label_smoothing=smoothing)
    share = torch.rand(15, dtype=torch.float64)
    expected.backward(share)

    with torch.no_grad():
        most, sums, picked, *smooth = functional.linear_cross_entropy(
            x, w, labels, chunks=chunks, bias=b, smooth=bool(smoothing), class_weight=classes
        )
        lse = functional.log_sum_exp(most, sums)
        nll = functional.cross_entropy_rows(lse, picked, labels, classes, -100, smoothing, *smooth, num_classes=6)
        given: dict[str, Any] = {"chunks": chunks, "bias": b, "class_weight": classes, "label_smoothing": smoothing}
        grads = functional.linear_cross_entropy_backward(
            share.view(3, 5), x, w, labels, lse, bias_trained=bias, **given
        )
        into, bias_into = torch.ones_like(w), torch.ones(6, dtype=torch.float64)
        grad_x = functional.linear_cross_entropy_add_grad(
            into, share.view(3, 5), x, w, labels, lse, bias_into=bias_into if bias else None, **given
        )
    torch.testing.assert_close(nll.view(-1), expected.detach())
    for mine, theirs in zip(grads, (x, w, *([] if b is None else [b])), strict=True):
        torch.testing.assert_close(mine, theirs.grad)
    torch.testing.assert_close((grad_x, into - 1), (x.grad, w.grad))
    if b is not None:
        torch.testing.assert_close(bias_into - 1, b.grad)


def test_parts_of_the_classes_are_combined_even_where_none_of_them_is_the_models() -> None:
    torch.manual_seed(0)
    x, w, labels = torch.randn(5, 4).double(), torch.randn(6, 4).double(), torch.tensor([0, 3, 2, 1, 0])
    mask = torch.tensor([0.0, 0, 0, 0, -torch.inf, -torch.inf]).double()

    def part(rank: int) -> list[Tensor]:
        here = slice(2 * rank, 2 * rank + 2)
        return functional.linear_cross_entropy(x, w[here], labels, chunks=2, bias=mask[here], offset=2 * rank)

    most, sums, picked = (torch.stack(found) for found in zip(*map(part, range(3)), strict=True))
    top = most.amax(0)
    lse = functional.log_sum_exp(top, (sums * (most - top).exp()).sum(0))
    expected = F.cross_entropy(F.linear(x, w, mask), labels, reduction="none")
    torch.testing.assert_close(lse - picked.sum(0), expected)


def test_no_rows() -> None:
    w, labels = torch.randn(6, 4), torch.zeros(0, dtype=torch.int64)
    found = functional.linear_cross_entropy(torch.zeros(0, 4), w, labels, chunks=3)
    assert [x.shape for x in found] == [(0,)] * 3
    grads = functional.linear_cross_entropy_backward(
        torch.zeros(0), torch.zeros(0, 4), w, labels, torch.zeros(0), chunks=3
    )
    assert [x.abs().sum() for x in grads] == [0, 0]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, {"mesh": "1x2x2", "microbatches": 2}),
        ({"weighted": True}, {"mesh": "1x1x2", "zero": 0}),
        ({"weighted": True, "bias": False}, {"mesh": "1x2x1", "zero": 3, "recompute": "full"}),
        ({"smoothing": 0.0}, {"mesh": "1x2x1", "zero": 1}),
        ({"smoothing": 0.0, "vocabulary": 37}, {"mesh": "1x1x2", "kernels": "triton"}),
        ({"weighted": True}, {"mesh": "1x2x2", "microbatches": 2, "kernels": "triton"}),
        ({"weighted": True, "smoothing": 0.0, "bias": False}, {"mesh": "1", "kernels": "triton"}),
    ],
)
def test_equal_to_one_device(options: dict[str, Any], more: dict[str, Any]) -> None:
    package = partc.compile(SHIFTED, options=options, precision="fp64", loss_chunks=3, **{"kernels": "aten", **more})
    found = package.verify(virtual=True, steps=1)
    assert found.ok and found.worst.rel_err < 1e-12


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", ["gpt", "gpt2", "bert", "t5", "gemma", "mixtral"])
@pytest.mark.parametrize(
    ("mesh", "more"),
    [("1x2x2", {}), ("2x1x2", {"schedule": "zero-bubble"}), ("1x2x2", {"zero": 3, "recompute": "selective"})],
)
def test_models_in_chunks(name: str, mesh: str, more: dict[str, Any], tmp_path: Path) -> None:
    model = MODELS[name]
    given = {"options": model.options, "precision": "fp64", "kernels": "aten", **more}
    package = partc.compile(model.source(tmp_path), mesh=mesh, microbatches=2, loss_chunks=3, **given)
    found = package.verify(virtual=True)
    assert found.ok and found.worst.rel_err < 1e-10


@pytest.mark.slow
def test_the_memory_of_a_head_that_is_not_trained(tmp_path: Path) -> None:
    frozen = "self.head.requires_grad_(False)\n        self.register_buffer("
    text = APART.replace("self.register_buffer(", frozen).replace("9", "4000")
    (tmp_path / "m.py").write_text(text)
    package = partc.compile(tmp_path / "m.py", mesh="1", loss_chunks=4, kernels="aten")
    assert package.memory is not None
    assert alone(package.write(tmp_path / "b")) == package.memory.worst.peak


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["aten", "triton"])
def test_less_memory_to_the_byte(tmp_path: Path, kernels: str) -> None:
    options = {"vocabulary": 4000, "seq": 16}
    given = {"mesh": "1", "options": options, "kernels": kernels}
    whole, parts = (partc.compile(SHIFTED, loss_chunks=n, **given) for n in (1, 8))
    assert whole.memory is not None and parts.memory is not None
    logits = 8 * 15 * 4000 * 4
    assert parts.memory.worst.peak < whole.memory.worst.peak - 1.5 * logits
    assert alone(parts.write(tmp_path / "b")) - parts.memory.worst.peak in (TOLD if kernels == "triton" else [0])


def test_rows_for_kernels_begin_at_lines_of_memory() -> None:
    """Logits of 37 classes, as their product makes them: in 16 bits, in the same memory for every chunk."""
    seen: list[Tensor] = []
    kernels: Any = SimpleNamespace(gradient_=lambda grad, logits, *rest: seen.append(logits))
    x, w = torch.randn(10, 4).bfloat16(), torch.randn(37, 4).bfloat16()
    row, labels = torch.zeros(10), torch.zeros(10, dtype=torch.int64)
    functional.linear_cross_entropy_backward(row, x, w, labels, row, chunks=3, kernels=kernels)
    assert [(logits.shape, logits.dtype, logits.stride()) for logits in seen] == [
        ((rows, 37), torch.bfloat16, (64, 1)) for rows in (4, 3, 3)
    ]
    assert len({logits.data_ptr() for logits in seen}) == 1


def test_what_is_not_made_in_chunks_beside_others_is_told(tmp_path: Path) -> None:
    text = SHIFTED.read_text().replace("self.head(h + self.mix(h).tanh())", "self.head(h + self.mixed(h))")
    text = (
        text.replace("def model(", "def first(").replace("def loss(", "def alone(")
        + """

class Two(Bigrams):
    def mixed(self, h):
        self.other = self.mix(h).tanh()
        return self.other


def model():
    return Two(40, 16, True, 0.1, False)


def loss(model, batch):
    return alone(model, batch) + nn.functional.cross_entropy(model.other.flatten(0, 1), batch["ids"].flatten() % 16)
"""
    )
    (tmp_path / "m.py").write_text(text)
    place = 1 + text.splitlines().index("        return self.head(h + self.mixed(h))")
    (told,) = partc.compile(tmp_path / "m.py", mesh="2", loss_chunks=2).warnings
    assert told.endswith("tanh stands between it and the product that makes its logits")
    assert f"m.py:{place}: a loss is computed from whole logits, not in 2 chunks" in told
    assert partc.compile(SHIFTED, mesh="2", loss_chunks=2).warnings == ()


@pytest.mark.parametrize(
    ("model", "chunks", "cause"),
    [("mlp", 2, "has no cross-entropy"), ("dlrm", 2, "has no cross-entropy"), ("gpt", 0, "--loss-chunks 0")],
)
def test_what_cannot_be_chunked_is_refused(model: str, chunks: int, cause: str) -> None:
    file = MODELS[model].file
    assert file is not None
    with pytest.raises(PartcError, match=cause) as error:
        partc.compile(file, mesh="2", loss_chunks=chunks)
    assert error.value.code == "P0418"


def test_what_reads_the_logits_too_is_named(tmp_path: Path) -> None:
    text = (
        SHIFTED.read_text()
        .replace("logits, labels = model", "whole, labels = model")
        .replace("[:, :-1].contiguous(), batch", ", batch")
        .replace("    weight =", "    logits = whole[:, :-1]\n    labels = labels\n    weight =")
    )
    text = text.replace(
        "label_smoothing=model.smoothing\n    )", "label_smoothing=model.smoothing\n    ) + whole.square().mean()"
    )
    (tmp_path / "m.py").write_text(text)
    with pytest.raises(PartcError, match="something else reads its logits too") as error:
        partc.compile(tmp_path / "m.py", mesh="2", loss_chunks=2)
    assert error.value.source is not None and error.value.source.file.endswith("m.py")


APART = """
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(9, 6), nn.RMSNorm(6), nn.Linear(6, 9)
        self.register_buffer("classes", torch.linspace(0.2, 3, 9))

    def forward(self, ids):
        return self.head(self.norm(self.embed(ids)))


def model():
    return Net()


def batch():
    return {"ids": torch.randint(0, 9, (4, 5)), "labels": torch.randint(0, 9, (4, 5))}


def loss(model, batch):
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), weight=model.classes)
"""


def test_a_loss_with_class_weights_stays_with_its_head(tmp_path: Path) -> None:
    """On pipelines too, where regions are what is inside the model."""
    (tmp_path / "m.py").write_text(APART)
    program = partc.compile(tmp_path / "m.py", mesh="pp=2", microbatches=2, loss_chunks=2).program
    assert "linear_cross_entropy" in {op.name for op in program.regions[-1].forward.ops}


@pytest.mark.parametrize("mesh", ["tp=3", "pp=2"])
def test_classes_in_the_second_dimension_are_chunked(mesh: str, tmp_path: Path) -> None:
    flat = 'model(batch["ids"]).flatten(0, 1), batch["labels"].flatten()'
    assert flat in APART
    (tmp_path / "m.py").write_text(APART.replace(flat, 'model(batch["ids"]).transpose(1, 2), batch["labels"]'))
    package = partc.compile(tmp_path / "m.py", mesh=mesh, microbatches=2, loss_chunks=2, precision="fp64")
    assert "linear_cross_entropy" in {op.name for op in package.program.regions[-1].forward.ops}
    found = package.verify(virtual=True, steps=1)
    assert found.ok and found.worst.rel_err < 1e-12


@pytest.mark.parametrize("kernels", ["aten", "triton"])
@pytest.mark.parametrize("mesh", ["dp=2", "tp=3", "pp=2"])
def test_a_head_that_is_not_trained(mesh: str, kernels: str, tmp_path: Path) -> None:
    """Its products are two thirds of those of a trained head; its gradient has no memory."""
    frozen = APART.replace(
        "        self.register_buffer(", "        self.head.requires_grad_(False)\n        self.register_buffer("
    )
    (tmp_path / "m.py").write_text(frozen)
    given: dict[str, Any] = {"mesh": mesh, "microbatches": 2, "precision": "fp64", "kernels": kernels}
    package = partc.compile(tmp_path / "m.py", loss_chunks=3, **given)
    backward = package.program.regions[-1].backward
    assert backward is not None
    assert "linear_cross_entropy_grad_input" in {op.name for op in backward.ops}
    found = package.verify(virtual=True, steps=2)
    assert found.ok and found.worst.rel_err < 1e-12


def test_a_bias_whose_weight_is_not_trained_is_named(tmp_path: Path) -> None:
    frozen = "self.head.weight.requires_grad_(False)\n        self.register_buffer("
    (tmp_path / "m.py").write_text(APART.replace("self.register_buffer(", frozen))
    with pytest.raises(PartcError, match="the bias of its head is trained, but not the weight"):
        partc.compile(tmp_path / "m.py", mesh="2", loss_chunks=2)


def test_a_head_elsewhere_is_named(tmp_path: Path) -> None:
    text = APART.replace("nn.Linear(6, 9)", "nn.Linear(6, 9)\n        self.scale = nn.Parameter(torch.ones(9))")
    text = text.replace("weight=model.classes)", "weight=model.classes) + model.scale.sum()")
    (tmp_path / "m.py").write_text(text)
    with pytest.raises(PartcError, match="its logits come from another region, or stage"):
        partc.compile(tmp_path / "m.py", mesh="pp=2", microbatches=2, loss_chunks=2)
