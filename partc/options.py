"""What the user decides about a compile, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from partc.errors import PartcError
from partc.mesh import PIPELINE_AXIS, Mesh
from partc.pins import Pin
from partc.schedules import SCHEDULES, ScheduleKind, stage_ranks

PRECISIONS = ("fp32", "fp64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The mesh and how to use it."""

    mesh: Mesh
    microbatches: int = 1
    schedule: str = "1f1b"
    virtual_stages: int | None = None  # on each pipeline rank; None is what the schedule likes
    precision: str = "fp32"
    seed: int = 0
    shard: tuple[str, ...] = ()

    @classmethod
    def checked(
        cls,
        *,
        mesh: str | Mesh,
        microbatches: int,
        schedule: str,
        precision: str,
        seed: int,
        shard: Sequence[str],
        virtual_stages: int | None = None,
    ) -> Options:
        """Raises PartcError P0101 to P0104, P0301 and P0404 to P0406."""
        parsed = mesh if isinstance(mesh, Mesh) else Mesh.parse(mesh)
        if microbatches < 1:
            raise PartcError("P0405", f"there cannot be {microbatches} microbatches", help="give 1 or more")
        for word, given, known in (("schedule", schedule, SCHEDULES), ("precision", precision, PRECISIONS)):
            if given not in known:
                raise PartcError("P0404", f"there is no {word} {given!r}", help=f"choose from {', '.join(known)}")
        for text in shard:
            Pin.parse(text)
        options = cls(
            mesh=parsed,
            microbatches=microbatches,
            schedule=schedule,
            virtual_stages=virtual_stages,
            precision=precision,
            seed=seed,
            shard=tuple(shard),
        )
        _ = options.places  # raises what is wrong with the number of stages
        return options

    @property
    def kind(self) -> ScheduleKind:
        return SCHEDULES[self.schedule]

    @property
    def places(self) -> tuple[int, ...]:
        """The pipeline rank of every stage. Raises PartcError P0406."""
        ranks = self.mesh.axis(PIPELINE_AXIS)
        each = self.kind.stages_per_rank if self.virtual_stages is None else self.virtual_stages
        return stage_ranks(self.kind, ranks, ranks * each)

    @property
    def command(self) -> dict[str, Any]:
        """What else the plan keeps, so that the compile can be repeated from it."""
        found: dict[str, Any] = {"schedule": self.schedule, "shard": list(self.shard)}
        return found if self.virtual_stages is None else found | {"virtual_stages": self.virtual_stages}

    @property
    def pins(self) -> tuple[Pin, ...]:
        return tuple(Pin.parse(text) for text in self.shard)

    @property
    def for_passes(self) -> dict[str, Any]:
        """By the names under which passes take them."""
        return {
            "pins": self.pins,
            "places": self.places,
            "halves": self.kind.split_backward,
            "kind": self.schedule,
        }
