"""The axis ep: experts are cut over ranks, and their rows travel."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import partc
from partc.cli import main
from partc.communication.descriptions import moved_bytes
from partc.errors import InternalError, PartcError
from partc.ir.mesh import Mesh
from partc.ir.program import RAGGED
from partc.package.launch import RunFailed
from partc.package.verify import verify
from partc.passes import experts as experts_pass
from partc.runtime.ops.experts import fits_grouped_product
from tests.durable import trained, whole
from tests.models import experts as loops
from tests.models import moe
from tests.zoo import MODELS

BATCHED = Path(__file__).parents[1] / "models" / "batched_experts.py"
MOE = Path(__file__).parents[1] / "models" / "moe.py"
EXPERTS = ("up", "down", "up_bias", "down_bias")


@pytest.mark.parametrize(
    ("mesh", "spec", "found", "axes"),
    [
        ("pp=2,dp=8,tp=2", "ep=4@dp", "pp=2,dp=2,ep=4,tp=2", ("ep",)),
        ("dp_out=2,dp_in=4", "ep=2@dp_in", "dp_out=2,dp_in=2,ep=2", ("ep",)),
        ("pp=2,dp=4,cp=2,tp=2", "ep=8@dp,cp", "pp=2,dp=1,ep=4,cp=2,tp=2", ("ep", "cp")),
        ("dp=4,cp=2", "ep=2@cp", "dp=4,cp=2", ("cp",)),
        ("dp=2,ep=2,cp=2", "ep,cp", "dp=2,ep=2,cp=2", ("ep", "cp")),
        ("dp=2,tp=4", "ep=2@tp", "dp=2,tp=2,tp_ep=2", ("tp_ep",)),
        ("dp=2,tp=4", "ep=4@tp", "dp=2,tp=4", ("tp",)),
        ("dp=4,tp=4", "ep=4@dp=2,tp=2", "dp=2,ep=2,tp=2,tp_ep=2", ("ep", "tp_ep")),
        ("cp=4,dp=2", "ep=2@cp", "cp=2,cp_ep=2,dp=2", ("cp_ep",)),
        ("dp_out=4,dp_in=4", "ep=4@dp_out=2,dp_in=2", "dp_out=2,ep=2,dp_in=2,dp_in_ep=2", ("ep", "dp_in_ep")),
        ("tp_out=2,tp_in=2", "tp_in", "tp_out=2,tp_in=2", ("tp_in",)),
    ],
)
def test_experts_take_neighbours_of_an_axis(mesh: str, spec: str, found: str, axes: tuple[str, ...]) -> None:
    made, over = Mesh.parse(mesh).with_experts(spec)
    assert (str(made), over) == (found, axes)
    assert Mesh.parse("ep=4,tp=2,pp=2").expert_axes == ("ep",)
    assert Mesh.parse("ep=1,dp=2").expert_axes == ()


@pytest.mark.parametrize(
    ("mesh", "spec", "cause"),
    [
        ("dp=8", "4@dp", "does not parse"),
        ("dp=8", "ep", "'ep', which does not cut rows"),
        ("pp=2,dp=2", "ep=2@pp", "'pp', which does not cut rows"),
        ("dp=8", "ep=4@dp=2", "does not divide dp=8"),
        ("dp=4,tp=2", "ep=8@dp=3,tp=2", "does not divide dp=4 x tp=2"),
        ("dp=4", "ep=4@dp,dp", "an axis twice"),
        ("dp=2,cp=4", "ep=6@dp,cp", "does not divide dp=2 x cp=4"),
        ("dp=2,cp=4", "ep=8@cp", "does not divide cp=4"),
        ("dp=8", "ep=3@dp", "does not divide dp=8"),
        ("dp=8", "ep=0@dp", "does not divide dp=8"),
        ("dp=4", "ep=2@dp_in", "'dp_in', which does not cut rows"),
        ("dp=4,ep=2", "ep=2@dp", "on top of ep=2"),
    ],
)
def test_experts_over_other_ranks_are_refused(mesh: str, spec: str, cause: str) -> None:
    with pytest.raises(PartcError, match=cause) as caught:
        Mesh.parse(mesh).with_experts(spec)
    assert caught.value.code == "P0106"


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the single-device models' runs are kept."""
    return tmp_path_factory.mktemp("references")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        ("dp=2,ep=2", {"zero": 1, "microbatches": 2}),
        ("ep=4,tp=2", {"zero": 3}),
        ("pp=2,ep=2,dp=2", {"zero": 2, "schedule": "zero-bubble", "microbatches": 4, "recompute": "full"}),
        ("cp=2,ep=2", {"zero": 3, "microbatches": 2, "recompute": "selective"}),
        ("tp=2,ep=2,pp=2", {"schedule": "gpipe", "microbatches": 2}),
        ("ep=8", {"zero": 2, "kernels": "triton"}),
        ("dp_out=2,ep=2,dp_in=2", {"zero": "3@dp_in", "microbatches": 2}),
        ("dp=2,cp=2", {"experts": "ep=4@dp,cp", "zero": 2, "microbatches": 2}),
        ("tp=2,cp=2,dp=2", {"experts": "ep=2@cp", "zero": 3, "recompute": "full"}),
        ("dp=2,tp=2", {"experts": "ep=2@tp", "zero": 1}),
        ("pp=2,tp=4", {"experts": "ep=2@tp", "microbatches": 2, "recompute": "full"}),
        ("dp=2,tp=4", {"experts": "ep=4@dp=2,tp=2", "zero": 3, "microbatches": 2}),
        pytest.param("cp=4", {"experts": "ep=2@cp", "zero": 2}, marks=pytest.mark.matrix),
        pytest.param("dp_out=2,dp_in=2", {"experts": "ep=4@dp_out,dp_in"}, marks=pytest.mark.slow),
    ],
)
def test_packages_equal_the_single_device(mesh: str, how: dict[str, Any], references: Path, tmp_path: Path) -> None:
    package = partc.compile(MOE, mesh=mesh, precision="fp64", **how)
    found = verify(package.write(tmp_path / "build"), steps=2, virtual=True, reference=references / "moe")
    assert found.ok and found.worst.rel_err < 1e-10, found.worst
    for item in package.program.parameters:
        if item.name.endswith(EXPERTS):
            assert item.type.layout.dims[0][0].axes[: len(package.options.expert_axes)] == package.options.expert_axes
            assert not {*package.options.expert_axes} & {*item.reduce, *item.gather}


