"""Rendezvous: from the start of a process until all ranks share a store.

Ranks cannot watch each other yet (see watchdog.py). Each one observes the processes that its own launcher has started
on its machine, reports after a while for which rank it waits, and gives up after `timeout`.
"""

from __future__ import annotations

import datetime
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..errors import UsageError, first_line, tell
from ..torch_private import connected_store, lone_store
from .processes import end_stopped, process_place, run_state, siblings
from .signals import TERMINATING, Caught

SPEAK = 20.0  # seconds after which a rank reports for which rank it waits
STOPPED = 15.0  # seconds after which a stopped process counts as failed
HURRY = 5.0  # seconds in which a rank finds out why its launcher stops all ranks
ANSWER = 10.0  # seconds for making a connection
LOOK = 2.0  # seconds between checks for missing ranks

_OPEN = 10  # the most ranks that a message names
_ALL = 64  # the most ranks in a world in which every rank may query all others


@dataclass(frozen=True, slots=True)
class LauncherVariables:
    """The launcher's variables: this rank, the number of ranks, and the address of rank 0."""

    rank: int
    size: int
    address: str = ""
    port: int = 0

    @property
    def hosts(self) -> bool:
        """Whether this process hosts the ranks' store."""
        return self.rank == 0 and not launcher_holds_store()


def world_size() -> int:
    """The number of started processes. Raises UsageError P0536."""
    return _number("WORLD_SIZE", 1, 1, 1 << 24)


def world() -> LauncherVariables:
    """This process's world. Raises UsageError P0536."""
    size = world_size()
    if size == 1:
        return LauncherVariables(0, 1)
    address = os.environ.get("MASTER_ADDR", "")
    if not address:
        raise _environment("MASTER_ADDR is not set")
    return LauncherVariables(_number("RANK", None, 0, size - 1), size, address, _number("MASTER_PORT", None, 1, 65535))


def launcher_holds_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_holder() -> str:
    return ("the launcher" if launcher_holds_store() else "rank 0") + ", which holds the ranks' store,"


def common_store(world: LauncherVariables, timeout: float, caught: Caught) -> Store:
    """Wait until all ranks have arrived; returns their common store. Raises UsageError P0536; exits if a rank cannot
    come.
    """
    return lone_store() if world.size == 1 else WatchedStore(world, timeout, caught).store()


