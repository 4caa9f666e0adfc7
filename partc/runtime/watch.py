"""Notices that another rank has died, and stops this one with words: which rank, and what this one waited in.

A thread of each rank leaves a sign of life in the ranks' common store, watches its neighbour's, and
looks for a failure that anyone has noted there. It works while the main thread waits in a collective.
On SIGTERM and SIGUSR1 it also settles with the others where to stop, if the run can be continued.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from torch.distributed.distributed_c10d import Store

from .clock import Clock
from .errors import UsageError
from .interruption import Interruption
from .torch_private import clone_store

INTERVAL = 1.0  # seconds between signs of life, in worlds of a usual size
PATIENCE = 15.0  # seconds without one after which a rank is dead
HURRY = 5.0  # the same, once a connection has broken or the launcher stops everybody

_FAILED, _SUSPECT = "failed", "suspect"


class PeerLost(RuntimeError):
    """A connection to another rank has broken, or nothing came in time."""


class Watch:
    """Used as a context around a rank's work; `clock` says what the main thread is in."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        timeout: float = math.inf,
        interruption: Interruption | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.clock = Clock() if clock is None else clock
        self._interruption = interruption
        self._works = world_size > 1 or interruption is not None
        self._patience = max(3 * INTERVAL, min(PATIENCE, timeout))
        self._timeout = timeout
        self._store = store
        self._rank = rank
        self._size = world_size
        self._neighbour = (rank + 1) % world_size
        self._interval = INTERVAL * max(1.0, world_size / 2048)
        self._done = threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, args=(clone_store(store),), daemon=True)
        self._turns = 0  # of that thread

    def __enter__(self) -> Watch:
        if self._works:
            # Python's own handlers wait for the main thread, which may be deep in a collective;
            # the wake-up pipe doesn't.
            os.set_blocking(self._wake_write, False)
            self._old_wakeup = signal.set_wakeup_fd(self._wake_write)
            caught = (signal.SIGTERM, signal.SIGUSR1) if self._interruption is not None else (signal.SIGTERM,)
            self._old_handlers = {number: signal.signal(number, lambda number, frame: None) for number in caught}
            self._thread.start()
            threading.Thread(target=self._guard, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._works:
            return
        alike = isinstance(error, UsageError) and error.alike
        if isinstance(error, PeerLost):
            # Somebody else's failure, most likely: leave time to find out whose, and let the thread tell.
            self._store.set(_SUSPECT, "")
            time.sleep(HURRY + 5 * self._interval)
            self._note(f"rank {self._rank} lost its connection in {self.clock.doing}: {_first_line(error)}")
            time.sleep(2 * self._interval)
        elif error is not None and not alike:
            self._note(
                f"rank {self._rank} failed in {self.clock.doing}: {kind.__name__ if kind else ''}: {_first_line(error)}"
            )
        self._done.set()
        os.write(self._wake_write, b"\0")
        self._thread.join()
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        if alike and self._rank:
            time.sleep(self._interval)  # rank 0 says it: a launcher stops everybody when the first one leaves
        elif error is not None and not alike:
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
                self._stop(f"{_store_holder()} died ({_first_line(error)})", 1)

    def _guard(self) -> None:
        """Stop where the store doesn't answer. Counts seconds in which this process itself runs."""
        turns, seconds = 0, 0
        while not self._done.wait(1.0):
            seconds = seconds + 1 if turns == self._turns else 0
            turns = self._turns
            if seconds > self._patience + 2 * self._interval:
                self._stop(f"{_store_holder()} does not answer", 1)

    def _look_around(self, store: Store) -> None:
        interruption, here = self._interruption, _process()
        beats, last, since = 0, "", time.monotonic()
        terminated: float | None = None
        while not self._done.is_set():
            beats += 1
            self._turns += 1
            store.set(f"alive/{self._rank}", f"{beats} {here} {self.clock.doing}")
            if store.check([_FAILED]):
                self._stop(store.get(_FAILED).decode(), 1)
            sign = self._sign(store)
            now = time.monotonic()
            if sign != last:
                last, since = sign, now
            patience = min(HURRY, self._patience) if store.check([_SUSPECT]) else self._patience
            if sign:
                _, place, where = sign.split(" ", 2)
                lives = _lives(place, here)
                # Of a process on this machine it is known; it may be held up by a signal or a debugger.
                allowed = self._timeout if lives else patience + self._interval
                if (lives is False and self._sign(store) == sign) or now - since > allowed:  # it may just have left
                    what = "stalls" if lives else "died"
                    store.compare_set(_FAILED, "", f"rank {self._neighbour} {what} (last seen in {where})")
                    continue
            for number in self._signals():
                if number == signal.SIGINT:
                    self._stop("interrupted", 130)
                elif number == signal.SIGTERM and terminated is None:
                    # A launcher does this when a rank has died. Stay just long enough to learn which.
                    terminated = now
                    store.set(_SUSPECT, "")
                if number in (signal.SIGTERM, signal.SIGUSR1) and interruption is not None:
                    interruption.ask(store)
            if interruption is not None:
                interruption.look(store)
                if interruption.agreed:  # so all ranks live
                    terminated = None
            if terminated is not None and now - terminated > HURRY + 4 * self._interval:
                self._stop("stopped by SIGTERM; no other rank is known to have failed", 143)
        store.set(f"alive/{self._rank}", "")

    def _sign(self, store: Store) -> str:
        """The neighbour's last sign of life; '' before its first and after its last."""
        key = f"alive/{self._neighbour}"
        return store.get(key).decode() if store.check([key]) else ""

    def _signals(self) -> bytes:
        """Numbers of the signals that arrived while waiting for the next sign of life to be due."""
        pending = self._interruption is not None and self._interruption.pending
        ready, _, _ = select.select([self._wake_read], [], [], 0.05 if pending else self._interval)
        return os.read(self._wake_read, 64) if ready else b""

    def _stop(self, why: str, code: int) -> None:
        print(f"error P0505: {why}; rank {self._rank} stops, in {self.clock.doing}", file=sys.stderr, flush=True)
        if code == 1:
            self._outlast_others()
        os._exit(code)

    def _outlast_others(self) -> None:
        """Rank 0's process may hold the store, where the others have yet to read why."""
        if self._rank == 0:
            time.sleep(3 * self._interval)


def _process() -> str:
    """This process, as others on its machine can find it: the machine's boot, its space of process ids, its id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}:{os.getpid()}"
    except OSError:
        return "elsewhere"


def _lives(place: str, here: str) -> bool | None:
    """Whether a process of this machine is there; None for those of others."""
    machine, _, number = place.rpartition(":")
    if not machine or machine != here.rpartition(":")[0]:
        return None
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False
    except (OSError, IndexError):
        return None


def _store_holder() -> str:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return "the launcher, which holds the ranks' store,"
    return "rank 0, which holds the ranks' store,"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]
