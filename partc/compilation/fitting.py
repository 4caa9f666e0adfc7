"""Fitting a program into memory: recomputation under a budget, and remedies if a limit is exceeded.

A budget (`--recompute 18GB`) covers all memory of a rank, not only saved activations. The other memory is known only
after a step has been rehearsed, and it changes with the choice of recomputation. So each choice assumes the smallest
other memory seen so far, is rehearsed, and is made again with the new knowledge: the first choice that fits is one with
the least recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from partc.compilation.options import Options
from partc.cost.memory import Account, categories_text
from partc.cost.saved_tensors import Time, bytes_option, parse_bytes
from partc.errors import PartcError
from partc.ir.mesh import PIPELINE_AXIS, holds_weights_whole, is_batch_axis
from partc.ir.printer import readable
from partc.ir.program import Program
from partc.passes import PassResult
from partc.rehearsal.held_times import observed
from partc.rehearsal.rehearsal import rehearse, rehearsed
from partc.runtime.optimizer.recipe import DEFAULT
from partc.schedules.per_stage import RECOMPUTE

ATTEMPTS, FURTHER = 12, 4  # the most programs to try until one fits, and then to find a quicker one, or a lower peak
# The moments of each pipeline rank, and whether the lowest peak is wanted -> the passes' steps.
Chosen = Callable[[Sequence[Sequence[Time]], bool], tuple[PassResult, ...]]


def within_budget(
    budget: int,
    start: Program,
    choose: Chosen,
    *,
    further: int = FURTHER,
    optimizer: str = DEFAULT,
    groups: Sequence[str] = (),
) -> tuple[PassResult, ...]:
    """The passes' steps with the least recomputation with which no pipeline rank holds more than `budget` bytes.

    `start` is the program before saved values are chosen. The first two attempts save everything and as little as
    possible. Later attempts assume the memory of all attempts so far, until one fits. `further` attempts look for a
    faster choice, assuming the least memory found so far. If nothing fits, as many look for the lowest peak. Their
    choices do not depend on the budget, so that every budget of at least this peak is met. Attempts end when no new
    choice is left. Raises PartcError P0415, which has a budget that is met, if no attempt fits.
    """
    search = _Search(start, choose, {"optimizer": optimizer, "groups": groups})
    whole = search.attempt([], lambda time: time)
    if whole.peak <= budget:
        return whole.steps
    least = search.attempt([whole], lambda time: replace(time, given=frozenset(), besides=0), lowest=True)
    ends = min(whole, least, key=lambda attempt: attempt.peak)
    if any(rank.timeline[-1].after > budget for rank in ends.account.ranks):  # between steps, whatever is saved
        raise _too_little(budget, ends.account, ends.peak)
    known = [whole, least]
    best = least if least.peak <= budget else None
    best = search.fitting(budget, known, lambda time: replace(time, given=frozenset()), most=ATTEMPTS) or best
    quicker = search.fitting(budget, known, lambda time: time, most=further)
    alike = [whole, least]  # with the attempts that follow: alike for every budget
    found = quicker or best or search.fitting(budget, alike, lambda time: time, most=further, lowest=True)
    if found is None:
        lowest = min(search.made, key=lambda attempt: attempt.peak)
        raise _too_little(budget, lowest.account, min(attempt.peak for attempt in alike))
    return found.steps


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Attempt:
    """A choice of saved values, with the results of the passes, the account, and the moments of each pipeline rank."""

    steps: tuple[PassResult, ...]
    account: Account
    times: tuple[tuple[Time, ...], ...]

    @property
    def peak(self) -> int:
        return self.account.worst.peak

    @property
    def chosen(self) -> Program:
        return self.steps[0].program


class _Search:
    """Makes attempts; equal choices are rehearsed once."""

    def __init__(self, start: Program, choose: Chosen, how: Mapping[str, Any]) -> None:
        self._how = how  # the optimizer and its groups, for rehearsals
        self._start, self._choose = start, choose
        self.made: list[_Attempt] = []  # in order

    def attempt(self, known: Sequence[_Attempt], each: Callable[[Time], Time], *, lowest: bool = False) -> _Attempt:
        """The best choice for the moments of the known attempts, each as this function changes it.

        This is the least recomputation with which no moment exceeds the budget, or the lowest peak.
        """
        ranks = range(self._start.mesh.axis(PIPELINE_AXIS))
        times = [[each(time) for attempt in known for time in attempt.times[rank]] for rank in ranks]
        steps = self._choose(times, lowest)
        chosen, program = steps[0].program, steps[-1].program
        for made in self.made:
            if made.chosen.regions == chosen.regions and made.chosen.calls == chosen.calls:
                return made
        account, ledgers = rehearsed(program, **self._how)
        seen = tuple(
            observed(self._start, chosen, schedule, ledger.peaks)
            for schedule, ledger in zip(program.schedule, ledgers, strict=True)
        )
        self.made.append(_Attempt(steps=steps, account=account, times=seen))
        return self.made[-1]

    def fitting(
        self,
        budget: int,
        known: list[_Attempt],
        each: Callable[[Time], Time],
        *,
        most: int,
        lowest: bool = False,
    ) -> _Attempt | None:
        """The first new attempt that fits, of at most this many; `known` receives all of them."""
        for _ in range(most):
            found = self.attempt(known, each, lowest=lowest)
            if found in known:
                return None
            known.append(found)
            if found.peak <= budget:
                return found
        return None


def _too_little(budget: int, account: Account, enough: int) -> PartcError:
    """The error with the account of the lowest peak found, and a budget that is met."""
    worst = account.worst
    return PartcError(
        "P0415",
        f"pipeline rank {worst.place} holds {worst.peak:,} bytes with the best choice found, "
        f"{readable(worst.peak - budget)} more than the budget: {categories_text(worst)}",
        help=f"give --recompute {bytes_option(enough)} or more, smaller microbatches, or --zero",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A combination of options, and the worst rank's peak with it."""

    flags: str
    peak: int


