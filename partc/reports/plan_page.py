"""The page that `partc plan --page` writes: the plan, time over memory, steps side by side, throughput over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partc.cost.forecast import Forecast
from partc.cost.forecast import Span as ForecastSpan
from partc.ir.printer import readable
from partc.planner.planning import PlanChoice, Planner
from partc.planner.reasons import binding_constraint, by_layer, parts, reason, scaling, shown_plans
from partc.planner.search import Played
from partc.planner.variations import Variation
from partc.quoting import environment, shown_lines
from partc.reports.plan_choice import duration_text, figure_text, gap_statement, plan_text

WIDE, HIGH = 1000.0, 300.0  # of a chart's area
STEPS = 4  # the steps that are drawn side by side
MOST_ROWS = 8  # the most pipeline ranks of a step that are drawn
MOST_BARS = 4000  # of all steps together; with more, only figures are shown
_TICKS = 5
_NARROW = 0.4  # of a picture's width of 1000 units: shorter waits are not drawn
_PARTS = 5  # kinds of time that have a colour; the last colour is for all others


@dataclass(frozen=True, slots=True, kw_only=True)
class GridLine:
    """A line of a chart's grid, with its label."""

    at: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDot:
    """A plan in a chart."""

    x: float
    y: float
    kind: str  # best, front, fits, large
    hover: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChart:
    """Points, a line through some of them, and a grid, in units of the picture."""

    dots: tuple[PlanDot, ...]
    line: str
    ideal: str
    across: tuple[GridLine, ...]
    up: tuple[GridLine, ...]
    limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionBar:
    """An action of a step, or a wait inside it, in thousandths of the longest step."""

    left: float
    width: float
    kind: str
    hover: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStep:
    """The predicted step of a plan: the rows of its pipeline ranks, and its parts."""

    title: str
    seconds: str
    why: str
    rows: tuple[tuple[str, tuple[ActionBar, ...]], ...]
    parts: tuple[tuple[int, float, str], ...]  # colour, thousandths of the longest step, words
    note: str


def page(
    planner: Planner, choice: PlanChoice, top: int, variations: Sequence[Variation], front: Sequence[Played]
) -> str:
    """The page's text. Names of models, clusters and options are escaped."""
    best, space = choice.best, choice.space
    found = shown_plans(choice, top)
    steps, legend = _steps(planner, choice, found[:STEPS])
    scaled = scaling(choice, variations)
    name = getattr(planner.request.model, "__name__", None) or type(planner.request.model).__name__
    model = Path(planner.request.model).name if isinstance(planner.request.model, str | Path) else name
    rate = space.batch / best.seconds
    return shown_lines(
        environment(markup=True)
        .get_template("plan.html.jinja")
        .render(
            title=f"{model} on {planner.request.cluster.name}",
            facts=[
                ("the plan", best.plan.flags),
                ("step", f"{duration_text(best.seconds)} for {space.batch:,} samples: {figure_text(rate)} a second"),
                *([("tokens a second", f"{rate * choice.tokens:,.0f}")] if choice.tokens else []),
                ("memory of a rank", f"{readable(best.bytes)} of {readable(choice.request.limit)}"),
                ("the search", _searched(choice)),
                ("proof", gap_statement(choice)),
                ("limits", binding_constraint(choice, variations)),
                *([("by layer", said)] if (said := by_layer(choice)) else []),
            ],
            memory=_memory(choice, front),
            steps=steps,
            legend=legend,
            plans=[
                {
                    "words": plan_text(each.plan),
                    "step": duration_text(each.seconds),
                    "memory": readable(each.bytes),
                    "fits": each.bytes <= choice.request.limit,
                    "rate": figure_text(space.batch / each.seconds),
                    "why": "the best" if each is best else reason(best, each, choice.request.limit),
                }
                for each in found
            ],
            throughput=_throughput(scaled) if len(scaled) > 1 else None,
            scaled=[
                {
                    "ranks": f"{each.ranks:,}",
                    "step": duration_text(each.best.seconds),
                    "rate": figure_text(each.rate),
                    "share": f"{each.share:.1%}",
                    "words": plan_text(each.best.plan),
                }
                for each in scaled
            ],
            variations=[
                {
                    "name": each.name,
                    "step": "" if each.best is None else duration_text(each.best.seconds),
                    "rate": "" if each.best is None else f"{each.rate / rate:.3g} x",
                    "memory": "" if each.best is None else readable(each.best.bytes),
                    "words": each.error if each.best is None else plan_text(each.best.plan),
                }
                for each in variations
            ],
            wide=WIDE,
            high=HIGH,
        )
    )


