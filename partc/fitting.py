"""Make a program fit the memory that there is: a budget of recomputation, and what would help where a limit is passed.

A budget (`--recompute 18GB`) is of all that a rank holds at one time, not of saved activations alone. What it holds
besides them is known once a step has been rehearsed, and changes with what is recomputed. So the choice is made as if
everything new took as little as what is known, rehearsed, and made again with what was found: the first that fits is
one of the least recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from partc.errors import PartcError
from partc.memory import Account, RankMemory, consists
from partc.mesh import PIPELINE_AXIS, is_batch_axis
from partc.observed import observed
from partc.options import Options
from partc.passes import Step
from partc.printer import readable
from partc.program import Program
from partc.rehearsal import rehearse, rehearsed
from partc.saving import Time, written

ATTEMPTS, FURTHER = 12, 4  # programs that are tried until one fits, and then to find a quicker one
Chosen = Callable[[Sequence[Sequence[Time]]], tuple[Step, ...]]  # times of each pipeline rank -> the passes' steps


def within(budget: int, start: Program, choose: Chosen, *, further: int = FURTHER) -> tuple[Step, ...]:
    """The steps with the least recomputation for which no rank of the pipeline holds more than `budget` bytes.

    `start` is the program before it is decided what calls save. Everything is saved at first, and as little as can be
    next; then what would fit if the times of all that was tried were those of any choice, until something does.
    `further` attempts look for something quicker, as if no more were held at any time than was ever found: where none
    is left, there is none. Raises PartcError P0415 if nothing that was tried fits.
    """
    tries = _Tries(budget, start, choose)
    fits = tries.next(lambda time: time)
    if fits is not None:
        return fits
    least = tries.next(lambda time: replace(time, given=frozenset(), besides=budget))
    for _ in range(ATTEMPTS):
        fits = tries.next(lambda time: replace(time, given=frozenset()))
        if fits is not None or tries.ended:
            break
    for _ in range(further):
        quicker = tries.next(lambda time: time)
        if quicker is not None:
            return quicker
        if tries.ended:
            break
    if fits is None and least is None:
        raise _too_little(budget, min(tries.accounts, key=lambda account: account.worst.peak))
    return fits or least or ()


class _Tries:
    """Programs that have been made and rehearsed, and the times that were found."""

    def __init__(self, budget: int, start: Program, choose: Chosen) -> None:
        self._budget, self._start, self._choose = budget, start, choose
        self._times: list[tuple[Time, ...]] = [()] * start.mesh.axis(PIPELINE_AXIS)
        self._seen: list[Program] = []
        self.accounts: list[Account] = []
        self.ended = False  # whether the last one had been tried before

    def next(self, each: Callable[[Time], Time]) -> tuple[Step, ...] | None:
        """The passes' steps with what is chosen if these are the times, where it is new and fits."""
        steps = self._choose([tuple(map(each, times)) for times in self._times])
        chosen, program = steps[0].program, steps[-1].program
        self.ended = any(chosen.regions == other.regions and chosen.calls == other.calls for other in self._seen)
        if self.ended:
            return None
        account, ledgers = rehearsed(program)
        self._seen.append(chosen)
        self.accounts.append(account)
        self._times = [
            (*known, *observed(self._start, chosen, schedule, ledger.peaks))
            for known, schedule, ledger in zip(self._times, program.schedule, ledgers, strict=True)
        ]
        return steps if account.worst.peak <= self._budget else None


def _too_little(budget: int, account: Account) -> PartcError:
    worst = account.worst
    return PartcError(
        "P0415",
        f"pipeline rank {worst.place} holds {worst.peak:,} bytes at least, {readable(worst.peak - budget)} more than "
        f"the budget: {consists(worst)}",
        help=f"give --recompute {written(worst.peak)} or more, smaller microbatches, or --zero",
    )


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
        budget = written(limit, fewer=True)
        yield f"--recompute {budget}", {"recompute": budget}
    for times in (2, 4):
        if options.table is None:
            count = options.microbatches * times
            yield f"--microbatches {count}", {"microbatches": count}
    if options.loss_chunks == 1:
        yield "--loss-chunks 8", {"loss_chunks": 8}
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
