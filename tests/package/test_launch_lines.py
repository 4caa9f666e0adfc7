"""The commands that start a package's ranks, for one node and for many."""

from __future__ import annotations

import itertools
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import partc
from partc.cli import main
from partc.errors import PartcError, Source
from partc.package import launch
from partc.package.launch import local_environment
from partc.runtime import plan as plans
from partc.runtime.plan import launches

MLP = Path(__file__).parents[2] / "examples" / "mlp.py"


@pytest.mark.parametrize(
    ("ranks", "node", "nodes"),
    [
        (1, None, 1),
        (64, None, 1),
        (16_384, None, 2048),
        (100, None, 1),
        (8, 4, 2),
        (16_384, 4, 4096),
        (12, 12, 1),
        (2, 8, 1),
    ],
)
def test_the_commands_start_every_rank_once(ranks: int, node: int | None, nodes: int) -> None:
    lines = [shlex.split(line) for line in launches(ranks, node)]
    assert len(lines) == nodes
    given = [dict(itertools.pairwise(line)) for line in lines]
    assert sum(int(each["--nproc-per-node"]) for each in given) == ranks
    if nodes > 1:
        assert [int(each["--node-rank"]) for each in given] == list(range(nodes))
        assert {int(each["--nnodes"]) for each in given} == {nodes}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return partc.compile(str(MLP), mesh="dp=4", nodes=2).write(tmp_path_factory.mktemp("nodes") / "build")


def test_the_readme_has_a_line_for_each_node(package: Path) -> None:
    text = (package / "README.md").read_text()
    assert all(f"    {line} --steps 20\n" in text for line in launches(4, 2))
    assert "--standalone" not in text


def test_more_ranks_than_a_machine_has_are_refused(
    package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "ONE_MACHINE", 2)
    assert main(["run", str(package), "--steps", "1"]) == 2
    said = capsys.readouterr()
    assert "P0549" in said.err
    assert all(line in said.out + said.err for line in launches(4, 2))


@pytest.mark.slow
@pytest.mark.processes
def test_two_nodes_train_by_their_lines(package: Path) -> None:
    """Both nodes are this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    commands = [line.replace("FIRST_NODE", "127.0.0.1").replace("29500", port) for line in launches(4, 2)]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *shlex.split(line)[1:], "--steps", "2", "--device", "cpu"],
            cwd=package,
            env=local_environment(),
        )
        for line in commands
    ]
    assert [each.wait(timeout=120) for each in started] == [0, 0]


def test_another_process_reads_why_input_was_refused(tmp_path: Path) -> None:
    error = PartcError("P0401", "a cause", help="a help", source=Source(file="model.py", line=3, module="blocks.0"))
    assert launch.refusal(tmp_path / "reports") is None
    with pytest.raises(SystemExit), launch.refusals_reported(tmp_path / "reports"):
        raise error
    found = launch.refusal(tmp_path / "reports")
    assert found is not None and str(found) == str(error)
    assert (found.code, found.cause, found.help, found.source) == ("P0401", "a cause", "a help", error.source)
