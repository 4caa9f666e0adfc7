"""A user's schedule: a table of actions in a CSV file, checked before anything is compiled.

    0F0,0F1,,0B0,0B1        two pipeline ranks, a stage each, two microbatches: a row for every rank,
    ,1F0,1B0,1F1,1B1        a cell for every action; empty cells only align the columns

This is the grammar of torch.distributed.pipelining: F is a stage's forward pass, B its backward pass, I and W the
halves of a backward pass (gradients of inputs and of weights), with the stage before and the microbatch after the
letter. `(0F1;3B0)OVERLAP_F_B` is a pair, which runs in sequence here. Tables that torch prints with transfers can be
read as well. SEND_F, RECV_F, SEND_B and RECV_B must then fit the computations; partc places transfers directly next to
their computations, which delays no rank. UNSHARD, RESHARD and REDUCE_GRAD do not affect the order of computations and
are ignored.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from partc.errors import PartcError, Source
from partc.runtime.documents import Malformed, contents
from partc.schedules.kind import Compute, ComputeKind

_ACTION = re.compile(r"(\d{1,6})(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d{1,6})", re.ASCII)
_PASSED_OVER = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*", re.ASCII)
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_SHOWN = 80  # the most characters of a cell in a message
COMPUTES = ("F", "B", "I", "W")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """An action of the table, and its row and column, counted from 1."""

    stage: int
    kind: str
    microbatch: int
    row: int
    column: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A checked table: the computations of every pipeline rank, and the rank of every stage."""

    file: str
    text: str
    rows: tuple[tuple[Compute, ...], ...]
    places: tuple[int, ...]

    @property
    def split_backward(self) -> bool:
        """Whether some backward passes run as I and W."""
        return any(compute.kind == "I" for row in self.rows for compute in row)


def read(path: Path, *, ranks: int, microbatches: int) -> Table:
    """Read and check a table for these numbers of pipeline ranks and microbatches. Raises PartcError P0407 to P0411."""
    try:
        text = contents(path).decode("utf-8")
    except (Malformed, UnicodeDecodeError) as error:
        reason = error if isinstance(error, Malformed) else "is not text"
        raise PartcError("P0407", f"the schedule {path} {reason}", help=_SHAPE) from None
    return parse(text, file=str(path), ranks=ranks, microbatches=microbatches)


def parse(text: str, *, file: str, ranks: int, microbatches: int) -> Table:
    """Parse and check a table. Raises PartcError P0407 to P0411."""
    return _TableReader(file, ranks, microbatches).table(text)


_ONE_ROW = "all of a stage's actions stand in one row"
_ONCE = "every stage does F once for each microbatch, and once either B, or I and then W"
_ORDER = "F comes after F of the stage before; B or I after F, and after B or I of the stage after; W after I"
_ENDS = "values go to later stages (_F), their gradients to earlier ones (_B)"
_SHAPE = "a schedule is a CSV file with a row of actions for each pipeline rank, such as 0F0,0F1,0B0,0B1"


