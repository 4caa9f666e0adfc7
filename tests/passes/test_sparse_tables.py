"""Sparse gradients of embedding tables, and optimizers that update the rows of a table."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partc
from partc.package.launch import RunFailed
from partc.package.verify import verify
from partc.runtime.checkpoint.manifest import checkpoints
from partc.runtime.layout import Shard
from partc.runtime.ops.row_gradients import RowGradient, TouchedRows
from partc.runtime.optimizer.recipe import Recipe
from partc.runtime.optimizer.update import make_update
from tests.durable import train, trained, whole
from tests.passes.test_levels import on_ranks

MODELS = Path(__file__).parents[1] / "models"
BAGS = MODELS / "bags.py"
CROSS = MODELS / "cross.py"
MOST = "*.most.*:optimizer=adagrad"
SPARSE = ("tables.[!m]*,tables.mean.*:optimizer=sparseadam,lr_scale=0.5", MOST)
ROWWISE = ("tables.*:optimizer=rowwise_adagrad",)
CHAINED = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Embedding(30, 8), nn.Embedding(11, 8), nn.Embedding(17, 8)
        self.mix, self.head = nn.Linear(8, 8), nn.Linear(24, 1)

    def forward(self, ids, others):
        x = self.first(ids)
        chosen = (x.sum(1) > 0).long() + ids % 9
        hidden = self.mix(x).relu()
        y = self.second(chosen) * hidden
        return self.head(torch.cat([hidden, y, self.third(others)], 1)).squeeze(1)

def model():
    return Model()

def batch():
    return {"ids": torch.randint(30, (8,)), "others": torch.randint(17, (8,)), "target": torch.randn(8)}

def loss(model, batch):
    return nn.functional.mse_loss(model(batch["ids"], batch["others"]), batch["target"])
"""
IDS = ([3, 1, 3, 7], [7, 0], [], [1, 1, 1])  # the rows of each step's lookups


