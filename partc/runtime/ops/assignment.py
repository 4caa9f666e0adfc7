"""The cheapest assignment of rows to columns, by which detectors match predictions with objects.

The search for shortest augmenting paths of Crouse (2016), as in scipy, so that equal costs have the same outcome.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def linear_sum_assignment(cost: Tensor, maximize: bool = False) -> tuple[Tensor, Tensor]:
    """The rows and the columns, as int64, of the elements of `cost` [rows, columns] with the least sum, or with the
    largest (`maximize`).

    Each row and each column has at most one element, and the smaller of the two numbers of them are assigned. The host
    computes it. Raises ValueError where scipy does: for costs that are no numbers, or that leave no assignment.
    """
    rows, columns = cost.shape
    if cost.is_meta:
        return _empty(cost), _empty(cost)
    given = (-cost if maximize else cost).detach()
    costs = (given if rows <= columns else given.T).tolist()
    if any(math.isnan(x) or x == -math.inf for row in costs for x in row):
        raise ValueError("matrix contains invalid numeric entries")
    found = torch.tensor(_assigned(costs), dtype=torch.int64, device=cost.device)
    own = torch.arange(len(costs), device=cost.device)
    if rows <= columns:
        return own, found
    order = found.argsort()
    return found[order], own[order]


def _empty(cost: Tensor) -> Tensor:
    return cost.new_empty(min(cost.shape), dtype=torch.int64)


def _assigned(costs: Sequence[Sequence[float]]) -> list[int]:
    """The column of each row; there are at least as many columns as rows."""
    rows, columns = len(costs), len(costs[0])
    prices, duals = [0.0] * rows, [0.0] * columns
    column_of, row_of = [-1] * rows, [-1] * columns
    for start in range(rows):
        lengths, before = [math.inf] * columns, [-1] * columns
        left = [*reversed(range(columns))]
        seen: list[int] = []
        row, least = start, 0.0
        while True:
            seen.append(row)
            base, own = least - prices[row], costs[row]
            nearest, place = math.inf, -1
            for index, column in enumerate(left):
                length = base + own[column] - duals[column]
                if length < lengths[column]:
                    lengths[column], before[column] = length, row
                length = lengths[column]
                if length < nearest or (length == nearest and row_of[column] < 0):
                    nearest, place = length, index
            if nearest == math.inf:
                raise ValueError("cost matrix is infeasible")
            least, column = nearest, left[place]
            left[place] = left[-1]
            left.pop()
            if row_of[column] < 0:
                break
            row = row_of[column]
        prices[start] += least
        for row in seen[1:]:
            prices[row] += least - lengths[column_of[row]]
        for other in {*range(columns)} - {*left}:
            duals[other] -= least - lengths[other]
        while True:
            row = row_of[column] = before[column]
            column_of[row], column = column, column_of[row]
            if row == start:
                break
    return column_of
