"""Outlining: the bodies that it finds, their names, and calls that still compute the model."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partc.frontend.model_precision import computing_in
from partc.frontend.trace import trace_file, trace_model
from partc.ir.interpreter import evaluate_program
from partc.ir.mesh import Mesh
from partc.ir.program import Program
from partc.ir.verifier import verify_program
from partc.passes.normalize import normalize
from partc.passes.outline import outline
from partc.passes.simplify import simplify

EXAMPLES = Path(__file__).parents[2] / "examples"
Batch = Mapping[str, Tensor]


def outlined(build: Callable[[], nn.Module], batch: Batch, stages: int = 1) -> Program:
    """The outlined program, well formed and equal to the eager model in double precision."""
    torch.manual_seed(3)
    model = build().double()
    doubles = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
    with computing_in(torch.float64):
        out = model(**doubles)
    expected = out if isinstance(out, Tensor) else out.loss
    traced = trace_model(build, lambda: batch, name="net", mesh=Mesh.parse("1"), precision="fp64").program
    program = outline(simplify(normalize(traced)), places=tuple(range(stages)))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    torch.testing.assert_close(evaluate_program(program, doubles, tensors), expected, rtol=1e-12, atol=0)
    verify_program(program, frozenset({"traced", "canonical", "regions"}), "outline")
    return program


def calls(program: Program) -> list[tuple[str, str]]:
    return [(call.name, call.region) for call in program.calls]


class Block(nn.Module):
    def __init__(self, width: int, hidden: int = 7) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    """A stem, `body` and a head."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 6)
        self.body = body
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x))).sum()  # type: ignore[no-any-return]


X = {"x": torch.randn(5, 3, generator=torch.Generator().manual_seed(0))}


def test_repeated_blocks_share_a_region() -> None:
    program = outlined(lambda: Net(nn.Sequential(*(Block(6) for _ in range(4)))), X)
    assert calls(program) == [("embed", "embed"), *((f"body.{i}", "body") for i in range(4)), ("head", "head")]
    block = program.region("body")
    assert [value.name for value in block.params] == ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert program.calls[3].params == ("body.2.up.weight", "body.2.up.bias", "body.2.down.weight", "body.2.down.bias")
    assert [len(call.args) for call in program.calls] == [1] * 6
    assert all(a.results == b.args for a, b in zip(program.calls, program.calls[1:], strict=False))


def test_another_shape_is_another_region() -> None:
    program = outlined(lambda: Net(nn.Sequential(Block(6), Block(6, 9), Block(6))), X)
    assert [region for _, region in calls(program)] == ["embed", "body", "body_2", "body", "head"]


def test_activations_of_a_sequential_join_what_they_follow() -> None:
    layers = lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.LayerNorm(6))  # noqa: E731
    program = outlined(lambda: Net(layers()), X)
    assert [name for name, _ in calls(program)] == ["embed", "body.0", "body.2", "body.4", "head"]
    assert program.calls[1].region == program.calls[2].region


