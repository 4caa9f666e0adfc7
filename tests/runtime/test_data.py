"""Data in order: epochs, exact resumption, and the end of the data."""

from __future__ import annotations

import importlib.util
import random
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import partc
from partc.errors import PartcError
from partc.package import launch
from partc.package.verify import verify
from partc.runtime.checkpoint.manifest import checkpoints, read
from partc.runtime.documents import Malformed
from partc.runtime.train.position import decoded, encoded
from tests.durable import losses, train, trained, whole
from tests.prefork import done

MODEL = """
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def model():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def batch():
    return [torch.randn(8, 4), torch.randn(8, 3)]


def loss(model, batch):
    x, target = batch
    return nn.functional.mse_loss(model(x), target)


def made(number):
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(8, 4, generator=generator), torch.randn(8, 3, generator=generator)]


class Rows(Dataset):
    def __len__(self):
        return 44

    def __getitem__(self, index):  # augmented: by torch's and by Python's numbers
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(4, generator=generator) + 0.1 * torch.randn(4) + 0.1 * random.random()
        return x, torch.randn(3, generator=generator)


class Stateful:
    '''Shuffles by a generator of its own, as torchdata's StatefulDataLoader.'''

    def __init__(self):
        self.generator, self.order, self.given, self.goes_on = torch.Generator().manual_seed(5), [], 0, False

    def __iter__(self):
        if not self.goes_on:
            self.order, self.given = torch.randperm(5, generator=self.generator).tolist(), 0
        self.goes_on = False
        while self.given < len(self.order):
            self.given += 1
            yield made(self.order[self.given - 1])

    def state_dict(self):
        return {"generator": self.generator.get_state(), "order": tuple(self.order), "given": self.given}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])
        self.order, self.given, self.goes_on = list(state["order"]), state["given"], True
"""

KINDS = {
    "a list": "data = [made(number) for number in range(5)]",
    "a generator function": "def data(count: int = 5):\n    for number in range(count):\n        yield made(number)",
    "a function that returns an iterator": "def data():\n    return map(made, range(5))",
    "a shuffling DataLoader": "def data():\n    return DataLoader(Rows(), 8, shuffle=True, drop_last=True)",
    "a stateful loader": "def data():\n    return Stateful()",
}


def packaged(folder: Path, data: str, mesh: str = "dp=2") -> Path:
    file = folder / "mine.py"
    file.write_text(f"{MODEL}\n\n{data}\n")
    return partc.compile(file, mesh=mesh, precision="fp64").write(folder / "build")


