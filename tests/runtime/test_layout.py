"""Cutting whole tensors to local ones, against a loop over every index."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from partc.ir.layout import Layout, index_ranges
from partc.runtime.checkpoint.boxes import pieces
from partc.runtime.dims import Sectioned, parse_dims
from partc.runtime.layout import DTYPES, Received, Shard, microbatch_part, parse_mesh

SIZES = {"pp": 2, "dp": 3, "tp": 2}


def held(layout: Layout, index: tuple[int, ...], sizes: dict[str, int]) -> dict[str, int]:
    """On which coordinate of each axis an element lies: its index taken apart, factor by factor."""
    place: dict[str, int] = {}
    for position, dim in zip(index, layout.dims, strict=True):
        for sub in reversed(dim):
            position, digit = divmod(position, sub.size)
            block = sub.size
            for axis in sub.axes:
                block //= sizes[axis]
                place[axis], digit = divmod(digit, block)
    return place


@pytest.mark.parametrize(
    "text",
    [
        "[12, 5]",
        "[12@tp, 5]",
        "[5, 12@dp]",
        "[3 · 4@tp, 5]",
        "[12@dp,tp, 7]",
        "[12@tp,dp, 7]",
        "[3@dp · 5 · 4@tp, 2@pp]",
        "[6@dp · 4@tp]",
        "[]",
        "[4@tp] partial(dp)",
    ],
)
def test_local_parts(text: str) -> None:
    layout = Layout.parse(text)
    shard = Shard("i64" + text)
    assert shard.shape == layout.shape and shard.dtype == torch.int64
    assert shard.local_shape(SIZES) == layout.local_shape(SIZES)
    whole = torch.arange(max(1, torch.Size(layout.shape).numel())).view(layout.shape)
    for numbers in itertools.product(*(range(size) for size in SIZES.values())):
        coordinate = dict(zip(SIZES, numbers, strict=True))
        mine = [
            int(whole[index])
            for index in itertools.product(*map(range, layout.shape))
            if all(coordinate[axis] == at for axis, at in held(layout, index, SIZES).items())
        ]
        part = shard.local(whole, SIZES, coordinate)
        assert part.shape == shard.local_shape(SIZES)
        assert part.flatten().tolist() == mine


SPARE = ["[7@dp, 2]", "[2@tp · 5@dp]", "[3, 2 · 4@dp]", "[1@dp]", "[7@dp,tp · 2]", "[2@dp, 5]", "[14@tp · 1@dp]"]


@pytest.mark.parametrize("text", SPARE)
def test_parts_that_end_with_spare_elements(text: str) -> None:
    """Each factor's numbers are dealt out in equal parts, the last ones filled up with zeros; the IR says the same."""
    shard, layout = Shard("i64" + text), Layout.parse(text)
    whole = torch.arange(1, torch.Size(shard.shape).numel() + 1).view(shard.shape)
    factors = [factor for dim in shard.dims for factor in dim]
    numbered = whole.view([size for size, _ in factors])
    seen = []
    for place in itertools.product(*map(range, SIZES.values())):
        coordinate = dict(zip(SIZES, place, strict=True))
        dealt = []
        for size, axes in factors:
            ways = [SIZES[axis] for axis in axes]
            rank = sum(coordinate[axis] * torch.Size(ways[at + 1 :]).numel() for at, axis in enumerate(axes))
            filled = [*range(size), *(-1 for _ in range(-size % torch.Size(ways).numel()))]
            each = len(filled) // torch.Size(ways).numel()
            dealt.append(filled[rank * each : (rank + 1) * each])
        expected = [0 if -1 in index else int(numbered[index]) for index in itertools.product(*dealt)]
        part = shard.local(whole, SIZES, coordinate)
        assert part.flatten().tolist() == expected
        assert part.shape == shard.local_shape(SIZES) == layout.local_shape(SIZES)
        ranges = index_ranges(layout, coordinate, SIZES)
        held = [[i for start, end in dim for i in range(start, end)] for dim in ranges]
        assert [int(whole[index]) for index in itertools.product(*held)] == [each for each in expected if each]
        if not coordinate["pp"]:
            seen += [each for each in expected if each]
    copies = 2 if "tp" not in text else 1
    assert sorted(seen) == sorted(whole.flatten().tolist() * copies)
    normal = layout.normalized(SIZES)
    for place in itertools.product(*map(range, SIZES.values())):
        coordinate = dict(zip(SIZES, place, strict=True))
        assert index_ranges(normal, coordinate, SIZES) == index_ranges(layout, coordinate, SIZES)


