"""Evaluations between steps equal those of one device, in evaluation mode, with the parameters of the step."""

from __future__ import annotations

import array
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import partc
from partc.errors import PartcError
from partc.runtime.checkpoint.manifest import checkpoints
from tests.durable import train, trained, whole
from tests.models import fused

# The tests' own models live in a module that a package can import: a top-level one.
sys.path.append(str(Path(__file__).parents[1] / "models"))
import given_models

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.norm = nn.{norm}(16)
        self.head = nn.Linear(16, 24, bias=False)
        {tie}

    def forward(self, ids):
        x = self.blocks(self.embed(ids))
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2) if {batched} else self.norm(x))


def model():
    return Net()


def made(generator=None):
    ids = torch.randint(24, (16, 6), generator=generator)
    return {{"ids": ids, "labels": torch.randint(24, (16, 6), generator=generator).masked_fill(ids < 5, -100)}}


def batch():
    return made()


def loss(model, batch):
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def evaluate(model, batch):
    {evaluate}


{data}
"""
LOSS = "return loss(model, batch)"
METRICS = """logits, labels = model(batch["ids"]), batch["labels"]
    right = (logits.argmax(-1) == labels) & (labels >= 0)
    own = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    return {"loss": own, "accuracy": right.double().sum() / (labels >= 0).sum(), "right": right.sum(), "wide": own.double()}"""
ACCURACY = 'return (model(batch["ids"]).argmax(-1) == batch["labels"]).double().mean()'
FEW_CALLS = 'return {"norm": model.embed(batch["ids"]).square().mean(), "tokens": (batch["labels"] >= 0).sum()}'
DATA = "def eval_data(step):\n    return made(torch.Generator().manual_seed(1000 + step))"
IN_ORDER = "eval_data = [made(torch.Generator().manual_seed(1000 + step)) for step in range(2)]"


def written(folder: Path, evaluate: str = LOSS, data: str = DATA, tie: str = "", norm: str = "BatchNorm1d") -> Path:
    file = folder / "mine.py"
    batched = norm == "BatchNorm1d"
    file.write_text(MODEL.format(evaluate=evaluate, data=data, tie=tie, norm=norm, batched=batched))
    return file


def evaluations(metrics: Path) -> dict[int, dict[str, float]]:
    """By step, the results of evaluations by their names in the log."""
    entries = map(json.loads, metrics.read_text().splitlines())
    found = {entry["step"]: {name: x for name, x in entry.items() if "evaluation" in name} for entry in entries}
    return {step: results for step, results in found.items() if results}


def on_one_device(package: Path, checkpoint: Path, seeds: list[int]) -> dict[str, float]:
    spec = importlib.util.spec_from_file_location("plain_model", package / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model: nn.Module = module.model().double()
    saved = whole(checkpoint)
    missing, _ = model.load_state_dict(
        {name: saved[name] for name in model.state_dict() if name in saved}, strict=False
    )
    assert set(missing) <= {"head.weight", "norm.num_batches_tracked"}  # tied, or read by nothing
    model.eval()
    with torch.no_grad():
        batches = [module.made(torch.Generator().manual_seed(seed)) for seed in seeds]
        each = [module.evaluate(model, batch) for batch in batches]
        if isinstance(each[0], torch.Tensor):
            return {"evaluation": sum(value.item() for value in each) / len(each)}
        names = each[0]
        return {f"evaluation/{name}": sum(values[name].item() for values in each) / len(each) for name in names}


CASES = {
    "dp=2,tp=2": {"mesh": "dp=2,tp=2", "microbatches": 2},
    "pp=2,dp=2": {"mesh": "pp=2,dp=2", "microbatches": 4},
    "pp=2,tp=2, interleaved": {"mesh": "pp=2,tp=2", "microbatches": 2, "schedule": "interleaved"},
    "dp=4, zero 3": {"mesh": "dp=4", "zero": 3},
    "pp=2,dp=2, zero 3": {"mesh": "pp=2,dp=2", "microbatches": 2, "zero": 3},
    "pp=2, zbv": {"mesh": "pp=2", "microbatches": 4, "schedule": "zbv"},
    "dp=2, zero 1, recomputed": {"mesh": "dp=2", "zero": 1, "recompute": "full", "loss_chunks": 2},
    "pp=4, few calls": {"mesh": "pp=4", "microbatches": 2},
    "pp=2, zbv, few calls": {"mesh": "pp=2", "microbatches": 2, "schedule": "zbv"},
}


EVALUATED = {
    "dp=2,tp=2": METRICS,
    "pp=2,tp=2, interleaved": METRICS,
    "pp=2,dp=2, zero 3": METRICS,
    "dp=4, zero 3": ACCURACY,
    "pp=4, few calls": FEW_CALLS,
    "pp=2, zbv, few calls": 'return batch["ids"].double().mean()',
}


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
def test_an_evaluation_equals_that_of_one_device(tmp_path: Path, case: str) -> None:
    file = written(tmp_path, EVALUATED.get(case, LOSS))
    package = partc.compile(file, precision="fp64", **CASES[case]).write(tmp_path / "build")  # type: ignore[arg-type]
    arguments = ("--eval-every", 3, "--eval-batches", 3, "--metrics", tmp_path / "m", "--save", tmp_path / "save")
    trained(package, "--steps", 5, "--save-every", 3, *arguments)
    found = evaluations(tmp_path / "m")
    assert list(found) == [3, 5]
    for step, checkpoint in zip((5, 3), checkpoints(tmp_path / "save"), strict=True):
        assert found[step] == pytest.approx(on_one_device(package, checkpoint, [1000, 1001, 1002]), rel=1e-12), step


LEFT_OUT = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.more = nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, x, hard):
        h = self.enter(x)
        if hard.any():
            h = h.index_put((hard.nonzero().squeeze(1),), self.more(h[hard]))
        return h.square().mean()


def model():
    return Net()


def made(generator=None):
    return {"x": torch.randn(8, 4, generator=generator).double(), "hard": torch.rand(8, generator=generator) > 0.4}


def batch():
    return made()


def loss(model, batch):
    return model(batch["x"], batch["hard"])


def evaluate(model, batch):
    return loss(model, batch)


def eval_data(step):
    return made(torch.Generator().manual_seed(1000 + step))
"""

