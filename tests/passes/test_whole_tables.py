"""Whole tables on single ranks: their placement against enumeration, and training against one device."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

import partc
from partc.cli import main
from partc.ir.parser import parse
from partc.ir.printer import print_program
from partc.sharding.table_placement import Starts, WholeTable, best_placement, largest_first, price

MODELS = Path(__file__).parents[1] / "models"
DLRM = MODELS / "dlrm.py"
ROWWISE = ["tables.*,bag.*:optimizer=rowwise_adagrad"]
# Rows of the categories of Criteo's clicks (Naumov et al. 2019).
CRITEO = (
    9980333, 36084, 17217, 7378, 20134, 3, 7112, 1442, 61, 9758201, 1333352, 313829, 10, 2208, 11156, 122, 4, 970, 14,
    9994222, 7267859, 9946608, 415421, 12420, 101, 36,
)  # fmt: skip


def _tables(rows: tuple[int, ...], ranks: int, width: int = 64, batch: int = 2048, kinds: int = 1) -> list[WholeTable]:
    vectors = 4 * width * batch // ranks
    return [
        WholeTable(
            name=f"t{number}",
            kind=number % kinds,
            bytes=4 * width * count,
            traffic=(8 * batch // ranks + 2 * vectors) * (ranks - 1),
            spread=(8 * batch // ranks + 2 * vectors) * (ranks - 1) / ranks + vectors / 2,
        )
        for number, count in enumerate(rows)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_the_integer_program_finds_the_best_of_all_placements(seed: int) -> None:
    draw = random.Random(seed)
    ranks, count, kinds = draw.choice([(2, 6, 1), (2, 5, 2), (3, 5, 1), (3, 4, 2)])
    tables = _tables(tuple(draw.choice([3, 100, 900, 1000, 5000]) for _ in range(count)), ranks, kinds=kinds)
    starts = Starts(whole=draw.choice([0, 1e5, 1e6]), spread=draw.choice([0, 1e5, 1e6]))
    placements = (
        {table.name: rank for table, rank in zip(tables, chosen, strict=True) if rank < ranks}
        for chosen in itertools.product(range(ranks + 1), repeat=count)
    )
    best = min(price(tables, ranks, placement, starts) for placement in placements)
    found = best_placement(tables, ranks, starts)
    assert found.price == pytest.approx(price(tables, ranks, found.ranks, starts), rel=1e-12)
    assert best - 1e-9 <= found.price <= best * (1 + 2e-3)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_tables_of_clicks_balance_better_than_largest_first(ranks: int) -> None:
    tables = _tables(CRITEO, ranks)
    found = best_placement(tables, ranks)
    greedy = price(tables, ranks, largest_first(tables, ranks))
    assert found.price < min(greedy, price(tables, ranks, {}))
    loads = [sum(table.bytes for table in tables if found.ranks.get(table.name) == rank) for rank in range(ranks)]
    total = sum(table.bytes for table in tables)
    assert max(loads) <= total / ranks * 1.1


def test_a_few_tables_are_not_spread_if_a_second_exchange_costs_more() -> None:
    """26 equal tables on 4 ranks: 2 of them would be spread to balance the bytes, which saves 7% of the memory."""
    tables = _tables((20000,) * 26, 4)
    assert len(best_placement(tables, 4).ranks) == 24
    assert len(best_placement(tables, 4, Starts(whole=1.2e6, spread=1.6e6)).ranks) == 26


def test_pinned_tables_stay_where_they_are() -> None:
    tables = _tables((1000,) * 6, 2)
    pinned = [*tables[:5], WholeTable(**{**_fields(tables[5]), "rank": 1, "whole": True})]
    assert best_placement(pinned, 2).ranks["t5"] == 1
    alone = [WholeTable(**{**_fields(each), "whole": True}) for each in _tables((10, 10**6), 8)]
    assert set(best_placement(alone, 8).ranks) == {"t0", "t1"}


def _fields(table: WholeTable) -> dict[str, Any]:
    return {name: getattr(table, name) for name in ("name", "kind", "bytes", "traffic", "spread")}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("model", "mesh", "group", "how"),
    [
        ("dlrm", "dp=4", "rowwise", {"microbatches": 2, "zero": 1}),
        ("dlrm", "dp=2", "rowwise", {"microbatches": 2, "recompute": "full"}),
        ("dlrm", "dp=2,ep=2", "rowwise", {}),
        ("dlrm", "pp=2,dp=2", "adagrad", {"microbatches": 2}),
        ("bags", "dp=2", "sparseadam", {"microbatches": 2}),
        ("bags", "dp=4", "adagrad", {"zero": 3}),
        ("bags", "dp=2,tp=2", "sgd", {}),
        ("cross", "dp=2", "sparseadam", {"microbatches": 2}),
        ("cross", "dp_out=2,dp_in=2", "rowwise", {"zero": 2}),
    ],
)
def test_whole_tables_equal_one_device(model: str, mesh: str, group: str, how: dict[str, Any]) -> None:
    names = {"dlrm": "tables.*,bag.*", "bags": "tables.*", "cross": "tables.*,words.*"}[model]
    if group == "rowwise":
        given: dict[str, Any] = {"group": [f"{names}:optimizer=rowwise_adagrad"]}
    elif group == "sparseadam":
        given = {"group": [f"{_asking(model)}:optimizer=sparseadam"]}
    else:
        given = {"optimizer": group}
    pins = [f"{name}=whole" for name in _asking(model).split(",")] if model != "dlrm" or group == "rowwise" else []
    package = partc.compile(MODELS / f"{model}.py", mesh=mesh, precision="fp64", shard=pins, **given, **how)
    stacks = [item for item in package.program.parameters if item.members]
    assert stacks or not pins
    assert parse(print_program(package.program)).parameters == package.program.parameters
    result = package.verify(steps=3)
    assert result.ok and result.worst is not None and result.worst.rel_err < 1e-10, result.worst


def _asking(model: str) -> str:
    """The tables whose gradients can be sparse."""
    return {
        "dlrm": "tables.*.weight,bag.weight",
        "bags": "tables.summed.weight,tables.weighted.weight,tables.mean.weight",
        "cross": "tables.*.weight,words.weight",
    }[model]


def test_whole_tables_send_the_bytes_of_the_formula() -> None:
    """Five tables on two ranks: three slots of ids and vectors for each, a spare one among them."""
    pins = ["tables.*.weight=whole", "bag.weight=[@dp, _]"]
    package = partc.compile(DLRM, mesh="dp=2", group=ROWWISE, shard=pins)
    (stack,) = (item for item in package.program.parameters if item.members)
    assert {name for name, _, _ in stack.members} == {f"tables.{number}.weight" for number in range(4)}
    plan = json.loads(dict(package.files())["plan.json"])
    moved = [
        item
        for region in plan["regions"].values()
        for item in (*region["forward"], *region["backward"])
        if item["op"] == "all_to_all"
    ]
    slots, own, width = 2, 8, 8
    assert sorted(item["bytes"] for item in moved) == sorted(
        [8 * own * slots, 4 * own * slots * width, 4 * own * slots * width]
    )
    held = {name: entry["stack"]["row"] for name, entry in plan["parameters"].items() if "stack" in entry}
    assert sorted(held.values())[0] == 0 and len(set(held.values())) == 4


def test_pins_place_tables_and_explanations_tell_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    pins = ["tables.0.weight=whole 1", "tables.1.weight=whole 1", "tables.2.weight=[_, @dp]", "tables.3.weight=whole 0"]
    package = partc.compile(DLRM, mesh="dp=2", group=ROWWISE, shard=pins)
    stack, bag = (item for item in package.program.parameters if item.members)
    assert (stack.name, bag.name) == ("tables.*.weight", "bag.*")
    rows = stack.type.shape[0] // 2
    assert {name: first // rows for name, first, _ in stack.members} == {
        "tables.0.weight": 1, "tables.1.weight": 1, "tables.3.weight": 0,
    }  # fmt: skip
    assert str(package.program.parameter("tables.2.weight").type) == "f32[16, 8@dp]"
    given = [word for pin in pins for word in ("--shard", pin)]
    assert (
        main(["inspect", str(DLRM), "--mesh", "dp=2", "--group", *ROWWISE, *given, "--explain", "tables.0.weight"]) == 0
    )
    assert capsys.readouterr().out.splitlines()[0].startswith("tables.0.weight is f32[40, 8] whole on rank 1 of 2: ")


@pytest.mark.parametrize(
    ("pin", "group", "why"),
    [
        ("tables.0.weight=whole 2", ROWWISE, r"P0302.*cannot be whole on that rank: 2 ranks share it"),
        ("tables.0.weight=whole", [], r"P0302.*sparse gradient"),
        ("top.0.weight=whole", ROWWISE, r"P0302.*one lookup that reads it"),
        ("tables.0.weight=whole -1", ROWWISE, r"P0301"),
    ],
)
def test_tables_that_cannot_be_whole_are_refused(pin: str, group: list[str], why: str) -> None:
    with pytest.raises(partc.PartcError, match=why):
        partc.compile(DLRM, mesh="dp=2", group=group, shard=[pin])


def test_vectors_of_equal_tables_come_in_the_order_of_the_model() -> None:
    """They are one view of the exchange, in which no vector is copied to another place."""
    package = partc.compile(
        MODELS / "in_order.py",
        mesh="dp=2",
        precision="fp64",
        group=["tables.*:optimizer=rowwise_adagrad"],
        shard=["tables.*.weight=whole"],
    )
    assert package.verify(steps=2).ok
    (stack,) = (item for item in package.program.parameters if item.members)
    assert [name for name, _, _ in stack.members] == [f"tables.{number}.weight" for number in range(4)]
    ops = [op.name for region in package.program.regions for op in region.forward.ops]
    assert ops.count("cat") == 1 and "split" not in ops, "of ids"
    # The gradient of all pairs of scores, x @ x.mT, is one product with g + g.mT.
    products = [op.name for region in package.program.regions for op in region.graphs[-1].ops if "matmul" in op.name]
    assert products == ["matmul"]
