"""Follows rows through operations: the dimension of a result that holds the rows of an operand."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from partc.errors import InternalError, Source
from partc.ir.naming import unique
from partc.ir.program import Arg, DType, Op, Ref, TensorType, Value
from partc.rules.tried import rule_of


def dims_of_rows(
    op: Op, types: Mapping[str, TensorType], held: Sequence[int | None], constants: Collection[str] = ()
) -> tuple[int, ...] | None:
    """The dimension of each result that holds the rows; `held` has the dimensions in the operands.

    `constants` are values that are equal in every row. None if the operation is not known to compute every row from the
    same row of its operands.
    """
    rule = rule_of(op, types)
    if rule is None:
        return None
    kinds = {factor.name: factor.kind for factor in rule.factors}
    rows = {rule.operands[i][dim] for i, dim in enumerate(held) if dim is not None}
    if len(rows) != 1:
        return None
    factors = rows.pop()
    if not factors or any(kinds[name] != "parallel" for name in factors):
        return None
    for name, operand, dim in zip(op.refs(), rule.operands, held, strict=True):
        if name not in constants and any(
            each in factors for i, names in enumerate(operand) if i != dim for each in names
        ):
            return None
    found = []
    for result in rule.results:
        places = [dim for dim, names in enumerate(result) if names == factors]
        if len(places) != 1:
            return None
        found += places
    return tuple(found)


@dataclass(slots=True)
class RowWriter:
    """Writes operations with unsharded types."""

    types: dict[str, TensorType]
    taken: set[str]
    source: Source | None = None
    ops: list[Op] = field(default_factory=list)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.types[name].shape

    def keep(self, op: Op) -> None:
        self.ops.append(op)
        self.types.update((value.name, value.type) for value in op.results)

    def add(
        self, name: str, args: tuple[Arg, ...], shape: Sequence[int], dtype: DType, stem: str, /, **attrs: Arg
    ) -> str:
        """Write an operation and return the name of its result, which begins with `stem`."""
        made = unique(stem, self.taken)
        self.define(name, args, shape, dtype, made, **attrs)
        return made

    def define(
        self, name: str, args: tuple[Arg, ...], shape: Sequence[int], dtype: DType, made: str, /, **attrs: Arg
    ) -> None:
        """Write an operation whose result has the name `made`."""
        type = TensorType.replicated(dtype, tuple(shape))
        value = Value(name=made, type=type)
        self.keep(Op(name=name, args=args, attrs=tuple(attrs.items()), results=(value,), source=self.source))

    def reshape(self, name: str, shape: Sequence[int], stem: str) -> str:
        if self.shape(name) == tuple(shape):
            return name
        return self.add("reshape", (Ref(name), tuple(shape)), shape, self.types[name].dtype, stem)

    def permute(self, name: str, order: Sequence[int], stem: str) -> str:
        if tuple(order) == tuple(range(len(order))):
            return name
        shape = [self.shape(name)[dim] for dim in order]
        return self.add("permute", (Ref(name), tuple(order)), shape, self.types[name].dtype, stem)

    def expand(self, name: str, shape: Sequence[int], stem: str) -> str:
        if self.shape(name) == tuple(shape):
            return name
        return self.add("expand", (Ref(name), tuple(shape)), shape, self.types[name].dtype, stem)

    def rows(
        self, x: str, places: Sequence[int], dims: Sequence[int], whole: Sequence[int], stem: str
    ) -> tuple[str, int] | None:
        """Replace the dimensions `places` of x, which correspond to the dimensions `dims` of `whole`, by one of rows.

        There is a row for each element of the shape `whole`, in order; x is repeated along its other dimensions.
        Returns the new value and the dimension of its rows; None if the sizes do not fit.
        """
        shape = self.shape(x)
        first = places[0]
        if list(places) != list(range(first, first + len(places))) or len(set(dims)) < len(dims):
            return None
        if any(shape[place] != whole[dim] for place, dim in zip(places, dims, strict=True)):
            return None
        before, behind = shape[:first], shape[first + len(places) :]
        sorted_dims = sorted(range(len(dims)), key=lambda index: dims[index])
        inner = [first + index for index in sorted_dims]
        x = self.permute(x, (*range(first), *inner, *range(first + len(places), len(shape))), stem)
        each = [size if dim in dims else 1 for dim, size in enumerate(whole)]
        x = self.reshape(x, (*before, *each, *behind), stem)
        x = self.expand(x, (*before, *whole, *behind), stem)
        return self.reshape(x, (*before, math.prod(whole), *behind), stem), first

    def only(self, x: str, dim: int, chosen: str, stem: str, value: int = 0) -> str:
        """x with `value` in the rows that are not set in `chosen`, a mask with one element for each row."""
        shape = self.shape(x)
        mask = self.types[chosen]
        dropped = (
            self.add("eq", (Ref(chosen), 0), mask.shape, "bool", f"{stem}_dropped")
            if mask.dtype != "bool"
            else (self.add("logical_not", (Ref(chosen),), mask.shape, "bool", f"{stem}_dropped"))
        )
        wide = [1] * len(shape)
        wide[dim] = shape[dim]
        dropped = self.reshape(dropped, wide, f"{stem}_dropped")
        return self.add("masked_fill", (Ref(x), Ref(dropped), value), shape, self.types[x].dtype, stem)


def names_of(args: Sequence[Arg]) -> list[str | None]:
    """The names of an index's tensors; None for dimensions that are not indexed."""
    found: list[str | None] = []
    for arg in args:
        if arg is not None and not isinstance(arg, Ref):
            raise InternalError("an index is neither a tensor nor left out")
        found.append(arg.name if isinstance(arg, Ref) else None)
    return found
