"""Layouts: the pass finds Megatron's pattern on small and large models; pins take precedence; choices are explained."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import partc
from partc.api import compilation
from partc.compilation.options import Options
from partc.errors import PartcError
from partc.ir.program import Program, Region
from partc.passes.annotate import explain
from partc.sharding import placements
from tests.zoo import MODELS

EXAMPLES = Path(__file__).parents[2] / "examples"


def _compiled(
    example: str, mesh: str, *, shard: tuple[str, ...] = (), microbatches: int = 1, **options: object
) -> Program:
    return partc.compile(
        EXAMPLES / f"{example}.py", mesh=mesh, microbatches=microbatches, shard=shard, options=options
    ).program


def _moves(region: Region) -> tuple[list[str], list[str]]:
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    assert region.backward is not None
    found = ([op.name for op in graph.ops if op.name in names] for graph in (region.forward, region.backward))
    return tuple(found)  # type: ignore[return-value]


@pytest.mark.sampled
@pytest.mark.parametrize(("mesh", "size"), [("tp=2", "tiny"), ("2x2x2", "tiny"), ("2x4x8", "8b"), ("1x1x8", "70b")])
def test_a_transformer_block_is_cut_as_megatron_does(mesh: str, size: str) -> None:
    program = _compiled("gpt", mesh, size=size, batch=16)
    layouts = {p.name.removeprefix("blocks.0."): p.type.layout for p in program.parameters}
    for name in ("attn.wq", "attn.wk", "attn.wv", "mlp.gate", "mlp.up"):
        assert layouts[f"{name}.weight"].dims[0][0].axes == ("tp",), name
    for name in ("attn.wo", "mlp.down"):
        assert layouts[f"{name}.weight"].dims[1][0].axes == ("tp",), name
    for name in ("embed.weight", "head.weight"):
        assert layouts[name].dims[0][0].axes == ("tp",), name
    block = program.region("block")
    values = block.forward.definitions()
    for name in ("x", "norm1", "norm2"):
        assert values[name].type.layout.dims[1][0].axes == ("tp",), "norms are cut along the sequence"
    again = [] if size == "tiny" else ["all_gather"]  # of the operand, which long sequences don't save whole
    assert _moves(block) == (
        ["all_gather", "reduce_scatter", "all_gather", "reduce_scatter"],
        [*again, "all_gather", "reduce_scatter", *again, "all_gather", "reduce_scatter"],
    )


@pytest.mark.parametrize("mesh", ["tp=2", "2x2x2", "1x1x4"])
def test_a_block_moves_no_more_bytes_than_megatron(mesh: str) -> None:
    """Korthikanti et al. 2022, section 4.2.2: 4 all-gathers and 4 reduce-scatters of [b, s, h] a block."""
    program = _compiled("gpt", mesh)
    n = program.mesh.axis("tp")
    block = program.region("block")
    x = next(value.type.layout.without("tp") for value in block.forward.inputs if value.name == "x")
    megatron = 8 * math.prod(x.local_shape(program.sizes)) * 4 * (n - 1) / n
    sent = 0.0
    assert block.backward is not None
    for graph in (block.forward, block.backward):
        for op in graph.ops:
            if op.name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
                values = graph.definitions()
                size = math.prod(values[next(op.refs())].type.layout.local_shape(program.sizes)) * 4
                sent += (
                    size * (n - 1) if op.name == "all_gather" else size * (n - 1) / n * (1 + (op.name == "all_reduce"))
                )
    if n == 4:  # two key and value heads on four ranks: theirs are gathered on top
        assert sent <= megatron * 1.6
    else:
        assert sent <= megatron


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp=2", "tp=4"])
def test_results_of_experts_are_added_up_by_token_before_they_are_summed_over_ranks(mesh: str, tmp_path: Path) -> None:
    """One row for each token travels, not one for each of its experts, as in the dense layers."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["mixtral"].config))
    given = {"batch": 4, "seq": 16}
    how: dict[str, Any] = {"mesh": mesh, "microbatches": 2, "options": given}
    program = partc.compile(f"hf:{tmp_path / 'config.json'}", precision="bf16", **how).program
    (layer,) = {call.region for call in program.calls if call.name == "model.layers.0"}
    region, tokens = program.region(layer), given["batch"] * given["seq"]
    sent = [
        types[name].shape
        for graph in region.graphs
        for types in [region.types(graph)]
        for op in graph.ops
        if op.name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        for name in op.refs()
    ]
    assert sent and all(math.prod(shape) <= tokens * MODELS["mixtral"].config["hidden_size"] for shape in sent), sent
    package = partc.compile(f"hf:{tmp_path / 'config.json'}", precision="fp64", **how)
    result = package.verify(steps=2)
    assert result.ok and result.worst.rel_err < 1e-10, result.worst


