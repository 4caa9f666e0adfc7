"""The independent harness: plain loops with torch.optim against packages in real processes, state dicts in fp64.

`make independent` runs all models on all settings and prints a table; here are a few.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import partc
from partc.errors import PartcError
from partc.package.export import export
from tests.durable import trained
from tests.independent.plain import Recipe, Trained, train
from tests.independent.rounding import rounding
from tests.independent.trainings import ALLOWED, MODELS, SETTINGS, Setting, compared, differences
from tests.prefork import shared

CHEAP = {
    "no_gradient": (0, 4),
    "own_backward": (1, 6),
    "fourier_operator": (3,),
    "frozen_parts": (1, 2),
    "vae_drawn": (3,),
    "used_twice": (5,),
    "running_mean": (2,),
    "reversible": (11,),
    "radiance": (1,),
    "attention_over_samples": (0,),
    "dressed_functions": (1,),
    "special_functions": (1,),
    "scripted_modules": (0,),
    "functional_gradients": (0,),
    "places_in_tables": (1, 5),
    "one_key_head": (1,),
    "plain_tensors": (1, 2),
    "tensors_in_lists": (0, 6),
    "states_in_dicts": (0, 4),
    "attributes_in_rings": (0, 6),
    "own_recomputation": (1, 4),
    "adversarial": (0, 4),
    "left_out_experts": (3,),
    "turing": (4,),
    "stored_keys": (5,),
    "forked_paths": (0,),
    "types_in_place": (1,),
    "one_vector": (1, 4),
    "selected_blocks": (0,),
    "nearly_attention": (1,),
    "memory_efficient": (0, 4),
    "capped_experts": (0, 5),
    "repeated_batch": (1, 5),
}
PAIRS = [
    pytest.param(name, SETTINGS[index], marks=() if index < 2 else (pytest.mark.slow,))
    for name, chosen in CHEAP.items()
    for index in chosen
]


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize(("model", "setting"), PAIRS, ids=lambda each: each if isinstance(each, str) else each.name)
def test_a_package_ends_where_a_plain_loop_ends(model: str, setting: Setting, tmp_path: Path) -> None:
    outcome = compared(MODELS / f"{model}.py", setting, tmp_path, shared())
    assert outcome.ok, outcome


@pytest.mark.slow
@pytest.mark.processes
def test_torchrun_ends_there_too(tmp_path: Path) -> None:
    outcome = compared(MODELS / "no_gradient.py", SETTINGS[2], tmp_path, None)
    assert not outcome.refused and outcome.ok, outcome


@pytest.mark.parametrize(
    "options", [{"mesh": "pp=2", "microbatches": 5}, {"mesh": "dp=3"}, {"mesh": "dp=2", "microbatches": 16}]
)
def test_batches_that_do_not_divide_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PartcError, match="P0401"):
        partc.compile(str(MODELS / "siamese.py"), **options)


@pytest.mark.parametrize(
    "other", [{"weight_decay": 0.05}, {"clip": 0.4}, {"min_lr": 2e-4}, {"accumulate": 2}, {"no_decay": ("*bias",)}]
)
def test_another_recipe_ends_elsewhere(other: dict[str, Any]) -> None:
    """A control: what the comparison allows is much less than what one option makes of the end."""
    path, recipe = MODELS / "no_gradient.py", SETTINGS[0].recipe
    found, plain = train(path, dataclasses.replace(recipe, **other)), train(path, recipe)
    assert max(error for _, error in differences(found, plain)) > 100 * ALLOWED


def test_a_loss_that_is_no_number_equals_itself_alone() -> None:
    ends = [
        Trained(state={"w": torch.tensor([loss, 1.0])}, losses=(loss,), gone_without=frozenset())
        for loss in (math.nan, 1.0)
    ]
    for found, plain in itertools.product(ends, repeat=2):
        assert {error for _, error in differences(found, plain)} == {0.0 if found is plain else math.inf}


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("no_gradient")
    package = partc.compile(str(MODELS / "no_gradient.py"), mesh="pp=2,dp=2", precision="fp64", microbatches=2, zero=2)
    return package.write(folder / "build")


class TestInOneProcess:
    """A plain loop against virtual ranks, where real processes would only add time."""

    def test_only_parameters_with_gradients_are_trained(self, build: Path) -> None:
        from partc.package.launch import read_package

        entries = read_package(build)["parameters"]
        without = train(MODELS / "no_gradient.py", Recipe(steps=1)).gone_without
        assert {name for name, entry in entries.items() if not entry["trainable"]} == without

    def test_a_run_cut_in_the_middle_of_its_schedule(self, build: Path, tmp_path: Path) -> None:
        recipe = Recipe(steps=7, weight_decay=0.1, clip=0.3, warmup=3, lr_schedule="cosine", min_lr=1e-5, accumulate=2)
        save = ("--save", tmp_path / "ckpt", "--save-every", 1, "--keep", 9, "--resume")
        trained(build, *recipe.arguments, *save)
        for last in (2, 5):  # continued in the warm-up, then on the way down
            for step in range(last + 1, recipe.steps + 1):
                shutil.rmtree(tmp_path / "ckpt" / f"step_{step:08d}")
            assert f"after step {last}" in trained(build, *recipe.arguments, *save)
        export(build, tmp_path / "ckpt", tmp_path / "end.safetensors", say=lambda line: None)
        end, plain = load_file(tmp_path / "end.safetensors"), train(MODELS / "no_gradient.py", recipe).state
        assert end.keys() == plain.keys()
        for name, x in plain.items():
            assert end[name].dtype == x.dtype and torch.allclose(end[name], x, rtol=0, atol=1e-10), name


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", ["complex_layers", "fused_projections", "decorrelated", "attention_over_samples"])
def test_rounding_in_16_bits_is_that_of_autocast(name: str) -> None:
    """Complex numbers were rounded to 16 bits, a norm without an epsilon added that of 16 bits, and running statistics
    were rounded between two batches of a step: the errors were five, twelve and ten times those of autocast.
    """
    found = rounding(MODELS / f"{name}.py", "dp=2", Recipe(optimizer="sgd", lr=0.05, steps=3), shared())
    assert found.package < 1.5 * found.autocast, found


@pytest.mark.slow
@pytest.mark.processes
def test_steps_that_fp16_skips_are_no_rounding() -> None:
    """The first scale of the loss is too large for this model, in a package as in an eager loop with GradScaler."""
    path, recipe = MODELS / "projected_memory.py", Recipe(optimizer="sgd", lr=0.05, steps=5)
    assert train(path, recipe, precision="fp16").skipped == {0, 1, 2}
    found = rounding(path, "dp=2", recipe, shared(), precision="fp16")
    assert found.package < 2 * found.autocast < 0.01, found