def test_rows_return_whole_where_only_the_last_additions_cut_them() -> None:
    """In bf16, tp cuts the rows of the experts' last biases, and not those of their products."""
    package = partc.compile(MOE, mesh="tp=4", experts="ep=2@tp", precision="bf16")
    (layer,) = {call.region for call in package.program.calls if call.name == "layers.0"}
    graph = package.program.region(layer).forward
    (back,) = (op for op in graph.ops if op.name == "combine")
    assert back.result.type.layout.sharded_axes == ("tp_ep",)


LOOPS = MOE.with_name("experts.py")  # experts are modules


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (MOE, {"skew": 0.0}),
        (MOE, {"skew": 100.0}),  # one rank receives all rows, the other none
        (LOOPS, {"style": "biased"}),
        pytest.param(LOOPS, {"style": "places"}, marks=pytest.mark.slow),
    ],
)
def test_kernels_count_the_rows_that_experts_receive(model: Path, options: dict[str, Any], tmp_path: Path) -> None:
    package = partc.compile(model, mesh="ep=2", precision="fp64", kernels="triton", options=options)
    layers = [region for region in package.program.regions if region.phase == "microbatch" and region.backward]
    counted = [any(RAGGED in dict(op.attrs) for op in graph.ops) for region in layers for graph in region.graphs]
    assert any(counted)
    found = verify(package.write(tmp_path / "build"), steps=2, virtual=True)
    assert found.ok and found.worst.rel_err < 1e-10, found.worst


