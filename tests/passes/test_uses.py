"""Calls whose batch an axis of weights cuts (`--batch-over`): regions, layouts, and equality with the single device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.errors import PartcError
from partc.ir.mesh import Mesh
from partc.ir.parser import parse
from partc.ir.printer import print_program
from partc.passes.uses import uses
from partc.sharding.uses import BatchUse
from tests.independent.plain import Recipe
from tests.independent.trainings import MODELS, Setting, compared
from tests.prefork import shared

EXAMPLES = Path(__file__).parents[2] / "examples"
MIXED = [
    ("dp=1,tp=2", "tp=embed,blocks.0-1", {}),
    ("dp=2,tp=2", "tp=blocks.1-2", {"microbatches": 2, "zero": 3, "recompute": "selective"}),
    ("dp=2,tp=2", "tp=blocks.0,head", {"zero": 1}),
    ("pp=2,tp=2", "tp=blocks.0,blocks.3,head", {"microbatches": 2, "recompute": "full"}),
    ("pp=2,tp=2", "tp=blocks.1-2", {"microbatches": 4, "schedule": "zbv", "loss_chunks": 2}),
    ("tp_out=2,tp_in=2", "tp_out=embed,blocks.0-1; tp_in=blocks.1-2", {"zero": 2}),
    ("dp=2,cp=2", "cp=blocks.0-1", {"zero": 3}),
    ("dp=2,tp=2", "tp=*", {"zero": 2, "microbatches": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "batch_over", "options"),
    [pytest.param(*case, marks=() if index < 2 else (pytest.mark.matrix,)) for index, case in enumerate(MIXED)],
)
def test_mixed_uses_train_like_the_single_device(mesh: str, batch_over: str, options: dict[str, Any]) -> None:
    package = partc.compile(str(EXAMPLES / "gpt.py"), mesh=mesh, batch_over=batch_over, precision="fp64", **options)
    result = package.verify(steps=2)
    assert result.ok, result.worst


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize(
    ("model", "mesh", "batch_over", "options"),
    [
        ("frozen_parts", "dp=2,tp=2", "tp=head", {"zero": 3}),
        ("mixer", "dp=2,tp=2", "tp=embed,blocks.1-2", {"zero": 1, "microbatches": 2}),
    ],
)
def test_mixed_uses_end_where_a_plain_loop_ends(
    model: str, mesh: str, batch_over: str, options: dict[str, Any], tmp_path: Path
) -> None:
    recipe = Recipe(weight_decay=0.1, clip=0.5, accumulate=2)
    setting = Setting(mesh=mesh, options={**options, "batch_over": batch_over}, recipe=recipe)
    outcome = compared(MODELS / f"{model}.py", setting, tmp_path, shared())
    assert outcome.ok and not outcome.refused, outcome


class Tied(nn.Module):
    """Rows of one weight are looked up, and multiplied at the end; layers draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(24, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(x)))
        return nn.functional.cross_entropy(self.norm(x) @ self.words.weight.T, ids)


@pytest.mark.parametrize("batch_over", ["tp=embed", "tp=layers.0-1,head", "tp=head"])
def test_a_weight_may_have_both_uses(batch_over: str) -> None:
    given = {"ids": torch.randint(24, (8,))}
    package = partc.compile(Tied, given, mesh="dp=2,tp=2", batch_over=batch_over, precision="fp64", zero=1)
    result = package.verify(steps=2)
    assert result.ok, result.worst


