"""Attention of some rows of a sequence: tiles of the scores by fused kernels, merged by their log-sum-exps.

A rank of the axis cp has the queries of some runs of positions. It has all keys and values (`attention_rows`), or keys
and values travel around the ranks, each of which holds its own runs (`ring_attention`). A run of queries and a run of
keys form a tile: below the diagonal all of its scores are read, on the diagonal the kernel is causal. Partial results
merge in at least fp32 (Liu et al. 2023, Ring Attention, section 3; Dao 2023, FlashAttention-2, section 3.1). In the
backward pass every tile uses the log-sum-exps and results of whole rows, so that its gradients are its summands of the
whole gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..comm.comm import Axis, Pending
from ..positions import Stretch, Stretches
from ..random import Draw
from .attention import (
    attention,
    attention_backward,
    attention_bias_backward,
    attention_in_blocks,
    attention_in_blocks_backward,
    kernel_name,
    kernels_lse,
    mask_part,
    plain_lse,
    row_dtype,
    spelled_out,
    with_sinks,
)


@dataclass(frozen=True, slots=True)
class Scores:
    """The arguments of attention other than queries, keys and values: which scores are read, and their scale."""

    mask: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    window: int = 0
    p: float = 0.0
    draw: Draw | None = None
    limits: Tensor | None = None
    keys: Tensor | None = None  # the keys of limits, in the order of positions

    def part(self, tile: Tile, q: Tensor, k: Tensor) -> Scores:
        """The arguments for a tile with these `q` and `k`."""
        rows, columns, every = tile.rows, tile.whole, slice(None)
        draw = None if self.draw is None else self.draw.part(every, every, rows, columns)
        mask = mask_part(self.mask, None, rows, columns)
        if self.limits is None:
            return replace(self, mask=mask, draw=draw)
        if self.keys is None:
            keys = torch.arange(tile.at.start, tile.at.stop, device=q.device)[None]
        else:
            keys = self.keys[:, tile.at]
        mask, limits = spelled_out(mask, self.limits[:, rows], keys, q, k)
        return replace(self, mask=mask, draw=draw, limits=limits, keys=keys)


@dataclass(frozen=True, slots=True)
class Tile:
    """Some rows and columns of the scores, as slices of this rank's queries and of the current keys.

    Masks and random numbers have `whole` columns, one for each key; the columns' positions are `at`. The first row is
    `ahead` positions after the first column.
    """

    rows: slice
    columns: slice
    whole: slice
    at: slice
    ahead: int
    kind: str  # "all": every score is read; "diagonal": the kernel is causal; "some": other scores are hidden


def attention_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    p: float = 0.0,
    draw: Draw | None = None,
    *,
    sinks: Tensor | None = None,
    limits: Tensor | None = None,
    keys: Tensor | None = None,
    rows: Stretches,
    columns: Stretches = (),
) -> tuple[Tensor, Tensor]:
    """Attention with the queries at the positions `rows` and all keys and values, whose positions are `columns` if
    given.
    """
    merged = Merged(q, v)
    scores = Scores(mask, is_causal, scale, window, p, draw, limits, keys)
    for tile in tiles(rows, columns or (Stretch(0, k.shape[2], 0),), scores):
        merged.add(q, k, v, tile, scores)
    return merged.results(sinks)


def attention_rows_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    p: float = 0.0,
    draw: Draw | None = None,
    learned: bool = False,
    *,
    limits: Tensor | None = None,
    keys: Tensor | None = None,
    rows: Stretches,
    columns: Stretches = (),
) -> tuple[Tensor, ...]:
    """The gradients of q, k and v, and of the mask if it is learned; those of k and v are partial sums."""
    scores = Scores(mask, is_causal, scale, window, p, draw, limits, keys)
    sums = TileGradients.like(q, k, v, mask if learned else None)
    for tile in tiles(rows, columns or (Stretch(0, k.shape[2], 0),), scores):
        sums.add(grad, q, k, v, out, lse, tile, scores)
    found = (sums.q.to(q.dtype), sums.k.to(k.dtype), sums.v.to(v.dtype))
    return found if sums.mask is None or mask is None else (*found, sums.mask.to(mask.dtype))


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    p: float = 0.0,
    draw: Draw | None = None,
    *,
    sinks: Tensor | None = None,
    limits: Tensor | None = None,
    keys: Tensor | None = None,
    ring: Axis,
    rows: Sequence[Stretches],
) -> tuple[Tensor, Tensor]:
    """Attention with queries, keys and values cut alike; keys and values travel around the ranks of `ring`.

    `rows` are the positions of each rank's part. A part is sent on while its scores are computed.
    """
    merged = Merged(q, v)
    scores = Scores(mask, is_causal, scale, window, p, draw, limits, keys)
    for source, keys, values in _ring_blocks(ring, k, v):
        for tile in tiles(rows[ring.rank], rows[source], scores):
            merged.add(q, keys, values, tile, scores)
    return merged.results(sinks)


def ring_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    p: float = 0.0,
    draw: Draw | None = None,
    learned: bool = False,
    *,
    limits: Tensor | None = None,
    keys: Tensor | None = None,
    ring: Axis,
    rows: Sequence[Stretches],
) -> tuple[Tensor, ...]:
    """The gradients of q, k and v, and of the mask if it is learned.

    The gradients of a part of keys and values travel one step behind it, in at least fp32, until they reach its rank.
    """
    scores = Scores(mask, is_causal, scale, window, p, draw, limits, keys)
    sums = TileGradients.like(q, k, v, mask if learned else None)
    size = k.numel()
    coming: Pending[Tensor] | None = None
    for source, keys, values in _ring_blocks(ring, k, v):
        here = sums.k.new_zeros(size + v.numel())
        sums.k, sums.v = here[:size].view(k.shape), here[size:].view(v.shape)
        for tile in tiles(rows[ring.rank], rows[source], scores):
            sums.add(grad, q, keys, values, out, lse, tile, scores)
        if coming is not None:
            here += coming.wait()
        coming = ring.start_shift(here)
    assert coming is not None
    home = coming.wait()
    found = (sums.q.to(q.dtype), home[:size].view(k.shape).to(k.dtype), home[size:].view(v.shape).to(v.dtype))
    return found if sums.mask is None or mask is None else (*found, sums.mask.to(mask.dtype))


def _ring_blocks(ring: Axis, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The keys and values of all ranks as (rank, k, v): this rank's first, then those of the ranks before it."""
    size = k.numel()
    here = torch.cat([k.reshape(-1), v.reshape(-1)])
    for step in range(ring.size):
        coming = ring.start_shift(here) if step + 1 < ring.size else None
        yield (ring.rank - step) % ring.size, here[:size].view(k.shape), here[size:].view(v.shape)
        if coming is not None:
            here = coming.wait()


