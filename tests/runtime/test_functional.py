"""Forward and backward functions of the emitted code against torch's own operations under autograd."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from partc.runtime.ops import attention, functional
from partc.runtime.torch_private import TorchDispatchMode

F64 = torch.float64


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


def close(mine: Tensor | None, theirs: Tensor | None, tolerance: float = 1e-12) -> None:
    assert mine is not None and theirs is not None
    assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def test_linear() -> None:
    x, w = torch.randn(3, 5, 7, dtype=F64), torch.randn(4, 7, dtype=F64, requires_grad=True)
    b = torch.randn(4, dtype=F64, requires_grad=True)
    grad = torch.randn(3, 5, 4, dtype=F64)
    F.linear(x, w, b).backward(grad)
    close(functional.linear_grad_weight(grad, x), w.grad)
    close(functional.linear_grad_bias(grad), b.grad)
    into = torch.ones(4, 7, dtype=F64)
    functional.linear_add_grad_weight(into, grad, x)
    assert w.grad is not None
    close(into, w.grad + 1)


@pytest.mark.parametrize("padding_idx", [-1, 4])
def test_embedding(padding_idx: int) -> None:
    table = torch.randn(12, 5, dtype=F64, requires_grad=True)
    ids = torch.tensor([[0, 4, 11, 4], [7, 3, 3, 8]])
    grad = torch.randn(2, 4, 5, dtype=F64)
    whole = F.embedding(ids, table, padding_idx=None if padding_idx < 0 else padding_idx)
    whole.backward(grad)
    shards = table.detach().chunk(3)
    close(
        sum((functional.embedding_shard(shard, ids, rank) for rank, shard in enumerate(shards)), torch.zeros(())),
        whole.detach(),
    )
    into = [torch.ones_like(shard) for shard in shards]
    for rank in range(3):
        functional.embedding_shard_add_grad(into[rank], grad, ids, rank, padding_idx)
    assert table.grad is not None
    close(torch.cat(into), table.grad + 1)
    apart = [functional.embedding_shard_grad(grad, ids, 4, rank, padding_idx) for rank in range(3)]
    close(torch.cat(apart), table.grad)
    once = torch.ones(12, 5, dtype=F64)
    functional.embedding_add_grad(once, grad, ids, padding_idx)
    close(once, table.grad + 1)
    assert torch.equal(ids, torch.tensor([[0, 4, 11, 4], [7, 3, 3, 8]]))


@pytest.mark.parametrize("smoothing", [0.0, 0.15])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignore", [-100, 2])
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_cross_entropy(smoothing: float, weighted: bool, ignore: int, dtype: torch.dtype) -> None:
    classes, ways = 15, 3
    logits = (torch.randn(4, 6, classes, dtype=F64) * 3).to(dtype).requires_grad_()
    labels = torch.randint(classes, (4, 6))
    labels[0, :4] = ignore
    rows = torch.promote_types(dtype, torch.float32)
    weight = torch.rand(classes, dtype=rows) if weighted else None
    wide = logits.detach().to(rows).requires_grad_()
    expected = F.cross_entropy(
        wide.flatten(0, 1), labels.flatten(), weight, ignore_index=ignore, label_smoothing=smoothing, reduction="none"
    ).view(4, 6)
    grad = torch.randn(4, 6, dtype=rows)
    expected.backward(grad)
    assert wide.grad is not None
    expected_grad = wide.grad.to(dtype)
    tolerance = {F64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 1e-2}[dtype]

    with torch.no_grad():
        nll, lse = functional.cross_entropy(logits, labels, weight, ignore, smoothing)
        close(nll, expected.detach(), tolerance)
        close(
            functional.cross_entropy_backward(grad, logits, labels, lse, weight, ignore, smoothing),
            expected_grad,
            tolerance,
        )

        shards, size = logits.chunk(ways, -1), classes // ways
        weights = [None] * ways if weight is None else weight.chunk(ways)
        largest = torch.stack([functional.shard_max(shard) for shard in shards]).amax(0)
        sums = sum((functional.sum_exp(shard, largest) for shard in shards), torch.zeros(()))
        picked = sum(
            (functional.pick(shard, labels, rank * size) for rank, shard in enumerate(shards)), torch.zeros(())
        )
        smooth = sum((functional.smooth_sum(*pair) for pair in zip(shards, weights, strict=True)), torch.zeros(()))
        lse = functional.log_sum_exp(largest, sums)
        rows_loss = functional.cross_entropy_rows(lse, picked, labels, weight, ignore, smoothing, smooth, classes)
        close(rows_loss, expected.detach(), tolerance)
        grads = [
            functional.cross_entropy_backward(
                grad, shard, labels, lse, weight, ignore, smoothing, offset=rank * size, num_classes=classes
            )
            for rank, shard in enumerate(shards)
        ]
        close(torch.cat(grads, -1), expected_grad, tolerance)


def masks(kind: str, s: int, t: int) -> Tensor | None:
    if kind in ("none", "causal"):
        return None
    if kind == "keys":
        return torch.tensor([[True] * t, [True] * (t - 2) + [False] * 2]).view(2, 1, 1, t)
    allowed = torch.rand(2, 1, s, t) > 0.3
    allowed[..., 0] = True
    if kind == "bool":
        return allowed
    if kind == "flat":
        return torch.randn(s, t)
    return torch.randn(2, 4, s, t)


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float", "flat", "keys"])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("sizes", [(6, 6, 8, 8), (5, 9, 8, 8), (6, 6, 8, 5)])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("explicit", [False, True])
def test_attention(
    mask: str,
    groups: int,
    sizes: tuple[int, int, int, int],
    scale: float | None,
    explicit: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_causal = mask == "causal"
    if explicit:
        monkeypatch.setattr(attention, "fused_kernel", lambda *args: None)
    s, t, width, value_width = sizes
    q = torch.randn(2, 4, s, width, dtype=F64, requires_grad=True)
    k = torch.randn(2, groups, t, width, dtype=F64, requires_grad=True)
    v = torch.randn(2, groups, t, value_width, dtype=F64, requires_grad=True)
    given = masks(mask, s, t)
    given = given.to(F64) if given is not None and given.is_floating_point() else given
    expected = F.scaled_dot_product_attention(
        q,
        k.repeat_interleave(4 // groups, 1),
        v.repeat_interleave(4 // groups, 1),
        given,
        is_causal=is_causal,
        scale=scale,
    )
    grad = torch.randn_like(expected)
    expected.backward(grad)
    with torch.no_grad():
        out, lse = functional.attention(q, k, v, given, is_causal, scale)
        grads = functional.attention_backward(grad, q, k, v, out, lse, given, is_causal, scale)
    close(out, expected.detach())
    for mine, x in zip(grads, (q, k, v), strict=True):
        close(mine, x.grad, 1e-11)


@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_of_rows_that_are_no_neighbours(is_causal: bool) -> None:
    """A gather along the head's size leaves such strides: kernels would read past every row's elements."""
    q, k, v, grad = (torch.randn(8, 2, 4, 6, dtype=torch.float64).permute(1, 2, 3, 0) for _ in range(4))
    assert q.shape == (2, 4, 6, 8) and q.stride(-1) != 1
    found = functional.attention(q, k, v, is_causal=is_causal)
    expected = functional.attention(*(x.contiguous() for x in (q, k, v)), is_causal=is_causal)
    torch.testing.assert_close(found, expected)
    gradients = functional.attention_backward(grad, q, k, v, *found, is_causal=is_causal)
    whole = (x.contiguous() for x in (grad, q, k, v))
    torch.testing.assert_close(gradients, functional.attention_backward(*whole, *expected, is_causal=is_causal))


@pytest.mark.parametrize("explicit", [False, True])
def test_attention_rows_that_read_nothing(explicit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They give zeros, not NaN, and no gradient."""
    if explicit:
        monkeypatch.setattr(attention, "fused_kernel", lambda *args: None)
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    allowed = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    allowed[..., 2, :] = False
    out, lse = functional.attention(q, k, v, allowed)
    grads = functional.attention_backward(torch.ones_like(out), q, k, v, out, lse, allowed)
    assert torch.equal(out[:, :, 2], torch.zeros(1, 2, 8))
    assert all(bool(x.isfinite().all()) for x in grads)
    assert torch.equal(grads[0][:, :, 2], torch.zeros(1, 2, 8))


