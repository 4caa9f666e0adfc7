"""The kernels of a package: what every fused operation of a program is written as, in Triton."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import sympy

from partc.codegen.collectives import readable_bytes
from partc.codegen.indexing import ZERO, largest
from partc.codegen.lowering import TRITON, Argument, Load, Lowering, Statement, computed_in, contiguous
from partc.codegen.names import Names
from partc.codegen.spaces import Variable, collapsed, condition, joined, settled, terms, variables
from partc.layout import Sizes
from partc.printer import print_operation
from partc.program import VIEWS, DType, Op, Program, TensorType

BLOCK = 1024  # elements of one program instance: 16 bytes for each of 4 x 32 threads
_WIDE = 2**31  # from here on, places take 64 bits
_LONG = 96  # characters of an expression that stands in one line
TORCH: Mapping[DType, str] = {
    "f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16", "i64": "int64", "i32": "int32",
    "i16": "int16", "i8": "int8", "u8": "uint8", "bool": "bool",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A tensor that the kernel makes; its dtype is torch's name for it."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """All that the template of a kernel lays out."""

    name: str
    operations: tuple[str, ...]
    moved: str
    apart: str
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    count: int
    wide: bool
    lines: tuple[str, ...]

    block = BLOCK

    @property
    def programs(self) -> int:
        return -(-self.count // BLOCK)

    @property
    def masked(self) -> bool:
        return self.count % BLOCK != 0

    @property
    def functions(self) -> bool:
        """Whether it is written with any of the functions that all kernels share."""
        return any("functions." in line for line in self.lines)

    @property
    def parameters(self) -> list[str]:
        """Of the kernel."""
        given = [name for item in self.arguments for name in (f"{item.name}_ptr", *map(str, _symbols(item).values()))]
        return [*given, *(f"{result.name}_ptr" for result in self.results)]

    @property
    def given(self) -> list[str]:
        """For the kernel's parameters, what its launch has."""
        found = []
        for item in self.arguments:
            found += [item.name, *(f"{item.name}.stride({dim})" for dim in _symbols(item))]
        return [*found, *(result.name for result in self.results)]

    @property
    def signature(self) -> str:
        return ", ".join(f"{argument.name}: Tensor" for argument in self.arguments)

    @property
    def returns(self) -> str:
        types = ["Tensor"] * len(self.results)
        return types[0] if len(types) == 1 else f"tuple[{', '.join(types)}]"


def kernels(program: Program) -> Iterator[Kernel]:
    """Every kernel once, by name; operations that are alike share one."""
    done: set[str] = set()
    for region in program.regions:
        for graph in region.graphs:
            types = {value.name: value.type for value in (*region.params, *graph.definitions().values())}
            for op in graph.ops:
                if op.body and kernel_name(op) not in done:
                    done.add(kernel_name(op))
                    yield kernel(op, types, program.sizes)


def kernel_name(op: Op) -> str:
    return str(dict(op.attrs)["kernel"])


def kernel(op: Op, types: Mapping[str, TensorType], sizes: Sizes, *, rounding: bool = False) -> Kernel:
    """One that goes through the elements of its results; `rounding` after every operation is for tests."""
    every = {name: types[name] for name in op.refs()}
    every.update((value.name, value.type) for step in op.body for value in step.results)
    outside = Names(("torch", "triton", "tl"))
    strided = dict(op.attrs).get("strided", ())
    arguments = {
        name: _argument(outside[name], every[name], sizes, isinstance(strided, tuple) and place in strided)
        for place, name in enumerate(op.refs())
    }
    results = tuple(
        Result(name=outside[value.name], shape=value.type.layout.local_shape(sizes), dtype=TORCH[value.type.dtype])
        for value in op.results
    )
    count = math.prod(results[0].shape)
    pointers = [f"{name}_ptr" for name in (*(item.name for item in arguments.values()), *(r.name for r in results))]
    given = [str(step) for item in arguments.values() for step in _symbols(item).values()]
    own = [f"x{number}" for number in range(len(results[0].shape))]
    names = Names(("tl", "functions", "index", "mask", "BLOCK", *pointers, *given, *own))
    loops = variables(results[0].shape, "i")
    index = tuple(ZERO if loop.size == 1 else loop.symbol for loop in loops)
    lowering = Lowering(
        body=op.body,
        arguments=arguments,
        types=every,
        sizes=sizes,
        names=names,
        ranges={loop.symbol: loop.size for loop in loops},
        rounding=rounding,
    )
    made = [lowering.value(value.name, index) for value in op.results]
    statements, few = _collapsed(lowering.statements, [loop for loop in loops if loop.size > 1])
    ranges = {loop.symbol: loop.size for loop in few}
    bounds = [largest(statement.place, ranges) for statement in statements if isinstance(statement, Load)]
    wide = max([count, *(bound for bound in bounds if bound is not None)]) >= _WIDE
    masked = count % BLOCK != 0
    lines = [*_loops(few, statements, strided=None in bounds)]
    for statement in statements:
        lines += _lines(statement, ranges, masked, names)
    for found, value, result in zip(made, op.results, results, strict=True):
        text = found.text if found.dtype == value.type.dtype else f"{found.text}.to({TRITON[value.type.dtype]})"
        lines.append(f"tl.store({result.name}_ptr + index, {text}{', mask=mask' if masked else ''})")
    return Kernel(
        name=kernel_name(op),
        operations=tuple(map(_told, op.body)),
        moved=readable_bytes(_bytes(op, every, sizes)),
        apart=readable_bytes(sum(_bytes(step, every, sizes) for step in op.body)),
        arguments=tuple(arguments.values()),
        results=results,
        count=count,
        wide=wide or (None in bounds and len(few) == 1),
        lines=tuple(lines),
    )


