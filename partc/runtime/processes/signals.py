"""Signals that ask a rank to stop: blocked until a thread can handle them, then read from a pipe.

Python's own handlers wait for the main thread, which may be inside a collective; the wake-up pipe does not. This module
has no slow imports: train.py calls `block_signals` before it loads torch.
"""

from __future__ import annotations

import os
import select
import signal
from types import TracebackType

TERMINATING = (signal.SIGTERM, signal.SIGHUP)  # a launcher sends these to all ranks when one has failed
_ASKING = (*TERMINATING, signal.SIGINT, signal.SIGUSR1)


def block_signals() -> None:
    """Block the signals of this process until `unblock_signals`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _ASKING)


def unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASKING)


class Caught:
    """A context in which stop signals have no effect except through `wait`. SIGUSR1 asks for a checkpoint."""

    def __init__(self, *, checkpoints: bool) -> None:
        self._numbers = [number for number in _ASKING if checkpoints or number != signal.SIGUSR1]
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def __enter__(self) -> Caught:
        self._old_wakeup = signal.set_wakeup_fd(self._write)
        # Under nohup, SIGHUP is ignored and stays ignored.
        caught = [number for number in self._numbers if signal.getsignal(number) != signal.SIG_IGN]
        self._old_handlers = {number: signal.signal(number, lambda number, frame: None) for number in caught}
        unblock_signals()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def wait(self, seconds: float) -> bytes:
        """Wait for signals, and return the numbers of those that have arrived."""
        ready, _, _ = select.select([self._read], [], [], seconds)
        return os.read(self._read, 64) if ready else b""

    def requeue(self, numbers: bytes) -> None:
        """Make `wait` return these signals again, since they were not handled."""
        os.write(self._write, numbers)

    def wake(self) -> None:
        """Make a `wait` in another thread return now."""
        os.write(self._write, b"\0")
