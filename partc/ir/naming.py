"""Names: of gradients, unique ones, paths of modules, and lists of them in sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

_NUMBERS = re.compile(r"(?<![^.])[0-9]+(?![^.])")  # whole parts of a path
# Suffixes of the names of values that passes derive from others.
WHOLE = "_whole"  # the value in its shape before a view joined dimensions
PRODUCT = "_product"  # the product of a linear operation, before its bias is added
EXTENDED, ZIGZAG, COUNTED = "_extended", "_zigzag", "_counted"  # sequences that are padded or reordered
_GRADIENT = "grad_"  # prefix of the gradients' names


def gradient_name(value: str) -> str:
    """The name of a value's gradient."""
    return f"{_GRADIENT}{value}"


def is_gradient(name: str) -> bool:
    """Whether a name is that of a gradient; no other value has one of these names."""
    return name.startswith(_GRADIENT)


def gradient_owner(name: str) -> str:
    """The name of the value whose gradient has this name; other names unchanged."""
    return name.removeprefix(_GRADIENT)


def unreserved(name: str) -> str:
    """The name, changed if it looks like the name of a gradient."""
    return f"own_{name}" if is_gradient(name) else name


def is_number(part: str) -> bool:
    """Whether a part of a module's path is an index into a list."""
    return part.isascii() and part.isdigit()


@lru_cache(1 << 16)
def numbered(path: str) -> tuple[tuple[str | None, ...], tuple[int, ...]]:
    """The parts of a path, None for its indices into lists; and these indices."""
    parts = path.split(".")
    kept = tuple(None if is_number(part) else part for part in parts)
    return kept, tuple(int(part) for part, name in zip(parts, kept, strict=True) if name is None)


@lru_cache(1 << 16)
def starred(path: str) -> str:
    """A path with `*` for its indices into lists."""
    return _NUMBERS.sub("*", path)


def unique(stem: str, taken: set[str]) -> str:
    """`stem`, or `stem_2`, `stem_3`, …; the name is added to `taken`."""
    name, count = stem, 1
    while name in taken:
        count += 1
        name = f"{stem}_{count}"
    taken.add(name)
    return name


def listed(words: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`, each word once; empty words are left out."""
    unique = list(dict.fromkeys(filter(None, words)))
    return f"{', '.join(unique[:-1])} and {unique[-1]}" if len(unique) > 1 else "".join(unique)
