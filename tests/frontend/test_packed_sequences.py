"""Recurrent networks over packed sequences whose lengths are data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import partc
from partc.frontend.trace import trace_model
from partc.ir.mesh import Mesh
from tests.independent.models import packed_sequences


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "microbatches"), [("dp=2", 1), ("pp=2,tp=2", 2)])
def test_networks_end_with_each_sequence(mesh: str, microbatches: int) -> None:
    package = partc.compile(packed_sequences.__file__, mesh=mesh, microbatches=microbatches, precision="fp64")
    assert package.warnings == ()
    result = package.verify(steps=2)
    assert result.ok, result.worst


class Net(nn.Module):
    def __init__(self, use: Callable[[Any, Any], Tensor], **options: Any) -> None:
        super().__init__()
        self.lstm, self.use = nn.LSTM(4, 4, batch_first=True, **options), use

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.use(self.lstm, pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))


WRONG: dict[str, tuple[Callable[[Any, Any], Tensor], str]] = {
    "data": (lambda lstm, packed: lstm(packed)[0].data.square().mean(), "square reads the data of packed sequences"),
    "joined data": (lambda lstm, packed: torch.cat([packed.data, lstm(packed)[0].data]).sum(), "cat reads the data"),
    "turned data": (lambda lstm, packed: lstm(packed)[0].data.T.sum(), "T reads the data"),
    "number of rows": (lambda lstm, packed: lstm(packed)[1][0].sum() / packed.data.shape[0], "shape reads the data"),
    "order": (lambda lstm, packed: lstm(packed)[1][0][0][packed.sorted_indices].sum(), "the order of packed sequences"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_depends_on_the_number_of_packed_rows_is_refused(name: str) -> None:
    use, cause = WRONG[name]
    batch = {"x": torch.randn(4, 3, 4), "lengths": torch.tensor([2, 3, 1, 2])}
    with pytest.raises(partc.PartcError, match=rf"test_packed_sequences.py:\d+: error P0206: .*{cause}"):
        trace_model(lambda: Net(use), lambda: batch, name="m", mesh=Mesh.parse("1"))


def test_dropouts_between_layers_are_refused() -> None:
    batch = {"x": torch.randn(4, 3, 4), "lengths": torch.tensor([2, 3, 1, 2])}
    net = Net(lambda lstm, packed: lstm(packed)[1][0].sum(), num_layers=2, dropout=0.1)
    with pytest.raises(partc.PartcError, match=r"P0206.*dropout between layers"):
        trace_model(lambda: net, lambda: batch, name="m", mesh=Mesh.parse("1"))
