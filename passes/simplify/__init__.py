"""Simplify constant expressions, and recognise composites that models spell out.

    tril      = tril(ones)                                      scaled_…  = attention(unsqueeze, …, None, True, None)
    scaled_…  = attention(unsqueeze, …, tril, False, None)  ->  nll_whole = cross_entropy(linear_4, labels, …)
    flatten   = reshape(linear_4, (32, 13))
    flatten_1 = reshape(labels, (32,))
    nll       = cross_entropy(flatten, flatten_1, …)

A constant that is equal for all examples keeps one row and is broadcast. Comparisons that the bounds of integers decide
are constants. A mask that consists of constants is evaluated: one that hides the future becomes `is_causal`, one that
hides distant positions a window, and one that hides nothing is dropped. Keys and values that are repeated for groups of
query heads are passed unrepeated. Attention, root mean square norms and softmaxes that are written out become one
operation. Scores of experts multiply the operand of their last product where it is narrower than the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from partc import fuel
from partc.ir.attention import FORWARD
from partc.ir.gradients import trainable_params
from partc.ir.naming import unique
from partc.ir.operations import RANDOM
from partc.ir.program import Arg, Op, Program, Ref, Region, TensorType, Value
from partc.passes.simplify.cut_off import with_cut_off_parameters
from partc.passes.simplify.decided import decided_masks
from partc.passes.simplify.idioms import IDIOMS
from partc.passes.simplify.indexing import plain_indexing
from partc.passes.simplify.label_losses import label_losses
from partc.passes.simplify.masks import known_masks
from partc.passes.simplify.routing import numbered_groups, unsorted_experts
from partc.passes.simplify.rows import plain_rows
from partc.passes.simplify.scores import narrow_scores
from partc.passes.simplify.written_attention import written_attention
from partc.rules import is_elementwise
from partc.rules.rule import argument

_ALONG = {"slice": 1, "cumsum": 1, "diff": 2, "softmax": 1, "gather": 1}  # position of the argument `dim`


def simplify(program: Program, *, forward_only: bool = False) -> Program:
    """Apply the rewrites to every region and drop dead operations."""
    regions = tuple(_simplified(region) for region in program.regions)
    if not forward_only:
        trained = trainable_params(program)
        regions = tuple(
            with_cut_off_parameters(region, before.forward, trained[region.name])
            for region, before in zip(regions, program.regions, strict=True)
        )
    return replace(program, regions=regions)


def _simplified(region: Region) -> Region:
    for rewrite in (
        decided_masks,
        plain_indexing,
        unsorted_experts,
        numbered_groups,
        _one_row,
        written_attention,
        known_masks,
        *(idiom.apply for idiom in IDIOMS),
        plain_rows,
        narrow_scores,
        label_losses,
        _short_chains,
        _merged,
    ):
        region = rewrite(region)
        region = replace(region, forward=region.forward.without_dead())
    return region


def _one_row(region: Region) -> Region:
    """Reduce values that are equal along their first dimension to one row if every reader broadcasts."""
    types = region.types(region.forward)
    small: dict[str, str] = {}  # value -> the value with one row
    taken = {*types}
    ops: list[Op] = []

    def row(op: Op, args: tuple[Arg, ...]) -> None:
        shape = (1, *op.result.type.shape[1:])
        type = TensorType.replicated(op.result.type.dtype, shape)
        value = Value(name=unique(f"{op.result.name}_row", taken), type=type)
        types[value.name] = type
        small[op.result.name] = value.name
        ops.append(replace(op, args=args, results=(value,)))

    for op in region.forward.ops:
        operands = [name for name in op.refs()]
        rows = [name for name in operands if name in small]
        narrow = _narrow(op, types) if op.name == "expand" else None
        if narrow is not None and fuel.may_rewrite("one row", op.source):
            row(op, (op.args[0], narrow))
        elif rows and len(op.results) == 1 and _keeps_rows(op, types, small):
            row(op.renamed(small), _with_one_row(op, small))
        elif rows and (is_elementwise(op.name) or op.name in FORWARD):
            narrowed = op.with_operands(small)
            if _broadcasts(narrowed, types):
                ops.append(narrowed)
                continue
        ops.append(op)
    return replace(region, forward=replace(region.forward, ops=tuple(ops)))


def _narrow(op: Op, types: Mapping[str, TensorType]) -> tuple[int, ...] | None:
    """The shape of an expand with a first dimension of 1; None if the expand makes no copies along it."""
    operand = types[next(op.refs())].shape
    shape = op.result.type.shape
    copies = len(shape) > 1 and shape[0] > 1 and (len(operand) < len(shape) or operand[0] == 1)
    return (1, *shape[1:]) if copies else None


def _keeps_rows(op: Op, types: Mapping[str, TensorType], small: Mapping[str, str]) -> bool:
    """Whether the result is equal along its first dimension because all operands are."""
    shape = op.result.type.shape
    for name in op.refs():
        operand = types[name].shape
        if name not in small and len(operand) == len(shape) and operand and operand[0] != 1:
            return False
    if is_elementwise(op.name):
        return True
    if op.name in _ALONG:
        dim = argument(op, _ALONG[op.name], "dim")
        return isinstance(dim, int) and dim % len(shape) != 0
    if op.name == "reshape":
        return bool(shape) and shape[0] == types[next(op.refs())].shape[0]
    return op.name == "embedding" and [*op.refs()][1] in small


def _with_one_row(op: Op, small: Mapping[str, str]) -> tuple[Arg, ...]:
    args = op.renamed(small).args
    if op.name == "reshape":
        return (args[0], (1, *op.result.type.shape[1:]))
    return args


def _broadcasts(op: Op, types: Mapping[str, TensorType]) -> bool:
    """Whether the operation yields its whole result even if some operands have one row."""
    shapes = [types[name].shape for name in op.refs()]
    if op.name in FORWARD:
        # Only the mask may have one row.
        return len(shapes) > 3 and {shape[0] for shape in shapes[:3]} == {op.result.type.shape[0]}
    return tuple(torch.broadcast_shapes(*shapes)) == op.result.type.shape


def _short_chains(region: Region) -> Region:
    """Shorten chains of reshapes: each reads the first one's operand, and one that restores its shape is dropped."""
    types = region.types(region.forward)
    made: dict[str, Op] = {}
    same: dict[str, str] = {}
    ops = []
    for op in region.forward.ops:
        op = op.with_operands(same)
        if op.name == "reshape":
            base = next(op.refs())
            while base in made and made[base].name == "reshape":
                base = next(made[base].refs())
            shorter = types[base].shape == op.result.type.shape or Ref(base) != op.args[0]
            if shorter and not fuel.may_rewrite("short chain", op.source):
                base = next(op.refs())
            elif types[base].shape == op.result.type.shape:
                same[op.result.name] = base
                continue
            op = replace(op, args=(Ref(base), *op.args[1:]))
        made.update((value.name, op) for value in op.results)
        ops.append(op)
    return replace(region, forward=region.forward.rewritten(ops, same))


