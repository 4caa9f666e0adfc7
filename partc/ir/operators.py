"""torch operators that represent collectives and composites while a region is differentiated.

They carry shapes and derivatives, never values: regions are differentiated on fake tensors, and the emitted code calls
partc.runtime instead. A tensor operand of a collective is the local shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from partc.ir.parser import parse_graph
from partc.ir.program import Arg, DType, DTypeArg, Op, Ref, TensorType
from partc.ir.scans import with_time
from partc.runtime.ops.assignment import linear_sum_assignment
from partc.runtime.ops.attention import row_dtype
from partc.runtime.ops.rotary import joined, pairs
from partc.torch_private import FakeTensor, OpOverloadPacket, below_autograd, overload_name

Shapes = Callable[..., Tensor | tuple[Tensor, ...] | list[Tensor]]
Gradients = Callable[..., Sequence[Tensor | None]]  # (grads of results, args, results) -> grads of args

_LIBRARY = torch.library.Library("partc", "DEF")
_ops = torch.ops.partc


def _operator(name: str, schema: str, shapes: Shapes, gradients: Gradients | None = None) -> None:
    """Define `partc::name` from its schema, its result shapes and its derivative, if it has one."""
    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, shapes, "CompositeExplicitAutograd")
    if gradients is None:
        return
    derivative = gradients
    call = getattr(_ops, name)

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            ctx.set_materialize_grads(False)  # zeros of autograd's own have no layout
            ctx.args = args
            with below_autograd():
                ctx.results = call(*args)
            return ctx.results

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            if all(g is None for g in grads):
                return (None,) * len(ctx.args)
            results = (ctx.results,) if isinstance(ctx.results, Tensor) else ctx.results
            given = tuple(torch.zeros_like(r) if g is None else g for g, r in zip(grads, results, strict=True))
            found = tuple(derivative(given, ctx.args, ctx.results))
            return found + (None,) * (len(ctx.args) - len(found))

    _LIBRARY.impl(name, lambda *args: Differentiable.apply(*args), "Autograd")


def _empty_like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)


def _assigned(cost: Tensor, maximize: bool = False) -> tuple[Tensor, Tensor]:
    """Values of constants are computed while a model is traced; other operands have none."""
    if isinstance(cost, FakeTensor):
        rows, columns = (cost.new_empty(min(cost.shape), dtype=torch.int64) for _ in range(2))
        return rows, columns
    return linear_sum_assignment(cost, maximize)


def _scaled(x: Tensor, dim: int, times: int = 1, over: int = 1) -> Tensor:
    shape = list(x.shape)
    shape[dim] = shape[dim] * times // over
    return x.new_empty(shape)


def _define_marks() -> None:
    """`mark` names a forward value in the traced graph; `mark_grad` names its gradient.

    Marked values are dense: derivatives that depend on strides are those for dense operands (rules.demands_dense).
    """
    dense = lambda x, name: x.new_empty(x.shape)  # noqa: E731
    _operator("mark_grad", "(Tensor x, str name) -> Tensor", dense)
    _operator("mark", "(Tensor x, str name) -> Tensor", dense, lambda g, a, r: [_ops.mark_grad(g[0], a[1])])


def _define_collectives() -> None:
    """Each reshard and its transpose, as partc.sharding.reshard plans them (n is the axis's size)."""
    one = "(Tensor x, str axis, int n) -> Tensor"
    cut = "(Tensor x, int dim, int outer, str axis, int n) -> Tensor"
    grow = lambda x, dim, outer, axis, n: _scaled(x, dim, times=n)  # noqa: E731
    shrink = lambda x, dim, outer, axis, n: _scaled(x, dim, over=n)  # noqa: E731
    rest = lambda args: args[1:]  # noqa: E731
    _operator("vary", one, _empty_like, lambda g, a, r: [_ops.all_reduce(g[0], *rest(a))])
    _operator("settle", one, _empty_like, lambda g, a, r: [g[0] / a[2]])
    _operator("spread", one, _empty_like, lambda g, a, r: [g[0]])
    _operator("all_reduce", one, _empty_like, lambda g, a, r: [g[0]])
    _operator("all_gather", cut, grow, lambda g, a, r: [_ops.reduce_scatter(g[0], *rest(a))])
    _operator("reduce_scatter", cut, shrink, lambda g, a, r: [_ops.all_gather(g[0], *rest(a))])
    _operator("unshard", cut, grow, lambda g, a, r: [_ops.take(g[0], *rest(a))])
    _operator("shard", cut, shrink, lambda g, a, r: [_ops.all_gather(g[0], *rest(a))])
    _operator("take", cut, shrink, lambda g, a, r: [_ops.put(g[0], *rest(a))])
    _operator("put", cut, grow, lambda g, a, r: [_ops.take(g[0], *rest(a))])
    _operator(
        "all_to_all",
        "(Tensor x, int split_dim, int split_outer, int concat_dim, int concat_outer, str axis, int n) -> Tensor",
        lambda x, sd, so, cd, co, axis, n: _scaled(_scaled(x, sd, over=n), cd, times=n),
        lambda g, a, r: [_ops.all_to_all(g[0], a[3], a[4], a[1], a[2], a[5], a[6])],
    )


def _define_matmuls() -> None:
    _operator(
        "linear_grad_input", "(Tensor g, Tensor w) -> Tensor", lambda g, w: g.new_empty([*g.shape[:-1], w.shape[1]])
    )
    _operator(
        "linear_grad_weight", "(Tensor g, Tensor x) -> Tensor", lambda g, x: g.new_empty([g.shape[-1], x.shape[-1]])
    )
    _operator("linear_grad_bias", "(Tensor g) -> Tensor", lambda g: g.new_empty(g.shape[-1:]))
    _operator(
        "linear",
        "(Tensor x, Tensor w, Tensor? b=None) -> Tensor",
        lambda x, w, b=None: x.new_empty([*x.shape[:-1], w.shape[0]]),
        lambda g, a, r: [
            _ops.linear_grad_input(g[0], a[1]),
            _ops.linear_grad_weight(g[0], a[0]),
            _ops.linear_grad_bias(g[0]) if len(a) > 2 and a[2] is not None else None,
        ],
    )
    _operator(
        "matmul_grad_left", "(Tensor g, Tensor b) -> Tensor", lambda g, b: g.new_empty([*g.shape[:-1], b.shape[-2]])
    )
    _operator(
        "matmul_grad_right",
        "(Tensor g, Tensor a, bool flat) -> Tensor",
        lambda g, a, flat: g.new_empty([*(() if flat else a.shape[:-2]), a.shape[-1], g.shape[-1]]),
    )
    _operator(
        "matmul",
        "(Tensor a, Tensor b) -> Tensor",
        lambda a, b: a.new_empty([*a.shape[:-1], b.shape[-1]]),
        lambda g, a, r: [_ops.matmul_grad_left(g[0], a[1]), _ops.matmul_grad_right(g[0], a[0], a[1].dim() == 2)],
    )


def _define_experts() -> None:
    """`route` numbers rows by their experts and counts them; `dispatch` and `combine` are each other's transposes."""
    plan = "Tensor order, Tensor grouped, Tensor counts, str axis, int n) -> Tensor"
    _operator(
        "route",
        "(Tensor experts, int count, bool stay, float most, str axis, int n) -> (Tensor, Tensor, Tensor, Tensor)",
        lambda experts, count, *_: (*(torch.empty_like(experts) for _ in range(3)), experts.new_empty(2, count)),
    )
    _operator("dispatch", f"(Tensor x, {plan}", _empty_like, lambda g, a, r: [_ops.combine(g[0], *a[1:])])
    _operator("combine", f"(Tensor x, {plan}", _empty_like, lambda g, a, r: [_ops.dispatch(g[0], *a[1:])])
    _operator(
        "expert_rows_grad",
        "(Tensor g, Tensor experts, int count) -> Tensor",
        lambda g, experts, count: g.new_empty([count, *g.shape[1:]]),
    )
    _operator(
        "expert_rows",
        "(Tensor experts, Tensor w) -> Tensor",
        lambda experts, w: w.new_empty([experts.shape[0], *w.shape[1:]]),
        lambda g, a, r: [None, _ops.expert_rows_grad(g[0], a[0], a[1].shape[0])],
    )
    _operator("expert_places", "(Tensor experts) -> Tensor", torch.empty_like)
    _operator(
        "expert_order",
        "(Tensor experts, int count) -> (Tensor, Tensor, Tensor)",
        lambda experts, count: tuple(torch.empty_like(experts) for _ in range(3)),
    )
    _operator(
        "permute_rows",
        "(Tensor x, Tensor order, Tensor inverse, int copies=1) -> Tensor",
        lambda x, order, inverse, copies=1: x.new_empty([x.shape[0] * copies, *x.shape[1:]]),
        lambda g, a, r: [_ops.permute_rows(g[0], a[2], a[1])],  # copies are introduced behind it
    )
    _operator(
        "selected_places",
        "(Tensor mask, int count) -> Tensor",
        lambda mask, count: torch.empty_like(mask, dtype=torch.int64),
    )
    _operator("linear_sum_assignment", "(Tensor cost, bool maximize=False) -> (Tensor, Tensor)", _assigned)
    _operator("times_loss_scale", "(Tensor x) -> Tensor", torch.empty_like)
    _operator(
        "expert_matmul_grad_rows",
        "(Tensor g, Tensor experts, Tensor w, bool ordered=False) -> Tensor",
        lambda g, experts, w, ordered=False: g.new_empty([g.shape[0], w.shape[1]]),
    )
    _operator(
        "expert_matmul_grad_weight",
        "(Tensor g, Tensor experts, Tensor x, int count, bool ordered=False) -> Tensor",
        lambda g, experts, x, count, ordered=False: g.new_empty([count, x.shape[1], g.shape[1]]),
    )
    _operator(
        "expert_matmul",
        "(Tensor x, Tensor experts, Tensor w, bool ordered=False) -> Tensor",
        lambda x, experts, w, ordered=False: x.new_empty([x.shape[0], w.shape[2]]),
        lambda g, a, r: [
            _ops.expert_matmul_grad_rows(g[0], *a[1:]),
            None,
            _ops.expert_matmul_grad_weight(g[0], a[1], a[0], a[2].shape[0], *a[3:]),
        ],
    )


def _define_bags() -> None:
    """Reductions of bags of rows; bag b has the rows from starts[b] to ends[b]."""
    bags = "Tensor starts, Tensor ends"
    _operator(
        "bag_sum_grad",
        f"(Tensor g, {bags}, int count) -> Tensor",
        lambda g, starts, ends, count: g.new_empty([count, g.shape[1]]),
    )
    _operator(
        "bag_sum",
        f"(Tensor x, {bags}) -> Tensor",
        lambda x, starts, ends: x.new_empty([starts.shape[0], x.shape[1]]),
        lambda g, a, r: [_ops.bag_sum_grad(g[0], a[1], a[2], a[0].shape[0])],
    )
    _operator("bag_max_grad", f"(Tensor g, Tensor x, {bags}) -> Tensor", lambda g, x, starts, ends: _empty_like(x))
    _operator(
        "bag_max",
        f"(Tensor x, {bags}) -> Tensor",
        lambda x, starts, ends: x.new_empty([starts.shape[0], x.shape[1]]),
        lambda g, a, r: [_ops.bag_max_grad(g[0], *a)],
    )


def _define_random() -> None:
    _operator("dropout_backward", "(Tensor g, Tensor kept, float p) -> Tensor", lambda g, kept, p: _empty_like(g))
    _operator(
        "dropout",
        "(Tensor x, float p, int dims, int number, str order='') -> (Tensor, Tensor)",
        lambda x, p, dims, *_: (_empty_like(x), _reduced_mask(x, dims)),
        lambda g, a, r: [_ops.dropout_backward(g[0], r[1], a[1])],
    )
    like = "(Tensor x, ScalarType dtype, int number, str order='') -> Tensor"
    for name in ("rand_like", "randn_like"):
        _operator(name, like, lambda x, dtype, *_: x.new_empty(x.shape, dtype=dtype), lambda g, a, r: [None])
    make = "(int[] size, ScalarType dtype, int number, str order='', *, Device? device=None) -> Tensor"
    new = lambda size, dtype, number, order="", device=None: torch.empty(size, dtype=dtype, device=device)  # noqa: E731
    _operator("rand", make, new)
    _operator("randn", make, new)


def _reduced_mask(x: Tensor, dims: int) -> Tensor:
    return x.new_empty([*x.shape[:dims], *(1 for _ in x.shape[dims:])], dtype=torch.bool)


def _define_composites() -> None:
    _operator(  # on complex numbers as pairs in the last dimension, unscaled
        "fourier",
        "(Tensor x, int[] dims, bool inverse) -> Tensor",
        lambda x, dims, inverse: x.new_empty(x.shape),
        lambda g, a, r: [_ops.fourier(g[0], a[1], not a[2])],
    )
    _operator("silu_backward", "(Tensor g, Tensor x) -> Tensor", _empty_like)
    _operator("silu", "(Tensor x) -> Tensor", _empty_like, lambda g, a, r: [_ops.silu_backward(g[0], a[0])])
    angles = "Tensor cos, Tensor sin, int? rotated, bool interleaved) -> Tensor"
    _operator("rotary_backward", f"(Tensor g, {angles}", lambda g, *_: g.new_empty(g.shape))
    _operator(
        "rotary",
        f"(Tensor x, {angles}",
        lambda x, *_: x.new_empty(x.shape),
        lambda g, a, r: _rotary_gradients(g[0], *a),
    )
    _operator(
        "rms_norm_backward",
        "(Tensor g, Tensor x, int[] shape, Tensor? w, Tensor rstd) -> (Tensor, Tensor)",
        lambda g, x, shape, w, rstd: (x.new_empty(x.shape), x.new_empty(shape)),
    )
    _operator(
        "rms_norm",
        "(Tensor x, int[] shape, Tensor? w, float? eps) -> (Tensor, Tensor)",
        lambda x, shape, w, eps: (x.new_empty(x.shape), _statistics(x, shape)),
        lambda g, a, r: _norm_gradients(_ops.rms_norm_backward(g[0], a[0], a[1], a[2], r[1]), a),
    )
    _operator(
        "layer_norm_backward",
        "(Tensor g, Tensor x, int[] shape, Tensor? w, Tensor mean, Tensor rstd) -> (Tensor, Tensor, Tensor)",
        lambda g, x, shape, w, mean, rstd: (x.new_empty(x.shape), x.new_empty(shape), x.new_empty(shape)),
    )
    _operator(
        "layer_norm",
        "(Tensor x, int[] shape, Tensor? w, Tensor? b, float eps) -> (Tensor, Tensor, Tensor)",
        lambda x, shape, w, b, eps: (x.new_empty(x.shape), _statistics(x, shape), _statistics(x, shape)),
        lambda g, a, r: _norm_gradients(_ops.layer_norm_backward(g[0], a[0], a[1], a[2], r[1], r[2]), a),
    )
    _operator(
        "attention_sinks_backward",
        "(Tensor g, Tensor out, Tensor lse, Tensor own) -> Tensor",
        lambda g, out, lse, own: _empty_like(own),
    )
    how = "bool is_causal, float? scale, int window"
    rows = "str rows='', str ring=''"
    _define_attention("attention", f"{how}=0, {rows}")
    _define_attention("attention_dropout", f"{how}, float p, int number, {rows}, str order=''")
    _operator(
        "embedding_shard_backward",
        "(Tensor g, Tensor ids, int rows, int padding, str axis) -> Tensor",
        lambda g, ids, rows, padding, axis: g.new_empty([rows, g.shape[-1]]),
    )
    _operator(
        "embedding_shard",
        "(Tensor w, Tensor ids, int padding, str axis) -> Tensor",
        lambda w, ids, padding, axis: w.new_empty([*ids.shape, w.shape[1]]),
        lambda g, a, r: [_ops.embedding_shard_backward(g[0], a[1], a[0].shape[0], a[2], a[3])],
    )
    _operator(  # its gradient is the softmax's, which is zero at padded classes
        "mask_classes", "(Tensor x, int classes, str axis) -> Tensor", _empty_like, lambda g, a, r: [g[0]]
    )
    _operator(
        "cross_entropy_backward",
        "(Tensor g, Tensor x, Tensor labels, Tensor lse, Tensor? w, int ignore, float smoothing, str axis) -> Tensor",
        lambda g, x, *_: _empty_like(x),
    )
    _operator(
        "cross_entropy",
        "(Tensor x, Tensor labels, Tensor? w, int ignore, float smoothing, str axis) -> (Tensor, Tensor)",
        lambda x, *_: (x.new_empty(x.shape[:-1]), x.new_empty(x.shape[:-1])),
        lambda g, a, r: [_ops.cross_entropy_backward(g[0], a[0], a[1], r[1], *a[2:])],
    )


def _define_attention(name: str, options: str) -> None:
    """Attention, and its derivatives without and with that of the mask."""
    read = "Tensor? limits=None, Tensor? keys=None, int[] reads=[]"
    _operator(
        f"{name}_backward",
        f"(Tensor g, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor lse, {options}, {read})"
        " -> (Tensor, Tensor, Tensor)",
        lambda g, q, k, v, *_: (_empty_like(q), _empty_like(k), _empty_like(v)),
    )
    _operator(
        f"{name}_bias_backward",
        f"(Tensor g, Tensor q, Tensor k, Tensor v, Tensor mask, Tensor out, Tensor lse, {options}, {read})"
        " -> (Tensor, Tensor, Tensor, Tensor)",
        lambda g, q, k, v, mask, *_: (_empty_like(q), _empty_like(k), _empty_like(v), mask.new_empty(mask.shape)),
    )
    backward, bias_backward = getattr(_ops, f"{name}_backward"), getattr(_ops, f"{name}_bias_backward")
    _operator(
        name,
        f"(Tensor q, Tensor k, Tensor v, Tensor? mask, {options}, Tensor? sinks=None, {read}) -> (Tensor, Tensor)",
        _attention_shapes,
        lambda g, a, r: _attention_gradients(
            bias_backward if _is_learned(a[3]) else backward, g[0], a, r, _position(getattr(_ops, name), "sinks")
        ),
    )


def _scan_shapes(
    starts: Sequence[Tensor],
    sequences: Sequence[Tensor],
    constants: Sequence[Tensor],
    *,
    length: int,
    dims: Sequence[int],
    reverse: bool,
    step: str,
) -> list[Tensor]:
    graph = parse_graph(step)
    types = graph.types()
    made = zip(graph.outputs[len(starts) :], dims[len(sequences) :], strict=True)
    (like, *_) = (*starts, *sequences)
    rows = [(with_time(types[name].shape, dim, length), types[name].dtype) for name, dim in made]
    return [*map(_empty_like, starts), *(like.new_empty(shape, dtype=DTYPES[dtype]) for shape, dtype in rows)]


def _define_scan() -> None:
    """A loop over time, whose step is a printed graph; partc.passes.differentiate.scans has its derivative."""
    _operator(
        "scan",
        "(Tensor[] starts, Tensor[] sequences, Tensor[] constants, *, int length, int[] dims, bool reverse, str step)"
        " -> Tensor[]",
        _scan_shapes,
    )


class _Owned(torch.autograd.Function):
    """Connects results to the operands whose gradients the model defines itself; differentiate follows the latter."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        with below_autograd():
            return tuple(map(_empty_like, tensors[:count]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("partc.passes.differentiate follows the gradients that a model defines itself")


class _Joined(torch.autograd.Function):
    """`join_rows`, whose derivative is `divide_rows`."""

    @staticmethod
    def forward(ctx: Any, counts: Tensor, shares: Sequence[int], *parts: Tensor) -> Tensor:
        ctx.plan = counts, shares
        with below_autograd():
            made: Tensor = _ops.join_rows(parts, counts, shares)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *_ops.divide_rows(grads[0], *ctx.plan)


def _define_rows_by_table() -> None:
    """`divide_rows` gives each of several tables its rows (`shares` are their mean numbers); `join_rows` is its
    inverse.
    """
    _operator(
        "divide_rows",
        "(Tensor x, Tensor counts, int[] shares) -> Tensor[]",
        lambda x, counts, shares: [x.new_empty([len(x) * n // sum(shares), *x.shape[1:]]) for n in shares],
    )
    _LIBRARY.define("join_rows(Tensor[] parts, Tensor counts, int[] shares) -> Tensor")
    rows = lambda parts, *_: parts[0].new_empty([sum(map(len, parts)), *parts[0].shape[1:]])  # noqa: E731
    _LIBRARY.impl("join_rows", rows, "CompositeExplicitAutograd")
    _LIBRARY.impl("join_rows", lambda parts, counts, shares: _Joined.apply(counts, shares, *parts), "Autograd")


def _define_own_gradients() -> None:
    """`own_gradient(results, operands, gradients)` gives the operands of a user's function the user's own gradients.

    It returns `results`. Operations of the same graph compute `gradients` from the incoming ones, for which
    `incoming_gradient(result)` stands.
    """
    _operator("incoming_gradient", "(Tensor y) -> Tensor", _empty_like)
    _LIBRARY.define("own_gradient(Tensor[] results, Tensor[] operands, Tensor[] gradients) -> Tensor[]")
    _LIBRARY.impl("own_gradient", lambda results, *_: list(map(_empty_like, results)), "CompositeExplicitAutograd")
    _LIBRARY.impl("own_gradient", lambda y, x, _: list(_Owned.apply(len(y), *y, *x)), "Autograd")
    _LIBRARY.define("hook_gradient(Tensor result, Tensor operand, Tensor gradient, int parts) -> Tensor")
    _LIBRARY.impl("hook_gradient", lambda result, *_: _empty_like(result), "CompositeExplicitAutograd")
    for name in ("incoming_gradient", "hook_gradient"):
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.fx.node.has_side_effect(_ops.hook_gradient.default)


def _statistics(x: Tensor, shape: Sequence[int]) -> Tensor:
    """One number of at least 32 bits for each normalised row, dimensions kept."""
    return x.new_empty([*x.shape[: x.dim() - len(shape)], *(1 for _ in shape)], dtype=row_dtype(x))


def _norm_gradients(found: Sequence[Tensor], args: Sequence[Any]) -> list[Tensor | None]:
    """Gradients in the order x, normalized_shape, weight, bias; None for absent operands."""
    weights = [grad if isinstance(arg, Tensor) else None for grad, arg in zip(found[1:], args[2:], strict=False)]
    return [found[0], None, *weights]


def _rotary_gradients(
    grad: Tensor, x: Tensor, cos: Tensor, sin: Tensor, rotated: int | None, interleaved: bool
) -> list[Tensor | None]:
    """Gradients of x and of the tables, if these are trained."""
    found: list[Tensor | None] = [_ops.rotary_backward(grad, cos, sin, rotated, interleaved), None, None]
    grad, x = grad[..., :rotated], x[..., :rotated]
    if cos.requires_grad:
        found[1] = _of_table(grad * x, cos, interleaved)
    if sin.requires_grad:
        first, second = pairs(x, interleaved)
        found[2] = _of_table(grad * joined(-second, first, interleaved), sin, interleaved)
    return found


def _of_table(grad: Tensor, table: Tensor, interleaved: bool) -> Tensor:
    """The gradient of a table: for each of its elements, the sum over all elements that read it."""
    if table.shape[-1] < grad.shape[-1]:
        first, second = pairs(grad, interleaved)
        grad = first + second
    return grad.sum_to_size(table.shape)


def _is_learned(mask: Tensor | None) -> bool:
    return mask is not None and mask.requires_grad


def _position(operator: Any, name: str) -> int:
    """The place of an argument in an operator's schema."""
    return [argument.name for argument in operator.default._schema.arguments].index(name)


def _attention_gradients(
    backward: Callable[..., Any], grad: Tensor, args: tuple[Any, ...], results: tuple[Tensor, ...], place: int
) -> list[Tensor | None]:
    """The gradients of attention's operands; sinks are the argument at `place`."""
    made = [*backward(grad, *args[:4], *results, *args[4:place], *args[place + 1 :])]
    if len(args) <= place or args[place] is None:
        return made
    return [*made, *[None] * (place - len(made)), _ops.attention_sinks_backward(grad, *results, args[place])]


def _attention_shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    b, h, s = q.shape[:3]
    # Attention kernels write [b, s, h, e] and return it transposed, so that heads merge without a copy.
    rows = q.new_empty([b, h, s], dtype=row_dtype(q))
    return q.new_empty([b, s, h, v.shape[-1]]).transpose(1, 2), rows


_define_marks()
_define_collectives()
_define_matmuls()
_define_experts()
_define_rows_by_table()
_define_bags()
_define_random()
_define_composites()
_define_own_gradients()
_define_scan()

DTYPES: dict[DType, torch.dtype] = {
    "f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "bool": torch.bool,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8,
}  # fmt: skip
DTYPE_NAMES: dict[torch.dtype, DType] = {dtype: name for name, dtype in DTYPES.items()}


def resolve(name: str) -> Callable[..., Any]:
    """The torch callable for an IR operation's name.

    Raises AttributeError for a name that neither partc nor ATen nor a registered library defines.
    """
    namespace, _, rest = name.partition("::")
    if rest:
        return getattr(getattr(torch.ops, namespace), rest)  # type: ignore[no-any-return]
    return getattr(_ops, name) if hasattr(_ops, name) else getattr(torch.ops.aten, name)  # type: ignore[no-any-return]


def overload(op: Op, types: Mapping[str, TensorType]) -> str:
    """The name of the torch overload that an operation of ATen or of a registered library calls, such as "src".

    Emitted code names it, because torch finds out at each call otherwise: it tries the overloads one after the other,
    and writes the operands' values into the message of each that does not fit, for which a GPU has to finish its work.
    """
    known = {name: torch.empty((), dtype=DTYPES[types[name].dtype], device="meta") for name in op.refs()}
    return overload_name(torch_operator(op.name), *torch_arguments(op, known))


def torch_operator(name: str) -> OpOverloadPacket:
    """The operator of ATen, or of a registered library. Raises AttributeError if there is none."""
    namespace, _, rest = name.rpartition("::")
    return getattr(getattr(torch.ops, namespace or "aten"), rest)  # type: ignore[no-any-return]


def torch_arguments(op: Op, known: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of an operation by position and by name, as torch takes them; `known` are the values in scope."""
    return [_as_torch(arg, known) for arg in op.args], {key: _as_torch(arg, known) for key, arg in op.attrs}


def _as_torch(arg: Arg, known: Mapping[str, Any]) -> Any:
    match arg:
        case Ref():
            return known[arg.name]
        case DTypeArg():
            return DTYPES[arg.name]
        case tuple():
            return [_as_torch(item, known) for item in arg]
        case _:
            return arg