# Stages of the evaluation read weights and statistics that other stages hold in training, in another order.
ORDERED = """
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16, momentum=None)
        self.head = nn.Linear(16, 24, bias=False)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, ids):
        x = self.embed(ids)
        if self.training:
            with torch.no_grad():
                self.seen.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        for layer in (self.a, self.b, self.c):
            x = x + F.gelu(layer(x))
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


def model():
    return Net()


def made(generator=None):
    ids = torch.randint(24, (16, 6), generator=generator)
    return {"ids": ids, "labels": torch.randint(24, (16, 6), generator=generator)}


def batch():
    return made()


def loss(model, batch):
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def evaluate(model, batch):
    x = model.embed(batch["ids"]) - model.seen
    by_head = x @ model.head.weight.t() @ model.c.weight.sum(0).expand(24, 16)
    return {
        "early": x.square().mean(),
        "weights": model.embed.weight.norm() + model.norm.running_var.rsqrt().sum() + model.seen.square().sum(),
        "loss": loss(model, batch),
        "seen": (batch["labels"] > 0).sum(),
        "back": by_head.square().mean(),
        "twice": model.b(model.b(model.c(x))).mean(),
    }


def eval_data(step):
    return made(torch.Generator().manual_seed(1000 + step))
"""


@pytest.mark.sampled
def _evaluates_as_one_device(model: str, tmp_path: Path, options: dict[str, Any]) -> None:
    """Train a package of the model file for two steps, and compare its evaluation."""
    file = tmp_path / "mine.py"
    file.write_text(model)
    package = partc.compile(file, precision="fp64", **options).write(tmp_path / "build")
    trained(package, "--steps", 2, "--eval-every", 2, "--metrics", tmp_path / "m", "--save", tmp_path / "save")
    expected = on_one_device(package, checkpoints(tmp_path / "save")[0], [1000])
    assert evaluations(tmp_path / "m")[2] == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"mesh": "pp=2,dp=2", "microbatches": 2, "zero": 3},
        {"mesh": "pp=4", "microbatches": 2},
        {"mesh": "pp=2", "microbatches": 4, "schedule": "zbv"},
        {"mesh": "pp=2,tp=2", "microbatches": 2, "schedule": "interleaved"},
        {"mesh": "dp=2", "zero": 3},
    ],
    ids=lambda options: options["mesh"],
)
def test_stages_are_sent_what_they_do_not_hold(tmp_path: Path, options: dict[str, Any]) -> None:
    _evaluates_as_one_device(ORDERED, tmp_path, options)


