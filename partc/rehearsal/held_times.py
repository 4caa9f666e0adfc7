"""The moments of a rank's step that a rehearsal observed: the memory besides the saved values of microbatches.

This memory depends little on which values are saved, so that the moments of a few rehearsed programs predict the memory
of others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from partc.cost.saved_tensors import Flight, Saving, Slot, Time, held_inputs, saved_bytes
from partc.ir.program import Action, Program

Peaks = Mapping[tuple[str, str], int]  # the peak bytes in every action and call ("" between calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """A stage's calls that save values, in order, with their regions and saved bytes."""

    slots: Mapping[str, Slot]
    bytes: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def up_to(self, name: str) -> int:
        """The bytes that the stage has saved at the end of the last call with this name."""
        calls = list(self.bytes)
        alike = [other for other in calls if self._kind(other) == self._kind(name)]
        return sum(self.bytes[other] for other in calls[: calls.index(alike[-1]) + 1])

    def _kind(self, name: str) -> tuple[Slot, int]:
        return self.slots[name], self.bytes[name]


def observed(plain: Program, chosen: Program, schedule: Sequence[Action], peaks: Peaks) -> tuple[Time, ...]:
    """The moments of the rank with this schedule. `chosen` is the program `plain` after its saved values were
    decided.
    """
    stages = {action.stage: _stage(plain, chosen, action.stage) for action in schedule}
    inside: dict[str, list[tuple[str, int]]] = {}
    for (action, call), bytes in peaks.items():
        inside.setdefault(action, []).append((call, bytes))
    given = frozenset((stage.slots[name], size) for stage in stages.values() for name, size in stage.bytes.items())
    most: dict[tuple[Flight, Saving | None], int] = {}
    for flight, saving, bytes in _times(schedule, stages, inside):
        most[flight, saving] = max(bytes, most.get((flight, saving), bytes))
    return tuple(
        Time(flight=flight, inside=saving, besides=bytes, given=given) for (flight, saving), bytes in most.items()
    )


def _stage(plain: Program, chosen: Program, stage: int) -> _Stage:
    held = held_inputs(plain)  # as at the decision: one of two bodies may be called with held inputs only
    regions = {region.name: region for region in chosen.regions}
    saving = {region.name for region in plain.regions if region.backward is not None and region.phase == "microbatch"}
    pairs = [
        (before, after)
        for before, after in zip(plain.calls, chosen.calls, strict=True)
        if before.stage == stage and before.region in saving
    ]
    return _Stage(
        slots={before.name: (stage, before.region) for before, _ in pairs},
        bytes={
            after.name: saved_bytes(regions[after.region], held[before.region], chosen.sizes) for before, after in pairs
        },
    )


def _times(
    schedule: Sequence[Action], stages: Mapping[int, _Stage], peaks: Mapping[str, list[tuple[str, int]]]
) -> Iterator[tuple[Flight, Saving | None, int]]:
    flying: dict[int, int] = {}
    for name, found in peaks.items():
        if not re.match(r"\d", name):  # the beginning and the end of the step
            yield (), None, max(bytes for _, bytes in found)
    for action in schedule:
        stage, partly = stages[action.stage], action.kind in ("F", "B", "I")
        whole = dict(flying)
        if action.kind == "F":
            whole[action.stage] = whole.get(action.stage, 0) + 1
        for call, bytes in peaks.get(str(action), ()):
            inside = (stage.slots[call], stage.bytes[call]) if partly and call in stage.slots else None
            flight = tuple(
                (each, count - (inside is not None and each == action.stage))
                for each, count in sorted(whole.items())
                if count > (inside is not None and each == action.stage)
            )
            more = bytes - sum(count * stages[each].total for each, count in flight)
            yield flight, inside, more - (stage.up_to(call) if inside is not None else 0)
        if action.kind == "F":
            flying[action.stage] = flying.get(action.stage, 0) + 1
        elif action.kind in ("B", "W"):
            flying[action.stage] -= 1