class _TableReader:
    """Reads one file; its errors name the place in the file."""

    def __init__(self, file: str, ranks: int, microbatches: int) -> None:
        self.file = file
        self.ranks = ranks
        self.microbatches = microbatches

    def table(self, text: str) -> Table:
        rows = [tuple(self._cells(number, line)) for number, line in enumerate(self._lines(text), 1)]
        if len(rows) != self.ranks:
            raise PartcError(
                "P0409",
                f"{self.file} has {_count(len(rows), 'row')} for {_count(self.ranks, 'pipeline rank')}",
                help=f"a row for each rank: a mesh with pp={len(rows)}, or a table of {_count(self.ranks, 'row')}",
            )
        places = self._places(rows)
        self._check_counts(rows, len(places))
        self._check_order(rows, len(places))
        computes = tuple(tuple(_compute(cell) for cell in row if cell.kind in COMPUTES) for row in rows)
        return Table(file=self.file, text=text, rows=computes, places=places)

    def _lines(self, text: str) -> list[list[str]]:
        try:
            lines = list(csv.reader(text.removeprefix("\ufeff").splitlines(), strict=True))
        except csv.Error as error:
            raise PartcError("P0407", f"{self.file} is not a CSV file: {error}", help=_SHAPE) from None
        while lines and not any(cell.strip() for cell in lines[-1]):
            lines.pop()
        if not lines:
            raise PartcError("P0407", f"the schedule {self.file} is empty", help=_SHAPE)
        return lines

    def _cells(self, row: int, line: Sequence[str]) -> Iterator[Cell]:
        for column, text in enumerate(line, 1):
            pair = _PAIR.fullmatch(text.strip())
            for word in pair[1].split(";") if pair else [text]:
                word = word.strip()
                match = _ACTION.fullmatch(word)
                if match:
                    stage, kind, microbatch = int(match[1]), match[2], int(match[3])
                    yield Cell(stage=stage, kind=kind, microbatch=microbatch, row=row, column=column)
                elif word and not _PASSED_OVER.fullmatch(word):
                    raise PartcError(
                        "P0408",
                        f"cell {column}: {text.strip()[:_SHOWN]!r} is not an action",
                        help="an action is a stage, F, B, I or W, and a microbatch: 0F0, 1B2, 3W7",
                        source=Source(file=self.file, line=row),
                    )

    def _places(self, rows: Sequence[Sequence[Cell]]) -> tuple[int, ...]:
        """The rank of every stage. Raises unless each stage has one rank, and each rank at least one stage."""
        found: dict[int, Cell] = {}
        for row in rows:
            for cell in row:
                first = found.setdefault(cell.stage, cell)
                if first.row != cell.row:
                    raise self._error("P0409", cell, f"stage {cell.stage} stands in row {first.row} already", _ONE_ROW)
                if cell.microbatch >= self.microbatches:
                    known = f"the last microbatch is {self.microbatches - 1}"
                    raise self._error("P0409", cell, known, f"compile with --microbatches {cell.microbatch + 1}")
        for number, row in enumerate(rows, 1):
            if not row:
                raise PartcError(
                    "P0409",
                    "the row has no action: every pipeline rank runs a stage",
                    help="give the rank a stage, or leave it out of the mesh and the table",
                    source=Source(file=self.file, line=number),
                )
        missing = next((stage for stage in range(max(found)) if stage not in found), None)
        if missing is not None:
            last = found[max(found)]
            raise self._error("P0409", last, f"there is no stage {missing}", "stages are numbered from 0, without gaps")
        return tuple(found[stage].row - 1 for stage in range(len(found)))

    def _check_counts(self, rows: Sequence[Sequence[Cell]], stages: int) -> None:
        """Check that each stage computes each microbatch once: F, then B or I and W; and that transfers occur once."""
        done: dict[tuple[int, str, int], Cell] = {}
        for cell in (cell for row in rows for cell in row):
            twice = done.get((cell.stage, cell.kind, cell.microbatch))
            if twice is None and cell.kind in ("B", "I", "W"):
                others = ("I", "W") if cell.kind == "B" else ("B",)
                twice = next((done[k] for o in others if (k := (cell.stage, o, cell.microbatch)) in done), None)
            if twice is not None:
                raise self._error("P0410", cell, f"that is done in cell {twice.column}: {twice}", _ONCE)
            done[cell.stage, cell.kind, cell.microbatch] = cell
        for stage in range(stages):
            for index in range(self.microbatches):
                whole = (stage, "B", index) in done
                for kind in ("F",) if whole else ("F", "I", "W") if (stage, "I", index) in done else ("F", "B"):
                    if (stage, kind, index) not in done:
                        self._missing(next(c for c in done.values() if c.stage == stage), f"{stage}{kind}{index}")

    def _missing(self, beside: Cell, action: str) -> None:
        raise PartcError("P0410", f"the row lacks {action}", help=_ONCE, source=Source(file=self.file, line=beside.row))

    def _check_order(self, rows: Sequence[Sequence[Cell]], stages: int) -> None:
        """Check by playing the table that it does not deadlock: F needs the stage before, B the stage after."""
        given = {str(cell) for row in rows for cell in row}
        needs = {str(cell): tuple(self._needs(cell, stages, given)) for row in rows for cell in row}
        done: set[str] = set()
        left = [list(row) for row in rows]
        while ready := [row for row in left if row and done.issuperset(needs[str(row[0])])]:
            for row in ready:
                done.add(str(row.pop(0)))
        stuck = [(row, next(need for need in needs[str(row[0])] if need not in done)) for row in left if row]
        if stuck:
            # A cell that waits for its own row is the cause; other cells may only wait for this cell.
            row, lacking = min(stuck, key=lambda item: item[1] not in map(str, item[0]))
            behind = next((other[0] for other, _ in stuck if lacking in map(str, other)), row[0])
            where = "later in its row" if behind is row[0] else f"in row {behind.row}, where {behind} waits as well"
            raise self._error("P0411", row[0], f"it waits forever for {lacking}, {where}", _ORDER)

    def _needs(self, cell: Cell, stages: int, given: set[str]) -> Iterator[str]:
        """Yields the actions for which a cell waits: transfers if the table has them, else the computations that they
        connect.
        """
        stage, index = cell.stage, cell.microbatch
        forward = cell.kind[-1] == "F"
        before = stage - 1 if forward else stage + 1
        if cell.kind in ("F", "B", "I", "RECV_F", "RECV_B"):
            way = "F" if forward else "B"
            if cell.kind in ("B", "I"):
                yield f"{stage}F{index}"
            if 0 <= before < stages:
                options = [] if cell.kind.startswith("RECV") else [f"{stage}RECV_{way}{index}"]
                options += [f"{before}SEND_{way}{index}", f"{before}{way}{index}", f"{before}I{index}"]
                yield next(option for option in options if option in given)
            elif cell.kind.startswith("RECV"):
                raise self._error("P0410", cell, f"stage {stage} receives nothing that way", _ENDS)
        elif cell.kind == "W":
            yield f"{stage}I{index}"
        else:
            if not 0 <= (stage + 1 if forward else stage - 1) < stages:
                raise self._error("P0410", cell, f"stage {stage} sends nothing that way", _ENDS)
            yield next(option for option in (f"{stage}{cell.kind[-1]}{index}", f"{stage}I{index}") if option in given)

    def _error(self, code: str, cell: Cell, cause: str, help: str) -> PartcError:
        return PartcError(
            code, f"cell {cell.column}, {cell}: {cause}", help=help, source=Source(file=self.file, line=cell.row)
        )


def _compute(cell: Cell) -> Compute:
    kinds: Mapping[str, ComputeKind] = {"F": "F", "B": "B", "I": "I", "W": "W"}
    return Compute(cell.stage, kinds[cell.kind], cell.microbatch)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
