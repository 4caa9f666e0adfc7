"""Operations on local shards: literal sizes become local, and some operations become their sharded forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from partc.errors import InternalError
from partc.ir.attention import ROWS, Attention
from partc.ir.layout import Sizes
from partc.ir.program import Arg, Op
from partc.rules.rule import RING, OpRule, argument, integers
from partc.runtime.positions import Order, Positions


def localize(op: Op, rule: OpRule | None, sizes: Sizes) -> Op:
    """The same operation on local shards; the layouts of its results determine the local sizes.

    If a factor with a sharded form is cut, the sharded form is called, with the axis as an attribute.
    """
    op = _LOCAL[op.name](op, sizes) if op.name in _LOCAL else op
    for factor, name in rule.sharded if rule is not None else ():
        axes = [choice.axis for choice in op.choices if choice.factor == factor and sizes[choice.axis] > 1]
        if len(axes) > 1:
            raise InternalError(f"{op.name} is cut along {factor} over {' and '.join(axes)}")
        if axes:
            op = replace(op, name=name, attrs=(*op.attrs, ("axis", axes[0])))
    return op


def _with_argument(op: Op, index: int, value: Arg) -> Op:
    return replace(op, args=(*op.args[:index], value, *op.args[index + 1 :]))


def _result_shape(index: int) -> Callable[[Op, Sizes], Op]:
    """A localizer for operations whose argument at this position is the shape of the result."""

    def local(op: Op, sizes: Sizes) -> Op:
        return _with_argument(op, index, op.result.type.layout.local_shape(sizes))

    return local


def _split(op: Op, sizes: Sizes) -> Op:
    """Each rank splits its own parts; `ways` remains if there are several."""
    dim, ways = integers(argument(op, 2, "dim", 0))[0], dict(op.attrs).get("ways")
    widths = tuple(value.type.layout.local_shape(sizes)[dim] for value in op.results)
    if isinstance(ways, int):
        left = ways * sum(widths) // sum(value.type.shape[dim] for value in op.results)
        op = replace(op, attrs=(("ways", left),) if left > 1 else ())
    return _with_argument(op, 1, widths)


def _slice(op: Op, sizes: Sizes) -> Op:
    """Scale the bounds like the result: a cut is at multiples of a grain that divides them, or between steps."""
    dim = integers(argument(op, 1, "dim", 0))[0]
    whole, local = op.result.type.shape[dim], op.result.type.layout.local_shape(sizes)[dim]
    if whole == local:
        return op
    start, step = integers(argument(op, 2, "start", 0))[0], integers(argument(op, 4, "step", 1))[0]
    start = start if step > 1 else start * local // whole
    bounds = (start, start + local) if step == 1 else (start, local * step)
    return replace(op, args=(op.args[0], dim, *bounds, *op.args[4:]), attrs=())


def _convolution(op: Op, sizes: Sizes) -> Op:
    """Scale the number of groups, if there are several: groups are the factor of the channels that is cut."""
    groups = integers(argument(op, 6, "groups", 1))[0]
    whole, local = op.result.type.shape[1], op.result.type.layout.local_shape(sizes)[1]
    if groups == 1 or whole == local:
        return op
    if len(op.args) > 6:
        return _with_argument(op, 6, groups * local // whole)
    attrs = tuple((name, groups * local // whole if name == "groups" else value) for name, value in op.attrs)
    return replace(op, attrs=attrs)


def _of_own_experts(op: Op, sizes: Sizes) -> Op:
    """Each rank has the rows and the matrices of one group. `dispatch` leaves rows in the order of their experts."""
    grouped = argument(op, len(op.args), "groups", 1) != 1
    return replace(op, attrs=(("ordered", True),) if grouped and op.name == "expert_matmul" else ())


def _lookup(op: Op, sizes: Sizes) -> Op:
    """Each rank has the rows of one group."""
    return replace(op, attrs=tuple(item for item in op.attrs if item[0] != "groups"))


def _repeat(op: Op, sizes: Sizes) -> Op:
    """Divide each number of copies by the ranks that cut it."""
    counts = [*integers(argument(op, 1, "repeats"))]
    for choice in op.choices:
        if choice.factor in (cut := [f"c{dim}" for dim in range(len(counts))]):
            counts[cut.index(choice.factor)] //= sizes[choice.axis]
    return replace(op, args=(op.args[0], tuple(counts)), attrs=())


def _repeat_interleave(op: Op, sizes: Sizes) -> Op:
    """Replace the size of the dimension by the local size."""
    dim = argument(op, 2, "dim")
    if argument(op, 3, "output_size") is None or not isinstance(dim, int):
        return op
    local = op.result.type.layout.local_shape(sizes)[dim]
    if len(op.args) > 3:
        return _with_argument(op, 3, local)
    return replace(op, attrs=tuple((name, local if name == "output_size" else value) for name, value in op.attrs))


def _attention(op: Op, sizes: Sizes) -> Op:
    """Add the ring, and the positions of this rank's queries if the scores that they read depend on positions."""
    attention = Attention.of(op)
    assert attention is not None
    ring = next((choice.axis for choice in op.choices if choice.factor == RING and sizes[choice.axis] > 1), None)
    whole = [axis for axis, size in sizes.items() if size == 1]
    rows = op.result.type.layout.without(*whole).dims[ROWS]
    kept = tuple(item for item in op.attrs if item[0] not in ("by_rows", "zigzag"))
    cut = (attention.causal or attention.window) and any(sub.axes for sub in rows)
    if ring is None and not attention.zigzag and not cut:
        return replace(op, attrs=kept)
    around = () if ring is None else (("ring", ring),)
    positions = Positions(" · ".join(map(str, rows)), Order(attention.zigzag))
    return replace(op, attrs=(("rows", str(positions)), *around, *kept))


# The position of the argument that is the shape of the result.
SHAPES: Mapping[str, int] = {
    "reshape": 1, "expand": 1, "rand": 0, "randn": 0, "full": 0, "zeros": 0, "ones": 0, "empty": 0, "new_full": 1,
    "new_zeros": 1, "new_ones": 1, "new_empty": 1,
}  # fmt: skip
_LOCAL: dict[str, Callable[[Op, Sizes], Op]] = {
    **{name: _result_shape(place) for name, place in SHAPES.items()},
    "attention": _attention,
    "attention_dropout": _attention,
    "conv1d": _convolution,
    "conv2d": _convolution,
    "conv3d": _convolution,
    "expert_matmul": _of_own_experts,
    "expert_rows": _of_own_experts,
    "embedding": _lookup,
    "split": _split,
    "slice": _slice,
    "repeat": _repeat,
    "repeat_interleave": _repeat_interleave,
}
