"""One small call or more of every operation in the table, and how to run it in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from partc.ir.parser import parse_graph
from partc.ir.program import Arg, DType, DTypeArg, Graph, Op, Ref, TensorType, Value
from partc.runtime.ops.assignment import linear_sum_assignment
from partc.runtime.ops.attention import attention_sinks_backward
from partc.runtime.ops.rotary import rotary, rotary_backward

DTYPES: dict[DType, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "i64": torch.int64,
    "i32": torch.int32,
    "bool": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Case:
    op: Op
    values: Mapping[str, Tensor]
    results: tuple[Tensor, ...]

    @property
    def types(self) -> dict[str, TensorType]:
        return {name: type_of(value) for name, value in self.values.items()}

    def __str__(self) -> str:
        shapes = " ".join("x".join(map(str, value.shape)) or "0d" for value in self.values.values())
        literals = [str(arg) for arg in self.op.args if not isinstance(arg, Ref)]
        return f"{self.op.name}({', '.join([shapes, *literals])})"


def type_of(tensor: Tensor) -> TensorType:
    return TensorType.replicated(NAMES[tensor.dtype], tensor.shape)


def run(op: Op, values: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """The operation's results, as a tuple."""
    args = [_read(arg, values) for arg in op.args]
    kwargs = {name: _read(arg, values) for name, arg in op.attrs if name != "axis"}
    implementation = IMPLEMENTATIONS.get(op.name) or getattr(torch.ops.aten, op.name)
    made = implementation(*args, **kwargs)
    return tuple(made) if isinstance(made, list | tuple) else (made,)


def _read(arg: Arg, values: Mapping[str, Tensor]) -> Any:
    if isinstance(arg, Ref):
        return values[arg.name]
    if isinstance(arg, DTypeArg):
        return DTYPES[arg.name]
    return [_read(item, values) for item in arg] if isinstance(arg, tuple) else arg


def _cross_entropy(logits: Tensor, labels: Tensor, weight: Tensor | None, ignore: int, smoothing: float) -> Tensor:
    classes = logits.movedim(-1, 1) if logits.dim() > 1 else logits
    return F.cross_entropy(
        classes,
        labels,
        weight if weight is None else weight.detach(),
        ignore_index=ignore,
        label_smoothing=smoothing,
        reduction="none",
    )


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]] @ v


def _attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *rest: Any) -> Any:
    _, _, causal, scale = rest
    with torch.enable_grad():
        given = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(_attention(*given, mask, causal, scale), given, grad)


def _linear_cross_entropy_backward(
    grad: Tensor, x: Tensor, w: Tensor, bias: Tensor | None, labels: Tensor, lse: Tensor, *rest: Any
) -> Tensor:
    spread = (F.linear(x, w, bias) - lse.unsqueeze(-1)).exp() - F.one_hot(labels, len(w))
    return (grad.unsqueeze(-1) * spread) @ w


