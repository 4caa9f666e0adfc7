"""Recomputation under a budget: the Pareto frontier and the distribution over calls, against exhaustive searches."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import highspy
import pytest
from expecttest import assert_expected_inline

from partc.cost.roofline import H100, seconds
from partc.cost.saved_tensors import (
    Time,
    bytes_option,
    held_inputs,
    microbatches_in_flight,
    parse_bytes,
    saved_bytes,
    stage_bytes,
)
from partc.ir.mesh import Mesh
from partc.ir.parser import parse
from partc.ir.printer import print_program
from partc.ir.program import Call, Program, Value
from partc.ir.verifier import verify_program
from partc.passes.recompute import budget, recompute
from partc.passes.recompute import choice as choices
from partc.passes.recompute.budget import MOST_POINTS, Row, solve
from partc.passes.recompute.choice import Point, SavingProblem, frontier
from partc.schedules import SCHEDULES, compute_order
from partc.schedules.table import Table
from partc.schedules.table import parse as parse_table
from tests.passes.test_recompute import outcome, random_choice
from tests.programs import op, value

BLOCKS = """
program deep mesh pp=2,dp=1,tp=1 microbatches 4 loss loss
input x
value x: f32[8@mb, 16]
value loss: f32[] partial(mb)
parameter w: f32[16, 16] vary(mb)
call last = last(x; ) -> loss stage 1

region block phase microbatch:
  param w: f32[16, 16] vary(mb)
  forward:
    input x: f32[8@mb, 16]
    h = linear(x, w)  # f32[8@mb, 16]
    t = tanh(h)  # f32[8@mb, 16]
    y = gelu(t)  # f32[8@mb, 16]
    return y
  saved t, x
  backward:
    input grad_y: f32[8@mb, 16]
    input t: f32[8@mb, 16]
    input x: f32[8@mb, 16]
    grad_t = gelu_backward(grad_y, t)  # f32[8@mb, 16]
    grad_h = tanh_backward(grad_t, t)  # f32[8@mb, 16]
    grad_w = linear_grad_weight(grad_h, x)  # f32[16, 16] partial(mb)
    grad_x = linear_grad_input(grad_h, w)  # f32[8@mb, 16]
    return grad_x, grad_w

region last phase microbatch:
  forward:
    input x: f32[8@mb, 16]
    loss = sum(x, (0, 1), False)  # f32[] partial(mb)
    return loss
  backward:
    input grad_loss: f32[]
    grad_x = expand(grad_loss, (2, 16))  # f32[8@mb, 16]
    return grad_x
"""
ONE = 2 * 16 * 4  # bytes of a microbatch's activation


@pytest.fixture
def program() -> Program:
    """Three blocks in stage 0, one in stage 1; the batch's first entry is saved for nothing."""
    parsed = parse(BLOCKS)
    types = parsed.value_types()
    names = ["x", "x1", "x2", "x3", "x4"]
    blocks = tuple(
        Call(name=f"blocks.{i}", region="block", params=("w",), args=(a,), results=(b,), stage=int(i == 3))
        for i, (a, b) in enumerate(itertools.pairwise(names))
    )
    last = replace(parsed.calls[0], args=("x4",))
    values = (*parsed.values, *(Value(name=name, type=types["x"]) for name in names[1:]))
    transfer = parse("program p mesh 1 microbatches 1 loss l\nvalue x3: f32[]\ntransfer x3 0 -> 1 gradient").transfers
    return replace(parsed, calls=(*blocks, last), values=values, transfers=transfer)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("18GB", 18 * 10**9), ("1.5GiB", 3 * 2**29), ("64KiB", 2**16), ("0.1kb", 100), ("7 MB", 7 * 10**6),
        ("12B", 12), ("0B", 0), ("1TB", 10**12), ("none", None), ("18", None), ("GB", None), ("-1GB", None),
        ("1e3MB", None), ("18GBs", None), ("1iB", None), ("٢GB", None), ("9" * 5000 + "GB", None),
    ],
)  # fmt: skip
def test_bytes_as_they_are_written(text: str, size: int | None) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("size", [0, 9_999_999, 10**7 + 1, 80 * 10**9 + 5, 10**13])
def test_bytes_are_written_as_they_are_read(size: int) -> None:
    fewer, more = parse_bytes(bytes_option(size, fewer=True)), parse_bytes(bytes_option(size))
    assert fewer is not None and more is not None and fewer <= size <= more <= fewer + 10**6


