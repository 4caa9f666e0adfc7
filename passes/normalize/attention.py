"""Attention as the operation `attention`, or `attention_dropout` if it drops weights."""

from __future__ import annotations

import math

from partc.ir.program import Arg, Op, Ref
from partc.passes.normalize.writer import Writer, ref
from partc.rules.rule import argument


def attention(w: Writer, op: Op) -> None:
    p = argument(op, 4, "dropout_p", 0.0)
    mask, causal = argument(op, 3, "attn_mask"), argument(op, 5, "is_causal", False)
    args = (*op.args[:3], mask, bool(causal), argument(op, 6, "scale"))
    name, more = ("attention_dropout", (0, p, w.draw())) if p else ("attention", ())  # 0: no window
    if len(w.shape(op.args[0])) == 4:
        w.add(op, name, (*_repeated(w, op), *args[3:], *more))
    else:
        _four_dimensional(w, op, name, args, more)


def _repeated(w: Writer, op: Op) -> list[Ref]:
    """Queries, keys and values, repeated for each example, and for each head unless keys and values share fewer."""
    batch, heads = op.result.type.shape[:2]
    operands = [ref(arg) for arg in op.args[:3]]
    shared = w.shape(operands[1])[1] if w.shape(operands[1])[1] == w.shape(operands[2])[1] else heads
    found = []
    for operand, count in zip(operands, (heads, shared, shared), strict=True):
        own, type = w.shape(operand), w.types[operand.name]
        shape = (batch, count if own[1] == 1 else own[1], *own[2:])
        if shape != own:
            operand = w.add(op, "expand", (operand, shape), w.value(f"{operand.name}_each", shape, type.dtype))
        found.append(operand)
    return found


def _four_dimensional(w: Writer, op: Op, name: str, args: tuple[Arg, ...], more: tuple[Arg, ...]) -> None:
    """Reshape operands that are not [b, h, s, k]: the dimensions before s become b and h."""
    shape, dtype = op.result.type.shape, op.result.type.dtype
    before = shape[:-2]

    def transposed(arg: Arg) -> Arg:
        if not isinstance(arg, Ref):
            return arg
        last = w.shape(arg)[-2:]
        if len(w.shape(arg)) > 2 and w.shape(arg)[:-2] != before:
            value = w.value(f"{arg.name}_each", (*before, *last), w.types[arg.name].dtype)
            arg = w.add(op, "expand", (arg, value.type.shape), value)
        elif len(w.shape(arg)) == 2 and before:
            return arg
        heads = before[-1] if len(before) > 1 else 1
        value = w.value(f"{arg.name}_heads", (math.prod(before) // heads, heads, *last), w.types[arg.name].dtype)
        return w.add(op, "reshape", (arg, value.type.shape), value)

    q, k, v, mask = (transposed(arg) for arg in args[:4])
    out = w.step(op, name, (q, k, v, mask, *args[4:], *more), "heads", (*w.shape(q)[:3], shape[-1]), dtype)
    w.add(op, "reshape", (out, shape))
