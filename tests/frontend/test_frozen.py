"""State outside the graph that forward changes or reads: refused by name if it matters, ignored if it does not."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch

import partc
from partc.errors import PartcError
from partc.frontend.capture import Captured, capture
from partc.frontend.model_files.model_file import load
from partc.frontend.trace import trace_file, trace_model
from partc.ir.mesh import Mesh

HEAD = """
import array, collections, contextvars, dataclasses, datetime, functools, itertools, random, time, uuid
from time import perf_counter
import numpy
import torch
import torch.nn.functional as F
from torch import nn

COUNT = 0
LOG = []
TABLE = {}
SCALE = [1.0]


class Other:
    __slots__ = ("number",)
    calls = 0

    def __init__(self):
        self.number = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        return self.number


def calls():
    calls.number += 1
    return calls.number


def counting():
    number = 0

    def count():
        nonlocal number
        number += 1
        return number

    return count


def seen(x, before=[]):
    before.append(len(x))
    return len(before)


calls.number = 0
VAR = contextvars.ContextVar("n", default=0)


class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        return x * (2 if self.passes > 100 else 1)


class Annealed:
    passes = 0

    def __call__(self):
        self.passes += 1
        return max(0.0, self.passes - 100)


def ticks():
    number = 0
    while True:
        number += 1
        yield number


@dataclasses.dataclass(slots=True)
class Slots:
    number: int = 0


@dataclasses.dataclass(frozen=True)
class Settled:
    number: int = 0


class Property:
    turns = 0

    @property
    def number(self):
        self.turns += 1
        return self.turns


def bumped(box):
    box[0] += 1
    return box[0]


class Static:
    turns = 0

    @classmethod
    def tick(cls):
        cls.turns += 1
        return cls.turns

    @staticmethod
    def seen(box=[0]):
        return bumped(box)

    class Inside:
        turns = 0


COUNTING, NUMBERS, TICKS, PARTIAL, SLOTS = counting(), itertools.count(1), ticks(), functools.partial(bumped, [0]), Slots()
ARRAY, SCALAR, TEXT, BYTES, TUPLE, SET = numpy.zeros(3), numpy.int64(0), "", b"", (), set()
COUNTER, SETTLED, PROPERTY, OWN_ARRAY = collections.Counter(), Settled(), Property(), array.array("l", [0])
RATES = iter([1.0] * 10 + [2.0] * 10)
LATE, ANNEALED, NORM = Late(), Annealed(), nn.BatchNorm1d(6, affine=False)
EVERYTHING, LIBRARIES = globals(), {"torch": torch}


@functools.lru_cache
def slopes(n):
    return [2.0 ** -i for i in range(n)]


@functools.lru_cache
def grid(n):
    found = torch.stack((torch.arange(float(n)), torch.ones(n)), -1).unsqueeze(0) + 0.5
    found[..., 0] /= n
    found[:, 1:].mul_(torch.arange(float(n - 1)).view(-1, 1))
    return found[0]


