"""The proof that a loop or a branch does nothing where a mask selects nothing.

    for e in range(experts):                      with the body                without it
        rows = torch.where(chosen == e)[0]        rows = selected(eq, 0)       rows = selected(eq, 0)
        if len(rows):                             selection_tested((eq,))      selection_tested((eq,))
            out[rows] += expert(x[rows])          x_0  = index(x, (rows,))
                                                  …
                                                  index_put_(out, (rows,), y)
        count = count + 1                         add(count, 1)                add(count, 1)

A package always runs the body, for it does not know the number of rows. That is right if the body only writes rows of
the tested mask, or fills elements where it is true (`masked_fill`, `where`). Two traces show it, one in which every
test finds something and one in which none does: the operations of the second are those of the first without some, and
these change nothing if the mask that was tested before them is zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from partc.errors import PartcError, Source
from partc.frontend.selections import TESTED
from partc.ir.program import SELECTED, Graph, Op, Ref, Value, is_change

LONGEST = 16  # operations between two masks and the values that both are computed from
_ORDERED = frozenset({
    "view", "_unsafe_view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "alias", "detach",
})  # fmt: skip
_VIEWS = _ORDERED | {
    "permute", "t", "transpose", "expand", "expand_as", "split", "split_with_sizes", "chunk", "unbind", "select",
    "slice", "diagonal", "narrow",
}  # fmt: skip
# Operations of one tensor that keep every element, and those that are zero only if all elements are.
_KEPT = _ORDERED | {"permute", "t", "transpose", "expand", "expand_as", "to", "_to_copy", "clone", "contiguous"}
_TOTALS = frozenset({"any", "sum", "count_nonzero", "max", "amax"})
_POSITIVE = frozenset({"one_hot", "bincount"})
# Operations of zeros that are zero.
_ZERO = _KEPT | _VIEWS | _TOTALS | {"index", "index_select", "gather", "cumsum", "repeat", "repeat_interleave"}
_BOTH = frozenset({"logical_and", "bitwise_and", "__and__"})
_NOT = frozenset({"logical_not", "bitwise_not"})
_PUTS = frozenset({"index_put", "index_put_"})
_WRITES = _PUTS | {"index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_"}


def check_empty(full: Graph, empty: Graph, test: Source) -> None:
    """Check that the operations which `empty` lacks change nothing where the masks tested before them are zero.

    `test` is the first test. Raises PartcError P0206.
    """
    check = _Alignment(full, test)
    check.same.update((mine.name, its.name) for mine, its in zip(full.inputs, empty.inputs, strict=True))
    rest = iter(full.ops)
    for wanted in empty.ops:
        for op in rest:
            if check.pairs(op, wanted):
                break
            check.leave_out(op)
        else:
            raise check.refusal(wanted)
    for op in rest:
        check.leave_out(op)
    if [check.there(name) for name in full.outputs] != list(empty.outputs):
        raise check.refusal(full.ops[-1])


def without_tests(graph: Graph) -> Graph:
    """The graph without its marks of tests."""
    return replace(graph, ops=tuple(op for op in graph.ops if op.name != TESTED))


@dataclass(slots=True)
class _Zeros:
    """The values that are zero everywhere if a tested tensor is."""

    makers: Mapping[str, Op]
    test: Op
    changed: frozenset[str]  # values that an operation changes in place
    seeds: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seeds.extend(self.test.refs())
        for name in self.seeds:
            op = self.makers.get(name)
            if op is None or not op.args or name in self.changed:
                continue
            first = op.args[0]
            if not isinstance(first, Ref):
                continue
            total = op.name in _TOTALS or _is_test(op)
            if op.name in _KEPT or op.name == "any" or (total and self._positive(first.name)):
                self.seeds.append(first.name)

    def _positive(self, name: str) -> bool:
        """Whether a value has no negative elements, as a mask does."""
        op = self.makers.get(name)
        while op is not None and op.name in _ZERO and isinstance(op.args[0], Ref):
            if op.results[0].type.dtype == "bool":
                return True
            op = self.makers.get(op.args[0].name)
        return op is not None and (op.results[0].type.dtype == "bool" or op.name in _POSITIVE)

    def has(self, name: str) -> bool:
        op = self.makers.get(name)
        if self._is_part(op) if self._part() else any(self._equal(name, seed) for seed in self.seeds):
            return True
        if op is None or name in self.changed:
            return False
        given = [arg.name for arg in op.args if isinstance(arg, Ref)]
        if op.name in _BOTH or op.name == "mul":
            return any(map(self.has, given))
        if op.name in _ZERO or _is_test(op):
            return bool(given) and self.has(given[0])
        return False

    def _part(self) -> bool:
        return self.test.args[1] != -1

    def _is_part(self, op: Op | None) -> bool:
        """Whether an operation makes the mask of the rows of a tested part."""
        if op is None or op.name != "eq" or not isinstance(op.args[0], Ref) or not isinstance(op.args[1], int):
            return False
        numbers = self.makers.get(op.args[0].name)
        first, last = self.test.args[1:]
        return (
            numbers is not None
            and numbers.name == "repeat_interleave"
            and self._equal(next(numbers.refs()), next(self.test.refs()))
            and first <= op.args[1] < last  # type: ignore[operator]
        )

    def _equal(self, one: str, other: str, steps: int = LONGEST) -> bool:
        """Whether two values are computed alike, from the same ones, in a few steps."""
        if one == other:
            return True
        if not steps:
            return False
        a, b = self.makers.get(one), self.makers.get(other)
        if a is None or b is None or {one, other} & self.changed or "rand" in a.name or len(a.results) != 1:
            return False
        pairs = list(zip(a.refs(), b.refs(), strict=False))
        alike = a.renamed(dict(pairs)) if len({x for x, _ in pairs}) == len(dict(pairs)) else a
        return (
            (a.name, alike.args, alike.attrs, len(b.results)) == (b.name, b.args, b.attrs, 1)
            and not {name for pair in pairs for name in pair} & self.changed
            and all(self._equal(x, y, steps - 1) for x, y in pairs)
        )


class _Alignment:
    """The values of the second trace in place of those of the first."""

    def __init__(self, full: Graph, test: Source) -> None:
        self._test = test
        self._makers = full.makers()
        self._values: Mapping[str, Value] = full.definitions()
        self._changed = frozenset(self._roots(full.ops))
        self._tests: list[_Zeros] = []  # so far
        self._active: Sequence[_Zeros] = ()  # since the last operation that both traces have
        self._decided: dict[str, Sequence[_Zeros]] = {}  # the active tests of each operation that is left out
        self.same: dict[str, str] = {}

    def _roots(self, ops: Sequence[Op]) -> set[str]:
        """Values whose memory an operation changes, and their views that it changes them by."""
        found: set[str] = set()
        for op in ops:
            name = op.args[0].name if is_change(op) and op.args and isinstance(op.args[0], Ref) else ""
            while name:
                found.add(name)
                maker = self._makers.get(name)
                viewed = maker is not None and (maker.name in _VIEWS or is_change(maker))
                name = next(maker.refs()) if maker is not None and viewed else ""
        return found

    def there(self, name: str) -> str:
        """The value that the second trace has in place of one; "" for those that it lacks. States have one name."""
        start = name
        while name in self._decided:
            name = self._unchanged(self._makers[name], self._decided[name])
        if name != start and name in self._values and self._values[name].type != self._values[start].type:
            return ""
        return self.same.get(name, name)

    def pairs(self, op: Op, wanted: Op) -> bool:
        if _form(op) != _form(wanted) or [*map(self.there, op.refs())] != [*wanted.refs()]:
            return False
        self.same.update((mine.name, its.name) for mine, its in zip(op.results, wanted.results, strict=True))
        self._active = ()
        if op.name == TESTED:
            self._meet(op)
        return True

    def _meet(self, test: Op) -> None:
        zeros = _Zeros(self._makers, test, self._changed)
        self._tests.append(zeros)
        self._active = (*self._active, zeros)

    def leave_out(self, op: Op) -> None:
        if op.name == TESTED:
            self._meet(op)
            return
        self._decided.update((value.name, self._active) for value in op.results)
        target = op.args[0] if op.args else None
        if not is_change(op) or not isinstance(target, Ref) or self._unchanged(op, self._active):
            return
        name = target.name
        while name in self._decided and self._makers[name].name in _VIEWS:
            name = next(self._makers[name].refs())
        if name not in self._decided:
            raise self.refusal(op)

    def _unchanged(self, op: Op, active: Sequence[_Zeros]) -> str:
        """The operand that an operation gives back if the tested masks are zero; "" for other operations."""
        operands = [arg.name if isinstance(arg, Ref) else "" for arg in op.args]
        if op.name in _ORDERED:
            return operands[0]
        if op.name in _WRITES:
            places = op.args[1] if op.name in _PUTS else op.args[2:3]
            names = [place.name for place in places if isinstance(place, Ref)] if isinstance(places, tuple) else []
            masks = [*map(self._mask_of_places, names)]
            return operands[0] if masks and any(mask and self._is_zero(mask, active) for mask in masks) else ""
        if op.name in ("masked_fill", "masked_fill_") and self._is_zero(operands[1], active):
            return operands[0]
        if op.name == "where" and len(operands) == 3:
            if self._is_zero(operands[0], active):
                return operands[2]
            maker = self._makers.get(operands[0])
            if maker is not None and maker.name in _NOT and self._is_zero(next(maker.refs()), active):
                return operands[1]
        return ""

    def _mask_of_places(self, name: str) -> str:
        """The mask whose places a value has; "" for other values."""
        op = self._makers.get(name)
        while op is not None and op.name == "detach":
            op = self._makers.get(next(op.refs()))
        return next(op.refs()) if op is not None and op.name == SELECTED else ""

    def _is_zero(self, mask: str, active: Sequence[_Zeros]) -> bool:
        """Whether a mask is zero where the active tests fail; where none is active, where any test so far does.

        A loop over the places of a mask tests each of them; its bodies are those of the rows that they write.
        """
        return bool(self._tests) and (all if active else any)(
            not [*zeros.test.refs()] or zeros.has(mask) for zeros in active or self._tests
        )

    def refusal(self, op: Op) -> PartcError:
        return PartcError(
            "P0206",
            "the model does not trace: a branch depends on the values of a tensor, and where a mask selects "
            f"nothing it changes {op.name}",
            help="let such a branch only write the rows that the tested mask selects, or choose with torch.where",
            source=self._test,
        )


def _is_test(op: Op) -> bool:
    """Whether an operation tells which elements are not zero; of those without a sign."""
    return op.name in ("gt", "ne") and op.args[1:] == (0,)


def _form(op: Op) -> tuple[Any, ...]:
    plain = op.renamed(dict.fromkeys(op.refs(), ""))
    return op.name, plain.args, plain.attrs, [value.type for value in op.results], op.source