# In training each microbatch is a batch of its own, as forward changes a buffer; in the evaluation none is.
EXPERTS = """
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.BatchNorm1d(8), nn.Linear(8, 4, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape) / 3) for shape in ((8, 12), (12, 8)))

    def forward(self, x):
        x = self.norm(x)
        weight, chosen = self.router(x).softmax(-1).topk(2, -1)
        gate = torch.zeros(len(x), 4, dtype=x.dtype).scatter(1, chosen, weight)
        hidden = F.gelu(torch.einsum("td,edh->teh", x, self.up))
        return x + torch.einsum("teh,ehd,te->td", hidden, self.down, gate)


def model():
    return Net()


def made(generator=None):
    return {"x": torch.randn(16, 8, generator=generator).double()}


def batch():
    return made()


def loss(model, batch):
    return model(batch["x"]).square().mean()


def evaluate(model, batch):
    return loss(model, batch)


def eval_data(step):
    return made(torch.Generator().manual_seed(1000 + step))
"""


@pytest.mark.parametrize("options", [{"mesh": "ep=2"}, {"mesh": "dp=2,ep=2", "zero": 1}], ids=str)
def test_experts_of_separate_microbatches_are_evaluated(tmp_path: Path, options: dict[str, Any]) -> None:
    _evaluates_as_one_device(EXPERTS, tmp_path, {**options, "microbatches": 2})


@pytest.mark.slow
def test_state_that_only_the_evaluation_reads_or_moves_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    own = ORDERED.replace('"early": x', '"early": model.own * x').replace(
        'self.register_buffer("seen"',
        'self.register_buffer("own", torch.ones(()))\n        self.register_buffer("seen"',
    )
    for text, name in ((own, "own"), (ORDERED.replace("if self.training:", "if True:"), "seen")):
        file.write_text(text)
        with pytest.raises(PartcError, match=rf"evaluate\(\) reads.* {name}\b") as refused:
            partc.compile(file, mesh="pp=2", microbatches=2)
        assert refused.value.code == "P0420"


@pytest.mark.slow
def test_tied_weights_and_an_iterable(tmp_path: Path) -> None:
    file = written(tmp_path, data=IN_ORDER, tie="self.head.weight = self.embed.weight", norm="LayerNorm")
    package = partc.compile(file, mesh="2x1x2", microbatches=2, precision="fp64").write(tmp_path / "build")
    arguments = ("--eval-every", 2, "--eval-batches", 3, "--metrics", tmp_path / "m", "--save", tmp_path / "save")
    trained(package, "--steps", 2, *arguments)
    expected = on_one_device(package, checkpoints(tmp_path / "save")[0], [1000, 1001, 1000])
    assert evaluations(tmp_path / "m")[2] == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_an_evaluation_changes_nothing_in_the_training(tmp_path: Path) -> None:
    package = partc.compile(written(tmp_path), mesh="2x2x1", microbatches=2, zero=1).write(tmp_path / "build")
    ends = []
    for every in (0, 1):
        trained(package, "--steps", 3, "--eval-every", every, "--save", tmp_path / f"save{every}")
        ends.append(whole(checkpoints(tmp_path / f"save{every}")[0]))
    assert all(ends[0][name].equal(ends[1][name]) for name in ends[0])


@pytest.mark.slow
@pytest.mark.processes
def test_real_ranks_evaluate_alike(tmp_path: Path) -> None:
    package = partc.compile(written(tmp_path), mesh="2x2x1", microbatches=2, zero=3).write(tmp_path / "build")
    for real in (False, True):
        trained(package, "--steps", 3, "--eval-every", 2, "--metrics", tmp_path / f"m{real}", real=real)
    assert evaluations(tmp_path / "mTrue") == evaluations(tmp_path / "mFalse") and evaluations(tmp_path / "mTrue")


@pytest.mark.slow
def test_a_token_file_is_evaluated_on(tmp_path: Path) -> None:
    package = partc.compile(written(tmp_path, data=""), mesh="dp=2", precision="fp64").write(tmp_path / "build")
    (tmp_path / "t.bin").write_bytes(array.array("H", [index % 24 for index in range(200)]).tobytes())
    arguments = ("--eval-every", 1, "--metrics", tmp_path / "m")
    trained(package, "--steps", 2, *arguments, "--eval-data", tmp_path / "t.bin")
    on_file = evaluations(tmp_path / "m")
    trained(package, "--steps", 2, *arguments)
    assert len(on_file) == 2 and on_file != evaluations(tmp_path / "m")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("evaluate", "code"),
    [
        ("return model(batch['ids'])", "P0208"),
        ("return {'loss': 3}", "P0206"),
        ("return {'loss': loss(model, batch), 'logits': model(batch['ids'])}", "P0208"),
        ("return {}", "P0206"),
        ("return loss(model, batch) + torch.rand(())", "P0420"),
    ],
)
def test_evaluations_that_cannot_be_compiled(tmp_path: Path, evaluate: str, code: str) -> None:
    with pytest.raises(PartcError) as refused:
        partc.compile(written(tmp_path, evaluate), mesh="dp=2")
    assert refused.value.code == code


