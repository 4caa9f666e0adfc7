"""Python's collector of cycles at known points: a pause in the midst of one rank's step would stall all of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY = 50  # steps


@contextmanager
def collected() -> Iterator[Callable[[int], None]]:
    """For a process's training: what is there before stays aside; the rest is collected after every so many steps."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield lambda done: None if done % EVERY else _collect()
    finally:
        gc.enable()
        gc.unfreeze()


def _collect() -> None:
    gc.collect(1)  # of the two generations that steps make
