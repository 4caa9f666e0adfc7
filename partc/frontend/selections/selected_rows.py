"""The tensors of a trace that hold rows selected by masks, and indexing with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partc.frontend.by_tensor import ByTensor
from partc.frontend.index_items import with_dims
from partc.ir.program import SELECTED
from partc.torch_private import without_modes

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
_library = torch.library.Library("partc", "FRAGMENT")
_library.define(f"{SELECTED}(Tensor mask, int dim) -> Tensor")
_library.impl(
    SELECTED,
    lambda mask, dim: torch.empty(mask.numel(), dtype=torch.int64, device=mask.device),
    "CompositeExplicitAutograd",
)


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """The mask that selects some of a tensor's rows, and the dimension of the rows."""

    mask: Tensor
    dim: int

    @property
    def chosen(self) -> Tensor:
        """The mask as booleans."""
        return self.mask if self.mask.dtype is torch.bool else self.mask.ne(0)

    def only(self, x: Tensor, instead: float = 0) -> Tensor:
        """x with zeros, or another number, in place of the rows that are not selected."""
        number = bool(instead) if x.dtype is torch.bool else instead
        return torch.where(self.chosen.reshape([-1 if dim == self.dim else 1 for dim in range(x.dim())]), x, number)

    def count(self) -> Tensor:
        """The number of selected rows."""
        return self.chosen.sum()

    def numbers(self, places: Tensor) -> Tensor:
        """For each row number in `places`, which counts all rows, the number that counts selected rows only."""
        counted = self.chosen.flatten().cumsum(0) - 1
        return counted.index_select(0, places.flatten()).reshape(places.shape)