def test_values_that_cp_cuts_between_calls_are_cut_by_tp_too() -> None:
    """The lookups of tokens read all positions; only the rank's own positions are summed over tp."""
    program = _compiled("gpt", "cp=2,tp=2", size="8b", depth=2)
    (x, *_) = program.region(program.calls_to("block")[0].region).forward.inputs
    assert {*x.type.layout.sharded_axes} == {"cp", "tp"} and not x.type.layout.partial, x


def test_logits_are_never_gathered() -> None:
    head = _compiled("gpt", "tp=2").region("head")
    logits = head.forward.definitions()["logits"].type
    assert logits.layout.dims[-1][-1].axes == ("tp",)
    assert head.backward is not None
    for graph in (head.forward, head.backward):
        for op in graph.ops:
            if op.name in ("all_gather", "all_reduce", "reduce_scatter", "all_to_all"):
                assert graph.definitions()[next(op.refs())].type.shape[-1:] != (256,), op


def test_a_row_parallel_bias_is_added_once_after_the_reduction() -> None:
    block = _compiled("mlp", "tp=2").region("block")
    order = [op.name for op in block.forward.ops]
    product = next(op for op in block.forward.ops if op.name == "linear" and "down.weight" in op.refs())
    assert product.result.type.layout.partial == ("tp",)
    reduced = next(i for i, op in enumerate(block.forward.ops) if product.result.name in op.refs())
    assert order[reduced] in ("reduce_scatter", "all_reduce")
    added = next(op for op in block.forward.ops if "down.bias" in op.refs())
    assert added.name == "add" and block.forward.ops.index(added) > reduced


def test_pins_win_and_change_what_is_explained() -> None:
    pinned = _compiled("gpt", "tp=2", shard=("*.mlp.up.weight=[_, _]",))
    assert pinned.parameter("blocks.2.mlp.up.weight").type.layout.sharded_axes == ()
    assert pinned.parameter("blocks.2.mlp.gate.weight").type.layout.sharded_axes == ("tp",)
    value = _compiled("gpt", "tp=2", shard=("block.norm1=[_, _, _]",))
    assert value.region("block").forward.definitions()["norm1"].type.layout.sharded_axes == ()


@pytest.mark.parametrize(
    ("pin", "code", "says"),
    [
        ("*.attn.wq.weight=[@tp @tp]", "P0301", "parse"),
        ("nothing.like.this=[@tp, _]", "P0303", "matches no"),
        ("*.attn.wk.weight=[3 * _@tp, _]", "P0302", "along dimension 0"),
        ("ids=[_, @tp]", "P0302", "legal"),
    ],
)
def test_pins_that_cannot_be_met_say_why(pin: str, code: str, says: str) -> None:
    with pytest.raises(PartcError) as error:
        _compiled("gpt", "tp=2", shard=(pin,))
    assert error.value.code == code
    assert says in str(error.value)


def test_explanations_order_the_alternatives_by_cost() -> None:
    options = Options.checked(mesh="tp=2", microbatches=1, schedule="1f1b", precision="fp32", seed=0, shard=())
    done = compilation(EXAMPLES / "gpt.py", None, options, model_options={}, until="batch")
    (found,) = explain(done.program, "blocks.1.attn.wo.weight")
    assert found.chosen.placement == "[_, @tp]"
    assert found.chosen.communication == 0.0
    assert {"[@tp, _]", "[_, _]"} <= {option.placement for option in found.others}
    whole = next(option for option in found.others if option.placement == "[_, _]")
    rows = next(option for option in found.others if option.placement == "[@tp, _]")
    assert whole.replicated_weights == 4 * 4 * 64 * 64  # of all four blocks, in bytes
    assert rows.communication + rows.repeated_bytes > 0
    costs = [(o.replicated_weights + o.repeated_flops, o.communication, o.repeated_bytes) for o in found.others]
    assert costs == sorted(costs)
    for unknown, close in (
        ("blocks.1.attn.wz.weight", "blocks.1.attn.wq.weight"),
        ("wo.weight", "blocks.0.attn.wo.weight"),
    ):
        with pytest.raises(PartcError, match="nothing is called") as raised:
            explain(done.program, unknown)
        assert close in str(raised.value.help)
    with pytest.raises(PartcError, match="nothing is called") as raised:
        explain(done.program, "zzz")
    assert "full name" in str(raised.value.help)


