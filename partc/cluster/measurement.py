"""Measuring the rates of CPU processes, on one machine or several: products, memory, launches, exchanges over gloo.

Each process computes with one thread, as packages on CPUs do by default. The rates of products and of memory come from
the line through the measured durations with the least relative errors. A link's latency is the duration of its smallest
message, and its rate follows from the largest message: for sizes between them, buffers may be quicker than the link.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from partc.cluster.probe import Meeting, Overlap, ProbeProcess, Sample
from partc.cluster.variation import expected_maximum
from partc.errors import PartcError

_LIMIT = 300.0  # seconds
_LINKS = ("inside", "between", "alone", "spread")
_LARGE = 1 << 18  # bytes that a process exchanges with several others, beyond which latency matters little
_NARROW = 0.8  # share of the bandwidth between neighbours: a distance with less crosses a narrower link
MARK = "measured by `partc cluster measure`"  # written into every file


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLine:
    """The duration of work, in seconds: `latency` plus work / `rate`."""

    latency: float
    rate: float

    def seconds(self, work: float) -> float:
        return self.latency + work / self.rate


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRates:
    """The measured samples of `nodes` nodes with `processes` processes each, and the cluster that they describe."""

    nodes: int
    processes: int
    memory: int
    processors: int  # the cores that all processes share, or 0 if each has its own core
    samples: tuple[Sample, ...]
    overlap: Overlap | None
    meeting: Meeting | None = None

    def line(self, kind: str) -> RateLine:
        """The fitted line through the samples of a kind."""
        samples = [sample for sample in self.samples if sample.kind == kind]
        return _ends(samples) if kind.startswith(_LINKS) else _line(samples)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(sample.kind for sample in self.samples))

    @property
    def slowdown(self) -> float:
        """The additional time of computation during an exchange, as a share."""
        if self.overlap is None:
            return 0.0
        alone = self.overlap.products, self.overlap.exchange
        return max(0.0, min(1.0, (self.overlap.both - max(alone)) / min(alone)))

    @property
    def jitter(self) -> float:
        """The variance of the duration of one second of computation, from the waits of meetings for the slowest
        process.
        """
        if self.meeting is None:
            return 0.0
        computed = self.meeting.products
        lag = max(0.0, self.meeting.both - self.meeting.barrier - computed)
        return (lag / expected_maximum(self.nodes * self.processes)) ** 2 / computed

    @property
    def oversubscription(self) -> tuple[int, float]:
        """The nodes below a switch, and their oversubscription: their bandwidth over the bandwidth out of the switch.
        (0, 1) if it is not oversubscribed.
        """
        distances = [int(kind.split()[1]) for kind in self.kinds if kind.startswith("between ")]
        rates = {distance: self.line(f"between {distance}").rate for distance in distances}
        narrow = [distance for distance in distances if rates[distance] < _NARROW * rates[1]]
        if not narrow or self.nodes % narrow[0]:
            return 0, 1.0
        return narrow[0], rates[1] / min(rates.values())

    @property
    def spread(self) -> float:
        """The share of a link's bandwidth that messages to several nodes reach; 1 if an oversubscribed network hides
        it.
        """
        line = self.line("between 1") if "spread" in self.kinds and not self.oversubscription[0] else None
        if line is None:
            return 1.0
        large = [sample for sample in self.samples if sample.kind == "spread" and sample.work >= _LARGE]
        return min(1.0, statistics.fmean(line.seconds(sample.work) / sample.seconds for sample in large))

    @property
    def shared(self) -> bool:
        """Whether the processes of a node share its link, so that one process alone is quicker."""
        return "alone" in self.kinds and self.line("between 1").rate < _NARROW * self.line("alone").rate

    def toml(self) -> str:
        """The text of a cluster file, as `--cluster` reads it."""
        products = [kind.split()[1] for kind in self.kinds if kind.startswith("product ")]
        peaks = ", ".join(f"{name} = {self.line(f'product {name}').rate:.4g}" for name in products)
        launch = next(sample.seconds for sample in self.samples if sample.kind == "launch")
        inside = "inside" if "inside" in self.kinds else None
        between = "between 1" if "between 1" in self.kinds else None
        leaf, narrow = self.oversubscription
        return "".join(
            (
                f"# The rates of processes on processors, {MARK}.\n",
                f"nodes = {self.nodes}\ndevices = {self.processes}\n",
                f"processors = {self.processors}\n" if self.processors else "",
                f"slowdown = {self.slowdown:.3g}\n",
                f'\n[device]\nname = "CPU"\nkind = "cpu"\nmemory = {self.memory}\npeak = {{ {peaks} }}\n',
                f"bandwidth = {self.line('memory').rate:.4g}\nlaunch = {launch:.4g}\nhost = 0.0\n",
                f"jitter = {self.jitter:.4g}\n" if self.jitter else "",
                f"attention = {self.line('attention').rate:.4g}\nspecial = {self.line('special').rate:.4g}\n",
                f'\n[inside]\nkind = "memory"\n{self._link(inside or between)}',
                f'\n[between]\nkind = "tcp"\n{self._link(between or inside)}',
                "shared = true\n" if self.shared else "",
                f"spread = {self.spread:.3g}\n" if self.spread < 1 else "",
                f"\n[network]\nleaf = {leaf}\noversubscription = {narrow:.4g}\n" if leaf else "",
            )
        )

    def _link(self, kind: str | None) -> str:
        line = RateLine(latency=5e-5, rate=1e9) if kind is None else self.line(kind)
        return f"gigabytes = {line.rate / 1e9:.4g}\nlatency = {line.latency:.4g}\n"

    def document(self) -> dict[str, Any]:
        return {"samples": [asdict(sample) for sample in self.samples], "slowdown": self.slowdown}


def _line(samples: Sequence[Sample]) -> RateLine:
    """The line with the least sum of squared relative errors."""
    weights = [1 / sample.seconds**2 for sample in samples]
    pairs = [(sample.work, sample.seconds) for sample in samples]
    one = sum(weights)
    x, xx = (sum(w * work**power for w, (work, _) in zip(weights, pairs, strict=True)) for power in (1, 2))
    y, xy = (sum(w * work**power * t for w, (work, t) in zip(weights, pairs, strict=True)) for power in (0, 1))
    spread = one * xx - x * x
    latency = (xx * y - x * xy) / spread if spread > 0 else 0.0
    slope = (one * xy - x * y) / spread if spread > 0 else xy / xx
    if latency < 0:
        latency, slope = 0.0, xy / xx
    return RateLine(latency=latency, rate=1 / max(slope, 1e-24))


def _ends(samples: Sequence[Sample]) -> RateLine:
    """The line through the smallest and the largest sample."""
    first, last = (choose(samples, key=lambda sample: sample.work) for choose in (min, max))
    return RateLine(latency=first.seconds, rate=(last.work - first.work) / max(1e-9, last.seconds - first.seconds))


def measured_rates(processes: int, *, nodes: int = 1, node: int = 0, master: str = "") -> MeasuredRates:
    """Measure the rates of `processes` processes on each node; `master` is HOST:PORT of the first node.

    Raises PartcError P0807 if they fail.
    """
    with tempfile.TemporaryDirectory(prefix="partc-measure-") as folder:
        address = f"tcp://{master}" if nodes > 1 else f"file://{folder}/meeting"
        places = [
            ProbeProcess(rank=node * processes + index, nodes=nodes, processes=processes, address=address)
            for index in range(processes)
        ]
        found = _run_probes(places, Path(folder))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // found["beside"]
    return MeasuredRates(
        nodes=nodes,
        processes=processes,
        memory=memory,
        processors=found["processors"],
        samples=tuple(Sample(**sample) for sample in found["samples"]),
        overlap=None if found["overlap"] is None else Overlap(**found["overlap"]),
        meeting=None if found["meeting"] is None else Meeting(**found["meeting"]),
    )


def _run_probes(places: Sequence[ProbeProcess], folder: Path) -> dict[str, Any]:
    """Run the processes of this node. Returns the document that the first one prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = []
    for place in places:
        file = folder / f"{place.rank}.json"
        file.write_text(json.dumps(asdict(place)))
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "partc.cluster.probe", str(file)],
                env=environment,
                stdout=subprocess.PIPE if place is places[0] else subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
    try:
        out, _ = started[0].communicate(timeout=_LIMIT)
        codes = [process.wait(timeout=10) for process in started]
    except subprocess.TimeoutExpired:
        codes, out = [1], ""
    finally:
        for process in started:
            process.kill()
    if any(codes):
        cause = f"{len(places)} processes on this machine did not finish"
        raise PartcError("P0807", cause, help="try fewer --processes, and look at --master with several nodes")
    result: dict[str, Any] = json.loads(out)
    return result
