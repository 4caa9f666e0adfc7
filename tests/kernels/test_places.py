"""Kernels at extreme sizes: tensors without elements, and memory offsets beyond 32 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from partc.codegen.kernels.fused import kernel
from partc.codegen.package import kernel_module
from partc.ir.program import Graph, Op, Program
from partc.passes.fuse import fuse
from tests.kernels.test_kernels import kernels
from tests.programs import fused_graph
from tests.triton_runs import Kernels

__all__ = ["kernels"]

EMPTY = """
  param w: f32[6]
  param table: f32[7, 6]
  forward:
    input x: f32[0, 6]
    input y: f32[3, 6]
    input ids: i64[0]
    rows = embedding(table, ids)  # f32[0, 6]
    a = mul(x, 2.0)  # f32[0, 6]
    b = add(a, rows)  # f32[0, 6]
    c, r = rms_norm(b, (6,), w, 1e-05)  # f32[0, 6] ; f32[0, 1]
    p = softmax(c, 1)  # f32[0, 6]
    s = sum(p, (0,), False)  # f32[6]
    d = cat((p, y), 0)  # f32[3, 6]
    e = mul(d, s)  # f32[3, 6]
    f = exp(e)  # f32[3, 6]
    nll, lse = cross_entropy(c, ids, None, -100, 0.0)  # f32[0] ; f32[0]
    dropped, kept = dropout(c, 0.5, 2, 0)  # f32[0, 6] ; bool[0, 6]
    more = neg(dropped)  # f32[0, 6]
    loss = linear(more, f)  # f32[0, 3]
    return loss
  saved ids, nll, f
  backward:
    input grad_loss: f32[0, 6]
    input ids: i64[0]
    input nll: f32[0]
    input f: f32[3, 6]
    grad_table = embedding_dense_backward(grad_loss, ids, 7, -1, False)  # f32[7, 6]
    return grad_table
"""


def test_what_has_no_elements_is_no_kernel_s() -> None:
    """No launch has nothing to do: what makes elements of none is left to PyTorch, and nothing else."""
    region = fuse(fused_graph(EMPTY), kernels="triton").regions[0]
    assert region.backward is not None
    fused = [op for op in region.forward.ops if op.body]
    assert [dict(op.attrs)["kernel"] for op in fused] == ["mul_exp"]
    types = {value.name: value.type for graph in region.graphs for value in graph.definitions().values()}
    for op in fused:
        assert all(0 not in types[name].shape for name in (*op.refs(), *(value.name for value in op.results)))
    assert [op.name for op in region.backward.ops] == ["embedding_dense_backward"]
    assert "drawn" in [op.name for op in region.forward.ops]


APART = 2**25  # from one row to the next


@pytest.fixture(scope="module")
def vast() -> Iterator[Tensor]:
    """More than 2^31 elements, of which hardly any is ever touched: the last of 65 rows begins at 2^31."""
    x = torch.empty(65, APART, dtype=torch.float16)
    x[:, 3:11] = torch.linspace(-2, 2, 520).reshape(65, 8)
    yield x


def one_kernel(program: Program, *, dense: bool = True) -> tuple[Op, Graph]:
    """Where inputs are known to be dense, places are known too."""
    program = replace(program, inputs=()) if dense else program
    graph = fuse(program, kernels="triton").regions[0].forward
    (op,) = (op for op in graph.ops if op.body)
    return op, graph


def run(kernels: Kernels, text: str, *, dense: bool = True, **values: Tensor) -> dict[str, Tensor]:
    """The results of a graph's only kernel."""
    op, graph = one_kernel(fused_graph(text), dense=dense)
    types = {name: value.type for name, value in graph.definitions().items()}
    return kernels.one(op, types, values, {"mb": 1, "tp": 2})


FAR = f"input x: f16[65, {APART}]"
PART = "part = slice(x, 1, 3, 11, 1)  # f16[65, 8]"


def test_elements_far_from_each_other(kernels: Kernels, vast: Tensor) -> None:
    text = f"""
  forward:
    {FAR}
    {PART}
    a = mul(part, 2.0)  # f16[65, 8]
    y = exp(a)  # f16[65, 8]
    loss = linear(y, y)  # f16[65, 65]
    return loss
"""
    torch.testing.assert_close(run(kernels, text, x=vast)["y"], (vast[:, 3:11].double() * 2).exp().half())


def test_strides_that_are_known_at_run_time_only(kernels: Kernels, vast: Tensor) -> None:
    text = """
  forward:
    input x: f16[65, 8]
    a = mul(x, 2.0)  # f16[65, 8]
    y = exp(a)  # f16[65, 8]
    loss = linear(y, y)  # f16[65, 65]
    return loss
"""
    part = vast[:, 3:11]
    torch.testing.assert_close(run(kernels, text, dense=False, x=part)["y"], (part.double() * 2).exp().half())


@pytest.mark.parametrize(("made", "shape"), [("softmax(a, 1)", "65, 8"), ("linear_grad_bias(a)", "8")])
def test_rows_far_from_each_other(kernels: Kernels, vast: Tensor, made: str, shape: str) -> None:
    text = f"""
  forward:
    {FAR}
    {PART}
    a = mul(part, 2.0)  # f16[65, 8]
    y = {made}  # f16[{shape}]
    loss = linear(y, y)  # f16[]
    return loss
"""
    part = vast[:, 3:11].double() * 2
    right = part.softmax(1) if "softmax" in made else part.sum(0)
    torch.testing.assert_close(run(kernels, text, x=vast)["y"].double(), right, rtol=2e-3, atol=2e-3)


def test_logits_far_from_each_other(kernels: Kernels, vast: Tensor) -> None:
    text = f"""
  forward:
    {FAR}
    input labels: i64[65]
    {PART}
    wide = to(part, <f32>)  # f32[65, 8]
    nll, lse = cross_entropy(wide, labels, None, -100, 0.0)  # f32[65] ; f32[65]
    loss = linear(nll, lse)  # f32[]
    return loss
"""
    labels = torch.arange(65) % 8
    right = torch.nn.functional.cross_entropy(vast[:, 3:11].float(), labels, reduction="none")
    made = run(kernels, text, x=vast, labels=labels)
    torch.testing.assert_close(made["nll"], right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "wide"), [(2**18 - 2**10, False), (2**18 + 1, True)])
def test_indices_have_64_bits_where_results_have_so_many_elements(rows: int, wide: bool) -> None:
    """Too many to run: it can be read."""
    shape = f"{rows}, {2**13 - (0 if wide else 1)}"
    text = f"""
  forward:
    input x: f16[{shape}]
    a = mul(x, 2.0)  # f16[{shape}]
    y = LAST  # f16[{shape}]
    loss = linear(y, y)  # f16[]
    return loss
"""
    for last in ("exp(a)", "softmax(a, 1)"):
        op, graph = one_kernel(fused_graph(text.replace("LAST", last)))
        types = {name: value.type for name, value in graph.definitions().items()}
        module = kernel_module(kernel(op, types, {"mb": 1, "tp": 2}))
        assert (".to(tl.int64)" in module) == wide, module