def test_the_time_does_not_grow_with_depth_or_ranks() -> None:
    small = _compiled("mlp", "1x2x2", depth=2)
    large = _compiled("mlp", "4x64x8", depth=48, batch=512)
    assert [r.name for r in small.regions] == [r.name for r in large.regions]


TABLES = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, rows, width):
        super().__init__()
        self.table, self.small = nn.Embedding(rows, 64), nn.Embedding(1000, 64)
        self.norm = nn.RMSNorm(64)
        self.up, self.middle, self.down = nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, 64)

    def forward(self, ids, few):
        x = self.table(ids) + self.small(few)
        return (x + self.down(self.middle(self.up(self.norm(x)).relu()).relu())).square().mean()


def model(rows: int = 1, width: int = 1):
    return Model(rows, width)


def batch():
    return {"ids": torch.zeros(64, 4096, dtype=torch.int64), "few": torch.zeros(64, 4096, dtype=torch.int64)}
"""


def test_a_large_table_is_cut_whatever_share_of_the_parameters_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of 256 MiB among 6.7 billion parameters; by its share alone every rank would hold it."""
    file = tmp_path / "tables.py"
    file.write_text(TABLES)
    options = Options.checked(mesh="tp=4", microbatches=1, schedule="1f1b", precision="fp32", seed=0, shard=())

    def layout() -> str:
        given = {"rows": 1 << 20, "width": 81_920}
        program = compilation(file, None, options, model_options=given, until="annotate").program
        return str({parameter.name: parameter.type.layout for parameter in program.parameters}["table.weight"])

    assert layout() == f"[{1 << 20}@tp, 64]"
    monkeypatch.setattr(placements, "LARGE_BYTES", math.inf)
    assert layout() == f"[{1 << 20}, 64]"


class _Scaled(torch.nn.Module):
    """Weights that are scaled before products read them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.empty(64, 16))
        self.down = torch.nn.Parameter(torch.empty(16, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        each = torch.nn.functional.linear(x, self.up / 2).relu()
        return torch.nn.functional.linear(each, self.down / 2).square().mean()


def test_weights_that_products_read_scaled_are_cut_for_any_number_of_microbatches() -> None:
    options = Options.checked(mesh="tp=2", microbatches=64, schedule="1f1b", precision="fp32", seed=0, shard=())
    batch = {"x": torch.zeros(64, 512, 16)}
    program = compilation(_Scaled(), batch, options, model_options={}, until="annotate").program
    cut = {p.name: any(sub.axes == ("tp",) for dim in p.type.layout.dims for sub in dim) for p in program.parameters}
    assert cut == {"up": True, "down": True}


class _Parallel(torch.nn.Module):
    """Attention and an MLP in parallel, as in GPT-J, GPT-NeoX and Phi: the outputs of both are added to x."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.qkv, self.o = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        self.up, self.down = torch.nn.Linear(32, 128), torch.nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(normed).chunk(3, -1))
        heads = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(heads.transpose(1, 2).flatten(2)) + self.down(self.up(normed).relu())


