"""Batches that a thread prepares in advance equal those prepared on demand, in the same order and once each."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from partc.runtime.checkpoint.manifest import checkpoints
from partc.runtime.train.feed import Feed
from tests.durable import build, trained, whole


def test_parts_are_made_ahead_in_order_and_once() -> None:
    made: list[tuple[int, bool]] = []
    come = threading.Event()

    def make(number: int) -> dict[str, Tensor]:
        made.append((number, threading.current_thread() is threading.main_thread()))
        if number == 2:
            come.set()
        return {"x": torch.full((2,), float(number))}

    feed = Feed(make, end=5, ahead=2, pin=False)
    assert feed(0)["x"].tolist() == [0, 0]
    assert come.wait(20), "batches 1 and 2 are made before anybody asks for them"
    assert [feed(number)["x"][0].item() for number in (1, 2, 3, 4)] == [1, 2, 3, 4]
    assert made == [(number, False) for number in range(5)]


def test_nothing_is_made_ahead_by_default_or_twice() -> None:
    made: list[int] = []

    def make(number: int) -> dict[str, Tensor]:
        made.append(number)
        return {}

    Feed(make, end=5, ahead=0, pin=False)(3)
    assert made == [3]
    feed = Feed(make, end=9, ahead=1, pin=False)
    feed(4)
    feed(7)  # not the one that was expected
    feed(8)
    assert sorted(set(made)) == [3, 4, 5, 7, 8] and made.count(7) == 1


def test_an_error_comes_with_its_own_batch() -> None:
    def make(number: int) -> dict[str, Tensor]:
        if number == 1:
            raise ValueError("no batch 1")
        assert not torch.is_grad_enabled()
        return {}

    feed = Feed(make, end=5, ahead=3, pin=False)
    feed(0)
    with pytest.raises(ValueError, match="no batch 1"):
        feed(1)


@pytest.mark.slow
@pytest.mark.processes
def test_a_training_is_the_same_with_batches_made_ahead(tmp_path: Path) -> None:
    package = build(tmp_path, "2x1x1")
    ends = []
    for ahead in (0, 3):
        save = tmp_path / f"save{ahead}"
        trained(package, "--steps", 3, "--accumulate", 2, "--prefetch", ahead, "--save", save, real=True)
        ends.append(whole(checkpoints(tmp_path / f"save{ahead}")[0]))
    assert ends[0].keys() == ends[1].keys() and all(ends[0][name].equal(ends[1][name]) for name in ends[0])
