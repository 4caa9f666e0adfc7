"""The part of a tensor that a rank holds: layouts as text, and cutting of whole tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .dims import Dims, Sectioned, SubDim, global_shape, parse_dims, written_dims
from .place import stacked_names

DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8,
    "bool": torch.bool,
}  # fmt: skip


class Seam(NamedTuple):
    """The place where gathered parts are joined: a dimension viewed as [outer, rest], along `rest` of `length`
    elements.

    All parts together may have more elements; the last ones are then spare.
    """

    dim: int
    outer: int
    length: int

    @property
    def rows(self) -> bool:
        """Whether the parts are consecutive rows of the whole."""
        return (self.dim, self.outer) == (0, 1)


@dataclass(frozen=True, slots=True)
class Shard:
    """A parameter, a buffer or a batch entry: its whole type, and its cut.

    `type` reads `f32[3 · 4096@tp, 4096]`: the element type, then for each dimension its factors from major to minor,
    with the mesh axes that cut them. An axis that is not named holds a copy. If axes do not divide their factor, the
    last parts end with zeros.
    """

    type: str
    trainable: bool = True
    reduce: tuple[str, ...] = ()  # axes over which the gradient is summed once per step
    shared: tuple[int, ...] = ()  # pipeline ranks that use it and sum its gradient, if there are several
    gather: tuple[str, ...] = ()  # the axes over which it is gathered for the calls that read it
    read: str = ""  # the type in which calls read it, if it is stored in another
    aliases: tuple[str, ...] = ()  # its other names in the model
    holds: tuple[int, ...] = ()  # the model's own shape, if the tensor is padded with zeros
    sectioned: Sectioned | None = None  # the order of a dimension, if it is not the model's
    sparse: bool = False  # its gradient only has the rows that lookups read
    stacked: bool = False  # its rows are parameters of the model: their numbers replace `*` in its name
    members: tuple[tuple[str, int, int], ...] = ()  # whole tables of the model in it: name, first row, number of rows
    counter: bool = False  # counts whether gradients reach some of the model's parameters, and is none of them
    apart: tuple[str, ...] = ()  # for a row of a stack, or a member: the axes along which ranks have different ones

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.type.partition("[")[0]]

    @property
    def read_dtype(self) -> torch.dtype:
        return DTYPES[self.read] if self.read else self.dtype

    @property
    def dims(self) -> Dims:
        return parse_dims(self.type[self.type.index("[") :])

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return global_shape(self.dims)

    @property
    def cut(self) -> frozenset[str]:
        """The axes along which ranks have different elements."""
        return cutting(self.dims) | frozenset(self.apart)

    @property
    def row(self) -> Shard:
        """The shard of each row of a stack."""
        type = f"{self.type.partition('[')[0]}[{written_dims(self.dims[1:])}]"
        order = self.sectioned and self.sectioned.of_row
        return replace(self, type=type, sectioned=order, stacked=False, apart=tuple(sorted(cutting(self.dims[:1]))))

    def member(self, rows: int) -> Shard:
        """The shard of a whole table, which is a member of this one."""
        others = "".join(f", {dim}" for dim in written_dims(self.dims[1:]).split(", ") if dim)
        type, apart = f"{self.type.partition('[')[0]}[{rows}{others}]", tuple(sorted(cutting(self.dims[:1])))
        return replace(self, type=type, members=(), apart=apart)

    def members_at(self, sizes: Mapping[str, int], coordinate: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        """The members on the rank at a coordinate: name -> (first row there, number of rows)."""
        ((size, axes),) = self.dims[0]
        count = size // group_size(axes, sizes)
        first = count * _place(axes, sizes, coordinate)
        return {name: (row - first, rows) for name, row, rows in self.members if first <= row < first + count}

    def seam(self, sizes: Mapping[str, int]) -> Seam:
        """The place where gathered parts are joined."""
        for index, dim in enumerate(self.dims):
            outer = 1
            for place, (size, axes) in enumerate(dim):
                if self.gather[-1] in axes:
                    left = [axis for axis in axes if axis not in self.gather]
                    behind = math.prod(_part(*factor, sizes) for factor in dim[place + 1 :])
                    return Seam(index, outer, _part(size, left, sizes) * behind)
                outer *= _part(size, axes, sizes)
        raise ValueError(f"{self.type} is not cut over {', '.join(self.gather)}")

    def local_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(math.prod(_part(*factor, sizes) for factor in dim) for dim in self.dims)

    def local(self, whole: Tensor, sizes: Mapping[str, int], coordinate: Mapping[str, int]) -> Tensor:
        """The part of `whole` at a coordinate: a view if the cut allows one. `whole` has the model's order.

        Padding consists of zeros.
        """
        if self.sectioned is not None:
            dim, _, sections = self.sectioned
            runs = self.sectioned.runs(0, sum(sections))
            whole = torch.cat([whole.narrow(dim, first, count) for first, count in runs], dim)
        if self.holds and tuple(whole.shape) == self.holds:
            padded = whole.new_zeros(self.shape)
            padded[tuple(map(slice, self.holds))] = whole
            whole = padded
        return local_part(whole, self.dims, sizes, coordinate)

    def in_model_order(self, whole: Tensor) -> Tensor:
        """A whole tensor in the model's order, from one in the order in which it is stored."""
        if self.sectioned is None:
            return whole
        dim, _, sections = self.sectioned
        runs = [*self.sectioned.runs(0, sum(sections))]
        parts = zip(runs, whole.split([count for _, count in runs], dim), strict=True)
        return torch.cat([part for _, part in sorted(parts, key=lambda each: each[0])], dim)


