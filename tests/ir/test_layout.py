"""Layouts: their text, their normal form, and the shards that ranks hold."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partc.ir.layout import Layout, Partial, Placement, Replicated, Shard, SubDim, Varying, index_ranges
from tests.virtual_ops import coordinates, cut, named

SIZES = {"dp": 2, "tp": 3, "mb": 2}


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any sub-dimensions, any axes on them in any order, also in spellings that aren't normal."""
    axes = draw(st.permutations(list(SIZES)))
    dims = []
    for _ in range(draw(st.integers(1, 3))):
        subs = []
        for _ in range(draw(st.integers(1, 3))):
            taken = tuple(axes.pop() for _ in range(min(len(axes), draw(st.integers(0, 2)))))
            subs.append(SubDim(math.prod(SIZES[a] for a in taken) * draw(st.integers(1, 3)), taken))
        dims.append(tuple(subs))
    marks = [draw(st.sampled_from("rvp")) for _ in axes]
    partial = tuple(axis for axis, mark in zip(axes, marks, strict=True) if mark == "p")
    varying = tuple(axis for axis, mark in zip(axes, marks, strict=True) if mark == "v")
    return Layout(tuple(dims), partial, varying)


def held(layout: Layout, coordinate: tuple[int, ...]) -> list[list[int]]:
    place = named(coordinate, SIZES)
    return [[i for a, b in ranges for i in range(a, b)] for ranges in index_ranges(layout, place, SIZES)]


@given(layouts())
def test_text_parses_back(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout
    assert Layout.parse(str(layout).replace("·", "*")) == layout


@given(layouts())
def test_normal_form_holds_the_same_elements(layout: Layout) -> None:
    normal = layout.normalized(SIZES)
    assert normal.normalized(SIZES) == normal
    assert normal.shape == layout.shape
    assert normal.local_shape(SIZES) == layout.local_shape(SIZES)
    for coordinate in coordinates(SIZES):
        assert held(normal, coordinate) == held(layout, coordinate)


@given(layouts(), layouts())
def test_layouts_that_hold_the_same_elements_are_equal(one: Layout, other: Layout) -> None:
    same = one.shape == other.shape and all(held(one, c) == held(other, c) for c in coordinates(SIZES))
    one, other = one.normalized(SIZES), other.normalized(SIZES)
    assert same == (one.dims == other.dims)


@given(layouts())
def test_index_ranges_are_what_digits_say(layout: Layout) -> None:
    whole = torch.arange(math.prod(layout.shape)).reshape(layout.shape)
    for coordinate in coordinates(SIZES):
        place = named(coordinate, SIZES)
        expected = cut(whole, layout, place, SIZES)
        indices = torch.meshgrid(*map(torch.tensor, held(layout, coordinate)), indexing="ij")
        assert torch.equal(whole[indices], expected)
        assert tuple(expected.shape) == layout.local_shape(SIZES)


@given(layouts())
def test_placements_build_the_layout_again(layout: Layout) -> None:
    """Where no sub-dimension is exhausted between two axes, single-axis placements say everything."""
    normal = layout.normalized(SIZES)
    order = [*normal.sharded_axes, *(axis for axis in SIZES if axis not in normal.sharded_axes)]
    built = Layout.build(normal.shape, normal.placements(order), SIZES)
    assert built is not None
    for axis in SIZES:
        assert built.placement(axis) == normal.placement(axis)
    assert built == normal


def test_ranges_join_where_they_touch() -> None:
    layout = Layout.parse("[12@dp, 3 · 4@dp, 2]")
    assert index_ranges(Layout.parse("[12@dp, 4]"), {"dp": 1}, SIZES) == (((6, 12),), ((0, 4),))
    assert index_ranges(layout, {"dp": 1}, {"dp": 2})[1] == ((2, 4), (6, 8), (10, 12))
    assert index_ranges(Layout.parse("[4 · 3]"), {}, SIZES) == (((0, 12),),)


@pytest.mark.parametrize(
    ("shape", "placements", "expected"),
    [
        ((16, 8), {"dp": Shard(0), "mb": Shard(0)}, "[16@dp,mb, 8]"),
        ((12, 8), {"tp": Shard(0, 4)}, "[4 · 3@tp, 8]"),
        ((36,), {"dp": Shard(0), "tp": Shard(0, 6)}, "[6@dp · 6@tp]"),
        ((12,), {"dp": Shard(0), "tp": Shard(0, 2)}, "[12@dp,tp]"),  # two rows cut over dp: nested all the same
        ((6,), {"dp": Partial(), "tp": Varying(), "mb": Replicated()}, "[6] partial(dp) vary(tp)"),
        ((8,), {"tp": Shard(0)}, None),
        ((12,), {"dp": Shard(0, 5)}, None),
        ((12,), {"dp": Shard(0), "tp": Shard(0, 3)}, None),  # 3 rows don't divide over dp
        ((36,), {"dp": Shard(0, 4), "tp": Shard(0, 6)}, None),  # 6 is not a multiple of 4
    ],
)
def test_build(shape: tuple[int, ...], placements: dict[str, Placement], expected: str | None) -> None:
    built = Layout.build(shape, placements, SIZES)
    assert (built and str(built)) == expected


def test_dual_swaps_varying_for_partial() -> None:
    layout = Layout.parse("[12@dp] partial(tp) vary(mb)")
    assert str(layout.dual()) == "[12@dp] partial(mb)"
    assert str(layout.without("dp", "mb")) == "[12] partial(tp)"


@pytest.mark.parametrize("text", ["12", "[a]", "[4@]", "[4] partial", "[4@tp", "[4 + 3]", "[4] varies(tp)"])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        Layout.parse(text)


def test_scalars() -> None:
    layout = Layout.parse("[] partial(dp)")
    assert (layout.shape, layout.local_shape(SIZES), str(layout)) == ((), (), "[] partial(dp)")
    assert index_ranges(layout, {"dp": 1}, SIZES) == ()
