"""The assignment of rows to columns is scipy's, ties and refusals included."""

from __future__ import annotations

import pytest
import torch
from scipy.optimize import linear_sum_assignment as scipy_assignment
from torch import Tensor

from partc.runtime.ops.assignment import linear_sum_assignment


def costs(kind: str, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    if kind == "distinct":
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    ties = torch.randint(4, (rows, columns), generator=generator).double()
    return (
        ties.masked_fill(torch.rand(rows, columns, generator=generator) < 0.3, torch.inf) if kind == "holes" else ties
    )


@pytest.mark.parametrize("kind", ["distinct", "ties", "holes"])
def test_assignments_are_those_of_scipy(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    refused = 0
    for number in range(400):
        rows, columns = torch.randint(1, 9, (2,), generator=generator).tolist()
        cost, maximize = costs(kind, rows, columns, generator), kind != "holes" and number % 2 == 1
        try:
            expected = scipy_assignment(cost.numpy(), maximize)
        except ValueError as error:
            refused += 1
            with pytest.raises(ValueError, match=str(error)):
                linear_sum_assignment(cost, maximize)
            continue
        found = linear_sum_assignment(cost, maximize)
        assert all(one.equal(torch.as_tensor(other)) for one, other in zip(found, expected, strict=True))
    assert bool(refused) == (kind == "holes")


def test_costs_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="invalid numeric entries"):
        linear_sum_assignment(torch.tensor([[1.0, torch.nan]]))
