"""The locations of partc, torch, the standard library and installed packages, as opposed to the user's files."""

from __future__ import annotations

import functools
import importlib.util
import site
import sys
import sysconfig
from pathlib import Path
from types import FrameType

from partc.errors import Source


@functools.cache
def is_machinery(filename: str) -> bool:
    """Whether a file of a traceback belongs to partc, torch or the standard library."""
    if filename.startswith("<"):
        return True
    path = Path(filename).resolve()
    if _is_below(path, _site_packages()):
        return _is_below(path, _machinery())
    return _is_below(path, _machinery()) or _is_below(path, _standard_library())


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, from this one outwards, that is not machinery."""
    while frame is not None and is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


@functools.cache
def is_installed(path: Path) -> bool:
    """Whether a file belongs to the standard library, to partc or to an installed package."""
    path = path.resolve()
    return _is_below(path, _site_packages()) or _is_below(path, _standard_library()) or _is_below(path, _machinery())


@functools.cache
def shortened(filename: str) -> str:
    """The path of an installed file, starting at its package, which is the same on every machine; other paths
    unchanged.
    """
    path = Path(filename)
    for folder in _site_packages():
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return filename


def line_of(frame: FrameType) -> Source:
    """The line that a frame runs."""
    return Source(file=shortened(frame.f_code.co_filename), line=frame.f_lineno)


def tested_place(frame: FrameType | None) -> tuple[str, int] | None:
    """The innermost function outside machinery, and the line that it runs: both are the same in a copy of the file."""
    frame = user_frame(frame)
    return None if frame is None else (frame.f_code.co_name, frame.f_lineno)


def _is_below(path: Path, folders: tuple[Path, ...]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


@functools.cache
def _machinery() -> tuple[Path, ...]:
    """The folders of partc and of torch. partc's own folders may be links to others next to it."""
    own = Path(__file__).parent
    linked = [own / name for name in ("passes", "codegen", "templates")]
    found = importlib.util.find_spec("torch")
    torch = [Path(folder) for folder in (found.submodule_search_locations or ())] if found else []
    return tuple(folder.resolve() for folder in (own, *linked, *torch))


@functools.cache
def _site_packages() -> tuple[Path, ...]:
    """The folders of installed packages, as named and with links resolved.

    `pip install --target` fills other folders of the search path.
    """
    targets = [folder for folder in sys.path if folder and any(Path(folder).glob("*.dist-info/RECORD"))]
    named = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages(), *targets]
    if site.ENABLE_USER_SITE:
        named.append(site.getusersitepackages())
    return tuple(dict.fromkeys(path for name in named for path in (Path(name), Path(name).resolve())))


@functools.cache
def _standard_library() -> tuple[Path, ...]:
    """The folders of the standard library. Installed packages may lie in folders below them."""
    return tuple(Path(sysconfig.get_path(key)).resolve() for key in ("stdlib", "platstdlib"))