def test_values_change_between_uses() -> None:
    """Each value that the other use reads changes once, and equal changes share a region."""
    program = parse(
        """
program net mesh tp=2 microbatches 1 loss loss
input x
value x: f32[8, 4]
value a: f32[8, 4]
value b: f32[8, 4]
value c: f32[8, 4]
value loss: f32[]
parameter w.0: f32[4, 4]
parameter w.1: f32[4, 4]
parameter w.2: f32[4, 4]
call layers.0 = layer(x, x; w.0) -> a
call layers.1 = layer(a, x; w.1) -> b
call layers.2 = layer(a, b; w.2) -> c
call end = end(c; ) -> loss

region layer phase microbatch:
  param w: f32[4, 4]
  forward:
    input x: f32[8, 4]
    input y: f32[8, 4]
    z = linear(x, w)  # f32[8, 4]
    s = add(z, y)  # f32[8, 4]
    return s

region end phase microbatch:
  forward:
    input c: f32[8, 4]
    loss = sum(c, (0, 1), False)  # f32[]
    return loss
"""
    )
    text = print_program(uses(program, batch_over=BatchUse.parse("tp=layers.1-2", program.mesh)))
    assert parse(text) == uses(program, batch_over=BatchUse.parse("tp=layers.1-2", program.mesh))
    assert [line for line in text.splitlines() if line.startswith(("call", "region"))] == [
        "call layers.0 = layer(x, x; w.0) -> a",
        "call change_a = change(a; ) -> a_changed",
        "call layers.1 = layer_batched(a_changed, x; w.1) -> b",
        "call layers.2 = layer_batched(a_changed, b; w.2) -> c",
        "call change_c = change_2(c; ) -> c_changed",
        "call end = end(c_changed; ) -> loss",
        "region layer phase microbatch:",
        "region layer_batched phase microbatch batch(tp):",
        "region end phase microbatch:",
        "region change phase microbatch:",
        "region change_2 phase microbatch:",
    ]


def test_ranges_of_calls() -> None:
    (use,) = BatchUse.parse("tp = head, model.layers.2-11.mlp", Mesh.parse("dp=2,tp=4"))
    names = ["head", "heads", "model.layers.2.mlp", "model.layers.11.mlp", "model.layers.12.mlp", "model.layers.1.mlp"]
    assert [name for name in names if use.matched(name)] == [names[0], names[2], names[3]]
    assert [use.axis for use in BatchUse.parse("tp=head", Mesh.parse("tp_out=2,tp_in=2"))] == ["tp_out", "tp_in"]


@pytest.mark.parametrize(
    ("mesh", "batch_over", "code"),
    [
        ("dp=4", "tp=embed", "P0305"),
        ("dp=2,tp=2", "dp=embed", "P0305"),
        ("tp=2", "embed", "P0305"),
        ("tp=2", "tp=embed,", "P0305"),
        ("tp=2", "tp=embed,nothing.*", "P0306"),
        ("dp=8,tp=4", "tp=embed", "P0401"),
    ],
)
def test_uses_that_do_not_fit_are_refused(mesh: str, batch_over: str, code: str) -> None:
    with pytest.raises(PartcError, match=code):
        partc.compile(str(EXAMPLES / "gpt.py"), mesh=mesh, batch_over=batch_over)


def test_a_pin_of_a_weight_whose_calls_cut_the_batch_is_refused() -> None:
    with pytest.raises(PartcError, match=r"P0302.* but --batch-over lets tp cut the batch in every call that reads it"):
        partc.compile(str(EXAMPLES / "gpt.py"), mesh="tp=2", batch_over="tp=blocks.*", shard=("*.up.weight=[@tp, _]",))


def test_weights_are_whole_where_the_batch_is_cut() -> None:
    program = partc.compile(
        str(EXAMPLES / "gpt.py"), mesh="dp=2,tp=2", batch_over="tp=embed,blocks.0-1", microbatches=2, zero=3
    ).program
    whole, cut = (program.parameter(f"blocks.{index}.mlp.up.weight") for index in (1, 2))
    assert (whole.gather, whole.reduce, cut.gather, cut.reduce) == (("dp", "tp"), (), ("dp",), ())
    regions = {region.name: region for region in program.regions}
    moving = {name: [op.name for op in region.forward.ops if dict(op.attrs).get("axis") == "tp"]
              for name, region in regions.items()}  # fmt: skip
    assert (moving["block_batched"], moving["change"]) == ([], ["all_to_all"])
    assert sorted(moving["block"]) == ["all_gather", "all_gather", "reduce_scatter", "reduce_scatter"]