# -- exhaustive searches ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_the_frontier_is_all_that_nothing_beats(seed: int) -> None:
    choice = random_choice(random.Random(seed))
    names = list(choice.bytes)
    subsets = itertools.chain.from_iterable(itertools.combinations(names, count) for count in range(len(names) + 1))
    outcomes = {found for subset in subsets if (found := outcome(choice, frozenset(subset)))}
    best = {a for a in outcomes if not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in outcomes)}
    points = frontier(choice)
    assert {(point.bytes, point.effort) for point in points} == best and len(points) == len(best)
    assert all(outcome(choice, point.saved) == (point.bytes, point.effort) for point in points)


@pytest.mark.parametrize("seed", range(40))
def test_a_large_frontier_has_the_ends_and_the_corners(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its points is one that nothing beats, with the bytes and the effort that it states."""
    choice = random_choice(random.Random(seed))
    every = [(point.bytes, point.effort) for point in frontier(choice)]
    monkeypatch.setattr(choices, "WORK", 0)
    points = frontier(choice)
    assert all(outcome(choice, point.saved) == (point.bytes, point.effort) for point in points)
    found = [(point.bytes, point.effort) for point in points]
    assert found == sorted(found, reverse=True) and set(found) <= set(every)
    assert (found[0], found[-1]) == (every[0], every[-1])
    for bytes, effort in set(every) - set(found):
        chords = [(a, b) for a, b in itertools.combinations(every, 2) if a[0] > bytes > b[0]]
        above = [(a[0] - bytes) * (b[1] - effort) - (bytes - b[0]) * (effort - a[1]) for a, b in chords]
        assert min(above) <= 0, "a corner of the hull is missing"


def test_a_large_frontier_takes_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of 200 products with 200 norms, from which backward needs all: it has thousands of efficient choices."""
    rng = random.Random(0)
    names = [f"v{index}" for index in range(400)]
    choice = SavingProblem(
        needed=tuple(names),
        bytes={"x": 64, **{name: 64 * rng.randint(1, 4) for name in names}},
        ops=tuple((name,) for name in names),
        reads=tuple(zip(["x", *names[:-1]])),
        effort=tuple(rng.choice((4000, 4001, 9000)) for _ in names),
    )
    solved = 0
    run = highspy.Highs.run

    def counted(solver: highspy.Highs) -> highspy.HighsStatus:
        nonlocal solved
        solved += 1
        return run(solver)

    monkeypatch.setattr(highspy.Highs, "run", counted)
    points = frontier(choice)
    assert len(points) > 10 and solved < 400
    assert all(outcome(choice, point.saved) == (point.bytes, point.effort) for point in points)
    assert (points[0].effort, points[-1].bytes) == (0, 64)


def _points(rng: random.Random) -> list[Point]:
    count = rng.randint(1, 4)
    sizes = sorted(rng.sample(range(12), count), reverse=True)
    efforts = sorted(rng.sample(range(30), count))
    return [Point(saved=frozenset(), bytes=a, effort=b) for a, b in zip(sizes, efforts, strict=True)]


@pytest.mark.parametrize("seed", range(40))
def test_the_dealing_is_the_quickest_of_all(seed: int) -> None:
    rng = random.Random(seed)
    frontiers = [_points(rng) for _ in range(rng.randint(1, 3))]
    counts = [rng.randint(1, 3) for _ in frontiers]
    weights = [[rng.randint(0, 3) for _ in frontiers] for _ in range(rng.randint(1, 2))]
    choices = [
        [
            mix
            for mix in itertools.combinations_with_replacement(range(len(points)), count)
            if len(set(mix)) <= MOST_POINTS
        ]
        for points, count in zip(frontiers, counts, strict=True)
    ]

    rows = []
    for weight in weights:
        inside = rng.choice([None, *range(len(frontiers))])
        if inside is None:
            rows.append(Row(weights=tuple(weight), besides=(rng.randint(0, 9),)))
            continue
        besides = tuple(rng.randint(0, 9) for _ in frontiers[inside])
        before = tuple(slot for slot in range(len(frontiers)) if slot != inside and rng.random() < 0.5)
        given = tuple(frozenset(rng.sample(range(len(points)), 1)) for points in frontiers)
        rows.append(Row(weights=tuple(weight), inside=inside, before=before, besides=besides))
        if rng.random() < 0.5:
            rows.append(replace(rows[-1], besides=tuple(each + 5 for each in besides), given=given))

    def held(row: Row, mixes: tuple[tuple[int, ...], ...]) -> int:
        """The most while any of the calls inside runs: those that save less come first."""
        if row.given and row.given != tuple(frozenset(mix) for mix in mixes):
            return 0
        taken = [[frontiers[slot][index].bytes for index in mix] for slot, mix in enumerate(mixes)]
        size = sum(weight * sum(each) for weight, each in zip(row.weights, taken, strict=True))
        size += sum(sum(taken[slot]) for slot in row.before)
        if row.inside is None:
            return size + row.besides[0]
        order = sorted(mixes[row.inside], reverse=True)
        own = [frontiers[row.inside][index].bytes for index in order]
        return size + max(sum(own[: number + 1]) + row.besides[index] for number, index in enumerate(order))

    def effort(mixes: tuple[tuple[int, ...], ...]) -> int:
        return sum(frontiers[slot][index].effort for slot, mix in enumerate(mixes) for index in mix)

    every = list(itertools.product(*choices))
    least = min(max(held(row, mixes) for row in rows) for mixes in every)
    for room in (least, least + rng.randint(1, 20)):
        quickest = min(effort(mixes) for mixes in every if all(held(row, mixes) <= room for row in rows))
        dealt = solve(frontiers, counts, rows, room)
        found = tuple(tuple(index for index, number in points.items() for _ in range(number)) for points in dealt)
        assert [len(mix) for mix in found] == counts and all(len(points) <= MOST_POINTS for points in dealt)
        assert all(list(points) == sorted(points, reverse=True) for points in dealt)
        assert all(held(row, found) <= room for row in rows) and effort(found) == quickest
    dealt = solve(frontiers, counts, rows, least - 1)
    found = tuple(tuple(index for index, number in points.items() for _ in range(number)) for points in dealt)
    assert max(held(row, found) for row in rows) == least, "what comes nearest"


def test_many_stages_choose_among_some_points_of_long_frontiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ends stay, so that all that fits is saved, and the choice that holds least is found."""
    points = [Point(saved=frozenset(), bytes=1000 - 10 * n, effort=n * n) for n in range(101)]
    frontiers, counts = [points] * 3, [2] * 3
    rows = [Row(weights=(1, 1, 1))]
    monkeypatch.setattr(budget, "FEWEST_POINTS", 5)
    monkeypatch.setattr(budget, "MOST_COLUMNS", 15)
    few = {0, 25, 50, 75, 100}
    for room, effort in ((6000, 0), (3000, 6 * 50**2), (0, 6 * 100**2), (-1, 6 * 100**2)):
        dealt = solve(frontiers, counts, rows, room)
        assert all(few.issuperset(each) for each in dealt)
        assert sum(points[index].effort * number for each in dealt for index, number in each.items()) == effort
    monkeypatch.setattr(budget, "MOST_COLUMNS", 3 * 101)
    assert solve(frontiers, counts, rows, 2940) == [{51: 2}] * 3


# -- programs ---------------------------------------------------------------------------------------


def _calls(program: Program) -> str:
    return "\n".join(
        f"{call.name}: {call.region} saves {', '.join(program.region(call.region).saved)}" for call in program.calls
    )


def _within(program: Program, budget: int, kind: str = "1f1b", table: Table | None = None) -> Program:
    """The program whose saved values keep within this many bytes while the schedule's microbatches are in flight."""
    ranks = program.mesh.axis("pp")
    rows = table.rows if table else compute_order(SCHEDULES[kind], ranks, program.microbatches, program.stages)
    times = [[Time(flight=flight) for flight in microbatches_in_flight(row)] for row in rows]
    return recompute(program, recompute=f"{budget}B", times=times)


def test_room_for_all_makes_nothing_again(program: Program) -> None:
    done = _within(program, 10**8)
    assert [region.saved for region in done.regions] == [("t", "x"), ()]
    assert [call.region for call in done.calls] == ["block"] * 4 + ["last"]


def test_a_region_is_cut_in_two_where_calls_differ(program: Program) -> None:
    """Stage 0 holds two microbatches of three blocks: all would be twelve activations; ten have room."""
    done = _within(program, 10 * ONE)
    verify_program(done, frozenset(), "recompute")
    assert parse(print_program(done)) == done
    assert_expected_inline(
        _calls(done),
        """\
blocks.0: block saves x
blocks.1: block_2 saves t, x
blocks.2: block_2 saves t, x
blocks.3: block_2 saves t, x
last: last saves """,
    )


def test_the_schedule_decides_what_is_in_flight(program: Program) -> None:
    """All four microbatches at once, in place of two and one."""
    assert len(_within(program, 12 * ONE).regions) == 2
    done = _within(program, 12 * ONE, kind="gpipe")
    assert stage_bytes(done) == (3 * ONE, 2 * ONE)
    table: Table = parse_table(
        "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n", file="t.csv", ranks=2, microbatches=4
    )
    assert _within(program, 12 * ONE, table=table) == done


@pytest.mark.parametrize("size", [6, 7, 8, 9, 10, 11, 12])
def test_every_rank_stays_within_its_budget(program: Program, size: int) -> None:
    done = _within(program, size * ONE)
    each = stage_bytes(done)
    rows = compute_order(SCHEDULES["1f1b"], 2, 4, 2)
    for row in rows:
        for mix in microbatches_in_flight(row):
            assert sum(count * each[stage] for stage, count in mix) <= size * ONE
    saved = [len(done.region(call.region).saved) for call in done.calls if call.stage == 0]
    assert sum(saved) == size // 2, "as much as fits"


def test_what_a_rank_holds_besides_is_taken_off(program: Program) -> None:
    most = _within(program, 10 * ONE)
    times = [[Time(flight=((0, 2),), besides=3 * ONE)], [Time(flight=((1, 1),), besides=11 * ONE)]]
    assert recompute(program, recompute=f"{13 * ONE}B", times=times) == most


def test_the_closest_choice_is_made_where_nothing_fits(program: Program) -> None:
    assert _within(program, 6 * ONE - 1) == _within(program, 6 * ONE)
    assert stage_bytes(_within(program, 6 * ONE))[0] == 3 * ONE


def test_bytes_of_a_point_are_those_that_its_region_saves(program: Program) -> None:
    for size in range(6, 13):
        done = _within(program, size * ONE)
        held = held_inputs(program)
        for region in done.regions:
            plain = "last" if region.name == "last" else "block"
            assert saved_bytes(region, held[plain], done.sizes) == ONE * len(region.saved)


# -- the machine ------------------------------------------------------------------------------------


def test_times_by_hand() -> None:
    sizes = Mesh.parse("dp=2,tp=4").sizes
    x, w = value("x", layout="[4096@dp, 8192]"), value("w", layout="[4096@tp, 8192]")
    y = value("y", layout="[4096@dp, 4096@tp]")
    types = {item.name: item.type for item in (x, w, y)}
    product = 2 * 2048 * 8192 * 1024 / H100.flops["f32"]
    assert seconds(op("linear", "x", "w", makes=y), types, sizes) == pytest.approx(H100.start + product)
    rounds = 2 * 4 * 2048 * 1024 / H100.memory
    assert seconds(op("gelu", "y", makes=y), types, sizes) == pytest.approx(H100.start + rounds)
    whole = value("z", layout="[4096@dp, 4096]")
    gathered = 3 * 4 * 2048 * 1024 / H100.link
    gather = op("all_gather", "y", makes=whole, dim=1, outer=1, axis="tp")
    assert seconds(gather, types, sizes) == pytest.approx(H100.meeting + gathered)
    assert seconds(op("reshape", "x", (2048, 2, 4096), makes=value("v", 2048, 2, 4096)), types, sizes) == 0