ORDER = Sectioned(0, 4, (8, 4, 12))  # 24 rows


@pytest.mark.parametrize(
    "text", ["[24@tp]", "[24@pp,tp]", "[24@pp,tp,dp]", "[24, 5]", "[7@dp, 24@tp]", "[24@tp, 7@dp]"]
)
def test_sections_are_stored_by_part(text: str) -> None:
    """A rank's part of a whole tensor, and its boxes in a checkpoint, have the rows of its place in the stored order."""
    dim = 1 if text.startswith("[7") else 0
    shard = Shard("i64" + text, sectioned=ORDER._replace(dim=dim))
    starts = [sum(ORDER.sections[:index]) for index in range(3)]
    stored = [
        start + part * (size // 4) + row
        for part in range(4)
        for start, size in zip(starts, ORDER.sections, strict=True)
        for row in range(size // 4)
    ]
    whole = torch.arange(torch.Size(shard.shape).numel()).view(shard.shape)
    assert shard.in_model_order(whole.index_select(dim, torch.tensor(stored))).equal(whole)
    plain = replace(shard, sectioned=None)
    for place in itertools.product(*map(range, SIZES.values())):
        coordinate = dict(zip(SIZES, place, strict=True))
        part = shard.local(whole, SIZES, coordinate)
        assert part.equal(plain.local(whole.index_select(dim, torch.tensor(stored)), SIZES, coordinate))
        filled = torch.zeros_like(part)
        for piece in pieces(shard.dims, shard.shape, SIZES, coordinate, shard.sectioned):
            filled[piece.here.slices] = whole[piece.whole.slices]
        assert filled.equal(part)


def test_axes_that_the_mesh_has_not_cut_nothing() -> None:
    x = torch.arange(8)
    assert torch.equal(Shard("i64[8@dp,tp]").local(x, {"tp": 2}, {"tp": 1}), x[4:])


@pytest.mark.parametrize("text", ["[12@dp,mb, 5@tp]", "[12@mb, 6@tp]", "[2 · 12@dp,mb]", "[12]"])
def test_microbatches(text: str) -> None:
    """Cut over the mesh first and in time afterwards: the same as both at once."""
    sizes, count = {"dp": 2, "tp": 1}, 3
    shard = Shard("i64" + text)
    whole = torch.arange(torch.Size(shard.shape).numel()).view(shard.shape)
    for place in range(2):
        local = shard.local(whole, sizes, {"dp": place, "tp": 0})
        for index in range(count):
            expected = shard.local(whole, {**sizes, "mb": count}, {"dp": place, "tp": 0, "mb": index})
            assert torch.equal(microbatch_part(local, shard.dims, sizes, count, index), expected)


def test_dtypes_cover_the_compilers() -> None:
    from partc.ir.program import ITEMSIZE

    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == dict(ITEMSIZE)
    assert Received(source=0, shape=(2,), dtype="bf16").torch_dtype == torch.bfloat16


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(4,\) where the layout says \(8,\)"):
        Shard("i64[8@tp]").local(torch.arange(4), SIZES, {"tp": 0})


def test_parsing() -> None:
    assert parse_dims("[16@dp,mb, 3 * 4@tp]") == (((16, ("dp", "mb")),), ((3, ()), (4, ("tp",))))
    assert parse_mesh("pp=2,dp=4,tp=8") == {"pp": 2, "dp": 4, "tp": 8}
