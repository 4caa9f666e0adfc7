"""Measures what a rank of a package holds: every tensor's memory from its creation to its end, while train.py trains.

It knows nothing of the compiler and its account. `python tests/meter.py PACKAGE REPORT ...` runs one rank, as torchrun
would, with the rest for train.py; `measured` runs all ranks of a package.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Meter(TorchDispatchMode):
    """The bytes of all storages that operations of this thread have made and that someone still refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.peak = 0
        self.peaks: list[int] = []  # of each step
        self.counts = True
        self._living: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.counts:
            self.take(result)
        return result

    def take(self, tensors: Any) -> None:
        """Count these from now on, if they aren't counted yet."""
        for x in tree_leaves(tensors):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._living:

                    def ended(_: Any, key: int = key) -> None:
                        del self._living[key]
                        self.bytes -= self._sizes.pop(key)

                    self._living[key] = weakref.ref(storage, ended)
                    self._sizes[key] = size
                    self.bytes += size
                    self.peak = max(self.peak, self.bytes)

    def resized(self, storage: Any, before: int, after: int) -> None:
        """A storage that counts has another size from now on."""
        key = storage._cdata
        if key in self._living:
            self._sizes[key] = after
            self.bytes += after - before
            self.peak = max(self.peak, self.bytes)

    def next_step(self) -> None:
        self.peaks.append(self.peak)
        self.peak = self.bytes

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.counts = False
        yield
        self.counts = True


def _interpreted_where_they_are() -> None:
    """Triton's interpreter copies what kernels are given, and lets go of it when Python next looks for cycles."""
    from triton.runtime.interpreter import GridExecutor

    GridExecutor._init_args_hst = lambda self, given, named: (list(given), named)
    GridExecutor._restore_args_dev = lambda self, *copies: None


def metered(train: Any, meter: Meter) -> None:
    """Have a package's `train` run under the meter. The batch is the model file's doing: only it itself counts."""
    plain = train.train
    if os.environ.get("TRITON_INTERPRET") == "1":
        _interpreted_where_they_are()

    def run(job: Any, rank: Any, comm: Any, data: Any, *rest: Any) -> None:
        part = data.part

        def counted(*given: Any) -> Any:
            meter.next_step()
            with meter.paused():
                made = part(*given)
            meter.take(made)
            return made

        data.part = counted
        meter.take(rank.parameters)
        with meter:
            plain(job, rank, comm, data, *rest)
        meter.next_step()

    train.train = run


def later(peaks: Sequence[int], arguments: Sequence[str]) -> int:
    """The least peak of the batches' memory among the steps after the second.

    gloo's threads may hold what they have sent until the machine lets them run again: in some step they do not. A
    first step whose gradients overflow makes no optimizer state.
    """
    each = int(arguments[arguments.index("--accumulate") + 1]) if "--accumulate" in arguments else 1
    return min(peaks[1 + 2 * each :])


def main(argv: Sequence[str]) -> int:
    package, report, *rest = argv
    sys.path.insert(0, package)
    train: Any = importlib.import_module("runtime.train.train")
    meter = Meter()
    metered(train, meter)
    status: int = train.main(rest, Path(package))
    path = Path(report) / f"meter_{int(os.environ.get('RANK', '0')):03d}.json"
    path.write_text(json.dumps({"peaks": meter.peaks}))
    return status


def measured(package: Path, ranks: int, arguments: Sequence[str] = (), *, steps: int = 5) -> list[int]:
    """The most bytes that each rank held in a step after the first."""
    from tests.prefork import shared  # not where this file runs as a rank

    command = [__file__, str(package), str(package.parent), "--steps", str(steps), *arguments]
    output = package.parent / "output.txt"
    assert shared().ranks(ranks, command, output, {**os.environ, "OMP_NUM_THREADS": "1"}).wait() == 0, (
        output.read_text()
    )
    found = []
    for rank in range(ranks):
        peaks = json.loads((package.parent / f"meter_{rank:03d}.json").read_text())["peaks"]
        found.append(later(peaks, arguments))
    return found


def launched(command: Sequence[str], ranks: int, *, timeout: float = 240) -> None:
    """Run a Python file on so many processes that find each other, to their end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    shared: Mapping[str, str] = {
        **os.environ,
        "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            _, said = process.communicate(timeout=timeout)
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
