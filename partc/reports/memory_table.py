"""Tables of the memory account: pipeline ranks side by side, the peak of one in detail, and a step in time.

rank   stages  peak      parameters  gradients  optimizer  activations
0, 1   0       12.3 MiB  1.7 MiB     1.7 MiB    3.3 MiB    5.6 MiB
2, 3   1       8.1 MiB   …

rank 0 holds most in 0B2, in blocks.1 (stages/stage_0.py:250, aten.sum)

12.3 MiB │      ▂▄▆█▄
         │  ▃▆█████████▇▄
 6.7 MiB │▅▅▅▅…
          data 0F0
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from partc.cost.memory import CATEGORIES, RESERVE, Account, Moment, RankMemory
from partc.ir.mesh import PIPELINE_AXIS, Mesh
from partc.ir.printer import readable

MOST_ALIVE = 16  # the most entries that are listed
MOST_PLACES = 16  # pipeline ranks
HEIGHT = 8
SHORT = {"parameters": "params", "temporaries": "temps", "communication": "comm"}  # for narrow columns
EIGHTHS = " ▁▂▃▄▅▆▇█"


def page(account: Account, mesh: Mesh, *, place: int | None = None, width: int = 120) -> str:
    """The account of all pipeline ranks, then the details of the one at `place` (default: the highest peak)."""
    rank = account.worst if place is None else account.ranks[place]
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=max(width, 100), highlight=False, markup=False, emoji=False)
    console.print(_ranks(account, mesh))
    console.print(
        f"\n{_members(mesh, rank.place)} hold{'s' * (_count(mesh) == 1)} most in {rank.at}:\n", soft_wrap=True
    )
    console.print(_alive_table(rank))
    rest = len(rank.alive) - MOST_ALIVE
    if rest > 0:
        left = sum(item.bytes for item in rank.alive[MOST_ALIVE:])
        console.print(f"and {rest} others with {readable(left)}")
    console.print()
    for line in memory_chart(rank.timeline, width=max(width, 60)):
        console.print(line, no_wrap=True, crop=True)
    if rank.host:
        console.print(f"\ncheckpoint: {readable(rank.host)} more in host memory, with train.py --save", soft_wrap=True)
    console.print(
        f"\non a GPU: about {readable(RESERVE)} more, for CUDA, NCCL and libraries' work spaces", soft_wrap=True
    )
    trains = any(each.host for each in account.ranks)
    console.print(f"\nin steps after the first, with {account.optimizer}" if trains else "\nin batches after the first")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _ranks(account: Account, mesh: Mesh) -> object:
    from rich.table import Table

    shown = [name for name in CATEGORIES if any(name in rank.categories for rank in account.ranks)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("ranks", "stages"):
        table.add_column(name)
    for name in ("peak", *shown):
        table.add_column(SHORT.get(name, name), justify="right", overflow="fold")
    listed = account.ranks if len(account.ranks) <= MOST_PLACES else (account.worst,)
    for rank in listed:
        sizes = (readable(rank.categories[name]) if name in rank.categories else "" for name in shown)
        stages = ", ".join(map(str, rank.stages))
        table.add_row(_members(mesh, rank.place, noun=False), stages, readable(rank.peak), *sizes)
    return table


def _count(mesh: Mesh) -> int:
    return mesh.size // mesh.axis(PIPELINE_AXIS)


def _members(mesh: Mesh, place: int, *, noun: bool = True) -> str:
    """The ranks at a coordinate on the pipeline axis."""
    ranks = [rank for rank in range(mesh.size) if mesh.coordinate(rank).get(PIPELINE_AXIS, 0) == place]
    few = ", ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]}, {ranks[1]} … {ranks[-1]}"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {few}" if noun else few


def _alive_table(rank: RankMemory) -> object:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    for justify in ("right", "left", "left", "left"):
        table.add_column(justify="right" if justify == "right" else "left")
    for item in rank.alive[:MOST_ALIVE]:
        count = f"{item.count:,} x" if item.count > 1 else ""
        table.add_row(readable(item.bytes), item.category, item.name, count)
    return table


def memory_chart(timeline: Sequence[Moment], *, width: int) -> Iterator[str]:
    """The memory over a step, from left to right, in rows of blocks. The lowest row starts at half of the bytes that
    are always held.
    """
    top = max((moment.peak for moment in timeline), default=0)
    floor = min((moment.after for moment in timeline), default=0) // 2
    label = max(len(readable(size)) for size in (top, floor))
    columns = _columns(timeline, width - label - 3)
    scale = max(top - floor, 1)
    levels = [round(8 * HEIGHT * (size - floor) / scale) for _, size in columns]
    for row in reversed(range(HEIGHT)):
        mark = readable(top) if row == HEIGHT - 1 else readable(floor) if row == 0 else ""
        yield f"{mark:>{label}} │{''.join(EIGHTHS[min(8, max(0, level - 8 * row))] for level in levels)}"
    yield " " * (label + 2) + _ticks([name for name, _ in columns])


def _columns(timeline: Sequence[Moment], width: int) -> list[tuple[str, int]]:
    """The peak of each group of actions, with the first action's name. A short step has wide columns."""
    each = max(1, -(-len(timeline) // width))
    wide = max(1, min(6, width // max(1, len(timeline))))
    found = []
    for start in range(0, len(timeline), each):
        stretch = timeline[start : start + each]
        found.append((stretch[0].action, max(moment.peak for moment in stretch)))
        found.extend(("", found[-1][1]) for _ in range(wide - 1))
    return found


def _ticks(names: Sequence[str]) -> str:
    """A line with the names of as many actions as fit."""
    line = ""
    for at, name in enumerate(names):
        if name and " " not in name and len(line) <= at and at + len(name) <= len(names):
            line = f"{line:<{at}}{name} "
    return line
