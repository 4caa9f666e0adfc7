"""Layouts of an operation's results, inferred from the layouts of its operands and its local shapes.

    grad = matmul(a, b)   # a: [8@dp, 16@tp], b: [16@tp, 4]   ->   [8@dp, 4] partial(tp)

The operation's rule on local shapes names the factors of every dimension. An operand's layout says how each factor is
cut, and a result's dimension is made of its factors; a contracted factor that is cut leaves the result partial.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from partc.ir.collectives import BY_TABLE, COLLECTIVES, ROUTED
from partc.ir.layout import Layout, Sizes, SubDim
from partc.ir.operations import KEEPING, spelling
from partc.ir.program import Arg, Op, TensorType
from partc.rules import resolve_lowered
from partc.rules.kernels import CONSTANTS, fill
from partc.rules.rule import Dims, OpRule, integers, number

Pieces = tuple[SubDim, ...]
_SAME = KEEPING - spelling("reshape") - spelling("permute") - spelling("expand")


@dataclass(frozen=True, slots=True)
class Inferred:
    """The layout of a result. The operation alone does not determine how the `open` dimensions are cut, nor whether the
    result is partial over the `loose` axes. Nothing is known about axes over which an operand is local. If the result
    is `in_order`, its elements have the order of this layout, however its dimensions are cut.

    `doubtful` says that the operands' local shapes allow several layouts, of which this one is the most probable.
    """

    layout: Layout
    open: frozenset[int] = frozenset()
    loose: frozenset[str] = frozenset()
    doubtful: bool = False
    in_order: bool = False

    def allows(self, stated: Layout, sizes: Sizes) -> bool:
        """Whether a stated layout agrees with this one."""
        unknown = frozenset(self.layout.local)
        found, stated = (_layout_within(layout, unknown, sizes).normalized(sizes) for layout in (self.layout, stated))
        # One element of a cut dimension is also a contribution to the sum over that dimension, and vice versa.
        ones = {dim for dim, size in enumerate(found.local_shape(sizes)) if size == 1}
        cut = (_axes(layout.dims[dim]) for layout in (found, stated) for dim in ones)
        loose = self.loose.union(*cut)
        partial, same = {*found.partial}, True
        for dim, (a, b) in enumerate(zip(found.dims, stated.dims, strict=True)):
            if a == b or dim in self.open or dim in ones:
                continue
            # Likewise a block of a dimension that is cut into one block for each rank.
            if summed := _summed_over(a, b, sizes):
                partial |= summed
            elif (summed := _summed_over(b, a, sizes)) and partial >= summed:
                partial -= summed
            else:
                same = False
        if self.in_order and _order(found, sizes) != _order(stated, sizes):
            return False
        return same and partial - loose <= {*stated.partial} <= partial | loose


def _summed_over(dim: Pieces, sums: Pieces, sizes: Sizes) -> set[str]:
    """The outer axes of a normalized dimension, of which each rank has one block, if the sum over the blocks has the
    dimension `sums`.
    """
    (first, *rest), (block, *more) = (each or (SubDim(1),) for each in (dim, sums))
    outer = first.axes[: len(first.axes) - len(block.axes)]
    cut = SubDim(block.size * math.prod(sizes[axis] for axis in outer), (*outer, *block.axes))
    return {*outer} if cut == first and not (rest or more or first.spare(sizes)) else set()


def _order(layout: Layout, sizes: Sizes) -> tuple[int | str, ...]:
    """The factors of a layout's elements, the major one first: axes, and numbers of elements on a rank."""
    found: list[int | str] = [1]
    for sub in (sub for dim in layout.dims for sub in dim):
        *_, last = found
        if sub.axes or isinstance(last, str):
            found += [*sub.axes, sub.part(sizes)]
        else:
            found[-1] = last * sub.size
    return tuple(factor for factor in found if factor != 1)


