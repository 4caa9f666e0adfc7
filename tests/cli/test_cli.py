"""The command line: its output, its exit codes, and no traceback for wrong input."""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from partc.cli import main
from partc.package.comparison import Difference, VerifyResult
from partc.package.launch import RunResult

ROOT = Path(__file__).parents[2]
MLP = str(ROOT / "examples" / "mlp.py")
SMALL = ["-D", "depth=3", "-D", "width=12", "-D", "hidden=20", "-D", "batch=12"]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """examples/mlp.py, compiled in fp64 for 2x1x2."""
    folder = tmp_path_factory.mktemp("cli") / "build"
    arguments = ["compile", MLP, "--mesh", "2x1x2", "--microbatches", "3", "--precision", "fp64", *SMALL]
    assert main([*arguments, "-o", str(folder)]) == 0
    return folder


def failing(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The error document of a command that must exit with 2; stderr has the same, without a traceback."""
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 2
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    error: dict[str, str] = json.loads(out)["error"]
    assert error["code"] in err and error["cause"] and set(error) == {"code", "cause", "help", "source"}
    return error


def model_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.py"
    path.write_text(text)
    return str(path)


PLAIN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 1)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).sum()

def model():
    return Net()

def batch(batch: int = 8):
    return {"x": torch.randn(batch, 6)}
"""


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"]):
        assert main(arguments) == 0
        text = capsys.readouterr().out
        assert all(f"  {name} " in text for name in ("compile", "verify", "run", "inspect", "doctor", "explain"))
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("partc, version ")


def test_compile_prints_phases_and_what_is_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "build"
    assert main(["compile", MLP, "--mesh", "tp=2", *SMALL, "-o", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    phases = [line for line in lines if " s" in line[:28] and line[:1].isupper()]
    labels = [line.split()[0] for line in phases]
    assert labels[:2] == ["Loaded", "Traced"] and labels[-4:] == ["Emitted", "Rehearsed", "Written", "Others"]
    assert {"Partitioned", "Scheduled"} <= set(labels)
    assert len({line.index(" s ") if " s " in line else len(line) - 2 for line in phases}) == 1
    assert lines[-1] == f"next: partc verify {folder}"
    assert (folder / "plan.json").exists() and (folder / "ranks" / "pp_0.py").exists()


def test_compile_says_that_triton_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is written all the same: it may run elsewhere."""
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "triton" else found(name))
    for kernels, said in (("triton", True), ("aten", False)):
        command = ["compile", str(MLP), "--mesh", "1", "--kernels", kernels, "-o", str(tmp_path / kernels)]
        assert main(command) == 0
        assert ("Triton, which is not installed here" in capsys.readouterr().out) == said


def test_compile_json_is_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", MLP, "--mesh", "1x2x2", *SMALL, "-o", str(tmp_path / "build"), "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert err == ""
    assert set(report) == {
        "ranks",
        "stages",
        "regions",
        "phases",
        "communication",
        "forward_only",
        "recompute",
        "saved",
        "memory",
        "replicated_ops",
        "warnings",
        "padded",
        "rules",
        "flops",
    }
    assert report["ranks"] == 4 and report["stages"] == 1 and len(report["regions"]) == 3
    assert report["communication"]["dp"] > 0 and report["communication"]["tp"] > 0
    assert all(seconds >= 0 for seconds in report["phases"].values()) and "Traced" in report["phases"]


@pytest.mark.slow
def test_two_compiles_are_byte_identical(package: Path, tmp_path: Path) -> None:
    arguments = ["compile", MLP, "--mesh", "2x1x2", "--microbatches", "3", "--precision", "fp64", *SMALL]
    script = f"from partc.cli import main; main({[*arguments, '-o', str(tmp_path / 'again')]!r})"
    subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "7"},
        check=True,
        capture_output=True,
    )
    first, second = (
        {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        }
        for folder in (package, tmp_path / "again")
    )
    assert first == second


def test_verify_virtual(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(package), "--virtual", "--steps", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] is True and len(result["losses"]) == len(result["reference_losses"]) == 2
    assert set(result["worst"]) == {"kind", "name", "rel_err"} and result["worst"]["rel_err"] < 1e-10


def test_the_readmes_model_file_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text().split("```python\n# mine.py\n", 1)[1].split("```", 1)[0]
    path, folder = model_file(tmp_path, text), str(tmp_path / "build")
    assert main(["compile", path, "--mesh", "1x2x2", "--microbatches", "2", "-D", "width=20", "-o", folder]) == 0
    assert main(["verify", folder, "--virtual", "--steps", "2"]) == 0
    assert "equal to the single-device model" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.processes
def test_run_prints_the_torchrun_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    package = tmp_path / "build"
    assert main(["compile", MLP, "--mesh", "2", "--precision", "fp64", *SMALL, "-o", str(package)]) == 0
    capfd.readouterr()
    assert main(["run", str(package), "--json", "--", "--steps", "2"]) == 0
    out, err = capfd.readouterr()
    result = json.loads(out)
    assert set(result) == {"losses", "step_seconds", "step_seconds_median", "tokens_per_second", "peak_bytes"}
    assert len(result["losses"]) == len(result["peak_bytes"]) == 2
    _, torchrun, *arguments = shlex.split(err.splitlines()[0])
    assert Path(torchrun).name == "torchrun" and arguments[:3] == ["--standalone", "--nproc-per-node", "2"]
    assert str(package / "train.py") in arguments
    assert err.splitlines()[0].count("--steps") == 1, "the number after -- replaces the default"


def test_a_check_that_does_not_hold_exits_with_1(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong"
    shutil.copytree(package, wrong)
    (region,) = (path for path in (wrong / "regions").glob("*.py") if "F.gelu(" in path.read_text())
    region.write_text(region.read_text().replace("F.gelu(", "1.001 * F.gelu("))
    assert main(["verify", str(wrong), "--virtual", "--steps", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 1   loss ") and "worst of " in lines[1] and "of 1e-10 allowed" in lines[1]
    assert lines[2] == "NOT equal to the single-device model"


def test_a_model_without_a_finite_loss_is_said(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = VerifyResult(
        ok=False,
        losses=(2.0, math.nan),
        reference_losses=(2.0, math.nan),
        worst=Difference(kind="loss", name="loss", rel_err=math.inf, step=2),
        tolerance=1e-10,
        rounding="fp64",
        compared=2,
    )
    monkeypatch.setattr("partc.package.verify.verify", lambda *_, **__: lost)
    assert main(["verify", str(package)]) == 1
    assert "own loss is not a finite number in step 2" in capsys.readouterr().out
    assert main(["verify", str(package), "--json"]) == 1
    said = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert said["losses"] == said["reference_losses"] == [2.0, None]
    seconds = {"step_seconds": (1.0, 1.0), "step_seconds_median": 1.0, "tokens_per_second": 1.0}
    ran = RunResult(losses=(2.0, math.nan), **seconds, peak_bytes=(1,))
    monkeypatch.setattr("partc.package.launch.run", lambda *_, **__: ran)
    assert main(["run", str(package), "--json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["losses"] == [2.0, None]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["compile"], "P0001"),
        (["compile", MLP], "P0001"),
        (["compile", MLP, "--mesh", "2", "--schedule", "zigzag"], "P0404"),
        (["fly"], "P0001"),
        (["compile", MLP, "--mesh", "2x"], "P0101"),
        (["compile", MLP, "--mesh", "2x2x2x2"], "P0102"),
        (["compile", MLP, "--mesh", "zp=2"], "P0103"),
        (["compile", MLP, "--mesh", "0"], "P0104"),
        (["compile", MLP, "--mesh", "2", "-D", "depth"], "P0003"),
        (["compile", MLP, "--mesh", "2", "--microbatches", "0"], "P0405"),
        (["compile", MLP, "--mesh", "2", "--shard", "nonsense"], "P0301"),
        (["compile", MLP, "--mesh", "2", "--dump-after", "nothing"], "P0604"),
        (["compile", "no_such_file.py", "--mesh", "2"], "P0201"),
        (["compile", MLP, "--mesh", "2", "-D", "colour=red"], "P0204"),
        (["compile", MLP, "--mesh", "2", "-D", "depth=many"], "P0204"),
        (["compile", MLP, "--mesh", "5"], "P0401"),
        (["compile", MLP, "--mesh", "2", "--microbatches", "7"], "P0401"),
        (["compile", MLP, "--mesh", "pp=40", "-D", "depth=2"], "P0403"),
        (["compile", MLP, "--mesh", "tp=2", "--shard", "nothing.*=[@tp, _]"], "P0303"),
        (["compile", MLP, "--mesh", "tp=3", "--shard", "blocks.*.up.weight=[@tp, _]"], "P0302"),
        (["compile", "hf:no/config.json", "--mesh", "2"], "P0231"),
        (["verify", "no_such_folder"], "P0503"),
        (["run", "no_such_folder"], "P0503"),
        (["inspect", MLP], "P0603"),
        (["inspect", MLP, "--rank", "0"], "P0503"),
        (["inspect", str(ROOT / "examples" / "gpt_2x2x2"), "--rank", "8"], "P0610"),
        (["inspect", MLP, "--mesh", "2", "--after", "nothing"], "P0604"),
    ],
)  # fmt: skip
def test_wrong_input_is_a_coded_error(
    arguments: list[str], code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "inspect":  # has no --json
        assert main(arguments) == 2
        assert f"error {code}: " in capsys.readouterr().err
    else:
        assert failing(arguments, capsys)["code"] == code
    assert not (tmp_path / "build").exists()


@pytest.mark.parametrize(
    ("change", "code", "line"),
    [
        (("def model():", "def network():"), "P0203", None),
        (("import torch\n", "import torch\nimport no_such_module\n"), "P0202", 3),
        (("import torch\n", "import torch\nthis is no python\n"), "P0202", 3),
        (("return Net()", "return 1 / 0"), "P0205", 15),
        (("return Net()", "return 'a net'"), "P0205", None),
        (("self.down(torch.relu(self.up(x))).sum()", "self.up(x).sum() * round(float(x.sum()))"), "P0206", 12),
        ((".sum()", ""), "P0208", None),
        ((".sum()", ".sum() + torch.poisson(x).sum()"), "P0207", 12),
    ],
)
def test_wrong_model_files_are_coded_errors(
    change: tuple[str, str], code: str, line: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert change[0] in PLAIN
    path = model_file(tmp_path, PLAIN.replace(*change))
    error = failing(["compile", path, "--mesh", "2", "-o", str(tmp_path / "build")], capsys)
    assert error["code"] == code
    if line is not None:
        assert error["source"] == f"{path}:{line}"


def test_an_output_folder_of_others_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    assert failing(["compile", MLP, "--mesh", "2", "-o", str(tmp_path)], capsys)["code"] == "P0601"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_bug_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import partc.explain

    def broken(code: str) -> str:
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr(partc.explain, "explanation", broken)
    assert main(["explain", "P0101"]) == 70
    err = capsys.readouterr().err
    assert "this is a bug in partc: ZeroDivisionError: of all things" in err and "Traceback" not in err
    kept = Path(err.split()[-1])
    assert "Traceback" in kept.read_text()
    kept.unlink()


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "p0401"]) == 0
    assert capsys.readouterr().out.startswith("P0401: the batch does not divide\n\n")
    assert main(["explain"]) == 0
    assert "P0103  an unknown axis" in capsys.readouterr().out
    assert main(["explain", "P9999"]) == 2


def test_a_command_leaves_the_garbage_collector_as_it_was() -> None:
    before = gc.get_threshold()
    assert main(["explain", "P0001"]) == 0 and main(["explain", "P9999"]) == 2
    assert gc.get_threshold() == before


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert {"python", "cores", "torch", "GPUs", "gloo", "NCCL", "triton"} <= set(found)
    assert code == (1 if any(item["ok"] is False for item in found.values()) else 0)
    assert found["torch"]["ok"] is True


def test_the_module_runs_as_a_command() -> None:
    done = subprocess.run([sys.executable, "-m", "partc", "explain", "P0101"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("P0101")
    done = subprocess.run([sys.executable, "-m", "partc", "compile"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "P0001" in done.stderr and done.stdout == ""


@pytest.mark.slow
def test_folders_of_the_working_folder_are_not_libraries(tmp_path: Path) -> None:
    """Torch imports z3 if it finds it."""
    (tmp_path / "z3").mkdir()
    command = [sys.executable, "-m", "partc", "compile", str(ROOT / MLP), "--mesh", "2", "-o", "z3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
