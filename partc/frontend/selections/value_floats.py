"""Floats that tensors hold, while a model is traced: the numbers that `item()`, `float()` and `tolist()` read.

    weight = min(1.0, 2.0 / loss.item())     the number is a tensor of fp64 without a gradient, and so is the weight
    loss * weight                            the tensor in the type of the loss, as torch reads a Python number
    if loss.item() > 2: …                    a test of a tensor, which `value_branches` decides

C code, such as NumPy's, cannot see the tensor. It reads a different number in each of the traces that `check_numbers`
compares, and a model whose traces differ is refused.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from partc.frontend.permissions import UNKNOWN_NUMBERS, permitted
from partc.frontend.selections.row_counts import RowCount, give_operators, give_texts, unknown_number
from partc.frontend.statements import only_written
from partc.installed import is_machinery
from partc.replaced import replaced

# Functions of Python's `math` with those of torch.
_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sqrt": torch.sqrt, "exp": torch.exp, "expm1": torch.expm1, "log": torch.log, "log2": torch.log2,
    "log10": torch.log10, "log1p": torch.log1p, "sin": torch.sin, "cos": torch.cos, "tan": torch.tan,
    "sinh": torch.sinh, "cosh": torch.cosh, "tanh": torch.tanh, "asin": torch.asin, "acos": torch.acos,
    "atan": torch.atan, "erf": torch.erf, "erfc": torch.erfc, "lgamma": torch.lgamma, "fabs": torch.abs,
}  # fmt: skip
_TESTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "isfinite": torch.isfinite, "isinf": torch.isinf, "isnan": torch.isnan,
}  # fmt: skip


class ValueFloat(float):
    """A float that a tensor holds, or one computed from it."""

    _tensor: Tensor

    def __new__(cls, tensor: Tensor, shown: float) -> ValueFloat:
        """`tensor` is a scalar of fp64; `shown` is the number that C code reads."""
        made = super().__new__(cls, shown)
        made._tensor = tensor
        return made

    @classmethod
    def of(cls, x: Tensor, shown: int) -> ValueFloat:
        """The number in a tensor of one element. C code reads `shown` - 3.63 in its place, or nan for 1."""
        return cls(x.detach().reshape(()).double(), shown - 3.63 if shown > 1 else math.nan)

    def __hash__(self) -> int:
        """Raise PartcError P0206 in a lookup: tables would never have the number."""
        frame = sys._getframe(1)
        if not is_machinery(frame.f_code.co_filename) and not only_written(frame):
            raise unknown_number()
        return float.__hash__(self)

    __class__ = property(lambda number: float)

    def tensor(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """The number as a scalar."""
        return self._tensor.to(dtype)

    def _computed(self, operate: Callable[[Any, Any], Any], other: Any, swapped: bool) -> Any:
        if isinstance(other, Tensor):
            mine, its = self.tensor(_type_with(other)), other
        elif isinstance(other, int | float):
            mine, its = self._tensor, _operand(other)
        else:
            return NotImplemented
        made = operate(its, mine) if swapped else operate(mine, its)
        if isinstance(other, Tensor):
            return made
        shown = (_shown(other), _shown(self)) if swapped else (_shown(self), _shown(other))
        return ValueFloat(made, _number(operate, *shown))

    def _compared(self, name: str, other: Any) -> Any:
        compare: Callable[[Any, Any], Any] = getattr(operator, name)
        if isinstance(other, Tensor):
            return compare(self.tensor(_type_with(other)), other)
        return compare(self._tensor, _operand(other)) if isinstance(other, int | float) else NotImplemented

    def __neg__(self) -> ValueFloat:
        return ValueFloat(-self._tensor, -float.__float__(self))

    def __pos__(self) -> ValueFloat:
        return self

    def __abs__(self) -> ValueFloat:
        return ValueFloat(self._tensor.abs(), float.__abs__(self))

    def __bool__(self) -> bool:
        return bool(self._tensor != 0)


def _operand(number: float) -> Any:
    if isinstance(number, ValueFloat):
        return number.tensor()
    return number.tensor().double() if isinstance(number, RowCount) else number


def _shown(number: float) -> float:
    """The number that C code reads."""
    return float(int(number)) if isinstance(number, RowCount) else float.__float__(float(number))


def _number(operate: Callable[..., Any], *operands: float) -> float:
    try:
        return float(operate(*operands))
    except (ArithmeticError, ValueError, TypeError):  # of a complex number
        return math.nan


def _type_with(x: Tensor) -> torch.dtype:
    """The type in which torch reads a float that it combines with a tensor."""
    if x.is_complex():
        return x.dtype.to_real()
    return x.dtype if x.is_floating_point() else torch.get_default_dtype()


give_texts(ValueFloat, float)
give_operators(
    ValueFloat,
    computed="add sub mul truediv floordiv mod pow",
    refused="int trunc floor ceil round divmod rdivmod",
    methods="is_integer as_integer_ratio hex",
)


def extreme(numbers: Sequence[Any], both: Callable[[Tensor, Tensor], Tensor]) -> ValueFloat | None:
    """Python's `max` or `min` of numbers; None unless a tensor holds at least one of them."""
    if not any(isinstance(x, ValueFloat) for x in numbers) or not all(isinstance(x, int | float) for x in numbers):
        return None
    first, *rest = (torch.as_tensor(_operand(x), dtype=torch.float64) for x in numbers)
    for x in rest:
        first = both(first, x)
    return ValueFloat(first, math.nan)