@pytest.mark.slow
def test_a_parameter_that_only_the_training_cuts_is_named(tmp_path: Path) -> None:
    file = written(tmp_path, "return model.norm.weight.cumsum(0).sum()")
    with pytest.raises(PartcError, match=r"the training cuts norm\.weight") as refused:
        partc.compile(file, mesh="tp=2")
    assert refused.value.code == "P0420"
    assert partc.compile(file, mesh="tp=2", shard=["norm.weight=[_]"]).evaluation is not None


def test_a_package_without_an_evaluation_says_so(tmp_path: Path) -> None:
    file = written(tmp_path)
    file.write_text(file.read_text().replace("def evaluate(", "def judged("))
    package = partc.compile(file, mesh="dp=2").write(tmp_path / "build")
    stopped = train(package, "--eval-every", 1)
    assert stopped.returncode == 2 and "P0546" in stopped.stderr


def test_counters_of_the_training_are_no_part_of_an_evaluation(tmp_path: Path) -> None:
    """A layer may be left out by all rows of a step, which the training counts."""
    file = tmp_path / "mine.py"
    file.write_text(LEFT_OUT)
    package = partc.compile(file, mesh="dp=2", precision="fp64")
    assert any(item.counts for item in package.program.parameters)
    package.write(tmp_path / "build")
    trained(tmp_path / "build", "--steps", 2, "--eval-every", 2, "--metrics", tmp_path / "m", "--save", tmp_path / "s")
    expected = on_one_device(tmp_path / "build", checkpoints(tmp_path / "s")[0], [1000])
    assert evaluations(tmp_path / "m")[2] == pytest.approx(expected, rel=1e-12)


CONTRASTED = """
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mixed = nn.Embedding(12, 4), nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 12)
        self.embed.requires_grad_(False)
        self.mixed.requires_grad_(False)

    def forward(self, ids):
        x = self.embed(ids)
        return x + F.linear(x, self.mixed.weight.T).sin()


def model():
    torch.manual_seed(0)
    return Net()


def made(generator=None):
    return {"ids": torch.randint(12, (8, 3), generator=generator)}


def batch():
    return made()


def loss(model, batch):
    x = model(batch["ids"])
    z = F.normalize(x.mean(1), dim=-1)
    return F.cross_entropy(z @ z.T / 0.5, torch.arange(len(z))) + model.head(x).square().mean()


def evaluate(model, batch):
    return {"loss": loss(model, batch), "mean": model(batch["ids"]).mean()}


def eval_data(step):
    return made(torch.Generator().manual_seed(1000 + step))
"""


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": "dp=1", "microbatches": 4},
        {"mesh": "dp=2,tp=2", "microbatches": 2, "zero": 3},
        {"mesh": "pp=2,dp=2", "microbatches": 2, "zero": 3},
    ],
)
def test_frozen_weights_behind_values_of_the_whole_batch(tmp_path: Path, options: dict[str, Any]) -> None:
    """Similarities of all examples, of frozen weights alone, are computed once a step, from a transposed weight."""
    _evaluates_as_one_device(CONTRASTED, tmp_path, options)


def test_a_model_object_is_evaluated(tmp_path: Path) -> None:
    batch = {"x": torch.randn(8, 5)}
    model, functions = given_models.Net(), {"loss": given_models.loss, "evaluate": given_models.judge}
    given = partc.compile(model, batch, mesh="dp=2", precision="fp64", eval_every=2, **functions)
    trained(given.write(tmp_path / "build"), "--steps", 2, "--metrics", tmp_path / "m", "--save", tmp_path / "save")
    model.double().load_state_dict(whole(checkpoints(tmp_path / "save")[0]), strict=False)
    found = given_models.judge(model, {"x": batch["x"].double()})
    expected = {f"evaluation/{name}": x.item() for name, x in found.items()}
    assert evaluations(tmp_path / "m") == {2: pytest.approx(expected, rel=1e-12)}


