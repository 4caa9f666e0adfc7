"""`partc verify` and `partc run` on a package written by hand: they accept it, and find injected errors."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
import partc.frontend.capture.traced_step
from partc.errors import PartcError
from partc.package.comparison import difference, largest_magnitude, relative_error, root_mean_square
from partc.package.launch import RunFailed, run
from partc.package.verify import verify
from partc.passes.outline import Linker
from tests.prefork import shared

TESTS = Path(__file__).parents[1]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The handmade package with the runtime in it, as the compiler would leave it."""
    folder = tmp_path / "build"
    shutil.copytree(TESTS / "handmade_package", folder, ignore=shutil.ignore_patterns("__pycache__"))
    runtime = TESTS.parent / "partc" / "runtime"
    shutil.copytree(runtime, folder / "runtime", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def replace_in(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_virtual_ranks_equal_the_single_device_model(package: Path, optimizer: str) -> None:
    result = verify(package, steps=3, virtual=True, arguments=["--optimizer", optimizer])
    assert result.ok
    assert result.worst.rel_err < 1e-12
    assert len(result.losses) == len(result.reference_losses) == 3
    # Per step: the loss, and a gradient and a value of 6 (7 in the second stage) parameters on each of 4 ranks.
    assert result.compared == 3 * (1 + 4 * 2 * 6 + 4 * 2 * 7)


def test_the_suite_starts_these_processes_with_torch_imported(package: Path) -> None:
    """Otherwise each verified package costs five seconds more, and all tests pass."""
    before = shared().processor_seconds
    assert verify(package, steps=1, virtual=True).ok
    assert shared().processor_seconds > before


@pytest.mark.slow
@pytest.mark.processes
def test_processes_equal_the_single_device_model(package: Path) -> None:
    result = verify(package, steps=2)
    assert result.ok
    assert result.worst.rel_err < 1e-12


@pytest.mark.parametrize(
    ("file", "old", "new", "worst"),
    [
        ("stages/stage_0.py", "self.comm.dp.reduce_gradients(self.grad_block_0)", "pass", "gradient"),
        (
            "stages/stage_1.py",
            'return {"blocks_0": grad_blocks_0}',
            'return {"blocks_0": 2 * grad_blocks_0}',
            "gradient",
        ),
        ("stages/stage_0.py", "grad_norm = comm.tp.all_reduce_(grad_norm)", "pass", "gradient"),
        ("stages/stage_1.py", "nll.sum() / count", "nll.sum() / count * 1.0000001", "loss"),
    ],
)
def test_wrong_packages_fail(package: Path, file: str, old: str, new: str, worst: str) -> None:
    replace_in(package / file, old, new)
    result = verify(package, steps=1, virtual=True, arguments=["--optimizer", "sgd"])
    assert not result.ok
    assert result.worst.kind == worst


def test_a_loss_that_is_wrong_after_the_first_step_is_seen(package: Path) -> None:
    stage = package / "stages/stage_1.py"
    replace_in(stage, "nll.sum() / count", "nll.sum() / count * FACTORS.pop()")
    ranks, microbatches = 4, 2
    stage.write_text(f"{stage.read_text()}\nFACTORS = [1.0000001] * 99 + [1.0] * {ranks * microbatches}\n")
    result = verify(package, steps=2, virtual=True, arguments=["--optimizer", "sgd"])
    assert not result.ok and result.restarted
    assert (result.worst.kind, result.worst.step) == ("loss", 2)


class BiasBeforeNorm(nn.Module):
    """A model with a bias whose gradient is zero, but which moves a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(6, 5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x)).sin().square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["lion", "adafactor"])
def test_updates_of_zero_gradients_may_differ(optimizer: str, tmp_path: Path) -> None:
    compiled = partc.compile(BiasBeforeNorm, {"x": torch.randn(12, 6)}, mesh="dp=3", precision="fp64")
    folder = compiled.write(tmp_path / "build")
    result = verify(folder, steps=3, virtual=True, arguments=["--optimizer", optimizer])
    assert result.ok and result.restarted, str(result.worst)


LATER = "[x['step'].fill_(1000.0) for x in self._optimizer.state.values() if x], self._optimizer.step()"
TRAINED = ["--weight-decay", "0.1", "--clip", "0.01", "--warmup", "2", "--lr-schedule", "cosine", "--accumulate", "2"]
# What an update could get wrong, as text in the package's runtime: (file, right, wrong, options that show it).
UPDATES = {
    "decay by half": (
        "optimizer/recipe.py",
        "{_DECAY: weight_decay}",
        "{_DECAY: weight_decay / 2}",
        ["--weight-decay", "0.1"],
    ),
    "decay by default off": (
        "optimizer/recipe.py",
        "{} if weight_decay is None",
        "{_DECAY: 0.0} if weight_decay is None",
        [],
    ),
    "decay of what is spared": (
        "optimizer/recipe.py",
        '{_DECAY: "0"}',
        '{_DECAY: "0.1"}',
        ["--no-decay", "*bias"],
    ),
    "no clipping": (
        "optimizer/update.py",
        "self._gradients.clip(norm, self._clip)",
        "pass",
        ["--clip", "0.01", "--optimizer", "sgd"],
    ),
    "no clipping by default": (
        "optimizer/update.py",
        "self._gradients.clip(norm, self._clip)",
        "pass",
        ["--optimizer", "sgd"],
    ),
    "a norm of one rank": (
        "optimizer/update.py",
        "total = self._comm.group((name,)).all_reduce(total)",
        "pass",
        ["--clip", "0.01", "--optimizer", "sgd", "--lr", "0.01"],  # AdamW's step does not depend on the norm
    ),
    "no bias correction": ("optimizer/optimizer.py", "self._optimizer.step()", LATER, []),
    "other betas": ("optimizer/optimizer.py", "lr=lr,", "lr=lr, betas=(0.9, 0.99),", []),
    "another epsilon": ("optimizer/optimizer.py", "lr=lr,", "lr=lr, eps=1e-6,", []),
    "rates of groups not scaled": ("optimizer/optimizer.py", "rate * scale", "rate", ["--group", "*bias:lr_scale=0.1"]),
    "options of groups lost": ("optimizer/recipe.py", "mine |= group.options", "pass", ["--group", "*bias:eps=0.1"]),
    "matrices not gathered": (
        "optimizer/whole.py",
        "whole = self._comm.group((axis,)).all_gather(whole, dim=position)",
        "whole = torch.cat([whole] * self._sizes[axis], position)",
        ["--optimizer", "muon"],
    ),
    "batches summed, not averaged": (
        "train/steps.py",
        "measure(self.job.accumulate)",
        "measure(1)",
        ["--accumulate", "2"],
    ),
    "the first batch alone": ("train/steps.py", "range(self.job.accumulate)", "range(1)", ["--accumulate", "2"]),
    "no warm-up": ("optimizer/update.py", "if step < self.warmup", "if False", ["--warmup", "3"]),
    "no way down": ("optimizer/update.py", 'self.decline == "constant"', "True", ["--lr-schedule", "linear"]),
}


SMALL = {"other betas", "another epsilon"}  # in three steps less than what fp32 rounds


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision",
    ["fp32", pytest.param("fp64", marks=pytest.mark.matrix), pytest.param("bf16", marks=pytest.mark.matrix)],
)
def test_updates_that_go_wrong_are_seen(precision: str, tmp_path: Path) -> None:
    """One package, whose runtime gets one fault after the other; as it is, it passes with every fault's options."""
    torch.manual_seed(0)  # whose first norm is above the default clip
    batch = {"x": torch.randn(8, 6)}
    package = partc.compile(deep, batch, mesh="dp=2,tp=2", precision=precision).write(tmp_path / "build")
    assert verify(package, virtual=True, arguments=TRAINED).ok
    passed, plain = {}, {}
    for fault, (file, right, wrong, options) in UPDATES.items():
        path, key = package / "runtime" / file, tuple(options)
        text = path.read_text()
        if precision != "fp64" and fault in SMALL:
            continue
        if key not in plain:
            plain[key] = tmp_path / f"plain_{len(plain)}"
            assert verify(package, virtual=True, arguments=options, reference=plain[key]).ok, fault
        replace_in(path, right, wrong)
        result = verify(package, virtual=True, arguments=options, reference=plain[key])
        path.write_text(text)
        passed |= {fault: result.worst} if result.ok else {}
    assert not passed


def deep() -> nn.Module:
    return Deep()


class Deep(nn.Module):
    """A frozen scale, a layer that only no_grad reads, and one that trains; its loss is large enough to be clipped."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 6)
        self.target = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.target(x)
        return 30 * (self.last(self.first(x).tanh()) - target).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_decay_of_what_no_gradient_reaches_is_seen(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that took requires_grad for a gradient would decay the target, whose gradient is None."""
    batch = {"x": torch.randn(8, 6)}
    right = partc.compile(deep, batch, mesh="dp=2", precision=precision)
    assert right.verify().ok
    every = frozenset(name for name, _ in Deep().named_parameters())
    monkeypatch.setattr(
        partc.frontend.capture.traced_step, "parameters_with_gradient", lambda model, loss, repeats: every
    )
    result = partc.compile(deep, batch, mesh="dp=2", precision=precision).verify()
    assert not result.ok


class Clamping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.line.weight.data.clamp_(-0.2, 0.2)
        return x + self.line(x).tanh()


class AllClamping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Clamping() for _ in range(7)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()  # type: ignore[no-any-return]


@pytest.mark.slow
def test_weights_that_forward_changes_without_the_plan_s_knowledge_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO keeps whole the weights that forward changes, of whose changes the compiler might know too few."""
    given = AllClamping, {"x": torch.randn(8, 6)}
    assert partc.compile(*given, mesh="dp=2", zero=1, precision="fp64").verify(steps=1).ok
    few = Linker.updates_of
    monkeypatch.setattr(Linker, "updates_of", lambda *given: [*few(*given)][:1])
    assert not partc.compile(*given, mesh="dp=2", zero=1, precision="fp64").verify(steps=1).ok


@pytest.mark.parametrize(
    "arguments", [["--save", "x"], ["--lr", "no"], ["--clip", "0"], ["--metrics", "log"], ["--steps", "4"]]
)
def test_options_that_verify_does_not_take(package: Path, arguments: list[str]) -> None:
    with pytest.raises(PartcError, match=r"P0504|P0521|P0535"):
        verify(package, virtual=True, arguments=arguments)


class HalfPrecise(nn.Module):
    """A model that rounds values by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(self.up(x).relu().bfloat16(), self.down.weight.bfloat16())
        return y.float().square().mean()


@pytest.mark.slow
def test_models_that_round_by_themselves_are_compared_in_their_precision(tmp_path: Path) -> None:
    compiled = partc.compile(HalfPrecise, {"x": torch.randn(16, 16)}, mesh="dp=2,tp=2")
    found = verify(compiled.write(tmp_path / "build"), steps=1, virtual=True)
    assert found.ok and found.rounding == "bf16", str(found.worst)
    assert abs(found.losses[0] / found.reference_losses[0] - 1) > 1e-5  # more than fp32 may differ


class Columns(nn.Module):
    """A batch norm over images one element wide, whose gradient is in the channels-last format, as in CLAP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(6), nn.Conv2d(1, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.norm(x.transpose(1, 3).contiguous()).transpose(1, 3)).relu().square().mean()


@pytest.mark.slow
def test_wrong_gradients_of_torchs_batch_norm_are_not_expected(tmp_path: Path) -> None:
    compiled = partc.compile(Columns, {"x": torch.randn(8, 1, 5, 6)}, mesh="dp=2", precision="fp64")
    found = verify(compiled.write(tmp_path / "build"), virtual=True)
    assert found.ok, str(found.worst)


def test_a_package_that_crashes_is_no_result(package: Path) -> None:
    replace_in(package / "stages/stage_0.py", 'return {"blocks_0": blocks_0}, saved', "raise KeyError('oops')")
    with pytest.raises(RunFailed) as failure:
        verify(package, steps=1, virtual=True)
    assert "oops" in failure.value.output


def test_a_deadlock_is_named(package: Path) -> None:
    replace_in(package / "ranks/pp_1.py", "1SEND_B0 ", "")
    with pytest.raises(RunFailed) as failure:
        verify(package, steps=1, virtual=True)
    assert "every rank waits for another" in failure.value.output
    assert "rank 0 in recv from rank 4" in failure.value.output


@pytest.mark.slow
@pytest.mark.processes
def test_run_reports(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    package = partc.compile(deep, {"x": torch.randn(8, 6)}, mesh="dp=2").write(tmp_path / "build")
    told: list[str] = []
    result = run(package, steps=3, tell=told.append)
    _, launcher, *options = shlex.split(told[0]) if told[0].startswith("$") else ("", *shlex.split(told[0]))
    assert Path(launcher).name == "torchrun" and options[:3] == ["--standalone", "--nproc-per-node", "2"]
    assert len(result.losses) == len(result.step_seconds) == 3
    assert len(result.peak_bytes) == 2 and min(result.peak_bytes) > 1 << 20
    assert result.tokens_per_second == pytest.approx(8 / result.step_seconds_median)
    assert capfd.readouterr().out == ""


def test_a_folder_that_is_no_package(tmp_path: Path) -> None:
    with pytest.raises(PartcError, match="P0503"):
        verify(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps([]))
    with pytest.raises(PartcError, match="P0503"):
        verify(tmp_path)


@pytest.mark.slow
def test_packages_need_torch_alone(package: Path, tmp_path: Path) -> None:
    """They train where partc isn't installed, nor anything else that torch can do without."""
    absent = ("partc", "numpy", "safetensors", "scipy", "highspy", "jinja2", "click", "rich", "transformers")
    program = (
        f"import sys, runpy; sys.modules.update(dict.fromkeys({absent!r})); "
        f"sys.argv = ['train.py', '--virtual', '--steps', '2', '--record', {str(tmp_path / 'record')!r}]; "
        f"runpy.run_path({str(package / 'train.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stderr
    assert len(list((tmp_path / "record").iterdir())) == 2 * 8


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("measure", [largest_magnitude, root_mean_square])
@pytest.mark.parametrize(
    ("mine", "theirs", "same"),
    [
        ([INF, 1.0], [INF, 1.0], True),
        ([-INF, 1.0], [INF, 1.0], False),
        ([INF, 1.0], [2.0, 1.0], False),
        ([NAN, 1.0], [NAN, 1.0], False),
        ([INF, 1.0], [INF, 1.5], False),
    ],
)
def test_infinities_are_compared_and_set_no_scale(
    measure: Callable[[Tensor], float], mine: list[float], theirs: list[float], same: bool
) -> None:
    """A mask's infinities are equal to each other; every other number is still held to the tolerance."""
    expected = torch.tensor(theirs)
    error = relative_error(difference(torch.tensor(mine), expected, measure), 0.0, measure(expected))
    assert error == 0.0 if same else error > 0.1


@pytest.mark.parametrize("measure", [largest_magnitude, root_mean_square])
@pytest.mark.parametrize("x", [torch.tensor(3), torch.tensor(True), torch.ones(0), torch.tensor(INF)])
def test_tensors_without_numbers_set_no_scale(measure: Callable[[Tensor], float], x: Tensor) -> None:
    assert measure(x) == 0.0 and difference(x, x.clone(), measure) == 0.0


class Sums(nn.Module):
    """torch.autocast computes the product in bf16, and index_add does not add its rows to those in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, torch.arange(len(x)), self.linear(x)).square().mean()


class Placed(nn.Module):
    """Forward checks that there are as many rows as marks. Batch norm makes each microbatch a batch of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor, marked: Tensor, rows: Tensor) -> Tensor:
        if marked.sum() != rows.shape[0]:
            raise ValueError("rows and marks differ")
        return (self.norm(x) * rows.mean(0)).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "batch", "options", "said", "line"),
    [
        (Sums, {"x": torch.randn(4, 4)}, {"precision": "bf16"}, "under torch.autocast in bf16", "index_add"),
        (
            Placed,
            {"x": torch.randn(4, 4), "marked": torch.ones(4, 2, dtype=torch.bool), "rows": torch.randn(8, 4)},
            {"precision": "fp64", "microbatches": 2},
            "on one of 2 microbatches.*rows and marks differ",
            "raise ValueError",
        ),
    ],
)
def test_a_model_that_stops_on_a_single_device_is_named(
    tmp_path: Path, model: type[nn.Module], batch: dict[str, Tensor], options: dict[str, Any], said: str, line: str
) -> None:
    compiled = partc.compile(model, batch, mesh="dp=1", **options)
    assert any("reads all 8 rows" in warning for warning in compiled.warnings) == (model is Placed)
    compiled.write(tmp_path / "build")
    with pytest.raises(PartcError, match=said) as refused:
        verify(tmp_path / "build", steps=1, virtual=True)
    source = refused.value.source
    assert refused.value.code == "P0553"
    assert source is not None and line in Path(source.file).read_text().splitlines()[source.line - 1]
