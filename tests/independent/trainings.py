"""Packages trained in real processes over gloo, and their exported states against the plain loop's."""

from __future__ import annotations

import fnmatch
import json
import math
import os
import random
import subprocess
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import partc
from partc.errors import PartcError
from partc.ir.mesh import Mesh
from partc.package.export import export
from partc.package.launch import local_environment, torchrun_command
from tests.independent.plain import Recipe, Trained, train
from tests.prefork import Server

MODELS = Path(__file__).parent / "models"
ALLOWED = 1e-10  # of a tensor's largest element, or of 1: fp64 sums in another order


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A mesh, how a package is compiled for it, and how it is trained."""

    mesh: str
    recipe: Recipe
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        words = [f"{key}={value}" for key, value in self.options.items() if key != "microbatches"]
        return " ".join([self.mesh, *words])


_DECAY = {"weight_decay": 0.1, "clip": 0.5}
SETTINGS: tuple[Setting, ...] = (
    Setting(mesh="dp=2", recipe=Recipe(**_DECAY, lr_schedule="linear", min_lr=1e-4)),
    Setting(mesh="tp=2", recipe=Recipe(optimizer="sgd", lr=0.05, weight_decay=0.05, clip=1.0)),
    Setting(
        mesh="pp=2",
        options={"microbatches": 4},
        recipe=Recipe(**_DECAY, accumulate=2, warmup=2, lr_schedule="cosine", min_lr=1e-5),
    ),
    Setting(mesh="dp=2,tp=2", options={"zero": 1}, recipe=Recipe(**_DECAY, no_decay=("*bias", "*norm*"))),
    Setting(mesh="pp=2,dp=2", options={"microbatches": 2, "zero": 3}, recipe=Recipe(**_DECAY, accumulate=2)),
    Setting(mesh="pp=2,tp=2", options={"microbatches": 4, "schedule": "zero-bubble"}, recipe=Recipe(**_DECAY)),
    Setting(mesh="pp=2,dp=2,tp=2", options={"microbatches": 2, "zero": 2}, recipe=Recipe(**_DECAY, warmup=3)),
    Setting(mesh="dp=4", options={"zero": 3, "recompute": "selective"}, recipe=Recipe(**_DECAY, accumulate=3)),
    Setting(mesh="cp=2", recipe=Recipe(**_DECAY)),
    Setting(mesh="dp=4", options={"zero": 1}, recipe=Recipe(**_DECAY)),
    Setting(
        mesh="pp=2",
        options={"microbatches": 4, "schedule": "interleaved", "virtual_stages": 2},
        recipe=Recipe(**_DECAY),
    ),
    Setting(mesh="pp=2,dp=2", options={"microbatches": 4, "schedule": "zbv"}, recipe=Recipe(**_DECAY)),
    Setting(mesh="dp=2,tp=2", options={"zero": 3, "recompute": "full"}, recipe=Recipe(**_DECAY, accumulate=2)),
    Setting(mesh="tp=3", recipe=Recipe(**_DECAY)),
)


MESHES = (
    *("dp=2", "tp=2", "pp=2", "cp=2", "dp=4", "tp=4", "pp=4", "dp=2,tp=2", "dp=2,cp=2", "cp=2,tp=2", "pp=2,dp=2"),
    *("pp=2,tp=2", "pp=2,cp=2", "dp=2,tp=2,cp=2", "pp=2,dp=2,tp=2", "dp=3", "tp=3"),
)
RARE_OPTIMIZERS = ("nadam", "radam", "adadelta", "adamax", "asgd")


def drawn_setting(seed: int) -> Setting:
    """A setting with options of the compiler and of train.py drawn at random: the same for the same seed."""
    draw = random.Random(seed)
    mesh = draw.choice(MESHES)
    options: dict[str, Any] = {"recompute": draw.choice(("none", "none", "selective", "full"))}
    options["microbatches"] = draw.choice((1, 2, 4))
    if "pp" in mesh:
        options["schedule"] = draw.choice(("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv"))
        if options["schedule"] == "interleaved":
            options["virtual_stages"] = 2
    if "dp" in mesh:
        options["zero"] = draw.choice((0, 1, 2, 3))
    recipe = Recipe(
        optimizer=draw.choice(("adamw", "adamw", "sgd:momentum=0.9", "adam", "rmsprop", "adagrad")),
        lr=draw.choice((1e-3, 3e-3)),
        weight_decay=draw.choice((None, 0.1)),
        clip=draw.choice((None, 0.5)),
        accumulate=draw.choice((1, 1, 2)),
        lr_schedule=draw.choice(("constant", "linear", "cosine")),
        no_decay=draw.choice(((), ("*bias",))),
    )
    rare: dict[str, tuple[Any, ...]] = {
        "loss_chunks": (2, 4),
        "bucket": ("1KB", "64B"),
        "recompute": ("softmax,all_gather", "gelu,relu,tanh,mul", "sum,add,layer_norm"),
        "nodes": (2,),
    }
    options |= {name: draw.choice(values) for name, values in rare.items() if draw.random() < 0.25}
    if Mesh.parse(mesh).size != 4:
        options.pop("nodes", None)
    if draw.random() < 0.25:
        recipe = replace(recipe, optimizer=draw.choice(RARE_OPTIMIZERS))
    return Setting(mesh=mesh, options=options, recipe=recipe)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One model in one setting: the largest error of its state dict and losses, or the code that refuses it."""

    model: str
    setting: str
    error: float = float("inf")
    where: str = ""
    refused: str = ""

    @property
    def ok(self) -> bool:
        return bool(self.refused) or self.error <= ALLOWED


