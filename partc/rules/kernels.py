"""Triton expressions of operations; operations without a line here are left to PyTorch.

An elementwise operation is an expression of its operands, with `{0}` for the first; longer code is a function in
partc/kernels/functions.py. Operands have the type of the computation (fp32 for 16-bit types). Views and constants are
index expressions and move no data. A gather reads the rows whose numbers another operand has. Reductions run along the
last dimensions, within the tile of one program, or along all other dimensions; a sum over one short dimension adds its
elements one by one. Composites consist of these (partc.passes.fuse.composites).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from partc.ir.program import FLOATING, ITEMSIZE, Arg, DType, DTypeArg, Op, Ref

Spelling = str | Callable[[Op], str | None]
Kind = Literal["pointwise", "view", "gather", "constant", "reduction", "composite", "streamed"]

# Operations whose results are contiguous, whatever the operands' strides.
CONTIGUOUS = frozenset(
    {
        "linear", "linear_grad_input", "linear_grad_weight", "matmul", "matmul_grad_left", "matmul_grad_right", "mm",
        "bmm", "embedding", "embedding_shard", "fused", "outer", "linear_grad_bias",
    }
)  # fmt: skip
_INDEXED = frozenset({"reshape", "permute", "expand", "slice", "split", "cat", "slice_backward", "alias"})
CONSTANTS = frozenset({"full", "zeros", "ones", "scalar_tensor"})
CONDITIONS: Mapping[str, int] = {"where": 0, "masked_fill": 1}  # the position of the operand that is a bool
LOGICAL = frozenset(  # their results are bools, whatever the operands are
    {"logical_and", "logical_or", "bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__", "__xor__"}
)
LABELS: Mapping[str, tuple[int, ...]] = {"cross_entropy_rows": (2, 4)}  # positions of operands that stay integers
LOOKED_UP: Mapping[str, tuple[int, int]] = {"cross_entropy_rows": (3, 2)}  # positions of a table and its index
REDUCTIONS = frozenset({"sum", "amax", "amin"})
COMPOSITES = frozenset(
    {
        "rms_norm", "rms_norm_backward", "layer_norm", "layer_norm_backward", "softmax", "_softmax_backward_data",
        "log_softmax", "_log_softmax_backward_data",
        "linear_grad_bias", "cross_entropy_backward", "rms_norm_grad_input", "rms_norm_grad_weight",
        "layer_norm_grad_input", "layer_norm_grad_weight",
        "logsumexp", "mean", "var", "std", "linalg_vector_norm",
    }
)  # fmt: skip
STREAMED = frozenset({"shard_max", "sum_exp", "pick", "smooth_sum"})  # reductions that read long rows once
# Computed by kernels of the runtime.
CHUNKED = frozenset({"linear_cross_entropy", "linear_cross_entropy_backward", "linear_cross_entropy_grad_input"})
TABLES = frozenset(
    {"embedding_dense_backward", "embedding_shard_backward"}
)  # their gradients have kernels of their own
_RANKED = frozenset({"mask_classes", "pick", "smooth_sum", "cross_entropy_backward", "embedding_shard_backward"})
_LARGEST: Mapping[DType, float] = {
    "f64": (2 - 2.0**-52) * 2.0**1023, "f32": (2 - 2.0**-23) * 2.0**127, "bf16": (2 - 2.0**-7) * 2.0**127,
    "f16": 65504.0,
}  # fmt: skip
_SMOOTHED: Mapping[str, tuple[int, int, int]] = {  # positions: class weights, smoothing, the weights' total
    "cross_entropy": (2, 4, 5), "cross_entropy_rows": (3, 5, 8), "cross_entropy_backward": (4, 6, 7),
}  # fmt: skip
# Defaults of the last arguments.
DEFAULTS: Mapping[str, tuple[float, ...]] = {
    "leaky_relu": (0.01,), "elu": (1, 1, 1), "celu": (1.0,), "softplus": (1, 20), "hardtanh": (-1, 1),
}  # fmt: skip
MOST_JOINED = 4  # operands of a fused `cat`: each element tests in which operand it lies


def kind(op: Op) -> Kind | None:
    """The role of the operation in a kernel; None if kernels do not support it."""
    if op.name == "cat":
        return "view" if len(cat_operands(op)[0]) <= MOST_JOINED else None
    if op.name in _INDEXED:
        stepped = op.name == "slice_backward" and op.args[5] != 1
        return None if stepped or op.attrs else "view"
    if op.name == "permute_rows":
        return "gather" if len(op.args) == 3 else None
    if op.name == "drawn":
        return "constant"
    if op.name in CONSTANTS:
        return "constant" if isinstance(fill(op), int | float) else None
    if op.name in REDUCTIONS:
        return "reduction"
    if op.name in STREAMED:
        return "streamed"
    if op.name in COMPOSITES:
        return None if lacks_total(op) else "composite"
    return "pointwise" if triton_expression(op) is not None else None


def triton_expression(op: Op) -> str | None:
    """The expression of an elementwise operation; None if there is none for these arguments."""
    spelling = POINTWISE.get(op.name)
    if spelling is None or len(op.results) != 1:
        return None
    return spelling if isinstance(spelling, str) and not op.attrs else spelling(op) if callable(spelling) else None


def arguments(op: Op) -> tuple[Arg, ...]:
    """The arguments of an elementwise operation, defaults included."""
    return (*op.args, *DEFAULTS.get(op.name, ())[len(op.args) - 1 :])


def fill(op: Op) -> Arg:
    """The number with which a constant is filled."""
    if op.name in ("zeros", "ones"):
        return int(op.name == "ones")
    return op.args[0] if op.name == "scalar_tensor" else op.args[1]


def cat_operands(op: Op) -> tuple[tuple[str, ...], int]:
    """The operands of a `cat`, and its dimension."""
    parts, dim = (*op.args, dict(op.attrs).get("dim", 0))[:2]
    names = (part.name for part in parts if isinstance(part, Ref)) if isinstance(parts, tuple) else ()
    return tuple(names), dim if isinstance(dim, int) else 0


def rank_axis(op: Op) -> str:
    """The axis that cuts the classes or the table of an operation; the kernel receives the rank on it."""
    axis = dict(op.attrs).get("axis") if op.name in _RANKED else None
    alike = op.name == "smooth_sum" and op.args[1] is None
    return axis if isinstance(axis, str) and not alike else ""


def lacks_total(op: Op) -> Ref | None:
    """The class weights of a smoothed loss, if the operation lacks their sum: kernels do not sum them for every row."""
    weight, smoothing, total = _SMOOTHED.get(op.name, (0, 0, 0))
    table = op.args[weight] if total and op.args[smoothing] and len(op.args) <= total else None
    return table if isinstance(table, Ref) else None


def launch_scalars(body: Iterable[Op]) -> dict[str, Op]:
    """The scalar parameters of a kernel's launch, each with an operation that needs it."""
    found = {f"{rank_axis(op)}_rank": op for op in body if rank_axis(op)}
    drawn = (op for op in body if op.name == "drawn")
    return found | {f"counter_{number}": op for number, op in enumerate(drawn)}


