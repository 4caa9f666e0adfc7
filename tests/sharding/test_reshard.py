"""Reshard plans against brute force: run on virtual ranks, compared with a new cut of the whole tensor."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from partc.errors import InternalError
from partc.ir.collectives import COLLECTIVES, backward_cost, cost
from partc.ir.layout import Layout, Partial, Placement, Replicated, Shard, SubDim, Varying
from partc.sharding import reshard
from partc.sharding.reshard import plan, traffic, transition
from tests.virtual_ops import Coordinate, assemble, coordinates, cut, named, run, shard

SIZES = {"a": 2, "b": 3, "c": 2}


def lay(text: str, sizes: dict[str, int] = SIZES) -> Layout:
    return Layout.parse(text).normalized(sizes)


def random_layout(shape: tuple[int, ...], sizes: dict[str, int], rng: random.Random) -> Layout:
    """Any factorisation of each dimension, any axes on any factor, in any order."""
    axes = list(sizes)
    rng.shuffle(axes)
    dims: list[tuple[SubDim, ...]] = []
    for size in shape:
        subs, rest = [], size
        while rest > 1:
            factor = rng.choice([n for n in range(2, rest + 1) if rest % n == 0])
            taken: list[str] = []
            while axes and rng.random() < 0.5 and factor % math.prod(sizes[a] for a in (*taken, axes[-1])) == 0:
                taken.append(axes.pop())
            subs.append(SubDim(factor, tuple(taken)))
            rest //= factor
        dims.append(tuple(subs) or (SubDim(1),))
    marks = {axis: rng.choice("rvp") for axis in axes}
    partial = tuple(axis for axis, mark in marks.items() if mark == "p")
    varying = tuple(axis for axis, mark in marks.items() if mark == "v")
    return Layout(tuple(dims), partial, varying).normalized(sizes)


@pytest.mark.parametrize("seed", range(150))
def test_plan_runs_to_the_target(seed: int) -> None:
    rng = random.Random(seed)
    shape = rng.choice([(12, 18), (36,), (12, 6, 2), (24, 12)])
    src, dst = random_layout(shape, SIZES, rng), random_layout(shape, SIZES, rng)
    whole = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    shards = shard(whole, src, SIZES)
    for step in plan(src, dst, sizes=SIZES, itemsize=4):
        sent = next(iter(shards.values())).numel() * 4
        assert step.forward == cost(step.op, SIZES[step.axis], sent)
        shards = run(step.op, shards, step.axis, dict(step.attrs), SIZES)
        assert step.result == step.result.normalized(SIZES)
        assert torch.allclose(assemble(shards, step.result, SIZES), whole, rtol=1e-12)
    if not dst.partial:
        for coordinate, local in shards.items():
            assert torch.allclose(local, cut(whole, dst, named(coordinate, SIZES), SIZES), rtol=1e-12)
    assert torch.allclose(assemble(shards, dst, SIZES), whole, rtol=1e-12)


@pytest.mark.parametrize("seed", range(60))
def test_backward_is_the_transpose(seed: int) -> None:
    """<step(x), g> = <x, transpose(g)>, with values and gradients read as their placements say.

    The pairing counts a replicated axis once, and sums over ranks where either side is a sum.
    """
    rng = random.Random(1000 + seed)
    shape = rng.choice([(12, 18), (36,), (24, 6)])
    src, dst = random_layout(shape, SIZES, rng), random_layout(shape, SIZES, rng)
    layout = src
    whole = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    gradient = whole.flip(0) * 7 % 5
    for step in plan(src, dst, sizes=SIZES, itemsize=4):
        given = shard(gradient, step.result.dual(), SIZES, seed=seed)
        attrs = dict(step.attrs)
        if step.op == "all_to_all":
            attrs = {
                "split_dim": attrs["concat_dim"],
                "split_outer": attrs["concat_outer"],
                "concat_dim": attrs["split_dim"],
                "concat_outer": attrs["split_outer"],
            }
        back = run(COLLECTIVES[step.op].transpose, given, step.axis, attrs, SIZES)
        sent = next(iter(shard(whole, layout, SIZES).values())).numel() * 4
        assert step.backward == backward_cost(step.op, SIZES[step.axis], sent)
        assert torch.allclose(assemble(back, layout.dual(), SIZES), gradient, rtol=1e-12)
        layout = step.result


@pytest.mark.parametrize("needs_grad", [True, False])
def test_the_bound_of_the_search_changes_no_cost(monkeypatch: pytest.MonkeyPatch, needs_grad: bool) -> None:
    rng, sizes = random.Random(7), {"a": 2, "b": 3, "mb": 2}
    pairs = [[random_layout((12, 12), sizes, rng) for _ in range(2)] for _ in range(40)]

    def costs() -> list[tuple[int, ...]]:
        reshard.normalized_plan.cache_clear()
        plans = [plan(*pair, sizes=sizes, itemsize=4, needs_grad=needs_grad) for pair in pairs]
        times = [[step for step in steps if step.axis == "mb" and step.op not in ("vary", "settle")] for steps in plans]
        moved = [sum(step.forward + needs_grad * step.backward for step in steps) for steps in plans]
        return [*zip(map(len, times), moved, map(len, plans), strict=True)]

    found = costs()
    monkeypatch.setattr(reshard.LeastRest, "of", lambda self, layout: (0, 0))
    assert costs() == found


def test_cuts_of_a_dimension_with_other_cuts_are_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"dp": 2, "mb": 2, "tp": 2, "ep": 4}
    source, target = (lay(f"[15360{cut} · 4096@tp,ep, 8]", sizes) for cut in ("", "@dp,mb"))
    seen, moves = [], reshard.Moves.of
    monkeypatch.setattr(reshard.Moves, "of", lambda self, layout: seen.append(layout) or moves(self, layout))
    steps = plan(source, target, sizes=sizes, itemsize=8)
    assert [(step.op, step.axis) for step in steps] == [("shard", "dp"), ("shard", "mb")]
    assert len(seen) < 10


def test_dual_exchanges_sums_and_equal_gradients() -> None:
    assert lay("[4@a, 6] partial(b) vary(c)").dual() == lay("[4@a, 6] partial(c)")


# Brute force over short chains: ranks hold arrays of global indices, and every operation at every
# position is tried. Knows nothing of sub-dimensions.

Array = np.ndarray[Any, np.dtype[np.int64]]
Held = dict[Coordinate, Array]
State = tuple[Held, frozenset[str], frozenset[str]]  # global indices, partial axes, varying axes
Key = tuple[tuple[tuple[tuple[int, ...], bytes], ...], frozenset[str], frozenset[str]]


class Brute:
    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.places = coordinates(sizes)

    def state(self, layout: Layout) -> State:
        whole = torch.arange(math.prod(layout.shape)).reshape(layout.shape)
        held = {p: cut(whole, layout, named(p, self.sizes), self.sizes).numpy() for p in self.places}
        return held, frozenset(layout.partial), frozenset(layout.varying)

    @staticmethod
    def key(state: State) -> Key:
        held, partial, varying = state
        return tuple((x.shape, x.tobytes()) for x in held.values()), partial, varying

    def groups(self, axis: str) -> Iterator[list[Coordinate]]:
        at = list(self.sizes).index(axis)
        for place in self.places:
            if place[at] == 0:
                yield [(*place[:at], i, *place[at + 1 :]) for i in range(self.sizes[axis])]

    def moves(self, state: State) -> Iterator[tuple[str, str, State]]:
        held, partial, varying = state
        some = next(iter(held.values()))
        for axis, n in self.sizes.items():
            cuts = [
                (dim, outer)
                for dim, size in enumerate(some.shape)
                for outer in range(1, size // n + 1)
                if size % (outer * n) == 0
            ]
            joins = [
                (d, outer) for d, size in enumerate(some.shape) for outer in range(1, size + 1) if size % outer == 0
            ]
            equal = all(np.array_equal(held[g[0]], held[m]) for g in self.groups(axis) for m in g)
            if axis in partial:
                yield "all_reduce", axis, (held, partial - {axis}, varying)
                yield from (
                    ("reduce_scatter", axis, (self.sliced(held, axis, *c), partial - {axis}, varying)) for c in cuts
                )
            elif axis in varying:
                yield "settle", axis, (held, partial, varying - {axis})
                yield from (("take", axis, (self.sliced(held, axis, *c), partial, varying - {axis})) for c in cuts)
            elif equal:
                yield "vary", axis, (held, partial, varying | {axis})
                yield "spread", axis, (held, partial | {axis}, varying)
                yield from (("shard", axis, (self.sliced(held, axis, *c), partial, varying)) for c in cuts)
            else:
                for join in joins:
                    whole = self.joined(held, axis, *join)
                    yield "unshard", axis, (whole, partial, varying)
                    yield "all_gather", axis, (whole, partial, varying | {axis})
                    yield "put", axis, (whole, partial | {axis}, varying)
                for c in cuts:
                    for join in joins:
                        moved = self.exchanged(held, axis, *c, *join)
                        if moved is not None:
                            yield "all_to_all", axis, (moved, partial, varying)

    def sliced(self, held: Held, axis: str, dim: int, outer: int) -> Held:
        made = {m: self.pieces(held[m], dim, outer, len(g))[i] for g in self.groups(axis) for i, m in enumerate(g)}
        return {place: made[place] for place in self.places}

    def joined(self, held: Held, axis: str, dim: int, outer: int) -> Held:
        made: Held = {}
        for g in self.groups(axis):
            made.update(dict.fromkeys(g, self.join([held[m] for m in g], dim, outer)))
        return {place: made[place] for place in self.places}

    def exchanged(self, held: Held, axis: str, split_dim: int, split_outer: int, dim: int, outer: int) -> Held | None:
        made: Held = {}
        for g in self.groups(axis):
            parts = [self.pieces(held[m], split_dim, split_outer, len(g)) for m in g]
            if parts[0][0].shape[dim] % outer:
                return None
            made.update((m, self.join([p[i] for p in parts], dim, outer)) for i, m in enumerate(g))
        return {place: made[place] for place in self.places}

    @staticmethod
    def pieces(x: Array, dim: int, outer: int, n: int) -> list[Array]:
        shape = (*x.shape[:dim], outer, n, x.shape[dim] // (outer * n), *x.shape[dim + 1 :])
        final = (*x.shape[:dim], x.shape[dim] // n, *x.shape[dim + 1 :])
        return [np.take(x.reshape(shape), i, dim + 1).reshape(final) for i in range(n)]

    @staticmethod
    def join(xs: list[Array], dim: int, outer: int) -> Array:
        x = xs[0]
        split = [y.reshape((*x.shape[:dim], outer, 1, x.shape[dim] // outer, *x.shape[dim + 1 :])) for y in xs]
        return np.concatenate(split, dim + 1).reshape((*x.shape[:dim], x.shape[dim] * len(xs), *x.shape[dim + 1 :]))

    def cheapest(self, src: Layout, dst: Layout, most: int, below: int) -> int | None:
        """The least cost of a chain of at most `most` moves that costs less than `below`; None if there is none."""
        goal = self.key(self.state(dst))
        best: dict[Key, int] = {self.key(self.state(src)): 0}
        frontier = {self.key(self.state(src)): (0, self.state(src))}
        for _ in range(most):
            reached: dict[Key, tuple[int, State]] = {}
            for bytes, state in frontier.values():
                local = next(iter(state[0].values())).size * 4
                for op, axis, made in self.moves(state):
                    n = self.sizes[axis]
                    total = bytes + cost(op, n, local) + backward_cost(op, n, local)
                    if total >= below:
                        continue
                    key = self.key(made)
                    if total < best.get(key, below):
                        best[key] = total
                        reached[key] = (total, made)
            frontier = reached
        return best.get(goal)


@pytest.mark.parametrize("seed", range(40))
def test_no_short_chain_is_cheaper(seed: int) -> None:
    rng = random.Random(seed)
    sizes = {"a": 2, "b": 2}
    shape = rng.choice([(8,), (4, 2), (6, 4), (4, 4)])
    src, dst = random_layout(shape, sizes, rng), random_layout(shape, sizes, rng)
    found = sum(step.forward + step.backward for step in plan(src, dst, sizes=sizes, itemsize=4))
    assert found == 0 or Brute(sizes).cheapest(src, dst, most=3, below=found) is None


PLACEMENTS = (Replicated(), Varying(), Partial(), Shard(0), Shard(1))


@pytest.mark.parametrize(("source", "target"), list(itertools.product(PLACEMENTS, repeat=2)))
def test_transition_on_one_axis_agrees_with_plans(source: Placement, target: Placement) -> None:
    sizes = {"a": 4}
    src, dst = (Layout.build((8, 12), {"a": placement}, sizes) for placement in (source, target))
    assert src is not None and dst is not None
    steps = plan(src, dst, sizes=sizes, itemsize=2)
    priced = tuple(round(96 * 2 * sent.bytes) for sent in traffic(source, target, 4))
    assert sum(priced) >= sum(step.forward + step.backward for step in steps)
    assert len(steps) <= len(transition(source, target)) or sum(priced) > 0
    if len(transition(source, target)) == len(steps):
        assert tuple(step.op for step in steps) == transition(source, target)
        assert priced == (sum(s.forward for s in steps), sum(s.backward for s in steps))


def test_costs_are_those_of_ring_algorithms() -> None:
    assert cost("all_reduce", 4, 96) == 2 * 3 * 96 // 4
    assert cost("reduce_scatter", 4, 96) == 3 * 96 // 4
    assert cost("all_gather", 4, 24) == 3 * 24  # (n - 1) / n of the 96 bytes gathered
    assert cost("all_to_all", 4, 96) == 3 * 96 // 4
    assert cost("take", 4, 96) == cost("vary", 4, 96) == 0
    assert backward_cost("vary", 4, 96) == cost("all_reduce", 4, 96)
    assert backward_cost("shard", 4, 96) == cost("all_gather", 4, 24)
    assert backward_cost("unshard", 4, 24) == 0


def names(src: str, dst: str, sizes: dict[str, int] = SIZES, **options: bool) -> list[str]:
    return [step.op for step in plan(lay(src, sizes), lay(dst, sizes), sizes=sizes, itemsize=2, **options)]


def test_sequence_parallel_pairs() -> None:
    """Megatron's collectives around a block's products follow from the layouts alone."""
    assert names("[12, 12@a, 8]", "[12, 12, 8] vary(a)") == ["all_gather"]
    assert names("[12, 12, 8] partial(a)", "[12, 12@a, 8]") == ["reduce_scatter"]
    assert names("[12, 12, 8] partial(a)", "[12, 12, 8]") == ["all_reduce"]
    assert names("[12, 12, 8]", "[12, 12, 8] vary(a)") == ["vary"]


def test_strided_cuts_need_no_detour() -> None:
    steps = plan(lay("[3 · 8@a, 5]"), lay("[24, 5]"), sizes=SIZES, itemsize=2)
    assert [(step.op, step.attrs) for step in steps] == [("unshard", (("dim", 0), ("outer", 3)))]
    assert names("[4@a · 6@b, 5]", "[4@a · 6, 5] vary(b)") == ["all_gather"]


def test_a_value_without_gradient_is_gathered_for_its_forward_bytes_alone() -> None:
    [step] = plan(lay("[12@a]"), lay("[12]"), sizes=SIZES, itemsize=8, needs_grad=False)
    assert (step.op, step.forward, step.backward) == ("unshard", 48, 0)


def test_axes_of_size_one_move_nothing() -> None:
    sizes = {"a": 1, "b": 2}
    assert plan(Layout.parse("[12@a, 4]"), Layout.parse("[12, 4@a] partial(a)"), sizes=sizes, itemsize=4) == ()


def test_microbatches_stay_where_they_are() -> None:
    """The batch is nested over dp and mb; only dp's part of the work may move."""
    sizes = {"dp": 2, "tp": 2, "mb": 2}
    for src, dst in (
        ("[16@dp,mb, 8@tp]", "[16@dp,mb, 8]"),
        ("[16@dp,mb, 8] partial(tp)", "[16@dp,mb, 8@tp]"),
        ("[8] partial(dp,mb)", "[8] partial(mb)"),
    ):
        assert all(step.axis != "mb" for step in plan(lay(src, sizes), lay(dst, sizes), sizes=sizes, itemsize=4))


def test_other_shapes_are_refused() -> None:
    with pytest.raises(InternalError, match="shapes differ"):
        plan(lay("[12]"), lay("[6, 2]"), sizes=SIZES, itemsize=4)
