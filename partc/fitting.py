"""Make a program fit the memory that there is: a budget of recomputation, and what would help where a limit is passed.

A budget (`--recompute 18GB`) is of all that a rank holds at one time, not of saved activations alone. What it holds
besides them is known once a step has been rehearsed, and changes a little with what is recomputed: so the choice is
made again with what was found, until every rank fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from partc.errors import PartcError
from partc.memory import Account, RankMemory, consists
from partc.mesh import PIPELINE_AXIS, is_batch_axis
from partc.options import Options
from partc.passes import Step
from partc.printer import readable
from partc.program import Program
from partc.rehearsal import rehearse
from partc.saving import most_saved

ATTEMPTS = 8
Chosen = Callable[[Sequence[int]], tuple[Step, ...]]  # what ranks hold besides saved activations -> the passes' steps


def within(budget: int, ranks: int, choose: Chosen) -> tuple[Step, ...]:
    """The steps with the least recomputation for which no rank of the pipeline holds more than `budget` bytes.

    Raises PartcError P0415 if even the least that can be saved is too much.
    """
    besides = [0] * ranks
    enough: tuple[list[int], tuple[Step, ...]] | None = None
    short = list(besides)
    before: Program | None = None
    for _ in range(ATTEMPTS):
        steps = choose(besides)
        program = steps[-1].program
        account = rehearse(program)
        over = [rank.peak - budget for rank in account.ranks]
        if max(over) <= 0:
            enough = (besides, steps)
        elif enough is None and before is not None and program.regions == before.regions:
            raise _too_little(budget, account)
        elif enough is None:
            saved = most_saved(program)
            least = [rank.peak - size for rank, size in zip(account.ranks, saved, strict=True)]
            short, before = besides, program
            # With room for as much less as was too much, something less is saved, if there is anything.
            besides = [now if more <= 0 else found for now, more, found in zip(besides, over, least, strict=True)]
            continue
        else:
            short = besides
        between = [(high + low) // 2 for high, low in zip(enough[0], short, strict=True)]
        if besides == [0] * ranks or between == short or max(map(abs, over)) < budget // 100:
            break
        besides = between
    if enough is None:
        raise _too_little(budget, account)
    return enough[1]


def _too_little(budget: int, account: Account) -> PartcError:
    worst = account.worst
    return PartcError(
        "P0415",
        f"pipeline rank {worst.place} holds {worst.peak:,} bytes at least, {readable(worst.peak - budget)} more than "
        f"the budget: {consists(worst)}",
        help=f"give --recompute {rounded(worst.peak)} or more, smaller microbatches, or --zero",
    )


def rounded(bytes: int) -> str:
    """No fewer, as the option takes them."""
    return f"{bytes}B" if bytes < 10**7 else f"{math.ceil(bytes / 1e6)}MB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Options that were tried, and what the rank that holds most holds with them."""

    flags: str
    peak: int


Compiled = Callable[[Options], Program]


def check_limit(account: Account, limit: int, options: Options, compiled: Compiled) -> None:
    """Raises PartcError P0416 if a rank holds more than `limit` bytes, with what other options come to."""
    worst = account.worst
    if worst.peak <= limit:
        return
    found = sorted(_remedies(options, worst.peak, limit, compiled), key=lambda remedy: remedy.peak)
    fits = [remedy for remedy in found if remedy.peak <= limit]
    lines = [
        f"{remedy.flags}: {readable(remedy.peak)}, {readable(worst.peak - remedy.peak)} less"
        f"{', fits' if remedy.peak <= limit else ''}"
        for remedy in found
    ]
    said = "these would help" if fits else "these would help, though none is enough"
    raise PartcError(
        "P0416",
        f"{_rank(account, worst)} holds {readable(worst.peak)} at one time, {readable(worst.peak - limit)} more than "
        f"--memory-limit {readable(limit)}: {consists(worst)}; in {worst.at}",
        help="\n    ".join([f"{said}:", *lines]) if lines else "no other option was found that lowers it",
    )


def _rank(account: Account, rank: RankMemory) -> str:
    return f"pipeline rank {rank.place}" if len(account.ranks) > 1 else "each rank"


def _remedies(options: Options, peak: int, limit: int, compiled: Compiled) -> Iterator[Remedy]:
    """The single changes that lower the peak; where none of them is enough, as few together as are."""
    singles = []
    for flags, change in _changes(options, limit):
        found = _peak(replace(options, **change), compiled)
        if found is not None and found < peak:
            singles.append((found, flags, change))
            yield Remedy(flags=flags, peak=found)
    together: dict[str, Any] = {}
    flagged: list[str] = []
    for lowest, flags, change in sorted(singles, key=lambda single: single[0]):
        if lowest <= limit:
            return
        if together.keys() & change.keys():
            continue
        together |= change
        flagged.append(flags)
        found = _peak(replace(options, **together), compiled) if len(flagged) > 1 else None
        if found is not None and found <= limit:
            yield Remedy(flags=" ".join(flagged), peak=found)
            return


def _peak(options: Options, compiled: Compiled) -> int | None:
    """None where the options can't be had together with the model."""
    try:
        _ = options.places
        return rehearse(compiled(options)).worst.peak
    except PartcError:
        return None


def _changes(options: Options, limit: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    mesh = options.mesh
    spread = tuple(name for name in mesh.names if is_batch_axis(name) and mesh.axis(name) > 1)
    for level in range(options.zero + 1, 4) if spread else ():
        yield f"--zero {level}", {"zero": level, "zero_axes": options.zero_axes or spread}
    kinds = ("none", "selective", "full")
    for kind in kinds[1 + kinds.index(options.recompute) :] if options.recompute in kinds else ():
        yield f"--recompute {kind}", {"recompute": kind}
    if options.recompute in kinds[:2]:
        yield f"--recompute {limit}B", {"recompute": f"{limit}B"}
    for times in (2, 4):
        if options.table is None:
            count = options.microbatches * times
            yield f"--microbatches {count}", {"microbatches": count}
    if options.precision in ("fp32", "fp64"):
        yield "--precision bf16", {"precision": "bf16"}
    if mesh.axis(PIPELINE_AXIS) > 1 and options.table is None and options.schedule != "1f1b":
        yield "--schedule 1f1b", {"schedule": "1f1b", "virtual_stages": None}
    yield from _meshes(options)


def _meshes(options: Options) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """As many ranks, of which fewer hold copies."""
    mesh = options.mesh
    spread = [name for name in mesh.names if is_batch_axis(name) and mesh.axis(name) % 2 == 0]
    for name in ("tp", PIPELINE_AXIS) if spread and options.table is None else ():
        sizes = {**mesh.sizes, spread[-1]: mesh.axis(spread[-1]) // 2, name: 2 * mesh.axis(name)}
        first, last = (name,) * (name == PIPELINE_AXIS), (name,) * (name != PIPELINE_AXIS)
        names: Iterable[str] = mesh.names if name in mesh.names else (*first, *mesh.names, *last)
        changed = replace(mesh, axes=tuple((axis, sizes[axis]) for axis in names))
        yield f"--mesh {changed}", {"mesh": changed}
