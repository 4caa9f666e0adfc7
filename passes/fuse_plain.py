"""Operations with several results as those with one that kernels do.

    y, buffer = log_sigmoid_forward(x)         y       = log_sigmoid(x)
    most, at  = max(x, -1, True)          ->   most    = amax(x, (-1,), True)
    saved x, buffer                            saved x
    backward:                                  backward:
      g = log_sigmoid_backward(gy, x, buffer)    g_away = neg(x)
                                                 g_part = sigmoid(g_away)
                                                 g      = mul(gy, g_part)
    ms = sum(x, (1,), False)                   ms_kept = sum(x, (1,), True)
                                               ms      = reshape(ms_kept, (8,))

A largest number is one without its place where nobody asks for that: no gradient goes there, which would be that of
one element, and with `amax` that of all that are equal. Sums of rows keep their dimensions, as rows in kernels do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from partc.layout import Layout, Sizes
from partc.naming import unique
from partc.program import Arg, Graph, Op, Ref, Region, TensorType, Value
from partc.rules.kernels import REDUCTIONS
from partc.rules.rule import argument

_ALONE = {"log_sigmoid_forward": "log_sigmoid", "max": "amax", "min": "amin"}  # without their second result


def plain(region: Region, sizes: Sizes) -> Region:
    """The region with derivatives spelled out, and then without the results that they alone read."""
    taken = set().union(*(region.types(graph) for graph in region.graphs))

    def spelled(graph: Graph) -> Graph:
        read, types = _read(graph), region.types(graph)

        def _steps(op: Op) -> Iterator[Op]:
            if op.name in REDUCTIONS:
                return _kept(op, types, sizes, taken)
            return _derivative(op, read, types, taken)

        return replace(graph, ops=tuple(step for op in graph.ops for step in _steps(op)))

    backward, weight = region.backward and spelled(region.backward), region.weight and spelled(region.weight)
    before = _read(region.backward) if region.backward else frozenset()
    given = _read(backward) if backward else frozenset()
    idle = before - given - set(region.kept)
    saved = tuple(name for name in region.saved if name not in idle)
    if backward is not None:
        backward = replace(backward, inputs=tuple(value for value in backward.inputs if value.name not in idle))
    return replace(
        region,
        forward=_alone(spelled(region.forward), saved),
        saved=saved,
        backward=backward and _alone(backward, region.kept),
        weight=weight and _alone(weight, ()),
    )


def _read(graph: Graph) -> frozenset[str]:
    return frozenset(name for op in graph.ops for name in op.refs()).union(graph.outputs)


def _alone(graph: Graph, also: Collection[str]) -> Graph:
    """Without second results that nobody reads."""
    read = _read(graph).union(also)
    found: list[Op] = []
    for op in graph.ops:
        if op.name not in _ALONE or len(op.results) != 2 or op.results[1].name in read:
            found.append(op)
        elif op.results[0].name in read:
            found.append(_first(op))
    return replace(graph, ops=tuple(found))


def _first(op: Op) -> Op:
    """An operation as the one that makes its first result alone."""
    args = op.args
    if isinstance(dim := (*args, None)[1], int):
        args = (args[0], (dim,), *args[2:])
    return replace(op, name=_ALONE[op.name], args=args, results=op.results[:1])


def _kept(op: Op, types: Mapping[str, TensorType], sizes: Sizes, taken: set[str]) -> Iterator[Op]:
    """A sum of rows with its dimensions, which kernels do, and then without them."""
    dims, rank = argument(op, 1, "dim"), len(types[next(op.refs())].shape)
    along = len(dims) if isinstance(dims, tuple) else 0
    last = isinstance(dims, tuple) and {dim % rank for dim in dims if isinstance(dim, int)} == set(
        range(rank - along, rank)
    )
    if not last or not 0 < along < rank or argument(op, 2, "keepdim", False) or op.attrs:
        yield op
        return
    type = op.result.type
    layout = replace(type.layout, dims=(*type.layout.dims, *Layout.replicated((1,) * along).dims))
    whole = Value(name=unique(f"{op.result.name}_kept", taken), type=replace(type, layout=layout))
    yield replace(op, args=(op.args[0], dims, True), results=(whole,))
    yield Op(
        name="reshape",
        args=(Ref(whole.name), type.layout.local_shape(sizes)),
        results=op.results,
        source=op.source,
    )


def _derivative(op: Op, read: Collection[str], types: Mapping[str, TensorType], taken: set[str]) -> Iterator[Op]:
    """The operations of one that reads what a kernel doesn't keep, or makes two gradients; any other itself."""

    def do(name: str, *args: Arg, word: str = "", like: Arg = None, makes: Value | None = None) -> Ref:
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
            part = do("sigmoid", do("neg", x, word="away", like=x), word="part", like=x)
            do("mul", grad, part, makes=op.result)
        case "_prelu_kernel_backward", (grad, x, slope):
            above = do("gt", x, 0.0, word="above", like=x)
            do("where", above, grad, do("mul", grad, slope, word="part", like=x), makes=op.results[0])
            if op.results[1].name in read:
                do("where", above, 0.0, do("mul", grad, x, word="terms", like=x), makes=op.results[1])
        case _:
            steps.append(op)
    yield from steps
