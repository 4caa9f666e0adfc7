"""Constant matrices as functions of rows and columns, without their elements.

Masks compare the position of a query with that of a key. Such a matrix needs one number for each row and column:

    Runs     booleans: each row changes between false and true at a few columns
    Two      two values, chosen by Runs
    Outer    integers rows[i] + columns[j]

Operations on these are exact at any size. Leading dimensions only broadcast: all their matrices are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_MOST_CHANGES = 64  # the most changes of a row


@dataclass(frozen=True, slots=True)
class Runs:
    """Booleans[s, t]: element (i, j) is true if an odd number of `changes[i]` is at most j.

    Rows of `changes` are sorted and filled up with t, which is no change.
    """

    changes: Tensor  # i64[s, n]
    columns: int

    @classmethod
    def normalized(cls, changes: Tensor, columns: int) -> Runs:
        """Sort the changes and cancel pairs of equal ones."""
        changes = changes.clamp(0, columns).sort(1).values
        n = changes.shape[1]
        if n > 1:
            place = torch.arange(n).expand_as(changes)
            starts = torch.ones_like(changes, dtype=torch.bool)
            starts[:, 1:] = changes[:, 1:] != changes[:, :-1]
            ends = torch.ones_like(starts)
            ends[:, :-1] = starts[:, 1:]
            first = torch.where(starts, place, 0).cummax(1).values
            kept = ends & ((place - first) % 2 == 0)
            changes = torch.where(kept, changes, columns).sort(1).values
        used = int((changes < columns).sum(1).max()) if changes.numel() else 0
        return cls(changes[:, :used], columns)

    @property
    def rows(self) -> int:
        return self.changes.shape[0]

    def __xor__(self, other: Runs) -> Runs:
        return Runs.normalized(torch.cat((self.changes, other.changes), 1), self.columns)

    def __invert__(self) -> Runs:
        return Runs.normalized(torch.cat((torch.zeros(self.rows, 1, dtype=torch.int64), self.changes), 1), self.columns)

    def combined(self, other: Runs, truth: Tensor) -> Runs:
        """The matrix `truth[self, other]`, element by element."""
        n, m = self.changes.shape[1], other.changes.shape[1]
        mine = torch.cat((torch.ones(n, dtype=torch.int64), torch.zeros(m, dtype=torch.int64)))
        changes, order = torch.cat((self.changes, other.changes), 1).sort(1)
        states = [(flags[order].cumsum(1) % 2) for flags in (mine, 1 - mine)]
        before = truth[0, 0].expand(self.rows, 1)
        now = torch.cat((before, truth[states[0], states[1]]), 1)
        flips = torch.where(now[:, 1:] != now[:, :-1], changes, self.columns)
        first = torch.where(before, 0, self.columns)
        return Runs.normalized(torch.cat((first, flips), 1), self.columns)

    def __and__(self, other: Runs) -> Runs:
        return self.combined(other, torch.tensor([[False, False], [False, True]]))

    def equals(self, other: Runs) -> bool:
        return (self ^ other).changes.numel() == 0

    def mirrored(self) -> Runs:
        """The matrix with its columns in reverse order."""
        changes = self.changes
        if changes.shape[1] % 2:
            changes = torch.cat((changes, torch.full((self.rows, 1), self.columns)), 1)
        return Runs.normalized(self.columns - changes, self.columns)

    def transposed(self) -> Runs | None:
        """The transpose; None unless both ends of the run in each row are monotone in the row."""
        if self.changes.shape[1] > 2:
            return None
        ends = torch.cat((self.changes, torch.full((self.rows, 2 - self.changes.shape[1]), self.columns)), 1)
        first, last = ends.unbind(1)
        wanted = torch.arange(self.columns)
        if all(bool((x[1:] >= x[:-1]).all()) for x in (first, last)):
            found = torch.stack([torch.searchsorted(x.contiguous(), wanted, right=True) for x in (last, first)], 1)
            return Runs.normalized(found, self.rows)
        if all(bool((x[1:] <= x[:-1]).all()) for x in (first, last)):
            flipped = Runs(self.changes.flip(0), self.columns).transposed()
            return None if flipped is None else flipped.mirrored()
        return None

    def dense(self) -> Tensor:
        counts = torch.zeros(self.rows, self.columns + 1, dtype=torch.int64)
        counts.scatter_add_(1, self.changes, torch.ones_like(self.changes))
        return counts.cumsum(1)[:, : self.columns] % 2 == 1


@dataclass(frozen=True, slots=True)
class Two:
    """`yes` where `where` is true, `no` elsewhere; both are scalars."""

    where: Runs
    yes: Tensor
    no: Tensor

    def map(self, apply: Callable[[Tensor], Tensor]) -> Two:
        return Two(self.where, apply(self.yes), apply(self.no))

    def with_(self, other: Two, apply: Callable[[Tensor, Tensor], Tensor]) -> Two | None:
        """An elementwise operation of this matrix and another; None if the result has more than two values."""
        values = [[apply(a, b) for b in (other.no, other.yes)] for a in (self.no, self.yes)]
        no = values[0][0]
        others = [value for row in values for value in row if not _equal(value, no)]
        if not others:
            return Two(self.where, no, no)
        if any(not _equal(value, others[0]) for value in others):
            return None
        truth = torch.tensor([[not _equal(value, no) for value in row] for row in values])
        return Two(self.where.combined(other.where, truth), others[0], no)

    def dense(self) -> Tensor:
        return torch.where(self.where.dense(), self.yes, self.no)


@dataclass(frozen=True, slots=True)
class Outer:
    """The integers rows[i] + columns[j], or their absolute values."""

    rows: Tensor  # i64[s]
    columns: Tensor  # i64[t]
    absolute: bool = False

    def plus(self, other: Outer, sign: int = 1) -> Outer | None:
        if self.absolute or other.absolute:
            return None
        return Outer(self.rows + sign * other.rows, self.columns + sign * other.columns)

    def compared(self, name: str, other: Outer) -> Runs | None:
        """The comparison of this matrix with another: lt, le, gt, ge, eq or ne. None if it has no structure."""
        if self.absolute:
            return self._absolute(name, other)
        if other.absolute:
            swapped = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}
            return other._absolute(swapped.get(name, name), self)
        rows, columns = other.rows - self.rows, self.columns - other.columns  # columns <name> rows
        if bool((columns[1:] >= columns[:-1]).all()):
            return _sorted(name, rows, columns)
        if bool((columns[1:] <= columns[:-1]).all()):
            return _sorted(name, rows, columns.flip(0).contiguous()).mirrored()
        return None

    def _absolute(self, name: str, other: Outer) -> Runs | None:
        limit = other.rows + other.columns[:1]
        if other.absolute or not bool((other.columns == other.columns[:1]).all()) or len(limit.unique()) > 1:
            return None
        plain = Outer(self.rows, self.columns)
        if name in ("gt", "ge", "ne"):
            opposite = self._absolute({"gt": "le", "ge": "lt", "ne": "eq"}[name], other)
            return None if opposite is None else ~opposite
        less = Outer(-other.rows, -other.columns)
        above, below = plain.compared(name, other), plain.compared({"lt": "gt", "le": "ge", "eq": "eq"}[name], less)
        if above is None or below is None:
            return None
        either = name == "eq" and bool((limit >= 0).all())
        truth = torch.tensor([[False, either], [either, True]])
        return above.combined(below, truth)

    def dense(self) -> Tensor:
        whole = self.rows[:, None] + self.columns
        return whole.abs() if self.absolute else whole


def _sorted(name: str, rows: Tensor, columns: Tensor) -> Runs:
    """columns[j] <name> rows[i], of columns in ascending order."""
    t = len(columns)
    below = torch.searchsorted(columns, rows)
    upto = torch.searchsorted(columns, rows, right=True)
    zero, end = torch.zeros_like(below), torch.full_like(below, t)
    first, last = {
        "lt": (zero, below),
        "le": (zero, upto),
        "gt": (upto, end),
        "ge": (below, end),
        "eq": (below, upto),
        "ne": (below, upto),
    }[name]
    found = Runs.normalized(torch.stack((first, last), 1), t)
    return ~found if name == "ne" else found


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(torch.equal(a, b) or (a.isnan() & b.isnan()))


Matrix = Two | Outer


def band(s: int, t: int, before: int | None, after: int | None) -> Runs:
    """The band of columns from `before` before each row's own to `after` after it; None: without that bound."""
    own = torch.arange(s)
    first = torch.zeros(s, dtype=torch.int64) if before is None else own - before
    last = torch.full((s,), t) if after is None else own + after + 1
    return Runs.normalized(torch.stack((first.clamp(0, t), torch.maximum(first, last).clamp(0, t)), 1), t)


