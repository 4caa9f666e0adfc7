"""The loops of a kernel: dimensions that are contiguous in every index expression are joined, and expressions are
printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy

from partc.codegen.kernels.indexing import FloorDiv, Modulo, Ranges
from partc.codegen.kernels.statements import Guard, Load, Reduce, Statement


@dataclass(frozen=True, slots=True)
class Variable:
    """A loop: its symbol and its number of iterations."""

    symbol: sympy.Symbol
    size: int


def variables(shape: Sequence[int], letter: str) -> tuple[Variable, ...]:
    """One loop for each dimension."""
    return tuple(
        Variable(sympy.Symbol(f"{letter}{dim}", integer=True, nonnegative=True), size) for dim, size in enumerate(shape)
    )


def collapsed(
    loops: Sequence[Variable], expressions: Iterable[sympy.Expr]
) -> tuple[tuple[Variable, ...], Mapping[sympy.Symbol, sympy.Expr]]:
    """As few loops as possible: neighbours are joined if every expression steps through both as through one loop.

    Also returns the expressions of the old symbols.
    """
    places = list(expressions)
    found: list[Variable] = []
    instead: dict[sympy.Symbol, sympy.Expr] = {}
    for loop in loops:
        last = found[-1] if found else None
        if last is not None and all(_follows(place, last, loop) for place in places):
            places = [place.subs(last.symbol, sympy.Integer(0)) for place in places]
            instead[last.symbol] = sympy.Integer(0)
            found[-1] = Variable(loop.symbol, last.size * loop.size)
        else:
            found.append(loop)
    return tuple(found), instead


def _follows(place: sympy.Expr, outer: Variable, inner: Variable) -> bool:
    """Whether one step of the outer loop is as long as a whole run of the inner one."""
    a, b = (_step(place, loop.symbol) for loop in (outer, inner))
    return a is not None and b is not None and sympy.expand(a - b * inner.size) == 0


def _step(place: sympy.Expr, symbol: sympy.Symbol) -> sympy.Expr | None:
    """The coefficient of a variable; None if it occurs inside a division."""
    if any(part.has(symbol) for part in place.atoms(FloorDiv, Modulo)):
        return None
    found: sympy.Expr = sympy.expand(place).coeff(symbol)
    return found


def with_symbols_replaced(statement: Statement, instead: Mapping[sympy.Symbol, sympy.Expr]) -> Statement:
    """The statement with symbols replaced."""
    if isinstance(statement, Reduce):
        return statement
    guards = tuple(replace(guard, index=guard.index.subs(instead)) for guard in statement.guards)
    if isinstance(statement, Load):
        return replace(statement, place=statement.place.subs(instead), guards=guards)
    return replace(statement, guards=guards, places=tuple(place.subs(instead) for place in statement.places))


def folded(statement: Statement, loops: Sequence[Variable], whole: sympy.Symbol) -> Statement:
    """The statement with one variable in place of several loops, in positions that step through them as through one."""
    if isinstance(statement, Reduce) or len(loops) < 2:
        return statement

    def replaced(expr: sympy.Expr) -> sympy.Expr:
        few, instead = collapsed(loops, [expr])
        return expr.subs(instead).subs(few[0].symbol, whole) if len(few) == 1 else expr

    if isinstance(statement, Load):
        return replace(statement, place=replaced(statement.place))
    return replace(statement, places=tuple(map(replaced, statement.places)))


def index_text(expr: sympy.Expr, ranges: Ranges) -> str:
    """An index expression as source."""
    if isinstance(expr, sympy.Add):
        return terms_text(terms(expr, ranges))
    if isinstance(expr, sympy.Mul):
        strides = [part for part in expr.args if _is_stride(part, ranges)]
        if not strides:
            factor, rest = expr.as_coeff_Mul()
            return f"{_atom(rest, ranges)} * {factor}"
        index = sympy.Mul(*(part for part in expr.args if part not in strides))
        return " * ".join([_wide_index(index, ranges), *map(str, strides)])
    if isinstance(expr, FloorDiv | Modulo):
        sign = "//" if isinstance(expr, FloorDiv) else "%"
        return f"{_atom(expr.args[0], ranges)} {sign} {expr.args[1]}"
    return str(expr)


def terms(place: sympy.Expr, ranges: Ranges) -> list[str]:
    """The signed terms of a position: long strides first, terms with equal strides together."""
    strides = sorted((symbol for symbol in place.free_symbols if _is_stride(symbol, ranges)), key=str)
    rest = sympy.expand(place)
    found = []
    for stride in strides:
        index = rest.coeff(stride)
        rest = sympy.expand(rest - index * stride)
        found.append(f"+ {_wide_index(index, ranges)} * {stride}")
    for term in sorted(sympy.Add.make_args(rest), key=_weight):
        negative = term.as_coeff_Mul()[0] < 0
        if term != 0:
            found.append(f"- {index_text(-term, ranges)}" if negative else f"+ {index_text(term, ranges)}")
    return found


def terms_text(parts: Sequence[str]) -> str:
    """Signed terms as one expression."""
    text = " ".join(parts)
    return f"-{text[2:]}" if text.startswith("- ") else text[2:]


def _atom(expr: sympy.Expr, ranges: Ranges) -> str:
    text = index_text(expr, ranges)
    return text if isinstance(expr, sympy.Symbol | sympy.Integer) else f"({text})"


def _wide_index(index: sympy.Expr, ranges: Ranges) -> str:
    """An index in 64 bits: it is multiplied by a stride only known at run time, so the product is unbounded."""
    text = _atom(index, ranges)
    return text if isinstance(index, sympy.Integer) else f"{text}.to(tl.int64)"


def _is_stride(expr: sympy.Expr, ranges: Ranges) -> bool:
    return isinstance(expr, sympy.Symbol) and expr not in ranges


def _weight(term: sympy.Expr) -> tuple[int, int, str]:
    """The sort key of terms: long strides first, constants last."""
    factor, rest = term.as_coeff_Mul()
    return (1 if rest == 1 else 0, -int(factor), str(rest))


def condition(guard: Guard, ranges: Ranges) -> str:
    """A guard as source."""
    index = index_text(guard.index, ranges)
    low = f"{index} >= {guard.low}" if guard.low > 0 else ""
    high = f"{index} < {guard.high}" if guard.high < guard.size else ""
    return f"({low}) & ({high})" if low and high else low or high
