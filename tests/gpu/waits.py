"""The lines at which a package's host waits for the GPU: `waits.py train.py STEPS OUT.json` trains in the mode of torch
that warns of each wait.

Each wait is counted at the innermost line of the package. Waits of the training loop for the loss are included.
"""

from __future__ import annotations

import json
import runpy
import sys
import traceback
import warnings
from collections import Counter
from pathlib import Path

import torch


def main(train: Path, steps: int, out: Path) -> None:
    found: Counter[str] = Counter()

    def note(*_: object, **__: object) -> None:
        inside = [frame for frame in traceback.extract_stack() if train.parent in Path(frame.filename).parents]
        if inside:
            found[f"{Path(inside[-1].filename).relative_to(train.parent)}:{inside[-1].lineno}"] += 1

    warnings.simplefilter("always")
    warnings.showwarning = note  # type: ignore[assignment]
    torch.cuda.init()
    torch.cuda.set_sync_debug_mode("warn")
    sys.path.insert(0, str(train.parent))
    sys.argv = [str(train), "--device", "cuda", "--steps", str(steps), "--no-tuning"]
    try:
        runpy.run_path(str(train), run_name="__main__")
    except SystemExit as error:
        if error.code:
            raise
    out.write_text(json.dumps(dict(found)))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]), Path(sys.argv[3]))
