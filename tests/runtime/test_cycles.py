"""Steps create no reference cycles that hold memory, so that the garbage collector may pause while they run."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

import partc
from partc.runtime.device import garbage_collection
from partc.runtime.device.garbage_collection import collected
from partc.runtime.train import train
from tests.durable import TIED, imported_from


@pytest.mark.slow
def test_the_collector_rests_inside_and_works_after() -> None:
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    with pytest.raises(ZeroDivisionError), collected() as collect:
        assert not gc.isenabled() and gc.get_freeze_count() > 1000
        collect(1)
        raise ZeroDivisionError
    assert gc.isenabled() and gc.get_freeze_count() == frozen


@pytest.mark.slow
def test_steps_leave_nothing_to_collect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def collect() -> None:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect(1)
        found.append(list(gc.garbage))
        gc.garbage.clear()
        gc.set_debug(0)

    monkeypatch.setattr(garbage_collection, "EVERY", 3)
    monkeypatch.setattr(garbage_collection, "collect_young", collect)
    build = partc.compile(TIED, mesh="1", microbatches=2, precision="fp16").write(tmp_path / "build")
    with imported_from(build):
        log = ["--metrics", str(tmp_path / "log.jsonl"), "--clip", "1", "--accumulate", "2"]
        assert train.main(["--device", "cpu", "--steps", "6", *log], build) == 0
    assert found == [[], []] and gc.isenabled()