def _bounds(starts: Tensor, ends: Tensor) -> list[tuple[int, int]]:
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "reshape": torch.reshape,
    "permute": torch.permute,
    "expand": lambda x, sizes: x.expand(sizes),
    "split": lambda x, sizes, dim: torch.split(x, sizes, dim),
    "slice": lambda x, dim, start, end, step=1: x[(slice(None),) * dim + (slice(start, end, step),)],
    "cat": torch.cat,
    "floor_divide": lambda x, y: torch.floor_divide(x.detach(), y.detach()),
    "to": lambda x, dtype: x.to(dtype),
    "sum": lambda x, dims=None, keepdim=False: x.sum(dims or list(range(x.dim())), keepdim),
    "linear": F.linear,
    "linear_grad_input": lambda g, w: g @ w,
    "linear_grad_weight": lambda g, x: g.flatten(0, -2).T @ x.flatten(0, -2),
    "linear_grad_bias": lambda g: g.flatten(0, -2).sum(0),
    "matmul_grad_left": lambda g, b: g @ b.mT,
    "matmul_grad_right": lambda g, a, flat: a.flatten(0, -2).T @ g.flatten(0, -2) if flat else a.mT @ g,
    "expert_matmul_grad_rows": lambda g, experts, w: torch.einsum("so,sio->si", g, w[experts]),
    "attention": _attention,
    "attention_backward": _attention_backward,
    "attention_sinks_backward": attention_sinks_backward,
    "expert_matmul": lambda x, experts, w: torch.einsum("si,sio->so", x, w[experts]),
    "expert_rows": lambda experts, w: w[experts],
    "expert_places": lambda experts: (experts[:, :, None] == experts[:, None]).tril(-1).sum(-1),
    "selected_places": lambda mask, count: (mask.cumsum(1) - 1).clamp_min(0),
    "bag_sum": lambda x, starts, ends: torch.stack([x[i:j].sum(0) for i, j in _bounds(starts, ends)]),
    "bag_max": lambda x, starts, ends: torch.stack(
        [x[i:j].amax(0) if j > i else x[:0].sum(0) for i, j in _bounds(starts, ends)]
    ),
    "bag_sum_grad": lambda g, starts, ends, count: sum(
        F.pad(each.expand(j - i, -1), (0, 0, i, count - j))
        for each, (i, j) in zip(g, _bounds(starts, ends), strict=True)
    ),
    "bag_max_grad": lambda g, x, starts, ends: sum(
        F.pad(F.one_hot(x[i:j].argmax(0), j - i).T * each, (0, 0, i, len(x) - j))
        if j > i
        else 0 * each.sum() * torch.ones_like(x)
        for each, (i, j) in zip(g, _bounds(starts, ends), strict=True)
    ),
    "embedding": lambda w, ids: F.embedding(ids, w),
    "mask_classes": lambda x, n: torch.cat([x[..., : max(n, 0)], torch.full_like(x[..., max(n, 0) :], -math.inf)], -1),
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": lambda x, w, bias, labels, weight: F.linear(x, w, bias).amax(-1),
    "linear_cross_entropy_backward": _linear_cross_entropy_backward,
    "linear_cross_entropy_grad_input": _linear_cross_entropy_backward,
    "rms_norm": F.rms_norm,
    "fourier": lambda x, dims, inverse: torch.view_as_real(
        torch.fft.fftn(torch.view_as_complex(x), dim=dims)
        if not inverse
        else torch.fft.ifftn(torch.view_as_complex(x), dim=dims, norm="forward")
    ),
    "incoming_gradient": torch.zeros_like,
    "times_loss_scale": lambda x: x,
    "own_gradient": lambda results, operands, gradients, dims: results,
    "rotary": rotary,
    "rotary_backward": rotary_backward,
    "layer_norm": F.layer_norm,
    "group_norm": F.group_norm,
    "softmax": lambda x, dim: x.softmax(dim),
    "log_softmax": lambda x, dim: x.log_softmax(dim),
    "full": lambda sizes, value: torch.full(sizes, value, dtype=torch.float64),
    "zeros": torch.zeros,
    "ones": torch.ones,
    "arange": torch.arange,
    "eye": torch.eye,
    "linspace": torch.linspace,
    "scalar_tensor": torch.scalar_tensor,
    "index": lambda x, places: x[tuple(slice(None) if place is None else place for place in places)],
    "einsum": lambda equation, operands: torch.einsum(equation, *operands),
    "pad": lambda x, pads, value=0: F.pad(x, pads, value=value),
    "max_pool1d": F.max_pool1d,
    "max_pool2d": F.max_pool2d,
    "adaptive_max_pool2d": F.adaptive_max_pool2d,
    "matrix_exp": torch.matrix_exp,
    "linalg_svdvals": torch.linalg.svdvals,
    "linalg_eigvalsh": torch.linalg.eigvalsh,
    "linalg_inv": torch.linalg.inv,
    "linalg_det": torch.linalg.det,
    "linalg_matrix_exp": torch.linalg.matrix_exp,
    "linalg_svd": torch.linalg.svd,
    "linalg_qr": torch.linalg.qr,
    "linalg_eigh": torch.linalg.eigh,
    "linalg_cholesky": torch.linalg.cholesky,
    "linear_sum_assignment": linear_sum_assignment,
    "linalg_slogdet": torch.linalg.slogdet,
    "linalg_pinv": torch.linalg.pinv,
    "inverse": torch.inverse,
    "det": torch.det,
    "slogdet": torch.slogdet,
    "logdet": torch.logdet,
    "max_pool3d": F.max_pool3d,
    "adaptive_max_pool3d": F.adaptive_max_pool3d,
    "avg_pool3d": F.avg_pool3d,
    "adaptive_avg_pool3d": F.adaptive_avg_pool3d,
    "avg_pool1d": F.avg_pool1d,
    "avg_pool2d": F.avg_pool2d,
    "adaptive_avg_pool1d": F.adaptive_avg_pool1d,
    "adaptive_avg_pool2d": F.adaptive_avg_pool2d,
    "upsample_nearest2d": lambda x, size: F.interpolate(x, size, mode="nearest"),
    "_upsample_nearest_exact2d": lambda x, size: F.interpolate(x, size, mode="nearest-exact"),
    "upsample_bilinear2d": lambda x, size: F.interpolate(x, size, mode="bilinear"),
    "upsample_bicubic2d": lambda x, size: F.interpolate(x, size, mode="bicubic"),
}


