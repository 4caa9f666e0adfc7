"""Over what a kernel goes: all elements of one shape, or rows and columns where it sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from partc.program import FLOATING, Arg, DType, Op, Ref
from partc.rules.rule import argument

Shape = tuple[int, ...]
MOST_COLUMNS = 8192  # of a row that one program holds whole; with more, derivatives of norms spill
WIDE = {"rms_norm": 16384, "layer_norm": 16384}  # and these not yet


@dataclass(frozen=True, slots=True)
class Form:
    """Rows of a shape: the last `along` dimensions are their columns, held `whole` where something sums along them."""

    shape: Shape
    along: int
    whole: bool

    @property
    def statistic(self) -> Shape:
        """One number for each row."""
        return (*self.shape[: len(self.shape) - self.along], *(1 for _ in range(self.along)))

    @property
    def wide(self) -> bool:
        """Whether a program holds so much of each tensor that there is room for few of them."""
        return self.whole and math.prod(self.column) > MOST_COLUMNS

    @property
    def column(self) -> Shape:
        """One number for each column."""
        return self.shape[len(self.shape) - self.along :]

    def with_(self, other: Form) -> Form | None:
        """What both can be done over."""
        if (self.shape, self.along) != (other.shape, other.along):
            return None
        return self if self.whole else other


def form(op: Op, shape_of: Callable[[str], Shape], dtype_of: Callable[[str], DType]) -> Form | None:
    """Of a reduction or a composite; None where no kernel does it."""
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
        case "softmax" | "_softmax_backward_data" | "log_softmax" | "_log_softmax_backward_data":
            forward = not op.name.startswith("_")
            last = op.args[1 if forward else 2] in (-1, len(shape) - 1)
            plain = not forward or (len(op.args) == 2 and not op.attrs)
            found = Form(shape, 1, True) if last and plain and shape else None
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
    if found.whole and math.prod(found.column) > WIDE.get(op.name, MOST_COLUMNS):
        return None
    return found


def _reduced(op: Op, shape: Shape) -> Form | None:
    """The last dimensions, kept; or, of sums, all dimensions but the last."""
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


def columns(op: Op, form: Form | None) -> frozenset[str]:
    """The results that are sums down all rows: nothing in the same kernel can read them."""
    if form is None:
        return frozenset()
    if op.name in ("rms_norm_backward", "layer_norm_backward"):
        return frozenset(value.name for value in op.results[1:])
    if form.whole or op.name == "cross_entropy_backward":
        return frozenset()
    return frozenset(value.name for value in op.results)


def fits(shape: Shape, form: Form) -> bool:
    """Whether a value of this shape is one for each element, or for each row."""
    return shape in (form.shape, form.statistic)


def _count(arg: Arg) -> int:
    return len(arg) if isinstance(arg, tuple) else 1
