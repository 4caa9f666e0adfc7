"""Failure detection: notices that another rank has died or was stopped, and ends this one with a message.

A thread of each rank writes a sign of life into the ranks' common store, watches its neighbour's, and looks for
failures that other ranks have noted there. It works while the main thread waits in a collective. On SIGTERM and SIGUSR1
it also agrees with the others on the last step, if the run can be continued.

A missing sign proves nothing: a call that holds Python's lock for a minute silences the thread. For a process on this
machine, the kernel knows its state; ranks that see a silent one running renew its sign for ranks elsewhere. Silence is
counted in seconds in which the listener itself runs, so a job that is suspended as a whole can continue as a whole.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from ..clock import Clock
from ..errors import PeerLost, UsageError, first_line, tell
from ..torch_private import clone_store
from .interruption import Interruption
from .processes import end_stopped, process_place, run_state, siblings
from .rendezvous import LauncherVariables, end_process, store_holder
from .signals import TERMINATING, Caught

INTERVAL = 1.0  # seconds between signs of life, except in very large worlds
SILENT = 3.0  # intervals without a sign after which a rank is examined
PATIENCE = 15.0  # seconds without a sign after which a stopped process counts as lost
AFAR = 22.0  # the same for a process on another machine, which may be stopped, or hold Python's lock
HURRY = 5.0  # the same after a connection has broken, or when the launcher stops all ranks

ABORTED = 5.0  # seconds for breaking off connections, which may also wait for peers

_FAILED, _SUSPECT = "failed", "suspect"
_NAMED = 4  # ranks that a message names
_ASKED = 256  # the most ranks in a world in which every rank may read the signs of all


@dataclass(slots=True)
class RankSigns:
    """This rank's knowledge about another rank."""

    sign: str = ""
    silent: float = 0.0  # seconds since the sign changed
    renewed: str = ""  # the sign that this rank has written on its behalf


