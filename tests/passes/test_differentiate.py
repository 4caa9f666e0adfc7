"""The pass `differentiate`: names of values in forward and backward graphs."""

from __future__ import annotations

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
