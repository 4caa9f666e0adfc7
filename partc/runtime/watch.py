"""Notices that another rank has died, and stops this one with words: which rank, and what this one waited in.

A thread of each rank leaves a sign of life in the ranks' common store, watches its neighbour's, and
looks for a failure that anyone has noted there. It works while the main thread waits in a collective.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from types import TracebackType

from torch.distributed.distributed_c10d import Store

from .torch_private import clone_store

INTERVAL = 1.0  # seconds between signs of life, in worlds of a usual size
PATIENCE = 15.0  # seconds without one after which a rank is dead
HURRY = 5.0  # the same, once a connection has broken or the launcher stops everybody

_FAILED, _SUSPECT = "failed", "suspect"


class PeerLost(RuntimeError):
    """A connection to another rank has broken, or nothing came in time."""


class Watch:
    """Used as a context around a rank's work; `doing` is what the main thread is in."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.doing = "start-up"
        self.step = 0  # counted from 1; 0 before the first
        self._store = store
        self._rank = rank
        self._size = world_size
        self._neighbour = (rank + 1) % world_size
        self._interval = INTERVAL * max(1.0, world_size / 2048)
        self._done = threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, args=(clone_store(store),), daemon=True)

    def entering(self, what: str) -> None:
        self.doing = f"{what} of step {self.step}" if self.step else what

    def __enter__(self) -> Watch:
        if self._size > 1:
            # Python's own handlers wait for the main thread, which may be deep in a collective;
            # the wake-up pipe doesn't.
            os.set_blocking(self._wake_write, False)
            self._old_wakeup = signal.set_wakeup_fd(self._wake_write)
            self._old_handler = signal.signal(signal.SIGTERM, lambda number, frame: None)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._size == 1:
            return
        if isinstance(error, PeerLost):
            # Somebody else's failure, most likely: leave time to find out whose, and let the thread tell.
            self._store.set(_SUSPECT, "")
            time.sleep(HURRY + 5 * self._interval)
            self._note(f"rank {self._rank} lost its connection in {self.doing}: {_first_line(error)}")
            time.sleep(2 * self._interval)
        elif error is not None and not getattr(error, "alike", False):
            self._note(
                f"rank {self._rank} failed in {self.doing}: {kind.__name__ if kind else ''}: {_first_line(error)}"
            )
        self._done.set()
        os.write(self._wake_write, b"\0")
        self._thread.join()
        signal.set_wakeup_fd(self._old_wakeup)
        signal.signal(signal.SIGTERM, self._old_handler)
        if error is not None:
            self._outlast_others()

    def _note(self, failure: str) -> None:
        """Tell all ranks; the first failure stands."""
        try:
            self._store.compare_set(_FAILED, "", failure)
        except RuntimeError as error:
            print(f"rank {self._rank}: cannot reach the other ranks' store: {error}", file=sys.stderr)

    def _run(self, store: Store) -> None:
        try:
            self._look_around(store)
        except RuntimeError as error:
            if not self._done.is_set():
                self._stop(f"the process that holds the ranks' store is gone ({_first_line(error)})", 1)

    def _look_around(self, store: Store) -> None:
        beats, last, since = 0, "", time.monotonic()
        terminated: float | None = None
        while not self._done.is_set():
            beats += 1
            store.set(f"alive/{self._rank}", f"{beats} {self.doing}")
            if store.check([_FAILED]):
                self._stop(store.get(_FAILED).decode(), 1)
            sign = store.get(f"alive/{self._neighbour}").decode() if store.check([f"alive/{self._neighbour}"]) else ""
            now = time.monotonic()
            if sign != last:
                last, since = sign, now
            patience = HURRY if store.check([_SUSPECT]) else PATIENCE
            if sign and now - since > patience + self._interval:
                where = sign.partition(" ")[2]
                store.compare_set(_FAILED, "", f"rank {self._neighbour} died (last seen in {where})")
                continue
            for number in self._signals():
                if number == signal.SIGINT:
                    self._stop("interrupted", 130)
                elif number == signal.SIGTERM and terminated is None:
                    # A launcher does this when a rank has died. Stay just long enough to learn which.
                    terminated = now
                    store.set(_SUSPECT, "")
            if terminated is not None and now - terminated > HURRY + 4 * self._interval:
                self._stop("stopped by SIGTERM; no other rank is known to have failed", 143)
        store.set(f"alive/{self._rank}", "")

    def _signals(self) -> bytes:
        """Numbers of the signals that arrived while waiting for the next sign of life to be due."""
        ready, _, _ = select.select([self._wake_read], [], [], self._interval)
        return os.read(self._wake_read, 64) if ready else b""

    def _stop(self, why: str, code: int) -> None:
        print(f"error P0505: {why}; rank {self._rank} stops, in {self.doing}", file=sys.stderr, flush=True)
        if code == 1:
            self._outlast_others()
        os._exit(code)

    def _outlast_others(self) -> None:
        """Rank 0's process may hold the store, where the others have yet to read why."""
        if self._rank == 0:
            time.sleep(3 * self._interval)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]