class _ParallelBlocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(64, 32)
        self.blocks = torch.nn.ModuleList(_Parallel() for _ in range(4))
        self.norm = torch.nn.LayerNorm(32)
        self.head = torch.nn.Linear(32, 64, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _parallel_blocks() -> torch.nn.Module:
    torch.manual_seed(0)
    return _ParallelBlocks()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=4"])
def test_parallel_branches_with_biases_are_reduced_together(mesh: str) -> None:
    batch = {"ids": torch.randint(64, (8, 64), generator=torch.Generator().manual_seed(1))}
    package = partc.compile(_parallel_blocks, batch, mesh=mesh, precision="fp64")
    (block,) = (region for region in package.program.regions if any(v.name == "down.weight" for v in region.params))
    assert _moves(block) == (["all_gather", "reduce_scatter"], ["all_gather", "reduce_scatter"])
    assert block.backward is not None
    wide = [op for op in block.backward.ops if op.name == "take" and len(op.result.type.shape) > 1]
    assert not wide, "a rank's part of a gathered gradient is the gradient that was gathered"
    products = [op for op in block.forward.ops if op.name == "linear"]
    assert [len(op.args) for op in products] == [3] * 4, "the kernels of the products add the biases"
    result = package.verify(steps=2)
    assert result.ok, result.worst


class _Modulated(torch.nn.Module):
    """A block of a diffusion transformer: one linear layer makes the scales, shifts and gates of a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(16, elementwise_affine=False) for _ in range(2))
        self.condition, self.mix = torch.nn.Linear(16, 6 * 16), torch.nn.Linear(16, 16)
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        made = self.condition(condition).unsqueeze(1).chunk(6, -1)
        x = x + made[2] * self.mix(self.norms[0](x) * (1 + made[1]) + made[0])
        return x + made[5] * self.down(self.up(self.norms[1](x) * (1 + made[4]) + made[3]).relu())


class _Blocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(_Modulated() for _ in range(2))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, condition)
        return x.square().mean()


def test_a_small_value_is_gathered_before_it_is_split() -> None:
    batch = {"x": torch.ones(4, 64, 16), "condition": torch.ones(4, 16)}
    program = partc.compile(_Blocks(), batch, mesh="tp=2").program
    [block] = [region for region in program.regions if len(program.calls_to(region.name)) == 2]
    sizes = {value.name: math.prod(value.type.shape) for value in block.forward.definitions().values()}
    sizes |= {value.name: math.prod(value.type.shape) for op in block.backward.ops for value in op.results}
    gathers = [op for op in block.forward.ops if op.name == "all_gather" and sizes[op.result.name] <= 4 * 6 * 16]
    sums = [op for op in block.backward.ops if op.name == "reduce_scatter" and sizes[op.result.name] <= 4 * 6 * 16]
    assert (len(gathers), len(sums)) == (1, 1)


class _Placed(torch.nn.Module):
    """Attention whose keys get projections of a table of positions, as in DeBERTa."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(64)
        self.q, self.k, self.v, self.o, self.place = (torch.nn.Linear(64, 64) for _ in range(5))

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        keys = self.k(normed) + self.place(table)
        q, k, v = (y.unflatten(-1, (4, 16)).transpose(1, 2) for y in (self.q(normed), keys, self.v(normed)))
        heads = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(heads.transpose(1, 2).flatten(2))


class _PlacedBlocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places = torch.nn.Parameter(torch.randn(8, 64))
        self.blocks = torch.nn.ModuleList(_Placed() for _ in range(4))
        self.up, self.down = torch.nn.Linear(64, 512), torch.nn.Linear(512, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.places)
        return self.down(self.up(x).relu()).square().mean()


def _placed_blocks() -> torch.nn.Module:
    torch.manual_seed(0)
    return _PlacedBlocks()


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=4"])
def test_a_small_table_that_weights_multiply_is_not_gathered_in_every_layer(mesh: str) -> None:
    package = partc.compile(_placed_blocks, {"x": torch.randn(8, 8, 64)}, mesh=mesh, precision="fp64")
    [block] = [region for region in package.program.regions if len(package.program.calls_to(region.name)) == 4]
    assert _moves(block) == (["all_reduce"], ["all_reduce"])
    layouts = {parameter.name: str(parameter.type.layout) for parameter in package.program.parameters}
    assert (layouts["places"], layouts["blocks.0.place.weight"]) == ("[8, 64]", "[64@tp, 64]")
    result = package.verify(steps=2)
    assert result.ok, result.worst


class _Coordinates(torch.nn.Module):
    """A bias for each place, computed from constant coordinates, as in Swin v2."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("coordinates", torch.linspace(-1, 1, 32).view(16, 2))
        self.up, self.down = torch.nn.Linear(2, 256), torch.nn.Linear(256, 16)
        self.mix = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.mix(x) + self.down(self.up(self.coordinates).relu())).square().mean()


def test_a_constant_that_weights_multiply_is_whole() -> None:
    program = partc.compile(_Coordinates(), {"x": torch.ones(8, 16, 16)}, mesh="tp=2").program
    layouts = {parameter.name: str(parameter.type.layout) for parameter in program.parameters}
    assert (layouts["coordinates"], layouts["up.weight"]) == ("[16, 2]", "[256@tp, 2]")