@functools.lru_cache
def table_of(rates, n):
    found = torch.zeros(n)
    found[0::2] = torch.arange(float(n // 2)) * rates[: n // 2]
    return found


class Inner(nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.1)
        self.n, self.items, self.known, self.last, self.cache, self.first = 0, [], {}, None, None, True
        self.other = nn.Linear(6, 6)
        self.generator_of_numpy, self.drawing = numpy.random.default_rng(0), random.Random(0)
        self.table, self.long, self.deep = numpy.zeros(3), [0.0] * 9000, {1: {2: {3: {4: {5: {6: 1}}}}}}
        self.numbers, self.cycle, self.iterator = itertools.count(1), itertools.cycle([1, 2]), iter([1.0, 2.0] * 99)
        self.slots, self.count, self.bytes = Other(), counting(), bytearray(b"ab")
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("age", torch.zeros((), dtype=torch.long))
        self.register_buffer("late", None)
        self.register_buffer("hidden", None, persistent=False)
        self.register_buffer("again", self.mean)
        self.register_buffer("short", torch.zeros(4), persistent=False)
        self.generator = torch.Generator()
        self.register_buffer("hollow", torch.zeros(6))
        self.library = torch
        self.ring, self.log, self.recent = [self.items], LOG, collections.deque(maxlen=9)
        self.ring.append(self.ring)
        for _ in range(40):
            self.ring[0] = [self.ring[0], self.ring[0]]
        self.extra_loss, self.shown, self.angles = torch.tensor(0.0), torch.zeros(1), torch.arange(6.0)

    def forward(self, x):
"""
TAIL = """
    @functools.lru_cache
    def scales(self):
        return {"of weights": self.up.weight.norm(dim=1), "of numbers": torch.arange(6.0)}

    @functools.lru_cache
    def numbers_up_to(self, n):
        return torch.arange(float(n))

    @functools.lru_cache
    def first_angles(self, n, device):
        return self.angles.to(device)[:n] * 2

    @functools.cached_property
    def norms(self):
        return self.up.weight.norm(dim=1)


@functools.cache
def doubled(w):
    return w * 2


def model():
    return Inner()


def batch():
    return {"x": torch.randn(4, 6)}


def loss(model, batch):
    return model(batch["x"]).square().mean()
"""
WRONG = {
    "counter": "self.n += 1\nreturn self.up(x) * self.n",
    "counter of hooks": "self.hooked = getattr(self, 'hooked', 0) + 1\nreturn self.up(x) * self.hooked",
    "first call": "if self.first:\n    self.first = False\n    x = x * 2\nreturn self.up(x)",
    "deque": "self.recent.append(1)\nreturn self.up(x) * len(self.recent)",
    "list of two names": "self.log.append(1)\nreturn self.up(x) * len(LOG)",
    "list in a ring": "self.ring[1].append(1)\nreturn self.up(x) * len(self.ring)",
    "list": "self.items.append(1)\nreturn self.up(x) * len(self.items)",
    "dict": "self.known['n'] = self.known.get('n', 0) + 1\nreturn self.up(x) * self.known['n']",
    "global": "global COUNT\nCOUNT += 1\nreturn self.up(x) * COUNT",
    "global list": "LOG.append(1)\nreturn self.up(x) * len(LOG)",
    "class attribute": "Inner.calls += 1\nreturn self.up(x) * Inner.calls",
    "random": "return self.up(x) * random.random()",
    "random branch": "if random.random() < 0.5:\n    x = x * 2\nreturn self.up(x)",
    "rare random branch": "if random.random() < 0.02:\n    x = x * 2\nreturn self.up(x)",
    "frequent random branch": "if random.uniform(0, 5) < 4.9:\n    x = x * 2\nreturn self.up(x)",
    "rare numpy.random branch": "if numpy.random.rand() < 0.02:\n    x = x * 2\nreturn self.up(x)",
    "rare branch on a generator": "if self.drawing.random() > 0.98:\n    x = x * 2\nreturn self.up(x)",
    "rare branch on NumPy's generator": "if self.generator_of_numpy.random() > 0.95:\n    x = x * 2\nreturn self.up(x)",
    "random module": "return (self.up if random.random() < 0.5 else self.other)(x)",
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
    "seed in a fork": "with torch.random.fork_rng(devices=[]):\n    torch.manual_seed(4)\n    return self.drop(self.up(x))",
    "another state": "state = torch.get_rng_state().clone()\nx = self.drop(self.up(x))\ntorch.set_rng_state(state)\nreturn self.drop(x)",
    "parameter": "self.more = nn.Parameter(torch.ones(6))\nreturn self.up(x) * self.more",
    "first value": "x = self.up(x)\nself.last = x.detach().mean(0) if self.last is None else self.last\nreturn x - self.last",
    "first buffer": "x = self.up(x)\nself.hidden = x.detach() if self.hidden is None else self.hidden\nreturn x - self.hidden",
    "sum in an attribute": "if self.cache is None:\n    self.cache = torch.zeros(6)\nself.cache.add_(x.mean())\nreturn self.up(x) * self.cache",
    "cache of a buffer that changes": "if self.cache is None:\n    self.cache = torch.arange(6.0) * self.mean\nself.mean.add_(1)\nreturn self.up(x) * self.cache",
    "cache of a parameter": "if self.cache is None:\n    self.cache = torch.arange(6.0) * self.up.bias\nreturn self.up(x) * self.cache",
    "another buffer": "if self.cache is None:\n    self.cache = 1\n    return self.up(x) * self.mean\nreturn self.up(x) * self.hollow",
    "more than a cache": "if self.cache is None:\n    self.cache = torch.arange(6.0)\n    x = x * 2\nreturn self.up(x) * self.cache",
    "table that a counter changes": "self.n += 1\ng = torch.arange(6.0)\nh = g[1:]\ng[2:] /= self.n\nreturn self.up(x)[:, 1:] * h",
    "rows that a counter changes": "self.n += 1\ng = torch.arange(6.0)\nh = g.view(2, 3)\nh[1].mul_(self.n)\nreturn self.up(x) * g.sin()",
    "numbers added in place": "self.n += 1\ng = torch.zeros(6)\ng[1:] += self.n * x.mean()\nreturn self.up(x) * g",
    "cached table changed by values": "g = self.numbers_up_to(6)\ng[1:] += x.mean()\nreturn self.up(x) * g",
    "cached table changed in each step": "g = self.numbers_up_to(6)\ng[1:] += 1\nreturn self.up(x) * g",
    "counter of a buffer": "self.n += 1\nx = self.up(x)\nself.age.mul_(self.n)\nreturn x",
    "buffer at last": "self.late = torch.ones(6)\nreturn self.up(x)",
    "no buffer": "y = self.up(x) * self.mean\nself.mean = None\nreturn y",
    "dtype of a buffer": "self.age = self.age + 0.5\nreturn self.up(x)",
    "one of two names": "self.mean = self.up(x).detach().mean(0)\nreturn self.up(x)",
    "memory of a buffer": "self.hollow = self.mean\nself.mean.add_(x.mean())\nreturn self.up(x)",
    "memory of a weight": "self.mean = self.again = self.up.bias.data\nreturn self.up(x)",
    "generator": "return self.up(x) * torch.rand(6, generator=self.generator)",
    "generator and values": "g = torch.Generator()\nreturn self.up(x) * torch.bernoulli(x.sigmoid(), generator=g)",
    "module": "self.extra = nn.Tanh()\nreturn self.extra(self.up(x))",
    "warm-up": "self.n += 1\nx = self.up(x)\nreturn x if self.n < 100 else x * 2",
    "global warm-up": "global COUNT\nCOUNT += 1\nx = self.up(x)\nreturn x if COUNT < 100 else x * 2",
    "class warm-up": "Inner.calls += 1\nx = self.up(x)\nreturn x if Inner.calls < 100 else x * 2",
    "every tenth call": "self.n += 1\nx = self.up(x)\nif self.n % 10 == 0:\n    x = x * 2\nreturn x",
    "decayed number": "self.n = self.n * 0.5 + 1\nx = self.up(x)\nreturn x * 2 if self.n > 1.99 else x",
    "random.Random": "return self.up(x) * self.drawing.uniform(1, 2)",
    "seed of a tensor": "return self.up(x) * random.Random(torch.randint(100, (1,)).item()).randrange(1, 4)",
    "numpy's generator": "return self.up(x) * float(self.generator_of_numpy.normal())",
    "array": "self.table[0] += 1\nreturn self.up(x) * float(self.table[0])",
    "bytes": "self.bytes[0] += 1\nreturn self.up(x) * self.bytes[0]",
    "long list": "self.long[0] += 1\nreturn self.up(x) * self.long[0]",
    "nested dict": "self.deep[1][2][3][4][5][6] += 1\nreturn self.up(x) * self.deep[1][2][3][4][5][6]",
    "itertools.count": "return self.up(x) * next(self.numbers)",
    "itertools.cycle": "return self.up(x) * next(self.cycle)",
    "iterator": "return self.up(x) * next(self.iterator)",
    "slots": "self.slots.number += 1\nreturn self.up(x) * self.slots.number",
    "own iterator": "return self.up(x) * next(self.slots)",
    "class that is no module": "Other.calls += 1\nreturn self.up(x) * Other.calls",
    "attribute of a function": "return self.up(x) * calls()",
    "closure": "return self.up(x) * self.count()",
    "default argument": "return self.up(x) * seen(x)",
    "context variable": "VAR.set(VAR.get() + 1)\nreturn self.up(x) * VAR.get()",
    "an attribute of a weight": "self.up.weight.calls = getattr(self.up.weight, 'calls', 0) + 1\nreturn self.up(x) * self.up.weight.calls",
    "new buffer of values": "x = self.up(x)\nif not hasattr(self, 'cos'):\n    self.register_buffer('cos', x.detach(), persistent=False)\nreturn x - self.cos",
    "new buffer of the state dict": "self.register_buffer('cos', torch.ones(6))\nreturn self.up(x) * self.cos",
    "longer table of weights": "if len(self.short) < 6:\n    self.register_buffer('short', self.up.bias.detach(), persistent=False)\nreturn self.up(x) * self.short",
    "lru_cache of a method with weights": "return self.up(x) * self.scales()['of weights']",
    "cache of a function of a weight": "return self.up(x) * doubled(self.up.bias)",
    "cache of the first batch": "self.last = functools.cache(lambda: x.mean()) if self.last is None else self.last\nreturn self.up(x) * self.last()",
    "cached property": "return self.up(x) * self.norms",
    "set by its name": "if self.last is None:\n    setattr(self, 'last', self.up.weight.norm(dim=1))\nreturn self.up(x) * self.last",
    "a tensor on a weight": "if not hasattr(self.up.weight, 'norms'):\n    self.up.weight.norms = self.up.weight.norm(dim=1)\nreturn self.up(x) * self.up.weight.norms",
    "buffer written once without gradients": "if self.n < 1:\n    with torch.no_grad():\n        self.hollow.copy_(x.mean(0))\nself.n += 1\nreturn self.up(x) * self.hollow",
    "weight scaled once without gradients": "with torch.no_grad():\n    if self.n < 1:\n        self.up.bias[1:].mul_(x.std())\nself.n += 1\nreturn self.up(x)",
    "branch from the third step": "self.n += 1\nreturn self.up(x) * (2 if self.n >= 3 else 1)",
    "branch on a number in a dict": "self.known['n'] = self.known.get('n', 0) + 1\nreturn self.up(x) * (2 if self.known['n'] > 100 else 1)",
    "branch on a number in a list": "self.long[0] += 1\nreturn self.up(x) * (2 if self.long[0] > 100 else 1)",
    "branch on a length": "self.items.append(0)\nreturn self.up(x) * (2 if len(self.items) > 100 else 1)",
    "quotient of a counter": "self.n += 1\nreturn self.up(x) * (1 + self.n // 100)",
    "counter of a module outside the model": "return LATE(self.up(x))",
    "counter of an object that is called": "return self.up(x) + ANNEALED()",
    "a gradient": "x = self.up(x)\nreturn x if self.up.weight.grad is None else x * self.up.weight.grad.norm()",
    "no gradient": "self.up.weight.grad = None\nreturn self.up(x)",
}
RIGHT = {
    "buffer written without gradients": "with torch.no_grad():\n    self.hollow.copy_(x.mean(0))\nself.n += 1\nreturn self.up(x) * self.hollow",
    "counter for a log": "self.n += 1\nreturn self.up(x)",
    "log of every tenth call": "self.n += 1\nx = self.up(x)\nif self.n % 10 == 0:\n    print(x.mean().item())\nreturn x",
    "loop on a counter": "self.n += 1\nx = self.up(x)\nwhile self.n < 0:\n    self.n -= 1\nreturn x",
    "numbers in containers for a log": "self.n += 1\nself.items.append(self.n)\nself.known['n'] = self.n\nreturn self.up(x)",
    "statistics that nobody reads": "return NORM(self.up(x))",
    "list for a log": "self.items.append(x.shape)\nreturn self.up(x)",
    "log of two names": "before = len(LOG)\nself.log.append(1)\nreturn self.up(x) * (len(LOG) - before)",
    "deque for a log": "self.recent.append(x.shape)\nreturn self.up(x)",
    "global log": "LOG.append(1)\nreturn self.up(x)",
    "clock for a log": "start = time.time()\ny = self.up(x)\nself.n = time.time() - start\nreturn y",
    "lru_cache": "return self.up(x) * slopes(4)[2]",
    "lru_cache of a method": "return self.up(x) * self.numbers_up_to(6)",
    "lru_cache of a buffer": "return self.up(x) * table_of(self.hollow, 6)",
    "lru_cache beside a log": "self.items.append(x.shape)\nself.n += 1\nreturn self.up(x) * self.numbers_up_to(6)",
    "lru_cache on a device": "return self.up(x) * self.numbers_up_to(6).to(x.device)",
    "cache by size on a device": "if len(x) not in self.known:\n    self.known[len(x)] = torch.arange(6.0) + 1\n"
    "return self.up(x) * self.known[len(x)].to(x.device)",
    "lru_cache of an attribute": "x = self.up(x) * self.first_angles(3, x.device).sum()\nreturn x * self.angles.to(x.device).sin()",
    "lru_cache of a table changed in place": "return self.up(x) * grid(6)[:, 0]",
    "cache of a table changed in place": "if self.cache is None:\n    self.cache = torch.arange(6.0)\n    self.cache[1:] /= 3\nreturn self.up(x) * self.cache",
    "seeded generator": "g = torch.Generator().manual_seed(1)\nreturn self.up(x) * torch.rand(6, generator=g)",
    "cache": "if self.cache is None:\n    self.cache = torch.arange(9.0)\nreturn self.up(x) * self.cache[:6].sin()",
    "cache of several": "if self.cache is None:\n    self.cache = [g.flatten() for g in torch.meshgrid(torch.arange(2.0), torch.ones(3), indexing='ij')]\n"
    "return self.up(x) * self.cache[0] * self.cache[1]",
    "cache of a buffer": "if self.cache is None:\n    self.cache = torch.arange(6.0) * self.mean\nreturn self.up(x) * self.cache.cos()",
    "cache in a buffer": "if self.hidden is None:\n    self.hidden = torch.ones(6)\nreturn self.up(x) * self.hidden",
    "cache by size": "if len(x) not in self.known:\n    self.known[len(x)] = torch.ones(6)\nreturn self.up(x) * self.known[len(x)]",
    "new buffer": "if not hasattr(self, 'cos'):\n    self.register_buffer('cos', torch.arange(6.0).cos(), persistent=False)\nreturn self.up(x) * self.cos",
    "longer table": "if len(self.short) < 6:\n    self.n = 6\n    self.register_buffer('short', torch.arange(6.0) * self.mean, persistent=False)\nreturn self.up(x) * self.short[:6]",
    "both names": "self.mean = self.again = self.up(x).detach().mean(0)\nreturn self.up(x)",
    "dictionary of sizes": "if len(x) not in TABLE:\n    TABLE[len(x)] = 0.5\nreturn self.up(x) * TABLE[len(x)]",
    "idle random": "if random.random() < 0.0:\n    return x\nreturn self.up(x)",
    "eval and back": "self.eval()\ny = self.up(x)\nself.train()\nreturn self.drop(y)",
    "an earlier state": "state = torch.get_rng_state()\nx = self.drop(self.up(x))\ntorch.set_rng_state(state)\nreturn self.drop(x)",
    "idle seed": "torch.manual_seed(3)\nreturn self.up(x)",
    "dropout": "return self.drop(self.up(x))",
    "plain tensors assigned before they are read": "self.extra_loss = 0.0\nself.extra_loss += x.mean()\nself.shown = self.up(x)\nreturn self.shown * self.extra_loss",
}


def traced(folder: Path, body: str) -> Captured:
    path = folder / "state.py"
    path.write_text(HEAD + textwrap.indent(body, " " * 8) + "\n" + TAIL)
    file = load(path, {})
    return capture(file.model, file.batch, file.loss, precision="fp32", path=file.path)


@pytest.mark.parametrize("name", WRONG)
def test_what_the_loss_depends_on_is_refused(name: str, tmp_path: Path) -> None:
    dtype = torch.get_default_dtype()
    torch.manual_seed(3)  # as models do
    with pytest.raises(PartcError) as caught:
        traced(tmp_path, WRONG[name])
    assert caught.value.code in ("P0225", "P0206") and caught.value.help
    assert caught.value.source is not None and caught.value.source.line > HEAD.count("\n"), caught.value
    assert torch.get_default_dtype() == dtype


class Conditioned(torch.nn.Module):
    """Equal layers, of which some are not traced; half of the steps pass them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.GELU()) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(2 if random.random() < 0.5 else 1):
            for layer in self.layers:
                x = layer(x)
        return (x - y).square().mean()


class Swapped(torch.nn.Module):
    """Half of the steps read another entry of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        some = self.layer(x if random.random() < 0.5 else y)
        return (some + x + y).square().mean()


def test_failures_with_numbers_of_a_later_step_are_listed(tmp_path: Path) -> None:
    scheduled = "self.n += 1\nreturn self.up(x) * [1.0, 1.0, 1.0, 1.0, 2.0][self.n]"
    (sentence,) = traced(tmp_path, scheduled).assumed
    assert "repeat the first step" in sentence and "self.n" in sentence and "IndexError" in sentence


# Statements and an expression for a number that grows in each step.
GROWING = {
    "attribute": ("self.n += 1", "self.n"),
    "variable of a function": ("", "COUNTING()"),
    "itertools.count": ("", "next(NUMBERS)"),
    "attribute that is an iterator": ("", "next(self.numbers)"),
    "generator": ("", "next(TICKS)"),
    "attribute of a function": ("", "calls()"),
    "default argument": ("", "seen(x)"),
    "partial": ("", "PARTIAL()"),
    "NumPy array": ("ARRAY[0] += 1", "ARRAY[0]"),
    "number of an array": ("self.table[0] += 1", "int(self.table[0])"),
    "NumPy scalar": ("global SCALAR\nSCALAR = numpy.int64(SCALAR) + 1", "SCALAR"),
    "text": ("global TEXT\nTEXT += 'x'", "len(TEXT)"),
    "bytes": ("global BYTES\nBYTES += b'x'", "len(BYTES)"),
    "bytearray": ("self.bytes.append(1)", "len(self.bytes)"),
    "array": ("OWN_ARRAY[0] += 1", "OWN_ARRAY[0]"),
    "tuple": ("global TUPLE\nTUPLE += (1,)", "len(TUPLE)"),
    "set": ("SET.add(len(SET))", "len(SET)"),
    "dict": ("TABLE[len(TABLE)] = 1", "len(TABLE)"),
    "Counter": ("COUNTER.update('a')", "COUNTER['a']"),
    "slots": ("SLOTS.number += 1", "SLOTS.number"),
    "frozen object": ("global SETTLED\nSETTLED = Settled(SETTLED.number + 1)", "SETTLED.number"),
    "property": ("", "PROPERTY.number"),
    "class method": ("", "Static.tick()"),
    "static method": ("", "Static.seen()"),
    "class within a class": ("Static.Inside.turns += 1", "Static.Inside.turns"),
    "context variable": ("VAR.set(VAR.get() + 1)", "VAR.get()"),
}


@pytest.mark.parametrize(
    ("name", "condition"),
    [  # `make test` has one condition for each name
        pytest.param(name, condition, marks=pytest.mark.slow if (place + which) % 2 else ())
        for place, name in enumerate(GROWING)
        for which, condition in enumerate(["n % 5 == 0", "n in {50, 100}"])
    ],
)
def test_late_effects_are_refused_or_listed(name: str, condition: str, tmp_path: Path) -> None:
    statements, number = GROWING[name]
    body = f"{statements}\nn = {number}\nreturn self.up(x) * (2 if {condition} else 1)"
    try:
        assumed = traced(tmp_path, body).assumed
    except PartcError as refusal:
        assert refusal.code == "P0225" and refusal.source is not None, refusal
    else:
        assert any("Packages repeat the first step" in sentence for sentence in assumed)


@pytest.mark.parametrize(
    "body",
    [
        "self.n += 1\nreturn self.up(x) * [1.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0][self.n % 7]",
        "self.n += 1\nreturn self.up(x) * (1 + (self.n & 16))",
        "self.n += 1\nreturn self.up(x) * (2 if self.n in {50, 100} else 1)",
        "self.n += 1\nreturn self.up(x) * {50: 2.0}.get(self.n, 1.0)",
        "ARRAY[0] += 1\nreturn self.up(x) * {50: 2.0}.get(ARRAY[0], 1.0)",
        "self.known[len(self.known)] = 1\nreturn self.up(x) * (2 if 50 in self.known else 1)",
    ],
)
def test_numbers_in_the_code_and_of_the_next_steps_are_tried(body: str, tmp_path: Path) -> None:
    with pytest.raises(PartcError, match=r"in a later step|compares it") as caught:
        traced(tmp_path, body)
    assert caught.value.code == "P0225"


@pytest.mark.parametrize(
    "body",
    [
        "self.n += 1\nreturn self.up(x) * {'step 50': 2}.get(f'step {self.n}', 1)",
        "return self.up(x) * next(RATES)",
        "self.last = {None: 'a', 'a': 'b', 'b': 'c', 'c': 'c'}[self.last]\nreturn self.up(x) * (2 if self.last == 'c' else 1)",
        "self.n = self.n + 1j\nreturn self.up(x) * (2 if self.n.imag > 5 else 1)",
        "self.long.pop()\nreturn self.up(x) * (1 if self.long else 2)",
    ],
)
def test_values_that_cannot_be_tried_are_listed(body: str, tmp_path: Path) -> None:
    assert any("Packages repeat the first step" in sentence for sentence in traced(tmp_path, body).assumed)


@pytest.mark.parametrize(
    "body",
    [
        "self.n += 1\nself.items.append(f'step {self.n}')",
        "self.n += 1\nself.known[self.n] = x.shape",
        "ARRAY[0] += 1",
        "self.items.append(x.mean().item())",
        "start = time.perf_counter()\nself.n += time.perf_counter() - start",
        "self.n += 1\nif self.n % 100 == 0:\n    print(f'step {self.n}: {x.mean()}')",
        "self.n += 1\nself.known.update(step=self.n, shape=x.shape)",
        "COUNTER[type(self).__name__] += 1\ncalls()\nSET.add(x.shape)",
    ],
)
def test_logs_need_no_assumption(body: str, tmp_path: Path) -> None:
    assert not traced(tmp_path, f"{body}\nreturn self.up(x)").assumed


DATA = """
import torch
from torch import nn

TEMPERATURE, RATES, CACHE, MODEL = 1.0, {"first": 1.0, "second": 1.0}, None, None


class Settings:
    scale = 1.0


class Net(nn.Module):
    gain = 1.0

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x):
        return (self.up(x) * (READ)).square().mean()