def _searched(choice: PlanChoice) -> str:
    outcome = choice.outcome
    simulated = len(outcome.fitting) + len(outcome.others)
    return f"{outcome.space:,} plans, {simulated:,} of them simulated, in {outcome.seconds:.1f} s"


def _memory(choice: PlanChoice, front: Sequence[Played]) -> PlanChart:
    """The chart of all simulated plans, with the line of the plans that no other plan beats in both time and memory."""
    best = choice.best
    known = [each for each in (*choice.outcome.fitting, *choice.outcome.others) if each.error is None]
    plans = {each.plan: each for each in (*known, *front)}
    slowest = max(4 * best.seconds, *(each.seconds for each in front), best.seconds)
    played = [each for each in plans.values() if each.seconds <= slowest]
    limit = choice.request.limit
    across = _LinearScale.of([each.bytes / 2**30 for each in played] + [limit / 2**30])
    up = _LinearScale.of([each.seconds for each in played])
    efficient = _efficient(played)
    points = [(across.at(each.bytes / 2**30) * WIDE, HIGH - up.at(each.seconds) * HIGH) for each in efficient]
    kinds = {each.plan: "front" for each in efficient} | {best.plan: "best"}

    def kind(each: Played) -> str:
        return "large" if each.bytes > limit else kinds.get(each.plan, "fits")

    return PlanChart(
        dots=tuple(
            PlanDot(
                x=across.at(each.bytes / 2**30) * WIDE,
                y=HIGH - up.at(each.seconds) * HIGH,
                kind=kind(each),
                hover=f"{plan_text(each.plan)}: {duration_text(each.seconds)}, {readable(each.bytes)}",
            )
            for each in sorted(played, key=lambda each: kind(each) in ("best", "front"))
        ),
        line=_path(_step_points(points)),
        ideal="",
        across=tuple(GridLine(at=across.at(tick) * WIDE, label=f"{tick:g}") for tick in across.ticks()),
        up=tuple(GridLine(at=HIGH - up.at(tick) * HIGH, label=duration_text(tick)) for tick in up.ticks()),
        limit=across.at(limit / 2**30) * WIDE,
    )


def _efficient(played: Sequence[Played]) -> list[Played]:
    """The Pareto set, by growing memory: each plan that is quicker than all plans that hold less."""
    found: list[Played] = []
    for each in sorted(played, key=lambda each: (each.bytes, each.seconds)):
        if not found or each.seconds < found[-1].seconds:
            found.append(each)
    return found


