"""The time of a step under failures: work since the last checkpoint is lost, and the run starts again.

Failures come at a constant rate, in proportion to the devices. A segment of `interval` seconds of work ends with a
checkpoint. If it takes s seconds without failures and devices fail l times a second, it takes (1/l + R)(exp(l s) - 1)
seconds on average, with R seconds for a restart (Daly 2006, A higher order estimate of the optimum checkpoint interval,
equation 20).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Annotated

from partc.errors import PartcError
from partc.runtime.documents import Malformed, at_least, decoded, more_than

_HOUR = 3600.0
_MOST = 700.0  # exp of a larger number overflows a float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """The times of a failure model, in seconds; `mtbf` is in hours, between two failures of one device.

    The default is the rate of 16,384 H100 over 54 days (Llama Team 2024, The Llama 3 Herd of Models, section 3.3.4).
    """

    mtbf: Annotated[float, more_than(0)] = 50_000.0
    checkpoint: Annotated[float, more_than(0)] = 60.0  # seconds in which no rank computes
    restart: Annotated[float, at_least(0)] = 600.0
    interval: Annotated[float, at_least(0)] = 0.0  # seconds of work between checkpoints; 0: the best interval

    @classmethod
    def parse(cls, text: str) -> Failures:
        """Read `mtbf=50000,checkpoint=60`. Raises PartcError P0808."""
        try:
            given = dict(part.split("=", 1) for part in text.split(",") if part)
            return decoded(cls, {name.strip(): float(value) for name, value in given.items()})
        except (Malformed, ValueError) as error:
            names = ", ".join(item.name for item in fields(cls))
            why = f" ({error})" if isinstance(error, Malformed) else ""
            help = f"for example mtbf=50000,checkpoint=60,restart=600; known are {names}"
            raise PartcError("P0808", f"--failures {text!r} cannot be read{why}", help=help) from None

    def share(self, devices: int, interval: float) -> float:
        """The share of the time that is spent on work which no failure undoes."""
        rate = devices / (self.mtbf * _HOUR)
        length = rate * (interval + self.checkpoint)
        if length > _MOST:
            return 0.0
        return interval / ((1 / rate + self.restart) * math.expm1(length))

    def best_interval(self, devices: int) -> float:
        """The seconds of work between checkpoints that make `share` largest."""
        if self.interval:
            return self.interval
        # The share rises to its maximum and falls: golden sections between a tenth of and ten times Young's estimate.
        young = math.sqrt(2 * self.checkpoint * self.mtbf * _HOUR / devices)
        low, high = math.log(young / 10), math.log(young * 10)
        ratio = (math.sqrt(5) - 1) / 2
        while high - low > 1e-6:
            left, right = high - ratio * (high - low), low + ratio * (high - low)
            if self.share(devices, math.exp(left)) < self.share(devices, math.exp(right)):
                low = left
            else:
                high = right
        return math.exp((low + high) / 2)

    def effective(self, step_seconds: float, devices: int) -> float:
        """The mean time of a step, with checkpoints, repeated work and restarts."""
        share = self.share(devices, self.best_interval(devices))
        return step_seconds / share if share else math.inf
