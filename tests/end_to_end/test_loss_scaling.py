"""fp16 packages against autocast and torch.amp.GradScaler: the skipped steps, and the weights.

A gradient in fp16 overflows where it is computed. Ranks and microbatches compute their own parts of the gradients of
weights, which are added in fp32; so an eager loop skips the same steps if it runs the same parts.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import partc
from partc.runtime.checkpoint.manifest import folder_name
from tests.durable import trained, whole
from tests.models.large_gradients import data, model

MODEL = Path(__file__).parents[1] / "models" / "large_gradients.py"
STEPS, RATE = 6, 0.01


def _eager(parts: int, *, low: bool = False, scale: float = 2.0**16) -> tuple[list[bool], torch.Tensor]:
    """The skipped steps of a plain loop, and its weight at the end."""
    torch.manual_seed(0)
    trained_model = model(low)
    optimizer = torch.optim.AdamW(trained_model.parameters(), lr=RATE)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    skipped = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in data(step)["x"].chunk(parts):
            with torch.autocast("cpu", torch.float16):
                loss = trained_model(part) / parts
            scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(scaler.get_scale() < before)
    return skipped, next(iter(trained_model.parameters())).detach()


def _packaged(folder: Path, mesh: str, microbatches: int = 1, *, low: bool = False) -> tuple[list[bool], torch.Tensor]:
    package = partc.compile(
        str(MODEL), mesh=mesh, microbatches=microbatches, precision="fp16", options={"low": low}
    ).write(folder / "build")
    log = folder / "log.jsonl"
    trained(package, "--steps", STEPS, "--lr", RATE, "--metrics", log, "--save", folder / "saved")
    skipped = [json.loads(line)["skipped"] for line in log.read_text().splitlines()]
    return skipped, whole(folder / "saved" / folder_name(STEPS))["weight.weight"]


@pytest.mark.parametrize(
    ("mesh", "microbatches", "parts", "first"), [("dp=1", 1, 1, True), ("dp=1", 2, 2, False), ("dp=2", 1, 2, False)]
)
def test_skipped_steps_are_those_of_the_same_parts(
    mesh: str, microbatches: int, parts: int, first: bool, tmp_path: Path
) -> None:
    skipped, weight = _packaged(tmp_path, mesh, microbatches)
    expected, eager = _eager(parts)
    assert skipped == expected == [first, *[False] * (STEPS - 1)]
    assert torch.allclose(weight, eager, atol=1e-6)


def test_a_loss_in_fp16_cannot_carry_the_first_scale(tmp_path: Path) -> None:
    """65,536 is above the range of fp16: an eager loop skips its first step. Packages compute the mean in fp32."""
    skipped, weight = _packaged(tmp_path, "dp=1", low=True)
    expected, _ = _eager(1, low=True)
    unscaled, eager = _eager(1, low=True, scale=2.0**15)
    assert expected == [True, *[False] * (STEPS - 1)] and not any(skipped) and not any(unscaled)
    assert torch.allclose(weight, eager, atol=1e-6)