class ModelView:
    """A rank's parameters under the model's own names: rows of stacks, and whole tables inside others.

    `shards` are the model's parameters. `counters` are further ones, which count whether gradients reach these.
    """

    def __init__(self, shards: Mapping[str, Shard], sizes: Mapping[str, int], coordinate: Mapping[str, int]) -> None:
        self.shards: dict[str, Shard] = {}
        self.counters = {name: shard for name, shard in shards.items() if shard.counter}
        self._names: dict[str, tuple[str, ...]] = {}
        self._tables: dict[str, dict[str, tuple[int, int]]] = {}
        for name, shard in shards.items():
            if shard.counter:
                continue
            if shard.members:
                self._tables[name] = tables = shard.members_at(sizes, coordinate)
                self.shards.update((each, shard.member(rows)) for each, (_, rows) in tables.items())
                continue
            if shard.stacked:
                every = stacked_names(name, shard.shape[0])
                self._names[name] = tuple(every[row] for row in _rows_held(shard.dims[0], sizes, coordinate))
            self.shards.update((each, shard.row if shard.stacked else shard) for each in self.names((name,)))

    def names(self, names: Iterable[str]) -> Iterator[str]:
        """The model's names for the package's parameters, as far as this rank holds them."""
        for name in names:
            yield from self._tables.get(name) or self._names.get(name, (name,))

    def tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors by the model's names: views of the rows of stacks, and parts of sparse gradients."""
        found: dict[str, Tensor] = {}
        for name, x in tensors.items():
            if name in self._tables:
                found |= {each: x.narrow(0, *where) for each, where in self._tables[name].items()}
                continue
            found |= zip(self._names[name], x.unbind(), strict=True) if name in self._names else {name: x}
        return found

    def joined(self, tensors: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `tensors`, for rows that are consecutive in memory; stacks have the shapes of `before`."""
        found: dict[str, Tensor] = {}
        for name, x in before.items():
            if name in self._tables:  # sparse gradients do not move it
                found[name] = x
                continue
            names = self._names.get(name, (name,))
            first = tensors[names[0]]
            found[name] = first.as_strided(x.shape, x.stride()) if name in self._names else first
        return found


def _rows_held(dim: tuple[SubDim, ...], sizes: Mapping[str, int], coordinate: Mapping[str, int]) -> list[int]:
    """The numbers of the rows that the rank at a coordinate holds."""
    rows = [0]
    for size, axes in dim:
        count = size // group_size(axes, sizes)
        first = count * _place(axes, sizes, coordinate)
        rows = [size * row + index for row in rows for index in range(first, first + count)]
    return rows


@dataclass(frozen=True, slots=True)
class Received:
    """A value from an earlier stage, for one microbatch, as this rank holds it."""

    source: int
    shape: tuple[int, ...]
    dtype: str
    gradient: bool = True  # its gradient is sent back

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class Returned:
    """A result of a stage that only runs forward: its value's name, its cut, and the axes over which it is summed."""

    value: str
    shard: Shard
    partial: tuple[str, ...] = ()

    def joined(self, parts: Sequence[Tensor], sizes: Mapping[str, int]) -> Tensor:
        """A rank's part of the value for a whole batch, from the parts for its microbatches.

        They are concatenated if microbatches cut the value, and summed if it is a sum or a scalar. Any other value is
        equal in all microbatches.
        """
        factors = [factor for dim in self.shard.dims for factor in dim]
        cut = next((index for index, (_, axes) in enumerate(factors) if "mb" in axes), None)
        if cut is not None:
            ways = {**sizes, "mb": len(parts)}
            shape = [size // group_size(axes, ways) for size, axes in factors]
            whole = torch.cat([part.reshape(shape) for part in parts], cut)
            return whole.reshape(self.shard.local_shape(sizes))
        return functools.reduce(torch.add, parts) if "mb" in self.partial or not factors else parts[-1]


def cutting(dims: Dims) -> frozenset[str]:
    """The axes that cut some dimension."""
    return frozenset(axis for dim in dims for _, axes in dim for axis in axes)


def short_name(dtype: torch.dtype) -> str:
    """The dtype's name in types, such as `f32`; torch's name for other dtypes."""
    return next((short for short, each in DTYPES.items() if each == dtype), str(dtype))


def tokens_per_step(plan: Mapping[str, Any]) -> int:
    """The number of positions of the first integer input with a sequence; else the number of examples."""
    shards = [Shard(f"{entry['dtype']}{entry['layout']}") for entry in plan["inputs"].values()]
    sequences = [shard.shape[0] * shard.shape[1] for shard in shards if shard.type[0] == "i" and len(shard.shape) == 2]
    examples = [shard.shape[0] for shard in shards if shard.shape]
    return (sequences or examples or [0])[0]


def group_size(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """The number of ranks that differ only on these axes."""
    return math.prod(sizes.get(axis, 1) for axis in axes)


def _part(size: int, axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    """The elements of each part of a factor, spare ones included."""
    return -(-size // group_size(axes, sizes))


def _place(axes: Sequence[str], sizes: Mapping[str, int], coordinate: Mapping[str, int]) -> int:
    """The index of a rank among the ranks that differ along these axes."""
    place = 0
    for axis in axes:
        place = place * sizes.get(axis, 1) + (coordinate.get(axis, 0) if sizes.get(axis, 1) > 1 else 0)
    return place


def local_part(whole: Tensor, dims: Dims, sizes: Mapping[str, int], coordinate: Mapping[str, int]) -> Tensor:
    """The part of `whole` at a coordinate, with zeros as spare elements. Axes that are absent from `sizes` do not
    cut.
    """
    shape = global_shape(dims)
    if tuple(whole.shape) != shape:
        raise ValueError(f"tensor of shape {tuple(whole.shape)} where the layout says {shape}")
    factors = [factor for dim in dims for factor in dim]
    part = whole.reshape([size for size, _ in factors])
    for position, (size, axes) in enumerate(factors):
        ways, index = group_size(axes, sizes), _place(axes, sizes, coordinate)
        if ways > 1:
            each = _part(size, axes, sizes)
            first, last = min(index * each, size), min((index + 1) * each, size)
            part = extended(part.narrow(position, first, last - first), position, each)
    return part.reshape([math.prod(_part(*factor, sizes) for factor in dim) for dim in dims])


def extended(x: Tensor, dim: int, size: int) -> Tensor:
    """The tensor padded with zeros along a dimension to `size` elements; itself if it has as many."""
    missing = size - x.shape[dim]
    return torch.nn.functional.pad(x, [0] * (2 * (x.dim() - dim) - 1) + [missing]) if missing else x


def microbatch_part(local: Tensor, dims: Dims, sizes: Mapping[str, int], count: int, index: int) -> Tensor:
    """Microbatch `index` of `count`, from a tensor that is already cut over the mesh's axes."""
    left = tuple(
        tuple(
            (size // group_size([a for a in axes if a != "mb"], sizes), tuple(a for a in axes if a == "mb"))
            for size, axes in dim
        )
        for dim in dims
    )
    return local_part(local, left, {"mb": count}, {"mb": index})


def parse_mesh(text: str) -> dict[str, int]:
    """Parse `pp=2,dp=2,tp=2`: sizes by axis, slowest first."""
    return {name: int(size) for name, _, size in (part.partition("=") for part in text.split(","))}