def test_attention_in_bf16() -> None:
    q, k, v = (torch.randn(1, 2, 16, 8).to(torch.bfloat16) for _ in range(3))
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    out, lse = functional.attention(q, k, v, is_causal=True)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("affine", [False, True])
def test_norms(affine: bool) -> None:
    x = torch.randn(3, 4, 7, dtype=F64, requires_grad=True)
    w = torch.randn(7, dtype=F64, requires_grad=True) if affine else None
    b = torch.randn(7, dtype=F64, requires_grad=True) if affine else None
    grad = torch.randn(3, 4, 7, dtype=F64)

    F.layer_norm(x, (7,), w, b, 1e-5).backward(grad)
    with torch.no_grad():
        y, mean, rstd = functional.layer_norm(x, (7,), w, b, 1e-5)
        grads = functional.layer_norm_backward(grad, x, (7,), w, mean, rstd)
    close(y, F.layer_norm(x, (7,), w, b, 1e-5).detach())
    close(grads[0], x.grad)
    if w is not None and b is not None:
        close(grads[1], w.grad)
        close(grads[2], b.grad)
        w.grad = None

    x.grad = None
    F.rms_norm(x, (7,), w, 1e-5).backward(grad)
    with torch.no_grad():
        y, rstd = functional.rms_norm(x, (7,), w, 1e-5)
        grad_x, grad_w = functional.rms_norm_backward(grad, x, (7,), w, rstd)
    close(y, F.rms_norm(x, (7,), w, 1e-5).detach())
    close(grad_x, x.grad)
    if w is not None:
        close(grad_w, w.grad)


