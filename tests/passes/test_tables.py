"""Embedding tables cut by rows or columns over the axes of the batch, with an exchange of ids and vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partc
from partc.api import compilation
from partc.compilation.options import Options
from partc.errors import PartcError
from partc.ir.layout import Shard
from partc.passes.tables import costs


class Bags(nn.Module):
    """Lookups and bags of words in tables whose rows no axis divides; the second table has a row without gradient."""

    def __init__(self, rows: int = 301) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(rows, 4, mode="mean")
        self.users = nn.Embedding(rows, 4, padding_idx=3)
        self.head = nn.Linear(4, 1)

    def forward(self, words: Tensor, users: Tensor) -> Tensor:
        return self.head(self.words(words) * self.users(users).relu() + self.words(users[:, None]))


def squared_error(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["words"], batch["users"])[:, 0], batch["target"])


def _batch(rows: int = 301, size: int = 8) -> dict[str, Tensor]:
    words, users = torch.randint(rows, (size, 5)), torch.randint(8, (size,))
    return {"words": words, "users": users, "target": torch.randn(size)}


def _compiled(mesh: str, microbatches: int, zero: int, rows: int = 301, cut: str = "[@dp, _]") -> partc.Package:
    pins = [f"{name}.weight={cut}" for name in ("words", "users") if cut]
    how = {"mesh": mesh, "microbatches": microbatches, "zero": zero, "precision": "fp64", "shard": pins}
    return partc.compile(Bags(rows), _batch(rows), loss=squared_error, **how)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "microbatches", "zero"), [("dp=2", 1, 3), ("dp=4", 2, 0), ("pp=2,dp=2", 2, 2)])
def test_tables_cut_by_rows_equal_one_device(mesh: str, microbatches: int, zero: int) -> None:
    package = _compiled(mesh, microbatches, zero)
    ways = package.program.sizes["dp"]
    for name in ("words.weight", "users.weight"):
        table = package.program.parameter(name)
        assert str(table.type) == f"f64[{-(-301 // ways) * ways}@dp, 4]"
        assert table.holds == ((301, 4) if 301 % ways else ())
        assert not table.gather and not table.reduce
    text = dict(package.files())
    code = "".join(str(content) for name, content in text.items() if name.startswith("regions/"))
    moved = [
        line for line in code.splitlines() if "301" in line and ("all_gather(" in line or "reduce_scatter(" in line)
    ]
    assert not moved
    result = package.verify(steps=3)
    assert result.ok and result.worst is not None and result.worst.rel_err < 1e-10, result.worst


def test_bags_are_summed_before_they_are_exchanged() -> None:
    for cut, collective in (("[@dp, _]", "reduce_scatter"), ("[_, @dp]", "all_to_all")):
        program = _compiled("dp=2", 1, 3, cut=cut).program
        found = [op for region in program.regions for op in region.forward.ops if op.name == collective]
        assert found
        for op in found:
            assert len(op.result.type.layout.local_shape(program.sizes)) == 2  # no vector for each word of a bag


def test_small_tables_and_tables_that_are_cheaper_to_gather_stay_with_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _compiled("dp=2", 1, 3, cut="").program.parameter("words.weight").gather == ("dp",)
    monkeypatch.setattr(costs, "LARGE_BYTES", 1)
    assert _compiled("dp=2", 1, 3, cut="").program.parameter("words.weight").gather == ("dp",)  # messages take time
    monkeypatch.setattr(costs, "LATENCY_BYTES", 0)
    assert _compiled("dp=2", 1, 3, rows=4, cut="").program.parameter("words.weight").gather == ("dp",)
    assert not _compiled("dp=2", 1, 3, cut="").program.parameter("words.weight").gather


@pytest.mark.parametrize("count", [1, 2])
def test_a_table_alone_is_cut_by_columns_and_tables_that_share_an_exchange_by_rows(count: int) -> None:
    batch = {"ids": torch.randint(1 << 19, (64, count)), "target": torch.randn(64)}
    model = Pair if count == 2 else Single
    program = partc.compile(model, batch, loss=large_loss, mesh="dp=8", zero=3).program
    for number in range(count):
        assert program.parameter(f"tables.{number}.weight").type.layout.placement("dp") == Shard(0 if count == 2 else 1)


def test_comments_of_exchanges_by_rows_speak_of_the_table() -> None:
    batch = {"ids": torch.randint(1 << 19, (64, 1)), "target": torch.randn(64)}
    package = partc.compile(Single, batch, loss=large_loss, mesh="dp=8", shard=["tables.0.weight=[@dp, _]"])
    code = "".join(str(content) for name, content in package.files() if name.startswith("regions/"))
    assert code.count("rows travel to the ranks of their rows of the table") == 2
    assert "of their experts" not in code


def test_an_exchange_among_nodes_saves_more_bytes_before_a_table_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's 192 ids cost 7.7 KB of vectors, a table 14.4 KB of gathers and sums; eight times as much is too much."""
    monkeypatch.setattr(costs, "LARGE_BYTES", 1)
    monkeypatch.setattr(costs, "LATENCY_BYTES", 0)
    options = {"microbatches": 1, "schedule": "1f1b", "precision": "fp32", "seed": 0, "shard": (), "zero": 3}
    for ranks, cut in ((8, True), (16, False)):
        given = Options.checked(mesh=f"dp={ranks}", **options)
        batch, functions = _batch(size=32 * ranks), {"loss": squared_error}
        found = compilation(Bags(), batch, given, functions=functions, model_options={}, until="tables").program
        assert found.parameter("words.weight").type.layout.sharded_axes == ("dp",) * cut


