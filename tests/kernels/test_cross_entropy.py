"""Kernels of cross-entropies in Triton's interpreter, against PyTorch in fp64: any classes, labels and prologues."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import partc
from partc.codegen.kernels import cross_entropy
from partc.ir.interpreter import results_of
from partc.ir.operators import DTYPES
from partc.ir.parser import parse
from partc.ir.printer import print_program
from partc.ir.program import Graph, Op, Program, Ref
from partc.ir.verifier import faults_of
from partc.passes.fuse import fuse
from partc.runtime.ops import functional
from tests.kernels.test_kernels import TOLERANCE, kernels, program_of
from tests.passes.test_chunk import SHIFTED
from tests.programs import fused_graph
from tests.triton_runs import Kernels, interpreted

__all__ = ["kernels"]

WHOLE = """
  forward:
    input x: {dtype}[2, 5, {classes}]
    input weight: {rarity}[{classes}]
    input labels: i64[2, 5]
    {cast}
    nll, lse = cross_entropy(wide, labels, {weight}, -100, {smoothing})  # {wide}[2, 5] ; {wide}[2, 5]
    loss = linear(nll, lse)  # {wide}[2, 2]
    return loss
  saved nll, lse
"""
PLAIN = {
    "dtype": "f32", "classes": 6, "smoothing": 0.0, "wide": "f32", "rarity": "f32", "weight": None,
    "cast": "wide = neg(x)  # f32[2, 5, 6]",
}  # fmt: skip
CUT = """
  forward:
    input x: {dtype}[3, 32@tp]
    input labels: i64[3]
    input bias: f32[32@tp]
    input weight: f32[32]
    wide = to(x, <f32>)  # f32[3, 32@tp]
    biased = add(wide, bias)  # f32[3, 32@tp]
    most = shard_max(biased)  # f32[3]
    top = all_reduce(most, op="max", axis="tp")  # f32[3]
    sums = sum_exp(biased, top)  # f32[3] partial(tp)
    picked = pick(biased, labels, axis="tp")  # f32[3] partial(tp)
    smooth = smooth_sum(biased, {weight}, axis="tp")  # f32[3] partial(tp)
    loss = linear(picked, smooth)  # f32[]
    return loss
  saved most, sums, picked, smooth
  backward:
    input grad_nll: f32[3]
    input x: {dtype}[3, 32@tp]
    input labels: i64[3]
    input bias: f32[32@tp]
    input weight: f32[32]
    input lse: f32[3]
    input most: f32[3]
    input sums: f32[3] partial(tp)
    input picked: f32[3] partial(tp)
    input smooth: f32[3] partial(tp)
    wide = to(x, <f32>)  # f32[3, 32@tp]
    biased = add(wide, bias)  # f32[3, 32@tp]
    grad_biased = cross_entropy_backward(grad_nll, biased, labels, lse, {weight}, -100, {smoothing}, axis="tp")  # f32[3, 32@tp]
    grad_x = to(grad_biased, <{dtype}>)  # {dtype}[3, 32@tp]
    return grad_x
