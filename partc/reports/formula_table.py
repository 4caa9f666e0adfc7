"""Tables of formulas: the meanings of names; then, for each region, the saved bytes, traffic and flops of a call.

block: 2 calls, each on one rank and for one microbatch
  saved for backward        b·s·h·(4 + 30/tp + 5·a·s/(h·tp) + 8/(h·tp))     192.5 KiB
    gelu, up                2·b·s·up/tp each                                 32.0 KiB each
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from partc.cost.formulas import Formulas, RegionFormulas
from partc.cost.formulas.size_names import Named, symbol, value_of
from partc.errors import PartcError
from partc.ir.printer import readable

if TYPE_CHECKING:
    from sympy import Expr

ORDER = "abshdegv"
OF_RANKS = ("parameters", "gradients", "optimizer", "saved")
Row = tuple[str, str, str]


def page(found: Formulas, *, region: str | None = None, width: int = 120) -> str:
    """The formulas of all regions, or of one region, as text. Raises PartcError P0605 if no region has this name."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=max(width, 100), highlight=False, markup=False, emoji=False)
    console.print(_grid((item.name, f"{item.value:,}", _meaning(found, item)) for item in found.names))
    if found.unnamed:
        numbers = ", ".join(map(str, found.unnamed))
        console.print(f"\nsizes without a name, which formulas have as numbers: {numbers}", soft_wrap=True)
    for one in chosen_regions(found, region):
        calls = f"{one.calls} call{'s' * (one.calls != 1)}"
        console.print(f"\n{one.name}: {calls}, each on one rank and for one microbatch\n", soft_wrap=True)
        console.print(_grid(_region(found, one)))
    if region is None:
        for rank in found.ranks:
            which = f"each rank at place {rank.place} of the pipeline" if len(found.ranks) > 1 else "each rank"
            console.print(f"\n{which}: what lasts, and what it saves of all microbatches in flight\n", soft_wrap=True)
            console.print(_grid(_row(found, name, getattr(rank, name)) for name in OF_RANKS))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def document(found: Formulas, *, region: str | None = None) -> dict[str, Any]:
    """The formulas as JSON; each formula is a Python expression."""
    return {
        "names": {item.name: {"value": item.value, "meaning": item.meaning} for item in found.names},
        "proportions": {name: str(formula) for name, formula in found.proportions.items()},
        "unnamed": list(found.unnamed),
        "regions": {
            one.name: {
                "calls": one.calls,
                "parameters": _entry(found, one.parameters),
                "saved": _entry(found, one.saved_bytes),
                "values": {term.name: _entry(found, term.bytes) for term in one.saved},
                "passes": {
                    part.name: {
                        "working": _entry(found, part.working),
                        "received": {axis: _entry(found, formula) for axis, formula in part.moved.items()},
                        "flops": _entry(found, part.flops),
                    }
                    for part in one.passes
                },
            }
            for one in chosen_regions(found, region)
        },
        "ranks": [{name: _entry(found, getattr(rank, name)) for name in OF_RANKS} for rank in found.ranks],
    }


def chosen_regions(found: Formulas, region: str | None) -> Sequence[RegionFormulas]:
    """All regions, or the named one."""
    if region is None:
        return found.regions
    one = [item for item in found.regions if item.name == region]
    if not one:
        names = ", ".join(item.name for item in found.regions)
        raise PartcError("P0605", f"no region is called {region!r}", help=f"there are {names}")
    return one