def case(name: str, *args: Any, **attrs: Any) -> Case:
    """A call with tensors as they come; each becomes a named value."""
    values: dict[str, Tensor] = {}

    def named(arg: Any) -> Arg:
        if isinstance(arg, Tensor):
            values[f"v{len(values)}"] = arg
            return Ref(f"v{len(values) - 1}")
        if isinstance(arg, torch.dtype):
            return DTypeArg(NAMES[arg])
        return tuple(named(item) for item in arg) if isinstance(arg, list | tuple) else arg

    op = Op(name=name, args=tuple(map(named, args)), attrs=tuple((key, named(arg)) for key, arg in attrs.items()))
    results = run(op, values)
    made = tuple(Value(name=f"r{i}", type=type_of(result)) for i, result in enumerate(results))
    return Case(Op(name=op.name, args=op.args, attrs=op.attrs, results=made), values, results)


_generator = torch.Generator().manual_seed(11)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def whole(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=_generator)


def truth(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_generator) > 0.4


UNARY = (
    "abs acosh asinh atan ceil celu cos cosh detach digamma elu erf erfc exp exp2 expm1 floor gelu hardsigmoid hardswish "
    "hardtanh isfinite isinf isnan leaky_relu lgamma log log10 log1p log2 log_sigmoid logical_not mish nan_to_num reciprocal "
    "relu relu6 round rsqrt selu sigmoid sign silu sin sinh softplus sqrt square tan tanh trunc neg alias clone "
    "contiguous ones_like zeros_like"
)
BINARY = (
    "atan2 copysign eq fmod ge gt le lt logaddexp logical_and logical_or logical_xor maximum minimum ne remainder "
    "floor_divide xlogy pow add sub mul div"
)
INTEGER = "bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__"


def pointwise_cases() -> list[Case]:
    x = normal(6, 4, 3).abs() + 1.5
    y = normal(4, 1).abs() + 0.5
    found = [case(name, x) for name in UNARY.split()]
    found += [case(name, x / 9) for name in ("acos", "asin", "atanh", "erfinv", "logit")]
    found += [case("binary_cross_entropy", x / 9, x.flip(0) / 9, None, 0)]
    found += [case(name, x, y) for name in BINARY.split()]
    found += [case(name, whole(9, 6, 4), whole(9, 6, 4)) for name in INTEGER.split()]
    found += [case("bitwise_not", truth(6, 4)), case("bitwise_and", truth(6, 4), truth(4))]
    found += [case(name, x, 2.5) for name in ("add", "sub", "mul", "div", "pow", "rsub", "gt")]
    found += [case("pow", 2.5, x), case("mul", x, normal()), case("add", x, y, alpha=2), case("add", x[:, :1], y)]
    found += [case("div", x, y, rounding_mode="floor"), case("rsub", x, y), case("lerp", x, x + 1, 0.3)]
    found += [case("clamp", x, 1.0, 2.0), case("clamp_min", x, 2.0), case("clamp_max", x, 2.0)]
    found += [case("addcmul", x, x, y), case("addcdiv", x, x, y), case("threshold", x, 2.0, 0.0)]
    found += [case("full_like", x, 3.0), case("gelu", x, approximate="tanh"), case("add", x, x)]
    found += [case("to", x, torch.float32), case("to", x, torch.int64), case("to", truth(6, 4), torch.float64)]
    found += [case("to", whole(5, 6, 4), torch.float64)]
    found += [
        case("where", truth(6, 4, 3), x, y),
        case("where", truth(4, 3), x, 0.0),
        case("where", truth(4, 3), 1.0, x),
    ]
    found += [case("masked_fill", x, truth(4, 3), 0.0), case("masked_fill", x, truth(6, 1, 3), -1e9)]
    return found


