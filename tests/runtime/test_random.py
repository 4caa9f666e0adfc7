"""Random numbers: the generator's published outputs, its statistics, and equal draws on every mesh."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import partc
from partc.package.verify import verify
from partc.runtime.comm.comm import Axis, Comm
from partc.runtime.layout import local_part, parse_dims
from partc.runtime.random import GOLDEN, Draw, dropout, dropout_backward, mixed, stream
from tests.zoo import MODELS

CPU = torch.device("cpu")


def _words(bits: Tensor) -> list[int]:
    return [word % (1 << 64) for word in bits.flatten().tolist()]


def test_outputs_are_splitmix64s() -> None:
    """The first outputs for seed 1234567, as published with the reference implementation (Vigna, splitmix64.c)."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert _words(Draw.everything(1234567, (4,), CPU).bits()) == published
    assert [mixed((1234567 + GOLDEN * (i + 1)) % (1 << 64)) for i in range(4)] == published


def test_streams_differ_by_seed_step_and_number() -> None:
    starts = {stream(seed, step, number) for seed in range(4) for step in range(8) for number in range(16)}
    assert len(starts) == 4 * 8 * 16
    assert all(0 <= start < 1 << 64 for start in starts)
    assert stream(-1, 0, 0) != stream(1, 0, 0)


def _sample(number: int) -> Draw:
    return Draw.everything(stream(3, 1, number), (400, 250), CPU)


def test_numbers_are_spread_as_they_should_be() -> None:
    count = 100_000
    u, n = _sample(0).uniform(torch.float64), _sample(1).normal(torch.float64)
    assert float(u.min()) >= 0 and float(u.max()) < 1
    assert float(u.mean()) == pytest.approx(0.5, abs=5 * math.sqrt(1 / 12 / count))
    assert float(u.var()) == pytest.approx(1 / 12, rel=0.02)
    assert float(n.mean()) == pytest.approx(0, abs=5 / math.sqrt(count))
    assert float(n.var()) == pytest.approx(1, rel=0.03) and float(n.pow(4).mean()) == pytest.approx(3, rel=0.06)
    histogram = torch.histc(u, 100, 0, 1)
    chi = float(((histogram - count / 100) ** 2 / (count / 100)).sum())
    assert 50 < chi < 160  # 99 degrees of freedom
    assert float(_sample(2).below(0.3).double().mean()) == pytest.approx(0.3, abs=5 * math.sqrt(0.21 / count))


@pytest.mark.parametrize("other", ["next element", "next row", "next operation", "next step"])
def test_neighbours_are_not_correlated(other: str) -> None:
    u = _sample(0).uniform(torch.float64)
    pairs = {
        "next element": (u[:, :-1], u[:, 1:]),
        "next row": (u[:-1], u[1:]),
        "next operation": (u, _sample(1).uniform(torch.float64)),
        "next step": (u, Draw.everything(stream(3, 2, 0), (400, 250), CPU).uniform(torch.float64)),
    }
    a, b = (x.flatten() - 0.5 for x in pairs[other])
    correlation = float((a * b).mean() * 12)
    assert abs(correlation) < 5 / math.sqrt(a.numel())


@pytest.mark.parametrize("layout", ["8@dp,mb, 6@tp, 5", "8, 6, 5", "2 · 4@dp, 6@tp,mb, 5", "8@mb, 3 · 2@tp, 5"])
def test_parts_are_drawn_as_parts_of_the_whole(layout: str) -> None:
    sizes = {"dp": 2, "tp": 2, "mb": 2} if "tp,mb" not in layout else {"dp": 2, "tp": 3, "mb": 2}
    whole = Draw.everything(stream(7, 4, 9), (8, 6, 5), CPU).bits()
    for dp in range(sizes["dp"]):
        for tp in range(sizes["tp"]):
            for mb in range(sizes["mb"]):
                comm = Comm({"dp": Axis(dp, sizes["dp"]), "tp": Axis(tp, sizes["tp"])}, {})
                comm.mb, comm.seed, comm.step = Axis(mb, sizes["mb"]), 7, 4
                place = {"dp": dp, "tp": tp, "mb": mb}
                expected = local_part(whole, parse_dims(f"[{layout}]"), sizes, place)
                assert torch.equal(comm.draw(9, layout).bits(), expected)


