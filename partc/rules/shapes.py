"""Rules that depend on shapes and literal arguments: one builder per family of operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from partc.ir.program import FLOATING, Arg, Op, TensorType
from partc.rules.rule import Dims, OpRule, argument, integers, is_ref, make

Types = tuple[TensorType, ...]  # of the operands, in the order of op.refs()
Builder = Callable[[Op, Types], OpRule | None]


def named_dims(shape: Sequence[int], prefix: str = "d") -> tuple[Dims, dict[str, int]]:
    """One factor for each dimension: d0, d1, ..."""
    return tuple((f"{prefix}{i}",) for i in range(len(shape))), {f"{prefix}{i}": n for i, n in enumerate(shape)}


def broadcast_dims(shape: Sequence[int], whole: Sequence[int]) -> Dims:
    """Dimensions of an operand that broadcasts to `whole`, whose factors are d0, d1, ..."""
    start = len(whole) - len(shape)
    return tuple((f"d{start + i}",) if n == whole[start + i] else () for i, n in enumerate(shape))


def dim_index(dim: int, rank: int) -> int:
    return dim % rank if rank else 0


# Elementwise and broadcasting operations


def pointwise(op: Op, types: Types, linear: Sequence[Collection[int]] = ()) -> OpRule:
    """Operands broadcast to the result; every dimension is parallel."""
    whole = op.results[0].type.shape
    dims, sizes = named_dims(whole)
    return make([(broadcast_dims(t.shape, whole), t) for t in types], [dims] * len(op.results), sizes, linear=linear)


def additive(op: Op, types: Types) -> OpRule:
    """add, sub: jointly linear, unless one side is a number."""
    return pointwise(op, types, [(0, 1)] if len(types) == 2 else [])


def product(op: Op, types: Types) -> OpRule:
    return pointwise(op, types, [(index,) for index in range(len(types))])


def quotient(op: Op, types: Types) -> OpRule:
    """div: linear in the dividend, unless the quotient is rounded."""
    exact = argument(op, 2, "rounding_mode") is None and op.args and is_ref(op.args[0])
    return pointwise(op, types, [(0,)] if exact else [])


def unary_linear(op: Op, types: Types) -> OpRule:
    return pointwise(op, types, [(0,)])


def cast(op: Op, types: Types) -> OpRule:
    """A cast is linear, except into integers, where it rounds."""
    made = op.results[0].type.dtype
    exact = made in FLOATING or (made != "bool" and types[0].dtype not in FLOATING)
    return pointwise(op, types, [(0,)] if exact else [])


def where(op: Op, types: Types) -> OpRule:
    """where(condition, x, y): jointly linear in x and y; a number other than 0 breaks that."""
    if any(not is_ref(arg) and arg != 0 for arg in op.args[1:3]):
        return pointwise(op, types)
    return pointwise(op, types, [range(1, len(types))])


def masked_fill(op: Op, types: Types) -> OpRule:
    return pointwise(op, types, [(0,)] if argument(op, 2, "value") == 0 else [])


# Reductions and operations along some dimensions


def reduction(op: Op, types: Types) -> OpRule:
    """sum(x, dims, keepdim), count_nonzero(x, dims): the reduced dimensions are contracted."""
    return _reduced(op, types, 1, contracted=True)


def whole_reduction(index: int = 1) -> Builder:
    """amax, mean, var, any, argmax ...: the reduced dimensions (the argument at `index`) must be whole."""

    def build(op: Op, types: Types) -> OpRule:
        if len(types) > 1:  # max(x, y) compares elements
            return pointwise(op, types)
        return _reduced(op, types, index, contracted=False)

    return build


def _reduced(op: Op, types: Types, index: int, *, contracted: bool) -> OpRule:
    shape = types[0].shape
    dims, sizes = named_dims(shape)
    given = argument(op, index, "dim")
    named = given if given is not None and not isinstance(given, bool) else ()
    reduced = {dim_index(d, len(shape)) for d in integers(named)} or set(range(len(shape)))
    kept = tuple(dim for i, dim in enumerate(dims) if i not in reduced)
    wide = tuple(() if i in reduced else dim for i, dim in enumerate(dims))
    results = [wide if len(value.type.shape) == len(shape) else kept for value in op.results]
    blocked = () if contracted else tuple(f"d{i}" for i in reduced)
    return make([(dims, types[0])], results, sizes, blocked=blocked, linear=[(0,)] if op.name == "sum" else [])


def whole_dims(index: int, name: str = "dim", *, linear: bool = False, default: Arg = -1) -> Builder:
    """Operations that need the dimensions in one of their arguments whole: softmax, cumsum, flip, roll, sort.

    Operands have equal shapes.
    """

    def build(op: Op, types: Types) -> OpRule:
        shape = types[0].shape
        dims, sizes = named_dims(shape)
        given = argument(op, index, name, default)
        named = integers(given) or tuple(range(len(shape)))
        blocked = {f"d{dim_index(d, len(shape))}" for d in named}
        results = []
        for value in op.results:
            for i, n in enumerate(value.type.shape):
                if n != shape[i]:  # topk returns fewer elements
                    sizes[f"k{i}"] = n
                    blocked.add(f"k{i}")
            results.append(tuple((f"k{i}" if n != shape[i] else f"d{i}",) for i, n in enumerate(value.type.shape)))
        return make([(dims, type) for type in types], results, sizes, blocked=blocked, linear=[(0,)] if linear else [])

    return build


def last_dims(count: int, *, linear: bool = False) -> Builder:
    """Operations that need the last `count` dimensions whole: tril, triu, pooling, interpolation."""

    def build(op: Op, types: Types) -> OpRule:
        shape = types[0].shape
        dims, sizes = named_dims(shape)
        lead = len(shape) - count
        results = []
        for value in op.results:
            tail = value.type.shape[lead:]
            sizes.update((f"o{i}", n) for i, n in enumerate(tail))
            results.append((*dims[:lead], *((f"o{i}",) for i in range(len(tail)))))
        blocked = {name for name in sizes if name.startswith("o") or int(name[1:]) >= lead}
        return make([(dims, types[0])], results, sizes, blocked=blocked, linear=[(0,)] if linear else [])

    return build


def diff(op: Op, types: Types) -> OpRule:
    """diff(x, n, dim, prepend, append): neighbours along one dimension."""
    shape, made = types[0].shape, op.results[0].type.shape
    dim = dim_index(integers(argument(op, 2, "dim", -1))[0], len(shape))
    dims, sizes = named_dims(shape)
    operands, blocked = [], set()
    for index, length in enumerate((*(type.shape[dim] for type in types), made[dim])):
        sizes[f"n{index}"] = length
        blocked.add(f"n{index}")
        operands.append((*dims[:dim], (f"n{index}",), *dims[dim + 1 :]))
    result = operands.pop()
    groups = [range(len(types))]
    return make(list(zip(operands, types, strict=True)), [result], sizes, blocked=blocked, linear=groups)


def pad(op: Op, types: Types) -> OpRule:
    """constant_pad_nd(x, pads, value): pads count from the last dimension."""
    shape, whole = types[0].shape, op.results[0].type.shape
    pads = integers(argument(op, 1, "pad"))
    padded = {len(shape) - 1 - i // 2 for i, n in enumerate(pads) if n}
    dims, sizes = named_dims(shape)
    sizes.update((f"o{i}", whole[i]) for i in padded)
    result = tuple((f"o{i}",) if i in padded else dim for i, dim in enumerate(dims))
    blocked = {name for i in padded for name in (f"o{i}", f"d{i}")}
    exact = argument(op, 2, "value", 0) == 0
    return make([(dims, types[0])], [result], sizes, blocked=blocked, linear=[(0,)] if exact else [])


def normalized(op: Op, types: Types) -> OpRule:
    """rms_norm, layer_norm(x, normalized_shape, ...): cutting a normalized dimension needs sums over the ranks."""
    shape = types[0].shape
    dims, sizes = named_dims(shape)
    count = len(integers(argument(op, 1, "normalized_shape")))
    tail = dims[len(shape) - count :]
    blocked = {name for dim in tail for name in dim}
    weights = [(tail, type) for type in types[1:]]
    results = [dims] * len(op.results)
    return make([(dims, types[0]), *weights], results, sizes, blocked=blocked, normalized=blocked)


def rotary(op: Op, types: Types) -> OpRule:
    """rotary(x, cos, sin, rotated, interleaved): rows may be cut between pairs, unless only a part is rotated."""
    whole = op.results[0].type.shape
    dims, sizes = named_dims(whole)
    last, pair = dims[-1], ("u",)
    if op.args[3] is None:
        sizes |= {"u": whole[-1] // 2, "p": 2}
        last = ("u", "p") if op.args[4] else ("p", "u")
    else:
        sizes["t"] = types[1].shape[-1]
        pair = ("t",)
    tables = [
        ((*broadcast_dims(t.shape[:-1], whole[:-1]), last if t.shape[-1] == whole[-1] else pair), t) for t in types[1:]
    ]
    row = (*dims[:-1], last)
    blocked = {"p", "t", *dims[-1]}
    return make([(row, types[0]), *tables], [row], sizes, blocked=blocked, linear=[(0,)])


def fourier(op: Op, types: Types) -> OpRule:
    """fourier(x, dims, inverse): the transformed dimensions, and the pairs in the last, must be whole."""
    dims, sizes = named_dims(types[0].shape)
    blocked = {f"d{dim}" for dim in (*integers(op.args[1]), len(dims) - 1)}
    return make([(dims, types[0])], [dims], sizes, blocked=blocked, linear=[(0,)])


# Gradients that a model defines itself


def incoming_gradient(op: Op, types: Types) -> OpRule:
    return replace(unary_linear(op, types), makes_gradients=True)


def own_gradient_rule(op: Op, types: Types) -> OpRule:
    """own_gradient(results, operands, gradients): equal numbers in the attribute `dims` are the same factor.

    If an operand lacks a cut factor, its gradient is a sum over the ranks; if all results lack it, they are partial.
    The attribute `alone` numbers the operands whose gradients need no incoming gradient: a partial sum of such an
    operand has the gradient of the whole sum. Factors in the attribute `whole` are never cut.
    """
    results, operands, gradients = (len(each) for each in op.args if isinstance(each, tuple))
    given = dict(op.attrs)["dims"]
    assert isinstance(given, tuple)
    numbers = [integers(each) for each in (*given, *given[results:])]
    dims = [tuple((f"d{number}",) for number in each) for each in numbers]
    sizes = {
        f"d{number}": size
        for each, type in zip(numbers, types, strict=True)
        for number, size in zip(each, type.shape, strict=True)
    }
    rule = make(
        list(zip(dims, types, strict=True)),
        dims[:results],
        sizes,
        blocked={f"d{number}" for number in integers(dict(op.attrs).get("whole", ()))},
        added=range(results),
        linear=[range(results)],
    )
    alone = integers(dict(op.attrs).get("alone", ()))
    return replace(
        rule,
        gradients=tuple(range(results + operands, results + operands + gradients)),
        unread=tuple(first + index for first in (results, results + operands) for index in alone),
    )


# Views


def reshape(op: Op, types: Types) -> OpRule | None:
    given, wanted = types[0].shape, op.results[0].type.shape
    if math.prod(given) != math.prod(wanted) or 0 in given:
        return None
    operand, result, sizes, blocked = common_factors(given, wanted)
    return make([(operand, types[0])], [result], sizes, blocked=blocked, linear=[(0,)])


def common_factors(given: Sequence[int], wanted: Sequence[int]) -> tuple[Dims, Dims, dict[str, int], frozenset[str]]:
    """The finest common factors of the dimensions of both shapes, major to minor.

    Where boundaries do not nest (2 x 3 viewed as 3 x 2), a common leading part may still be cut; the rest is blocked.
    """
    sides = [list(given), list(wanted)]
    made: list[list[list[str]]] = [[[] for _ in given], [[] for _ in wanted]]
    place = [0, 0]
    left = [1, 1]  # the remaining size of the current dimension on each side
    sizes: dict[str, int] = {}
    blocked: set[str] = set()

    def advance(side: int) -> bool:
        while left[side] == 1 and place[side] < len(sides[side]):
            left[side] = sides[side][place[side]]
            place[side] += 1
        return left[side] != 1

    def emit(size: int, on: Iterable[int], *, whole: bool = False) -> None:
        name = f"f{len(sizes)}"
        sizes[name] = size
        if whole:
            blocked.add(name)
        for side in on:
            made[side][place[side] - 1].append(name)
            left[side] //= size

    while advance(0) and advance(1):
        shared = math.gcd(left[0], left[1])
        if shared > 1:
            emit(shared, (0, 1))
            if 1 in left:
                continue
        spans = [left[0], left[1]]
        for side in (0, 1):
            emit(left[side], (side,), whole=True)
        while spans[0] != spans[1]:
            side = 0 if spans[0] < spans[1] else 1
            advance(side)
            spans[side] *= left[side]
            emit(left[side], (side,), whole=True)
    return _frozen(made[0]), _frozen(made[1]), sizes, frozenset(blocked)


def _frozen(dims: list[list[str]]) -> Dims:
    return tuple(tuple(dim) for dim in dims)


def permute(op: Op, types: Types) -> OpRule:
    dims, sizes = named_dims(types[0].shape)
    order = [dim_index(d, len(dims)) for d in integers(argument(op, 1, "dims"))]
    return make([(dims, types[0])], [tuple(dims[d] for d in order)], sizes, linear=[(0,)])


def expand(op: Op, types: Types) -> OpRule:
    return pointwise(op, types, [(0,)])


def _pieces(sizes: Sequence[int]) -> tuple[int, list[int]]:
    """The common grain of the pieces along a dimension, and the number of grains in each."""
    grain = math.gcd(*sizes)
    return grain, [size // grain for size in sizes]


def split(op: Op, types: Types) -> OpRule:
    """split(x, sizes, dim): the pieces are multiples of a grain `u`, which may be cut in all pieces at once.

    With `ways`, the dimension consists of as many equal parts, each of which is split, and only parts are cut.
    """
    shape, ways = types[0].shape, dict(op.attrs).get("ways")
    dim = dim_index(integers(argument(op, 2, "dim", 0))[0], len(shape))
    if isinstance(ways, int):
        return _split_parts(op, types[0], dim, ways)
    return _along_grain(op, types, dim, [value.type.shape[dim] for value in op.results], joined=False)


def _split_parts(op: Op, x: TensorType, dim: int, ways: int) -> OpRule:
    dims, sizes = named_dims(x.shape)
    names = [f"c{i}" for i in range(len(op.results))]
    sizes |= {"n": ways, "c": x.shape[dim] // ways}
    sizes.update((name, value.type.shape[dim] // ways) for name, value in zip(names, op.results, strict=True))
    whole, *parts = ((*dims[:dim], ("n", name), *dims[dim + 1 :]) for name in ("c", *names))
    return make([(whole, x)], parts, sizes, blocked={"c", *names}, linear=[(0,)])


def cat(op: Op, types: Types) -> OpRule:
    shape = op.results[0].type.shape
    dim = dim_index(integers(argument(op, 1, "dim", 0))[0], len(shape))
    return _along_grain(op, types, dim, [type.shape[dim] for type in types], joined=True)


def slice_scatter(op: Op, types: Types) -> OpRule:
    """slice_scatter(x, part, dim, start, end, step): the part's own dimension is whole, all others are cut alike."""
    dims, sizes = named_dims(types[0].shape)
    dim = dim_index(integers(argument(op, 2, "dim", 0))[0], len(dims))
    sizes["k"] = types[1].shape[dim]
    operands = [(dims, types[0]), ((*dims[:dim], ("k",), *dims[dim + 1 :]), types[1])]
    return make(operands, [dims], sizes, blocked={f"d{dim}", "k"}, linear=[range(2)])