def _gradients(step: int) -> Tensor:
    return torch.randn(len(IDS[step]), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize(
    ("text", "torchs"),
    [
        ("sparseadam:betas=0.8,0.9,eps=1e-3", lambda x: torch.optim.SparseAdam([x], 0.1, (0.8, 0.9), 1e-3)),
        ("sparseadam:maximize=true", lambda x: torch.optim.SparseAdam([x], 0.1, maximize=True)),
        ("adagrad:lr_decay=0.1", lambda x: torch.optim.Adagrad([x], 0.1, lr_decay=0.1)),
        ("sgd", lambda x: torch.optim.SGD([x], 0.1)),
    ],
)
def test_rows_are_updated_as_torch_does(text: str, torchs: Any) -> None:
    """torch's optimizers on its own sparse gradients, with duplicates and a step without rows."""
    start = torch.randn(9, 4, dtype=torch.float64)
    theirs = nn.Parameter(start.clone())
    oracle = torchs(theirs)
    parameters = {"t": start.clone()}
    rows = RowGradient(parameters["t"])
    gradients: dict[str, Any] = {"t": rows}
    how: dict[str, Any] = {"shards": {"t": Shard("f64[9, 4]", sparse=True)}, "comm": None, "sizes": {}, "lr": 0.1}
    optimizer, scaled = make_update({"t": Recipe.of(text).settings("t", 2)}, parameters, gradients, {}, None, **how)
    assert optimizer is not None
    for step, ids in enumerate(IDS):
        theirs.grad = torch.sparse_coo_tensor(torch.tensor([ids], dtype=torch.long), _gradients(step) / 2, (9, 4))
        oracle.step()
        rows.zero_()
        for index, number in enumerate(ids):  # a row at a time, as from several microbatches
            rows.add_(TouchedRows(torch.tensor([number]), _gradients(step)[index : index + 1]))
        scaled.begin(2)
        optimizer.begin(0.1)
        with torch.no_grad():
            optimizer.step()
        assert torch.allclose(parameters["t"], theirs, rtol=0, atol=1e-13)
        touched = {number for seen in IDS[: step + 1] for number in seen}
        for number in {*range(9)} - touched:
            assert torch.equal(parameters["t"][number], start[number])


@pytest.mark.parametrize("ways", [2, 3])
def test_rowwise_adagrad_keeps_one_sum_for_each_row_also_where_columns_are_cut(ways: int) -> None:
    """FBGEMM's EXACT_ROWWISE_ADAGRAD, written out; ranks have two columns of four each, the third one spare ones."""
    start, found = torch.randn(9, 4, dtype=torch.float64), dict[int, Tensor]()
    expected, sums = start.clone(), torch.zeros(9, dtype=torch.float64)
    for step, ids in enumerate(IDS):
        summed = {n: sum(_gradients(step)[i] for i, m in enumerate(ids) if m == n) for n in ids}
        for n, g in summed.items():
            assert isinstance(g, Tensor)
            sums[n] += g.square().mean()
            expected[n] -= 0.1 * g / (sums[n].sqrt() + 1e-8)

    def rank(comm: Any, number: int) -> None:
        sizes, shards = {"dp": ways}, {"t": Shard("f64[9, 4@dp]", sparse=True)}
        part = lambda x: Shard(f"f64[{len(x)}, 4@dp]").local(x, sizes, {"dp": number}).clone()  # noqa: E731
        parameters = {"t": part(start)}
        rows = RowGradient(parameters["t"])
        rule = {"t": Recipe.of("rowwise_adagrad").settings("t", 2)}
        gradients: dict[str, Any] = {"t": rows}
        how: dict[str, Any] = {"shards": shards, "comm": comm, "sizes": sizes, "lr": 0.1}
        optimizer, _ = make_update(rule, parameters, gradients, {}, None, **how)
        assert optimizer is not None
        for step, ids in enumerate(IDS):
            rows.zero_()
            rows.add_(TouchedRows(torch.tensor(ids, dtype=torch.long), part(_gradients(step))))
            optimizer.begin(0.1)
            with torch.no_grad():
                optimizer.step()
        assert torch.allclose(optimizer.state_of("t")["sum"][:, 0], sums, rtol=1e-13, atol=0)
        found[number] = parameters["t"]

    on_ranks(rank, {"dp": ways})
    assert torch.allclose(torch.cat([found[number] for number in range(2)], 1), expected, rtol=0, atol=1e-13)
    assert all(not x.any() for number, x in found.items() if number == 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "microbatches", "zero", "groups"),
    [("dp=2", 1, 0, SPARSE), ("pp=2,dp=2", 2, 2, ROWWISE), ("dp_out=2,dp_in=2", 2, 3, SPARSE), ("tp=2", 1, 0, SPARSE)],
)
def test_sparse_gradients_equal_one_device(mesh: str, microbatches: int, zero: int, groups: tuple[str, ...]) -> None:
    """Every kind of bag, with torch's sparse gradients and optimizers as the reference."""
    how: dict[str, Any] = {"mesh": mesh, "microbatches": microbatches, "zero": zero, "precision": "fp64"}
    package = partc.compile(BAGS, group=groups, **how)
    assert package.memory is not None
    for parameter in package.program.parameters:
        asked = parameter.name.startswith("tables.") and (groups == ROWWISE or "most" not in parameter.name)
        assert parameter.sparse == asked
        assert not parameter.sparse or not (parameter.reduce or parameter.gather)
    files = [str(content) for name, content in package.files() if name.startswith("regions/")]
    assert any("_rows(" in text for text in files)
    result = package.verify(steps=3)
    assert result.ok and result.worst is not None and result.worst.rel_err < 1e-10, result.worst


@pytest.mark.slow
def test_a_training_with_sparse_gradients_continues_on_other_meshes(tmp_path: Path) -> None:
    """Real processes, the plain loop with torch's own optimizers as the oracle, and states cut otherwise after it."""
    how: dict[str, Any] = {"precision": "fp64", "group": [*SPARSE, "*.summed.*:optimizer=rowwise_adagrad"]}
    for mesh in ("dp=2", "dp=4", "tp=2"):
        partc.compile(BAGS, mesh=mesh, shard=["tables.u*.weight=[@dp, _]"], **how).write(tmp_path / mesh)
    arguments = ("--lr", "0.05", "--seed", "3", "--weight-decay", "0")
    trained(tmp_path / "dp=2", "--steps", 3, *arguments, "--save", tmp_path / "save", real=True)
    for mesh in ("dp=4", "tp=2", "dp=2"):
        trained(
            tmp_path / mesh, "--steps", 5, *arguments, "--resume", tmp_path / "save", "--save", tmp_path / f"to {mesh}"
        )
    expected = _plain_loop(5, 0.05)
    for mesh in ("dp=4", "tp=2", "dp=2"):
        (last, *_) = [path for path in checkpoints(tmp_path / f"to {mesh}") if "5" in path.name]
        found = whole(last)
        for name, x in expected.items():
            assert torch.allclose(found[name][: len(x)], x, rtol=0, atol=1e-10), (mesh, name)
    assert whole(last)["sum/tables.summed.weight"].shape == (37, 1)


