"""The cheapest chain of collectives from one layout of a value to another.

Every step changes the placement on one axis. The backward pass runs its transpose:

    vary  R->V  identity / all_reduce            settle  V->R  identity / divide by n
    spread R->P divide by n / identity           all_reduce  P->R  sum / identity
    all_gather S->V  gather / reduce_scatter     unshard  S->R  gather / take
    shard  R->S  slice / all_gather              take  V->S  slice / put
    reduce_scatter  P->S  sum, slice / gather    put  S->P  zero-pad / take
    all_to_all  S->S'  / the reverse

`outer` in a step's attributes counts elements of the local tensor: the dimension is viewed as [outer, rest], and `rest`
is gathered or cut. For an all_to_all both counts refer to the tensor after the cut and before the join, so that the
reverse step has the same numbers.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import count, permutations

from partc.errors import InternalError
from partc.ir.collectives import backward_cost, cost, resized
from partc.ir.layout import Layout, Partial, Placement, Replicated, Shard, Sizes, SubDim, Varying
from partc.ir.mesh import TIME_AXIS

# Microbatches run one after the other, so nothing can move between them: a price that only a plan without an
# alternative pays.
_FORBIDDEN = 1 << 80


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardStep:
    """One reshard on one axis: the operation, its attributes, the layout after it, and the bytes sent by a rank."""

    op: str
    axis: str
    attrs: tuple[tuple[str, int], ...]
    result: Layout
    forward: int
    backward: int


def transition(source: Placement, target: Placement) -> tuple[str, ...]:
    """The operations that take one placement to another on the same axis."""
    if source == target:
        return ()
    if isinstance(source, Shard) and isinstance(target, Shard):
        return ("all_to_all",)
    return _TRANSITIONS[type(source), type(target)]


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes that a rank sends for a change of placement, per byte of the value before the axis cuts it, and the
    number of collectives.
    """

    bytes: float
    collectives: int


@cache
def traffic(source: Placement, target: Placement, n: int) -> tuple[Traffic, Traffic]:
    """The traffic of a change of placement in the forward pass, and in the backward pass."""
    whole = n * n
    local = whole // n if isinstance(source, Shard) else whole
    forward: list[int] = []
    backward: list[int] = []
    for op in transition(source, target):
        forward.append(cost(op, n, local))
        backward.append(backward_cost(op, n, local))
        local = resized(op, n, local)
    return _traffic(forward, whole), _traffic(backward, whole)


def _traffic(sent: Sequence[int], whole: int) -> Traffic:
    return Traffic(sum(sent) / whole, sum(map(bool, sent)))


_TRANSITIONS: Mapping[tuple[type, type], tuple[str, ...]] = {
    (Replicated, Varying): ("vary",),
    (Replicated, Partial): ("spread",),
    (Replicated, Shard): ("shard",),
    (Varying, Replicated): ("settle",),
    (Varying, Partial): ("settle", "spread"),
    (Varying, Shard): ("take",),
    (Partial, Replicated): ("all_reduce",),
    (Partial, Varying): ("all_reduce", "vary"),
    (Partial, Shard): ("reduce_scatter",),
    (Shard, Replicated): ("unshard",),
    (Shard, Varying): ("all_gather",),
    (Shard, Partial): ("put",),
}


def plan(src: Layout, dst: Layout, *, sizes: Sizes, itemsize: int, needs_grad: bool = True) -> tuple[ReshardStep, ...]:
    """The chain of steps from `src` to `dst` that sends the fewest bytes, forward and backward together.

    Among equally cheap chains, the one with the fewest steps wins. Raises InternalError if the shapes differ, or if the
    size of an axis does not divide the dimension that it cuts.
    """
    used = tuple(sorted({axis: sizes[axis] for axis in (*src.axes, *dst.axes)}.items()))
    return normalized_plan(src.normalized(sizes), dst.normalized(sizes), used, itemsize, needs_grad)


