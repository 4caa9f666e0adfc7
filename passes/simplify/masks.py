"""Attention masks that consist of constants, evaluated at compile time, at any size.

    hidden = gt(columns, rows)
    mask   = where(hidden, -inf, 0.0)               ->    y = attention(q, k, v, None, True, None)
    y      = attention(q, k, v, mask, False, None)

Vectors are evaluated; matrices are kept as functions of their rows and columns (matrices.py). A mask that hides the
future becomes `is_causal`, one that hides distant positions a window, and one that hides nothing is dropped. Others,
and documents, become limits of each row (limits.py). Of a conjunction, conditions that depend on the batch remain a
mask: padding is a mask with one row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from partc import fuel
from partc.ir import operators
from partc.ir.attention import Attention
from partc.ir.naming import unique
from partc.ir.operations import RANDOM
from partc.ir.program import Arg, DTypeArg, Op, Ref, Region, TensorType, Value
from partc.passes.simplify.limits import (
    Attrs,
    LimitWriter,
    equal_numbers,
    limits_of,
    limits_of_documents,
    limits_or_keys,
)
from partc.passes.simplify.matrices import Matrix, Outer, Runs, Two, as_matrix, band, outer
from partc.rules.rule import argument, integers
from partc.rules.shapes import slice_bounds

_WHOLE = 1 << 12  # the largest matrix that is evaluated element by element
_MOST_ELEMENTS = 1 << 27  # the same for vectors, and for matrices without another form
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_AND = ("__and__", "bitwise_and", "logical_and")
_OR = ("__or__", "__xor__", "bitwise_or", "bitwise_xor", "logical_or", "logical_xor")
_POINTWISE = (*_AND, *_OR, "add", "sub", "rsub", "mul", "div", "maximum", "minimum")
_UNARY = ("bitwise_not", "logical_not", "neg", "to", "abs", "exp", "relu", "log")
_SAME = ("alias", "clone", "contiguous", "detach")


@dataclass(frozen=True, slots=True)
class Seen:
    """The positions that a row reads: all, or none after its own (causal), or only those nearer than `window`."""

    causal: bool
    window: int  # 0: no window
    chunk: int = 0  # positions in a chunk, if rows only read their own chunk; 0: no chunks


@dataclass(frozen=True, slots=True)
class MaskStructure:
    """The structure of a mask, as options of attention."""

    seen: Seen
    rest: str | None = None  # the remaining mask
    attrs: Attrs = ()  # limits and keys


def known_masks(region: Region) -> Region:
    """Replace masks of attention by their structure; conditions that depend on the batch remain a mask."""
    graph = region.forward
    constants = Constants(graph.makers())
    known: dict[str, MaskStructure | None] = {}
    types = region.types(graph)
    taken = {*types}
    ops: list[Op] = []
    for op in graph.ops:
        attention = Attention.of(op)
        if attention is not None and attention.mask and not attention.causal:
            mask = attention.mask
            if mask not in known:
                maker = constants.made.get(mask)
                writing = LimitWriter(taken, maker.source if maker is not None else op.source)
                known[mask] = _split(mask, constants, types, writing, in_chunks=not attention.drops)
                ops += writing.ops
            found = known[mask]
            if found is not None and fuel.may_rewrite("known mask", op.source):
                if found.seen.chunk:
                    ops += _in_chunks(op, found.seen.chunk, types, taken)
                    continue
                op = _with_structure(op, found)
        ops.append(op)
    return replace(region, forward=replace(graph, ops=tuple(ops)))


def _with_structure(op: Op, known: MaskStructure) -> Op:
    seen, mask = known.seen, None if known.rest is None else Ref(known.rest)
    window = (seen.window,) if seen.window else ()
    rest = window if op.name == "attention" else (seen.window, *op.args[7:])
    return replace(op, args=(*op.args[:3], mask, seen.causal, op.args[5], *rest), attrs=(*op.attrs, *known.attrs))


def _in_chunks(op: Op, size: int, types: Mapping[str, TensorType], taken: set[str]) -> Iterator[Op]:
    """Attention with a chunked mask as causal attention in which each chunk is an example."""
    operands: list[Arg] = []
    for arg in op.args[:3]:
        assert isinstance(arg, Ref)
        type = types[arg.name]
        b, h, s, d = type.shape
        name = arg.name
        for view, to, shape in (
            ("reshape", (b, h, s // size, size, d), (b, h, s // size, size, d)),
            ("permute", (0, 2, 1, 3, 4), (b, s // size, h, size, d)),
            ("reshape", (b * s // size, h, size, d), (b * s // size, h, size, d)),
        ):
            value = Value(name=unique(f"{arg.name}_chunks", taken), type=type.shaped(shape))
            yield Op(name=view, args=(Ref(name), to), results=(value,), source=op.source)
            name = value.name
        operands.append(Ref(name))
    result = op.result
    b, h, s, e = result.type.shape
    made = [
        Value(name=unique(f"{result.name}_chunks", taken), type=result.type.shaped(shape))
        for shape in ((b * s // size, h, size, e), (b, s // size, h, size, e), (b, h, s // size, size, e))
    ]
    yield Op(name="attention", args=(*operands, None, True, op.args[5]), results=(made[0],), source=op.source)
    yield Op(name="reshape", args=(Ref(made[0].name), made[1].type.shape), results=(made[1],), source=op.source)
    yield Op(name="permute", args=(Ref(made[1].name), (0, 2, 1, 3, 4)), results=(made[2],), source=op.source)
    yield Op(name="reshape", args=(Ref(made[2].name), result.type.shape), results=(result,), source=op.source)


def _split(
    name: str, constants: Constants, types: Mapping[str, TensorType], writing: LimitWriter, *, in_chunks: bool
) -> MaskStructure | None:
    """The structure of a mask, with its remaining mask and limits written; None if no part has a known structure."""
    made = constants.made
    if name not in made or len(made[name].result.type.shape) < 2 or made[name].result.type.shape[-1] < 2:
        return None
    known: Runs | None = None
    rest: list[Value] = []  # masks with one row
    limits: list[Callable[[LimitWriter], Attrs | None]] = []  # of conditions on the batch that are not a row
    for condition in _conditions(name, constants):
        seen = constants.seen(condition)
        if seen is not None:
            known = seen if known is None else known & seen
        elif (row := _one_row(condition, made)) is not None:
            rest.append(row)
        elif (either := _disjunction(condition, constants)) is not None:
            limits.append(partial(limits_or_keys, *either))
        elif condition in made and (pair := equal_numbers(made[condition], types)) and _by_example(name, made):
            limits.append(partial(limits_of_documents, *pair))
        else:
            return None
    if len(limits) > 1 or (known is None and [row.name for row in rest] == [name]):
        return None
    if limits:
        found, attrs = _seen(known), limits[0](writing) or ()
        if found is None or found.chunk or not attrs:
            return None
    else:
        found, attrs = structured(known, writing, in_chunks=in_chunks and not rest)
    return None if found is None else MaskStructure(found, _conjunction(rest, writing), attrs)


def _conjunction(rows: Sequence[Value], writing: LimitWriter) -> str | None:
    """The mask that is set where all masks are; None for no masks."""
    while len(rows) > 1:
        a, b, *others = rows
        shape = tuple(torch.broadcast_shapes(a.type.shape, b.type.shape))
        both = writing.add("__and__", shape, Ref(a.name), Ref(b.name), dtype="bool")
        rows = [Value(name=both.name, type=TensorType.replicated("bool", shape)), *others]
    return rows[0].name if rows else None


def structured(known: Runs | None, writing: LimitWriter, *, in_chunks: bool) -> tuple[Seen | None, Attrs]:
    """The structure of a constant mask, or else its limits; (None, ()) if it has neither.

    Chunks are structure only if attention may run in chunks; otherwise they are described by limits.
    """
    found = _seen(known)
    without = found is None or (found.chunk and not in_chunks)
    return _as_limits(known, writing) if without and known is not None else (found, ())


def _seen(known: Runs | None) -> Seen | None:
    """The structure of a constant mask that needs no limits; None if there is none."""
    return Seen(causal=False, window=0) if known is None else structure(known)


def _as_limits(known: Runs, writing: LimitWriter) -> tuple[Seen | None, Attrs]:
    attrs = limits_of(known, writing)
    if attrs is None:
        return None, ()
    s, t = known.rows, known.columns
    return Seen(causal=s == t and known.equals(known & band(s, t, None, 0)), window=0), attrs


def _disjunction(name: str, constants: Constants) -> tuple[Runs, Value] | None:
    """For a disjunction of a constant mask and a row of booleans: both; None for other masks."""
    op = constants.made.get(name)
    if op is None or op.name not in ("__or__", "bitwise_or", "logical_or") or len([*op.refs()]) != 2:
        return None
    for constant, other in ([*op.refs()], [*op.refs()][::-1]):
        runs, row = constants.seen(constant), _one_row(other, constants.made)
        if runs is not None and row is not None and row.type.shape[1] == 1:
            return (runs, row) if (runs.rows, runs.columns) == op.result.type.shape[-2:] else None
    return None


def _by_example(name: str, made: Mapping[str, Op]) -> bool:
    """Whether a mask has a matrix for each example rather than for each head."""
    op = made[name]
    while op.name == "expand" and (before := next(op.refs())) in made and len(made[before].result.type.shape) == 4:
        op = made[before]
    return len(op.result.type.shape) == 4 and op.result.type.shape[1] == 1


def _conditions(name: str, constants: Constants) -> Iterator[str]:
    """The conditions whose conjunction a mask is; the mask itself if it is not a conjunction."""
    op = constants.made.get(name)
    shape = op.result.type.shape if op is not None else ()
    if op is None or constants.seen(name) is not None or (shape[-2:-1] == (1,) and len(shape) == 4):
        yield name
    elif op.name in _AND and op.result.type.dtype == "bool":
        for operand in op.refs():
            yield from _conditions(operand, constants)
    elif op.name in ("expand", "reshape", *_SAME, "to") and op.result.type.dtype == "bool":
        operand = next(op.refs())
        before = constants.made[operand].result.type if operand in constants.made else None
        if before is not None and before.dtype == "bool" and before.shape[-2:] == shape[-2:]:
            yield from _conditions(operand, constants)
        else:
            yield name
    elif op.name == "where" and _is_number(op.args[1], 0) and _is_number(op.args[2], -math.inf, constants):
        yield from _conditions(next(op.refs()), constants)
    else:
        yield name


def _is_number(arg: Arg, number: float, constants: Constants | None = None) -> bool:
    if isinstance(arg, Ref) and constants is not None:
        return constants.number(arg.name) == number
    return isinstance(arg, int | float) and arg == number


def _one_row(name: str, made: Mapping[str, Op]) -> Value | None:
    """The row that a boolean matrix with equal rows repeats; None for other values."""
    op = made.get(name)
    while op is not None and len(op.results) == 1 and op.result.type.dtype == "bool":
        shape = op.result.type.shape
        if len(shape) == 4 and shape[-2] == 1:
            return op.result
        if op.name != "expand":
            return None
        op = made.get(next(op.refs()))
    return None


def structure(seen: Runs) -> Seen | None:
    """The structure of a constant mask; None if attention has no option for it."""
    s, t = seen.rows, seen.columns
    if not (~seen).changes.numel():
        return Seen(causal=False, window=0)
    if s != t or seen.changes.shape[1] > 2 or not seen.changes.numel():
        return None
    if seen.equals(band(s, t, None, 0)):
        return Seen(causal=True, window=0)
    last, first = seen.changes[-1], seen.changes[0]
    before = int(s - last[0])
    if seen.equals(band(s, t, before - 1, 0)):
        return Seen(causal=True, window=before)
    own = torch.arange(s)
    inside = torch.nonzero(seen.changes[:, 0])
    chunk = int(inside[0]) if len(inside) else 0
    if chunk and s % chunk == 0 and seen.equals(Runs.normalized(torch.stack((own // chunk * chunk, own + 1), 1), t)):
        return Seen(causal=True, window=0, chunk=chunk)
    after = int(first[1]) if len(first) > 1 and first[0] == 0 else 0
    if after and seen.equals(band(s, t, after - 1, after - 1)):
        return Seen(causal=False, window=after)
    return None


@dataclass(slots=True)
class Constants:
    """Evaluates the values that depend on no parameter, buffer or input, as tensors or structured matrices."""

    made: Mapping[str, Op]
    whole: int = _WHOLE
    values: dict[str, Tensor | Matrix | None] = field(default_factory=dict)

    def seen(self, name: str) -> Runs | None:
        """The positions that a constant mask shows; None if the mask is not constant or adds other numbers than 0 and
        -inf.
        """
        value = self.value(name)
        if isinstance(value, Tensor):
            value = as_matrix(value, *value.shape[-2:]) if value.dim() > 1 else None
        if not isinstance(value, Two):
            return None
        read = [_is_read(x) for x in (value.no, value.yes)]
        if None in read:
            return None
        open = Runs(torch.zeros(value.where.rows, 1, dtype=torch.int64), value.where.columns)
        if read[0] == read[1]:
            return open if read[0] else ~open
        return value.where if read[1] else ~value.where

    def value(self, name: str) -> Tensor | Matrix | None:
        if name not in self.values:
            self.values[name] = self._value(name)
        return self.values[name]

    def number(self, name: str) -> float | None:
        """The number in a constant of one element; None for other values."""
        value = self.value(name)
        return float(value) if isinstance(value, Tensor) and value.numel() == 1 else None

    def _value(self, name: str) -> Tensor | Matrix | None:
        op = self.made.get(name)
        if op is None or op.name in RANDOM or len(op.results) != 1:
            return None
        operands = [] if op.name in _METADATA else [*op.refs()]
        if any(self.value(operand) is None for operand in operands):
            return None
        shape = op.result.type.shape
        count, longest = math.prod(shape), max(shape, default=1)
        plain = all(isinstance(self.value(operand), Tensor) for operand in operands)
        if plain and count <= (_MOST_ELEMENTS if count == longest else self.whole):
            return self._evaluated(op)
        if len(shape) > 1:
            with_form = self._matrix(op, *shape[-2:])
            if with_form is not None:
                return with_form
        return self._evaluated(op) if count <= _MOST_ELEMENTS else None

    def _evaluated(self, op: Op) -> Tensor | None:
        """The result as a tensor; None if it is not constant or too large."""
        shape, dtype = op.result.type.shape, operators.DTYPES[op.result.type.dtype]
        if op.name in _METADATA and op.args and isinstance(op.args[0], Ref):
            number = _METADATA[op.name](op)
            return None if number is None else torch.full(shape, number, dtype=dtype)
        if op.name == "constant":
            return torch.tensor(op.args[0], dtype=dtype).reshape(shape)
        args, attrs = operators.torch_arguments(op, {name: self._elements(name) for name in op.refs()})
        made = operators.resolve(op.name)(*args, **attrs)
        return made if isinstance(made, Tensor) else None

    def _elements(self, name: str) -> Tensor:
        found, type = self.value(name), self.made[name].result.type
        assert found is not None
        if isinstance(found, Tensor):
            return found
        return found.dense().to(operators.DTYPES[type.dtype]).expand(type.shape)

    def _matrix(self, op: Op, s: int, t: int) -> Matrix | None:
        """The result as a structured matrix; None if it only exists as a tensor."""
        dtype = operators.DTYPES[op.result.type.dtype]
        if op.name in _METADATA:
            number = _METADATA[op.name](op)
            return None if number is None else as_matrix(torch.full((1, 1), number, dtype=dtype), s, t)
        if op.name in ("expand", "reshape", "slice", "permute", *_SAME):
            first = op.args[0]
            assert isinstance(first, Ref)
            return self._view(op, first, s, t)
        lifted = [self._lifted(arg, s, t) for arg in op.args if not isinstance(arg, DTypeArg | tuple | None)]
        operands = [operand for operand in lifted if operand is not None]
        if not operands or len(operands) < len(lifted):
            return None
        match op.name, operands:
            case _, [x, y] if op.name in _COMPARISONS:
                return _compared(op.name, x, y, s)
            case _, [x] if op.name in _UNARY:
                return _unary(op.name, x, dtype)
            case (("tril" | "triu"), [Two() as x, *_]):
                k = next(iter(integers(argument(op, 1, "diagonal", 0))), 0)
                kept = band(s, t, None, k) if op.name == "tril" else band(s, t, -k, None)
                inside = Two(kept, torch.tensor(True), torch.tensor(False))
                return x.with_(inside, lambda v, c: v.masked_fill(~c, 0))
            case "masked_fill", [Two() as x, Two() as mask, fill] if (filled := _constant(fill)) is not None:
                return x.with_(mask, lambda v, m: v.masked_fill(m, filled.to(v.dtype)))
            case "where", [Two() as mask, Two() as x, Two() as y]:
                return _chosen(mask, x, y, dtype)
            case _, [x, y] if op.name in _POINTWISE:
                return _pointwise(op, x, y, s)
        return None

    def _lifted(self, arg: Arg, s: int, t: int) -> Matrix | None:
        if isinstance(arg, Ref):
            value = self.value(arg.name)
            if isinstance(value, Tensor):
                return as_matrix(value, s, t)
            shape = self.made[arg.name].result.type.shape
            return value if shape[-2:] == (s, t) else None
        return as_matrix(torch.tensor(arg).reshape(1, 1), s, t) if isinstance(arg, bool | int | float) else None

    def _view(self, op: Op, operand: Ref, s: int, t: int) -> Matrix | None:
        x, shape = self.value(operand.name), self.made[operand.name].result.type.shape
        if isinstance(x, Tensor):
            if op.name == "expand":
                return as_matrix(x, s, t)
            x = as_matrix(x, *shape[-2:]) if x.dim() > 1 else None
        if x is None:
            return None
        if op.name == "slice":
            dim, start, end, step = slice_bounds(op, shape)
            return _cut(x, dim - len(shape), slice(start, end, step)) if step == 1 or dim == len(shape) - 2 else None
        if op.name == "permute":
            return _permuted(x, integers(op.args[1]), len(shape))
        return x if shape[-2:] == (s, t) else None


def _is_read(x: Tensor) -> bool | None:
    """Whether a mask with this element shows the position; None for numbers that do neither."""
    if x.dtype == torch.bool:
        return bool(x)
    if not x.is_floating_point():
        return None
    return True if x == 0 else False if x <= torch.finfo(x.dtype).min else None


def _compared(name: str, x: Matrix, y: Matrix, s: int) -> Two | None:
    """A comparison of two matrices; None if its result has no known structure."""
    if isinstance(x, Two) and isinstance(y, Two):
        return x.with_(y, getattr(torch, name))
    a, b = outer(x, s), outer(y, s)
    runs = None if a is None or b is None else a.compared(name, b)
    return None if runs is None else Two(runs, torch.tensor(True), torch.tensor(False))


def _pointwise(op: Op, x: Matrix, y: Matrix, s: int) -> Matrix | None:
    """An elementwise operation on two matrices; None if its result has no known structure."""
    if isinstance(x, Two) and isinstance(y, Two):
        attrs = {key: operators.DTYPES[arg.name] if isinstance(arg, DTypeArg) else arg for key, arg in op.attrs}
        call, dtype = operators.resolve(op.name), operators.DTYPES[op.result.type.dtype]
        return x.with_(y, lambda a, b: call(a, b, **attrs).to(dtype))
    if op.attrs or op.name not in ("add", "sub", "rsub"):
        return None
    a, b = outer(x, s), outer(y, s)
    if a is None or b is None:
        return None
    return b.plus(a, -1) if op.name == "rsub" else a.plus(b, 1 if op.name == "add" else -1)


def _unary(name: str, x: Matrix, dtype: torch.dtype) -> Matrix | None:
    """An elementwise operation on a matrix; None if its result has no known structure."""
    if isinstance(x, Two):
        call = operators.resolve(name)
        return x.map(lambda value: (value if name == "to" else call(value)).to(dtype))
    if name == "abs":
        return Outer(x.rows, x.columns, absolute=True)
    if name == "neg" and not x.absolute:
        return Outer(-x.rows, -x.columns)
    most = int(x.rows.abs().max() + x.columns.abs().max())
    exact = most <= (1 / torch.finfo(dtype).eps if dtype.is_floating_point else torch.iinfo(dtype).max)
    return x if name == "to" and dtype != torch.bool and exact else None


def _constant(x: Matrix) -> Tensor | None:
    """The value of a matrix whose elements are all equal; None for other matrices."""
    return x.yes if isinstance(x, Two) and torch.equal(x.yes, x.no) else None


def _chosen(where: Two, yes: Two, no: Two, dtype: torch.dtype) -> Two | None:
    """torch.where of two matrices, at least one of which has equal elements; None for others."""
    one, other = _constant(yes), _constant(no)
    if other is not None:
        return where.with_(yes, lambda c, value: (value if c else other).to(dtype))
    if one is not None:
        return where.with_(no, lambda c, value: (one if c else value).to(dtype))
    return None


def _cut(x: Matrix, dim: int, part: slice) -> Matrix:
    if dim < -2:
        return x
    if isinstance(x, Outer):
        rows, columns = (x.rows[part], x.columns) if dim == -2 else (x.rows, x.columns[part])
        return replace(x, rows=rows, columns=columns.contiguous())
    if dim == -2:
        return replace(x, where=Runs.normalized(x.where.changes[part], x.where.columns))
    return replace(x, where=Runs.normalized((x.where.changes - part.start).clamp(min=0), part.stop - part.start))


def _permuted(x: Matrix, order: tuple[int, ...], rank: int) -> Matrix | None:
    last = tuple(dim % rank for dim in order[-2:])
    if last == (rank - 2, rank - 1):
        return x
    if last != (rank - 1, rank - 2):
        return None
    if isinstance(x, Outer):
        return replace(x, rows=x.columns, columns=x.rows)
    transposed = x.where.transposed()
    return None if transposed is None else replace(x, where=transposed)


def _fill(place: int) -> Callable[[Op], float | None]:
    def fill(op: Op) -> float | None:
        number = op.args[place] if len(op.args) > place else None
        return number if isinstance(number, int | float) else None

    return fill


# Operations that only read their operand's metadata, and the number with which they fill the result.
_METADATA: Mapping[str, Callable[[Op], float | None]] = {
    "full": _fill(1),
    "new_full": _fill(2),
    "full_like": _fill(1),
    **dict.fromkeys(("zeros", "new_zeros", "zeros_like"), lambda op: 0),
    **dict.fromkeys(("ones", "new_ones", "ones_like"), lambda op: 1),
}
