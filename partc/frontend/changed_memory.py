"""Changes in place that a package would lose, because it keeps buffers of the model alone from step to step.

self.cos = self.table[0]; self.cos.mul_(2)                               two buffers in one memory
{"ids": text[:, :-1], "labels": text[:, 1:]}; ids[mask] = 0              two entries of the batch, likewise
CENTER = torch.zeros(8); x - CENTER; CENTER.lerp_(x.mean(0), 0.1)        a tensor outside the model
"""

from __future__ import annotations

from collections.abc import Mapping

from partc.errors import PartcError
from partc.frontend.branches.changes import changed_by
from partc.ir.operations import memory_owner, shares_memory
from partc.ir.program import Graph, TensorType


def check_changes(graph: Graph, types: Mapping[str, TensorType], shared: Mapping[str, str]) -> None:
    """Raises PartcError P0225 where a traced graph makes such a change. `shared` describes each value that has memory
    in common with another tensor.
    """
    # A tensor that forward makes of numbers is a copy of its constant.
    outside = {value.name for op in graph.ops if op.name == "constant" for value in op.results}
    if not shared and not outside:
        return
    made = graph.makers()
    read: set[str] = set()
    changes = []
    for op in graph.ops:
        changed = {*changed_by(op)}
        owners = {name: memory_owner(name, made, types) for name in op.refs()}
        if op.name == "copy_" and len({*owners.values()}) == 1:
            continue  # of a tensor to itself, as a trace ends for a constant that is detached in place
        if not shares_memory(op, types):
            read.update(owner for name, owner in owners.items() if name not in changed)
        changes += [(op, owners[name]) for name in changed if name in owners]
    for op, owner in changes:
        if owner in shared:
            help = "put a copy into one of them: .clone()"
            raise PartcError("P0225", f"forward changes {shared[owner]}", help=help, source=op.source)
        if owner in outside & read:
            raise PartcError(
                "P0225",
                "forward reads a tensor outside the model and changes it in place: every step of a package would read"
                " its first values",
                help="register it as a buffer of the model, or make the module that has it a part of the model",
                source=op.source,
            )
