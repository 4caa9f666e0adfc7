"""`partc verify` and `partc run` on a package written by hand: they hold, and they notice."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from partc.errors import PartcError
from partc.launch import RunFailed, run
from partc.verify import verify

TESTS = Path(__file__).parent


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
    result = verify(package, steps=3, virtual=True, optimizer=optimizer)
    assert result.ok
    assert result.worst.rel_err < 1e-12
    assert len(result.losses) == len(result.reference_losses) == 3
    # Per step: the loss, and a gradient and a value of 6 (7 in the second stage) parameters on each of 4 ranks.
    assert result.compared == 3 * (1 + 4 * 2 * 6 + 4 * 2 * 7)


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
    result = verify(package, steps=1, virtual=True)
    assert not result.ok
    assert result.worst.kind == worst


def test_a_package_that_crashes_is_no_result(package: Path) -> None:
    replace_in(package / "stages/stage_0.py", 'return {"blocks_0": blocks_0}, saved', "raise KeyError('oops')")
    with pytest.raises(RunFailed) as failure:
        verify(package, steps=1, virtual=True)
    assert "oops" in failure.value.output


def test_a_deadlock_is_named(package: Path) -> None:
    replace_in(package / "ranks/rank_004.py", "1SEND_B0 ", "")
    with pytest.raises(RunFailed) as failure:
        verify(package, steps=1, virtual=True)
    assert "every rank waits for another" in failure.value.output
    assert "rank 0 in recv from rank 4" in failure.value.output


@pytest.mark.processes
def test_run_reports(package: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    result = run(package, steps=3, tell=told.append)
    assert "torchrun --standalone --nproc-per-node 8" in told[0]
    assert len(result.losses) == len(result.step_seconds) == 3
    assert len(result.peak_bytes) == 8 and min(result.peak_bytes) > 1 << 20
    assert result.tokens_per_second == pytest.approx(8 / result.step_seconds_median)
    assert capfd.readouterr().out == ""


def test_a_folder_that_is_no_package(tmp_path: Path) -> None:
    with pytest.raises(PartcError, match="P0503"):
        verify(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps([]))
    with pytest.raises(PartcError, match="P0503"):
        verify(tmp_path)


def test_packages_need_torch_alone(package: Path, tmp_path: Path) -> None:
    """They train where partc isn't installed, nor anything else that torch can do without."""
    absent = ("partc", "numpy", "safetensors", "scipy", "jinja2", "click", "rich", "transformers")
    program = (
        f"import sys, runpy; sys.modules.update(dict.fromkeys({absent!r})); "
        f"sys.argv = ['train.py', '--virtual', '--steps', '2', '--record', {str(tmp_path / 'record')!r}]; "
        f"runpy.run_path({str(package / 'train.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stderr
    assert len(list((tmp_path / "record").iterdir())) == 2 * 8
