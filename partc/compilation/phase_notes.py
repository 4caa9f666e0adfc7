"""The sentences of a compile: remarks on its phases, and notes for the package's README."""

from __future__ import annotations

from partc import passes
from partc.cost.accounting import ReplicatedOp
from partc.errors import PartcError
from partc.ir.program import Program


def coupled(error: PartcError, microbatches: int) -> str:
    """The consequence of an operation that needs the whole batch, in a sentence."""
    where = f"{error.source}: " if error.source else ""
    return (
        f"{where}{error.cause}. Each of the {microbatches} microbatches is a batch of its own: statistics are "
        "those of a microbatch, the loss is the mean of theirs, as where one device accumulates gradients (P0402)."
    )


def size(program: Program) -> str:
    ops = sum(len(region.forward.ops) for region in program.regions)
    return f"{ops:,} operations, {len(program.parameters):,} parameters and buffers"


def note(step: passes.PassResult) -> str:
    """The remark on a pass's line, beside its time."""
    program = step.program
    match step.name:
        case "outline":
            return f"{counted(len(program.regions), 'region')}, {counted(len(program.calls), 'call')}"
        case "partition":
            found = [op.name for region in program.regions for op in region.forward.ops]
            kinds = ("all_reduce", "all_gather", "unshard", "reduce_scatter", "all_to_all")
            return ", ".join(f"{found.count(kind)} {kind}" for kind in kinds if kind in found)
        case "stages":
            return f"{counted(program.stages, 'stage')}, {counted(len(program.transfers), 'transfer')}"
        case "schedule":
            return f"{max(map(len, program.schedule), default=0)} actions a rank"
        case "check":
            return f"{program.mesh.size:,} ranks: communication matches, nothing can deadlock"
        case _:
            return ""


def counted(count: int, noun: str) -> str:
    """`1 stage`, `2 stages`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def sentence(item: ReplicatedOp) -> str:
    """A note for the package's README about a repeated computation."""
    why = "is repeated" if item.rule else "has no rule and is repeated"
    return f"`{item.place}` ({item.op}) {why} on every rank of {item.axis}: {item.flops:,} operations a step."
