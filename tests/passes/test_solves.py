"""Forward substitution by rows becomes one triangular solve, against the loop in eager torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from partc import passes
from partc.frontend.trace import trace_model
from partc.ir.interpreter import evaluate_program
from partc.ir.mesh import Mesh
from partc.ir.program import Program

ROWS = 7


class Substituted(nn.Module):
    """`until` rows of a matrix are substituted; `masked` clears it from the diagonal on first."""

    def __init__(self, until: int, masked: bool) -> None:
        super().__init__()
        self.until, self.masked = until, masked
        self.first, self.second = nn.Linear(ROWS, ROWS), nn.Linear(ROWS, ROWS)

    def forward(self, x: Tensor) -> Tensor:
        a = -(self.first(x) @ self.second(x).mT)
        if self.masked:
            a = a.masked_fill(torch.ones(ROWS, ROWS, dtype=torch.bool).triu(), 0)
        for i in range(1, self.until):
            row, above = a[..., i, :i].clone(), a[..., :i, :i].clone()
            a[..., i, :i] = row + (row.unsqueeze(-1) * above).sum(-2)
        return a @ x


def normalized(until: int, masked: bool) -> Program:
    traced = trace_model(
        lambda: Substituted(until, masked),
        lambda: {"x": torch.randn(4, 2, ROWS, ROWS)},
        lambda model, batch: (model(batch["x"]) ** 2).mean(),
        name="rows",
        mesh=Mesh.parse("1"),
        precision="fp64",
    ).program
    return passes.run(traced, {}, until="normalize")[-1].program


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("until", [ROWS, ROWS - 1])
def test_the_solve_equals_the_loop(until: int, masked: bool) -> None:
    program = normalized(until, masked)
    solves = [op for op in program.regions[0].forward.ops if op.name == "linalg_solve_triangular"]
    assert len(solves) == (until == ROWS)  # a substitution of some rows is another function
    torch.manual_seed(3)
    model = Substituted(until, masked).double()
    x = torch.randn(4, 2, ROWS, ROWS, dtype=torch.float64)
    wanted = (model(x) ** 2).mean()
    made = evaluate_program(program, {"x": x}, dict(model.named_parameters()))
    torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12)