def _step_points(points: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yields the points of a step function: between two plans of the front, only the slower one fits."""
    before: float | None = None
    for x, y in points:
        if before is not None:
            yield x, before
        yield x, y
        before = y


def _throughput(scaled: Sequence[Any]) -> PlanChart:
    """The chart of samples per second over ranks, both on logarithmic scales, with the line of a constant rate per
    rank.
    """
    least = scaled[0]
    rates = [each.rate for each in scaled]
    ideal = [least.rate * each.ranks / least.ranks for each in scaled]
    low, high = math.log2(least.ranks), math.log2(scaled[-1].ranks)
    bottom, top = math.log2(min(rates)), math.log2(max(ideal))

    def place(ranks: int, rate: float) -> tuple[float, float]:
        x = (math.log2(ranks) - low) / (high - low)
        y = (math.log2(rate) - bottom) / (top - bottom or 1.0)
        return (0.04 + 0.92 * x) * WIDE, HIGH * (0.94 - 0.88 * y)

    lines = [math.log2(min(rates)) + (top - bottom) * step / (_TICKS - 1) for step in range(_TICKS)]
    return PlanChart(
        dots=tuple(
            PlanDot(
                x=place(each.ranks, each.rate)[0],
                y=place(each.ranks, each.rate)[1],
                kind="front",
                hover=f"{each.ranks:,} ranks: {figure_text(each.rate)} samples/s, {each.share:.1%}: "
                f"{plan_text(each.best.plan)}",
            )
            for each in scaled
        ),
        line=_path(place(each.ranks, each.rate) for each in scaled),
        ideal=_path(place(each.ranks, rate) for each, rate in zip(scaled, ideal, strict=True)),
        across=tuple(GridLine(at=place(each.ranks, each.rate)[0], label=f"{each.ranks:,}") for each in scaled),
        up=tuple(GridLine(at=place(least.ranks, 2**line)[1], label=figure_text(2**line)) for line in lines),
    )


@dataclass(frozen=True, slots=True)
class _LinearScale:
    """A linear scale from 0 to a round number, as shares of the picture."""

    step: float
    end: float

    @classmethod
    def of(cls, values: Sequence[float]) -> _LinearScale:
        most = max(values) * 1.05
        power = 10.0 ** math.floor(math.log10(most / _TICKS))
        step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor * _TICKS >= most)
        return cls(step, math.ceil(most / step) * step)

    def at(self, value: float) -> float:
        return value / self.end

    def ticks(self) -> list[float]:
        return [index * self.step for index in range(round(self.end / self.step) + 1)]


def _path(points: Iterator[tuple[float, float]]) -> str:
    return " ".join(f"{'L' if index else 'M'}{x:.1f},{y:.1f}" for index, (x, y) in enumerate(points))


def _steps(
    planner: Planner, choice: PlanChoice, found: Sequence[Played]
) -> tuple[list[PlanStep], list[tuple[int, str]]]:
    """The steps of some plans at the same scale, and the legend of their parts."""
    best = choice.best
    longest = max(each.seconds for each in found)
    names = _ranked([parts(each) for each in found])
    colours = {name: min(index, _PARTS) for index, name in enumerate(names)}
    left = MOST_BARS
    steps = []
    for each in found:
        forecast = Forecast(planner.simulator.program(each.plan), planner.simulator.rates)
        places = forecast.places
        chosen = _spread(len(places))
        rows = tuple(
            (f"rank {place}" if len(places) > 1 else "", tuple(_bars(places[place], longest))) for place in chosen
        )
        count = sum(len(bars) for _, bars in rows)
        note = f"{len(chosen)} of {len(places)} pipeline ranks" if len(chosen) < len(places) else ""
        if count > left:
            rows, note = (), f"{count:,} actions and waits: too many to draw"
        left -= count if rows else 0
        shares = tuple(
            (colours[name], 1000 * seconds / longest, f"{name}: {duration_text(seconds)}")
            for name, seconds in sorted(parts(each).items(), key=lambda part: names.index(part[0]))
            if seconds > 0
        )
        steps.append(
            PlanStep(
                title=plan_text(each.plan),
                seconds=duration_text(each.seconds),
                why="the best" if each is best else reason(best, each, choice.request.limit),
                rows=rows,
                parts=shares,
                note=note,
            )
        )
    legend = [(index, name) for index, name in enumerate(names[:_PARTS])]
    return steps, [*legend, *([(_PARTS, "other waits")] if len(names) > _PARTS else [])]


def _ranked(found: Sequence[Mapping[str, float]]) -> list[str]:
    """The parts of steps: computation, idle time, then waits by their seconds."""
    total: dict[str, float] = {}
    for each in found:
        for name, seconds in each.items():
            total[name] = total.get(name, 0.0) + seconds
    first = [name for name in total if not name.startswith("wait")]
    waits = sorted((name for name in total if name.startswith("wait")), key=lambda name: -total[name])
    return [*first, *(name for name in waits if total[name] > 0)]


def _spread(places: int) -> list[int]:
    """The pipeline ranks that are drawn: all if they are few, else evenly spread ones from the first to the last."""
    if places <= MOST_ROWS:
        return list(range(places))
    return [round(index * (places - 1) / (MOST_ROWS - 1)) for index in range(MOST_ROWS)]


def _bars(spans: Sequence[ForecastSpan], longest: float) -> Iterator[ActionBar]:
    """Yields the bars of a pipeline rank's actions, and of the waits inside them."""
    for span in spans:
        width = 1000 * span.inside.seconds / longest
        if width <= 0:
            continue
        left = 1000 * span.start / longest
        hover = f"{span.name}: {duration_text(span.start)} to {duration_text(span.end)}"
        kind = next((letter for letter in span.name if letter in "FBIW"), "U") if span.name[:1].isdigit() else "U"
        yield ActionBar(left=left, width=width, kind=kind, hover=hover)
        waits = ", ".join(f"{name} {duration_text(seconds)}" for name, seconds in span.inside.waited)
        for start, end in _idle(span):
            if 1000 * (end - start) / longest > _NARROW:
                yield ActionBar(
                    left=left + 1000 * start / longest,
                    width=1000 * (end - start) / longest,
                    kind="wait",
                    hover=f"{span.name} waits: {waits or 'for communication'}",
                )


def _idle(span: ForecastSpan) -> Iterator[tuple[float, float]]:
    """Yields the intervals of an action without computation."""
    now = 0.0
    for piece in sorted((piece for piece in span.inside.pieces if not piece.segment.op), key=lambda piece: piece.start):
        if piece.start > now:
            yield now, piece.start
        now = max(now, piece.end)
    if span.inside.seconds > now:
        yield now, span.inside.seconds
