"""The package's AdamW against torch's over several steps: clipping, loss scales, decay, and any position in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from partc.codegen.kernels.fixed import FixedKernels
from partc.ir.operators import DTYPES
from partc.ir.program import DType
from partc.package.verify import verify
from partc.runtime.comm.comm import Comm
from partc.runtime.execution.executor import gradient_memory
from partc.runtime.execution.parts import Parts
from partc.runtime.layout import Shard
from partc.runtime.optimizer.optimizer import Several, TorchOptimizer
from partc.runtime.optimizer.recipe import Recipe
from partc.runtime.optimizer.update import LossScale, Rate, Update, make_update
from tests.durable import build, losses, same_records, trained
from tests.triton_runs import Kernels, interpreted, there

SHAPES = {"norm.weight": (7,), "up.weight": (33, 65), "up.bias": (33,), "empty": (0, 4), "down.weight": (64, 48)}


@pytest.fixture(scope="module", params=[1024, 4096])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Of several blocks each, the last of them not whole."""
    folder = Kernels(tmp_path_factory.mktemp("kernels"))
    blocks = {"block": request.param, "interpreted": request.param}
    written = (FixedKernels(name=name, each="", **blocks) for name in ("adamw", "sgd", "squares"))
    return SimpleNamespace(**{built.name: folder.load(built) for built in written})


class Trained:
    """Parameters of one rank under one of both optimizers."""

    def __init__(
        self,
        shards: Mapping[str, Shard],
        kernels: Any,
        *,
        wide: bool = False,
        optimizer: str = "adamw",
        loss_scale: bool = False,
        **how: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        self.parameters = {
            name: there(torch.randn(shard.shape, generator=generator).to(shard.dtype)) for name, shard in shards.items()
        }
        if wide:
            self.parameters = {name: x.double() for name, x in self.parameters.items()}
        self.gradients, self.buffers, _ = gradient_memory(shards, self.parameters)
        options = {key: how.pop(key) for key in ("weight_decay", "no_decay", "groups") if key in how}
        recipe = Recipe.of(optimizer, **options)
        settings = recipe.all_settings({name: len(shard.shape) for name, shard in shards.items()})
        self.comm = comm = Comm({}, {})
        comm.device = there(torch.zeros(1)).device
        self.optimizer, scaled = make_update(
            settings, self.parameters, self.gradients, self.buffers, kernels, shards=shards, comm=comm, sizes={}, lr=0.1
        )
        rate = Rate(base=0.1, warmup=2)
        self.scale = LossScale() if loss_scale else None
        self.update = Update(
            self.optimizer,
            scaled,
            {name: shards[name] for name in self.gradients},
            comm,
            {},
            rate,
            scale=self.scale,
            **how,
        )

    def step(self, number: int, gradients: Mapping[str, Tensor], batches: int = 1) -> Any:
        for name, x in gradients.items():
            self.gradients[name].copy_(x)
        with torch.no_grad():
            norm = self.update.measure(batches)
            goes_on = self.update.begin(number, norm)
            if goes_on:
                self.update.apply(norm)
            return self.update.ended(number, norm, skipped=not goes_on)

    def state_of(self, name: str) -> Mapping[str, Tensor]:
        assert self.optimizer is not None
        return self.optimizer.state_of(name)


def both(dtype: str, kernels: Any, **how: Any) -> tuple[Trained, Trained]:
    shards = {name: Shard(f"{dtype}{list(shape)}") for name, shape in SHAPES.items()}
    shards["frozen"] = Shard(f"{dtype}[3]", trainable=False)
    return Trained(shards, kernels, **how), Trained(shards, None, wide=dtype != "f64", **how)


def drawn(number: int, scale: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randn(shape, generator=generator) * scale for name, shape in SHAPES.items()}


def same(mine: Trained, theirs: Trained, tolerance: float) -> None:
    for name, x in mine.parameters.items():
        torch.testing.assert_close(x.double(), theirs.parameters[name].double(), rtol=tolerance, atol=tolerance)
    for name in mine.gradients:
        found, right = mine.state_of(name), theirs.state_of(name)
        assert found.keys() == right.keys()
        for key, x in found.items():
            assert x.shape == right[key].shape
            torch.testing.assert_close(x.double().cpu(), right[key].double().cpu(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("f64", 1e-14), ("f32", 2e-6), ("bf16", 0.02)])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"clip": 0.5, "norms": True},
        {"clip": 1e4, "weight_decay": 0.3, "no_decay": ("*.bias", "norm*")},
        {"weight_decay": 0.3, "no_decay": ("*",), "clip": 0.1},
        {"groups": ("*.bias:lr_scale=0.1", "norm*:weight_decay=0.2,lr_scale=3")},
    ],
    ids=["plain", "clipped", "groups", "none decays", "other rates"],
)
def test_steps_are_torchs(
    kernels: SimpleNamespace, dtype: str, tolerance: float, how: dict[str, Any], optimizer: str
) -> None:
    mine, theirs = both(dtype, kernels, optimizer=optimizer, **how)
    torchs = TorchOptimizer | Several
    assert not isinstance(mine.optimizer, torchs) and isinstance(theirs.optimizer, torchs)
    for number in range(4):
        found, right = (each.step(number, drawn(number, 1 + number), batches=3) for each in (mine, theirs))
        assert found.rate == right.rate and (found.norm is None) == (right.norm is None)
        if found.norm is not None:
            assert found.norm == pytest.approx(right.norm, rel=1e-2 if dtype == "bf16" else 1e-6)
    same(mine, theirs, tolerance)


