"""Comparisons of uniform random numbers with limits, on which the branches of a model may depend."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from partc.frontend.by_tensor import ByTensor

_UNIFORM = frozenset({"rand", "rand_like"})
_SAME = frozenset({"reshape", "view", "squeeze", "to", "float", "double", "__getitem__"})
_BELOW = frozenset({"lt", "le", "__lt__", "__le__"})
_ABOVE = frozenset({"ge", "gt", "__ge__", "__gt__"})
TESTS = frozenset({"__bool__", "is_nonzero"})


@dataclass(frozen=True, slots=True)
class UniformDraw:
    """A uniform random number from [low, high), or a tensor of them."""

    number: int
    low: float = 0.0
    high: float = 1.0

    @property
    def whole_part(self) -> int | None:
        """The integer that `int` makes of each such number; None if it makes several."""
        first = math.trunc(self.low)
        return first if self.low < self.high and math.trunc(math.nextafter(self.high, self.low)) == first else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomTest:
    """A comparison of a uniform random number with a limit."""

    draw: UniformDraw
    limit: float
    below: bool  # whether numbers below the limit pass

    @property
    def is_certain(self) -> bool:
        """Whether all numbers that can be drawn have the same outcome."""
        return not self.draw.low < self.limit < self.draw.high

    @property
    def certain_outcome(self) -> bool:
        return (self.limit >= self.draw.high) == self.below


class RandomTests:
    """The tensors that compare uniform random numbers with limits, in a run of Python code on tensors."""

    def __init__(self) -> None:
        self._uniform: ByTensor[UniformDraw] = ByTensor()
        self._tests: ByTensor[RandomTest] = ByTensor()
        self._draws = 0

    def follow(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> None:
        """Follow a call of the function `name`."""
        if not isinstance(made, Tensor):
            return
        if name.endswith("_") and not name.endswith("__"):
            self._uniform.pop(made)
            if name == "uniform_" and (bounds := _bounds(*args[1:], **kwargs)) is not None:
                self._draw(made, *bounds)
            return
        draw = self._uniform.get(args[0]) if args else None
        if draw is not None and name in _SAME and made.numel() == args[0].numel():
            self._uniform[made] = draw
        elif name in _UNIFORM or (draw is not None and name in _SAME):  # an element of several counts as a draw
            self._draw(made, *(() if draw is None else (draw.low, draw.high)))
        elif name in _BELOW | _ABOVE and draw is not None and isinstance(args[1], int | float):
            self._tests[made] = RandomTest(draw=draw, limit=args[1], below=name in _BELOW)

    def is_uniform(self, x: Any) -> bool:
        return x in self._uniform

    def number(self, x: Tensor) -> Tensor:
        """A random number in place of its item(), which is unknown in a trace: comparisons of it are tests as well."""
        made = x.reshape(())
        self.follow("reshape", (x,), {}, made)
        return made

    def whole_part(self, x: Any) -> int | None:
        """The integer that `int` makes of a random number; None if not all numbers that can be drawn have the same."""
        draw = self._uniform.get(x)
        return None if draw is None else draw.whole_part

    def of(self, x: Any) -> RandomTest | None:
        """The test that computed a tensor; None if no test did."""
        return self._tests.get(x)

    def _draw(self, made: Tensor, *bounds: float) -> None:
        self._draws += 1
        self._uniform[made] = UniformDraw(self._draws, *bounds)


def _bounds(low: Any = 0.0, high: Any = 1.0, **named: Any) -> tuple[float, float] | None:
    """The bounds that a call of `uniform_` has as arguments; None if one of them is not a plain number."""
    low, high = named.get("from", low), named.get("to", high)
    return (low, high) if isinstance(low, int | float) and isinstance(high, int | float) else None
