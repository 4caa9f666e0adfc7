"""Bounds of integers: the least and the largest number that a value can have.

    s, chosen = topk(scores, 2)      # scores: f32[64, 4]     chosen: 0 to 3
    experts   = reshape(chosen, (128,))                       experts: 0 to 3
    beyond    = ge(experts, 4)                                beyond: 0 to 0, which is always false

Booleans are the integers 0 and 1. A number from a batch or a buffer is bounded only by its dtype, until a lookup uses
it as an index: torch refuses indices out of range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from partc.ir.program import FLOATING, ITEMSIZE, Arg, DType, Graph, Op, Ref, TensorType
from partc.rules.rule import argument


@dataclass(frozen=True, slots=True)
class IntegerBounds:
    """The least and the largest number, both included."""

    least: int
    most: int

    @classmethod
    def around(cls, numbers: Sequence[int]) -> IntegerBounds:
        return cls(min(numbers), max(numbers))

    def __contains__(self, other: IntegerBounds) -> bool:
        return self.least <= other.least and other.most <= self.most

    @property
    def only(self) -> int | None:
        """The one number within the bounds; None if there are more."""
        return self.least if self.least == self.most else None


_MOVING = frozenset({"all_gather", "unshard", "shard", "take", "all_to_all"})  # collectives that compute nothing
ANY = IntegerBounds(-(1 << 2000), 1 << 2000)  # wider than the finite numbers of every dtype


def bounds_of_dtype(dtype: DType) -> IntegerBounds:
    if dtype in FLOATING:
        return ANY
    bits = 8 * ITEMSIZE[dtype]
    if dtype in ("bool", "u8"):
        return IntegerBounds(0, 1 if dtype == "bool" else (1 << bits) - 1)
    return IntegerBounds(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


@dataclass(frozen=True, slots=True)
class BoundedCall:
    """An operation, the known bounds of its operands, and the operations that computed them."""

    op: Op
    types: Mapping[str, TensorType]
    known: Mapping[str, IntegerBounds]
    makers: Mapping[str, Op]

    def at(self, index: int, name: str = "", default: Arg = None) -> IntegerBounds:
        """The bounds of an argument, by position or name."""
        return self.of(argument(self.op, index, name, default))

    def of(self, arg: Arg) -> IntegerBounds:
        if isinstance(arg, Ref):
            return self.known.get(arg.name) or bounds_of_dtype(self.types[arg.name].dtype)
        if isinstance(arg, int):
            # A number beyond the range of the computation's dtype wraps around.
            number = IntegerBounds(int(arg), int(arg))
            return number if number in bounds_of_dtype(self.dtype) else ANY
        return ANY

    @property
    def dtype(self) -> DType:
        """The dtype in which the operation computes: of its result, or of the numbers that it compares."""
        made = self.op.results[0].type.dtype
        first = next(self.op.refs(), None)
        return self.types[first].dtype if made == "bool" and first is not None else made

    def shape(self, index: int = 0) -> tuple[int, ...]:
        arg = self.op.args[index]
        return self.types[arg.name].shape if isinstance(arg, Ref) else ()

    def places(self, index: int, default: int | None) -> IntegerBounds:
        """The bounds of indices along the dimension that an argument names; along all dimensions if it is None."""
        dim, shape = argument(self.op, index, "dim", default), self.shape()
        size = shape[dim] if isinstance(dim, int) and not isinstance(dim, bool) and shape else math.prod(shape)
        return IntegerBounds(0, max(size - 1, 0))

    def chosen(self, x: Arg, mask: Arg, truth: bool) -> IntegerBounds:
        """The bounds of the elements of x at which a mask equals `truth`; the mask may compare x with a number."""
        found, maker = self.of(x), self.makers.get(mask.name) if isinstance(mask, Ref) else None
        if maker is None or maker.name not in OPPOSITE or maker.args[0] != x:
            return found
        number = replace(self, op=maker).of(maker.args[1]).only
        if number is None:
            return found
        name = maker.name if truth else OPPOSITE[maker.name]
        least, most = found.least, found.most
        if name in ("gt", "ge", "eq"):
            least = max(least, number + (name == "gt"))
        if name in ("lt", "le", "eq"):
            most = min(most, number - (name == "lt"))
        if name == "ne":
            least, most = least + (least == number), most - (most == number)
        return IntegerBounds(least, most) if least <= most else found


_Formula = Callable[[BoundedCall], IntegerBounds | tuple[IntegerBounds, ...]]


OPPOSITE: Mapping[str, str] = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}


def bounds_of(call: BoundedCall) -> dict[str, IntegerBounds]:
    """The bounds of the results that are integers or booleans, and of operands that the operation uses as indices."""
    op = call.op
    results = [(place, value) for place, value in enumerate(op.results) if value.type.dtype not in FLOATING]
    made = _looked_up(call)
    if not results:
        return made
    formula = FORMULAS.get(op.name)
    found = call.at(0) if op.name in _MOVING else formula(call) if formula is not None else ANY
    for place, value in results:
        dtype, each = bounds_of_dtype(value.type.dtype), found[place] if isinstance(found, tuple) else found
        made[value.name] = each if each in dtype else dtype  # larger numbers wrap around
    return made


def bounds_of_graph(graph: Graph, types: Mapping[str, TensorType]) -> dict[str, IntegerBounds]:
    """The bounds of a graph's integers and booleans; inputs are left out until a lookup uses them as indices."""
    makers = graph.makers()
    known: dict[str, IntegerBounds] = {}
    for op in graph.ops:
        known |= bounds_of(BoundedCall(op, types, known, makers))
    return known