@pytest.mark.slow
def test_without_a_function_the_loss_is_evaluated_where_asked_for(tmp_path: Path) -> None:
    file = written(tmp_path)
    file.write_text(file.read_text().replace("def evaluate(", "def judged("))
    assert partc.compile(file, mesh="dp=2").evaluation is None
    package = partc.compile(file, mesh="dp=2", precision="fp64", eval_every=2).write(tmp_path / "build")
    trained(package, "--steps", 2, "--metrics", tmp_path / "m", "--save", tmp_path / "save")
    (package / "model.py").write_text(f"{(package / 'model.py').read_text()}\nevaluate = loss\n")
    expected = on_one_device(package, checkpoints(tmp_path / "save")[0], [1000])
    assert evaluations(tmp_path / "m") == {2: pytest.approx(expected, rel=1e-12)}


@pytest.mark.slow
def test_weights_that_evaluations_do_not_read_stay_cut(tmp_path: Path) -> None:
    file = written(tmp_path, "return model.blocks(model.embed(batch['ids'])).square().mean()")
    package = partc.compile(file, mesh="dp=2,tp=2", zero=1, precision="fp64").write(tmp_path / "build")
    trained(package, "--steps", 1, "--eval-every", 1, "--metrics", tmp_path / "m", "--save", tmp_path / "save")
    expected = on_one_device(package, checkpoints(tmp_path / "save")[0], [1000])
    assert evaluations(tmp_path / "m") == {1: pytest.approx(expected, rel=1e-12)}


SUMMED = """x, total = model.embed(batch["ids"]), 0
    for block in model.blocks:
        x = block(x)
        total = total + x.square().mean() + (x > 0.5).double().mean()
    return {"loss": loss(model, batch), "total": total}"""
FROZEN = "self.embed.requires_grad_(False), self.blocks[0].requires_grad_(False)"
SPARSE = "self.embed.sparse = True; self.head.weight = self.embed.weight"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tie", "options"),
    [
        ("", {"mesh": "pp=2,dp=2", "microbatches": 2}),
        (FROZEN, {"mesh": "pp=2"}),
        (FROZEN, {"mesh": "pp=4", "microbatches": 2, "schedule": "gpipe"}),
        (SPARSE, {"mesh": "cp=4"}),
        (SPARSE, {"mesh": "dp=2", "optimizer": "adagrad"}),
        ("", {"mesh": "dp=2,tp=2", "zero": 3, "batch_over": "tp=embed,blocks.0"}),
    ],
)
def test_parts_that_the_training_treats_otherwise(tmp_path: Path, tie: str, options: dict[str, object]) -> None:
    """Sums over all blocks, frozen blocks that several stages compute, a table that only the evaluation looks up."""
    file = written(tmp_path, SUMMED, tie=tie, norm="LayerNorm")
    package = partc.compile(file, precision="fp64", **options).write(tmp_path / "build")  # type: ignore[arg-type]
    trained(package, "--steps", 1, "--eval-every", 1, "--metrics", tmp_path / "m", "--save", tmp_path / "save")
    expected = on_one_device(package, checkpoints(tmp_path / "save")[0], [1000])
    assert evaluations(tmp_path / "m") == {1: pytest.approx(expected, rel=1e-12)}


@pytest.mark.slow
@pytest.mark.processes
def test_stages_that_only_an_evaluation_connects(tmp_path: Path) -> None:
    """Real ranks: the first stage sends its sum to the last one, to which it sends nothing in a training step."""
    file = written(tmp_path, SUMMED, tie=FROZEN, norm="LayerNorm")
    package = partc.compile(file, mesh="pp=4", microbatches=2, precision="fp64").write(tmp_path / "build")
    for real in (False, True):
        trained(package, "--steps", 3, "--eval-every", 2, "--metrics", tmp_path / f"m{real}", real=real)
    assert evaluations(tmp_path / "mTrue") == evaluations(tmp_path / "mFalse") and evaluations(tmp_path / "mTrue")


def test_fused_projections_are_read_in_the_order_of_the_training(tmp_path: Path) -> None:
    batch = fused.batch()
    package = partc.compile(fused.model(), batch, mesh="tp=2", precision="fp64", eval_every=1).write(tmp_path / "build")
    trained(package, "--steps", 1, "--metrics", tmp_path / "m", "--save", tmp_path / "save")
    model, saved = fused.model().double(), whole(checkpoints(tmp_path / "save")[0])
    model.load_state_dict({name: saved[name] for name in model.state_dict()})
    assert evaluations(tmp_path / "m") == {1: {"evaluation": pytest.approx(model(**batch).item(), rel=1e-12)}}
