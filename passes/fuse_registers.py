"""What a program holds of long rows at once, in registers: more of it would spill.

Every sum along a row is a point that all of a program's threads pass together. What is there before it and read after
it, each holds its part of meanwhile: for the gradient of a norm, the row's gradient and the row itself, both scaled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from partc.passes.fuse_forms import Form, Shape
from partc.program import Op
from partc.rules.kernels import REDUCTIONS

Roots = Callable[[Iterable[str]], Collection[str]]  # what values are, seen through views

MOST_HELD = 160 * 1024  # bytes, of the 256 KiB of registers that a processor has: addresses and masks take some too
SHORT = 4096  # columns; shorter rows leave room for all that a kernel may be given


def is_long(form: Form) -> bool:
    """Whether it matters how many rows are held."""
    return form.whole and math.prod(form.column) > SHORT


def fits_registers(
    steps: Sequence[Op], makes: Collection[str], form: Form, shapes: Mapping[str, Shape], roots: Roots
) -> bool:
    """Whether a program has room for whole rows of what it computes in `steps`."""
    size = 8 if any(value.type.dtype == "f64" for step in steps for value in step.results) else 4
    block = 1 << (math.prod(form.column) - 1).bit_length()
    return _rows_held(steps, makes, form.along, shapes, roots) * block * size <= MOST_HELD


def _rows_held(
    steps: Sequence[Op], makes: Collection[str], along: int, shapes: Mapping[str, Shape], roots: Roots
) -> int:
    """At the sum along rows where most are; what is summed down the columns is held all the time."""

    def is_row(name: str) -> bool:
        return math.prod(shapes[name][-along:]) > 1

    made_of: dict[str, frozenset[str]] = {}  # value -> itself, and all that it is computed from
    rows: set[str] = set()
    for step in steps:
        for name in (*step.refs(), *(value.name for value in step.results)):
            rows.update(roots((name,)) if is_row(name) else ())
        own = frozenset().union(*(made_of.get(name, {name}) for name in roots(step.refs())))
        made_of.update((value.name, own | {value.name}) for value in step.results)
    sums = [step.result.name for step in steps if step.name in REDUCTIONS]
    down = [name for name in sums if is_row(name)]

    def held(sum: str) -> int:
        before = made_of[sum]
        after = {name for step in steps if step.results[0].name not in before for name in roots(step.refs())}
        return len(before & rows & after.union(makes))

    return max((held(name) for name in sums if name not in down), default=0) + len(down)
