"""Random modules, batches, meshes and options of train.py, held against plain PyTorch in double precision."""

from __future__ import annotations

import json
import os
import random
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partc
from partc.errors import PartcError
from partc.package.export import export
from partc.package.launch import local_environment
from partc.runtime.checkpoint.safetensors import load
from tests.fuzz.pieces import PIECES
from tests.prefork import Server

HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\n"
STEPS = 3
SIZES = (1, 1, 2, 3, 4, 5, 6, 7, 8)
NAMES = ("x", "X", "inputs", "batch", "h", "comm", "data", "é", "value", "labels_1")
MESHES = (
    "1",
    "2",
    "2",
    "tp=2",
    "tp=2",
    "tp=3",
    "2x2",
    "pp=2",
    "pp=2",
    "1x2x2",
    "2x1x2",
    "tp=2,dp=2",
    "dp_out=2,dp_in=2,tp=1",
)
# Refusals of what plain PyTorch trains, each for its reason: batches that do not divide, too few calls, budgets too
# small, draws, changes in place, gradients that reach nothing, weights as long as the whole batch.
PLAUSIBLE = frozenset({"P0401", "P0403", "P0404", "P0413", "P0415", "P0212", "P0217", "P0302", "P0105", "P0222"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A module as lines of text, its batch, and how it is compiled and trained."""

    init: tuple[str, ...] = ()
    body: tuple[str, ...] = ()  # assignments to v0, v1, …
    batch: tuple[tuple[str, str], ...] = ()  # names and expressions: numbers, ids, a mask
    repeat: int = 1
    last: str = "v.square().mean()"
    compile: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    verified: bool = False  # by `partc verify` too, which reads and writes more kinds of tensors

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Case:
        given = json.loads(text)
        known = {item.name for item in fields(cls)}
        tuples = {name: tuple(given[name]) for name in ("init", "body")}
        return cls(
            **{k: v for k, v in given.items() if k in known} | tuples | {"batch": tuple(map(tuple, given["batch"]))}
        )

    @property
    def text(self) -> str:
        """The model file."""
        names = ", ".join(name for name, _ in self.batch)
        x, i, m = (name for name, _ in self.batch)
        lines = [
            "class Block(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            *indented(self.init, 2),
        ]
        lines += ["    def forward(self, v, i, m):", "        v0 = v", *indented(self.body, 2), *indented(JOIN, 2)]
        lines += ["", "class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        self.blocks = nn.ModuleList(Block() for _ in range({self.repeat}))"]
        lines += [f"    def forward(self, {names}):", f"        v = {x}", "        for block in self.blocks:"]
        lines += [f"            v = block(v, {i}, {m})", f"        return {self.last}", ""]
        lines += ["def model():", "    return Model()", ""]
        entries = ", ".join(f"{name!r}: {text}" for name, text in self.batch)
        lines += ["def batch():", f"    return {{{entries}}}", ""]
        lines += ["def data(step):", "    torch.manual_seed(step + 7)", "    return batch()", ""]
        return HEAD + "\n".join(lines)


# What a block makes joins the values that flow through all of them, whatever its shape.
JOIN = (
    "w = v0",
    "if w.shape != v.shape:",
    "    w = w.flatten(1).mean(1).view(-1, *[1] * (v.dim() - 1)) if w.shape[:1] == v.shape[:1] and w.dim() > 1 else w.mean()",
    "return v + 0.1 * torch.tanh(w)",
)


def indented(lines: tuple[str, ...], depth: int) -> list[str]:
    return [f"{'    ' * depth}{line}" for line in lines]


def draw(seed: int) -> Case:
    """A case whose module runs forward and backward in plain PyTorch."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    mesh = rng.choice(MESHES)
    pipelines = "pp=2" in mesh or (mesh.count("x") == 2 and mesh[0] == "2")
    ways = 4 if mesh.startswith("dp_out") else 2 if mesh in ("2", "2x2", "1x2x2", "tp=2,dp=2") else 1
    microbatches = rng.choice((1, 1, 2, 3)) if not pipelines else rng.choice((2, 2, 4))
    rows = ways * microbatches * rng.choice((1, 1, 2, 3))
    shape = (rows, *(rng.choice(SIZES) for _ in range(rng.choice((1, 1, 2, 2, 3)))))
    names = rng.sample(NAMES, 3)
    ids = rng.choice(
        (
            "torch.randint(10, ({0}, {1}))",
            "torch.randint(10, ({0},))",
            "torch.randint(10, ({0}, {1}), dtype=torch.int32)",
        )
    )
    batch = (
        (names[0], f"torch.randn{shape}"),
        (names[1], ids.format(rows, rng.choice(SIZES))),
        (names[2], f"torch.rand({rows}, {rng.choice(SIZES)}) > 0.3"),
    )
    compile: dict[str, Any] = {"mesh": mesh, "microbatches": microbatches}
    if pipelines:
        compile["schedule"] = rng.choice(("1f1b", "1f1b", "gpipe", "zero-bubble", "interleaved", "zbv"))
    compile["zero"] = rng.choice((0, 0, 1, 2, 3)) if ways > 1 else 0
    compile["recompute"] = rng.choice(("none", "none", "none", "selective", "full", "1MB"))
    compile["bucket"] = rng.choice(("25MB", "0B", "500B"))
    train: dict[str, Any] = {
        "optimizer": rng.choice(("sgd", "sgd", "adamw")),
        "lr": 0.01,
        "weight-decay": rng.choice((0.0, 0.1)),
    }
    if rng.random() < 0.4:
        train["clip"] = rng.choice((0.1, 10.0))
    if rng.random() < 0.3:
        train["accumulate"] = 2
    if rng.random() < 0.3:
        train["warmup"] = 2
    if rng.random() < 0.2:
        train["no-decay"] = "*.p0"
    case = Case(batch=batch, repeat=rng.choice((1, 2, 3)) + 2 * pipelines, compile=compile, train=train)
    return replace(_written(case, rng), verified=rng.random() < 0.15)


def _written(case: Case, rng: random.Random) -> Case:
    """With a body: pieces are tried on real tensors, and those that run are kept."""
    space: dict[str, Any] = {"torch": torch, "F": F, "nn": nn}
    x, space["i"], space["m"] = (eval(text, space) for _, text in case.batch)
    values = {"v": x.double()}
    init: list[str] = []
    body: list[str] = ["v1 = nn.functional.linear(v, self.p0)"]
    init.append(f"self.p0 = nn.Parameter(torch.randn({x.shape[-1]}, {x.shape[-1]}) * 0.5)")
    space["self"] = nn.Module()
    torch.set_default_dtype(torch.float64)
    try:
        exec(init[0], space)
        values["v1"] = eval("F.linear(v, self.p0)", {**space, "v": values["v"]})
        wanted = rng.randint(1, 6)
        for _ in range(12 * wanted):
            if len(body) > wanted:
                break
            _try(rng.choice(PIECES), rng, space, values, init, body)
    finally:
        torch.set_default_dtype(torch.float32)
    last = max(values, key=lambda name: int(name[1:] or 0))
    return replace(case, init=tuple(init), body=(*body, f"v0 = {last}"))


def _try(
    piece: str, rng: random.Random, space: dict[str, Any], values: dict[str, Tensor], init: list[str], body: list[str]
) -> None:
    """Add a line for a piece, if it runs."""
    a, b = rng.choice([*values][-3:]), rng.choice([*values])
    local: dict[str, Any] = {
        **space,
        **values,
        "a": values[a],
        "b": values[b],
        "d": rng.choice(SIZES),
        "d2": rng.choice(SIZES),
    }
    more: list[str] = []
    module = space["self"]

    def held(text: str) -> str:
        name = f"n{len(init) + len(more)}"
        more.append(f"self.{name} = {text}")
        return f"self.{name}"

    try:
        piece = re.sub(r"\{([^{}]*)\}", lambda match: str(_plain(eval(match[1], local))), piece)
        piece = _calls(piece, "P", lambda inner: held(f"nn.Parameter(torch.randn({inner}) * 0.5)"))
        piece = _calls(piece, "B", lambda inner: held(f"nn.Buffer({inner})"))
        piece = _calls(piece, "M", held)
        for line in more:
            exec(line, local)
        name = f"v{len(body) + 1}"
        code = re.sub(r"\ba\b", a, re.sub(r"\bb\b", b, piece))
        with torch.random.fork_rng():
            made_ = eval(code, local)
            again = eval(code, local)
    except Exception:
        return
    if not isinstance(made_, Tensor) or made_.is_complex() or made_.numel() > 4096 or not made_.isfinite().all():
        return
    if not torch.equal(made_, again) or not isinstance(module, nn.Module):
        return
    if not made_.is_floating_point():
        code = f"({code}).to(v.dtype)"
        made_ = made_.double()
    init.extend(more)
    body.append(f"{name} = {code}")
    values[name] = made_.detach() if not made_.requires_grad else made_


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, torch.Size) else value


def _calls(text: str, name: str, make: Callable[[str], str]) -> str:
    """The text with every call of `name` replaced, brackets matched."""
    while (match := re.search(rf"(?<![\w.]){name}\(", text)) is not None:
        depth, end = 1, match.end()
        while depth:
            depth += (text[end] == "(") - (text[end] == ")")
            end += 1
        text = text[: match.start()] + make(text[match.end() : end - 1]) + text[end:]
    return text


# -- plain PyTorch -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """A plain loop's final state, and by name the least share of the largest gradient that any element had."""

    state: Mapping[str, Tensor]
    least: Mapping[str, Tensor]


def plain(case: Case, *, repeated: bool) -> Plain:
    """Train with torch's own optimizers; raises what PyTorch raises."""
    space: dict[str, Any] = {}
    exec(compile(case.text, "<model>", "exec"), space)
    torch.manual_seed(0)
    model: nn.Module = space["model"]().double()
    train, parts = case.train, int(case.compile["microbatches"]) if repeated else 1
    trained = dict(model.named_parameters())
    free = {name for name in trained if "no-decay" in train and name.endswith(".p0")}
    groups = [
        {"params": [x for name, x in trained.items() if name not in free], "weight_decay": train["weight-decay"]},
        {"params": [x for name, x in trained.items() if name in free], "weight_decay": 0.0},
    ]
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[train["optimizer"]]
    optimizer = kind([group for group in groups if group["params"]], lr=train["lr"])
    least = {name: torch.full_like(x, torch.inf) for name, x in trained.items()}
    accumulate = int(train.get("accumulate", 1))
    torch.set_default_dtype(torch.float64)
    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            for number in range(step * accumulate, (step + 1) * accumulate):
                for entries in _batches(space, number, parts):
                    (model(**entries) / (parts * accumulate)).backward()
            found = [x.grad.abs().max() for x in trained.values() if x.grad is not None and x.numel()]
            largest = max([*map(float, found), 1e-300])
            for name, x in trained.items():
                if x.grad is not None:
                    least[name] = torch.minimum(
                        least[name], torch.where(x.grad == 0, torch.inf, x.grad.abs() / largest)
                    )
            if "clip" in train:
                nn.utils.clip_grad_norm_(trained.values(), train["clip"])
            for group in optimizer.param_groups:
                group["lr"] = train["lr"] * min(1.0, (step + 1) / (train.get("warmup") or 1))
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    return Plain(state={name: x.detach().clone() for name, x in model.state_dict().items()}, least=least)


def _batches(space: Mapping[str, Any], number: int, parts: int) -> Iterator[dict[str, Tensor]]:
    torch.set_default_dtype(torch.float32)
    batch = {name: x.double() if x.is_floating_point() else x for name, x in space["data"](number).items()}
    torch.set_default_dtype(torch.float64)
    cut = {name: x.chunk(parts) for name, x in batch.items()}
    for part in range(parts):
        yield {name: pieces[part] for name, pieces in cut.items()}


# -- one case ----------------------------------------------------------------------------------


class Failed(AssertionError):
    """A case that crashes, is refused without reason, or ends with other numbers; `kind` names which."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


def run(case: Case, server: Server) -> str:
    """Returns "holds", "invalid" for what PyTorch refuses, or a refusal's code. Raises Failed."""
    try:
        expected = plain(case, repeated=False)
    except Exception:
        return "invalid"
    if not all(x.isfinite().all() for x in expected.state.values()):
        return "invalid"
    with tempfile.TemporaryDirectory(prefix="partc-fuzz-") as name:
        folder = Path(name)
        (folder / "m.py").write_text(case.text, encoding="utf-8")
        try:
            package = partc.compile(folder / "m.py", precision="fp64", **case.compile)
        except PartcError as error:
            # Numbers of the whole batch's rows in the model, of which a microbatch has fewer.
            literal = error.code == "P0206" and case.compile["microbatches"] > 1
            if error.code in PLAUSIBLE or literal:
                return error.code
            raise Failed(f"refused {error.code}", str(error)) from None
        except Exception as error:
            raise Failed(_place(error), f"{type(error).__name__}: {error}") from error
        if package.program.separate_batches:
            try:
                expected = plain(case, repeated=True)
            except Exception:
                return "invalid"
        package.write(folder / "build")
        if case.verified:
            try:
                result = package.verify(steps=1)
            except Exception as error:
                raise Failed(f"verify: {_place(error)}", f"{type(error).__name__}: {error}") from error
            if not result.ok:
                raise Failed("verify differs", str(result.worst))
        words = [word for key, value in case.train.items() for word in (f"--{key}", str(value))]
        train = [
            str(folder / "build" / "train.py"),
            "--virtual",
            "--steps",
            str(STEPS),
            "--save",
            str(folder / "save"),
            *words,
        ]
        if server.start(train, folder / "out.txt", local_environment()).wait():
            said = (folder / "out.txt").read_text(errors="replace").strip().splitlines()
            raise Failed(f"stopped: {said[-1][:60] if said else ''}", "\n".join(said[-8:]))
        export(folder / "build", folder / "save", folder / "end.safetensors", say=lambda line: None)
        state, _ = load(folder / "end.safetensors")
        _compare(case, state, expected)
    return "holds"


def _place(error: BaseException) -> str:
    """Where in partc an error was raised."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if f"{os.sep}partc{os.sep}" in frame.filename
    ]
    frame = (frames or traceback.extract_tb(error.__traceback__))[-1]
    return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"


def _compare(case: Case, state: Mapping[str, Tensor], expected: Plain) -> None:
    if set(state) != set(expected.state):
        raise Failed("names differ", str(set(state) ^ set(expected.state)))
    scale = max(
        (float(x.abs().max()) for x in expected.state.values() if x.is_floating_point() and x.numel()), default=1.0
    )
    for name, theirs in expected.state.items():
        mine = state[name]
        if mine.shape != theirs.shape or mine.is_floating_point() != theirs.is_floating_point():
            raise Failed("types differ", f"{name} {mine.dtype}{tuple(mine.shape)}, {theirs.dtype}{tuple(theirs.shape)}")
        apart = (mine.double() - theirs.double()).abs()
        if case.train["optimizer"] == "adamw" and name in expected.least:
            # AdamW divides by what is rounding alone where gradients vanish.
            apart = apart.masked_fill(expected.least[name] < 1e-7, 0)
        if theirs.numel() and not float(apart.max()) <= 1e-8 * max(scale, 1.0):
            raise Failed("differs", f"{name} by {float(apart.max()):.1e}")


# -- smaller cases -----------------------------------------------------------------------------


def shrunk(case: Case, kind: str, server: Server, *, attempts: int = 30) -> Case:
    """A smaller case that fails in the same way: without lines, without options, on fewer ranks."""
    done = False
    while not done and attempts > 0:
        done = True
        for smaller in _smaller(case):
            attempts -= 1
            if attempts < 0:
                break
            try:
                run(smaller, server)
            except Failed as failure:
                if failure.kind == kind:
                    case, done = smaller, False
                    break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    for key in case.train:
        if key not in ("optimizer", "lr", "weight-decay"):
            yield replace(case, train={k: v for k, v in case.train.items() if k != key})
    for key, value in (
        ("zero", 0),
        ("recompute", "none"),
        ("bucket", "25MB"),
        ("schedule", "1f1b"),
        ("microbatches", 1),
        ("mesh", "1"),
    ):
        if case.compile.get(key, value) != value:
            yield replace(case, compile={**case.compile, key: value})
    if case.verified:
        yield replace(case, verified=False)
    if case.repeat > 1:
        yield replace(case, repeat=1)
    for index in reversed(range(1, len(case.body) - 1)):
        target, _, code = case.body[index].partition(" = ")
        for other in dict.fromkeys(re.findall(r"\bv\d*\b", code)) or ("v1",):
            body = [re.sub(rf"\b{target}\b", other, line) for n, line in enumerate(case.body) if n != index]
            yield _without_unused(replace(case, body=tuple(body)))


def _without_unused(case: Case) -> Case:
    text = "\n".join(case.body)
    names = {line: line.removeprefix("self.").partition(" ")[0] for line in case.init}
    kept = (line for line, name in names.items() if re.search(rf"self\.{name}\b", text))
    return replace(case, init=tuple(kept))
