"""Optimization fuel: PARTC_FUEL=n allows the first n optional rewrites, so that bisection finds a wrong one.

A pass calls `allowed("fold repeat_kv", place)` before each optional rewrite. The count is the only state of this
module; the runner resets it for every compile.
"""

from __future__ import annotations

from partc.settings import REWRITES, settings, tell

_spent = 0


def restart() -> None:
    """Start counting from zero."""
    global _spent
    _spent = 0


def num_requested() -> int:
    """The number of rewrites requested since the last refill, allowed or not."""
    return _spent


def may_rewrite(rewrite: str, place: object = "") -> bool:
    """Whether this rewrite may happen; PARTC_DEBUG=5 prints it with its number."""
    global _spent
    _spent += 1
    limit = settings().fuel
    go = limit is None or _spent <= limit
    tell(REWRITES, f"rewrite {_spent:<5} {rewrite}{f' at {place}' if place else ''}{'' if go else ' (no fuel)'}")
    return go
