"""Normalized, simplified and outlined programs equal the eager model; each rewrite is also tested alone."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partc import fuel
from partc.errors import PartcError
from partc.frontend.model_precision import computing_in
from partc.frontend.trace import trace_model
from partc.ir.interpreter import evaluate_program
from partc.ir.layout import Layout
from partc.ir.mesh import Mesh
from partc.ir.program import Graph, Op, Program, Ref, TensorType, Value
from partc.passes.normalize import normalize
from partc.passes.normalize.writes import with_joins
from partc.passes.outline import outline
from partc.passes.simplify import simplify
from partc.settings import Settings

Forward = Callable[..., Tensor]


class Function(nn.Module):
    """A model of one function and a few weights of odd sizes."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(7, 6))
        self.v = nn.Parameter(torch.randn(6))
        self.function = function

    def forward(self, **batch: Tensor) -> Tensor:
        return self.function(self, **batch)


def check(model: nn.Module, batch: Mapping[str, Tensor], loss: Any = None) -> Program:
    """Hold every stage against the eager model in double precision; gives the simplified program."""
    model = model.double()
    doubles = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
    with computing_in(torch.float64):
        given = {name: x.clone() for name, x in doubles.items()}
        out = model(**given) if loss is None else loss(model, given)
    expected = out if isinstance(out, Tensor) else out.loss
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    program = trace_model(
        lambda: copy.deepcopy(model).to("meta"), lambda: batch, loss, name="m", mesh=Mesh.parse("1"), precision="fp64"
    ).program
    for step in (normalize, simplify):
        program = step(program)
        torch.testing.assert_close(evaluate_program(program, doubles, tensors), expected, rtol=1e-12, atol=0)
    outlined = outline(program)
    torch.testing.assert_close(evaluate_program(outlined, doubles, tensors), expected, rtol=1e-12, atol=0)
    return program


def ops(program: Program) -> list[Op]:
    return [op for region in program.regions for op in region.forward.ops]


def names(program: Program) -> list[str]:
    return [op.name for op in ops(program)]


X = {"x": torch.randn(5, 3, 6, generator=torch.Generator().manual_seed(0))}


def quotient(x: Tensor, most: Tensor) -> Tensor:
    """Squares of a softmax of rows, if `most` are their largest numbers."""
    power = torch.exp(x - most)
    return (power / power.sum(-1, keepdim=True)).pow(2).sum()


