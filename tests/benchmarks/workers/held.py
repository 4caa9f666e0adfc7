"""A rank of a peer (see peers.py) under the meter of all tensors: what it holds at most in each step.

FSDP keeps storages and takes their memory away, so the meter follows their sizes here.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import peers
import torch
from gate import read_task
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.meter import Meter


class Following(Meter):
    """Sees the operations inside of those on distributed tensors, and what storages are resized to."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


def main() -> None:
    meter = Following()
    plain = torch.UntypedStorage.resize_

    def resized(storage: Any, size: int) -> Any:
        before = storage.nbytes()
        result = plain(storage, size)
        meter.resized(storage, before, size)
        return result

    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]
    peers.wait_for_round = lambda task, step: meter.next_step()
    with meter:
        peers.main()
    meter.next_step()
    path = read_task().report / f"meter_{int(os.environ['RANK']):03d}.json"
    path.write_text(json.dumps({"peaks": meter.peaks}))


if __name__ == "__main__":
    main()
