"""Datasets of examples: rows by number, streams with a state, and entries that do not fit a batch.

The tables below have the attributes of those of Hugging Face's `datasets`; where that is installed, it is read itself.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import partc
from partc.runtime.checkpoint.manifest import checkpoints, read
from tests.durable import losses, trained, whole

MODEL = """
import torch
from torch import nn

ROWS = 44


def model():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def batch():
    return {"x": torch.randn(8, 4), "label": torch.randint(3, (8,))}


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["label"])


def columns():
    generator = torch.Generator().manual_seed(7)
    return {
        "x": torch.randn(ROWS, 4, generator=generator, dtype=torch.float64).tolist(),
        "text": [f"row {row}" for row in range(ROWS)],
        "label": torch.randint(3, (ROWS,), generator=generator).tolist(),
    }


def arrow():
    import datasets
    import pyarrow

    # Under a fingerprint of its own: some releases cannot pickle a table of pyarrow to make one.
    return datasets.Dataset(datasets.table.InMemoryTable(pyarrow.table(columns())), fingerprint="made")


class Table:
    '''Rows by their numbers, as a Dataset.'''

    def __init__(self, held):
        self.held, self.column_names, self.read = held, list(held), []

    def __len__(self):
        return ROWS

    def __getitem__(self, rows):
        self.read.append(rows)
        return {name: [column[row] for row in rows] for name, column in self.held.items()}

    def __iter__(self):
        raise AssertionError("a table is read by rows")

    def select_columns(self, names):
        return Table({name: self.held[name] for name in names})


class Stream:
    '''Examples in order with a state, as an IterableDataset.'''

    def __init__(self, held, size=0):
        self.held, self.column_names, self.size, self.at = held, list(held), size, 0

    def batch(self, size, drop_last_batch=False):
        assert drop_last_batch
        return Stream(self.held, size)

    def __iter__(self):
        while self.at + self.size <= ROWS:
            self.at += self.size
            yield {name: column[self.at - self.size : self.at] for name, column in self.held.items()}
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]
"""
KINDS = {
    "a table": "data = Table(columns())",
    "a function of a table": "def data():\n    return Table(columns())",
    "a stream": "def data():\n    return Stream(columns())",
    "datasets": "def data():\n    return arrow()",
    "datasets, streamed": "def data():\n    return arrow().to_iterable_dataset()",
}
INSTALLED = importlib.util.find_spec("datasets") is not None


def packaged(folder: Path, data: str, mesh: str = "dp=2") -> Path:
    file = folder / "mine.py"
    file.write_text(f"{MODEL}\n\n{data}\n")
    return partc.compile(file, mesh=mesh, precision="fp64").write(folder / "build")


def plain_losses(package: Path, steps: int) -> list[float]:
    spec = importlib.util.spec_from_file_location("plain_examples", package / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    model, found = module.model().double(), []
    held = {name: torch.tensor(column) for name, column in module.columns().items() if name != "text"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        first = step % 5 * 8  # 44 rows are five batches, and four rows are left out
        optimizer.zero_grad()
        value = module.loss(
            model, {"x": held["x"][first : first + 8].double(), "label": held["label"][first : first + 8]}
        )
        value.backward()
        optimizer.step()
        found.append(value.item())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_examples_fill_batches_in_order(tmp_path: Path, kind: str) -> None:
    if "datasets" in kind and not INSTALLED:
        pytest.skip("Hugging Face's datasets is not installed")
    package = packaged(tmp_path, KINDS[kind], "pp=2,dp=2")
    trained(package, "--steps", 7, "--accumulate", 1, "--optimizer", "sgd", "--lr", 0.1, "--metrics", tmp_path / "m")
    assert losses(tmp_path / "m") == pytest.approx(plain_losses(package, 7), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_training_reads_on(tmp_path: Path, kind: str) -> None:
    if "datasets" in kind and not INSTALLED:
        pytest.skip("Hugging Face's datasets is not installed")
    package = packaged(tmp_path, KINDS[kind])
    trained(package, "--steps", 7, "--save-every", 2, "--save", tmp_path / "once")
    trained(package, "--steps", 4, "--save-every", 2, "--save", tmp_path / "twice")
    said = trained(package, "--steps", 7, "--save-every", 2, "--save", tmp_path / "twice", "--resume")
    assert "read again" not in said
    ends = [whole(checkpoints(tmp_path / name)[0]) for name in ("once", "twice")]
    assert all(ends[0][name].equal(ends[1][name]) for name in ends[0])
    assert ("position" in read(checkpoints(tmp_path / "once")[0]).run) == ("stream" in kind)


def test_ranks_read_their_own_rows(tmp_path: Path) -> None:
    from partc.runtime.layout import Shard
    from partc.runtime.train.examples import ExampleRows

    class Table:
        column_names = ("x",)

        def __init__(self) -> None:
            self.read: list[list[int]] = []

        def __len__(self) -> int:
            return 20

        def __getitem__(self, rows: list[int]) -> dict[str, list[int]]:
            self.read.append(rows)
            return {"x": rows}

    plan = {"inputs": {"x": {"dtype": "i64", "layout": "[8@dp]"}}}
    table = Table()
    rows = ExampleRows(table, plan, {"x": torch.zeros(8, dtype=torch.int64)}, name="data", again=True)
    part = rows.part(3, {"x": Shard("i64[8@dp]")}, {"dp": 2}, {"dp": 1})
    assert part["x"].tolist() == table.read[-1] == [12, 13, 14, 15]  # batch 1 of the second epoch
    assert rows.batch(0)["x"].tolist() == list(range(8))


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        ("data = Table({'y': [0] * ROWS, 'x': columns()['x']})", "P0543", "none 'label'"),
        ("data = Table({**columns(), 'x': [[0.0]] * ROWS})", "P0543", "shape [4, 1]"),
        ("data = Table({**columns(), 'x': [[0.0], [0.0, 1.0]] * (ROWS // 2)})", "P0543", "is not a tensor"),
        ("ROWS = 7\ndata = Table(columns())", "P0544", "7 rows"),
    ],
)
def test_examples_that_do_not_fit_are_refused(tmp_path: Path, data: str, code: str, words: str) -> None:
    from tests.durable import train

    run = train(packaged(tmp_path, data), "--steps", 1)
    assert run.returncode != 0 and code in run.stderr and words in run.stderr