class Stage(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.merge = nn.Linear(width, width + 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.merge(x)  # type: ignore[no-any-return]


class Pyramid(nn.Module):
    """Stages of different widths that hold equal blocks, as Swin has."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.stages = nn.ModuleList([Stage(4, 2), Stage(6, 3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return x.square().sum()


def test_nested_containers_are_followed_to_what_repeats() -> None:
    program = outlined(Pyramid, X)
    names = [name for name, _ in calls(program)]
    assert [name for name in names if ".blocks." in name] == [
        *(f"stages.0.blocks.{i}" for i in range(2)),
        *(f"stages.1.blocks.{i}" for i in range(3)),
    ]
    regions = dict(calls(program))
    assert regions["stages.0.blocks.0"] == regions["stages.0.blocks.1"] != regions["stages.1.blocks.0"]
    assert len({regions[f"stages.1.blocks.{i}"] for i in range(3)}) == 1


class Towers(nn.Module):
    """An encoder whose output every decoder block reads; the first block makes a bias that the others use."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(4, 6)
        self.encoder = nn.ModuleList(Block(6) for _ in range(3))
        self.decoder = nn.ModuleList(Block(6) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shared = self.bias(torch.arange(4)).sum(0)
        for block in self.encoder:
            x = block(x) + shared
        for block in self.decoder:
            y = block(y) * x
        return y.sum()


def test_values_that_later_bodies_read_are_passed_to_them() -> None:
    program = outlined(Towers, {"x": torch.randn(5, 6), "y": torch.randn(5, 6)})
    decoders = [call for call in program.calls if call.name.startswith("decoder")]
    assert len(decoders) == 3
    assert len({call.region for call in decoders}) == 1


class Language(nn.Module):
    """Tied embeddings, positions, a mask given with the batch, labels that are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.place = nn.Embedding(8, 6)
        self.layers = nn.ModuleList(Block(6) for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, keep: Tensor, labels: Tensor) -> Tensor:
        hidden = (keep == 0)[:, :, None]
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x).masked_fill(hidden, 0.0)
            x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], ~hidden[:, None].mT)[:, 0]
        return F.cross_entropy(self.head(x).mT, labels)


def language() -> dict[str, Tensor]:
    labels = torch.randint(11, (5, 7))
    labels[0, 2:], labels[3, 6:] = -100, -100
    keep = torch.ones(5, 7, dtype=torch.long)
    keep[2, 4:] = 0
    return {"ids": torch.randint(11, (5, 7)), "keep": keep, "labels": labels}


def test_values_without_parameters_have_regions_of_their_own() -> None:
    program = outlined(Language, language())
    phases = {region.name: region.phase for region in program.regions}
    free = [call for call in program.calls if not call.params]
    assert "setup" in {phases[call.region] for call in free}
    assert all(phases[call.region] == "microbatch" for call in free if call.args)
    made = {name: call for call in free for name in call.results}
    assert "count" in made
    assert made["count"].args == ("labels",)
    assert [len(call.results) for call in free if call.args] == [1] * len([call for call in free if call.args])
    last = program.calls[-1]
    assert last.results == ("loss",)
    assert "count" in last.args


class Scattering(nn.Module):
    """Adds tokens up by `index_add` into zeros, as experts written by hand do."""

    def __init__(self) -> None:
        super().__init__()
        self.bins = nn.Linear(6, 3)
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        flat, best = x.flatten(0, 1), self.bins(x).argmax(-1).flatten()
        chosen = torch.zeros(flat.shape[0], 3).scatter(1, best[:, None], 1.0)
        total = torch.zeros_like(flat).index_add(0, torch.arange(flat.shape[0]), flat * chosen[:, :1])
        return x + self.out(total).view_as(x)


def test_tensors_of_one_number_are_made_where_they_are_read() -> None:
    """As a constant, a mask of DeepSeek-V3's groups of experts had the size of the whole batch, one gibibyte."""
    build = lambda: Net(nn.Sequential(Scattering(), Scattering(), Scattering()))  # noqa: E731
    program = outlined(build, {"x": torch.randn(4, 5, 3)})
    setup = [op.name for region in program.regions if region.phase == "setup" for op in region.forward.ops]
    (body,) = {call.region for call in program.calls if call.name.startswith("body")}
    shapes = [op.result.type.shape for op in program.region(body).forward.ops if op.name == "full"]
    assert "full" not in setup and sorted(shapes) == [(20, 3), (20, 6)], (setup, shapes)


class Total(nn.Module):
    """Adds rows up by `index_add` into zeros, as aggregations of graph networks do."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, torch.arange(x.shape[0]).flip(0), x)


def test_modules_without_parameters_that_read_one_fill_join_the_module_before_them() -> None:
    build = lambda: Net(nn.Sequential(nn.Linear(6, 6), Total(), Total()))  # noqa: E731
    program = outlined(build, X)
    assert [call.name for call in program.calls] == ["constants", "embed", "body.0", "head"]
    assert [op.name for op in program.region(program.calls[2].region).forward.ops].count("full") == 1


def test_tied_weights_are_one_parameter_of_two_calls() -> None:
    program = outlined(Language, language())
    readers = [call.name for call in program.calls if "embed.weight" in call.params]
    assert readers == ["embed", "head"]
    assert program.parameter("embed.weight").aliases == ("head.weight",)


def test_a_model_without_repetition_is_one_region() -> None:
    program = outlined(lambda: Net(Block(6)), X)
    assert [region.name for region in program.regions] == ["net"]


class Scaled(nn.Module):
    """Layers with names, a weight of its own, and what runs between them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = Block(6), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.out(self.body(x).tanh() * self.scale), y)


class Functions(nn.Module):
    """Layers that are functions of weights in lists, in a dictionary of names, or in attributes."""

    def __init__(self, style: str, depth: int = 4) -> None:
        super().__init__()
        self.style = style
        self.stem, self.head = nn.Linear(3, 6), nn.Linear(6, 1)
        self.gain = nn.Parameter(torch.rand(6))
        if style == "lists":
            self.up = nn.ParameterList(torch.randn(7, 6) for _ in range(depth))
            self.down = nn.ParameterList(torch.randn(6, 7) for _ in range(depth))
        for i in range(depth):
            if style == "attributes":
                self.register_parameter(f"up{i}", nn.Parameter(torch.randn(7, 6)))
                self.register_parameter(f"down{i}", nn.Parameter(torch.randn(6, 7)))
            elif style == "modules":
                setattr(self, f"block{i}", Block(6))
        if style == "holders":
            self.layers = nn.ModuleList(
                nn.ParameterDict({"up": torch.randn(7, 6), "down": torch.randn(6, 7)}) for _ in range(depth)
            )

    def layer(self, i: int, x: Tensor) -> Tensor:
        match self.style:
            case "modules":
                return getattr(self, f"block{i}")(x)  # type: ignore[no-any-return]
            case "lists":
                up, down = self.up[i], self.down[i]
            case "attributes":
                up, down = getattr(self, f"up{i}"), getattr(self, f"down{i}")
            case "holders":
                up, down = self.layers[i]["up"], self.layers[i]["down"]
        normed = x / x.square().mean(-1, keepdim=True).sqrt() * self.gain
        return x + F.linear(F.linear(normed, up).relu(), down)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i in range(4):
            x = self.layer(i, x)
        return self.head(x).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("style", "names", "region", "params"),
    [
        ("lists", "block.{}", "block", ["gain", "up", "down"]),
        ("attributes", "block.{}", "block", ["gain", "up", "down"]),
        ("holders", "layers.{}", "layer", ["gain", "up", "down"]),
        ("modules", "block{}", "block", ["up.weight", "up.bias", "down.weight", "down.bias"]),
    ],
)
def test_numbers_in_names_of_weights_tell_bodies(style: str, names: str, region: str, params: list[str]) -> None:
    program = outlined(lambda: Functions(style), X)
    assert calls(program) == [("embed", "embed"), *((names.format(i), region) for i in range(4)), ("head", "head")]
    assert sorted(value.name for value in program.region(region).params) == sorted(params)


class Numbered(nn.Module):
    """Numbered layers of which no three are alike, or whose weights are read again in another order."""

    def __init__(self, widths: list[int], order: list[int]) -> None:
        super().__init__()
        for i, (width, after) in enumerate(zip(widths, [*widths[1:], widths[0]], strict=True)):
            setattr(self, f"fc{i}", nn.Linear(width, after))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for i in self.order:
            x = getattr(self, f"fc{i}")(x).tanh()
        return x.sum()


@pytest.mark.parametrize(("widths", "order"), [([3, 4, 5, 6], [0, 1, 2, 3]), ([3, 3, 3], [0, 1, 2, 1, 0])])
def test_numbers_without_repeated_bodies_tell_nothing(widths: list[int], order: list[int]) -> None:
    assert calls(outlined(lambda: Numbered(widths, order), X)) == [("net", "net")]


@pytest.mark.parametrize(
    ("stages", "names"),
    [
        (1, ["net"]),
        (2, ["body", "bridge", "out"]),
        (4, ["body.up", "body.down", "bridge", "out"]),
    ],
)
def test_more_stages_than_bodies_cut_inside_them(stages: int, names: list[str]) -> None:
    program = outlined(Scaled, {"x": torch.randn(5, 6), "y": torch.randn(5, 4)}, stages)
    assert [call.name for call in program.calls] == names


class Flagged(nn.Module):
    """Buffers whose next values are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.register_buffer("seen", torch.tensor(False))
        self.register_buffer("low", torch.tensor(0.0))
        self.register_buffer("first", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.up(x)
        self.seen.fill_(True)
        self.low.copy_(h.detach().amin())
        self.first.copy_(h.detach().amin())
        return h - self.low


class Flags(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()  # type: ignore[no-any-return]


def test_every_changed_buffer_has_a_next_value_of_its_own() -> None:
    program = outlined(lambda: Flags(Flagged(), Flagged()), {"x": torch.randn(8, 4)})
    assert len(program.updates) == len({value for _, value in program.updates}) == 6


class Counting(nn.Module):
    """Counts the rows of each bin in a buffer, as routers with a bias in place of a loss do."""

    def __init__(self) -> None:
        super().__init__()
        self.bins, self.out = nn.Linear(6, 3), nn.Linear(6, 6)
        self.register_buffer("counts", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        best = self.bins(x).argmax(-1)
        self.counts += torch.zeros(3).scatter_add(0, best, torch.ones(len(x)))
        return x + self.out(x)


def test_moved_updates_leave_shared_fills_with_their_readers() -> None:
    """Updates of a pipeline's buffers are moved; each counts by the same zeros and ones."""
    program = outlined(lambda: Net(nn.Sequential(Counting(), Counting(), Counting())), X, stages=2)
    (body,) = {call.region for call in program.calls if call.name.startswith("body")}
    assert [op.name for op in program.region(body).forward.ops].count("full") == 2


class Weights(nn.Module):
    """No modules inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = (x @ self.first.T).relu()
        return ((h @ self.second.T).tanh() + h).sum()


@pytest.mark.parametrize("stages", [2, 50])
def test_at_last_every_weight_is_a_call(stages: int) -> None:
    assert [call.name for call in outlined(Weights, X, stages).calls] == ["first", "second"]


def test_equal_parts_inside_blocks_stay_one_region() -> None:
    program = outlined(lambda: Net(nn.Sequential(Block(6), Block(6))), X, 6)
    assert [call for call in calls(program) if "body" in call[0]] == [
        ("body.0.up", "up"),
        ("body.0.down", "down"),
        ("body.1.up", "up"),
        ("body.1.down", "down"),
    ]


@pytest.mark.parametrize("example", ["gpt", "mlp"])
def test_names_are_readable_and_valid(example: str) -> None:
    traced = trace_file(EXAMPLES / f"{example}.py", {}, mesh=Mesh.parse("1")).program
    program = outline(simplify(normalize(traced)))
    for region in program.regions:
        names = [
            value.name for value in (*region.forward.inputs, *(v for op in region.forward.ops for v in op.results))
        ]
        assert len(set(names)) == len(names)
        assert all(name.isidentifier() and not keyword.iskeyword(name) for name in names)
    block = [value.name for op in program.region("block").forward.ops for value in op.results]
    if example == "gpt":
        assert {"norm1", "attn_q", "attn_k", "attn_v", "attn_heads", "attn_wo", "mlp_gate", "mlp_down", "y"} <= set(
            block
        )
        assert [call.name for call in program.calls][:4] == ["rotary", "make_count", "embed", "blocks.0"]
        head = [value.name for op in program.region("head").forward.ops for value in op.results]
        assert head == ["norm", "logits", "nll", "nll_sum", "loss"]
    else:
        assert block == ["norm", "up_product", "up", "hidden", "down_product", "down", "out"]


HUGGING_FACE: Mapping[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", {"intermediate_size": 40, "num_key_value_heads": 2}),
    "GPT2": ("GPT2LMHeadModel", {"n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 16, "resid_pdrop": 0.0}),
    "Bert": ("BertForMaskedLM", {"intermediate_size": 40}),
    "ViT": ("ViTForImageClassification", {"intermediate_size": 40, "image_size": 12, "patch_size": 4, "num_labels": 5}),
    "T5": (
        "T5ForConditionalGeneration",
        {"d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0},
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", HUGGING_FACE)
@pytest.mark.parametrize("masked", [False, True])
def test_hugging_face_models(name: str, masked: bool) -> None:
    transformers = pytest.importorskip("transformers")
    model, options = HUGGING_FACE[name]
    common = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "use_cache": False, "vocab_size": 60}
    still = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate"), 0.0)
    tokens = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")(**{**common, **still, **tokens, **options})
    ids = torch.randint(2, 60, (5, 9))
    labels = ids.clone()
    labels[1, 3:] = -100
    batch = {"input_ids": ids, "labels": labels}
    if name == "ViT":
        batch = {"pixel_values": torch.randn(5, 3, 12, 12), "labels": torch.randint(5, (5,))}
    elif masked:
        batch["attention_mask"] = (torch.arange(9) < torch.tensor([[9], [4], [7], [9], [5]])).long()
    program = outlined(lambda: getattr(transformers, model)(config).train(), batch)
    bodies = [region for call, region in calls(program) if call.rpartition(".")[2].isdigit()]
    assert len(bodies) == (6 if name == "T5" else 3)
    assert len(set(bodies)) <= (4 if name == "T5" else 1)
