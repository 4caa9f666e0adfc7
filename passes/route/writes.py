"""Writes of selected rows, and the proof that a mask selects a place once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from partc.errors import Source
from partc.ir.operations import KEEPING
from partc.ir.program import SELECTED, Arg, Op, Ref, TensorType
from partc.rules import is_elementwise
from partc.rules.rule import argument

_WIDE = frozenset({"i64", "i32", "f64"})  # types in which places stay distinct


@dataclass(frozen=True, slots=True)
class Write:
    """Rows that are added to a tensor, or assigned in it, at selected places.

    `held`: a vector whose elements at the selected places are the places of the rows, such as sorted tokens; "" if the
    rows go to the selected places themselves.

    `sums`: for `y[places] += rows`, the assigned value `y[places] + rows`; "" for other writes. Torch keeps one of the
    sums of a place that is selected twice, so this adds rows only if every place is selected once.
    """

    op: Op
    into: str
    places: tuple[str, ...]
    rows: str
    adds: bool
    sums: str = ""
    held: str = ""

    @property
    def source(self) -> Source | None:
        return self.op.source


def write_of(op: Op, makers: Mapping[str, Op]) -> Write | None:
    """An operation as a write; assigning the sum of new rows and the existing ones adds. None for other operations."""
    places: tuple[Arg, ...]
    if op.name == "index_add" and op.args[1] == 0 and dict(op.attrs).get("alpha", 1) == 1:
        into, _, place, rows, *_ = op.args
        adds, places = True, (place,)
    elif op.name == "index_put" and isinstance(op.args[1], tuple):
        into, _, rows, *more = op.args
        adds, places = bool(more and more[0]), op.args[1]
    else:
        return None
    if not (isinstance(into, Ref) and isinstance(rows, Ref)):
        return None
    names = tuple(place.name for place in places if isinstance(place, Ref))
    if op.name == "index_add" and (selected := _selected_behind(names[0], makers)):
        return Write(op, into.name, selected, rows.name, adds, held=names[0])
    if len(names) < len(places) or any(name not in makers or makers[name].name != SELECTED for name in names):
        return None
    sum_of = makers.get(rows.name)
    if not adds and sum_of is not None and sum_of.name == "add":
        for there, more_rows in (sum_of.args[:2], sum_of.args[1::-1]):
            read = makers.get(there.name) if isinstance(there, Ref) else None
            if read is not None and read.name == "index" and read.args == (into, places) and isinstance(more_rows, Ref):
                return Write(op, into.name, names, more_rows.name, adds=True, sums=rows.name)
    return Write(op, into.name, names, rows.name, adds)


def _selected_behind(name: str, makers: Mapping[str, Op]) -> tuple[str, ...]:
    """The selected places at which a vector was read, before arithmetic on it; empty for other values."""
    op = makers.get(name)
    while op is not None and (op.name in KEEPING or is_elementwise(op.name)) and len([*op.refs()]) == 1:
        op = makers.get(next(op.refs()))
    if op is None or op.name != "index":
        return ()
    places = [*op.refs()][1:]
    selected = all(name in makers and makers[name].name == SELECTED for name in places)
    return tuple(places) if selected else ()


@dataclass(frozen=True, slots=True)
class Distinct:
    """Proofs about integers and masks of a graph, from the operations that make them."""

    makers: Mapping[str, Op]
    types: Mapping[str, TensorType]

    def at_most_once(self, mask: str, dims: Iterable[int]) -> bool:
        """Whether a mask is set at most once along the given dimensions together."""
        wide = [dim for dim in dims if self.types[mask].shape[dim] > 1]
        return not wide or (len(wide) == 1 and self._once(mask, wide[0]))

    def _once(self, mask: str, dim: int) -> bool:
        op = self.makers.get(mask)
        if op is None:
            return False
        names = list(op.refs())
        if op.name == "eq":
            numbers = [name for name in names if self._size(name, mask, dim) > 1]
            return len(numbers) == 1 and self.numbers(numbers[0], self._own(numbers[0], mask, dim))
        if op.name in ("logical_and", "bitwise_and", "mul"):
            return any(
                self._size(name, mask, dim) > 1 and self._once(name, self._own(name, mask, dim)) for name in names
            )
        if op.name == "ne" and op.args[1] == 0:
            return self._once(names[0], dim)
        source = self._moved(op, mask, dim)
        return source is not None and self._once(*source)

    def numbers(self, name: str, dim: int) -> bool:
        """Whether integers are distinct along a dimension, as those of topk and sort are."""
        op = self.makers.get(name)
        if op is None:
            return False
        if op.name in ("topk", "sort", "argsort"):
            places = len(op.results) == 1 or op.results[1].name == name
            along = argument(op, 2 if op.name == "topk" else 1, "dim", -1)
            return places and isinstance(along, int) and along % len(self.types[name].shape) == dim
        source = self._moved(op, name, dim) if self.types[name].dtype in _WIDE else None
        return source is not None and self.numbers(*source)

    def _size(self, name: str, result: str, dim: int) -> int:
        """The size of an operand along the dimension `dim` of an elementwise result."""
        own = self._own(name, result, dim)
        return 1 if own < 0 else self.types[name].shape[own]

    def _own(self, name: str, result: str, dim: int) -> int:
        return dim - len(self.types[result].shape) + len(self.types[name].shape)

    def _moved(self, op: Op, name: str, dim: int) -> tuple[str, int] | None:
        """The operand that has the elements of a result, and the dimension there; None for other operations."""
        source = next(op.refs(), None)
        if source is None or source not in self.types:
            return None
        before, shape = self.types[source].shape, self.types[name].shape
        if op.name in ("to", "detach", "slice", "split"):
            return source, dim
        if op.name == "expand":
            own = dim - len(shape) + len(before)
            return (source, own) if own >= 0 and before[own] == shape[dim] else None
        if op.name == "permute" and isinstance(op.args[1], tuple):
            place = op.args[1][dim]
            return (source, place) if isinstance(place, int) else None
        if op.name == "reshape":
            ahead = math.prod(shape[:dim])
            for own, size in enumerate(before):
                if size == shape[dim] and math.prod(before[:own]) == ahead:
                    return source, own
        return None
