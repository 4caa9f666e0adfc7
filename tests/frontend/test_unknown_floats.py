"""Floats that tensors hold (`item()`, `float()`, `tolist()`) as factors, bounds and operands of tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import partc
from partc.errors import PartcError
from partc.frontend.trace import trace_model
from partc.ir.mesh import Mesh
from tests.frontend.test_unknown_numbers import batch


class Net(nn.Module):
    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.step = nn.Linear(8, 8), step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self.layer(x))


def balanced(h: Tensor) -> Tensor:
    """A weight of a loss within bounds, as adaptive weights of several losses are."""
    one, two = h.square().mean(), (h.sin() - 1).abs().mean()
    weight = max(0.1, min(4.0, one.item() / (two.item() + 1e-6)))
    assert isinstance(weight, float) and type(weight) is float
    further = (2 - weight) ** 2 % 3 + (weight // 0.5) / 7
    return one + weight * two * further + two * -weight + abs(-weight) * one


def functions(h: Tensor) -> Tensor:
    number = float(h.std())
    return h.square().mean() * math.exp(-number) / math.sqrt(number) + math.log1p(number) * h.mean()


def quantized(h: Tensor) -> Tensor:
    scale = h.detach().abs().max().item() / 127
    return ((h / scale).clamp(-64.5, 1 / scale) * scale).mean() + h.clamp(min=-scale * 99, max=0.5).sum()


def as_tensors(h: Tensor) -> Tensor:
    temperatures = h.std((0, 1)).tolist()
    made = torch.tensor(temperatures) + torch.full((8,), temperatures[2]) + torch.full_like(h[0, 0], temperatures[3])
    scaled = torch.add(h, h.cos(), alpha=temperatures[0]) + torch.lerp(h, h.sin(), temperatures[1])
    return (scaled * made).mean() * sum(temperatures) / len(temperatures)


def chosen(h: Tensor) -> Tensor:
    """Tests of numbers: both outcomes are traced."""
    loss = h.square().mean()
    if math.isnan(loss.item()):
        raise ValueError("no number")
    first, second = h[:2].mean().item(), h[2:].mean().item()
    return loss * (loss.item() if loss < 0.3 else 2.0) + (h.sin().mean() if first > second else h.cos().mean())


def mixed(h: Tensor) -> Tensor:
    """Integers, counts and floats of tensors together."""
    best, positive = int(h.mean((0, 1)).argmax()), h > 0
    share = float(positive.sum()) / positive.numel()
    return h[..., best].mean() * share * best + h[positive].sum() / max(float(best), 1.0) + (best + share) * h.mean()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: float) -> tuple[Tensor, float]:
        y = self.layer(x / scale) * scale
        return x + y.tanh(), y.std().item()


class Chain(nn.Module):
    """Equal layers that receive and return floats."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0
        for layer in self.layers:
            x, scale = layer(x, scale)
        return x.square().mean() * scale


STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "balanced": balanced, "functions": functions, "quantized": quantized, "as tensors": as_tensors, "chosen": chosen,
    "mixed": mixed,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_floats_of_tensors_are_numbers_of_the_trace(name: str) -> None:
    torch.manual_seed(0)
    found = partc.compile(Net(STEPS[name]), batch(), mesh="dp=2,tp=2", precision="fp64").verify(steps=3)
    assert found.ok, str(found.worst)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["pp=2,tp=2", "dp=2"])
def test_equal_layers_pass_floats_on(mesh: str) -> None:
    torch.manual_seed(0)
    found = partc.compile(Chain(), batch(), mesh=mesh, precision="fp64").verify(steps=3)
    assert found.ok, str(found.worst)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_floats_take_the_type_of_the_tensor_beside_them(precision: str) -> None:
    torch.manual_seed(0)
    found = partc.compile(Net(as_tensors), batch(), mesh="dp=2", precision=precision).verify(steps=2)
    assert found.ok, str(found.worst)


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "rounded": lambda h: h.mean() * round(h.std().item(), 2),
    "in NumPy": lambda h: h.mean() * float(np.exp(h.std().item())),
    "a test in NumPy": lambda h: h.mean() if np.isfinite(h.std().item()) else h.sum(),
    "an integer": lambda h: h.mean() * int(h.std().item() * 10),
    "a size": lambda h: h[:, : int(float(h.abs().max()))].mean(),
    "a key": lambda h: h.mean() * {f"{h.std().item():.0f}": 2.0}.get("0", 1.0),
    "in math with two": lambda h: h.mean() * math.copysign(1.0, h.mean().item()),
    "a probability": lambda h: nn.functional.dropout(h, h.std().item() * 0.01).mean(),
}


@pytest.mark.parametrize("step", REFUSED.values(), ids=REFUSED)
def test_other_uses_of_unknown_floats_are_refused(step: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(PartcError) as error:
        trace_model(lambda: Net(step), batch, name="net", mesh=Mesh.parse("1"), precision="fp64")
    assert error.value.code == "P0206" and "Sym" not in error.value.cause
    assert error.value.source is not None and "test_unknown_floats.py" in error.value.source.file


class Averaging(nn.Module):
    """A float average that outlives the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.average = 0.0

    def forward(self, x: Tensor) -> Tensor:
        loss = self.layer(x).square().mean()
        self.average = 0.9 * self.average + 0.1 * loss.item()
        return loss * (1 + self.average)


def test_a_float_average_in_an_attribute_is_refused() -> None:
    with pytest.raises(PartcError, match=r"P0225.*self\.average"):
        trace_model(Averaging, batch, name="net", mesh=Mesh.parse("1"), precision="fp64")
