"""Mixed integer programs, solved by HiGHS."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any  # numpy's


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearConstraints:
    """Linear constraints. Each row bounds a weighted sum of the columns: `lower <= matrix @ columns <= upper`.

    The matrix has the weights `values` in `columns`, where row i begins at `starts[i]`.
    """

    lower: Array
    upper: Array
    starts: Array
    columns: Array
    values: Array

    @classmethod
    def dense(cls, matrix: Array, lower: Array, upper: Array) -> LinearConstraints:
        """The rows of a matrix of shape (rows, columns). A bound is a number for all rows, or one for each row."""
        rows, columns = np.nonzero(matrix)
        return cls._sorted(rows, columns, matrix[rows, columns], lower, upper, len(matrix))

    @classmethod
    def sparse(
        cls, entries: Sequence[tuple[int, int, float]], lower: Array, upper: Array, count: int
    ) -> LinearConstraints:
        """The `count` rows of (row, column, weight). Weights of the same place add up."""
        rows, columns, values = (np.array(each) for each in zip(*entries, strict=True))
        width = columns.max() + 1
        places, found = np.unique(rows * width + columns, return_inverse=True)
        return cls._sorted(places // width, places % width, np.bincount(found, values), lower, upper, count)

    @classmethod
    def _sorted(
        cls, rows: Array, columns: Array, values: Array, lower: Array, upper: Array, count: int
    ) -> LinearConstraints:
        return cls(
            lower=np.broadcast_to(lower, count),
            upper=np.broadcast_to(upper, count),
            starts=np.searchsorted(rows, np.arange(count)),
            columns=columns,
            values=values,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerSolution:
    """The values of the columns, or None if the solver found none."""

    values: Array | None
    infeasible: bool
    message: str


def solve_integer_program(
    cost: Array,
    rows: Sequence[LinearConstraints],
    *,
    integral: Array,
    upper: Array,
    lower: Array = 0.0,
    options: Mapping[str, float],
) -> IntegerSolution:
    """The values of the columns with the least cost, within their bounds and `rows`.

    `integral` says for each column whether it takes integers alone. A bound is a number for all columns, or one for
    each. `options` are those of HiGHS, such as the relative gap `mip_rel_gap` at which a search ends.
    """
    import highspy

    count = len(cost)
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = count, sum(len(each.starts) for each in rows)
    program.col_cost_ = cost
    program.col_lower_, program.col_upper_ = np.broadcast_to(lower, count), np.broadcast_to(upper, count)
    program.integrality_ = [highspy.HighsVarType(int(each)) for each in integral]
    program.row_lower_ = np.concatenate([each.lower for each in rows])
    program.row_upper_ = np.concatenate([each.upper for each in rows])
    sizes = [len(each.values) for each in rows]
    begins = np.cumsum([0, *sizes])
    matrix = program.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.num_col_, matrix.num_row_ = count, program.num_row_
    matrix.start_ = np.append(
        np.concatenate([each.starts + begin for each, begin in zip(rows, begins[:-1], strict=True)]), begins[-1]
    )
    matrix.index_ = np.concatenate([each.columns for each in rows])
    matrix.value_ = np.concatenate([each.values for each in rows])
    with _stdout_on_stderr():
        solver = highspy.Highs()
        for name, value in {"output_flag": False, **options}.items():
            solver.setOptionValue(name, value)
        solver.passModel(program)
        solver.run()
    status = solver.getModelStatus()
    solved = solver.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    return IntegerSolution(
        values=np.array(solver.getSolution().col_value) if solved else None,
        infeasible=status == highspy.HighsModelStatus.kInfeasible,
        message=solver.modelStatusToString(status),
    )


@contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """A context in which standard output goes to standard error: some versions of HiGHS print text, which would
    precede a command's JSON.
    """
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # a process without standard output
        yield
        return
    try:
        with suppress(OSError):  # a process without standard error
            os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