def product_cases() -> list[Case]:
    x = normal(2, 6, 12)
    found = [case("linear", x, normal(18, 12)), case("linear", x, normal(18, 12), normal(18))]
    found += [case("linear", normal(12), normal(6, 12), normal(6)), case("linear", normal(6, 3), normal(4, 3), None)]
    found += [case("matmul", normal(*a), normal(*b)) for a, b in (
        ((2, 6, 12), (12, 6)), ((3, 1, 4, 6), (2, 6, 9)), ((6,), (6,)), ((4, 6), (6,)), ((6,), (2, 6, 3)),
    )]  # fmt: skip
    found += [case("linear_grad_input", normal(6, 12, 18), normal(18, 4))]
    found += [case("linear_grad_bias", normal(6, 12, 18))]
    found += [case("linear_grad_weight", normal(6, 12, 18), normal(6, 12, 4))]
    found += [case("matmul_grad_left", normal(6, 12, 18), b) for b in (normal(6, 4, 18), normal(4, 18))]
    found += [case("matmul_grad_right", normal(6, 12, 18), normal(6, 12, 4), flat) for flat in (True, False)]
    found += [case("expert_matmul_grad_rows", normal(12, 18), torch.arange(12) % 3, normal(4, 6, 18))]
    found += [case("expert_matmul", normal(12, 6), torch.arange(12) % 3, normal(4, 6, 18))]
    found += [case("expert_rows", torch.arange(12) % 3, normal(4, 6))]
    found += [case("expert_places", torch.randint(3, (6, 12))), case("times_loss_scale", torch.randn(4, 6))]
    found += [case("selected_places", torch.rand(6, 12).argsort(1) < 5, 5)]
    found += [case("linear_sum_assignment", normal(6, 4)), case("linear_sum_assignment", normal(4, 6), True)]
    starts, ends = torch.tensor([0, 0, 3, 3, 8, 11]), torch.tensor([0, 3, 3, 8, 11, 12])
    found += [case("bucketize", normal(6, 4), torch.arange(3.0))]
    found += [case(f"_{f}_backward_data", x, x, 1, torch.float64) for f in ("softmax", "log_softmax")]
    found += [case("bag_sum", normal(13, 6), starts, ends), case("bag_max", normal(13, 6), starts, ends)]
    found += [case("bag_sum_grad", normal(6, 4), starts, ends, 13)]
    found += [case("bag_max_grad", normal(6, 4), normal(13, 4), starts, ends)]
    found += [case("mm", normal(6, 4), normal(4, 6)), case("bmm", normal(6, 4, 3), normal(6, 3, 4))]
    found += [
        case("mv", normal(6, 4), normal(4)),
        case("dot", normal(6), normal(6)),
        case("outer", normal(6), normal(4)),
    ]
    found += [case("einsum", "bhsd,bhtd->bhst", [normal(2, 3, 4, 6), normal(2, 3, 6, 6)])]
    found += [case("einsum", "...hqk,...khd->...qhd", [normal(2, 3, 4, 6, 6), normal(3, 6, 4, 2)])]
    found += [
        case("einsum", "bi,oi,o->o", [normal(2, 6), normal(3, 6), normal(3)]),
        case("einsum", "ij->ji", [normal(6, 4)]),
    ]
    q, k, v = normal(2, 6, 4, 3), normal(2, 3, 4, 3), normal(2, 3, 4, 6)
    found += [case("attention", q, k, v, None, True, None), case("attention", q, q, q, None, False, 0.5)]
    found += [case("attention", q, k, v, truth(2, 1, 4, 4).logical_or(torch.eye(4).bool()), False, None)]
    found += [
        case("attention", q, k, v, normal(4, 4), False, None),
        case("attention", q, k, v, normal(6, 4, 4), False, None),
    ]
    found += [case("attention", q, k, v, None, True, None, sinks=normal(6))]
    out, lse = normal(2, 6, 4, 6), normal(2, 6, 4)
    found += [case("attention_sinks_backward", out, normal(2, 6, 4, 6), lse, normal(6))]
    found += [case("attention_backward", out, q, k, v, None, out, lse, causal, None) for causal in (True, False)]
    image, filters = normal(2, 6, 5, 7), normal(12, 6, 3, 2)
    found += [case("conv2d", image, filters, normal(12), [2, 1]), case("conv2d", image, filters)]
    found += [
        case("conv1d", normal(2, 6, 8), normal(4, 6, 2), normal(4)),
        case("conv3d", normal(2, 3, 4, 4, 4), normal(6, 3, 2, 2, 2)),
    ]
    return [*found, case("conv2d", image, normal(12, 1, 3, 2), normal(12), [1, 1], [0, 0], [1, 1], 6)]


