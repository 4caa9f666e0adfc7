"""Attributes of a model that forward sets in its first step, as a plan names them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

ABSENT = "absent"  # the value of an attribute that the constructor does not make


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstValue:
    """An attribute that is `before` until the first step, and has another value after every step: `after`, or a tensor
    if this is None. A `persistent` one is a buffer of the model's state dict.
    """

    name: str  # its path, such as layers.0.state
    before: int | str | None
    after: int | None
    persistent: bool = False

    @property
    def is_tensor(self) -> bool:
        return self.after is None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSteps:
    """The attributes that forward sets in the first step; the model's buffer `flag` is true afterwards."""

    flag: str
    values: tuple[FirstValue, ...]

    @classmethod
    def of_plan(cls, plan: Mapping[str, Any]) -> FirstSteps | None:
        """The first steps of a plan.json; None if its model has none."""
        found = plan.get("first_steps")
        return found and cls(flag=found["flag"], values=tuple(FirstValue(**each) for each in found["values"]))

    @property
    def document(self) -> dict[str, Any]:
        """The first steps for plan.json."""
        return {"flag": self.flag, "values": [asdict(value) for value in self.values]}

    @property
    def buffers(self) -> tuple[str, ...]:
        """The names of the buffers that take the place of attributes, and of the flag: zeros before the first step."""
        return (*(value.name for value in self.values if value.is_tensor), self.flag)