@pytest.mark.slow
def test_gradients_of_joined_matrices_are_written_side_by_side(tmp_path: Path) -> None:
    """The rows of a kernel's only result, which joins two gradients, are those that the rank receives."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["mixtral"].config))
    options = {"batch": 4, "seq": 16}
    package = partc.compile(
        f"hf:{tmp_path / 'config.json'}", mesh="ep=2,dp=2", precision="fp64", kernels="triton", options=options
    )
    (layer,) = {call.region for call in package.program.calls if call.name == "model.layers.0"}
    backward = package.program.region(layer).backward
    assert backward is not None and not any(op.name == "cat" for op in backward.ops)
    (joined,) = (op for op in backward.ops if op.body and op.body[-1].name == "cat")
    assert RAGGED in dict(joined.attrs) and len(joined.results) == 1
    found = verify(package.write(tmp_path / "build"), steps=2, virtual=True)
    assert found.ok and found.worst.rel_err < 1e-10, found.worst


@pytest.mark.slow
def test_one_example_of_each_rank_is_recomputed() -> None:
    """Reshapes of one example are none for a rank, and the layouts of gradients behind them have two names."""
    mesh = {"mesh": "dp=4", "microbatches": 2, "recompute": "full", "precision": "fp64"}
    assert partc.compile(LOOPS, **mesh).verify(steps=1).ok


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "how", "arguments"),
    [
        pytest.param(
            "ep=2,tp=2", {"zero": 1, "options": {"style": "put"}}, ["--optimizer", "muon"], marks=pytest.mark.slow
        ),
        pytest.param(
            "pp=2,dp=2,ep=2", {"zero": 3, "microbatches": 2}, ["--optimizer", "adafactor"], marks=pytest.mark.slow
        ),
        ("dp=2", {"zero": 2, "kernels": "triton"}, ["--clip", "0.1"]),
        (
            "dp=2,ep=2",
            {"zero": 1},
            ["--group", "*.experts.1.*:lr_scale=0.1", "--no-decay", "*.experts.2.up.*", "--clip", "0.1"],
        ),
    ],
)
def test_experts_that_are_modules_keep_their_names(
    mesh: str, how: dict[str, Any], arguments: list[str], tmp_path: Path
) -> None:
    """One tensor has all of them; the options of each are those of its own name."""
    package = partc.compile(LOOPS, mesh=mesh, precision="fp64", **how)
    stacks = {item.name for item in package.program.parameters if item.stacked}
    each = ("up", "gate", "down")
    assert stacks == {f"mixtures.{layer}.experts.*.{name}.weight" for layer in range(2) for name in each}
    found = verify(package.write(tmp_path / "build"), arguments=arguments, steps=2, virtual=True)
    assert found.ok and found.worst.rel_err < 1e-10, found.worst


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("style", "mesh", "how"),
    [
        ("stacked", "pp=2,ep=2", {"microbatches": 2}),
        ("gathered", "dp=2,tp=2", {"experts": "ep=4@dp,tp", "zero": 2}),
        ("summed", "pp=2,ep=2", {"zero": 1}),
        pytest.param("joined", "dp=2,ep=2", {"zero": 3}, marks=pytest.mark.slow),
        pytest.param("side_by_side", "ep=2,tp=2", {"recompute": "full"}, marks=pytest.mark.slow),
    ],
)
def test_modules_that_all_tokens_pass_are_experts(style: str, mesh: str, how: dict[str, Any], tmp_path: Path) -> None:
    """A layer of them is one region, which no pipeline stage cuts."""
    package = partc.compile(LOOPS, mesh=mesh, precision="fp64", options={"style": style}, **how)
    assert {call.region for call in package.program.calls if call.params} == {"embed", "norm", "mixture", "head"}
    assert len(package.program.transfers) <= 2  # before and after a norm
    assert {item.name for item in package.program.parameters if item.stacked} >= {"mixtures.0.experts.*.up.weight"}
    found = verify(package.write(tmp_path / "build"), steps=2, virtual=True)
    assert found.ok and found.worst.rel_err < 1e-10, found.worst


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("style", "mesh", "how", "cut"),
    [
        ("choice", "pp=2,ep=2", {"microbatches": 2, "zero": 1}, "4@ep,"),
        ("capacity", "dp=2,tp=4", {"experts": "ep=2@tp", "zero": 3}, "4@tp,tp_ep,"),
        ("soft", "dp=2,cp=2", {"experts": "ep=4@dp,cp", "recompute": "full"}, "4@ep,cp,"),
        ("turned", "dp=2,tp=2", {"experts": "ep=4@dp,tp", "zero": 2}, "4@ep,tp,"),
    ],
)
def test_batched_products_are_cut_by_experts(
    style: str, mesh: str, how: dict[str, Any], cut: str, tmp_path: Path
) -> None:
    package = partc.compile(BATCHED, mesh=mesh, precision="fp64", options={"style": style}, **how)
    weights = [f"layers.{layer}.{name}" for layer in range(2) for name in ("up", "down", "bias")]
    types = {item.name: str(item.type) for item in package.program.parameters}
    assert all(types[name].startswith(f"f64[{cut}") for name in weights)
    found = verify(package.write(tmp_path / "build"), steps=2, virtual=True)
    assert found.ok and found.worst.rel_err < 1e-10, found.worst


class Branches(nn.Module):
    """Linear layers side by side, whose results no token weighs: no experts."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        k, v, q, o = torch.stack([kind(x) for kind in self.kinds]).unbind(0)
        return nn.functional.mse_loss(nn.functional.scaled_dot_product_attention(q, k, v) + o, target)


def test_layers_side_by_side_are_no_experts() -> None:
    data = {"x": torch.randn(8, 4, 8), "target": torch.randn(8, 4, 8)}
    with pytest.raises(PartcError, match="no experts in a form"):
        partc.compile(Branches(), batch=data, mesh="ep=2", precision="fp64")


