"""The comparison of schedules: length of a step, idle time, activations in flight.

All schedules do the same work: whatever its number of stages, a rank takes equally long for a microbatch, by default
one unit of time forward and two backward.

    schedule     stages  length   idle  microbatches in flight, rank by rank
    1f1b              2      12  25.0%  2 1
    zero-bubble       2      10  10.0%  2 2

    1f1b: forwards and backwards alternate, with fewer microbatches in flight
    0  0fffff1fffff            0bbbbbbbbbbb2fffff1bbbbbbbbbbb      2bbbbbbbbbbb
    1        0fffff0bbbbbbbbbbb1fffff1bbbbbbbbbbb2fffff2bbbbbbbbbbb
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from partc.cost.simulation import Durations, Timeline, simulate
from partc.schedules import SCHEDULES, compute_order, stage_ranks
from partc.schedules.table import Table

MOST_RANKS = 16  # the most ranks whose peaks are shown one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A schedule, simulated on equal ranks."""

    name: str
    does: str
    stages: int
    timeline: Timeline

    @property
    def in_flight(self) -> tuple[float, ...]:
        """The peak activations of each rank; one microbatch through all its stages counts 1."""
        ranks = len(self.timeline.ranks)
        return tuple(peak * ranks / self.stages for peak in self.timeline.in_flight)


def candidates(
    ranks: int,
    microbatches: int,
    *,
    virtual_stages: int | None = None,
    table: Table | None = None,
    durations: Durations = Durations(),  # noqa: B008
) -> tuple[Candidate, ...]:
    """All schedules for these numbers of pipeline ranks and microbatches, and the user's own table.

    A schedule that allows several stages on a rank has `virtual_stages` on each, if that number is given. `durations`
    are for one microbatch on one rank, through all its stages.
    """
    found = []
    for kind in SCHEDULES.values():
        several = kind.placement == "loop" and kind.stages_per_rank > 1
        stages = ranks * (virtual_stages if several and virtual_stages else kind.stages_per_rank)
        order = compute_order(kind, ranks, microbatches, stages)
        step = simulate(order, stage_ranks(kind, ranks, stages), durations=durations.shared(ranks / stages))
        found.append(Candidate(name=kind.name, does=kind.does, stages=stages, timeline=step))
    if table is not None:
        stages = len(table.places)
        step = simulate(table.rows, table.places, durations=durations.shared(ranks / stages))
        found.append(Candidate(name=table.file, does="a table of the user's own", stages=stages, timeline=step))
    return tuple(found)


def text(found: Sequence[Candidate], *, width: int) -> str:
    """A table of figures; then the timelines at the same scale, if they fit into `width` columns."""
    return "\n".join([*_figures(found), *_drawings(found, width)]) + "\n"


def figures(candidate: Candidate) -> tuple[str, str, str, str]:
    """The number of stages, the length, the idle share and the peaks, in words."""
    peaks = " ".join(f"{peak:.3g}" for peak in candidate.in_flight)
    if len(candidate.in_flight) > MOST_RANKS:
        peaks = f"{max(candidate.in_flight):.3g} at most"
    step = candidate.timeline
    return str(candidate.stages), f"{step.makespan:.4g}", f"{step.bubble:.1%}", peaks


def _figures(found: Sequence[Candidate]) -> Iterator[str]:
    rows = [("schedule", "stages", "length", "idle", "microbatches in flight, rank by rank")]
    rows += [(item.name, *figures(item)) for item in found]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for name, *numbers, peaks in rows:
        aligned = [f"{number:>{width}}" for number, width in zip(numbers, widths[1:], strict=True)]
        yield "  ".join([f"{name:<{widths[0]}}", *aligned, peaks])


def _drawings(found: Sequence[Candidate], width: int) -> Iterator[str]:
    spans = [span for item in found for line in item.timeline.ranks for span in line]
    shortest = min(span.end - span.start for span in spans if span.end > span.start)
    longest = max(item.timeline.makespan for item in found)
    margin = len(str(len(found[0].timeline.ranks) - 1)) + 2
    scale = int((width - margin) * shortest / longest)  # columns for the shortest computation
    yield ""
    if scale < 1:
        yield f"too long to draw in {width} columns: widen the terminal, or see the page that --html writes"
        return
    yield "f forward, b backward, i its gradients of inputs, w those of weights, after the microbatch's last digit;"
    yield "capitals for a rank's second stage, and for every other one from there"
    for item in found:
        yield ""
        yield f"{item.name}: {item.does}"
        for rank, line in enumerate(_lines(item, min(scale, 6) / shortest)):
            yield f"{rank:>{margin - 2}}  {line}".rstrip()


def _lines(candidate: Candidate, scale: float) -> Iterator[str]:
    """Yields a line for each rank's computations, with `scale` columns for a unit of time."""
    for line in candidate.timeline.ranks:
        order = sorted({span.compute.stage for span in line})
        drawn = ""
        for span in line:
            start, end = round(span.start * scale), round(span.end * scale)
            letter = span.compute.kind.lower()
            if order.index(span.compute.stage) % 2:
                letter = letter.upper()
            number = str(span.compute.microbatch % 10) if end - start > 1 else ""
            drawn = drawn.ljust(start) + number + letter * (end - start - len(number))
        yield drawn
