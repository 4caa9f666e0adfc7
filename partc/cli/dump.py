"""`--dump-after`: the program after passes, as numbered files next to the package."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from partc import passes
from partc.cli.inspection import program_text
from partc.errors import PartcError
from partc.runtime.whole_files import write_whole

ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """The passes after which the program is written, and the folder: `build-dump/04-annotate.txt`."""

    folder: Path
    names: frozenset[str]

    @classmethod
    def of(cls, wanted: Sequence[str], output: Path) -> Dump:
        """Check names and folder. Raises PartcError P0604, and P0601 if the folder holds other files."""
        names = frozenset(passes.known(name) for name in wanted if name != ALL)
        if ALL in wanted:
            names = frozenset((passes.FIRST, *passes.NAMES))
        folder = output.resolve().with_name(f"{output.resolve().name}-dump")
        if names and os.path.lexists(folder):
            found = [entry.name for entry in folder.iterdir()] if folder.is_dir() else [""]
            others = [name for name in found if not re.fullmatch(r"\d\d-[a-z]+\.txt", name)]
            if others:
                raise PartcError(
                    "P0601",
                    f"{folder / others[0]} was not written by partc",
                    help="move it, or choose another -o",
                )
        return cls(folder=folder, names=names)

    def observe(self, step: passes.PassResult) -> None:
        if step.name in self.names:
            number = (passes.FIRST, *passes.NAMES).index(step.name)
            path = self.folder / f"{number:02d}-{step.name}.txt"
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                write_whole(path, program_text(step.program, sources=True))
            except OSError as error:
                cause = f"{path} cannot be written: {error.strerror}"
                raise PartcError("P0602", cause, help="choose another -o, with room next to it") from error
