"""The share of a program that rules cover, and draft rules for the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from partc.errors import Source
from partc.ir.program import Op, Program, Ref, TensorType
from partc.rules import flops, resolve
from partc.rules.notation import NotationError, parse
from partc.rules.table import NotationRule
from partc.rules.trial import Build, trial
from partc.rules.tried import batch_operands

LETTERS = "bsdhkvmnpqrtuwxyzacefgijlo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The shares of operations, and of their flops in a step, that rules cover."""

    ops: float
    flops: float
    tried: tuple[str, ...] = ()  # operations without a rule whose batch is cut because trials passed

    def __str__(self) -> str:
        also = f"; trials let the batch of {', '.join(self.tried)} be cut" if self.tried else ""
        return f"{self.ops:.1%} of operations, {self.flops:.1%} of flops{also}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """An operation without a rule, once for every name and signature.

    `draft` is the text of a rule that fits the shapes, `blocked` the factors that must stay whole according to trials,
    `slots` the positions of the operands among other arguments. A draft that could not be tried, or that leaves nothing
    to cut, has a `doubt`.
    """

    op: str
    draft: str
    source: Source | None
    blocked: tuple[str, ...] = ()
    slots: tuple[int, ...] | None = None
    doubt: str = ""

    def __str__(self) -> str:
        """The call that registers the rule; a comment if there is a doubt."""
        slots = "" if self.slots is None else f", slots={self.slots}"
        blocked = f', blocked="{" ".join(self.blocked)}"' if self.blocked else ""
        call = f'partc.rule("{self.op}", "{self.draft}"{slots}{blocked})'
        return f"# {self.doubt}\n# {call}" if self.doubt else call


def coverage(program: Program) -> Coverage:
    """The coverage of a program before the partition pass, over all operations with operands in a step."""
    known = covered = 0
    work = ruled = 0.0
    by_trial: dict[str, None] = {}
    for op, types, calls in _operations(program):
        rule = resolve(op, types)
        cost = float(flops(op, rule) if rule is not None else _elements_moved(op, types)) * calls
        known, work = known + calls, work + cost
        by_trial.update({op.name: None} if batch_operands(op, types) is not None else {})
        if rule is not None:
            covered, ruled = covered + calls, ruled + cost
    return Coverage(ops=covered / known if known else 1.0, flops=ruled / work if work else 1.0, tried=tuple(by_trial))


def missing(program: Program) -> tuple[Missing, ...]:
    """The operations that no rule covers, in the program's order."""
    found: dict[tuple[str, str], Missing] = {}
    for op, types, _ in _operations(program):
        if resolve(op, types) is None:
            draft = _draft(op, types)
            name = op.name if "::" in op.name else f"aten::{op.name}"
            if (name, draft) not in found:
                found[name, draft] = _tried(Missing(op=name, draft=draft, source=op.source), op, types)
    return tuple(found.values())


def _operations(program: Program) -> Iterator[tuple[Op, dict[str, TensorType], int]]:
    for region in program.regions:
        types = region.types(region.forward)
        calls = len(program.calls_to(region.name))
        if region.phase != "setup":
            yield from ((op, types, calls) for op in region.forward.ops if op.results and any(True for _ in op.refs()))


def _elements_moved(op: Op, types: dict[str, TensorType]) -> int:
    """The number of elements that the operation reads and writes: a substitute for its unknown flops."""
    made = sum(math.prod(value.type.shape) for value in op.results)
    read = max((math.prod(types[name].shape) for name in op.refs()), default=0)
    return max(made, read)


def _draft(op: Op, types: dict[str, TensorType]) -> str:
    """A draft that identifies equal sizes with one factor: a guess to be checked, dimension by dimension."""
    letters: dict[int, str] = {}

    def term(shape: tuple[int, ...]) -> str:
        named = [letters.setdefault(size, LETTERS[len(letters) % len(LETTERS)]) for size in shape]
        return f"[{' '.join(named)}]"

    operands = [f"x{index}{term(types[name].shape)}" for index, name in enumerate(op.refs())]
    return f"{', '.join(operands)} -> {', '.join(term(value.type.shape) for value in op.results)}"


def _tried(draft: Missing, op: Op, types: dict[str, TensorType]) -> Missing:
    """The draft without the factors whose cuts change the operation's results."""
    slots = tuple(index for index, arg in enumerate(op.args) if isinstance(arg, Ref))
    plain = slots == tuple(range(len(slots)))
    draft = replace(draft, slots=None if plain else slots)
    if len(slots) < len(types_read := [*op.refs()]):
        return replace(
            draft, doubt=f"some of its {len(types_read)} operands are not single arguments: a rule cannot express this"
        )
    notation = parse(draft.draft)
    blocked: list[str] = []
    cause = ""
    while True:
        written = NotationRule(notation=notation, slots=slots, blocked=" ".join(blocked))
        build: Build = lambda op, types: written(op, tuple(types[name] for name in op.refs()))  # noqa: B023, E731
        try:
            rule = build(op, types)
            outcome = trial(op, types, build)
        except NotationError as error:
            return replace(draft, doubt=f"does not fit: {error}; correct it")
        if outcome is None:
            return replace(draft, blocked=tuple(blocked), doubt="could not be tried: check every factor by hand")
        if rule is None or all(factor.kind == "blocked" for factor in rule.factors):
            why = f": {cause}" if cause else ""
            return replace(draft, blocked=tuple(blocked), doubt=f"no factor may be cut alone{why}")
        if not outcome:
            return replace(draft, blocked=tuple(blocked))
        blocked.append(outcome[0].factor)
        cause = cause or outcome[0].cause
