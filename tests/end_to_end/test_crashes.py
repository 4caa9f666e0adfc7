"""Models that once caused internal errors: each equals its single-device model, or is refused with a code."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

import partc
from partc.cli.console import guarded
from partc.errors import PartcError
from partc.passes.recompute.choice import SavingProblem, frontier
from tests.prefork import done

HEAD = """\
import functools
import torch
import torch.nn.functional as F
from torch import nn
"""
MODEL = """

class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(8, 8)
{init}
    def forward(self, x):
        w, p, q = self.w, getattr(self, "p", None), getattr(self, "q", None)
        {body}


def model():
    return M()


def batch():
    return {{"x": {batch}}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The body of forward, what the module holds besides a layer `w`, and the batch."""

    body: str
    init: tuple[str, ...] = ()
    batch: str = "torch.randn(8, 8)"
    mesh: str = "tp=2"
    microbatches: int = 1

    def write(self, folder: Path) -> Path:
        body = self.body if "return" in self.body else f"return ({self.body}).square().mean()"
        init = "".join(f"        self.{line}\n" for line in self.init)
        path = folder / "m.py"
        path.write_text(HEAD + MODEL.format(init=init, body=body, batch=self.batch))
        return path


VECTOR = "p = nn.Parameter(torch.randn(8))"
VECTORS = (VECTOR, "q = nn.Parameter(torch.randn(8))")
CUBE = "torch.randn(8, 4, 8)"
BAG = "torch.randint(10, (8, 3))"
EYE = "F.logsigmoid((2 * torch.eye(x.shape[0]) - 1) * (w(x) @ x.t()))"
NUMBERS = (  # operations along the dimension of a number, which has none
    "t.gather(-1, t.argsort(-1))", "t.index_select(0, z[None])", "t.scatter(0, z, t * 2)", "t.scatter_add(0, z, t * 2)",
    "t.index_add(0, z, t)", "t.index_copy(0, z, t * 3)", "t.index_fill(0, z, 2.0) * t", "t.take(z)", "t.sort(-1)[0]",
    "t.topk(1)[0]", "t.cumsum(0)", "t.cummax(0)[0]", "t.logcumsumexp(0)", "t.softmax(-1) * t", "t.logsumexp(0)",
    "t.amax(0)", "t.max(-1, keepdim=True)[0]", "t.median(0)[0]", "t.kthvalue(1)[0]", "t.sum((0,))", "t.mean(-1)", "t.norm(dim=0)",
    "t.flip(0)", "t.roll(1)", "t.movedim(0, 0)", "t.transpose(-1, 0)", "t.swapaxes(0, 0)", "t.squeeze(0)", "t.unfold(0, 1, 1)",
    "t.masked_select(t > -9).sum()", "t.argmax(-1) * t", "t.quantile(0.5)", "t.repeat(2).sum()", "torch.einsum(',->', t, t)",
)  # fmt: skip
HOLDS = {
    "facts of dtypes and sizes": Case(
        body="w(x) * (torch.can_cast(torch.int, torch.result_type(x, 1)) + 2 * x.is_same_size(x + 1))"
    ),
    "vector @ vector": Case(body="w(x) * (p @ q)", init=VECTORS),
    "activation @ vector": Case(body="w(x).sum(0) @ p", init=VECTORS),
    "matrix @ vector": Case(body="w(x) @ p", init=VECTORS),
    "products of elements of two dtypes by einsum": Case(
        body="torch.einsum('bi, j -> bij', w(x), torch.arange(4)) * torch.einsum('b,j', x[:, 0] > 0, q)[:, None, :4]",
        init=VECTORS,
    ),
    "vector @ matrix": Case(body="p @ w(x)", init=VECTORS),
    "vector @ batch of matrices": Case(body="p[:4] @ w(x)", init=VECTORS, batch=CUBE, mesh="2x2"),
    **{
        f"vector @ transposed matrix of each {part}": Case(
            body="p @ w(x).mT", init=(VECTOR,), batch="torch.randn(2, 4, 8)", mesh=mesh, microbatches=count
        )
        for part, mesh, count in (("rank", "dp=2", 1), ("microbatch", "1", 2), ("rank of tp", "dp=2,tp=2", 1))
    },
    "batch of matrices @ vector": Case(body="w(x) @ p", init=VECTORS, batch=CUBE, mesh="2x2"),
    "distances of the batch's own rows": Case(body="torch.cdist(w(x), w(x) + 1)", mesh="2"),
    "distances of batches": Case(body="torch.cdist(w(x), x)", batch=CUBE, mesh="2x2"),
    "inverse of a matrix": Case(
        body="w(x) @ torch.linalg.inv(q.T @ q + torch.eye(8))", init=("q = nn.Parameter(torch.randn(8, 8))",)
    ),
    "systems of equations": Case(
        body="torch.linalg.solve(w(x)[:, :, None] * x[:, None] / 40 + torch.eye(8), x[:, :, None])",
        mesh="dp=2,tp=2",
        microbatches=2,
    ),
    "Cholesky factor": Case(
        body="w(x) @ torch.linalg.cholesky(q.T @ q + torch.eye(8))",
        init=("q = nn.Parameter(torch.randn(8, 8))",),
        mesh="dp=2",
    ),
    "exponential of a matrix": Case(body="w(x) @ torch.matrix_exp(q)", init=("q = nn.Parameter(torch.randn(8, 8))",)),
    "spectral norm": Case(
        body="self.sn(w(x))", init=("sn = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4))",), mesh="2"
    ),
    "spectral norm whose weight is cut by columns": Case(
        body="self.last(F.silu(self.sn(x)))",
        init=("sn = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 16))", "last = nn.Linear(16, 1)"),
        batch="torch.randn(16, 6)",
    ),
    "a buffer that is only written": Case(
        body="y = w(x); self.b.copy_(y.mean(0).detach()); return y.square().mean()",
        init=("register_buffer('b', torch.zeros(8))",),
    ),
    "a buffer that is filled": Case(
        body="y = w(x); self.b.fill_(2.0); return y.square().mean()", init=("register_buffer('b', torch.zeros(8))",)
    ),
    "an operation into a buffer": Case(
        body="y = w(x); torch.mul(y.mean(0).detach(), 2, out=self.b); return y.square().mean()",
        init=("register_buffer('b', torch.zeros(8))",),
    ),
    "a layer without outputs": Case(
        body="w(x) + self.c(self.h(x))", init=("h = nn.Linear(8, 0)", "c = nn.Linear(0, 8)"), mesh="2x2"
    ),
    "copysign of a parameter": Case(body="w(x) * torch.copysign(torch.ones_like(p), p)", init=VECTORS),
    "copysign of one number": Case(
        body="w(x) * torch.copysign(torch.ones(()), self.n)", init=("n = nn.Parameter(torch.randn(()))",), mesh="2x2"
    ),
    "copysign of a layer": Case(body="x * torch.copysign(p, w(x))", init=VECTORS),
    "gradients that are zero but for rounding": Case(body="w(x).softmax(-1).mean(-1, keepdim=True) * x", mesh="2x2"),
    "sgn of a parameter": Case(body="w(x) * torch.sgn(p)", init=VECTORS),
    "floor of a parameter": Case(body="w(x) * torch.floor(p)", init=VECTORS),
    **{
        f"a gradient of zeros through {layer} steps on {mesh}": Case(
            body="self.cell(w(x))[0].sgn() * p",
            init=(VECTOR, "cell = nn.LSTM(8, 8)"),
            batch=f"torch.randn({layer}, 4, 8)",
            mesh=mesh,
        )
        for layer, mesh in ((3, "dp=3"), (3, "tp=2"), (64, "dp=2,tp=2"))
    },
    **{
        f"a number without dimensions on {mesh}": Case(
            body=f"t, z = w(x).mean(), torch.zeros((), dtype=torch.long); return (x * ({' + '.join(NUMBERS)})).square().mean()",
            mesh=mesh,
        )
        for mesh in ("dp=2", "tp=2")
    },
    "repeats with a size": Case(
        body="torch.repeat_interleave(w(x).view(2, 4, 4, 2), 3, 2, output_size=12)", batch="torch.randn(2, 4, 8)"
    ),
    "an identity matrix in a loss": Case(body=EYE),
    "attention of five dimensions": Case(
        body="F.scaled_dot_product_attention(w(x), w(x), w(x), is_causal=True)", batch="torch.randn(4, 2, 3, 5, 8)"
    ),
    "attention of three dimensions": Case(body="F.scaled_dot_product_attention(w(x), w(x), w(x))", batch=CUBE),
    "attention of two dimensions": Case(body="F.scaled_dot_product_attention(w(x), w(x), w(x))"),
    "a boolean buffer": Case(
        body="torch.where(self.b, w(x), 0.0)", init=("register_buffer('b', torch.ones(8, 8).tril().bool())",)
    ),
    "bags on pipelines": Case(
        body="self.v(F.relu(w(self.e(x))))",
        init=("e = nn.EmbeddingBag(10, 8, mode='max')", "v = nn.Linear(8, 4)"),
        batch=BAG,
        mesh="pp=2",
        microbatches=2,
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", HOLDS)
def test_what_once_was_an_internal_error_equals_its_model(name: str, tmp_path: Path) -> None:
    case = HOLDS[name]
    package = partc.compile(case.write(tmp_path), mesh=case.mesh, microbatches=case.microbatches, precision="fp64")
    result = package.verify(steps=2)
    assert result.ok, result.worst


HALF = ("h = nn.Linear(8, 8).bfloat16()",)
REFUSED = {
    "a module in fewer bits": (Case(body="self.h(w(x).bfloat16()).float()", init=HALF), "P0222", "linear"),
    "integers into a layer": (Case(body="w(x)", batch="torch.randint(3, (8, 8))"), "P0222", "int64"),
    "booleans into a layer": (Case(body="w(x)", batch="torch.rand(8, 8) > 0.5"), "P0222", "bool"),
    "no derivative": (Case(body="w(x) * (p // 2)", init=VECTORS), "P0222", "floor_divide"),
    "an index of the whole batch": (
        Case(
            body="torch.zeros(2, 8).index_reduce(0, torch.arange(8) % 2, w(x), 'mean').sin() + w(x.sum(0))",
            microbatches=4,
        ),
        "P0222",
        "index_reduce",
    ),
    "autocast": (
        Case(body="\n        with torch.autocast('cpu', torch.bfloat16): y = w(x)\n        return y.sum()"),
        "P0223",
        "autocast",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused_at_its_line(name: str, tmp_path: Path) -> None:
    case, code, said = REFUSED[name]
    path = case.write(tmp_path)
    with pytest.raises(PartcError) as failure:
        partc.compile(path, mesh="2", microbatches=case.microbatches)
    error = failure.value
    assert error.code == code and said in error.cause and error.help
    first = next(n for n, line in enumerate(path.read_text().splitlines(), 1) if "def forward" in line)
    assert error.source is not None and error.source.file == str(path) and error.source.line > first


def test_a_refusal_does_not_depend_on_filters_of_warnings(tmp_path: Path) -> None:
    case, code, said = REFUSED["an index of the whole batch"]
    path = case.write(tmp_path)
    with warnings.catch_warnings(), pytest.raises(PartcError, match=said) as failure:
        warnings.simplefilter("ignore")  # as PYTHONWARNINGS=ignore does
        partc.compile(path, mesh="2", microbatches=case.microbatches)
    assert failure.value.code == code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("branches", "said"),
    [
        ("lambda y: y * 3, lambda y: y * 2", "capturethebranchesoftorch.cond"),
        ("w, lambda y: y * 2", "capturethebranchesoftorch.cond"),
        ("lambda y: y, lambda y: y * 2", "capturethebranchesoftorch.cond"),
    ],
)
def test_a_conditional_is_refused_at_its_line(branches: str, said: str, tmp_path: Path) -> None:
    """This runs in a process of its own: after some other tests, torch failed to trace torch.cond, with another error."""
    path = Case(body=f"torch.cond(x.sum() > 0, {branches}, (x,))").write(tmp_path)
    ended = done(["-m", "partc", "compile", path, "--mesh", "2", "-o", tmp_path / "build"])
    text = re.sub(r"\s+", "", ended.stderr)  # the console wraps long lines
    assert ended.returncode == 2 and said in text and "cond" in text and "help:" in text, ended.stderr
    first = next(n for n, line in enumerate(path.read_text().splitlines(), 1) if "def forward" in line)
    place = re.search(re.escape(re.sub(r"\s+", "", str(path))) + r":(\d+)", text)
    assert place is not None and int(place[1]) > first, ended.stderr


@pytest.mark.parametrize("value", ["dict", "str", "int", "type", "iter", "map", "Exception", "getattr"])
@pytest.mark.parametrize("place", ["model", "batch"])
def test_builtins_in_place_of_functions(value: str, place: str, tmp_path: Path) -> None:
    functions = {"model": "lambda: nn.Linear(8, 8)", "batch": "lambda: {'input': torch.randn(8, 8)}"} | {place: value}
    path = tmp_path / "m.py"
    path.write_text(HEAD + "".join(f"{name} = {text}\n" for name, text in functions.items()))
    with pytest.raises(PartcError) as failure:
        partc.compile(path, mesh="2")
    assert failure.value.code == "P0205"


@pytest.mark.parametrize("depth", [200, 1500])
def test_deeply_nested_modules_are_refused(depth: int, tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    build = f"functools.reduce(lambda m, _: nn.Sequential(m), range({depth}), nn.Linear(8, 8))"
    path.write_text(
        f"{HEAD}def model():\n    return {build}\ndef batch():\n    return {{'input': torch.randn(8, 8)}}\n"
    )
    with pytest.raises(PartcError, match="deeper than Python's recursion limit"):
        partc.compile(path, mesh="2")


def test_an_error_whose_text_fails_is_told() -> None:
    class Bad(Exception):
        def __str__(self) -> str:
            raise ValueError

    def command() -> None:
        raise Bad

    assert guarded(command, json=False) == 70


# -- budgets -----------------------------------------------------------------------------------


def _choice(seed: int) -> SavingProblem:
    """A few values, from bytes to gigabytes, each made of earlier ones."""
    rng = random.Random(seed)
    names = [f"v{index}" for index in range(rng.randint(2, 8))]
    large = 10 ** rng.randint(1, 10)
    return SavingProblem(
        needed=tuple(rng.sample(names, max(1, len(names) // 2))),
        bytes={name: rng.choice((4, 8, 12, 4 * rng.randint(1, large), 4 * rng.randint(1, large))) for name in names},
        ops=tuple((name,) for name in names),
        reads=tuple(tuple(rng.sample(names[:n], min(n, rng.randint(0, 2)))) for n in range(len(names))),
        effort=tuple(rng.choice((0, 1, rng.randint(1, 10 * large), rng.randint(1, 1000))) for _ in names),
    )


def _all(choice: SavingProblem) -> Iterator[tuple[int, int]]:
    """Bytes and effort of every choice."""
    makers = {name: index for index, (name,) in enumerate(choice.ops)}
    for bits in product((False, True), repeat=len(choice.bytes)):
        saved = {name for name, kept in zip(choice.bytes, bits, strict=True) if kept}
        again: set[str] = set()
        waiting = [name for name in choice.needed if name not in saved]
        while waiting:
            name = waiting.pop()
            if name not in again:
                again.add(name)
                waiting.extend(read for read in choice.reads[makers[name]] if read not in saved)
        yield sum(choice.bytes[name] for name in saved), sum(choice.effort[makers[name]] for name in again)


@pytest.mark.parametrize("seed", [24, 40, 68, *range(500, 530)])  # the first three were internal errors
def test_frontiers_of_large_numbers(seed: int) -> None:
    """No choice beats a point of the frontier in both numbers, but for what is a millionth of either."""
    choice = _choice(seed)
    points = [(point.bytes, point.effort) for point in frontier(choice)]
    assert points == sorted(points, reverse=True) and len({effort for _, effort in points}) == len(points)
    every = list(_all(choice))
    assert set(points) <= set(every)
    slack = [max(numbers) * 1e-6 for numbers in zip(*every, strict=True)]
    for bytes, effort in every:
        assert any(b <= bytes + slack[0] and e <= effort + slack[1] for b, e in points)
