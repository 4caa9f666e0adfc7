"""Rows that a mask selects, while a model is traced: all rows, with the mask beside them.

    rows = torch.where(chosen == e)[0]       rows  = selected(eq(chosen, e), 0)      as many as the mask has elements
    y    = expert(x[rows])              ->   y     = expert(x[rows])                 of all of them
    out.index_add_(0, rows, y)               out.index_add_(0, rows, y)              `route` leaves out the rest

A trace has no values, so that the number of selected rows is unknown. Every row is kept, in the order of the mask's
elements. The pass `route` checks that rows are computed one by one, and that only selected ones are written back.

A number of rows is an integer that can be tested against zero, be a size, and be an operand of tensors. Tests whether
anything is selected (`mask.any()`, `len(rows) == 0`, a loop over `nonzero()`) pass as if it were; `check_empty`
compares with traces in which all or some of them fail. `check_numbers` compares with traces in which these integers are
other ones: a loop, an index, a threshold or a library's function that reads one as a plain integer changes such a
trace.

Counts that a model lists (`counts.tolist()`) divide a tensor into parts of consecutive rows. A part is a selection too:

    parts = x.split(counts.tolist())          part  = repeat_interleave(counts)          the part of each row
    y     = torch.cat([f(parts[0]), …])   ->  rows  = selected(eq(part, 0), 0)
                                              y     = index_put(y, (rows,), f(x[rows])), …
"""

from __future__ import annotations

import ast
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from partc.errors import PartcError, Source
from partc.frontend import row_counts
from partc.frontend.repeats import MARK
from partc.frontend.row_counts import TESTS_OF_ZERO, PartSize, RowCount, unknown_number, without_counts
from partc.frontend.statements import around
from partc.installed import is_machinery, shortened, user_frame
from partc.ir.program import SELECTED
from partc.torch_private import without_modes