def model():
    global MODEL
    MODEL = Net()
    return MODEL


def batch():
    return {"x": torch.randn(4, 6)}


def data(step):
    SET
    return batch()


def loss(model, batch):
    return model(batch["x"])
"""


def of_data(folder: Path, sets: str, reads: str) -> Captured:
    path = folder / "data.py"
    path.write_text(DATA.replace("READ", reads).replace("SET", sets))
    file = load(path, {})
    return capture(file.model, file.batch, file.loss, precision="fp32", path=file.path)


@pytest.mark.parametrize(
    ("sets", "reads"),
    [
        ("global TEMPERATURE; TEMPERATURE = 0.9 ** step", "TEMPERATURE"),
        ("RATES['first'] = step", "RATES['first']"),
        ("RATES.update(first=step)", "RATES['first']"),
        ("Settings.scale = step", "Settings.scale"),
        ("setattr(Settings, 'scale', step)", "Settings.scale"),
        ("Net.gain = step", "self.gain"),
        ("MODEL.gain = step", "self.gain"),
    ],
)
def test_values_that_data_sets_for_forward_are_refused(sets: str, reads: str, tmp_path: Path) -> None:
    with pytest.raises(PartcError, match="data sets") as caught:
        of_data(tmp_path, sets, reads)
    assert caught.value.code == "P0225"
    assert caught.value.source is not None and caught.value.source.line == DATA[: DATA.index("SET")].count("\n") + 1


@pytest.mark.parametrize(
    ("sets", "reads"),
    [
        ("global TEMPERATURE; TEMPERATURE = step", "2.0"),
        ("RATES['second'] = step", "RATES['first']"),
        ("global CACHE; CACHE = torch.ones(4) if CACHE is None else CACHE", "2.0"),
        ("RATES.setdefault('first', 1.0) if 'first' not in RATES else None", "2.0"),
        ("gain = step", "self.gain"),
    ],
)
def test_values_that_data_sets_for_itself_are_let_be(sets: str, reads: str, tmp_path: Path) -> None:
    assert not of_data(tmp_path, sets, reads).assumed


@pytest.mark.parametrize(
    "table",
    [
        "{'1': 2.0}.get(f'{x.mean().item()}', 3.0)",
        "{'1': 2.0}.get(str(x.sum(0).argmax().item()), 3.0)",
        "2.0 if len(repr(x.mean().item())) > 8 else 3.0",
        "{7: 2.0}.get(int((x > 0).sum()), 3.0)",
    ],
)
def test_unknown_numbers_that_forward_takes_for_known_ones_are_listed(table: str, tmp_path: Path) -> None:
    path = tmp_path / "state.py"
    path.write_text(HEAD + textwrap.indent(f"return self.up(x) * ({table})", " " * 8) + "\n" + TAIL)
    (sentence,) = trace_file(path, {}, mesh=Mesh.parse("1")).assumed
    assert "takes a number that a tensor holds for a known one" in sentence


@pytest.mark.parametrize(
    "table", ["{1.0: 2.0}.get(x.mean().item(), 3.0)", "2.0 if float(x.mean()).is_integer() else 3.0"]
)
def test_lookups_of_unknown_floats_are_refused(table: str, tmp_path: Path) -> None:
    path = tmp_path / "state.py"
    path.write_text(HEAD + textwrap.indent(f"return self.up(x) * ({table})", " " * 8) + "\n" + TAIL)
    with pytest.raises(PartcError) as caught:
        trace_file(path, {}, mesh=Mesh.parse("1"))
    assert caught.value.code == "P0206"


class FrozenLater(torch.nn.Module):
    """Two equal layers, of which a later step freezes one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.up.requires_grad_(self.steps < 100)
        return self.down(self.up(x)).square().mean()


