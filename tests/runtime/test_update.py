"""Updates: the gradient norm for every sharding, clipping, rates, accumulation, and loss scales."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import partc
from partc.package.verify import verify
from partc.runtime.checkpoint.safetensors import load
from partc.runtime.optimizer.gradients import Gradients
from partc.runtime.optimizer.optimizer import make_optimizers
from partc.runtime.optimizer.recipe import Recipe
from partc.runtime.optimizer.update import BACKOFF, FIRST_SCALE, GROWTH, PATIENCE, Decline, LossScale, Rate
from tests import prefork
from tests.passes.test_zero import tied


def _package(folder: Path, mesh: str, **options: object) -> Path:
    torch.manual_seed(1)
    batch = {"ids": torch.randint(16, (16, 4))}
    given = {"microbatches": 4, "precision": "fp64", **options}
    return partc.compile(tied, batch, mesh=mesh, **given).write(folder / "build")  # type: ignore[arg-type]


def _sgd(clip: float) -> list[str]:
    return ["--optimizer", "sgd", "--lr", "0.5", "--clip", str(clip)]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mesh", "zero", "schedule"),
    [("1", 0, "1f1b"), ("2x2", 0, "1f1b"), ("2x2x2", 1, "1f1b"), ("2x2x2", 3, "zbv"), ("pp=2,dp=2", 2, "interleaved")],
)
def test_clipping_is_that_of_one_device(mesh: str, zero: int, schedule: str, tmp_path: Path) -> None:
    """Weights that are tied over stages, replicated, cut or frozen count once each in the norm."""
    package = _package(tmp_path, mesh, zero=zero, schedule=schedule)
    result = verify(package, steps=3, virtual=True, arguments=_sgd(clip=0.05))
    assert result.ok, result.worst


@pytest.mark.parametrize("most", [0.5, 5.0, 5.0 + 5e-7, 7.0])
@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_clipping_is_torchs(most: float, bad: float) -> None:
    """Also at the limit, and where a gradient is not a number."""
    named = {"a": torch.tensor([3.0, bad], dtype=torch.float64), "b": torch.tensor([4.0], dtype=torch.float64)}
    parameters = [nn.Parameter(torch.zeros_like(x)) for x in named.values()]
    for parameter, x in zip(parameters, named.values(), strict=True):
        parameter.grad = x.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, most)
    Gradients((*named.values(),), named).clip(norm, most)
    for parameter, x in zip(parameters, named.values(), strict=True):
        torch.testing.assert_close(x, parameter.grad, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_clipping_matters(tmp_path: Path) -> None:
    package = _package(tmp_path, "1")
    clipped, plain = (verify(package, steps=3, virtual=True, arguments=_sgd(clip=clip)) for clip in (0.05, 1e6))
    assert clipped.losses[0] == plain.losses[0]
    assert abs(clipped.losses[-1] - plain.losses[-1]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "zero"), [("2x2x2", 0), ("pp=2,dp=2", 1), ("2x2", 3)])
def test_accumulated_batches_are_one_step(mesh: str, zero: int, tmp_path: Path) -> None:
    result = verify(
        _package(tmp_path, mesh, zero=zero), steps=2, virtual=True, arguments=["--accumulate", "3", "--clip", "0.1"]
    )
    assert result.ok, result.worst


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize("decline", ["constant", "linear", "cosine"])
def test_rates_are_those_of_torchs_schedulers(decline: Decline, warmup: int) -> None:
    base, steps, least = 0.3, 15, 0.01
    peak = max(warmup - 1, 0)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=base)
    rising = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / max(warmup, 1), 1.0, peak)
    falling: torch.optim.lr_scheduler.LRScheduler
    if decline == "cosine":
        falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - 1 - peak, eta_min=least)
    elif decline == "linear":
        falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, least / base, steps - 1 - peak)
    else:
        falling = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [rising, falling], [peak])
    rate = Rate(base=base, warmup=warmup, decline=decline, least=least, steps=steps)
    for step in range(steps):
        assert rate.at(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9), step
        optimizer.step()
        both.step()
    assert decline == "constant" or rate.at(steps - 1) == pytest.approx(least, rel=1e-9)


def test_weights_without_decay() -> None:
    values = {name: torch.ones(2) for name in ("up.weight", "up.bias", "norm.weight")}
    for x in values.values():
        x.grad = torch.zeros(2)
    recipe = Recipe.of("adamw", weight_decay=0.5, no_decay=("*.bias", "norm*"))
    for _, optimizer, _ in make_optimizers(recipe.all_settings(dict.fromkeys(values, 1)), values, 0.1):
        optimizer.step()
    assert {name: float(x[0]) for name, x in values.items()} == pytest.approx(
        {"up.weight": 0.95, "up.bias": 1.0, "norm.weight": 1.0}
    )


def test_loss_scales_follow_torchs_scaler() -> None:
    scale = LossScale()
    expected, good = FIRST_SCALE, 0
    for finite in [False, False, True, False, *[True] * (2 * PATIENCE + 5)]:
        scale.after(finite)
        good = good + 1 if finite else 0
        expected *= 1 if finite else BACKOFF
        if good == PATIENCE:
            expected, good = expected * GROWTH, 0
        assert scale.value == expected
    again = LossScale()
    again.restore(scale.state())
    assert (again.value, again.good) == (scale.value, scale.good)


LARGE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return (self.second(self.first(x)) * 40).float().square().sum()

def model():
    return Net()

def batch():
    return {"x": torch.randn(8, 4)}
"""


@pytest.mark.slow
def test_an_overflow_is_skipped_on_all_ranks_together(tmp_path: Path) -> None:
    """Scaled by 65536, gradients of thousands don't fit 16 bits: the scale falls until they do."""
    (tmp_path / "net.py").write_text(LARGE)
    package = partc.compile(tmp_path / "net.py", mesh="pp=2,dp=2", precision="fp16", microbatches=2).write(
        tmp_path / "build"
    )
    command = [package / "train.py", "--virtual", "--steps", 20, "--lr", "1e-6", "--optimizer", "sgd"]
    done = prefork.done([*command, "--metrics", tmp_path / "log.jsonl", "--record", tmp_path / "record"])
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    skipped = [line["skipped"] for line in lines]
    assert skipped[0] and 0 < sum(skipped) < 20
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert done.stderr.count("overflow: skipped") == sum(skipped)
    for rank in range(4):
        steps = [load(tmp_path / "record" / f"step_{step:04d}_rank_{rank:03d}.safetensors")[0] for step in range(1, 21)]
        for step in range(1, 20):
            names = [name for name in steps[step] if name.startswith("parameter/")]
            same = all(torch.equal(steps[step][name], steps[step - 1][name]) for name in names)
            assert same == skipped[step], (rank, step)


@pytest.mark.parametrize(
    "option", [["--clip", "0"], ["--clip", "-1"], ["--accumulate", "0"], ["--warmup", "-1"], ["--min-lr", "-1"],
               ["--weight-decay", "nan"]],
)  # fmt: skip
def test_wrong_settings(option: list[str], tmp_path: Path) -> None:
    package = _package(tmp_path, "1", microbatches=1)
    done = prefork.done([package / "train.py", "--virtual", *option])
    assert done.returncode == 2 and "error P0521" in done.stderr and "Traceback" not in done.stderr