def _looked_up(call: BoundedCall) -> dict[str, IntegerBounds]:
    """The bounds of a lookup's indices, which are in range."""
    dim, places = {
        "gather": (argument(call.op, 1, "dim"), argument(call.op, 2, "index")),
        "embedding": (0, argument(call.op, 1, "indices")),
    }.get(call.op.name, (None, None))
    if not isinstance(dim, int) or not isinstance(places, Ref) or not call.shape():
        return {}
    found, size = call.of(places), call.shape()[dim]
    least, most = max(found.least, 0), min(found.most, size - 1)
    return {places.name: IntegerBounds(least, most)} if least <= most else {}


def _joined(*given: IntegerBounds) -> IntegerBounds:
    """Bounds that contain the elements of several operands."""
    return IntegerBounds(min(each.least for each in given), max(each.most for each in given))


def _nonzero(x: IntegerBounds) -> IntegerBounds:
    return IntegerBounds(int(x.least > 0 or x.most < 0), int(x != IntegerBounds(0, 0)))


def _negated(x: IntegerBounds) -> IntegerBounds:
    return IntegerBounds(1 - x.most, 1 - x.least)


def _corners(of: Callable[[int, int], int]) -> _Formula:
    """The bounds of a function of two numbers that is monotone in each of them."""
    return lambda call: IntegerBounds.around([of(*each) for each in product(*map(_ends, (call.at(0), call.at(1))))])


def _ends(x: IntegerBounds) -> tuple[int, int]:
    return x.least, x.most


def _added(sign: int) -> _Formula:
    def formula(call: BoundedCall) -> IntegerBounds:
        alpha = argument(call.op, 2, "alpha", 1)
        if not isinstance(alpha, int):
            return ANY
        return IntegerBounds.around([x + sign * alpha * y for x, y in product(_ends(call.at(0)), _ends(call.at(1)))])

    return formula


