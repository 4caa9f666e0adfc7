"""Batches of any form: entries by path, constants of the trace, and objects of the user's own types."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.errors import PartcError
from partc.package.verify import verify
from partc.runtime.documents import Malformed
from partc.runtime.train.entries import constants_as_text, entries, rebuilt_batch
from partc.torch_private import FakeTensorMode
from tests.durable import train, trained
from tests.independent.plain import Recipe
from tests.independent.plain import train as plainly_trained
from tests.independent.trainings import differences, packaged
from tests.models import nested
from tests.prefork import shared

NESTED = Path(nested.__file__)
HEAD = """
import torch
from torch import nn


def model():
    return nn.Linear(4, 3)


def batch():
    return {batch}


def loss(model, batch):
    return model({x}).square().mean()
"""


def equal(left: Any, right: Any) -> bool:
    """Equality of nested objects, types included."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and torch.equal(left, right)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(equal, left, right))
    if isinstance(left, dict | nested.Encoding):
        return type(left) is type(right) and left.keys() == right.keys() and all(equal(left[k], right[k]) for k in left)
    if isinstance(left, nested.Targets):
        return type(left) is type(right) and equal(vars(left), vars(right))
    return type(left) is type(right) and left == right


def test_a_batch_rebuilt_from_its_entries_is_the_same_and_shares_no_container() -> None:
    batch = nested.batch()
    found = entries(batch)
    assert list(found)[:3] == ["inputs.ids", "inputs.mask", "rest.0.0"]
    assert constants_as_text(found)["targets.main.kind"] == "<Kind.MEAN: 'mean'>"
    again = rebuilt_batch(batch, found)
    assert equal(again, batch)
    other = rebuilt_batch(batch, {"inputs.ids": torch.zeros(1), "rest.1.1.1": 7})
    assert other["inputs"].ids.shape == (1,) and batch["inputs"].ids.shape == (8, 6)
    assert other["rest"][1] == (0.5, [False, 7]) and batch["rest"][1] == (0.5, [False, True])
    ordered = OrderedDict(b=torch.ones(1), a=torch.zeros(2))
    assert type(rebuilt_batch(ordered, {})) is OrderedDict and list(rebuilt_batch(ordered, {})) == ["b", "a"]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": {1, 2}}, "'x', which is of set"),
        ({"a": {"b": torch.ones(1)}, "a.b": 3}, "two entries of the path 'a.b'"),
        ({3: torch.ones(1)}, "key 3, which is not a string"),
        ({"x": [1.0, 2.0]}, "no tensor"),
        (3, "is of int, not a tensor"),
    ],
)
def test_no_batches(batch: Any, message: str) -> None:
    with pytest.raises(Malformed, match=message):
        entries(batch)


def test_a_list_within_itself_is_refused() -> None:
    endless: list[Any] = [torch.ones(1)]
    endless.append(endless)
    with pytest.raises(Malformed, match="deeper"):
        entries({"x": endless})


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "pp=2,tp=2"])
def test_nested_batches_train_as_on_one_device(tmp_path: Path, mesh: str) -> None:
    package = partc.compile(NESTED, mesh=mesh, microbatches=2, precision="fp64").write(tmp_path / "build")
    assert verify(package, virtual=True).ok


@pytest.mark.parametrize(
    "batch",
    [
        [torch.randn(8, 4), torch.randn(8, 3)],
        nested.Pair(torch.randn(8, 4), torch.randn(8, 3)),
        {"left": torch.randn(8, 4), "right": torch.randn(8, 3)},
        torch.randn(8, 4),
    ],
    ids=["by position", "a named tuple", "by name", "a tensor"],
)
def test_batches_of_objects_are_arguments_or_one_argument(batch: Any) -> None:
    build = {nested.Pair: of_pair, Tensor: of_one}.get(type(batch), of_two)
    assert partc.compile(build, batch, mesh="dp=2", precision="fp64").verify(steps=2).ok


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 3)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return (self.up(left) - right).square().mean()


class OfPair(Two):
    def forward(self, pair: nested.Pair) -> Tensor:  # type: ignore[override]
        return super().forward(pair.left, pair.right)


