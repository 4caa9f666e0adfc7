"""The parts of a step's time: bubbles and transfers without a common clock, means over ranks, and utilisation."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import partc
from partc.runtime.clock import Interval
from partc.runtime.comm.virtual import VirtualComm, World
from partc.runtime.device.peak_flops import known_peak, measured_peak
from partc.runtime.errors import UsageError
from partc.runtime.layout import tokens_per_step
from partc.runtime.optimizer.update import Updated
from partc.runtime.train import step_times as module
from partc.runtime.train.command_line import parse
from partc.runtime.train.log import StepLog
from partc.runtime.train.step_times import Split, Times
from partc.runtime.train.steps import Steps
from partc.runtime.train.trace import wanted_steps
from tests import prefork
from tests.durable import train
from tests.zoo import EXAMPLES

LINKS = {(0, 1): 1, (1, 0): 1}, {(0, 1): 0, (1, 0): 0}
# Microseconds. Rank 1 waits from 0; its peer sends at 40, and what is sent takes 10. Then rank 0 waits
# from 60 for an answer that is sent at 100; the second message has come long before it is asked for.
STEP = (
    [(0, 40, "work"), (40, 41, "send"), (42, 43, "send"), (60, 110, "recv"), (40, 120, "work")],
    [(0, 50, "recv"), (90, 92, "recv"), (100, 101, "send"), (0, 120, "work")],
)


def split_of(monkeypatch: pytest.MonkeyPatch, ahead: int, machines: tuple[int, int]) -> list[Split | None]:
    """The reports of both ranks on STEP, if rank 1's clock is ahead by so many microseconds."""
    found: list[Split | None] = [None, None]
    world = World(2)

    def work(rank: int) -> None:
        monkeypatch.setattr(module, "machine", lambda: machines[rank])
        comm = VirtualComm(world=world, rank=rank, coordinate={"pp": rank}, groups={"pp": (0, 1)}, links=LINKS[rank])
        times = Times(comm, sizes={"pp": 2}, links=LINKS[rank], stages=(rank,), metrics=True)
        there = ahead * rank
        intervals = [
            Interval(
                (start + there) * 1000,
                (end + there) * 1000,
                kind,  # type: ignore[arg-type]
                kind,
                {"send": f"link {rank} {1 - rank}", "recv": f"link {1 - rank} {rank}"}.get(kind, ""),
            )
            for start, end, kind in STEP[rank]
        ]
        monkeypatch.setattr(comm.clock, "stop", lambda: intervals)
        times.begin(0)
        found[rank] = times.end(0)

    world.run(work)
    return found


