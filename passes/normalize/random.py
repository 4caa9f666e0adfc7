"""Random operations in terms of dropout, uniform and normal numbers that are drawn by element."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from partc.errors import PartcError
from partc.ir.program import Arg, DTypeArg, Op, Ref, Value
from partc.passes.normalize.writer import Rewrite, Writer, ref
from partc.rules.rule import argument, number

_FRESH = frozenset({"empty", "new_empty", "full", "zeros"})
_SELU_FLOOR = -1.7580993408473766  # the limit of selu: -scale * alpha (Klambauer et al. 2017)


def refuse_unknown(op: Op) -> None:
    """Raise PartcError P0207 for an operation that draws from torch's generator and has no rewrite here."""
    if draws_random_numbers(op.name):
        raise PartcError(
            "P0207",
            f"{op.name} draws in a way that is not the same on every mesh",
            help="build it from torch.rand, torch.randn and dropouts",
            source=op.source,
        )


@cache
def draws_random_numbers(name: str) -> bool:
    """Whether torch marks an operation as drawing from a generator."""
    space, _, plain = name.rpartition("::")
    packet = getattr(getattr(torch.ops, space or "aten"), plain, None)
    overloads = [getattr(packet, each) for each in packet.overloads()] if packet is not None else []
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def dropout(w: Writer, op: Op) -> None:
    p, training = op.args[1], argument(op, 2, "train", True)
    assert isinstance(p, int | float)
    if not training or not p:
        w.drop(op)
    elif "alpha" in op.name and p < 1:
        _alpha_dropout(w, op, p)
    else:
        dims = 2 if op.name.startswith("feature") else len(op.result.type.shape)
        dropped(w, op, op.args[0], p, dims, op.result)


def dropped(w: Writer, op: Op, x: Arg, p: float, dims: int, result: Value) -> Ref:
    """x with elements dropped with probability p; elements that share the first `dims` indices are dropped together."""
    if p == 1:
        return w.add(op, "mul", (x, 0.0), result)
    return w.add(op, "dropout", (x, p, dims, w.draw()), result)


def _alpha_dropout(w: Writer, op: Op, p: float) -> None:
    """Dropped elements become selu's floor; a scale and a shift restore mean and variance (Klambauer et al. 2017)."""
    shape, dtype = op.result.type.shape, op.result.type.dtype
    scale = ((_SELU_FLOOR**2 * p + 1) * (1 - p)) ** -0.5
    small = (*shape[:2], *(1 for _ in shape[2:])) if op.name.startswith("feature") else shape
    u = _drawn(w, op, "rand", w.value(f"{op.result.name}_drawn", small, "f64"))
    kept = w.step(op, "to", (w.step(op, "lt", (u, 1 - p), "below"), DTypeArg(dtype)), "kept")
    floor = w.step(op, "mul", (w.step(op, "add", (kept, -1), "lost"), -_SELU_FLOOR * scale), "floor")
    shift = w.step(op, "add", (floor, -_SELU_FLOOR * scale * p), "shift")
    scaled = w.step(op, "mul", (kept, scale), "scale")
    w.add(op, "add", (w.step(op, "mul", (op.args[0], scaled), "scaled", None, dtype), shift))


def _random_like(kind: str) -> Rewrite:
    """rand_like, randn_like: random numbers in the operand's shape and dtype."""

    def rewrite(w: Writer, op: Op) -> None:
        _drawn(w, op, kind, op.result)

    return rewrite


def _random_new(kind: str) -> Rewrite:
    """rand, randn: a new tensor."""

    def rewrite(w: Writer, op: Op) -> None:
        w.add(op, kind, (op.result.type.shape, DTypeArg(op.result.type.dtype), w.draw()))

    return rewrite


def _drawn(w: Writer, op: Op, kind: str, result: Value) -> Ref:
    """Random numbers in the shape of a result; if the operand has that shape, they take its layout."""
    dtype = DTypeArg(result.type.dtype)
    like = _modelled(w, op.args[0], result.type.shape)
    if like is not None:
        return w.add(op, f"{kind}_like", (like, dtype, w.draw()), result)
    return w.add(op, kind, (result.type.shape, dtype, w.draw()), result)


def _modelled(w: Writer, arg: Arg, shape: tuple[int, ...]) -> Ref | None:
    """The operand if it has this shape, or the tensor for which `empty_like` made it; else None."""
    if not isinstance(arg, Ref) or w.shape(arg) != shape:
        return None
    made = w.made.get(arg.name)
    if made is not None and made.name == "empty_like":
        return _modelled(w, made.args[0], shape)
    return None if made is not None and made.name in _FRESH else arg


def _uniform(w: Writer, op: Op) -> None:
    """uniform(x, low, high): low + (high - low) * u."""
    low, high = argument(op, 1, "from", 0.0), argument(op, 2, "to", 1.0)
    assert isinstance(low, int | float) and isinstance(high, int | float)
    _affine(w, op, "rand", high - low, low)


def _normal_like(w: Writer, op: Op) -> None:
    """The functional form of normal_: mean + std * n."""
    _affine(w, op, "randn", argument(op, 2, "std", 1.0), argument(op, 1, "mean", 0.0))


def _normal(w: Writer, op: Op) -> None:
    """normal(mean, std) of numbers or tensors, with a size if neither is a tensor; no gradient reaches them."""
    mean, std = (_stopped(w, op, arg) for arg in (op.args[0], argument(op, 1, "std", 1.0)))
    _affine(w, op, "randn", std, mean)