def _argument(name: str, type: TensorType, sizes: Sizes, strided: bool) -> Argument:
    shape = type.layout.local_shape(sizes)
    strides = contiguous(shape)
    if strided:
        strides = tuple(
            sympy.Symbol(f"{name}_stride_{dim}", integer=True) if size > 1 else ZERO for dim, size in enumerate(shape)
        )
    return Argument(name=name, shape=shape, dtype=type.dtype, strides=strides)


def _symbols(argument: Argument) -> dict[int, sympy.Symbol]:
    """The strides that are known at run time only, by dimension."""
    return {dim: step for dim, step in enumerate(argument.strides) if isinstance(step, sympy.Symbol)}


def _collapsed(
    statements: Sequence[Statement], loops: Sequence[Variable]
) -> tuple[list[Statement], tuple[Variable, ...]]:
    """The same with as few loops as do: a single one is the index itself."""
    place = sum(
        (loop.symbol * step for loop, step in zip(loops, contiguous([i.size for i in loops]), strict=True)), ZERO
    )
    few, instead = collapsed(loops, [*(expr for statement in statements for expr in _expressions(statement)), place])
    names = ["index"] if len(few) == 1 else [f"x{number}" for number in range(len(few))]
    found = tuple(
        Variable(sympy.Symbol(name, integer=True, nonnegative=True), loop.size)
        for name, loop in zip(names, few, strict=True)
    )
    symbols = {old.symbol: new.symbol for old, new in zip(few, found, strict=True)}
    return [settled(settled(statement, instead), symbols) for statement in statements], found


def _expressions(statement: Statement) -> Iterator[sympy.Expr]:
    yield from (guard.index for guard in statement.guards)
    if isinstance(statement, Load):
        yield statement.place


def _loops(loops: Sequence[Variable], statements: Sequence[Statement], strided: bool) -> Iterator[str]:
    """How the loops' variables follow from the index, for those that some statement reads."""
    if len(loops) < 2:
        return
    read = set().union(*(expr.free_symbols for statement in statements for expr in _expressions(statement)))
    inside = math.prod(loop.size for loop in loops)
    for number, loop in enumerate(loops):
        inside //= loop.size
        text = "index" if inside == 1 else f"index // {inside}"
        text = text if number == 0 else f"{text} % {loop.size}"
        if loop.symbol in read:
            yield f"{loop.symbol} = ({text}).to(tl.int64)" if strided else f"{loop.symbol} = {text}"


def _lines(statement: Statement, ranges: Mapping[sympy.Symbol, int], masked: bool, names: Names) -> Iterator[str]:
    conditions = [condition(guard, ranges) for guard in statement.guards]
    if not isinstance(statement, Load):
        yield f"{statement.target} = {statement.text.format(*conditions) if conditions else statement.text}"
        return
    moving = bool(statement.place.free_symbols & set(ranges))
    mask = _both(["mask" if masked else "", *conditions]) if moving else ""
    masks = f", mask={mask}" if mask else ""
    masks += ", other=0" if any(conditions) and mask else ""
    parts = terms(statement.place, ranges)
    place = joined(parts)
    if len(statement.source) + len(place) > _LONG and len(parts) > 1:
        place = names.fresh(f"{statement.target}_place")
        yield from _summed(place, parts)
    pointer = f"{statement.source}_ptr + {place}" if parts else f"{statement.source}_ptr"
    yield f"{statement.target} = tl.load({pointer}{masks}){_upcast(statement.dtype)}"


def _summed(target: str, parts: Sequence[str]) -> Iterator[str]:
    """Terms added up in statements that are not too long."""
    line: list[str] = []
    sign = "="
    for part in parts:
        if line and len(target) + len(joined([*line, part])) > _LONG:
            yield f"{target} {sign} {joined(line)}"
            line, sign = [], "+="
        line.append(part)
    yield f"{target} {sign} {joined(line)}"


def _both(conditions: Sequence[str]) -> str:
    """All of them at once."""
    found = [condition for condition in conditions if condition]
    return " & ".join(text if " " not in text else f"({text})" for text in found) if len(found) > 1 else "".join(found)


def _upcast(dtype: DType) -> str:
    return ".to(tl.float32)" if computed_in(dtype) != dtype else ""


def _bytes(op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> int:
    """What an operation reads and writes; a view by itself nothing."""
    if op.name in VIEWS:
        return 0
    values = [*(types[name] for name in dict.fromkeys(op.refs())), *(value.type for value in op.results)]
    return sum(type.local_bytes(sizes) for type in values)


def _told(op: Op) -> str:
    """An operation, and where it stands in the model."""
    place = f"  # {op.source.file.rpartition('/')[2]}:{op.source.line}" if op.source and op.source.line else ""
    return f"{', '.join(value.name for value in op.results)} = {print_operation(op)}{place}"