def model_files(folder: Path = MODELS) -> list[Path]:
    return sorted(path for path in folder.glob("*.py") if not path.name.startswith("_"))


def row(path: Path, settings: Sequence[Setting], torchrun: bool) -> list[Outcome]:
    """One model in all settings."""
    server = None if torchrun else Server()
    found = []
    for setting in settings:
        with tempfile.TemporaryDirectory(prefix="partc-independent-") as folder:
            try:
                found.append(compared(path, setting, Path(folder), server))
            except Exception as error:  # a bug of partc, which the table shows like the others
                said = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}"
                found.append(Outcome(model=path.stem, setting=setting.name, where=said))
    if server is not None:
        server.close()
    return found


class Ended(Exception):
    """A rank that stopped with an error, and its own words."""


def compared(path: Path, setting: Setting, folder: Path, server: Server | None) -> Outcome:
    """Compile, train and export a model, and hold its end against the plain loop's."""
    try:
        package = partc.compile(str(path), mesh=setting.mesh, precision="fp64", **setting.options)
    except PartcError as refusal:
        return Outcome(model=path.stem, setting=setting.name, refused=refusal.code)
    build = package.write(folder / "build")
    names = [parameter.name for parameter in package.program.parameters]
    spared = tuple(glob for glob in setting.recipe.no_decay if fnmatch.filter(names, glob))  # others are refused
    recipe = replace(setting.recipe, no_decay=spared)
    found = packaged(build, recipe, folder, server)
    parts = setting.options["microbatches"] if package.program.separate_batches else 1
    plain = train(path, recipe, microbatches=parts)
    where, error = max(differences(found, plain), key=lambda item: item[1])
    return Outcome(model=path.stem, setting=setting.name, error=error, where=where)


def packaged(build: Path, recipe: Recipe, folder: Path, server: Server | None) -> Trained:
    """A package's end: forked ranks where a server has torch loaded, else torchrun."""
    log = folder / "log.jsonl"
    arguments = [*recipe.arguments, "--save", str(folder / "ckpt"), "--metrics", str(log)]
    if server is None:
        done = subprocess.run(
            torchrun_command(build, arguments), env=local_environment(), capture_output=True, text=True
        )
        if done.returncode:
            raise Ended(done.stderr)
    else:
        _forked(build, arguments, folder, server)
    export(build, folder / "ckpt", folder / "end.safetensors", say=lambda line: None)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    losses = tuple(math.nan if line["loss"] is None else line["loss"] for line in lines)  # JSON has no NaN
    skipped = frozenset(step for step, line in enumerate(lines) if line.get("skipped"))
    state = load_file(folder / "end.safetensors")
    return Trained(state=state, losses=losses, gone_without=frozenset(), skipped=skipped)


def _forked(build: Path, arguments: Sequence[str], folder: Path, server: Server) -> None:
    """Every rank a process of its own, with the environment that torchrun gives it."""
    ranks = Mesh.parse(json.loads((build / "plan.json").read_text())["mesh"]).size
    output = folder / "output.txt"
    command = [str(build / "train.py"), *arguments]
    if server.ranks(ranks, command, output, {**os.environ, "OMP_NUM_THREADS": "1"}).wait():
        raise Ended(output.read_text()[-6000:])


def differences(found: Trained, plain: Trained) -> Iterator[tuple[str, float]]:
    """Per loss and per entry of the state dict, the largest difference."""
    losses = (torch.tensor(each.losses, dtype=torch.float64) for each in (found, plain))
    for step, (mine, theirs) in enumerate(zip(*losses, strict=True)):
        yield f"loss {step}", _difference(mine, theirs)
    if found.state.keys() != plain.state.keys():
        yield f"names {sorted(found.state.keys() ^ plain.state.keys())}", float("inf")
        return
    for name, theirs in plain.state.items():
        yield name, _difference(found.state[name], theirs)


def _difference(mine: Tensor, theirs: Tensor) -> float:
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        return float("inf")
    mine, theirs = mine.double(), theirs.double()
    differ = (mine != theirs) & ~(mine.isnan() & theirs.isnan())
    if not differ.any():
        return 0.0
    error = float((mine - theirs)[differ].abs().max()) / max(1.0, float(theirs.abs().nan_to_num(0.0, posinf=0.0).max()))
    return error if error == error else float("inf")