def test_weights_that_a_later_step_freezes_are_found() -> None:
    with pytest.raises(PartcError, match=r"self\.steps of FrozenLater, and compares it") as caught:
        partc.compile(FrozenLater, {"x": torch.randn(4, 6)}, mesh="1")
    assert caught.value.code == "P0225"


@pytest.mark.parametrize("model", [Conditioned, Swapped])
def test_differences_before_untraced_layers_and_in_entries_are_found(model: type[torch.nn.Module]) -> None:
    with pytest.raises(PartcError, match="Python's random module") as caught:
        partc.compile(model, {"x": torch.randn(4, 6), "y": torch.randn(4, 6)}, mesh="1")
    assert caught.value.code == "P0225"


@pytest.mark.parametrize("name", RIGHT)
def test_what_matters_nowhere_is_let_be(name: str, tmp_path: Path) -> None:
    drawn = random.getstate()
    assumed = traced(tmp_path, RIGHT[name]).assumed
    assert "random" in name or random.getstate() == drawn
    assert any("draw nothing from Python's random module" in sentence for sentence in assumed) == ("random" in name)


CACHES = """
import functools
import torch
from torch import nn

TABLES, LAST = {"masks": {}}, None


@functools.lru_cache
def slopes(n):
    return torch.arange(float(n))


class Cached(nn.Module):
    halves = {}

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x):
        global LAST
        n = len(x)
        if n not in TABLES["masks"]:
            TABLES["masks"][n] = 0.5 * torch.ones(n, n).tril(), n
        if n not in self.halves:
            self.halves[n] = [torch.ones(n) / 2]
        LAST = torch.ones(n) if LAST is None else LAST
        mask, _ = TABLES["masks"][n]
        return mask @ self.up(x) * slopes(6) + (LAST * self.halves[n][0])[:, None]


def model():
    return Cached()


def batch():
    return {"x": torch.ones(4, 6)}


def loss(model, batch):
    return model(batch["x"]).mean()
"""