def norm_and_loss_cases() -> list[Case]:
    x, w, b = normal(2, 3, 6), normal(6), normal(6)
    heads, rows, columns = normal(2, 4, 6, 8), normal(6, 8), normal(2, 1, 6, 2)
    found = [
        case("incoming_gradient", x),
        case("own_gradient", [x], [x, w], [x, w], dims=((0, 1, 2), (0, 1, 2), (2,))),
        case("own_gradient", [b, w], [x], [x], dims=((2,), (2,), (0, 1, 2))),
        *(
            case("fourier", torch.randn(4, 6, 8, 2, dtype=torch.float64), dims, back)
            for dims, back in (((2,), False), ((0, 1), True))
        ),
        *(case(f"rotary{way}", heads, rows, rows, None, False) for way in ("", "_backward")),
        *(case(f"rotary{way}", heads, columns, columns, 4, True) for way in ("", "_backward")),
        case("rms_norm", x, [6], w, 1e-5),
        case("rms_norm", x, [6], None, 1e-5),
        case("rms_norm", x, [3, 6], normal(3, 6), 1e-5),
    ]
    found += [case("layer_norm", x, [6], w, b, 1e-5), case("layer_norm", x, [6], None, None, 1e-5)]
    found += [case("group_norm", normal(2, 6, 4, 3), 3, w, b), case("embedding", normal(12, 6), whole(12, 4, 3))]
    labels = whole(12, 2, 3)
    labels[0, 1] = -100
    logits = normal(2, 3, 12)
    found += [
        case("mask_classes", logits, 9),
        case("cross_entropy", logits, labels, None, -100, 0.0),
        case("cross_entropy", logits, labels, None, -100, 0.1),
    ]
    rows, head, known = normal(2, 3, 6), normal(12, 6), whole(12, 2, 3)
    found += [
        case("linear_cross_entropy", rows, head, None, known, None),
        case("linear_cross_entropy", rows, head, normal(12), known, None),
        *(
            case(f"linear_cross_entropy_{made}", normal(2, 3), rows, head, None, known, normal(2, 3), None, -100, 0.0)
            for made in ("backward", "grad_input")
        ),
    ]
    return [*found, case("cross_entropy", logits.reshape(6, 12), labels.reshape(6), normal(12).abs(), -100, 0.0)]