@pytest.mark.parametrize(
    ("pin", "why"),
    [
        ("head.weight=[_, @dp]", "is not a table"),  # a product reads it
        ("words.weight=[_, @dp]", "is not a table"),  # four columns are not a multiple of eight
    ],
)
def test_pins_over_dp_are_for_tables_that_can_be_cut_so(pin: str, why: str) -> None:
    with pytest.raises(partc.PartcError, match=why) as caught:
        partc.compile(Bags(), _batch(), loss=squared_error, mesh="dp=8", shard=[pin])
    assert caught.value.code == "P0302"


def test_a_large_recommender_holds_its_share_of_the_tables() -> None:
    """Eight tables of 2 GiB on 8 ranks: 2 GiB of rows a rank, and neither a whole table nor all of them at once."""
    package = partc.compile(Large, _large_batch, loss=large_loss, mesh="dp=8", zero=3)
    assert package.memory is not None
    share = 8 * (1 << 23) * 64 * 4 // 8
    assert share <= package.memory.worst.categories["parameters"] < 1.01 * share
    assert package.memory.worst.peak < 6 * share  # parameters, gradients, two moments, and the largest update


RAGGED = Path(__file__).parents[1] / "models" / "ragged.py"
CUT = {
    "rows": ("w*.weight=[@dp, _]", "users.weight=[@dp, _]"),
    "columns": ("words.weight=[_, @dp]", "users.weight=[_, @dp]", "weighted.weight=[@dp, _]"),
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mesh", "mode", "how"),
    [
        ("dp=2", "sum", {"sparse": 1, "last": 1, "microbatches": 2, "group": ["w*.weight:optimizer=rowwise_adagrad"]}),
        ("dp=2", "mean", {"last": 1, "shard": "rows", "microbatches": 2}),
        ("dp=4", "mean", {"shard": "columns", "zero": 3}),
        ("dp=2,ep=2", "max", {"sparse": 1, "group": ["weighted.weight:optimizer=sparseadam"]}),
        ("dp=2,tp=2", "max", {"shard": "columns", "microbatches": 2}),
        ("pp=2,dp=2", "sum", {"sparse": 1, "optimizer": "adagrad", "microbatches": 2, "recompute": "full"}),
    ],
)
def test_bags_that_begin_at_offsets_equal_one_device(mesh: str, mode: str, how: dict[str, Any]) -> None:
    options: dict[str, Any] = {"mode": mode} | {name: how[name] for name in ("sparse", "last") if name in how}
    given = {name: value for name, value in how.items() if name not in options}
    if "shard" in given:
        given["shard"] = [pin for pin in CUT[given["shard"]] if mode != "max" or "@dp, _" not in pin]
    package = partc.compile(RAGGED, mesh=mesh, precision="fp64", options=options, **given)
    tables = [item for item in package.program.parameters if len(item.type.shape) == 2 and "op" not in item.name[1:3]]
    cut = [item.name for item in tables if "dp" in item.type.layout.sharded_axes]
    assert cut or not ("shard" in how or "group" in how)
    result = package.verify(steps=3)
    assert result.ok and result.worst is not None and result.worst.rel_err < 1e-10, result.worst


