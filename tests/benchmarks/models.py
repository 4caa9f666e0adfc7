"""The zoo as a table: what was proved of every model on every mesh, and what it costs. `make models` runs it."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import partc  # noqa: E402
from partc.errors import PartcError  # noqa: E402
from partc.package.verify import verify  # noqa: E402
from partc.schedules import SCHEDULES  # noqa: E402
from tests.prefork import quick_starts  # noqa: E402
from tests.zoo import MODELS  # noqa: E402

MESHES = ("2", "tp=2", "pp=2", "2x2", "2x2x2", "1x4x2", "2x1x4")
COLUMNS = (
    "model",
    "mesh",
    "schedule",
    "microbatches",
    "worst error",
    "ops without a rule",
    "compile s",
    "bytes per step",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One row to be."""

    model: str
    mesh: str
    schedule: str
    microbatches: int
    zero: str = "0"
    recompute: str = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The outcome of a case."""

    run: Run
    error: str
    unruled: str
    seconds: str
    moved: str
    ok: bool
    worst: float = math.inf  # relative error

    @property
    def cells(self) -> tuple[str, ...]:
        run = self.run
        known = (run.model, run.mesh, run.schedule, str(run.microbatches))
        return (*known, self.error, self.unruled, self.seconds, self.moved)


def runs(only: str, meshes: tuple[str, ...], quick: bool) -> Iterator[Run]:
    """Every model on every mesh; with pipelines, every schedule on the largest mesh."""
    for model in MODELS:
        if not fnmatchcase(model, only):
            continue
        for mesh in meshes:
            piped = partc.Mesh.parse(mesh).axis("pp") > 1
            schedules = ("1f1b",) if quick or not piped else tuple(SCHEDULES) if mesh == "2x2x2" else ("1f1b", "gpipe")
            for schedule in schedules:
                for microbatches in (4,) if quick or schedule != "1f1b" else (1, 4):
                    yield Run(model=model, mesh=mesh, schedule=schedule, microbatches=microbatches)


def row(run: Run, folder: str) -> Row:
    """Compile, verify in fp64, and read off the plan."""
    from partc.ir.printer import readable

    model, shared = MODELS[run.model], Path(folder)
    try:
        start = time.perf_counter()
        package = partc.compile(
            model.source(shared),
            mesh=run.mesh,
            microbatches=run.microbatches,
            schedule=run.schedule,
            precision="fp64",
            zero=run.zero,
            recompute=run.recompute,
            options=model.options,
        )
        seconds = time.perf_counter() - start
        with tempfile.TemporaryDirectory() as build:
            package.write(Path(build) / "build")
            result = verify(Path(build) / "build", steps=2, virtual=True, reference=shared / f"{run.model}_run")
    except PartcError as error:
        return Row(run=run, error=f"{error.code}: {error.cause}", unruled="", seconds="", moved="", ok=False)
    unruled = sorted({item.op for item in package.replicated_ops if not item.rule})
    moved = ", ".join(f"{readable(size)} {axis}" for axis, size in package.communication.items() if size)
    repeated = " (per microbatch)" if package.program.separate_batches else ""
    return Row(
        run=run,
        error=f"{result.worst.rel_err:.0e}{repeated}" if result.ok else f"DIFFERS: {result.worst}",
        unruled=", ".join(unruled) or "none",
        seconds=f"{seconds:.1f}",
        moved=moved or "none",
        ok=result.ok,
        worst=result.worst.rel_err,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="models whose name matches this pattern")
    parser.add_argument("--mesh", action="append", help="instead of all")
    parser.add_argument("--quick", action="store_true", help="1f1b with 4 microbatches alone")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--markdown", type=Path, help="write the table here too")
    given = parser.parse_args()
    rows = list(proved(list(runs(given.only, tuple(given.mesh or MESHES), given.quick)), given.workers))
    table = Table(*COLUMNS)
    for found in rows:
        table.add_row(*found.cells)
    Console(width=160).print(table)
    if given.markdown:
        lines = [f"| {' | '.join(cells)} |" for cells in (COLUMNS, ("---",) * len(COLUMNS), *(r.cells for r in rows))]
        given.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    failed = [found for found in rows if not found.ok]
    print(f"{len(rows)} rows, {len(failed)} not verified")
    return 1 if failed else 0


def proved(wanted: list[Run], workers: int) -> Iterator[Row]:
    """A row for each run, as groups of them end that share the single device's run."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in wanted:
        groups.setdefault((run.model, run.zero[0]), []).append(run)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=quick_starts) as pool:
        for group in pool.map(_group, groups.values()):
            yield from group


def _group(group: list[Run]) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        return [row(run, folder) for run in group]


if __name__ == "__main__":
    sys.exit(main())
