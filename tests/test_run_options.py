"""Options of train.py that cannot be: `partc run` says so before it starts a process, train.py before its ranks meet."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from partc.cli import main
from partc.errors import PartcError
from partc.package import launch
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
    def started(command: object) -> None:
        pytest.fail(f"{command} was started")

    monkeypatch.setattr(launch, "_watched", started)
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


def test_good_values(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ends of the ranges."""
    monkeypatch.setattr(launch, "_watched", lambda command: pytest.fail("started as it should"))
    good = ["--steps", "1", "--lr", "0", "--min-lr", "0", "--seed", str(2**32 - 1), "--timeout", "1", "--keep", "1"]
    good += ["--save-slack", "0", "--exit-code", "255", "--warmup", "0", "--weight-decay", "0", "--no-decay", "*bias"]
    good += ["--metrics", str(tmp_path / "log"), "--save", str(tmp_path / "new" / "save"), "--resume"]
    with pytest.raises(pytest.fail.Exception, match="started as it should"):
        launch.run(package, arguments=good)
    assert not list(tmp_path.iterdir())


def test_reports_that_cannot_be_copied(tmp_path: Path) -> None:
    (tmp_path / "rank_000.json").write_text("{}")
    with pytest.raises(PartcError, match="P0538: /dev/null, which --report names"):
        launch._copy_reports(tmp_path, Path("/dev/null"))
