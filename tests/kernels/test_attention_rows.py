"""Attention of some rows in tiles that are merged, against scores that are written out."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from partc.ir.attention import SIGNATURES
from partc.ir.operators import resolve
from partc.passes.differentiate.forms import NAMED
from partc.runtime.ops import attention as runtime_attention
from partc.runtime.ops.attention import attention, attention_backward, attention_sinks_backward, within
from partc.runtime.ops.attention_rows import attention_rows, attention_rows_backward
from partc.runtime.positions import Order, Orders, Positions

LENGTH = 24
CASES = [(True, 0), (False, 0), (True, 5), (False, 4), (True, 9), (True, LENGTH)]


def _masks() -> list[Tensor | None]:
    read = torch.rand(2, 1, LENGTH, LENGTH) > 0.3
    read[0, :, 5] = False  # a row that reads nothing
    read[1, :, 20, :16] = False  # and one that reads nothing of two ranks' keys
    added = torch.randn(4, LENGTH, LENGTH, dtype=torch.float64).masked_fill(~read[0], -math.inf)
    return [None, read, added, torch.rand(2, 1, 1, LENGTH) > 0.2]


def _written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, window: int) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    ahead = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    if causal:
        scores = scores.masked_fill(ahead < 0, -math.inf)
    if window:
        scores = scores.masked_fill(ahead.abs() >= window, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    blank = (scores == -math.inf).all(-1, keepdim=True)
    return (scores.masked_fill(blank, 0).softmax(-1) * ~blank) @ v


@pytest.mark.parametrize("dim", ["24@cp", "2 · 12@cp", "2 · 12@cp zigzag 6"])
@pytest.mark.parametrize(("causal", "window"), CASES)
def test_rows_of_three_ranks_are_those_of_the_whole(dim: str, causal: bool, window: int) -> None:
    torch.manual_seed(0)
    shapes = ((2, 4, LENGTH, 8), (2, 2, LENGTH, 8), (2, 2, LENGTH, 6))
    for mask, dense in itertools.product(_masks(), (True, False)):
        q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
        if not dense:  # heads and positions have changed places
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        whole = _written_out(q, k, v, mask, causal, window)
        grad = torch.randn_like(whole)
        wanted = torch.autograd.grad(whole, leaves, grad)
        q, k, v = (x.detach() for x in leaves)
        sums = [torch.zeros_like(x) for x in (q, k, v)]
        for rank in range(3):
            rows = Positions.parse(dim).of_rank({"cp": (rank, 3)})
            where = torch.cat([torch.arange(*run[:2]) for run in rows])
            own = mask if mask is None or mask.shape[-2] == 1 else mask[..., where, :]
            part = grad[:, :, where]
            out, lse = attention_rows(q[:, :, where], k, v, own, causal, None, window, rows=rows)
            torch.testing.assert_close(out, whole[:, :, where].detach(), rtol=1e-12, atol=1e-12)
            given = (own, out, lse, causal, None, window)
            found = attention_rows_backward(part, q[:, :, where], k, v, *given, rows=rows)
            sums[0][:, :, where] = found[0]
            sums[1] += found[1]
            sums[2] += found[2]
        for made, right in zip(sums, wanted, strict=True):
            torch.testing.assert_close(made, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("small", [0, 1 << 24])
@pytest.mark.parametrize("causal", [True, False])
def test_limits_are_the_mask_that_they_stand_for(small: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the whole, and of the rows of ranks in their order; of positions, and of documents, the last without keys."""
    monkeypatch.setattr(runtime_attention, "SMALL", small)
    at, documents = torch.arange(LENGTH)[:, None], torch.randint(0, 3, (2, LENGTH))
    prefix = torch.cat((0 * at, (at + 1).clamp(min=5)), 1)[None]
    of_documents = torch.stack((documents, documents + 1), -1)
    for limits, keys in ((prefix, None), (of_documents, documents), (of_documents, documents[:, : LENGTH - 3])):
        mask = within(limits, keys, LENGTH)
        for given in (None, torch.rand(2, 1, 1, LENGTH) > 0.2, torch.randn(4, LENGTH, LENGTH, dtype=torch.float64)):
            q, k, v, grad = (torch.randn(2, 4, LENGTH, 8, dtype=torch.float64) for _ in range(4))
            if given is None:
                both: Tensor = mask
            else:
                both = mask & given if given.dtype == torch.bool else given.masked_fill(~mask, -math.inf)
            leaves = [x.requires_grad_() for x in (q, k, v)]
            whole = _written_out(q, k, v, both, causal, 0)
            wanted = torch.autograd.grad(whole, leaves, grad)
            q, k, v = (x.detach() for x in leaves)
            out, lse = attention(q, k, v, given, causal, limits=limits, keys=keys)
            found = attention_backward(grad, q, k, v, out, lse, given, causal, limits=limits, keys=keys)
            seen = (both if both.dtype == torch.bool else both != -math.inf) & (at >= at.T if causal else at >= 0)
            read = seen.any(-1, keepdim=True).expand(2, 4, LENGTH, 1)
            torch.testing.assert_close(out * read, whole.detach(), rtol=1e-12, atol=1e-12)
            if bool(read.all()):
                torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
            for rank in range(3):
                rows = Positions.parse("2 · 12@cp zigzag 6").of_rank({"cp": (rank, 3)})
                turned = Positions.parse("2 · 12 zigzag 6").of_rank({})
                where, order = (torch.cat([torch.arange(*run[:2]) for run in runs]) for runs in (rows, turned))
                own = given if given is None or given.shape[-2] == 1 else given[..., where, :]
                own = None if own is None else own[..., order]
                part, norms = attention_rows(
                    *(q[:, :, where], k[:, :, order], v[:, :, order], own, causal),
                    limits=limits[:, where],
                    keys=keys,
                    rows=rows,
                    columns=turned,
                )
                torch.testing.assert_close(part, whole[:, :, where].detach(), rtol=1e-12, atol=1e-12)
                sums = attention_rows_backward(
                    *(grad[:, :, where], q[:, :, where], k[:, :, order], v[:, :, order], own, part, norms, causal),
                    limits=limits[:, where],
                    keys=keys,
                    rows=rows,
                    columns=turned,
                )
                torch.testing.assert_close(sums[0], wanted[0][:, :, where], rtol=1e-12, atol=1e-12)


