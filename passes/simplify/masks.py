"""Attention masks that consist of constants, evaluated at compile time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from partc import fuel
from partc.ir import operators
from partc.ir.program import RANDOM, Arg, DTypeArg, Op, Ref, Region

_MOST_ELEMENTS = 1 << 27  # the largest mask that is evaluated


def known_masks(region: Region) -> Region:
    """Evaluate attention masks that consist of constants."""
    made = region.forward.makers()
    known: dict[str, str] = {}
    ops = []
    for op in region.forward.ops:
        if op.name in ("attention", "attention_dropout") and isinstance(op.args[3], Ref) and not op.args[4]:
            mask = op.args[3].name
            if mask not in known:
                known[mask] = _kind_of_mask(mask, made)
            if known[mask] != "other" and fuel.allowed("known mask", op.source):
                op = replace(op, args=(*op.args[:3], None, known[mask] == "causal", *op.args[5:]))
        ops.append(op)
    return replace(region, forward=replace(region.forward, ops=tuple(ops)))


def _kind_of_mask(name: str, made: Mapping[str, Op]) -> str:
    """`causal`, `open` (hides nothing) or `other`."""
    if name not in made or math.prod(made[name].result.type.shape) > _MOST_ELEMENTS:
        return "other"
    values: dict[str, Tensor] = {}
    if not _evaluate(name, made, values):
        return "other"
    mask = values[name]
    if mask.dim() < 2 or mask.shape[-1] < 2:
        return "other"
    hidden = ~mask if mask.dtype == torch.bool else mask == -math.inf
    if mask.dtype != torch.bool and not bool(((mask == 0) | hidden | (mask <= torch.finfo(mask.dtype).min)).all()):
        return "other"
    if mask.dtype != torch.bool:
        hidden = hidden | (mask <= torch.finfo(mask.dtype).min)
    if not bool(hidden.any()):
        return "open"
    future = torch.ones(mask.shape[-2:], dtype=torch.bool).triu(1)
    square = mask.shape[-1] == mask.shape[-2]
    return "causal" if square and bool((hidden == future).all()) else "other"


def _evaluate(name: str, made: Mapping[str, Op], values: dict[str, Tensor]) -> bool:
    """Compute a value from constants; False if it depends on a parameter, a buffer or an input."""
    if name in values:
        return True
    if name not in made:
        return False
    op = made[name]
    if op.name in RANDOM:
        return False
    if len(op.results) != 1 or not all(_evaluate(operand, made, values) for operand in op.refs()):
        return False

    def value(arg: Arg) -> object:
        if isinstance(arg, Ref):
            return values[arg.name]
        if isinstance(arg, DTypeArg):
            return operators.DTYPES[arg.name]
        return [value(item) for item in arg] if isinstance(arg, tuple) else arg

    if op.name == "constant":
        shape = op.result.type.shape
        values[name] = torch.tensor(op.args[0], dtype=operators.DTYPES[op.result.type.dtype]).reshape(shape)
        return True
    attrs = {key: value(arg) for key, arg in op.attrs}
    values[name] = operators.resolve(op.name)(*(value(arg) for arg in op.args), **attrs)
    return True