class Watchdog:
    """A context around a rank's work; `clock` tells the main thread's activity, `caught` has its signals."""

    def __init__(
        self,
        store: Store,
        world: LauncherVariables,
        caught: Caught,
        clock: Clock,
        timeout: float,
        interruption: Interruption | None,
        leaving: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.store = store
        self._leaving = leaving  # called before this process ends from here
        self.clock = clock
        self._interruption = interruption
        self._patience = max(3 * INTERVAL, min(PATIENCE, timeout))
        self._afar = max(3 * INTERVAL, min(AFAR, timeout))
        self._timeout = timeout
        self._rank = world.rank
        self._size = world.size
        self._seen: dict[int, RankSigns] = {}
        self._interval = INTERVAL * max(1.0, world.size / 2048)
        self._caught = caught
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(clone_store(store),), daemon=True)
        self._turns = 0  # iterations of the thread's loop
        self._holder = ""  # the place of rank 0, if its process holds the store
        self._here = process_place()

    def __enter__(self) -> Watchdog:
        self._thread.start()
        threading.Thread(target=self._guard, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        alike = isinstance(error, UsageError) and error.alike
        if isinstance(error, PeerLost | DistError):
            # Most likely another rank failed: allow time to find out which, and let the thread report it.
            self._publish(_SUSPECT, "")
            time.sleep(HURRY + 5 * self._interval)
            self._note(
                f"rank {self._rank} lost its connection in {self.clock.doing}: {first_line(error)}{self.busy_ranks()}"
            )
            time.sleep(2 * self._interval)
        elif error is not None and not alike:
            why = (
                error.cause
                if isinstance(error, UsageError)
                else f"{kind.__name__ if kind else ''}: {first_line(error)}"
            )
            self._note(f"rank {self._rank} failed in {self.clock.doing}: {why}")
        self._done.set()
        self._caught.wake()
        self._thread.join()
        if alike and self._rank:
            time.sleep(self._interval)  # rank 0 reports it, since a launcher stops all ranks when the first one leaves
        elif error is not None and not alike:
            self._outlast_others()

    def busy_ranks(self) -> str:
        """The activities of ranks that do not wait for others, one of which may be the cause of the waiting."""
        if self._size > _ASKED:
            return ""
        found = []
        with suppress(RuntimeError):
            for rank in range(self._size):
                doing = self._sign(self.store, rank).partition(" ")[2].partition(" ")[2]
                if doing and " over " not in doing and rank != self._rank:
                    found.append(f"; rank {rank} is in {doing}")
        return "".join(found[:_NAMED])

    def _note(self, failure: str) -> None:
        """Report a failure to all ranks; only the first one counts."""
        self._publish(_FAILED, failure)

    def _publish(self, key: str, text: str) -> None:
        try:
            self.store.compare_set(key, "", text)
        except RuntimeError as error:
            tell(f"rank {self._rank}: cannot reach the other ranks' store: {first_line(error)}")

    def _run(self, store: Store) -> None:
        try:
            self._look_around(store)
        except RuntimeError as error:
            if not self._done.is_set():
                self._stop(f"{store_holder()} died ({first_line(error)})", 1)

    def _guard(self) -> None:
        """End this process if the store does not answer. Counts only seconds in which this process runs."""
        turns, seconds = 0, 0
        while not self._done.wait(1.0):
            seconds = seconds + 1 if turns == self._turns else 0
            turns = self._turns
            if seconds > self._patience + 2 * self._interval:
                # Without a store, each rank has to find out itself, before it ends the processes that others observe.
                found = {rank: place for rank, place in siblings().items() if run_state(place) == "stopped"}
                holder = run_state(self._holder) == "stopped"
                why = f"{store_holder()} {'stalls, stopped by a signal' if holder else 'does not answer'}"
                others = sorted(rank for rank, place in found.items() if place != self._holder)
                why += "".join(f", rank {rank} stalls, stopped by a signal" for rank in others[:_NAMED])
                self._stop(why, 1, stopped=(self._holder, *found.values()))

    def _look_around(self, store: Store) -> None:
        interruption = self._interruption
        beats, before = 0, time.monotonic()
        terminated: float | None = None
        while not self._done.is_set():
            beats += 1
            self._turns += 1
            store.set(f"alive/{self._rank}", f"{beats} {self._here} {self.clock.doing}")
            if store.check([_FAILED]):
                self._stop(store.get(_FAILED).decode(), 1)
            now = time.monotonic()
            lost = self.lost_ranks(store, now - before)
            before = now
            if not lost and self.clock.waited > self._timeout:  # on CPUs the transfer itself times out
                lost = f"rank {self._rank} has not moved for {self._timeout:g} s in {self.clock.doing}"
            if lost:
                store.compare_set(_FAILED, "", lost)
                continue
            for number in self._signals():
                if number == signal.SIGINT:
                    self._stop("interrupted", 130)
                elif number in TERMINATING and terminated is None:
                    # A launcher does this when a rank has died. Stay long enough to learn which one.
                    terminated = now
                    store.set(_SUSPECT, "")
                if number in (*TERMINATING, signal.SIGUSR1) and interruption is not None:
                    interruption.ask(store)
            if interruption is not None:
                interruption.look(store)
                if interruption.agreed:  # so all ranks are alive
                    terminated = None
            if terminated is not None and self._size == 1 and interruption is None:
                self._stop("stopped by SIGTERM", 143)
            if terminated is not None and now - terminated > HURRY + 4 * self._interval:
                self._stop("stopped by SIGTERM; no other rank is known to have failed", 143)
        store.set(f"alive/{self._rank}", "")

    def lost_ranks(self, store: Store, passed: float) -> str:
        """The lost ranks among those after this one; '' if there are none.

        `passed` are the seconds since the last check. More than two intervals are time in which this process did not
        run, so they do not count as silence of others. A silent rank watches nobody, so this rank also watches the
        rank behind it.
        """
        passed = min(passed, 2 * self._interval)
        if not self._holder and store_holder().startswith("rank 0"):
            self._holder = _place(self._sign(store, 0))
        hurry = store.check([_SUSPECT])
        lost: dict[int, str] = {}
        ranks = [(self._rank + distance) % self._size for distance in range(1, self._size)]
        for rank in ranks:
            seen = self.look_at(store, rank, passed)
            how = self._verdict(store, rank, seen, hurry, bool(lost))
            if how:
                lost[rank] = f"rank {rank} {how} (last seen in {seen.sign.split(' ', 2)[2]})"
            if seen.silent < SILENT * self._interval:
                break
        mate = self._rank - int(os.environ.get("LOCAL_WORLD_SIZE", "0")) + 1
        if os.environ.get("LOCAL_RANK") == str(self._rank - mate) and mate < self._rank and mate not in ranks[:1]:
            self._renew(store, mate, self.look_at(store, mate, passed))
        for rank in lost:
            end_stopped(_place(self._seen[rank].sign))
        more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
        return ", ".join(list(lost.values())[:_NAMED]) + more

    def look_at(self, store: Store, rank: int, passed: float) -> RankSigns:
        """The last sign of a rank, and the seconds since it changed; `passed` are those since the last check."""
        seen, sign = self._seen.setdefault(rank, RankSigns()), self._sign(store, rank)
        if sign and sign in (seen.sign, seen.renewed):
            seen.silent += passed
        else:
            seen.sign, seen.silent = sign, 0.0
        return seen

    def _verdict(self, store: Store, rank: int, seen: RankSigns, hurry: bool, another: bool) -> str:
        """How a rank was lost; '' if it is not lost, or has left regularly. After `another` lost rank, silence is
        sufficient evidence.
        """
        if not seen.sign:
            return ""
        found = run_state(_place(seen.sign))
        if found == "gone":
            return "died" if self._sign(store, rank) else ""  # a process that left regularly has deleted its sign
        if found == "stopped":
            patience = self._allowed_silence(self._patience, hurry, another)
            return "stalls, stopped by a signal" if seen.silent > patience else ""
        if found == "runs":
            self._renew(store, rank, seen)
            return "stalls" if seen.silent > self._timeout else ""
        patience = self._allowed_silence(self._afar, hurry, another)
        return f"died or stalls, without a sign of life for {seen.silent:.0f} s" if seen.silent > patience else ""

    def _allowed_silence(self, patience: float, hurry: bool, another: bool) -> float:
        return SILENT * self._interval if another else min(HURRY, patience) if hurry else patience

    def _renew(self, store: Store, rank: int, seen: RankSigns) -> None:
        """Renew the sign of a silent rank that runs on this machine, for ranks on other machines."""
        silent = SILENT * self._interval < seen.silent <= self._timeout
        if silent and run_state(_place(seen.sign)) == "runs":
            number, _, rest = seen.sign.partition(" ")
            seen.renewed = f"{number}+{seen.silent:.0f} {rest}"
            store.set(f"alive/{rank}", seen.renewed)

    def _sign(self, store: Store, rank: int) -> str:
        """A rank's latest sign of life; '' after it has left."""
        key = f"alive/{rank}"
        return store.get(key).decode() if store.check([key]) else ""

    def _signals(self) -> bytes:
        """The numbers of the signals that arrive before the next sign of life is due."""
        pending = self._interruption is not None and self._interruption.pending
        return self._caught.wait(0.05 if pending else self._interval)

    def _stop(self, why: str, code: int, *, stopped: Sequence[str] = ()) -> None:
        doing = self.clock.doing
        _break_off(self._leaving)
        # Rank 0's process may host the store, from which others still have to read the failure.
        linger = 3 * self._interval if stopped or (code == 1 and not self._rank) else 0.0
        end_process(why, self._rank, doing, code, linger=linger, stopped=stopped)

    def _outlast_others(self) -> None:
        """Wait for the others: rank 0's process may host the store, from which they still have to read the failure."""
        if self._rank == 0:
            time.sleep(3 * self._interval)


@contextmanager
def breaking_off() -> Iterator[list[Callable[[], None]]]:
    """A context that, on an error, calls the functions in its list, which break off connections that would block this
    process.
    """
    leaving: list[Callable[[], None]] = []
    try:
        yield leaving
    except BaseException:
        _break_off(leaving)
        raise


def _break_off(leaving: Sequence[Callable[[], None]]) -> None:
    """Break off connections without waiting long, ignoring failures, since the process ends afterwards."""

    def run() -> None:
        for each in leaving:
            with suppress(Exception):
                each()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(ABORTED)


def _place(sign: str) -> str:
    """The place of the process that wrote a sign."""
    return sign.split(" ", 2)[1] if sign else ""
