"""Counts the long rows that a program holds in registers at once: too many would spill.

All threads of a program meet at every sum along a row. Each thread holds its part of the values that are computed
before the sum and read after it: for the gradient of a norm, the scaled gradient of the row and the scaled row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from partc.ir.program import Op
from partc.passes.fuse.iteration_spaces import Form, Shape
from partc.rules.kernels import REDUCTIONS

Roots = Callable[[Iterable[str]], Collection[str]]  # values -> the values behind views

MOST_HELD = 160 * 1024  # bytes; of a multiprocessor's 256 KiB of registers, addresses and masks take some
SHORT = 4096  # columns; for shorter rows, registers always suffice


def is_long(form: Form) -> bool:
    """Whether the number of held rows matters."""
    return form.whole and math.prod(form.column) > SHORT


def fits_registers(
    steps: Sequence[Op], makes: Collection[str], form: Form, shapes: Mapping[str, Shape], roots: Roots
) -> bool:
    """Whether a program has enough registers for the rows of the values in `steps`."""
    size = 8 if any(value.type.dtype == "f64" for step in steps for value in step.results) else 4
    block = 1 << (math.prod(form.column) - 1).bit_length()
    return _rows_held(steps, makes, form.along, shapes, roots) * block * size <= MOST_HELD


def _rows_held(
    steps: Sequence[Op], makes: Collection[str], along: int, shapes: Mapping[str, Shape], roots: Roots
) -> int:
    """The number of rows held at the worst sum along rows; sums down the columns are held throughout."""

    def is_row(name: str) -> bool:
        return math.prod(shapes[name][-along:]) > 1

    made_of: dict[str, frozenset[str]] = {}  # value -> itself and all values from which it is computed
    rows: set[str] = set()
    for step in steps:
        for name in (*step.refs(), *(value.name for value in step.results)):
            rows.update(roots((name,)) if is_row(name) else ())
        own = frozenset().union(*(made_of.get(name, {name}) for name in roots(step.refs())))
        made_of.update((value.name, own | {value.name}) for value in step.results)
    sums = [step.result.name for step in steps if step.name in REDUCTIONS]
    down = [name for name in sums if is_row(name)]

    def live_rows(sum: str) -> int:
        before = made_of[sum]
        after = {name for step in steps if step.results[0].name not in before for name in roots(step.refs())}
        return len(before & rows & after.union(makes))

    return max((live_rows(name) for name in sums if name not in down), default=0) + len(down)
