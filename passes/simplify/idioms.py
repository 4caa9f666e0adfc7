"""Operations that models spell out: a table of rewrites.

    t = tanh(mul(add(x, mul(pow(x, 3), 0.044715)), 0.7978845608028654))
    y = mul(mul(x, 0.5), add(t, 1))                                          ->    y = gelu(x, approximate=tanh)

    m = amax(x, (2,), True)        # or max(x, 2, True), detached or not
    e = exp(sub(x, m))                                                       ->    y = softmax(x, 2)
    y = div(e, sum(e, (2,), True))

    a, b = split(x, (8, 8), 3)     # or slices
    y = add(mul(x, cos), mul(cat((neg(b), a), 3), sin))                      ->    y = rotary(x, cos, sin, None, False)

    t = cat((a, b), 0)
    y = slice(t, 0, 0, 2)          # within a                                    ->    y = slice(a, 0, 0, 2)

    y = add(full((4, 8), 0), x)                                              ->    y = x

A single operation has its own derivative and saves only its operand. The maximum that a softmax subtracts cancels, and
so does its gradient, however it is distributed among equal maxima. A quotient without the subtraction overflows for
large numbers, so it is not rewritten as a softmax.
"""

from __future__ import annotations

from dataclasses import replace

from partc.ir.patterns import Match, Rewrite
from partc.ir.program import Arg, Op, Ref
from partc.rules.kernels import CONSTANTS, fill
from partc.rules.shapes import slice_bounds


def _grouped_heads(match: Match) -> Op | None:
    """Attention on keys and values shared by groups of query heads, without the expanded copies for each head."""
    groups = set()
    for name in ("k", "v"):
        shape, inner, copies, heads = (match.shape(f"{name}{part}") for part in ("", "_inner", "_copies", "_heads"))
        if shape is None or copies is None or len(shape) != 4 or len(copies) != 5:
            return None
        (b, g, t, d), n = shape, copies[2]
        if (inner, copies, heads) != ((b, g, 1, t, d), (b, g, n, t, d), (b, g * n, t, d)):
            return None  # the last view may also join b and g: then every group is an example with n heads
        groups.add(g)
    if len(groups) > 1:
        return None
    return replace(match.root, args=(match["q"], match["k"], match["v"], *match["rest"]))


def _repeated_heads(match: Match) -> Op | None:
    """The same without `repeat_interleave` of keys and values for groups of query heads."""
    if not isinstance(match["n"], int) or any(len(match.shape(name) or ()) != 4 for name in ("k", "v")):
        return None
    return replace(match.root, args=(match["q"], match["k"], match["v"], *match["rest"]))


def _rms_norm(match: Match) -> Op | None:
    x, w = match["x"], match.bound.get("w")
    shape = match.shape("x")
    if not shape or not isinstance(match["eps"], float) or match.bound.get("power", -0.5) != -0.5:
        return None
    if w is not None and (match.shape("w") != shape[-1:] or w.name in match.makers):
        return None
    if match["dims"] != (len(shape) - 1,) or match["n"] != shape[-1]:
        return None
    return replace(match.root, name="rms_norm", args=(x, shape[-1:], w, match["eps"]), attrs=())


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
    """Whether the subtracted value is the maximum of each row."""
    op = match.makers.get(match["most"].name) if isinstance(match["most"], Ref) else None
    while op is not None and op.name == "detach":
        op = match.makers.get(next(op.refs()))
    if op is None or op.attrs or op.name not in ("amax", "max") or len(op.args) != 3 or op.args[0] != match["x"]:
        return False
    along = op.args[1][0] if isinstance(op.args[1], tuple) and len(op.args[1]) == 1 else op.args[1]
    return isinstance(along, int) and along % len(match.root.result.type.shape) == dim and op.args[2] is True


def _rotary(match: Match) -> Op | None:
    return _rotation(match, match["x"], both_angles=True)


