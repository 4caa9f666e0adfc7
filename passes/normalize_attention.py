"""Attention as one operation; with dropout, one that drops weights out."""

from __future__ import annotations

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
    w.add(op, "attention_dropout", (*args, p, w.draw()))


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
