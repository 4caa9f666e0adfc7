"""Random operations in terms of uniform and normal numbers that are drawn by element."""

from __future__ import annotations

from collections.abc import Mapping

from partc.passes.normalize_writer import Rewrite, Writer, argument
from partc.program import Arg, DTypeArg, Op, Ref, Value


def _like(kind: str) -> Rewrite:
    """rand_like, randn_like: in the shape and dtype of the operand's."""

    def rewrite(w: Writer, op: Op) -> None:
        _drawn(w, op, kind, op.result)

    return rewrite


def _made(kind: str) -> Rewrite:
    """rand, randn: a new tensor."""

    def rewrite(w: Writer, op: Op) -> None:
        w.add(op, kind, (op.result.type.shape, DTypeArg(op.result.type.dtype), w.draw()))

    return rewrite


def _drawn(w: Writer, op: Op, kind: str, result: Value) -> Ref:
    """Numbers in the shape of a result; as many as the operand has take its layout."""
    first = op.args[0]
    if isinstance(first, Ref) and w.types[first.name] == result.type:
        return w.add(op, f"{kind}_like", (first, w.draw()), result)
    return w.add(op, kind, (result.type.shape, DTypeArg(result.type.dtype), w.draw()), result)


def _uniform(w: Writer, op: Op) -> None:
    """uniform(x, low, high): low + (high - low) * u."""
    low, high = argument(op, 1, "from", 0.0), argument(op, 2, "to", 1.0)
    assert isinstance(low, int | float) and isinstance(high, int | float)
    _affine(w, op, "rand", high - low, low)


def _normal(w: Writer, op: Op) -> None:
    """normal(x, mean, std): mean + std * n."""
    mean, std = argument(op, 1, "mean", 0.0), argument(op, 2, "std", 1.0)
    _affine(w, op, "randn", std, mean)


def _affine(w: Writer, op: Op, kind: str, scale: Arg, shift: Arg) -> None:
    type = op.result.type
    number: Arg = _drawn(w, op, kind, w.value(f"{op.result.name}_drawn", type.shape, type.dtype))
    number = w.add(op, "mul", (number, scale), w.value(f"{op.result.name}_scaled", type.shape, type.dtype))
    w.add(op, "add", (number, shift))


def _bernoulli(w: Writer, op: Op) -> None:
    """1 where a uniform number lies below the probability: a number, or the operand itself."""
    type = op.result.type
    u = _drawn(w, op, "rand", w.value(f"{op.result.name}_drawn", type.shape, "f64"))
    p = argument(op, 1, "p")
    below = w.value(f"{op.result.name}_below", type.shape, "bool")
    w.add(op, "lt", (u, op.args[0] if p is None else p), below)
    w.add(op, "to", (Ref(below.name), DTypeArg(type.dtype)))


def _randint(w: Writer, op: Op) -> None:
    """Whole numbers from low up to, not including, high: floor(u * (high - low)) + low."""
    numbers = [arg for arg in op.args if isinstance(arg, int) and not isinstance(arg, bool)]
    low, high = (0, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])
    type = op.result.type
    u: Arg = w.add(
        op, "rand", (type.shape, DTypeArg("f64"), w.draw()), w.value(f"{op.result.name}_drawn", type.shape, "f64")
    )
    u = w.add(op, "mul", (u, high - low), w.value(f"{op.result.name}_scaled", type.shape, "f64"))
    u = w.add(op, "floor", (u,), w.value(f"{op.result.name}_floor", type.shape, "f64"))
    u = w.add(op, "add", (u, low), w.value(f"{op.result.name}_shifted", type.shape, "f64"))
    w.add(op, "to", (u, DTypeArg(type.dtype)))


def _randperm(w: Writer, op: Op) -> None:
    """The order of as many uniform numbers."""
    shape = op.result.type.shape
    u = w.add(op, "rand", (shape, DTypeArg("f64"), w.draw()), w.value(f"{op.result.name}_drawn", shape, "f64"))
    w.add(op, "argsort", (u, 0))


RANDOM: Mapping[str, Rewrite] = {
    "rand_like": _like("rand"),
    "randn_like": _like("randn"),
    "rand": _made("rand"),
    "randn": _made("randn"),
    "uniform": _uniform,
    "normal": _normal,
    "normal_functional": _normal,
    "bernoulli": _bernoulli,
    "randint": _randint,
    "randint_like": _randint,
    "randperm": _randperm,
}
