"""Operations with several results, replaced by operations with one result that kernels compute.

    y, buffer = log_sigmoid_forward(x)         y       = log_sigmoid(x)
    most, at  = max(x, -1, True)          ->   most    = amax(x, (-1,), True)
    saved x, buffer                            saved x
    backward:                                  backward:
      g = log_sigmoid_backward(gy, x, buffer)    g_away = neg(x)
                                                 g_part = sigmoid(g_away)
                                                 g      = mul(gy, g_part)
    s = sum(x, (1,), False)                    s_kept  = sum(x, (1,), True)
                                               s       = reshape(s_kept, (8,))

A maximum without its index is used only if no gradient flows: the gradient of `max` goes to one element, that of `amax`
to all equal ones. Sums of rows keep their dimensions, as rows in kernels do. Bools are counted in fp32, which is exact
for rows of up to 2**24 elements.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from partc.ir.layout import Layout, Sizes
from partc.ir.naming import unique
from partc.ir.program import FLOATING, Arg, DType, DTypeArg, Graph, Op, Ref, Region, TensorType, Value
from partc.rules.kernels import REDUCTIONS
from partc.rules.rule import argument

_ALONE = {"log_sigmoid_forward": "log_sigmoid", "max": "amax", "min": "amin"}  # the operation without the second result

_EXACT = 2**24  # the largest count that fp32 represents exactly


def with_plain_derivatives(region: Region, sizes: Sizes) -> Region:
    """The region with derivatives spelled out, and without results that only they read."""
    taken = set().union(*(region.types(graph) for graph in region.graphs))

    def spelled(graph: Graph) -> Graph:
        read, types = _read(graph), region.types(graph)
        return replace(graph, ops=tuple(step for op in graph.ops for step in _derivative(op, read, types, taken)))

    def with_reshapes(graph: Graph) -> Graph:
        types = region.types(graph)
        return replace(graph, ops=tuple(step for op in graph.ops for step in _with_reshape(op, types, sizes, taken)))

    backward, weight = region.backward and spelled(region.backward), region.weight and spelled(region.weight)
    before = _read(region.backward) if region.backward else frozenset()
    given = _read(backward) if backward else frozenset()
    idle = before - given - set(region.kept)
    saved = tuple(name for name in region.saved if name not in idle)
    if backward is not None:
        backward = replace(backward, inputs=tuple(value for value in backward.inputs if value.name not in idle))
    region = replace(
        region,
        forward=_without_second_results(spelled(region.forward), saved),
        saved=saved,
        backward=backward and _without_second_results(backward, region.kept),
        weight=weight and _without_second_results(weight, ()),
    )
    return region.mapped(with_reshapes)


def _read(graph: Graph) -> frozenset[str]:
    return frozenset(name for op in graph.ops for name in op.refs()).union(graph.outputs)


def _without_second_results(graph: Graph, also: Collection[str]) -> Graph:
    """Replace operations whose second results are unread."""
    read = _read(graph).union(also)
    found: list[Op] = []
    for op in graph.ops:
        if op.name not in _ALONE or len(op.results) != 2 or op.results[1].name in read:
            found.append(op)
        elif op.results[0].name in read:
            found.append(_first_result_op(op))
    return replace(graph, ops=tuple(found))


def _first_result_op(op: Op) -> Op:
    """The operation that computes only the first result."""
    args = op.args
    if isinstance(dim := (*args, None)[1], int):
        args = (args[0], (dim,), *args[2:])
    return replace(op, name=_ALONE[op.name], args=args, results=op.results[:1])


def _with_reshape(op: Op, types: Mapping[str, TensorType], sizes: Sizes, taken: set[str]) -> Iterator[Op]:
    """A sum of rows that keeps its dimensions, followed by a reshape; bools are counted as numbers."""
    along = _summed_dims(op, types)
    if not along:
        yield op
        return
    made, x = op.result, types[next(op.refs())]

    def write(name: str, *args: Arg, like: TensorType, dtype: DType, word: str) -> Value:
        value = Value(name=unique(f"{made.name}_{word}", taken), type=replace(like, dtype=dtype))
        steps.append(Op(name=name, args=args, results=(value,), source=op.source))
        return value

    steps: list[Op] = []
    counts = x.dtype == "bool" and op.name == "sum"
    dtype: DType = "f32" if counts else made.type.dtype
    of = Ref(write("to", op.args[0], DTypeArg("f32"), like=x, dtype="f32", word="ones").name) if counts else op.args[0]
    kept = argument(op, 2, "keepdim", False)
    layout = made.type.layout
    whole = layout if kept else replace(layout, dims=(*layout.dims, *Layout.replicated((1,) * along).dims))
    last = write(op.name, of, op.args[1], True, like=replace(made.type, layout=whole), dtype=dtype, word="kept")
    if counts:
        last = write(
            "to", Ref(last.name), DTypeArg(made.type.dtype), like=last.type, dtype=made.type.dtype, word="count"
        )
    if not kept:
        shape = layout.local_shape(sizes)
        steps.append(Op(name="reshape", args=(Ref(last.name), shape), results=(made,), source=op.source))
    yield from (*steps[:-1], replace(steps[-1], results=(made,)))


def _summed_dims(op: Op, types: Mapping[str, TensorType]) -> int:
    """The number of trailing dimensions of a sum that drops them, or counts bools; 0 for other operations."""
    if op.name not in (*REDUCTIONS, "logsumexp") or op.attrs:
        return 0
    x, dims = types[next(op.refs())], argument(op, 1, "dim")
    rank = len(x.shape)
    found = {dim % rank for dim in dims if isinstance(dim, int)} if isinstance(dims, tuple) and rank else set()
    if len(found) == rank or found != set(range(rank - len(found), rank)):
        return 0
    dropped = x.dtype in FLOATING and not argument(op, 2, "keepdim", False)
    counted = x.dtype == "bool" and op.name == "sum" and math.prod(x.shape[rank - len(found) :]) < _EXACT
    return len(found) if dropped or counted else 0


def _derivative(op: Op, read: Collection[str], types: Mapping[str, TensorType], taken: set[str]) -> Iterator[Op]:
    """The operations of a derivative that reads a dropped result or has two results; other operations unchanged."""

    def write(name: str, *args: Arg, word: str = "", like: Arg = None, makes: Value | None = None) -> Ref:
        if makes is None:
            assert isinstance(like, Ref)
            type = types[like.name]
            makes = Value(
                name=unique(f"{op.results[0].name}_{word}", taken),
                type=replace(type, dtype="bool") if name == "gt" else type,
            )
        steps.append(Op(name=name, args=args, results=(makes,), source=op.source))
        return Ref(makes.name)

    steps: list[Op] = []
    match op.name, op.args:
        case "log_sigmoid_backward", (grad, x, _):
            part = write("sigmoid", write("neg", x, word="away", like=x), word="part", like=x)
            write("mul", grad, part, makes=op.result)
        case "_prelu_kernel_backward", (grad, x, slope):
            above = write("gt", x, 0.0, word="above", like=x)
            write("where", above, grad, write("mul", grad, slope, word="part", like=grad), makes=op.results[0])
            if op.results[1].name in read:
                write("masked_fill", write("mul", grad, x, word="terms", like=grad), above, 0.0, makes=op.results[1])
        case _:
            steps.append(op)
    yield from steps