def tiles(rows: Stretches, columns: Stretches, scores: Scores) -> Iterator[Tile]:
    """The tiles in which some scores are read."""
    row = 0
    for own in rows:
        column = 0
        for read in columns:
            for first, last, kind in _read(own, read, scores):
                here, length = first - read.start, last - first
                yield Tile(
                    slice(row, row + own.stop - own.start),
                    slice(column + here, column + here + length),
                    slice(read.held + here, read.held + here + length),
                    slice(first, last),
                    own.start - first,
                    kind,
                )
            column += read.stop - read.start
        row += own.stop - own.start


def _read(own: Stretch, read: Stretch, scores: Scores) -> Iterator[tuple[int, int, str]]:
    """The positions of `read` that the queries of `own` read, in parts: (start, stop, kind of tile)."""
    start, stop, first, last = own.start, own.stop, read.start, read.stop
    if scores.is_causal:
        last = min(last, stop)
    if scores.window:
        first = max(first, start - scores.window + 1)
        last = last if scores.is_causal else min(last, stop + scores.window - 1)
        near = max(stop - 1 - first, last - 1 - start) < scores.window
        if not near:
            if first < last:
                yield first, last, "some"
            return
    if not scores.is_causal:
        if first < last:
            yield first, last, "all"
        return
    if first < min(last, start):
        yield first, min(last, start), "all"
    first = max(first, start)
    if first < last:
        yield first, last, "diagonal" if (first, last) == (start, stop) else "some"