def _layout_within(layout: Layout, axes: Set[str], sizes: Sizes) -> Layout:
    """The layout within one rank of these axes."""
    if axes.isdisjoint(layout.axes):
        return layout
    dims = tuple(
        tuple(SubDim(sub.size // math.prod(sizes[axis] for axis in sub.axes if axis in axes), sub.axes) for sub in dim)
        for dim in layout.dims
    )
    return replace(layout, dims=dims).without(*axes)


def local(shape: tuple[int, ...], operands: Iterable[TensorType]) -> Layout:
    """The layout of a result whose operation has no rule: only the local shape is known."""
    layouts = [type.layout for type in operands]
    axes = {axis for layout in layouts for axis in (*layout.sharded_axes, *layout.partial, *layout.local)}
    return replace(Layout.replicated(shape), local=tuple(sorted(axes)))


def inferred(op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> tuple[Inferred | None, ...]:
    """The inferred layout of each result; None if no rule determines it. Of the results only local shapes are read."""
    unknown = {axis for name in op.refs() for axis in types[name].layout.local}
    if not unknown:
        return _inferred(op, types, sizes)
    if dict(op.attrs).get("axis") in unknown:
        return (None,) * len(op.results)
    known = {name: _type_within(types[name], unknown, sizes) for name in op.refs()}
    axes = tuple(sorted(unknown))
    return tuple(
        made and replace(made, layout=replace(made.layout, local=axes)) for made in _inferred(op, known, sizes)
    )


def _type_within(type: TensorType, axes: Set[str], sizes: Sizes) -> TensorType:
    return replace(type, layout=_layout_within(type.layout, axes, sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    """An operation, the types of its operands, and the local shapes of its results."""

    op: Op
    operands: tuple[TensorType, ...]
    shapes: tuple[tuple[int, ...], ...]
    sizes: Sizes

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return tuple(type.layout for type in self.operands)

    @property
    def sharded(self) -> bool:
        """Whether this form of the operation is for cut operands: an attribute names the axis that cuts them."""
        return "axis" in dict(self.op.attrs)


Results = tuple[Inferred | None, ...]  # None: unknown


def _inferred(op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> Results:
    if op.body:
        return _of_body(op, types, sizes)
    shapes = tuple(value.type.layout.local_shape(sizes) for value in op.results)
    known = _Operation(op=op, operands=tuple(types[name] for name in op.refs()), shapes=shapes, sizes=sizes)
    special = _SPECIAL.get(op.name)
    found = special(known) if special is not None else None
    if found is not None:
        return found
    if known.sharded:
        return (None,) * len(op.results)
    if "ring" in dict(op.attrs):
        return _ring_layouts(op, known.operands)
    local = replace(op, results=tuple(replace(value, type=value.type.local(sizes)) for value in op.results))
    rule = resolve_lowered(local, {name: types[name].local(sizes) for name in op.refs()})
    if rule is None:
        return tuple(_without_rule(known.operands, shape, sizes) for shape in shapes)
    first = _by_rule(op, rule, known.operands, shapes, sizes)
    derivative = op.name.endswith("_backward")
    return (*first, *(None if derivative else _statistic(first[0], shape, sizes) for shape in shapes[len(first) :]))


def _constant(known: _Operation) -> Results | None:
    return None if known.operands else (_filled(known.shapes[0], fill(known.op), known.sizes),)


def _incoming_gradient(known: _Operation) -> Results:
    # The operand has no gradient, so a varying one need not be marked.
    return (Inferred(known.layouts[0].dual(), loose=frozenset(known.sizes)),)


def _like_operands(known: _Operation) -> Results:
    """Each result has the layout of the operand in its place."""
    return tuple(map(Inferred, known.layouts[: len(known.op.results)]))


def _permuted_rows(known: _Operation) -> Results:
    """Each rank permutes its own rows, or copies of them."""
    x, order, _ = known.layouts
    return (Inferred(replace(x, dims=(order.dims[0], *x.dims[1:]))),)


def _permuted(known: _Operation) -> Results:
    layout = known.layouts[0]
    return (Inferred(replace(layout, dims=tuple(layout.dims[dim] for dim in integers(known.op.args[1])))),)


def _repeated(known: _Operation) -> Results:
    """Where a rank has one copy, local shapes do not show whether the copies of a dimension are cut."""
    layout, shape = known.layouts[0], known.shapes[0]
    before = (*(1,) * (len(shape) - len(layout.dims)), *layout.local_shape(known.sizes))
    dims = (*(((SubDim(1),),) * (len(shape) - len(layout.dims))), *layout.dims)
    found = (dim if size == own else (SubDim(size),) for dim, size, own in zip(dims, shape, before, strict=True))
    return (Inferred(Layout(tuple(found), layout.partial), open=frozenset(range(len(shape)))),)


def _divided(known: _Operation) -> Results | None:
    op = known.op
    if not isinstance(op.args[1], int) or not op.result.type.layout.partial:
        return None
    return (_spread(known.layouts[0], op.result.type.layout, op.args[1], known.sizes),)


def _embedding_shard(known: _Operation) -> Results:
    table, ids = known.layouts
    partial = tuple(sorted({str(dict(known.op.attrs)["axis"]), *table.partial}))
    return (Inferred(Layout((*ids.dims, *table.dims[1:]), partial)),)


def _embedding_shard_backward(known: _Operation) -> Results:
    *rows, width = known.layouts[0].dims
    axis = str(dict(known.op.attrs)["axis"])
    partial = tuple(sorted({*known.layouts[0].partial, *(name for dim in rows for name in _axes(dim))}))
    return (Inferred(Layout(((SubDim(known.shapes[0][0] * known.sizes[axis], (axis,)),), width), partial)),)


def _addmm(known: _Operation) -> Results:
    return (_product(*known.layouts),)


def _along(position: int) -> _Special:
    """For operations along one dimension that ranks hold whole; its number is the argument at this position."""
    return lambda known: tuple(_dimension_layout(known, position, shape) for shape in known.shapes)


def _split(known: _Operation) -> Results | None:
    """Pieces of rows that are cut in parts: each rank splits its own part (see the pass `sections`)."""
    (dim,), layout = integers(known.op.args[2]), known.layouts[0]
    (rows, *more), dims = layout.dims[dim], layout.dims
    if more or not rows.axes:
        return None
    ways = math.prod(known.sizes[axis] for axis in rows.axes)
    pieces = ((SubDim(shape[dim] * ways, rows.axes),) for shape in known.shapes)
    return tuple(Inferred(replace(layout, dims=(*dims[:dim], piece, *dims[dim + 1 :]), varying=())) for piece in pieces)


def _sliced(known: _Operation) -> Results | None:
    found = _stepped(known.op, known.layouts[0], known.shapes[0], known.sizes)
    return None if found is None else (found,)


def _like(position: int) -> _Special:
    """For derivatives whose first result has the layout of this operand; operand 0 is the incoming gradient."""
    return lambda known: (_like_operand(known.layouts[position], known.layouts[0]), *_unknown_but_first(known))


def _unknown_but_first(known: _Operation) -> Results:
    return (None,) * (len(known.op.results) - 1)


def _convolved_backward(known: _Operation) -> Results:
    """The gradient of the input is a product of the incoming one and the weight, of which ranks may have parts."""
    grad, x, weight = known.layouts
    found = _like_operand(x, replace(grad, partial=(*grad.partial, *weight.partial)))
    return (found, *_unknown_but_first(known))


def _all_like_second(known: _Operation) -> Results:
    """For derivatives of elementwise operations."""
    return (_like_operand(known.layouts[1], known.layouts[0]),) * len(known.op.results)


def _convolved(known: _Operation) -> Results:
    # A convolution contracts channels: equal local shapes of operands and result do not mean equal layouts.
    whole = not any(layout.normalized(known.sizes).axes for layout in known.layouts)
    return (Inferred(Layout.replicated(known.shapes[0])) if whole else None,)


def _sharded_loss(known: _Operation) -> Results | None:
    if not known.sharded:
        return None
    *rows, classes = known.layouts[0].dims
    parts = tuple(axis for axis in known.layouts[0].partial if axis not in _axes(classes))
    return (Inferred(Layout(tuple(rows), parts)),) * len(known.op.results)


def _over_classes(known: _Operation) -> Results:
    """For reductions of logits whose classes are cut: each rank has its part of a maximum or sum over classes."""
    *dims, classes = known.layouts[0].dims
    return (Inferred(Layout(tuple(dims), tuple(sorted({*known.layouts[0].partial, *_axes(classes)})))),)


def _put_by_index(known: _Operation) -> Results | None:
    return None if known.sharded else (_written(known.layouts, adds=True in known.op.args[3:]),)


def _norm_backward(known: _Operation) -> Results | None:
    return None if known.sharded else _of_norm(known.layouts[1], known.layouts[0].partial, known.shapes)


_Special = Callable[[_Operation], Results | None]
# The results of operations that have no rule, or of which the layouts of the operands say more than a rule. None if the
# operation, as it is called, is like others.
_SPECIAL: Mapping[str, _Special] = {
    **dict.fromkeys(COLLECTIVES.keys() | _SAME, lambda known: (_moved(known.op, known.layouts[0], known.sizes),)),
    **dict.fromkeys(ROUTED, lambda known: _routed(known.op, known.operands)),
    **dict.fromkeys(BY_TABLE, lambda known: _by_table(known.op, known.operands)),
    **dict.fromkeys(CONSTANTS, _constant),
    "incoming_gradient": _incoming_gradient,
    "own_gradient": _like_operands,
    "permute": _permuted,
    "permute_rows": _permuted_rows,
    "expert_order": lambda known: (Inferred(known.layouts[0]),) * 3,
    "reshape": lambda known: (reshaped(known.layouts[0], known.shapes[0], known.sizes),),
    "repeat": _repeated,
    "div": _divided,
    "embedding_shard": _embedding_shard,
    "embedding_shard_backward": _embedding_shard_backward,
    "addmm": _addmm,
    **dict.fromkeys(("select", "unbind", "stack"), _along(1)),
    **dict.fromkeys(("slice_backward", "select_backward"), _along(2)),
    "slice": _sliced,
    "split": _split,
    "dropout_backward": _like(0),
    "cross_entropy_backward": _like(1),
    "convolution": _convolved,
    "convolution_backward": _convolved_backward,
    "native_group_norm_backward": _like(1),
    "native_batch_norm_backward": _like(1),
    "max_pool2d_with_indices_backward": _like(1),
    "avg_pool2d_backward": _like(1),
    "_prelu_kernel_backward": _all_like_second,
    **dict.fromkeys(("mask_classes", "mask_classes_shard"), _like_operands),
    **dict.fromkeys(("cross_entropy", "cross_entropy_shard"), _sharded_loss),
    **dict.fromkeys(("shard_max", "sum_exp", "pick", "smooth_sum"), _over_classes),
    **dict.fromkeys(("index_put", "_index_put_impl"), _put_by_index),
    **dict.fromkeys(("rms_norm_backward", "layer_norm_backward"), _norm_backward),
}


def _ring_layouts(op: Op, operands: Sequence[TensorType]) -> tuple[Inferred | None, ...]:
    """The layouts of ring attention, or of its gradients: cut like the queries.

    The gradient of a mask that all rows share comes from all ranks' rows, which its layout does not show.
    """
    layouts = [replace(type.layout, varying=()) for type in operands]
    if op.name.endswith("_backward"):
        return (*map(Inferred, layouts[1:4]), *(None,) * (len(op.results) - 3))
    rows = layouts[0].dims[:3]
    made = (Inferred(replace(layouts[0], dims=(*rows, layouts[2].dims[3]))), Inferred(replace(layouts[0], dims=rows)))
    return made[: len(op.results)]


def _product(bias: Layout, x: Layout, weight: Layout) -> Inferred:
    rows, within = x.dims
    partial = {*bias.partial, *x.partial, *weight.partial, *_axes(within)}
    return Inferred(Layout((rows, weight.dims[1]), tuple(sorted(partial))))


def _written(operands: Sequence[Layout], *, adds: bool) -> Inferred:
    """The layout of a tensor after values are written at places: partial over an axis that cuts only the values."""
    base, *values = operands
    cut = {axis for layout in values for axis in layout.sharded_axes}.difference(base.sharded_axes)
    partial = {axis for layout in operands for axis in layout.partial} | (cut if adds else set())
    return Inferred(
        replace(base, varying=(), partial=tuple(sorted(partial))), loose=frozenset() if adds else frozenset(cut)
    )


def _dimension_layout(known: _Operation, position: int, shape: tuple[int, ...]) -> Inferred:
    """The layout of a result that differs from the operand by one dimension, which each rank has whole.

    Where the operand's dimension is cut, no layout describes the result: it is local.
    """
    layout, args = known.layouts[0], known.op.args
    dims, place = list(layout.dims), number(args[position]) if len(args) > position else 0
    here = place % max(len(dims), len(shape))
    whole = [(SubDim(shape[here]),)] if len(shape) >= len(dims) else []
    cut = _axes(dims[here]) if len(shape) == len(dims) else ()
    dims[here : here + (len(shape) <= len(dims))] = whole
    partial = tuple(sorted({axis for each in known.layouts for axis in each.partial}))
    return Inferred(replace(layout, dims=tuple(dims), partial=partial, varying=(), local=tuple(sorted(cut))))


def _stepped(op: Op, layout: Layout, shape: tuple[int, ...], sizes: Sizes) -> Inferred | None:
    """The layout of every n-th element if each rank's runs of elements are multiples of n; otherwise None."""
    numbers = [arg for arg in op.args[1:] if isinstance(arg, int)]
    if len(numbers) != 4 or numbers[-1] == 1:
        return None
    at, start, _, step = numbers
    *outer, last = layout.dims[at]
    run = last.size // math.prod(sizes[axis] for axis in last.axes)
    if run % step or start >= step or shape[at] * step != layout.local_shape(sizes)[at]:
        return None
    dims = list(layout.dims)
    dims[at] = (*outer, SubDim(last.size // step, last.axes))
    return Inferred(replace(layout, dims=tuple(dims), varying=()))


def _like_operand(x: Layout, grad: Layout) -> Inferred:
    summed = {axis for axis in grad.sharded_axes if axis not in x.sharded_axes}
    return Inferred(replace(x, varying=(), partial=tuple(sorted({*grad.partial, *summed}))))


def _filled(shape: tuple[int, ...], number: Arg, sizes: Sizes) -> Inferred:
    """A constant: any cut is valid, and zeros are also partial sums of zeros."""
    zero = isinstance(number, int | float) and number == 0
    loose = frozenset(sizes) if zero else frozenset()
    return Inferred(Layout.replicated(shape), frozenset(range(len(shape))), loose)


def _of_norm(x: Layout, partial: tuple[str, ...], shapes: Sequence[tuple[int, ...]]) -> tuple[Inferred | None, ...]:
    """The gradients of a norm's input, and of its weight and bias: sums over the rows."""
    along = len(shapes[1]) if len(shapes) > 1 else 1
    rows, kept = x.dims[: len(x.dims) - along], x.dims[len(x.dims) - along :]
    sums = tuple(sorted({*partial, *(axis for dim in rows for axis in _axes(dim))}))
    made = [Inferred(Layout(kept, sums)) if shape else None for shape in shapes[1:]]
    return (Inferred(replace(x, partial=partial, varying=())), *made)


def _without_rule(operands: Sequence[TensorType], shape: tuple[int, ...], sizes: Sizes) -> Inferred | None:
    """Whole operands give a whole result; operands of the result's shape give a result that is cut like them."""
    if operands and not any(type.layout.normalized(sizes).axes for type in operands):
        return Inferred(Layout.replicated(shape))
    if not operands or any(type.layout.local_shape(sizes) != shape for type in operands):
        return None
    dims = [
        next((dim for dim in each if _axes(dim)), each[0])
        for each in zip(*(type.layout.dims for type in operands), strict=True)
    ]
    return Inferred(Layout(tuple(dims), tuple(sorted({axis for type in operands for axis in type.layout.partial}))))


def _by_rule(
    op: Op, rule: OpRule, operands: Sequence[TensorType], shapes: Sequence[tuple[int, ...]], sizes: Sizes
) -> tuple[Inferred | None, ...]:
    pieces: dict[str, Pieces] = {}
    ones: dict[tuple[int, int], Pieces] = {}  # dimensions with one local element, by (number of dimensions, index)
    for type, dims in zip(operands, rule.operands, strict=True):
        for place, (cut, names) in enumerate(zip(type.layout.dims, dims, strict=True)):
            if not names and _axes(cut):
                ones.setdefault((len(dims), place), cut)
            found = _of_factors(cut, [rule.factor(name).size for name in names], sizes)
            if found is None:
                return (None,) * len(rule.results)
            for name, each in zip(names, found, strict=True):
                if name in pieces and _size(pieces[name]) != _size(each):
                    return (None,) * len(rule.results)  # local sizes differ: one operand has a single element
                if not _axes(pieces.get(name, ())):
                    pieces[name] = each
    partial = {axis for type in operands for axis in type.layout.partial}
    for factor in rule.factors:
        if factor.kind == "contracted" and factor.name not in rule.combined:
            partial |= {*_axes(pieces.get(factor.name, ()))}
    loose = {axis for cut in ones.values() for axis in _axes(cut)}
    made: list[Inferred | None] = []
    for dims, shape in zip(rule.results, shapes, strict=False):
        # A cut factor of another result may be summed here; this result then has no dimension for it.
        gone = {*pieces} - {name for dim in dims for name in dim}
        summed = frozenset(loose | {axis for name in gone for axis in _axes(pieces[name])})
        made.append(_inferred_from(dims, shape, pieces, ones, tuple(sorted(partial)), summed, sizes))
    return tuple(made)


def _inferred_from(
    dims: Dims,
    shape: tuple[int, ...],
    pieces: Mapping[str, Pieces],
    ones: Mapping[tuple[int, int], Pieces],
    partial: tuple[str, ...],
    loose: frozenset[str],
    sizes: Sizes,
) -> Inferred | None:
    cut: list[Pieces] = []
    unsure: set[int] = set()
    for place, (names, size) in enumerate(zip(dims, shape, strict=True)):
        if not names:
            cut.append(ones.get((len(dims), place), (SubDim(size),)))
            unsure.add(place)
        elif all(name in pieces for name in names):
            found = tuple(piece for name in names for piece in pieces[name])
            whole = math.prod(_local(piece, sizes) for piece in found) == size  # a statistic has one element
            cut.append(found if whole else (SubDim(size),))
        else:
            cut.append((SubDim(size),))
            unsure.add(place)
    layout = Layout(tuple(cut), partial)
    twice = len({*layout.axes}) < len(layout.axes)  # factors of one local element hide which dimension an axis cuts
    return None if twice else Inferred(layout, frozenset(unsure), loose, doubtful=bool(loose))


def _statistic(first: Inferred | None, shape: tuple[int, ...], sizes: Sizes) -> Inferred | None:
    """Statistics have the leading dimensions of the first result, and one element or nothing for the others."""
    if first is None:
        return None
    local = first.layout.local_shape(sizes)
    same = [place < len(local) and local[place] == size for place, size in enumerate(shape)]
    dims = tuple(first.layout.dims[place] if same[place] else (SubDim(size),) for place, size in enumerate(shape))
    return replace(first, layout=replace(first.layout, dims=dims))


def _of_factors(cut: Pieces, factors: Sequence[int], sizes: Sizes) -> list[Pieces] | None:
    """Assign a dimension's sub-dimensions to factors of these local sizes, major first; None if they do not fit."""
    if len(factors) < 2:
        return [cut][: len(factors)]
    if 0 in factors:
        return None if _axes(cut) else [(SubDim(size),) for size in factors]
    left = list(cut)
    found: list[Pieces] = []
    for size in factors:
        taken: list[SubDim] = []
        if size == 1 and left and left[0].axes and _local(left[0], sizes) == 1:
            taken.append(left.pop(0))
        while math.prod(_local(sub, sizes) for sub in taken) != size:
            if not left:
                return None
            sub, rest = left.pop(0), size // math.prod(_local(each, sizes) for each in taken)
            here = _local(sub, sizes)
            if rest % here:
                if here % rest:
                    return None
                left.insert(0, SubDim(here // rest))
                sub = SubDim(sub.size // (here // rest), sub.axes)
            taken.append(sub)
        found.append(tuple(taken))
    found[-1] = (*found[-1], *left)
    return found


def _spread(layout: Layout, stated: Layout, number: int, sizes: Sizes) -> Inferred:
    """Replicated values that are divided by the number of ranks are also partial sums."""
    more = [axis for axis in stated.partial if axis not in layout.partial]
    ways = math.prod(sizes[axis] for axis in more)
    return Inferred(replace(layout, partial=stated.partial) if more and ways == number else layout)


def reshaped(layout: Layout, shape: tuple[int, ...], sizes: Sizes) -> Inferred | None:
    """The layout of the same elements in another local shape; None if no layout has it."""
    if not shape or 0 in shape:
        return Inferred(replace(layout, dims=tuple((SubDim(size),) for size in shape)), frozenset(range(len(shape))))
    row = tuple(sub for dim in layout.dims for sub in dim if sub.size > 1)
    found = _with_ones(layout, shape, sizes) or (_of_factors(row, shape, sizes) if len(shape) > 1 else [row])
    if found is None:
        return None
    dims = tuple(pieces or (SubDim(1),) for pieces in found)
    if 1 in shape or 1 in layout.local_shape(sizes) or any(_local(sub, sizes) == 1 for sub in row):
        return Inferred(replace(layout, dims=dims), frozenset(range(len(shape))), frozenset(sizes), doubtful=True)
    # A cut at the start of a dimension may also stand at the end of the dimension before, which then has one local
    # element.
    starts = [dim for dim, pieces in enumerate(dims) if dim and pieces[0].axes]
    unsure = frozenset(starts) | frozenset(dim - 1 for dim in starts)
    return Inferred(replace(layout, dims=dims), unsure, doubtful=bool(unsure), in_order=True)


def _with_ones(layout: Layout, shape: tuple[int, ...], sizes: Sizes) -> list[Pieces] | None:
    """The same dimensions with dimensions of one element inserted; None if the shape differs otherwise."""
    dims = [dim for dim in layout.dims if _size(dim) > 1]
    if math.prod(shape) < 2 or [math.prod(_local(sub, sizes) for sub in dim) for dim in dims] != [
        size for size in shape if size > 1
    ]:
        return None
    left = iter(dims)
    return [next(left) if size > 1 else () for size in shape]


def _of_body(op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> tuple[Inferred | None, ...]:
    known = {name: types[name] for name in op.refs()}
    found: dict[str, Inferred | None] = {}
    for step in op.body:
        for value, made in zip(step.results, inferred(step, known, sizes), strict=False):
            found[value.name] = made
            known[value.name] = value.type
    return tuple(found.get(value.name) for value in op.results)


def _routed(op: Op, operands: Sequence[TensorType]) -> tuple[Inferred | None, ...]:
    """Rows are cut like their indices: `order` at their own rank, `grouped` at the rank of their expert."""
    if op.name == "route":
        return (Inferred(operands[0].layout), None, None, None)
    x, order, grouped, _ = (type.layout for type in operands)
    rows = (grouped if op.name == "dispatch" else order).dims[0]
    return (Inferred(replace(x, dims=(rows, *x.dims[1:]))),)


def _by_table(op: Op, operands: Sequence[TensorType]) -> tuple[Inferred | None, ...]:
    """The layout of each table's rows, in proportion to `shares`; or of the rows of all tables together."""
    if op.name == "divide_rows":
        shares = integers(op.args[2])
        return tuple(Inferred(_scaled(operands[0].layout, share, sum(shares))) for share in shares)
    rows = [type.layout.shape[0] for type in operands[:-1]]
    return (Inferred(_scaled(operands[0].layout, sum(rows), rows[0])),)


def _scaled(layout: Layout, times: int, over: int) -> Layout:
    """A layout with times/over as many rows on each rank."""
    *major, minor = layout.dims[0]
    return replace(layout, dims=((*major, replace(minor, size=minor.size * times // over)), *layout.dims[1:]))


def _moved(op: Op, layout: Layout, sizes: Sizes) -> Inferred | None:
    """The layout after a collective or a local reshard."""
    attrs = dict(op.attrs)
    axis = str(attrs.get("axis", ""))
    partial = tuple(name for name in layout.partial if name != axis)
    match op.name:
        case "all_reduce":
            return Inferred(replace(layout, partial=partial))
        case "spread":
            return Inferred(replace(layout, partial=(*layout.partial, axis)))
        case "all_gather" | "unshard":
            return Inferred(replace(_gathered(layout, axis, sizes), partial=layout.partial))
        case "put":
            return Inferred(replace(_gathered(layout, axis, sizes), partial=(*layout.partial, axis)))
        case "reduce_scatter" | "take" | "shard":
            where = number(attrs["dim"]), number(attrs.get("outer", 1))
            return _cut(replace(layout, partial=partial), *where, axis, sizes)
        case "all_to_all":
            dim, outer = number(attrs["split_dim"]), number(attrs.get("split_outer", 1))
            whole = outer == 1 and number(attrs.get("concat_outer", 1)) == 1
            # Within one dimension, the pieces may come in either order.
            if not whole or dim == number(attrs["concat_dim"]):
                return None
            return _cut(_gathered(layout, axis, sizes), dim, outer, axis, sizes)
    return Inferred(layout)


def _gathered(layout: Layout, axis: str, sizes: Sizes) -> Layout:
    """The layout without an axis. Axes that cut its parts remain: `[16@dp,tp]` without dp is `[2 · 8@tp]`."""

    def parts(sub: SubDim) -> Iterator[SubDim]:
        if axis not in sub.axes[:-1]:
            yield SubDim(sub.size, tuple(other for other in sub.axes if other != axis))
            return
        place = sub.axes.index(axis)
        outer = math.prod(sizes[other] for other in sub.axes[: place + 1])
        yield SubDim(outer, sub.axes[:place])
        yield SubDim(sub.size // outer, sub.axes[place + 1 :])

    return replace(layout, dims=tuple(tuple(part for sub in dim for part in parts(sub)) for dim in layout.dims))


def _cut(layout: Layout, dim: int, outer: int, axis: str, sizes: Sizes) -> Inferred | None:
    """The dimension, seen as [outer, rest] in local elements, cut along `rest`."""
    here = math.prod(_local(sub, sizes) for sub in layout.dims[dim])
    parts = _of_factors(layout.dims[dim], [outer, here // outer], sizes) if outer > 1 else [(), layout.dims[dim]]
    if parts is None or not parts[1]:
        return None
    before, (first, *rest) = parts[0], parts[1]
    ways = sizes[axis]
    if _local(first, sizes) % ways:
        return None
    dims = list(layout.dims)
    dims[dim] = (*before, SubDim(first.size, (*first.axes, axis)), *rest)
    return Inferred(replace(layout, dims=tuple(dims)))


def _local(sub: SubDim, sizes: Sizes) -> int:
    return sub.size // math.prod(sizes[axis] for axis in sub.axes)


def _size(cut: Sequence[SubDim]) -> int:
    return math.prod(sub.size for sub in cut)


def _axes(cut: Sequence[SubDim]) -> tuple[str, ...]:
    return tuple(axis for sub in cut for axis in sub.axes)