@lru_cache(maxsize=4096)
def normalized_plan(
    src: Layout, dst: Layout, items: tuple[tuple[str, int], ...], itemsize: int, needs_grad: bool
) -> tuple[ReshardStep, ...]:
    """A* search over layouts. The bound on further steps adds up each axis' own least cost."""
    if src.shape != dst.shape:
        raise InternalError(f"no reshard from {src} to {dst}: the shapes differ")
    sizes = dict(items)
    candidates, rest = Moves(src, dst, sizes), LeastRest(dst, sizes, itemsize, needs_grad)
    order = count()
    queue: list[tuple[_Cost, int, int, Layout, tuple[ReshardStep, ...]]] = [(rest.of(src), next(order), 0, src, ())]
    done: set[Layout] = set()
    while queue:
        _, _, bytes, layout, steps = heapq.heappop(queue)
        if layout == dst:
            return steps
        if layout in done:
            continue
        done.add(layout)
        local = math.prod(layout.local_shape(sizes)) * itemsize
        for op, axis, attrs, result in candidates.of(layout):
            if result in done:
                continue
            forward = cost(op, sizes[axis], local)
            backward = backward_cost(op, sizes[axis], local) if needs_grad else 0
            step = ReshardStep(op=op, axis=axis, attrs=attrs, result=result, forward=forward, backward=backward)
            moved = bytes + forward + backward + _forbidden(op, axis)
            left, more = rest.of(result)
            least = moved + left, len(steps) + 1 + more
            heapq.heappush(queue, (least, next(order), moved, result, (*steps, step)))
    raise InternalError(f"no reshard from {src} to {dst}")


def _forbidden(op: str, axis: str) -> int:
    return _FORBIDDEN if axis == TIME_AXIS and op not in ("vary", "settle", "spread") else 0


Move = tuple[str, str, tuple[tuple[str, int], ...], Layout]
_Dim = tuple[SubDim, ...]
_Cost = tuple[int, int]  # (bytes, steps)
# The kind of a placement, and whether it is a cut at the same position as in the last layout.
_Kind = tuple[type[Placement], bool]
_KINDS: Sequence[_Kind] = ((Replicated, False), (Varying, False), (Partial, False), (Shard, False), (Shard, True))


class LeastRest:
    """A lower bound on the bytes and steps from a layout to the last one, `dst`.

    The position of an axis' cut, counted in elements of the dimension before it, does not change when other axes move.
    So each axis needs at least the steps from its own placement, on operands at least as large as if all axes cut the
    value.
    """

    def __init__(self, dst: Layout, sizes: Sizes, itemsize: int, needs_grad: bool) -> None:
        self._sizes = sizes
        self._places = {cut for dim, subs in enumerate(dst.dims) for cut in self._cuts(dim, subs)}
        smallest = math.prod(dst.shape) * itemsize // math.prod(sizes.values())
        self._alone: dict[str, Mapping[_Kind, _Cost]] = {}
        for axis, n in sizes.items():
            kind = type(dst.placement(axis))
            self._alone[axis] = _least_costs((kind, kind is Shard), axis, n, smallest, needs_grad)
        self._dims: dict[tuple[int, _Dim], _Cost] = {}

    def of(self, layout: Layout) -> _Cost:
        moving = {*layout.sharded_axes, *layout.partial, *layout.varying}
        costs = [self._of_dim(dim, subs) for dim, subs in enumerate(layout.dims)]
        costs += [self._alone[axis][Partial, False] for axis in layout.partial]
        costs += [self._alone[axis][Varying, False] for axis in layout.varying]
        costs += [self._alone[axis][Replicated, False] for axis in self._sizes if axis not in moving]
        return _sum(costs)

    def _of_dim(self, dim: int, subs: _Dim) -> _Cost:
        if (dim, subs) not in self._dims:
            cuts = self._cuts(dim, subs)
            self._dims[dim, subs] = _sum([self._alone[cut[0]][Shard, cut in self._places] for cut in cuts])
        return self._dims[dim, subs]

    def _cuts(self, dim: int, subs: _Dim) -> Iterator[tuple[str, int, int]]:
        """The axes that cut a dimension, with the positions of their cuts."""
        before = 1
        for sub in subs:
            inside = before
            for axis in sub.axes:
                yield axis, dim, inside
                inside *= self._sizes[axis]
            before *= sub.size


def _sum(costs: Sequence[_Cost]) -> _Cost:
    return sum(bytes for bytes, _ in costs), sum(steps for _, steps in costs)


