"""Names for the sizes of a program: b, s, h, a, v where a size's role is known, else the name of a parameter.

b = 4      examples of a microbatch on a rank
s = 32     ids, dimension 1
h = 64     columns of embed.weight
up = 256   rows of up.weight; 4·h in this model
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from partc.cost.formulas.symbols import Dimensions, Product
from partc.ir.mesh import TIME_AXIS
from partc.ir.naming import unique
from partc.ir.program import FLOATING, ITEMSIZE
from partc.quoting import identifier
from partc.sharding.choices import batch_axes

if TYPE_CHECKING:
    from sympy import Expr

# Factors of rules, and the names that their sizes get unless these are taken.
ROLES = (
    ("embedding.v", "v", "rows of an embedding"),
    ("embedding_shard.v", "v", "rows of an embedding"),
    ("embedding.d", "h", "columns of an embedding"),
    ("embedding_shard.d", "h", "columns of an embedding"),
    ("attention.g", "a", "heads"),
    ("attention.r", "a", "heads"),
    ("attention_dropout.g", "a", "heads"),
    ("attention.s", "s", "queries"),
    ("attention.d", "d", "size of a head"),
    ("attention.e", "e", "size of a head"),
    ("matmul.d1", "a", "heads"),
)
FEW = 4
_PLAIN = ("weight", "bias")
MOST_TIMES, MOST_PARTS = 64, 8  # two sizes are in proportion if their ratio is n/m, with no larger numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A name in formulas, its number in this program, and its meaning."""

    name: str
    value: int
    meaning: str


def symbol(name: str) -> Any:
    """The symbol of a size or of the ranks of an axis."""
    from sympy import Symbol

    return Symbol(name, positive=True, integer=True)


def value_of(formula: Expr, sizes: Mapping[str, int]) -> Any:
    """The value of a formula."""
    return formula.subs({each: sizes[str(each)] for each in formula.free_symbols})


