"""The axis cp cuts sequences and leaves weights whole; attention changes to a cut by heads and back."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import partc
from partc.cli import main
from partc.errors import PartcError
from partc.frontend.model_files.model_file import load
from partc.ir.attention import Attention
from partc.ir.collectives import collectives_of, cost
from partc.ir.layout import Shard
from partc.ir.mesh import Mesh
from partc.ir.program import Op, Program
from partc.package.verify import verify
from partc.runtime.positions import Positions, Stretch, Stretches
from tests.durable import trained, whole
from tests.zoo import MODELS, Model

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
MEGATRON = Path(__file__).parents[1] / "models" / "gpt.py"
SEQUENCES = Path(__file__).parents[1] / "models" / "sequences.py"
PACKED = Path(__file__).parents[1] / "models" / "packed.py"
COUNTING = """

def batch():
    tokens = torch.arange(16 * {length}).reshape(16, {length}) * 7 % 256
    return {{"ids": tokens[:, :-1], "labels": tokens[:, 1:]}}
"""


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the single-device models' runs are kept."""
    return tmp_path_factory.mktemp("references")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        ("cp=4", {"zero": 1}),
        ("dp=2,cp=2", {"zero": 3, "microbatches": 2, "recompute": "full"}),
        ("cp=2,tp=2", {"zero": 2, "microbatches": 2}),
        ("tp=2,cp=2", {"recompute": "selective"}),
        ("cp=2,tp=4", {"options": {"seq": "32"}}),
        ("pp=2,cp=2", {"schedule": "zero-bubble", "microbatches": 4, "zero": 1}),
        ("pp=2,dp=2,cp=2", {"schedule": "interleaved", "virtual_stages": 2, "microbatches": 4, "zero": 3}),
        ("cp=2,pp=2,tp=2", {"microbatches": 2, "loss_chunks": 4}),
        pytest.param("cp=2", {"options": {"seq": "33"}}, marks=pytest.mark.matrix),
    ],
)
def test_packages_equal_the_single_device(mesh: str, how: dict[str, Any], references: Path, tmp_path: Path) -> None:
    package = partc.compile(GPT, mesh=mesh, precision="fp64", **how)
    model = "-".join(["gpt", *how.get("options", {}).values()])
    found = verify(package.write(tmp_path / "build"), steps=2, virtual=True, reference=references / model)
    assert found.ok and found.worst.rel_err < 1e-10, found.worst
    assert not [item for item in package.replicated_ops if item.axis == "cp"]


def test_tensor_parallelism_cuts_the_parts_of_sequences_that_cp_gives_a_rank() -> None:
    """Four ranks cut neither of the two halves that cp takes its parts from."""
    options = {"heads": "4", "hidden": "64", "seq": "256", "batch": "2"}
    program = partc.compile(MEGATRON, mesh="cp=2,tp=4", options=options).program
    block = next(region for region in program.regions if region.name.startswith("block"))
    made = {value.name: str(value.type.layout) for op in block.forward.ops for value in op.results}
    assert made["norm1"] == made["norm2"] == "[2, 2 · 128@cp,tp, 64]"