class Depthwise(nn.Module):
    """A convolution of each channel by itself, as in linear attention and state-space models."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.down = nn.Conv1d(8, 8, 3, padding=1, groups=8), nn.Linear(8, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.down(self.mix(x.mT).mT), target)


@pytest.mark.parametrize("mesh", ["ep=2", "ep=2,tp=2", "ep=2,cp=2"])
def test_channels_of_depthwise_convolutions_are_no_experts(mesh: str) -> None:
    data = {"x": torch.randn(8, 4, 8), "target": torch.randn(8, 4, 8)}
    with pytest.raises(PartcError, match="no experts in a form"):
        partc.compile(Depthwise(), batch=data, mesh=mesh, precision="fp64")


STORED = MOE.with_name("stored.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forms", "mesh", "how"),
    [
        ("flat+minor+repeated", "dp=2,ep=2", {"zero": 3}),
        ("chunks+last+einsum", "dp=2,tp=4", {"experts": "ep=4@dp=2,tp=2", "zero": 1}),
        ("biased+middle+dense", "pp=3,ep=2", {"microbatches": 2, "recompute": "full"}),
        ("slices+vector+scaled+gated", "ep=2,cp=2,tp=2", {"zero": 2}),
        ("columns+rows+masks+both", "dp=2,cp=2", {"experts": "ep=4@dp,cp", "microbatches": 2}),
    ],
)
def test_experts_are_found_in_many_forms(forms: str, mesh: str, how: dict[str, Any], tmp_path: Path) -> None:
    """Weights of every layer are cut by experts, whatever their shape is and whoever reads them."""
    package = partc.compile(STORED, mesh=mesh, precision="fp64", options={"forms": forms}, **how)
    found = verify(package.write(tmp_path / "build"), steps=2, virtual=True)
    assert found.ok and found.worst.rel_err < 1e-10, found.worst
    for item in package.program.parameters:
        if item.name.split(".")[-1] in ("up", "up_bias", "scale"):
            assert {*package.options.expert_axes} <= {*item.type.layout.sharded_axes}, item


class Apart(nn.Module):
    """Experts of which some are not trained, or whose names do not count from 0."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        names = ("left", "right") if kind == "named" else ("0", "1")
        self.router = nn.Linear(6, 2)
        self.experts = nn.ModuleDict({name: nn.Linear(6, 6) for name in names})
        for x in self.experts["1"].parameters() if kind == "frozen" else ():
            x.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = self.router(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts.values()):
            here = torch.where(chosen == number)[0]
            out.index_add_(0, here, expert(x[here]))
        return out.square().mean()


def partly_frozen() -> nn.Module:
    return Apart("frozen")


def named() -> nn.Module:
    return Apart("named")


@pytest.mark.slow
@pytest.mark.parametrize("model", [partly_frozen, named])
def test_experts_that_are_unlike_stay_apart(model: Any) -> None:
    batch = {"x": torch.randn(8, 6)}
    package = partc.compile(model, batch, mesh="dp=2", precision="fp64")
    assert not any(item.stacked for item in package.program.parameters)
    assert package.verify(steps=2).ok
    with pytest.raises(PartcError, match="not a parameter with a dimension for experts") as caught:
        partc.compile(model, batch, mesh="ep=2", precision="fp64")
    assert caught.value.code == "P0107" and "count from 0" in caught.value.help


SESSIONS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, trained):
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)) for _ in range(4)
        ).requires_grad_(trained)

    def forward(self, x):
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, which = torch.where(chosen == number)
            out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, which, None])
        return out.view_as(x)


def model(trained: bool = True):
    return Net(trained)


def batch():
    return {"x": torch.randn(8, 12, 8), "target": torch.randn(8, 12, 8)}


def loss(model, batch):
    return nn.functional.mse_loss(model(batch["x"]), batch["target"])


def evaluate(model, batch):
    return {"far": (model(batch["x"]) - batch["target"]).abs().mean()}


