"""The largest number of an entry as a Python number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.errors import PartcError
from partc.frontend.trace import trace_model
from partc.ir.mesh import Mesh
from partc.ir.parser import parse
from partc.ir.printer import print_program
from partc.ir.program import Program
from partc.package import launch
from partc.package.verify import verify
from tests.models import longest_sequences


@pytest.mark.slow
def test_the_longest_sequence_is_as_long_in_every_batch(tmp_path: Path) -> None:
    package = partc.compile(longest_sequences.__file__, mesh="pp=2,dp=2", microbatches=2, precision="fp64")
    folder = package.write(tmp_path / "build")
    result = verify(folder, steps=longest_sequences.FIXED, virtual=True)
    assert result.ok, result.worst
    with pytest.raises(PartcError, match=r"P0543: .*'lengths' in batch 3 of data\(step\) is 8, of batch\(\) 9"):
        launch.run(folder, steps=longest_sequences.FIXED + 1, arguments=["--virtual"])


class Net(nn.Module):
    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.line, self.use = nn.Linear(4, 4), use

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.line(self.use(x, lengths)).square().mean()


def traced(use: Callable[[Tensor, Tensor], Tensor]) -> Program:
    batch = {"x": torch.randn(4, 3, 4), "lengths": torch.tensor([2, 3, 1, 2])}
    return trace_model(lambda: Net(use), lambda: batch, name="m", mesh=Mesh.parse("1")).program


def guarded(x: Tensor, lengths: Tensor) -> Tensor:
    if lengths.max().item() > 3:
        raise ValueError("too long")
    return x / lengths.max()


def test_guards_and_tensors_read_no_number() -> None:
    assert traced(guarded).largest == ()


@pytest.mark.parametrize(
    "use",
    [
        lambda x, lengths: x[:, : int(lengths.max() + 1) - 1],
        lambda x, lengths: x[:, : max(lengths.tolist())],
        lambda x, lengths: x * (torch.arange(lengths.max(0)[0]) < lengths[:, None])[..., None],
    ],
)
def test_programs_have_the_numbers(use: Callable[[Tensor, Tensor], Tensor]) -> None:
    program = traced(use)
    assert program.largest == (("lengths", 3),)
    assert parse(print_program(program)).largest == program.largest


def test_numbers_that_more_than_the_largest_one_determines_are_refused() -> None:
    with pytest.raises(PartcError, match="P0206"):
        traced(lambda x, lengths: x * torch.zeros(int((3 - lengths).max())).sum())