def _quotient(call: BoundedCall) -> IntegerBounds:
    mode = "floor" if call.op.name == "floor_divide" else dict(call.op.attrs).get("rounding_mode")
    x, y = call.at(0), call.at(1)
    if y.least <= 0 or mode not in ("floor", "trunc"):
        return ANY
    down = [a // b if mode == "floor" or a >= 0 else -(-a // b) for a, b in product(_ends(x), _ends(y))]
    return IntegerBounds.around(down)


def _remainder(call: BoundedCall) -> IntegerBounds:
    x, y = call.at(0), call.at(1)
    if y.least <= 0:
        return ANY
    return x if x.least >= 0 and x.most < y.least else IntegerBounds(0, y.most - 1)


def _clamped(call: BoundedCall) -> IntegerBounds:
    x = call.at(0)
    name = call.op.name
    low = (1, "min") if name != "clamp_max" else None
    high = (1 if name == "clamp_max" else 2, "max") if name != "clamp_min" else None
    if low is not None and argument(call.op, *low) is not None:
        limit = call.at(*low)
        x = IntegerBounds(max(x.least, limit.least), max(x.most, limit.most))
    if high is not None and argument(call.op, *high) is not None:
        limit = call.at(*high)
        x = IntegerBounds(min(x.least, limit.least), min(x.most, limit.most))
    return x


def _and_bounds(call: BoundedCall) -> IntegerBounds:
    x, y = call.at(0), call.at(1)
    if call.op.name == "logical_and":
        x, y = _nonzero(x), _nonzero(y)
    if call.op.results[0].type.dtype == "bool":
        return IntegerBounds(x.least & y.least, x.most & y.most)
    return IntegerBounds(0, min(x.most, y.most)) if x.least >= 0 <= y.least else ANY


def _or_bounds(call: BoundedCall) -> IntegerBounds:
    x, y = call.at(0), call.at(1)
    if call.op.name == "logical_or":
        x, y = _nonzero(x), _nonzero(y)
    return IntegerBounds(x.least | y.least, x.most | y.most) if call.op.results[0].type.dtype == "bool" else ANY


def _inverted(call: BoundedCall) -> IntegerBounds:
    x = call.at(0)
    if call.op.name == "logical_not":
        return _negated(_nonzero(x))
    return _negated(x) if call.op.result.type.dtype == "bool" else IntegerBounds(~x.most, ~x.least)


def _compared(
    always: Callable[[IntegerBounds, IntegerBounds], bool], never: Callable[[IntegerBounds, IntegerBounds], bool]
) -> _Formula:
    def formula(call: BoundedCall) -> IntegerBounds:
        x, y = call.at(0), call.at(1)
        return IntegerBounds(int(always(x, y)), int(not never(x, y)))

    return formula


def _equal(x: IntegerBounds, y: IntegerBounds) -> bool:
    return x.only is not None and x.only == y.only


def _disjoint(x: IntegerBounds, y: IntegerBounds) -> bool:
    return x.most < y.least or y.most < x.least


def _sum(call: BoundedCall) -> IntegerBounds:
    x, made = call.at(0), math.prod(call.op.result.type.shape)
    count = math.prod(call.shape()) // made if made else 0
    return IntegerBounds(count * x.least, count * x.most)


def _running_sum(call: BoundedCall) -> IntegerBounds:
    x, count = call.at(0), call.places(1, None).most + 1
    return IntegerBounds(min(x.least, count * x.least), max(x.most, count * x.most))


def _counted(call: BoundedCall) -> IntegerBounds:
    first, end, step = (argument(call.op, place, name) for place, name in enumerate(("start", "end", "step")))
    first, end, step = 0 if end is None else first, first if end is None else end, 1 if step is None else step
    if not isinstance(first, int) or not isinstance(end, int) or not isinstance(step, int):
        return ANY
    found = range(first, end, step)
    return IntegerBounds.around((found[0], found[-1])) if found else IntegerBounds(0, 0)


def _where(call: BoundedCall) -> IntegerBounds:
    if len(call.op.args) != 3:
        return ANY
    mask, yes, no = call.op.args
    return _joined(call.chosen(yes, mask, True), call.chosen(no, mask, False))


def _filled(call: BoundedCall) -> IntegerBounds:
    return _joined(call.chosen(call.op.args[0], argument(call.op, 1, "mask"), False), call.at(2, "value"))


def _written(call: BoundedCall) -> IntegerBounds:
    replaces = not argument(call.op, 3, "accumulate", False)
    return _joined(call.at(0), call.at(2)) if replaces else ANY


def _scattered(call: BoundedCall) -> IntegerBounds:
    plain = not call.op.attrs and len(call.op.args) == 4
    return _joined(call.at(0), call.at(3)) if plain else ANY


def _repeated(call: BoundedCall) -> IntegerBounds:
    """repeat_interleave: elements of the operand; with counts alone, the indices of the counts."""
    return call.places(0, None) if argument(call.op, 1, "repeats") is None else call.at(0)


def _extreme(call: BoundedCall) -> tuple[IntegerBounds, IntegerBounds]:
    alone = not isinstance(argument(call.op, 1, "other"), Ref)
    return call.at(0) if alone else _joined(call.at(0), call.at(1, "other")), call.places(1, None)


FORMULAS: Mapping[str, _Formula] = {
    name: formula
    for names, formula in (
        # Elements of operands
        ("reshape permute expand slice split flip roll repeat unfold diagonal", lambda call: call.at(0)),
        ("alias clone contiguous detach", lambda call: call.at(0)),
        ("index index_select gather embedding amax amin", lambda call: call.at(0)),
        ("repeat_interleave", _repeated),
        ("cat", lambda call: _joined(*map(call.of, call.op.args[0] if isinstance(call.op.args[0], tuple) else ()))),
        ("where", _where),
        ("masked_fill", _filled),
        ("index_put", _written),
        ("scatter index_copy", _scattered),
        ("constant_pad_nd", lambda call: _joined(call.at(0), call.at(2, "value", 0))),
        ("tril triu", lambda call: _joined(call.at(0), IntegerBounds(0, 0))),
        # Places
        ("topk", lambda call: (call.at(0), call.places(2, -1))),
        ("sort", lambda call: (call.at(0), call.places(1, -1))),
        ("max min", _extreme),
        ("argsort", lambda call: call.places(1, -1)),
        ("argmax argmin", lambda call: call.places(1, None)),
        ("arange", _counted),
        # Constants
        ("full", lambda call: call.at(1)),
        # Arithmetic
        ("to", lambda call: _nonzero(call.at(0)) if call.op.result.type.dtype == "bool" else call.at(0)),
        ("add", _added(1)),
        ("sub", _added(-1)),
        ("mul", _corners(lambda x, y: x * y)),
        ("minimum", _corners(min)),
        ("maximum", _corners(max)),
        ("neg", lambda call: IntegerBounds(-call.at(0).most, -call.at(0).least)),
        ("floor_divide div", _quotient),
        ("remainder", _remainder),
        ("clamp clamp_min clamp_max", _clamped),
        ("sum", _sum),
        ("cumsum", _running_sum),
        # Truth
        ("lt", _compared(lambda x, y: x.most < y.least, lambda x, y: x.least >= y.most)),
        ("le", _compared(lambda x, y: x.most <= y.least, lambda x, y: x.least > y.most)),
        ("gt", _compared(lambda x, y: x.least > y.most, lambda x, y: x.most <= y.least)),
        ("ge", _compared(lambda x, y: x.least >= y.most, lambda x, y: x.most < y.least)),
        ("eq", _compared(_equal, _disjoint)),
        ("ne", _compared(_disjoint, _equal)),
        ("__and__ bitwise_and logical_and", _and_bounds),
        ("__or__ bitwise_or logical_or", _or_bounds),
        ("bitwise_not logical_not", _inverted),
        ("any all", lambda call: _nonzero(call.at(0)) if math.prod(call.shape()) else ANY),
    )
    for name in names.split()
}
