"""A rank's clock: the name of its current activity, and the intervals of past activities."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from partc.runtime import clock as module
from partc.runtime.clock import Clock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A clock that stands still until it is moved."""
    time = [0]
    monkeypatch.setattr(module.time, "monotonic_ns", lambda: time[0])
    return time


def test_doing_says_the_step_and_the_collective() -> None:
    clock = Clock()
    assert clock.doing == "start-up"
    clock.entering("setup")
    assert clock.doing == "setup"
    clock.step = 3
    clock.entering("0F1", "work")
    begun = clock.begin("all_reduce", "dp,tp")
    assert clock.doing == "0F1 of step 3, all_reduce over dp,tp"
    clock.end(begun, "collective", "all_reduce", "dp,tp", 8)
    assert clock.doing == "0F1 of step 3"
    assert clock.stop() == []


def test_intervals_lie_end_to_end_with_communication_inside(now: list[int]) -> None:
    def at(time: int, do: Any, *arguments: Any) -> Any:
        now[0] = time
        return do(*arguments)

    clock = Clock()
    at(5, clock.start, torch.device("cpu"))
    at(7, clock.entering, "0F0", "work")
    begun = at(8, clock.begin, "all_gather", "tp")
    at(11, clock.end, begun, "collective", "all_gather", "tp", 24, 6)
    at(12, clock.entering, "saving")
    now[0] = 20
    assert [tuple(each) for each in clock.stop()] == [
        (5, 7, "aside", "start-up", "", 0, "", 5),
        (8, 11, "collective", "all_gather", "tp", 24, "0F0", 6),
        (7, 12, "work", "0F0", "", 0, "", 7),
        (12, 20, "aside", "saving", "", 0, "", 12),
    ]
    assert clock.stop() == []


def test_it_starts_anew_and_forgets_what_began_while_it_was_off(now: list[int]) -> None:
    clock = Clock()
    begun = clock.begin("recv", "link 0 1")
    clock.start(torch.device("cpu"))
    clock.end(begun, "recv", "recv", "link 0 1", 0)
    clock.entering("1F0", "work")
    assert [each.name for each in clock.stop()] == ["start-up", "1F0"]
    clock.entering("2F0", "work")
    clock.start(torch.device("cpu"))
    clock.entering("2B0", "work")
    found = clock.stop()
    assert [(each.name, each.kind) for each in found] == [("2F0", "work"), ("2B0", "work")]
    assert all(a.end == b.start for a, b in pairwise(found))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_is_asked_when_its_work_was_done() -> None:
    clock = Clock()
    clock.start(torch.device("cuda"))
    x = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    clock.entering("0F0", "work")
    for _ in range(10):
        x = x @ x
    clock.entering("0B0", "work")
    first, second, _ = clock.stop()
    assert second.end - second.start > 1e5, "the products take longer than their launches"
    assert first.end == second.start
