"""The environment's settings, read once: PARTC_DEBUG, PARTC_FUEL, PARTC_DISABLE and PARTC_CACHE."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from partc.errors import PartcError

# PARTC_DEBUG: each level prints what the lower ones do, to stderr.
PASSES, OP_COUNTS, IR, EMITTED, REWRITES = 1, 2, 3, 4, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`fuel` caps the number of optional rewrites of a process; `disabled` names passes to leave out.

    `cache` is the folder of traced programs: by default one among the user's caches, "" for none.
    """

    debug: int = 0
    fuel: int | None = None
    disabled: tuple[str, ...] = ()
    cache: str | None = None

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Settings:
        """Parse the environment. Raises PartcError P0701."""
        return cls(
            debug=_number(environment, "PARTC_DEBUG") or 0,
            fuel=_number(environment, "PARTC_FUEL"),
            disabled=tuple(name.strip() for name in environment.get("PARTC_DISABLE", "").split(",") if name.strip()),
            cache=environment.get("PARTC_CACHE"),
        )


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal():
        raise PartcError("P0701", f"{name}={text!r} is not a number", help=f"unset {name}, or give it 0 or more")
    return int(text)


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process."""
    return Settings.read(os.environ)


def tell(level: int, text: str) -> None:
    """Print to stderr if PARTC_DEBUG is at least `level`."""
    if settings().debug >= level:
        print(text, file=sys.stderr)
