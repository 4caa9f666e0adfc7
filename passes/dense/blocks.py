"""Follows the blocks of a value through the operations that compute it.

A form has the labels and sizes of a value's blocks in the order of its elements, whatever dimensions they make up:

    rows: f32[48, 16]                                 (("b", 2), ("s", 3), (EXPERTS, 8), ("d", 16))
    reshape to [2, 3, 8, 16], permute to [8, 2, 3, 16]: ((EXPERTS, 8), ("b", 2), ("s", 3), ("d", 16))

An operand's form lacks the blocks along which it is repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partc.ir.operations import RANDOM
from partc.ir.program import Op, TensorType
from partc.rules.tried import rule_of

EXPERTS = "experts"
_OWN = frozenset({"own_gradient", "incoming_gradient"})  # gradients that a model computes itself

Label = str | tuple[str, str]  # the second kind are factors of an operation's operands alone
Form = tuple[tuple[Label, int], ...]


def labels(form: Form) -> frozenset[Label]:
    return frozenset(label for label, _ in form)


def without_experts(form: Form) -> Form:
    return tuple(block for block in form if block[0] != EXPERTS)


def form_of(shape: Sequence[int], names: Sequence[Label]) -> Form:
    """The form of a value whose dimensions have these labels. Only the experts may have the size 1."""
    return tuple((name, size) for name, size in zip(names, shape, strict=True) if size > 1 or name == EXPERTS)


def blocks_by_dim(shape: Sequence[int], form: Form) -> list[Form] | None:
    """The blocks of each dimension; None if a dimension has a part of the experts, or the sizes do not fit."""
    waiting, found = [block for block in form if block[1] > 1], list[Form]()
    for size in shape:
        here: list[tuple[Label, int]] = []
        while size > 1:
            if not waiting:
                return None
            label, whole = waiting.pop(0)
            part = whole if size % whole == 0 else size
            if whole % part or (label == EXPERTS and part < whole):
                return None
            if part < whole:
                waiting.insert(0, (label, whole // part))
            here.append((label, part))
            size //= part
        found.append(tuple(here))
    return None if waiting else found


def operand_forms(op: Op, result: str, form: Form, types: Mapping[str, TensorType]) -> list[Form] | None:
    """The form of each operand of an operation, by the form of one of its results.

    None if the operation has no rule, draws random numbers, has a gradient of the model's own, or does not compute each
    expert's elements from the same expert's.
    """
    rule = None if op.name in RANDOM | _OWN or op.body else rule_of(op, types)
    place = next(index for index, value in enumerate(op.results) if value.name == result)
    blocks = blocks_by_dim(op.results[place].type.shape, form)
    if rule is None or blocks is None:
        return None
    sizes = {factor.name: factor.size for factor in rule.factors}
    held: dict[str, Form] = {}
    for dim, here in zip(rule.results[place], blocks, strict=True):
        parts = blocks_by_dim([sizes[name] for name in dim], here)
        if parts is None:
            return None
        held.update(zip(dim, parts, strict=True))
    order = {name: number for number, name in enumerate(held)}
    for factor in rule.factors:
        if factor.kind != "parallel":
            if EXPERTS in labels(held.get(factor.name, ())):
                return None
            held[factor.name] = (((op.results[0].name, factor.name), factor.size),)
    found = list[Form]()
    for dims in rule.operands:
        names = [name for dim in dims for name in dim]
        places = [(label, order.get(name, -1)) for name in names for label, _ in held[name]]
        if any(a == b and i > j for n, (a, i) in enumerate(places) for b, j in places[n:]):
            return None  # the parts of a block change their order
        found.append(_joined([held[name] for name in names]))
    return found


def _joined(parts: Sequence[Form]) -> Form:
    """The blocks of all parts, with neighbouring parts of one block put together."""
    found: list[tuple[Label, int]] = []
    for label, size in (block for part in parts for block in part):
        if found and found[-1][0] == label:
            size *= found.pop()[1]
        found.append((label, size))
    return tuple(found)
