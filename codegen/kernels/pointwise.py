"""Kernels that iterate over the elements of their results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import sympy

from partc.codegen.kernels.indexing import ZERO
from partc.codegen.kernels.kernel import (
    Configuration,
    Draft,
    Kernel,
    Result,
    StoredValue,
    expressions,
    is_long,
    statement_lines,
    stored,
)
from partc.codegen.kernels.spaces import Variable, collapsed, folded, variables, with_symbols_replaced
from partc.codegen.kernels.statements import Reduce, Statement, contiguous
from partc.ir.layout import Sizes
from partc.ir.mesh import TIME_AXIS
from partc.ir.program import RAGGED, Op, TensorType

BLOCK = 1024  # elements per program: 16 bytes for each of 4 x 32 threads
OTHERS = ((512, 4), (2048, 4), (2048, 8), (4096, 8))  # further candidates: (elements, warps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointwise(Kernel):
    """A kernel over `count` elements, or over all elements of the argument `rows` if its number depends on the data."""

    count: int
    long: bool  # positions need 64 bits
    rows: str
    parts: int  # the number of equal parts that the first result joins
    gathered: int  # the fewest rows of an argument from which rows are selected; 0 if there is none

    template = "pointwise"

    @property
    def below(self) -> int:
        return self.gathered or super(Pointwise, self).below

    @property
    def configuration(self) -> Configuration:
        return {"BLOCK": BLOCK, "num_warps": 4}

    @property
    def candidates(self) -> list[Configuration]:
        """Configurations for tuning; if the default block divides the elements, only sizes that do, too: they need no
        mask.
        """
        others = ({"BLOCK": block, "num_warps": warps} for block, warps in OTHERS)
        return [self.configuration, *(each for each in others if self.masked or self.count % each["BLOCK"] == 0)]

    @property
    def masked(self) -> bool:
        return bool(self.rows) or self.count % BLOCK != 0

    @property
    def end(self) -> str:
        """The number of elements, in the kernel."""
        return "count" if self.rows else str(self.count)

    @property
    def launched(self) -> str:
        """The number of elements, in the launcher."""
        parts = f" // {self.parts}" if self.parts > 1 else ""
        return f"{self.results[0].name}.numel(){parts}" if self.rows else str(self.count)

    @property
    def parameters(self) -> list[str]:
        counted = ["count"] if self.rows else []
        return [*self.read, *(f"{result.name}_ptr" for result in self.results), *counted, "BLOCK: tl.constexpr"]

    def memory(self, result: Result) -> str:
        if not self.rows or result.over:
            return super(Pointwise, self).memory(result)
        shape = ", ".join((f"{self.rows}.shape[0]", *map(str, result.shape[1:])))
        return f"{self.rows}.new_empty(({shape},), dtype=torch.{result.dtype})"


def pointwise(op: Op, types: Mapping[str, TensorType], sizes: Sizes, *, rounding: bool = False) -> Pointwise:
    """The kernel of a fused operation whose results all have one shape."""
    draft = Draft.of(op, types, sizes)
    values = [*draft.stored_values()]
    names = [_shaped(value.name, op) for value in values]
    shape = draft.types[names[0]].layout.local_shape(sizes)
    count = math.prod(shape)
    loops = variables(shape, "i")
    index = tuple(ZERO if loop.size == 1 else loop.symbol for loop in loops)
    own = ["index", "mask", "count", "BLOCK", *(f"x{number}" for number in range(len(shape)))]
    lowering = draft.lowering(own, {loop.symbol: loop.size for loop in loops}, rounding=rounding)
    made = [lowering.value(name, index) for name in names]
    statements, few = _collapsed(lowering.statements, [loop for loop in loops if loop.size > 1])
    whole = sympy.Symbol("index", integer=True, nonnegative=True)
    statements = [folded(statement, few, whole) for statement in statements]
    ranges = {loop.symbol: loop.size for loop in few} | {whole: count} | lowering.beyond
    rows, most = _counted(op, draft, count)
    mask = "mask" if rows or count % BLOCK else ""
    written = [*_loops(few, statements)]
    for statement in statements:
        assert not isinstance(statement, Reduce)
        written += statement_lines(statement, ranges, mask, lowering.names)
    for found, value in zip(made, values, strict=True):
        place = _place(value)
        written.append(
            f"tl.store({value.result.name}_ptr + {place}, {stored(found, value.dtype)}{', mask=mask' if mask else ''})"
        )
    most *= max(value.count for value in values)
    reach = most + max(BLOCK, *(block for block, _ in OTHERS))  # the last block is partly masked
    return Pointwise(
        **draft.common_fields(),  # type: ignore[arg-type]
        count=count,
        long=is_long(reach, statements, ranges),
        rows=rows,
        parts=values[0].count,
        gathered=min(_gathered(op, draft), default=0),
        lines=tuple(written),
    )


def _place(value: StoredValue) -> str:
    """The place of an element of a value in its result."""
    if value.count == 1:
        return "index"
    between = (value.count - 1) * value.run  # elements of the other parts between two runs
    parts = ["index", f"index // {value.run} * {between}", *([str(value.start)] if value.start else [])]
    return " + ".join(parts)


def _counted(op: Op, draft: Draft, count: int) -> tuple[str, int]:
    """The argument whose number of rows depends on the data, if any, and the most elements of a result: one rank may
    receive the rows of all ranks.
    """
    place = dict(op.attrs).get(RAGGED)
    if not isinstance(place, int):
        return "", count
    name, argument = list(draft.arguments.items())[place]
    axes = (axis for sub in draft.types[name].layout.dims[0] for axis in sub.axes if axis != TIME_AXIS)
    return argument.name, count * math.prod(draft.sizes[axis] for axis in axes)


def _gathered(op: Op, draft: Draft) -> Iterator[int]:
    """The numbers of rows of the arguments whose rows are selected."""
    for step in op.body:
        if step.name == "index_select":
            yield draft.types[next(step.refs())].layout.local_shape(draft.sizes)[0]


def _shaped(name: str, op: Op) -> str:
    """A result before its final reshapes, which keep the order of elements."""
    made = {step.result.name: step for step in op.body if step.name == "reshape"}
    while name in made and len(op.results) == 1:
        name = next(made[name].refs())
    return name


def _collapsed(
    statements: Sequence[Statement], loops: Sequence[Variable]
) -> tuple[list[Statement], tuple[Variable, ...]]:
    """The statements with as few loops as possible; a single loop's variable is the index itself."""
    place = sum(
        (loop.symbol * step for loop, step in zip(loops, contiguous([i.size for i in loops]), strict=True)), ZERO
    )
    few, instead = collapsed(loops, [*(expr for statement in statements for expr in expressions(statement)), place])
    names = ["index"] if len(few) == 1 else [f"x{number}" for number in range(len(few))]
    found = tuple(
        Variable(sympy.Symbol(name, integer=True, nonnegative=True), loop.size)
        for name, loop in zip(names, few, strict=True)
    )
    symbols = {old.symbol: new.symbol for old, new in zip(few, found, strict=True)}
    return [
        with_symbols_replaced(with_symbols_replaced(statement, instead), symbols) for statement in statements
    ], found


def _loops(loops: Sequence[Variable], statements: Sequence[Statement]) -> Iterator[str]:
    """The loop variables that some statement reads, computed from the index."""
    if len(loops) < 2:
        return
    read = set().union(*(expr.free_symbols for statement in statements for expr in expressions(statement)))
    inside = math.prod(loop.size for loop in loops)
    for number, loop in enumerate(loops):
        inside //= loop.size
        text = "index" if inside == 1 else f"index // {inside}"
        text = text if number == 0 else f"{text} % {loop.size}"
        if loop.symbol in read:
            yield f"{loop.symbol} = {text}"