def optimizer(model):
    biases = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    weights = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    groups = [{"params": weights, "weight_decay": 0.1}, *([{"params": biases, "lr": 1e-3}] if biases else [])]
    return torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trained", "mesh", "experts"), [(True, "dp=2,cp=2", "ep=2@dp"), (True, "dp=2", ""), (False, "dp=2", "")]
)
def test_experts_with_biases_train_and_are_evaluated(
    trained: bool, mesh: str, experts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen experts are one parameter too; groups of the model file's optimizer come from the trace's cache as well."""
    monkeypatch.setenv("PARTC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "mine.py").write_text(SESSIONS)
    for _ in range(2 if experts else 1):
        how = {"experts": experts} if experts else {}
        package = partc.compile(tmp_path / "mine.py", mesh=mesh, precision="fp64", options={"trained": trained}, **how)
    assert sum(item.stacked for item in package.program.parameters) == 4
    assert package.verify(steps=2).ok


def _forward(
    weights: dict[str, Tensor], x: Tensor, most: float = math.inf, scope: int = moe.SEQ, skew: float = 0
) -> Tensor:
    """The logits of tests/models/moe.py, token by token and expert by expert.

    Of each `scope` tokens, an expert takes the first `most` rows.
    """
    skewed = skew * torch.arange(moe.EXPERTS)
    for layer in range(2):
        of = {name.removeprefix(f"layers.{layer}."): each for name, each in weights.items()}
        rows = []
        taken: list[int] = []
        for number, token in enumerate(x.flatten(0, 1)):
            taken = taken if number % scope else []
            scores = (of["router.weight"] @ token - skewed).softmax(0)
            mixed = torch.zeros_like(token)
            for e in scores.argsort(descending=True)[: moe.CHOSEN].tolist():
                taken.append(e)
                if taken.count(e) > most:
                    continue
                hidden = nn.functional.silu(token @ of["up"][e] + of["up_bias"][e])
                mixed = mixed + scores[e] * (hidden @ of["down"][e] + of["down_bias"][e])
            shared = nn.functional.silu(of["shared.0.weight"] @ token + of["shared.0.bias"])
            rows.append(token + mixed + of["shared.2.weight"] @ shared + of["shared.2.bias"])
        x = torch.stack(rows).reshape(x.shape)
    return x @ weights["head.weight"].T + weights["head.bias"]


def _equals_a_plain_loop(
    mesh: str, how: dict[str, Any], folder: Path, *dropped: int, real: bool = False, skew: float = 0
) -> str:
    """Train with a clipped norm, in which each element of an expert counts once; returns what the training printed.

    `dropped` and `skew` are those of `_forward`.
    """
    torch.manual_seed(3)
    model = moe.model().double()
    save_file({name: x.clone() for name, x in model.state_dict().items()}, folder / "init.safetensors")
    weights = {name: x.detach().requires_grad_() for name, x in model.named_parameters()}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-3, weight_decay=0.1)
    batch = moe.batch()
    for _ in range(3):
        optimizer.zero_grad()
        logits = _forward(weights, batch["x"].double(), *dropped, skew=skew)
        assert not dropped or not logits.allclose(_forward(weights, batch["x"].double()))
        nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
        assert torch.nn.utils.clip_grad_norm_(weights.values(), 0.05) > 0.1
        optimizer.step()
    package = partc.compile(MOE, mesh=mesh, precision="fp64", options={"skew": str(skew)}, **how)
    build, save = package.write(folder / "build"), folder / "save"
    given = ("--steps", 3, "--weight-decay", 0.1, "--clip", 0.05, "--init", folder / "init.safetensors")
    measured = ("--metrics", folder / "metrics", "--report", folder / "report")
    printed = trained(build, *given, "--save", save, *measured, real=real)
    found = whole(save / "step_00000003")
    for name, x in weights.items():
        torch.testing.assert_close(found[name], x.detach(), rtol=1e-10, atol=1e-12)
    return printed


def _metrics(folder: Path, layer: int) -> dict[str, float]:
    """The last step's loads of a layer."""
    prefix, line = f"load/layers.{layer}/", json.loads((folder / "metrics").read_text().splitlines()[-1])
    return {name.removeprefix(prefix): value for name, value in line.items() if name.startswith(prefix)}


@pytest.mark.slow
def test_rows_beyond_the_account_are_computed_and_named(tmp_path: Path) -> None:
    """All tokens choose the two experts of the first of four ranks."""
    printed = _equals_a_plain_loop("ep=4", {"expert_rows": 1.5}, tmp_path, real=True, skew=20)
    for layer in range(2):
        said = (
            f"128 rows came for this rank's experts of layers.{layer}, where the mean is 32; the memory account has 1.5"
        )
        assert printed.count(said) == 1
        assert _metrics(tmp_path, layer) == {"largest": 4.0, "empty": 0.75, "dropped": 0.0}
    assert "largest load 4.00" in printed
    report = json.loads((tmp_path / "report" / "rank_003.json").read_text())
    assert report["expert_rows"] == {f"layers.{layer}": [64, 64, *(0 for _ in range(6))] for layer in range(2)}


@pytest.mark.slow
def test_the_memory_account_has_the_stated_rows() -> None:
    def bytes_of(rows: float | None) -> int:
        options = {"batch": "64", "skew": "0"}
        return partc.compile(MOE, mesh="ep=4", precision="fp64", options=options, expert_rows=rows).memory.worst.peak

    mean, twice, three = (bytes_of(rows) for rows in (None, 2, 3))
    assert bytes_of(1) == mean < twice < three
    assert three - twice == pytest.approx(twice - mean, rel=0.2)
    with pytest.raises(PartcError, match=r"--expert-rows 0\.5 is out of range"):
        bytes_of(0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        ("dp=2,ep=2", {"zero": 3}),
        ("pp=2,ep=2", {"zero": 1}),
        ("dp=2,tp=2", {"zero": 2, "experts": "ep=4@dp,tp"}),  # folded
    ],
)
def test_a_training_on_processes_equals_a_plain_loop(mesh: str, how: dict[str, Any], tmp_path: Path) -> None:
    _equals_a_plain_loop(mesh, {"microbatches": 2, **how}, tmp_path, real=True)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mesh", "how", "dropped"),
    [
        ("dp=2,ep=2", {"expert_capacity": 1, "zero": 3, "microbatches": 2}, (1,)),
        ("ep=2,cp=2,tp=2", {"expert_capacity": 1.5, "zero": 1, "recompute": "full"}, (2,)),
        ("dp=2,tp=2", {"expert_capacity": 1, "experts": "ep=4@dp,tp"}, (1,)),
        ("dp=2,ep=2", {"expert_capacity": "0.75@microbatch"}, (12, 64)),
        pytest.param("pp=2,cp=2", {"expert_capacity": 1, "microbatches": 4}, (1,), marks=pytest.mark.slow),
        pytest.param("1", {"expert_capacity": "0.5"}, (1,), marks=pytest.mark.matrix),
    ],
)
def test_experts_drop_rows_beyond_their_capacity(
    mesh: str, how: dict[str, Any], dropped: tuple[int, ...], tmp_path: Path
) -> None:
    """The same ones on every mesh: those of the plain loop."""
    printed = _equals_a_plain_loop(mesh, how, tmp_path, *dropped)
    assert _metrics(tmp_path, 1)["dropped"] > 0 and "  dropped " in printed


