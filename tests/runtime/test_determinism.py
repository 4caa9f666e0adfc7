"""`train.py --deterministic` uses torch's deterministic algorithms during a run, and names operations without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import partc
from partc.runtime.checkpoint.safetensors import load
from partc.runtime.device.determinism import deterministic
from partc.runtime.errors import UsageError
from partc.runtime.ops import attention_kernels
from partc.runtime.ops.attention_kernels import Case, Gpu, on_gpu
from partc.runtime.train.steps import Steps
from tests.durable import TIED, train


def test_a_run_uses_them_and_leaves_torch_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = partc.compile(TIED, mesh="2", microbatches=2, precision="fp32").write(tmp_path / "build")
    seen: list[tuple[bool, bool, bool]] = []
    run = Steps.run

    def ran(steps: Steps, step: int) -> Any:
        filled = torch.utils.deterministic.fill_uninitialized_memory
        seen.append((torch.are_deterministic_algorithms_enabled(), filled, torch.backends.cudnn.deterministic))
        return run(steps, step)

    monkeypatch.setattr(Steps, "run", ran)
    for how in ((), ("--deterministic",)):
        done = train(build, "--steps", 2, "--record", tmp_path / f"record{len(how)}", *how)
        assert done.returncode == 0, done.stderr
    assert seen == [(False, True, False)] * 4 + [(True, False, True)] * 4
    assert not torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory
    for file in (tmp_path / "record0").iterdir():
        mine, other = load(file)[0], load(tmp_path / "record1" / file.name)[0]
        assert all(torch.equal(x, other[name]) for name, x in mine.items())


def test_an_operation_without_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own words, from an operation that has none on any device."""
    build = partc.compile(TIED, mesh="1", precision="fp32").write(tmp_path / "build")
    run = Steps.run_batch

    def ran(steps: Steps, first: bool, last: bool) -> Any:
        places = torch.zeros(1, 1, 2, 2, dtype=torch.int64)
        torch.nn.functional.max_unpool2d(torch.ones(1, 1, 2, 2), places, 2)
        return run(steps, first, last)

    monkeypatch.setattr(Steps, "run_batch", ran)
    assert train(build, "--steps", 1).returncode == 0
    done = train(build, "--steps", 1, "--deterministic")
    assert done.returncode == 2 and "error P0542: --deterministic: max_unpool" in done.stderr, done.stderr


def test_attention_is_not_cudnns_nor_flash_attention_3s(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(torch.bfloat16, heads=8, groups=8, s=256, t=256, d=64, e=64, causal=True)
    hopper = Gpu((9, 0), 92000)
    assert on_gpu(case, hopper).name == "cudnn"
    device = torch.device("cuda", 0)
    monkeypatch.setattr(attention_kernels, "gpu_at", lambda index: hopper)
    with deterministic(True):
        choice = on_gpu(case, hopper)
        assert choice.name == "flash" and ("cudnn", "not deterministic") in choice.passed
        for name in ("cudnn", "flash3"):
            with pytest.raises(UsageError, match="not deterministic"):
                attention_kernels.enable_kernels(name, {}, device, lambda line: None)