def loaded(package: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("plain_model", package / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain_losses(package: Path, batches: list[list[Tensor]], rate: float) -> list[float]:
    """The losses of a plain loop over these batches."""
    module = loaded(package)
    torch.manual_seed(0)
    model = module.model().double()
    optimizer, found = torch.optim.SGD(model.parameters(), lr=rate), []
    for batch in batches:
        optimizer.zero_grad()
        value = module.loss(model, [x.double() for x in batch])
        value.backward()
        optimizer.step()
        found.append(value.item())
    return found


@pytest.mark.parametrize("kind", ["a list", "a generator function", "a function that returns an iterator"])
def test_an_iterable_starts_again_when_it_ends(tmp_path: Path, kind: str) -> None:
    package = packaged(tmp_path, KINDS[kind], "pp=2,dp=2")
    made = loaded(package).made
    trained(package, "--steps", 6, "--accumulate", 1, "--optimizer", "sgd", "--lr", 0.1, "--metrics", tmp_path / "m")
    expected = plain_losses(package, [made(number % 5) for number in range(6)], 0.1)
    assert losses(tmp_path / "m") == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_training_reads_on_where_it_stopped(tmp_path: Path, kind: str) -> None:
    package = packaged(tmp_path, KINDS[kind])
    common = ("--accumulate", 2, "--save-every", 2)
    trained(package, "--steps", 7, *common, "--save", tmp_path / "once")
    trained(package, "--steps", 4, *common, "--save", tmp_path / "twice")  # 8 batches: in the second epoch
    said = trained(package, "--steps", 7, *common, "--save", tmp_path / "twice", "--resume")
    assert ("its first 8 batches are read again and skipped" in said) == (kind != "a stateful loader")
    ends = [whole(checkpoints(tmp_path / name)[0]) for name in ("once", "twice")]
    assert ends[0].keys() == ends[1].keys() and all(ends[0][name].equal(ends[1][name]) for name in ends[0])
    runs = [read(checkpoints(tmp_path / name)[0]).run for name in ("once", "twice")]
    assert runs[0].get("position") == runs[1].get("position")
    assert ("position" in runs[0]) == (kind == "a stateful loader")


@pytest.mark.slow
def test_a_state_is_restored_and_nothing_is_read_again(tmp_path: Path) -> None:
    package = packaged(tmp_path, KINDS["a stateful loader"])
    trained(package, "--steps", 4, "--save", tmp_path / "save")
    run = read(checkpoints(tmp_path / "save")[0]).run
    epoch, since, state = decoded(run["position"])
    assert (epoch, since, state["given"]) == (0, 4, 4)
    file = package / "model.py"
    file.write_text(
        file.read_text().replace("yield made(", "print('made', self.given, flush=True)\n            yield made(")
    )
    ended = done([package / "train.py", "--virtual", "--steps", "6", "--save", tmp_path / "save", "--resume"])
    assert ended.returncode == 0, ended.stderr
    assert re.findall(r"^made (\d+)$", ended.stderr, re.MULTILINE) == ["5", "1"]


@pytest.mark.slow
@pytest.mark.processes
def test_real_ranks_read_the_same_batches_ahead_or_not(tmp_path: Path) -> None:
    package = packaged(tmp_path, KINDS["a shuffling DataLoader"], "pp=2,dp=2")
    for real, name in ((False, "virtual"), (True, "real")):
        ahead = ("--prefetch", 2) if real else ()
        trained(package, "--steps", 7, "--metrics", tmp_path / name, *ahead, real=real)
    assert losses(tmp_path / "virtual") == losses(tmp_path / "real")
    assert len(set(losses(tmp_path / "real"))) == 7


def test_the_reference_reads_the_same_batches(tmp_path: Path) -> None:
    assert verify(packaged(tmp_path, KINDS["a shuffling DataLoader"]), steps=7, virtual=True).ok


@pytest.mark.parametrize(
    ("data", "arguments", "code", "message"),
    [
        (KINDS["a list"], ["--data-end", "error"], "P0544", "ends after 5 batches"),
        ("data = map(made, range(5))", [], "P0544", "ends after 5 batches"),
        ("data = []", [], "P0544", "ends after 0 batches"),
        ("def data():\n    yield from map(made, range(3))\n    raise KeyError('gone')", [], "P0530", "gone"),
        ("def data():\n    return 3", [], "P0543", "gives int"),
        ("def data():\n    return DataLoader(Rows(), 8)", [], "P0543", "drop_last=True"),
    ],
)
def test_data_that_ends_or_fails(tmp_path: Path, data: str, arguments: list[str], code: str, message: str) -> None:
    stopped = train(packaged(tmp_path, data), "--steps", 7, *arguments)
    assert stopped.returncode == 2 and code in stopped.stderr and message in stopped.stderr, stopped.stderr


@pytest.mark.slow
def test_options_reach_iterables(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"{MODEL}\n\n{KINDS['a generator function']}\n")
    package = partc.compile(file, mesh="dp=2", options={"count": 2}).write(tmp_path / "build")
    stopped = train(package, "--steps", 3, "--data-end", "error")
    assert "ends after 2 batches" in stopped.stderr
    with pytest.raises(PartcError, match=r"P0544: .* ends after 2 batches"):  # an error of the ranks
        launch.run(package, steps=3, arguments=["--virtual", "--data-end", "error"])


def test_states_come_back_as_they_were() -> None:
    numpy = pytest.importorskip("numpy")
    state = {
        "generator": torch.get_rng_state(), 3: (1, [2.5, float("inf")], {4}), "text": "ä\0", "none": None, "yes": True,
        "bytes": b"\x00\xff", "large": 2**200, "python": random.getstate(), "empty": torch.empty(0, 3),
        "numpy": numpy.random.default_rng(3).bit_generator.state, "old": numpy.random.RandomState(3).get_state(),
    }  # fmt: skip
    found = decoded(encoded(state))
    assert torch.equal(found.pop("generator"), state.pop("generator"))  # type: ignore[arg-type]
    assert found.pop("empty").shape == state.pop("empty").shape  # type: ignore[union-attr]
    old, given = found.pop("old"), state.pop("old")
    assert old[1].dtype == given[1].dtype and (old[1] == given[1]).all() and old[2:] == given[2:]  # type: ignore[index]
    assert found == state and type(found["yes"]) is bool


@pytest.mark.parametrize(
    "text", ["", "[", "3", '["tensor"]', '["tensor", "f", [2], "AA=="]', '["what", []]', "[" * 9999]
)
def test_texts_that_are_no_states(text: str) -> None:
    with pytest.raises(Malformed):
        decoded(text)
