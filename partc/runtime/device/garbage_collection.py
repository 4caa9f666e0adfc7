"""Garbage collection at fixed points: a pause in the middle of one rank's step would stall all ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY = 50  # steps


@contextmanager
def collected() -> Iterator[Callable[[int], None]]:
    """A context for a process's training: existing objects are frozen, and others are collected every few steps."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield lambda done: None if done % EVERY else collect_young()
    finally:
        gc.enable()
        gc.unfreeze()


def collect_young() -> None:
    """Collect the two generations that steps fill."""
    gc.collect(1)
