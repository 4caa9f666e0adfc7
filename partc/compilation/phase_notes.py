"""The sentences that a compile prints: remarks on its phases, and notes for the package's README."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from partc import passes
from partc.cost.accounting import ReplicatedOp
from partc.ir.naming import EXTENDED
from partc.ir.program import Program
from partc.rules.updates import UpdateRule


def size(program: Program) -> str:
    ops = sum(len(region.forward.ops) for region in program.regions)
    return f"{ops:,} operations, {len(program.parameters):,} parameters and buffers"


def phase_note(step: passes.PassResult) -> str:
    """The remark on a pass's progress line."""
    program = step.program
    match step.name:
        case "outline":
            return f"{count_text(len(program.regions), 'region')}, {count_text(len(program.calls), 'call')}"
        case "extend":
            return ", ".join(f"{true} positions are {whole}" for true, whole in padded_lengths(program))
        case "partition":
            found = [op.name for region in program.regions for op in region.forward.ops]
            kinds = ("all_reduce", "all_gather", "unshard", "reduce_scatter", "all_to_all")
            return ", ".join(f"{found.count(kind)} {kind}" for kind in kinds if kind in found)
        case "stages":
            return f"{count_text(program.stages, 'stage')}, {count_text(len(program.transfers), 'transfer')}"
        case "schedule":
            return f"{max(map(len, program.schedule), default=0)} actions a rank"
        case "check":
            return f"{program.mesh.size:,} ranks: communication matches, nothing can deadlock"
        case _:
            return ""


def padded_lengths(program: Program) -> list[tuple[int, int]]:
    """The lengths of sequences that are padded, as (model's length, padded length)."""
    found: dict[tuple[int, int], None] = {}
    for region in program.regions:
        types = region.types(region.forward)
        for op in region.forward.ops:
            dim = op.args[1] if op.name == "cat" and op.source is None else None
            if isinstance(dim, int) and op.result.name.endswith(EXTENDED):
                found[types[next(op.refs())].shape[dim], op.result.type.shape[dim]] = None
    return sorted(found)


def count_text(count: int, noun: str) -> str:
    """`1 stage`, `2 stages`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def sentence(item: ReplicatedOp) -> str:
    """A note for the package's README about a repeated computation."""
    why = "is repeated" if item.rule else "has no rule and is repeated"
    return f"`{item.place}` ({item.op}) {why} on every rank of {item.axis}: {item.flops:,} operations a step."


def made_dense(traced: Program, program: Program, rules: Mapping[str, UpdateRule]) -> Iterator[str]:
    """A sentence for each reason why gradients are dense although lookups in the normalized `traced` ask for sparse
    ones.
    """
    wanted = {item.name for item in traced.parameters if item.sparse}
    found: dict[str, list[str]] = {}
    for item in program.parameters:
        if item.name in wanted and item.trainable and not item.sparse:
            rule = rules[item.name]
            shared = "other operations, or other pipeline stages, read them as well"
            found.setdefault(shared if rule.takes_rows else f"{rule.name} updates whole tables", []).append(item.name)
    for reason, names in found.items():
        yield f"Lookups ask for sparse gradients of {', '.join(names)}, which are dense: {reason}."


def padding_sentences(padded: Mapping[str, tuple[Sequence[int], Sequence[int]]]) -> Iterator[str]:
    """A sentence for each padded parameter; equal parameters of layers share one.

    `padded` maps names to (model's shape, padded shape).
    """
    alike: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for name, (true, held) in padded.items():
        layers = re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", name)
        alike.setdefault((layers, tuple(true), tuple(held)), []).append(name)
    for (layers, true, held), names in alike.items():
        shown = layers if len(names) > 1 else names[0]
        reason = "to be cut or moved in whole lines"
        yield f"`{shown}` is held as {list(held)} for its {list(true)}, {reason}: the rest is zeros"