class SizeNames:
    """Formulas for the sizes of a program's values. Sizes without a name stay numbers."""

    def __init__(self, dimensions: Dimensions) -> None:
        self.dimensions = dimensions
        self.unnamed: set[int] = set()  # larger sizes that formulas show as numbers
        self._of: dict[int, Any] = {}  # an uncut size -> its formula
        self._named: dict[str, Named] = {}
        self._widths: list[str] = []
        self._heads: tuple[str, ...] = ()
        self._batch()
        self._entries()
        self._roles()
        self._hidden()
        self._inside_heads()
        self._sums()
        self._parameters()
        self._sums()
        self._axes()

    def named(self) -> tuple[Named, ...]:
        return tuple(self._named.values())

    def elements(self, region: str, name: str) -> Expr:
        """The number of elements of a value on one rank."""
        from sympy import Integer

        found: Any = Integer(1)
        for dim in self.dimensions.dims[region, name]:
            for size in self.dimensions.whole(dim):
                found *= self._formula(size)
            for piece in dim:
                for axis in piece.axes:
                    found /= symbol(axis)
        return found

    def bytes(self, region: str, name: str) -> Expr:
        return self.elements(region, name) * ITEMSIZE[self.dimensions.types[region, name].dtype]

    def product(self, product: Product) -> Expr:
        """The floating-point operations of a matrix product on one rank."""
        from sympy import Rational

        found: Any = Rational(2 * product.share.numerator, product.share.denominator)
        for size in self.dimensions.sizes.parts(product.sizes):
            found *= self._formula(size)
        for axis in sorted(product.axes):
            found /= symbol(axis)
        return found

    def number(self, formula: Expr) -> int:
        """The value of a formula in this program."""
        return int(value_of(formula, {name: named.value for name, named in self._named.items()}))

    def proportions(self) -> Mapping[str, Expr]:
        """Names that follow from others, if the model keeps its proportions as it grows."""
        if "h" not in self._named:
            return {}
        h = self._named["h"].value
        found: dict[str, Any] = {}
        for name in self._widths:
            value = self._named[name].value
            ratio = Fraction(value, h)
            heads = self._named["a"].value if "a" in self._named else 0
            if name in self._heads:
                if heads * value == h:
                    found[name] = symbol("h") / symbol("a")
            elif "v" in self._named and value == self._named["v"].value:
                found[name] = symbol("v")
            elif ratio.numerator <= MOST_TIMES and ratio.denominator <= MOST_PARTS:
                found[name] = symbol("h") * ratio.numerator / ratio.denominator
        return found

    def _formula(self, size: int) -> Any:
        value = self.dimensions.sizes.value[size]
        if size not in self._of and value > FEW:
            self.unnamed.add(value)
        return self._of.get(size, value)

    def _name(
        self, sizes: Sequence[int], wanted: str, meaning: str, *, width: bool = False, product: bool = True
    ) -> str:
        """Name the unnamed part of a product, or the largest factor of it; its other sizes stay numbers."""
        name = unique(identifier(wanted), {*self._named, *self.dimensions.program.sizes})
        left = [size for size in sizes if size not in self._of]
        size = max(left, key=lambda size: self.dimensions.sizes.value[size])
        others = math.prod(self.dimensions.sizes.value[other] for other in left if other != size and product)
        self._of.update((other, self.dimensions.sizes.value[other]) for other in left)
        self._of[size] = symbol(name) / others
        value = self.dimensions.sizes.value[size] * others
        self._named[name] = Named(name=name, value=value, meaning=meaning)
        if width:
            self._widths.append(name)
        return name

    def _unnamed(self, sizes: Sequence[int]) -> bool:
        return any(size not in self._of for size in sizes)

    def _batch(self) -> None:
        program = self.dimensions.program
        if not program.batch_entries:
            return
        whole = self.dimensions.whole(self.dimensions.dims["", program.batch_entries[0]][0])
        sizes = program.sizes
        ranks = [axis for axis in batch_axes(sizes) if sizes[axis] > 1]
        if whole:
            self._name(whole, "b", "examples of a microbatch on a rank")
            each = self._named.pop("b")
            self._of = {size: formula * math.prod(map(symbol, ranks)) for size, formula in self._of.items()}
            value = each.value // math.prod(sizes[axis] for axis in ranks)
            self._named["b"] = Named(name="b", value=value, meaning=each.meaning)

    def _axes(self) -> None:
        for axis, size in self.dimensions.program.sizes.items():
            if size > 1:
                meaning = "microbatches" if axis == TIME_AXIS else f"ranks of the axis {axis}"
                self._named[axis] = Named(name=axis, value=size, meaning=meaning)

    def _entries(self) -> None:
        program = self.dimensions.program
        types = program.value_types()
        for entry in program.inputs:
            words = types[entry].dtype not in FLOATING
            for index, dim in enumerate(self.dimensions.dims["", entry]):
                whole = self.dimensions.whole(dim)
                if self._unnamed(whole) and self._large(whole):
                    wanted = "s" if words and "s" not in self._named and index == 1 else f"{entry}_{index}"
                    self._name(whole, wanted, f"{entry}, dimension {index}")

    def _large(self, sizes: Sequence[int]) -> bool:
        """Whether the unnamed part is large enough for a name. Small sizes (channels, kernels, projections) stay
        numbers.
        """
        return math.prod(self.dimensions.sizes.value[size] for size in sizes if size not in self._of) > FEW

    def _roles(self) -> None:
        for role, wanted, meaning in ROLES:
            for size in self.dimensions.roles.get(role, ()):
                whole = self.dimensions.sizes.parts([size])
                if wanted not in self._named and self._unnamed(whole):
                    self._name(whole, wanted, meaning, width=wanted in ("d", "e"))
                    self._heads += (wanted,) if wanted in ("d", "e") else ()
        if "a" in self._named:
            self._grouped()

    def _grouped(self) -> None:
        """Name the group size of grouped-query attention."""
        for size in self.dimensions.roles.get("attention.r", ()):
            whole = self.dimensions.sizes.parts([size])
            if self._unnamed(whole):
                keys = self._named.pop("a")
                value = keys.value * math.prod(self.dimensions.sizes.value[part] for part in whole)
                a, g = symbol("a"), symbol("g")
                self._of = {part: getattr(f, "subs", lambda *_, f=f: f)(a, g) for part, f in self._of.items()}
                self._name(whole, "a", "heads")
                self._of = {part: f / g if part in whole and a in f.free_symbols else f for part, f in self._of.items()}
                self._named["a"] = Named(name="a", value=value, meaning="heads")
                self._named["g"] = Named(name="g", value=keys.value, meaning="heads of keys and values")
                return

    def _hidden(self) -> None:
        """Name the width of the values that pass between the calls of the most-called region."""
        program = self.dimensions.program
        if "h" in self._named or not program.calls:
            return
        calls = [call.region for call in program.calls]
        region = program.region(max(calls, key=calls.count))
        for value in region.forward.inputs:
            if value.type.dtype in FLOATING and len(value.type.shape) > 1:
                last = self.dimensions.whole(self.dimensions.dims[region.name, value.name][-1])
                if self._unnamed(last):
                    self._name(last, "h", f"last dimension of {region.name}'s {value.name}")
                return

    def _inside_heads(self) -> None:
        """Name the head size in parameters' dimensions that hold heads."""
        a, g = symbol("a"), symbol("g")
        for region in self.dimensions.program.regions:
            for value in region.params:
                for dim in self.dimensions.dims[region.name, value.name]:
                    whole = self.dimensions.whole(dim)
                    heads = any({a, g} & getattr(self._of.get(size), "free_symbols", set()) for size in whole)
                    if heads and self._unnamed(whole) and self._large(whole):
                        wanted = "e" if "d" in self._named else "d"
                        name = self._name(whole, wanted, "size of a head", width=True, product=False)
                        self._heads += (name,)

    def _sums(self) -> None:
        """Leave lengths that are sums of named sizes and a constant without names."""
        for found in (*self.dimensions.sums, *reversed(self.dimensions.sums)):
            whole, *parts = (self.dimensions.sizes.parts(side) for side in (found.whole, *found.parts))
            unknown = [side for side in (whole, *parts) if len(side) == 1 and self._unnamed(side) and self._large(side)]
            if len(unknown) != 1 or sum(self._unnamed(side) for side in (whole, *parts)) != 1:
                continue
            total = sum((self._product(side) for side in parts if side not in unknown), found.more)
            self._of[unknown[0][0]] = total if unknown[0] == whole else self._product(whole) - total

    def _product(self, sizes: Sequence[int]) -> Any:
        return math.prod(self._formula(size) for size in sizes)

    def _parameters(self) -> None:
        for region in self.dimensions.program.regions:
            for value in region.params:
                for index, dim in enumerate(self.dimensions.dims[region.name, value.name]):
                    whole = self.dimensions.whole(dim)
                    if self._unnamed(whole) and self._large(whole):
                        place = ("rows", "columns")[index] if index < 2 else f"dimension {index}"
                        parts = value.name.split(".")
                        wanted = parts[-2] if len(parts) > 1 else parts[0] if parts[0] not in _PLAIN else region.name
                        meaning = f"{place} of {region.name}'s {value.name}"
                        self._name(whole, wanted, meaning, width=True, product=False)
