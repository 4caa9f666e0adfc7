"""The notation of rules: `x[*b i], w[o i], +bias?[o] -> [*b o]`.

Each operand lists the factors of its dimensions: `i` is one factor, `(g r)` one dimension of two factors, major first,
`*b` any number of dimensions. `?` marks an operand that may be absent, `+` an operand that is added to the
contraction's sum, `~` an operand that broadcasts from the right like a mask. The results follow the arrow. A factor
that no result carries is summed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from partc.rules.rule import Dims


class NotationError(ValueError):
    """A rule does not parse or does not fit the shapes; the message says where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One operand or result: the factors of each dimension; a star is written `*name` and stands alone."""

    name: str
    dims: tuple[tuple[str, ...], ...]
    optional: bool = False
    added: bool = False
    broadcast: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    operands: tuple[Term, ...]
    results: tuple[Term, ...]

    @property
    def factors(self) -> frozenset[str]:
        """The names of all factors, stars without their mark."""
        terms = (*self.operands, *self.results)
        return frozenset(name.lstrip("*") for term in terms for dim in term.dims for name in dim)


_TERM = re.compile(r"\s*([+~]?)\s*([A-Za-z_]\w*)?(\??)\s*\[([^\[\]]*)\]\s*")
_DIM = re.compile(r"\s*(?:(\*?[A-Za-z_]\w*)|\(([^()]*)\))\s*")


def parse(text: str) -> Notation:
    """Parse a rule. Raises NotationError."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise NotationError("no `->` between operands and results")
    notation = Notation(operands=_terms(left), results=_terms(right))
    if not notation.results:
        raise NotationError("no result after `->`")
    for term in notation.results:
        if term.optional or term.added or term.broadcast:
            raise NotationError("a result takes no mark")
    for name in notation.factors:
        if name.startswith("partial"):
            raise NotationError(f"a factor may not be called {name!r}")
    return notation


def _terms(text: str) -> tuple[Term, ...]:
    terms: list[Term] = []
    position = 0
    while position < len(text.rstrip()):
        if terms:
            if text[position] != ",":
                raise NotationError(f"a comma is missing before {text[position:].strip()!r}")
            position += 1
        match = _TERM.match(text, position)
        if not match:
            raise NotationError(f"cannot read {text[position:].strip()!r}")
        mark, name, optional, inside = match.groups()
        terms.append(
            Term(
                name=name or "",
                dims=_dims(inside),
                optional=bool(optional),
                added=mark == "+",
                broadcast=mark == "~",
            )
        )
        position = match.end()
    return tuple(terms)


def _dims(text: str) -> tuple[tuple[str, ...], ...]:
    dims: list[tuple[str, ...]] = []
    position = 0
    while position < len(text.rstrip()):
        match = _DIM.match(text, position)
        if not match:
            raise NotationError(f"cannot read {text[position:].strip()!r} in [{text.strip()}]")
        single, group = match.groups()
        names = (single,) if single else tuple(group.split())
        if not single and any(not re.fullmatch(r"[A-Za-z_]\w*", name) for name in names):
            raise NotationError(f"cannot read ({group}) in [{text.strip()}]")
        dims.append(names)
        position = match.end()
    if sum(dim[0].startswith("*") for dim in dims if dim) > 1:
        raise NotationError(f"more than one starred factor in [{text.strip()}]")
    return tuple(dims)


def bind(
    terms: Sequence[Term], shapes: Sequence[Sequence[int]], result_terms: Sequence[Term]
) -> tuple[list[Dims], list[Dims], dict[str, int]]:
    """The factors of every dimension of the operands and results, and the factors' sizes.

    A dimension of size 1 broadcasts if its factor is larger. Raises NotationError if the shapes do not fit the terms.
    """
    stars = _star_lengths(terms, shapes)
    operands = [_expanded(term, stars, len(shape)) for term, shape in zip(terms, shapes, strict=True)]
    sizes = _sizes(terms, operands, shapes)
    found: list[Dims] = []
    for term, dims, shape in zip(terms, operands, shapes, strict=True):
        kept = []
        for dim, size in zip(dims, shape, strict=True):
            whole = math.prod(sizes[name] for name in dim)
            if size not in (1, whole):
                raise NotationError(f"operand {term.name} has a dimension of {size} where the rule has {whole}")
            kept.append(() if size == 1 else dim)
        found.append(tuple(kept))
    results = [_expanded(term, stars, None) for term in result_terms]
    for dims in results:
        for name in (name for dim in dims for name in dim):
            if name not in sizes:
                raise NotationError(f"no operand gives the size of factor {name}")
    return found, results, sizes


def _star_lengths(terms: Sequence[Term], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    lengths: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        stars = [dim[0] for dim in term.dims if dim and dim[0].startswith("*")]
        fixed = len(term.dims) - len(stars)
        if stars and len(shape) >= fixed:
            lengths[stars[0]] = max(lengths.get(stars[0], 0), len(shape) - fixed)
    return lengths


def _expanded(term: Term, stars: dict[str, int], rank: int | None) -> Dims:
    """The term's dimensions with stars written out as b0, b1, ...; cut to `rank` if it broadcasts."""
    dims: list[tuple[str, ...]] = []
    for dim in term.dims:
        if dim and dim[0].startswith("*"):
            dims.extend((f"{dim[0][1:]}{index}",) for index in range(stars.get(dim[0], 0)))
        else:
            dims.append(dim)
    if rank is not None and term.broadcast and rank < len(dims):
        dims = dims[len(dims) - rank :]
    if rank is not None and rank != len(dims):
        raise NotationError(f"operand {term.name} has {rank} dimensions where the rule has {len(dims)}")
    return tuple(dims)


def _sizes(terms: Sequence[Term], operands: Sequence[Dims], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """The size of each factor: from dimensions of a single factor, then from dimensions with one unknown factor."""
    tensors = zip(operands, shapes, strict=True)
    pairs = [pair for dims, shape in tensors for pair in zip(dims, shape, strict=True)]
    sizes: dict[str, int] = {}
    for dim, size in pairs:
        if len(dim) == 1:
            sizes[dim[0]] = max(sizes.get(dim[0], 1), size)
    for dim, size in pairs:
        unknown = [name for name in dim if name not in sizes]
        known = math.prod(sizes[name] for name in dim if name in sizes)
        if len(unknown) == 1 and size % known == 0:
            sizes[unknown[0]] = size // known
    for term, dims in zip(terms, operands, strict=True):
        for name in (name for dim in dims for name in dim):
            if name not in sizes:
                raise NotationError(f"the size of factor {name} of operand {term.name} does not follow from the shapes")
    return sizes
