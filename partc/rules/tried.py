"""Rules by trial: an operation without a rule may be cut along its batch if it treats examples alike.

The operation runs on small random operands, whole and in parts along the first dimension, forward and backward. If
results and gradients agree, only its batch may be cut. Operations of other libraries are not tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import torch

from partc.errors import PartcError
from partc.ir.collectives import MOVING
from partc.ir.operations import RANDOM
from partc.ir.program import Arg, DType, Op, Ref, TensorType
from partc.rules import resolve
from partc.rules.notation import NotationError
from partc.rules.per_example import examples
from partc.rules.rule import OpRule
from partc.rules.table import TABLE
from partc.rules.trial import trial


def rule_of(op: Op, types: Mapping[str, TensorType]) -> OpRule | None:
    """The operation's rule, from the table or by trial; None if it has none."""
    if op.name in TABLE:
        return resolve(op, types)
    slots = batch_operands(op, types)
    return None if slots is None else examples(*slots)(op, tuple(types[name] for name in op.refs()))


def batch_operands(op: Op, types: Mapping[str, TensorType]) -> tuple[int, ...] | None:
    """The positions of the operands that carry the batch; None if the operation has a rule or may not be cut."""
    torchs = "::" not in op.name and hasattr(torch.ops.aten, op.name)
    reads = tuple(op.refs())
    if op.name in TABLE or not torchs or op.body or op.name in MOVING | RANDOM or not reads or not op.results:
        return None
    names = {name: f"v{index}" for index, name in enumerate(dict.fromkeys(reads))}
    results = tuple(replace(value, name=f"r{index}") for index, value in enumerate(op.results))
    plain = replace(op.renamed(names), results=results, choices=(), source=None)
    return _tried(plain, tuple((names[name], types[name].dtype, types[name].shape) for name in names))


@lru_cache(maxsize=1024)
def _tried(op: Op, operands: tuple[tuple[str, DType, tuple[int, ...]], ...]) -> tuple[int, ...] | None:
    """All operands whose first dimension is the results', or the first of them alone, whichever passes."""
    types = {name: TensorType.replicated(dtype, shape) for name, dtype, shape in operands}
    shapes = [types[name].shape for name in op.refs()]
    rows = op.results[0].type.shape[:1]
    alike = tuple(index for index, shape in enumerate(shapes) if shape[:1] == rows)
    if any(not isinstance(arg, Ref) and _reads(arg) for arg in op.args) or not rows or not alike:
        return None
    for slots in dict.fromkeys((alike, alike[:1])):
        build = examples(*slots)
        try:
            found = trial(op, types, lambda op, types: build(op, tuple(types[name] for name in op.refs())))  # noqa: B023
        except (PartcError, NotationError):
            continue
        if found == ():
            return slots
    return None


def _reads(arg: Arg) -> bool:
    return isinstance(arg, tuple) and any(isinstance(item, Ref) or _reads(item) for item in arg)