class Merged:
    """The merged results of some rows, over the tiles added so far."""

    def __init__(self, q: Tensor, v: Tensor) -> None:
        b, heads, s, _ = q.shape
        wide = row_dtype(q)
        self._dtype = q.dtype
        self.out = q.new_zeros(b, s, heads, v.shape[-1], dtype=wide).transpose(1, 2)
        self.lse = q.new_full((b, heads, s), -math.inf, dtype=wide)

    def add(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scores: Scores) -> None:
        out, lse = _tile(q[:, :, tile.rows], k[:, :, tile.columns], v[:, :, tile.columns], tile, scores)
        here, sums = self.out[:, :, tile.rows], self.lse[..., tile.rows]
        # A row that reads no position has no sum: the difference is NaN, and its weight is set to zero.
        share = torch.sigmoid(lse.to(sums.dtype) - sums).nan_to_num_(nan=0.0).unsqueeze(-1)
        here.add_(share * (out.to(here.dtype) - here))
        sums.copy_(torch.logaddexp(sums, lse))

    def results(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = (self.out, self.lse) if sinks is None else with_sinks(self.out, self.lse, sinks)
        return out.to(self._dtype), lse


def _tile(q: Tensor, k: Tensor, v: Tensor, tile: Tile, scores: Scores) -> tuple[Tensor, Tensor]:
    """The results of a tile alone, and its rows' log-sum-exps; minus infinity where a row reads nothing."""
    part = scores.part(tile, q, k)
    if _by_blocks(tile, part):
        return attention_in_blocks(
            *(q, k, v, part.mask, scores.is_causal, scores.scale, scores.window, scores.p, part.draw),
            ahead=tile.ahead,
            limits=part.limits,
            keys=part.keys,
        )
    out, lse = attention(q, k, v, part.mask, tile.kind == "diagonal", scores.scale)
    # Kernels return finite numbers for rows that read nothing.
    return out, plain_lse(lse, q, part.mask, tile.kind == "diagonal")


def _by_blocks(tile: Tile, scores: Scores) -> bool:
    return tile.kind == "some" or scores.draw is not None or scores.limits is not None


@dataclass(slots=True)
class TileGradients:
    """The sums of gradients over tiles, in at least fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None

    @classmethod
    def like(cls, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> TileGradients:
        wide = row_dtype(q)
        zeros = [
            torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v, *([] if mask is None else [mask]))
        ]
        return cls(*zeros)

    def add(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        tile: Tile,
        scores: Scores,
    ) -> None:
        lse = lse.masked_fill(lse == -math.inf, math.inf)  # all weights of a row without positions become zero
        grad, q, out, lse = grad[:, :, tile.rows], q[:, :, tile.rows], out[:, :, tile.rows], lse[..., tile.rows]
        k, v = k[:, :, tile.columns], v[:, :, tile.columns]
        part = scores.part(tile, q, k)
        found: tuple[Tensor | None, ...]
        if _by_blocks(tile, part):
            found = attention_in_blocks_backward(
                *(grad, q, k, v, out, lse, part.mask, scores.is_causal, scores.scale, scores.window, scores.p),
                part.draw,
                learned=self.mask is not None,
                ahead=tile.ahead,
                limits=part.limits,
                keys=part.keys,
            )
        else:
            causal = tile.kind == "diagonal"
            form = kernels_lse(lse, kernel_name(q, k, v, part.mask, causal))
            if self.mask is None or part.mask is None:
                found = attention_backward(grad, q, k, v, out, form, part.mask, causal, scores.scale)
            else:
                found = attention_bias_backward(grad, q, k, v, part.mask, out, form, causal, scores.scale)
        sums = (
            self.q[:, :, tile.rows],
            self.k[:, :, tile.columns],
            self.v[:, :, tile.columns],
            mask_part(self.mask, None, tile.rows, tile.whole),
        )
        for into, gradient in zip(sums, found, strict=False):
            if into is not None and gradient is not None:
                into += gradient
