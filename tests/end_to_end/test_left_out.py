"""Parameters that no gradient reaches in some steps, or in any, against a plain loop with torch's optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import partc
from partc.errors import PartcError
from partc.package.verify import verify
from partc.runtime.checkpoint.manifest import folder_name
from tests.durable import trained, whole
from tests.independent.plain import Recipe, train
from tests.independent.trainings import ALLOWED, MODELS, Setting, compared
from tests.models.left_out import model
from tests.prefork import shared

MODEL = Path(__file__).parents[1] / "models" / "left_out.py"
_DECAY = {"weight_decay": 0.1, "clip": 0.5, "steps": 6}


def _recipe(**how: Any) -> Recipe:
    return Recipe(**{**_DECAY, **how})


@pytest.mark.parametrize(
    ("mesh", "options", "recipe"),
    [
        ("dp=2", {}, _recipe()),
        ("ep=2", {"zero": 1}, _recipe(optimizer="sgd:momentum=0.9,dampening=0.1", lr=0.05)),
        pytest.param("pp=2", {"microbatches": 2}, _recipe(accumulate=2), marks=pytest.mark.slow),
        pytest.param("dp=2,tp=2", {"zero": 3}, _recipe(optimizer="nadam"), marks=pytest.mark.slow),
        pytest.param("dp=2,ep=2", {"zero": 2, "microbatches": 2}, _recipe(optimizer="adagrad"), marks=pytest.mark.slow),
        pytest.param("cp=2,tp=2", {"recompute": "full"}, _recipe(optimizer="rmsprop"), marks=pytest.mark.slow),
        pytest.param("cp=3", {}, _recipe(optimizer="radam"), marks=pytest.mark.slow),
        pytest.param("tp=2", {}, _recipe(optimizer="adafactor"), marks=pytest.mark.slow),
        pytest.param("dp=4", {"zero": 3}, _recipe(optimizer="asgd"), marks=pytest.mark.slow),
        pytest.param(
            "dp=2", {"zero": 2}, _recipe(optimizer="rprop", weight_decay=None, accumulate=2), marks=pytest.mark.slow
        ),
        pytest.param("ep=4", {}, _recipe(optimizer="adadelta"), marks=pytest.mark.slow),
        pytest.param("dp=2", {"zero": 1}, _recipe(optimizer="adamax", clip=None), marks=pytest.mark.slow),
    ],
)
def test_the_optimizer_leaves_parameters_without_a_gradient(
    mesh: str, options: Mapping[str, Any], recipe: Recipe, tmp_path: Path
) -> None:
    found = compared(MODEL, Setting(mesh=mesh, options=options, recipe=recipe), tmp_path, shared())
    assert not found.refused and found.error <= ALLOWED, (found.error, found.where)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "mesh"),
    [
        ({"style": "masks"}, "dp=2"),
        ({"style": "first"}, "tp=2"),
        ({"style": "hit"}, "ep=2"),
        ({"depth": 7}, "dp=2"),
        ({"depth": 3, "shared": True}, "pp=2"),
    ],
)
def test_forms_of_loops_over_experts(options: Mapping[str, Any], mesh: str, tmp_path: Path) -> None:
    package = partc.compile(str(MODEL), mesh=mesh, precision="fp64", options=options)
    assert not package.warnings
    found = verify(package.write(tmp_path / "build"), steps=5, virtual=True, arguments=["--weight-decay", "0.5"])
    assert found.ok, found.worst


def test_experts_keep_their_values_without_rows(tmp_path: Path) -> None:
    """Eagerly too: the test's own expectation."""
    torch.manual_seed(0)
    before = {name: x.double() for name, x in model().state_dict().items()}
    after = train(MODEL, _recipe()).state
    moved = {name for name, x in after.items() if not torch.equal(x, before[name])}
    assert all(f"blocks.0.experts.{number}.up.weight" in moved for number in (0, 1, 2))
    assert not any(".experts.3." in name for name in moved)
    before_rare, after_rare = (train(MODEL, _recipe(steps=steps)).state["adapter.weight"] for steps in (2, 4))
    assert torch.equal(before_rare, after_rare)


@pytest.mark.parametrize("meshes", [("dp=2", "ep=2"), pytest.param(("ep=4", "dp=2,tp=2"), marks=pytest.mark.slow)])
def test_resumed_trainings_continue_bit_by_bit(meshes: tuple[str, str], tmp_path: Path) -> None:
    """Also on another mesh; states that an optimizer makes at the first gradient are absent before it."""
    one, other = (
        partc.compile(str(MODEL), mesh=mesh, precision="fp64", zero=1).write(tmp_path / mesh) for mesh in meshes
    )
    optimizer = ("--optimizer", "sgd:momentum=0.9,dampening=0.5", "--lr", "0.05", "--weight-decay", "0.1")
    trained(one, *optimizer, "--steps", 6, "--save", tmp_path / "through", "--save-every", 1, "--keep", 9)
    first = whole(tmp_path / "through" / folder_name(1))
    assert "momentum_buffer/blocks.0.experts.0.up.weight" in first
    assert not any("experts.2" in name or "experts.3" in name for name in first if "/" in name)
    trained(one, "--resume", tmp_path / "through" / folder_name(1), "--steps", 6, "--save", tmp_path / "again")
    trained(other, "--resume", tmp_path / "through" / folder_name(1), "--steps", 6, "--save", tmp_path / "moved")
    through, again, moved = (whole(tmp_path / name / folder_name(6)) for name in ("through", "again", "moved"))
    assert through.keys() == again.keys() == moved.keys()
    assert all(torch.equal(through[name], again[name]) for name in through)
    assert all(torch.allclose(through[name], moved[name], rtol=1e-12, atol=1e-12) for name in through)


@pytest.mark.slow
def test_counts_are_not_compressed() -> None:
    with pytest.raises(PartcError) as caught:
        partc.compile(MODEL, mesh="dp=2", compress_grads="int8")
    assert caught.value.code == "P0423" and "a step may leave out " in caught.value.cause
    partc.compile(MODEL, mesh="dp=2", grad_reduce="bf16")


@pytest.mark.parametrize(
    ("mesh", "options"),
    [("dp=2", {"zero": 1}), pytest.param("pp=2,tp=2", {"microbatches": 2}, marks=pytest.mark.slow)],
)
def test_dropped_layers_have_no_gradient(mesh: str, options: Mapping[str, Any], tmp_path: Path) -> None:
    setting = Setting(mesh=mesh, options=options, recipe=_recipe(accumulate=2))
    found = compared(MODELS / "dropped_layers.py", setting, tmp_path, shared())
    assert not found.refused and found.error <= ALLOWED, (found.error, found.where)


@pytest.mark.slow
def test_parameters_and_their_counts_are_in_one_stage(tmp_path: Path) -> None:
    setting = Setting(mesh="pp=2", options={"microbatches": 3, "zero": 1}, recipe=_recipe())
    found = compared(MODEL.with_name("single_experts.py"), setting, tmp_path, shared())
    assert not found.refused and found.error <= ALLOWED, (found.error, found.where)
    with pytest.raises(PartcError) as caught:
        partc.compile(MODEL.with_name("single_experts.py"), mesh="pp=12", microbatches=12)
    assert caught.value.code == "P0403" and "numbers of rows" in str(caught.value.help)
