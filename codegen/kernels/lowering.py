"""The computation of one kernel as statements, derived from the elements of its results back to memory.

Every value is requested at an index. An elementwise operation requests its operands at the same index, a view requests
its operand at another index, and the kernel's inputs are loaded. So views move no data, and a value that is read at two
indices is computed at both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import sympy

from partc.codegen.kernels.indexing import ZERO, Index, broadcast, through, unflattened
from partc.codegen.kernels.statements import (
    TRITON,
    Evaluate,
    Found,
    Guard,
    Guards,
    KernelTensor,
    Load,
    Reduce,
    Statement,
    cast,
    computed_in,
    constant,
)
from partc.codegen.names import Names, emitted_name
from partc.errors import InternalError
from partc.ir.layout import Sizes
from partc.ir.program import FLOATING, Arg, DType, Op, Ref, TensorType
from partc.rules import kernels
from partc.rules.rule import argument

# Statistics of a streamed row: the variables of the template.
STREAMS: Mapping[str, str] = {"shard_max": "largest", "sum_exp": "sums", "pick": "picked", "smooth_sum": "logits_sum"}


@dataclass(slots=True, kw_only=True)
class Lowering:
    """The statements of one kernel, in order; each value once for every index at which it is requested."""

    body: tuple[Op, ...]
    arguments: Mapping[str, KernelTensor]
    types: Mapping[str, TensorType]
    sizes: Sizes
    names: Names
    ranges: Mapping[sympy.Symbol, int]
    columns: Index = ()  # the index along the reduced dimensions
    rounding: bool = False  # round after every operation, as PyTorch does; for tests of bitwise equality
    statements: list[Statement] = field(default_factory=list)
    over: dict[str, frozenset[sympy.Symbol]] = field(default_factory=dict)  # variable -> the loops over which it varies
    # Symbol of a position in a table -> the variable of its index.
    looked_up: dict[sympy.Symbol, Found] = field(default_factory=dict)
    # The positions in `looked_up` that are within the table even where the kernel's mask is False.
    everywhere: set[sympy.Symbol] = field(default_factory=set)
    beyond: dict[sympy.Symbol, int] = field(
        default_factory=dict
    )  # ranges of symbols other than loops: looked-up positions, and ranks
    _known: dict[tuple[str, Index, Guards], Found] = field(default_factory=dict)
    _makers: dict[str, tuple[Op, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for op in self.body:
            self._makers.update((value.name, (op, number)) for number, value in enumerate(op.results))

    def shape(self, name: str) -> tuple[int, ...]:
        return self.types[name].layout.local_shape(self.sizes)

    def value(self, name: str, index: Index, guards: Guards = ()) -> Found:
        """The variable that holds this element of a value; it is only valid where all guards hold."""
        for known in ((), guards):
            if (name, index, known) in self._known:
                return self._known[name, index, known]
        found = self._loaded(name, index, guards) if name in self.arguments else self._lowered(name, index, guards)
        self._known[name, index, guards] = found
        self.over[found.text] = found.over
        return found

    def _loaded(self, name: str, index: Index, guards: Guards) -> Found:
        argument = self.arguments[name]
        place = sum((part * stride for part, stride in zip(index, argument.strides, strict=True)), ZERO)
        target = self.names.fresh(argument.name)
        self.statements.append(
            Load(
                target=target,
                source=argument.name,
                place=sympy.expand(place),
                guards=guards,
                dtype=argument.dtype,
                anywhere=bool(self.everywhere) and place.free_symbols & set(self.ranges) <= self.everywhere,
            )
        )
        over = place.free_symbols.union(*(guard.index.free_symbols for guard in guards)) & set(self.ranges)
        over = over.union(*(found.over for symbol, found in self.looked_up.items() if symbol in over))
        return Found(target, computed_in(argument.dtype), over=frozenset(over))

    def _lowered(self, name: str, index: Index, guards: Guards) -> Found:
        op, number = self._makers[name]
        match kernels.kind(op):
            case _ if op.name == "index_select":
                return self._gathered(op, index, guards)
            case "constant" if op.name == "drawn":
                return self._drawn(op, index)
            case "constant":
                return constant(kernels.fill(op), computed_in(op.result.type.dtype))
            case "view" if op.name == "cat":
                return self._joined(op, index, guards)
            case "view" if op.name == "slice_backward":
                return self._padded(op, index, guards)
            case "view":
                source = next(op.refs())
                inner = through(op, index, self.shape(source), self.shape(name), number, self.ranges)
                return self.value(source, inner, guards)
            case "pointwise" if op.name == "mask_classes":
                return self._masked(op, index, guards)
            case "pointwise":
                return self._computed(op, index, guards)
            case "reduction" if not self.columns:
                return self._added(op, index, guards)
            case "reduction":
                return self._reduced(op, index)
            case "streamed":  # computed by the template
                over = frozenset().union(*(part.free_symbols for part in index))
                return Found(STREAMS[op.name], computed_in(op.result.type.dtype), over=over)
            case "composite" if op.name == "cross_entropy_backward":
                return self._logits_gradient(op, index, guards)
        raise InternalError(f"no kernel computes {op.name}")

    def _computed(self, op: Op, index: Index, guards: Guards) -> Found:
        text = kernels.triton_expression(op)
        assert text is not None
        result = computed_in(op.result.type.dtype)
        table, labels = kernels.LOOKED_UP.get(op.name, (-1, 0))
        operands: list[Found | None] = []
        for number, arg in enumerate(kernels.arguments(op)):
            looked_up = number == table and isinstance(arg, Ref)
            operands.append(self._looked_up(arg, operands[labels]) if looked_up else self._operand(arg, index, guards))
        wanted = _computes(op, operands)
        written = [
            cast(found, _read_as(op, place, found, wanted)) if found else "" for place, found in enumerate(operands)
        ]
        over = frozenset[sympy.Symbol]().union(*(found.over for found in operands if found is not None))
        if text == "{0}" and not self.rounding:  # a cast
            return Found(written[0], result, over=over)
        return self._rounded(op, text.format(*written), over)

    def _drawn(self, op: Op, index: Index) -> Found:
        """Whether a dropout keeps an element, by its position in the whole tensor relative to this rank's first
        element.
        """
        place: sympy.Expr = ZERO
        for part, dim in zip(index, op.result.type.layout.dims, strict=True):
            here = [sub.size // math.prod(self.sizes[axis] for axis in sub.axes) for sub in dim]
            for step, sub in zip(unflattened(part, here, self.ranges), dim, strict=True):
                place = place * sub.size + step
        p = op.args[0]
        assert isinstance(p, float)
        counter = next(name for name, other in kernels.launch_scalars(self.body).items() if other is op)
        place = sympy.expand(place)
        moving = "{0}" if place.free_symbols else "tl.full([], {0}, tl.int64)"
        below = math.ceil((1 - p) * (1 << 53))
        text = f"functions.kept({counter}_ptr, {moving}, {below})"
        over = frozenset(place.free_symbols & set(self.ranges))
        return Found(self._statement(op.result.name, text, places=(place,)), "bool", over=over)

    def _logits_gradient(self, op: Op, index: Index, guards: Guards) -> Found:
        """The gradient of a cross-entropy, from each row's statistics and whether the column is the label."""
        _, logits, _, _, weight, ignore, smoothing, *total = op.args
        assert isinstance(logits, Ref)
        dtype = computed_in(op.result.type.dtype)
        grad, x, labels, lse = (
            self.value(name, index if name == logits.name else index[:-1], guards) for name in list(op.refs())[:4]
        )
        classes = self.shape(logits.name)[-1]
        first = f" - {kernels.rank_axis(op)}_rank * {classes}" if kernels.rank_axis(op) else ""
        hit = f"{labels.text} == {kernels.literal(ignore)}, {labels.text}{first} == {{0}}"
        own = cast(self._looked_up(weight, labels), dtype) if weight is not None else ""
        outer = f"{cast(grad, dtype)} * {own}" if own and not smoothing else cast(grad, dtype)
        given = ", ".join((outer, *(cast(found, dtype) for found in (x, lse))))
        text = f"functions.cross_entropy_backward({given}, {hit})"
        if smoothing:
            whole = self.types[logits.name].shape[-1]
            more = [cast(constant(number, dtype), dtype) for number in (smoothing, whole)]
            name = "smooth_cross_entropy_backward"
            if own:
                sums, here = self.value(next(_names(total)), ()), self.class_weight(op, weight, classes, index[-1])
                name, more = f"weighted_{name}", [own, *more, cast(sums, dtype), cast(here, dtype)]
            text = f"functions.{name}({given}, {hit}, {', '.join(more)})"
        target = self._statement(op.result.name, text, places=index[-1:])
        over = frozenset().union(index[-1].free_symbols, *(found.over for found in (grad, x, labels, lse)))
        return Found(target, dtype, over=over)

    def class_weight(self, op: Op, weight: Arg, classes: int, column: sympy.Expr) -> Found:
        """The weight of one of this rank's classes, from the weights of all classes."""
        assert isinstance(weight, Ref)
        return self.value(weight.name, (self._class(op, classes, column),))

    def _class(self, op: Op, classes: int, column: sympy.Expr) -> sympy.Expr:
        """The global number of one of this rank's classes."""
        axis = kernels.rank_axis(op)
        if not axis:
            return column
        rank = sympy.Symbol(f"{axis}_rank", integer=True, nonnegative=True)
        self._range(rank, self.sizes[axis])
        return column + rank * classes

    def _masked(self, op: Op, index: Index, guards: Guards) -> Found:
        """A logit, or minus infinity for padded classes."""
        source, classes = op.args
        assert isinstance(source, Ref)
        logit = self.value(source.name, index, guards)
        place = self._class(op, self.shape(source.name)[-1], index[-1])
        text = f'tl.where({{0}} < {classes}, {logit.text}, float("-inf"))'
        over = logit.over | (place.free_symbols & set(self.ranges))
        return Found(self._statement(op.result.name, text, places=(place,)), logit.dtype, over=over)

    def _reduced(self, op: Op, index: Index) -> Found:
        """A reduction along the last dimensions, for the rows of the index."""
        name = next(op.refs())
        first = len(self.shape(name)) - len(self.columns)
        source = self.value(name, (*index[:first], *self.columns))
        target = self.names.fresh(emitted_name(op.result.name))
        self.statements.append(Reduce(target=target, source=source, how=op.name))
        along = frozenset().union(*(part.free_symbols for part in self.columns))
        return Found(target, source.dtype, over=source.over - along)

    def _gathered(self, op: Op, index: Index, guards: Guards) -> Found:
        """An element of the row whose number another operand has. All numbers are those of rows."""
        source, dim, rows = op.args
        assert isinstance(source, Ref) and isinstance(rows, Ref) and dim == 0
        row = self.value(rows.name, index[:1], guards)
        place = sympy.Symbol(row.text, integer=True, nonnegative=True)
        self.looked_up[place] = row
        if not row.over:  # one row for all elements
            self.everywhere.add(place)
        self._range(place, self.shape(source.name)[0])
        return self.value(source.name, (place, *index[1:]), guards)

    def _added(self, op: Op, index: Index, guards: Guards) -> Found:
        """A sum of a few elements."""
        (name,) = op.refs()
        shape, dims = self.shape(name), argument(op, 1, "dim")
        assert isinstance(dims, tuple) and isinstance(dims[0], int)
        dim = dims[0] % len(shape)
        after = index[dim + (1 if argument(op, 2, "keepdim", False) else 0) :]
        parts = [self.value(name, (*index[:dim], sympy.Integer(at), *after), guards) for at in range(shape[dim])]
        text = " + ".join(cast(part, computed_in(op.result.type.dtype)) for part in parts)
        return self._rounded(op, text, frozenset[sympy.Symbol]().union(*(part.over for part in parts)))

    def _rounded(self, op: Op, text: str, over: frozenset[sympy.Symbol]) -> Found:
        """The variable of an operation's result, rounded to the result's type if every operation rounds."""
        dtype = op.result.type.dtype
        result = computed_in(dtype)
        if self.rounding and dtype != result:
            text = f"({text}).to({TRITON[dtype]}).to({TRITON[result]})"
        return Found(self._statement(op.result.name, text), result, over=over)

    def _looked_up(self, table: Arg, labels: Found | None) -> Found:
        """A label's entry in a table; a label outside the classes reads the first entry."""
        assert isinstance(table, Ref) and labels is not None
        (size,) = self.shape(table.name)
        text = f"tl.where(({labels.text} >= 0) & ({labels.text} < {size}), {labels.text}, 0)"
        place = sympy.Symbol(self._statement(f"{table.name}_place", text), integer=True, nonnegative=True)
        self.looked_up[place] = labels
        self.everywhere.add(place)
        self._range(place, size)
        return self.value(table.name, (place if size > 1 else ZERO,))

    def _range(self, symbol: sympy.Symbol, size: int) -> None:
        self.beyond[symbol] = size
        self.ranges = {**self.ranges, symbol: size}

    def _operand(self, arg: Arg, index: Index, guards: Guards) -> Found | None:
        if isinstance(arg, Ref):
            return self.value(arg.name, broadcast(index, self.shape(arg.name)), guards)
        return constant(arg, "f32") if isinstance(arg, int | float) else None

    def _joined(self, op: Op, index: Index, guards: Guards) -> Found:
        """The element of a `cat`, from the operand that contains the index."""
        parts, dim = kernels.cat_operands(op)
        dim %= len(index)
        start, size = 0, self.shape(op.result.name)[dim]
        found: list[tuple[Guard, Found]] = []
        for part in parts:
            end = start + self.shape(part)[dim]
            guard = Guard(index[dim], start, end, size)
            inner = (*index[:dim], sympy.expand(index[dim] - start), *index[dim + 1 :])
            if end > start:
                found.append((guard, self.value(part, inner, (*guards, guard))))
            start = end
        dtype = computed_in(op.result.type.dtype)
        over = index[dim].free_symbols.union(*(value.over for _, value in found))
        text = cast(found[-1][1], dtype)
        for number, (_, value) in reversed(list(enumerate(found[:-1]))):
            text = f"tl.where({{{number}}}, {cast(value, dtype)}, {text})"
        target = self._statement(op.result.name, text, tuple(guard for guard, _ in found[:-1]))
        return Found(target, dtype, over=frozenset(over))

    def _padded(self, op: Op, index: Index, guards: Guards) -> Found:
        """The gradient of a slice's operand: zero outside the slice."""
        source = next(op.refs())
        dim, start = kernels.padded_slice(op)
        dim %= len(index)
        guard = Guard(index[dim], start, start + self.shape(source)[dim], self.shape(op.result.name)[dim])
        if guard.low == 0 and guard.high == guard.size:
            return self.value(source, index, guards)
        inner = (*index[:dim], sympy.expand(index[dim] - start), *index[dim + 1 :])
        value = self.value(source, inner, (*guards, guard))
        target = self._statement(op.result.name, f"tl.where({{0}}, {value.text}, 0.0)", (guard,))
        return Found(target, value.dtype, over=frozenset(value.over | index[dim].free_symbols))

    def _statement(self, name: str, text: str, guards: Guards = (), places: tuple[sympy.Expr, ...] = ()) -> str:
        target = self.names.fresh(emitted_name(name))
        self.statements.append(Evaluate(target=target, text=text, guards=guards, places=places))
        return target


def _names(args: Sequence[Arg]) -> Iterator[str]:
    return (arg.name for arg in args if isinstance(arg, Ref))


def _read_as(op: Op, place: int, found: Found, wanted: DType) -> DType:
    """The type in which an operand is requested if the operation computes in `wanted`."""
    if kernels.CONDITIONS.get(op.name) == place:
        return "bool"
    if place in kernels.LABELS.get(op.name, ()):
        return "i64" if found.number is not None else found.dtype
    return wanted


def _computes(op: Op, operands: Sequence[Found | None]) -> DType:
    """The type in which an operation computes: its result's; for comparisons, the widest type of the operands."""
    result = computed_in(op.result.type.dtype)
    if result != "bool" or op.name == "to" or op.name in kernels.LOGICAL:
        return result
    given = [found.dtype for found in operands if found is not None and found.number is None]
    numbers = [found.number for found in operands if found is not None and found.number is not None]
    if "f64" in given:
        return "f64"
    if any(dtype in FLOATING for dtype in given) or any(isinstance(number, float) for number in numbers):
        return "f32"
    return given[0] if len(set(given)) == 1 and given[0] != "bool" else "i64"