def _loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def _plain_loop(steps: int, rate: float) -> dict[str, Tensor]:
    bags = _loaded(BAGS)
    torch.manual_seed(3)
    model = bags.model().double()
    named = dict(model.named_parameters())
    adam = [named[f"tables.{name}.weight"] for name in ("weighted", "mean", "users")]
    summed = named["tables.summed.weight"]
    optimizers = [
        torch.optim.SparseAdam(adam, rate / 2),
        torch.optim.Adagrad([named["tables.most.weight"]], rate),
        torch.optim.AdamW(model.head.parameters(), rate, weight_decay=0),
    ]
    sums = torch.zeros(len(summed), 1, dtype=torch.float64)
    for step in range(steps):
        model.zero_grad()
        batch = {key: x.double() if x.is_floating_point() else x for key, x in bags.data(step).items()}
        bags.loss(model, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            assert summed.grad is not None
            g = summed.grad.to_dense()
            sums += g.square().mean(1, keepdim=True)
            summed -= 0.5 * rate * g / (sums.sqrt() + 1e-8)
    return {name: x.detach() for name, x in named.items()}


@pytest.mark.slow
def test_a_recommender_trains_on_processes_as_a_plain_loop_does(tmp_path: Path) -> None:
    """Ids travel to the ranks of their rows over gloo; the oracle is a loop with torch's sparse gradients."""
    how: dict[str, Any] = {"precision": "fp64", "group": ["tables.*,words.*:optimizer=sparseadam"], "lr": 0.02}
    package = partc.compile(CROSS, mesh="dp=4", microbatches=2, **how)
    assert sum(op.name == "route" for region in package.program.regions for op in region.forward.ops) == 2  # two widths
    package.write(tmp_path / "package")
    trained(tmp_path / "package", "--steps", 6, "--seed", 5, "--save", tmp_path / "save", real=True)
    cross = _loaded(CROSS)
    torch.manual_seed(5)
    model = cross.model().double()
    tables = [x for name, x in model.named_parameters() if name.startswith(("tables.", "words."))]
    others = [x for name, x in model.named_parameters() if not name.startswith(("tables.", "words."))]
    optimizers = [torch.optim.SparseAdam(tables, 0.02), torch.optim.AdamW(others, 0.02)]
    for step in range(6):
        model.zero_grad()
        batch = {key: x.double() if x.is_floating_point() else x for key, x in cross.data(step).items()}
        cross.loss(model, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
    (last, *_) = [path for path in checkpoints(tmp_path / "save") if "6" in path.name]
    found = whole(last)
    for name, x in model.named_parameters():
        assert torch.allclose(found[name][: len(x)], x, rtol=0, atol=1e-10), name


@pytest.mark.parametrize("microbatches", [1, 2])
def test_tables_share_one_exchange_of_ids_and_one_of_vectors(microbatches: int) -> None:
    """Of four tables and a bag; the tables' numbers of rows do not divide, and one has fewer rows than ids."""
    how: dict[str, Any] = {"group": ["tables.*,bag.*:optimizer=rowwise_adagrad"], "microbatches": microbatches}
    package = partc.compile(MODELS / "dlrm.py", mesh="dp=4", precision="fp64", **how)
    ops = [op.name for region in package.program.regions for graph in region.graphs for op in graph.ops]
    assert [ops.count(name) for name in ("route", "dispatch", "combine")] == [1, 2, 1]
    tables = [item for item in package.program.parameters if item.name.startswith("tables.")]
    assert len(tables) == 4 and all(item.type.layout.dims[0][0].axes == ("dp",) for item in tables)
    result = package.verify(steps=3)
    assert result.ok and result.worst is not None and result.worst.rel_err < 1e-10, result.worst


@pytest.mark.slow
def test_rows_are_cast_and_not_tables() -> None:
    """In bf16 no copy of a table exists, vectors travel in 16 bits, and gradients are added in fp32."""
    group = ["tables.*,words.*:optimizer=rowwise_adagrad"]
    package = partc.compile(CROSS, mesh="dp=4", precision="bf16", group=group)
    tables = {item.name for item in package.program.parameters if item.sparse}
    assert len(tables) == 4
    for call in package.program.calls:
        region = package.program.region(call.region)
        for value, name in zip(region.params, call.params, strict=True):
            assert value.type.dtype == ("f32" if name in tables else "bf16")
        moved = [op.result.type.dtype for op in region.forward.ops if op.name == "combine"]
        assert moved == ["bf16"] * len(moved)
        backward = () if region.backward is None else region.backward.ops
        assert {op.result.type.dtype for op in backward if op.name == "embedding_dense_backward"} <= {"f32"}
    result = package.verify(steps=2)
    assert result.ok, result.worst


@pytest.mark.slow
def test_a_lookup_whose_ids_depend_on_another_has_an_exchange_of_its_own(tmp_path: Path) -> None:
    """Ids from the sign of a vector, and a lookup between dense layers, whose ids are known from the start."""
    (tmp_path / "chained.py").write_text(CHAINED)
    group = ["*.weight:optimizer=adagrad", "first.*,second.*,third.*:optimizer=rowwise_adagrad"]
    pins = [f"{name}.weight=[@dp, _]" for name in ("first", "second", "third")]
    package = partc.compile(tmp_path / "chained.py", mesh="dp=2", precision="fp64", group=group, shard=pins)
    names = [op.name for region in package.program.regions for op in region.forward.ops]
    assert names.count("route") == 2 and names.count("divide_rows") == 1
    result = package.verify(steps=3)
    assert result.ok and result.worst is not None and result.worst.rel_err < 1e-10, result.worst


@pytest.mark.parametrize(("mesh", "sent"), [("dp=4", 3 / 4), ("dp=8", 7 / 8)])
def test_exchanges_of_ids_and_vectors_move_the_bytes_of_the_formula(mesh: str, sent: float) -> None:
    """A lookup by rows sends its ids once and its vectors twice, each without the part that stays."""
    package = partc.compile(CROSS, mesh=mesh, group=["tables.*,words.*:optimizer=rowwise_adagrad"])
    sizes, moved = package.program.sizes, 0.0
    for region in package.program.regions:
        for graph in region.graphs:
            types = region.types(graph)
            for op in graph.ops:
                if op.name in ("dispatch", "combine"):
                    moved += types[next(op.refs())].local_bytes(sizes) * sent
    each = 16 // sizes["dp"]
    lookups = sum(8 * each + 2 * 4 * width * each for width in (8, 4, 8))
    bags = 5 * each * (8 + 2 * 4 * 8)
    assert moved == (lookups + bags) * sent


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("file", "old", "new", "caught"),
    [
        # A table that the plan of updates misses is never trained.
        ("regions/*.py", r"\n    g\.(tables_0_weight|weight)\.add_\(functional\.embedding_rows\(.*\n", "\n", "tables"),
        # Ranks without rows crash where others have some.
        ("runtime/optimizer/rows.py", r"\.unsqueeze\(-1\)\.flatten\(1\)", ".reshape(len(values), -1)", None),
        # Duplicates overwrite each other in place of adding up.
        ("runtime/ops/row_gradients.py", r"torch\.embedding_bag\(values, order, (.*)\)\[0\]", r"values[order[\1]]", ""),
        # Numbers of rows that are those of the whole table.
        ("runtime/ops/embedding.py", r"local = numbers - rank \* rows", "local = numbers", "words"),
    ],
)
def test_mistakes_with_sparse_gradients_are_found(
    file: str, old: str, new: str, caught: str | None, tmp_path: Path
) -> None:
    """Mistakes that peers shipped, made in an emitted package, fail its verification; a table has fewer rows than ranks."""
    mesh, first = ("dp=2", 40) if caught == "words" else ("dp=4", 2)
    how: dict[str, Any] = {"mesh": mesh, "precision": "fp64", "options": {"first": first}}
    partc.compile(CROSS, group=["tables.*,words.*:optimizer=rowwise_adagrad"], **how).write(tmp_path / "package")
    if caught is None:
        assert verify(tmp_path / "package", steps=2, virtual=True).ok
    changed = 0
    for path in sorted((tmp_path / "package").glob(file)):
        text, count = re.subn(old, new, path.read_text())
        path.write_text(text)
        changed += count
    assert changed
    if caught is None:
        with pytest.raises(RunFailed, match="0 elements"):
            verify(tmp_path / "package", steps=2, virtual=True)
    else:
        result = verify(tmp_path / "package", steps=2, virtual=True)
        assert not result.ok and caught in result.worst.name


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=4", "dp=2,tp=2"])
def test_evaluations_read_tables_as_the_training_cuts_them(mesh: str, tmp_path: Path) -> None:
    """The loss of a batch that was not trained on equals that of the trained parameters on one device."""
    how: dict[str, Any] = {
        "precision": "fp64",
        "eval_every": 2,
        "group": ["tables.*,words.*:optimizer=rowwise_adagrad"],
    }
    partc.compile(CROSS, mesh=mesh, **how).write(tmp_path / "package")
    saved = ("--metrics", tmp_path / "metrics.jsonl", "--save", tmp_path / "save")
    trained(tmp_path / "package", "--steps", 2, "--seed", 5, "--eval-batches", 2, *saved)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (last, *_) = [path for path in checkpoints(tmp_path / "save") if "2" in path.name]
    found, cross = whole(last), _loaded(CROSS)
    model = cross.model().double()
    model.load_state_dict({name: found[name][: len(x)] for name, x in model.state_dict().items()})
    losses = []
    for batch in cross.eval_data:
        losses.append(cross.loss(model, {k: x.double() if x.is_floating_point() else x for k, x in batch.items()}))
    assert lines[-1]["evaluation"] == pytest.approx(float(sum(losses)) / 2, rel=1e-10)


def test_no_dense_gradient_of_a_large_table_is_held() -> None:
    """Four tables of 4 GiB on 4 ranks: what a rank holds besides its rows and their sums is small."""
    package = partc.compile(
        Large, _large_batch, loss=large_loss, mesh="dp=4", group=["tables.*:optimizer=rowwise_adagrad"]
    )
    assert package.memory is not None
    rows = 4 * (1 << 24) // 4
    share = rows * 64 * 4 + rows * 4
    assert share < package.memory.worst.peak < 1.01 * share


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(1 << 24, 64) for _ in range(4))
        self.head = nn.Linear(64, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.stack([table(ids[:, index]) for index, table in enumerate(self.tables)]).sum(0))


