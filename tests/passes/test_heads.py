"""Attention heads that tp does not divide: key and value heads are repeated, query heads padded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partc
from partc.ir.parser import parse
from partc.ir.printer import print_program
from partc.ir.program import Program
from partc.rules import flops, resolve

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"


class Attention(nn.Module):
    """Grouped attention with a norm of queries; dropout and norms over all heads are options that forbid padding."""

    def __init__(self, heads: int, groups: int, *, size: int = 4, whole_norm: bool = False) -> None:
        super().__init__()
        self.size, width = size, heads * size
        self.wq = nn.Linear(width, heads * size)
        self.wk = nn.Linear(width, groups * size)
        self.wv = nn.Linear(width, groups * size)
        self.wo = nn.Linear(heads * size, width)
        self.before = nn.RMSNorm(width) if whole_norm else nn.Identity()
        self.norm = nn.LayerNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.before(self.wq(x)).view(batch, length, -1, self.size).transpose(1, 2)
        k = self.wk(x).view(batch, length, -1, self.size).transpose(1, 2)
        v = self.wv(x).view(batch, length, -1, self.size).transpose(1, 2)
        out = F.scaled_dot_product_attention(self.norm(q), k, v, is_causal=True, enable_gqa=True)
        return x + self.wo(out.transpose(1, 2).reshape(batch, length, -1))


def stack(depth: int = 2, heads: int = 8, groups: int = 2, size: int = 4, whole_norm: bool = False) -> nn.Module:
    return nn.Sequential(*(Attention(heads, groups, size=size, whole_norm=whole_norm) for _ in range(depth)))


def squared_error(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["target"])


def _compiled(heads: int, groups: int, mesh: str, *, length: int = 8, batch: int = 2, **more: Any) -> partc.Package:
    sizes = {key: more.pop(key) for key in ("size", "whole_norm", "depth") if key in more}
    width = heads * sizes.get("size", 4)
    entries = {"x": torch.randn(batch, length, width), "target": torch.randn(batch, length, width)}
    model = stack(heads=heads, groups=groups, **sizes)
    return partc.compile(model, entries, loss=squared_error, mesh=mesh, precision="fp64", **more)


def _work_of_a_rank(program: Program) -> float:
    """The multiplications and additions of one rank's forward products."""
    total = 0.0
    for call in program.calls:
        region = program.region(call.region)
        types = {name: type.local(program.sizes) for name, type in region.types(region.forward).items()}
        for op in region.forward.ops:
            local = [type.local(program.sizes) for type in (value.type for value in op.results)]
            rule = resolve(op, types)
            assert len(local) == len(op.results)
            total += flops(op, rule) if rule is not None else 0
    return total


def _work_of_megatron(heads: int, groups: int, ways: int, size: int, rows: int, length: int, depth: int) -> float:
    """The same for Megatron: a rank has heads / ways query heads, and at least one whole key and value head."""
    width, own, own_groups = heads * size, heads / ways, max(groups / ways, 1)
    projections = 2 * rows * length * width * size * (2 * own + 2 * own_groups)
    scores = 2 * 2 * rows * length * length * own * size / 2
    return depth * (projections + scores)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("heads", "groups", "mesh"),
    [(8, 2, "tp=4"), (8, 2, "tp=8"), (8, 1, "dp=2,tp=2"), (12, 4, "tp=6"), (6, 2, "pp=2,tp=3")],
)
def test_few_key_heads_are_repeated_and_query_heads_cut(heads: int, groups: int, mesh: str) -> None:
    package = _compiled(heads, groups, mesh, length=24, microbatches=2 if "pp" in mesh else 1)
    program = package.program
    ways = program.sizes["tp"]
    for region in program.regions:
        for op in region.forward.ops:
            if op.name == "attention":
                cut = [type.layout.local_shape(program.sizes)[1] for type in _operands(program, region.name, op.args)]
                assert cut[0] == heads // ways and cut[1] == cut[2] <= cut[0]
    assert not any(parameter.holds for parameter in program.parameters)
    rows = 2 // program.sizes.get("dp", 1) // program.microbatches
    ours = _work_of_a_rank(program)
    assert ours <= 1.05 * _work_of_megatron(heads, groups, ways, 4, rows, 24, 2)
    result = package.verify()
    assert result.ok and result.worst is not None and result.worst.rel_err < 1e-10, result.worst