# Each function's operations after normalize and simplify, the sum that makes a number of it left out.
NORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weight first": lambda w, x: w * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6),
    "a product": lambda w, x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w,
    "a quotient": lambda w, x: x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w,
    "a quotient of the weighted": lambda w, x: (x * w) / ((x**2).sum(-1, keepdim=True) / 6 + 1e-6).sqrt(),
    "without weight": lambda w, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "a quotient without weight": lambda w, x: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6),
    "a power": lambda w, x: w * (x * ((x * x).mean(-1, keepdim=True) + 1e-6) ** -0.5),
}
FUNCTIONS: Mapping[str, tuple[Forward, list[str]]] = {
    "view": (lambda m, x: x.view(5, -1, 2).sin().sum(), ["reshape", "sin"]),
    "meshgrid": (lambda m, x: torch.meshgrid(m.v, m.v.sin())[1].sum(), ["sin", "reshape", "expand"]),
    "meshgrid xy": (
        lambda m, x: math.prod(torch.meshgrid(m.v, x.sum((1, 2)), m.v.sin(), indexing="xy")).sum(),
        ["sum", "sin", *["reshape", "expand"] * 3, "mul", "mul"],
    ),
    "flatten": (lambda m, x: x.flatten(1).unsqueeze(1).squeeze(1).sin().sum(), ["reshape", "sin"]),
    "same view": (lambda m, x: x.view(5, 3, 6).contiguous().sum(), []),
    "transpose": (lambda m, x: x.transpose(-1, 0).sin().sum(), ["permute", "sin"]),
    "t": (lambda m, x: (m.w.t().sin() * 2).sum(), ["permute", "sin", "mul"]),
    "movedim": (lambda m, x: x.movedim((0, 1), (2, 0)).softmax(-1).square().sum(), ["permute", "softmax", "square"]),
    "matrix transpose": (lambda m, x: x.mT.cumsum(-1).sum(), ["permute", "cumsum"]),
    "chunk": (lambda m, x: (lambda a, b: a * b)(*x.chunk(2, -1)).sum(), ["split", "mul"]),
    "unbind": (lambda m, x: (lambda a, b, c: a * b - c)(*x.unbind(1)).sum(), ["split", "mul", "sub"]),
    "broadcast": (lambda m, x: torch.broadcast_to(m.v, (5, *m.v.shape)).cumsum(0).sum(), ["expand", "cumsum"]),
    "one part": (lambda m, x: x.sin().chunk(1, -1)[0].sum(), ["sin"]),
    "one row": (lambda m, x: x.sum(1, keepdim=True).unbind(1)[0].sin().sum(), ["sum", "sin"]),
    "select": (lambda m, x: (x[:, -1] * 3).sum(), ["slice", "mul"]),
    "select of one": (lambda m, x: (x.sum(1, keepdim=True)[:, 0] * 3).sum(), ["sum", "mul"]),
    "slice": (lambda m, x: (x[:, 1:, ::2] * 3).sum(), ["slice", "slice", "mul"]),
    "whole slice": (lambda m, x: x[:, 0:100].sum(), []),
    "stack": (
        lambda m, x: torch.stack([x, x.sin()], -2).cumsum(-2).sum(),
        ["sin", "reshape", "reshape", "cat", "cumsum"],
    ),
    "empty cat": (lambda m, x: torch.cat([x[:0].view(0), x.flatten()]).sin().sum(), ["sin"]),
    "padded rows": (
        lambda m, x: torch.nn.utils.rnn.pad_sequence([x[0], x[1, :2], m.v[None]], True, 0.5, "left").sin().sum(),
        [
            *("slice", "slice", "reshape", "slice", "reshape"),
            *("constant_pad_nd", "constant_pad_nd", "reshape", "reshape", "cat", "sin"),
        ],
    ),
    "an empty part": (
        lambda m, x: (lambda a, b, c: torch.cat([a.sin(), b.cos(), c], -1).sum() + b.sum())(*x.split([2, 0, 4], -1)),
        ["full", "split", "sin", "cat", "sum", "sum", "add"],
    ),
    "one part that is not empty": (lambda m, x: x.split([0, 6], -1)[1].sin().sum(), ["sin"]),
    "nothing": (lambda m, x: x.sin().sum() + (F.dropout(x[:, 3:] * 2, 0.5).exp() * m.v[0]).sum(), ["sin", "sum", "full", "sum", "add"]),
    "linear": (lambda m, x: F.linear(x, m.w, m.w[:, 0]).sum(), ["slice", "reshape", "linear", "add"]),
    "reversed dimensions": (
        lambda m, x: (x.T.cumsum(0) * m.v[0] + m.v.T[0]).sum(),
        ["permute", "cumsum", "slice", "reshape", "mul", "add"],
    ),
    "product with a transpose": (lambda m, x: (x @ m.w.T).sum(), ["linear"]),
    "rows": (lambda m, x: (x.view(-1, 6) @ m.w.T).view(5, 3, 7).cumsum(1).sum(), ["linear", "cumsum"]),
    "addmm": (
        lambda m, x: torch.addmm(m.v, m.w, x[0].mT @ x[1]).sum(),
        ["slice", "reshape", "permute", "slice", "reshape", "matmul", "matmul", "add"],
    ),
    "baddbmm": (
        lambda m, x: torch.baddbmm(m.v, x, x[:, :, :6].mT @ x, beta=2, alpha=0.5).sum(),
        ["permute", "matmul", "matmul", "mul", "mul", "add"],
    ),
    "mean": (lambda m, x: x.mean(-1).sum(), ["sum", "div"]),
    "mean of all": (lambda m, x: x.mean() + m.v.mean(), ["sum", "div", "sum", "div", "add"]),
    "sum of booleans": (lambda m, x: ((x > 0).sum() * m.v[0]).sum(), ["gt", "to", "sum", "slice", "reshape", "mul"]),
    "neutral": (lambda m, x: ((x + 0) * 1.0 / 1 - 0).pow(1).sum(), []),
    "no pads": (lambda m, x: F.pad(F.pad(x, (0, 0)), (0, 0, 0, 0), mode="replicate").sum(), []),
    "repeated once": (lambda m, x: x.repeat(1, 1, 1).tile(1).sum(), []),
    "whole turns": (lambda m, x: x.roll((3, -6), (1, 2)).roll(90).rot90(4, (0, 1)).flip([]).sum(), []),
    "whole part": (lambda m, x: x.narrow(1, 0, 3).sum(), []),
    "last part": (lambda m, x: x.narrow(1, -1, 1).sin().sum(), ["slice", "sin"]),
    "pools of one": (lambda m, x: F.adaptive_avg_pool1d(F.adaptive_avg_pool2d(x, (3, 6)), 6).sum(), []),
    "stack of one": (lambda m, x: torch.stack([x], 1).sin().sum(), ["reshape", "sin"]),
    "mean of one": (lambda m, x: x.sum(1, keepdim=True).mean(1).sin().sum(), ["sum", "sum", "sin"]),
    "one bound": (lambda m, x: x.clamp(0.0, math.inf).clamp(-math.inf, 1.0).sum(), ["clamp", "clamp"]),
    "cast": (lambda m, x: (x > 0).to(x.dtype).to(x.dtype).sum(), ["gt", "to"]),
    "clone": (lambda m, x: x.clone().detach().sum(), []),
    "dropout": (lambda m, x: F.dropout(F.dropout(x, 0.0), 0.3, training=False).sum(), []),
    "in place": (lambda m, x: (x * 2).add_(1).mul_(x).sum(), ["mul", "add", "mul"]),
    "kept before a change": (lambda m, x: (lambda y: y.clone().exp_() + y)(x.sin()).sum(), ["sin", "exp", "add"]),
    "a changed slice": (
        lambda m, x: (lambda y: [y[:, 1:].mul_(3), y[..., 0].fill_(2.0), y][-1].cumsum(0).sum())(x.sin()),
        ["sin", "slice", "mul", "slice", "cat", "full", "reshape", "slice", "cat", "cumsum"],
    ),
    "a view of new shape": (
        lambda m, x: (lambda y, z: [z[0].t_(), y * 2][-1].sum())(*(lambda y: (y, y[:, :3, :3]))(x.sin())),
        ["sin", "mul"],
    ),
    "parts that change each other": (
        lambda m, x: (lambda a, b, c: [a.mul_(2), b.add_(a), c.copy_(b[..., :1]), a * b * c][-1].sum())(
            *x.sin().unbind(1)
        ),
        [
            *("sin", "split", "mul", "slice", "slice", "add", "reshape", "slice"),
            *("expand", "mul", "reshape", "mul"),
        ],
    ),
    "a filled diagonal": (
        lambda m, x: (lambda y: [y[:, 0].fill_diagonal_(3.0), y][-1].cumsum(0).sum())(x.sin()),
        ["sin", "slice", "reshape", "eye", "masked_fill", "reshape", "slice", "cat", "cumsum"],
    ),
    "a changed diagonal": (
        lambda m, x: (lambda y: [y.diagonal(0, 1, 2).mul_(2), y][-1].cumsum(0).sum())(x.sin()),
        ["sin", "diagonal", "mul", "diagonal_scatter", "cumsum"],
    ),
    "filled in parts": (
        lambda m, x: (lambda y: [y[:2].copy_(x[:2].sin()), y[2:].copy_(x[2:]), y][-1].cumsum(0).sum())(
            x.new_empty(x.shape)
        ),
        ["slice", "sin", "slice", "cat", "cumsum"],
    ),
    "filled": (lambda m, x: (x.sin().fill_(2.0) * x).sum(), ["full", "mul"]),
    "written out": (
        lambda m, x: (x * torch.tensor([1.0, 2.0, 4.0, 0.5, 0.25, 3.0])).sum(),
        [*["full"] * 6, "cat", "mul"],
    ),
    "counted": (lambda m, x: (x * torch.tensor([0, 1, 2, 3, 4, 5])).sum(), ["arange", "mul"]),
    "repeated number": (lambda m, x: (x * x.new_ones(6) + torch.ones_like(x)).sum(), ["full", "mul", "full", "add"]),
    "compared with a constant": (
        lambda m, x: ((x.long() == torch.tensor(1)) * x).sum() + ((torch.tensor(2) != x.long()) * x).sum(),
        ["to", "eq", "mul", "sum", "ne", "mul", "sum", "add"],
    ),
    "sum with zeros": (lambda m, x: (torch.zeros_like(x) + 2 * x).sum(), ["mul"]),
    "zeros that broadcast": (lambda m, x: (x.new_zeros(4, 1, 6) + x[0]).sum(), ["full", "slice", "reshape", "add"]),
    "any element": (lambda m, x: torch.where((x > 1).any(), x, -x).sum(), [
        "gt", "count_nonzero", "gt", "neg", "where",
    ]),
    "all elements": (lambda m, x: torch.where((x > 1).all(), x, -x).sum(), [
        "gt", "count_nonzero", "eq", "neg", "where",
    ]),
    "test of a test": (lambda m, x: torch.where((x.sum() > 1).ne(0).any(), x, -x).sum(), [
        "sum", "gt", "neg", "where",
    ]),
    "tanh gelu": (
        lambda m, x: (0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))).sum(),
        ["gelu"],
    ),
    "gated": (lambda m, x: F.glu(x, 2).cumsum(1).sum() + F.glu(m.w[:6], 0).sum(), [
        "split", "sigmoid", "mul", "cumsum", "sum", "slice", "split", "sigmoid", "mul", "sum", "add",
    ]),
    "written norm": (
        lambda m, x: (m.v * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))).sum(),
        ["rms_norm"],
    ),
    **{f"written norm, {form}": (lambda m, x, norm=norm: norm(m.v, x).sum(), ["rms_norm"]) for form, norm in NORMS.items()},
    "written softmax": (lambda m, x: quotient(x, x.max(-1, keepdim=True).values), ["softmax", "pow"]),
    "written softmax of weights, detached": (
        lambda m, x: (lambda y: quotient(y, y.amax(-1, True).detach()))(x * m.v),
        ["mul", "softmax", "pow"],
    ),
    "a quotient below another number": (
        lambda m, x: quotient(x, x.amax(0, True)), ["amax", "sub", "exp", "sum", "div", "pow"],
    ),
    "aliases": (
        lambda m, x: torch.special.expit(torch.multiply(x.clip(-1, 1), 2).absolute()).moveaxis(0, 1).cumsum(0).sum(),
        ["clamp", "mul", "abs", "sigmoid", "permute", "cumsum"],
    ),
    "tile": (lambda m, x: torch.tile(x, (2,)).cumsum(2).sum(), ["repeat", "cumsum"]),
    "norms": (
        lambda m, x: (torch.linalg.norm(x, dim=-1) / torch.linalg.norm(m.w)).sum() + torch.linalg.norm(m.w, "nuc"),
        ["linalg_vector_norm", "linalg_vector_norm", "div", "sum", "linalg_norm", "add"],
    ),
    "scattered by elements": (
        lambda m, x: x.masked_scatter(x > 0, x.exp()[:4]).cumsum(1).sum(),
        ["gt", "exp", "slice", "to", "reshape", "cumsum", "sub", "mul", "reshape", "index_select", "reshape", "where",
         "cumsum"],
    ),
    "scattered from all elements": (
        lambda m, x: x.masked_scatter(x > 0, x.exp()).cumsum(1).sum(),
        ["gt", "exp", "to", "reshape", "cumsum", "sub", "mul", "reshape", "index_select", "reshape", "where", "cumsum"],
    ),
    "mean squares": (lambda m, x: F.mse_loss(x, m.v.expand_as(x)), ["expand", "sub", "mul", "sum", "div"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_spelling(name: str) -> None:
    function, expected = FUNCTIONS[name]
    torch.manual_seed(1)
    found = names(check(Function(function), X))
    assert (found[:-1] if found[-1] == "sum" and expected != found else found) == expected


class Steps(nn.Module):
    """A cell that runs three steps, from a state of zeros and then from its own."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state, total = None, torch.zeros(())
        for step in x.unbind(1):
            state = self.cell(step, state)
            total = total + (state if isinstance(state, Tensor) else sum(state)).square().mean()
        return total


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cell", ["LSTMCell", "GRUCell", "tanh", "relu"])
def test_cells_are_products_and_gates(cell: str, bias: bool) -> None:
    torch.manual_seed(1)
    made = getattr(nn, cell)(5, 4, bias=bias) if "Cell" in cell else nn.RNNCell(5, 4, bias=bias, nonlinearity=cell)
    found = names(check(Steps(made), {"x": torch.randn(6, 3, 5)}))
    assert found.count("linear") == 6
    assert not any(name.endswith("_cell") for name in found)


def test_sizes_and_dimensions_are_explicit() -> None:
    program = check(Function(lambda m, x: x.view(-1, 2).transpose(-1, -2).cumsum(-1).sum()), X)
    reshape, permute, *_ = ops(program)
    assert reshape.args[1] == (45, 2)
    assert permute.args[1] == (1, 0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(reduction: str, weighted: bool, smoothing: float) -> None:
    labels = torch.tensor([[0, 6, -100], [2, 2, 3], [-100, -100, -100], [5, 1, -100], [0, 0, 0]])

    def forward(m: Any, x: Tensor, labels: Tensor) -> Tensor:
        weight = m.w.sum(1).abs().detach() if weighted else None
        logits = F.linear(x, m.w).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), weight, reduction=reduction, label_smoothing=smoothing)

    found = names(check(Function(forward), {**X, "labels": labels}))
    assert found.count("cross_entropy") == 1
    assert ("ne" in found) == (reduction == "mean")


LOSSES: Mapping[str, Callable[..., Tensor]] = {
    "poisson_nll_loss": lambda x, y, **how: F.poisson_nll_loss(x, x.detach() ** 2, **how),
    "cosine_embedding_loss": lambda x, y, **how: F.cosine_embedding_loss(x, x.flip(0), 2 * (y % 2) - 1, **how),
    "soft_margin_loss": lambda x, y, **how: F.soft_margin_loss(x, x.flip(0).detach().sign(), **how),
    "hinge_embedding_loss": lambda x, y, **how: F.hinge_embedding_loss(x, x.flip(0).detach().sign(), **how),
    "triplet_margin_loss": lambda x, y, **how: F.triplet_margin_loss(x, x.flip(0), x.flip(1), swap=True, **how),
    "margin_ranking_loss": lambda x, y, **how: F.margin_ranking_loss(x[:, 0], x[:, 1], (y % 2) * 2.0 - 1, **how),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_with_a_built_in_mean_are_sums_of_rows(name: str, reduction: str) -> None:
    labels = torch.tensor([0, 5, 2, 3, 1])

    def forward(m: Any, x: Tensor, labels: Tensor) -> Tensor:
        return LOSSES[name](x[:, 0] * m.v, labels, reduction=reduction)

    found = names(check(Function(forward), {**X, "labels": labels}))
    assert found.count(name) == 1
    assert found[found.index(name) + 1 :] == (["sum", "div"] if reduction == "mean" else ["sum"])


@pytest.mark.parametrize(
    "window", [torch.hann_window, torch.hamming_window, torch.bartlett_window, torch.kaiser_window]
)
def test_constants_from_numbers_have_the_precision_of_the_trace(window: Callable[..., Tensor]) -> None:
    program = check(Function(lambda m, x: (m.v * window(6) * torch.fft.fftfreq(6)).sum()), X)
    assert all(op.result.type.dtype == "f64" for op in ops(program))


def test_unweighted_losses_are_counted_on_whole_labels() -> None:
    labels = torch.tensor([[0, 6, -1], [2, 2, 3], [-1, -1, -1], [5, 1, -1], [0, 0, 0]])

    def forward(m: Any, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, m.w).view(-1, 7), labels.view(-1), ignore_index=-1)

    program = check(Function(forward), {**X, "labels": labels})
    assert names(program) == ["linear", "cross_entropy", "sum", "ne", "to", "sum", "div"]
    assert ops(program)[1].result.type.shape == (5, 3)


def test_classes_in_the_second_dimension() -> None:
    labels = torch.randint(6, (5, 3))

    def forward(m: Any, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(x.mT, labels) * m.v.sum()

    assert names(check(Function(forward), {**X, "labels": labels})).count("cross_entropy") == 1


@pytest.mark.parametrize("moved", [lambda x: x.mT, lambda x: x.transpose(1, 2).double(), lambda x: x.movedim(2, 1)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_classes_that_are_moved_for_a_loss_stay_last(moved: Callable[[Tensor], Tensor], reduction: str) -> None:
    labels = torch.tensor([[0, 6, -100], [2, 2, 3], [-100, -100, -100], [5, 1, -100], [0, 0, 0]])

    def forward(m: Any, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(moved(F.linear(x, m.w)), labels, reduction=reduction).square().sum()

    assert "permute" not in names(check(Function(forward), {**X, "labels": labels}))


def test_permutations_that_cancel_are_dropped() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        turned = x.permute(2, 0, 1)
        return (turned.movedim(0, 2) + turned.permute(2, 0, 1).permute(2, 0, 1)).cumsum(1).sum()

    assert "permute" not in names(check(Function(forward), {"x": torch.randn(5, 3, 6)}))


class Layers(nn.Module):
    """Each layer turns its rows before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Turned() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.mT).relu().mT


def test_layers_that_turn_their_rows_stay_equal() -> None:
    layers = outline(check(Layers(), {"x": torch.randn(2, 4, 5)})).calls
    assert len({call.region for call in layers if call.name.startswith("layers")}) == 1


HEADS = {
    "x": torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(0)),
    "k": torch.randn(3, 2, 5, 6, generator=torch.Generator().manual_seed(1)),
}