NOT_SELECTED = object()
# A mark of a test whether tensors are zero, in one part of their rows or in all, and its outcome. An iteration of a
# loop has the depth of the loop in its mark; the mark at the end of a loop has no tensors.
TESTED = "selection_tested"
MOST_TESTS = 32  # in `while` loops, beyond which they have no end
_library = torch.library.Library("partc", "FRAGMENT")
_library.define(f"{SELECTED}(Tensor mask, int dim) -> Tensor")
_library.impl(
    SELECTED,
    lambda mask, dim: torch.empty(mask.numel(), dtype=torch.int64, device=mask.device),
    "CompositeExplicitAutograd",
)
_library.define(f"{TESTED}(Tensor[] tested, int first, int last, int loop, bool outcome) -> ()")
_library.impl(TESTED, lambda tested, first, last, loop, outcome: None, "CompositeExplicitAutograd")
torch.fx.node.has_side_effect(torch.ops.partc.selection_tested.default)
_INDICES = frozenset({"where", "nonzero", "argwhere"})
_ARITHMETIC = frozenset({
    "add", "sub", "rsub", "mul", "div", "true_divide", "divide", "multiply", "subtract", "pow", "__add__", "__radd__",
    "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__rdiv__", "add_", "sub_", "mul_",
    "div_", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__",
})  # fmt: skip
_REDUCTIONS = frozenset({"sum", "mean"})
_LOSSES = frozenset({
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "kl_div",
})  # fmt: skip
# Functions that write selected rows back to a tensor of all rows.
_WRITES = frozenset({
    "index_add", "index_add_", "index_copy", "index_copy_", "index_put", "index_put_", "__setitem__", "scatter_add",
    "scatter_add_", "scatter", "scatter_", "masked_scatter", "masked_scatter_",
})  # fmt: skip
_COUNTS = frozenset({"sum", "count_nonzero"})
_NUMBERS = frozenset({"size", "stride", "numel", "nelement", "__len__"})
_PROPERTIES = (torch.Tensor.shape, torch.Tensor.nbytes)
_COMPARISONS = {
    ast.Eq: "eq", ast.NotEq: "ne", ast.Gt: "gt", ast.GtE: "ge", ast.Lt: "lt", ast.LtE: "le",
}  # fmt: skip
# The files of methods that are written in Python, and call a mode from there.
_METHODS = (
    torch.Tensor.__format__.__code__.co_filename, torch.overrides.__file__,
    str(Path(__file__).with_name("builtin_numbers.py")),
)  # fmt: skip
_OWN = (__file__, row_counts.__file__)
# Functions that make a tensor of a number, and those that make one of given sizes.
_FROM_NUMBERS = frozenset({"tensor", "as_tensor", "scalar_tensor"})
_SIZED = frozenset({
    "zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "expand", "broadcast_to",
})  # fmt: skip
_SHAPES = frozenset({"view", "reshape", "unflatten", "_unsafe_view"})
_RESHAPED = frozenset({*_SHAPES, "unsqueeze", "to", "long", "contiguous", "clone"})  # of one dimension, all elements
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class Iterations:
    """The places of a mask's elements, which a loop may go through, and nothing else."""

    _selections: Selections
    _mask: Tensor
    _places: Sequence[Any]
    _sources: Sequence[Source]

    def __iter__(self) -> Iterator[Any]:
        return self._selections.iterations(self._mask, self._places, self._sources)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a tensor: the mask that selects some of them, and their dimension."""

    tensor: weakref.ref[Tensor]
    mask: Tensor
    dim: int


class Selections:
    """The tensors of a trace that hold rows selected by masks."""

    def __init__(
        self,
        *,
        selects: Callable[[int], bool],
        call: Callable[[], int],
        shown: Callable[[int], int],
        value: Callable[[Tensor], Tensor | None],
        know: Callable[[Any, Any], None],
        guard: Callable[[FrameType | None], bool | None],
    ) -> None:
        """`value` and `know` are of constants. `selects` gives the outcome of a test from its number in its `call`.

        `shown` gives the integer that stands for a number of selected rows, from the number of all rows. `guard` gives
        the outcome of a test in a frame whose other outcome only raises.
        """
        self.tests: list[Source] = []
        self.numbers: list[Source] = []  # of rows, that the model reads
        self._loops = 0  # over places that have begun and not ended
        self._selects, self._call, self._shown = selects, call, shown
        self._outcomes: dict[tuple[int, int, int, int], tuple[weakref.ref[Tensor], bool]] = {}
        self._numbers: Counter[int] = Counter()  # of tests in each call
        self._tests_in_while = 0
        self._value, self._know, self._guard = value, know, guard
        self._rows: dict[int, _Rows] = {}
        self._indices: dict[int, tuple[weakref.ref[Tensor], tuple[Tensor, ...]]] = {}  # by the mask
        self._counts: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}  # a count of a mask's elements
        self._row_counts: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}  # the counts of a matrix's rows
        self._views: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}  # a mask in another shape, and the mask
        # Rows of one example: all rows, and the number of the example.
        self._examples: dict[int, tuple[weakref.ref[Tensor], Tensor, int]] = {}
        self._selected: dict[int, tuple[weakref.ref[Tensor], Tensor, Tensor]] = {}  # by masked_select: x, mask
        # A test of a count: its answer if the count is not zero, and the counted mask.
        self._answers: dict[int, tuple[weakref.ref[Tensor], bool, Tensor]] = {}
        self._placed: dict[int, weakref.ref[Tensor]] = {}  # places that nonzero() found, as constants
        # Numbers of selected rows, arange(count), and the dimension that they run along.
        self._numbered: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._listed: dict[
            int, tuple[weakref.ref[Tensor], Tensor, int]
        ] = {}  # elements of integers, which may be counts
        self._parts: dict[tuple[int, int], tuple[Tensor, list[Tensor]]] = {}  # counts, and the mask of each part
        self._frame: FrameType | None = None

    def nonempty(self, tested: Tensor, first: int = -1, last: int = -1) -> bool:
        """The answer to a test whether a mask selects anything, or whether its elements `first` to `last - 1` do.

        The graph records the test.
        """
        self._tests_in_while += any(isinstance(node, ast.While) for node in around(self._frame))
        if self._tests_in_while > MOST_TESTS:
            raise _endless_loop(next(self._source(), None))
        self.tests.extend(self._source())
        outcome = self._outcome(tested, first, last)
        torch.ops.partc.selection_tested.default([tested.detach()], first, last, 0, outcome)
        return outcome

    def _outcome(self, tested: Tensor, first: int, last: int) -> bool:
        """The outcome of a test. Tests of the same elements of one mask have the same outcome."""
        key = id(tested), tested._version, first, last
        held = self._outcomes.get(key)
        if held is None or held[0]() is not tested:
            call = self._call()
            held = weakref.ref(tested), self._selects(self._numbers[call])
            self._outcomes[key] = held
            self._numbers[call] += 1
        return held[1]

    def parts(self, counts: Tensor, first: int, last: int) -> list[int]:
        """The parts `first` to `last - 1` without those that tests have found empty."""

        def is_empty(part: int) -> bool:
            held = self._outcomes.get((id(counts), counts._version, part, part + 1))
            return held is not None and held[0]() is counts and not held[1]

        return [part for part in range(first, last) if not is_empty(part)]

    @property
    def most_tests(self) -> int:
        """The largest number of different tests of one call."""
        return max(self._numbers.values(), default=0)

    def iterations(self, mask: Tensor, places: Sequence[Any], sources: Sequence[Source]) -> Iterator[Any]:
        """The places of a mask's elements, each with a test of its element."""
        self.tests.extend(sources)
        self._loops += 1
        loop = self._loops
        try:
            for number, place in enumerate(places):
                outcome = self._outcome(mask, number, number + 1)
                torch.ops.partc.selection_tested.default([mask.detach()], number, number + 1, loop, outcome)
                if outcome:
                    yield place
        finally:
            torch.ops.partc.selection_tested.default([], -1, -1, loop, True)
            self._loops -= 1

    def _source(self) -> Iterator[Source]:
        frame = user_frame(self._frame)
        if frame is not None:
            yield Source(file=shortened(frame.f_code.co_filename), line=frame.f_lineno)

    @property
    def any(self) -> bool:
        """Whether a mask has selected rows so far."""
        return bool(self._rows)

    def _number_of(self, mask: Tensor, times: int = 1) -> RowCount:
        """The number of selected rows, or a multiple."""
        self.numbers.extend(self._source())
        whole, shown = mask.numel() * times, self._shown(mask.numel()) * times
        counted = lambda: mask.ne(0).sum() * times if times != 1 else mask.ne(0).sum()  # noqa: E731
        return RowCount(whole, shown, self, counted, mask if times == 1 else None, mask)

    def compares_inside_torch(self) -> bool:
        """Whether a function of torch compares two numbers."""
        self._frame = _outside()
        return self.inside_torch()

    def passed(self) -> bool | None:
        """The outcome under which a guard that compares two numbers does not raise; None for other comparisons."""
        return self._guard(_outside())

    def inside_torch(self) -> bool:
        return self._frame is not None and is_machinery(self._frame.f_code.co_filename)

    def sized(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments of a call with sizes in place of numbers of rows; for arithmetic, with tensors."""
        if (name in _ARITHMETIC or name in _SHAPES) and any(isinstance(x, RowCount) for x in _leaves((args, kwargs))):
            arithmetic = name in _ARITHMETIC
            return without_counts(args, arithmetic), without_counts(kwargs, arithmetic)
        return args, kwargs

    def call(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType
    ) -> Any:
        """The result of a call that is another one for selected rows; NOT_SELECTED for other calls."""
        while frame.f_back is not None and frame.f_code.co_filename in _METHODS:
            frame = frame.f_back
        self._frame = frame
        given: Any = args[0] if args else None
        if name in _FROM_NUMBERS and isinstance(given, RowCount):
            return given.tensor().to(kwargs.get("dtype") or torch.int64)
        if name in _SIZED and (made := self._made(func, args, kwargs)) is not None:
            return made
        if name == "arange" and len(args) == 1 and isinstance(given, RowCount) and given._mask is not None:
            return self._arange(func, given._mask, kwargs)
        if name in _INDICES and len(args) + len(kwargs.keys() - {"as_tuple"}) == 1 and isinstance(given, Tensor):
            return self._found(given, name == "where" or bool(kwargs.get("as_tuple")))
        if name == "__getitem__":
            index, masked = self._with_constants(self._with_parts(given, args[1]))
            made = self._read(func, given, index)
            # Unlike rows that a slice selects, those of a mask are no view.
            return (func(given, index) if made is NOT_SELECTED else made).clone() if masked else made
        if name in ("split", "split_with_sizes") and len(args) > 1:
            return self._divided(given, args[1], args[2] if len(args) > 2 else kwargs.get("dim", 0))
        if name in ("cat", "concat", "concatenate") and isinstance(given, tuple | list):
            return self._joined(given, args[1] if len(args) > 1 else kwargs.get("dim", 0))
        if name == "masked_select" and len(args) == 2 and self._value(args[1]) is None:
            same = given.shape == args[1].shape
            x, mask = (given, args[1]) if same else torch.broadcast_tensors(given, args[1])
            made = self._read(torch.Tensor.__getitem__, x, mask)
            self._selected[id(made)] = weakref.ref(made), x, mask
            return made
        held = self._of(given)
        if name == "__setitem__":
            index, masked = self._with_constants(self._with_parts(given, args[1]))
            if masked or self._of(args[2]) is not None:
                func(given, self._as_indices(index), args[2])
                return None
            return self._written(func, *args)
        if name in ("masked_scatter", "masked_scatter_") and (source := self._packed(args[2])) is not None:
            return _scattered(name, given, args[1], source)
        if held is None:
            return NOT_SELECTED
        if name in ("reshape", "view") and not held.dim:
            shape = tuple(args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:])
            if (merged := self._merged(given, shape)) is not None:
                example = self._examples.get(id(given))
                if example is not None and example[0]() is given:
                    self._examples[id(merged)] = weakref.ref(merged), *example[1:]
                return merged
        if name in _REDUCTIONS:
            return self._reduced(func, name, args, kwargs, held)
        if name in _LOSSES:
            return self._loss(func, name, args, kwargs, held)
        if name == "unbind" and not held.dim and not (args[1] if len(args) > 1 else kwargs.get("dim", 0)):
            return self._each(given, held)
        if name in _NUMBERS or (name == "__get__" and getattr(func, "__self__", None) in _PROPERTIES):
            return self._size(func, name, args, kwargs, held)
        return NOT_SELECTED

    def follow(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Any) -> bool:
        """Follow any other call; whether its result may be computed from the values of constants."""
        self._counted_by(name, args, kwargs, made)
        if name in ("unbind", "__getitem__") and args[0].dim() == 1 and args[0].dtype in _INTEGERS:
            self._list(args[0], made, args[1:])
        if not self._rows or name in _WRITES:
            return True
        if name in _RESHAPED and args:
            self._number_like(args[0], made)
        operands = [x for x in _leaves((args, kwargs)) if self._of(x) is not None]
        # A call of a module that is not traced lists its empty results behind its operands.
        self._hold_like(operands, args[0] if name == f"{MARK}.default" else made)
        return not operands or all(self._of(x) is not None for x in _leaves(made) if isinstance(x, Tensor))

    def _made(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        """A tensor that is made with as many rows as a mask selects: the selected rows of one with all of them."""
        first = 1 if args and isinstance(args[0], Tensor) else 0
        if "size" in kwargs:
            args, kwargs = (
                (*args[:first], kwargs["size"], *args[first:]),
                {k: x for k, x in kwargs.items() if k != "size"},
            )
        listed = len(args) > first and isinstance(args[first], tuple | list)
        sizes, rest = (args[first], args[first + 1 :]) if listed else (args[first:], ())
        mask = sizes[0]._mask if sizes and isinstance(sizes[0], RowCount) else None
        if mask is None:
            return None
        held = self._of(args[0]) if first else None
        if held is not None and held.mask is mask and not held.dim:
            same: Tensor = func(args[0], (mask.numel(), *sizes[1:]), *rest, **kwargs)
            self._hold(same, mask, 0)
            return same
        made: Tensor = self._read(
            torch.Tensor.__getitem__, func(*args[:first], (*mask.shape, *sizes[1:]), *rest, **kwargs), mask
        )
        return made

    def _arange(self, func: Callable[..., Any], mask: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        """The numbers 0, 1, … of the selected rows."""
        counted = mask.ne(0).flatten().cumsum(0) - 1
        like = func(1, **kwargs)
        made: Tensor = self._read(Tensor.__getitem__, counted.reshape(mask.shape).to(like.dtype), mask)
        self._numbered[id(made)] = weakref.ref(made), 0
        return made

    def _packed(self, x: Any) -> Tensor | None:
        """Selected rows, and behind them rows of nan, which show where more are read; None for other tensors."""
        held = self._of(x)
        if held is None or held.dim:
            return None
        count, chosen = held.mask.numel(), held.mask.flatten().ne(0)
        order = torch.arange(count) + torch.where(chosen, 0, count)
        beyond = (torch.arange(count) >= chosen.sum()).reshape(-1, *(1 for _ in x.shape[1:]))
        packed = self._only(x, held).index_select(0, order.argsort())
        return torch.where(beyond, math.nan, packed) if x.is_floating_point() else packed

    def _number_like(self, numbers: Any, made: Any) -> None:
        """Follow a result with the elements of row numbers, in their order."""
        if self._numbered_dim(numbers) is not None and isinstance(made, Tensor) and made.numel() == numbers.numel():
            wide = [dim for dim, size in enumerate(made.shape) if size != 1]
            if len(wide) == 1:
                self._numbered[id(made)] = weakref.ref(made), wide[0]

    def _numbered_dim(self, x: Any) -> int | None:
        found = self._numbered.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def _of_all_rows(self, x: Tensor, index: tuple[Any, ...]) -> Tensor | None:
        """rows[numbers, i, …] where the numbers are those of all selected rows, as rows[:, i, …]."""
        held, own = self._of(x), self._of(index[0])
        dim, others = self._numbered_dim(index[0]), index[1:]
        if dim is None or held is None or own is None or held.mask is not own.mask or held.dim:
            return None
        if any(not isinstance(item, Tensor) or item.dtype is torch.bool or self._of(item) for item in others):
            return None
        shape = torch.broadcast_shapes(*(item.shape for item in others), (1,) * index[0].dim())
        dim += len(shape) - index[0].dim()
        if shape[dim] != 1:
            return None
        if others:
            made = x[(slice(None), *(item.expand(shape) for item in others))]
        else:
            made = x.reshape(len(x), *shape, *x.shape[1:])
        self._hold(made, held.mask, 0)
        made = made.squeeze(1 + dim).movedim(0, dim)
        self._hold(made, held.mask, dim)
        return made

    # -- indices -----------------------------------------------------------------------------------

    def _of(self, x: Any) -> _Rows | None:
        found = self._rows.get(id(x))
        return found if found is not None and found.tensor() is x else None

    def _found(self, mask: Tensor, as_tuple: bool) -> Any:
        """The places of all elements of a mask."""
        if self._value(mask) is not None or not mask.dim() or mask.is_nested:
            return NOT_SELECTED
        indices = self._places(mask)
        if as_tuple:
            return indices
        made = indices[0][:, None] if mask.dim() == 1 else torch.stack(indices, 1)
        self._hold(made, mask, 0)
        if mask.dim() == 1:
            with without_modes():
                self._know(made, torch.arange(mask.numel())[:, None])
        return made

    def _places(self, mask: Tensor) -> tuple[Tensor, ...]:
        held = self._indices.get(id(mask))
        if held is not None and held[0]() is mask:
            return held[1]
        indices = tuple(torch.ops.partc.selected.default(mask, dim) for dim in range(mask.dim()))
        for index in indices:
            self._hold(index, mask, 0)
        if mask.dim() == 1:
            with without_modes():
                self._know(indices[0], torch.arange(mask.numel()))
        self._indices[id(mask)] = weakref.ref(mask), indices
        return indices

    def _hold(self, x: Tensor, mask: Tensor, dim: int) -> None:
        self._rows[id(x)] = _Rows(weakref.ref(x), mask, dim)

    def _each(self, x: Tensor, held: _Rows) -> Any:
        """The places that nonzero() found, one after the other, as constants; NOT_SELECTED for other rows."""
        real = self._value(x)
        if real is None:
            return NOT_SELECTED
        with without_modes():
            numbers, values = real.tolist(), real.unbind(0)
        rows = []
        for number, row in zip(numbers, values, strict=True):
            made = torch.tensor(number)
            self._know(made, row)
            self._placed[id(made)] = weakref.ref(made)
            rows.append(made)
        return Iterations(self, held.mask, rows, [*self._source()])

    def listed(self, x: Tensor) -> Iterations | None:
        """x.tolist() of the places that nonzero() found; None for other tensors."""
        held, real = self._of(x), self._value(x)
        if held is None or held.dim or real is None:
            return None
        self._frame = _outside()
        with without_modes():
            return Iterations(self, held.mask, real.tolist(), [*self._source()])

    def _with_constants(self, index: Any) -> tuple[Any, bool]:
        """An index with places in place of masks that are constants, and whether it had some."""
        items = index if isinstance(index, tuple) else (index,)
        found: list[Any] = []
        masked = False
        for item in items:
            mask = self._value(item) if isinstance(item, Tensor) and item.dtype is torch.bool and item.dim() else None
            if mask is None:
                found.append(item)
                continue
            masked = True
            with without_modes():
                places = [places.tolist() for places in mask.nonzero(as_tuple=True)]
            first, count = places[0][0] if places[0] else 0, len(places[0])
            if mask.dim() == 1 and places[0] == [*range(first, first + count)]:
                found.append(slice(None) if count == len(mask) else slice(first, first + count))
            else:
                found.extend(torch.tensor(numbers, dtype=torch.int64) for numbers in places)
        return (tuple(found) if masked else index), masked

    def _as_indices(self, index: Any) -> tuple[Any, ...]:
        """An index with the places of masks in place of the masks."""
        items = index if isinstance(index, tuple) else (index,)
        found: list[Any] = []
        for item in items:
            if isinstance(item, Tensor) and item.dtype is torch.bool and item.dim():
                found.extend(self._places(item))
            else:
                found.append(item)
        return tuple(found)

    def _read(self, func: Callable[..., Any], x: Tensor, index: Any) -> Any:
        items = index if isinstance(index, tuple) else (index,)
        if (whole := self._of_all_rows(x, items)) is not None:
            return whole
        given = self._as_indices(index)
        if self._is_place(x) and index == 0 and not isinstance(index, Tensor | bool):
            made = func(x, index)
            real = self._value(x)
            with without_modes():
                self._know(made, real[0] if real is not None else None)
            self._placed[id(made)] = weakref.ref(made)
            return made
        if any(map(self._unknown, given)) and self._of(x) is None:
            x, given = self._looked_up(x, given)
            return func(x, given)
        numbers = tuple(self._number(item, x, place) for place, item in enumerate(given))
        if len(given) == len(items) and all(a is b for a, b in zip(numbers, items, strict=True)):
            held = [*filter(None, map(self._of, (x, *items)))]
            if not held:
                return NOT_SELECTED
        made = func(x, numbers if isinstance(index, tuple) or len(numbers) > 1 else numbers[0])
        self._hold_like([x, *(item for item in numbers if isinstance(item, Tensor))], made)
        if not any(isinstance(item, Tensor) for item in items):
            self._number_like(x, made)
        return made

    def _unknown(self, item: Any) -> bool:
        """Whether a part of an index is an integer tensor of no dimension, whose value a trace would ask for."""
        return isinstance(item, Tensor) and not item.dim() and item.dtype in _INTEGERS and self._value(item) is None

    def _written(self, func: Callable[..., Any], x: Tensor, index: Any, value: Any) -> Any:
        """x[:, i] = value as x.movedim(1, 0)[i.reshape(1)] = value; rows of x[mask] = rows in the order of the mask."""
        items = index if isinstance(index, tuple) else (index,)
        masked = isinstance(index, Tensor) and index.dtype is torch.bool and index.dim() and isinstance(value, Tensor)
        if masked and value.dim() == x.dim() - index.dim() + 1 and value.shape[0] > 1:
            mask = index.reshape(*index.shape, *(1 for _ in range(x.dim() - index.dim())))
            x.masked_scatter_(mask.expand_as(x), value.expand(len(value), *x.shape[index.dim() :]))
            return None
        if not any(map(self._unknown, items)):
            return NOT_SELECTED
        rest = tuple(slice(None) if self._unknown(item) else item for item in items)
        if any(isinstance(item, Tensor | list | bool) for item in rest):
            return NOT_SELECTED
        view, dims, places, dim = x[rest], [], [], 0
        width = x.dim() - sum(isinstance(item, int | slice) for item in rest)
        for item, plain in zip(items, rest, strict=True):
            if self._unknown(item):
                dims.append(dim)
                places.append(torch.where(item < 0, item + view.shape[dim], item).reshape(1))
            dim += width if plain is Ellipsis else not isinstance(plain, int)
        func(view.movedim(dims, tuple(range(len(dims)))), tuple(places), value)
        return None

    def _looked_up(self, x: Tensor, index: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, ...]]:
        """x[:, i] as x.index_select(1, i)[:, 0]: the tensor and the index that remain."""
        taken = [
            0 if item is None or item is Ellipsis else item.dim() if getattr(item, "dtype", None) is torch.bool else 1
            for item in index
        ]
        dim, found = 0, []
        for item, count in zip(index, taken, strict=True):
            if self._unknown(item):
                x = x.index_select(dim, torch.where(item < 0, item + x.shape[dim], item).reshape(1))
            found.append(0 if self._unknown(item) else item)
            dim += x.dim() - sum(taken) if item is Ellipsis else count
        return x, tuple(found)

    def _is_place(self, x: Any) -> bool:
        found = self._placed.get(id(x))
        return found is not None and found() is x

    def _number(self, item: Any, x: Tensor, dim: int) -> Any:
        """A constant number of an index as a number, for a trace would take its value from the tensor.

        A place for which the model has nothing, such as a class that no token chooses, is never found.
        """
        real = self._value(item) if isinstance(item, Tensor) and item.shape in ((), (1,)) else None
        if real is None or real.dtype is torch.bool:
            return item
        number = min(int(real), x.shape[dim] - 1) if self._is_place(item) and dim < x.dim() else int(real)
        return slice(number, number + 1) if real.dim() and number >= 0 else item if real.dim() else number

    def _hold_like(self, operands: Sequence[Any], made: Any) -> None:
        """Let results that have as many rows hold rows of the same mask."""
        held = next(filter(None, map(self._of, operands)), None)
        if held is None:
            return
        count = held.mask.numel()
        for x in _leaves(made):
            if isinstance(x, Tensor) and self._of(x) is None:
                places = [dim for dim, size in enumerate(x.shape) if size == count]
                if places:
                    self._hold(x, held.mask, held.dim if held.dim in places else places[0])

    # -- parts ---------------------------------------------------------------------------------------

    def _list(self, counts: Tensor, made: Any, index: tuple[Any, ...]) -> None:
        """Follow the elements of a list of integers."""
        for part, x in enumerate(made if isinstance(made, tuple) else (made,)):
            if not x.dim() and all(isinstance(number, int) for number in index):
                number = part if isinstance(made, tuple) else index[0] % len(counts)
                self._listed[id(x)] = weakref.ref(x), counts, number

    def _masks(self, counts: Tensor, rows: int) -> list[Tensor]:
        """For each count, a mask of its rows."""
        found = self._parts.get((id(counts), rows))
        if found is None:
            numbers = torch.repeat_interleave(counts, output_size=rows)
            found = counts, [numbers == number for number in range(len(counts))]
            self._parts[id(counts), rows] = found
        return found[1]

    def _divided(self, x: Tensor, sizes: Any, dim: int) -> Any:
        """x.split(counts.tolist(), dim)."""
        if not isinstance(sizes, tuple | list) or not any(isinstance(size, PartSize) for size in sizes):
            return NOT_SELECTED
        counts = next(size.counts for size in sizes if isinstance(size, PartSize))
        own = [isinstance(size, PartSize) and size.counts is counts and size.first for size in sizes]
        if own != [*range(len(counts))] or any(size.last != size.first + 1 for size in sizes):
            raise unknown_number()
        if not dim % x.dim() and (parts := self._of_examples(x, counts)) is not None:
            return parts
        before = (slice(None),) * (dim % x.dim())
        masks = self._masks(counts, x.shape[dim])
        return tuple(self._read(Tensor.__getitem__, x, (*before, *self._places(mask))) for mask in masks)

    def _of_examples(self, x: Tensor, counts: Tensor) -> tuple[Tensor, ...] | None:
        """Selected rows by example, where the mask has a row for each and `counts` are the sums of these."""
        held, found = self._of(x), self._row_counts.get(id(counts))
        if held is None or held.dim or found is None or found[0]() is not counts:
            return None
        view = self._views.get(id(found[1]))
        whole = found[1] if view is None or view[0]() is not found[1] else view[1]
        if held.mask is not whole:
            return None
        parts = []
        rows = zip(self._only(x, held).split(found[1].shape[1]), found[1].unbind(0), strict=True)
        for number, (some, mask) in enumerate(rows):
            parts.append(self._read(Tensor.__getitem__, some, mask))
            self._examples[id(parts[-1])] = weakref.ref(parts[-1]), x, number
        return tuple(parts)

    def _all_examples(self, parts: Sequence[Any]) -> Tensor | None:
        """The rows of all examples in their order, each example's as they are or reshaped alike."""
        found = [self._examples.get(id(part)) for part in parts]
        x = found[0][1] if found and found[0] is not None else None
        for number, (part, known) in enumerate(zip(parts, found, strict=True)):
            if known is None or known[0]() is not part or known[1] is not x or known[2] != number:
                return None
        if x is None or sum(part.numel() for part in parts) != x.numel():
            return None
        inner = parts[0].shape[1:]
        if any(part.shape[1:] != inner for part in parts):
            return None
        return x if x.shape[1:] == inner else self._merged(x, (-1, *inner))

    def _merged(self, x: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        """Selected rows whose dimension becomes one with those behind it: every row is several ones."""
        held = self._of(x)
        made = x.new_empty(0) if held is None or held.dim else self._only(x, held).reshape(shape)
        if held is None or not len(made) or len(made) == len(x) or len(made) % len(x):
            return None
        mask = held.mask.ne(0).flatten()[:, None].expand(-1, len(made) // len(x)).flatten()
        rows: Tensor = self._read(Tensor.__getitem__, made, mask)
        return rows

    def _with_parts(self, x: Tensor, index: Any) -> Any:
        """An index with the places of a part in place of its slice, x[start : start + count]."""
        items = index if isinstance(index, tuple) else (index,)
        ends = [
            [isinstance(end, PartSize) for end in (item.start, item.stop)] if isinstance(item, slice) else [False]
            for item in items
        ]
        if not any(map(any, ends)):
            return index
        dim = next(dim for dim, each in enumerate(ends) if any(each))
        start, stop = items[dim].start, items[dim].stop
        counts = (stop if isinstance(stop, PartSize) else start).counts
        first = start.last if isinstance(start, PartSize) else 0 if start in (None, 0) else None
        last = stop.last if isinstance(stop, PartSize) else len(counts) if stop is None else None
        parts = [] if first is None or last is None else self.parts(counts, first, last)
        if (
            len(parts) != 1
            or any(self.parts(counts, 0, end.first) for end in (start, stop) if isinstance(end, PartSize))
            or items[dim].step is not None
            or not all(isinstance(item, slice) for item in items[:dim])
        ):
            raise unknown_number()
        places = self._places(self._masks(counts, x.shape[dim])[parts[0]])
        return (*items[:dim], *places, *items[dim + 1 :])

    def _joined(self, parts: Sequence[Any], dim: int) -> Any:
        """All parts of a tensor's rows, put together in their order."""
        if not dim and (whole := self._all_examples(parts)) is not None:
            return whole
        held = [self._of(x) for x in parts]
        masks = [each.mask for each in held if each is not None]
        for _, known in self._parts.values():
            if len(known) == len(masks) == len(held) and all(a is b for a, b in zip(masks, known, strict=True)):
                break
        else:
            return NOT_SELECTED
        if any(each is None or each.dim or dim % x.dim() for each, x in zip(held, parts, strict=True)):
            return NOT_SELECTED
        made = torch.zeros_like(parts[0])
        for mask, x in zip(masks, parts, strict=True):
            made = torch.index_put(made, self._places(mask), x)
        return made

    # -- reductions ----------------------------------------------------------------------------------

    def _only(self, x: Tensor, held: _Rows) -> Tensor:
        """The selected rows, with zeros in place of the others."""
        mask = held.mask if held.mask.dtype is torch.bool else held.mask.ne(0)
        return torch.where(mask.reshape([-1 if dim == held.dim else 1 for dim in range(x.dim())]), x, 0)

    def _reduced(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], held: _Rows
    ) -> Any:
        """The sum or the mean of the selected rows."""
        x, (_, *rest) = args[0], args
        dims = rest[0] if rest else kwargs.get("dim")
        listed = range(x.dim()) if dims is None or dims == () else [dims] if isinstance(dims, int) else dims
        over = {dim % x.dim() for dim in listed}
        if held.dim not in over:
            return NOT_SELECTED
        total = torch.sum(self._only(x, held), *rest, **kwargs)
        if name == "sum":
            return total
        return total / (held.mask.ne(0).sum() * math.prod(x.shape[dim] for dim in over - {held.dim}))

    def _loss(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], held: _Rows
    ) -> Any:
        """A loss of the selected rows: their losses, summed, over their number."""
        given = kwargs.get("reduction", "mean")
        if given == "none" or held.dim or kwargs.get("weight") is not None or len(args) > 2:
            return NOT_SELECTED
        losses = func(*args, **{**kwargs, "reduction": "none"})
        if losses.shape[:1] != (held.mask.numel(),):
            return NOT_SELECTED
        whole = _Rows(held.tensor, held.mask, 0)
        total = self._only(losses, whole).sum()
        if given == "sum":
            return total
        target = args[1] if len(args) > 1 else kwargs["target"]
        if name in ("cross_entropy", "nll_loss") and not target.is_floating_point():
            counted = target.ne(kwargs.get("ignore_index", -100))
            return total / self._only(counted, whole).sum()
        return total / (held.mask.ne(0).sum() * (1 if given == "batchmean" else math.prod(losses.shape[1:])))

    # -- numbers of rows ---------------------------------------------------------------------------

    def _size(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], held: _Rows
    ) -> Any:
        if name == "__len__":
            if held.dim or self.inside_torch():
                return NOT_SELECTED
            number = self._number_of(held.mask)
            return int(number) if not self._tests_length() else number.whole if number else 0
        made = func(*args, **kwargs)
        if name == "stride" and isinstance(made, tuple):
            return tuple(self._size(func, name, (args[0], dim), {}, held) for dim in range(len(made)))
        if isinstance(made, torch.Size):
            number = self._number_of(held.mask)
            return torch.Size([number if dim == held.dim else size for dim, size in enumerate(made)])
        if name in ("stride", "size"):
            dim = (args[1] if len(args) > 1 else kwargs["dim"]) % args[0].dim()
            depends = dim == held.dim if name == "size" else dim < held.dim
        else:  # a number of elements or bytes
            depends = True
        return self._number_of(held.mask, made // held.mask.numel()) if depends else made

    def _tests_length(self) -> bool:
        """Whether the code that takes this len() only tests whether it is zero."""
        path = around(self._frame)
        outer = next((node for node in reversed(path[:-1]) if isinstance(node, ast.expr | ast.stmt)), None)
        if isinstance(outer, ast.Compare) and len(outer.ops) == 1:
            number = outer.comparators[0]
            tested = isinstance(number, ast.Constant) and number.value in (0, 1)
            return tested and (_COMPARISONS.get(type(outer.ops[0]), ""), number.value) in TESTS_OF_ZERO  # type: ignore[attr-defined]
        return isinstance(outer, ast.If | ast.UnaryOp | ast.BoolOp)

    def labels(self, targets: Any, lengths: Any) -> Any:
        """Labels of all examples in a row, labels.masked_select(mask), as a matrix with their examples as rows.

        `lengths` are the counts of the mask's rows; other targets stay.
        """
        found, counts = self._selected.get(id(targets)), self._row_counts.get(id(lengths))
        if found is None or counts is None or found[0]() is not targets or counts[0]() is not lengths:
            return targets
        _, x, mask = found
        if counts[1] is not mask:
            return targets
        rows, width = x.shape
        places = torch.where(mask, mask.cumsum(1) - 1, width)
        return x.new_zeros(rows, width + 1).scatter(1, places, x)[:, :width]

    def _counted_by(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Any) -> None:
        """Follow the result of any other call: counts of masks, and tests of them."""
        if not isinstance(made, Tensor) or not args or not isinstance(args[0], Tensor):
            return
        x = args[0]
        if name in _SHAPES and x.dtype is torch.bool:
            self._views[id(made)] = weakref.ref(made), x
        along = (*args[1:], kwargs.get("dim"))[0]
        if name in _COUNTS and x.dtype is torch.bool and x.dim() == 2 and along in (1, -1) and made.dim() == 1:
            self._row_counts[id(made)] = weakref.ref(made), x
        if made.dim():
            return
        if name == "any" and x.dim():
            self._answers[id(made)] = weakref.ref(made), True, x
        elif name in _COUNTS and x.dtype is torch.bool and x.dim():
            self._counts[id(made)] = weakref.ref(made), x
        elif (mask := self._counted(x)) is not None and len(args) == 2 and isinstance(args[1], int):
            answer = TESTS_OF_ZERO.get((name.strip("_"), args[1]))
            if answer is not None:
                self._answers[id(made)] = weakref.ref(made), answer, mask
        elif name in ("logical_not", "bitwise_not", "__invert__", "__not__"):
            found = self._answered(x)
            if found is not None:
                self._answers[id(made)] = weakref.ref(made), not found[0], found[1]

    def _counted(self, x: Any) -> Tensor | None:
        found = self._counts.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def _answered(self, x: Any) -> tuple[bool, Tensor] | None:
        found = self._answers.get(id(x))
        return found[1:] if found is not None and found[0]() is x else None

    def answer(self, name: str, x: Any) -> Any:
        """The value of a test whether a mask selects anything."""
        if self._value(x) is not None:
            return NOT_SELECTED
        listed = self._listed.get(id(x))
        if listed is not None and listed[0]() is x and name in ("item", "__int__", "__index__"):
            _, counts, part = listed
            self.numbers.extend(self._source())
            return PartSize.of(counts, part, part + 1, self._shown(4), self)
        mask = self._counted(x)
        if mask is not None:
            if name in ("__bool__", "is_nonzero"):
                return self.nonempty(mask)
            number = self._number_of(mask)
            return number if name == "item" else float(int(number)) if name == "__float__" else int(number)
        found = self._answered(x)
        if found is None:
            return NOT_SELECTED
        return found[0] is self.nonempty(found[1])


def _scattered(name: str, x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """x.masked_scatter(mask, source) as one example, for examples may select other numbers of rows."""
    mask = mask.expand_as(x)
    while mask.dim() > 1 and not mask.stride(-1):
        mask = mask[..., 0]
    rest = x.shape[mask.dim() :]
    wide = mask.reshape(1, -1, *(1 for _ in rest))
    made = x.reshape(1, -1, *rest).masked_scatter(wide, source).reshape(x.shape)
    return x.copy_(made) if name == "masked_scatter_" else made


def _outside() -> FrameType | None:
    """The frame that called a method of selections or of numbers of rows."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _OWN:
        frame = frame.f_back
    return frame


def _leaves(item: Any) -> Iterator[Any]:
    if isinstance(item, dict):
        item = tuple(item.values())
    if isinstance(item, tuple | list):
        for one in item:
            yield from _leaves(one)
    else:
        yield item


def _endless_loop(source: Source | None) -> PartcError:
    return PartcError(
        "P0206",
        "the model does not trace: a loop goes on as long as a mask selects something",
        help="repeat it a fixed number of times, with torch.where for the rows that are done",
        source=source,
    )
