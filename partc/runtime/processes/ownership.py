"""A file lock with which only one run at a time saves into a folder. The kernel releases it when a process ends.

Every rank holds the lock, so that no other run begins while a rank of a killed run may still complete a checkpoint.
Rank 0 takes the lock exclusively, notifies the others, and then shares it with them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..documents import Malformed, decoded, parsed
from ..errors import UsageError
from .agreement import Together

NAME = ".lock"
PATIENCE = 30.0  # seconds within which all ranks of a run end after one was killed
_TURN = 0.1
_LONGEST = 4096  # bytes of the lock file
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
_ALONE, _SHARED = fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_SH | fcntl.LOCK_NB


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owner:
    """The contents of the lock file: the location of rank 0 of the run that holds or held the lock."""

    host: str
    pid: int


def claim_folder(folder: Path, together: Together, *, timeout: float, say: Callable[[str], None]) -> Callable[[], None]:
    """Make this the only run that saves into `folder`; returns the function that ends this.

    Waits for another run's ranks, which may be about to end. Raises UsageError P0526 and P0539 on all ranks.
    """
    descriptor, problem, code = -1, "", "P0526"
    try:
        if together.rank == 0:
            descriptor = _opened(folder)
            # Less than the time for which the others wait for rank 0.
            if _taken_alone(descriptor, folder, min(PATIENCE, timeout / 2), say):
                _lock(descriptor, _SHARED)  # before notifying the others, which share it
            else:
                problem, code = f"{_named(descriptor)} saves into {folder}", "P0539"
    except BlockingIOError:  # changing an exclusive lock to a shared one releases it in between
        problem, code = f"{_named(descriptor)} saves into {folder}", "P0539"
    except OSError as error:
        problem = f"rank {together.rank} cannot write a checkpoint in {folder}: {error.strerror}"
    code, _, problem = together.broadcast(f"{code} {problem}").partition(" ")
    if not problem:
        mine = ""
        try:
            if together.rank:
                descriptor = _opened(folder)
                _lock(descriptor, _SHARED)
        except BlockingIOError:
            mine = f"P0539 {_named(descriptor)} saves into {folder}"
        except OSError as error:
            mine = f"P0526 rank {together.rank} cannot write a checkpoint in {folder}: {error.strerror}"
        code, _, problem = together.first_problem(mine).partition(" ")
    if problem:
        if descriptor >= 0:
            os.close(descriptor)
        help = "give --save a folder with room, which all ranks can write to"
        if code == "P0539":
            help = "wait for it or stop it, or save in another folder"
        raise UsageError(code, problem, help, alike=True)
    return lambda: os.close(descriptor)


def _opened(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    # A symbolic link could point to any file, which would be overwritten.
    return os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _taken_alone(descriptor: int, folder: Path, patience: float, say: Callable[[str], None]) -> bool:
    """Try to get the exclusive lock within `patience` seconds and write the owner into the file; returns whether it
    succeeded.
    """
    deadline, reported = time.monotonic() + patience, False
    while True:
        try:
            if not _lock(descriptor, _ALONE):
                say(f"{folder} cannot be locked: see that no other run saves there")
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            if not reported:
                say(f"waiting for {_named(descriptor)}, which saves into {folder}, to end")
                reported = True
            time.sleep(_TURN)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0)
    return True


def _lock(descriptor: int, how: int) -> bool:
    """Lock the file; returns whether the file system supports locks. Raises BlockingIOError if another run holds the
    lock.
    """
    try:
        fcntl.flock(descriptor, how)
        return True
    except OSError as error:
        if error.errno in _TAKEN:
            raise BlockingIOError(error.errno, error.strerror) from None
        if error.errno in (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL):
            return False
        raise


def _named(descriptor: int) -> str:
    try:
        owner = decoded(_Owner, parsed(os.pread(descriptor, _LONGEST, 0)))
    except (Malformed, OSError):
        return "another run"
    return f"another run (process {owner.pid} on {owner.host!r})"