def _repeated(k: Tensor, times: int) -> Tensor:
    b, g, t, d = k.shape
    return k[:, :, None].expand(b, g, times, t, d).reshape(b, g * times, t, d)


def _future(batch: int, size: int, mode: str) -> Tensor:
    """Masks as models make them: from positions, from a triangle, or additive."""
    places = torch.arange(size)
    seen = (places[None, :] <= places[:, None]).expand(batch, 1, size, size)
    if mode == "boolean":
        return seen
    if mode == "triangle":
        return torch.ones(size, size, dtype=torch.bool).tril()
    return torch.zeros(batch, 1, size, size).masked_fill(~seen, torch.finfo(torch.float64).min)


@pytest.mark.parametrize("mode", ["boolean", "triangle", "additive"])
def test_constant_causal_masks_are_recognised(mode: str) -> None:
    def forward(m: Any, x: Tensor, k: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x * m.v, _repeated(k, 2), _repeated(k, 2), _future(3, 5, mode)).sum()

    program = check(Function(forward), HEADS)
    assert names(program) == ["mul", "attention", "sum"]
    [attention] = [op for op in ops(program) if op.name == "attention"]
    assert attention.args[3:5] == (None, True)
    assert [arg.name for arg in attention.args[1:3]] == ["k", "k"]  # type: ignore[union-attr]