@pytest.mark.parametrize(
    ("given", "how", "cause"),
    [
        ("1.25@rank", {}, "rank is not a scope that every mesh has"),
        ("0", {}, "not a positive number"),
        ("much", {}, "not a positive number"),
        ("1@microbatch", {"microbatches": 2}, "parts of one batch"),
        ("1", {"model": "stack.py"}, "has no rows to bound"),
    ],
)
def test_capacities_that_cannot_be_kept_are_refused(given: str, how: dict[str, Any], cause: str) -> None:
    model = MOE.with_name(how.pop("model", MOE.name))
    with pytest.raises(PartcError, match=cause) as caught:
        partc.compile(model, mesh="dp=2", precision="fp64", expert_capacity=given, **how)
    assert caught.value.code == "P0109"


def test_a_package_that_drops_rows_is_not_compared_with_the_model(tmp_path: Path) -> None:
    build = partc.compile(MOE, mesh="1", precision="fp64", expert_capacity=1).write(tmp_path / "build")
    with pytest.raises(PartcError, match="whose experts take all rows") as caught:
        verify(build, virtual=True)
    assert caught.value.code == "P0109"


@pytest.mark.parametrize(
    ("model", "mesh", "experts", "cause"),
    [
        ("stack.py", "ep=2", None, "no experts in a form"),
        ("stack.py", "dp=2,tp=2", "ep=2@tp", "no experts in a form"),
        ("stack.py", "tp=4", "ep=2@tp", "no experts in a form"),
        ("moe.py", "ep=3,dp=2", None, "8 experts do not divide over ep=3"),
        ("moe.py", "dp=4,tp=4", "ep=16@dp,tp", "8 experts do not divide over ep=4, tp=4"),
    ],
)
def test_models_without_experts_for_it_are_refused(model: str, mesh: str, experts: str | None, cause: str) -> None:
    with pytest.raises(PartcError, match=cause) as caught:
        partc.compile(MOE.with_name(model), mesh=mesh, precision="fp64", experts=experts, options={"batch": "24"})
    assert caught.value.code == "P0107"


class Mixing(nn.Module):
    """Experts whose weights are read otherwise too."""

    def __init__(self, uses: str) -> None:
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.up, self.down = (nn.Parameter(torch.randn(4, 6, 6)) for _ in range(2))
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        order = chosen.sort()
        ends = torch.cumsum(torch.histc(order.values.float(), 4, 0, 3), 0, dtype=torch.int32)
        hidden = torch._grouped_mm(x[order.indices], self.up, offs=ends)
        out = torch._grouped_mm(hidden, self.down.flip(0) if self.uses == "flip" else self.down, offs=ends)
        back = torch.empty_like(order.indices)
        back[order.indices] = torch.arange(len(back))
        return out[back].square().mean() + (self.up.square().sum() if self.uses == "norm" else 0)


class Shared(nn.Module):
    """Two layers with routers of their own, and the same experts in modules."""

    def __init__(self) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(6, 2) for _ in range(2))
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for router in self.routers:
            chosen, out = router(x).argmax(-1), torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                here = torch.where(chosen == number)[0]
                out.index_add_(0, here, expert(x[here]))
            x = x + out
        return x.square().mean()