"""


def rows(*shape: int, dtype: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(DTYPES[dtype])  # type: ignore[index]


def labels_of(*shape: int, classes: int) -> Tensor:
    """The first and the last class among them, and one that is ignored."""
    found = torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(1))
    found.view(-1)[:3] = torch.tensor([0, classes - 1, -100])
    return found


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weight", [None, "weight"])
@pytest.mark.parametrize(("dtype", "classes"), [("bf16", 37), ("f16", 64), ("f32", 1), ("f64", 1000)])
def test_losses_of_rows(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, dtype: str, classes: int, weight: str | None, smoothing: float
) -> None:
    """One kernel reads logits once, casts them itself, and makes losses and log-sum-exps; steps of 256 classes."""
    monkeypatch.setattr(cross_entropy, "STEP", 256)
    wide = "f32" if dtype in ("bf16", "f16") else dtype
    cast = (
        f"wide = to(x, <{wide}>)  # {wide}[2, 5, {classes}]"
        if wide != dtype
        else f"wide = neg(x)  # {wide}[2, 5, {classes}]"
    )
    text = WHOLE.format(
        dtype=dtype, classes=classes, smoothing=smoothing, wide=wide, cast=cast, weight=weight, rarity=dtype
    )
    region = fused_graph(text).regions[0]
    graph = replace(region.forward, ops=region.forward.ops[:-1], outputs=region.saved)
    after = fuse(program_of(graph), kernels="triton").regions[0].forward
    summed = ["to"] * (dtype != wide) + ["sum"] if weight and smoothing else []
    assert [op.name for op in after.ops] == [*summed, "fused"]
    x, labels = rows(2, 5, classes, dtype=dtype), labels_of(2, 5, classes=classes)
    rarity = rows(classes, dtype=dtype, seed=5).abs()
    made = kernels.run(after, {"x": x, "labels": labels, "weight": rarity}, {}, {})
    logits = x.double() if wide != dtype else -x.double()
    right = F.cross_entropy(
        logits.flatten(0, 1),
        labels.flatten(),
        rarity.double() if weight else None,
        label_smoothing=smoothing,
        reduction="none",
    ).reshape(2, 5)
    tolerance = 10 * TOLERANCE["f64" if wide == "f64" else "f32"]
    torch.testing.assert_close(made["nll"].double(), right, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(made["lse"].double(), logits.logsumexp(-1), rtol=tolerance, atol=tolerance)


def test_rows_that_begin_with_nothing_and_rows_that_are_no_numbers(kernels: Kernels) -> None:
    """Minus infinity is a class that isn't there; what isn't a number stays none."""
    text = WHOLE.format(**PLAIN)
    region = fused_graph(text).regions[0]
    graph = replace(region.forward, ops=region.forward.ops[:-1], outputs=region.saved)
    after = fuse(program_of(graph), kernels="triton").regions[0].forward
    x = rows(2, 5, 6, dtype="f32")
    x[0, 0, :5] = torch.inf  # after neg
    x[0, 1, 2] = torch.nan
    x[0, 2, 3] = -torch.inf
    labels = torch.full((2, 5), 5)
    made = kernels.run(after, {"x": x, "labels": labels}, {}, {})
    right = F.cross_entropy(-x.flatten(0, 1), labels.flatten(), reduction="none").reshape(2, 5)
    torch.testing.assert_close(made["nll"], right, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert made["nll"][0, :3].isnan().tolist() == [False, True, True]


def fused_cut(dtype: str, smoothing: float, weight: str | None) -> Program:
    before = fused_graph(CUT.format(dtype=dtype, smoothing=smoothing, weight=weight))
    after = fuse(before, kernels="triton")
    assert parse(print_program(after)) == after
    assert not list(faults_of(after, {"local"}))
    return after


@pytest.mark.parametrize(
    ("dtype", "smoothing", "weight"),
    [("bf16", 0.1, None), ("f32", 0.0, None), ("bf16", 0.0, "weight"), ("f32", 0.1, "weight")],
)
def test_classes_that_are_cut(kernels: Kernels, dtype: str, smoothing: float, weight: str | None) -> None:
    """Two ranks, of which the second has nothing but padding for one row; sums are below the largest of both."""
    after = fused_cut(dtype, smoothing, weight).regions[0]
    (first, second), reduce = [op for op in after.forward.ops if op.body], after.forward.ops[1]
    assert reduce.name == "all_reduce" and after.backward is not None
    types = {value.name: value.type for value in after.forward.definitions().values()}
    sizes = {"tp": 2, "mb": 1}
    x, bias = rows(3, 32, dtype=dtype), rows(32, dtype="f32", seed=3)
    if not weight:
        x[1, 16:] = -torch.inf
    labels, rarity = torch.tensor([20, 3, -100]), rows(32, dtype="f32", seed=5).abs()
    parts = [
        {"x": x[:, part], "bias": bias[part], "labels": labels, "weight": rarity, "tp_rank": rank}
        for rank, part in enumerate((slice(0, 16), slice(16, 32)))
    ]
    for known in parts:
        known.update(kernels.one(first, types, known, sizes))  # type: ignore[arg-type]
    top = torch.maximum(parts[0]["most"], parts[1]["most"])  # type: ignore[arg-type]
    for known in parts:
        known.update(kernels.one(second, types, {**known, "top": top}, sizes))  # type: ignore[dict-item]
    logits = x.double() + bias.double()
    total = {name: sum(known[name].double() for known in parts) for name in ("sums", "picked", "smooth")}  # type: ignore[union-attr]
    torch.testing.assert_close(total["sums"].log() + top, logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        total["picked"], torch.stack([logits[0, 20], logits[1, 3], logits.new_zeros(())]), rtol=1e-6, atol=1e-6
    )
    smooth = (logits * rarity.double()).sum(-1) if weight else logits.sum(-1)
    torch.testing.assert_close(total["smooth"], smooth, rtol=1e-5, atol=1e-5)
    lse = logits.logsumexp(-1)
    grad = torch.tensor([0.5, -2.0, 3.0])
    (backward,) = [op for op in after.backward.ops if op.body]
    types = {value.name: value.type for value in after.backward.definitions().values()}
    sums = {name: x for op in after.backward.ops if not op.body for name, x in results_of(op, parts[0]).items()}  # type: ignore[arg-type]
    for rank, known in enumerate(parts):
        given = {**known, **sums, "grad_nll": grad, "lse": lse.float(), "tp_rank": rank}
        made = kernels.one(backward, types, given, sizes)["grad_x"]  # type: ignore[arg-type]
        part = slice(16 * rank, 16 * rank + 16)
        right = functional.cross_entropy_backward(
            grad.double(),
            logits[:, part],
            labels,
            lse,
            rarity.double() if weight else None,
            -100,
            smoothing,
            16 * rank,
            32,
        )
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(made.double(), right, rtol=tolerance, atol=tolerance)


def test_logits_are_read_once_and_their_gradient_is_written_over_them() -> None:
    """Saved are logits in few bits, not their copy in fp32, where a product has made them and no one else reads them."""
    text = """
  param w: bf16[32, 4]
  forward:
    input h: bf16[3, 4]
    input labels: i64[3]
    x = linear(h, w)  # bf16[3, 32]
    wide = to(x, <f32>)  # f32[3, 32]
    nll, lse = cross_entropy(wide, labels, None, -100, 0.0)  # f32[3] ; f32[3]
    loss = sum(nll, (0,), False)  # f32[]
    return loss
  saved wide, labels, lse{more}
  backward:
    input grad_loss: f32[]
    input wide: f32[3, 32]
    input labels: i64[3]
    input lse: f32[3]{taken}
    grad_nll = expand(grad_loss, (3,))  # f32[3]
    grad_wide = cross_entropy_backward(grad_nll, wide, labels, lse, None, -100, 0.0)  # f32[3, 32]
    grad_x = to(grad_wide, <bf16>)  # bf16[3, 32]
    {also}
    return grad_h
