"""Replayed construction equals plain construction bit for bit, and takes little memory."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from partc.runtime.train import replay
from partc.runtime.train.init import initialise


def check(build: Callable[[], nn.Module], *, said: str = "", wanted: Callable[[str], bool] = lambda name: True) -> None:
    """The initialised tensors equal the plain model's, and so does the generator afterwards."""
    torch.manual_seed(7)
    model = build()
    following = torch.rand(3)
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    expected = {name: x.detach() for name, x in tensors.items() if wanted(name)}
    got: dict[str, Tensor] = {}
    lines: list[str] = []
    module: Any = SimpleNamespace(model=build)
    initialise(module, {}, 7, set(expected), lambda name, x: got.update({name: x.clone()}), say=lines.append)
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(got[name], x), name
        assert got[name].dtype == x.dtype
    assert torch.equal(torch.rand(3), following)
    if said:
        assert len(lines) == 1 and said in lines[0]
    else:
        assert lines == []


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=2)
        self.linear = nn.Linear(6, 5)
        self.norm = nn.LayerNorm(5)
        self.conv = nn.Conv2d(3, 4, 3)
        self.batch_norm = nn.BatchNorm1d(5)
        self.attention = nn.MultiheadAttention(6, 2)


class Custom(nn.Module):
    """Everything that nn.init offers, buffers computed from each other, tied weights, writes to parts."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 7)
        nn.init.trunc_normal_(self.a.weight, std=0.3)
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(40, 30), std=0.6))
        self.narrow = nn.Parameter(nn.init.trunc_normal_(torch.empty(40, 3), a=-0.2, b=0.1))
        nn.init.orthogonal_(self.a.weight)
        nn.init.zeros_(self.a.bias)
        self.b = nn.Linear(7, 6)
        with torch.no_grad():
            self.b.weight[2:4].normal_(0, 0.1)
            self.b.weight.mul_(0.5)
            self.b.bias.copy_(self.a.weight[0] * 2)
        self.table = nn.Parameter(torch.randn(3, 4) * 0.02)
        self.scale = nn.Parameter(torch.ones(4))
        self.tied = nn.Linear(6, 11, bias=False)
        self.embedding = nn.Embedding(11, 6)
        self.tied.weight = self.embedding.weight
        inverse = 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))
        self.register_buffer("inv_freq", inverse)
        self.register_buffer("angles", torch.outer(torch.arange(5).float(), inverse))
        self.register_buffer("mask", torch.tril(torch.ones(4, 4, dtype=torch.bool)))
        self.register_buffer("numbers", torch.tensor([1.5, 2.5, -3.0]))
        self.register_buffer("order", torch.randperm(9))
        self.identity = nn.Parameter(nn.init.eye_(torch.empty(4, 4)))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(6, 5), 0.4))
        self.half = nn.Linear(3, 3).to(torch.float64)


class Applied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
        self.head = nn.Linear(5, 9)
        self.apply(self.init)
        for layer in self.layers:
            layer.weight.data.normal_(mean=0.0, std=0.1)

    def init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.constant_(module.bias, 0.25)


class ReadsConstants(nn.Module):
    """The construction of Hugging Face's ViT: rates from a linspace, read by `.item()`."""

    def __init__(self) -> None:
        super().__init__()
        rates = [x.item() for x in torch.linspace(0, 0.1, 4)]
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in rates])
        with torch.no_grad():
            for layer, rate in zip(self.layers, rates, strict=True):
                layer.bias.fill_(rate)


class ReadsDraws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.linear.weight.data.mul_(1.0 / self.linear.weight.abs().max().item())


class Seeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        torch.manual_seed(7)
        self.second = nn.Linear(3, 3)


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, generator=torch.Generator().manual_seed(1)))
        self.linear = nn.Linear(3, 3)


class Outside(nn.Module):
    table = torch.zeros(5)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("copy", Outside.table + 1)
        self.linear = nn.Linear(3, 3)


@pytest.mark.parametrize("build", [Layers, Custom, Applied, ReadsConstants, ReadsDraws, Outside])
def test_replayed_equals_plain(build: Callable[[], nn.Module]) -> None:
    check(build)


@pytest.mark.parametrize("build", [Layers, Custom, Applied])
def test_a_part_of_the_tensors(build: Callable[[], nn.Module]) -> None:
    """Unwanted parameters still draw their random numbers."""
    check(build, wanted=lambda name: "b" in name)


@pytest.mark.parametrize(("build", "why"), [(Seeds, "generator"), (OwnGenerator, "generator")])
def test_what_cannot_be_replayed_is_built_whole(build: Callable[[], nn.Module], why: str) -> None:
    check(build, said=why)


