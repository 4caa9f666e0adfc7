"""Losses that balance experts, on meshes that cut the tokens that they count."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import partc
from partc.errors import PartcError
from partc.frontend.gradients import own_functions
from partc.ir.parser import parse
from partc.ir.printer import print_program
from partc.package.verify import verify
from tests.durable import trained, whole
from tests.end_to_end.test_peer_bugs import change
from tests.models import balanced
from tests.pairwise import Row

BALANCED = Path(__file__).parents[1] / "models" / "balanced.py"
BY_SEQUENCE = "sequence+attached sequence+sigmoid+z"
BY_BATCH = "switch+attached switch+bincount+weighted+importance"


def _compiled(kinds: str, options: Row) -> Any:
    return partc.compile(str(BALANCED), precision="fp64", options={"kinds": kinds}, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"mesh": "pp=2,dp=2", "microbatches": 4, "recompute": "full"},
        {"mesh": "dp=2,ep=2", "microbatches": 2, "zero": 3},
        pytest.param({"mesh": "tp=2,cp=2", "zero": 1}, marks=pytest.mark.slow),
        pytest.param({"mesh": "pp=2,ep=2,tp=2", "microbatches": 2, "schedule": "zbv"}, marks=pytest.mark.slow),
    ],
)
def test_losses_by_sequence_are_those_of_the_whole_batch(options: Row, tmp_path: Path) -> None:
    package = _compiled(BY_SEQUENCE, options)
    assert not package.program.separate_batches and not package.warnings
    assert verify(package.write(tmp_path / "build"), steps=2, virtual=True).ok


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"mesh": "dp=2,ep=2"},
        {"mesh": "pp=2,dp=2", "microbatches": 2, "recompute": "full"},
        pytest.param({"mesh": "tp=2,cp=2", "zero": 1}, marks=pytest.mark.slow),
        pytest.param({"mesh": "dp=2,ep=2,tp=2", "microbatches": 2, "zero": 3}, marks=pytest.mark.slow),
    ],
)
def test_losses_by_batch_are_those_of_all_ranks_and_of_each_microbatch(options: Row, tmp_path: Path) -> None:
    package = _compiled(BY_BATCH, options)
    assert package.program.separate_batches == bool(package.warnings) == ("microbatches" in options)
    assert verify(package.write(tmp_path / "build"), steps=2, virtual=True).ok


def _stepped(kinds: str, parts: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights of a model, and its weights after a step against the mean loss of `parts` batches; attached losses are terms."""
    torch.manual_seed(0)
    model = balanced.model(kinds.replace("attached ", "")).double()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    cut = {name: x.chunk(parts) for name, x in balanced.data(0).items()}
    losses = [model(x.double(), labels) for x, labels in zip(*cut.values(), strict=True)]
    torch.stack(losses).mean().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return before, {name: x.detach() for name, x in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize(("kinds", "microbatches"), [("attached sequence", 2), ("attached switch", 4)])
def test_attached_losses_count_as_terms_of_the_loss(kinds: str, microbatches: int, tmp_path: Path) -> None:
    before, after = _stepped(kinds, microbatches if kinds == "attached switch" else 1)
    save_file(before, tmp_path / "init.safetensors")
    build = _compiled(kinds, {"mesh": "dp=2", "microbatches": microbatches}).write(tmp_path / "build")
    given = ("--steps", 1, "--optimizer", "sgd", "--lr", 1, "--init", tmp_path / "init.safetensors")
    trained(build, *given, "--save", tmp_path / "save")
    found = whole(tmp_path / "save" / "step_00000001")
    for name, x in after.items():
        torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-12)


def test_fp16_scales_attached_losses(tmp_path: Path) -> None:
    """Their share of the router's gradient is that of the model in fp64, to fp16's precision."""
    before, after = _stepped("attached sequence", 1)
    _, without = _stepped("z", 1)
    save_file({name: x.float() for name, x in before.items()}, tmp_path / "init.safetensors")
    package = partc.compile(
        str(BALANCED), mesh="dp=2", precision="fp16", microbatches=2, options={"kinds": "attached sequence"}
    )
    given = ("--steps", 1, "--optimizer", "sgd", "--lr", 1, "--init", tmp_path / "init.safetensors")
    trained(package.write(tmp_path / "build"), *given, "--save", tmp_path / "save")
    found = whole(tmp_path / "save" / "step_00000001")
    name = "layers.1.router.weight"
    moved, expected = found[name].double() - before[name], after[name] - before[name]
    assert (moved - expected).norm() < 0.02 * expected.norm()
    assert (without[name] - after[name]).norm() > 0.05 * expected.norm()


