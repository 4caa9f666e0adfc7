"""Recorded and replayed steps equal executed steps bit for bit, on a stand-in for CUDA graphs."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import partc
from partc.codegen.cuda_graphs import obstacle
from partc.errors import PartcError
from partc.runtime.checkpoint.safetensors import load
from partc.runtime.device.cuda_graphs import CudaGraph, RecordedWork, recording
from partc.runtime.errors import UsageError
from partc.runtime.optimizer.update import LossScale
from partc.runtime.processes.watchdog import PeerLost
from tests.cpu_graph import Refused, cpu_graphs
from tests.durable import TIED, train
from tests.zoo import MODELS

NOISY = Path(__file__).parents[1] / "models" / "noisy.py"
STEPS = 5  # of which the last three are repeated


def trained(build: Path, folder: Path, *arguments: object) -> dict[str, torch.Tensor]:
    """All that a training has left behind: gradients, parameters, the optimizer's state and its like, and the log."""
    folder.mkdir()
    log = folder / "log.jsonl"
    told = ("--record", folder / "record", "--save", folder / "save", "--metrics", log, "--peak-flops", 1)
    done = train(build, "--steps", STEPS, *told, *arguments)
    assert done.returncode == 0, done.stderr
    files = [*(folder / "record").iterdir(), *(folder / "save").rglob("*.safetensors")]
    found = {f"{file.name}: {name}": x for file in files for name, x in load(file)[0].items()}
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    numbers = [[line[key] or 0.0 for key in ("loss", "lr", "grad_norm", "skipped")] for line in lines]
    return found | {"log": torch.tensor(numbers, dtype=torch.float64)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and len(one) > 10
    differing = [name for name, x in one.items() if not torch.allclose(x, other[name], rtol=0, atol=0, equal_nan=True)]
    assert differing == []


CASES: dict[str, tuple[Path, dict[str, Any], tuple[object, ...]]] = {
    "dropout": (NOISY, {"mesh": "1", "microbatches": 2}, ("--lr-schedule", "cosine", "--warmup", 2)),
    "kernels": (
        NOISY,
        {"mesh": "1", "microbatches": 2, "precision": "bf16", "kernels": "triton"},
        ("--lr-schedule", "linear", "--clip", 0.1, "--no-decay", "*bias*"),
    ),
    "cut dropout": (NOISY, {"mesh": "dp=2,tp=2", "zero": 1}, ("--optimizer", "sgd", "--warmup", 4)),
    "accumulated": (NOISY, {"mesh": "1", "recompute": "full", "loss_chunks": 3}, ("--accumulate", 3, "--clip", 0.1)),
    "fp16": (NOISY, {"mesh": "2", "precision": "fp16"}, ("--accumulate", 2, "--clip", 1.0, "--steps", 12)),
    "parts": (TIED, {"mesh": "2", "zero": 3, "microbatches": 2}, ("--accumulate", 3, "--lr-schedule", "linear")),
    "parts of gradients": (TIED, {"mesh": "2", "zero": 2, "compress_grads": "bf16"}, ("--accumulate", 2)),
    "compressed": (TIED, {"mesh": "2", "precision": "fp32", "compress_grads": "int8"}, ("--clip", 0.1)),
    "nodes": (TIED, {"mesh": "4", "zero": 3, "nodes": 2, "recompute": "selective"}, ()),
}


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
def test_repeated_steps_are_the_steps(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, options, arguments = CASES[case]
    build = tmp_path / "build"
    # So much that updates are skipped while steps are done, and while they are repeated.
    monkeypatch.setattr(LossScale.__init__, "__defaults__", (2.0**21,))
    partc.compile(model, **{"precision": "fp64", **options}).write(build)
    plain = trained(build, tmp_path / "plain", *arguments)
    with cpu_graphs(monkeypatch) as graphs:
        repeated = trained(build, tmp_path / "repeated", "--cuda-graphs", *arguments)
    assert all(graph.nodes for graph in graphs) and len(graphs) >= 3
    same(plain, repeated)
    if case == "fp16":
        skipped = plain["log"][:, 3].tolist()
        assert skipped[:4] == [1, 1, 1, 1] and 0 in skipped[:-2]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", MODELS)
def test_every_model_repeats(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS[name]
    if model.config:
        pytest.importorskip("transformers")
    build = tmp_path / "build"
    package = partc.compile(model.source(tmp_path), mesh="1", microbatches=2, precision="fp64", options=model.options)
    if obstacle(package.program) is not None:
        assert name in ("mixtral", "mixture")
        return
    package.write(build)
    plain = trained(build, tmp_path / "plain", "--warmup", 5, "--clip", 0.1)
    with cpu_graphs(monkeypatch):
        repeated = trained(build, tmp_path / "repeated", "--cuda-graphs", "--warmup", 5, "--clip", 0.1)
    same(plain, repeated)


BREAKS = {
    "loss = loss * (1.0 + comm.step)": None,
    "loss = loss * (1.0 + 0.0 * loss.item())": "waits for the device",
    "loss = loss * torch.tensor(1.0)": "copies from the host",
    "loss = loss[loss == loss].sum()": "waits for the device",
    "loss = loss * torch.rand(())": "draws from a generator",
    "comm.kept = getattr(comm, 'kept', loss) * 0.5 + loss; loss = loss + comm.kept": "has been freed",
}


@pytest.mark.parametrize("line", BREAKS)
def test_what_cannot_be_repeated_is_seen(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in's own control: a number of the host's is repeated as it was, and what CUDA would refuse is refused."""
    build = tmp_path / "build"
    partc.compile(TIED, mesh="1", precision="fp64").write(build)
    stage = build / "stages" / "stage_0.py"
    text = stage.read_text()
    (there,) = [each for each in text.splitlines() if "loss, kept = head_forward(" in each]
    stage.write_text(text.replace(there, f"{there}\n        comm = self.comm\n        {line}"))
    plain = trained(build, tmp_path / "plain")
    with cpu_graphs(monkeypatch):
        if BREAKS[line] is not None:
            with pytest.raises(Refused, match=BREAKS[line]):
                trained(build, tmp_path / "repeated", "--cuda-graphs")
            return
        repeated = trained(build, tmp_path / "repeated", "--cuda-graphs")
    with pytest.raises(AssertionError):
        same(plain, repeated)


@pytest.mark.slow
def test_a_continued_run_repeats_its_steps_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new recording starts; replayed and executed steps are equal, wherever the change occurs."""
    build, save = tmp_path / "build", tmp_path / "save"
    partc.compile(TIED, mesh="2", microbatches=2, zero=2, compress_grads="bf16", cuda_graphs=True).write(build)
    whole = trained(build, tmp_path / "whole", "--steps", 8, "--no-cuda-graphs", "--warmup", 6)
    with cpu_graphs(monkeypatch) as graphs:
        first = train(build, "--steps", 4, "--save", save, "--warmup", 6)
        assert first.returncode == 0 and graphs
        graphs.clear()
        rest = trained(build, tmp_path / "rest", "--steps", 8, "--resume", save)
    assert graphs
    later = {name: x for name, x in rest.items() if name != "log"}
    same({name: whole[name] for name in later}, later)


def test_batches_of_other_types_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other shapes they are anyway."""
    model = tmp_path / "small.py"
    given = "torch.ones(4, 4, dtype=torch.int64 if step < 3 else torch.int32)"
    text = SMALL.replace("torch.ones(4, 4)", "torch.ones(4, 4, dtype=torch.int64)").replace('["x"]', '["x"].float()')
    model.write_text(f"{text}\ndef data(step):\n    return {{'x': {given}}}\n")
    build = partc.compile(model, mesh="1").write(tmp_path / "build")
    assert train(build, "--steps", 5).returncode == 0
    with cpu_graphs(monkeypatch):
        done = train(build, "--steps", 5, "--cuda-graphs")
    said = "error P0533: steps cannot be repeated: x of the batch is torch.int32 on this rank, and was torch.int64"
    assert done.returncode == 2 and said in done.stderr, done.stderr


SMALL = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

def batch():
    return {"x": torch.ones(4, 4)}

def loss(model, batch):
    return model(batch["x"]).sum()
"""


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"mesh": "pp=2"}, "pipeline ranks send"),
        ({"mesh": "1", "kernels": "inductor"}, "functions compiled by torch.compile"),
        ({"mesh": "2", "precision": "fp16", "compress_grads": "int8"}, "the error feedback of --compress-grads"),
    ],
)
def test_what_the_host_has_a_part_in_is_refused(options: dict[str, Any], cause: str, tmp_path: Path) -> None:
    model = tmp_path / "small.py"
    model.write_text(SMALL)
    with pytest.raises(PartcError, match=cause) as error:
        partc.compile(model, cuda_graphs=True, **options)
    assert error.value.code == "P0419" and "leave out --cuda-graphs" in error.value.help
    build = partc.compile(model, **options).write(tmp_path / "build")
    assert cause in json.loads((build / "plan.json").read_text())["uncaptured"]
    done = train(build, "--cuda-graphs")
    assert done.returncode == 2 and "error P0533" in done.stderr and cause in done.stderr