def view_cases() -> list[Case]:
    x = normal(4, 6, 12)
    shapes = [
        (24, 12),
        (4, 6, 3, 4),
        (4, 72),
        (2, 2, 6, 12),
        (4, 1, 6, 12),
        (288,),
        (8, 3, 3, 2, 2),
        (6, 4, 12),
        (4, 8, 9),
        (3, 8, 12),
    ]
    found = [case("reshape", x, list(shape)) for shape in shapes]
    found += [
        case("reshape", normal(6, 1, 4), [6, 4]),
        case("reshape", normal(), [1, 1]),
        case("reshape", normal(1, 1), []),
    ]
    found += [case("permute", x, [2, 0, 1]), case("permute", x, [0, 2, 1])]
    found += [
        case("expand", normal(6, 1, 3), [2, 6, 4, 3]),
        case("expand", normal(), [6, 4]),
        case("expand", x, [4, 6, 12]),
    ]
    found += [
        case("split", x, [4, 4, 4], 2),
        case("split", x, [6, 3, 3], 2),
        case("split", x, [1, 3], 0),
        case("split", x, [2, 2, 2], 1),
    ]
    found += [
        case("cat", [x, x + 1], 2),
        case("cat", [normal(4, 6), normal(4, 12), normal(4, 2)], 1),
        case("cat", [x], 0),
        case("slice_scatter", normal(4, 6, 8), normal(4, 6, 4), 2, 1, 8, 2),
        case("slice_scatter", normal(4, 6, 8), normal(4, 2, 8), -2, 0, 6, 3),
    ]
    found += [
        case("slice", x, 2, 0, 6, 1),
        case("slice", x, 2, 4, 8, 1),
        case("slice", x, 1, 3, 6, 1),
        case("slice", x, 0, 1, 2, 1),
    ]
    found += [
        case("slice", x, 2, 1, 12, 2),
        case("slice", x, 2, 0, 12, 3),
        case("slice", x, 2, 1, 11, 3),
        case("slice", x, 2, 6, 12),
    ]
    found += [case("repeat", normal(6, 4), [2, 3, 1]), case("repeat_interleave", x, 3, 1)]
    found += [
        case("flip", x, [1]),
        case("roll", x, [1], [2]),
        case("roll", x, [3]),
        case("tril", x),
        case("triu", x, 1),
    ]
    return [
        *found,
        case("constant_pad_nd", x, [1, 0], 0),
        case("pad", x, [0, 0, 1, 2], 1.0),
        case("diff", x, 1, 2),
        case("diff", x, 1, 1, x[:, :2]),
    ]


def reduction_cases() -> list[Case]:
    x = normal(4, 6, 3)
    found = [
        case("sum", x, [1], False),
        case("sum", x, [0, 2], True),
        case("sum", x),
        case("sum", x, [2]),
        case("sum", whole(9, 6, 4), [1]),
    ]
    found += [case(name, x, [1], True) for name in ("amax", "amin", "mean", "logsumexp")]
    found += [case(name, x) for name in ("mean", "max", "min", "any", "all", "prod", "argmax", "var", "std")]
    found += [case("count_nonzero", x), case("count_nonzero", x, [0, 2])]
    found += [
        case("argmax", x, 1),
        case("argmin", x, 1, True),
        case("max", x, 1),
        case("max", x, -x),
        case("min", x, 2, True),
        case("var", x, [1]),
    ]
    found += [case("norm", x, 2, [1]), case("linalg_vector_norm", x, 2, [1, 2], True)]
    found += [case("any", truth(4, 6), 1), case("all", truth(4, 6), 1, True)]
    found += [
        case(name, x, 1) for name in ("softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")
    ]
    return [*found, case("sort", x, 1), case("argsort", x, 1), case("topk", x, 2, 1), case("topk", x, 3, 2)]


MATRIX_FUNCTIONS = (
    "matrix_exp", "linalg_matrix_exp", "linalg_svdvals", "linalg_svd", "linalg_qr", "linalg_eigh", "linalg_eigvalsh",
    "linalg_cholesky", "linalg_inv", "inverse", "linalg_det", "det", "linalg_slogdet", "slogdet", "logdet",
    "linalg_pinv",
)  # fmt: skip


def pooling_cases() -> list[Case]:
    image = normal(2, 6, 4, 6)
    found = [case(name, normal(2, 6, 8), 2) for name in ("max_pool1d", "avg_pool1d", "adaptive_avg_pool1d")]
    found += [
        case(name, image, [2, 3]) for name in ("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d")
    ]
    matrices = normal(4, 3, 3)
    matrices = matrices @ matrices.mT + torch.eye(3, dtype=matrices.dtype)  # symmetric and positive definite
    found += [case(name, matrices) for name in MATRIX_FUNCTIONS]
    film = normal(2, 6, 4, 6, 2)
    found += [
        case(name, film, [2, 3, 2])
        for name in ("max_pool3d", "avg_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool3d")
    ]
    return found + [
        case(name, image, [8, 9])
        for name in ("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_bicubic2d")
    ]


