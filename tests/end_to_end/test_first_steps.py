"""Attributes that forward sets in the first step: a package has buffers and a flag in their place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partc
from partc.errors import PartcError
from partc.ir.parser import parse
from partc.ir.printer import print_program


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.used(self.up(x).tanh())).square().mean()  # type: ignore[no-any-return]

    def used(self, h: Tensor) -> Tensor:
        raise NotImplementedError


class InPlaceOfNone(Base):
    state: Tensor | None = None

    def used(self, h: Tensor) -> Tensor:
        if self.state is None:
            self.state = torch.zeros(6)
        self.state = 0.9 * self.state + 0.1 * h.detach().mean(0)
        return h - self.state


class InPlaceOfNoBuffer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def used(self, h: Tensor) -> Tensor:
        mean = h.detach().mean(0)
        self.mean = mean if self.mean is None else torch.lerp(self.mean, mean, 0.1)
        return h - self.mean


class InPlaceOfNothing(Base):
    def used(self, h: Tensor) -> Tensor:
        if not hasattr(self, "count"):
            self.count = torch.zeros(6, dtype=torch.int64)
        self.count.add_((h > 0).sum(0))
        return h / (1 + self.count)


class ReadOnlyLater(Base):
    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def used(self, h: Tensor) -> Tensor:
        if self.last is not None:
            h = h + 0.5 * self.last
        self.last = h.detach().amax(0)
        return h


class BehindDropout(nn.Module):
    """A model whose operations before the state draw random numbers, and change a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.out = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.norm(self.up(x)).tanh(), 0.3)
        if self.state is None:
            self.state = torch.zeros(6)
        self.state = 0.9 * self.state + 0.1 * h.detach().mean(0)
        return self.out(F.dropout(h - self.state, 0.2)).square().mean()  # type: ignore[no-any-return]


class AndDecidesByValues(BehindDropout):
    """The state is also reset, by a branch on values: each path is traced."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.norm(self.up(x)).tanh(), 0.3)
        if self.state is None:
            self.state = torch.zeros(6)
        if self.state.sum() > 0.2:
            self.state = 0.5 * self.state
            h = h * 2
        self.state = 0.9 * self.state + 0.1 * h.detach().mean(0)
        return self.out(h - self.state).square().mean()  # type: ignore[no-any-return]


class Ready(Base):
    """A boolean that changes once; the first batch decides about a trained scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.ready = nn.Parameter(torch.ones(6)), False

    def used(self, h: Tensor) -> Tensor:
        if not self.ready:
            with torch.no_grad():
                self.scale.data.copy_(1 / (h.std(0) + 0.1))
            self.ready = True
        return h * self.scale


class Table(Base):
    """A table that forward fills up to the largest length so far, as rotary embeddings do, and a counter for a log."""

    def __init__(self) -> None:
        super().__init__()
        self.speeds = nn.Parameter(torch.linspace(0.1, 1.0, 8), requires_grad=False)
        self.register_buffer("table", torch.zeros(8), persistent=False)
        self.known, self.calls = 0, 0

    def angles(self, length: int) -> Tensor:
        self.calls += 1
        if length <= self.known:
            return self.table[:length]  # type: ignore[no-any-return]
        made = torch.arange(length) * self.speeds[:length]
        self.table[:length] = made.detach()
        self.known = length
        return made

    def used(self, h: Tensor) -> Tensor:
        return h * self.angles(h.shape[1]).cos() + self.angles(h.shape[1] - 1).sum()


class Counting(InPlaceOfNoBuffer):
    """An integer buffer is taken for a constant until a trace shows that it changes; then forward is traced again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64), persistent=False)

    def used(self, h: Tensor) -> Tensor:
        self.steps += 1
        return super().used(h) / self.steps.sum()


class Layers(Base):
    """Equal modules with a state each, and a counter for a log."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.calls = nn.ModuleList(InPlaceOfNone() for _ in range(7)), 0

    def used(self, h: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers:
            h = layer.used(layer.up(h))
        return h


MODELS = (InPlaceOfNone, InPlaceOfNoBuffer, InPlaceOfNothing, ReadOnlyLater, Ready, Table, Counting, Layers)


def _batch() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 6, generator=torch.Generator().manual_seed(5))}


