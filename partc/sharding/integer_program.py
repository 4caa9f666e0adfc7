"""Mixed integer programs, solved by HiGHS through scipy."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


def solve_integer_program(cost: Any, **given: Any) -> Any:
    """The result of `scipy.optimize.milp` with these arguments."""
    from scipy.optimize import milp

    with _stdout_on_stderr():
        return milp(cost, **given)


@contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """A context in which standard output goes to standard error: some versions of HiGHS print debugging text, which
    would precede a command's JSON.
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
