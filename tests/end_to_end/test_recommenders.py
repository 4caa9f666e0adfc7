"""Recommenders on all axes equal one device, with ZeRO, recomputation and every kind of gradients of tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import partc
from tests.pairwise import Row, pairwise

MODELS = Path(__file__).parents[1] / "models"
TABLES = {
    "dlrm": "tables.*,bag.*",
    "cross": "tables.*,words.*",
    "sequence": "items.*,targets.*",
}
ASKING = {"dlrm": "", "cross": "tables.*,words.*", "sequence": "targets.*"}  # tables of modules with sparse=True
MESHES = (
    "dp=2", "dp=4", "pp=2,dp=2", "dp=2,tp=2", "tp=2", "dp_out=2,dp_in=2", "dp=2,cp=2", "ep=2", "dp=2,ep=2", "pp=2,dp=2,tp=2",
)  # fmt: skip
UPDATES = ("adamw", "sgd", "sparse", "rowwise")


def _impossible(row: Row) -> bool:
    """Sparse Adam is for modules that ask for it; only sequences are cut by cp."""
    if row.get("model") == "dlrm" and row.get("update") == "sparse":
        return True
    return row.get("model") in ("dlrm", "cross") and "cp" in row.get("mesh", "")


ROWS = pairwise(
    {
        "mesh": MESHES,
        "model": tuple(TABLES),
        "update": UPDATES,
        "zero": (0, 1, 2, 3),
        "microbatches": (1, 2),
        "recompute": ("none", "full", "selective"),
    },
    _impossible,
)
FEW = [
    {"mesh": "dp=4", "model": "cross", "update": "rowwise", "zero": 1, "microbatches": 2, "recompute": "none"},
    {"mesh": "dp=2,cp=2", "model": "sequence", "update": "sparse", "zero": 3, "microbatches": 1, "recompute": "full"},
    {"mesh": "dp=2,ep=2", "model": "dlrm", "update": "rowwise", "zero": 0, "microbatches": 2, "recompute": "none"},
]


def _named(row: Row) -> str:
    return " ".join(map(str, row.values()))


def _compiled(row: Row) -> partc.Package:
    model, update = row["model"], row["update"]
    how: dict[str, Any] = {key: row[key] for key in ("mesh", "zero", "microbatches", "recompute")}
    if update == "sparse":
        how["group"] = [f"{ASKING[model]}:optimizer=sparseadam"]
    elif update == "rowwise":
        how["group"] = [f"{TABLES[model]}:optimizer=rowwise_adagrad"]
    else:
        how["optimizer"] = update
    return partc.compile(MODELS / f"{model}.py", precision="fp64", **how)


def _equal(row: Row) -> None:
    package = _compiled(row)
    if row["update"] == "rowwise" and row["model"] != "sequence":
        assert any(parameter.sparse for parameter in package.program.parameters)
    result = package.verify(steps=3)
    assert result.ok and result.worst is not None and result.worst.rel_err < 1e-10, result.worst


@pytest.mark.sampled
@pytest.mark.parametrize("row", FEW, ids=_named)
def test_recommenders_equal_one_device(row: Row) -> None:
    _equal(row)


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=pytest.mark.matrix if i % 2 else ()) for i, row in enumerate(ROWS)], ids=_named
)
def test_recommenders_equal_one_device_on_every_mesh(row: Row) -> None:
    _equal(row)