def _rotary_of_pairs(match: Match) -> Op | None:
    part = _part(match, match["a"])
    return None if part is None else _rotation(match, part[0], both_angles=False)


def _rotation(match: Match, x: Arg, *, both_angles: bool) -> Op | None:
    """The rotation of x, if `a` and `b` are the elements of its pairs; `both_angles`: each element has an angle."""
    root, a, b = match.root, _part(match, match["a"]), _part(match, match["b"])
    type = root.result.type
    if root.attrs or not isinstance(x, Ref) or match.types[x.name] != type or not type.shape:
        return None
    *rows, size = type.shape
    half, interleaved = size // 2, "both" in match.bound
    picked = (range(0, size, 2), range(1, size, 2)) if interleaved else (range(half), range(half, size))
    if size == 0 or size % 2 or (a, b) != ((x, picked[0]), (x, picked[1])):
        return None
    joined = (*rows, half, 2) if interleaved else type.shape
    if match["dim"] != len(joined) - 1 or (interleaved and match.shape("both") != joined):
        return None
    for name in ("cos", "sin"):
        shape = match.shape(name)
        if not shape or len(shape) > len(type.shape) or match.types[match[name].name].dtype != type.dtype:
            return None
        if shape[-1] != (size if both_angles else half):
            return None
    return replace(root, name="rotary", args=(x, match["cos"], match["sin"], None, interleaved))


def _part_of_whole(match: Match) -> Op | None:
    """A slice of a concatenation as a slice of one part; tensors that are filled part by part end in these."""
    shape, dim, parts = match.shape("whole"), match["dim"], match["parts"]
    if match.root.attrs or shape is None or not isinstance(dim, int) or not isinstance(parts, tuple):
        return None
    along, start, end, step = slice_bounds(match.root, shape)
    first = 0
    for part in parts if along == dim % len(shape) else ():
        size = match.types[part.name].shape[along]
        if first <= start and end <= first + size:
            if end - start == size and step == 1:
                return replace(match.root, name="reshape", args=(part, match.root.result.type.shape))
            return replace(match.root, args=(part, along, start - first, end - first, step))
        first += size
    return None


def _sum_with_zeros(match: Match) -> Op | None:
    """A value that is added to zeros as itself; layers that sum parts in place begin with zeros."""
    root, x = match.root, match["x"]
    zeros = match.makers.get(match["zeros"].name) if isinstance(match["zeros"], Ref) else None
    if root.attrs or zeros is None or zeros.name not in CONSTANTS or fill(zeros) != 0:
        return None
    if not isinstance(x, Ref) or match.types[x.name] != root.result.type:
        return None
    return replace(root, name="reshape", args=(x, root.result.type.shape))


def _partial_rotary(match: Match) -> Op | None:
    """A rotation of the first elements of each row, with the others unchanged."""
    type, head, tail = match.root.result.type, _part(match, match["x"]), _part(match, match["rest"])
    size = type.shape[-1] if type.shape else 0
    if match.root.attrs or head is None or tail is None or match["dim"] != len(type.shape) - 1:
        return None
    rotated = match.types[match["x"].name].shape[-1] if match["rotated"] is None else match["rotated"]
    whole = head[0] == tail[0] and match.types[head[0].name] == type
    if not whole or head[1] != range(rotated) or tail[1] != range(rotated, size):
        return None
    args = (head[0], match["cos"], match["sin"], rotated, match["interleaved"])
    return replace(match.root, name="rotary", args=args)


def _part(match: Match, arg: Arg) -> tuple[Ref, range] | None:
    """The value of which an argument is a part along the last dimension, and the part's indices."""
    op = match.makers.get(arg.name) if isinstance(arg, Ref) else None
    if op is None or op.name not in ("slice", "split", "reshape") or not isinstance(op.args[0], Ref):
        return None
    base = op.args[0]
    shape = match.types[base.name].shape
    if op.name == "reshape":
        return _column(match, op, base)
    if op.name == "slice":
        dim, start, end, step = slice_bounds(op, shape)
        return (base, range(start, end, step)) if dim == len(shape) - 1 else None
    if op.args[2] != len(shape) - 1:
        return None
    place = next(place for place, value in enumerate(op.results) if Ref(value.name) == arg)
    sizes = [value.type.shape[-1] for value in op.results]
    return base, range(sum(sizes[:place]), sum(sizes[: place + 1]))