RING = ("block.attention_heads=[_, _, @cp, _] ring",)
HEADS = ("block.attention_heads=[_, @cp, _, _]",)
RING_TP = ("block.attention_heads=[_, @tp, @cp, _] ring",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mesh", "how"),
    [
        ("causal 16", "cp=4,tp=3", {"shard": RING_TP, "zero": 2}),
        pytest.param("full 16", "cp=4", {"shard": RING, "recompute": "selective"}, marks=pytest.mark.matrix),
        ("window 16", "dp=2,cp=2", {"shard": RING, "zero": 3}),
        pytest.param("near 16", "pp=2,cp=4", {"shard": RING, "microbatches": 2}, marks=pytest.mark.matrix),
        ("alibi 16", "cp=4", {"shard": RING, "recompute": "full"}),
        pytest.param(
            "documents 14", "dp=2,cp=2", {"shard": RING, "microbatches": 2, "zero": 1}, marks=pytest.mark.matrix
        ),
        ("prefix 14", "pp=2,cp=2", {"shard": RING, "schedule": "zero-bubble", "microbatches": 2}),
        ("latent 13", "cp=2,tp=3", {"shard": RING_TP}),
        ("dropout 13", "cp=4", {"shard": RING, "recompute": "full", "microbatches": 2}),
        ("sinks 13", "cp=4", {"shard": RING, "zero": 3}),
        pytest.param("sinks 16", "pp=2,cp=2", {"recompute": "full", "microbatches": 2}, marks=pytest.mark.matrix),
        ("sinks 15", "cp=3", {"shard": HEADS, "recompute": "selective"}),
        ("dropped-sinks 14", "cp=2,tp=3", {"shard": RING_TP, "zero": 2}),
        ("causal 13", "cp=4", {"zero": 3, "loss_chunks": 2}),
        ("full 13", "dp=2,cp=2", {"zero": 1}),
        pytest.param("window 13", "cp=2,tp=3", {"recompute": "full"}, marks=pytest.mark.matrix),
        ("near 13", "pp=2,cp=4", {"microbatches": 2}),
        pytest.param("alibi 15", "cp=4", {"recompute": "selective", "zero": 2}, marks=pytest.mark.matrix),
        ("documents 11", "dp=2,cp=2", {"microbatches": 2, "zero": 3}),
        pytest.param("prefix 9", "pp=2,cp=2", {"recompute": "full", "microbatches": 2}, marks=pytest.mark.matrix),
        pytest.param("latent 7", "cp=2,tp=2", {"zero": 1}, marks=pytest.mark.matrix),
        pytest.param("dropout 15", "dp=2,cp=4", {"recompute": "full", "microbatches": 2}, marks=pytest.mark.matrix),
        ("convolution 13", "cp=4", {"zero": 2}),
        ("table 13", "dp=2,cp=2", {"zero": 3}),
    ],
)
def test_every_kind_of_attention_reads_the_rows_of_its_rank(
    kind: str, mesh: str, how: dict[str, Any], tmp_path: Path
) -> None:
    """Three heads divide over cp=3 alone: else queries stay cut along the sequence; keys and values are gathered or
    go around.

    Sequences that cp, or twice cp, does not divide are longer inside, without a trace in loss and gradients.
    """
    name, seq = kind.split()
    package = partc.compile(SEQUENCES, mesh=mesh, precision="fp64", options={"kind": name, "seq": seq}, **how)
    assert not [item for item in package.replicated_ops if item.axis == "cp"]
    found = verify(package.write(tmp_path / "build"), steps=2, virtual=True)
    assert found.ok and found.worst.rel_err < 1e-10, found.worst


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "seq"), [("cp=4", "13"), ("pp=2,cp=2", "16")])
def test_packed_sequences_are_masked_by_document(mesh: str, seq: str, tmp_path: Path) -> None:
    """The documents' numbers and positions come from their bounds, as in `cu_seqlens`."""
    package = partc.compile(PACKED, mesh=mesh, precision="fp64", options={"seq": seq}, zero=1)
    found = verify(package.write(tmp_path / "build"), steps=2, virtual=True)
    assert found.ok and found.worst.rel_err < 1e-10, found.worst


def test_kernels_of_packed_sequences_are_refused() -> None:
    with pytest.raises(PartcError, match="searchsorted") as failure:
        partc.compile(PACKED, mesh="cp=2", options={"how": "kernel"})
    assert failure.value.code == "P0206"


def test_sequences_are_cut_and_weights_are_whole() -> None:
    package = partc.compile(GPT, mesh="dp=2,cp=4", precision="bf16")
    program = package.program
    assert all(parameter.type.layout.sharded_axes == () for parameter in program.parameters)
    assert all("cp" in parameter.reduce for parameter in program.parameters if "blocks." in parameter.name)
    crossing = {value.name: value.type.layout.placement("cp") for value in program.values if len(value.type.shape) == 3}
    assert crossing and set(crossing.values()) == {Shard(1, 2)}