class Sums(nn.Module):
    """Sums that are no mixtures: of products with a tensor and with numbers, and of least values along dimensions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.least = nn.Linear(6, 8), kind == "least"

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.least:
            return (h.min(0).values + h.min(1).values).square().mean()
        return (h * h + h * 2 + h * 3).square().mean()


def products() -> nn.Module:
    return Sums("products")


def least() -> nn.Module:
    return Sums("least")


def summing() -> nn.Module:
    return Mixing("norm")


def flipping() -> nn.Module:
    return Mixing("flip")


@pytest.mark.parametrize(
    ("model", "cause"),
    [
        (summing, "reads up as well"),
        (flipping, "not a parameter with a dimension"),
        (Shared, "not a parameter with a dimension"),
        (products, "no experts in a form"),
        (least, "no experts in a form"),
    ],
)
def test_experts_that_cannot_be_cut_are_refused(model: Any, cause: str) -> None:
    with pytest.raises(PartcError, match=cause) as caught:
        partc.compile(model, {"x": torch.randn(8, 6)}, mesh="ep=2", precision="fp64")
    assert caught.value.code == "P0107"


def test_pins_reach_experts() -> None:
    how: dict[str, Any] = {"mesh": "dp=2,tp=2", "experts": "ep=4@dp,tp", "precision": "fp64"}
    partc.compile(MOE, **how, shard=["*.up=[@ep,tp, _, _]"])
    with pytest.raises(PartcError, match="ep cuts it by experts") as caught:
        partc.compile(MOE, **how, shard=["*.up=[_, @ep, _]"])
    assert caught.value.code == "P0302"


def test_explanations_tell_where_experts_are(capsys: pytest.CaptureFixture[str]) -> None:
    """32 rows of 16 numbers of 8 bytes leave a rank, of which half stay."""
    how = ["--mesh", "dp=2,tp=2", "--experts", "ep=4@dp,tp", "--precision", "fp64"]
    assert main(["inspect", str(LOOPS), *how, "--explain", "mixtures.0.experts.1.up.weight"]) == 0
    found = capsys.readouterr().out.splitlines()
    assert "mixtures.0.experts.*.up.weight is f64[4@ep,tp, 24, 16]: a rank has 1 of 4 experts" in found[3]
    assert found[4:] == [f"  rows come over {axis}: 2.0 KiB in each microbatch" for axis in ("ep", "tp")]


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", ["ep=4", "ep=2,tp=2"])
def test_experts_without_rows_have_zero_gradients(mesh: str, tmp_path: Path) -> None:
    package = partc.compile(MOE, mesh=mesh, precision="fp64", options={"skew": "3"}, zero=2)
    assert verify(package.write(tmp_path / "build"), steps=2, virtual=True).ok


# Mistakes of peers (shared in their trackers), made in a package: the file, its text, and the text in its place.
MUTANTS = {
    "the norm leaves out experts": (
        "runtime/optimizer/gradients.py",
        "for name in names)",
        'for name in names if "up" not in name and "down" not in name)',
    ),
    "experts' gradients are multiplied by ep": (
        "runtime/ops/experts.py",
        "into[expert].addmm_(x[rows].mT, grad[rows])",
        "into[expert].addmm_(2 * x[rows].mT, grad[rows])",
    ),
    "experts' gradients are summed with those of other experts": (
        "runtime/ops/experts.py",
        "ends = _ends(experts, into.shape[0])",
        "ends = _ends(0 * experts, into.shape[0])",
    ),
    "a rank without rows skips the exchange": (
        "runtime/comm/comm.py",
        "        if (sum(going), sum(coming)) !=",
        "        if not sum(going):\n            return there(x)\n        if (sum(going), sum(coming)) !=",
    ),
    "rows are counted wrong": (
        "runtime/ops/experts.py",
        "counts = torch.stack((leaving, coming.flatten())).cpu()",
        "counts = torch.stack((leaving, coming.flatten())).cpu() + (axis.rank == 0)",
    ),
    "rows that come are counted wrong": (
        "runtime/comm/virtual.py",
        "every[source][target] for source in range(self.size)",
        "every[source][target][source:] for source in range(self.size)",
    ),
    "rows are returned to other places": (
        "runtime/ops/experts.py",
        "back.index_select(0, _inverse(order))",
        "back",
    ),
}


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package whose last rank has no rows, and the single-device run with it."""
    folder = tmp_path_factory.mktemp("mutants")
    package = partc.compile(MOE, mesh="dp=1,ep=4", precision="fp64", options={"skew": "3"}, kernels="aten")
    assert _verified(package.write(folder / "build"), folder)
    return folder


def _verified(build: Path, folder: Path) -> bool:
    try:
        return verify(build, arguments=["--clip", "0.01"], steps=1, virtual=True, reference=folder / "reference").ok
    except (PartcError, RunFailed):
        return False


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MUTANTS)
def test_mistakes_of_peers_are_found(mistake: str, skewed: Path, tmp_path: Path) -> None:
    name, text, instead = MUTANTS[mistake]
    build = Path(shutil.copytree(skewed / "build", tmp_path / "build"))
    before = (build / name).read_text()
    assert before.count(text) == 1
    (build / name).write_text(before.replace(text, instead))
    assert not _verified(build, skewed)


