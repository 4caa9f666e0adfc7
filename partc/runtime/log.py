"""What a run tells: a line of JSON per step in a file, a progress line on the screen."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TextIO

from .update import Updated


class StepLog:
    """Opened on the one rank that has the loss and stands first on every other axis."""

    def __init__(
        self, path: Path | None, steps: int, stream: TextIO | None = None, *, start: int = 0, tokens: int = 0
    ) -> None:
        self._steps = steps
        self._tokens = tokens  # of a step
        self._stream = sys.stderr if stream is None else stream
        earlier = _earlier(path, start) if path else ""
        self._file = path.open("w") if path else None
        if self._file:
            self._file.write(earlier)

    def step(self, step: int, loss: float, seconds: float, updated: Updated, peak_bytes: int) -> None:
        if self._file:
            entry = {"step": step, "loss": loss, "seconds": round(seconds, 6), "lr": updated.rate}
            entry |= {"tokens_per_second": round(self._tokens / seconds, 1), "peak_bytes": peak_bytes}
            entry |= {} if updated.norm is None else {"grad_norm": updated.norm, "skipped": updated.skipped}
            print(json.dumps(entry), file=self._file, flush=True)
        skipped = "  overflow: skipped" if updated.skipped else ""
        line = f"step {step + 1}/{self._steps}  loss {loss:.6f}  {seconds:.3f} s{skipped}"
        if self._stream.isatty():
            print(f"\r{line}\033[K", end="\n" if step + 1 == self._steps else "", file=self._stream, flush=True)
        else:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        if self._file:
            self._file.close()


def _earlier(path: Path, start: int) -> str:
    """Lines of the run that this one continues, up to where it does."""
    if not start or not path.exists():
        return ""
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        try:
            if json.loads(line)["step"] < start and line.endswith("\n"):
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    return "".join(kept)