class Compiled(Protocol):
    """Compiles a model with other options, up to the proof; without `ahead`, ZeRO 3 gathers nothing ahead."""

    def __call__(self, options: Options, /, *, ahead: bool = True) -> Program: ...


def check_limit(account: Account, limit: int, options: Options, compiled: Compiled) -> None:
    """Raise PartcError P0416 if a rank holds more than `limit` bytes; the message has the peaks with other options."""
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
    said = "these would help" if fits else "none of these is enough; the first comes closest"
    help = "\n    ".join([f"{said}:", *lines]) if lines else "no other option was found that lowers it"
    raise _too_much(account, limit, help)


def check_evaluation(account: Account, limit: int | None) -> None:
    """Raise PartcError P0416 if a rank exceeds `limit` bytes during an evaluation, although its training steps fit."""
    if limit is not None and account.worst.peak > limit:
        raise _too_much(
            account, limit, "the step alone fits: --microbatches cuts batches of evaluations too, or evaluate less"
        )


def _too_much(account: Account, limit: int, help: str) -> PartcError:
    worst = account.worst
    rank = f"pipeline rank {worst.place}" if len(account.ranks) > 1 else "each rank"
    return PartcError(
        "P0416",
        f"{rank} holds {readable(worst.peak)} at its peak, {readable(worst.peak - limit)} more than "
        f"--memory-limit {readable(limit)}: {categories_text(worst)}; in {worst.at}",
        help=help,
    )


def _remedies(options: Options, peak: int, limit: int, compiled: Compiled) -> Iterator[Remedy]:
    """The single changes that lower the peak. If none suffices, also the smallest combination that does, or the one
    with the lowest peak.

    Other meshes are tried only if no change on this one suffices.
    """
    singles: list[tuple[int, str, Mapping[str, Any]]] = []
    lowest: Remedy | None = None
    known: dict[Options, int | None] = {}

    def peak_after(change: Mapping[str, Any]) -> int | None:
        other = replace(options, **change)
        if other not in known:
            known[other] = _peak(other, compiled)
        return known[other]

    for changes in (_changes(options, limit), _meshes(options)):
        for flags, change in changes:
            if parse_bytes(change.get("recompute", "")) is not None and any(
                least <= limit and "recompute" in other for least, _, other in singles
            ):
                continue  # a budget takes many compiles, and one of the fixed kinds of recomputation suffices
            found = peak_after(change)
            if found is not None and found < peak:
                singles.append((found, flags, change))
                yield Remedy(flags=flags, peak=found)
        if any(least <= limit for least, _, _ in singles):
            return
        together: dict[str, Any] = {}
        flagged: list[str] = []
        for _, flags, change in sorted(singles, key=lambda single: single[0]):
            if together.keys() & change.keys():
                continue
            together |= change
            flagged.append(flags)
            found = peak_after(together) if len(flagged) > 1 else None
            if found is not None and (lowest is None or found < lowest.peak):
                lowest = Remedy(flags=" ".join(flagged), peak=found)
            if lowest is not None and lowest.peak <= limit:
                yield lowest
                return
    if lowest is not None and lowest.peak < min(least for least, _, _ in singles):
        yield lowest


def _peak(options: Options, compiled: Compiled) -> int | None:
    """The peak with these options; None if the model does not allow them."""
    try:
        _ = options.places
        return rehearse(compiled(options, ahead=False), optimizer=options.optimizer, groups=options.group).worst.peak
    except PartcError:
        return None


def _changes(options: Options, limit: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    mesh = options.mesh
    spread = tuple(name for name in mesh.names if holds_weights_whole(name) and mesh.axis(name) > 1)
    for level in range(options.zero + 1, 4) if spread else ():
        yield f"--zero {level}", {"zero": level, "zero_axes": options.zero_axes or spread}
    for kind in RECOMPUTE[1 + RECOMPUTE.index(options.recompute) :] if options.recompute in RECOMPUTE else ():
        yield f"--recompute {kind}", {"recompute": kind}
    if options.recompute in RECOMPUTE[:2]:
        budget = bytes_option(limit, fewer=True)
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


def _meshes(options: Options) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Meshes with the same number of ranks and less replication."""
    mesh = options.mesh
    spread = [name for name in mesh.names if is_batch_axis(name) and mesh.axis(name) % 2 == 0]
    for name in ("tp", PIPELINE_AXIS) if spread and options.table is None else ():
        sizes = {**mesh.sizes, spread[-1]: mesh.axis(spread[-1]) // 2, name: 2 * mesh.axis(name)}
        first, last = (name,) * (name == PIPELINE_AXIS), (name,) * (name != PIPELINE_AXIS)
        names: Iterable[str] = mesh.names if name in mesh.names else (*first, *mesh.names, *last)
        changed = replace(mesh, axes=tuple((axis, sizes[axis]) for axis in names))
        yield f"--mesh {changed}", {"mesh": changed}