def factored_text(found: Formulas, formula: Expr) -> str:
    """A sum as text, with the common factors of its terms in front; also with h, if a term has no other factor."""
    from sympy import Integer, cancel

    shares = [axis for axis in formula.free_symbols if formula.subs(axis, 1) == 0]
    for axis in shares:  # the ranks of a ring receive from all other ranks
        formula = cancel(formula / (axis - 1))
    terms = [term.as_coeff_Mul() for term in formula.expand().as_ordered_terms()]
    common: Any = Integer(1)
    for each in formula.free_symbols:
        powers = [term.as_powers_dict().get(each, 0) for _, term in terms]
        if min(powers) > 0 or max(powers) < 0:
            common *= each ** (min(powers) if min(powers) > 0 else max(powers))
    h = symbol("h")
    if any(term / common == h for _, term in terms):
        common *= h
    if len(terms) == 1:
        common = formula
    inner = sorted((count * term / common for count, term in terms), key=lambda term: -abs(_size(found, term)))
    top, bottom = (_product(part) for part in common.as_numer_denom())
    factors = [top] if top != "1" or len(terms) == 1 else []
    factors += [f"({' + '.join(map(_text, inner)).replace('+ -', '- ')})"] if len(terms) > 1 else []
    factors += [f"({axis} - 1)" for axis in sorted(shares, key=str)]
    if factors[0] == "1" and len(factors) > 1:
        del factors[0]
    whole = "·".join(factors) if len(factors) > 1 or bottom != "1" else factors[0].strip("()")
    return whole + ("" if bottom == "1" else f"/({bottom})" if "·" in bottom else f"/{bottom}")


def _size(found: Formulas, term: Expr) -> float:
    return float(value_of(term, {item.name: item.value for item in found.names}))


def _text(term: Expr) -> str:
    """A product of numbers and symbols, as text."""
    top, bottom = (_product(part) for part in term.as_numer_denom())
    return top + ("" if bottom == "1" else f"/({bottom})" if "·" in bottom else f"/{bottom}")


def _product(term: Expr) -> str:
    """The letters of a product, in the order that papers use."""
    count, rest = term.as_coeff_Mul()
    powers = {str(base): int(power) for base, power in rest.as_powers_dict().items() if base.is_Symbol}
    ordered = sorted(powers, key=lambda name: (len(name) > 1, ORDER.find(name) % len(ORDER), name))
    parts = [name + _power(powers[name]) for name in ordered]
    return "·".join(([str(count)] if count != 1 or not parts else []) + parts)


def _power(power: int) -> str:
    return "" if power == 1 else "".join("⁰¹²³⁴⁵⁶⁷⁸⁹"[int(digit)] for digit in str(power))


def _meaning(found: Formulas, named: Named) -> str:
    determined = found.proportions.get(named.name)
    return named.meaning + (f"; {factored_text(found, determined)} in this model" if determined is not None else "")


def _region(found: Formulas, one: RegionFormulas) -> Iterator[Row]:
    yield _row(found, "saved for backward", one.saved_bytes)
    groups: dict[Any, list[str]] = {}
    for term in one.saved:
        groups.setdefault(term.bytes, []).append(term.name)
    for formula, names in groups.items():
        each = " each" if len(names) > 1 else ""
        yield f"  {', '.join(names)}", _text(formula) + each, readable(found.at(formula)) + each
    yield _row(found, "parameters, as read", one.parameters)
    for part in one.passes:
        yield _row(found, f"{part.name}, working memory", part.working)
        for axis, formula in part.moved.items():
            yield _row(found, f"{part.name}, received over {axis}", formula)
        if part.flops != 0:
            yield (
                f"{part.name}, flops",
                factored_text(found, found.in_proportion(part.flops)),
                f"{found.at(part.flops):,}",
            )


def _row(found: Formulas, name: str, formula: Expr) -> Row:
    return name, factored_text(found, found.in_proportion(formula)), readable(found.at(formula))


def _entry(found: Formulas, formula: Expr) -> dict[str, Any]:
    return {
        "formula": str(formula),
        "in_proportion": str(found.in_proportion(formula).expand()),
        "value": found.at(formula),
    }


def _grid(rows: Iterable[Row]) -> object:
    """A table of three columns. Numbers are right-aligned: the second column if it has only numbers, else the third."""
    from rich.table import Table

    rows = list(rows)
    numbers = 1 if all(row[1].replace(",", "").isdigit() for row in rows) else 2

    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for index in range(3):
        table.add_column(justify="right" if index == numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
