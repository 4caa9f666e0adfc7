"""The bound of an expert's rows, and the scope that it counts in."""

from __future__ import annotations

import math
from dataclasses import dataclass

from partc.errors import PartcError

SCOPES = ("sequence", "microbatch")


@dataclass(frozen=True, slots=True)
class Capacity:
    """An expert takes `factor` times its even share of the rows of a scope, rounded up."""

    factor: float
    scope: str = SCOPES[0]

    def __str__(self) -> str:
        return f"{self.factor:g}@{self.scope}"

    @classmethod
    def parse(cls, text: str) -> Capacity:
        """Parse "1.25" or "1.25@microbatch". Raises PartcError P0109."""
        factor, _, scope = text.partition("@")
        try:
            found = cls(float(factor), scope or SCOPES[0])
        except ValueError:
            found = cls(0.0)
        if not 0 < found.factor < math.inf:
            raise PartcError(
                "P0109",
                f"--expert-capacity {text} is not a positive number",
                help="give one such as 1.25, or 1.25@sequence",
            )
        if found.scope not in SCOPES:
            raise PartcError(
                "P0109",
                f"--expert-capacity {text}: {found.scope} is not a scope that every mesh has",
                help=f"count rows by {' or by '.join(SCOPES)}: on other meshes a rank would drop other rows",
            )
        return found