def test_parameters_stand_as_their_gradients_do(kernels: SimpleNamespace) -> None:
    mine, _ = both("f32", kernels)
    assert len(mine.buffers) == 1
    first = mine.parameters["norm.weight"]
    for name, gradient in mine.gradients.items():
        x = mine.parameters[name]
        assert x.shape == gradient.shape and x.is_contiguous()
        assert x.storage_offset() == gradient.storage_offset()
        assert x.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    assert mine.parameters["frozen"].untyped_storage().nbytes() == 12


def test_overflows_are_skipped(kernels: SimpleNamespace) -> None:
    """With a scaled loss, an infinite gradient only changes the scale."""
    mine, theirs = both("f32", kernels, loss_scale=True)
    scales = mine.scale, theirs.scale
    assert scales[0] is not None and scales[1] is not None
    for number in range(3):
        for each, scale in zip((mine, theirs), scales, strict=True):
            gradients = drawn(number, scale.value)
            each.comm.scales(scale.value)
            if number == 1:
                gradients["down.weight"][5, 6] = float("inf")
            before = {name: x.clone() for name, x in each.parameters.items()}
            assert each.step(number, gradients).skipped == (number == 1)
            still = all(torch.equal(before[name], x) for name, x in each.parameters.items())
            assert still == (number == 1)
    assert scales[0].value == scales[1].value == LossScale().value / 2
    same(mine, theirs, 2e-6)


def test_what_was_kept_goes_on(kernels: SimpleNamespace) -> None:
    """From torch's state, where some parameters have had fewer steps than others: each has its own correction."""
    mine, theirs = both("f64", kernels, no_decay=("up.bias",))
    for name in SHAPES:
        if name != "up.weight":
            assert mine.optimizer is not None and theirs.optimizer is not None
            generator = torch.Generator().manual_seed(1)
            for optimizer in (mine.optimizer, theirs.optimizer):
                generator.manual_seed(1)
                for key, value in _state(SHAPES[name], generator, 30.0 if "down" in name else 7.0).items():
                    optimizer.restore(name, key, value)
    for number in range(2):
        for each in (mine, theirs):
            each.step(number, drawn(number, 1.0))
    same(mine, theirs, 1e-14)
    assert [float(mine.state_of(name)["step"]) for name in SHAPES] == [9, 2, 9, 9, 32]