def _column(match: Match, op: Op, base: Ref) -> tuple[Ref, range] | None:
    """Every n-th element of rows that have been reshaped to [*rows, columns, n]."""
    found = _part(match, base)
    maker = match.makers.get(found[0].name) if found is not None else None
    if found is None or maker is None or maker.name != "reshape" or not isinstance(maker.args[0], Ref):
        return None
    whole, shape, made = match.types[maker.args[0].name].shape, maker.result.type.shape, op.result.type.shape
    apart = len(found[1]) == 1 and len(shape) > 1 and made == shape[:-1]
    if not apart or whole != (*shape[:-2], shape[-2] * shape[-1]):
        return None
    return maker.args[0], range(found[1].start, whole[-1], shape[-1])


_MEAN = "add(div(sum((pow(x, 2) | mul(x, x) | square(x)), dims, True), n), eps)"  # of squares
_FACTOR, _DIVISOR = f"(rsqrt({_MEAN}) | pow({_MEAN}, power))", f"sqrt({_MEAN})"
# Forms with a weight come first, since they contain the others.
_RMS_NORMS = (
    f"mul(w, (mul(x, {_FACTOR}) | div(x, {_DIVISOR})))",
    f"mul(mul(w, x), {_FACTOR})",
    f"div(mul(w, x), {_DIVISOR})",
    f"mul(x, {_FACTOR})",
    f"div(x, {_DIVISOR})",
)

IDIOMS = (
    Rewrite("sum with zeros", "add(x, zeros)", _sum_with_zeros),
    Rewrite("part", "slice((whole := cat(parts, dim)), *cut)", _part_of_whole),
    Rewrite(
        "grouped heads",
        "(attention | attention_dropout)(q,"
        " (k_heads := reshape((k_copies := expand((k_inner := reshape(k, _)), _)), _)),"
        " (v_heads := reshape((v_copies := expand((v_inner := reshape(v, _)), _)), _)), *rest)",
        _grouped_heads,
    ),
    Rewrite(
        "repeated heads",
        "(attention | attention_dropout)(q, repeat_interleave(k, n, 1), repeat_interleave(v, n, 1), *rest)",
        _repeated_heads,
    ),
    *(Rewrite("rms_norm", form, _rms_norm) for form in _RMS_NORMS),
    Rewrite("gelu", "mul(mul(x, 0.5), add(tanh(mul(add(x, mul(pow(x, 3), 0.044715)), 0.7978845608028654)), 1))", _gelu),
    Rewrite("softmax", "div((e := exp((below := sub(x, most)))), (total := sum(e, dims, True)))", _softmax),
    Rewrite("rotary", "add(mul(x, cos), mul(cat((neg(b), a), dim), sin))", _rotary),
    Rewrite(
        "interleaved rotary",
        "add(mul(x, cos), mul(reshape((both := cat((reshape(neg(b), _), reshape(a, _)), dim)), _), sin))",
        _rotary,
    ),
    Rewrite(
        "rotary of pairs",
        "cat((sub(mul(a, cos), mul(b, sin)), add(mul(b, cos), mul(a, sin))), dim)",
        _rotary_of_pairs,
    ),
    Rewrite(
        "interleaved rotary of pairs",
        "reshape((both := cat((reshape(sub(mul(a, cos), mul(b, sin)), _),"
        " reshape(add(mul(b, cos), mul(a, sin)), _)), dim)), _)",
        _rotary_of_pairs,
    ),
    Rewrite("partial rotary", "cat((rotary(x, cos, sin, rotated, interleaved), rest), dim)", _partial_rotary),
)
