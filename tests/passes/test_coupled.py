"""Models whose examples depend on each other, and models that keep statistics."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import PartcError
from partc.package.verify import verify
from tests.independent.models import input_statistics
from tests.zoo import MODELS


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the single-device models' runs are kept."""
    return tmp_path_factory.mktemp("coupled")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "microbatches"),
    [
        ("resnet", "4x1", 1), ("unet", "pp=4", 2), ("mixture", "2x2x2", 2), ("dlrm", "pp=3,dp=2", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("resnet", "2x2x2", 4), ("unet", "2x2", 1), ("clip", "2x2x2", 2),
        )),
        *(pytest.param(*case, marks=pytest.mark.matrix) for case in (("mixture", "2", 1), ("dlrm", "2x2x2", 4))),
    ],
)  # fmt: skip
def test_coupled_models_equal_one_device(name: str, mesh: str, microbatches: int, shared: Path, tmp_path: Path) -> None:
    model = MODELS[name]
    if model.config:
        pytest.importorskip("transformers")
    package = partc.compile(
        model.source(shared), mesh=mesh, microbatches=microbatches, precision="fp64", options=model.options
    )
    package.write(tmp_path / "build")
    result = verify(tmp_path / "build", steps=2, virtual=True, reference=shared / f"{name}_run")
    assert result.ok, result.worst
    assert package.program.separate_batches == bool(package.warnings) == (microbatches > 1 and name != "dlrm")


class Counting(nn.Module):
    """Batch norms of every kind, and buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), norm)
            for norm in (
                nn.BatchNorm1d(6),
                nn.BatchNorm1d(6, affine=False),
                nn.BatchNorm1d(6, track_running_stats=False),
                nn.BatchNorm1d(6, momentum=0.3).eval(),
            )
        )
        self.spatial = nn.InstanceNorm1d(6, affine=True, track_running_stats=True)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        x = self.spatial(x.reshape(x.shape[0], 6, 1) + torch.arange(3) * x.mean()).mean(-1)
        self.steps += 1
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return nn.functional.mse_loss(x + self.mean, target)

    def train(self, mode: bool = True) -> Counting:
        super().train(mode)
        self.blocks[3].eval()
        return self


def counting() -> nn.Module:
    return Counting()


def _batch() -> dict[str, Tensor]:
    """The same in every order of tests: gradients before a norm nearly cancel, for some batches to the last digits."""
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(12, 6, generator=generator), "target": torch.randn(12, 6, generator=generator)}


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(("mesh", "microbatches"), [("2", 1), ("2", 3), ("pp=2,tp=3", 2), ("pp=2,dp=2,tp=2", 3)])
def test_statistics_and_buffers_are_those_of_one_device(mesh: str, microbatches: int) -> None:
    package = partc.compile(counting, _batch(), mesh=mesh, microbatches=microbatches, precision="fp64")
    assert {buffer for buffer, _ in package.program.updates} >= {"steps", "mean", "blocks.0.1.running_var"}
    result = package.verify(steps=3)
    assert result.ok, result.worst


def test_statistics_of_inputs_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    """Counts, means, maxima and weights from inputs alone: no microbatch becomes a batch of its own."""
    package = partc.compile(input_statistics.__file__, mesh="pp=2,dp=2", microbatches=2, precision="fp64")
    assert not package.program.separate_batches and package.warnings == ()
    result = verify(package.write(tmp_path / "build"), steps=2, virtual=True)
    assert result.ok, result.worst


class Best(nn.Module):
    """A penalty on the distance of a loss from its lowest value so far: exactly zero where this step's is the lowest."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 1)
        self.register_buffer("best", torch.tensor(torch.inf))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        mean = (self.up(x) - target).square().mean()
        self.best.copy_(torch.minimum(self.best, 0.5 * mean.detach()))
        return mean + (mean - 2 * self.best).abs()


def test_a_sum_that_exists_whole_is_read_whole() -> None:
    package = partc.compile(Best, _batch(), mesh="dp=3", precision="fp64")
    assert sum(op.name == "all_reduce" for region in package.program.regions for op in region.forward.ops) == 1
    result = package.verify(steps=3)
    assert result.ok, result.worst


class Normed(nn.Module):
    """A batch norm over examples and places."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Conv1d(2, 6, 1), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x)).sigmoid().square().mean()


def test_a_batch_norm_takes_one_sum_over_ranks_in_backward() -> None:
    package = partc.compile(Normed, {"x": torch.randn(8, 2, 3)}, mesh="dp=2", precision="fp64")
    (region,) = (region for region in package.program.regions if any("running_mean" in x.name for x in region.params))
    assert region.backward is not None
    forward, backward = (Counter(op.name for op in graph.ops) for graph in (region.forward, region.backward))
    assert (forward["all_reduce"], backward["all_reduce"]) == (2, 1)
    assert forward["sub"] == 1  # one centred value for the variance and for the result
    result = package.verify(steps=3)
    assert result.ok, result.worst


class Edges(nn.Module):
    """Sums over the edges of graphs, whose ends number the nodes of the whole batch, with a norm over all nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        first, last = edges
        y = torch.zeros_like(x).index_add(0, last % 16, self.up(x)[first])
        return self.norm(y).square().mean()


@pytest.mark.parametrize("numbers", [16, 4])
def test_numbers_of_rows_of_the_whole_batch_are_refused_in_microbatches(numbers: int) -> None:
    edges = torch.arange(40).reshape(2, 20) % numbers
    batch = {"x": torch.randn(16, 4), "edges": edges}
    assert partc.compile(Edges, batch, mesh="dp=2").warnings == ()
    if numbers == 4:  # within each microbatch
        assert len(partc.compile(Edges, batch, mesh="dp=2", microbatches=4).warnings) == 1
        return
    with pytest.raises(PartcError) as error:
        partc.compile(Edges, batch, mesh="dp=2", microbatches=4)
    assert error.value.code == "P0402" and error.value.source is not None
    assert "test_coupled.py" in error.value.source.file and "up to 15" in error.value.cause