class SelectedRows:
    """Records the rows that each tensor holds. `value` and `know` read and write the values of constants."""

    def __init__(self, value: Callable[[Tensor], Tensor | None], know: Callable[[Any, Any], None]) -> None:
        self.value, self.know = value, know
        self._rows: ByTensor[MaskedRows] = ByTensor()
        self._places: ByTensor[tuple[Tensor, ...]] = ByTensor()  # mask -> places along each dimension
        # Places that a mask over selected rows found -> the mask that selected the rows, and the mask over them.
        self._within: ByTensor[tuple[Tensor, Tensor]] = ByTensor()
        self._constants: ByTensor[bool] = ByTensor()  # constants that are places found by nonzero()
        self._numbered: ByTensor[int] = ByTensor()  # row numbers 0, 1, … of selected rows -> their dimension
        self._widened: ByTensor[Tensor] = ByTensor()  # mask with further dimensions that it is constant along -> mask
        # Elements that a widened mask selected -> the indexed tensor, its version then, and the mask of its rows.
        self._elements: ByTensor[tuple[Tensor, int, Tensor]] = ByTensor()

    @property
    def any(self) -> bool:
        """Whether a mask has selected rows so far."""
        return bool(self._rows)

    def of(self, x: Any) -> MaskedRows | None:
        return self._rows.get(x)

    def hold(self, x: Tensor, mask: Tensor, dim: int) -> None:
        self._rows[x] = MaskedRows(mask, dim)

    def hold_like(self, operands: Sequence[Any], made: Any) -> None:
        """Note that results with as many rows as the operands hold rows of the same mask."""
        held = next(filter(None, map(self.of, operands)), None)
        if held is None:
            return
        count = held.mask.numel()
        for x in leaves(made):
            if isinstance(x, Tensor) and self.of(x) is None:
                places = [dim for dim, size in enumerate(x.shape) if size == count]
                if len(places) > 1 and x._is_view():  # such as a transposed one
                    strides = [y.stride(own.dim) for y in operands if (own := self.of(y)) is not None]
                    places = [dim for dim in places if x.stride(dim) in strides] or places
                if places:
                    self.hold(x, held.mask, held.dim if held.dim in places else places[0])

    # -- places of a mask's elements -----------------------------------------------------------------

    def found(self, mask: Tensor, as_tuple: bool) -> Any:
        """The places of all elements of a mask."""
        if self.value(mask) is not None or not mask.dim() or mask.is_nested:
            return NotImplemented
        indices = self.places(mask)
        if as_tuple:
            return indices
        made = indices[0][:, None] if mask.dim() == 1 else torch.stack(indices, 1)
        self.hold(made, mask, 0)
        if mask.dim() == 1:
            with without_modes():
                self.know(made, torch.arange(mask.numel())[:, None])
        return made

    def places(self, mask: Tensor) -> tuple[Tensor, ...]:
        """The places of a mask's elements, one tensor for each dimension.

        A mask over rows that another mask has selected is False in all other rows.
        """
        known = self._places.get(mask)
        if known is not None:
            return known
        outer = self.of(mask)
        whole = mask if outer is None or outer.dim else outer.only(mask)
        indices = tuple(torch.ops.partc.selected.default(whole, dim) for dim in range(mask.dim()))
        own = whole
        if outer is not None and not outer.dim and mask.dim() == 1:
            own = whole.reshape(outer.mask.shape if outer.mask.dim() > 1 else (1, -1))
            self._within[indices[0]] = outer.mask, whole
        for index in indices:
            self.hold(index, own, 0)
        if mask.dim() == 1 and whole is mask:
            with without_modes():
                self.know(indices[0], torch.arange(mask.numel()))
        self._places[mask] = self._places[whole] = indices
        return indices

    def is_place(self, x: Tensor) -> bool:
        """Whether x has the places of a mask's elements along a dimension."""
        held = self.of(x)
        return held is not None and any(x is place for place in self._places.get(held.mask) or ())

    def _places_within(self, x: Tensor, index: tuple[Any, ...]) -> Tensor | None:
        """places[some] as the places of the elements of a mask that a second mask over its rows selects; None for
        other tensors and indices.
        """
        held = self.of(x)
        within = self._within.get(index[0]) if len(index) == 1 else None
        if held is None or within is None or within[0] is not held.mask:
            return None
        own = self.of(index[0])
        assert own is not None
        places = self.places(held.mask)
        dims = [dim - len(places) for dim, place in enumerate(places) if place is x]
        return self.places(own.mask)[dims[0]] if dims else None

    def as_constants(self, real: Tensor) -> list[Tensor]:
        """The places one by one, as constants."""
        with without_modes():
            numbers, values = real.tolist(), real.unbind(0)
        rows = []
        for number, row in zip(numbers, values, strict=True):
            made = torch.tensor(number)
            self.know(made, row)
            self._constants[made] = True
            rows.append(made)
        return rows

    # -- numbers of rows -----------------------------------------------------------------------------

    def number(self, x: Tensor, dim: int) -> None:
        """Note that x has the numbers 0, 1, … of selected rows along a dimension."""
        self._numbered[x] = dim

    def number_like(self, numbers: Any, made: Any) -> None:
        """Follow a result that has the elements of row numbers, in order."""
        if numbers in self._numbered and isinstance(made, Tensor) and made.numel() == numbers.numel():
            wide = [dim for dim, size in enumerate(made.shape) if size != 1]
            if len(wide) == 1:
                self._numbered[made] = wide[0]

    def _of_all_rows(self, x: Tensor, index: tuple[Any, ...]) -> Tensor | None:
        """rows[numbers, i, …] as rows[:, i, …], if `numbers` are all row numbers; None for other indices."""
        held, own = self.of(x), self.of(index[0])
        dim, others = self._numbered.get(index[0]), index[1:]
        if dim is None or held is None or own is None or held.mask is not own.mask or held.dim:
            return None
        if any(not isinstance(item, Tensor) or item.dtype is torch.bool or self.of(item) for item in others):
            return None
        shape = torch.broadcast_shapes(*(item.shape for item in others), (1,) * index[0].dim())
        dim += len(shape) - index[0].dim()
        if shape[dim] != 1:
            return None
        if others:
            made = x[(slice(None), *(item.expand(shape) for item in others))]
        else:
            made = x.reshape(len(x), *shape, *x.shape[1:])
        self.hold(made, held.mask, 0)
        made = made.squeeze(1 + dim).movedim(0, dim)
        self.hold(made, held.mask, dim)
        return made

    # -- masks with further dimensions ---------------------------------------------------------------

    def widen(self, name: str, args: Sequence[Any], made: Any) -> None:
        """Follow masks that get further dimensions: mask.unsqueeze(-1).expand_as(x), and tests of several of them."""
        x = args[0] if args else None
        if not isinstance(x, Tensor) or not isinstance(made, Tensor) or x.dtype is not torch.bool:
            return
        source = self._widened.get(x)
        if name == "unsqueeze" and len(args) > 1 and args[1] in (-1, x.dim()):
            self._widened[made] = x if source is None else source
        elif name in ("expand", "expand_as") and source is not None and made.shape[: source.dim()] == source.shape:
            self._widened[made] = source

    def regrouped(self, x: Tensor, shape: Sequence[int]) -> Tensor | None:
        """y[mask.unsqueeze(-1).expand_as(y)].view(-1, width) as y[mask]; None for other tensors and shapes."""
        found = self._elements.get(x)
        if found is None or found[0]._version != found[1]:
            return None
        source, _, mask = found
        if tuple(shape) != (-1, *source.shape[mask.dim() :]):
            return None
        return self.selected(source, mask)

    # -- indexing ------------------------------------------------------------------------------------

    def read(self, func: Callable[..., Any], x: Tensor, index: Any) -> Any:
        """x[index]; NotImplemented where no rows are selected."""
        items = index if isinstance(index, tuple) else (index,)
        if (whole := self._of_all_rows(x, items)) is not None:
            return whole
        given = self.as_indices(x, index)
        if (place := self._places_within(x, given)) is not None:
            return place
        if x in self._constants and index == 0 and not isinstance(index, Tensor | bool):
            made = func(x, index)
            real = self.value(x)
            with without_modes():
                self.know(made, real[0] if real is not None else None)
            self._constants[made] = True
            return made
        if any(map(self._unknown, given)) and self.of(x) is None:
            x, given = self._looked_up(x, given)
            return func(x, given)
        alone = sum(isinstance(item, Tensor) for item in given) == 1
        numbers = tuple(self._number(item, x, place, alone) for place, item in enumerate(given))
        if len(given) == len(items) and all(a is b for a, b in zip(numbers, items, strict=True)):
            held = [*filter(None, map(self.of, (x, *items)))]
            if not held:
                return NotImplemented
        made = func(x, numbers if isinstance(index, tuple) or len(numbers) > 1 else numbers[0])
        self.hold_like([*(item for item in numbers if isinstance(item, Tensor)), x], made)
        if (mask := self._widened.get(items[0])) is not None and items[0].shape == x.shape:
            self._elements[made] = x, x._version, mask
        if not any(isinstance(item, Tensor) for item in items):
            self.number_like(x, made)
            if (real := self.value(x)) is not None:
                with without_modes():
                    self.know(made, real[items])
        return made

    def selected(self, x: Tensor, mask: Any) -> Tensor:
        """x[mask]."""
        made: Tensor = self.read(Tensor.__getitem__, x, mask)
        return made

    def again(self, x: Tensor, held: MaskedRows) -> Tensor:
        """The selected rows of a tensor that has a row for each element of a mask."""
        rows = held.only(x).movedim(held.dim, 0)
        given = rows.reshape(*held.mask.shape, *rows.shape[1:]), self.places(held.mask)
        made: Tensor = self.read(Tensor.__getitem__, *given)
        if held.dim:
            made = made.movedim(0, held.dim)
            self.hold(made, held.mask, held.dim)
        return made

    def with_constants(self, index: Any) -> tuple[Any, bool]:
        """An index in which constant masks are replaced by their places, and whether there were any."""
        items = index if isinstance(index, tuple) else (index,)
        found: list[Any] = []
        masked = False
        for item in items:
            mask = self.value(item) if isinstance(item, Tensor) and item.dtype is torch.bool and item.dim() else None
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

    def as_indices(self, x: Tensor, index: Any) -> tuple[Any, ...]:
        """An index of x in which masks are replaced by their places. Raises IndexError for masks of another shape."""
        items = index if isinstance(index, tuple) else (index,)
        found: list[Any] = []
        dim = 0 if self.of(x) is None and type(Ellipsis) not in map(type, items) else x.dim()
        for item in items:
            mask = isinstance(item, Tensor) and item.dtype is torch.bool and item.dim() > 0
            count = item.dim() if mask else int(item is not None)
            if mask and dim + count <= x.dim() and x.shape[dim : dim + count] != item.shape:
                raise IndexError(
                    f"the shape of the mask {[*item.shape]} at index {dim} does not match the shape of the indexed "
                    f"tensor {[*x.shape]}"
                )
            dim += count
            found.extend(self.places(item) if mask else (item,))
        return tuple(found)

    def _unknown(self, item: Any) -> bool:
        """Whether an item of an index is an integer scalar tensor, whose value a trace would read."""
        return isinstance(item, Tensor) and not item.dim() and item.dtype in INTEGERS and self.value(item) is None

    def written(self, func: Callable[..., Any], x: Tensor, index: Any, value: Any) -> Any:
        """x[:, i] = value as x.movedim(1, 0)[i.reshape(1)] = value; rows of x[mask] = rows in the order of the mask.

        x[mask] = row repeats the row for all rows of x, and selects those where the mask is set.
        """
        items = index if isinstance(index, tuple) else (index,)
        if any(self.of(item) for item in items):
            return self.written_alike(func, x, index, value)
        masked = isinstance(index, Tensor) and index.dtype is torch.bool and index.dim() and isinstance(value, Tensor)
        if masked and value.dim() == x.dim() - index.dim() + 1 and value.shape[0] > 1:
            mask = index.reshape(*index.shape, *(1 for _ in range(x.dim() - index.dim())))
            x.masked_scatter_(mask.expand_as(x), value.expand(len(value), *x.shape[index.dim() :]))
            return None
        if masked and value.dim():
            row = value if value.dim() + index.dim() <= x.dim() else value[0]
            func(x, self.as_indices(x, index), self.selected(row.expand(x.shape), index))
            return None
        if not any(map(self._unknown, items)):
            return NotImplemented
        rest = tuple(slice(None) if self._unknown(item) else item for item in items)
        if any(isinstance(item, Tensor | list | bool) for item in rest):
            return NotImplemented
        view, dims, places, dim = x[rest], [], [], 0
        width = x.dim() - sum(isinstance(item, int | slice) for item in rest)
        for item, plain in zip(items, rest, strict=True):
            if self._unknown(item):
                dims.append(dim)
                places.append(torch.where(item < 0, item + view.shape[dim], item).reshape(1))
            dim += width if plain is Ellipsis else not isinstance(plain, int)
        func(view.movedim(dims, tuple(range(len(dims)))), tuple(places), value)
        return None

    def moved(self, x: Tensor, index: Any, value: Any) -> tuple[Tensor, Tensor, Any] | None:
        """x[:, mask] = value as x.movedim(1, 0)[mask] = value.movedim(1, 0): the view, the mask and the value; None for
        other indices.
        """
        items = index if isinstance(index, tuple) else (index,)
        first, mask = len(items) - 1, items[-1] if items else None
        if not first or not isinstance(mask, Tensor) or mask.dtype is not torch.bool or not mask.dim():
            return None
        if self.value(mask) is not None:
            return None
        if any(item != slice(None) if isinstance(item, slice) else True for item in items[:-1]):
            return None
        behind = x.dim() - first - mask.dim()
        if isinstance(value, Tensor) and value.dim() > behind:
            held, dim = self.of(value), value.dim() - behind - 1
            if held is not None and held.dim == dim == first:
                value = value.movedim(dim, 0)
                self.hold(value, held.mask, 0)
            elif held is None and value.shape[dim] == 1:
                value = value.squeeze(dim)
            else:
                return None
        return x.movedim(tuple(range(first, first + mask.dim())), tuple(range(mask.dim()))), mask, value

    def written_alike(self, func: Callable[..., Any], x: Tensor, index: Any, value: Any) -> Any:
        """x[rows, …] = value for all rows, and x[rows, columns] = value with a column for each row.

        The value has a row for each of `rows`, or is the same for all of them.
        """
        items = self.as_indices(x, index)
        mask = selecting = next(held.mask for item in items if (held := self.of(item)) is not None)
        if (within := self._within.get(items[0])) is not None:  # x has the rows over which a second mask runs
            mask = within[1]
        if self._numbers_all(items[0], mask):
            items = (*self.places(mask), *items[1:])
        places = tuple(place for place in self.places(mask) if any(place is item for item in items))
        if not places or any(a is not b for a, b in zip(places, items, strict=False)):
            return NotImplemented
        rest = tuple(self._number(item, x, dim) for dim, item in enumerate(items) if dim >= len(places))
        own = self.of(value)
        if own is not None and (own.mask is not selecting or own.dim):
            return NotImplemented
        if all(isinstance(item, int | slice) for item in rest):
            x = x[(*(slice(None),) * len(places), *rest)]
            shape = x.shape[len(places) :]
            if own is None:
                same = torch.as_tensor(value, dtype=x.dtype)
                if same.dim() > len(shape):
                    if same.dim() > len(shape) + 1 or len(same) != 1:
                        return NotImplemented
                    same = same[0]
                value = self.read(Tensor.__getitem__, same.expand(*mask.shape, *shape), places)
            func(x, places, value)
            return None
        if any(self.of(item) is None or item.dim() != 1 for item in rest):
            return NotImplemented
        return self._written_at_columns(x, mask, len(places), rest, value)

    def _written_at_columns(self, x: Tensor, mask: Tensor, count: int, columns: Sequence[Tensor], value: Any) -> Any:
        """x[rows, …, columns, …] = value, where the mask's first `count` dimensions are those of x that `rows` are
        places of, and `columns` has each selected row's place along a further dimension of x.

        Of several rows with the same places and columns, the last one is written, as on CPUs.
        """
        own = self.of(value)
        given, sizes, inner = mask.shape[:count], x.shape[count : count + len(columns)], x.shape[count + len(columns) :]
        several = math.prod(mask.shape[count:])  # rows with the same places
        if own is not None and several > 1 and value.requires_grad:  # eagerly, all of them have the gradient of one
            return NotImplemented
        if own is None and isinstance(value, Tensor) and value.dim() > len(inner):
            return NotImplemented
        positive = [torch.where(item < 0, item + size, item) for item, size in zip(columns, sizes, strict=True)]
        column = positive[0]
        for item, size in zip(positive[1:], sizes[1:], strict=True):
            column = column * size + item
        width, selected = math.prod(sizes), MaskedRows(mask, 0)
        column = selected.only(column)
        hit = column.reshape(*given, several, 1) == torch.arange(width)
        hit = hit & mask.ne(0).reshape(*given, several, 1)
        wide = (*given, width, *(1 for _ in inner))
        if own is not None:
            last = (hit * torch.arange(several)[:, None]).amax(count)
            rows = selected.only(value).reshape(*given, several, *value.shape[1:])
            last = last.reshape(wide).expand(*given, width, *value.shape[1:])
            value = rows.expand(*given, several, *value.shape[1:]).gather(count, last)
        old = x.reshape(*given, width, *inner)
        x.copy_(torch.where(hit.any(count).reshape(wide), value, old).reshape(x.shape))
        return None

    def _numbers_all(self, item: Any, mask: Tensor) -> bool:
        """Whether an item of an index has the places of all rows of a one-dimensional mask, in order."""
        held, real = self.of(item), self.value(item) if isinstance(item, Tensor) else None
        if held is None or held.mask is not mask or mask.dim() != 1 or real is None or real.dim() != 1:
            return False
        with without_modes():
            return torch.equal(real, torch.arange(len(mask)))

    def _looked_up(self, x: Tensor, index: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, ...]]:
        """x[:, i] as x.index_select(1, i)[:, 0]: the tensor and the index that remain."""
        for item, dim in with_dims(index, x.dim()):
            if self._unknown(item):
                x = x.index_select(dim, torch.where(item < 0, item + x.shape[dim], item).reshape(1))
        return x, tuple(0 if self._unknown(item) else item for item in index)

    def _number(self, item: Any, x: Tensor, dim: int, alone: bool = True) -> Any:
        """A constant scalar tensor in an index as a number, because a trace would read the tensor's value; a vector of
        one number as a slice, if no other tensor of the index runs along with it.

        A place that nonzero() found is limited to the dimension: one beyond it, such as a class that no token chooses,
        never occurs.
        """
        real = self.value(item) if isinstance(item, Tensor) and item.shape in ((), (1,)) else None
        if real is None or real.dtype is torch.bool or (real.dim() and not alone):
            return item
        number = min(int(real), x.shape[dim] - 1) if item in self._constants and dim < x.dim() else int(real)
        return slice(number, number + 1) if real.dim() and number >= 0 else item if real.dim() else number

    def merged(self, x: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        """Selected rows whose dimension is merged with the ones behind it: each row becomes several."""
        held = self.of(x)
        made = x.new_empty(0) if held is None or held.dim else held.only(x).reshape(shape)
        if held is None or not len(made) or len(made) == len(x) or len(made) % len(x):
            return None
        mask = held.mask.ne(0).flatten()[:, None].expand(-1, len(made) // len(x)).flatten()
        return self.selected(made, mask)

    def packed(self, x: Any) -> Tensor | None:
        """Selected rows moved to the front, followed by rows of nan, which reveal reads beyond them; None for other
        tensors.
        """
        held = self.of(x)
        if held is None or held.dim:
            return None
        count, chosen = held.mask.numel(), held.mask.flatten().ne(0)
        order = torch.arange(count) + torch.where(chosen, 0, count)
        beyond = (torch.arange(count) >= chosen.sum()).reshape(-1, *(1 for _ in x.shape[1:]))
        packed = held.only(x).index_select(0, order.argsort())
        return torch.where(beyond, math.nan, packed) if x.is_floating_point() else packed


def leaves(item: Any) -> Iterator[Any]:
    """The items of nested tuples, lists and dicts."""
    if isinstance(item, dict):
        item = tuple(item.values())
    if isinstance(item, tuple | list):
        for one in item:
            yield from leaves(one)
    else:
        yield item