# Mistakes of peers, made in a package: losses whose gradient depends on the mesh.
MUTANTS = {
    "the load is that of a rank": (
        "layer",
        "comm.dp.start_all_reduce_(sum_2_and_sum_3_partial)",
        "comm.mb.start_all_reduce_(sum_2_and_sum_3_partial)",
    ),
    "an attached loss counts twice": ("constants", "torch.full((), 1,", "torch.full((), 2,"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_not_the_single_device_model(name: str, tmp_path: Path) -> None:
    build = _compiled("switch+attached sequence", {"mesh": "dp=2"}).write(tmp_path / "build")
    assert verify(build, steps=1, virtual=True, reference=tmp_path / "reference").ok
    file, line, becomes = MUTANTS[name]
    change(build / "regions" / f"{file}.py", line, becomes)
    assert not verify(build, steps=1, virtual=True, reference=tmp_path / "reference").ok


# The second time, of values with few bits.
AGAIN = {
    "with other scales": ("saved.x.to(torch.bfloat16)", "(saved.x / 3).to(torch.bfloat16) * 3"),
    "with other numbers of rows": ("functional.route(chosen_2,", "functional.route(0 * chosen_2,"),
}


@pytest.mark.slow
def test_recomputation_sees_the_scales_and_shapes_of_the_first_time(tmp_path: Path) -> None:
    """In bf16, packages with and without recomputation train to the same bits; two mutants do not."""

    def weights(build: Path) -> dict[str, Tensor]:
        trained(build, "--steps", 1, "--lr", 1, "--optimizer", "sgd", "--save", build / "save")
        return whole(build / "save" / "step_00000001")

    def same(found: dict[str, Tensor]) -> bool:
        return all(torch.equal(found[name], x) for name, x in once.items())

    kept, build = (
        partc.compile(str(BALANCED), mesh="ep=2", precision="bf16", options={"kinds": "z"}, recompute=recompute).write(
            tmp_path / recompute
        )
        for recompute in ("none", "full")
    )
    once = weights(kept)
    assert same(weights(build))
    for mistake, (text, becomes) in AGAIN.items():
        mutant = Path(shutil.copytree(build, tmp_path / mistake, ignore=shutil.ignore_patterns("save")))
        region = mutant / "regions" / "layer.py"
        forward, name, backward = region.read_text().partition("def layer_backward")
        assert backward.count(text) == 1
        region.write_text(forward + name + backward.replace(text, becomes))
        assert not same(weights(mutant)), mistake


@pytest.mark.slow
def test_an_attached_loss_does_not_grow_with_the_microbatches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(own_functions, "fitted_gradient", lambda gradient, x, parts: gradient.detach())
    package = _compiled("attached switch", {"mesh": "1", "microbatches": 2})
    assert not verify(package.write(tmp_path / "build"), steps=1, virtual=True).ok


RATE = 0.02


def _biased(options: Row) -> Any:
    return partc.compile(str(BALANCED), precision="fp64", options={"kinds": "bias+z"}, router_bias_rate=RATE, **options)


@pytest.mark.parametrize(
    ("options", "accumulate"),
    [
        ({"mesh": "dp=2,ep=2", "microbatches": 2, "recompute": "full", "zero": 3}, 1),
        pytest.param({"mesh": "pp=2,tp=2", "microbatches": 4, "schedule": "zero-bubble"}, 3, marks=pytest.mark.slow),
    ],
)
def test_biases_follow_the_load_of_a_step(options: Row, accumulate: int, tmp_path: Path) -> None:
    """Against a plain loop that counts by hooks. Loads are not part of the norm by which gradients are clipped."""
    torch.manual_seed(0)
    model = balanced.model("bias+z").double()
    save_file({name: x.clone() for name, x in model.state_dict().items()}, tmp_path / "init.safetensors")
    loads = [torch.zeros(balanced.EXPERTS, dtype=torch.int64) for _ in model.layers]  # type: ignore[union-attr]
    for layer, load in zip(model.layers, loads, strict=True):  # type: ignore[arg-type]

        def count(module: Any, given: Any, logits: Tensor, layer: Any = layer, load: Tensor = load) -> None:
            scores = logits.softmax(-1) + layer.bias
            load += torch.bincount(scores.topk(balanced.CHOSEN, -1).indices.flatten(), minlength=len(load))

        layer.router.register_forward_hook(count)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    spread: list[dict[str, float]] = []
    for step in range(3):
        optimizer.zero_grad()
        for number in range(step * accumulate, (step + 1) * accumulate):
            x, labels = balanced.data(number).values()
            (model(x.double(), labels) / accumulate).backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
        optimizer.step()
        spread.append({})
        for number, load in enumerate(loads):
            spread[-1] |= {f"load/layers.{number}/largest": float(max(load) / (sum(load) / len(load)))}
            spread[-1] |= {f"load/layers.{number}/empty": float((load == 0).sum() / len(load))}
        for layer, load in zip(model.layers, loads, strict=True):  # type: ignore[arg-type]
            layer.bias += RATE * (load.sum() / len(load) - load).sign().double()
            load.zero_()
    given = ("--optimizer", "sgd", "--lr", 1, "--clip", 0.1, "--accumulate", accumulate)
    package = _biased(options)
    assert parse(print_program(package.program)).parameters == package.program.parameters
    build, save = package.write(tmp_path / "build"), tmp_path / "save"
    metrics = tmp_path / "metrics.jsonl"
    trained(build, "--steps", 3, *given, "--init", tmp_path / "init.safetensors", "--save", save, "--metrics", metrics)
    for line, expected in zip(metrics.read_text().splitlines(), spread, strict=True):
        logged = json.loads(line)
        assert {name: logged[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    found = whole(save / "step_00000003")
    for name, x in model.state_dict().items():
        torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-12)
    assert found["layers.1.bias"].abs().sum() > 0


@pytest.mark.parametrize("kinds", ["z", "own bias"])
def test_models_without_a_bias_to_move_are_refused(kinds: str) -> None:
    with pytest.raises(PartcError) as caught:
        partc.compile(str(BALANCED), mesh="1", options={"kinds": kinds}, router_bias_rate=RATE)
    assert caught.value.code == "P0108"


@pytest.mark.parametrize("rounded", [{"grad_reduce": "bf16"}, {"compress_grads": "int8", "nodes": 1}])
def test_rounded_sums_of_loads_are_refused(rounded: Row) -> None:
    with pytest.raises(PartcError, match="round the counts") as caught:
        partc.compile(str(BALANCED), mesh="2", options={"kinds": "bias"}, router_bias_rate=RATE, **rounded)
    assert caught.value.code == "P0108"


LOADS = "g.bias.add_(torch.ops.aten.histc.default("
BIASED = {
    "recomputation counts rows twice": ("regions/layer.py", LOADS, "g.bias.add_(2 * torch.ops.aten.histc.default("),
    "padding is counted": ("regions/layer.py", LOADS, "g.bias.add_(torch.eye(4)[0] + torch.ops.aten.histc.default("),
    "loads are part of the norm": ("runtime/train/training.py", "if name not in job.balance", ""),
    "the bias moves towards full experts": ("runtime/optimizer/balance.py", "load.mean() - load", "load - load.mean()"),
}


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("biased")
    build = _biased({"mesh": "dp=2", "recompute": "full"}).write(folder / "build")
    assert verify(build, steps=2, virtual=True, reference=folder / "reference").ok
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", BIASED)
def test_a_mutant_moves_biases_otherwise(name: str, biased: Path, tmp_path: Path) -> None:
    build = Path(shutil.copytree(biased / "build", tmp_path / "build"))
    file, line, becomes = BIASED[name]
    change(build / file, line, becomes)
    assert not verify(build, steps=2, virtual=True, reference=biased / "reference").ok
