"""Results of a run on a GPU, as tables on the screen and row by row in files, so that an interrupted run keeps its rows."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class Results:
    """`gpu.md` has the tables, `gpu.jsonl` a line for each row. Without a folder they are on the screen alone."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._columns: Sequence[str] = ()
        self._title = ""
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def say(self, line: str) -> None:
        print(line, flush=True)
        self._write("gpu.md", line)

    def table(self, title: str, *columns: str) -> None:
        """Rows that follow are this table's."""
        self._title, self._columns = title, columns
        self.say(f"\n## {title}\n")
        self.say(f"| {' | '.join(columns)} |")
        self.say(f"|{'---|' * len(columns)}")

    def row(self, *cells: Any) -> None:
        assert len(cells) == len(self._columns)
        self.say(f"| {' | '.join(map(str, cells))} |")
        told = {"table": self._title, **dict(zip(self._columns, cells, strict=True)), "at": round(time.time())}
        self._write("gpu.jsonl", json.dumps(told, default=str))

    def _write(self, name: str, line: str) -> None:
        if self._folder is not None:
            with (self._folder / name).open("a", encoding="utf-8") as file:
                print(line, file=file, flush=True)


def folder_of(given: Path | None) -> Path | None:
    """Where results go: a folder that is named, or the one that $OUT names."""
    return given if given is not None else Path(os.environ["OUT"]) if os.environ.get("OUT") else None


class Deadline:
    """The seconds that a part may take, in one call with others' time limit."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._end = now() + seconds

    @property
    def left(self) -> float:
        return self._end - self._now()
