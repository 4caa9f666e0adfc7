"""Modules of models with long names are formatted as ruff formats them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import partc
from partc.quoting import WIDTH


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection_of_every_hidden_state_into_queries_and_keys = nn.Linear(8, 8)
        self.projection_of_every_hidden_state_into_values_and_gates = nn.Linear(8, 8)
        self.dropout_of_the_states_that_leave_this_residual_layer = nn.Dropout(0.1)

    def forward(self, hidden_states_that_the_former_layer_has_made: Tensor) -> Tensor:
        queries_and_keys_of_all_places_in_each_sequence = torch.tanh(
            self.projection_of_every_hidden_state_into_queries_and_keys(hidden_states_that_the_former_layer_has_made)
        )
        values_and_gates_of_all_places_in_each_sequence = torch.sigmoid(
            self.projection_of_every_hidden_state_into_values_and_gates(hidden_states_that_the_former_layer_has_made)
        )
        both_kinds_of_states_of_all_places_in_each_sequence = (
            queries_and_keys_of_all_places_in_each_sequence * values_and_gates_of_all_places_in_each_sequence
        )
        kept = self.dropout_of_the_states_that_leave_this_residual_layer(
            both_kinds_of_states_of_all_places_in_each_sequence.where(
                both_kinds_of_states_of_all_places_in_each_sequence > -3.0e38,
                torch.full_like(both_kinds_of_states_of_all_places_in_each_sequence, -3.0e38),
            )
        )
        return hidden_states_that_the_former_layer_has_made + kept.flatten(1).view_as(kept)


class Long(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder_whose_layers_have_names_that_are_long = nn.ModuleList(Layer() for _ in range(6))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.encoder_whose_layers_have_names_that_are_long:
            x = layer(x)
        return self.head(x)[..., 0].square().mean()


def test_modules_of_long_names_are_formatted(tmp_path: Path) -> None:
    package = partc.compile(Long(), {"x": torch.ones(4, 6, 8)}, mesh="dp=2,tp=2", zero=1)
    folder = Path(package.write(tmp_path / "long"))
    modules = [file for name in ("regions", "stages", "ranks") for file in (folder / name).glob("*.py")]
    check = ["-m", "ruff", "format", "--isolated", "--check", "--diff", "--line-length", str(WIDTH)]
    done = subprocess.run([sys.executable, *check, *map(str, modules)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
