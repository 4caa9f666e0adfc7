"""A plan: every decision about how a model is spread over ranks, as a JSON document.

    {"mesh": "pp=2,dp=4,tp=8", "microbatches": 8, "schedule": "1f1b", "zero": 1, "options": {"batch": 64}}

`partc plan -o plan.json` writes one on one line, so that the file is also a list of one plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Union

from partc.compilation.options import BUCKET, Options
from partc.errors import PartcError
from partc.runtime.documents import Malformed, Positive, contents, decoded, parsed

LARGEST = 1 << 26  # bytes of a file of plans

Scalar = Union[bool, int, float, str]


def _is_option(value: dict[str, Scalar]) -> str:
    wrong = next((name for name in value if not name.isidentifier()), None)
    return "" if wrong is None else f"whose entry {wrong[:40]!r} is no name of an option"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The options of a compile that decide speed and memory, and those of the model file (`options`)."""

    mesh: str
    microbatches: Positive = 1
    schedule: str = "1f1b"
    virtual_stages: Positive | None = None  # on each pipeline rank; None: the schedule's default
    zero: int | str = 0
    recompute: str = "none"
    precision: str = "fp32"
    kernels: str = "auto"
    loss_chunks: Positive = 1
    bucket: str = BUCKET
    nodes: Positive | None = None
    grad_reduce: str = "fp32"
    compress_grads: str = "none"
    optimizer: str | None = None
    options: Annotated[dict[str, Scalar], _is_option] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, document: object, *, place: str = "the plan") -> Plan:
        """Read the result of `document`. Raises PartcError P0850."""
        try:
            return decoded(cls, document)
        except Malformed as error:
            raise _unreadable(place, error) from None

    def document(self) -> dict[str, Any]:
        """The plan as a JSON document, without fields that have their defaults."""
        known = {name: getattr(self, name) for name in (item.name for item in fields(self))}
        defaults = Plan(mesh="")
        kept = ("mesh", "microbatches", "schedule", "zero", "recompute", "precision", "kernels")
        return {name: value for name, value in known.items() if name in kept or value != getattr(defaults, name)}

    @property
    def text(self) -> str:
        """The plan on one line."""
        return json.dumps(self.document())

    def compile_options(self, *, memory_limit: str | None = None) -> Options:
        """The checked options of the plan's compile. Raises PartcError as Options.checked."""
        if self.schedule.lower().endswith(".csv"):
            raise PartcError("P0850", f"the plan names the file {self.schedule}", help="give --schedule to partc compile")
        return Options.checked(
            mesh=self.mesh,
            microbatches=self.microbatches,
            schedule=self.schedule,
            virtual_stages=self.virtual_stages,
            precision=self.precision,
            seed=0,
            shard=(),
            zero=self.zero,
            recompute=self.recompute,
            kernels=self.kernels,
            loss_chunks=self.loss_chunks,
            bucket=self.bucket,
            nodes=self.nodes,
            grad_reduce=self.grad_reduce,
            compress_grads=self.compress_grads,
            optimizer=self.optimizer,
            memory_limit=memory_limit,
        )

    @property
    def level(self) -> int:
        """The ZeRO level, without its axes."""
        return int(str(self.zero)[:1] or 0)

    @property
    def model_options(self) -> dict[str, str]:
        """The options of the model file, as -D gives them."""
        return {name: str(value) for name, value in self.options.items()}

    @property
    def flags(self) -> str:
        """The plan as options of `partc compile`; those at their defaults are left out."""
        return " ".join(self._flags())

    def _flags(self) -> Iterator[str]:
        defaults = Plan(mesh="")
        yield f"--mesh {self.mesh}"
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name not in ("mesh", "options") and value != getattr(defaults, item.name):
                yield f"--{item.name.replace('_', '-')} {value}"
        for name, value in self.options.items():
            yield f"-D {name}={value}"


def read(path: Path) -> Plan:
    """The plan in a file. Raises PartcError P0850."""
    try:
        return Plan.of(parsed(contents(path, largest=LARGEST)), place=str(path))
    except Malformed as error:
        raise _unreadable(str(path), error) from None


def read_lines(path: Path) -> tuple[Plan, ...]:
    """The plans of a file, one on each line. Raises PartcError P0850."""
    try:
        lines = contents(path, largest=LARGEST).decode("utf-8").splitlines()
    except (Malformed, UnicodeDecodeError) as error:
        raise _unreadable(str(path), error) from None
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(Plan.of(parsed(line), place=f"{path}:{number}"))
            except Malformed as error:
                raise _unreadable(f"{path}:{number}", error) from None
    return tuple(found)


def _unreadable(place: str, error: Exception) -> PartcError:
    shape = '{"mesh": "pp=2,dp=4,tp=8", "microbatches": 8}'
    return PartcError("P0850", f"{place} cannot be read: {error}", help=f"a plan is a JSON object such as {shape}")
