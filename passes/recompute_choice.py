"""Which values to save: exact choices between memory and doing things again, as integer programs.

A value has a binary that says it is saved; an operation that may be done again has one that says it
is. What backward needs is saved or made again; so is whatever an operation that is done again reads.
Without a limit on memory this is a minimum cut: the solver's relaxation is integral.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from partc.errors import InternalError


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What backward needs, what each value takes to save, and the operations that could be done again.

    `ops`, `reads` and `moved` go together: an operation's results, the values that it reads (without
    those that are there in any case), and the bytes that it reads and writes.
    """

    needed: tuple[str, ...]
    bytes: Mapping[str, int]
    ops: tuple[tuple[str, ...], ...]
    reads: tuple[tuple[str, ...], ...]
    moved: tuple[int, ...]


def least(choice: Choice, *, worth: int) -> frozenset[str]:
    """The values to save, so that bytes saved, `worth` times, and bytes moved to make the others are the least."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    makers = {name: index for index, results in enumerate(choice.ops) for name in results}
    relevant = _relevant(choice, makers)
    values = [name for name in choice.bytes if name in relevant]
    if not values:
        return frozenset()
    column = {name: len(choice.ops) + index for index, name in enumerate(values)}
    rows: list[tuple[list[int], list[int]]] = []

    def available(name: str) -> list[int]:
        return [column[name], *([makers[name]] if name in makers else [])]

    rows.extend((available(name), []) for name in choice.needed)
    for index, reads in enumerate(choice.reads):
        if not relevant.isdisjoint(choice.ops[index]):
            rows.extend((available(name), [index]) for name in reads)
    width = len(choice.ops) + len(values)
    matrix = np.zeros((len(rows), width))
    for row, (plus, minus) in zip(matrix, rows, strict=True):
        row[plus] = 1
        row[minus] -= 1
    prices = np.array([*choice.moved, *(worth * choice.bytes[name] for name in values)], dtype=float)
    scale = prices.max() or 1.0
    lower = np.array([0.0 if minus else 1.0 for _, minus in rows])
    found = milp(
        prices / scale,
        constraints=LinearConstraint(matrix, lower, np.inf),
        integrality=np.ones(width),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        raise InternalError(f"no choice of what to save: {found.message}")
    return frozenset(name for name in values if found.x[column[name]] > 0.5)


def _relevant(choice: Choice, makers: Mapping[str, int]) -> set[str]:
    """What is needed, and what it could be made of."""
    found: set[str] = set()
    todo = list(choice.needed)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            if name in makers:
                todo.extend(choice.reads[makers[name]])
    return found