def _merged(region: Region) -> Region:
    """Merge equal operations that depend on no input, or on no parameter, or that one module runs twice.

    Bodies then share views of a table and masks of a batch, and a model that runs twice on one batch computes once. The
    region's results stay separate, since each may be the next value of a buffer.
    """
    kept = set(region.forward.outputs)
    for op in region.forward.ops:  # each result of each call of a user's function has its own incoming gradient
        if op.name == "incoming_gradient":
            kept.update((*op.refs(), op.result.name))
        elif op.name == "own_gradient":
            kept.update(value.name for value in op.results)
    fed = {value.name for value in region.forward.inputs}
    weighted = {value.name for value in region.params}
    known: dict[tuple[str | None, tuple[object, ...]], Op] = {}
    same: dict[str, str] = {}
    ops = []
    for op in region.forward.ops:
        op = op.with_operands(same)
        module = op.module
        unfed, plain = fed.isdisjoint(op.refs()), op.name not in RANDOM and not op.body
        if (unfed or plain) and kept.isdisjoint(value.name for value in op.results):
            shared = unfed or weighted.isdisjoint(op.refs())
            key = None if shared else module, op.content
            if key in known and fuel.may_rewrite("constant made once", op.source):
                same.update((new.name, old.name) for new, old in zip(op.results, known[key].results, strict=True))
                continue
            known[key] = op
        made = [value.name for value in op.results]
        if not unfed:
            fed.update(made)
        if not plain or not weighted.isdisjoint(op.refs()):
            weighted.update(made)
        ops.append(op)
    return replace(region, forward=region.forward.rewritten(ops, same))
