"""A table of predictions, one line for each plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from partc.ir.printer import readable


def table(names: Sequence[str], found: Sequence[Mapping[str, Any]]) -> str:
    """The table of the predictions of named plans, as text."""
    width = max(map(len, names), default=0)
    lines = [f"{'':>4} {'mesh':<{width}}  {'step':>11} {'compute':>11} {'exposed':>11} {'bubble':>11}  memory"]
    for number, (name, each) in enumerate(zip(names, found, strict=True), 1):
        if each["error"] is not None:
            lines.append(f"{number:>4} {name:<{width}}  error {each['error']['code']}: {each['error']['cause']}")
            continue
        times = " ".join(f"{each[key] * 1e3:>8.1f} ms" for key in ("step_seconds", "compute", "exposed", "bubble"))
        notes = [readable(each["memory_bytes"]), *([] if each["fits"] else ["does not fit"])]
        if "scale_factor" in each:
            notes.append(f"{each['scale_factor']:.0%} of single devices")
        if "effective_seconds" in each:
            seconds = each["effective_seconds"]
            notes.append("no progress with failures" if seconds is None else f"{seconds * 1e3:.1f} ms with failures")
        lines.append(f"{number:>4} {name:<{width}}  {times}  {', '.join(notes)}")
    return "\n".join(lines) + "\n"