def _moved(name: str, **how: Any) -> float:
    """The bytes that each rank sends in a block's forward, in collectives of this name."""
    program = partc.compile(GPT, mesh="cp=2", precision="fp32", **how).program
    region = next(region for region in program.regions if region.name == "block")
    types = region.types(region.forward)
    moving = [op for op in region.forward.ops if op.name == name]
    return sum(cost(name, 2, types[next(op.refs())].local_bytes(program.sizes)) for op in moving)


def test_the_all_to_alls_of_attention_move_what_the_formula_says() -> None:
    """A layer moves queries, keys, values and the result: (1 - 1/cp) of each rank's part (DeepSpeed-Ulysses, 3.2)."""
    batch, seq, heads, groups, head = 16, 32, 4, 2, 16
    moved = _moved("all_to_all", shard=("block.attn_heads=[_, @cp, _, _]",))
    assert moved == batch * seq / 2 * (heads + groups + groups + heads) * head * 4 / 2


class Mixed(torch.nn.Module):
    """Attention without a mask from the positions before it, and a convolution of each channel, as in Mamba."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.o = torch.nn.LayerNorm(32), torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
        self.mix = torch.nn.Conv1d(64, 64, 4, padding=3, groups=64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        heads = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(heads.transpose(1, 2).flatten(2))
        mixed = self.mix(self.up(x).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return x + self.down(torch.nn.functional.silu(mixed))


def mixing() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Mixed() for _ in range(3)), torch.nn.Linear(32, 32, bias=False))


def squares(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"]).square().mean()


@pytest.mark.parametrize("mesh", ["cp=2,tp=2", "tp=2,cp=2", "cp=2,dp=2,tp=2"])
def test_heads_and_channels_that_tp_cuts_travel_over_cp_alone(mesh: str) -> None:
    """Each rank keeps its part of the heads, of which it then has the share of its cp rank for all positions."""
    package = partc.compile(mixing, {"x": torch.randn(8, 16, 32)}, loss=squares, mesh=mesh, precision="fp64")
    program = package.program
    region = next(region for region in program.regions if len(program.calls_to(region.name)) == 3)
    moves = [dict(op.attrs)["axis"] for graph in region.graphs for op in graph.ops if op.name == "all_to_all"]
    assert {*moves} == {"cp"}
    result = package.verify(steps=2)
    assert result.ok, result.worst


def test_gathered_keys_and_values_move_what_the_formula_says() -> None:
    """Each rank receives the keys and values of the others."""
    batch, seq, groups, head = 16, 32, 2, 16
    rows = ("block.attn_heads=[_, _, @cp, _] gathered",)
    assert _moved("all_gather", shard=rows) == batch * seq / 2 * 2 * groups * head * 4
    assert _moved("all_to_all", shard=rows) == 0


def test_a_ring_sends_what_the_formula_says() -> None:
    """Forward, keys and values of a rank visit the others; backward too, and their gradients come home in fp32."""
    batch, seq, groups, head = 16, 32, 2, 16
    ring = ("block.attn_heads=[_, _, @cp, _] ring",)
    program = partc.compile(GPT, mesh="cp=4", precision="bf16", shard=ring).program
    region = next(region for region in program.regions if region.name == "block")
    assert region.backward is not None
    part = batch * seq // 4 * 2 * groups * head
    for graph, wanted in ((region.forward, 3 * part * 2), (region.backward, 3 * part * 2 + 4 * part * 4)):
        types = region.types(graph)
        moving = [each for op in graph.ops for each in collectives_of(op, types, program.sizes) if each.op == "shift"]
        assert sum(each.bytes for each in moving) == wanted
        assert not [op for op in graph.ops if op.name in ("all_gather", "all_to_all")]


ZIGZAG = "block.attn_heads=[_, @tp, 2 * _@cp, _]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        ("cp=4", {"shard": (f"{ZIGZAG} ring",), "zero": 3}),
        ("dp=2,cp=2,tp=2", {"shard": (f"{ZIGZAG} gathered",), "zero": 3, "recompute": "full"}),
        ("pp=2,cp=4", {"schedule": "interleaved", "virtual_stages": 2, "microbatches": 4, "zero": 1}),
        ("cp=2,tp=2", {"shard": (f"{ZIGZAG} ring",), "loss_chunks": 4, "microbatches": 2}),
        ("cp=2,pp=2", {"schedule": "zero-bubble", "microbatches": 4, "zero": 2}),
    ],
)
def test_ordered_sequences_equal_the_single_device(
    mesh: str, how: dict[str, Any], references: Path, tmp_path: Path
) -> None:
    """Rotary positions, labels and masks follow the order of the sequence, in which every rank has equal work."""
    package = partc.compile(GPT, mesh=mesh, precision="fp64", **how)
    rows = {dict(op.attrs).get("rows") for op in _attentions(package.program)}
    assert all(" zigzag " in str(each) for each in rows), rows
    assert not [item for item in package.replicated_ops if item.axis == "cp"]
    found = verify(package.write(tmp_path / "build"), steps=2, virtual=True, reference=references / "gpt")
    assert found.ok and found.worst.rel_err < 1e-10, found.worst


def _attentions(program: Program) -> list[Op]:
    return [op for region in program.regions for op in region.forward.ops if op.name.startswith("attention")]


@pytest.mark.parametrize("n", [2, 3, 8])
def test_under_a_causal_mask_every_rank_has_equal_work(n: int) -> None:
    """In the order of the pass, in every step of the ring; the last rank of consecutive positions has twice as much."""
    size = 32 * n

    def scores(rows: Stretches, columns: Stretches) -> int:
        """The scores that are read, counted one by one."""
        own = torch.cat([torch.arange(each.start, each.stop) for each in rows])
        read = torch.cat([torch.arange(each.start, each.stop) for each in columns])
        return int((own[:, None] >= read).sum())

    turned = [Positions.parse(f"2 · {size // 2}@cp zigzag {2 * n}").of_rank({"cp": (rank, n)}) for rank in range(n)]
    everything = Positions.parse(f"{size} zigzag {2 * n}").of_rank({})
    work = [scores(rows, everything) for rows in turned]
    assert max(work) <= 1.02 * min(work) and sum(work) == size * (size + 1) // 2
    for step in range(1, n):
        steps = [scores(turned[rank], turned[(rank - step) % n]) for rank in range(n)]
        assert max(steps) <= 1.02 * min(steps)
    last = scores(Positions.parse(f"{size}@cp").of_rank({"cp": (n - 1, n)}), ((Stretch(0, size, 0)),))
    assert last > (2 - 1 / n) * 0.98 * sum(work) / n


TURNED = "2 · 8@cp zigzag 4"


@pytest.mark.slow
def test_sequences_keep_their_order_where_something_depends_on_it() -> None:
    """A convolution reads neighbours. A loss that drops the last position, and dropouts by position, do not."""
    for kind, rows in (("convolution", "16@cp"), ("causal", TURNED), ("dropout", TURNED)):
        package = partc.compile(SEQUENCES, mesh="cp=2", options={"kind": kind})
        assert {dict(op.attrs)["rows"] for op in _attentions(package.program)} == {rows}
        noted = [text for text in package.warnings if "conv1d depends on the order" in text]
        assert len(noted) == (kind == "convolution")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mesh", "whole"),
    [("causal", "cp=2", 16), ("causal", "cp=4", 16), ("full", "cp=2", 14), ("full", "cp=4", 16), ("full", "dp=2", 13)],
)
def test_sequences_are_as_long_inside_as_their_ranks_need(kind: str, mesh: str, whole: int) -> None:
    """A causal mask takes an early and a late part of each rank; the true keys are read without one."""
    program = partc.compile(SEQUENCES, mesh=mesh, options={"kind": kind, "seq": "13"}).program
    for region in program.regions:
        types = region.types(region.forward)
        for op in region.forward.ops:
            if op.name.startswith("attention"):
                q, k = (types[name].shape[2] for name in list(op.refs())[:2])
                assert (q, k) == (whole, whole if kind == "causal" else 13)
    assert all(value.type.shape == (4, 13) for value in program.values if value.name in program.inputs)


MISTAKES = {
    "added positions count": ("_zigzag >= 12", "_zigzag >= 13"),
    "the last positions are dropped": ("_zigzag >= 12", "_zigzag >= 8"),
    "labels keep their order": ("torch.cat((slice_3, flip_2), dim=1)", "torch.cat((slice_3, slice_3), dim=1)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_with_added_positions_is_not_the_single_device_model(mistake: str, tmp_path: Path) -> None:
    """Sequences that 2 · cp does not divide crash in other frameworks, or lose tokens without a word."""
    package = partc.compile(SEQUENCES, mesh="cp=2", precision="fp64", options={"seq": "13", "depth": "1"})
    build = package.write(tmp_path / "build")
    assert verify(build, virtual=True, reference=tmp_path / "reference").ok
    line, becomes = MISTAKES[mistake]
    files = [file for file in (build / "regions").glob("*.py") if line in file.read_text()]
    assert files
    for file in files:
        file.write_text(file.read_text().replace(line, becomes))
    assert not verify(build, virtual=True, reference=tmp_path / "reference").ok


@pytest.mark.slow
def test_added_positions_are_not_in_the_statistics_of_routers(tmp_path: Path) -> None:
    """Padding that balancing losses count shipped elsewhere. Here the positions are 13, and 16 inside."""
    pytest.importorskip("transformers")
    known = MODELS["mixtral"]
    config = {**known.config, "output_router_logits": True, "router_aux_loss_coef": 0.5, "num_hidden_layers": 1}
    model = Model(name="mixtral", config=config, options={**known.options, "seq": "13"})
    package = partc.compile(model.source(tmp_path), mesh="cp=4", precision="fp64", options=model.options)
    build = package.write(tmp_path / "build")
    found = verify(build, virtual=True, reference=tmp_path / "reference")
    assert found.ok and found.worst.rel_err < 1e-10, found.worst
    head = build / "regions" / "head.py"
    text, changed = re.subn(
        r"_counted = (\w+)\.masked_fill\(\w+, 0\)(  # f64\[\d+, 4\])", r"_counted = \1\2", head.read_text()
    )
    assert changed
    head.write_text(text)
    assert not verify(build, virtual=True, reference=tmp_path / "reference").ok


def test_sequences_are_ordered_once() -> None:
    pins = ("block.attn_heads=[_, _, 2 * _@cp, _] ring",)
    program = partc.compile(GPT, mesh="cp=2", shard=pins, options={"depth": 2}).program
    turned = [op for region in program.regions for op in region.forward.ops if op.name == "flip"]
    assert len(turned) == 4, "of ids, position numbers, and labels: for the loss and for their count"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "pins"),
    [
        (33, ()),
        (32, ("block.attn_heads=[_, @cp, _, _]",)),
        (32, ("block.attn_heads=[_, _, 2 * _@cp, _] ring",)),
    ],
    ids=str,
)
def test_a_training_equals_a_plain_loop(length: int, pins: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "counting.py"
    path.write_text(GPT.read_text() + COUNTING.format(length=length))
    file = load(path, {})
    torch.manual_seed(3)
    model = file.model().double()
    save_file({name: x.clone().contiguous() for name, x in model.state_dict().items()}, tmp_path / "init.safetensors")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    assert file.loss is not None
    torch.set_default_dtype(torch.float64)  # of the rotary tables, which forward makes
    try:
        for _ in range(3):
            optimizer.zero_grad()
            file.loss(model, file.batch()).backward()
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    package = partc.compile(path, mesh="dp=2,cp=2", microbatches=2, precision="fp64", zero=3, shard=pins)
    build, save = package.write(tmp_path / "build"), tmp_path / "save"
    given = ("--steps", 3, "--weight-decay", 0.1, "--init", tmp_path / "init.safetensors", "--save", save)
    trained(build, *given, real=True)
    found = whole(save / "step_00000003")
    for name, x in model.named_parameters():
        torch.testing.assert_close(found[name], x.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_pins_reach_it() -> None:
    def kept(*pins: str) -> int:
        program = partc.compile(GPT, mesh="cp=2,tp=2", shard=pins).program
        region = next(region for region in program.regions if region.name == "block")
        value = next(x for op in region.forward.ops for x in op.results if x.name == "mlp_hidden")
        return math.prod(value.type.layout.local_shape(program.sizes))

    free = kept()
    assert kept("block.mlp_hidden=[_, _, @tp]") == free, "a pin without cp leaves it free"
    assert kept("block.mlp_hidden=[_, @cp, _]") == 2 * free
    with pytest.raises(PartcError, match="P0302"):
        kept("embed.weight=[@cp, _]")


def test_meshes_have_it_anywhere() -> None:
    assert Mesh.parse("cp=2,pp=2,tp=2,dp=2").names == ("cp", "pp", "tp", "dp")
    with pytest.raises(PartcError, match="P0413"):
        partc.compile(GPT, mesh="cp=2,tp=2", zero="1@tp")
    command = partc.compile(GPT, mesh="dp=2,cp=2", zero=1).options.command
    assert command["zero"] == "1@dp,cp"


@pytest.mark.slow
def test_zero_cuts_every_parameter_over_the_axes_that_sum_its_gradient(tmp_path: Path) -> None:
    package = partc.compile(GPT, mesh="dp=2,cp=2", precision="fp64", zero=3, options={"depth": 1})
    gathered = {parameter.name: parameter.gather for parameter in package.program.parameters}
    assert gathered["embed.weight"] == ("dp",), "its lookups are repeated over cp, so its gradient is whole there"
    assert gathered["blocks.0.attn.wq.weight"] == ("dp", "cp")
    found = verify(package.write(tmp_path / "build"), steps=2, virtual=True)
    assert found.ok and found.worst.rel_err < 1e-10, found.worst


@pytest.mark.slow
def test_memory_falls_as_the_number_of_ranks_grows() -> None:
    """Around a ring nothing has the whole sequence but ids, labels and position numbers."""

    def peak(mesh: str, *pins: str) -> int:
        options = {"seq": "4096", "batch": "2", "depth": "2"}
        package = partc.compile(GPT, mesh=mesh, options=options, precision="bf16", microbatches=1, shard=pins)
        return max(rank.peak for rank in package.memory.ranks)

    assert 4 * peak("cp=4", f"{ZIGZAG} ring".replace("@tp", "_")) < 1.2 * peak("cp=1")


def test_the_form_of_attention_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that have an order for attention by rows are not then attended by heads, whatever these cost."""

    def orders() -> set[int]:
        program = partc.compile(SEQUENCES, mesh="cp=2", options={"heads": 2, "groups": 2, "depth": 1}).program
        found = [Attention.of(op) for op in _attentions(program)]
        return {each.rows.order.parts if each.rows else 0 for each in found if each}

    assert orders() == {0}
    monkeypatch.setattr("partc.passes.sequences.prefers_rows", lambda *_: True)
    assert orders() == {4}


@pytest.mark.slow
def test_explanations_name_the_forms_of_attention_as_pins_do(capsys: pytest.CaptureFixture[str]) -> None:
    def told(*pins: str) -> tuple[str, set[str]]:
        more = [word for pin in pins for word in ("--shard", pin)]
        assert main(["inspect", str(GPT), "--mesh", "cp=2", "--explain", "block.attn_heads", *more]) == 0
        first, *others = capsys.readouterr().out.splitlines()
        return first.removeprefix("block.attn_heads is ").removesuffix(" over cp"), {
            each.partition(":")[0].removeprefix("  instead ") for each in others
        }

    chosen, others = told()
    assert chosen == "[_, _, 2 * _@cp, _] gathered"
    for form in ("[_, _, 2 * _@cp, _] ring", "[_, @cp, _, _] (heads)"):
        assert form in others
        assert told(f"block.attn_heads={form.removesuffix(' (heads)')}")[0] == form
