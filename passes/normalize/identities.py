"""Operations that return their operand for some arguments: pads of no element, a repetition of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from partc.ir.program import Op, Ref
from partc.passes.normalize.random import refuse_unknown
from partc.passes.normalize.writer import Rewrite, Writer, ref, with_dtypes
from partc.rules.rule import argument, number

_Test = Callable[[Op, tuple[int, ...]], bool]  # of an operation and its operand's shape


def _neutral(value: int) -> Rewrite:
    """Drop an operation whose second operand is its neutral number, such as a multiplication by 1, unless it casts."""
    return _dropped(lambda op, _: not op.attrs and type(op.args[1]) in (int, float) and op.args[1] == value)


def _dropped(changes_nothing: _Test) -> Rewrite:
    """Drop an operation that changes nothing, unless it casts."""

    def rewrite(w: Writer, op: Op) -> None:
        same = isinstance(op.args[0], Ref) and op.result.type == w.types[op.args[0].name]
        if same and changes_nothing(op, w.shape(op.args[0])):
            w.drop(op)
        else:
            keep(w, op)

    return rewrite


def keep(w: Writer, op: Op) -> None:
    """Keep an operation. If torch would give its result the default dtype, its attributes state the dtype."""
    refuse_unknown(op)
    w.keep(with_dtypes(w, op))


def _rolls_by_whole_turns(op: Op, shape: tuple[int, ...]) -> bool:
    shifts, dims = _numbers(op, 1), _numbers(op, 2)
    sizes = [shape[dim] for dim in dims if shape] or [math.prod(shape)]
    return all(shift % size == 0 for shift, size in zip(shifts, sizes, strict=True))


def _numbers(op: Op, index: int) -> tuple[int, ...]:
    found = op.args[index] if index < len(op.args) else ()
    return tuple(map(number, found)) if isinstance(found, tuple) else (number(found),)


def _clamp(w: Writer, op: Op) -> None:
    """Leave out an infinite bound if there is another one. torch has no clamp without bounds."""
    low, high = argument(op, 1, "min"), argument(op, 2, "max")
    bounds = (None if low == -math.inf else low), (None if high == math.inf else high)
    if w.types[ref(op.args[0]).name] == op.result.type and any(bound is not None for bound in bounds):
        op = replace(op, args=(op.args[0], *bounds), attrs=())
    keep(w, op)


IDENTITIES: Mapping[str, Rewrite] = {
    **dict.fromkeys(("constant_pad_nd", "pad"), _dropped(lambda op, _: not any(_numbers(op, 1)))),
    # The same number of elements: each is repeated once, or is the mean of itself.
    **dict.fromkeys(
        ("repeat", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"), _dropped(lambda *_: True)
    ),
    "roll": _dropped(_rolls_by_whole_turns),
    "flip": _dropped(lambda op, shape: all(shape[dim] == 1 for dim in _numbers(op, 1) if shape)),
    "rot90": _dropped(lambda op, _: number(argument(op, 1, "k", 1)) % 4 == 0),
    **dict.fromkeys(("add", "sub"), _neutral(0)),
    **dict.fromkeys(("mul", "div", "pow"), _neutral(1)),
    "clamp": _clamp,
    # A boolean is its own test, and one element is any of its elements.
    "ne": _dropped(lambda op, _: op.args[1] == 0),
    **dict.fromkeys(("any", "all"), _dropped(lambda _, shape: not shape)),
}