def _operands(program: Program, region: str, args: Any) -> list[Any]:
    types = program.region(region).types(program.region(region).forward)
    return [types[arg.name] for arg in args[:3]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "groups", "mesh", "zero"),
    [(14, 2, "tp=4", 0), (5, 5, "tp=4", 0), (3, 3, "dp=2,tp=2", 3), (2, 2, "tp=4", 0), (6, 3, "pp=2,tp=4", 0)],
)
def test_heads_that_do_not_divide_are_padded(heads: int, groups: int, mesh: str, zero: int) -> None:
    package = _compiled(heads, groups, mesh, zero=zero, microbatches=2 if "pp" in mesh else 1)
    program = package.program
    ways = program.sizes["tp"]
    whole = -(-heads // ways) * ways * 4
    wide = {
        parameter.name: (parameter.holds, parameter.type.shape) for parameter in program.parameters if parameter.holds
    }
    assert wide["0.wq.weight"] == ((heads * 4, heads * 4), (whole, heads * 4))
    assert wide["1.wo.weight"] == ((heads * 4, heads * 4), (heads * 4, whole))
    assert wide["0.wq.bias"] == ((heads * 4,), (whole,))
    assert ("0.wv.weight" in wide) == (heads == groups)
    assert not package.report["replicated_ops"]
    result = package.verify(steps=3)
    assert result.ok and result.worst is not None and result.worst.rel_err < 1e-10, result.worst
    text = print_program(program)
    assert print_program(parse(text)) == text


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "mesh", "more"), [(3, "tp=8", {}), (3, "tp=2", {"whole_norm": True})])
def test_heads_stay_as_they_are_where_padding_costs_too_much_or_changes_results(
    heads: int, mesh: str, more: dict[str, Any]
) -> None:
    package = _compiled(heads, heads, mesh, **more)
    assert not any(parameter.holds for parameter in package.program.parameters)
    result = package.verify()
    assert result.ok and result.worst is not None and result.worst.rel_err < 1e-10, result.worst


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp=4", "cp=4"])
def test_kernels_rotate_heads_that_are_cut(mesh: str) -> None:
    """Two key heads on four ranks: over tp each rank rotates half of one, a quarter of its pairs at a time."""
    package = partc.compile(GPT, mesh=mesh, kernels="triton", precision="fp64", options={"depth": 1, "batch": 2})
    found = package.verify(steps=1)
    assert found.ok and found.worst.rel_err < 1e-10, found.worst


class Padded(nn.Module):
    """Attention with copied key heads. Each layer makes the mask of the batch's lengths anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 16) for _ in range(2))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        for layer in self.layers:
            q, k, v = (each.unflatten(2, (-1, 4)).transpose(1, 2) for each in layer(x).split([8, 4, 4], 2))
            k, v = (each.repeat_interleave(2, 1) for each in (k, v))
            seen = torch.arange(x.shape[1]) < lengths[:, None, None, None]
            weights = (q @ k.transpose(2, 3)).masked_fill(~seen, float("-inf")).softmax(3)
            x = x + (weights @ v).transpose(1, 2).flatten(2)
        return x.square().mean()


@pytest.mark.slow
def test_copied_heads_are_grouped_and_a_batch_has_one_mask() -> None:
    batch = {"x": torch.randn(8, 6, 8), "lengths": torch.randint(1, 7, (8,))}
    package = partc.compile(Padded, batch, mesh="pp=2,dp=2", microbatches=2, precision="fp64")
    ops = [(op, region) for region in package.program.regions for op in region.forward.ops]
    for op, region in ops:
        if op.name == "attention":
            shapes = [region.types(region.forward)[name].shape[1] for name in op.refs()]
            assert shapes == [2, 1, 1, 1]
    assert sum(op.name == "where" for op, _ in ops) == 1
    assert package.verify(steps=1).ok