def _least_costs(last: _Kind, axis: str, n: int, local: int, needs_grad: bool) -> Mapping[_Kind, _Cost]:
    """The least cost of one axis from each kind of placement to the last one, on operands of `local` bytes."""
    found: dict[_Kind, _Cost] = dict.fromkeys(_KINDS, (_FORBIDDEN * _FORBIDDEN, 0)) | {last: (0, 0)}
    for _ in _KINDS:
        for here, then in permutations(_KINDS, 2):
            ops = ("all_to_all",) if here[0] is then[0] else _TRANSITIONS[here[0], then[0]]
            if len(ops) == 1:
                bytes, steps = found[then]
                bytes += cost(ops[0], n, local) + (backward_cost(ops[0], n, local) if needs_grad else 0)
                found[here] = min(found[here], (bytes + _forbidden(ops[0], axis), steps + 1))
    return found


class Moves:
    """The candidate moves from a layout: on axes that differ, to positions at which either layout has a boundary."""

    def __init__(self, src: Layout, dst: Layout, sizes: Sizes) -> None:
        self._dst = dst
        self._sizes = sizes
        self._axes = _differing(src, dst)
        self._marks = tuple(
            sorted({*_boundaries(a, sizes), *_boundaries(b, sizes)}) for a, b in zip(src.dims, dst.dims, strict=True)
        )
        # Caches by dimension, its sub-dimensions and axis: there are few of these, but many layouts.
        self._cuts: dict[tuple[int, _Dim, str], Sequence[tuple[int, _Dim]]] = {}
        self._uncuts: dict[tuple[_Dim, str], tuple[int, _Dim] | None] = {}

    def of(self, layout: Layout) -> Iterator[Move]:
        for axis in self._axes:
            if axis in layout.partial:
                bare = replace(layout, partial=_without_axis(layout.partial, axis))
                yield "all_reduce", axis, (), bare
                yield from self._cut("reduce_scatter", bare, axis)
            elif axis in layout.varying:
                bare = replace(layout, varying=_without_axis(layout.varying, axis))
                yield "settle", axis, (), bare
                yield from self._cut("take", bare, axis)
            elif axis in layout.sharded_axes:
                yield from self._joined(layout, axis)
            else:
                yield from self._marked("vary", "spread", layout, axis, ())
                yield from self._cut("shard", layout, axis)

    def _marked(
        self, vary: str, spread: str, bare: Layout, axis: str, attrs: tuple[tuple[str, int], ...]
    ) -> Iterator[Move]:
        """Steps to varying or partial, which are only useful if the target has that placement."""
        if axis in self._dst.varying:
            yield vary, axis, attrs, replace(bare, varying=tuple(sorted((*bare.varying, axis))))
        if axis in self._dst.partial:
            yield spread, axis, attrs, replace(bare, partial=tuple(sorted((*bare.partial, axis))))

    def _joined(self, layout: Layout, axis: str) -> Iterator[Move]:
        """Steps from a sharded axis."""
        n = self._sizes[axis]
        dim, outer, bare = self._uncut(layout, axis)
        attrs = (("dim", dim), ("outer", outer))
        yield "unshard", axis, attrs, bare
        yield from self._marked("all_gather", "put", bare, axis, attrs)
        for _, _, target, result in self._cut("", bare, axis):
            to_dim, to_outer = target[0][1], target[1][1]
            concat_outer, split_outer = outer, to_outer
            if to_dim == dim:  # counted without the axis that moves
                low, high = sorted((outer, to_outer))
                if result == layout or high % (low * n):
                    continue
                if to_outer < outer:
                    concat_outer = outer // n
                else:
                    split_outer = to_outer // n
            moved = (
                ("split_dim", to_dim),
                ("split_outer", split_outer),
                ("concat_dim", dim),
                ("concat_outer", concat_outer),
            )
            yield "all_to_all", axis, moved, result

    def _cut(self, op: str, bare: Layout, axis: str) -> Iterator[Move]:
        """All ways to cut a layout along an axis that it does not use yet."""
        for dim, subs in enumerate(bare.dims):
            key = dim, subs, axis
            if key not in self._cuts:
                self._cuts[key] = [*self._cuts_of(dim, subs, axis)]
            for outer, parts in self._cuts[key]:
                yield op, axis, (("dim", dim), ("outer", outer)), _with_dim(bare, dim, parts)

    def _cuts_of(self, dim: int, subs: _Dim, axis: str) -> Iterator[tuple[int, _Dim]]:
        for outer in _positions(subs, self._marks[dim], self._sizes):
            parts = _cut_dim(subs, axis, outer, self._sizes)
            if parts is not None:
                yield outer, _normalized(parts, self._sizes)

    def _uncut(self, layout: Layout, axis: str) -> tuple[int, int, Layout]:
        for dim, subs in enumerate(layout.dims):
            if (subs, axis) not in self._uncuts:
                found = _uncut_dim(subs, axis, self._sizes)
                self._uncuts[subs, axis] = None if found is None else (found[0], _normalized(found[1], self._sizes))
            known = self._uncuts[subs, axis]
            if known is not None:
                return dim, known[0], _with_dim(layout, dim, known[1])
        raise InternalError(f"{layout} is not sharded over {axis}")