def test_ids_before_the_examples_are_refused_with_the_order_that_helps() -> None:
    batch = {"ids": torch.randint(9, (40,)), "offsets": torch.arange(0, 40, 5), "target": torch.randn(8)}
    with pytest.raises(partc.PartcError, match=r"P0402.*batch of 40 examples"):
        partc.compile(Ragged(), batch, loss=ragged_error, mesh="dp=2")
    partc.compile(Ragged(), {"target": batch["target"], **batch}, loss=ragged_error, mesh="dp=2")


def test_bags_at_offsets_are_refused_where_a_microbatch_is_a_batch_of_its_own() -> None:
    """With as many ids as bags, both would be cut; PyTorch refuses the second part, whose first offset is not zero."""
    batch = {"target": torch.randn(8), "ids": torch.randint(9, (8,)), "offsets": torch.arange(8)}
    partc.compile(Ragged(), batch, loss=ragged_error, mesh="dp=2")
    with pytest.raises(partc.PartcError, match=r"P0402.*bags begin at offsets in the whole batch"):
        partc.compile(Ragged(), batch, loss=ragged_error, mesh="dp=2", microbatches=2)


def test_gradients_are_divided_by_frequencies() -> None:
    ids = {"ids": torch.randint(9, (8, 2))}
    result = partc.compile(Scaled(False), ids, loss=mean_square, mesh="dp=2,tp=2", precision="fp64").verify(steps=2)
    assert result.ok, result.worst
    with pytest.raises(partc.PartcError, match=r"P0402.*scale_grad_by_freq=True of bags"):
        partc.compile(Scaled(True), ids, loss=mean_square, mesh="dp=2")


class Scaled(nn.Module):
    def __init__(self, bags: bool) -> None:
        super().__init__()
        self.table = (nn.EmbeddingBag if bags else nn.Embedding)(9, 4, scale_grad_by_freq=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


def mean_square(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["ids"]).square().mean()


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(9, 4)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.words(ids, offsets).sum(1)


def ragged_error(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["ids"], batch["offsets"]), batch["target"])


class Large(nn.Module):
    count, rows = 8, 1 << 23

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(self.rows, 64) for _ in range(self.count))
        self.head = nn.Linear(64, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.stack([table(ids[:, index]) for index, table in enumerate(self.tables)]).sum(0))


class Pair(Large):
    count, rows = 2, 1 << 19


class Single(Pair):
    count = 1


def _large_batch() -> dict[str, Tensor]:
    return {"ids": torch.randint(1 << 23, (1024, 8)), "target": torch.randn(1024)}


def large_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["ids"])[:, 0], batch["target"])


class Few(nn.Module):
    """A small table in a model that consists of other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.user_ids = nn.ModuleDict({"a [b]": nn.Embedding(6, 4)})
        self.tower = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.tower(self.user_ids["a [b]"](ids)).square().mean()


def test_a_mesh_for_experts_without_any_names_a_pin_that_works() -> None:
    batch = {"ids": torch.randint(6, (8,))}
    with pytest.raises(PartcError) as refused:
        partc.compile(Few(), batch, mesh="ep=2", precision="fp64")
    assert refused.value.code == "P0107"
    pin = refused.value.help.partition("--shard '")[2].partition("'")[0]
    package = partc.compile(Few(), batch, mesh="ep=2", precision="fp64", shard=[pin])
    assert "@ep" in str(package.program.parameter("user_ids.a [b].weight").type)
    assert package.verify(steps=2).ok
