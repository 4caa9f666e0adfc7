"""Losses that balance experts, on meshes that cut the tokens that they count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import partc
from partc.errors import PartcError
from partc.frontend import own_backward
from partc.package.verify import verify
from tests.durable import trained, whole
from tests.models import balanced
from tests.pairwise import Row
from tests.test_peer_bugs import change

BALANCED = Path(__file__).parent / "models" / "balanced.py"
BY_SEQUENCE = "sequence+attached sequence+sigmoid+z"
BY_BATCH = "switch+attached switch+bincount+weighted+importance"


def _compiled(kinds: str, options: Row) -> Any:
    return partc.compile(str(BALANCED), precision="fp64", options={"kinds": kinds}, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": "pp=2,dp=2", "microbatches": 4, "recompute": "full"},
        {"mesh": "dp=2,ep=2", "microbatches": 2, "zero": 3},
        pytest.param({"mesh": "tp=2,cp=2", "zero": 1}, marks=pytest.mark.slow),
        pytest.param({"mesh": "pp=2,ep=2,tp=2", "microbatches": 2, "schedule": "zbv"}, marks=pytest.mark.slow),
    ],
)
def test_losses_by_sequence_are_those_of_the_whole_batch(options: Row, tmp_path: Path) -> None:
    package = _compiled(BY_SEQUENCE, options)
    assert not package.program.separate_batches and not package.warnings
    assert verify(package.write(tmp_path / "build"), steps=2, virtual=True).ok


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": "dp=2,ep=2"},
        {"mesh": "pp=2,dp=2", "microbatches": 2, "recompute": "full"},
        pytest.param({"mesh": "tp=2,cp=2", "zero": 1}, marks=pytest.mark.slow),
        pytest.param({"mesh": "dp=2,ep=2,tp=2", "microbatches": 2, "zero": 3}, marks=pytest.mark.slow),
    ],
)
def test_losses_by_batch_are_those_of_all_ranks_and_of_each_microbatch(options: Row, tmp_path: Path) -> None:
    package = _compiled(BY_BATCH, options)
    assert package.program.separate_batches == bool(package.warnings) == ("microbatches" in options)
    assert verify(package.write(tmp_path / "build"), steps=2, virtual=True).ok


def _stepped(kinds: str, parts: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights of a model, and its weights after a step against the mean loss of `parts` batches; attached losses are terms."""
    torch.manual_seed(0)
    model = balanced.model(kinds.replace("attached ", "")).double()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    cut = {name: x.chunk(parts) for name, x in balanced.batch().items()}
    losses = [model(x.double(), labels) for x, labels in zip(*cut.values(), strict=True)]
    torch.stack(losses).mean().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return before, {name: x.detach() for name, x in model.state_dict().items()}


@pytest.mark.parametrize(("kinds", "microbatches"), [("attached sequence", 2), ("attached switch", 4)])
def test_attached_losses_count_as_terms_of_the_loss(kinds: str, microbatches: int, tmp_path: Path) -> None:
    before, after = _stepped(kinds, microbatches if kinds == "attached switch" else 1)
    save_file(before, tmp_path / "init.safetensors")
    build = _compiled(kinds, {"mesh": "dp=2", "microbatches": microbatches}).write(tmp_path / "build")
    given = ("--steps", 1, "--optimizer", "sgd", "--lr", 1, "--init", tmp_path / "init.safetensors")
    trained(build, *given, "--save", tmp_path / "save")
    found = whole(tmp_path / "save" / "step_00000001")
    for name, x in after.items():
        torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-12)


def test_fp16_does_not_scale_attached_losses() -> None:
    with pytest.raises(PartcError, match="fp16 scales the loss") as caught:
        partc.compile(str(BALANCED), mesh="1", precision="fp16", options={"kinds": "attached sequence"})
    assert caught.value.code == "P0216"


# Mistakes of peers, made in a package: losses whose gradient depends on the mesh.
MUTANTS = {
    "the load is that of a rank": (
        "layer",
        "comm.dp.start_all_reduce_(div_partial)",
        "comm.mb.start_all_reduce_(div_partial)",
    ),
    "an attached loss counts twice": ("constants", "torch.full((), 1,", "torch.full((), 2,"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_not_the_single_device_model(name: str, tmp_path: Path) -> None:
    build = _compiled("switch+attached sequence", {"mesh": "dp=2"}).write(tmp_path / "build")
    assert verify(build, steps=1, virtual=True, reference=tmp_path / "reference").ok
    file, line, becomes = MUTANTS[name]
    change(build / "regions" / f"{file}.py", line, becomes)
    assert not verify(build, steps=1, virtual=True, reference=tmp_path / "reference").ok


@pytest.mark.slow
def test_an_attached_loss_does_not_grow_with_the_microbatches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(own_backward, "_fitted", lambda gradient, x, parts: gradient.detach())
    package = _compiled("attached switch", {"mesh": "1", "microbatches": 2})
    assert not verify(package.write(tmp_path / "build"), steps=1, virtual=True).ok
