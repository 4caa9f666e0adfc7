"""The proof that a loop or a branch does nothing where a mask selects nothing.

    for e in range(experts):                      with the body                without it
        rows = torch.where(chosen == e)[0]        rows = selected(eq, 0)       rows = selected(eq, 0)
        if len(rows):                             selection_tested((eq,))      selection_tested((eq,))
            out[rows] += expert(x[rows])          x_0  = index(x, (rows,))
                                                  …
                                                  index_put_(out, (rows,), y)
        count = count + 1                         add(count, 1)                add(count, 1)

A package always runs the body, for it does not know the number of rows. That is correct if the body only writes rows of
the tested mask, or fills elements where it is true (`masked_fill`, `where`). The proof compares traces: one in which
every test finds something, and others in which none or some do. The others must equal the first without some
operations, and these must change nothing if the mask that was tested before them is zero. Where a counter, a list or a
stored outcome carries one test's outcome to the code behind another test, a trace in which only one of them finds
something differs.

A loop over the places of a mask tests one element in each iteration:

    hit = one.sum(0) > 0                          sum  = sum(one, 0)             sum = sum(one, 0)
    for e in hit.nonzero():                       hit  = gt(sum, 0)              hit = gt(sum, 0)
        rows = torch.where(one[:, e])             selection_tested((hit,), e, e + 1, 1)
        …                                         rows = selected(select(one, 1, e), 0)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from partc.errors import PartcError, Source
from partc.frontend.selections.selection_tests import TESTED
from partc.ir.operations import KEEPING, SHOWING, spelling
from partc.ir.program import SELECTED, Arg, Graph, Op, Ref, TensorType, is_change

LONGEST = 16  # the most operations between two masks and their common source
_ALIKE = KEEPING - spelling("permute") - spelling("expand")  # the result has the operand's elements in order
# For non-negative operands, zero only if all elements are.
_TOTALS = frozenset({"any", "sum", "count_nonzero", "max", "amax"})
_POSITIVE = frozenset({"one_hot", "bincount"})
# Operations whose result is zero if the operand is.
_ZERO = KEEPING | SHOWING | _TOTALS | {"index", "index_select", "gather", "cumsum", "repeat", "repeat_interleave"}
_OF_PARTS = frozenset({"repeat_interleave", "eq", SELECTED})
_BOTH = frozenset({"logical_and", "bitwise_and", "__and__"})
_NOT = frozenset({"logical_not", "bitwise_not"})
_PUTS = frozenset({"index_put", "index_put_"})
_WRITES = _PUTS | {
    "index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_", "scatter_add", "scatter_add_",
}  # fmt: skip
_BY_PLACE = KEEPING | {"index", "floor_divide", "remainder", "add", "sub", "mul"}  # without operands, without results


class ChangedError(PartcError):
    """A branch changes more than the rows that its test selects; `line` is the line of the test."""

    line = ""


@dataclass(frozen=True, slots=True)
class Elements:
    """The elements of a value that a test reads: those from index `first` to before `last` of a dimension, or all.

    With `equal`, they are those that equal `first`.
    """

    test: Op
    value: str
    dim: int | None
    first: int
    last: int
    equal: bool = False


def check_empty(
    full: Graph, empty: Graph, states: Mapping[str, TensorType], test: Source
) -> Mapping[str, Elements | None]:
    """Check that the operations which `empty` lacks change nothing where the masks tested before them are zero.

    `states` has the types of parameters and buffers. `test` is the first test. Returns, for each value that `empty`
    lacks, the elements of which one must be set for the value to be computed; None if that depends on several tests.
    Raises PartcError P0206.
    """
    check = _Alignment(full, states, test)
    check.same.update((mine.name, its.name) for mine, its in zip(full.inputs, empty.inputs, strict=True))
    place = 0
    for wanted in empty.ops:
        found = check.place_behind(full.ops, place, wanted)
        if isinstance(found, int):
            place = found
        elif wanted.name != "constant" and not check.pairs_left_out(wanted):  # constants stand before all tests
            raise found
    for op in full.ops[place:]:
        check.leave_out(op)
    if [check.there(name) for name in full.outputs] != list(empty.outputs):
        raise check.refusal(full.ops[-1])
    return check.tested()


def without_tests(graph: Graph) -> Graph:
    """The graph without its marks of tests."""
    return replace(graph, ops=tuple(op for op in graph.ops if op.name != TESTED))


@dataclass(frozen=True, slots=True)
class _Zero:
    """A value that is zero from index `first` to before `last` of a dimension; everywhere if `dim` is None."""

    name: str
    dim: int | None
    first: int
    last: int


@dataclass(slots=True)
class _Zeros:
    """The values that are zero, in part or everywhere, if a tested tensor is zero."""

    makers: Mapping[str, Op]
    types: Mapping[str, TensorType]
    test: Op
    changed: frozenset[str]  # values that an operation changes in place
    seeds: list[_Zero] = field(default_factory=list)

    def __post_init__(self) -> None:
        _, first, last, *_ = self.test.args
        assert isinstance(first, int) and isinstance(last, int)
        self.seeds.extend(_Zero(name, None if first == -1 else 0, first, last) for name in self.test.refs())
        for seed in self.seeds:
            op = self._maker(seed.name)
            if op is None or not op.args or not isinstance(op.args[0], Ref):
                continue
            given = op.args[0].name
            total = op.name in _TOTALS or _is_test(op)
            if (op.name in KEEPING and not self._rounds(op)) or op.name == "any" or (total and self._positive(given)):
                dim = None if seed.dim is None else self._dim_before(op, seed.dim)
                if given not in self.changed and (seed.dim is None or dim is not None):
                    self.seeds.append(replace(seed, name=given, dim=dim))

    @property
    def elements(self) -> Elements:
        """The elements that the test reads, as early in the graph as they are known."""
        seed = self.seeds[-1]
        op = self._maker(seed.name)
        last_dim = seed.dim is not None and seed.dim == len(self._shape(seed.name)) - 1
        numbers = self._counted(op) if op is not None and last_dim and seed.last == seed.first + 1 else None
        if numbers is not None and numbers not in self.changed:
            return Elements(self.test, numbers, None, seed.first, seed.last, equal=True)
        return Elements(self.test, seed.name, seed.dim, seed.first, seed.last)

    def empties(self, other: _Zeros) -> bool:
        """Whether another test finds nothing if this one finds nothing."""
        seed = other.seeds[0]
        if self.has(seed.name) or seed.dim is None:
            return self.has(seed.name)
        return all(self._has_slice(seed.name, seed.dim, index) for index in range(seed.first, seed.last))

    def _rounds(self, op: Op) -> bool:
        """Whether an operation may round a fraction away; masks and counts have none."""
        given = next(op.refs())
        rounds = self.types[given].differentiable and op.results[0].type.dtype.startswith(("i", "u"))
        return rounds and not self._positive(given)

    def _maker(self, name: str) -> Op | None:
        """The operation that computes a value; None if the value is changed in place.

        Also None for argmax's and max's indices, and for the maximum of two tensors.
        """
        op = None if name in self.changed else self.makers.get(name)
        if op is not None and op.name in _TOTALS and (op.results[0].name != name or len([*op.refs()]) > 1):
            return None
        return op

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.types[name].shape

    def _dim_before(self, op: Op, dim: int) -> int | None:
        """The dimension of the first operand that becomes the result's dimension `dim` unchanged; None if there is
        none.
        """
        before, after = self._shape(next(op.refs())), op.results[0].type.shape
        if op.name == "permute":
            return _axes(op.args[1:], before)[dim]
        if op.name in ("transpose", "t"):
            one, other = _axes(op.args[1:], before) or (0, len(before) - 1)
            return {one: other, other: one}.get(dim, dim)
        if op.name in _TOTALS:
            over = _axes(op.args[1:2], before)
            rest = [axis for axis in range(len(before)) if axis not in over]
            return rest[dim] if len(after) == len(rest) else dim if dim in rest else None
        if op.name in ("select", "slice"):
            (axis,) = _axes(op.args[1], before)
            return dim + (dim >= axis) if op.name == "select" else dim if dim != axis else None
        if op.name in _ALIKE or _is_test(op):
            for axis, size in enumerate(before):
                if size == after[dim] and prod(before[axis + 1 :]) == prod(after[dim + 1 :]):
                    return axis
        return None

    def _positive(self, name: str) -> bool:
        """Whether a value has no negative elements, as a mask does."""
        if self.types[name].dtype == "bool":
            return True
        op = self._maker(name)
        if op is None or op.name in _POSITIVE or self._counted(op) is not None:
            return op is not None
        given = [isinstance(arg, Ref) and self._positive(arg.name) for arg in op.args]
        return all(given) if op.name == "mul" else op.name in _ZERO and given[0]

    def has(self, name: str) -> bool:
        """Whether a value is zero everywhere."""
        if any(seed.dim is None and self._equal(name, seed.name) for seed in self.seeds):
            return True
        op = self._maker(name)
        if op is None:
            return False
        given = [*op.refs()]
        if op.name in _BOTH or op.name == "mul":
            return any(map(self.has, given))
        if op.name in ("select", "slice") and self._is_part(op):
            return True
        if op.name in _ZERO or _is_test(op):
            return bool(given) and self.has(given[0])
        return self._is_unmet(op)

    def _is_part(self, op: Op) -> bool:
        """Whether an operation selects indices of a dimension at which its operand is zero."""
        match op.args:
            case (Ref(name), int(dim), int(first)) if op.name == "select":
                part = range(first, first + 1)
            case (Ref(name), int(dim), int(first), int(last)) | (Ref(name), int(dim), int(first), int(last), 1):
                part = range(first, last)
            case _:
                return False
        dim %= len(self._shape(name))
        return first >= 0 and bool(part) and all(self._has_slice(name, dim, index) for index in part)

    def _has_slice(self, name: str, dim: int, index: int) -> bool:
        """Whether a value is zero at an index of a dimension."""
        for seed in self.seeds:
            if (seed.dim is None or (seed.dim == dim and seed.first <= index < seed.last)) and self._equal(
                name, seed.name
            ):
                return True
        op = self._maker(name)
        if op is None:
            return False
        given = [*op.refs()]
        if op.name in _BOTH or op.name == "mul":
            return any(self._has_slice(x, dim, index) for x in given if self._shape(x) == self._shape(name))
        before = self._dim_before(op, dim) if given else None
        return before is not None and self._has_slice(given[0], before, index)

    def _is_unmet(self, op: Op) -> bool:
        """Whether an operation compares numbers with one whose count among them is zero."""
        if op.name != "eq" or not isinstance(op.args[0], Ref) or (number := self._number(op.args[1])) is None:
            return False
        name = op.args[0].name
        found = [seed for seed in self.seeds if seed.dim is not None and seed.first <= number < seed.last]
        numbers = self._maker(name)
        if numbers is not None and numbers.name == "repeat_interleave":
            counts = next(numbers.refs())
            if any(seed.dim == 0 and self._equal(counts, seed.name) for seed in found):
                return True
        for seed in found:
            maker = self._maker(seed.name)
            counted = None if maker is None or seed.dim != len(self._shape(seed.name)) - 1 else self._counted(maker)
            if counted is not None and self._is_among(name, counted):
                return True
        return False

    def _number(self, operand: Arg) -> int | None:
        """The integer that an operand is, or that it holds as a constant."""
        if not isinstance(operand, Ref):
            return operand if isinstance(operand, int) else None
        op = self._maker(self._rearranged_source(operand.name))
        match (op.name, op.args) if op is not None else None:
            case ("constant", ((int(number),), ())):
                return number
        return None

    def _counted(self, op: Op) -> str | None:
        """The operand whose numbers an operation counts (bincount) or marks (one-hot); None for other operations."""
        if op.name == "one_hot":
            return next(op.refs())
        if op.name == "scatter_add" and len(op.results[0].type.shape) == 1:  # torch.bincount
            makers = [self._maker(self._rearranged_source(name)) for name in op.refs()]
            if [maker and maker.name for maker in makers[::2]] == ["zeros", "ones_like"]:
                return [*op.refs()][1]
        return None

    def _rearranged_source(self, name: str) -> str:
        """The source of a value behind operations that keep every element."""
        while (op := self._maker(name)) is not None and op.name in KEEPING:
            name = next(op.refs())
        return name

    def _is_among(self, name: str, numbers: str) -> bool:
        """Whether all elements of a value are elements of another one."""
        numbers = self._rearranged_source(numbers)
        while not self._equal(name, numbers):
            op = self._maker(name)
            if op is None or op.name not in KEEPING | SHOWING:
                return False
            name = next(op.refs())
        return numbers not in self.changed

    def _equal(self, one: str, other: str, steps: int = LONGEST) -> bool:
        """Whether two values are equal: computed by the same few operations from the same values."""
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
    """Maps values of the first trace to those of the second, and follows the tests of masks."""

    def __init__(self, full: Graph, states: Mapping[str, TensorType], test: Source) -> None:
        self._test = test
        self._makers = full.makers()
        self._types = {**states, **full.types()}
        self._changed = frozenset(self._roots(full.ops))
        self._tests: list[_Zeros] = []  # the tests met so far
        self._active: Sequence[_Zeros] = ()  # the tests since the last operation that both traces have
        self._decided: dict[str, Sequence[_Zeros]] = {}  # the active tests of each operation that is left out
        self.same: dict[str, str] = {}

    def _roots(self, ops: Sequence[Op]) -> set[str]:
        """The values that operations change in place, and the views through which they do so."""
        found: set[str] = set()
        for op in ops:
            name = op.args[0].name if is_change(op) and op.args and isinstance(op.args[0], Ref) else ""
            while name:
                found.add(name)
                maker = self._makers.get(name)
                viewed = maker is not None and (maker.name in SHOWING or is_change(maker))
                name = next(maker.refs()) if maker is not None and viewed else ""
        return found

    def tested(self) -> Mapping[str, Elements | None]:
        """The elements that decide whether each value that is left out is computed; None for several tests."""
        found: dict[str, Elements | None] = {}
        known: dict[int, Elements | None] = {}
        for name, tests in self._decided.items():
            if id(tests) not in known:
                inner = tests[-1] if tests else None
                alone = inner is not None and all(outer.empties(inner) for outer in tests[:-1])
                known[id(tests)] = inner.elements if inner is not None and alone else None
            found[name] = known[id(tests)]
        return found

    def there(self, name: str) -> str:
        """The second trace's value for a value of the first; "" if the second lacks it. A changed state keeps one
        name.
        """
        start = name
        while name in self._decided:
            name = self._unchanged(self._makers[name], self._decided[name])
        if name != start and name in self._types and self._types[name] != self._types[start]:
            return ""
        return self.same.get(name, name)

    def pairs(self, op: Op, wanted: Op) -> bool:
        if _form(op) != _form(wanted) or [*map(self.there, op.refs())] != [*wanted.refs()]:
            return False
        self.same.update((mine.name, its.name) for mine, its in zip(op.results, wanted.results, strict=True))
        self._active = ()
        if op.name == TESTED and not wanted.args[-1]:
            self._follow_test(op)
        return True

    def place_behind(self, ops: Sequence[Op], first: int, wanted: Op) -> int | PartcError:
        """Find the operation that pairs with `wanted`, at `first` or later; operations before it are left out.

        Returns the index behind it; or the error that says why there is none, and then leaves nothing out.
        """
        if first < len(ops) and self.pairs(ops[first], wanted):
            return first + 1
        before = dict(self.same), dict(self._decided), [*self._tests], self._active
        refusal: PartcError = self.refusal(wanted)
        try:
            for place in range(first, len(ops)):
                if self.pairs(ops[place], wanted):
                    return place + 1
                self.leave_out(ops[place])
        except PartcError as error:
            refusal = error
        self.same, self._decided, self._tests, self._active = before
        return refusal

    def pairs_left_out(self, wanted: Op) -> bool:
        """Pair `wanted`, which computes masks of parts, with an equal operation that was left out earlier."""
        for name in self._decided if wanted.name in _OF_PARTS else ():
            op = self._makers[name]
            constant = self._changed.isdisjoint([*op.refs(), *(value.name for value in op.results)])
            if constant and _form(op) == _form(wanted) and [*map(self.there, op.refs())] == [*wanted.refs()]:
                for mine, its in zip(op.results, wanted.results, strict=True):
                    del self._decided[mine.name]
                    self.same[mine.name] = its.name
                return True
        return False

    def _follow_test(self, test: Op) -> None:
        """Follow a test. An iteration's test replaces that of the iteration before; a test without masks ends the
        loop.
        """
        _, first, _, depth, *_ = test.args
        if depth and first != 0:
            before = [place for place, zeros in enumerate(self._active) if zeros.test.args[3] == depth]
            self._active = self._active[: before[-1]] if before else self._active
        if [*test.refs()]:
            zeros = _Zeros(self._makers, self._types, test, self._changed)
            self._tests.append(zeros)
            self._active = (*self._active, zeros)

    def leave_out(self, op: Op) -> None:
        if op.name == TESTED:
            self._follow_test(op)
            return
        self._decided.update((value.name, self._active) for value in op.results)
        target = op.args[0] if op.args else None
        if not is_change(op) or not isinstance(target, Ref) or self._unchanged(op, self._active):
            return
        name = target.name
        while name in self._decided and self._makers[name].name in SHOWING:
            name = next(self._makers[name].refs())
        if name not in self._decided:
            raise self.refusal(op)

    def _unchanged(self, op: Op, active: Sequence[_Zeros]) -> str:
        """The operand that an operation returns unchanged if the tested masks are zero; "" for other operations."""
        operands = [arg.name if isinstance(arg, Ref) else "" for arg in op.args]
        if op.name in _ALIKE & SHOWING:
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
        """The mask to whose places a value refers, or whose places it is computed from; the value itself if it is a
        mask; "" for other values.
        """
        if name in self._types and self._types[name].dtype == "bool":
            return name
        op = self._makers.get(name)
        while op is not None and op.name in _BY_PLACE and name not in self._changed:
            read = [*op.refs()]
            name = read[-1] if op.name == "index" or len(read) == 1 else ""
            op = self._makers.get(name)
        return next(op.refs()) if op is not None and op.name == SELECTED else ""

    def _is_zero(self, mask: str, active: Sequence[_Zeros]) -> bool:
        """Whether a mask is zero if any active test finds nothing; without active tests, if any test so far does."""
        return bool(self._tests) and all(zeros.has(mask) for zeros in active or self._tests)

    def refusal(self, op: Op) -> ChangedError:
        error = ChangedError(
            "P0206",
            "the model does not trace: a branch depends on the values of a tensor, and where a mask selects "
            f"nothing it changes {op.name}",
            help="let such a branch only write the rows that the tested mask selects, or choose with torch.where",
            source=self._test,
        )
        error.line = str(self._tests[-1].test.args[-2]) if self._tests else ""
        return error


def _axes(listed: Any, shape: tuple[int, ...]) -> list[int]:
    """The dimensions that are listed in an operation's arguments, as non-negative numbers."""
    if isinstance(listed, tuple):
        return [axis for one in listed for axis in _axes(one, shape)]
    return [listed % len(shape)] if isinstance(listed, int) else []


def _is_test(op: Op) -> bool:
    """Whether an operation tests which elements are nonzero, or positive."""
    return op.name in ("gt", "greater", "ne", "not_equal") and op.args[1:] == (0,)


def _form(op: Op) -> tuple[Any, ...]:
    return (replace(op, args=op.args[:-1]) if op.name == TESTED else op).form, op.source
