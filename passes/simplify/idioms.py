"""Operations that models spell out: a table of rewrites.

    t = tanh(mul(add(x, mul(pow(x, 3), 0.044715)), 0.7978845608028654))
    y = mul(mul(x, 0.5), add(t, 1))                                          ->    y = gelu(x, approximate=tanh)

    m = amax(x, (2,), True)        # or max(x, 2, True), detached or not
    e = exp(sub(x, m))                                                       ->    y = softmax(x, 2)
    y = div(e, sum(e, (2,), True))

One operation has a derivative of its own and saves its operand alone. The number that a softmax subtracts cancels, and
so does its gradient, wherever among equal numbers it goes. Without it, large numbers overflow that a softmax holds:
such a quotient is no softmax.
"""

from __future__ import annotations

from dataclasses import replace

from partc.ir.patterns import Match, Pattern, Rewrite
from partc.ir.program import Op, Ref


def _grouped_heads(match: Match) -> Op | None:
    """Attention takes keys and values that groups of query heads share, without the copies for each head."""
    for name, copies in (("k", "k_copies"), ("v", "v_copies")):
        shape, inner, wide = match.shape(name), match.shape(f"{name}_inner"), match.shape(copies)
        if shape is None or inner is None or wide is None or len(shape) != 4 or len(wide) != 5:
            return None
        b, g, t, d = shape
        if inner != (b, g, 1, t, d) or wide != (b, g, wide[2], t, d):
            return None
    return replace(match.root, args=(match["q"], match["k"], match["v"], *match["rest"]))


def _rms_norm(match: Match) -> Op | None:
    w, x = match["w"], match["x"]
    shape, weight = match.shape("x"), match.shape("w")
    if not shape or weight != shape[-1:] or w.name in match.makers or not isinstance(match["eps"], float):
        return None
    if match["dims"] != (len(shape) - 1,) or match["n"] != shape[-1]:
        return None
    return replace(match.root, name="rms_norm", args=(x, weight, w, match["eps"]), attrs=())


def _gelu(match: Match) -> Op | None:
    if not isinstance(match["x"], Ref):
        return None
    return replace(match.root, name="gelu", args=(match["x"],), attrs=(("approximate", "tanh"),))


def _softmax(match: Match) -> Op | None:
    x, dims = match["x"], match["dims"]
    if match.root.attrs or not isinstance(x, Ref) or not isinstance(dims, tuple) or len(dims) != 1:
        return None
    alone = match.is_read_by("e", 2) and match.is_read_by("total", 1) and match.is_read_by("below", 1)
    same = match.types[match["e"].name] == match.root.result.type
    if not alone or not same or not _is_largest(match, dims[0]):
        return None
    return replace(match.root, name="softmax", args=(x, dims[0]))


def _is_largest(match: Match, dim: int) -> bool:
    """Whether the subtracted value is the largest of each row."""
    op = match.makers.get(match["most"].name) if isinstance(match["most"], Ref) else None
    while op is not None and op.name == "detach":
        op = match.makers.get(next(op.refs()))
    if op is None or op.attrs or op.name not in ("amax", "max") or len(op.args) != 3 or op.args[0] != match["x"]:
        return False
    along = op.args[1][0] if isinstance(op.args[1], tuple) and len(op.args[1]) == 1 else op.args[1]
    return isinstance(along, int) and along % len(match.root.result.type.shape) == dim and op.args[2] is True


IDIOMS = (
    Rewrite(
        name="grouped heads",
        pattern=Pattern(
            "(attention | attention_dropout)(q, reshape((k_copies := expand((k_inner := reshape(k, _)), _)), _),"
            " reshape((v_copies := expand((v_inner := reshape(v, _)), _)), _), *rest)"
        ),
        instead=_grouped_heads,
    ),
    Rewrite(
        name="rms_norm",
        pattern=Pattern("mul(w, mul(x, rsqrt(add(div(sum(pow(x, 2), dims, True), n), eps))))"),
        instead=_rms_norm,
    ),
    Rewrite(
        name="gelu",
        pattern=Pattern("mul(mul(x, 0.5), add(tanh(mul(add(x, mul(pow(x, 3), 0.044715)), 0.7978845608028654)), 1))"),
        instead=_gelu,
    ),
    Rewrite(
        name="softmax",
        pattern=Pattern("div((e := exp((below := sub(x, most)))), (total := sum(e, dims, True)))"),
        instead=_softmax,
    ),
)
