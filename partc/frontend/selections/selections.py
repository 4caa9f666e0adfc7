"""Rows that a mask selects, while a model is traced: all rows, together with the mask.

    rows = torch.where(chosen == e)[0]       rows  = selected(eq(chosen, e), 0)      one for each element of the mask
    y    = expert(x[rows])              ->   y     = expert(x[rows])                 for all rows
    out.index_add_(0, rows, y)               out.index_add_(0, rows, y)              `route` leaves out the rest

A trace has no values, so that the number of selected rows is unknown. Every row is kept, in the order of the mask's
elements. The pass `route` checks that rows are computed one by one, and that only selected ones are written back.

A number of rows is an integer that can be tested against zero, be a size, and be an operand of tensors. Tests whether
anything is selected (`mask.any()`, `len(rows) == 0`, a loop over `nonzero()`) pass as if it were; `check_empty`
compares with traces in which all or some of them fail. `check_numbers` compares with traces with other integers: a
loop, an index, a threshold or a library function that reads one as a plain integer changes such a trace.

Counts that a model lists (`counts.tolist()`) divide a tensor into parts of consecutive rows. A part is a selection too:

    parts = x.split(counts.tolist())          part  = repeat_interleave(counts)          the part of each row
    y     = torch.cat([f(parts[0]), …])   ->  rows  = selected(eq(part, 0), 0)
                                              y     = index_put(y, (rows,), f(x[rows])), …
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import EllipsisType, FrameType
from typing import Any

import torch
from torch import Tensor

from partc.errors import Source
from partc.frontend.by_tensor import ByTensor
from partc.frontend.index_items import with_dims
from partc.frontend.permissions import UNKNOWN_NUMBERS, permitted
from partc.frontend.selections import rows_in_order
from partc.frontend.selections.bounded_integers import BoundedIntegers
from partc.frontend.selections.equal_groups import EqualGroups
from partc.frontend.selections.mask_counts import SHAPES, MaskCounts
from partc.frontend.selections.row_counts import (
    TESTS_OF_ZERO,
    PartSize,
    RowCount,
    ValueNumber,
    note_known,
    unknown_number,
    without_counts,
)
from partc.frontend.selections.row_reductions import CONTRACTIONS, REDUCTIONS, contracted, mean_loss, reduced
from partc.frontend.selections.selected_parts import SelectedParts
from partc.frontend.selections.selected_rows import INTEGERS, MaskedRows, SelectedRows, leaves
from partc.frontend.selections.selection_tests import Iterations, SelectionTests, caller_frame
from partc.frontend.selections.value_floats import ValueFloat
from partc.frontend.statements import enclosing_nodes
from partc.frontend.torch_call import TorchCall
from partc.frontend.traceable_forms.functions import fixed_bincount
from partc.installed import user_frame
from partc.ir.program import MODULE_MARK
from partc.torch_private import without_modes, without_overriding

_ARITHMETIC = frozenset({
    "add", "sub", "rsub", "mul", "div", "true_divide", "divide", "multiply", "subtract", "pow", "__add__", "__radd__",
    "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__rdiv__", "add_", "sub_", "mul_",
    "div_", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__",
})  # fmt: skip
# Functions that write selected rows back to a tensor of all rows.
_WRITES = frozenset({
    "index_add", "index_add_", "index_copy", "index_copy_", "index_put", "index_put_", "__setitem__", "scatter_add",
    "scatter_add_", "scatter", "scatter_", "masked_scatter", "masked_scatter_",
})  # fmt: skip
_OPERATORS_IN_PLACE = frozenset({
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__", "__imod__",
    "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
})  # fmt: skip
_PROPERTIES = (torch.Tensor.shape, torch.Tensor.nbytes)
_COMPARISONS = {
    ast.Eq: "eq", ast.NotEq: "ne", ast.Gt: "gt", ast.GtE: "ge", ast.Lt: "lt", ast.LtE: "le",
}  # fmt: skip
# The files of methods that are written in Python, and call a mode from there.
_METHODS = (
    torch.Tensor.__format__.__code__.co_filename, torch.overrides.__file__,
    str(Path(__file__).parents[1] / "branches" / "builtin_numbers.py"),
)  # fmt: skip
# Keep the elements of one dimension in order.
_RESHAPED = frozenset({*SHAPES, "unsqueeze", "to", "long", "contiguous", "clone"})


MOST_LISTED = 64  # elements of a tensor whose floats are listed


class Selections:
    """Replaces calls of torch functions on rows selected by masks, in one trace."""

    def __init__(
        self,
        tests: SelectionTests,
        *,
        shown: Callable[[int], int],
        value: Callable[[Tensor], Tensor | None],
        know: Callable[[Any, Any], None],
    ) -> None:
        """`value` and `know` read and write the values of constants.

        `shown` maps the number of all rows to the integer that stands for a number of selected rows.
        """
        self.tests = tests
        self.numbers: list[Source] = []  # lines that read a number of rows
        self._shown, self._value, self._know = shown, value, know
        self._rows = SelectedRows(value, know)
        self._counts = MaskCounts()
        self._bounds = BoundedIntegers()
        self._parts = SelectedParts(self._rows, self._counts, self.tests.parts)
        self._groups = EqualGroups(self._rows, self._counts)
        self._copies: ByTensor[bool] = ByTensor()  # rows looked up at unknown places, which are views in eager code
        self._packed: ByTensor[tuple[Tensor, Tensor]] = ByTensor()  # result of masked_select -> x, mask

    @property
    def any(self) -> bool:
        """Whether a mask has selected rows so far."""
        return self._rows.any

    def hold(self, operands: Any) -> bool:
        """Whether an operand holds selected rows. Their places are known as if the mask selected all."""
        return any(self._rows.of(x) is not None for x in leaves(operands))

    def sized(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments of a call with numbers of rows replaced by sizes, or by tensors for arithmetic."""
        if (name in _ARITHMETIC or name in SHAPES) and any(isinstance(x, RowCount) for x in leaves((args, kwargs))):
            arithmetic = name in _ARITHMETIC
            return without_counts(args, arithmetic), without_counts(kwargs, arithmetic)
        return args, kwargs

    def call(self, call: TorchCall, frame: FrameType) -> Any:
        """The result of a call that selected rows change; NotImplemented for other calls."""
        while frame.f_back is not None and frame.f_code.co_filename in _METHODS:
            frame = frame.f_back
        self.tests.frame = frame
        name, args = call.name, call.args
        if name in ("__getitem__", "__setitem__") and (index := _without_lists(args[1])) is not args[1]:
            call = replace(call, args=(args[0], index, *args[2:]))
            made = _CALLS[name](self, call)
            return call.run() if made is NotImplemented else made
        changed = call.kwargs.get("out", call.given if _changes_in_place(name) else None)
        if isinstance(changed, Tensor) and (changed in self._copies or changed._base in self._copies):
            raise unknown_number()
        if (rewrite := _CALLS.get(name)) is not None:
            return rewrite(self, call)
        of_rows = _CALLS_OF_ROWS.get(name)
        held = None if of_rows is None else self._rows.of(call.given)
        return NotImplemented if of_rows is None or held is None else of_rows(self, call, held)

    def follow(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Any) -> bool:
        """Follow any other call; return whether its result may be computed from the values of constants."""
        self._groups.check((args, kwargs))
        with without_overriding():  # the trace's modes would intercept every read of a dtype
            self._counts.follow(name, args, kwargs, made)
            self._bounds.follow(name, args, kwargs, made)
            self._rows.widen(name, args, made)
            parts = name in ("unbind", "__getitem__", "cumsum") and args[0].dim() == 1 and args[0].dtype in INTEGERS
        if parts and name == "cumsum":
            self._parts.sum_up(args[0], made)
        elif parts:
            self._parts.follow(args[0], made, args[1:])
        if not self._rows.any:
            return True
        if name in _WRITES:
            return not self.hold((args, kwargs))
        if name in _RESHAPED and args:
            self._rows.number_like(args[0], made)
        operands = [x for x in leaves((args, kwargs)) if self._rows.of(x) is not None]
        # The mark of a call that is not traced lists its empty results behind its operands.
        self._rows.hold_like(operands, args[0] if name == f"{MODULE_MARK}.default" else made)
        return not operands or all(self._rows.of(x) is not None for x in leaves(made) if isinstance(x, Tensor))

    # -- calls that make tensors ---------------------------------------------------------------------

    def _tensor(self, call: TorchCall) -> Any:
        if not isinstance(call.given, RowCount):
            return NotImplemented
        return call.given.tensor().to(call.kwargs.get("dtype") or torch.int64)

    def _select_rows(self, call: TorchCall) -> Any:
        """A new tensor with one row for each selected row: the selected rows of a tensor with all rows."""
        args, kwargs = call.args, call.kwargs
        first = 1 if isinstance(call.given, Tensor) else 0
        if "size" in kwargs:
            args = (*args[:first], kwargs["size"], *args[first:])
            kwargs = {k: x for k, x in kwargs.items() if k != "size"}
        listed = len(args) > first and isinstance(args[first], tuple | list)
        sizes, rest = (args[first], args[first + 1 :]) if listed else (args[first:], ())
        mask = sizes[0]._mask if sizes and isinstance(sizes[0], RowCount) else None
        if mask is None and sizes and isinstance(sizes[0], Tensor):  # mask.sum()
            mask = self._counts.counted(sizes[0])
        if mask is None:
            return NotImplemented
        held = self._rows.of(args[0]) if first else None
        if held is not None and held.mask is mask and not held.dim:
            same: Tensor = call.func(args[0], (mask.numel(), *sizes[1:]), *rest, **kwargs)
            self._rows.hold(same, mask, 0)
            return same
        return self._rows.selected(call.func(*args[:first], (*mask.shape, *sizes[1:]), *rest, **kwargs), mask)

    def _expanded(self, call: TorchCall) -> Any:
        """x.expand_as(rows): a row that repeats for each selected row."""
        held = self._rows.of(call.argument(1, "other"))
        if held is None or held.dim or self._rows.of(call.given) is not None:
            return NotImplemented
        shape = call.argument(1, "other").shape[1:]
        return self._rows.selected(call.given.expand(*held.mask.shape, *shape), held.mask)

    def _repeated(self, call: TorchCall) -> Any:
        """row.repeat(n, …) for n selected rows."""
        x, *sizes = call.args
        times = [*sizes[0]] if sizes and isinstance(sizes[0], tuple | list) else sizes
        mask = times[0]._mask if times and isinstance(times[0], RowCount) else None
        one = None if mask is None else call.func(x, (1, *times[1:]))
        if one is None or mask is None or len(one) != 1:
            return NotImplemented
        return self._rows.selected(one.expand(*mask.shape, *one.shape[1:]), mask)

    def _arange(self, call: TorchCall) -> Any:
        """The numbers 0, 1, … of the selected rows."""
        mask = call.given._mask if len(call.args) == 1 and isinstance(call.given, RowCount) else None
        if mask is None:
            return NotImplemented
        counted = mask.ne(0).flatten().cumsum(0) - 1
        like = call.func(1, **call.kwargs)
        made = self._rows.selected(counted.reshape(mask.shape).to(like.dtype), mask)
        self._rows.number(made, 0)
        return made

    # -- calls that read and write by masks ----------------------------------------------------------

    def _find_places(self, call: TorchCall) -> Any:
        if len(call.args) + len(call.kwargs.keys() - {"as_tuple"}) != 1 or not isinstance(call.given, Tensor):
            return NotImplemented
        return self._rows.found(call.given, call.name == "where" or bool(call.kwargs.get("as_tuple")))

    def _read(self, call: TorchCall) -> Any:
        x, index = self._at_numbers(*call.args)
        if x is not call.given:
            rest = TorchCall(call.func, call.name, (x, index), {})
            made = self._read(rest)
            return rest.run() if made is NotImplemented else made
        if (part := self._between(x, index)) is not NotImplemented:
            return part
        if (row := self._groups.read(x, index)) is not NotImplemented:
            return row
        if (rows := rows_in_order.read(self._rows, x, index)) is not NotImplemented:
            self._copies[rows] = True
            return rows
        index, masked = self._rows.with_constants(self._parts.with_places(x, index))
        made = self._rows.read(call.func, x, index)
        # Unlike rows that a slice selects, those of a mask are not views.
        return (call.func(x, index) if made is NotImplemented else made).clone() if masked else made

    def _written(self, call: TorchCall) -> Any:
        x, index, value = call.args
        if (moved := self._rows.moved(x, index, value)) is not None:
            return self._written(replace(call, args=moved))
        places, masked = self._rows.with_constants(self._parts.with_places(x, index))
        if masked or self._rows.of(value) is not None:
            indices = self._rows.as_indices(x, places)
            several = len(indices) > 1 and any(self._rows.of(item) is not None for item in indices)
            if not several or self._rows.written_alike(call.func, x, indices, value) is NotImplemented:
                call.func(x, indices, value)
            return None
        return self._rows.written(call.func, x, index, value)

    def _put(self, call: TorchCall) -> Any:
        """x.index_put((rows, …), value), whose places differ, as an assignment to an item."""
        x, index, value = call.given, call.argument(1, "indices"), call.argument(2, "values")
        rows = [self._rows.of(item) for item in index]
        if not any(rows) or (len(rows) == 1 and self._rows.of(value) is not None):
            return NotImplemented
        index = tuple(index)
        if call.argument(3, "accumulate", False):
            value = self._read(TorchCall(Tensor.__getitem__, "__getitem__", (x, index), {})) + value
            self._rows.hold_like([index[0]], value)
        made = x if call.name == "index_put_" else x.clone()
        self._written(TorchCall(Tensor.__setitem__, "__setitem__", (made, index, value), {}))
        return made

    def _masked(self, call: TorchCall) -> Any:
        """x.masked_select(mask), which is x[mask] where the mask is a constant."""
        given, mask = call.given, call.argument(1, "mask")
        if not isinstance(given, Tensor) or not isinstance(mask, Tensor) or "out" in call.kwargs:
            return NotImplemented
        known = self._value(mask)
        x, mask = (given, mask) if given.shape == mask.shape else torch.broadcast_tensors(given, mask)
        if known is not None:
            with without_modes():
                known = known.expand(mask.shape)
            self._know(mask, known)
            return self._read(TorchCall(Tensor.__getitem__, "__getitem__", (x, mask), {}))
        if not mask.dim():
            x, mask = x[None], mask[None]
        made = self._rows.selected(x, mask)
        if made is not NotImplemented:
            self._packed[made] = x, mask
        return made

    def _scattered(self, call: TorchCall) -> Any:
        """x.masked_scatter(mask, source) on all examples as one, because each may select another number of rows."""
        source = self._rows.packed(call.argument(2, "source"))
        if source is None:
            return NotImplemented
        x, mask = call.given, call.argument(1, "mask")
        mask = mask.expand_as(x)
        while mask.dim() > 1 and not mask.stride(-1):
            mask = mask[..., 0]
        rest = x.shape[mask.dim() :]
        wide = mask.reshape(1, -1, *(1 for _ in rest))
        made = x.reshape(1, -1, *rest).masked_scatter(wide, source).reshape(x.shape)
        return x.copy_(made) if call.name == "masked_scatter_" else made

    def _distinct(self, call: TorchCall) -> Any:
        """torch.unique_consecutive of an unknown vector, without counts and inverse indices."""
        if (
            len(call.args) > 1
            or any(call.kwargs.values())
            or call.given.dim() != 1
            or self._value(call.given) is not None
        ):
            return NotImplemented
        return self._groups.distinct(call.given)

    def _distinct_numbers(self, call: TorchCall) -> Any:
        """x.unique() of integers below a known bound: the places of the numbers that occur, and their counts."""
        bound = self._bounds.of(call.given)
        unlike = call.argument(2, "return_inverse", False) or call.argument(4, "dim") is not None
        if bound is None or unlike or call.given.dtype not in INTEGERS or self._value(call.given) is not None:
            return NotImplemented
        counts = fixed_bincount(call.given.flatten(), minlength=bound)
        found = self._rows.found(counts, as_tuple=True)[0]
        if not call.argument(3, "return_counts", False):
            return found
        return found, self._read(TorchCall(Tensor.__getitem__, "__getitem__", (counts, found), {}))

    def _rolled(self, call: TorchCall) -> Any:
        """x.roll(number, dim), as a lookup of rows."""
        shift, dim = call.argument(1, "shifts"), call.argument(2, "dims")
        [shift] = shift if isinstance(shift, tuple | list) and len(shift) == 1 else [shift]
        [dim] = dim if isinstance(dim, tuple | list) and len(dim) == 1 else [dim]
        if not isinstance(shift, RowCount) or not isinstance(dim, int):
            return NotImplemented
        count = call.given.shape[dim]
        return call.given.index_select(dim, (torch.arange(count) - shift.tensor()) % count)

    def _divided(self, call: TorchCall) -> Any:
        if len(call.args) < 2:
            return NotImplemented
        return self._parts.divided(call.given, call.args[1], call.argument(2, "dim", 0))

    def _joined(self, call: TorchCall) -> Any:
        if not isinstance(call.given, tuple | list):
            return NotImplemented
        dim = call.argument(1, "dim", 0)
        made = self._parts.joined(call.given, dim)
        return rows_in_order.joined(self._rows, call.given, dim) if made is NotImplemented else made

    def _spread(self, call: TorchCall) -> Any:
        """Arithmetic on selected rows and a plain tensor with one row for each of them; its rows move to the selected
        places.
        """
        selected = next((x for x in call.args if (held := self._rows.of(x)) is not None and not held.dim), None)
        if selected is None or not all(isinstance(x, Tensor) and x.dim() == selected.dim() for x in call.args):
            return NotImplemented
        held, count = self._rows.of(selected), len(selected)
        plain = next((x for x in call.args if x.shape[0] not in (1, count) and self._rows.of(x) is None), None)
        if plain is None or held is None:
            return NotImplemented
        mask = held.mask.ne(0).reshape(*held.mask.shape, *(1 for _ in plain.shape[1:]))
        wide = plain.new_zeros(*held.mask.shape, *plain.shape[1:])
        rows = self._rows.selected(wide.masked_scatter(mask.expand_as(wide), plain), held.mask)
        operands = [rows if x is plain else x for x in call.args]
        made = call.func(*operands, **call.kwargs)
        self._rows.hold_like(operands, made)
        return made

    def _contracted(self, call: TorchCall) -> Any:
        if not self._rows.any:
            return NotImplemented
        return contracted(self._rows, call)

    # -- calls on selected rows ----------------------------------------------------------------------

    def _merged(self, call: TorchCall, held: MaskedRows) -> Any:
        args = call.args
        shape = tuple(args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:])
        if (groups := self._groups.grouped(call.given, shape)) is not NotImplemented:
            return groups
        if (rows := self._rows.regrouped(call.given, shape)) is not None:
            return rows
        merged = None if held.dim else self._rows.merged(call.given, shape)
        if merged is None:
            return NotImplemented
        self._parts.reshaped(call.given, merged)
        return merged

    def _flattened(self, call: TorchCall, held: MaskedRows) -> Any:
        shape = call.given.shape
        first, last = (call.argument(1, "start_dim", 0), call.argument(2, "end_dim", -1))
        if first % len(shape) or not last % len(shape):
            return NotImplemented
        return self._merged(replace(call, args=(call.given, (-1, *shape[last % len(shape) + 1 :]))), held)

    def _iterate(self, call: TorchCall, held: MaskedRows) -> Any:
        """Iterating over the places that nonzero() found: constants, one by one; NotImplemented for other rows."""
        real = None if held.dim or call.argument(1, "dim", 0) else self._value(call.given)
        if real is None:
            return NotImplemented
        return Iterations(call.given, self.tests, held.mask, self._rows.as_constants(real), [*self.tests.source()])

    def listed(self, x: Tensor) -> Iterations | None:
        """x.tolist() of the places that nonzero() found; None for other tensors."""
        held, real = self._rows.of(x), self._value(x)
        if held is None or held.dim or (real is None and not self._rows.is_place(x)):
            return None
        self.tests.frame = caller_frame()
        with without_modes():
            places = None if real is None else real.tolist()
        return Iterations(x, self.tests, held.mask, places, [*self.tests.source()])

    def _reduced(self, call: TorchCall, held: MaskedRows) -> Any:
        """A reduction over the selected rows."""
        made = reduced(self._rows, call, held)
        if made is not NotImplemented and call.given.dtype is torch.bool:
            self._counts.follow(call.name, (held.only(call.given), *call.args[1:]), call.kwargs, made)
        return made

    def _ordered(self, call: TorchCall, held: MaskedRows) -> Any:
        return rows_in_order.ordered(self._rows, call, held)

    def _loss(self, call: TorchCall, held: MaskedRows) -> Any:
        return mean_loss(call, held)

    # -- numbers of rows -----------------------------------------------------------------------------

    def _number_of(self, mask: Tensor, times: int = 1) -> RowCount:
        """The number of selected rows, times `times`."""
        self.numbers.extend(self.tests.source())
        whole, shown = mask.numel() * times, self._shown(mask.numel()) * times
        counted = lambda: mask.ne(0).sum() * times if times != 1 else mask.ne(0).sum()  # noqa: E731
        return RowCount(whole, shown, self.tests, counted, mask if times == 1 else None, mask)

    def _number_in(self, name: str, x: Tensor) -> Any:
        """An unknown number as a place or factor; NotImplemented if the model traces without it, and for other
        tensors.
        """
        single = name == "item" and x.numel() == 1 and (x.is_floating_point() or x.dtype in INTEGERS)
        listed = name == "tolist" and x.is_floating_point() and x.numel() <= MOST_LISTED
        if not (single or listed) or not permitted(UNKNOWN_NUMBERS).may():
            return NotImplemented
        self.numbers.extend(self.tests.source())
        if listed:
            return self._listed(x)
        if x.is_floating_point():
            return ValueFloat.of(x, self._shown(4))
        return ValueNumber.of(x.reshape(()), 0, self._shown(4), self.tests)

    def _listed(self, x: Tensor) -> Any:
        return [*map(self._listed, x.unbind(0))] if x.dim() else ValueFloat.of(x, self._shown(4))

    def _at_numbers(self, x: Tensor, index: Any) -> tuple[Tensor, Any]:
        """A tensor with the rows at unknown places looked up, and the index that remains."""
        items = [self._place(item) for item in (index if isinstance(index, tuple) else (index,))]
        parts = [part for item in items for part in (_bounds(item) if isinstance(item, slice) else (item,))]
        if not any(isinstance(part, ValueNumber) for part in parts) or self._rows.of(x) is not None:
            return x, index
        if not all(part is None or part is Ellipsis or isinstance(part, int) for part in parts):
            return x, index  # refused, because the integers are not those of other traces
        for place, (item, dim) in enumerate([*with_dims(items, x.dim())]):
            if isinstance(item, ValueNumber):
                x, items[place] = self._looked_up(x, dim, item, 1), 0
            elif isinstance(item, slice) and isinstance(item.stop, ValueNumber) and item.step in (None, 1):
                length = item.stop.length_from(item.start)
                if length is not None:
                    x, items[place] = self._looked_up(x, dim, item.start, length), slice(None)
        return x, tuple(items)

    def _between(self, x: Tensor, index: Any) -> Any:
        """x[:, a:b] with unknown bounds: the selected rows between them; NotImplemented for other indices."""
        items = index if isinstance(index, tuple) else (index,)
        if any(isinstance(item, bool) or not isinstance(item, int | slice | EllipsisType | None) for item in items):
            return NotImplemented
        dims = enumerate(with_dims(items, x.dim()))
        found = [(place, dim) for place, (item, dim) in dims if isinstance(item, slice) and self._is_bounded(item)]
        if len(found) != 1 or self._rows.of(x) is not None or not permitted(UNKNOWN_NUMBERS).may():
            return NotImplemented
        [(place, dim)] = found
        kept = dim + sum((item is None) - isinstance(item, int) for item in items[:place])  # dimension of the result
        size, part = x.shape[dim], items[place]
        places = torch.arange(size)
        mask = places >= _bound(0 if part.start is None else part.start, size)
        if part.stop is not None:
            mask = mask & (places < _bound(part.stop, size))
        whole = x[(*items[:place], slice(None), *items[place + 1 :])]
        rows = self._rows.selected(whole, (*(slice(None),) * kept, mask))
        self._rows.hold(rows, mask, kept)
        self._copies[rows] = True
        self.numbers.extend(self.tests.source())
        return rows

    def _is_bounded(self, part: slice) -> bool:
        """Whether a bound of a slice is an unknown integer. Slices by the sizes of parts are read elsewhere."""
        start, stop, step = _bounds(part)
        if step not in (None, 1) or isinstance(start, PartSize):
            return False
        if isinstance(stop, PartSize):
            return (start is None or (type(start) is int and start == 0)) and stop.last == stop.first + 1
        unknown = [
            isinstance(x, ValueNumber)
            or (isinstance(x, Tensor) and not x.dim() and x.dtype in INTEGERS and self._value(x) is None)
            for x in (start, stop)
        ]
        return any(unknown) and all(
            known or x is None or type(x) is int for known, x in zip(unknown, (start, stop), strict=True)
        )

    def _place(self, item: Any) -> Any:
        """An item of an index; an integer of a list, which may be a count, is a place here."""
        if not isinstance(item, PartSize):
            return item
        return ValueNumber.of(item.tensor(), 0, int(item), self.tests)

    def _looked_up(self, x: Tensor, dim: int, start: ValueNumber, length: int) -> Tensor:
        """`length` rows of a dimension from an unknown place, as a copy. A single place may be negative."""
        first = start.tensor()
        if length == 1:
            first = torch.where(first < 0, first + x.shape[dim], first)
        made = x.index_select(dim, first + torch.arange(length))
        self._copies[made] = True
        return made

    def _narrowed(self, call: TorchCall) -> Any:
        """Rewrite x.narrow(dim, place, length) or x.select(dim, place) if the place is an unknown integer."""
        dim, start = call.argument(1, "dim"), call.argument(2, "start" if call.name == "narrow" else "index")
        if not isinstance(start, ValueNumber) or not isinstance(dim, int) or self._rows.of(call.given) is not None:
            return NotImplemented
        length = call.argument(3, "length", 1)
        made = self._looked_up(call.given, dim % call.given.dim(), start, length)
        return made if call.name == "narrow" else made.squeeze(dim)

    def _length(self, call: TorchCall, held: MaskedRows) -> Any:
        if held.dim or self.tests.inside_torch():
            return NotImplemented
        number = self._number_of(held.mask)
        return int(number) if not self._tests_length() else number.whole if number else 0

    def _size(self, call: TorchCall, held: MaskedRows) -> Any:
        if call.name == "__get__" and getattr(call.func, "__self__", None) not in _PROPERTIES:
            return NotImplemented
        made = call.run()
        if call.name == "stride" and isinstance(made, tuple):
            each = (TorchCall(call.func, "stride", (call.given, dim), {}) for dim in range(len(made)))
            return tuple(self._size(one, held) for one in each)
        if isinstance(made, torch.Size):
            number = self._number_of(held.mask)
            return torch.Size([number if dim == held.dim else size for dim, size in enumerate(made)])
        depends = True  # the number of elements or bytes
        if call.name in ("stride", "size"):
            dim = call.argument(1, "dim") % call.given.dim()
            depends = dim == held.dim if call.name == "size" else dim < held.dim
        return self._number_of(held.mask, made // held.mask.numel()) if depends else made

    def _tests_length(self) -> bool:
        """Whether the code that calls this len() only tests whether it is zero."""
        path = enclosing_nodes(self.tests.frame)
        outer = next((node for node in reversed(path[:-1]) if isinstance(node, ast.expr | ast.stmt)), None)
        if isinstance(outer, ast.Compare) and len(outer.ops) == 1:
            number = outer.comparators[0]
            tested = isinstance(number, ast.Constant) and number.value in (0, 1)
            return tested and (_COMPARISONS.get(type(outer.ops[0]), ""), number.value) in TESTS_OF_ZERO  # type: ignore[attr-defined]
        return isinstance(outer, ast.If | ast.UnaryOp | ast.BoolOp)

    def labels(self, targets: Any, lengths: Any) -> Any:
        """Concatenated labels of all examples, labels.masked_select(mask), as a matrix with one row per example.

        `lengths` are the counts of the mask's rows; other targets are returned as they are.
        """
        found = self._packed.get(targets)
        if found is None or self._counts.counted_by_row(lengths) is not found[1]:
            return targets
        x, mask = found
        rows, width = x.shape
        places = torch.where(mask, mask.cumsum(1) - 1, width)
        return x.new_zeros(rows, width + 1).scatter(1, places, x)[:, :width]

    def only_place(self, name: str, x: Any) -> Any:
        """The one place that nonzero() finds in a mask, read as a number; NotImplemented for other tensors."""
        held = self._rows.of(x)
        if name not in ("item", "__int__", "__index__") or held is None or held.dim or held.mask.dim() != 1:
            return NotImplemented
        if self._value(x) is None or x.numel() != held.mask.numel():
            return NotImplemented
        return self._number_in("item", held.chosen.long().argmax())

    def answer(self, name: str, x: Any) -> Any:
        """The value of a test whether a mask selects anything, or of a count; NotImplemented for other tensors."""
        if self._value(x) is not None:
            return NotImplemented
        if name in ("__int__", "__float__"):  # whose result is a plain number; asks for a trace with another type
            permitted(UNKNOWN_NUMBERS).may()
        listed = self._parts.listed(x)
        if listed is not None and name in ("item", "__int__", "__index__"):
            counts, first, last = listed
            self.numbers.extend(self.tests.source())
            return PartSize.of(counts, first, last, self._shown(4) * (last - first), self.tests)
        mask = self._counts.counted(x)
        if mask is not None:
            if name in ("__bool__", "is_nonzero"):
                return self.tests.nonempty(mask)
            number = self._number_of(mask)
            if name in ("__int__", "__float__"):
                note_known(user_frame(sys._getframe(1)))
            return number if name == "item" else float(int(number)) if name == "__float__" else int(number)
        found = self._counts.answer(x)
        if found is None:
            return self._number_in(name, x)
        return found[0] is self.tests.nonempty(found[1])


def _changes_in_place(name: str) -> bool:
    """Whether a function changes its first argument: `add_`, `x[i] = y` or `x += y`."""
    return name in _OPERATORS_IN_PLACE if name.endswith("__") else name.endswith("_")


def _without_lists(index: Any) -> Any:
    """An index with tensors in place of listed places, and of lists of unknown numbers."""
    if isinstance(index, Iterations):
        return index.tensor
    if isinstance(index, list) and any(isinstance(x, ValueNumber) for x in index):
        return torch.stack([x.tensor() if isinstance(x, ValueNumber) else torch.tensor(x) for x in index])
    if not isinstance(index, tuple):
        return index
    made = tuple(map(_without_lists, index))
    return index if all(a is b for a, b in zip(made, index, strict=True)) else made


def _bound(number: Any, size: int) -> Any:
    """A bound of a slice, which counts from the end if it is negative."""
    if isinstance(number, RowCount):
        number = number.tensor()
    if isinstance(number, Tensor):
        return torch.where(number < 0, number + size, number)
    return number if number >= 0 else number + size


def _bounds(item: slice) -> tuple[Any, Any, Any]:
    return item.start, item.stop, item.step


def _named(names: str, rewrite: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return dict.fromkeys(names.split(), rewrite)


# For each function, the method that returns its result for selected rows, or NotImplemented.
_CALLS: Mapping[str, Callable[[Selections, TorchCall], Any]] = {
    **_named("tensor as_tensor scalar_tensor", Selections._tensor),
    **_named("zeros ones full new_zeros new_ones new_full expand broadcast_to", Selections._select_rows),
    "expand_as": Selections._expanded,
    **_named("repeat tile", Selections._repeated),
    "arange": Selections._arange,
    **_named("where nonzero argwhere", Selections._find_places),
    "__getitem__": Selections._read,
    "__setitem__": Selections._written,
    **_named("index_put index_put_", Selections._put),
    "roll": Selections._rolled,
    **_named("narrow select", Selections._narrowed),
    **_named("split split_with_sizes", Selections._divided),
    **_named("cat concat concatenate", Selections._joined),
    "masked_select": Selections._masked,
    "unique_consecutive": Selections._distinct,
    "unique": Selections._distinct_numbers,
    **_named("masked_scatter masked_scatter_", Selections._scattered),
    **dict.fromkeys(_ARITHMETIC, Selections._spread),
    **dict.fromkeys(CONTRACTIONS, Selections._contracted),
}
# The same for calls whose first argument holds selected rows.
_CALLS_OF_ROWS: Mapping[str, Callable[[Selections, TorchCall, MaskedRows], Any]] = {
    **_named("reshape view", Selections._merged),
    "flatten": Selections._flattened,
    **dict.fromkeys(REDUCTIONS, Selections._reduced),
    **dict.fromkeys(rows_in_order.ORDERED, Selections._ordered),
    **_named(
        "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy"
        " binary_cross_entropy_with_logits kl_div soft_margin_loss hinge_embedding_loss poisson_nll_loss"
        " cosine_embedding_loss margin_ranking_loss triplet_margin_loss multi_margin_loss"
        " multilabel_margin_loss multilabel_soft_margin_loss triplet_margin_with_distance_loss",
        Selections._loss,
    ),
    "unbind": Selections._iterate,
    "__len__": Selections._length,
    **_named("size stride numel nelement __get__", Selections._size),
}
