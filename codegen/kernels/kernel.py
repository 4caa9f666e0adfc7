"""The parts that all emitted kernels share: tensors, the launcher's arguments, and statements as lines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import sympy

from partc.codegen.kernels.indexing import ZERO, Ranges, largest
from partc.codegen.kernels.lowering import Lowering
from partc.codegen.kernels.spaces import condition, index_text, terms, terms_text
from partc.codegen.kernels.statements import (
    TRITON,
    Evaluate,
    Found,
    KernelTensor,
    Load,
    Reduce,
    Statement,
    computed_in,
    contiguous,
)
from partc.codegen.lifetimes import overwritten
from partc.codegen.names import Names
from partc.codegen.operands import DTYPES
from partc.ir.layout import Sizes
from partc.ir.printer import fused_bytes, print_operation, readable
from partc.ir.program import DType, Op, TensorType
from partc.rules import kernels

_LONGEST = 96  # the longest expression on one line
TORCH: Mapping[DType, str] = {name: text.removeprefix("torch.") for name, text in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A tensor that the kernel writes, with torch's name for its dtype. `over`: the argument that it overwrites."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    over: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredValue:
    """A value that the kernel writes to a result: the whole of it, or the part `number` of `count` equal parts.

    Parts alternate in memory, in runs of `run` elements.
    """

    name: str
    dtype: DType
    result: Result
    number: int = 0
    count: int = 1
    run: int = 0

    @property
    def start(self) -> int:
        """The place of the first element in the result."""
        return self.number * self.run


Configuration = Mapping[str, int]  # block sizes and number of warps
MOST_WARPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """The description of a kernel and its launch, from which a template writes its source."""

    name: str
    operations: tuple[str, ...]
    moved: str
    apart: str
    arguments: tuple[KernelTensor, ...]
    numbers: tuple[str, ...]  # scalar parameters of the launch
    results: tuple[Result, ...]
    lines: tuple[str, ...]

    template = ""
    interpreting = None  # the configuration for Triton's interpreter, if different

    @property
    def configuration(self) -> Configuration:
        """The configuration for launches that have not been tuned."""
        raise NotImplementedError

    @property
    def candidates(self) -> list[Configuration]:
        """Configurations for tuning, the default first, then other numbers of warps."""
        warps = self.configuration["num_warps"]
        others = [each for each in (2 * warps, warps // 2) if 1 <= each <= MOST_WARPS]
        return [self.configuration, *({**self.configuration, "num_warps": each} for each in others)]

    @property
    def below(self) -> int:
        """Upper bound of the integer arguments."""
        return 2

    @property
    def tried(self) -> str:
        return self.name

    @property
    def scratch(self) -> list[str]:
        """The operands for timing candidates, as source."""
        texts = []
        for item in self.arguments:
            below = f", {self.below}" if self.below > 2 and item.dtype.startswith("i") else ""
            texts.append(f"scratch({item.shape}, torch.{TORCH[item.dtype]}, device{below})")
        return [*texts, *("0" if number else "scratch((), torch.int64, device)" for number in self._scalars.values())]

    @property
    def functions(self) -> bool:
        """Whether the kernel uses any of the shared functions."""
        return any("functions." in line for line in self.lines)

    @property
    def _scalars(self) -> dict[str, bool]:
        """The scalar arguments of the launch, each with True for a number, False for a word in memory (random
        counters).
        """
        return {name: not name.startswith("counter") for name in self.numbers}

    @property
    def read(self) -> list[str]:
        """The kernel's parameters for its inputs."""
        read = (name for item in self.arguments for name in (f"{item.name}_ptr", *map(str, symbols(item).values())))
        return [*read, *(name if number else f"{name}_ptr" for name, number in self._scalars.items())]

    @property
    def given(self) -> list[str]:
        """The launcher's arguments for the kernel's inputs."""
        given = (
            text
            for item in self.arguments
            for text in (item.name, *(f"{item.name}.stride({dim})" for dim in symbols(item)))
        )
        return [*given, *self.numbers]

    def memory(self, result: Result) -> str:
        """The expression that allocates a result, or the argument that it overwrites."""
        if result.over:
            return f"{result.over}  # which nobody reads any more"
        return f"torch.empty({result.shape}, dtype=torch.{result.dtype}, device={self.arguments[0].name}.device)"

    @property
    def signature(self) -> str:
        tensors = (f"{argument.name}: Tensor" for argument in self.arguments)
        return ", ".join(
            (*tensors, *(f"{name}: {'int' if number else 'Tensor'}" for name, number in self._scalars.items()))
        )

    @property
    def returns(self) -> str:
        types = ["Tensor"] * len(self.results)
        return types[0] if len(types) == 1 else f"tuple[{', '.join(types)}]"