class WatchedStore:
    """A connection in progress: a thread talks to the store, which may not answer, while the main thread watches for
    missing ranks.
    """

    def __init__(self, world: LauncherVariables, timeout: float, caught: Caught) -> None:
        self._world = world
        self._timeout = timeout
        self._caught = caught
        self._began = time.monotonic()
        self._spoken = False
        self._signals = b""  # signals that the next listener has to handle
        self._terminated: float | None = None
        self._known: dict[int, str] = {}  # rank -> place of a sibling
        self._stopped: dict[int, float] = {}  # rank -> seconds in which this process ran and the sibling was stopped
        self._looked = self._began
        self._waiting = f"{store_holder()} does not answer"
        self._missed = self._began  # the time at which `_waiting` was determined
        self._found: Store | None = None
        self._error: Exception | None = None

    def store(self) -> Store:
        thread = threading.Thread(target=self._join, daemon=True)
        thread.start()
        while thread.is_alive():
            self._pause()
        if isinstance(self._error, DistError):
            self._leave(f"{store_holder()} died ({first_line(self._error)})", 1)
        if self._error is not None:
            raise self._error
        assert self._found is not None
        self._caught.requeue(self._signals)
        return self._found

    def _join(self) -> None:
        try:
            store = self._open() if self._world.hosts else self._reached()
            self._found = PrefixStore(self.session(store), store)
        except Exception as error:  # the main thread raises it
            self._error = error

    def _open(self) -> Store:
        try:
            return self._connected()
        except DistError as error:
            cause = f"rank 0 cannot open port {self._world.port} for the ranks' store: {first_line(error)}"
            if "EADDRINUSE" in str(error):
                cause = f"port {self._world.port}, on which rank 0 is to open the ranks' store, is in use"
            raise UsageError("P0536", cause, "set MASTER_PORT to a free port, the same for all ranks") from None

    def _reached(self) -> Store:
        """Connect to the store, which another process hosts or is about to host."""
        address, port = self._world.address, self._world.port
        while True:
            try:
                socket.create_connection((address, port), timeout=ANSWER).close()
                self._waiting = f"{store_holder()} does not answer at {address}:{port}"
                return self._connected()
            except (OSError, UnicodeError) as error:
                why = getattr(error, "strerror", None) or error
                self._waiting = f"{store_holder()} is not there ({address}:{port}: {why})"
            except DistError:
                self._waiting = f"what answers at {address}:{port} is not the ranks' store"
            time.sleep(0.2)

    def _connected(self) -> Store:
        limit = datetime.timedelta(seconds=self._timeout)
        place = self._world
        return connected_store(place.address, place.port, place.size, limit, master=place.hosts)

    def session(self, store: Store) -> str:
        """A name that is unique to the ranks of this start.

        A launcher's store outlives restarts, with the entries of ended ranks, and the agents of several nodes may count
        restarts differently. Rank 0 creates a name; the others count themselves and wait for its answer. Under the name
        of a rank 0 that has ended, nobody answers, or the count is already complete.
        """
        size, rank = self._world.size, self._world.rank
        self._waiting = "rank 0 has not come"
        if rank == 0:
            # With this key, NCCL's monitors of an earlier start tell others to write dumps.
            store.delete_key("exception_dump")
            name = uuid.uuid4().hex
            store.set(f"{name}/alive/0", _first_sign())
            store.set("session", name)
            while not store.check([f"{name}/full"]):
                self._look_for_missing(store, name)
            store.set(f"{name}/begins", "")
            return name
        tried = ""
        fresh = False
        while True:
            if store.check(["session"]):
                name = store.get("session").decode()
                if name != tried:
                    tried = name
                    if store.add(f"{name}/is/{rank}", 1) > 1:
                        help = "give each process its own RANK, and each job its own MASTER_PORT"
                        raise UsageError("P0536", f"two processes are rank {rank}", help)
                    store.set(f"{name}/alive/{rank}", _first_sign())
                    count = store.add(f"{name}/count", 1)
                    fresh = count < size
                    if count == size - 1:
                        store.set(f"{name}/full", "")
                if fresh and store.check([f"{name}/begins"]):
                    return name
            self._look_for_missing(store, tried if fresh else "")

    def _look_for_missing(self, store: Store, name: str) -> None:
        """Report missing ranks occasionally; otherwise pause briefly."""
        size = self._world.size
        time.sleep(0.02 * max(1.0, size / 256))
        names = self._world.rank == 0 or size <= _ALL  # in larger worlds this would overload the store
        if name and names and time.monotonic() - self._missed > LOOK:
            self._waiting = _not_there(store, name, size)
            self._missed = time.monotonic()

    def _pause(self) -> None:
        """Wait briefly, then check whether the missing ranks can still come."""
        signals = self._caught.wait(0.02)
        self._signals += signals
        for number in signals:
            if number == signal.SIGINT:
                self._leave("interrupted", 130)
            if number in TERMINATING and self._terminated is None:
                self._terminated = time.monotonic()
        now = time.monotonic()
        if now - self._looked > 0.5:
            self._look_around(min(now - self._looked, 1.0))
            self._looked = now
        if self._terminated is not None and now - self._terminated > HURRY:
            self._leave(f"stopped by SIGTERM while {self._waiting}", 143)
        if now - self._began > self._timeout:
            self._leave(f"{self._waiting} after {self._timeout:g} s", 1)
        if now - self._began > SPEAK and not self._spoken:
            self._spoken = True
            rank = self._world.rank
            if rank == 0 or os.environ.get("LOCAL_RANK", str(rank)) in ("0", "1"):
                tell(f"rank {rank} waits: {self._waiting}; it gives up after {self._timeout:g} s (--timeout)")

    def _look_around(self, passed: float) -> None:
        """Exit if a process that the launcher has started on this machine has ended or was stopped."""
        started = siblings()
        self._known |= started
        first = self._world.rank - int(os.environ.get("LOCAL_RANK", "0"))
        here = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "0")))
        # Torchrun starts all processes before it watches them.
        if "TORCHELASTIC_RUN_ID" in os.environ and self._world.rank in started:
            for rank in here:
                if rank not in self._known:
                    self._leave(f"rank {rank} died before it joined the others", 1)
        for rank, place in self._known.items():
            found = run_state(place)
            if found == "gone" and rank != self._world.rank:
                self._leave(f"rank {rank} died before it joined the others", 1)
            self._stopped[rank] = self._stopped.get(rank, 0.0) + passed if found == "stopped" else 0.0
            if self._stopped[rank] > STOPPED:
                why = f"rank {rank} stalls: it was stopped by a signal before it joined the others"
                self._leave(why, 1, stopped=(place,))

    def _leave(self, why: str, code: int, *, stopped: Sequence[str] = ()) -> NoReturn:
        linger = 2.0 if self._world.hosts or stopped else 0.0
        end_process(why, self._world.rank, "the meeting of all ranks", code, linger=linger, stopped=stopped)


def end_process(
    why: str, rank: int, doing: str, code: int, *, linger: float = 0.0, stopped: Sequence[str] = ()
) -> NoReturn:
    """End this process, whatever its main thread is doing, and stopped siblings; wait `linger` seconds first, for the
    other ranks.
    """
    tell(f"error P0505: {why}; rank {rank} stops, in {doing}")
    time.sleep(linger)
    for place in stopped:
        end_stopped(place)
    os._exit(code)


def _first_sign() -> str:
    return f"0 {process_place()} start-up"


def _not_there(store: Store, name: str, size: int) -> str:
    if not name:
        return "rank 0 has not come"
    missing = [rank for rank in range(size) if not store.check([f"{name}/alive/{rank}"])]
    if not missing:
        return "rank 0 has not answered"
    more = f" and {len(missing) - _OPEN} more" if len(missing) > _OPEN else ""
    ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing[:_OPEN]))}{more}"
    return f"{ranks} {'has' if len(missing) == 1 else 'have'} not come"


def _number(name: str, default: int | None, least: int, most: int) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise _environment(f"{name} is not set")
    if not text.isdecimal() or not least <= int(text) <= most:
        raise _environment(f"{name} is {text!r}, and must be a number from {least} to {most}")
    return int(text)


def _environment(cause: str) -> UsageError:
    help = "start with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process"
    return UsageError("P0536", cause, help)
