"""Kernels over rows: sums along rows and down columns, with elementwise operations in between.

A program handles ROWS rows at a time. If it sums along rows, it holds them whole, in one block of COLUMNS elements;
otherwise the columns are distributed over programs, too. For a sum down the columns, each program sums its rows, and
PyTorch sums over programs: in the same order on every GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import sympy

from partc.codegen.kernels.indexing import ZERO, Index, Ranges
from partc.codegen.kernels.kernel import (
    TORCH,
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
from partc.codegen.kernels.statements import TRITON, Found, Load, Reduce, Statement, computed_in, contiguous
from partc.ir.layout import Sizes
from partc.ir.program import DType, Op, TensorType
from partc.rules.kernels import REDUCTIONS
from partc.rules.rule import integers

TILE = 4096  # elements that a program holds at a time, unless a row is longer
SUMMED = 2048  # the same for programs that sum down columns and accumulate a whole tile
PROGRAMS = 528  # programs that sum down columns: four for each multiprocessor of an H100
NARROW = 128  # columns per program that only sums down many rows
WIDEST = 1024  # columns per program that sums neither way
MOST_ACROSS = 65_535  # the most programs along the second dimension of a CUDA grid
_REDUCED = {  # reductions along rows: operation -> Triton function and neutral element
    "sum": ("tl.sum({}, axis=1, keep_dims=True)", "0.0"),
    "amax": ("functions.largest({})", 'float("-inf")'),
    "amin": ("-functions.largest(-({}))", 'float("inf")'),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """The distribution of rows and columns over programs: the size of a tile, tiles per program, and programs."""

    rows: int
    columns: int
    high: int
    wide: int
    programs: int
    steps: int
    across: int

    @property
    def cuts_rows(self) -> bool:
        """Whether the last tile has rows that do not exist."""
        return self.steps > 1 or self.high * self.programs != self.rows

    @property
    def cuts_columns(self) -> bool:
        return self.wide * self.across != self.columns

    @property
    def reach(self) -> int:
        """The number of elements in all tiles, masked ones included, because positions are computed before masking."""
        most = 2 * self.high * self.programs if self.steps > 1 else 0  # rows in one step of the largest candidate
        return (max(self.rows, self.high * self.programs) + most) * self.wide * self.across

    @property
    def parts(self) -> int:
        """The number of elements in a sum's parts, for the candidate with the most programs."""
        return 2 * self.programs * self.columns

    @property
    def warps(self) -> int:
        return max(4, min(16, self.high * self.wide // 512))


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSum:
    """A sum down all rows: `parts` are the sums of all programs, `total` is the variable of a program's sum.

    Sums of one type share the tensor of parts, so that one launch adds them up; `row` is the index of this sum.
    """

    result: Result
    parts: str
    row: int
    total: str
    dtype: str
    shaped: bool  # the result is not one-dimensional

    @property
    def kind(self) -> tuple[str, str]:
        return self.dtype, self.result.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialSums:
    """The partial sums of the programs, for all sums of one type."""

    name: str
    sums: tuple[ColumnSum, ...]

    @property
    def dtype(self) -> str:
        return self.sums[0].dtype

    @property
    def rows(self) -> int:
        return len(self.sums)

    @property
    def cast(self) -> str:
        """The cast to the type of the results."""
        own, result = self.sums[0].kind
        return f".to(torch.{result})" if own != result else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows(Kernel):
    """A kernel over rows. `lines` run for each tile; `before` runs once, for all tiles."""

    tiling: Tiling
    long: bool  # positions need 64 bits
    before: tuple[str, ...]
    sums: tuple[ColumnSum, ...]

    template = "rows"

    @property
    def configuration(self) -> Configuration:
        loop = {"PROGRAMS": self.tiling.programs, "STAGES": 1} if self.tiling.steps > 1 else {}
        return {"ROWS": self.tiling.high, "COLUMNS": self.tiling.wide, **loop, "num_warps": self.tiling.warps}

    @property
    def candidates(self) -> list[Configuration]:
        """Configurations for tuning: numbers of warps with 16 to 32 elements per thread, or only 16 if programs
        distribute columns and keep sums; with more, derivatives spill.

        If programs process several tiles in sequence: also smaller and larger tiles, half and twice as many programs,
        and software pipelining.
        """
        elements = 16 if self.tiling.steps > 1 and self.tiling.across > 1 else 32
        least, most = self.tiling.high * self.tiling.wide // (32 * elements), max(8, self.tiling.warps)
        found = [each for each in super(Rows, self).candidates if least <= each["num_warps"] <= most]
        if self.tiling.steps > 1:
            own, programs = self.configuration, self.tiling.programs
            found += [{**own, "PROGRAMS": each} for each in (programs // 2, 2 * programs) if each]
            found += [{**own, "STAGES": 2}]
            if self.tiling.high > 1:
                small = {**own, "ROWS": self.tiling.high // 2, "num_warps": max(4, self.tiling.warps // 2)}
                large = {**own, "ROWS": 2 * self.tiling.high, "num_warps": 2 * self.tiling.warps}
                found += [small, {**small, "PROGRAMS": 2 * programs}, {**small, "STAGES": 2}]
                found += [{**small, "PROGRAMS": 2 * programs, "STAGES": 2}, large, {**large, "STAGES": 2}]
        return found

    @property
    def programs(self) -> str:
        """The number of programs, as the launcher computes it."""
        return 'CONFIGURATION["PROGRAMS"]' if self.tiling.steps > 1 else str(self.tiling.programs)

    @property
    def written(self) -> list[Result]:
        """The results that the kernel itself writes."""
        summed = {total.result.name for total in self.sums}
        return [result for result in self.results if result.name not in summed]

    @property
    def parameters(self) -> list[str]:
        made = [*(f"{result.name}_ptr" for result in self.written), *(f"{part.name}_ptr" for part in self.parts)]
        loop = ("PROGRAMS: tl.constexpr", "STAGES: tl.constexpr") if self.tiling.steps > 1 else ()
        return [*self.read, *made, "ROWS: tl.constexpr", "COLUMNS: tl.constexpr", *loop]

    @property
    def parts(self) -> list[PartialSums]:
        """The partial sums that remain to be added over programs."""
        names = dict.fromkeys(total.parts for total in self.sums)
        return [PartialSums(name=name, sums=tuple(each for each in self.sums if each.parts == name)) for name in names]

    def summed(self, total: ColumnSum) -> str:
        """The expression of a program's sum."""
        return added_rows(total.total) if self.tiling.steps > 1 else total.total

    def place(self, total: ColumnSum) -> str:
        """The row of the parts that a program writes."""
        programs = "PROGRAMS" if self.tiling.steps > 1 else str(self.tiling.programs)
        return f"({total.row} * {programs} + program)" if total.row else "program"

    @property
    def added(self) -> list[str]:
        """The statements that add the shared parts of several sums."""
        shared = (parts for parts in self.parts if parts.rows > 1)
        return [
            f"{', '.join(total.result.name for total in parts.sums)} = {parts.name}.sum(1){parts.cast}"
            for parts in shared
        ]

    @property
    def returned(self) -> list[str]:
        """The return values in the order of the results, with sums over programs."""
        found = {total.result.name: self._total(total, parts) for parts in self.parts for total in parts.sums}
        return [found.get(result.name, result.name) for result in self.results]

    @property
    def unsummed(self) -> list[str]:
        """The return values without the sums over programs: other results, then partial sums [programs, columns] or
        [sums, programs, columns].
        """
        return [*(result.name for result in self.written), *(parts.name for parts in self.parts)]

    @staticmethod
    def _total(total: ColumnSum, parts: PartialSums) -> str:
        shape = f".reshape({total.result.shape})" if total.shaped else ""
        return f"{total.result.name}{shape}" if parts.rows > 1 else f"{parts.name}.sum(0){shape}{parts.cast}"


def tiling(rows: int, columns: int, *, whole: bool, summing: bool) -> Tiling:
    """The tiling: tiles of up to TILE or SUMMED elements, with whole rows if the kernel sums along them."""
    tile = SUMMED if summing else TILE
    few = max(NARROW, tile // _power(rows)) if summing else WIDEST
    few = max(few, _power(-(-columns // MOST_ACROSS)))
    wide = _power(columns) if whole else min(_power(columns), few)
    high = max(1, min(_power(rows), tile // wide))
    across = -(-columns // wide)
    tiles = -(-rows // high)
    programs = min(tiles, max(1, PROGRAMS // across)) if summing else tiles
    return Tiling(
        rows=rows, columns=columns, high=high, wide=wide, programs=programs, steps=-(-tiles // programs), across=across
    )


@dataclass(frozen=True, slots=True)
class _Reductions:
    """The reductions of a fused operation, and the shape of its rows."""

    shape: tuple[int, ...]
    first: int
    down: Mapping[str, str]  # result that sums down all rows -> its operand
    tiling: Tiling

    @classmethod
    def of(cls, op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> _Reductions:
        inner = [step for step in op.body if step.name in REDUCTIONS]
        losses = [step for step in op.body if step.name == "cross_entropy_backward"]
        down = {step.result.name: next(step.refs()) for step in inner if 0 in integers(step.args[1])}
        known = {**types, **{value.name: value.type for step in op.body for value in step.results}}
        first = losses[0].result.name if losses else next(inner[0].refs())
        shape = known[first].layout.local_shape(sizes)
        number = len(shape) - int(str(dict(op.attrs)["along"]))
        tiles = tiling(
            math.prod(shape[:number]),
            math.prod(shape[number:]),
            whole=len(down) < len(inner),
            summing=any(value.name in down for value in op.results),
        )
        return cls(shape, number, down, tiles)


def launch_workspace(op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> list[tuple[tuple[int, ...], DType]]:
    """The shapes and types of a launch's memory besides its results: partial sums, and sums before a cast."""
    found = _Reductions.of(op, types, sizes)
    whole, columns = (found.tiling.programs, found.tiling.columns), (found.tiling.columns,)
    dtypes = [value.type.dtype for value in op.results if value.name in found.down]
    passing: list[tuple[tuple[int, ...], DType]] = [(whole, computed_in(dtype)) for dtype in dtypes]
    return [*passing, *((columns, computed_in(dtype)) for dtype in dtypes if computed_in(dtype) != dtype)]


def unsummed_shapes(
    op: Op, types: Mapping[str, TensorType], sizes: Sizes
) -> dict[tuple[DType, DType], tuple[tuple[int, ...], list[str]]]:
    """For each (type of the sums, type of the results): the shape of the partial sums, and their results.

    The shape is [sums, programs, columns]; a single sum lacks the first dimension.
    """
    found = _Reductions.of(op, types, sizes)
    together: dict[tuple[DType, DType], list[str]] = {}
    for value in op.results:
        if value.name in found.down:
            together.setdefault((computed_in(value.type.dtype), value.type.dtype), []).append(value.name)
    place = found.tiling.programs, found.tiling.columns
    return {key: ((len(names), *place)[len(names) < 2 :], names) for key, names in together.items()}


# The kernel's own variables and constants.
_VARIABLES = (
    "row", "column", "in_rows", "in_columns", "inside", "program", "step", "ROWS", "COLUMNS", "PROGRAMS", "STAGES",
)  # fmt: skip


def rows(op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> Rows:
    """The kernel of a fused operation with reductions."""
    draft = Draft.of(op, types, sizes)
    sums_of = _Reductions.of(op, types, sizes)
    shape, first, down, tiles = sums_of.shape, sums_of.first, sums_of.down, sums_of.tiling
    each = (variables(shape[:first], "r"), variables(shape[first:], "c"))
    index: Index = tuple(ZERO if loop.size == 1 else loop.symbol for loops in each for loop in loops)
    every = {loop.symbol: loop.size for loops in each for loop in loops}
    loops = [f"{name}_{number}" for name in ("row", "column") for number in range(len(shape))]
    lowering = draft.lowering([*_VARIABLES, *loops], every, columns=index[first:])
    statistic: Index = (*index[:first], *(ZERO for _ in index[first:]))
    shapes = {name: type.layout.local_shape(sizes) for name, type in draft.types.items()}
    values = [*draft.stored_values()]
    statistics = _per_row_shape(shape, first)
    per_row = {value.name for value in values if value.name not in down and shapes[value.name] == statistics}
    made = [
        lowering.value(down.get(value.name, value.name), statistic if value.name in per_row else index)
        for value in values
    ]
    statements, few, over = collapsed_rows(lowering.statements, each, lowering.over)
    row, column = (sympy.Symbol(name, integer=True, nonnegative=True) for name in ("row", "column"))
    ranges = {loop.symbol: loop.size for loops in few for loop in loops}
    ranges |= {row: tiles.rows, column: tiles.columns} | lowering.beyond
    text = _Text(tiles, ranges, over, frozenset((row, *(loop.symbol for loop in few[0]))))
    before, body = [*row_loops(few[1], statements, "column")], [*row_loops(few[0], statements, "row")]
    for statement in statements:
        fixed = tiles.steps > 1 and not text.differs(statement.target, 0)
        if isinstance(statement, Reduce):
            written = text.reduced(statement)
        else:
            written = statement_lines(statement, text.ranges, text.mask(statement), lowering.names)
        (before if fixed else body).extend(written)
    sums: list[ColumnSum] = []
    for value, found in zip(values, made, strict=True):
        if value.name in down:
            total = lowering.names.fresh(f"{value.result.name}_total")
            sums.append(_column_sum(value, total, sums, draft))
            body.append(text.down(total, found, computed_in(value.dtype)))
        else:
            body.append(text.store(value, found, each_row=value.name in per_row))
    reach = tiles.reach * max(value.count for value in values)
    return Rows(
        **draft.common_fields(),  # type: ignore[arg-type]
        tiling=tiles,
        long=is_long(max(reach, len(sums) * tiles.parts), statements, ranges),
        before=tuple(before),
        lines=tuple(body),
        sums=tuple(sums),
    )


def _column_sum(value: StoredValue, total: str, others: Sequence[ColumnSum], draft: Draft) -> ColumnSum:
    """A sum down the columns; sums of equal element types share the tensor of their parts."""
    dtype = TORCH[computed_in(value.dtype)]
    alike = [other for other in others if other.kind == (dtype, value.result.dtype)]
    return ColumnSum(
        result=value.result,
        parts=alike[0].parts if alike else draft.outside.fresh(f"{value.result.name}_parts"),
        row=len(alike),
        total=total,
        dtype=dtype,
        shaped=len(value.result.shape) != 1,
    )


@dataclass(frozen=True, slots=True)
class _Text:
    """Writes lines, with masks for partial tiles and the dimensions over which variables vary."""

    tiling: Tiling
    ranges: Ranges
    over: Mapping[str, frozenset[int]]  # variable -> {0} if it varies over rows, {1} over columns
    row_symbols: frozenset[sympy.Symbol]

    def differs(self, variable: str, way: int) -> bool:
        return way in self.over.get(variable, ())

    def mask(self, statement: Statement) -> str:
        """The mask of a load."""
        if not isinstance(statement, Load) or statement.anywhere:
            return ""
        symbols = set().union(*(expr.free_symbols for expr in expressions(statement))) & set(self.ranges)
        by_row = self.tiling.cuts_rows and bool(symbols & self.row_symbols)
        by_column = self.tiling.cuts_columns and bool(symbols - self.row_symbols)
        return _masked(by_row, by_column)

    def reduced(self, statement: Reduce) -> Iterator[str]:
        """A reduction along rows, in which masked elements are neutral."""
        found = statement.source
        made, nothing = _REDUCED[statement.how]
        text = found.text
        if self.tiling.cuts_columns:
            text = f"tl.where(in_columns, {text}, {nothing})"
        elif self.tiling.wide > 1 and not self.differs(found.text, 1):
            text = self._spread(found)
        yield f"{statement.target} = {made.format(text)}"

    def down(self, total: str, found: Found, dtype: DType) -> str:
        """A sum down the rows of a tile. Several tiles are first summed by element, and the rows of that sum at the
        end.
        """
        text = found.text
        if self.tiling.cuts_rows:
            text = f"tl.where(in_rows, {text}, 0.0)"
        elif self.tiling.high > 1 and not self.differs(found.text, 0):
            text = self._spread(found)
        return f"{total} += {text}" if self.tiling.steps > 1 else f"{total} = {added_rows(text)}"

    def store(self, value: StoredValue, found: Found, *, each_row: bool) -> str:
        """A store of one element for each of the tile, or one for each row."""
        mask = _masked(self.tiling.cuts_rows, self.tiling.cuts_columns and not each_row)
        first = f" + {value.start}" if value.start else ""
        place = "row" if each_row else f"row * {value.count * self.tiling.columns} + column{first}"
        masked = f", mask={mask}" if mask else ""
        return f"tl.store({value.result.name}_ptr + {place}, {stored(found, value.dtype)}{masked})"

    def _spread(self, found: Found) -> str:
        return f"{found.text} + tl.zeros([ROWS, COLUMNS], {TRITON[found.dtype]})"


def added_rows(tile: str) -> str:
    """The sum down the rows of a tile, [1, COLUMNS]."""
    return f"tl.sum({tile}, axis=0, keep_dims=True)"


def _masked(by_row: bool, by_column: bool) -> str:
    return {(True, True): "inside", (True, False): "in_rows", (False, True): "in_columns"}.get((by_row, by_column), "")


def _per_row_shape(shape: tuple[int, ...], first: int) -> tuple[int, ...]:
    """The shape with one number for each row."""
    return (*shape[:first], *(1 for _ in shape[first:]))


def _power(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()


Loops = tuple[tuple[Variable, ...], tuple[Variable, ...]]  # (loops over rows, loops over columns)


def collapsed_rows(
    statements: Sequence[Statement], each: Loops, over: Mapping[str, frozenset[sympy.Symbol]]
) -> tuple[list[Statement], Loops, dict[str, frozenset[int]]]:
    """The statements with as few loops as possible, the loops, and the directions in which each variable varies."""
    found = list(statements)
    few: list[tuple[Variable, ...]] = []
    for name, loops in zip(("row", "column"), each, strict=True):
        real = [loop for loop in loops if loop.size > 1]
        steps = contiguous([loop.size for loop in real])
        place = sum((loop.symbol * step for loop, step in zip(real, steps, strict=True)), ZERO)
        kept, instead = collapsed(real, [*(expr for item in found for expr in expressions(item)), place])
        names = [name] if len(kept) == 1 else [f"{name}_{number}" for number in range(len(kept))]
        new = tuple(
            Variable(sympy.Symbol(text, integer=True, nonnegative=True), loop.size)
            for text, loop in zip(names, kept, strict=True)
        )
        symbols = {old.symbol: now.symbol for old, now in zip(kept, new, strict=True)}
        whole = sympy.Symbol(name, integer=True, nonnegative=True)
        found = [
            folded(with_symbols_replaced(with_symbols_replaced(item, instead), symbols), new, whole) for item in found
        ]
        few.append(new)
    way = {loop.symbol: number for number, loops in enumerate(each) for loop in loops}
    ways = {name: frozenset(way[symbol] for symbol in symbols if symbol in way) for name, symbols in over.items()}
    return found, (few[0], few[1]), ways


def row_loops(loops: Sequence[Variable], statements: Sequence[Statement], every: str) -> Iterator[str]:
    """Lines that compute several loop variables from the number of the row or column."""
    read = set().union(*(expr.free_symbols for statement in statements for expr in expressions(statement)))
    inside = math.prod(loop.size for loop in loops)
    for number, loop in enumerate(loops if len(loops) > 1 else ()):
        inside //= loop.size
        text = every if inside == 1 else f"{every} // {inside}"
        text = text if number == 0 else f"{text} % {loop.size}"
        if loop.symbol in read:
            yield f"{loop.symbol} = {text}"
