"""Writing a package's folder atomically, and never over files that partc did not write."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from partc.errors import PartcError
from partc.runtime.documents import Malformed, contents, parsed
from partc.runtime.whole_files import write_whole

MANIFEST = "files.sha256"  # digests of the files that partc wrote, in the format of `sha256sum -c`
PAGE = '<meta name="generator" content="partc">'  # the mark of a report
_CACHES = "__pycache__"


def check_target(directory: Path) -> None:
    """Check that the folder may be replaced.

    Raises PartcError P0601 if it is not partc's, P0602 if it is unusable, and P0606 if it was changed by hand.
    """
    try:
        _check_target(directory)
    except (OSError, RuntimeError, ValueError) as error:  # cycles of links, names that no file can have
        raise _unwritable(directory, error) from error


def _check_target(directory: Path) -> None:
    resolved = directory.resolve()
    if resolved == resolved.parent:
        raise PartcError("P0601", f"{directory} is the root of the file system", help="name another with -o")
    if not directory.exists() and not directory.is_symlink():
        return
    if not directory.is_dir():
        raise PartcError("P0601", f"{directory} is not a folder", help="name another with -o, or remove it")
    if not any(directory.iterdir()):
        return
    if not _is_package(directory):
        raise PartcError(
            "P0601",
            f"{directory} holds files that partc did not write",
            help="name another folder with -o, or remove this one",
        )
    for name, digest in _manifest(directory).items():
        path = directory / name
        if path.is_symlink() or (path.is_file() and _digest(path.read_bytes()) != digest):
            raise PartcError(
                "P0606",
                f"{path} has been changed since partc wrote it",
                help="compile to another folder with -o, or remove the file",
            )


def write(files: Iterable[tuple[str, str | bytes]], directory: Path) -> Path:
    """Write a package and return its folder.

    The package is written next to its final place and moved there when complete; until then an older package is
    unchanged. Then the older package's files are removed; a user's files among them stay. Raises PartcError P0601,
    P0602 and P0606.
    """
    check_target(directory)
    target = directory.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise _unwritable(target, error) from error
    new, old = aside / "new", aside / "old"
    try:
        _write_all(files, new)
        if target.exists():
            _keep_others(target, new)
            target.rename(old)
        new.rename(target)
    except OSError as error:
        raise _unwritable(target, error) from error
    finally:
        if old.exists() and not target.exists():  # a run was stopped between the two moves
            old.rename(target)
        shutil.rmtree(aside, ignore_errors=True)
    return directory


def write_page(text: str, path: Path, *, mark: str = PAGE, option: str = "--html") -> None:
    """Write a report. It replaces nothing but an older report, which contains `mark`. Raises PartcError P0601 and
    P0602.
    """
    try:
        if path.exists() and mark.encode() not in contents(path):
            raise PartcError("P0601", f"{path} is a file that partc did not write", help=f"name another with {option}")
        write_whole(path, text)
    except (Malformed, OSError) as error:
        why = getattr(error, "strerror", None) or f"it {error}"
        help = f"give a file in a folder that exists, with room, to {option}"
        raise PartcError("P0602", f"{path} cannot be written: {why}", help=help) from error


def _write_all(files: Iterable[tuple[str, str | bytes]], folder: Path) -> None:
    folder.mkdir()
    made = {folder}
    lines = []
    for name, content in files:
        path = folder / name
        if path.parent not in made:
            path.parent.mkdir(parents=True, exist_ok=True)
            made.add(path.parent)
        data = content.encode() if isinstance(content, str) else content
        path.write_bytes(data)
        lines.append(f"{_digest(data)}  {name}\n")
    (folder / MANIFEST).write_text("".join(lines))


def _keep_others(old: Path, new: Path) -> None:
    """Copy the user's own files from the old folder to the new one: logs, checkpoints, notes."""
    ours = {*_manifest(old), MANIFEST, "plan.json"}
    for root, folders, names in os.walk(old):
        folders[:] = [name for name in folders if name != _CACHES]
        for name in names:
            relative = PurePosixPath((Path(root) / name).relative_to(old).as_posix())
            if str(relative) not in ours and not (new / relative).exists():
                (new / relative).parent.mkdir(parents=True, exist_ok=True)
                _link(old / relative, new / relative)


def _link(source: Path, target: Path) -> None:
    """Hard-link the file under a second name, since the first will be removed. Copy it if links do not work."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _is_package(directory: Path) -> bool:
    try:
        plan = parsed(contents(directory / "plan.json"))
    except Malformed:
        return False
    return isinstance(plan, dict) and isinstance(plan.get("partc"), int)


def _manifest(directory: Path) -> dict[str, str]:
    """The digests of the files that partc wrote, by name. Raises PartcError P0606 for paths outside the folder."""
    try:
        lines = contents(directory / MANIFEST, within=directory).decode().splitlines()
    except (Malformed, UnicodeDecodeError):
        return {}
    pairs = (line.partition("  ") for line in lines)
    listed = {name: digest for digest, found, name in pairs if found}
    resolved = functools.cache(Path.resolve)  # most files share their folders
    for name in listed:
        if not _is_inside(directory, name, resolved):
            raise PartcError(
                "P0606",
                f"{directory / MANIFEST} lists {name!r}, which is not in the folder",
                help="compile to another folder with -o, or remove the file",
            )
    return listed


def _is_inside(directory: Path, name: str, resolved: Callable[[Path], Path]) -> bool:
    """Whether a listed name is a file inside the folder that is reached without symbolic links."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name or not path.parts:
        return False
    return resolved((directory / path).parent) == resolved(directory) / path.parent


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _unwritable(target: Path, error: Exception) -> PartcError:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return PartcError("P0602", f"{target} cannot be written: {reason}", help="give a writable folder with -o")
