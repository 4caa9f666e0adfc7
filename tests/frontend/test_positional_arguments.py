"""Operands that a model gives by keyword are operands all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.frontend.positional_arguments import by_position

FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "numel": lambda x, mask: x[mask].sum() / torch.numel(input=x[mask]),
    "masked_select": lambda x, mask: torch.masked_select(input=x, mask=mask).mean(),
    "nonzero": lambda x, mask: x[torch.nonzero(input=mask, as_tuple=True)].mean(),
    "where": lambda x, mask: x[torch.where(condition=mask)].mean(),
    "cat": lambda x, mask: torch.cat(tensors=[x[mask], x[~mask].square()]).mean(),
    "index_select": lambda x, mask: torch.index_select(input=x, dim=0, index=mask[:, 0].nonzero().squeeze(1)).mean(),
    "matmul": lambda x, mask: torch.matmul(input=x[mask[:, 0]].T, other=x[mask[:, 0]]).mean(),
    "std": lambda x, mask: torch.std(input=x[mask[:, 0]], dim=0).sum(),
    "cov": lambda x, mask: torch.cov(input=x[mask[:, 0]].T).square().mean(),
}


class Keywords(nn.Module):
    def __init__(self, name: str = "numel") -> None:
        super().__init__()
        self.name, self.up = name, nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return FORMS[self.name](self.up(x), mask)


@pytest.mark.parametrize("name", FORMS)
def test_operands_by_keyword(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(8, 6, generator=generator), "mask": torch.rand(8, 6, generator=generator) > 0.4}
    assert partc.compile(Keywords(name), batch, mesh="tp=2", precision="fp64").verify(steps=1).ok


def test_only_leading_tensors_move() -> None:
    x, y = torch.ones(2), torch.ones(2)
    assert by_position(torch.sum, "sum", (), {"input": x, "dim": 0}) == ((x,), {"dim": 0})
    assert by_position(torch.cat, "cat", (), {"tensors": [x, y]}) == (([x, y],), {})
    assert by_position(torch.where, "where", (), {"condition": x, "input": y, "other": y})[0][0] is x
    assert by_position(torch.sum, "sum", (x,), {"dim": 0}) == ((x,), {"dim": 0})
    assert by_position(torch.zeros, "zeros", (), {"size": (2,)}) == ((), {"size": (2,)})
