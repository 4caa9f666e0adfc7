"""State outside the graph that forward changes or reads: refused by name where it matters, let be where it does not."""

from __future__ import annotations

import random
import textwrap
from pathlib import Path

import pytest
import torch

from partc.errors import PartcError
from partc.frontend.capture import capture
from partc.frontend.model_file import load

HEAD = """
import datetime, functools, random, time, uuid
from time import perf_counter
import numpy
import torch
import torch.nn.functional as F
from torch import nn

COUNT = 0
LOG = []
TABLE = {}
SCALE = [1.0]


@functools.lru_cache
def slopes(n):
    return [2.0 ** -i for i in range(n)]


class Inner(nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.1)
        self.n, self.items, self.known, self.last, self.cache, self.first = 0, [], {}, None, None, True
        self.other = nn.Linear(6, 6)

    def forward(self, x):
"""
TAIL = """

def model():
    return Inner()


def batch():
    return {"x": torch.randn(4, 6)}


def loss(model, batch):
    return model(batch["x"]).square().mean()
"""
WRONG = {
    "counter": "self.n += 1\nreturn self.up(x) * self.n",
    "first call": "if self.first:\n    self.first = False\n    x = x * 2\nreturn self.up(x)",
    "list": "self.items.append(1)\nreturn self.up(x) * len(self.items)",
    "dict": "self.known['n'] = self.known.get('n', 0) + 1\nreturn self.up(x) * self.known['n']",
    "global": "global COUNT\nCOUNT += 1\nreturn self.up(x) * COUNT",
    "global list": "LOG.append(1)\nreturn self.up(x) * len(LOG)",
    "class attribute": "Inner.calls += 1\nreturn self.up(x) * Inner.calls",
    "random": "return self.up(x) * random.random()",
    "random branch": "if random.random() < 0.5:\n    x = x * 2\nreturn self.up(x)",
    "numpy.random": "return self.up(x) * float(numpy.random.rand())",
    "time": "return self.up(x) * (time.time() % 7)",
    "imported clock": "return self.up(x) * (perf_counter() % 7)",
    "hour": "return self.up(x) * (int(time.time()) // 3600 % 24)",
    "now": "return self.up(x) * datetime.datetime.now().microsecond",
    "uuid": "return self.up(x) * (uuid.uuid4().int % 1000)",
    "requires_grad_": "self.up.weight.requires_grad_(False)\nreturn self.other(self.up(x))",
    "default dtype": "torch.set_default_dtype(torch.float16)\nreturn self.up(x)",
    "training": "y = self.drop(self.up(x))\nself.eval()\nreturn y",
    "manual_seed": "torch.manual_seed(3)\nreturn self.drop(self.up(x))",
    "parameter": "self.more = nn.Parameter(torch.ones(6))\nreturn self.up(x) * self.more",
    "module": "self.extra = nn.Tanh()\nreturn self.extra(self.up(x))",
}
RIGHT = {
    "counter for a log": "self.n += 1\nreturn self.up(x)",
    "list for a log": "self.items.append(x.shape)\nreturn self.up(x)",
    "global log": "LOG.append(1)\nreturn self.up(x)",
    "clock for a log": "start = time.time()\ny = self.up(x)\nself.n = time.time() - start\nreturn y",
    "lru_cache": "return self.up(x) * slopes(4)[2]",
    "dictionary of sizes": "if len(x) not in TABLE:\n    TABLE[len(x)] = 0.5\nreturn self.up(x) * TABLE[len(x)]",
    "idle random": "if random.random() < 0.0:\n    return x\nreturn self.up(x)",
    "eval and back": "self.eval()\ny = self.up(x)\nself.train()\nreturn self.drop(y)",
    "idle seed": "torch.manual_seed(3)\nreturn self.up(x)",
    "dropout": "return self.drop(self.up(x))",
}


def traced(folder: Path, body: str) -> None:
    path = folder / "state.py"
    path.write_text(HEAD + textwrap.indent(body, " " * 8) + "\n" + TAIL)
    file = load(path, {})
    capture(file.model, file.batch, file.loss, precision="fp32", path=file.path)


@pytest.mark.parametrize("name", WRONG)
def test_what_the_loss_depends_on_is_refused(name: str, tmp_path: Path) -> None:
    dtype = torch.get_default_dtype()
    with pytest.raises(PartcError) as caught:
        traced(tmp_path, WRONG[name])
    assert caught.value.code in ("P0225", "P0206") and caught.value.help
    assert caught.value.source is not None and caught.value.source.line > HEAD.count("\n"), caught.value
    assert torch.get_default_dtype() == dtype


@pytest.mark.parametrize("name", RIGHT)
def test_what_matters_nowhere_is_let_be(name: str, tmp_path: Path) -> None:
    drawn = random.getstate()
    traced(tmp_path, RIGHT[name])
    assert "random" in name or random.getstate() == drawn


def test_a_model_is_traced_once_where_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    export = torch.export.export

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal count
        count += 1
        return export(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.export, "export", counted)
    path = tmp_path / "plain.py"
    path.write_text(
        "import torch\nfrom torch import nn\n\ndef model():\n    return nn.Sequential(nn.Linear(6, 1), nn.Dropout(0.1))\n\n"
        "def batch():\n    return {'x': torch.randn(4, 6)}\n\ndef loss(model, batch):\n    return model(batch['x']).mean()\n"
    )
    file = load(path, {})
    capture(file.model, file.batch, file.loss, precision="fp32", path=file.path)
    assert count == 1
