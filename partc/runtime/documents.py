"""Untrusted files: JSON text, checked against the frozen dataclass that declares its schema.

    @dataclass(frozen=True)
    class Entry:
        file: Annotated[str, file_name]
        sizes: tuple[Annotated[int, at_least(0)], ...]
        note: str = ""

    decoded(Entry, parsed(text))   # an Entry, or Malformed: "sizes[2] is -1, less than 0"

Fields without a default are required, and a document has no other fields. Annotations are checks: functions that return
a complaint, or ''. Numbers are finite, keys are unique, and the only conversion is from integers to floats.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import reprlib
import stat
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

T = TypeVar("T")
Check = Callable[[Any], str]  # returns a complaint about a value that can follow "is": "less than 0"; '' for none

LARGEST = 1 << 30  # the most bytes of a document
_INTEGERS = range(-(1 << 63), 1 << 64)
_LONGEST_NAME = 255


class Malformed(ValueError):
    """A file cannot be read, is not JSON, or does not match its schema. The message follows the file's name."""


def at_least(least: float) -> Check:
    return lambda value: "" if value >= least else f"less than {least}"


def at_most(most: float) -> Check:
    return lambda value: "" if value <= most else f"more than {most}"


def more_than(bound: float) -> Check:
    return lambda value: "" if value > bound else f"not more than {bound}"


def file_name(value: str) -> str:
    """Check that a value names a file in the document's own folder, without separators or `..`."""
    plain = value not in ("", ".", "..") and not set(value) & {"/", "\\", "\0"}
    return "" if plain and len(os.fsencode(_encodable(value))) <= _LONGEST_NAME else "no plain file name"


Natural = Annotated[int, at_least(0)]
Positive = Annotated[int, at_least(1)]
FileName = Annotated[str, file_name]


def path_of(text: str) -> Path:
    """A command line argument as a path. Raises Malformed if it cannot be a path."""
    try:
        if not text:
            raise ValueError("it is empty")
        os.stat(text)
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise Malformed(f"{_shown(text)} is not a path: {error.strerror}") from None
    except ValueError as error:
        raise Malformed(f"{_shown(text)} is not a path: {error}") from None
    return Path(text)


def regular(path: Path, *, within: Path | None = None) -> BinaryIO:
    """Open a regular file that lies in the folder `within`, links resolved. Raises Malformed and OSError."""
    if within is not None and not path.resolve().is_relative_to(within.resolve()):
        raise Malformed("is a link that leaves the folder")
    # Opening anything else may block until there is a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Malformed("is not a regular file")
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def contents(path: Path, *, within: Path | None = None, largest: int = LARGEST) -> bytes:
    """The bytes of a regular file. Raises Malformed."""
    try:
        with regular(path, within=within) as file:
            data = file.read(largest + 1)
    except Malformed:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # circular links, invalid file names
        raise Malformed(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > largest:
        raise Malformed(f"has more than {largest:,} bytes")
    return data


def parsed(data: bytes | str, *, finite: bool = True) -> Any:
    """The value of a JSON text. Raises Malformed. Python's dialect also allows NaN and Infinity."""
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        numbers: dict[str, Any] = {"parse_constant": _no_number, "parse_float": _finite} if finite else {}
        return json.loads(text, object_pairs_hook=_unique_keys, **numbers)
    except UnicodeDecodeError as error:
        raise Malformed(f"is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise Malformed("is nested too deeply") from None
    except ValueError as error:
        raise error if isinstance(error, Malformed) else Malformed(f"is not JSON: {error}") from None


def decoded(kind: type[T], found: object, *, loose: bool = False) -> T:
    """The value as the declared `kind`. Raises Malformed. `loose` documents may have additional fields."""
    result: T = _decoded(kind, found, "", loose)
    return result


def _decoded(kind: Any, found: object, place: str, loose: bool) -> Any:
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if kind is Any:
        return found
    if origin is Annotated:
        value = _decoded(arguments[0], found, place, loose)
        for check in arguments[1:]:
            complaint = check(value)
            if complaint:
                raise Malformed(f"{place or 'it'} is {_shown(found)}, {complaint}")
        return value
    if origin is Literal:
        if any(found == value and type(found) is type(value) for value in arguments):
            return found
        raise Malformed(f"{place or 'it'} is {_shown(found)}, none of {', '.join(map(repr, arguments))}")
    if origin in (typing.Union, types.UnionType):
        return _one_of(arguments, found, place, loose)
    if dataclasses.is_dataclass(kind):
        return _object(kind, _expected(dict, found, place), place, loose)
    if origin is tuple and arguments[1:] != (...,):
        values = _expected(list, found, place)
        if len(values) != len(arguments):
            raise Malformed(f"{place or 'it'} has {len(values)} items, not {len(arguments)}")
        return tuple(
            _decoded(each, value, f"{place}[{i}]", loose)
            for i, (each, value) in enumerate(zip(arguments, values, strict=True))
        )
    if origin in (tuple, list):
        items = [
            _decoded(arguments[0], value, f"{place}[{i}]", loose)
            for i, value in enumerate(_expected(list, found, place))
        ]
        return tuple(items) if origin is tuple else items
    if origin is dict:
        pairs = _expected(dict, found, place).items()
        return {key: _decoded(arguments[1], value, f"{place}[{_shown(key)}]", loose) for key, value in pairs}
    if kind is float:
        return _number(_expected((int, float), found, place), place)
    if kind is int and _expected(int, found, place) not in _INTEGERS:
        raise Malformed(f"{place or 'it'} is {_shown(found)}, which no integer of 64 bits is")
    return _expected(type(None) if kind is None else kind, found, place)


def _object(kind: Any, found: Mapping[str, object], place: str, loose: bool) -> Any:
    hints = _hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    for name in found:
        if name not in fields and not loose:
            raise Malformed(f"{place or 'it'} has a field {_shown(name)}, which is unknown")
    values = {}
    for name, field in fields.items():
        if name in found:
            values[name] = _decoded(hints[name], found[name], f"{place}.{name}" if place else name, loose)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise Malformed(f"{place or 'it'} has no {name}")
    return kind(**values)


def _one_of(kinds: tuple[Any, ...], found: object, place: str, loose: bool) -> Any:
    complaints = []
    for kind in kinds:
        try:
            return _decoded(kind, found, place, loose)
        except Malformed as error:
            complaints.append(str(error))
    raise Malformed(complaints[0] if found is not None else complaints[-1])


def _expected(kind: Any, found: Any, place: str) -> Any:
    if isinstance(found, kind) and (not isinstance(found, bool) or kind is bool):
        return found
    names = {dict: "an object", list: "a list", str: "text", int: "an integer", bool: "true or false"}
    name = names.get(kind, "null" if kind is type(None) else "a number")
    raise Malformed(f"{place or 'it'} is {_shown(found)}, not {name}")


def _number(found: float, place: str) -> float:
    try:
        value = float(found)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise Malformed(f"{place or 'it'} is {_shown(found)}, which is not finite")
    return value


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise Malformed(f"has {_shown(twice)} twice")
    return found


def _no_number(name: str) -> object:
    raise Malformed(f"has {name}, which is not a number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Malformed(f"has {_shown(text)}, which is out of range")
    return value


def _shown(found: object) -> str:
    """A value for an error message: short, on one line, printable everywhere."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    try:
        return short.repr(found)
    except (RecursionError, ValueError):  # ValueError: an integer with too many digits
        return f"a {type(found).__name__}"


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