def as_tensors(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of torch, with tensors in place of floats that tensors hold."""
    given = (*args, *kwargs.values())
    if not any(_holds(x) for x in given):
        return args, dict(kwargs)
    other = next((x for x in given if isinstance(x, Tensor)), None)
    dtype = torch.get_default_dtype() if other is None else _type_with(other)
    if name in ("clamp", "clamp_", "clip", "clip_"):  # takes two numbers or two tensors
        wide = lambda x: torch.full((), x, dtype=dtype) if isinstance(x, int | float) else x  # noqa: E731
        return tuple(map(wide, _replaced(args, dtype))), {k: wide(x) for k, x in _replaced(kwargs, dtype).items()}
    alpha = kwargs.get("alpha")
    if isinstance(alpha, ValueFloat):
        args, kwargs = (args[0], args[1] * alpha.tensor(dtype)), {k: x for k, x in kwargs.items() if k != "alpha"}
    return tuple(_replaced(args, dtype)), dict(_replaced(kwargs, dtype))


def made(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result of a function that makes a tensor of floats that tensors hold; NotImplemented for other calls."""
    if not any(_holds(x) for x in (*args, *kwargs.values())):
        return NotImplemented
    dtype = kwargs.get("dtype")
    if name in ("tensor", "as_tensor", "scalar_tensor"):
        return _stacked(args[0], dtype or torch.get_default_dtype())
    if name == "full":
        return _stacked(kwargs.get("fill_value", args[-1]), dtype or torch.get_default_dtype()).expand(args[0]).clone()
    if name in ("full_like", "new_full"):
        shape = args[0].shape if name == "full_like" else args[1]
        return _stacked(kwargs.get("fill_value", args[-1]), dtype or args[0].dtype).expand(shape).clone()
    return NotImplemented


def _holds(item: Any) -> bool:
    return isinstance(item, ValueFloat) or (isinstance(item, list | tuple) and any(map(_holds, item)))


def _replaced(item: Any, dtype: torch.dtype) -> Any:
    if isinstance(item, ValueFloat):
        return item.tensor(dtype)
    if isinstance(item, Mapping):
        return {key: _replaced(one, dtype) for key, one in item.items()}
    return type(item)(_replaced(one, dtype) for one in item) if type(item) in (list, tuple) else item


def _stacked(item: Any, dtype: torch.dtype) -> Tensor:
    if isinstance(item, list | tuple):
        return torch.stack([_stacked(one, dtype) for one in item])
    return torch.as_tensor(_operand(item)).to(dtype)


@contextmanager
def with_functions() -> Iterator[None]:
    """A context in which Python's `math` computes with floats that tensors hold, if traces may use them."""
    functions = {**_FUNCTIONS, **_TESTS} if permitted(UNKNOWN_NUMBERS).allowed else {}
    plain = {name: getattr(math, name) for name in functions}

    def run(name: str, x: Any, *more: Any) -> Any:
        if not isinstance(x, ValueFloat) or more:
            return plain[name](x, *more)
        found = functions[name](x.tensor())
        return found if name in _TESTS else ValueFloat(found, _number(plain[name], float.__float__(x)))

    with replaced(math, **{name: partial(run, name) for name in functions}):
        yield
