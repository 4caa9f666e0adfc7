"""Norms, softmaxes, row statistics and permuted rows, spelled as elementwise operations, sums along rows and columns,
and selections of rows.

    y, rstd = rms_norm(x, (4096,), w, 1e-05)   ->   y_square = mul(x, x)
                                                    y_sum    = sum(y_square, (2,), True)
                                                    y_mean   = mul(y_sum, 0.000244140625)
                                                    y_var    = add(y_mean, 1e-05)
                                                    rstd     = rsqrt(y_var)
                                                    y_unit   = mul(x, rstd)
                                                    y        = mul(y_unit, w)

Intermediate values are fp32 if the operands have 16 bits. Gradients follow Zhang and Sennrich 2019, appendix A, for
rms_norm, and Ba, Kiros and Hinton 2016 for layer_norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from partc.ir.layout import Layout, Sizes
from partc.ir.naming import unique
from partc.ir.program import FLOATING, Arg, DType, Graph, Op, Ref, Region, TensorType, Value

# Results beyond the first: statistics of rows, in fp32 if rows have 16 bits.
STATISTICS = frozenset({"rms_norm", "layer_norm"})


def spelled_out(op: Op, types: Mapping[str, TensorType], sizes: Sizes, taken: set[str]) -> tuple[Op, ...]:
    """The operations of a composite; any other operation itself. New names are added to `taken`."""
    write = _COMPOSITES.get(op.name)
    if write is None:
        return (op,)
    shown = op.results[0].name
    writer = _RowWriter(op=op, types=types, sizes=sizes, stem=shown, taken=taken)
    write(writer, *op.args)
    return tuple(writer.ops)


def in_fp32(region: Region) -> Region:
    """The region with the statistics of its norms in fp32, as kernels write them."""
    names = {
        value.name
        for graph in region.graphs
        for op in graph.ops
        if op.name in STATISTICS
        for value in op.results[1:]
        if value.type.dtype in ("bf16", "f16")
    }

    def retyped(value: Value) -> Value:
        return replace(value, type=replace(value.type, dtype="f32")) if value.name in names else value

    def graph_of(graph: Graph) -> Graph:
        ops = tuple(replace(op, results=tuple(map(retyped, op.results))) for op in graph.ops)
        return replace(graph, inputs=tuple(map(retyped, graph.inputs)), ops=ops)

    return region.mapped(graph_of)


def epsilon(dtype: DType) -> float:
    """The number that rms_norm adds if no epsilon is given: the machine epsilon of the rows' statistics, which have at
    least 32 bits.
    """
    return 2.0**-52 if dtype == "f64" else 2.0**-23


@dataclass(slots=True, kw_only=True)
class _RowWriter:
    """Writes operations on rows: all but the last `along` dimensions of x number the rows."""

    op: Op
    types: Mapping[str, TensorType]
    sizes: Sizes
    stem: str
    taken: set[str]
    ops: list[Op] = field(default_factory=list)
    known: dict[str, TensorType] = field(default_factory=dict)

    def type_of(self, arg: Arg) -> TensorType:
        assert isinstance(arg, Ref)
        return self.known.get(arg.name) or self.types[arg.name]

    def results(self, count: int) -> tuple[Value | None, ...]:
        """The results; None for those that only a derivative would read, in a region without backward."""
        return (*self.op.results, *[None] * (count - len(self.op.results)))

    def shape(self, arg: Arg) -> tuple[int, ...]:
        return self.type_of(arg).layout.local_shape(self.sizes)

    def do(self, name: str, *args: Arg, word: str = "", makes: Value | None = None) -> Ref:
        """Write an elementwise operation."""
        operands = [arg for arg in args if isinstance(arg, Ref)]
        largest = max(operands, key=lambda arg: math.prod(self.shape(arg)))
        partial = tuple(sorted({axis for arg in operands for axis in self.type_of(arg).layout.partial}))
        return self._write(name, args, replace(self.type_of(largest).layout, partial=partial), word, makes)

    def sum(self, x: Ref, along: int, word: str, *, name: str = "sum") -> Ref:
        """Write a sum along rows; dimensions are kept."""
        shape, layout = self.shape(x), self.type_of(x).layout
        first = len(shape) - along
        kept = replace(layout, dims=(*layout.dims[:first], *Layout.replicated((1,) * along).dims))
        return self._write(name, (x, tuple(range(first, len(shape))), True), kept, word, None)

    def column(self, x: Ref, along: int, makes: Value) -> None:
        """Write a sum over all rows."""
        rows = tuple(range(len(self.shape(x)) - along))
        self._write("sum", (x, rows, False), makes.type.layout, "", makes)

    def mean(self, x: Ref, along: int, word: str) -> Ref:
        shape = self.shape(x)
        return self.do("mul", self.sum(x, along, f"{word}_sum"), 1 / math.prod(shape[len(shape) - along :]), word=word)

    def _write(self, name: str, args: tuple[Arg, ...], layout: Layout, word: str, makes: Value | None) -> Ref:
        if makes is None:
            dtype = self.types[next(self.op.refs())].dtype
            wide: DType = "f32" if dtype in ("bf16", "f16") or dtype not in FLOATING else dtype
            makes = Value(name=unique(f"{self.stem}_{word}", self.taken), type=TensorType(dtype=wide, layout=layout))
        self.known[makes.name] = makes.type
        self.ops.append(Op(name=name, args=args, results=(makes,), source=self.op.source))
        return Ref(makes.name)


def _rms_norm(w: _RowWriter, x: Ref, shape: tuple[int, ...], weight: Arg, eps: Arg) -> None:
    made, rstd = w.results(2)
    small = epsilon(w.type_of(x).dtype) if eps is None else eps
    var = w.do("add", w.mean(w.do("mul", x, x, word="square"), len(shape), "mean"), small, word="var")
    scale = w.do("rsqrt", var, word="rstd", makes=rstd)
    unit = w.do("mul", x, scale, word="unit", makes=made if weight is None else None)
    if weight is not None:
        w.do("mul", unit, weight, makes=made)


def _rms_norm_backward(w: _RowWriter, grad: Ref, x: Ref, shape: tuple[int, ...], weight: Arg, rstd: Ref) -> None:
    unit = _rms_norm_grad_input(w, grad, x, shape, weight, rstd)
    if weight is not None:
        w.column(w.do("mul", grad, unit, word="terms"), len(shape), w.op.results[1])


def _rms_norm_grad_input(w: _RowWriter, grad: Ref, x: Ref, shape: tuple[int, ...], weight: Arg, rstd: Ref) -> Ref:
    unit = w.do("mul", x, rstd, word="unit")
    scaled = grad if weight is None else w.do("mul", grad, weight, word="scaled")
    along = w.mean(w.do("mul", scaled, unit, word="product"), len(shape), "along")
    across = w.do("sub", scaled, w.do("mul", unit, along, word="part"), word="across")
    w.do("mul", across, rstd, makes=w.op.results[0])
    return unit


def _rms_norm_grad_weight(w: _RowWriter, grad: Ref, x: Ref, shape: tuple[int, ...], rstd: Ref) -> None:
    unit = w.do("mul", x, rstd, word="unit")
    w.column(w.do("mul", grad, unit, word="terms"), len(shape), w.op.result)


def _layer_norm(w: _RowWriter, x: Ref, shape: tuple[int, ...], weight: Arg, bias: Arg, eps: Arg) -> None:
    made, mean, rstd = w.results(3)
    average = w.do("mul", w.sum(x, len(shape), "sum"), 1 / math.prod(shape), word="mean", makes=mean)
    centered = w.do("sub", x, average, word="centered")
    spread = w.mean(w.do("mul", centered, centered, word="square"), len(shape), "spread")
    scale = w.do("rsqrt", w.do("add", spread, eps, word="var"), word="rstd", makes=rstd)
    steps = [("mul", scale), *([("mul", weight)] if weight is not None else []), *([("add", bias)] if bias else [])]
    for number, (name, other) in enumerate(steps):
        last = number == len(steps) - 1
        centered = w.do(name, centered, other, word=f"unit_{number}", makes=made if last else None)


def _layer_norm_backward(
    w: _RowWriter, grad: Ref, x: Ref, shape: tuple[int, ...], weight: Arg, mean: Ref, rstd: Ref
) -> None:
    unit = _layer_norm_grad_input(w, grad, x, shape, weight, mean, rstd)
    if weight is not None:
        _affine_gradients(w, grad, unit, len(shape), *w.op.results[1:])


def _layer_norm_grad_input(
    w: _RowWriter, grad: Ref, x: Ref, shape: tuple[int, ...], weight: Arg, mean: Ref, rstd: Ref
) -> Ref:
    along = len(shape)
    unit = w.do("mul", w.do("sub", x, mean, word="centered"), rstd, word="unit")
    scaled = grad if weight is None else w.do("mul", grad, weight, word="scaled")
    level = w.mean(scaled, along, "level")
    slope = w.mean(w.do("mul", scaled, unit, word="product"), along, "slope")
    flat = w.do("sub", scaled, level, word="flat")
    across = w.do("sub", flat, w.do("mul", unit, slope, word="part"), word="across")
    w.do("mul", across, rstd, makes=w.op.results[0])
    return unit


def _layer_norm_grad_weight(w: _RowWriter, grad: Ref, x: Ref, shape: tuple[int, ...], mean: Ref, rstd: Ref) -> None:
    unit = w.do("mul", w.do("sub", x, mean, word="centered"), rstd, word="unit")
    _affine_gradients(w, grad, unit, len(shape), *w.op.results)


def _affine_gradients(w: _RowWriter, grad: Ref, unit: Ref, along: int, grad_weight: Value, grad_bias: Value) -> None:
    w.column(w.do("mul", grad, unit, word="terms"), along, grad_weight)
    w.column(grad, along, grad_bias)


def _softmax(w: _RowWriter, x: Ref, dim: Arg) -> None:
    most = w.sum(x, 1, "most", name="amax")
    power = w.do("exp", w.do("sub", x, most, word="below"), word="power")
    w.do("div", power, w.sum(power, 1, "total"), makes=w.op.result)


def _softmax_backward(w: _RowWriter, grad: Ref, y: Ref, dim: Arg, dtype: Arg) -> None:
    along = w.sum(w.do("mul", grad, y, word="product"), 1, "along")
    w.do("mul", w.do("sub", grad, along, word="across"), y, makes=w.op.result)


def _log_softmax(w: _RowWriter, x: Ref, dim: Arg) -> None:
    below = w.do("sub", x, w.sum(x, 1, "most", name="amax"), word="below")
    total = w.sum(w.do("exp", below, word="power"), 1, "total")
    w.do("sub", below, w.do("log", total, word="level"), makes=w.op.result)


def _log_softmax_backward(w: _RowWriter, grad: Ref, y: Ref, dim: Arg, dtype: Arg) -> None:
    along = w.sum(grad, 1, "along")
    w.do("sub", grad, w.do("mul", w.do("exp", y, word="weight"), along, word="part"), makes=w.op.result)


def _logsumexp(w: _RowWriter, x: Ref, dims: tuple[int, ...], keep: Arg) -> None:
    """The log-sum-exp of rows; for rows of infinities nothing is subtracted."""
    most = w.sum(x, len(dims), "most", name="amax")
    level = w.do("nan_to_num", most, math.nan, 0.0, 0.0, word="level")
    total = w.sum(w.do("exp", w.do("sub", x, level, word="below"), word="power"), len(dims), "total")
    w.do("add", w.do("log", total, word="log"), level, makes=w.op.result)


def _mean(w: _RowWriter, x: Ref, dims: tuple[int, ...], keep: Arg) -> None:
    shape = w.shape(x)
    w.do("mul", w.sum(x, len(dims), "sum"), 1 / math.prod(shape[len(shape) - len(dims) :]), makes=w.op.result)


def _var(w: _RowWriter, x: Ref, dims: tuple[int, ...]) -> None:
    along, shape = len(dims), w.shape(x)
    correction = dict(w.op.attrs).get("correction")
    count = math.prod(shape[len(shape) - along :]) - (correction if isinstance(correction, int | float) else 1)
    centered = w.do("sub", x, w.mean(x, along, "mean"), word="centered")
    total = w.sum(w.do("mul", centered, centered, word="square"), along, "total")
    share = 1 / count if count > 0 else math.inf  # an empty mean is 0 · inf, as in PyTorch
    var = w.do("mul", total, share, word="var", makes=w.op.result if w.op.name == "var" else None)
    if w.op.name == "std":
        w.do("sqrt", var, makes=w.op.result)


def _norm(w: _RowWriter, x: Ref, order: Arg, dims: tuple[int, ...], keep: Arg) -> None:
    w.do("sqrt", w.sum(w.do("mul", x, x, word="square"), len(dims), "total"), makes=w.op.result)


def _linear_grad_bias(w: _RowWriter, grad: Ref) -> None:
    w.column(grad, 1, w.op.result)


def _permute_rows(w: _RowWriter, x: Ref, order: Ref, inverse: Ref) -> None:
    made = w.op.result
    w._write("index_select", (x, 0, order), made.type.layout, "", made)


_COMPOSITES: Mapping[str, Callable[..., Ref | None]] = {
    "rms_norm": _rms_norm,
    "rms_norm_backward": _rms_norm_backward,
    "rms_norm_grad_input": _rms_norm_grad_input,
    "rms_norm_grad_weight": _rms_norm_grad_weight,
    "layer_norm": _layer_norm,
    "layer_norm_backward": _layer_norm_backward,
    "layer_norm_grad_input": _layer_norm_grad_input,
    "layer_norm_grad_weight": _layer_norm_grad_weight,
    "softmax": _softmax,
    "_softmax_backward_data": _softmax_backward,
    "log_softmax": _log_softmax,
    "_log_softmax_backward_data": _log_softmax_backward,
    "logsumexp": _logsumexp,
    "mean": _mean,
    "var": _var,
    "std": _var,
    "linalg_vector_norm": _norm,
    "linear_grad_bias": _linear_grad_bias,
    "permute_rows": _permute_rows,
}
