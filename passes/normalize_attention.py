"""Attention as one operation; with dropout, one that drops weights out."""

from __future__ import annotations

import math

from partc.errors import PartcError
from partc.passes.normalize_writer import Writer, argument
from partc.program import Arg, Op, Ref


def attention(w: Writer, op: Op) -> None:
    p = argument(op, 4, "dropout_p", 0.0)
    mask, causal = argument(op, 3, "attn_mask"), argument(op, 5, "is_causal", False)
    args = (*op.args[:3], mask, bool(causal), argument(op, 6, "scale"))
    if not p:
        w.add(op, "attention", args)
        return
    if isinstance(mask, Ref) and mask.name in w.trained:
        _spelled_attention(w, op, mask, p, argument(op, 6, "scale"))
        return
    if len(w.shape(op.args[0])) == 4:
        w.add(op, "attention_dropout", (*args, p, w.draw()))
    else:
        _four_dimensional(w, op, args, p)


def _four_dimensional(w: Writer, op: Op, args: tuple[Arg, ...], p: Arg) -> None:
    """Attention with dropout whose operands have other dimensions than [b, h, s, k]: those before s make b and h."""
    shape, dtype = op.result.type.shape, op.result.type.dtype
    before = shape[:-2]

    def turned(arg: Arg) -> Arg:
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

    q, k, v, mask = (turned(arg) for arg in args[:4])
    heads = w.value(f"{op.result.name}_heads", (*w.shape(q)[:3], shape[-1]), dtype)
    out = w.add(op, "attention_dropout", (q, k, v, mask, *args[4:], p, w.draw()), heads)
    w.add(op, "reshape", (out, shape))


def _spelled_attention(w: Writer, op: Op, mask: Ref, p: Arg, scale: Arg) -> None:
    """Attention with dropout whose additive mask is learned: nothing but the plain operations has its gradient."""
    (q, k, v), dtype = op.args[:3], op.result.type.dtype
    b, h, s, d = w.shape(q)
    t = w.shape(k)[2]
    if w.shape(k)[1] != h:
        raise PartcError(
            "P0207",
            "attention with grouped heads, dropout and a learned mask",
            help="repeat the keys and values for their query heads",
            source=op.source,
        )

    def step(name: str, args: tuple[Arg, ...], stem: str, shape: tuple[int, ...]) -> Ref:
        return w.add(op, name, args, w.value(f"{op.result.name}_{stem}", shape, dtype))

    turned = step("permute", (k, (0, 1, 3, 2)), "keys", (b, h, d, t))
    scores = step("matmul", (q, turned), "scores", (b, h, s, t))
    scores = step("mul", (scores, d**-0.5 if scale is None else scale), "scaled", (b, h, s, t))
    scores = step("add", (scores, mask), "masked", (b, h, s, t))
    weights = step("softmax", (scores, 3), "weights", (b, h, s, t))
    dropped = step("dropout", (weights, p, 4, w.draw()), "dropped", (b, h, s, t))
    w.add(op, "matmul", (dropped, v))
