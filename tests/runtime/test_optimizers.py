"""Every optimizer on shards takes torch's steps on whole tensors, resumes exactly, or is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.errors import PartcError
from partc.runtime.checkpoint.manifest import read
from partc.runtime.errors import UsageError
from partc.runtime.execution.executor import gradient_memory
from partc.runtime.layout import Shard
from partc.runtime.optimizer.kinds import KINDS
from partc.runtime.optimizer.recipe import Recipe
from partc.runtime.optimizer.update import make_update
from tests.durable import TIED, build, train, trained, whole
from tests.passes.test_levels import on_ranks

SIZES = {"dp": 2, "tp": 2}
LAYOUTS = {
    "rows": Shard("f64[6@tp, 8@dp]"),
    "columns": Shard("f64[5, 8@tp,dp]"),
    "fused": Shard("f64[3 · 4@tp, 6@dp]"),
    "flat": Shard("f64[1, 12@dp]"),
    "padded": Shard("f64[8@tp, 4@dp]", holds=(7, 4)),
    "kernel": Shard("f64[4@dp, 3, 2@tp]"),
    "norm": Shard("f64[8@tp]"),
    "spare row": Shard("f64[5@dp, 2 · 3@tp]"),
    "spare column": Shard("f64[4@tp, 3 · 5@dp]"),
    "spare": Shard("f64[1@tp]"),
    "whole": Shard("f64[3]"),
    "scalar": Shard("f64[]"),
}
# The same tensors where dp and tp have changed places.
OTHERS = {
    name: Shard(shard.type.replace("dp", "#").replace("tp", "dp").replace("#", "tp"), holds=shard.holds)
    for name, shard in LAYOUTS.items()
}
SHAPES = {name: shard.holds or shard.shape for name, shard in LAYOUTS.items()}
RATES = (0.05, 0.1, 0.1, 0.02, 0.01)

# Options of train.py, and torch's class with the arguments that each parameter's group has.
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adadelta:rho=0.8": (torch.optim.Adadelta, {"rho": 0.8}),
    "adagrad:lr_decay=0.1,initial_accumulator_value=0.5": (
        torch.optim.Adagrad,
        {"lr_decay": 0.1, "initial_accumulator_value": 0.5},
    ),
    "adam:amsgrad=true,weight_decay=0.1": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "adamax": (torch.optim.Adamax, {}),
    "adamw:betas=0.8,0.95,eps=1e-6": (torch.optim.AdamW, {"betas": (0.8, 0.95), "eps": 1e-6}),
    "asgd:t0=2,lambd=0.01": (torch.optim.ASGD, {"t0": 2, "lambd": 0.01}),
    "nadam:decoupled_weight_decay=true,weight_decay=0.1": (
        torch.optim.NAdam,
        {"decoupled_weight_decay": True, "weight_decay": 0.1},
    ),
    "radam": (torch.optim.RAdam, {}),
    "rmsprop:centered=true,momentum=0.9": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "rprop:etas=0.4,1.3": (torch.optim.Rprop, {"etas": (0.4, 1.3)}),
    "sgd": (torch.optim.SGD, {}),
    "sgd:momentum=0.9,nesterov=true": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "sgd:momentum=0.9,dampening=0.2,maximize=true": (
        torch.optim.SGD,
        {"momentum": 0.9, "dampening": 0.2, "maximize": True},
    ),
    "adafactor:weight_decay=0.1": (torch.optim.Adafactor, {"weight_decay": 0.1}),
    "muon:momentum=0.9": (torch.optim.Muon, {"momentum": 0.9}),
}


class Ranks:
    """Virtual ranks that hold parts of the parameters, under one optimizer."""

    def __init__(self, recipe: Recipe, layouts: Mapping[str, Shard], start: Mapping[str, Tensor]) -> None:
        self.recipe, self.layouts = recipe, layouts
        self.dims = {name: len(shape) for name, shape in SHAPES.items()}
        self.values, self.states = dict(start), dict[str, dict[str, Tensor]]()

    def run(self, steps: range, gradients: list[dict[str, Tensor]]) -> Ranks:
        """Steps on ranks that begin with the values and states, cut anew; afterwards these are put together."""
        parts: dict[int, dict[str, Tensor]] = {}
        kept: dict[int, dict[str, dict[str, Tensor]]] = {}
        uncut: dict[str, set[str]] = {}

        def rank(comm: Any, number: int) -> None:
            place = comm.group(("dp",)).rank, comm.group(("tp",)).rank
            coordinate = dict(zip(SIZES, place, strict=True))

            def cut(name: str, x: Tensor) -> Tensor:
                return self.layouts[name].local(x, SIZES, coordinate).clone(memory_format=torch.contiguous_format)

            mine = {name: cut(name, x) for name, x in self.values.items()}
            grads, buffers, _ = gradient_memory(self.layouts, mine)
            settings = self.recipe.all_settings(self.dims)
            how = {"shards": self.layouts, "comm": comm, "sizes": SIZES, "lr": RATES[0]}
            optimizer, _ = make_update(settings, mine, grads, buffers, None, **how)
            assert optimizer is not None
            for name, states in self.states.items():
                for key, x in states.items():
                    there = x if key in uncut_before.get(name, ()) else cut(name, x)
                    optimizer.restore(name, key, there.clone())
            for step in steps:
                for name, x in gradients[step].items():
                    grads[name].copy_(cut(name, x))
                optimizer.begin(RATES[step])
                with torch.no_grad():
                    optimizer.step()
            parts[number] = mine
            kept[number] = {name: {key: x.clone() for key, x in optimizer.state_of(name).items()} for name in mine}
            for name in mine:
                uncut[name] = {key for key in optimizer.state_of(name) if key in optimizer.uncut(name)}

        uncut_before = getattr(self, "uncut", {})
        on_ranks(rank, SIZES)
        self.uncut = uncut
        self.values = {name: self._joined(name, {n: x[name] for n, x in parts.items()}) for name in SHAPES}
        self.states = {
            name: {
                key: x if key in uncut[name] else self._joined(name, {n: found[name][key] for n, found in kept.items()})
                for key, x in kept[0][name].items()
            }
            for name in SHAPES
        }
        for name, states in self.states.items():
            assert sorted(states) == sorted(self.recipe.settings(name, self.dims[name]).states(self.dims[name]))
        return self

    def _joined(self, name: str, parts: Mapping[int, Tensor]) -> Tensor:
        """The whole tensor, whose parts that several ranks hold must be equal bit by bit."""
        shape = SHAPES[name]
        places = torch.arange(1, math.prod(shape) + 1).view(shape)
        joined = torch.full((math.prod(shape),), math.nan, dtype=torch.float64)
        for number, part in parts.items():
            there = self.layouts[name].local(places, SIZES, {"dp": number // 2, "tp": number % 2})
            index = there[there > 0] - 1
            before = joined[index]
            assert torch.equal(before.nan_to_num(), torch.where(before.isnan(), 0.0, part[there > 0].double()))
            joined[index] = part[there > 0].double()
        assert not joined.isnan().any()
        return joined.view(shape).to(next(iter(parts.values())).dtype)


def random(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


GRADIENTS = [random(step + 1) for step in range(len(RATES))]


@pytest.mark.parametrize("text", CASES)
def test_shards_take_torchs_steps_and_continue(text: str) -> None:
    kind, arguments = CASES[text]
    plain = {name: nn.Parameter(x.clone()) for name, x in random(0).items()}
    theirs = []
    for x in plain.values():
        matrix = kind is not torch.optim.Muon or x.dim() == 2
        theirs.append(kind([x], **arguments) if matrix else torch.optim.AdamW([x]))
    for rate, gradients in zip(RATES, GRADIENTS, strict=True):
        for name, x in plain.items():
            x.grad = gradients[name].clone()
        for optimizer in theirs:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
    recipe = Recipe.of(text)
    mine = Ranks(recipe, LAYOUTS, random(0)).run(range(5), GRADIENTS)
    for name, x in plain.items():
        torch.testing.assert_close(mine.values[name], x.detach(), rtol=1e-12, atol=1e-12)
    again = Ranks(recipe, LAYOUTS, random(0)).run(range(2), GRADIENTS).run(range(2, 5), GRADIENTS)
    assert all(torch.equal(again.values[name], x) for name, x in mine.values.items())
    turned = Ranks(recipe, LAYOUTS, random(0)).run(range(2), GRADIENTS)
    turned.layouts = OTHERS
    turned.run(range(2, 5), GRADIENTS)
    assert all(torch.equal(turned.values[name], x) for name, x in mine.values.items())


def test_every_optimizer_is_here() -> None:
    assert {text.partition(":")[0] for text in CASES} == KINDS.keys() - {"lion", "rowwise_adagrad", "sparseadam"}


def test_lion_takes_the_papers_steps() -> None:
    """Chen et al. 2023, algorithm 2."""
    plain, momenta = random(0), {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for rate, gradients in zip(RATES, GRADIENTS, strict=True):
        for name, g in gradients.items():
            c = 0.8 * momenta[name] + 0.2 * g
            plain[name] = plain[name] - rate * (torch.sign(c) + 0.1 * plain[name])
            momenta[name] = 0.95 * momenta[name] + 0.05 * g
    mine = Ranks(Recipe.of("lion:betas=0.8,0.95,weight_decay=0.1"), LAYOUTS, random(0)).run(range(5), GRADIENTS)
    for name, x in plain.items():
        torch.testing.assert_close(mine.values[name], x, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(mine.states[name]["exp_avg"], momenta[name], rtol=1e-12, atol=1e-12)


def test_groups_have_options_and_optimizers_of_their_own() -> None:
    recipe = Recipe.of(
        "sgd:momentum=0.9",
        weight_decay=0.2,
        groups=("*s:lr_scale=0.5,momentum=0.5", "rows,f*:optimizer=muon", "norm:weight-decay=0.1,lr_scale=2"),
        no_decay=("col*",),
    )
    sgd, muon = torch.optim.SGD, torch.optim.Muon
    told: dict[str, tuple[Any, float, dict[str, Any]]] = {
        **dict.fromkeys(SHAPES, (sgd, 1.0, {"momentum": 0.9, "weight_decay": 0.2})),
        "columns": (sgd, 0.5, {"momentum": 0.5, "weight_decay": 0.0}),
        "rows": (muon, 0.5, {"momentum": 0.5}),
        "fused": (muon, 1.0, {}),
        "flat": (muon, 1.0, {}),
        "norm": (sgd, 2.0, {"momentum": 0.9, "weight_decay": 0.1}),
    }
    plain = {name: nn.Parameter(x.clone()) for name, x in random(0).items()}
    theirs = {name: kind([plain[name]], **options) for name, (kind, _, options) in told.items()}
    for rate, gradients in zip(RATES, GRADIENTS, strict=True):
        for name, optimizer in theirs.items():
            plain[name].grad = gradients[name].clone()
            optimizer.param_groups[0]["lr"] = rate * told[name][1]
            optimizer.step()
    mine = Ranks(recipe, LAYOUTS, random(0)).run(range(5), GRADIENTS)
    for name, x in plain.items():
        torch.testing.assert_close(mine.values[name], x.detach(), rtol=1e-12, atol=1e-12, msg=name)
    assert recipe.states({name: len(shape) for name, shape in SHAPES.items()}) == [["momentum_buffer"]]


NOISE = ("--group", "*qkv.bias:optimizer=sgd,weight_decay=0")  # gradients of keys' biases are rounding errors alone
END_TO_END = {
    "adamw": ("--betas", "0.8,0.95", "--group", "*bias,*norm*:weight_decay=0,lr_scale=0.5"),
    "rmsprop": ("--centered", "--momentum", "0.9", *NOISE),
    "lion": ("--weight-decay", "0.1", "--no-decay", "*bias", *NOISE),
    "muon": ("--group", "embed*:optimizer=adamw,lr_scale=0.3"),
    "adafactor": NOISE,
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packages")


@pytest.mark.sampled
@pytest.mark.parametrize("name", END_TO_END)
def test_packages_continue_bit_by_bit(name: str, packages: Path, tmp_path: Path) -> None:
    package = build(packages, "2x2x2 zero 3")
    given = ("--optimizer", name, *END_TO_END[name], "--lr", 0.01, "--clip", 1)
    trained(package, "--steps", 4, *given, "--save", tmp_path / "full")
    trained(package, "--steps", 2, *given, "--save", tmp_path / "half")
    half = tmp_path / "half" / "step_00000002"
    trained(package, "--steps", 4, "--resume", half, "--save", tmp_path / "rest")
    full, rest = (whole(tmp_path / place / "step_00000004") for place in ("full", "rest"))
    assert full.keys() == rest.keys() and all(torch.equal(x, rest[key]) for key, x in full.items())
    trained(build(packages, "dp=2 zero 2"), "--steps", 4, "--resume", half, "--save", tmp_path / "other")
    other = whole(tmp_path / "other" / "step_00000004")
    for key, x in full.items():
        torch.testing.assert_close(other[key], x, rtol=1e-9, atol=1e-10, msg=key)


def test_another_optimizer_does_not_continue(packages: Path, tmp_path: Path) -> None:
    package, save = build(packages, "dp=2"), tmp_path / "save"
    trained(package, "--steps", 1, "--optimizer", "sgd:momentum=0.9", "--save", save)
    for given in (("--optimizer", "adamw"), ("--momentum", "0"), ("--optimizer", "rmsprop")):
        done = train(package, "--steps", 2, *given, "--resume", save)
        assert done.returncode == 2 and "error P0521" in done.stderr
    done = train(package, "--steps", 2, "--betas", "0.9,0.95", "--resume", save)
    assert done.returncode == 2 and "error P0551" in done.stderr
    trained(package, "--steps", 2, "--momentum", "0.5", "--save", save, "--resume")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("lbfgs", "evaluates the loss several times"),
        ("adamw8bit", "8 bits"),
        ("lamb", "is unknown"),
        ("adam:amsgrad=yes", "amsgrad=yes is not a value"),
        ("sgd:nesterov=true", "Nesterov momentum requires a momentum"),
        ("adamw:lr=1", "has no option 'lr'"),
    ],
)
def test_refusals_name_the_cause(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        Recipe.of(text)
    assert refused.value.code == "P0551" and refused.value.exit_code == 2


def test_compiles_account_for_their_optimizer(tmp_path: Path) -> None:
    """States of trained parameters by hand: a moment for momentum, none for plain descent."""
    how: dict[str, Any] = {"mesh": "dp=2", "precision": "fp64", "zero": 1}
    kept = {}
    for text in ("sgd", "sgd:momentum=0.9", "adamw"):
        package = partc.compile(TIED, optimizer=text, **how)
        account = package.memory
        assert account is not None and account.optimizer == text
        kept[text] = account.worst.categories.get("optimizer", 0)
        parts = {item.name: item.type.local_bytes({"dp": 2}) for item in package.program.parameters if item.trainable}
    assert kept["sgd"] == 0 and kept["sgd:momentum=0.9"] == sum(parts.values())
    assert kept["adamw"] == 2 * sum(parts.values()) + 4 * len(parts)
    group = ("embed*:momentum=0",)
    grouped = partc.compile(TIED, optimizer="sgd:momentum=0.9", group=group, **how)
    assert grouped.memory is not None
    assert grouped.memory.worst.categories["optimizer"] == sum(parts.values()) - parts["embed.weight"]
    build = grouped.write(tmp_path / "build")
    save = tmp_path / "save"
    assert "memory account" not in trained(build, "--steps", 1, "--save", save)
    run = read(save / "step_00000001").run
    assert run["optimizer"] == "sgd:momentum=0.9" and run["group"] == list(group)
    said = trained(build, "--steps", 1, "--optimizer", "rmsprop")
    assert "the memory account in plan.json is for sgd:momentum=0.9: this run's optimizer is rmsprop" in said


def test_a_compile_refuses_what_packages_cannot_run(tmp_path: Path) -> None:
    for given in ({"optimizer": "lbfgs"}, {"optimizer": "sgd:betas=1,2"}, {"group": ("zzz*:eps=1",)}):
        with pytest.raises(PartcError, match="P0551"):
            partc.compile(TIED, mesh="dp=2", **given)
