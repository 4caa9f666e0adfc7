"""Vocabularies that tp does not divide are padded inside the package, and have the model's size outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.compilation.phase_notes import padding_sentences
from partc.ir.parser import parse
from partc.ir.printer import print_program
from partc.package.verify import verify
from partc.runtime.layout import Shard
from tests.zoo import MODELS, Model


def _gpt2(vocabulary: int, **more: object) -> Model:
    known = MODELS["gpt2"]
    return Model(name="gpt2", config={**known.config, "vocab_size": vocabulary, **more}, options=known.options)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "microbatches"), [("tp=8", 1), ("pp=2,tp=3", 2), ("2x2x2", 4)])
def test_odd_vocabularies_equal_one_device(mesh: str, microbatches: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = _gpt2(97)
    package = partc.compile(
        model.source(tmp_path), mesh=mesh, microbatches=microbatches, precision="fp64", options=model.options
    )
    package.write(tmp_path / "build")
    result = verify(tmp_path / "build", steps=3, virtual=True)
    assert result.ok, result.worst
    tied = package.program.parameter("transformer.wte.weight")
    ways = package.program.mesh.axis("tp")
    assert tied.holds == (97, 32) and tied.type.shape == (-(-97 // ways) * ways, 32)
    assert tied.type.layout.sharded_axes == ("tp",)


def test_fifty_thousand_tokens_on_eight_ranks_are_never_gathered(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = _gpt2(50_257, n_embd=64, n_head=8)
    package = partc.compile(model.source(tmp_path), mesh="tp=8", options=model.options)
    assert package.program.parameter("transformer.wte.weight").type.shape == (50_264, 64)
    assert package.report["padded"] == {"transformer.wte.weight": [[50_257, 64], [50_264, 64]]}
    head = package.program.region("head")
    sizes = package.program.sizes
    for graph in head.graphs:
        for op in graph.ops:
            if op.name in ("all_gather", "all_reduce", "all_to_all"):
                assert all(50_264 // 8 not in value.type.layout.local_shape(sizes) for value in op.results)


class Tagger(nn.Module):
    """Its loss reads the classes in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 13)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(x).transpose(1, 2), labels)


def test_classes_in_the_second_dimension_are_padded() -> None:
    batch = {"x": torch.randn(4, 5, 6), "labels": torch.randint(13, (4, 5))}
    package = partc.compile(Tagger, batch, mesh="tp=2", precision="fp64")
    assert package.program.parameter("head.weight").holds == (13, 6)
    assert package.verify().ok


class Classifier(nn.Module):
    """Its logits are read by a loss, and as they are by a penalty."""

    def __init__(self, *, penalised: bool) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, 13)
        self.penalised = penalised

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = 5 * torch.tanh(self.head(self.body(x).relu()) / 5)
        loss = nn.functional.cross_entropy(logits, labels)
        return loss + 0.01 * logits.logsumexp(-1).square().mean() if self.penalised else loss


def plain_classifier() -> nn.Module:
    return Classifier(penalised=False)


def penalised_classifier() -> nn.Module:
    return Classifier(penalised=True)


@pytest.mark.sampled
@pytest.mark.parametrize("build", [plain_classifier, penalised_classifier])
@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "2x2"])
def test_heads_with_bias_and_other_readers(build: object, mesh: str) -> None:
    batch = {"x": torch.randn(8, 6), "labels": torch.randint(13, (8,))}
    package = partc.compile(build, batch, mesh=mesh, precision="fp64")
    assert {p.name for p in package.program.parameters if p.holds} == {"head.weight", "head.bias"}
    result = package.verify()
    assert result.ok, result.worst
    text = print_program(package.program)
    assert "holds(13)" in text and print_program(parse(text)) == text


class TiedClassifier(nn.Module):
    """The table and the head are one parameter, read twice in one region; the table is looked up twice."""

    def __init__(self, vocabulary: int = 13) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, 8)
        self.head = nn.Linear(8, vocabulary)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.table(x) + self.table(labels).cos().roll(1, 1)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "2x2"])
def test_a_table_read_twice_in_one_region(mesh: str) -> None:
    batch = {"x": torch.randint(13, (8, 5)), "labels": torch.randint(13, (8, 5))}
    package = partc.compile(TiedClassifier, batch, mesh=mesh, precision="fp64")
    assert package.program.parameter("table.weight").type.layout.sharded_axes == ("tp",)
    result = package.verify()
    assert result.ok, result.worst


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "precision", "more"),
    [("1", "bf16", {}), ("dp=2", "fp64", {}), ("tp=2", "fp64", {}), ("tp=3", "fp64", {"loss_chunks": 3})],
)
def test_triton_kernels_read_rows_of_logits_in_whole_lines(mesh: str, precision: str, more: Any) -> None:
    batch = {"x": torch.randint(2053, (6, 5)), "labels": torch.randint(2053, (6, 5))}
    package = partc.compile(_tied, batch, mesh=mesh, precision=precision, kernels="triton", **more)
    ways = package.program.sizes.get("tp", 1)
    held = package.program.parameter("table.weight").type.shape[0]
    assert held % (64 * ways) == 0 and 2053 < held < 2053 + 64 * ways
    result = package.verify(steps=2)
    assert result.ok, result.worst
    text = print_program(package.program)
    assert ("mask_classes(" in text) and print_program(parse(text)) == text


def _tied() -> nn.Module:
    return TiedClassifier(2053)


def test_heads_of_few_classes_and_tables_alone_are_not_filled_up_to_lines() -> None:
    batch = {"x": torch.randn(8, 6), "labels": torch.randint(13, (8,))}
    program = partc.compile(plain_classifier, batch, mesh="1", kernels="triton").program
    assert not [parameter for parameter in program.parameters if parameter.holds]
    program = partc.compile(Looked, {"x": torch.randint(2053, (6, 5))}, mesh="1", kernels="triton").program
    assert not [parameter for parameter in program.parameters if parameter.holds]


class Looked(nn.Module):
    """A table that nothing multiplies with."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2053, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).square().mean()


def test_smoothed_losses_and_divisible_vocabularies_are_left_alone() -> None:
    batch = {"x": torch.randn(8, 6), "labels": torch.randint(13, (8,))}
    for mesh in ("1", "2", "tp=13"):
        program = partc.compile(plain_classifier, batch, mesh=mesh).program
        assert not [parameter for parameter in program.parameters if parameter.holds]


def test_shards_of_padded_parameters_end_in_zeros() -> None:
    shard = Shard("f32[6@tp, 2]", holds=(5, 2))
    whole = torch.arange(1.0, 11.0).reshape(5, 2)
    assert torch.equal(shard.local(whole, {"tp": 2}, {"tp": 0}), whole[:3])
    assert torch.equal(shard.local(whole, {"tp": 2}, {"tp": 1}), torch.cat([whole[3:], torch.zeros(1, 2)]))


def test_equal_paddings_of_layers_are_one_sentence() -> None:
    layers = {f"blocks.{i}.wq.weight": ([6, 4], [8, 4]) for i in range(3)}
    lines = list(padding_sentences({**layers, "head.0": ([5], [8])}))
    heads = [line.partition(", to be")[0] for line in lines]
    assert heads == ["`blocks.*.wq.weight` is held as [8, 4] for its [6, 4]", "`head.0` is held as [8] for its [5]"]
