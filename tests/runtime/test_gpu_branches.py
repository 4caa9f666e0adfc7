"""The runtime's branches for GPUs, on machines without one: tensors without memory claim to be CUDA tensors.

Operations check shapes and types, and what would wait for the device, or copy a number from the host, cannot be done.
Kernels are not launched; their arguments have to be on the device.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import partc
from partc.runtime.checkpoint.checkpoint import Held, RankPosition, Saver
from partc.runtime.checkpoint.safetensors import load
from partc.runtime.comm.virtual import VirtualComm, World
from partc.runtime.device.pinned import pinned
from partc.runtime.device.sending import to_device
from partc.runtime.layout import DTYPES, Shard
from partc.runtime.ops import attention_kernels
from partc.runtime.optimizer.update import Updated
from partc.runtime.torch_private import lone_store
from partc.runtime.train import train, training
from partc.runtime.train.steps import Done, Steps
from tests.durable import imported_from

ROOT = Path(__file__).parents[2]
DEVICE = torch.device("meta")


class Launches:
    """In a kernel's place."""

    def __init__(self, found: list[str], name: str) -> None:
        self.found, self.name = found, name

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*given: Any, **how: Any) -> None:
            assert all(x.device == DEVICE for x in given if isinstance(x, Tensor)), self.name
            self.found.append(self.name)

        return launch


class Unread(Steps):
    """Steps of which the host reads nothing."""

    def run(self, step: int) -> Done:
        self.copy_in({name: x.to(DEVICE) for name, x in self.part_of(step).items()})
        if self.scale is not None:
            self.comm.scales(self.scale.value)
        self.comm.begins(self.job.seed, step)
        for first, last in ((True, False), (False, True)):
            self.run_batch(first, last)
        self.measure()
        self.update.begin(step, torch.ones(()))
        self.apply_update()
        return Done(loss=None, seconds=0.0, data=0.0, updated=Updated(rate=0.0, norm=None), recorded={}, loads={})


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on memory that isn't there is a GPU's."""
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda x: x.device == DEVICE), raising=False)
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: x)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(attention_kernels, "refusal", lambda *_: "")
    monkeypatch.setattr(training, "Steps", Unread)
    for name in ("adam", "sgd"):  # which ask for a device that they know
        module = importlib.import_module(f"torch.optim.{name}")
        monkeypatch.setattr(module, "_device_dtype_check_for_fused", lambda *_, **__: None)


def steps_taken(package: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[str]:
    """Two steps on the device; the names of the kernels that they would launch."""
    pretend(monkeypatch)
    found: list[str] = []
    with imported_from(package):
        job = train.parse(["--virtual", "--steps", "2", *arguments], package)
        rank = train.load_rank(0, DEVICE, job)
        for name, module in list(sys.modules.items()):
            if name.startswith("kernels."):
                for key, item in list(vars(module).items()):
                    if type(item).__name__ in ("JITFunction", "InterpretedFunction") and name != "kernels.functions":
                        setattr(module, key, Launches(found, key))
        for name, shard in rank.shards.items():
            rank.parameters[name] = torch.empty(shard.local_shape(job.sizes), dtype=shard.dtype, device=DEVICE)
        comm = VirtualComm(world=World(1), rank=0, coordinate=rank.place.coordinate, groups={}, links={})
        comm.device = DEVICE
        model_file = train.load_model_file(package / "model.py")
        data = train.batches_of(job, model_file, str)
        training.train(job, rank, comm, data, model_file, DEVICE, lone_store(), None)
    return found


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("model", "options", "arguments"),
    [
        ("examples/gpt.py", {"precision": "bf16", "kernels": "triton"}, ["--clip", "1"]),
        ("examples/gpt.py", {"precision": "bf16", "kernels": "aten", "recompute": "full"}, ["--clip", "1"]),
        (
            "examples/gpt.py",
            {"precision": "fp16", "kernels": "triton", "microbatches": 2, "loss_chunks": 2},
            ["--optimizer", "sgd"],
        ),
        ("tests/models/mixture.py", {"precision": "bf16", "kernels": "triton"}, []),
        ("tests/models/noisy.py", {"precision": "fp32", "kernels": "triton"}, []),
        ("tests/models/tied.py", {"precision": "fp32", "kernels": "aten"}, []),
        ("tests/models/resnet.py", {"precision": "bf16", "kernels": "aten"}, []),
    ],
    ids=lambda x: x.split("/")[-1] if isinstance(x, str) else x.get("kernels") if isinstance(x, dict) else " ".join(x),
)
def test_a_step_waits_for_nothing(
    model: str, options: dict[str, Any], arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partc.compile(ROOT / model, mesh="1", **options).write(tmp_path / "build")
    found = steps_taken(tmp_path / "build", monkeypatch, *arguments)
    assert bool(found) == (options["kernels"] == "triton")


@pytest.mark.slow
def test_a_step_that_waits_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: one that asks for a number of the device's."""
    package = tmp_path / "build"
    partc.compile(ROOT / "examples/gpt.py", mesh="1", kernels="aten").write(package)
    stage = package / "stages" / "stage_0.py"
    text = stage.read_text()
    assert "    saved: list[Any] = []\n" in text
    stage.write_text(
        text.replace("    saved: list[Any] = []\n", "    saved: list[Any] = []\n        self.cos.sum().item()\n")
    )
    with pytest.raises(RuntimeError, match="meta"):
        steps_taken(package, monkeypatch)