def test_the_users_caches_have_no_tensors_of_the_traces(tmp_path: Path) -> None:
    """The model runs in eager mode afterwards, in the same process."""
    path = tmp_path / "caches.py"
    path.write_text(CACHES)
    file = load(path, {})
    for _ in range(2):
        capture(file.model, file.batch, file.loss, precision="fp32", path=file.path)
    found = file.loss(file.model(), file.batch())
    assert type(found) is torch.Tensor and found.isfinite()


@contextmanager
def counted_exports() -> Iterator[Mock]:
    """A context with a mock that `torch.export.export` calls through."""
    with patch.object(torch.export, "export", wraps=torch.export.export) as export:
        yield export


def test_a_model_is_traced_once_where_nothing_changes(tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text(
        "import torch\nfrom torch import nn\n\ndef model():\n    return nn.Sequential(nn.Linear(6, 1), nn.Dropout(0.1))\n\n"
        "def batch():\n    return {'x': torch.randn(4, 6)}\n\ndef loss(model, batch):\n    return model(batch['x']).mean()\n"
    )
    file = load(path, {})
    with counted_exports() as export:
        capture(file.model, file.batch, file.loss, precision="fp32", path=file.path)
    assert export.call_count == 1


POOLS = """
from collections.abc import Mapping
import torch
from torch import nn

class Pools(Mapping):
    def __len__(self):
        return 0

    def __getitem__(self, key):
        raise KeyError(key)

    def __iter__(self):
        raise NotImplementedError

POOLS = Pools()

def model():
    return nn.Linear(6, 1)

def batch():
    return {"x": torch.randn(4, 6)}

def loss(model, batch):
    return model(batch["x"]).mean()
"""


def test_mappings_whose_items_cannot_be_read_are_let_be(tmp_path: Path) -> None:
    path = tmp_path / "pools.py"
    path.write_text(POOLS)
    file = load(path, {})
    capture(file.model, file.batch, file.loss, precision="fp32", path=file.path)


class Noting(torch.nn.Module):
    """Experts for the rows that masks select; forward may note the type of its input in an attribute."""

    def __init__(self, notes: bool) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(6, 4)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(4))
        self.notes = notes
        self.given: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.notes:
            self.given = x.dtype
        chosen, made = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows) > 0:
                made = made.index_add(0, rows, expert(x[rows]))
        return made.square().mean()


def traces(notes: bool) -> int:
    with counted_exports() as export:
        trace_model(partial(Noting, notes), lambda: {"x": torch.zeros(8, 6)}, name="noting", mesh=Mesh.parse("dp=2"))
    return int(export.call_count)


def test_changes_of_state_are_tried_in_one_of_the_traces() -> None:
    """The traces of other outcomes of tests, with which the first trace is compared, do not try them again."""
    plain = traces(notes=False)
    assert plain > 2, "tests of masks have several outcomes"
    assert traces(notes=True) <= plain + 1
