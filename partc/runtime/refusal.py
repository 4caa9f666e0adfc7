"""The file with which a process that rejects its input tells the cause to the process that started it.

The exit code does not: torchrun ends alike after wrong input and after a crash.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .whole_files import write_whole

_NAME = "refusal.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An error for wrong input; `source` are the fields of the line of the user's code, if it is known."""

    code: str
    cause: str
    help: str
    source: Mapping[str, Any] | None = None

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / _NAME, json.dumps(asdict(self)))


def read_refusal(folder: Path) -> Refusal | None:
    path = folder / _NAME
    return Refusal(**json.loads(path.read_text())) if path.is_file() else None


def remove_refusal(folder: Path) -> None:
    """Remove the file of an earlier run."""
    (folder / _NAME).unlink(missing_ok=True)
