"""The time limit of a search, which also interrupts a lowering."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_AGAIN = 0.01  # seconds until the timer tries again, if the running code must not be interrupted
_LONGEST = 1e9  # seconds, which every timer takes
_SHIELDED = "partc.torch_private"  # this module replaces functions of torch for a while, and must restore them


class TimeUpError(BaseException):
    """The time is up. Handlers of ordinary errors do not catch it."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise TimeUpError in the context's code after `seconds`; never if these are None, or outside the main thread.

    Only instructions of partc's own code are interrupted, so that torch and the solver are never left halfway.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_: int, frame: FrameType | None) -> None:
        name = str(frame.f_globals.get("__name__")) if frame is not None else ""
        if name.startswith("partc.") and name not in (_SHIELDED, __name__):
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise TimeUpError

    start, before = time.perf_counter(), signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, min(max(seconds, _AGAIN), _LONGEST), _AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:  # another timer was running
            signal.setitimer(signal.ITIMER_REAL, max(_AGAIN, left - (time.perf_counter() - start)), interval)