@pytest.mark.slow
def test_experts_are_named_with_their_line(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source = MODELS["mixtral"].source(tmp_path)
    with pytest.raises(PartcError, match="the host has to read operands of expert_matmul") as error:
        partc.compile(source, mesh="1", options=MODELS["mixtral"].options, cuda_graphs=True)
    assert error.value.code == "P0419" and error.value.source is not None and error.value.source.line > 0


@pytest.mark.slow
def test_assignments_are_made_on_the_host() -> None:
    model = Path(__file__).parents[1] / "independent" / "models" / "set_matching.py"
    with pytest.raises(PartcError, match="the host has to read operands of linear_sum_assignment") as error:
        partc.compile(model, mesh="1", cuda_graphs=True)
    assert (
        error.value.code == "P0419" and error.value.source is not None and error.value.source.file.endswith(model.name)
    )


@pytest.mark.parametrize(
    ("precision", "hidden", "mesh", "recorded"),
    [("bf16", 24, "1", True), ("bf16", 24, "dp=2", True), ("bf16", 20, "1", False), ("fp32", 24, "1", False),
     ("bf16", 24, "ep=2", False)],
)  # fmt: skip
def test_experts_in_one_kernel_are_recorded(precision: str, hidden: int, mesh: str, recorded: bool) -> None:
    """Torch's grouped product needs bf16 and rows at multiples of 16 bytes; rows that travel are counted on the host."""
    model = Path(__file__).parents[1] / "models" / "routed.py"
    done = partc.compile(model, mesh=mesh, precision=precision, options={"hidden": hidden})
    assert (obstacle(done.program) is None) is recorded


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (("--check-nans",), "--check-nans stops in the middle of a step"),
        (("--trace", "there"), "--trace reads the time in the middle of a step"),
        ((), "it is not on GPUs here"),
    ],
)
def test_runs_that_cannot_repeat_are_refused(
    arguments: tuple[str, ...], cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    build = tmp_path / "build"
    partc.compile(TIED, mesh="1", cuda_graphs=True).write(build)
    assert json.loads((build / "plan.json").read_text())["command"]["cuda_graphs"] is True
    assert "| CUDA graphs |" in (build / "README.md").read_text()
    done = train(build, *arguments)
    assert done.returncode == 2 and "error P0533" in done.stderr and cause in done.stderr
    assert train(build, "--steps", 1, "--no-cuda-graphs", *arguments).returncode == 0


def test_what_cuda_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its words, and the option that trains without."""

    class Refusing:
        def __init__(self, *given: object, **named: object) -> None:
            assert named == {"capture_error_mode": "thread_local"}

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", Refusing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    with pytest.raises(
        UsageError, match=r"P0534: .*: CUDA error: operation not permitted.*capturing\n  help: leave out"
    ):
        CudaGraph((0, 0)).capture(lambda: None)


@pytest.mark.parametrize(
    ("cause", "seen"), [(RuntimeError("the host waits"), UsageError), (PeerLost("rank 1 is gone"), PeerLost)]
)
def test_what_breaks_a_recording_is_told_not_that_it_broke(
    cause: RuntimeError, seen: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __init__(self, *given: object, **named: object) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def work() -> None:
        raise cause

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", Broken)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    with pytest.raises(seen, match=str(cause)):
        CudaGraph((0, 0)).capture(work)


def test_recordings_share_a_stream_and_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of CUDA in their order; the names of torch's arguments are checked against torch."""
    said: list[str] = []
    signature = inspect.signature(torch.cuda.graph.__init__)

    class Stream:
        def __init__(self, name: object) -> None:
            self.name = name if isinstance(name, str) else "side"

        def wait_stream(self, other: Stream) -> None:
            said.append(f"{self.name} waits for {other.name}")

    streams = [Stream("main")]

    @contextmanager
    def within(stream: Stream) -> Iterator[None]:
        streams.append(stream)
        yield
        streams.pop()

    class Graph:
        def replay(self) -> None:
            said.append("replay")

        def reset(self) -> None:
            said.append("reset")

    @contextmanager
    def capturing(*given: object, **named: object) -> Iterator[None]:
        call = signature.bind(None, *given, **named).arguments
        assert isinstance(call["cuda_graph"], Graph) and call["pool"] == "pool"
        said.append(f"capture on {call['stream'].name}")
        yield

    for name, stand_in in {
        "Stream": Stream, "stream": within, "current_stream": lambda device=None: streams[-1], "CUDAGraph": Graph,
        "graph_pool_handle": lambda: "pool", "graph": capturing,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: said.append("the device is done"))
    with recording(True, torch.device("cuda", 0)) as make:
        assert make is not None
        works = [RecordedWork(lambda: said.append("done"), make()), RecordedWork(lambda: said.append("else"), make())]
        for _ in range(4):
            for work in works:
                work()
    assert said == [
        "side waits for main",
        *("done", "else") * 2,
        *("capture on side", "done", "replay", "capture on side", "else", "replay"),
        *("replay", "replay", "main waits for side"),
        *("the device is done", "reset", "reset"),  # communicators cannot be destroyed while recordings have their work
    ]
    said.clear()
    with pytest.raises(ZeroDivisionError), recording(True, torch.device("cuda", 0)) as make:
        assert make is not None
        make()
        raise ZeroDivisionError
    assert said == ["side waits for main", "reset"], "of a device that may hang nothing is waited for"
