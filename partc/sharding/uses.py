"""The calls whose batch an axis of weights or sequences cuts: `--batch-over 'tp=embed,blocks.0-15'`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from partc.errors import PartcError
from partc.ir.mesh import PIPELINE_AXIS, TENSOR_AXIS, Mesh, is_batch_axis, is_tensor_axis

_HELP = "for example 'tp=embed,blocks.0-15'; a semicolon separates axes"
_NUMBER = r"(?<![^.])([0-9]{1,6})(?![^.])"  # a part of a dotted name
_RANGE = re.compile(r"(?<![^.])([0-9]{1,6})-([0-9]{1,6})(?![^.])")


@dataclass(frozen=True, slots=True)
class BatchUse:
    """An axis that cuts the batch in the calls that match one of the globs. `0-15` in a glob is a range of numbers."""

    axis: str
    globs: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, mesh: Mesh) -> tuple[BatchUse, ...]:
        """Parse `tp=embed,blocks.0-15`, with a semicolon between axes; `tp` names all pieces of tp that a mesh has.

        Raises PartcError P0305.
        """
        found: dict[str, tuple[str, ...]] = {}
        for part in filter(str.strip, text.split(";")):
            for use in cls._of_axis(part.strip(), mesh):
                found[use.axis] = (*found.get(use.axis, ()), *use.globs)
        return tuple(cls(axis, found[axis]) for axis in mesh.names if axis in found)

    @classmethod
    def _of_axis(cls, text: str, mesh: Mesh) -> Iterator[BatchUse]:
        axis, equals, names = text.partition("=")
        globs = tuple(glob.strip() for glob in names.split(","))
        if not equals or not all(globs):
            raise PartcError("P0305", f"--batch-over {text!r} is not AXIS=CALL,CALL", help=_HELP)
        axis = axis.strip()
        axes = [name for name in mesh.names if name == axis or (axis == TENSOR_AXIS and is_tensor_axis(name))]
        if not axes or axis == PIPELINE_AXIS or is_batch_axis(axis):
            possible = [name for name in mesh.names if name != PIPELINE_AXIS and not is_batch_axis(name)]
            raise PartcError(
                "P0305",
                f"--batch-over {text!r} names {axis!r}, which does not cut weights or sequences",
                help=f"the mesh {mesh} has {', '.join(possible) or 'no such axis'}",
            )
        yield from (cls(name, globs) for name in axes)

    def matched(self, call: str) -> tuple[str, ...]:
        """The globs that match the name of a call."""
        return tuple(glob for glob in self.globs if _matches(glob, call))


def _matches(glob: str, name: str) -> bool:
    span = _RANGE.search(glob)
    if span is None:
        return fnmatchcase(name, glob)
    numbers = {text for text in re.findall(_NUMBER, name) if int(span[1]) <= int(text) <= int(span[2])}
    return any(_matches(glob[: span.start()] + text + glob[span.end() :], name) for text in numbers)


def uses_text(axis: str, chosen: Sequence[str], calls: Sequence[str]) -> str:
    """The text for the chosen ones among all calls, with globs and ranges: `tp=stages.*,blocks.0-15`."""
    left = {name.partition(".")[0] for name in {*calls}.difference(chosen)}
    runs: list[tuple[str, str, int, int]] = []  # the text before and after a number, and the first and last number
    for name in chosen:
        first, dot, _ = name.partition(".")
        if dot and first not in left:
            runs += [run for run in [(f"{first}.*", "", -1, -1)] if run not in runs]
            continue
        parts = [(name[: match.start()], name[match.end() :], int(match[0])) for match in re.finditer(_NUMBER, name)]
        known = runs[-1] if runs else None
        if known is not None and any(part == (*known[:2], known[3] + 1) for part in parts):
            runs[-1] = (*known[:3], known[3] + 1)
        else:
            runs.append((*parts[-1][:2], parts[-1][2], parts[-1][2]) if parts else (name, "", -1, -1))
    return f"{axis}={','.join(map(_spelled_run, runs))}"


def _spelled_run(run: tuple[str, str, int, int]) -> str:
    before, after, first, last = run
    number = "" if first < 0 else str(first) if first == last else f"{first}-{last}"
    return f"{before}{number}{after}"
