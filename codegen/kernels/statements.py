"""The statements of kernels, and the tensors that they access."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy

from partc.codegen.operands import DTYPES
from partc.ir.program import FLOATING, Arg, DType
from partc.rules import kernels

TRITON: Mapping[DType, str] = {
    name: "tl.int1" if name == "bool" else text.replace("torch", "tl") for name, text in DTYPES.items()
}


@dataclass(frozen=True, slots=True)
class Guard:
    """The condition for an element to exist: `low <= index < high`, of an index below `size`."""

    index: sympy.Expr
    low: int
    high: int
    size: int


Guards = tuple[Guard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load `target`: the element of an argument at a position in memory, in the type of the computation."""

    target: str
    source: str
    place: sympy.Expr
    guards: Guards
    dtype: DType
    anywhere: bool = False  # the position is valid memory even where the kernel's own element doesn't exist


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Set `target` to an expression, in which `{0}`, `{1}`, … stand for its `guards`, and then for its `places`."""

    target: str
    text: str
    guards: Guards = ()
    places: tuple[sympy.Expr, ...] = ()  # indices in the expression


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce:
    """Set `target` to the sum, maximum or minimum of a variable along each row."""

    target: str
    source: Found
    how: str  # the operation: sum, amax or amin


Statement = Load | Evaluate | Reduce


@dataclass(frozen=True, slots=True)
class Found:
    """A value at an index: a variable or a number, its type, and the loops over which it varies."""

    text: str
    dtype: DType
    number: Arg = None
    over: frozenset[sympy.Symbol] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTensor:
    """A tensor argument of the kernel; strides that are only known at run time are symbols."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    strides: tuple[sympy.Expr, ...]


def computed_in(dtype: DType) -> DType:
    """The type of the computation: fp32 for 16-bit types."""
    return "f32" if dtype in ("bf16", "f16") else dtype


def contiguous(shape: Sequence[int]) -> tuple[sympy.Expr, ...]:
    """The strides of contiguous memory."""
    found: list[sympy.Expr] = []
    step = 1
    for size in reversed(shape):
        found.append(sympy.Integer(step))
        step *= size
    return tuple(reversed(found))


def constant(number: Arg, dtype: DType) -> Found:
    return Found(kernels.literal(number), dtype, number)


def cast(found: Found, dtype: DType) -> str:
    """The value in another type. A number takes the type of the other operand, unless fp32 cannot hold it exactly."""
    if found.number is not None:
        number = float(found.number) if dtype in FLOATING and isinstance(found.number, int) else found.number
        if dtype == "bool":
            return repr(bool(number))
        exact = not isinstance(number, float) or number != number or _in_32_bits(number) == number
        return kernels.literal(number) if dtype != "f64" or exact else f"tl.full([], {number!r}, tl.float64)"
    if found.dtype == dtype:
        return found.text
    return f"({found.text} != 0)" if dtype == "bool" else f"{found.text}.to({TRITON[dtype]})"


def _in_32_bits(number: float) -> float:
    try:
        rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        return float("nan")
    return rounded
