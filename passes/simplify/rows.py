"""Undo the flattening of leading dimensions into rows: row-wise operations run on the original dimensions.

    f    = reshape(x, (32, 64))               y    = matmul(x, w)            # [4, 8, 192]
    y    = matmul(f, w)                       z    = add(y, b)
    z    = add(y, b)                     ->
    out  = reshape(z, (4, 8, 192))            out is z

A dimension of rows that joins batch and sequence can be cut in fewer ways than the two dimensions, and is less
readable. The flattening moves below every row-wise operation, until a reshape undoes it, or a sum over all rows makes
it irrelevant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from partc import fuel
from partc.ir.naming import WHOLE
from partc.ir.program import Arg, Op, Ref, Region, TensorType, Value
from partc.rules import is_elementwise

_PRODUCTS = frozenset({"matmul", "linear"})
_NORMS = frozenset({"layer_norm", "rms_norm"})


def plain_rows(region: Region) -> Region:
    """Sink reshapes that flatten leading dimensions below row-wise operations."""
    types = region.types(region.forward)
    whole: dict[str, str] = {}  # flattened value -> its original
    ops: list[Op] = []
    for op in region.forward.ops:
        if op.name == "reshape" and _flattens(types[next(op.refs())].shape, op.result.type.shape):
            whole[op.result.name] = next(op.refs())
        elif (lead := _row_dims(op, types, whole)) is not None and fuel.may_rewrite("keep dimensions", op.source):
            op = _unflattened(op, lead, types, whole, ops)
        elif _sums_all(op, types) and (source := whole.get(next(op.refs()))) is not None:
            every = tuple(range(len(types[source].shape)))
            op = replace(op, args=(Ref(source), every, *op.args[2:]))
        ops.append(op)
    return replace(region, forward=replace(region.forward, ops=tuple(ops)))


def _flattens(shape: tuple[int, ...], flat: tuple[int, ...]) -> bool:
    """Whether a reshape joins leading dimensions and keeps at most one more: [4, 8, n] to [32, n], or [4, 8] to
    [32].
    """
    for tail in (0, 1):
        lead = shape[: len(shape) - tail]
        if len(lead) > 1 and flat == (math.prod(lead), *shape[len(lead) :]):
            return True
    return False


def _row_dims(op: Op, types: Mapping[str, TensorType], whole: Mapping[str, str]) -> tuple[int, ...] | None:
    """The original dimensions of the operation's rows, if it treats rows independently; else None."""
    names = list(op.refs())
    leads = set()
    for name in names:
        rank = len(types[name].shape)
        if name in whole:
            shape = types[whole[name]].shape
            leads.add(shape[: len(shape) - rank + 1])
    if len(leads) != 1 or len(op.results) != 1:
        return None
    others = [types[name].shape for name in names if name not in whole]
    if op.name in _PRODUCTS:
        fits = names[0] in whole and len(op.result.type.shape) == 2 and all(name not in whole for name in names[1:])
    elif op.name in _NORMS:
        fits = names[0] in whole and isinstance(op.args[1], tuple) and len(op.args[1]) == 1
        fits = fits and all(name not in whole for name in names[1:])
    elif op.name == "cross_entropy":
        fits = names[0] in whole and names[1] in whole
    else:
        ranks = {len(types[name].shape) for name in names if name in whole}
        fits = is_elementwise(op.name) and ranks == {len(op.result.type.shape)}
        # An operand that is added to every row still broadcasts from the right.
        fits = fits and all(math.prod(shape) == 1 or (len(shape) == 1 and ranks == {2}) for shape in others)
        fits = fits and all(len(shape) <= 1 for shape in others)
    return leads.pop() if fits else None


def _unflattened(
    op: Op, lead: tuple[int, ...], types: dict[str, TensorType], whole: dict[str, str], ops: list[Op]
) -> Op:
    """Write the operation on the original dimensions; return the reshape that restores its flat result."""
    sources = {name: whole[name] for name in op.refs() if name in whole}
    shape = (*lead, *op.result.type.shape[1:])
    type = TensorType.replicated(op.result.type.dtype, shape)
    result = Value(name=f"{op.result.name}{WHOLE}", type=type)
    types[result.name] = type
    ops.append(replace(op.renamed(sources), results=(result,)))
    whole[op.result.name] = result.name
    args: tuple[Arg, ...] = (Ref(result.name), op.result.type.shape)
    return replace(op, name="reshape", args=args, attrs=())


def _sums_all(op: Op, types: Mapping[str, TensorType]) -> bool:
    if op.name != "sum" or op.result.type.shape:
        return False
    return op.args[1] == tuple(range(len(types[next(op.refs())].shape)))
