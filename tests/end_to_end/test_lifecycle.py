"""A model's life on every kind of mesh: training, evaluation, a checkpoint, another mesh, an export, and inference.

Each end is that of a plain loop on one device.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import partc
from partc.package.export import export
from partc.runtime.checkpoint.manifest import checkpoints
from partc.runtime.train.inference import main as infer
from tests.durable import imported_from, trained, whole
from tests.models import attending_experts as model_file

FILE = Path(model_file.__file__)
STEPS, HALF, LR, DECAY, CLIP = 4, 2, 1e-2, 0.1, 0.5

# A mesh with its options, and the mesh on which the second half of the training starts from its checkpoint.
CASES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ep": ({"mesh": "dp=2,ep=2", "zero": 1}, {"mesh": "cp=2,tp=2"}),
    "cp": ({"mesh": "dp=2,cp=2", "zero": 3}, {"mesh": "pp=2,ep=2", "microbatches": 2, "zero": 2}),
    "ep of dp and cp": (
        {"mesh": "dp=2,cp=2", "experts": "ep=4@dp,cp", "zero": 1},
        {"mesh": "pp=2,dp=2", "experts": "ep=2@dp", "microbatches": 4, "schedule": "zbv", "zero": 1},
    ),
    "cp and ep": (
        {"mesh": "cp=2,ep=2", "microbatches": 2, "loss_chunks": 2},
        {"mesh": "pp=2,cp=2", "microbatches": 4, "schedule": "interleaved", "recompute": "full"},
    ),
}


@cache
def start() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {name: x.double() for name, x in model_file.model().state_dict().items()}


@cache
def on_one_device() -> tuple[dict[str, Tensor], dict[int, dict[str, float]], Tensor]:
    """The end of a plain loop, its evaluations by step, and the logits of its first batch."""
    model = model_file.model().double()
    model.load_state_dict(start())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    evaluations = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        model_file.loss(model, model_file.data(step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        with torch.no_grad():
            found = model_file.evaluate(model, model_file.data(0))
        evaluations[step + 1] = {f"evaluation/{name}": x.item() for name, x in found.items()}
    with torch.no_grad():
        logits = model_file.infer(model, model_file.data(0))["logits"]
    return model.state_dict(), evaluations, logits


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for name, x in expected.items():
        torch.testing.assert_close(
            found[name], x, rtol=1e-10, atol=1e-10, msg=lambda said, name=name: f"{name}: {said}"
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.matrix if case in ("ep", "cp") else ()) for case in CASES]
)
def test_a_training_goes_on_elsewhere_and_infers(tmp_path: Path, case: str) -> None:
    end, evaluations, logits = on_one_device()
    first, second = CASES[case]
    save_file(start(), tmp_path / "start.safetensors")
    how = ("--steps", STEPS, "--lr", LR, "--weight-decay", DECAY, "--clip", CLIP)
    build = partc.compile(FILE, precision="fp64", **first).write(tmp_path / "first")
    evaluated = ("--eval-every", HALF, "--metrics", tmp_path / "metrics")
    saved = ("--save", tmp_path / "whole", "--save-every", HALF)
    trained(build, *how, *evaluated, *saved, "--init", tmp_path / "start.safetensors")
    at_end, at_half = checkpoints(tmp_path / "whole")
    assert_close(whole(at_end), end)
    for entry in map(json.loads, (tmp_path / "metrics").read_text().splitlines()):
        if entry["step"] in (HALF, STEPS):
            expected = evaluations[entry["step"]]
            assert {name: entry[name] for name in expected} == pytest.approx(expected, rel=1e-10)

    shutil.copytree(at_half, tmp_path / "half" / at_half.name)
    other = partc.compile(FILE, precision="fp64", **second).write(tmp_path / "second")
    trained(other, *how, "--resume", tmp_path / "half", "--save", tmp_path / "rest")
    export(other, tmp_path / "rest", tmp_path / "end.safetensors", say=lambda line: None)
    exported = load_file(tmp_path / "end.safetensors")
    assert exported.keys() == end.keys()
    assert_close(exported, end)

    mesh = {name: first[name] for name in ("mesh", "experts") if name in first}
    forward = partc.compile(FILE, precision="fp64", forward_only=True, **mesh).write(tmp_path / "forward")
    given = ["--virtual", "--init", tmp_path / "end.safetensors", "--out", tmp_path / "results", "--batches", 1]
    with imported_from(forward):
        assert infer(list(map(str, given)), forward) == 0
    (results,) = (tmp_path / "results").rglob("*.safetensors")
    assert_close(load_file(results), {"logits": logits})
