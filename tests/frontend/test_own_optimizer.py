"""A model file's optimizer(model): its package takes the steps of an eager loop with that optimizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import partc
from partc.compilation.options import Options
from partc.errors import PartcError
from partc.frontend.model_files.model_file import load
from partc.frontend.model_files.own_optimizer import own_optimizer
from partc.runtime.optimizer.recipe import Recipe
from tests.durable import trained, whole

STEPS = 4
MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.add_module("odd, [1]: *?", nn.Linear(8, 8))
        for parameter in self.get_submodule("odd, [1]: *?").parameters():
            parameter.odd = True
        self.head = nn.Linear(8, 11)

    def forward(self, ids):
        return self.head(self.get_submodule("odd, [1]: *?")(self.blocks(self.embed(ids))))


def model():
    return Model()


def batch():
    return {"ids": torch.arange(32).reshape(4, 8) % 11}


def loss(model, batch):
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["ids"].roll(1, 1).flatten())


"""
GROUPED = """
def optimizer(model):
    named = dict(model.named_parameters())
    first = [p for name, p in named.items() if name.startswith("blocks.0.")]
    odd = [p for p in named.values() if hasattr(p, "odd")]
    taken = {id(p) for p in (*first, *odd)}
    rest = [p for p in named.values() if id(p) not in taken]
    return torch.optim.AdamW(
        [
            {"params": [p for p in rest if p.dim() > 1]},
            {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
            {"params": first, "lr": 3e-3, "betas": (0.5, 0.6)},
            {"params": odd, "eps": 1e-3},
        ],
        lr=1e-2, betas=(0.8, 0.95), weight_decay=0.3,
    )
"""
SEVERAL = """
def optimizer(model):
    inner = [p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("blocks")]
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    head = list(model.head.parameters())
    return [
        torch.optim.Muon(inner, lr=0.02, weight_decay=0.0),
        torch.optim.SGD(norms, lr=0.05, momentum=0.9),
        torch.optim.AdamW(head, lr=1e-3, eps=1e-6),
    ]
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "own.py"
    path.write_text(MODEL + text)
    return path


@pytest.mark.parametrize(("text", "mesh"), [(GROUPED, "dp=2,tp=2"), (SEVERAL, "pp=2,tp=2")])
def test_packages_take_the_steps_of_the_users_optimizer(text: str, mesh: str, tmp_path: Path) -> None:
    file = load(written(tmp_path, text), {})
    torch.manual_seed(1)
    model = file.model().double()
    save_file({name: x.clone() for name, x in model.state_dict().items()}, tmp_path / "init.safetensors")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    assert file.optimizer is not None and file.loss is not None
    found = file.optimizer(model)
    every = found if isinstance(found, list) else [found]
    for _ in range(STEPS):
        model.zero_grad()
        file.loss(model, file.batch()).backward()
        for each in every:
            each.step()
    package = partc.compile(file.path, mesh=mesh, microbatches=2, precision="fp64", zero=1).write(tmp_path / "build")
    trained(package, "--steps", STEPS, "--init", tmp_path / "init.safetensors", "--save", tmp_path / "save")
    last = whole(tmp_path / "save" / f"step_{STEPS:08d}")
    for name, x in model.state_dict().items():
        torch.testing.assert_close(last[name], x, rtol=1e-10, atol=1e-12, msg=lambda said, name=name: f"{name}: {said}")
    moved = {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])}
    assert ("embed.weight" in moved) == (text is GROUPED)


@pytest.mark.slow
def test_compiles_record_it_and_options_replace_it(tmp_path: Path) -> None:
    path = written(tmp_path, GROUPED)
    plan = json.loads((partc.compile(path, mesh="dp=2").write(tmp_path / "a") / "plan.json").read_text())
    command = plan["command"]
    assert command["optimizer"] == "adamw:betas=0.8,0.95,weight_decay=0.3" and command["lr"] == 0.01
    assert "blocks.*.norm.weight" not in str(command["group"])  # the first block's differ
    recipe = Recipe.of(command["optimizer"], groups=command["group"])
    assert recipe.settings("blocks.1.norm.bias", 1).options == (("betas", (0.8, 0.95)), ("weight_decay", 0.0))
    assert recipe.settings("blocks.0.up.weight", 2).lr_scale == pytest.approx(0.3)
    given = partc.compile(path, mesh="dp=2", optimizer="sgd", lr=0.5).options.command
    assert given["optimizer"] == "sgd" and given["lr"] == 0.5 and "group" not in given


def test_equal_layers_are_one_pattern() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)) for _ in range(50)))

    def build(model: nn.Module) -> torch.optim.Optimizer:
        matrices = [x for x in model.parameters() if x.dim() == 2]
        others = [x for x in model.parameters() if x.dim() != 2]
        return torch.optim.SGD([{"params": matrices}, {"params": others, "momentum": 0.5}], lr=0.1)

    found = own_optimizer(build, model, Path("own.py"))
    assert found.groups == ("*.*.bias,*.1.weight:momentum=0.5",)


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("return None", "NoneType"),
        ("return []", "NoneType"),
        ("return torch.optim.LBFGS(model.parameters())", "LBFGS"),
        ("return model.missing", "fails: AttributeError"),
        ("return torch.optim.SGD([torch.zeros(3, requires_grad=True)])", "not a parameter of the model"),
        ("return [torch.optim.SGD(model.head.parameters()), torch.optim.AdamW(model.parameters())]", "two of the"),
        ("made = torch.optim.SGD(model.parameters()); made.step = print; return made", "the step of SGD"),
        (
            "made = torch.optim.SGD(model.parameters()); made.register_step_post_hook(lambda *_: None); return made",
            "the step of SGD",
        ),
        (
            "made = torch.optim.Adam(model.parameters()); made.state[model.head.bias]['step'] = 9; return made",
            "gives Adam states",
        ),
        (
            "model.head.bias.requires_grad_(False); return torch.optim.SGD(model.blocks.parameters())",
            "changes head.bias of the model",
        ),
        (
            "nn.init.ones_(model.head.bias); return torch.optim.SGD(model.parameters())",
            "changes head.bias of the model",
        ),
        (
            "model.head.bias.data.mul_(0.5); return torch.optim.SGD(model.parameters())",
            "changes head.bias of the model",
        ),
        (
            "model.head.weight.data = torch.ones(11, 8); return torch.optim.SGD(model.parameters())",
            "changes head.weight of the model",
        ),
        ("model.blocks.eval(); return torch.optim.SGD(model.parameters())", "changes blocks.0.down.training"),
        ("return type('Mine', (torch.optim.SGD,), {})(model.parameters())", "Mine, which packages cannot run"),
    ],
)
def test_others_are_refused(body: str, cause: str, tmp_path: Path) -> None:
    with pytest.raises(PartcError, match=cause) as refused:
        partc.compile(written(tmp_path, f"def optimizer(model):\n    {body}\n"), mesh="dp=2")
    assert refused.value.code == "P0551"


def test_rates_are_checked() -> None:
    with pytest.raises(PartcError, match="P0004"):
        Options.checked(mesh="2", microbatches=1, schedule="1f1b", precision="fp32", seed=0, shard=(), lr=-1.0)