def test_batches_go_to_a_gpu_from_pinned_memory_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    x = torch.arange(3.0)
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: (said.append("pinned"), x)[1])
    monkeypatch.setattr(Tensor, "to", lambda x, device, non_blocking=False: (said.append(f"{non_blocking}"), x)[1])
    to_device(x, torch.device("cuda", 0))
    assert said == ["pinned", "True"]
    assert to_device(x, torch.device("cpu")).data_ptr() == x.data_ptr() and said[2:] == ["False"]


class Runtime:
    """The part of CUDA's runtime that pins memory."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}  # bytes, by address
        self.full = False

    def cudaHostRegister(self, place: int, size: int, flags: int) -> int:
        assert flags == 1
        self.pinned[place] = size
        return 1 if self.full else 0

    def cudaHostUnregister(self, place: int) -> int:
        del self.pinned[place]
        return 0


@pytest.mark.slow
def test_a_checkpoints_host_memory_is_as_large_as_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not rounded up to powers of two, and pinned once; it is let go of with the last tensor in it."""
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(
        torch.cuda, "Event", lambda: type("E", (), {"record": lambda s: 0, "synchronize": lambda s: 0})()
    )
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda x: x.device.type == "cpu"))
    shapes = {"a": (1025,), "b": (3, 700), "c": (), "d": (2,)}
    held = {
        name: Held(Shard(f"{kind}[{', '.join(map(str, shape))}]"), torch.randn(shape).to(DTYPES[kind]))
        for (name, shape), kind in zip(shapes.items(), ("f32", "f32", "f32", "f64"), strict=True)
    }
    place = RankPosition(rank=0, world_size=1, sizes={}, coordinate={})
    saver = Saver(tmp_path, keep=2, place=place, store=lone_store(), attempt="one", run={})
    for step in (1, 2):
        saver.save(step, held)
        saver.wait()
        (size,) = runtime.pinned.values()
        exact = sum(each.tensor.nbytes for each in held.values())
        assert exact <= size <= exact + 64 * len(held)
    (file,) = (tmp_path / "step_00000002").glob("*.safetensors")
    found = load(file)[0]
    assert all(torch.equal(found[name], each.tensor) for name, each in held.items())
    del saver
    gc.collect()
    assert not runtime.pinned
    runtime.full = True
    with pytest.raises(RuntimeError, match="CUDA cannot lock 64 bytes of host memory in place"):
        pinned([torch.ones(2)])