def _with_dim(layout: Layout, dim: int, subs: _Dim) -> Layout:
    return Layout((*layout.dims[:dim], subs, *layout.dims[dim + 1 :]), layout.partial, layout.varying, layout.local)


def _normalized(subs: _Dim, sizes: Sizes) -> _Dim:
    return Layout((subs,)).normalized(sizes).dims[0]


def _differing(src: Layout, dst: Layout) -> tuple[str, ...]:
    """The axes that must move, and axes that share a dimension with one of these."""
    axes = {*src.partial} ^ {*dst.partial} | {*src.varying} ^ {*dst.varying}
    for a, b in zip(src.dims, dst.dims, strict=True):
        if a != b:
            axes.update(axis for sub in (*a, *b) for axis in sub.axes)
    return tuple(sorted(axes))


def _without_axis(axes: tuple[str, ...], axis: str) -> tuple[str, ...]:
    return tuple(other for other in axes if other != axis)


def _boundaries(dim: tuple[SubDim, ...], sizes: Sizes) -> Iterator[int]:
    """The global element counts before each sub-dimension, and at the cuts inside it."""
    before = 1
    for sub in dim:
        inside = before
        yield inside
        for axis in sub.axes:
            inside *= sizes[axis]
            yield inside
        before *= sub.size


def _group_size(sub: SubDim, sizes: Sizes) -> int:
    return math.prod(sizes[axis] for axis in sub.axes)


def _positions(dim: tuple[SubDim, ...], marks: list[int], sizes: Sizes) -> list[int]:
    """The local positions at which a cut may start: at a sub-dimension, or inside one at a global boundary."""
    found = set()
    local = whole = 1
    for sub in dim:
        ways = _group_size(sub, sizes)
        inside = sub.size // ways
        found.add(local)
        for mark in marks:
            offset, rest = divmod(mark, whole * ways)
            if not rest and 1 < offset < inside and inside % offset == 0:
                found.add(local * offset)
        local *= inside
        whole *= sub.size
    return sorted(found)


def cut(layout: Layout, axis: str, dim: int, outer: int, sizes: Sizes) -> Layout | None:
    """The layout after cutting the local tensor's `dim`, viewed as [outer, rest], along `rest`.

    Returns None if the sizes do not divide.
    """
    subs = _cut_dim(layout.dims[dim], axis, outer, sizes)
    return None if subs is None else _with_dim(layout, dim, subs).normalized(sizes)


def _cut_dim(subs: _Dim, axis: str, outer: int, sizes: Sizes) -> _Dim | None:
    before = 1
    for index, sub in enumerate(subs):
        inside = sub.size // _group_size(sub, sizes)
        offset, rest = divmod(outer, before)
        if not rest and offset < inside:
            if inside % offset or (inside // offset) % sizes[axis]:
                return None
            parts = (
                (SubDim(sub.size, (*sub.axes, axis)),)
                if offset == 1
                else (SubDim(sub.size * offset // inside, sub.axes), SubDim(inside // offset, (axis,)))
            )
            return (*subs[:index], *parts, *subs[index + 1 :])
        before *= inside
    return None


def _uncut_dim(subs: _Dim, axis: str, sizes: Sizes) -> tuple[int, _Dim] | None:
    before = 1
    for index, sub in enumerate(subs):
        if axis in sub.axes:
            place = sub.axes.index(axis)
            major = math.prod(sizes[other] for other in sub.axes[:place])
            parts = (
                SubDim(major, sub.axes[:place]),
                SubDim(sizes[axis]),
                SubDim(sub.size // (major * sizes[axis]), sub.axes[place + 1 :]),
            )
            return before, (*subs[:index], *parts, *subs[index + 1 :])
        before *= sub.size // _group_size(sub, sizes)
    return None