def padded_slice(op: Op) -> tuple[int, int]:
    """The dimension of the slice whose gradient this operation is, and the slice's start."""
    dim, start = op.args[2:4]
    first = start if isinstance(start, int) else 0
    at = dim if isinstance(dim, int) else 0
    sizes = op.args[1]
    whole = sizes[at] if isinstance(sizes, tuple) else 0
    return at, first + whole if first < 0 and isinstance(whole, int) else first


def literal(arg: Arg) -> str:
    """A number as Triton source."""
    if isinstance(arg, float) and not math.isfinite(arg):
        return f'float("{arg}")'
    return f"({arg!r})" if isinstance(arg, int | float) and not isinstance(arg, bool) and arg < 0 else repr(arg)


def _scaled(symbol: str) -> Spelling:
    """`x + alpha * y`."""

    def write(op: Op) -> str | None:
        attrs = dict(op.attrs)
        alpha = attrs.pop("alpha", 1)
        if attrs:
            return None
        return f"{{0}} {symbol} {{1}}" if alpha == 1 else f"{{0}} {symbol} {literal(alpha)} * {{1}}"

    return write


def _power(op: Op) -> str | None:
    """The exact forms of the few exponents that occur."""
    exponent = op.args[1]
    powers = {1: "{0}", 2: "{0} * {0}", 3: "{0} * {0} * {0}", 4: "({0} * {0}) * ({0} * {0})", -1: "1.0 / {0}",
              0.5: "tl.sqrt({0})", -0.5: "tl.rsqrt({0})"}  # fmt: skip
    return powers.get(exponent) if isinstance(exponent, int | float) and op.result.type.dtype in FLOATING else None


def _floating(text: str) -> Spelling:
    """A spelling for floating-point operands only."""
    return lambda op: text if op.result.type.dtype in FLOATING and not op.attrs else None


def _integer_quotient(text: str) -> Spelling:
    """A spelling for integers divided by a positive number: no rounding, no division by zero."""

    def write(op: Op) -> str | None:
        by = op.args[1]
        positive = isinstance(by, int) and not isinstance(by, bool) and by > 0
        return text if positive and op.result.type.dtype in ("i64", "i32") and not op.attrs else None

    return write


def _clamped(op: Op) -> str | None:
    low, high = (*arguments(op)[1:], None, None)[:2]
    return None if op.attrs else _no_more(_no_less("{0}", low, "{1}"), high, "{2}")