class OfOne(Two):
    def forward(self, batch: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(batch, batch[:, 1:])


def of_one() -> nn.Module:
    return OfOne()


def of_two() -> nn.Module:
    return Two()


def of_pair() -> nn.Module:
    return OfPair()


def test_a_shared_microbatch_of_a_nested_batch_is_a_batch_of_its_own(tmp_path: Path) -> None:
    """An operation that couples examples makes each microbatch a batch of its own, in the reference too."""
    text = HEAD.format(batch="{'in': [torch.randn(8, 4), 2.0]}", x="batch['in'][0]")
    text = text.replace(".square().mean()", ".cumsum(0).square().mean() * batch['in'][1]")
    file = tmp_path / "coupled.py"
    file.write_text(text)
    package = partc.compile(file, mesh="tp=1", microbatches=2, precision="fp64")
    assert package.warnings
    assert package.verify(steps=2).ok


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{'a': [x, 3]}", "'a.1' in batch 2 of data(step) is 3, and 2 was compiled"),
        ("{'a': [x, True]}", "'a.1' in batch 2 of data(step) is True, and 2 was compiled"),
        ("{'a': [x, 2], 'b': x}", "has the tensor 'b', and batch() has none there"),
        ("{'a': [x]}", "has no entry 'a.1'"),
        ("{'a': [x[:7], 2]}", "'a.0' in batch 2 of data(step) has shape [7, 4], of batch() [8, 4]"),
        ("{'a': [x, 2], 'b': {1}}", "'b', which is of set"),
        ("[x]", "has no entry 'a.0'"),
    ],
)
def test_batches_of_another_form_are_refused(tmp_path: Path, given: str, message: str) -> None:
    text = HEAD.format(batch="{'a': [torch.randn(8, 4), 2]}", x="batch['a'][0]")
    text += f"\n\ndef data(step):\n    x = torch.ones(8, 4)\n    return {given} if step == 2 else {{'a': [x, 2]}}\n"
    file = tmp_path / "form.py"
    file.write_text(text)
    package = partc.compile(file, mesh="dp=2").write(tmp_path / "build")
    trained(package, "--steps", 2)
    stopped = train(package, "--steps", 3)
    assert stopped.returncode == 2 and "P0543" in stopped.stderr and message in stopped.stderr, stopped.stderr


@pytest.mark.parametrize(
    "batch",
    [
        "next(iter(torch.utils.data.DataLoader([{'x': torch.ones(4)}] * 8, batch_size=8, shuffle=True)))",
        "{'x': torch.tensor(torch.randn(8, 4).tolist())}",
        "{'x': torch.from_numpy(torch.ones(8, 4).numpy())}",
    ],
)
def test_a_batch_may_read_the_values_of_its_tensors(tmp_path: Path, batch: str) -> None:
    file = tmp_path / "form.py"
    file.write_text(HEAD.format(batch=batch, x="batch['x']"))
    assert partc.compile(file, mesh="dp=2", precision="fp64").verify(steps=1).ok


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ("{'x': torch.ones(8, 4), 'y': {1}}", "'y', which is of set"),
        ("{'x': {'y': torch.ones(8, 4)}, 'x.y': None}", "two entries"),
        ("{'x': {'y': torch.ones(8, 4).to_sparse()}}", "'x.y', which is sparse"),
        ("3", "is of int, not a tensor"),
    ],
)
def test_batches_that_cannot_be_compiled(tmp_path: Path, batch: str, message: str) -> None:
    file = tmp_path / "form.py"
    file.write_text(HEAD.format(batch=batch, x="batch['x']"))
    with pytest.raises(PartcError, match=message) as refused:
        partc.compile(file, mesh="dp=2")
    assert refused.value.code == "P0205"


SIZES = """
import torch
from torch import nn


def model():
    return nn.Linear(4, 3)


def batch():
    return data(0)


def data(step):
    x = torch.randn(4, 5, 4, generator=torch.Generator().manual_seed(step))
    return {{"x": x, "sizes": {sizes}, "scales": {scales}}}


def of_batch(model, x, sizes, scales):
    rows = model(x).cumsum(0)
    means = [each[:size].mean(0) for each, size in zip(rows, sizes)]
    return (torch.stack(means) * torch.tensor(scales).sum()).square().mean()


def loss(model, batch):
    {loss}
"""
WHOLE = "return of_batch(model, **batch)"
HALVES = """x, scales = batch["x"], batch["scales"]
    return (of_batch(model, x[:2], [2, 3], scales) + of_batch(model, x[2:], [2, 3], scales)) / 2"""


@pytest.mark.slow
def test_a_list_of_constants_is_cut_with_the_examples(tmp_path: Path) -> None:
    """Each microbatch is a batch of its own: the loss is the mean of those of the halves, with half of the list each."""
    file, halves = tmp_path / "sizes.py", tmp_path / "halves.py"
    sizes, scales = "[2, 3, 2, 3]", "(0.5, 1.0, 2.0, 3.0)"
    file.write_text(SIZES.format(sizes=sizes, scales=scales, loss=WHOLE))
    halves.write_text(SIZES.format(sizes=sizes, scales=scales, loss=HALVES))
    recipe = Recipe(weight_decay=0.1, clip=0.5)
    built = partc.compile(file, mesh="dp=2", microbatches=2, precision="fp64")
    assert built.program.separate_batches
    build = built.write(tmp_path / "build")
    found = packaged(build, recipe, tmp_path, shared())
    assert max(error for _, error in differences(found, plainly_trained(halves, recipe))) < 1e-12
    assert verify(build, virtual=True).ok


def test_a_list_with_other_constants_in_each_microbatch_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "sizes.py"
    file.write_text(SIZES.format(sizes="[2, 3, 3, 2]", scales="1.0", loss=WHOLE))
    with pytest.raises(PartcError, match=r"list of the entry sizes\.0 has other constants.*: 2 and 3") as refusal:
        partc.compile(file, mesh="dp=2", microbatches=2)
    assert refusal.value.code == "P0401"
    partc.compile(file, mesh="dp=2")


def test_copies_of_modules_without_values_share_their_mode() -> None:
    """batch() may build a model that copies its layers; with a mode of its own, each copy crashed the process."""
    with FakeTensorMode() as mode:
        layer = copy.deepcopy(nn.Linear(2, 2))
    assert layer.weight.fake_mode is mode
