"""Boxes: with every layout, the ranks that speak for a tensor write each of its elements once."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from partc.runtime.checkpoint.boxes import Box, pieces, writes_tensor
from partc.runtime.layout import Shard

SIZES = {"pp": 2, "dp": 2, "tp": 3}


@pytest.mark.parametrize(
    ("type", "holds"),
    [
        ("f32[5, 7]", ()),
        ("f32[]", ()),
        ("f32[6@tp, 4]", ()),
        ("f32[6@tp, 4@dp]", ()),
        ("f32[12@tp,dp, 5]", ()),
        ("f32[12@dp,tp]", ()),
        ("f32[3 · 6@tp, 5]", ()),
        ("f32[2@dp · 3 · 6@tp · 2, 5 · 3]", ()),
        ("f32[3@tp · 5 · 2@dp]", ()),
        ("f32[9@tp, 4]", (7, 4)),
        ("f32[6@tp, 4]", (1, 4)),
        ("f32[2 · 6@tp, 3]", (7, 3)),
        ("f32[7@tp, 4]", ()),
        ("f32[2@dp · 5@tp, 3]", ()),
        ("f32[3, 2 · 4@tp]", ()),
        ("f32[1@tp]", ()),
        ("f32[8@tp, 4]", (5, 4)),
    ],
)
@pytest.mark.parametrize("holders", [(0,), (1,), (0, 1)])
def test_every_element_is_written_once(type: str, holds: tuple[int, ...], holders: tuple[int, ...]) -> None:
    shard = Shard(type, holds=holds)
    shape = holds or shard.shape
    whole = torch.arange(float(math.prod(shape))).view(shape)
    times = torch.zeros(shape)
    for place in itertools.product(*map(range, SIZES.values())):
        coordinate = dict(zip(SIZES, place, strict=True))
        if coordinate["pp"] not in holders:
            continue
        local = shard.local(whole, SIZES, coordinate)
        rebuilt = torch.zeros_like(local)
        found = pieces(shard.dims, shape, SIZES, coordinate)
        for piece in found:
            rebuilt[piece.here.slices] = whole[piece.whole.slices]
        assert torch.equal(rebuilt, local)
        if writes_tensor("a.weight", shard.cut, SIZES, coordinate, holders):
            for piece in found:
                times[piece.whole.slices] += 1
    assert torch.equal(times, torch.ones(shape))


def test_a_strided_shard_has_as_few_boxes_as_it_can() -> None:
    dims = Shard("f32[3 · 6@tp, 5 · 4, 8]").dims
    found = pieces(dims, (18, 20, 8), {"tp": 2}, {"tp": 1})
    assert [piece.whole for piece in found] == [Box((start, 0, 0), (3, 20, 8)) for start in (3, 9, 15)]
    assert [piece.local for piece in found] == [(0, 0, 0), (3, 0, 0), (6, 0, 0)]
    assert len(pieces(dims, (18, 20, 8), {"tp": 1}, {"tp": 0})) == 1


def test_copies_share_the_work() -> None:
    sizes = {"dp": 4}
    names = [f"blocks.{index}.weight" for index in range(400)]
    counts = [sum(writes_tensor(name, (), sizes, {"dp": place}, (0,)) for name in names) for place in range(4)]
    assert sum(counts) == 400 and min(counts) > 60


def test_boxes_meet() -> None:
    box = Box((2, 3), (4, 5))
    assert box.meet(Box((0, 0), (3, 4))) == Box((2, 3), (1, 1))
    assert box.meet(Box((6, 3), (1, 1))) is None
    assert Box((), ()).meet(Box((), ())) == Box((), ())