def lookup_cases() -> list[Case]:
    x = normal(4, 6, 3)
    found = [
        case("gather", x, 1, whole(6, 4, 9, 3)),
        case("gather", x, 2, whole(3, 4, 6, 2)),
        case("gather", x, 0, whole(4, 6, 2, 3)),
    ]
    found += [case("index_select", x, 1, whole(6, 12)), case("index_select", x, 0, whole(4, 3))]
    found += [
        case("index", x, [whole(4, 6)]),
        case("index", x, [None, whole(6, 4, 3)]),
        case("index", x, [None, whole(6, 12), whole(3, 12)]),
    ]
    return [
        *found,
        case("index", x, [whole(4, 6, 1), None, whole(3, 4)]),
        case("index", x, [whole(4, 6, 1), whole(6, 4)]),
    ]


def constant_cases() -> list[Case]:
    x = normal(3, 4)
    found = [case("full", [6, 4], 2.5), case("zeros", [6, 4]), case("ones", [6, 4]), case("scalar_tensor", 2.0)]
    found += [case("new_zeros", x, [6, 4]), case("new_ones", x, [6, 4]), case("new_full", x, [6, 4], 2.0)]
    return [*found, case("arange", 12), case("eye", 6), case("linspace", 0.0, 1.0, 12)]


def _scan(
    starts: Any, sequences: Any, constants: Any, length: int, dims: Any, reverse: bool, step: Graph
) -> list[Tensor]:
    """Time after time, from the definition."""
    states, rows = starts, []
    for t in reversed(range(length)) if reverse else range(length):
        elements = [x.select(dim, t) for x, dim in zip(sequences, dims, strict=False)]
        known = dict(zip((value.name for value in step.inputs), (*states, *elements, *constants), strict=True))
        for op in step.ops:
            known.update(zip((value.name for value in op.results), run(op, known), strict=True))
        made = [known[name] for name in step.outputs]
        states = made[: len(starts)]
        rows.append(made[len(starts) :])
    rows = rows[::-1] if reverse else rows
    return [
        *states,
        *(torch.stack([*each], dim) for each, dim in zip(zip(*rows, strict=True), dims[len(sequences) :], strict=True)),
    ]


IMPLEMENTATIONS["scan"] = _scan
DECAYING = """input h: f64[4, 6]
input a_t: f64[4, 6]
input b_t: f64[4, 6]
input w: f64[6]
decayed = mul(a_t, h)  # f64[4, 6]
next = add(decayed, b_t)  # f64[4, 6]
out = mul(next, w)  # f64[4, 6]
return next, out
"""
MIXING = """input h: f64[4, 6]
input x_t: f64[4, 1, 6]
input w: f64[6, 6]
flat = reshape(x_t, (4, 6))  # f64[4, 6]
mixed = linear(h, w)  # f64[4, 6]
next = add(mixed, flat)  # f64[4, 6]
return next, next
"""


def scan_cases() -> list[Case]:
    a, b, h = normal(4, 3, 6), normal(3, 4, 6), normal(4, 6)
    decaying = {"length": 3, "dims": [1, 0, 2], "step": parse_graph(DECAYING)}
    mixing = {"length": 3, "dims": [0, 1], "reverse": True, "step": parse_graph(MIXING)}
    return [
        case("scan", [h], [a, b], [normal(6)], reverse=False, **decaying),
        case("scan", [h], [a, b], [normal(6)], reverse=True, **decaying),
        case("scan", [h], [normal(3, 4, 1, 6)], [normal(6, 6)], **mixing),
    ]


def solve_cases() -> list[Case]:
    a, x = normal(4, 2, 6, 6).tril() + 4 * torch.eye(6, dtype=torch.float64), normal(4, 2, 6, 6)
    return [
        case("linalg_solve_triangular", a, x[..., :4], upper=False),
        case("linalg_solve_triangular", a, x, upper=False, left=False, unitriangular=True),
        case("linalg_solve_triangular", a[0, 0], x[..., :4], upper=False),
        case("linalg_solve_triangular", a, x[:1, :, :4], upper=False, left=False),
    ]


def all_cases() -> list[Case]:
    return [
        *solve_cases(),
        *scan_cases(),
        *pointwise_cases(),
        *product_cases(),
        *norm_and_loss_cases(),
        *view_cases(),
        *reduction_cases(),
        *pooling_cases(),
        *lookup_cases(),
        *constant_cases(),
    ]