@pytest.mark.parametrize(("mask", "reads"), [("dilated", 9), ("shifted", 19), ("rectangular", 17)])
def test_other_masks_are_limits(mask: str, reads: int) -> None:
    """The scores that they read are counted; a mask that reads no later position is causal as well."""

    def forward(m: Any, x: Tensor, k: Tensor) -> Tensor:
        rows, columns = torch.arange(5)[:, None], torch.arange(5)[None, :]
        seen = (columns <= rows) & ((rows - columns) % 2 == 0) if mask == "dilated" else columns <= rows + 1
        if mask == "rectangular":
            seen, k = seen[:, :4] | (columns[:, :4] == 0), k[:, :, :4]
        return F.scaled_dot_product_attention(x * m.v, _repeated(k, 2), _repeated(k, 2), seen).sum()

    [attention] = [op for op in ops(check(Function(forward), HEADS)) if op.name == "attention"]
    assert attention.args[3:5] == (None, mask == "dilated")
    first, second, of = dict(attention.attrs)["reads"]  # type: ignore[misc]
    assert (first + second, of) == (reads, 20 if mask == "rectangular" else 25)


def test_a_mask_that_hides_nothing_is_none() -> None:
    def forward(m: Any, x: Tensor, k: Tensor) -> Tensor:
        mask = torch.ones(3, 1, 5, 5, dtype=torch.bool)
        return F.scaled_dot_product_attention(x * m.v, k, k, mask, enable_gqa=True).sum()

    [attention] = [op for op in ops(check(Function(forward), HEADS)) if op.name == "attention"]
    assert attention.args[3:5] == (None, False)


