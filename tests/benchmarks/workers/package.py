"""A rank of an emitted package: its own train.py's work, held before each round."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from typing import Any

from gate import read_task, wait_for_round


def main() -> int:
    task = read_task()
    sys.path.insert(0, str(task.package))
    train: Any = importlib.import_module("runtime.train.train")
    steps: Any = importlib.import_module("runtime.train.steps").Steps
    run = steps.run

    def run_when_told(self: Any, step: int) -> Any:
        wait_for_round(task, step)
        done = run(self, step)
        return replace(done, seconds=done.seconds - done.data)

    steps.run = run_when_told
    status: int = train.main(["--steps", str(task.total), "--report", str(task.report)], task.package)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
