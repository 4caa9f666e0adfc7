"""Uses of the planner: `--mesh auto`, `partc replan`, variations, reasons, and the page."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import partc
from partc.cli import main
from partc.cluster.cluster import preset
from partc.compilation.given_options import BUCKET
from partc.compilation.plan import ParallelPlan
from partc.errors import PartcError
from partc.planner.planning import PlanChoice, Planner, Request
from partc.planner.reasons import binding_constraint, differences, parts
from partc.planner.replanning import nodes_of, planner_of, request_of
from partc.planner.search import Played
from partc.planner.variations import front, price, required_choice, variations
from tests.durable import losses, trained, whole
from tests.independent.plain import Recipe, train

MLP = str(Path(__file__).parents[2] / "examples" / "mlp.py")
FIX = "schedule=1f1b,recompute=none,zero=0|1"
AUTO = ("--mesh", "auto", "--cluster", "4xCPU", "--batch", "16", "--precision", "fp64", "--fix", FIX)

LEARNER = """
import torch
from torch import nn
from torch.nn import functional as F

class Rows:
    '''A loader with a state: its batches follow from a generator, not from the number of a step.'''

    def __init__(self):
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self):
        while True:
            x = torch.randn(12, 6, generator=self.generator, dtype=torch.float64)
            yield {"x": x, "labels": (x.sum(1) > 0).long()}

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])

def model(width: int = 8):
    blocks = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(3)]
    return nn.Sequential(nn.Linear(6, width), *blocks, nn.Linear(width, 2))

def batch():
    return {"x": torch.randn(12, 6), "labels": torch.randint(0, 2, (12,))}

def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["labels"])

def data():
    return Rows()
"""


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def compiled(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    code = main(["compile", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_mesh_that_partc_chooses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The package is that of the options that are printed, but for the prediction in its plan."""
    model = tmp_path / "ein Plätzchen" / "mlp.py"
    model.parent.mkdir()
    shutil.copy(MLP, model)
    code = main(["compile", str(model), *AUTO, "-o", str(tmp_path / "auto")])
    said = capsys.readouterr().out
    assert code == 0, said
    again = next(line for line in said.splitlines() if line.startswith("the same again: partc "))
    words = shlex.split(again.removeprefix("the same again: partc "))
    assert main([*words, "-o", str(tmp_path / "given")]) == 0
    mine, given = files(tmp_path / "auto"), files(tmp_path / "given")
    plan = json.loads(mine.pop("plan.json"))
    planned = plan.pop("planned")
    assert plan == json.loads(given.pop("plan.json"))
    assert {**mine, "files.sha256": b""} == {**given, "files.sha256": b""}
    assert planned["cluster"] == "4xCPU" and planned["gap"] == 0 and planned["step_seconds"] > 0
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "auto"), "--virtual", "--steps", "1"]) == 0


@pytest.mark.slow
def test_a_model_object_on_a_cluster() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    package = partc.compile(
        model,
        {"input": torch.randn(8, 8)},
        mesh="auto",
        cluster="2xCPU",
        fix="dp=2",
        precision="fp64",
        loss=_square,
        optimizer="sgd",
    )
    assert package.program.mesh.axis("dp") == 2 and package.planned is not None
    assert package.verify(steps=2).ok


def _square(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    out: torch.Tensor = model(batch["input"]).square().mean()
    return out


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--mesh", "auto"), "P0816"),
        (("--mesh", "2", "--cluster", "4xCPU"), "P0816"),
        (("--mesh", "2", "--max-seconds", "3"), "P0816"),
        (("--mesh", "2", "--ranks", "0"), "P0816"),
        ((*AUTO, "--zero", "1"), "P0815"),
        ((*AUTO, "--microbatches", "1"), "P0815"),
        ((*AUTO, "--ranks", "8"), "P0803"),
        ((*AUTO, "--memory", "1KB"), "P0813"),
        ((*AUTO, "--global-batch", "8"), "P0814"),
        (("--mesh", "auto", "--cluster", "4xCPU", "--max-seconds", "nan"), "P0004"),
        (("--mesh", "auto", "--cluster", "4xABC"), "P0802"),
        (("--mesh", "auto", "--plan", "plan.json", "--cluster", "4xCPU"), "P0804"),
    ],
)
def test_refusals_of_auto(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: str
) -> None:
    status, found = compiled(capsys, MLP, *arguments, "-o", tmp_path / "build")
    assert (status, found["error"]["code"]) == (2, code)
    assert not (tmp_path / "build").exists()


