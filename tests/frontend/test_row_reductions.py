"""Statistics and orders of the rows that a mask selects, against eager code and autograd in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partc import passes
from partc.frontend.trace import trace_model
from partc.ir.interpreter import evaluate_program
from partc.ir.mesh import Mesh
from partc.ir.program import Program

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def correlations(a: Tensor, b: Tensor) -> Tensor:
    a, b = ((x - x.mean(0)) / (x.std(0) + 1e-5) for x in (a, b))
    return torch.einsum("nd,ne->de", a, b) / len(a)


def rescaled(x: Tensor) -> Tensor:
    return (x - x.min()) / (x.max() - x.min())


def transposed(x: Tensor) -> Tensor:
    return x.mT.softmax(1).amax() + x.t().mean(1).std() + x.transpose(0, 1).norm(dim=1).sum()


def of_losses(x: Tensor, y: Tensor) -> Tensor:
    ones = torch.ones(len(x))
    pairs = F.cosine_embedding_loss(x, y, ones) + F.triplet_margin_loss(x, y, y.flip(1))
    return pairs + F.margin_ranking_loss(x, y, y.sign()) + F.soft_margin_loss(x, y.sign()) + F.poisson_nll_loss(x, y)


def numbered(x: Tensor) -> Tensor:
    return x * torch.arange(len(x))[:, None]


def hard(x: Tensor, y: Tensor) -> Tensor:
    score = (x - y).square().sum(1)
    values, places = score.topk(2)
    return values.mean() + (x[places] * y[places]).mean() + score[score.argmax()] - x[places[0]].sum()


def in_order(x: Tensor) -> Tensor:
    ordered = x.sort(0, descending=True).values
    steps = (x[1:] - x[:-1]).abs().mean() + x[1:-1].square().sum() + x[-2:].mean() + x[:2].prod()
    return steps + x[0].sum() - x[-1, 1:].sum() + numbered(ordered).mean()


def by_class(h: Tensor, label: Tensor) -> Tensor:
    total = torch.zeros(())
    for number in range(3):
        mask = label == number
        if mask.any():
            total = total + h[mask].var(0, correction=0).sum() + h[mask].amax()
    return total


# x and y have rows of 3 features for 8 examples of 4 places; m selects places; `label` is 0, 1 or 2 for each example.
LOSSES: dict[str, Loss] = {
    "var": lambda x, y, m, label: x[m].var() + x[m].var(0).sum() + x[m].var(dim=(0, 1), unbiased=False),
    "std": lambda x, y, m, label: x[m].std(0, keepdim=True).sum() + torch.std_mean(x[m], dim=0, correction=0)[0].prod(),
    "largest": lambda x, y, m, label: x[m].amax() + x[m].max(0).values.sum() - x[m].min(dim=0)[0].prod() + x[m].amin((0,))[1],
    "place of the largest": lambda x, y, m, label: (x[m].argmax(0) * x[m].mean(0)).sum() + x[m].argmin() * x[m].sum(),
    "logsumexp": lambda x, y, m, label: x[m].logsumexp(0).sum() + torch.logsumexp(x[m], (0, 1)),
    "softmax": lambda x, y, m, label: (x[m].softmax(0) * y[m]).sum() + (F.log_softmax(x[m], 0) * y[m]).mean(),
    "norm": lambda x, y, m, label: x[m].norm() + torch.linalg.vector_norm(x[m], 1, 0).prod() + x[m].norm(p=3, dim=0).sum(),
    "normalize": lambda x, y, m, label: (F.normalize(x[m], dim=0) * y[m]).sum(),
    "products": lambda x, y, m, label: (x[m].T @ y[m]).square().mean() + x[m, 0].dot(y[m, 1]) + x[m].prod(),
    "sums so far": lambda x, y, m, label: (x[m].cumsum(0) * y[m].cumprod(0)).sum(),
    "covariance": lambda x, y, m, label: torch.cov(x[m].T).square().sum(),
    "correlations": lambda x, y, m, label: correlations(x[m], y[m]).square().sum(),
    "rescaled": lambda x, y, m, label: (rescaled(x[m].sum(1)) * y[m].sum(1)).mean(),
    "batch norm": lambda x, y, m, label: (F.batch_norm(x[m], None, None, y[0, 0], y[0, 1], True) * y[m]).sum(),
    "transposed": lambda x, y, m, label: transposed(x[m]),
    "losses": lambda x, y, m, label: of_losses(x[m], y[m]),
    "weighted classes": lambda x, y, m, label: F.cross_entropy(
        x[m], label[:, None].expand(-1, 4)[m], torch.tensor([1.0, 2.0, 3.0]), ignore_index=1, label_smoothing=0.1
    ),
    "hard examples": lambda x, y, m, label: hard(x[m], y[m]),
    "order": lambda x, y, m, label: in_order(x[m]),
    "median": lambda x, y, m, label: x[m].median() + x[m].median(0).values.sum() + (x[m].median(0)[1] * y[0, 0]).sum(),
    "joined": lambda x, y, m, label: torch.cat([x[m], y[~m], x[:, 0]]).std() + torch.cat([x[m], y[m]], 1).amax(),
    "joined classes": lambda x, y, m, label: F.binary_cross_entropy_with_logits(
        torch.cat([x[m].sum(1), y[~m].sum(1)]), torch.cat([torch.ones_like(x[m, 0]), torch.zeros_like(y[~m, 0])])
    ),
    "turned": lambda x, y, m, label: numbered(x[m].flip(0)).sum(),
    "selected twice": lambda x, y, m, label: x[m][x[m].sum(1) > 0].std() + x[m][x[m].sum(1) > 0].max(),
    "by class": lambda x, y, m, label: by_class(x.mean(1), label),
    "all": lambda x, y, m, label: x[m].sum() * (y[m] > -9).all(),
}  # fmt: skip


class Selecting(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor, m: Tensor, label: Tensor) -> Tensor:
        return self.loss(self.layer(x), y, m, label)


def batch(number: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(number)
    x, y = torch.randn(2, 8, 4, 3, generator=draw)
    mask = torch.rand(8, 4, generator=draw) > (0.4, 0.8, 0.0)[number]
    return {"x": x, "y": y, "m": mask, "label": torch.randint(0, 3, (8,), generator=draw)}


def routed(loss: Loss) -> Program:
    traced = trace_model(lambda: Selecting(loss), batch, name="selecting", mesh=Mesh.parse("1x1x2"), precision="fp64")
    return passes.run(traced.program, {}, until="route")[-1].program


@pytest.mark.parametrize("name", LOSSES)
def test_selected_rows_give_the_eager_loss_and_gradient(name: str) -> None:
    """Also where few rows are selected, and all of them."""
    program = routed(LOSSES[name])
    assert "selected" not in {op.name for op in program.regions[0].forward.ops}
    torch.manual_seed(0)  # with some weights nothing is selected, and a maximum of nothing is an error
    model = Selecting(LOSSES[name]).double()
    params = dict(model.named_parameters())
    for number in range(3):
        given = {key: x.double() if x.is_floating_point() else x for key, x in batch(number).items()}
        with torch.device("cpu"):
            torch.set_default_dtype(torch.float64)
            try:
                mine, theirs = evaluate_program(program, given, params), model(**given)
            finally:
                torch.set_default_dtype(torch.float32)
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
        grads = (torch.autograd.grad(loss, list(params.values())) for loss in (mine, theirs))
        for own, eager in zip(*grads, strict=True):
            torch.testing.assert_close(own, eager, rtol=1e-10, atol=1e-12)