@dataclass(slots=True, kw_only=True)
class Draft:
    """A fused operation before its kernel is written: its tensors, under names that are free in kernel and launcher."""

    op: Op
    types: dict[str, TensorType]
    sizes: Sizes
    outside: Names
    arguments: dict[str, KernelTensor]
    results: tuple[Result, ...]

    @classmethod
    def of(cls, op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> Draft:
        every = {name: types[name] for name in op.refs()}
        every.update((value.name, value.type) for step in op.body for value in step.results)
        outside = Names(("torch", "triton", "tl", "CONFIGURATION", *kernels.launch_scalars(op.body)))
        strided = dict(op.attrs).get("strided", ())
        arguments = {
            name: _argument(outside[name], every[name], sizes, isinstance(strided, tuple) and place in strided)
            for place, name in enumerate(op.refs())
        }
        over = overwritten(op)
        names = {number: item.name for number, item in enumerate(arguments.values())}
        results = tuple(
            Result(
                name=outside[value.name],
                shape=value.type.layout.local_shape(sizes),
                dtype=TORCH[value.type.dtype],
                over=names.get(over.get(number, -1), ""),
            )
            for number, value in enumerate(op.results)
        )
        return cls(op=op, types=every, sizes=sizes, outside=outside, arguments=arguments, results=results)

    def stored_values(self) -> Iterator[StoredValue]:
        """The values that the kernel writes, in the order of the results."""
        joined = {step.result.name: step for step in self.op.body if step.name == "cat"}
        for value, result in zip(self.op.results, self.results, strict=True):
            if value.name not in joined:
                yield StoredValue(name=value.name, dtype=value.type.dtype, result=result)
                continue
            names, dim = kernels.cat_operands(joined[value.name])
            run = math.prod(self.types[names[0]].layout.local_shape(self.sizes)[dim:])
            for number, name in enumerate(names):
                yield StoredValue(
                    name=name, dtype=value.type.dtype, result=result, number=number, count=len(names), run=run
                )

    def lowering(self, own: Sequence[str], ranges: Ranges, **more: object) -> Lowering:
        """The lowering that derives the kernel's statements; `own` are names that the template uses."""
        pointers = [
            f"{name}_ptr" for name in (*(x.name for x in self.arguments.values()), *(r.name for r in self.results))
        ]
        given = [str(step) for item in self.arguments.values() for step in symbols(item).values()]
        scalars = (text for name in kernels.launch_scalars(self.op.body) for text in (name, f"{name}_ptr"))
        names = Names(("tl", "functions", *own, *pointers, *given, *scalars))
        return Lowering(
            body=self.op.body,
            arguments=self.arguments,
            types=self.types,
            sizes=self.sizes,
            names=names,
            ranges=ranges,
            **more,  # type: ignore[arg-type]
        )

    def common_fields(self) -> dict[str, object]:
        """The fields of a Kernel that do not depend on its template."""
        together, apart = fused_bytes(self.op, self.types, self.sizes)
        return {
            "name": kernel_name(self.op),
            "operations": tuple(map(_described, self.op.body)),
            "moved": readable(together),
            "apart": readable(apart),
            "arguments": tuple(self.arguments.values()),
            "numbers": tuple(kernels.launch_scalars(self.op.body)),
            "results": self.results,
        }


def kernel_name(op: Op) -> str:
    return str(dict(op.attrs)["kernel"])


def _argument(name: str, type: TensorType, sizes: Sizes, strided: bool) -> KernelTensor:
    shape = type.layout.local_shape(sizes)
    strides = contiguous(shape)
    if strided:
        strides = tuple(
            sympy.Symbol(f"{name}_stride_{dim}", integer=True) if size > 1 else ZERO for dim, size in enumerate(shape)
        )
    return KernelTensor(name=name, shape=shape, dtype=type.dtype, strides=strides)


def symbols(argument: KernelTensor) -> dict[int, sympy.Symbol]:
    """The strides that are only known at run time, by dimension."""
    return {dim: step for dim, step in enumerate(argument.strides) if isinstance(step, sympy.Symbol)}


def expressions(statement: Statement) -> Iterator[sympy.Expr]:
    """The index expressions of a statement."""
    if isinstance(statement, Reduce):
        return
    yield from (guard.index for guard in statement.guards)
    yield from (statement.place,) if isinstance(statement, Load) else statement.places


def is_long(reach: int, statements: Sequence[Statement], ranges: Ranges) -> bool:
    """Whether positions need 64 bits: `reach`, or those in loads and computations, as far as strides are known."""
    places = (
        (statement.place,) if isinstance(statement, Load) else statement.places
        for statement in statements
        if not isinstance(statement, Reduce)
    )
    return max(reach, *(largest(place, ranges) or 0 for several in places for place in several), 0) >= 2**31


def statement_lines(statement: Load | Evaluate, ranges: Ranges, mask: str, names: Names) -> Iterator[str]:
    """A statement as lines; `mask` excludes elements that do not exist."""
    conditions = [condition(guard, ranges) for guard in statement.guards]
    if isinstance(statement, Evaluate):
        parts = [*conditions, *(index_text(place, ranges) for place in statement.places)]
        yield f"{statement.target} = {statement.text.format(*parts) if parts else statement.text}"
        return
    moving = bool(statement.place.free_symbols & set(ranges))
    both = _conjunction(["" if statement.anywhere else mask, *conditions]) if moving else ""
    masks = f", mask={both}" if both else ""
    masks += ", other=0" if any(conditions) and both else ""
    parts = terms(statement.place, ranges)
    place = terms_text(parts)
    if len(statement.source) + len(place) > _LONGEST and len(parts) > 1:
        place = names.fresh(f"{statement.target}_place")
        yield from _summed(place, parts)
    pointer = f"{statement.source}_ptr + {place}" if parts else f"{statement.source}_ptr"
    yield f"{statement.target} = tl.load({pointer}{masks}){_upcast(statement.dtype)}"


def stored(found: Found, dtype: DType) -> str:
    """A value, cast to the type of its memory."""
    return found.text if found.dtype == dtype else f"{found.text}.to({TRITON[dtype]})"


def _summed(target: str, parts: Sequence[str]) -> Iterator[str]:
    """A sum in statements of bounded length."""
    line: list[str] = []
    sign = "="
    for part in parts:
        if line and len(target) + len(terms_text([*line, part])) > _LONGEST:
            yield f"{target} {sign} {terms_text(line)}"
            line, sign = [], "+="
        line.append(part)
    yield f"{target} {sign} {terms_text(line)}"


def _conjunction(conditions: Sequence[str]) -> str:
    """The conjunction of conditions."""
    found = [condition for condition in conditions if condition]
    return " & ".join(text if " " not in text else f"({text})" for text in found) if len(found) > 1 else "".join(found)


def _upcast(dtype: DType) -> str:
    return ".to(tl.float32)" if computed_in(dtype) != dtype else ""


def _described(op: Op) -> str:
    """An operation as text, with its line in the model."""
    place = f"  # {op.source.file.rpartition('/')[2]}:{op.source.line}" if op.source and op.source.line else ""
    return f"{', '.join(value.name for value in op.results)} = {print_operation(op)}{place}"
