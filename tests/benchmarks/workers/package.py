"""A rank of an emitted package: its own train.py's work, held before each round."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from gate import read_task, wait_for_round


def main() -> int:
    task = read_task()
    sys.path.insert(0, str(task.package))
    train: Any = importlib.import_module("runtime.train.train")
    make_batch = train._batch

    def batch_when_told(job: Any, model_file: Any, step: int) -> Any:
        batch = make_batch(job, model_file, step)
        wait_for_round(task, step)
        return batch

    train._batch = batch_when_told
    status: int = train.main(["--steps", str(task.total), "--report", str(task.report)], task.package)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