def test_rows_of_constants_are_broadcast() -> None:
    """Positions are looked up once, not for every example."""

    def forward(m: Any, x: Tensor) -> Tensor:
        places = torch.arange(3)[None, :].expand(5, 3)
        return (x * F.embedding(places, m.w)).sum()

    program = check(Function(forward), X)
    assert all(value.type.shape[:1] != (5,) for op in ops(program)[:-2] for value in op.results)


def test_a_changed_entry_of_the_batch_is_the_steps_own() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        before = (x * m.v).sum()
        x[:, 0].clamp_(0, 1)
        return before * x.add_(1).sum() + (x * m.v).mean()

    check(Function(forward), X)


def test_detached_tensors_share_memory() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = x.sin()
        return (y.detach().mul_(2) * m.v).sum() + y.sum()

    check(Function(forward), X)


def observed(x: Tensor, least: Tensor) -> Tensor:
    """x by torch's fake quantization, which writes the least number and others."""
    on, most, scale, zero = torch.ones(1, dtype=torch.int64), least + 1, least + 0, torch.zeros(1, dtype=torch.int32)
    return torch.fused_moving_avg_obs_fake_quant(x, on, on, least, most, scale, zero, 0.1, 0, 255, 0, False, False)


@pytest.mark.parametrize(
    ("forward", "code"),
    [
        (lambda m, x: torch.poisson(x).sum(), "P0207"),
        (lambda m, x: (lambda y: y.detach().mul_(2).sum() + y.sum())((x * m.v).sin()), "P0212"),
        (lambda m, x: observed(x.sin(), x.mean().detach()).sum(), "P0212"),
    ],
)
def test_what_cannot_be_normalized_is_refused(forward: Forward, code: str) -> None:
    with pytest.raises(PartcError) as failure:
        normalize(trace_model(lambda: Function(forward), lambda: X, name="m", mesh=Mesh.parse("1")).program)
    assert failure.value.code == code
    assert failure.value.source is not None
    assert failure.value.source.file.endswith("test_normalize.py")


