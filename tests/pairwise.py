"""Rows of a table in which every two values of different columns occur together, instead of a full product."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]
_Chosen: TypeAlias = dict[str, int]  # per column, the index of a value
_Pair: TypeAlias = frozenset[tuple[str, int]]


def pairwise(columns: Mapping[str, Sequence[Any]], excluded: Callable[[Row], bool] = lambda row: False) -> list[Row]:
    """The rows, the same ones in every run.

    `excluded` says which rows cannot be; it is asked about incomplete rows too, and true there if no completion can be.
    """

    def named(chosen: _Chosen) -> Row:
        return {name: columns[name][index] for name, index in chosen.items()}

    def completed(chosen: _Chosen, missing: Mapping[_Pair, None]) -> _Chosen | None:
        """A row with these values; the others each cover the most missing pairs, then the least used. None if excluded."""
        if excluded(named(chosen)):
            return None
        free = [name for name in columns if name not in chosen]
        if not free:
            return chosen
        name = free[0]

        def gain(index: int) -> tuple[int, int]:
            met = sum(frozenset({(name, index), other}) in missing for other in chosen.items())
            return -met, used[name, index]

        for index in sorted(range(len(columns[name])), key=gain):
            if (row := completed({**chosen, name: index}, missing)) is not None:
                return row
        return None

    used: Counter[tuple[str, int]] = Counter()
    missing: dict[_Pair, None] = {}
    for left, right in combinations(columns, 2):
        for i, j in product(range(len(columns[left])), range(len(columns[right]))):
            if completed({left: i, right: j}, {}) is not None:
                missing[frozenset({(left, i), (right, j)})] = None
    rows = []
    while missing:
        row = completed(dict(sorted(next(iter(missing)))), missing)
        assert row is not None
        for pair in combinations(row.items(), 2):
            missing.pop(frozenset(pair), None)
        used.update(row.items())
        rows.append(named({name: row[name] for name in columns}))
    return rows
