"""The errors that end a rank: wrong use of the package, failures of other ranks or of this machine."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from .clock import Clock


class UsageError(Exception):
    """Wrong use of the package: a code, one sentence of cause, one of help.

    `alike`: every rank raises the same error, so that no single rank is to blame.
    """

    def __init__(self, code: str, cause: str, help: str, *, alike: bool = False, exit_code: int = 2) -> None:
        super().__init__(f"error {code}: {cause}\n  help: {help}")
        self.code = code
        self.cause = cause
        self.help = help
        self.alike = alike
        self.exit_code = exit_code


class PeerLost(RuntimeError):
    """A connection to another rank broke, or timed out."""


def shown(text: str) -> str:
    """The text on one line, with control characters escaped: names in it may contain any character."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def tell(text: str) -> None:
    """Print lines to stderr, with control characters escaped. A closed terminal does not end the training."""
    with suppress(OSError):
        print("\n".join(map(shown, text.split("\n"))), file=sys.stderr, flush=True)


@contextmanager
def writing(path: Path, rank: int) -> Iterator[None]:
    """Raise UsageError P0538 if a file of the run cannot be written."""
    try:
        yield
    except OSError as error:
        cause = f"rank {rank} cannot write {path}: {error.strerror or error}"
        raise UsageError("P0538", cause, "name a place with room that this rank can write to") from error


@contextmanager
def enough_memory(who: str, clock: Clock) -> Iterator[None]:
    """Raise UsageError P0537 if this machine or its GPU runs out of memory."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not _out_of_memory(error):
            raise
        why = first_line(error)
        rows = f" ({clock.rows})" if clock.rows else ""
        cause = f"{who} has not enough memory in {clock.doing}{rows}{f': {why}' if why else ''}"
        help = (
            "`partc memory` says what ranks hold; more ranks, --zero, --recompute or more microbatches need less each"
            + ("; --expert-capacity bounds the rows of experts" if clock.rows else "")
        )
        raise UsageError("P0537", cause, help, exit_code=1) from error


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, without the C++ source location of torch's exceptions."""
    return re.sub(r"^\[[^]]*\] ", "", str(error).strip().partition("\n")[0])[:200]


def _out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    said = ("can't allocate memory", os.strerror(errno.ENOMEM), "can't start new thread", "bad_alloc")
    return any(words in str(error) for words in said)