@pytest.mark.parametrize(("ahead", "machines"), [(0, (1, 1)), (0, (1, 2)), (123_456, (1, 2)), (-987_654, (1, 2))])
def test_a_late_peer_is_told_from_a_long_way(
    ahead: int, machines: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = split_of(monkeypatch, ahead, machines)
    assert first == second
    # Bubbles of 40 and 40; what is left of the receives, and the sends; the rest of 120 and 120.
    assert first is not None
    assert first.bubble == pytest.approx(40e-6, rel=1e-9)
    assert first.exposed_communication == pytest.approx((10 + 1 + 1 + 10 + 2 + 1) / 2 * 1e-6, rel=1e-9)
    assert sum(first) == pytest.approx(120e-6, rel=1e-9)


def test_steps_to_trace() -> None:
    assert wanted_steps("3:5", 0, 10) == range(2, 5)
    assert wanted_steps("4", 0, 10) == range(3, 4)
    assert wanted_steps("8:20", 0, 10) == range(7, 10)
    assert wanted_steps(None, 0, 10) == range(1, 4)
    assert wanted_steps(None, 7, 9) == range(8, 9)
    assert wanted_steps(None, 8, 9) == range(8, 9)
    for text in ("3:2", "0:2", "x", "3:", "11:12", "-1:3"):
        with pytest.raises(UsageError, match="P0521"):
            wanted_steps(text, 0, 10)
    with pytest.raises(UsageError, match="this run makes steps 6 to 10"):
        wanted_steps("2:5", 5, 10)


def test_peaks() -> None:
    assert known_peak("NVIDIA H100 80GB HBM3", torch.bfloat16) == 989e12
    assert known_peak("NVIDIA H100 PCIe", torch.bfloat16) == 756e12
    assert known_peak("NVIDIA A100-SXM4-80GB", torch.float32) == 19.5e12
    assert known_peak("Tesla V100-SXM2-16GB", torch.float64) == 7.8e12
    assert known_peak("Tesla T4", torch.bfloat16) is None
    assert known_peak("NVIDIA A1000", torch.float32) is None
    assert 1e8 < measured_peak(torch.device("cpu"), torch.float32) < 1e14


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_no_number_is_null(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "m.jsonl", 4, io.StringIO())
    log.step(0, float("nan"), 0.25, Updated(rate=0.1, norm=float("inf"), skipped=True), 1)
    entry = json.loads(
        (tmp_path / "m.jsonl").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON")
    )
    assert entry["loss"] is None and entry["grad_norm"] is None and entry["skipped"] is True


def test_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    for stream in (Terminal(), io.StringIO()):
        log = StepLog(None, 4, stream)
        for step in range(4):
            log.step(step, 2.5, 0.25, Updated(rate=0.1, norm=None), 1)
        log.close()
        text = stream.getvalue()
        assert text.count("step ") == 4 and text.endswith("\n")
        if stream.isatty():
            shown = text.split("\r")[1:]
            assert [line.count("█") > 0 for line in shown] == [True] * 4 and "░" not in shown[-1]
            assert all(len(line.removesuffix("\n").removesuffix("\033[K")) < 90 for line in shown)
            assert text.count("\n") == 1 and shown[-1].count("0:00:00 left") == 1
        else:
            assert text.splitlines()[0] == "step 1/4  loss 2.500000  0.250 s"
    monkeypatch.setenv("COLUMNS", "20")
    narrow = Terminal()
    StepLog(None, 4, narrow).step(0, 2.5, 0.25, Updated(rate=0.1, norm=None), 1)
    assert narrow.getvalue() == "\r" + "step 1/4  loss 2.500000"[:19] + "\033[K"
    plain = io.StringIO()
    scores = {"evaluation/a\x1b[31m\nb": 1.0}  # keys of the user's dict
    StepLog(None, 4, plain).step(0, 2.5, 0.25, Updated(rate=0.1, norm=None), 1, evaluation=scores)
    assert plain.getvalue() == "step 1/4  loss 2.500000  evaluation/a\\x1b[31m\\nb 1.000000  0.250 s\n"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("times") / "build"
    partc.compile(str(Path(__file__).parents[2] / "examples" / "mlp.py"), mesh="2x1x1", microbatches=2).write(path)
    return path


def test_metrics_of_a_run_add_up(built: Path, tmp_path: Path) -> None:
    command = [built / "train.py", "--virtual", "--steps", 3, "--accumulate", 2]
    done = prefork.done([*command, "--metrics", tmp_path / "m.jsonl", "--peak-flops", "1e9"])
    assert done.returncode == 0, done.stderr
    assert "mfu is the share of 1e+09 flops a second, given" in done.stderr
    flops = json.loads((built / "plan.json").read_text())["flops"]
    for line in (tmp_path / "m.jsonl").read_text().splitlines():
        entry = json.loads(line)
        assert min(entry["compute"], entry["exposed_communication"], entry["bubble"]) >= 0
        assert entry["mfu"] == pytest.approx(2 * flops / entry["seconds"] / 1e9, rel=1e-3)
        assert entry["bubble"] > 0 and entry["tokens_per_second"] > 0


def test_a_step_takes_all_that_it_takes(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that does later what it is told: when the next batch is copied there, or a loss is read."""
    owed, spent = [0.0], {"device": 0.0, "copies": 0.0, "measuring": 0.0}

    def settle() -> None:
        time.sleep(owed[0])
        spent["device"] += owed[0]
        owed[0] = 0.0

    run, take, end = Steps.run_batch, Steps.copy_in, Times.end

    def launched(steps: Steps, first: bool, last: bool) -> Any:
        owed[0] += 0.02
        return run(steps, first, last)

    def copied(steps: Steps, batch: Any) -> None:
        settle()
        time.sleep(0.01)
        spent["copies"] += 0.01
        take(steps, batch)

    def ended(times: Times, step: int) -> Any:
        time.sleep(0.005)
        spent["measuring"] += 0.005
        return end(times, step)

    item = torch.Tensor.item
    monkeypatch.setattr(Steps, "run_batch", launched)
    monkeypatch.setattr(Steps, "copy_in", copied)
    monkeypatch.setattr(Times, "end", ended)
    monkeypatch.setattr(torch.Tensor, "item", lambda x: (settle(), item(x))[1])
    partc.compile(EXAMPLES / "mlp.py", mesh="1").write(tmp_path / "build")
    log = tmp_path / "m.jsonl"
    done = train(tmp_path / "build", "--steps", 3, "--accumulate", 4, "--metrics", log, "--peak-flops", 1)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(lines) == 3 and spent["device"] >= 3 * 4 * 0.02 - 1e-9
    tokens = tokens_per_step(json.loads((tmp_path / "build" / "plan.json").read_text())) * 4
    for line in lines:
        assert line["seconds"] >= 4 * (0.02 + 0.01) and line["data"] >= 4 * 0.01
        assert line["tokens_per_second"] == pytest.approx(tokens / line["seconds"], rel=1e-3)
    assert [line["measuring"] >= 0.005 for line in lines] == [False, True, True], "the next step has to bear it"
    assert all(line["seconds"] >= 4 * 0.03 + line["measuring"] for line in lines)


def test_what_cannot_be_asked_for(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="more than 0"):
        parse(["--peak-flops", "0"], built)
    with pytest.raises(UsageError, match="--trace-steps has no --trace"):
        parse(["--trace-steps", "2:3"], built)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="P0529") as raised:
        parse(["--tensorboard", "runs"], built)
    assert raised.value.alike and "pip install tensorboard" in str(raised.value)


def test_kernels_need_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partc.compile(str(EXAMPLES / "mlp.py"), mesh="1", kernels="triton").write(tmp_path / "build")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="P0531"):
        parse([], tmp_path / "build")


def test_tensorboard_has_every_number(built: Path, tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    command = [built / "train.py", "--virtual", "--steps", 2, "--tensorboard", tmp_path]
    assert prefork.done(command).returncode == 0
    found = reader.EventAccumulator(str(tmp_path))
    found.Reload()
    assert {"loss", "lr", "grad_norm", "mfu", "bubble", "seconds"} <= set(found.Tags()["scalars"])
    assert [event.step for event in found.Scalars("loss")] == [1, 2]
