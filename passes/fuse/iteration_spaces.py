"""Iteration spaces of kernels: all elements of one shape, or rows and columns if the kernel sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from partc.ir.program import FLOATING, Arg, DType, Op, Ref
from partc.rules.rule import argument

Shape = tuple[int, ...]
MOST_COLUMNS = 16384  # the most columns of a row that a program holds whole
MOST_UNROLLED = 8  # the most elements that one element of a result adds without a loop
MOST_SUMMED = 8192  # the same if it also sums over rows: with more, registers spill


@dataclass(frozen=True, slots=True)
class Form:
    """Rows of a shape: the last `along` dimensions are their columns, held `whole` if the kernel sums along them."""

    shape: Shape
    along: int
    whole: bool

    @property
    def statistic(self) -> Shape:
        """The shape with one number for each row."""
        return (*self.shape[: len(self.shape) - self.along], *(1 for _ in range(self.along)))

    @property
    def wide(self) -> bool:
        """Whether a program that holds such a row has no registers left for sums over columns."""
        return self.whole and math.prod(self.column) > MOST_SUMMED

    @property
    def column(self) -> Shape:
        """The shape with one number for each column."""
        return self.shape[len(self.shape) - self.along :]

    def with_(self, other: Form) -> Form | None:
        """The common form of two operations; None if they have none."""
        if (self.shape, self.along) != (other.shape, other.along):
            return None
        both = self if self.whole else other
        return None if both.wide and self.whole != other.whole else both


def form(op: Op, shape_of: Callable[[str], Shape], dtype_of: Callable[[str], DType]) -> Form | None:
    """The form of a reduction or composite; None if kernels do not support it."""
    x = next(op.refs())
    shape = shape_of(x)
    if dtype_of(x) not in FLOATING:
        return None
    found: Form | None = None
    match op.name:
        case "rms_norm" | "layer_norm":
            found = Form(shape, _count(op.args[1]), True)
        case "rms_norm_backward" | "layer_norm_backward":
            found = Form(shape, _count(op.args[2]), True)
            found = None if found.wide else found
        case "rms_norm_grad_input" | "layer_norm_grad_input":
            found = Form(shape, _count(op.args[2]), True)
        case "rms_norm_grad_weight" | "layer_norm_grad_weight":
            found = Form(shape, _count(op.args[2]), False)
        case "softmax" | "log_softmax":
            last = len(op.args) == 2 and not op.attrs and op.args[1] in (-1, len(shape) - 1)
            found = Form(shape, 1, True) if last and shape else None
        case "_softmax_backward_data" | "_log_softmax_backward_data":
            found = Form(shape, 1, True) if op.args[2] in (-1, len(shape) - 1) and shape else None
        case "cross_entropy_backward":
            logits = op.args[1]
            found = Form(shape_of(logits.name), 1, False) if isinstance(logits, Ref) else None
            shape = found.shape if found else ()
        case "linear_grad_bias":
            found = Form(shape, 1, False)
        case "sum" | "amax" | "amin" | "mean" | "logsumexp" | "var" | "std" | "linalg_vector_norm":
            found = _reduced(op, shape)
    if found is None or found.along >= len(shape):
        return None
    if found.whole and math.prod(found.column) > MOST_COLUMNS:
        return None
    return found


def _reduced(op: Op, shape: Shape) -> Form | None:
    """The form of a reduction over the last dimensions with dimensions kept, or of a sum over all but the last."""
    at = 2 if op.name == "linalg_vector_norm" else 1
    dims, keep = argument(op, at, "dim"), argument(op, at + 1, "keepdim", False)
    attrs = {name for name, _ in op.attrs} - ({"correction", "keepdim"} if op.name in ("var", "std") else set())
    if not isinstance(dims, tuple) or attrs or (at == 2 and op.args[1] != 2):
        return None
    reduced = sorted(dim % len(shape) for dim in dims if isinstance(dim, int))
    count = len(reduced)
    if not reduced or count == len(shape):
        return None
    if reduced == list(range(len(shape) - count, len(shape))) and keep is True:
        return Form(shape, count, True)
    if reduced == list(range(count)) and op.name == "sum":
        return Form(shape, len(shape) - count, False)
    return None


def is_short_sum(op: Op, shape: Shape) -> bool:
    """Whether an operation sums an operand of this shape over one short dimension other than the last. Each element of
    the result then adds a few elements, and neighbouring elements of the result read neighbours in memory.
    """
    dims = argument(op, 1, "dim")
    if op.name != "sum" or op.attrs or not isinstance(dims, tuple) or len(dims) != 1 or not isinstance(dims[0], int):
        return False
    dim = dims[0] % len(shape)
    return op.result.type.dtype in FLOATING and dim < len(shape) - 1 and shape[dim] <= MOST_UNROLLED


def columns(op: Op, form: Form | None) -> frozenset[str]:
    """The results that are sums over all rows; no operation of the same kernel can read them."""
    if form is None:
        return frozenset()
    if op.name in ("rms_norm_backward", "layer_norm_backward"):
        return frozenset(value.name for value in op.results[1:])
    if form.whole or op.name == "cross_entropy_backward":
        return frozenset()
    return frozenset(value.name for value in op.results)


def fits(shape: Shape, form: Form) -> bool:
    """Whether a shape has one number for each element, or one for each row."""
    return shape in (form.shape, form.statistic)


def _count(arg: Arg) -> int:
    return len(arg) if isinstance(arg, tuple) else 1