"""
    alone = text.format(more="", taken="", also="grad_h = linear_grad_input(grad_x, w)  # bf16[3, 4]")
    region = fuse(fused_graph(alone), kernels="triton").regions[0]
    assert region.backward is not None
    assert region.saved == ("labels", "lse", "x")
    assert dict(_kernel(region.backward).attrs)["over"] == (0, 0)
    assert _kernel(region.backward).args[0] == Ref("x")
    twice = text.format(
        more=", x",
        taken="\n    input x: bf16[3, 32]",
        also="both = linear_grad_weight(grad_x, x)  # bf16[32, 32]\n    grad_h = linear_grad_input(both, w)  # bf16[3, 4]",
    )
    handed = text.format(
        more=", x",
        taken="\n    input x: bf16[3, 32]",
        also="grad_h = linear_grad_input(grad_x, w)  # bf16[3, 4]",
    ).replace("return grad_h", "return grad_h, x, grad_x\n  kept x, grad_x\n  weight:")
    handed += """    input x: bf16[3, 32]
    input grad_x: bf16[3, 32]
    grad_w = linear_grad_weight(grad_x, x)  # bf16[32, 32]
    return grad_w
"""
    for read in (twice, handed):
        region = fuse(fused_graph(read), kernels="triton").regions[0]
        assert region.backward is not None
        assert "over" not in dict(_kernel(region.backward).attrs)


def _kernel(graph: Graph) -> Op:
    (found,) = [op for op in graph.ops if op.body]
    return found


@pytest.mark.slow
@pytest.mark.sampled
@interpreted
@pytest.mark.parametrize(("mesh", "smoothing"), [("1x2x2", 0.1), ("tp=2", 0.0)])
def test_weighted_losses_of_packages(mesh: str, smoothing: float) -> None:
    """Means over the weights of what is not ignored, with no softmax and no logits of PyTorch's."""
    package = partc.compile(
        SHIFTED, mesh=mesh, options={"weighted": True, "smoothing": smoothing}, precision="fp64", kernels="triton"
    )
    text = "".join(str(body) for path, body in package.files() if path.startswith("regions/"))
    assert "functional.cross_entropy" not in text and "functional.smooth_sum" not in text
    found = package.verify(virtual=True, steps=1)
    assert found.ok and found.worst.rel_err < 1e-13


def test_two_losses_of_the_same_logits_are_two_kernels(kernels: Kernels) -> None:
    text = WHOLE.format(**PLAIN)
    text = text.replace("input labels", "input others: i64[2, 5]\n    input labels")
    second = "more, top = cross_entropy(wide, others, None, -100, 0.5)  # f32[2, 5] ; f32[2, 5]\n    loss ="
    text = text.replace("loss =", second).replace("saved nll, lse", "saved nll, lse, more")
    region = fused_graph(text).regions[0]
    graph = replace(region.forward, ops=region.forward.ops[:-1], outputs=region.saved)
    after = fuse(program_of(graph), kernels="triton").regions[0].forward
    assert [op.name for op in after.ops].count("fused") == 2
    x, labels = rows(2, 5, 6, dtype="f32"), labels_of(2, 5, classes=6)
    made = kernels.run(after, {"x": x, "labels": labels, "others": 5 - labels.clamp(0)}, {}, {})
    for name, target, smoothing in (("nll", labels, 0.0), ("more", 5 - labels.clamp(0), 0.5)):
        right = F.cross_entropy(-x.flatten(0, 1), target.flatten(), label_smoothing=smoothing, reduction="none")
        torch.testing.assert_close(made[name].flatten(), right, rtol=1e-5, atol=1e-5)
