"""Gradients of embedding tables by kernels, against sums in fp64, for any pattern of ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from partc.codegen.kernels.fused import kernel
from partc.ir.operators import DTYPES
from partc.ir.program import DType
from partc.passes.fuse import fuse
from partc.runtime.ops import functional
from tests.kernels.test_kernels import TOLERANCE, kernels
from tests.programs import fused_graph
from tests.triton_runs import Kernels, there

__all__ = ["kernels"]

TABLE = """
  param w: {dtype}[40@tp, {width}]
  forward:
    input ids: i64[{count}]
    x = embedding_shard(w, ids, axis="tp")  # {dtype}[{count}, {width}]
    loss = sum(x, (0, 1), False)  # {dtype}[]
    return loss
  saved ids
  backward:
    input grad_loss: {dtype}[{count}, {width}]
    input ids: i64[{count}]
    grad_w = embedding_shard_backward(grad_loss, ids, 20{padding}, axis="tp")  # {dtype}[40@tp, {width}]
    return grad_w
"""


def looked_up(kind: str, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    if kind == "one":
        return torch.full((count,), 23)
    if kind == "each":
        return torch.arange(count) % 40
    rare = torch.rand(count, generator=generator) < 0.2
    return torch.where(rare, torch.randint(0, 40, (count,), generator=generator), 7)


@pytest.mark.parametrize(
    ("kind", "count", "width", "dtype", "padding"),
    [
        ("one", 100, 5, "f32", -1),
        ("each", 64, 8, "f64", 3),
        ("often", 150, 3, "bf16", -1),
        ("often", 97, 1, "f32", 7),
        ("one", 32, 4, "f16", -1),
        ("each", 1, 6, "f64", -1),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_rows_are_added_to_those_of_the_table(
    kernels: Kernels, kind: str, count: int, width: int, dtype: DType, padding: int, rank: int
) -> None:
    """Gradients of each half of a table, added to a buffer or alone; repeated runs give the same bits."""
    given = f", {padding}" if padding >= 0 else ""
    text = TABLE.format(dtype=dtype, count=count, width=width, padding=given)
    region = fuse(fused_graph(text), kernels="triton").regions[0]
    assert region.backward is not None
    (op,) = region.backward.ops
    types = {name: value.type for name, value in region.backward.definitions().items()}
    grad = torch.randn(count, width, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    ids = looked_up(kind, count)
    right = torch.zeros(20, width, dtype=torch.float64)
    functional.embedding_shard_add_grad(right, grad.double(), ids, rank, padding)
    known: dict[str, Any] = {"grad_loss": grad, "ids": ids, "tp_rank": rank}
    alone = kernels.one(op, types, known, {"tp": 2, "mb": 1})["grad_w"]
    tolerance = TOLERANCE[dtype]
    assert alone.dtype == DTYPES[dtype]
    torch.testing.assert_close(alone.double(), right, rtol=tolerance, atol=tolerance)
    wide = torch.float64 if dtype == "f64" else torch.float32
    launch = kernels.load(kernel(op, types, {"tp": 2, "mb": 1}))
    into, again = (there(torch.ones(20, width, dtype=wide)) for _ in range(2))
    for made in (into, again):
        assert launch(there(grad), there(ids), rank, into=made) is made
    assert torch.equal(into, again)
    tolerance = 10 * TOLERANCE["f64" if dtype == "f64" else "f32"]
    torch.testing.assert_close(into.cpu().double(), right + 1, rtol=tolerance, atol=tolerance)


def test_places_in_a_large_table_take_64_bits(kernels: Kernels) -> None:
    """Numbers of 32 bits, and a table with more than 2^31 elements, of which only the last row is touched."""
    rows, width, count = (1 << 27) + 1, 16, 3
    text = TABLE.format(dtype="bf16", count=count, width=width, padding="").replace("40@tp", f"{2 * rows}@tp")
    text = text.replace("ids, 20", f"ids, {rows}").replace("ids: i64", "ids: i32")
    region = fuse(fused_graph(text), kernels="triton").regions[0]
    assert region.backward is not None
    (op,) = region.backward.ops
    types = {name: value.type for name, value in region.backward.definitions().items()}
    launch = kernels.load(kernel(op, types, {"tp": 2, "mb": 1}))
    grad = there(torch.ones(count, width, dtype=torch.bfloat16))
    ids = there(torch.full((count,), rows - 1, dtype=torch.int32))
    into = torch.empty(rows, width, dtype=torch.bfloat16, device=grad.device)  # what is not touched is in no memory
    into[-1] = 1
    launch(grad, ids, 0, into=into)
    assert into[-1].tolist() == [4.0] * width