def _no_less(text: str, bound: Arg, place: str) -> str:
    """Clamp from below by a number, or by a tensor whose NaNs propagate."""
    if isinstance(bound, Ref):
        return _extreme("maximum", text, place)
    return text if bound is None else f"tl.where({text} < {place}, {place}, {text})"


def _no_more(text: str, bound: Arg, place: str) -> str:
    if isinstance(bound, Ref):
        return _extreme("minimum", text, place)
    return text if bound is None else f"tl.where({text} > {place}, {place}, {text})"


def _extreme(name: str, left: str = "{0}", right: str = "{1}") -> str:
    return f"tl.{name}({left}, {right}, propagate_nan=tl.PropagateNan.ALL)"


def _finite(op: Op) -> str | None:
    """nan_to_num: infinities become the largest numbers of the type, unless replacements are given."""
    most = _LARGEST.get(op.result.type.dtype)
    if most is None or op.attrs:
        return None
    nan, above, below = (
        f"{{{place}}}" if len(op.args) > place and op.args[place] is not None else literal(default)
        for place, default in enumerate((0.0, most, -most), 1)
    )
    infinite = f'tl.where({{0}} == float("inf"), {above}, tl.where({{0}} == float("-inf"), {below}, {{0}}))'
    return f"tl.where({{0}} != {{0}}, {nan}, {infinite})"


def _third(text: str) -> Spelling:
    """x + value * (a function of two other operands): addcmul, addcdiv."""

    def write(op: Op) -> str | None:
        attrs = dict(op.attrs)
        value = attrs.pop("value", 1)
        return None if attrs else f"{{0}} + {'' if value == 1 else f'{literal(value)} * '}{text}"

    return write


def _lerp(op: Op) -> str:
    """Linear interpolation, computed from the nearer end."""
    weight = op.args[2]
    if isinstance(weight, int | float):
        return "{0} + {2} * ({1} - {0})" if abs(weight) < 0.5 else "{1} - (1.0 - {2}) * ({1} - {0})"
    return "functions.lerp({0}, {1}, {2})"


def _elu_backward(op: Op) -> str | None:
    """The derivative of elu from its input, or from its result (then without an exponential)."""
    if op.attrs:
        return None
    if op.args[4]:
        return "tl.where({5} > 0.0, {0} * {2}, {0} * {3} * ({5} + {1} * {2}))"
    return "functions.elu_backward({0}, {1}, {2}, {3}, {5})"


def _gelu(suffix: str) -> Spelling:
    operands = "{0}, {1}" if suffix else "{0}"

    def write(op: Op) -> str | None:
        how = dict(op.attrs).get("approximate", "none")
        return f"functions.gelu{'_tanh' if how == 'tanh' else ''}{suffix}({operands})"

    return write


def _dropout_backward(op: Op) -> str | None:
    p = op.args[2]
    return f"{{0}} * {{1}} * {literal(1 / (1 - p))}" if isinstance(p, float) and p < 1 else None


def _row_losses(op: Op) -> str | None:
    """Cross-entropy of a row from lse, label logit, label, class weights, ignored label, smoothing, sum of logits,
    classes, and total weight.
    """
    if lacks_total(op):
        return None
    if op.args[3] is not None:
        smooth = "functions.weighted_smooth_row_loss({0}, {1}, {2} == {4}, {3}, {5}, {6}, {7}, {8})"
        return smooth if op.args[5] else "functions.weighted_row_loss({0}, {1}, {2} == {4}, {3})"
    if op.args[5]:
        return "functions.smooth_row_loss({0}, {1}, {2} == {4}, {5}, {6}, {7})"
    return "functions.row_loss({0}, {1}, {2} == {4})"


def _comparison(symbol: str) -> Spelling:
    return f"{{0}} {symbol} {{1}}"


def _cast(op: Op) -> str | None:
    """A cast to the result's type; the reader performs it."""
    return "{0}" if isinstance(op.args[1], DTypeArg) and op.args[1].name in ITEMSIZE else None


