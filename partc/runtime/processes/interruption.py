"""Stopping on request: threads next to the training agree on a step at which all ranks stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.distributed_c10d import Store


class Interruption:
    """One rank's part in the agreement. Its main thread calls `before` before each step; the watching thread calls
    `look`.

    After a request, every rank notes the last step that it has begun, and does not begin another until all have noted
    theirs. All stop after the latest of these steps: no rank has gone further, and ranks that are behind can still take
    part in steps in which others wait.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._begun = -1
        self._noted = False
        self._stop: int | None = None
        self._changed = threading.Condition()

    @property
    def agreed(self) -> bool:
        return self._stop is not None

    @property
    def pending(self) -> bool:
        """Whether a stop is requested and not yet agreed on."""
        return self._noted and self._stop is None

    def before(self, step: int) -> bool:
        """Whether to stop instead of beginning this step (counted from 0)."""
        with self._changed:
            while self.pending:
                self._changed.wait()
            if self._stop is not None and step >= self._stop:
                return True
            self._begun = step
            return False

    def ask(self, store: Store) -> None:
        store.set("stop", "")

    def look(self, store: Store) -> None:
        """Advance the agreement."""
        if not self._noted and store.check(["stop"]):
            with self._changed:
                self._noted, begun = True, self._begun
            store.set(f"stop/{self._rank}", str(begun))
            if store.add("stop/count", 1) == self._size:
                latest = max(int(store.get(f"stop/{rank}")) for rank in range(self._size))
                store.set("stop/step", str(latest + 1))
        if self.pending and store.check(["stop/step"]):
            with self._changed:
                self._stop = int(store.get("stop/step"))
                self._changed.notify_all()


class VirtualInterruption:
    """The interruption of virtual ranks, which take turns in one process."""

    def __init__(self) -> None:
        self.asked = False
        self._begun = -1
        self._stop: int | None = None

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        def ask(number: int, frame: object) -> None:
            self.asked = True

        old = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGUSR1)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def before(self, step: int) -> bool:
        if self.asked and self._stop is None:
            self._stop = self._begun + 1
        if self._stop is not None and step >= self._stop:
            return True
        self._begun = max(self._begun, step)
        return False