def test_fuel_stops_rewrites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuel, "settings", lambda: replace(Settings.read({}), fuel=0))
    found = names(check(Function(FUNCTIONS["tanh gelu"][0]), X))
    assert "gelu" not in found
    assert "tanh" in found


def test_joins_of_many_writes_take_time_in_their_number() -> None:
    def calls(count: int) -> int:
        """The calls of Python functions that the join of `count` writes takes."""
        row, whole = (TensorType(dtype="f32", layout=Layout.replicated(shape)) for shape in ((1,), (count,)))
        names = [f"y{number}" for number in range(count + 1)]
        ops = [
            Op(
                name="slice_scatter",
                args=(Ref(one), Ref(f"a{place}"), 0, place, place + 1, 1),
                results=(Value(name=other, type=whole),),
            )
            for place, (one, other) in enumerate(pairwise(names))
        ]
        inputs = (Value(name="y0", type=whole), *(Value(name=f"a{place}", type=row) for place in range(count)))
        found = 0

        def counted(_: Any, event: str, __: Any) -> None:
            nonlocal found
            found += event == "call"

        graph = Graph(inputs=inputs, ops=tuple(ops), outputs=(names[-1],))
        before = sys.getprofile()
        sys.setprofile(counted)
        try:
            joined = with_joins(graph)
        finally:
            sys.setprofile(before)
        assert [op.name for op in joined.ops] == ["cat"]
        return found

    assert calls(400) < 2.5 * calls(200)