@pytest.mark.slow
def test_a_reduction_over_ep_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Experts whose gradients are summed over ep like dense ones."""
    held = experts_pass.expert_layout
    monkeypatch.setattr(
        experts_pass,
        "expert_layout",
        lambda type, *where: replace(held(type, *where), varying=type.layout.varying),  # type: ignore[type-var]
    )
    with pytest.raises(InternalError):
        partc.compile(MOE, mesh="dp=2,ep=2", precision="fp64")


@pytest.mark.slow
@pytest.mark.parametrize("model", [MOE, LOOPS])
def test_checkpoints_hold_experts_by_their_global_numbers(model: Path, tmp_path: Path) -> None:
    """A training goes on from ep to other cuts, and back, in the end on processes."""
    compiled = {
        mesh: partc.compile(model, mesh=mesh, precision="fp64", zero=zero).write(tmp_path / mesh)
        for mesh, zero in (("dp=2,ep=2", 1), ("ep=4,tp=2", 3), ("tp=2", 0))
    }
    trained(compiled["tp=2"], "--steps", 4, "--save", tmp_path / "whole")
    last, save = "", None
    for step, mesh in ((1, "dp=2,ep=2"), (2, "tp=2"), (3, "ep=4,tp=2"), (4, "dp=2,ep=2")):
        save = tmp_path / f"save {step}"
        given = ("--steps", step, "--save", save, *(("--resume", last) if last else ()))
        trained(compiled[mesh], *given, real=step == 4)
        last = str(save / f"step_{step:08d}")
    expected, found = whole(tmp_path / "whole" / "step_00000004"), whole(Path(last))
    own = {name for name, _ in (moe if model == MOE else loops).model().named_parameters()}
    assert expected.keys() == found.keys() >= own and not any("*" in name for name in found)
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-12)


def test_rows_move_the_bytes_of_the_formula() -> None:
    """T tokens of k experts, h wide: T k h b (1 - 1/ep) each way, forward and backward (Lepikhin et al. 2020, GShard)."""
    ep, dp, microbatches = 4, 2, 2
    package = partc.compile(MOE, mesh=f"dp={dp},ep={ep}", microbatches=microbatches, precision="fp64")
    region = next(region for region in package.program.regions if region.name == "layer")
    assert region.backward is not None
    tokens = 16 * 4 // (dp * ep * microbatches)
    expected = tokens * moe.CHOSEN * moe.WIDTH * 8 * (ep - 1) // ep
    for graph in (region.forward, region.backward):
        moved = {
            op.name: moved_bytes(op, region.types(graph), package.program.sizes)
            for op in graph.ops
            if op.name in ("dispatch", "combine")
        }
        assert moved == {"dispatch": expected, "combine": expected}
        products = [op for op in graph.ops if op.name.startswith("expert_matmul")]  # the rows are not sorted again
        assert products and all(dict(op.attrs).get("ordered") is True for op in products)


@pytest.mark.parametrize(("rows", "columns", "shift"), [(16, 24, 0), (12, 24, 0), (16, 12, 0), (16, 24, 4), (16, 1, 0)])
@pytest.mark.parametrize("turned", [False, True])
def test_torch_takes_the_matrices_that_go_to_its_kernel(rows: int, columns: int, shift: int, turned: bool) -> None:
    """torch's kernel for all experts refuses rows that do not start at multiples of 16 bytes."""
    w = torch.randn(4 * rows * columns + shift).bfloat16()[shift:].view(4, rows, columns)
    w = w.mT if turned else w
    x, ends = torch.randn(10, w.shape[1]).bfloat16(), torch.tensor([2, 5, 5, 10], dtype=torch.int32)
    fits = fits_grouped_product(x, w)
    assert fits == (columns == 24 and shift == 0 and (rows == 16 or turned))
    if fits:
        torch.nn.functional.grouped_mm(x, w, offs=ends)


@pytest.mark.parametrize(("rows", "columns", "turned"), [(16, 24, False), (12, 24, False), (16, 24, True)])
def test_torch_takes_the_rows_whose_products_are_gradients_of_weights(rows: int, columns: int, turned: bool) -> None:
    x, grad, ends = torch.randn(10, rows).bfloat16(), torch.randn(10, columns).bfloat16(), torch.tensor([2, 5, 5, 10])
    grad = grad.T.contiguous().T if turned else grad
    assert fits_grouped_product(x, grad) == (rows == 16 and not turned)
    if fits_grouped_product(x, grad):
        found = torch.nn.functional.grouped_mm(x.mT, grad, offs=ends.int())
        each = [x[start:end].mT @ grad[start:end] for start, end in pairwise((0, *ends.tolist()))]
        torch.testing.assert_close(found, torch.stack(each), rtol=0.02, atol=0.02)


class Sevens(nn.Module):
    """Sequences of seven tokens, each of which chooses one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 2)
        self.up = nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        score, chosen = self.router(tokens).softmax(-1).max(-1)
        return (torch.einsum("ti,tio->to", tokens, self.up[chosen]) * score[:, None]).square().mean()


@pytest.mark.slow
def test_rows_of_a_microbatch_that_the_ranks_do_not_divide() -> None:
    batch = {"x": torch.randn(4, 7, 4)}
    how: dict[str, Any] = {"mesh": "cp=2", "experts": "ep=2@cp", "precision": "fp64"}
    assert partc.compile(Sevens, batch, microbatches=2, **how).verify(steps=2).ok  # of two examples
    with pytest.raises(PartcError, match="their 7 rows of a microbatch") as refused:
        partc.compile(Sevens, batch, microbatches=4, **how)
    assert refused.value.code == "P0107" and refused.value.source is not None