def _stopped(w: Writer, op: Op, arg: Arg) -> Arg:
    if not isinstance(arg, Ref) or arg.name not in w.trained:
        return arg
    return w.add(op, "detach", (arg,), w.value(f"{arg.name}_stopped", w.shape(arg), w.types[arg.name].dtype))


def _affine(w: Writer, op: Op, kind: str, scale: Arg, shift: Arg) -> None:
    type = op.result.type
    number = _drawn(w, op, kind, w.value(f"{op.result.name}_drawn", type.shape, type.dtype))
    w.add(op, "add", (w.step(op, "mul", (number, scale), "scaled"), shift))


def _bernoulli(w: Writer, op: Op) -> None:
    """1 if a uniform number is below the probability: a number, or the operand itself."""
    type = op.result.type
    u = _drawn(w, op, "rand", w.value(f"{op.result.name}_drawn", type.shape, "f64"))
    p = argument(op, 1, "p")
    below = w.step(op, "lt", (u, op.args[0] if p is None else p), "below")
    w.add(op, "to", (below, DTypeArg(type.dtype)))


def _randint(w: Writer, op: Op) -> None:
    """Integers in [low, high): floor(u * (high - low)) + low."""
    numbers = [arg for arg in op.args if isinstance(arg, int) and not isinstance(arg, bool)]
    low, high = (0, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])
    u = w.step(op, "rand", (op.result.type.shape, DTypeArg("f64"), w.draw()), "drawn", op.result.type.shape)
    u = w.step(op, "floor", (w.step(op, "mul", (u, high - low), "scaled"),), "floor")
    w.add(op, "to", (w.step(op, "add", (u, low), "shifted"), DTypeArg(op.result.type.dtype)))


def _randperm(w: Writer, op: Op) -> None:
    """The order of n uniform numbers."""
    shape = op.result.type.shape
    u = w.step(op, "rand", (shape, DTypeArg("f64"), w.draw()), "drawn", shape)
    w.add(op, "argsort", (u, 0))


def _exponential(w: Writer, op: Op) -> None:
    """-log(1 - u) / rate."""
    rate = argument(op, 1, "lambd", 1.0)
    paced = w.step(op, "div", (_exponentials(w, op, op.result.type.shape), rate), "paced")
    w.add(op, "to", (paced, DTypeArg(op.result.type.dtype)))


def _exponentials(w: Writer, op: Op, shape: tuple[int, ...]) -> Ref:
    u = _drawn(w, op, "rand", w.value(f"{op.result.name}_drawn", shape, "f64"))
    rest = w.step(op, "add", (w.step(op, "neg", (u,), "below"), 1), "rest")
    return w.step(op, "neg", (w.step(op, "log", (rest,), "log"),), "waited")


def _rrelu(w: Writer, op: Op) -> None:
    """x above zero; below, x times a random number between lower and upper."""
    lower, upper = argument(op, 1, "lower", 1 / 8), argument(op, 2, "upper", 1 / 3)
    assert isinstance(lower, int | float) and isinstance(upper, int | float)
    if not argument(op, 3, "training", False):
        w.add(op, "leaky_relu", (op.args[0], (lower + upper) / 2))
        return
    type = op.result.type
    slope = _drawn(w, op, "rand", w.value(f"{op.result.name}_drawn", type.shape, type.dtype))
    slope = w.step(op, "add", (w.step(op, "mul", (slope, upper - lower), "spread"), lower), "slope")
    low = w.step(op, "le", (op.args[0], 0), "low")
    w.add(op, "where", (low, w.step(op, "mul", (op.args[0], slope), "leak", None, type.dtype), op.args[0]))


def _multinomial(w: Writer, op: Op) -> None:
    """The indices whose exponential numbers, divided by their weights, are smallest (Efraimidis and Spirakis 2006)."""
    weights, count, again = ref(op.args[0]), number(op.args[1]), argument(op, 2, "replacement", False)
    shape, dtype = w.shape(weights), w.types[weights.name].dtype
    many, last = ((*shape[:-1], count, shape[-1]), len(shape)) if again else (shape, len(shape) - 1)
    waited = _exponentials(w, op, many)
    if dtype != "f64":
        weights = w.step(op, "to", (weights, DTypeArg("f64")), "wide")
    if again:
        weights = w.step(op, "reshape", (weights, (*shape[:-1], 1, shape[-1])), "rows")
    keys = w.step(op, "div", (weights, waited), "keys")
    if again or count == 1:
        w.add(op, "argmax", (keys, last, not again))
    else:
        best = w.value(f"{op.result.name}_best", op.result.type.shape, "f64")
        w.keep(Op(name="topk", args=(keys, count, last, True, True), results=(best, op.result), source=op.source))


RANDOM: Mapping[str, Rewrite] = {
    "dropout": dropout,
    "feature_dropout": dropout,
    "alpha_dropout": dropout,
    "feature_alpha_dropout": dropout,
    "rand_like": _random_like("rand"),
    "randn_like": _random_like("randn"),
    "rand": _random_new("rand"),
    "randn": _random_new("randn"),
    "uniform": _uniform,
    "normal": _normal,
    "normal_functional": _normal_like,
    "bernoulli": _bernoulli,
    "randint": _randint,
    "randint_like": _randint,
    "randperm": _randperm,
    "exponential": _exponential,
    "rrelu": _rrelu,
    "multinomial": _multinomial,
}