def test_sinks_count_once_whatever_the_tiles() -> None:
    """Their gradients are sums over the ranks' rows."""
    q, k, v, grad = (torch.randn(2, 4, LENGTH, 8, dtype=torch.float64) for _ in range(4))
    sinks = torch.randn(4, dtype=torch.float64)
    for mask, window in itertools.product(_masks(), (0, 5)):
        whole, lse = attention(q, k, v, mask, True, None, window, sinks)
        sums = torch.zeros_like(sinks)
        for rank in range(3):
            rows = Positions.parse("2 · 12@cp").of_rank({"cp": (rank, 3)})
            where = torch.cat([torch.arange(*run[:2]) for run in rows])
            own = mask if mask is None or mask.shape[-2] == 1 else mask[..., where, :]
            out, norms = attention_rows(q[:, :, where], k, v, own, True, None, window, sinks=sinks, rows=rows)
            torch.testing.assert_close((out, norms), (whole[:, :, where], lse[..., where]), rtol=1e-12, atol=1e-12)
            sums += attention_sinks_backward(grad[:, :, where], out, norms, sinks)
        torch.testing.assert_close(sums, attention_sinks_backward(grad, whole, lse, sinks), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("text", ["24", "24@cp", "2 · 12@cp,tp zigzag 6", "24@cp of 21", "2 · 12@cp zigzag 4 of 23"])
def test_positions_are_printed_as_they_are_read(text: str) -> None:
    assert str(Positions.parse(text)) == text
    orders = Orders(((0, Positions.parse(text).order), (2, Order(true=31))))
    assert Orders.parse(str(orders)) == orders and str(orders).endswith(", 2 of 31")


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_attention_is_read_as_its_operator_declares_it(name: str) -> None:
    """The operands in the order of the torch operator, without those that are attributes in the IR."""
    words = {"g": "gradient", "out": "result", "is_causal": "causal", "p": "dropout", "number": "draw"}
    schema = resolve(name).default._schema.arguments  # type: ignore[attr-defined]
    names = tuple(words.get(each.name, each.name) for each in schema if each.name not in NAMED)
    assert names == SIGNATURES[name][: len(names)] and len(names) >= 7


def test_positions_of_a_rank() -> None:
    assert Positions.parse("24@cp").of_rank({"cp": (1, 3)}) == ((8, 16, 8),)
    assert Positions.parse("2 · 12@cp").of_rank({"cp": (2, 3)}) == ((8, 12, 8), (20, 24, 20))
    assert Positions.parse("24@cp,tp").of_rank({"cp": (1, 2), "tp": (0, 3)}) == ((12, 16, 12),)
    assert Positions.parse("4@cp · 6").of_rank({"cp": (1, 2)}) == ((12, 24, 12),)
