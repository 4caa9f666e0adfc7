"""The user's pins: `--shard 'blocks.*.attn.wq.weight=[@tp, _]'`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from partc.errors import PartcError
from partc.layout import Placement, Replicated, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A user's wish: the placement of every value or parameter whose name matches."""

    pattern: str
    text: str

    @classmethod
    def parse(cls, text: str) -> Pin:
        """Read `GLOB=LAYOUT`. Raises PartcError P0301."""
        pattern, equals, layout = text.partition("=")
        if not equals or not pattern.strip():
            raise PartcError("P0301", f"--shard {text!r} is not GLOB=LAYOUT", help="for example '*.wq.weight=[@tp, _]'")
        return cls(pattern=pattern.strip(), text=layout.strip())

    def matches(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern)

    def placement(self, axis: str) -> Placement:
        """Where the pin cuts on this axis: `[_, 4096@tp]`, `[3 * 64@tp, _]`, `[_, _]`. Raises PartcError P0301."""
        match = re.fullmatch(r"\s*\[(.*)\]\s*", self.text)
        if not match:
            raise PartcError(
                "P0301", f"layout {self.text!r} of --shard does not parse", help="write one entry a dimension: [@tp, _]"
            )
        found: Placement = Replicated()
        for dim, part in enumerate(match.group(1).split(", ")):
            outer = 1
            for sub in re.split(r"\s*[·*]\s*", part.strip()):
                piece = re.fullmatch(r"(\d+|_)?(?:@([\w,]+))?", sub)
                if not piece:
                    raise PartcError(
                        "P0301",
                        f"layout {self.text!r} of --shard does not parse at {sub!r}",
                        help="write sizes, _ or *",
                    )
                if piece.group(2) and axis in piece.group(2).split(","):
                    found = Shard(dim, outer)
                outer *= int(piece.group(1)) if piece.group(1) and piece.group(1) != "_" else 1
        return found