class DrawsElsewhere(nn.Module):
    """As hyper-connections, whose constructor draws the first stream of each layer by Python's `randrange`."""

    def __init__(self) -> None:
        super().__init__()
        self.python = nn.Parameter(torch.tensor([random.random() for _ in range(4)]))
        self.numpy = nn.Parameter(torch.from_numpy(numpy.random.randn(4)))


@pytest.mark.parametrize("size", [0, None])  # built whole, and recorded
def test_all_ranks_draw_alike_from_the_generators_of_python_and_numpy(size: int | None) -> None:
    drawn: list[dict[str, Tensor]] = [{}, {}, {}]
    before = random.getstate()
    for seed, found in zip((7, 7, 8), drawn, strict=True):
        module: Any = SimpleNamespace(model=DrawsElsewhere)
        initialise(
            module, {}, seed, {"python", "numpy"}, lambda name, x, found=found: found.update({name: x}), size=size
        )
    assert random.getstate() == before
    for name in ("python", "numpy"):
        assert torch.equal(drawn[0][name], drawn[1][name]) and not torch.equal(drawn[0][name], drawn[2][name])


def test_a_constructor_that_fails_fails() -> None:
    def build() -> nn.Module:
        raise KeyError("width")

    with pytest.raises(KeyError, match="width"):
        module: Any = SimpleNamespace(model=build)
        initialise(module, {}, 0, set(), lambda name, x: None, say=lambda line: None)


def test_one_tensor_at_a_time() -> None:
    """A model whose weights are initialised twice never has two of them in memory."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(8)])
            for layer in self.layers:
                nn.init.normal_(layer.weight)

    alive: list[weakref.ref[torch.UntypedStorage]] = []
    most = 0

    def take(name: str, x: Tensor) -> None:
        nonlocal most
        alive.append(weakref.ref(x.untyped_storage()))
        most = max(most, sum(storage() is not None for storage in alive))

    module: Any = SimpleNamespace(model=Deep)
    initialise(module, {}, 0, {f"layers.{i}.weight" for i in range(8)}, take)
    assert len(alive) == 8
    assert most == 1


def test_small_models_are_built_whole() -> None:
    built: list[bool] = []

    def build() -> nn.Module:
        module = nn.Linear(3, 3)
        built.append(type(module.weight.data) is Tensor)
        return module

    module: Any = SimpleNamespace(model=build)
    initialise(module, {}, 0, {"weight"}, lambda name, x: None, size=48)
    initialise(module, {}, 0, {"weight"}, lambda name, x: None, size=1 << 30)
    assert built == [True, False]


def hugging_face(family: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    if family == "llama":
        config = transformers.LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes)
        return transformers.LlamaForCausalLM(config)
    if family == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4))
    if family == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=50, **sizes))
    config = transformers.ViTConfig(image_size=16, patch_size=8, **sizes)
    return transformers.ViTForImageClassification(config)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "vit"])
def test_hugging_face(family: str) -> None:
    check(lambda: hugging_face(family))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_skipped_draws_leave_the_generator_as_made_ones_do(dtype: torch.dtype) -> None:
    made, skipped = torch.Generator(), torch.Generator()
    for name in ("uniform_", "normal_"):
        for count in (1, 15, 16, 17, 31, 32, 100, 4096, 70_001, 131_072):
            words = replay.random_words(name, dtype, count, True)
            if words is None:
                assert name == "normal_" and count < 16
                continue
            made.manual_seed(count)
            skipped.manual_seed(count)
            getattr(torch.empty(count, dtype=dtype), name)(generator=made)
            replay.skip_words(skipped, words)
            assert torch.equal(made.get_state(), skipped.get_state()), (name, count)


def test_many_threads_and_few_bytes_give_the_same_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partc.runtime.train.init.replay_threads", lambda: 4)
    monkeypatch.setattr(replay, "MOST_WAITING", 100)
    for build in (Layers, Custom):
        check(build)
        check(build, wanted=lambda name: "weight" in name)


def test_a_draw_of_unknown_length_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    words = replay.random_words

    def wrong(name: str, dtype: torch.dtype, count: int, dense: bool) -> int | None:
        drawn.append(name)
        return None if (known := words(name, dtype, count, dense)) is None else known + 1

    replay.draws_as_predicted.cache_clear()
    monkeypatch.setattr(replay, "random_words", wrong)
    check(Layers, wanted=lambda name: name == "attention.in_proj_weight")
    replay.draws_as_predicted.cache_clear()
    assert drawn


class Caught(nn.Module):
    """Draws from a generator of its own, and catches the error that recording raises."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        try:
            drawn = torch.rand(4, generator=torch.Generator().manual_seed(3))
        except Exception:
            drawn = torch.ones(4)
        self.scale = nn.Parameter(drawn)


def test_a_constructor_that_catches_errors_of_fake_tensors_is_built_whole() -> None:
    check(Caught, said="building the whole model")
