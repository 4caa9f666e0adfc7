"""The page that `partc cluster measure --page` writes: measured durations, the lines through them, and residuals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from partc.cluster.measurement import MeasuredRates, RateLine
from partc.cluster.probe import Sample
from partc.quoting import environment

_Axis = Callable[[float], float]

WIDE, HIGH, LOW = 1000.0, 300.0, 90.0  # of a chart of durations; LOW: the height of its residuals below
_KINDS = 6  # number of colours
_RATES = {"flops": "Gflop/s", "bytes": "GB/s", "elements": "G/s"}
_GROUPS = (
    ("Matrix products and attention", "flops", ("product", "attention")),
    ("Exponential functions", "elements", ("special",)),
    ("Memory", "bytes", ("memory",)),
    ("Messages", "bytes", ("inside", "between", "alone", "spread")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDot:
    """A measured duration in a chart: its position, and the position of its residual below."""

    x: float
    y: float
    residual: float
    colour: int
    hover: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedLine:
    """The fitted line of a kind of durations, in words and as a path."""

    colour: int
    path: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredChart:
    """A chart of durations over work, both on logarithmic axes, with the residuals of the lines in percent."""

    title: str
    unit: str
    dots: tuple[MeasuredDot, ...]
    lines: tuple[FittedLine, ...]
    across: tuple[tuple[float, str], ...]
    up: tuple[tuple[float, str], ...]
    most: int  # percent at the ends of the residuals' axis


def page(rates: MeasuredRates) -> str:
    """The page's text."""
    shared = f"{rates.processors}, which all processes share" if rates.processors else "one for each process"
    leaf, narrow = rates.oversubscription
    facts = [
        ("processes", f"{rates.nodes * rates.processes}: {rates.nodes} nodes of {rates.processes}"),
        ("cores", shared),
        ("overlap", f"computation takes {1 + rates.slowdown:.2f} times as long during an exchange"),
    ]
    if "alone" in rates.kinds:
        facts.append(("link of a node", "shared by its processes" if rates.shared else "one for each process"))
    if leaf:
        facts.append(("network", f"{leaf} nodes below a switch, oversubscribed {narrow:.3g} to 1"))
    text = environment(markup=True).get_template("measurement.html.jinja")
    return text.render(charts=tuple(_charts(rates)), facts=facts, wide=WIDE, high=HIGH, low=LOW) + "\n"


def _charts(rates: MeasuredRates) -> Iterator[MeasuredChart]:
    for title, unit, names in _GROUPS:
        kinds = [kind for kind in rates.kinds if kind.split()[0] in names]
        if kinds:
            yield _chart(title, unit, {kind: rates.line(kind) for kind in kinds}, rates.samples)


def _chart(title: str, unit: str, lines: dict[str, RateLine], samples: Sequence[Sample]) -> MeasuredChart:
    found = [sample for sample in samples if sample.kind in lines]
    errors = [lines[sample.kind].seconds(sample.work) / sample.seconds - 1 for sample in found]
    most = max(10, math.ceil(max(map(abs, errors)) * 10) * 10)
    left, right = _decades([sample.work for sample in found])
    low, high = _decades([sample.seconds for sample in found])

    def across(work: float) -> float:
        return WIDE * (math.log10(work) - left) / (right - left)

    def up(seconds: float) -> float:
        return HIGH * (high - math.log10(seconds)) / (high - low)

    colours = {kind: number % _KINDS for number, kind in enumerate(lines)}
    dots = tuple(
        MeasuredDot(
            x=across(sample.work),
            y=up(sample.seconds),
            residual=LOW / 2 * (1 - 100 * error / most),
            colour=colours[sample.kind],
            hover=f"{sample.kind}: {sample.work:.4g} {unit} in {sample.seconds * 1e3:.4g} ms, the line {error:+.1%}",
        )
        for sample, error in zip(found, errors, strict=True)
    )
    return MeasuredChart(
        title=title,
        unit=unit,
        dots=dots,
        lines=tuple(
            _drawn(kind, unit, line, colours[kind], [s.work for s in found if s.kind == kind], across, up)
            for kind, line in lines.items()
        ),
        across=tuple((across(10.0**power), f"1e{power}") for power in range(left, right + 1)),
        up=tuple((up(10.0**power), _seconds(power)) for power in range(low, high + 1)),
        most=most,
    )


def _drawn(
    kind: str, unit: str, line: RateLine, colour: int, works: Sequence[float], across: _Axis, up: _Axis
) -> FittedLine:
    first, last = math.log10(min(works)), math.log10(max(works))
    points = [10 ** (first + (last - first) * step / 40) for step in range(41)]
    path = " L".join(f"{across(work):.1f} {up(line.seconds(work)):.1f}" for work in points)
    rate = f"{line.rate / 1e9:.4g} {_RATES[unit]}"
    return FittedLine(colour=colour, path=f"M{path}", words=f"{kind}: {line.latency * 1e6:.3g} us + {rate}")


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """The exponents of the powers of ten around some values."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _seconds(power: int) -> str:
    unit, size = next((unit, size) for unit, size in (("s", 0), ("ms", -3), ("us", -6), ("ns", -99)) if power >= size)
    return f"{10 ** (power - max(size, -9)):g} {unit}"
