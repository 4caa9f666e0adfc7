"""The user's rules are tested with numbers before they are used, and drafts before they are printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partc
from partc.api import compilation
from partc.cli import main
from partc.compilation.options import Options
from partc.errors import PartcError
from partc.ir.program import Program
from partc.passes import normalize
from partc.rules.coverage import coverage, missing
from partc.rules.table import TABLE

LIBRARY = torch.library.Library("trials", "DEF")
LIBRARY.define("centred(Tensor x) -> Tensor")
LIBRARY.impl("centred", lambda x: x - x.mean(-1, keepdim=True), "CompositeImplicitAutograd")
LIBRARY.define("gated(Tensor x, float slope, Tensor w) -> Tensor")
LIBRARY.impl("gated", lambda x, slope, w: torch.where(x > 0, x, slope * x) * w, "CompositeImplicitAutograd")
LIBRARY.define("margin(Tensor x, Tensor y, int reduction) -> Tensor")
LIBRARY.impl("margin", torch.ops.aten.soft_margin_loss.default, "CompositeImplicitAutograd")
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
    def __init__(self, loss: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(6, 8)
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return LOSSES[self.loss](self.up(x), self.down(x)).sum()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda x, y: torch.ops.trials.margin(x, y.detach().sign(), 1),
    "sum": lambda x, y: torch.ops.trials.margin(x, y.detach().sign(), 2),
    "centred": lambda x, y: torch.ops.trials.centred(x),
    "gated": lambda x, y: torch.ops.trials.gated(x, 0.1, y),
    "total": lambda x, y: torch.ops.trials.total(x, y),
    "shared": lambda x, y: torch.ops.trials.shared(x),
    "poisson": lambda x, y: F.poisson_nll_loss(x, y.detach()),
    "cosine": lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(4)),
    "hinge": lambda x, y: F.hinge_embedding_loss(x, torch.ones(4, 8), reduction="none"),
    "cross": lambda x, y: torch.cross(x[..., :6].reshape(4, 2, 3), y[..., :6].reshape(4, 2, 3), dim=-1),
    "trace": lambda x, y: torch.trace(x @ y.T),
}


def compiled(loss: str) -> Program:
    options = Options.checked(mesh="dp=2,tp=2", microbatches=1, schedule="1f1b", precision="fp32", seed=0, shard=())
    return compilation(Net(loss), {"x": torch.randn(4, 6)}, options, model_options={}, until="annotate").program


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    """Rules registered in a test are gone after it."""
    before = dict(TABLE)
    yield
    TABLE.clear()
    TABLE.update(before)


WRONG: list[tuple[str, str, dict[str, Any], str, str]] = [
    ("trials::margin", "x[b s], y[b s] -> []", {}, "mean", "cut in 2 along b, the result .* is a mean"),
    ("trials::margin", "x[b s], y[b s] -> []", {"blocked": "b"}, "mean", "cut in 2 along s.* is a mean"),
    ("trials::centred", "x[b d] -> [b d]", {}, "centred", "along d, the result is"),
    (
        "trials::gated",
        "x[b d], w[b d] -> [b d]",
        {"slots": (0, 2), "linear": "x|w"},
        "gated",
        "of operands that are sums of two parts",
    ),
    ("trials::total", "x[b s], y[c s] -> []", {}, "total", "along [bc]"),
    ("trials::shared", "x[b d] -> [b d]", {}, "shared", "along b, the gradient of"),
]
RIGHT: list[tuple[str, str, dict[str, Any], str]] = [
    ("trials::margin", "x[b s], y[b s] -> []", {}, "sum"),
    ("trials::margin", "x[b s], y[b s] -> []", {"blocked": "b s"}, "mean"),
    ("trials::centred", "x[b d] -> [b d]", {"blocked": "d", "linear": "x"}, "centred"),
    (
        "trials::gated",
        "x[b d], w[b d] -> [b d]",
        {"slots": (0, 2), "linear": "w"},
        "gated",
    ),
    ("trials::total", "x[b s], y[b s] -> []", {"linear": "x|y"}, "total"),
    ("trials::shared", "x[b d] -> [b d]", {"blocked": "b"}, "shared"),
]


@pytest.mark.parametrize(("name", "text", "marks", "loss", "said"), WRONG)
def test_wrong_rules_are_refused(name: str, text: str, marks: dict[str, Any], loss: str, said: str) -> None:
    partc.rule(name, text, **marks)
    with pytest.raises(PartcError, match=said) as caught:
        compiled(loss)
    assert caught.value.code == "P0315"
    assert caught.value.source is not None and caught.value.source.line > 0


@pytest.mark.parametrize(("name", "text", "marks", "loss"), RIGHT)
def test_right_rules_are_taken(name: str, text: str, marks: dict[str, Any], loss: str) -> None:
    partc.rule(name, text, **marks)
    assert coverage(compiled(loss)).ops == 1


@pytest.mark.parametrize("loss", LOSSES)
def test_drafts_can_be_pasted(loss: str) -> None:
    """The line that stands there, run as it stands: it is a comment or a rule that passes the trial."""
    drafts = missing(compiled(loss))
    assert drafts
    for draft in drafts:
        exec(str(draft), {"partc": partc})
    compiled(loss)


def test_a_mean_is_no_draft(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(normalize.REWRITES, "poisson_nll_loss")  # which makes a sum of it
    (tmp_path / "mean.py").write_text(
        "import torch\nfrom torch import nn\nimport torch.nn.functional as F\n\n"
        "def model():\n    return nn.Linear(6, 8)\n\ndef batch():\n    return {'x': torch.randn(4, 6)}\n\n"
        "def loss(model, batch):\n    return F.poisson_nll_loss(model(batch['x']), torch.ones(4, 8))\n"
    )
    assert main(["rule", str(tmp_path / "mean.py"), "--mesh", "tp=2"]) == 0
    out = capsys.readouterr().out
    assert "it is a mean over that factor" in out and "\npartc.rule(" not in out
