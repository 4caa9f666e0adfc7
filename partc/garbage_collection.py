"""Garbage collection while partc compiles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# A compile allocates millions of objects, keeps most of them to its end, and leaves few in cycles. Python's own
# thresholds (700, 10, 10) spend a sixth of its time on searches for such cycles.
THRESHOLDS = (100_000, 50, 1000)


@contextmanager
def rare_collections() -> Iterator[None]:
    """A context that raises the collector's thresholds, and restores them at its end."""
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
