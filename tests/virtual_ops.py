"""Ranks as a dictionary: each collective's effect on all of them at once, written from its definition.

Nothing here comes from the compiler but the layouts' own fields.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from partc.ir.layout import Layout, Sizes, SubDim

Coordinate = tuple[int, ...]  # in the order of the axes of `sizes`
Shards = dict[Coordinate, Tensor]


def coordinates(sizes: Sizes) -> list[Coordinate]:
    return list(itertools.product(*(range(size) for size in sizes.values())))


def named(coordinate: Coordinate, sizes: Sizes) -> dict[str, int]:
    return dict(zip(sizes, coordinate, strict=True))


def _indices(dim: tuple[SubDim, ...], place: Mapping[str, int], sizes: Sizes) -> list[int]:
    """Global indices of a dimension that a rank holds: those whose digits are the rank's."""
    held = []
    for index in range(math.prod(sub.size for sub in dim)):
        rest, mine = index, True
        for sub in reversed(dim):
            rest, digit = divmod(rest, sub.size)
            chunk = sub.size // math.prod(sizes[axis] for axis in sub.axes)
            owner = digit // chunk
            for axis in reversed(sub.axes):
                owner, part = divmod(owner, sizes[axis])
                mine &= part == place[axis]
        if mine:
            held.append(index)
    return held


def cut(tensor: Tensor, layout: Layout, place: Mapping[str, int], sizes: Sizes) -> Tensor:
    """The part of a whole tensor that a rank holds."""
    for dim, subs in enumerate(layout.dims):
        tensor = tensor.index_select(dim, torch.tensor(_indices(subs, place, sizes), dtype=torch.long))
    return tensor


def shard(tensor: Tensor, layout: Layout, sizes: Sizes, *, seed: int = 0) -> Shards:
    """Every rank's local tensor; over partial axes, random parts whose sum is the tensor."""
    generator = torch.Generator().manual_seed(seed)
    shards: Shards = {}
    partial = [axis for axis in sizes if axis in layout.partial]
    count = math.prod(sizes[axis] for axis in partial)
    parts = [tensor]
    if count > 1:
        parts = [torch.randint(-9, 9, tensor.shape, generator=generator).to(tensor.dtype) for _ in range(count - 1)]
        parts.append(tensor - sum(parts))
    for coordinate in coordinates(sizes):
        place = named(coordinate, sizes)
        part = 0
        for axis in partial:
            part = part * sizes[axis] + place[axis]
        shards[coordinate] = cut(parts[part], layout, place, sizes)
    return shards


def assemble(shards: Shards, layout: Layout, sizes: Sizes) -> Tensor:
    """The whole tensor; raises AssertionError where copies differ."""
    example = next(iter(shards.values()))
    whole = example.new_zeros(layout.shape)
    written = torch.zeros(layout.shape, dtype=torch.bool)
    summed = [axis for axis in sizes if axis in layout.partial]
    sums: dict[Coordinate, Tensor] = {}
    for coordinate, local in shards.items():
        key = tuple(0 if axis in summed else index for axis, index in named(coordinate, sizes).items())
        sums[key] = sums[key] + local if key in sums else local
    for coordinate, local in sums.items():
        place = named(coordinate, sizes)
        held = [_indices(dim, place, sizes) for dim in layout.dims]
        where = np.ix_(*held) if held else ()
        assert list(local.shape) == [len(indices) for indices in held], f"{tuple(local.shape)} is not {layout}'s shape"
        seen = written[where]
        copies = whole[where][seen], local[seen]
        assert torch.allclose(*copies, rtol=1e-12, atol=1e-12, equal_nan=True), f"copies of {layout} differ"
        whole[where] = local
        written[where] = True
    assert written.all(), f"{layout} leaves elements out"
    return whole


def run(op: str, shards: Shards, axis: str, attrs: Mapping[str, int], sizes: Sizes) -> Shards:
    """One reshard on every rank."""
    n = sizes[axis]
    position = list(sizes).index(axis)
    groups: dict[Coordinate, list[Coordinate]] = {}
    for coordinate in shards:
        groups.setdefault(coordinate[:position] + coordinate[position + 1 :], []).append(coordinate)
    made: Shards = {}
    for members in groups.values():
        members.sort(key=lambda member: member[position])
        results = _group(op, [shards[member] for member in members], n, attrs)
        made.update(zip(members, results, strict=True))
    return made


def _group(op: str, locals_: list[Tensor], n: int, attrs: Mapping[str, int]) -> list[Tensor]:
    if op in ("vary", "alias"):
        return locals_
    if op == "settle":
        assert all(torch.equal(x, locals_[0]) for x in locals_)
        return locals_
    if op in ("spread", "div"):
        return [x / n for x in locals_]
    if op == "all_reduce":
        return [sum(locals_[1:], locals_[0])] * n
    if op == "all_to_all":
        chunks = [_chunks(x, n, attrs["split_dim"], attrs["split_outer"]) for x in locals_]
        return [
            _join([chunks[sender][receiver] for sender in range(n)], attrs["concat_dim"], attrs["concat_outer"])
            for receiver in range(n)
        ]
    dim, outer = attrs["dim"], attrs["outer"]
    if op in ("all_gather", "unshard"):
        return [_join(locals_, dim, outer)] * n
    if op in ("shard", "take"):
        return [_chunks(x, n, dim, outer)[rank] for rank, x in enumerate(locals_)]
    if op == "reduce_scatter":
        return list(_chunks(sum(locals_[1:], locals_[0]), n, dim, outer))
    if op == "put":
        zero = [torch.zeros_like(x) for x in locals_]
        return [_join([*zero[:rank], x, *zero[rank + 1 :]], dim, outer) for rank, x in enumerate(locals_)]
    raise ValueError(op)


def _chunks(x: Tensor, n: int, dim: int, outer: int) -> list[Tensor]:
    """The dimension as [outer, rest], `rest` in n pieces."""
    size = x.shape[dim]
    assert size % (outer * n) == 0, f"{size} does not split into [{outer}, {n} x ...]"
    step = size // (outer * n)
    picks = [[(o * n + r) * step + i for o in range(outer) for i in range(step)] for r in range(n)]
    return [x.index_select(dim, torch.tensor(pick)) for pick in picks]


def _join(pieces: list[Tensor], dim: int, outer: int) -> Tensor:
    """The pieces side by side in `rest` of the dimension seen as [outer, rest]."""
    size = pieces[0].shape[dim]
    assert size % outer == 0, f"{size} is not [{outer}, ...]"
    step = size // outer
    rows = [piece.narrow(dim, o * step, step) for o in range(outer) for piece in pieces]
    return torch.cat(rows, dim)