def _along_grain(op: Op, types: Types, dim: int, pieces: Sequence[int], *, joined: bool) -> OpRule:
    whole_shape = op.results[0].type.shape if joined else types[0].shape
    dims, sizes = named_dims(whole_shape)
    grain, counts = _pieces([*pieces, whole_shape[dim]])
    sizes.update({"u": grain, "c": counts[-1]})
    sizes.update((f"c{i}", count) for i, count in enumerate(counts[:-1]))
    blocked = {name for name in sizes if name.startswith("c")}
    whole = (*dims[:dim], ("c", "u"), *dims[dim + 1 :])
    parts = [(*dims[:dim], (f"c{i}", "u"), *dims[dim + 1 :]) for i in range(len(pieces))]
    if joined:
        operands = list(zip(parts, types, strict=True))
        return make(operands, [whole], sizes, blocked=blocked, linear=[range(len(types))])
    return make([(whole, types[0])], parts, sizes, blocked=blocked, linear=[(0,)])


def slice_(op: Op, types: Types) -> OpRule:
    """slice(x, dim, start, end, step): cut like a piece of a split, or between the steps."""
    shape, made = types[0].shape, op.results[0].type.shape
    dim, start, _, step = slice_bounds(op, shape)
    dims, sizes = named_dims(shape)
    operand: tuple[str, ...]
    result: tuple[str, ...]
    if step == 1:
        grain, (count, kept) = _pieces_at(start, shape[dim], made[dim])
        sizes.update({"u": grain, "c": count, "k": kept})
        operand, result = ("c", "u"), ("k", "u")
    elif made[dim] * step == shape[dim]:
        sizes.update({"u": made[dim], "c": step})
        operand, result = ("u", "c"), ("u",)
    else:
        sizes.update({"c": shape[dim], "k": made[dim]})
        operand, result = ("c",), ("k",)
    before, after = dims[:dim], dims[dim + 1 :]
    return make(
        [((*before, operand, *after), types[0])],
        [(*before, result, *after)],
        sizes,
        blocked={"c", "k"},
        linear=[(0,)],
    )


