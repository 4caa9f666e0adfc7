"""What the user decides about a compile, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from partc.errors import PartcError
from partc.mesh import Mesh
from partc.pins import Pin

SCHEDULES = ("1f1b", "gpipe")
PRECISIONS = ("fp32", "fp64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The mesh and how to use it."""

    mesh: Mesh
    microbatches: int = 1
    schedule: str = "1f1b"
    precision: str = "fp32"
    seed: int = 0
    shard: tuple[str, ...] = ()

    @classmethod
    def checked(
        cls, *, mesh: str | Mesh, microbatches: int, schedule: str, precision: str, seed: int, shard: Sequence[str]
    ) -> Options:
        """Raises PartcError P0101 to P0104, P0301, P0404 and P0405."""
        parsed = mesh if isinstance(mesh, Mesh) else Mesh.parse(mesh)
        if microbatches < 1:
            raise PartcError("P0405", f"there cannot be {microbatches} microbatches", help="give 1 or more")
        for word, given, known in (("schedule", schedule, SCHEDULES), ("precision", precision, PRECISIONS)):
            if given not in known:
                raise PartcError("P0404", f"there is no {word} {given!r}", help=f"choose from {', '.join(known)}")
        for text in shard:
            Pin.parse(text)
        return cls(
            mesh=parsed,
            microbatches=microbatches,
            schedule=schedule,
            precision=precision,
            seed=seed,
            shard=tuple(shard),
        )

    @property
    def pins(self) -> tuple[Pin, ...]:
        return tuple(Pin.parse(text) for text in self.shard)

    @property
    def for_passes(self) -> dict[str, Any]:
        """By the names under which passes take them."""
        return {"pins": self.pins, "kind": self.schedule}
