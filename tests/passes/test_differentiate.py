"""The pass `differentiate`: names of values in forward and backward graphs, and equal operations."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.ir.naming import is_gradient


class Recurrent(nn.Module):
    """An LSTM, whose steps are named by no line of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.memory(x)
        return states.square().mean()


class Solving(nn.Module):
    """A system of equations, whose factors only the derivative reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) * 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.solve(self.weight, x.mT).square().mean()


@pytest.mark.parametrize("build", [Recurrent, Solving])
def test_no_forward_value_has_a_name_of_a_gradient(build: type[nn.Module]) -> None:
    program = partc.compile(build(), {"x": torch.ones(4, 3, 4)}, mesh="dp=2").program
    made = {value.name for region in program.regions for op in region.forward.ops for value in op.results}
    assert made
    assert not {name for name in made if is_gradient(name)}


def test_an_lstm_of_the_batch_itself_trains_in_single_precision() -> None:
    """Torch would choose oneDNN's inference layer here, whose backward pass fails."""
    compiled = partc.compile(Recurrent(), {"x": torch.randn(4, 3, 4)}, mesh="dp=2")
    assert compiled.verify(steps=2).ok


class Squared(nn.Module):
    """Products of a value with itself: the gradients of both factors are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        scaled = self.second(hidden * hidden)
        return (scaled * scaled * scaled.sigmoid()).mean()


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "pp=2"])
def test_backward_graphs_have_no_equal_operations(mesh: str) -> None:
    compiled = partc.compile(Squared(), {"x": torch.ones(4, 4)}, mesh=mesh, precision="fp64")
    for region in compiled.program.regions:
        equal = Counter((op.name, op.args, op.attrs) for op in region.backward.ops)
        assert not [op for op, count in equal.items() if count > 1]
    assert compiled.verify(steps=2).ok


class Squares(nn.Module):
    """A square, whose derivative torch writes as a first power."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return ((x * self.weight) ** 2).mean()


def test_derivatives_contain_no_first_powers() -> None:
    package = partc.compile(Squares(), {"x": torch.ones(4, 4)}, mesh="dp=2", precision="fp64")
    graphs = [region.backward for region in package.program.regions if region.backward is not None]
    powers = [op for graph in graphs for op in graph.ops if op.name == "pow"]
    assert graphs and not powers
    assert package.verify(steps=2).ok


class Branching(nn.Module):
    """A branch on values, whose gradients pass to its weight only where it is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        if (x > 100).any():
            x = x @ self.weight
        return (x * self.weight.sum()).mean()


def test_forward_graphs_choose_between_different_values_alone() -> None:
    package = partc.compile(Branching(), {"x": torch.ones(4, 4)}, mesh="dp=2", precision="fp64")
    graphs = [graph for region in package.program.regions for graph in (region.forward, region.backward) if graph]
    choices = [op for graph in graphs for op in graph.ops if op.name == "where"]
    assert len(choices) == 3, "the product or its operand, and the gradients of both or zeros"
    assert all(op.args[1] != op.args[2] for op in choices)
    assert package.verify(steps=2).ok