def test_the_function_refuses_alike() -> None:
    for given, code in (
        ({"mesh": "auto"}, "P0816"),
        ({"mesh": "2", "cluster": "2xCPU"}, "P0816"),
        ({"mesh": "auto", "cluster": "2xCPU", "zero": 2}, "P0815"),
    ):
        with pytest.raises(PartcError) as caught:
            partc.compile(MLP, **given)  # type: ignore[arg-type]
        assert caught.value.code == code


def plain(path: Path, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and parameters of a loop on one device: AdamW, two batches a step, clipped gradients."""
    spec = importlib.util.spec_from_file_location("plain_learner", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    model: nn.Module = module.model(12).double()
    optimizer, batches, found = torch.optim.AdamW(model.parameters(), lr=0.01), iter(module.Rows()), []
    for _ in range(steps):
        optimizer.zero_grad()
        parts = [module.loss(model, next(batches)) / 2 for _ in range(2)]
        total = torch.stack(parts).sum()
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        found.append(total.item())
    return found, dict(model.named_parameters())


@pytest.mark.slow
def test_a_training_goes_on_on_fewer_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three steps on four processes, three more on the two of a smaller cluster: as six steps on one device."""
    file = tmp_path / "learner.py"
    file.write_text(LEARNER)
    first, second, saves = tmp_path / "first", tmp_path / "second", tmp_path / "saves"
    partc.compile(file, mesh="pp=2,dp=2", microbatches=3, zero=2, precision="fp64", options={"width": 12}).write(first)
    recipe = ("--optimizer", "adamw", "--lr", 0.01, "--accumulate", 2, "--clip", 0.5, "--save", saves)
    trained(first, "--steps", 3, *recipe, "--metrics", tmp_path / "a", real=True)
    cluster = tmp_path / "smaller.toml"
    cluster.write_text('nodes = 1\ndevices = 2\ndevice = "CPU"\n')
    given = ["--cluster", str(cluster), "--checkpoint", str(saves), "-o", str(second), "--fix", "tp=2,recompute=none"]
    assert main(["replan", str(first), *given, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    plan = json.loads((second / "plan.json").read_text())
    assert (report["step"], report["planned"]["cluster"], plan["mesh"]) == (3, "smaller", "tp=2")
    assert (plan["options"], plan["precision"], plan["seed"]) == ({"width": 12}, "fp64", 0)
    trained(second, "--steps", 6, "--save", saves, "--resume", "--metrics", tmp_path / "b", real=True)
    expected, parameters = plain(file, 6)
    assert [*losses(tmp_path / "a"), *losses(tmp_path / "b")] == pytest.approx(expected, rel=1e-10)
    held = whole(saves / "step_00000006")
    for name, parameter in parameters.items():
        torch.testing.assert_close(held[name], parameter.detach(), rtol=1e-9, atol=1e-11)

    damaged = tmp_path / "damaged"
    shutil.copytree(saves / "step_00000003", damaged / "step_00000003")
    (damaged / "step_00000003" / "manifest.json").write_text("{")
    other = tmp_path / "other"
    partc.compile(file, mesh="1", precision="fp64").write(other)
    for arguments, code in (
        ((tmp_path, *given), "P0503"),
        ((first, "--checkpoint", tmp_path / "none", "--cluster", "2xCPU", "-o", tmp_path / "x"), "P0523"),
        ((first, "--checkpoint", damaged, "--cluster", "2xCPU", "-o", tmp_path / "x"), "P0524"),
        ((other, "--checkpoint", saves, "--cluster", "2xCPU", "-o", tmp_path / "x"), "P0525"),
        ((first, "--cluster", "2xCPU", "-o", first), "P0601"),
        ((first, "-o", tmp_path / "x"), "P0816"),
        ((first, "--cluster", "7xCPU", "-o", tmp_path / "x", "--fix", "pp=1,tp=1,cp=1"), "P0812"),
    ):
        assert main(["replan", *map(str, arguments), "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["error"]["code"] == code


COUPLED = """
import torch
from torch import nn
from torch.nn import functional as F

def model():
    blocks = [nn.Sequential(nn.Linear(256, 256, bias=False), nn.BatchNorm1d(256), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(256, 2))

def data(step, batch=1024):
    x = torch.randn(batch, 256, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return {"x": x, "labels": (x.sum(1) > 0).long()}

def batch(batch=1024):
    return data(0, batch)

def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["labels"])
"""


@pytest.mark.slow
def test_a_batch_that_was_whole_stays_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Batch norms over microbatches would be another training, though a pipeline would be quicker with them."""
    file = tmp_path / "coupled.py"
    file.write_text(COUPLED)
    first, second, saves = tmp_path / "first", tmp_path / "second", tmp_path / "saves"
    partc.compile(file, mesh="dp=2", precision="fp64").write(first)
    trained(first, "--steps", 2, "--lr", 0.01, "--save", saves)
    given = ["replan", str(first), "--cluster", "2xCPU", "--checkpoint", str(saves), "-o", str(second), "--json"]
    assert main([*given, "--fix", "pp=2,microbatches=2"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "P0811"
    assert main([*given, "--fix", "pp=2"]) == 0
    trained(second, "--steps", 4, "--lr", 0.01, "--save", saves, "--resume")
    expected = train(file, Recipe(steps=4, lr=0.01)).state
    held = whole(saves / "step_00000004")
    for name, parameter in expected.items():
        torch.testing.assert_close(held[name], parameter, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_what_would_make_a_continued_training_fit_continues_it(tmp_path: Path) -> None:
    """Whole batches stay whole, separate batches as many, and as large, in each plan that the message names."""
    file = tmp_path / "coupled.py"
    file.write_text(COUPLED)
    for name, microbatches, decided, free in (("whole", 1, "20MB", "12MB"), ("separate", 2, "12MB", "8MB")):
        package, fix = tmp_path / name, "dp=1,tp=2,zero=0,recompute=none"
        partc.compile(file, mesh="dp=2", microbatches=microbatches, precision="fp64").write(package)
        for memory, given in ((decided, {"fix": fix}), (free, {})):
            with pytest.raises(PartcError) as caught:
                required_choice(planner_of(package, request_of(package, "2xCPU", None, memory=memory, **given)))
            help = caught.value.help
            assert caught.value.code == "P0813" and "twice the ranks" in help and "the batch" not in help
            assert ("without --fix: " in help) is bool(given)
            counts = re.findall("--mesh [^ ]+(?: --microbatches ([0-9]+))?", help)
            assert counts == [str(microbatches) if microbatches > 1 else ""] * len(counts), help


def test_the_form_of_gradient_sums_stays_on_the_new_cluster(tmp_path: Path) -> None:
    partc.compile(MLP, mesh="dp=4", nodes=2).write(tmp_path / "nodes")
    partc.compile(MLP, mesh="dp=4", compress_grads="int8", bucket="1MB").write(tmp_path / "flat")
    partc.compile(MLP, mesh="dp=4", cuda_graphs=True).write(tmp_path / "recorded")
    kept, default = (request_of(tmp_path / name, "4xCPU", None) for name in ("flat", "nodes"))
    assert request_of(tmp_path / "recorded", "4xH100-80GB", None).cuda_graphs and not kept.cuda_graphs
    assert not request_of(tmp_path / "recorded", "4xCPU", None).cuda_graphs
    assert (kept.compress_grads, kept.bucket, kept.grad_reduce) == ("int8", "1MB", "fp32")
    assert (default.compress_grads, default.bucket) == ("none", BUCKET)
    for name, mesh, cluster, expected in (
        ("nodes", "dp=8", "2x4xCPU", 4),
        ("nodes", "pp=2,dp=3,tp=2", "2x6xCPU", 6),
        ("nodes", "dp=4", "1x4xCPU", None),
        ("nodes", "dp=6", "2x4xCPU", None),
        ("flat", "dp=8", "2x4xCPU", None),
    ):
        assert nodes_of(tmp_path / name, ParallelPlan(mesh=mesh), preset(cluster)) == expected


LARGE = {"width": 8192, "hidden": 32768, "depth": 4}
FEW = "zero=0|3,schedule=1f1b,recompute=none|full,tp=1,microbatches=1|4"


def request(memory: str | None = None, **given: Any) -> Request:
    given = {"fix": FEW, "options": {"batch": 262144, **LARGE}} | given
    return Request.checked(MLP, "2x4xA100-40GB", memory=memory, **given)


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner(request())


@pytest.fixture(scope="module")
def choice(planner: Planner) -> PlanChoice:
    return required_choice(planner)


@pytest.mark.slow
def test_a_variation_is_the_best_plan_of_its_own_request(planner: Planner, choice: PlanChoice) -> None:
    found = {each.name: each for each in variations(planner, choice, None)}
    for name, asked in {
        "one more node, 12 ranks": None,
        "half of the ranks, 4": request(ranks=4),
        "twice the batch, 524,288": request(options={"batch": 524288, **LARGE}),
        "with --cuda-graphs": request(cuda_graphs=True),
        "half the batch, 131,072": request(options={"batch": 131072, **LARGE}),
    }.items():
        assert found[name].best is not None or asked is None, found[name].error
        if asked is not None:
            alone = required_choice(Planner(asked)).best
            assert found[name].best.seconds == pytest.approx(alone.seconds, rel=1e-9)  # type: ignore[union-attr]
    more = next(each for name, each in found.items() if name.startswith("10% more memory"))
    assert more.best is not None and more.best.seconds <= choice.best.seconds
    assert binding_constraint(choice, tuple(found.values())).startswith("memory does not bind: with 10% more memory")
    tight = planner.choice(limit=int(choice.best.bytes / 1.05))  # the best plan holds a little too much
    gain = 1 - choice.best.seconds / tight.best.seconds
    assert gain > 0 and f"a step would take {gain:.1%} less" in binding_constraint(tight, [price(planner, tight)])


def test_a_quicker_plan_that_fits_does_not_say_that_memory_binds(planner: Planner, choice: PlanChoice) -> None:
    """The price of memory takes a search of its own, which may find what the first one had no time for."""
    more = price(planner, choice)
    assert more.best is not None and more.best.bytes <= choice.request.limit
    every = ((plan, planner.predicted(plan)) for plan in planner.plans())
    slower = max(
        (Played(plan=plan, bound=choice.best.bound, prediction=each) for plan, each in every),
        key=lambda played: played.seconds,
    )
    assert slower.seconds > 1.01 * choice.best.seconds
    hasty = replace(choice, outcome=replace(choice.outcome, fitting=(slower,), others=(), complete=False))
    text = binding_constraint(hasty, [more])
    assert text.startswith("the search ended too early: a plan that fits takes ") and more.best.plan.flags in text


def test_the_front_has_the_plans_that_no_other_beats(planner: Planner, choice: PlanChoice) -> None:
    every = [planner.predicted(plan) for plan in planner.plans()]
    found = front(planner, choice, None)
    assert len(found) > 1
    for played in found:
        for other in every:
            assert other.step_seconds >= played.seconds * (1 - 1e-9) or other.memory_bytes > played.bytes


def test_the_parts_of_a_step_make_up_its_delay(planner: Planner, choice: PlanChoice) -> None:
    for plan in planner.plans():
        each = Played(plan=plan, bound=choice.best.bound, prediction=planner.predicted(plan))
        assert sum(parts(each).values()) == pytest.approx(each.seconds, rel=1e-6)
        assert sum(differences(choice.best, each).values()) == pytest.approx(
            each.seconds - choice.best.seconds, abs=1e-9
        )


@pytest.mark.slow
def test_what_would_make_it_fit_does(planner: Planner, choice: PlanChoice) -> None:
    """Without recomputation nothing fits; each plan that the message names does, in its own request."""
    limit = int(1.02 * min(planner.predicted(plan).memory_bytes for plan in planner.plans())) >> 20
    with pytest.raises(PartcError) as caught:
        fix = "zero=0,schedule=1f1b,recompute=none,pp=1,tp=1"
        required_choice(Planner(request(memory=f"{limit}MiB", fix=fix, max_seconds=12), planner.simulator))
    error = caught.value
    assert error.code == "P0813" and "without --fix" in error.help
    flags = re.search(r"without --fix: ([^;]*)", error.help)
    assert flags is not None
    found = planner.predicted(
        next(plan for plan in Planner(request(fix=""), planner.simulator).plans() if plan.flags == flags[1])
    )
    assert found.memory_bytes <= limit << 20


class Page(HTMLParser):
    """The elements and texts of a page, all of which are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.said = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "!doctype"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said += data


@pytest.mark.slow
def test_the_page_shows_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names from outside are data: a cluster and a model file that are called like markup."""
    model = tmp_path / "<b>mlp.py"
    shutil.copy(MLP, model)
    cluster = tmp_path / "c.toml"
    name = "<script>alert(1)</script>\\u001b[31m"
    cluster.write_text(f'name = "{name}"\nnodes = 2\ndevices = 2\ndevice = "A100-40GB"\n')
    file = tmp_path / "plan.html"
    arguments = ["--cluster", str(cluster), "--batch", "16", "--fix", f"{FEW},pp=1", "--page", str(file)]
    assert main(["plan", str(model), *arguments, "--top", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    text = file.read_text()
    page = Page(text)
    assert not page.open and "<script>alert(1)" in page.said
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "img", "iframe"}
    assert not re.search(r"(?:src|href|url)\s*[=(]|http", text)
    assert not any(ord(character) < 32 and character not in "\n" for character in text)
    for each in found["plans"]:
        mesh = each["plan"]["mesh"]
        assert mesh in page.said
    kinds = [attributes.get("class", "") for tag, attributes in page.tags if tag == "circle"]
    assert kinds.count("dot best") == 1 and len(kinds) >= len(found["plans"])
    for each in found["scaling"]:
        assert f"{each['share']:.1%}" in page.said
    rates = {each["ranks"]: each["samples_per_second"] for each in found["scaling"]}
    least = min(rates)
    for each in found["scaling"]:
        assert each["share"] == pytest.approx(rates[each["ranks"]] / (each["ranks"] * rates[least] / least))
    assert rates[4] == pytest.approx(16 / found["plans"][0]["step_seconds"])
    file.write_text("mine")
    assert main(["plan", str(model), *arguments]) == 2
    assert main(["plan", str(model), *arguments[:4], "-o", str(model)]) == 2
    assert main(["plan", str(model), *arguments[:4], "-o", str(tmp_path / "none" / "plan.json")]) == 2
    assert model.read_text() == Path(MLP).read_text()
    assert file.read_text() == "mine" and "\x1b" not in capsys.readouterr().err