def as_matrix(x: Tensor, s: int, t: int) -> Matrix | None:
    """A tensor that broadcasts to [.., s, t] as a matrix; None if it has no such form."""
    x = x.reshape((1,) * (2 - x.dim()) + x.shape)
    x = x.flatten(0, -3) if x.dim() > 2 else x[None]
    if len(x) > 1 and not bool((x == x[:1]).all()):
        return None
    x = x[0]
    if x.is_floating_point() and bool(x.isnan().any()):
        return None
    if x.dtype == torch.bool or len(x.unique()) <= 2:
        values = x.unique()
        no, yes = values[0], values[-1]
        runs = _runs(x == yes, s, t) if not _equal(no, yes) else Runs(torch.zeros(s, 0, dtype=torch.int64), t)
        if runs is not None:
            return Two(runs, yes, no)
    whole = _integers(x)
    if whole is None or min(x.shape) > 1:
        return None
    if x.shape[0] == 1:
        return Outer(torch.zeros(s, dtype=torch.int64), whole[0].expand(t).contiguous())
    return Outer(whole[:, 0].expand(s).contiguous(), torch.zeros(t, dtype=torch.int64))


def outer(matrix: Matrix, s: int) -> Outer | None:
    """A matrix as a sum of row and column integers; None if it has no such form."""
    if isinstance(matrix, Outer):
        return matrix
    runs = matrix.where
    yes, no = (_integers(value) for value in (matrix.yes, matrix.no))
    if yes is None or no is None:
        return None
    step = yes - no
    zero = torch.zeros(s, dtype=torch.int64)
    if bool((runs.changes == runs.changes[:1]).all()):
        return Outer(zero + no, Runs(runs.changes[:1], runs.columns).dense()[0] * step)
    if bool(((runs.changes == 0) | (runs.changes == runs.columns)).all()):
        true = (runs.changes == 0).sum(1) % 2
        return Outer(true * step + no, torch.zeros(runs.columns, dtype=torch.int64))
    return None


def _integers(x: Tensor) -> Tensor | None:
    """The values as integers, if they are integers and small enough for exact sums and differences."""
    if x.dtype == torch.bool:
        return x.to(torch.int64)
    if not x.is_floating_point():
        return x.to(torch.int64) if bool((x.abs() < 1 << 60).all()) else None
    exact = bool((x == x.round()).all()) and bool((x.abs() <= 1 / torch.finfo(x.dtype).eps / 2).all())
    return x.to(torch.int64) if exact else None


def _runs(x: Tensor, s: int, t: int) -> Runs | None:
    """Booleans [1 or s, 1 or t] as runs."""
    if x.shape[1] == 1:
        first = torch.where(x, 0, t)
        return Runs.normalized(first.expand(s, 1), t)
    changed = x.clone()
    changed[:, 1:] ^= x[:, :-1]
    count = int(changed.sum(1).max())
    if count > _MOST_CHANGES:
        return None
    places = torch.where(changed, torch.arange(t), t)
    found = places.topk(count, 1, largest=False, sorted=True).values if count else places[:, :0]
    return Runs(found.expand(s, count).contiguous(), t)