def _large_batch() -> dict[str, Tensor]:
    return {"ids": torch.randint(1 << 24, (1024, 4)), "target": torch.randn(1024)}


def large_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["ids"])[:, 0], batch["target"])


class Tied(nn.Module):
    """A table that a product reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 4, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids) @ self.table.weight.T


class Sparse(Tied):
    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


def _ids() -> dict[str, Tensor]:
    return {"ids": torch.zeros(8, dtype=torch.long)}


def squared(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["ids"]).square().mean()


@pytest.mark.parametrize(
    ("make", "optimizer", "why"),
    [
        (Tied, "sparseadam", "other operations than lookups read it"),
        (Dense, "sparseadam", "table.weight is dense"),
    ],
)
def test_sparse_gradients_that_cannot_be_had_are_refused(make: Any, optimizer: str, why: str) -> None:
    with pytest.raises(partc.PartcError, match=re.escape(why)) as caught:
        partc.compile(make, _ids, loss=squared, mesh="dp=2", optimizer=optimizer)
    assert caught.value.code == "P0422"


def test_another_optimizer_at_run_time_is_refused(tmp_path: Path) -> None:
    partc.compile(BAGS, mesh="dp=1", precision="fp64", group=SPARSE).write(tmp_path / "package")
    done = train(tmp_path / "package", "--steps", 1, "--group", "tables.*:optimizer=rmsprop")
    assert done.returncode == 2 and "error P0551" in done.stderr and "is sparse in this package" in done.stderr


def test_a_gradient_that_is_dense_against_the_model_is_said() -> None:
    said = {name: " ".join(_warnings(Sparse, name)) for name in ("adamw", "sgd", "adagrad")}
    assert "of table.weight, which are dense: adamw updates whole tables." in said["adamw"]
    assert "dense" not in said["sgd"] + said["adagrad"]
    assert "which are dense: other operations" in " ".join(_warnings(Tied, "sgd"))


def _warnings(make: Any, optimizer: str) -> tuple[str, ...]:
    return partc.compile(make, _ids, loss=squared, mesh="dp=2", optimizer=optimizer).warnings


class Columns(nn.Module):
    """Tables of unequal heights, looked up by columns of one entry, and a table of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.tables = nn.ModuleList(nn.Embedding(7 + 5 * index, 8) for index in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        found = sum(table(tags[:, index]) for index, table in enumerate(self.tables))
        return self.head(self.words(ids) + found[:, None]).square().mean()


@pytest.mark.parametrize("mesh", ["tp=2,dp=2", "dp=2,cp=2,tp=2", "tp=2,ep=2"])
def test_ids_travel_to_tables_whose_columns_tp_cuts(mesh: str) -> None:
    """Each rank looks up its columns of its rows: no table is gathered over tp, and its gradient stays sparse."""
    batch = {"ids": torch.randint(12, (8, 4)), "tags": torch.randint(7, (8, 3))}
    package = partc.compile(Columns, batch, mesh=mesh, precision="fp64", group=ROWWISE)
    ops = [op for region in package.program.regions for op in region.forward.ops]
    assert any(op.name == "dispatch" for op in ops)
    assert not any(op.name == "unshard" and any(name.startswith("tables") for name in op.refs()) for op in ops)
    assert all(item.sparse for item in package.program.parameters if item.name.startswith("tables"))
    assert package.verify(steps=2).ok