POINTWISE: Mapping[str, Spelling] = {
    "add": _scaled("+"),
    "sub": _scaled("-"),
    "rsub": "{1} - {0}",
    "mul": "{0} * {1}",
    "div": lambda op: None if op.attrs else "{0} / {1}",
    "neg": "-{0}",
    "reciprocal": "1.0 / {0}",
    "square": "{0} * {0}",
    "abs": "tl.abs({0})",
    "pow": _power,
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "log": "tl.log({0})",
    "log2": "tl.log2({0})",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "tl.rsqrt({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "erf": "tl.erf({0})",
    "tanh": "functions.tanh({0})",
    "sigmoid": "tl.sigmoid({0})",
    "silu": "functions.silu({0})",
    "gelu": _gelu(""),
    "relu": "tl.where({0} < 0, 0.0, {0})",  # a NaN passes
    "leaky_relu": "functions.leaky_relu({0}, {1})",
    "_prelu_kernel": "functions.leaky_relu({0}, {1})",
    "elu": "functions.elu({0}, {1}, {2}, {3})",
    "celu": "functions.elu({0}, {1}, 1.0, 1.0 / {1})",
    "softplus": "functions.softplus({0}, {1}, {2})",
    "log_sigmoid": "functions.log_sigmoid({0})",
    "logit": lambda op: "tl.log({0} / (1.0 - {0}))" if op.args[1:] in ((), (None,)) else None,
    "binary_cross_entropy": "functions.binary_cross_entropy({0}, {1})",
    "mish": "functions.mish({0})",
    "hardtanh": _clamped,
    "hardsigmoid": "functions.hardsigmoid({0})",
    "hardswish": "{0} * functions.hardsigmoid({0})",
    "threshold": "tl.where({0} <= {1}, {2}, {0})",
    "log1p": "functions.log1p({0})",
    "expm1": "functions.expm1({0})",
    "floor": _floating("tl.floor({0})"),
    "ceil": _floating("tl.ceil({0})"),
    "round": _floating("functions.round({0})"),
    "trunc": _floating("functions.trunc({0})"),
    "frac": _floating("{0} - functions.trunc({0})"),
    "sign": _floating("functions.sign({0})"),
    "sgn": _floating("functions.sign({0})"),
    "isnan": "{0} != {0}",
    "isinf": 'tl.abs({0}) == float("inf")',
    "nan_to_num": _finite,
    "remainder": _integer_quotient("functions.remainder({0}, {1})"),
    "fmod": _integer_quotient("{0} % {1}"),
    "lerp": _lerp,
    "addcmul": _third("({1} * {2})"),
    "addcdiv": _third("({1} / {2})"),
    "xlogy": "tl.where(({0} == 0) & ({1} == {1}), 0.0, {0} * tl.log({1}))",
    "logaddexp": "functions.log_add_exp({0}, {1})",
    "maximum": _extreme("maximum"),
    "minimum": _extreme("minimum"),
    "clamp": _clamped,
    "clamp_min": lambda op: None if op.attrs else _no_less("{0}", op.args[1], "{1}"),
    "clamp_max": lambda op: None if op.attrs else _no_more("{0}", op.args[1], "{1}"),
    "where": "tl.where({0}, {1}, {2})",
    "masked_fill": "tl.where({1}, {2}, {0})",
    "to": _cast,
    "eq": _comparison("=="),
    "ne": _comparison("!="),
    "lt": _comparison("<"),
    "le": _comparison("<="),
    "gt": _comparison(">"),
    "ge": _comparison(">="),
    "logical_and": "{0} & {1}",
    "logical_or": "{0} | {1}",
    "logical_not": "{0} == 0",
    "bitwise_and": "{0} & {1}",
    "bitwise_or": "{0} | {1}",
    "bitwise_xor": "{0} ^ {1}",
    "bitwise_not": lambda op: "{0} == 0" if op.result.type.dtype == "bool" else "~{0}",
    "logical_xor": "({0} != 0) != ({1} != 0)",
    "__and__": "{0} & {1}",
    "__or__": "{0} | {1}",
    "__xor__": "{0} ^ {1}",
    # of rows
    "mask_classes": lambda op: "{0}",  # the lowering adds the class index
    "log_sum_exp": "{0} + tl.log({1})",
    "cross_entropy_rows": _row_losses,
    # derivatives: operand 0 is the gradient
    "silu_backward": "functions.silu_backward({0}, {1})",
    "gelu_backward": _gelu("_backward"),
    "tanh_backward": "{0} * (1.0 - {1} * {1})",
    "sigmoid_backward": "{0} * {1} * (1.0 - {1})",
    "threshold_backward": "tl.where({1} <= {2}, 0.0, {0})",
    "leaky_relu_backward": "tl.where({1} > 0.0, {0}, {0} * {2})",
    "elu_backward": _elu_backward,
    "softplus_backward": "functions.softplus_backward({0}, {1}, {2}, {3})",
    "hardtanh_backward": "tl.where(({1} <= {2}) | ({1} >= {3}), 0.0, {0})",
    "hardsigmoid_backward": "functions.hardsigmoid_backward({0}, {1})",
    "hardswish_backward": "functions.hardswish_backward({0}, {1})",
    "binary_cross_entropy_backward": "functions.binary_cross_entropy_backward({0}, {1}, {2})",
    "mish_backward": "functions.mish_backward({0}, {1})",
    "dropout_backward": _dropout_backward,
    "drop": _dropout_backward,
}