@pytest.mark.parametrize("read", [("up.weight", "down.weight"), ("norm.weight", "up.bias", "empty"), tuple(SHAPES)])
@pytest.mark.parametrize(("bits", "spared"), [("bf16", "up.*"), ("f16", "*"), ("f16", "up.*")])
def test_what_is_read_in_fewer_bits_is_written_too(
    kernels: SimpleNamespace, read: tuple[str, ...], bits: DType, spared: str
) -> None:
    """Into memory that those who read it have already, wherever parameters stand that have no such copy."""
    mine, _ = both("f32", kernels, weight_decay=0.3, no_decay=(spared,))
    assert mine.optimizer is not None
    copies = {name: mine.parameters[name].to(DTYPES[bits]) for name in read}
    held = {name: x.view(x.shape) for name, x in copies.items()}
    other = there(torch.ones(3, dtype=torch.float64))
    taken = mine.optimizer.copy_to({**copies, "up.bias": other} if "up.bias" not in read else copies)
    assert taken == {name for name in read if copies[name].numel()} and other.equal(torch.ones_like(other))
    assert len({copies[name].untyped_storage().data_ptr() for name in taken}) == 1
    for number in range(2):
        mine.step(number, drawn(number, 1.0))
        for name in taken:
            assert torch.equal(copies[name], mine.parameters[name].to(DTYPES[bits])), name
            assert not torch.equal(copies[name], held[name])


def _state(shape: tuple[int, ...], generator: torch.Generator, steps: float) -> dict[str, Tensor]:
    moments = (torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return {"step": torch.tensor(steps), **dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))}


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(
    ("mesh", "optimizer"),
    [
        ("2x2 zero 1", "adamw"),
        pytest.param("2x2 zero 1", "sgd", marks=pytest.mark.matrix),
        pytest.param("pp=2,dp=2", "adamw", marks=pytest.mark.matrix),
    ],
)
def test_packages_update_with_it(mesh: str, optimizer: str, tmp_path: Path) -> None:
    """As the single-device model does; a continued run has the same bits, and PyTorch's kernels go on from it too."""
    package = build(tmp_path / "triton", mesh, kernels="triton")
    options = ("--optimizer", optimizer, "--lr", "0.01", "--clip", "0.05", "--accumulate", "2")
    result = verify(package, steps=2, virtual=True, arguments=options)
    assert result.ok and result.worst.rel_err < 1e-11
    how = ("--clip", 0.05, "--weight-decay", 0.1, "--no-decay", "*.bias", "--optimizer", optimizer)
    trained(package, "--steps", 3, "--record", tmp_path / "whole", *how)
    trained(package, "--steps", 1, "--save", tmp_path / "save", *how)
    trained(package, "--steps", 3, "--resume", tmp_path / "save", "--record", tmp_path / "parts")
    same_records(tmp_path / "whole", tmp_path / "parts", 2)
    other = build(tmp_path / "aten", "2")
    logs = [tmp_path / "mine.jsonl", tmp_path / "theirs.jsonl"]
    for log, on in zip(logs, (package, other), strict=True):
        trained(on, "--steps", 3, "--resume", tmp_path / "save", "--metrics", log)
    mine, theirs = map(losses, logs)
    assert mine == pytest.approx(theirs, rel=1e-12)


@pytest.mark.slow
@interpreted
def test_packages_read_what_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights that calls read in 16 bits: bit by bit what a cast after the update makes."""
    package = build(tmp_path, "pp=2,dp=2", kernels="triton", precision="fp16", schedule="interleaved")
    left: list[str] = []
    plain = Parts.leave

    def leave(parts: Parts, names: Collection[str]) -> None:
        left.extend(names)
        plain(parts, names)

    monkeypatch.setattr(Parts, "leave", leave)
    trained(package, "--steps", 3, "--metrics", tmp_path / "mine")
    assert len(left) > 8
    monkeypatch.setattr("partc.runtime.train.training.write_casts", lambda optimizer, stages: None)
    trained(package, "--steps", 3, "--metrics", tmp_path / "theirs")
    assert losses(tmp_path / "mine") == losses(tmp_path / "theirs")
    assert len(set(losses(tmp_path / "mine"))) == 3