def test_scale_of_attention_is_that_of_the_head() -> None:
    q, k, v = (torch.randn(1, 1, 3, 16, dtype=F64) for _ in range(3))
    close(functional.attention(q, k, v)[0], functional.attention(q, k, v, scale=1 / math.sqrt(16))[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("groups", [4, 2])
def test_attention_on_gpus(dtype: torch.dtype, is_causal: bool, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused kernels against the written-out one."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    q, grad = (torch.randn(2, 4, 40, 16, device="cuda").to(dtype) for _ in range(2))
    k, v = (torch.randn(2, groups, 40, 16, device="cuda").to(dtype) for _ in range(2))
    assert attention.fused_kernel(q, k, v, None, is_causal, 0) is not None
    out, lse = functional.attention(q, k, v, None, is_causal)
    grads = functional.attention_backward(grad, q, k, v, out, lse, None, is_causal)
    monkeypatch.setattr(attention, "fused_kernel", lambda *args: None)
    wide = [x.double() for x in (grad, q, k, v)]
    exact, exact_lse = functional.attention(*wide[1:], None, is_causal)
    exact_grads = functional.attention_backward(*wide, exact, exact_lse, None, is_causal)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 2e-3
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(grads, exact_grads, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=tolerance, atol=tolerance)


def test_pairs_of_indices_choose_and_add_as_torch_does() -> None:
    """Repeated pairs, and indices from the end; one outside is refused."""
    x = torch.randn(3, 4, 5, 2, dtype=torch.float64)
    first, second = torch.tensor([3, 0, -1, 0, 2]), torch.tensor([1, 4, 1, -1, 0])
    assert torch.equal(functional.index_pairs(x, 1, first, second), x[:, first, second])
    values = torch.randn(3, 5, 2, dtype=torch.float64)
    expected = torch.ops.aten.index_put(x, [None, first, second], values, True)
    assert torch.equal(functional.index_pairs_add(x, 1, first, second, values), expected)
    for outside in [(first + 1, second), (first, second + 1), (first - 4, second), (first, second - 5)]:
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            functional.index_pairs(x, 1, *outside)
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            functional.index_pairs_add(x, 1, *outside, values)


@pytest.mark.parametrize("mode", ["sum", "max"])
def test_bags_that_begin_at_offsets(mode: str) -> None:
    """Empty bags, equal rows of a bag, and rows behind the last bag; and ranks that have some of the bags."""
    table, ids = torch.randn(9, 4, dtype=F64), torch.tensor([3, 3, 1, 8, 0, 2, 2, 5, 7, 7])
    rows = table[ids].requires_grad_()
    bounds = torch.tensor([0, 0, 2, 5, 5, 9])
    starts, ends = bounds[:-1], bounds[1:]
    expected = F.embedding_bag(torch.arange(9), rows, starts, mode=mode)
    grad = torch.randn(5, 4, dtype=F64)
    expected.backward(grad)
    forward = {"sum": functional.bag_sum, "max": functional.bag_max}[mode]
    made, found = torch.empty(0, 4, dtype=F64), torch.zeros_like(rows)
    for some in (slice(0, 2), slice(2, 5)):
        part = rows.detach(), starts[some], ends[some]
        made = torch.cat((made, forward(*part)))
        if mode == "sum":
            found += functional.bag_sum_grad(grad[some], *part[1:], len(ids))
        else:
            found += functional.bag_max_grad(grad[some], *part)
    close(made, expected.detach())
    close(found, rows.grad)


class IndexedSums(TorchDispatchMode):
    """Collects the types in which rows are added up by index: GPUs round each addition to that type."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "index_add" in str(func):
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_rows_are_added_up_in_fp32() -> None:
    rows, ids = torch.ones(1000, 2).bfloat16(), torch.zeros(1000, dtype=torch.int64)
    starts, ends = torch.tensor([0]), torch.tensor([1000])
    with IndexedSums() as seen:
        made = functional.bag_sum(rows, starts, ends)
        functional.embedding_grad(rows, ids, 3)
        functional.embedding_shard_grad(rows, ids, 3, 0)
    assert seen.dtypes == {torch.float32} and made.dtype == torch.bfloat16
    assert made.tolist() == [[1000.0, 1000.0]]


@pytest.mark.gpu
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("count", [8, 5])
def test_products_with_experts_on_gpus(ordered: bool, count: int) -> None:
    """Grouped products in bf16, with experts without rows and the weights of a transposed view, against fp64."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    rows, inner, outer = 200, 64, 48
    experts = torch.randint(count - 1, (rows,), device="cuda")
    experts = experts.sort().values if ordered else experts
    x, grad = (torch.randn(rows, size, device="cuda").bfloat16() for size in (inner, outer))
    w = torch.randn(count, outer, inner, device="cuda").bfloat16().mT
    into = torch.randn(count, inner, outer, device="cuda")
    start = into.double()
    made = functional.expert_matmul(x, experts, w, ordered=ordered)
    back = functional.expert_matmul_grad_rows(grad, experts, w, ordered=ordered)
    functional.expert_matmul_add_grad_weight(into, grad, experts, x, ordered=ordered)
    whole = torch.zeros(rows, count, device="cuda", dtype=torch.float64).scatter_(1, experts[:, None], 1)
    x64, w64, grad64 = x.double(), w.double(), grad.double()
    torch.testing.assert_close(made.double(), torch.einsum("si,se,eio->so", x64, whole, w64), rtol=0.01, atol=0.1)
    torch.testing.assert_close(back.double(), torch.einsum("so,se,eio->si", grad64, whole, w64), rtol=0.01, atol=0.1)
    wanted = start + torch.einsum("si,se,so->eio", x64, whole, grad64)
    torch.testing.assert_close(into.double(), wanted, rtol=0.01, atol=0.1)