def test_dropout_keeps_scales_and_leads_gradients_back() -> None:
    x = torch.randn(40, 50, dtype=torch.float64)
    y, kept = dropout(x, 0.25, Draw.everything(5, (40, 50), CPU))
    assert torch.equal(y != 0, kept) and torch.allclose(y[kept], x[kept] / 0.75)
    assert torch.equal(dropout_backward(torch.ones_like(x), kept, 0.25), kept.double() / 0.75)
    y, kept = dropout(x, 0.5, Draw.everything(5, (40,), CPU))
    assert kept.shape == (40, 1) and {row.any().item() for row in (y == 0)} == {True, False}


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the single-device models' runs are kept."""
    return tmp_path_factory.mktemp("random")


def _verified(name: str, shared: Path, folder: Path, **options: object) -> partc.Package:
    model = MODELS[name]
    package = partc.compile(model.source(shared), precision="fp64", options=model.options, **options)  # type: ignore[arg-type]
    package.write(folder / "build")
    result = verify(folder / "build", steps=2, virtual=True, reference=shared / f"{name}_run")
    assert result.ok, result.worst
    return package


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "microbatches", "schedule"),
    [
        ("2", 4, "1f1b"), ("pp=2", 4, "gpipe"), ("2x2x2", 4, "1f1b"), ("1x4x2", 1, "1f1b"), ("pp=2,dp=2", 2, "zbv"),
        ("pp=2,tp=2", 4, "interleaved"),
        *(pytest.param(*case, marks=pytest.mark.matrix) for case in (("tp=2", 1, "1f1b"), ("2x2", 2, "1f1b"))),
    ],
)  # fmt: skip
def test_every_mesh_draws_what_one_device_draws(
    mesh: str, microbatches: int, schedule: str, shared: Path, tmp_path: Path
) -> None:
    package = _verified("noisy", shared, tmp_path, mesh=mesh, microbatches=microbatches, schedule=schedule)
    assert package.program.draws == 4 + 3 * 5
    blocks = [call for call in package.program.calls if call.name.startswith("blocks.")]
    numbers = [call.random for call in blocks]
    assert numbers == [4, 9, 14]
    assert len({call.region for call in blocks}) <= 2  # one of them with a split backward pass


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2_dropout", pytest.param("bert_dropout", marks=pytest.mark.matrix), "t5_dropout"])
def test_families_with_their_own_dropouts(name: str, shared: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert _verified(name, shared, tmp_path, mesh="2x2x2", microbatches=4).program.draws > 5


class Lottery(nn.Module):
    """Torch's rarer random operations, a part of which backward runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.selu, self.whole = nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.3)
        self.leak = nn.RReLU()
        self.memory = nn.LSTM(16, 16, num_layers=2, dropout=0.25, batch_first=True)
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.leak(self.whole(self.selu(self.table(ids))))
        x = x * torch.empty_like(x).exponential_(2.0) + torch.normal(x.detach(), 0.1)
        x, _ = self.memory(x)
        x = x + checkpoint(self.inner, x, use_reentrant=False) + torch.empty_like(x).normal_(0.0, 0.1)
        once = torch.multinomial(x[:, 0].detach().softmax(-1), 1)
        twice = torch.multinomial(x[:, 1].detach().softmax(-1), 3, replacement=True)
        apart = torch.multinomial(x[:, 2].detach().softmax(-1), 2)
        chosen = self.table(torch.cat((once, twice, apart), 1)).mean(1, keepdim=True)
        return self.head(x + chosen + torch.randint_like(x[:, :, :1], 3))


def _likelihood(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "microbatches"),
    [
        pytest.param("1", 1, marks=pytest.mark.matrix),
        ("2", 4),
        pytest.param("tp=2", 2, marks=pytest.mark.matrix),
        ("2x2", 1),
    ],
)
def test_rarer_operations_draw_by_element_too(mesh: str, microbatches: int) -> None:
    batch = {"ids": torch.randint(32, (16, 8)), "labels": torch.randint(32, (16, 8))}
    package = partc.compile(Lottery, batch, loss=_likelihood, mesh=mesh, microbatches=microbatches, precision="fp64")
    assert any("checkpoint at" in warning and "--recompute decides" in warning for warning in package.warnings)
    result = package.verify()
    assert result.ok, result.worst


class Roulette(nn.Module):
    """A draw whose number of random bits depends on what it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.poisson(self.rate.detach() * x.abs()) * self.rate).mean()


def test_draws_that_are_not_by_element_are_refused() -> None:
    with pytest.raises(partc.PartcError) as refused:
        partc.compile(Roulette, {"x": torch.randn(8, 8)}, mesh="2")
    assert refused.value.code == "P0207" and refused.value.source is not None