class Marked(Edges):
    def forward(self, x: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[marks] = self.up(x[marks])
        return self.norm(y).square().mean()


def test_places_of_masks_are_no_numbers_of_the_batch() -> None:
    batch = {"x": torch.randn(16, 4), "marks": torch.arange(16) % 3 == 0}
    assert len(partc.compile(Marked, batch, mesh="dp=2", microbatches=4).warnings) == 1


@pytest.mark.slow
class Halves(nn.Module):
    """The batch as two halves, and one by one: neither view can be cut into all parts of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        halves = self.up(x).view(2, -1, 6)
        y = torch.cat([halves[0] * halves[1].flip(0), halves[1]])
        return torch.stack([row.roll(1) * one for row, one in zip(y, weight, strict=True)]).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "microbatches"), [("dp=4", 1), ("pp=1", 4)])
def test_views_that_a_batch_cannot_be_cut_along(mesh: str, microbatches: int) -> None:
    data = {"x": torch.randn(16, 6), "weight": torch.rand(16)}
    assert partc.compile(Halves(), data, mesh=mesh, microbatches=microbatches, precision="fp64").verify(steps=2).ok


@pytest.mark.slow
def test_the_warning_says_where_and_what() -> None:
    package = partc.compile(counting, _batch(), mesh="2", microbatches=3)
    [warning] = package.warnings
    assert (
        "test_coupled.py:" in warning
        and "each of the 3 microbatches" in warning.lower()
        and warning.endswith("(P0402).")
    )
    assert partc.compile(counting, _batch(), mesh="2").warnings == ()
    assert package.report["warnings"] == [warning]
    assert warning in dict(package.files())["README.md"]


def test_batches_that_do_not_divide_are_refused() -> None:
    for mesh, microbatches in (("2", 5), ("5", 3)):
        with pytest.raises(PartcError) as failure:
            partc.compile(counting, _batch(), mesh=mesh, microbatches=microbatches)
        assert failure.value.code == "P0401"


WEIGHTED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
    def forward(self, x):
        return self.down(self.norm(self.up(x)).relu())

def model(): return Net()
def batch(): return {"x": torch.randn(16, 6), "y": torch.randint(0, 4, (16,)), "w": torch.rand(4)}
def loss(model, batch): return nn.functional.cross_entropy(model(batch["x"]), batch["y"], weight=batch["w"])
"""


def test_an_entry_as_long_as_a_microbatch_is_whole_in_each(tmp_path: Path) -> None:
    file = tmp_path / "weighted.py"
    file.write_text(WEIGHTED)
    package = partc.compile(str(file), mesh="pp=2", microbatches=4, precision="fp64")
    assert package.program.batch_entries == ("x", "y") and package.program.step_input("w").shape == (4,)
    assert package.verify(steps=1).ok


class Queue(nn.Module):
    """Keeps the keys of eight examples, which is the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.register_buffer("keys", torch.zeros(4, 16))
        self.register_buffer("first", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = self.line(x)
        loss = (y @ self.keys.clone()).exp().mean()
        self.keys[:, (self.first + torch.arange(8)) % 16] = y.detach().T
        self.first += 8
        return loss


def test_values_that_do_not_fit_their_places_are_refused() -> None:
    with pytest.raises(PartcError, match=r"of shape \(4, 4\) to places of shape \(4, 8\)") as caught:
        partc.compile(Queue(), {"x": torch.zeros(8, 4)}, mesh="1", microbatches=2)
    assert caught.value.source is not None


def _in_rows(x: Tensor) -> Tensor:
    rows, best = torch.arange(x.shape[0]), x.topk(2, -1).indices
    y = x * 2
    y[rows, best[:, 0]] = 0.5
    y[rows[:, None], best] += x[:, :2]
    y[:, [1, 3]] = x[:, :2]
    return y


# Functions that treat examples alike.
ALIKE = {
    "affine_grid": lambda x: F.affine_grid(x.view(-1, 2, 3), [x.shape[0], 1, 4, 5], align_corners=False),
    "cross_entropy of probabilities": lambda x: F.cross_entropy(x, x.detach().softmax(-1), label_smoothing=0.1),
    "writes at numbers of rows": _in_rows,
    "reads at numbers of rows": lambda x: x[torch.arange(x.shape[0])[:, None], x.topk(2, -1).indices],
    "diag_embed": torch.diag_embed,
    "triangular solve": lambda x: torch.linalg.solve_triangular(
        torch.diag_embed(x.exp()), torch.eye(6, dtype=x.dtype), upper=True
    ),
    "igamma": lambda x: torch.special.gammainc(torch.ones((), dtype=x.dtype), x.abs()),
}


class Alike(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.up, self.scale = name, nn.Linear(6, 6), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        made = ALIKE[self.name](self.up(x))
        return made * self.scale if not made.dim() else (made * self.scale).square().mean()


@pytest.mark.parametrize("name", ALIKE)
def test_functions_that_treat_examples_alike_couple_none(name: str) -> None:
    batch = {"x": torch.randn(8, 6)}
    package = partc.compile(Alike(name), batch, mesh="dp=2", microbatches=2, precision="fp64")
    assert not package.program.separate_batches
    gathered = [op for region in package.program.regions for op in region.forward.ops if op.name == "all_gather"]
    assert not gathered
    assert package.verify(steps=2).ok
