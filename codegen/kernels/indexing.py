"""Positions of elements: index expressions of views and of memory, simplified by the ranges of their variables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import sympy

from partc.errors import InternalError
from partc.ir.program import Op

Index = tuple[sympy.Expr, ...]  # the index of a tensor's element, one expression per dimension
Ranges = Mapping[sympy.Symbol, int]  # variable -> exclusive upper bound; the lower bound is 0

ZERO = sympy.Integer(0)


class FloorDiv(sympy.Function):  # type: ignore[misc]
    """a // b of non-negative integers."""

    nargs = 2
    is_integer = True


class Modulo(sympy.Function):  # type: ignore[misc]
    """a % b of non-negative integers."""

    nargs = 2
    is_integer = True


def largest(expr: sympy.Expr, ranges: Ranges) -> int | None:
    """The largest value of an expression; None if it depends on a stride that is only known at run time."""
    if isinstance(expr, sympy.Integer):
        return int(expr)
    if isinstance(expr, sympy.Symbol):
        return ranges[expr] - 1 if expr in ranges else None
    parts = [largest(arg, ranges) for arg in expr.args]
    if any(part is None for part in parts):
        return None
    known = [part for part in parts if part is not None]
    if isinstance(expr, sympy.Add):
        return sum(known)
    if isinstance(expr, sympy.Mul):
        return max(known) if any(part < 0 for part in known) else math.prod(known)
    if isinstance(expr, FloorDiv):
        return known[0] // known[1]
    if isinstance(expr, Modulo):
        return min(known[0], known[1] - 1)
    return None


def smallest(expr: sympy.Expr) -> int:
    """A lower bound: the constant term, with all variables at 0."""
    return int(expr.as_coeff_Add()[0])


def _stays_below(expr: sympy.Expr, by: int, ranges: Ranges) -> bool:
    bound = largest(expr, ranges)
    return smallest(expr) >= 0 and bound is not None and bound < by


def floor_divide(expr: sympy.Expr, by: int, ranges: Ranges) -> sympy.Expr:
    """expr // by: multiples of `by` are divided, terms that stay below `by` vanish."""
    if by == 1:
        return expr
    whole, rest = _parts(expr, by)
    if _stays_below(rest, by, ranges):
        return whole
    if isinstance(rest, FloorDiv):  # x // a // b
        return whole + floor_divide(rest.args[0], int(rest.args[1]) * by, ranges)
    return whole + FloorDiv(rest, sympy.Integer(by))


def modulo(expr: sympy.Expr, by: int, ranges: Ranges) -> sympy.Expr:
    """expr % by, simplified in the same way."""
    if by == 1:
        return ZERO
    _, rest = _parts(expr, by)
    if _stays_below(rest, by, ranges):
        return rest
    if isinstance(rest, Modulo) and int(rest.args[1]) % by == 0:  # x % ab % b
        return modulo(rest.args[0], by, ranges)
    return Modulo(rest, sympy.Integer(by))


def _parts(expr: sympy.Expr, by: int) -> tuple[sympy.Expr, sympy.Expr]:
    """The terms that are multiples of `by`, divided by it, and the other terms."""
    whole, rest = ZERO, ZERO
    for term in sympy.Add.make_args(sympy.expand(expr)):
        factor, symbols = term.as_coeff_Mul()
        if factor.is_Integer and int(factor) % by == 0:
            whole += symbols * (int(factor) // by)
        else:
            rest += term
    if not rest.has(sympy.Symbol, FloorDiv, Modulo):  # a constant
        return whole + int(rest) // by, sympy.Integer(int(rest) % by)
    return whole, rest


def flattened(index: Index, shape: Sequence[int]) -> sympy.Expr:
    """The position of an element in contiguous memory of this shape."""
    place: sympy.Expr = ZERO
    for part, size in zip(index, shape, strict=True):
        place = place * size + part
    return sympy.expand(place)


def unflattened(place: sympy.Expr, shape: Sequence[int], ranges: Ranges) -> Index:
    """The inverse of `flattened`."""
    found: list[sympy.Expr] = []
    for size in reversed(shape[1:]):
        found.append(modulo(place, size, ranges))
        place = floor_divide(place, size, ranges)
    return (*((place,) if shape else ()), *reversed(found))


def broadcast(index: Index, shape: Sequence[int]) -> Index:
    """The index into an operand for an element of the broadcast result."""
    aligned = index[len(index) - len(shape) :]
    return tuple(ZERO if size == 1 else part for part, size in zip(aligned, shape, strict=True))


def through(op: Op, index: Index, operand: Sequence[int], shape: Sequence[int], result: int, ranges: Ranges) -> Index:
    """The index into a view's operand for an element of its result; `result` is the number of a split's result."""
    match op.name:
        case "alias":
            return index
        case "reshape":
            return _reshaped(index, operand, shape, ranges)
        case "expand":
            return broadcast(index, operand)
        case "permute":
            order = _integers(op.args[1])
            found = [ZERO] * len(order)
            for place, dim in enumerate(order):
                found[dim] = index[place]
            return tuple(found)
        case "slice":
            along, start, _, step = (*op.args[1:], None, None, None, None)[:4]
            at = _number(along, 0) % len(operand)
            begin = _number(start, 0)
            begin = max(0, begin + operand[at]) if begin < 0 else begin
            return _moved(index, at, index[at] * _number(step, 1) + begin)
        case "split":
            at = _number((*op.args, 0)[2], 0) % len(operand)
            sizes = _integers(op.args[1])
            return _moved(index, at, index[at] + sum(sizes[:result]))
    raise InternalError(f"{op.name} is not a view")


def _reshaped(index: Index, operand: Sequence[int], shape: Sequence[int], ranges: Ranges) -> Index:
    """Match runs of dimensions with equal numbers of elements, so that unchanged dimensions keep their indices."""
    found: list[sympy.Expr] = []
    i = j = 0
    while i < len(operand) or j < len(shape):
        ends = [i, j]
        counts = [1, 1]
        while True:
            first = counts[0] <= counts[1] and ends[0] < len(operand)
            side = 0 if first or ends[1] >= len(shape) else 1
            if counts[0] == counts[1] and (ends[0] > i or ends[1] > j):
                break
            sizes = (operand, shape)[side]
            counts[side] *= sizes[ends[side]]
            ends[side] += 1
        place = flattened(index[j : ends[1]], shape[j : ends[1]])
        found.extend(unflattened(place, operand[i : ends[0]], ranges))
        i, j = ends
    return tuple(found)


def _moved(index: Index, dim: int, part: sympy.Expr) -> Index:
    return (*index[:dim], sympy.expand(part), *index[dim + 1 :])


def _integers(arg: object) -> tuple[int, ...]:
    return tuple(int(item) for item in arg) if isinstance(arg, tuple) else ()


def _number(arg: object, default: int) -> int:
    return arg if isinstance(arg, int) else default
