"""Recognise activations that models write out: gelu in its tanh form.

    h = mul(x, 0.5)
    t = tanh(mul(add(x, mul(pow(x, 3), 0.044715)), 0.7978845608028654))    ->    y = gelu(x, approximate=tanh)
    y = mul(h, add(t, 1))

One operation has an exact derivative of its own and saves its operand alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from partc import fuel
from partc.program import Op, Ref, Region

Made = Mapping[str, Op]


def gelus(region: Region) -> Region:
    """Replace the last operation of each spelled-out gelu; the others are dead then."""
    made = {value.name: op for op in region.forward.ops for value in op.results}
    ops = []
    for op in region.forward.ops:
        x = _gelu_operand(op, made) if op.name == "mul" else None
        if x is not None and fuel.allowed("gelu", op.source):
            op = replace(op, name="gelu", args=(Ref(x),), attrs=(("approximate", "tanh"),))
        ops.append(op)
    return replace(region, forward=replace(region.forward, ops=tuple(ops)))


def _gelu_operand(op: Op, made: Made) -> str | None:
    """x of (x · 0.5) · (1 + tanh(√(2/π) · (x + 0.044715 · x³)))."""
    for half, shifted in _operands(op):
        x = _scaled(half, 0.5, made)
        turned = made.get(_plus(shifted, 1, made) or "")
        if x is None or turned is None or turned.name != "tanh":
            continue
        inner = made.get(_scaled(next(turned.refs()), math.sqrt(2 / math.pi), made) or "")
        if inner is None or inner.name != "add" or inner.attrs:
            continue
        for first, cubic in _operands(inner):
            cube = made.get(_scaled(cubic, 0.044715, made) or "")
            if first == x and cube is not None and cube.name == "pow" and cube.args == (Ref(x), 3):
                return x
    return None


def _operands(op: Op) -> Iterator[tuple[str, str]]:
    """Two tensor operands in either order."""
    names = tuple(op.refs())
    if len(names) == 2:
        yield names[0], names[1]
        yield names[1], names[0]


def _scaled(name: str, by: float, made: Made) -> str | None:
    return _with_number("mul", name, by, made)


def _plus(name: str, number: float, made: Made) -> str | None:
    return _with_number("add", name, number, made)


def _with_number(kind: str, name: str, number: float, made: Made) -> str | None:
    """The other operand, if a value is the sum or product of a tensor and this number."""
    op = made.get(name)
    if op is None or op.name != kind or len(op.args) != 2 or op.attrs:
        return None
    tensors = [arg.name for arg in op.args if isinstance(arg, Ref)]
    numbers = [arg for arg in op.args if isinstance(arg, int | float)]
    close = len(numbers) == 1 and math.isclose(numbers[0], number, rel_tol=1e-9)
    return tensors[0] if len(tensors) == 1 and close else None
