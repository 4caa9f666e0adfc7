"""Rules of the user's are tried with numbers before they are used, and drafts before they are printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partc
from partc.cli import main
from partc.coverage import missing
from partc.errors import PartcError
from partc.rules.table import TABLE

LIBRARY = torch.library.Library("trials", "DEF")
LIBRARY.define("centred(Tensor x) -> Tensor")
LIBRARY.impl("centred", lambda x: x - x.mean(-1, keepdim=True), "CompositeImplicitAutograd")
LIBRARY.define("gated(Tensor x, float slope, Tensor w) -> Tensor")
LIBRARY.impl("gated", lambda x, slope, w: torch.where(x > 0, x, slope * x) * w, "CompositeImplicitAutograd")
LIBRARY.define("total(Tensor x, Tensor y) -> Tensor")
LIBRARY.impl("total", lambda x, y: (x * y).sum(), "CompositeImplicitAutograd")


class _Shared(torch.autograd.Function):
    """A sum of rows whose gradient is divided by how many there are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = x.shape[0]
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2 / ctx.rows


LIBRARY.define("shared(Tensor x) -> Tensor")
LIBRARY.impl("shared", lambda x: x * 2, "CompositeExplicitAutograd")
LIBRARY.impl("shared", _Shared.apply, "Autograd")


class Net(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(6, 8)
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.up(x), self.down(x)).sum()


def compiled(loss: Callable[[Tensor, Tensor], Tensor]) -> partc.Package:
    return partc.compile(Net(loss), {"x": torch.randn(4, 6)}, mesh="dp=2,tp=2")


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    """Rules registered in a test are gone after it."""
    before = dict(TABLE)
    yield
    TABLE.clear()
    TABLE.update(before)


def soft_margin(x: Tensor, y: Tensor) -> Tensor:
    return F.soft_margin_loss(x, y.detach().sign())


def summed_soft_margin(x: Tensor, y: Tensor) -> Tensor:
    return F.soft_margin_loss(x, y.detach().sign(), reduction="sum")


WRONG: list[tuple[str, str, dict[str, Any], Callable[[Tensor, Tensor], Tensor], str]] = [
    ("aten::soft_margin_loss", "x[b s], y[b s] -> []", {}, soft_margin, "cut in 2 along b, the result .* is a mean"),
    ("aten::soft_margin_loss", "x[b s], y[b s] -> []", {"blocked": "b"}, soft_margin, "cut in 2 along s.* is a mean"),
    ("trials::centred", "x[b d] -> [b d]", {}, lambda x, y: torch.ops.trials.centred(x), "along d, the result is"),
    (
        "trials::gated",
        "x[b d], w[b d] -> [b d]",
        {"slots": (0, 2), "linear": "x|w"},
        lambda x, y: torch.ops.trials.gated(x, 0.1, y),
        "of operands that are sums of two parts",
    ),
    ("trials::total", "x[b s], y[c s] -> []", {}, lambda x, y: torch.ops.trials.total(x, y), "along [bc]"),
    ("trials::shared", "x[b d] -> [b d]", {}, lambda x, y: torch.ops.trials.shared(x), "along b, the gradient of"),
]
RIGHT: list[tuple[str, str, dict[str, Any], Callable[[Tensor, Tensor], Tensor]]] = [
    ("aten::soft_margin_loss", "x[b s], y[b s] -> []", {}, summed_soft_margin),
    ("aten::soft_margin_loss", "x[b s], y[b s] -> []", {"blocked": "b s"}, soft_margin),
    ("trials::centred", "x[b d] -> [b d]", {"blocked": "d", "linear": "x"}, lambda x, y: torch.ops.trials.centred(x)),
    (
        "trials::gated",
        "x[b d], w[b d] -> [b d]",
        {"slots": (0, 2), "linear": "w"},
        lambda x, y: torch.ops.trials.gated(x, 0.1, y),
    ),
    ("trials::total", "x[b s], y[b s] -> []", {"linear": "x|y"}, lambda x, y: torch.ops.trials.total(x, y)),
    ("trials::shared", "x[b d] -> [b d]", {"blocked": "b"}, lambda x, y: torch.ops.trials.shared(x)),
]


@pytest.mark.parametrize(("name", "text", "marks", "loss", "said"), WRONG)
def test_wrong_rules_are_refused(
    name: str, text: str, marks: dict[str, Any], loss: Callable[[Tensor, Tensor], Tensor], said: str
) -> None:
    partc.rule(name, text, **marks)
    with pytest.raises(PartcError, match=said) as caught:
        compiled(loss)
    assert caught.value.code == "P0315"
    assert caught.value.source is not None and caught.value.source.line > 0


@pytest.mark.parametrize(("name", "text", "marks", "loss"), RIGHT)
def test_right_rules_are_taken(
    name: str, text: str, marks: dict[str, Any], loss: Callable[[Tensor, Tensor], Tensor]
) -> None:
    partc.rule(name, text, **marks)
    assert compiled(loss).coverage.ops == 1


DRAFTED: list[Callable[[Tensor, Tensor], Tensor]] = [
    soft_margin,
    summed_soft_margin,
    lambda x, y: F.poisson_nll_loss(x, y),
    lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(4)),
    lambda x, y: F.hinge_embedding_loss(x, torch.ones(4, 8), reduction="none"),
    lambda x, y: torch.cross(x.reshape(4, 8, 1).expand(4, 8, 3), y.reshape(4, 8, 1).expand(4, 8, 3) * 2, dim=-1),
    lambda x, y: torch.ops.trials.centred(x),
    lambda x, y: torch.ops.trials.gated(x, 0.1, y),
    lambda x, y: torch.trace(x @ y.T),
]


@pytest.mark.parametrize("loss", DRAFTED)
def test_drafts_can_be_pasted(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """The line that stands there, run as it stands: it is a comment or a rule that passes the trial."""
    drafts = missing(compiled(loss).traced)
    assert drafts
    for draft in drafts:
        exec(str(draft), {"partc": partc})
    compiled(loss)


def test_a_mean_is_no_draft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mean.py").write_text(
        "import torch\nfrom torch import nn\nimport torch.nn.functional as F\n\n"
        "def model():\n    return nn.Linear(6, 8)\n\ndef batch():\n    return {'x': torch.randn(4, 6)}\n\n"
        "def loss(model, batch):\n    return F.poisson_nll_loss(model(batch['x']), torch.ones(4, 8))\n"
    )
    assert main(["rule", str(tmp_path / "mean.py"), "--mesh", "tp=2"]) == 0
    out = capsys.readouterr().out
    assert "it is a mean over that factor" in out and "\npartc.rule(" not in out
