"""Checkpoints are written while training continues; a failed write leaves no partial checkpoint."""

from __future__ import annotations

import errno
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from partc.runtime.checkpoint import checkpoint
from partc.runtime.checkpoint.checkpoint import Held, RankPosition, Saver
from partc.runtime.checkpoint.manifest import checkpoints, read
from partc.runtime.checkpoint.safetensors import TensorFile
from partc.runtime.device.host_memory import peak_bytes
from partc.runtime.errors import UsageError
from partc.runtime.layout import Shard
from partc.runtime.torch_private import lone_store
from partc.runtime.train.log import StepLog
from tests.durable import build, trained, whole

RUN = {"seed": 0, "optimizer": "sgd", "mesh": "tp=2"}


def saver(folder: Path, **place: Any) -> Saver:
    given: dict[str, Any] = {"rank": 0, "world_size": 1, "sizes": {"tp": 1}, "coordinate": {"tp": 0}, **place}
    return Saver(folder, keep=3, place=RankPosition(**given), store=lone_store(), attempt="now", run=RUN)


def held(x: Tensor) -> dict[str, Held]:
    return {"weight": Held(Shard("f32[4, 3]"), x)}


def test_training_goes_on_while_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = threading.Event()
    write: Callable[..., None] = checkpoint.write

    def late(*arguments: Any) -> None:
        assert may_write.wait(10)
        write(*arguments)

    monkeypatch.setattr(checkpoint, "write", late)
    x = torch.arange(12.0).view(4, 3)
    one = saver(tmp_path)
    one.save(7, held(x))
    before = x.clone()
    x.mul_(-1)  # the next step
    assert not checkpoints(tmp_path)
    may_write.set()
    one.wait()
    (path,) = checkpoints(tmp_path)
    assert torch.equal(whole(path)["weight"], before)
    one.save(8, held(x))
    one.wait()
    assert torch.equal(whole(path)["weight"], before) and torch.equal(whole(checkpoints(tmp_path)[0])["weight"], x)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = saver(tmp_path)
    one.save(1, held(torch.ones(4, 3)))
    one.wait()

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write", full)
        one.save(2, held(torch.zeros(4, 3)))
        with pytest.raises(UsageError, match=r"P0526: rank 0 cannot write .*: No space left on device"):
            one.wait()
    (path,) = checkpoints(tmp_path)
    assert path.name == "step_00000001" and whole(path)["weight"].eq(1).all()


def test_tensors_without_elements_are_saved(tmp_path: Path) -> None:
    one = saver(tmp_path)
    empty = {
        "none": Held(Shard("f32[0, 3]"), torch.empty(0, 3)),
        "rows": Held(Shard("i64[4, 0]"), torch.empty(4, 0).long()),
    }
    one.save(1, held(torch.ones(4, 3)) | empty)
    one.wait()
    (path,) = checkpoints(tmp_path)
    found = whole(path)
    assert {name: (x.dtype, tuple(x.shape)) for name, x in found.items()} == {
        "weight": (torch.float32, (4, 3)), "none": (torch.float32, (0, 3)), "rows": (torch.int64, (4, 0)),
    }  # fmt: skip


def test_nobody_commits_before_all_have_written(tmp_path: Path) -> None:
    store = lone_store()
    ranks = [
        Saver(
            tmp_path,
            keep=1,
            place=RankPosition(rank=rank, world_size=2, sizes={"tp": 2}, coordinate={"tp": rank}),
            store=store,
            attempt="now",
            run=RUN,
        )
        for rank in range(2)
    ]
    x = torch.arange(12.0).view(4, 3)
    shard = Shard("f32[4@tp, 3]")
    ranks[1].save(1, {"weight": Held(shard, x[2:])})
    ranks[1].wait()
    assert not checkpoints(tmp_path)
    ranks[0].save(1, {"weight": Held(shard, x[:2])})
    ranks[0].wait()
    (path,) = checkpoints(tmp_path)
    assert torch.equal(whole(path)["weight"], x)
    assert sorted(file.name for file in path.iterdir()) == [
        "manifest.json",
        "rank_000.safetensors",
        "rank_001.safetensors",
    ]


@pytest.mark.parametrize("aligned", [True, False])
def test_only_what_is_looked_at_is_read(tmp_path: Path, aligned: bool) -> None:
    """A file larger than most machines' memory, of holes."""
    rows, columns = 1 << 20, 1 << 18
    header = f'{{"x":{{"dtype":"F32","shape":[{rows},{columns}],"data_offsets":[0,{4 * rows * columns}]}}}}'.encode()
    header += b" " * (-len(header) % 8 + (not aligned))
    with (tmp_path / "x").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        try:
            file.truncate(8 + len(header) + 4 * rows * columns)
        except OSError:
            pytest.skip("no file of a tebibyte here")
    before = peak_bytes(torch.device("cpu"))
    part = TensorFile(tmp_path / "x").tensor("x", (slice(rows // 2, rows // 2 + 3), slice(5, 9)))
    assert part.shape == (3, 4) and part.sum() == 0
    assert peak_bytes(torch.device("cpu")) - before < 64 << 20


@pytest.mark.parametrize("slack", [0, 2])
def test_no_more_steps_can_be_lost_than_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slack: int) -> None:
    """Whenever a step is counted, the newest checkpoint is at most `--save-every` and the slack behind it."""
    package, save = build(tmp_path, "2x1x1"), tmp_path / "save"
    behind = []
    count, write = StepLog.step, checkpoint.write

    def counted(log: StepLog, step: int, *rest: Any) -> None:
        count(log, step, *rest)
        there = checkpoints(save)
        behind.append(step + 1 - (read(there[0]).step if there else 0))

    def late(*arguments: Any) -> None:
        time.sleep(0.5)
        write(*arguments)

    monkeypatch.setattr(StepLog, "step", counted)
    monkeypatch.setattr(checkpoint, "write", late)
    trained(package, "--steps", 9, "--save", save, "--save-every", 3, "--save-slack", slack)
    assert len(behind) == 9 and max(behind) == 3 + slack
