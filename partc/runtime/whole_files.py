"""Files that are written completely or not at all: after a full disk or a kill, the old file or none remains."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A context with a temporary file that replaces `path` when it is written; after an error it is removed.

    A link still points to its file afterwards, and an existing file keeps its permissions. Raises OSError, also for
    folders, pipes and devices.
    """
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    there = target.exists()
    if there and not target.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if there:
        target.open("ab").close()  # raises for a read-only file
    aside = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with aside.open("xb") as file:
            if there:
                shutil.copymode(target, aside)
            yield file
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text in UTF-8. Raises OSError."""
    with replacing(path) as file:
        file.write(text.encode())
