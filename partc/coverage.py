"""How much of a program has rules, and a first draft of those that are missing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from partc.errors import Source
from partc.program import Op, Program, TensorType
from partc.rules import flops, resolve

LETTERS = "bsdhkvmnpqrtuwxyzacefgijlo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Shares of operations, and of their work in a step, that a rule covers."""

    ops: float
    flops: float

    def __str__(self) -> str:
        return f"{self.ops:.1%} of operations, {self.flops:.1%} of flops"


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """An operation without a rule, once for every name and signature."""

    op: str
    draft: str  # the text of a rule that fits the shapes
    source: Source | None


def coverage(program: Program) -> Coverage:
    """Of a program before partition: what depends on an operand, in all calls of a microbatch or step."""
    known = covered = 0
    work = ruled = 0.0
    for op, types, calls in _operations(program):
        rule = resolve(op, types)
        cost = float(flops(op, rule) if rule is not None else _work(op, types)) * calls
        known, work = known + calls, work + cost
        if rule is not None:
            covered, ruled = covered + calls, ruled + cost
    return Coverage(ops=covered / known if known else 1.0, flops=ruled / work if work else 1.0)


def missing(program: Program) -> tuple[Missing, ...]:
    """The operations that no rule covers, in the program's order."""
    found: dict[tuple[str, str], Missing] = {}
    for op, types, _ in _operations(program):
        if resolve(op, types) is None:
            draft = _draft(op, types)
            name = op.name if "::" in op.name else f"aten::{op.name}"
            found.setdefault((name, draft), Missing(op=name, draft=draft, source=op.source))
    return tuple(found.values())


def _operations(program: Program) -> Iterator[tuple[Op, dict[str, TensorType], int]]:
    for region in program.regions:
        types = region.types(region.forward)
        calls = sum(call.region == region.name for call in program.calls)
        if region.phase != "setup":
            yield from ((op, types, calls) for op in region.forward.ops if op.results and any(True for _ in op.refs()))


def _work(op: Op, types: dict[str, TensorType]) -> int:
    """Nothing is known of it but its size: each element that it reads or makes, once."""
    made = sum(math.prod(value.type.shape) for value in op.results)
    read = max((math.prod(types[name].shape) for name in op.refs()), default=0)
    return max(made, read)


def _draft(op: Op, types: dict[str, TensorType]) -> str:
    """Equal sizes are taken for the same factor: a guess to be checked, dimension by dimension."""
    letters: dict[int, str] = {}

    def term(shape: tuple[int, ...]) -> str:
        named = [letters.setdefault(size, LETTERS[len(letters) % len(LETTERS)]) for size in shape]
        return f"[{' '.join(named)}]"

    operands = [f"x{index}{term(types[name].shape)}" for index, name in enumerate(op.refs())]
    return f"{', '.join(operands)} -> {', '.join(term(value.type.shape) for value in op.results)}"