@pytest.mark.parametrize("build", MODELS)
def test_first_steps_equal_those_of_one_device(build: Callable[[], nn.Module]) -> None:
    found = partc.compile(build, _batch(), mesh="dp=2", precision="fp64").verify(steps=3)
    assert found.ok, found.worst


@pytest.mark.parametrize(("build", "draws"), [(BehindDropout, 2), (AndDecidesByValues, 1)])
def test_operations_before_the_first_difference_run_once(build: Callable[[], nn.Module], draws: int) -> None:
    """They ran in both outcomes, so that dropout drew twice (P0207 from partc verify)."""
    package = partc.compile(build, _batch(), mesh="dp=2", precision="fp64")
    assert package.program.draws == draws
    found = package.verify(steps=4)
    assert found.ok, found.worst


def test_a_pipeline_follows_first_steps() -> None:
    """Both stages have first steps. Each microbatch is a step of its own, and recomputation changes nothing."""
    how: dict[str, object] = {"mesh": "pp=2", "microbatches": 2, "recompute": "full", "precision": "fp64"}
    found = partc.compile(Layers, _batch(), **how).verify(steps=2)  # type: ignore[arg-type]
    assert found.ok, found.worst


def test_exports_have_the_buffers_of_state_dicts(tmp_path: Path) -> None:
    """A buffer that is registered without a tensor is in the state dict of a trained model; an attribute is not."""
    package = partc.compile(InPlaceOfNoBuffer, _batch(), mesh="1", precision="fp64")
    assert package.program.steps is not None
    assert [(each.name, each.persistent) for each in package.program.steps.values] == [("mean", True)]
    assert parse(print_program(package.program)).steps == package.program.steps
    numbers = partc.compile(Table, _batch(), mesh="1").program
    assert parse(print_program(numbers)).steps == numbers.steps is not None
    plain = partc.compile(InPlaceOfNone, _batch(), mesh="1").program
    assert plain.steps is not None and not plain.steps.values[0].persistent


class Longer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.rows: Tensor | None = None

    def used(self, h: Tensor) -> Tensor:
        row = h.detach().mean(0, keepdim=True)
        self.rows = row if self.rows is None else torch.cat([self.rows, row])
        return h - self.rows.mean(0)


class Odd(Base):
    def __init__(self) -> None:
        super().__init__()
        self.odd = False

    def used(self, h: Tensor) -> Tensor:
        self.odd = not self.odd
        return h * 2 if self.odd else h


class OneStep(Base):
    """Eager code stops in the second step: a package must not take this for a guard that is passed."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Tensor | None = None

    def used(self, h: Tensor) -> Tensor:
        assert self.state is None
        self.state = h.detach().mean(0)
        return h - self.state


class WithGradient(Base):
    """Eager code cannot pass back through the first step again."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Tensor | None = None

    def used(self, h: Tensor) -> Tensor:
        self.state = h.mean(0) if self.state is None else self.state + h.mean(0)
        return h - self.state


@pytest.mark.parametrize("build", [Longer, Odd, OneStep, WithGradient])
def test_steps_that_go_on_to_differ_are_refused(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(PartcError) as caught:
        partc.compile(build, _batch(), mesh="1")
    assert caught.value.code == "P0225" and caught.value.source is not None


def test_first_steps_have_no_evaluation() -> None:
    with pytest.raises(PartcError) as caught:
        partc.compile(InPlaceOfNone, _batch(), mesh="1", eval_every=1)
    assert caught.value.code == "P0420" and "state" in caught.value.cause
