"""Invalid options of train.py: `partc run` refuses them before it starts a process, train.py before its ranks start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from partc.cli import main
from partc.errors import PartcError
from partc.package import launch
from partc.runtime.errors import UsageError
from partc.runtime.train.tokens import check_file
from tests.durable import build

BAD: dict[str, tuple[str, ...]] = {
    "--steps": ("-1", "0", "nan", "x", "1.5", "", "9" * 40, "9" * 6000, "inf", "1e3"),
    "--lr": ("nan", "inf", "-1", "x", "", "-inf", "1e999"),
    "--min-lr": ("nan", "-1", "inf", "x"),
    "--clip": ("0", "nan", "-1", "inf", ""),
    "--weight-decay": ("nan", "-0.1", "inf", "x"),
    "--warmup": ("-1", "1.5", "nan"),
    "--accumulate": ("0", "-3", "2.5", "x"),
    "--seed": ("-1", str(2**32), "x", "1.5", str(2**64)),
    "--peak-flops": ("0", "-1", "nan", "inf"),
    "--timeout": ("0", "-1", "nan", "inf", "1e12", "x", "0.0001"),
    "--save-every": ("0", "-1", "x"),
    "--save-slack": ("-1", "x"),
    "--keep": ("0", "-1"),
    "--exit-code": ("-1", "256", "x", "1.5"),
    "--optimizer": (
        "lamb",
        "",
        "SGD",
        "lbfgs",
        "adamw8bit",
        "adamw:",
        "adamw:betas=2,1",
        "sgd:eps=1",
        "muon:ns_steps=x",
    ),
    "--betas": ("x", "0.9", "0.9,2", "nan,0", "0.9,inf"),
    "--momentum": ("0.9", "x"),  # of sgd, not of adamw
    "--group": ("", "*bias", "*bias:", ":eps=1", "zzz*:eps=1", "*bias:zzz=1", "*:lr_scale=-1", "*:optimizer=zzz"),
    "--lr-schedule": ("step", ""),
    "--no-decay": ("zzz*", "", "["),
    "--data": ("", "{folder}", "{folder}/none.bin", "{folder}/pipe.bin", "/dev/zero"),
    "--metrics": ("", "{folder}", "{folder}/none/log", "{folder}/nowhere", "/proc/x", "/dev/null/x", "a" * 300),
    "--save": ("", "/dev/null", "/proc/x", "{folder}/nowhere", "/dev/null/x", "{folder}/file", "b" * 300),
    "--trace": ("", "/dev/null", "/proc/x"),
    "--record": ("", "/dev/null", "/proc/x", "{folder}/file"),
    "--report": ("", "/dev/null", "{folder}/nowhere", "/proc/x", "{folder}/file/below"),
    "--tensorboard": ("", "/dev/null"),
    "--resume": ("{folder}/none", "/dev/null", "{folder}", "{folder}/step_00000009"),
    "--init": ("", "{folder}/none", "/dev/null", "{folder}", "{folder}/file"),
    "--tuned": ("", "{folder}/none", "/dev/null", "{folder}"),
    "--trace-steps": ("x", "3:1", "0:2", ":", "2:3"),
    "--eval-every": ("-1", "x", "1.5", "2"),
    "--prefetch": ("-1", "65", "nan"),
    "--eval-batches": ("0", "x"),
    "--data-end": ("x",),
    "--bogus": ("1",),
    "--virtual": ("1",),
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("package"), "dp=2")


@pytest.mark.parametrize("option", BAD)
def test_bad_values(
    option: str, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def started(command: object, **_: object) -> None:
        pytest.fail(f"{command} was started")

    monkeypatch.setattr(launch, "run_watched", started)
    (tmp_path / "file").write_text("not a tensor")
    (tmp_path / "nowhere").symlink_to("gone")
    os.mkfifo(tmp_path / "pipe.bin")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for value in BAD[option]:
        given = [option, value.format(folder=tmp_path)]
        if option == "--trace-steps" and value != "2:3":
            given += ["--trace", str(tmp_path / "trace")]
        for switch in ([], ["--virtual"]):
            assert main(["run", str(package), "--", *given, *switch]) == 2, given
            said = capsys.readouterr().err
            assert said.startswith("error P05") and len(said) < 1500 and "Traceback" not in said, (given, said)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


CONTRADICTIONS = [
    ("--lr 0.1 --min-lr 1", "P0521"),
    ("--min-lr 0.0001", "P0521"),
    ("--data-dtype int32", "P0521"),
    ("--data-labels next", "P0521"),
    ("--eval-batches 3", "P0521"),
    ("--eval-data {folder}/tokens.bin", "P0521"),
    ("--keep 2", "P0521"),
    ("--save-every 5", "P0521"),
    ("--save-slack 2", "P0521"),
    ("--exit-code 3", "P0521"),
    ("--no-tuning --tuned {folder}/tuned.json", "P0521"),
    ("--report {folder}/x --trace {folder}/x", "P0521"),
    ("--save {folder}/x --record {folder}/x", "P0521"),
    ("--save {folder}/x --metrics {folder}/x", "P0521"),
    ("--metrics {folder}/tokens.bin", "P0538"),
    ("--metrics {package}/plan.json", "P0538"),
    ("--trace {folder}/x --trace-steps 90:95", "P0521"),
    ("--optimizer sgd --betas 0.9,0.9", "P0551"),
    ("--eval-every 3", "P0546"),
    ("--cuda-graphs --device cpu", "P0533"),
]


@pytest.mark.parametrize(("given", "code"), CONTRADICTIONS)
def test_options_that_contradict(
    given: str,
    code: str,
    package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launch, "run_watched", lambda command, **_: pytest.fail("was started"))
    (tmp_path / "tokens.bin").write_bytes(bytes(1000))
    (tmp_path / "tuned.json").write_text("{}")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    words = given.format(folder=tmp_path, package=package).split()
    assert main(["run", str(package), "--", *words]) == 2
    assert f"error {code}" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_tokens_are_checked_before_processes_start(tmp_path: Path) -> None:
    """Too few of them, or tokens that the model does not have."""
    plan = {
        "inputs": {
            name: {"dtype": "i64", "layout": "[4@dp, 16]", "indices": [{"below": 50}]} for name in ("ids", "labels")
        }
    }
    for tokens, labels, message in (
        (bytes(30), None, "has 15 tokens, and a row of the batch 16"),
        (bytes(32), "next", "has 16 tokens, and a row of the batch 17"),
        (bytes(9000) + b"\x32\0" + bytes(4), None, "has the token 50, and the model 50 of them"),
    ):
        (tmp_path / "t.bin").write_bytes(tokens)
        with pytest.raises(UsageError, match=f"P0545.*{message}"):
            check_file(tmp_path / "t.bin", "uint16", plan, labels)
    (tmp_path / "t.bin").write_bytes(bytes(34))
    check_file(tmp_path / "t.bin", "uint16", plan, "next")


def test_a_launcher_that_is_stopped_before_its_ranks_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "LAUNCHER_CHECK_SECONDS", 0.2)
    command = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"]
    with pytest.raises(PartcError, match=r"P0536.*was stopped before it started a rank"):
        launch.run_watched(command, launches=True)


def test_good_values(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ends of the ranges."""
    monkeypatch.setattr(launch, "run_watched", lambda command, **_: pytest.fail("started as it should"))
    good = ["--steps", "1", "--lr", "0", "--min-lr", "0", "--seed", str(2**32 - 1), "--timeout", "1", "--keep", "1"]
    good += ["--save-slack", "0", "--exit-code", "255", "--warmup", "0", "--weight-decay", "0", "--no-decay", "*bias"]
    good += ["--metrics", str(tmp_path / "log"), "--save", str(tmp_path / "new" / "save"), "--resume"]
    with pytest.raises(pytest.fail.Exception, match="started as it should"):
        launch.run(package, arguments=good)
    assert not list(tmp_path.iterdir())


def test_reports_that_cannot_be_copied(tmp_path: Path) -> None:
    (tmp_path / "rank_000.json").write_text("{}")
    with pytest.raises(PartcError, match="P0538: /dev/null, which --report names"):
        launch.copy_reports(tmp_path, Path("/dev/null"))
