"""A run's log: a line of JSON per step in a file, a progress line or bar on the screen, TensorBoard."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ..documents import Malformed, decoded, parsed
from ..errors import shown, writing
from ..optimizer.update import Updated
from ..whole_files import write_whole
from .step_times import Split


class StepLog:
    """The log. Only one rank opens it: the one that has the loss, at coordinate 0 on every other axis.

    `tokens` and `flops` are numbers per step, `peak` the flops per second of all ranks and their source, `board` a
    folder for TensorBoard.
    """

    def __init__(
        self,
        path: Path | None,
        steps: int,
        stream: TextIO | None = None,
        *,
        rank: int = 0,
        start: int = 0,
        tokens: int = 0,
        flops: int = 0,
        peak: tuple[float, str] | None = None,
        board: Path | None = None,
    ) -> None:
        self._start, self._steps = start, steps
        self._began = time.monotonic()
        self._tokens, self._flops = tokens, flops
        self._peak = 0.0 if peak is None else peak[0]
        self._stream = sys.stderr if stream is None else stream
        self._rank = rank
        self._path, self._folder = path, board
        self._file: TextIO | None = None
        self._board = None
        if path is not None:
            with writing(path, rank):
                earlier = _earlier(path, start)
                if earlier:
                    write_whole(path, earlier)
                self._file = _opened(path, os.O_APPEND if earlier else os.O_TRUNC)
        if board is not None:
            with writing(board, rank):
                self._board = _writer(board, start)
        if peak is not None:
            self._print(f"mfu is the share of {peak[0]:.3g} flops a second, {peak[1]}\n")

    def step(
        self,
        step: int,
        loss: float,
        seconds: float,
        updated: Updated,
        peak_bytes: int,
        split: Split | None = None,
        aside: Mapping[str, float] | None = None,
        evaluation: Mapping[str, float] | None = None,
        loads: Mapping[str, float] | None = None,
    ) -> None:
        """Log a step. `step` counts from 0; users see numbers from 1, as in checkpoints.

        `seconds` is the whole time; `aside` names the host's other activities in it. `evaluation` has the
        results of an evaluation after the step, `loads` the spreads of experts' loads.
        """
        entry: dict[str, Any] = {"step": step + 1, "loss": loss, "seconds": round(seconds, 6), "lr": updated.rate}
        entry |= {"tokens_per_second": round(self._tokens / seconds, 1), "peak_bytes": peak_bytes}
        entry |= {} if updated.norm is None else {"grad_norm": updated.norm, "skipped": updated.skipped}
        entry |= {} if split is None else {name: round(value, 6) for name, value in split._asdict().items()}
        entry |= {} if aside is None else {name: round(value, 6) for name, value in aside.items()}
        entry |= {**(evaluation or {}), **(loads or {})}
        entry |= {"mfu": round(self._flops / seconds / self._peak, 6)} if self._peak else {}
        if self._file is not None and self._path is not None:
            # JSON has neither NaN nor infinity.
            finite = {name: value if math.isfinite(value) else None for name, value in entry.items()}
            with writing(self._path, self._rank):
                print(json.dumps(finite, allow_nan=False), file=self._file, flush=True)
        if self._board is not None and self._folder is not None:
            with writing(self._folder, self._rank):
                for name, value in entry.items():
                    if name != "step":
                        self._board.add_scalar(name, value, step + 1)
        skipped = "  overflow: skipped" if updated.skipped else ""
        additions = "".join(f"  {name} {value:.6f}" for name, value in (evaluation or {}).items())
        additions += _fullest(loads or {})
        line = shown(f"step {step + 1}/{self._steps}  loss {loss:.6f}{additions}  {seconds:.3f} s{skipped}")
        if self._stream.isatty():
            last = step + 1 == self._steps
            self._print(f"\r{self._bar(step + 1, line)}\033[K" + "\n" * last)
        else:
            self._print(f"{line}\n")

    def close(self) -> None:
        if self._file is not None and self._path is not None:
            with writing(self._path, self._rank):
                self._file.close()
        if self._board is not None and self._folder is not None:
            with writing(self._folder, self._rank):
                self._board.close()

    def _print(self, text: str) -> None:
        with suppress(OSError):  # a closed terminal does not end the training
            print(text, end="", file=self._stream, flush=True)

    def _bar(self, done: int, line: str) -> str:
        """The line with a progress bar and the remaining time, in the terminal's width."""
        passed = time.monotonic() - self._began
        left = round(passed / max(1, done - self._start) * (self._steps - done))
        line = f"{line}  {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
        columns = shutil.get_terminal_size().columns
        room = min(40, columns - len(line) - 4)
        if room < 5:
            return line[: columns - 1]
        filled = room * done // self._steps
        return f"{'█' * filled}{'░' * (room - filled)}  {line}"


def _fullest(loads: Mapping[str, float]) -> str:
    """Text: the largest load of an expert over the mean, among all layers, and the largest share of dropped rows."""
    largest, dropped = (
        max((value for name, value in loads.items() if name.endswith(f"/{word}")), default=0.0)
        for word in ("largest", "dropped")
    )
    return f"  largest load {largest:.2f}" * bool(largest) + f"  dropped {dropped:.1%}" * bool(dropped)


def _writer(folder: Path, start: int) -> Any:
    """TensorBoard's writer; it replaces an earlier run's entries of later steps."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=start + 1 if start else None)


@dataclass(frozen=True, slots=True)
class _LogLine:
    """The fields of every line of the log."""

    step: int


def _opened(path: Path, how: int) -> TextIO:
    """Open a file for writing. Raises OSError for a pipe without a reader, which would block."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | how, 0o666)
    os.set_blocking(descriptor, True)
    return open(descriptor, "w")


def _earlier(path: Path, start: int) -> str:
    """The lines of the run that is continued, up to its continuation."""
    if not start or not path.is_file():
        return ""
    kept = []
    for line in path.read_text(errors="replace").splitlines(keepends=True):
        try:
            if decoded(_LogLine, parsed(line), loose=True).step <= start and line.endswith("\n"):
                kept.append(line)
        except Malformed:
            continue
    return "".join(kept)