def _pieces_at(start: int, size: int, kept: int) -> tuple[int, list[int]]:
    grain = math.gcd(start, size, kept)
    return grain, [size // grain, kept // grain]


def slice_bounds(op: Op, shape: Sequence[int]) -> tuple[int, int, int, int]:
    """dim, start, end and step of a slice, all non-negative and inside the tensor."""
    dim = dim_index(integers(argument(op, 1, "dim", 0))[0], len(shape))
    size = shape[dim]
    start, end, step = (
        next(iter(integers(argument(op, place, name))), default)
        for place, name, default in ((2, "start", 0), (3, "end", size), (4, "step", 1))
    )
    inside = [min(max(value + size if value < 0 else value, 0), size) for value in (start, end)]
    return dim, inside[0], max(inside), step


def repeat(op: Op, types: Types) -> OpRule:
    """repeat(x, counts): each result dimension is [count, size]; copies may be cut."""
    shape, whole = types[0].shape, op.results[0].type.shape
    new = len(whole) - len(shape)
    dims, sizes = named_dims(shape)
    sizes.update((f"c{i}", count) for i, count in enumerate(copies(shape, whole)))
    result = tuple((f"c{i}", *(dims[i - new] if i >= new else ())) for i in range(len(whole)))
    return make([(dims, types[0])], [result], sizes, linear=[(0,)])


def copies(shape: Sequence[int], made: Sequence[int]) -> tuple[int, ...]:
    """The number of copies in each dimension of a tensor that `repeat` makes of one with this shape."""
    before = (*(1,) * (len(made) - len(shape)), *shape)
    return tuple(size // part if part else 1 for size, part in zip(made, before, strict=True))


def repeat_interleave(op: Op, types: Types) -> OpRule | None:
    """repeat_interleave(x, count, dim): each element of the dimension becomes `count` neighbours."""
    count, dim = argument(op, 1, "repeats"), argument(op, 2, "dim")
    if not isinstance(count, int) or not isinstance(dim, int):
        return None
    dims, sizes = named_dims(types[0].shape)
    dim = dim_index(dim, len(dims))
    sizes["c"] = count
    result = (*dims[:dim], (*dims[dim], "c"), *dims[dim + 1 :])
    return make([(dims, types[0])], [result], sizes, blocked={"c"}, linear=[(0,)])


# Constants


def constant(op: Op, types: Types) -> OpRule:
    """full, zeros, ones, new_full ...: any dimension of the result may be cut; an operand only lends its dtype."""
    dims, sizes = named_dims(op.results[0].type.shape)
    lenders = []
    for index, type in enumerate(types):
        lent, more = named_dims(type.shape, f"x{index}_")
        sizes.update(more)
        lenders.append((lent, type))
    blocked = {name for name in sizes if name.startswith("x")}
    return make(lenders, [dims], sizes, blocked=blocked)


def positional(op: Op, types: Types) -> OpRule:
    """arange, eye, linspace: an element depends on its position, so no dimension can be cut."""
    rule = constant(op, types)
    return make([], rule.results, {f.name: f.size for f in rule.factors}, blocked=[f.name for f in rule.factors])
