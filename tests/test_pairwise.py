"""Tables of rows in which every two values meet, and the list of packages whose bits are recorded."""

from __future__ import annotations

from itertools import combinations, product

import torch

from tests.pairwise import Row, pairwise
from tests.same_bits import COLUMNS, differences, digest, packages


def test_every_two_values_meet_in_few_rows() -> None:
    columns = {name: range(size) for name, size in (("a", 6), ("b", 4), ("c", 4), ("d", 3), ("e", 2))}
    rows = pairwise(columns)
    for left, right in combinations(columns, 2):
        assert {(row[left], row[right]) for row in rows} == set(product(columns[left], columns[right]))
    assert len(rows) <= 28  # of 576; 24 at least
    assert rows == pairwise(columns)


def test_excluded_rows_are_left_out_and_all_other_pairs_stay() -> None:
    columns = {"mesh": ("dp", "pp"), "schedule": ("gpipe", "1f1b", "zbv"), "zero": (0, 1, 2, 3)}

    def excluded(row: Row) -> bool:
        return row.get("mesh") == "dp" and row.get("schedule", "1f1b") != "1f1b"

    rows = pairwise(columns, excluded)
    assert not any(map(excluded, rows))
    assert {(row["mesh"], row["schedule"]) for row in rows} == {
        ("dp", "1f1b"),
        *product(("pp",), columns["schedule"]),
    }
    assert {(row["schedule"], row["zero"]) for row in rows} == set(product(columns["schedule"], columns["zero"]))


def test_recorded_packages_hold_every_choice() -> None:
    found = packages()
    assert len(found) >= 40
    for name, values in COLUMNS.items():
        assert {row[name] for row in found.values()} >= set(values)


def test_digests_tell_bits_apart() -> None:
    x = {"w": torch.tensor([0.0, 1.0]), "b": torch.tensor(1.0, dtype=torch.bfloat16)}
    assert digest(x) == digest(dict(reversed(x.items())))
    others = (
        {"w": torch.tensor([-0.0, 1.0])},
        {"w": x["w"].view(2, 1)},
        {"w": x["w"].view(torch.int32)},
        {"b": x["b"].float()},
    )
    assert len({digest(x), *(digest({**x, **other}) for other in others)}) == 5
    before = {"losses": [1.0], "parameters": "a", "compile_seconds": 1.0}
    assert differences(before, {**before, "compile_seconds": 2.0}) == []
    assert differences(before, {"refused": "P0401"}) == ["losses", "parameters", "refused"]
