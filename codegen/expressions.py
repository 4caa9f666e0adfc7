"""The Python source of each operation, one line each.

Operations without an entry are torch.ops.aten.<name>.<overload>(...).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from partc.codegen import losses
from partc.codegen.operands import Emit, Operands, arguments
from partc.ir.attention import ROWS, Attention
from partc.ir.layout import Layout, SubDim
from partc.ir.operations import effects
from partc.ir.operators import overload
from partc.ir.program import SPARSE, Op, Ref, TensorType, Value
from partc.quoting import literal
from partc.rules import kernels
from partc.rules.rule import integers
from partc.runtime.positions import Order, Orders, Positions


def expression(operands: Operands) -> str:
    """The right-hand side for an operation."""
    return _TABLE.get(operands.op.name, _aten)(operands)


def accumulation(gradient: str, operands: Operands) -> str:
    """A statement that adds an operation's result to a gradient buffer, in one pass if possible."""
    emit = _ACCUMULATE.get(operands.op.name)
    flat = operands.op.name != "matmul_grad_right" or operands.op.args[2] is True
    if emit is None or not flat or SPARSE in operands.attrs:
        return f"{operands.named(gradient)}.add_({expression(operands)})"
    return emit(operands.named(gradient), operands)


def accumulates(name: str) -> bool:
    """Whether the operation has a form that adds all results but the first to gradient buffers."""
    return name in _ACCUMULATE_MORE


def with_accumulation(gradients: Sequence[str], operands: Operands) -> str:
    """The expression of the first result, in the form that adds all other results to gradient buffers."""
    return _ACCUMULATE_MORE[operands.op.name]([operands.named(gradient) for gradient in gradients], operands)


def summed_by_programs(op: Op) -> frozenset[str]:
    """The results of a fused operation that are partial sums of its kernel's programs."""
    if "along" not in dict(op.attrs) or any(step.name in (*kernels.TABLES, *kernels.STREAMED) for step in op.body):
        return frozenset()
    down = {step.result.name for step in op.body if step.name == "sum" and 0 in integers(step.args[1])}
    return frozenset(value.name for value in op.results if value.name in down)


def unsummed(operands: Operands) -> str:
    """The expression of a fused operation that returns the partial sums of its kernel's programs."""
    return _fused(operands, "summed=False")


def returns_more(name: str) -> bool:
    """Whether the function also returns values for its backward, which regions without a gradient do not read."""
    return bool(effects(name).extra)


def emitted_type(op: Op, value: Value) -> TensorType:
    """The type of a result as emitted code has it: tables' gradients are summed in at least fp32."""
    type = value.type
    wide = op.name in ("embedding_dense_backward", "embedding_shard_backward") and type.dtype in ("bf16", "f16")
    return replace(type, dtype="f32") if wide else type


def is_chained(name: str) -> bool:
    """Whether the operation is a method of its first operand (`x.reshape(…)`) that moves no data."""
    return name in _VIEWS


def is_atom(text: str) -> bool:
    """Whether a method call may follow this expression without parentheses."""
    depth = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if depth == 0 and char in " *":
            return False
    return not text.startswith(("-", "~"))


def _infix(symbol: str) -> Emit:
    def emit(o: Operands) -> str:
        if "alpha" in o.attrs or "rounding_mode" in o.attrs:
            return _aten(o)
        left = f"({o.args[0]})" if symbol == "**" and o.args[0].startswith("-") else o.args[0]
        close = symbol == "**" and all(re.fullmatch(r"[\w.]+", operand) for operand in (left, o.args[1]))
        return f"{left}{symbol}{o.args[1]}" if close else f"{left} {symbol} {o.args[1]}"

    return emit


def _index(o: Operands) -> str:
    """torch's indexing, or a faster form if two index vectors select elements along adjacent dimensions."""
    indices = o.op.args[1]
    added = o.op.name == "index_put"
    if not isinstance(indices, tuple) or (added and o.op.args[3:4] != (True,)):
        return _aten(o)
    dim = len(indices) - 2
    pair = [o.types[index.name] for index in indices if isinstance(index, Ref)]
    vectors = len(pair) == 2 and all(index is None for index in indices[:dim]) and pair[0].shape == pair[1].shape
    if not vectors or any(type.dtype not in ("i64", "i32") or len(type.shape) != 1 for type in pair):
        return _aten(o)
    if added and isinstance(o.op.args[2], Ref):
        values, x = o.whole(2), o.whole(0)
        if values != (*x[:dim], *pair[0].shape, *x[dim + 2 :]):
            return _aten(o)
    args = (o.args[0], str(dim), *o.items[1][-2:], *(o.args[2:3] if added else ()))
    name = "functional.index_pairs_add" if added else "functional.index_pairs"
    return f"{o.named(name)}({', '.join(args)})"


def _prefix(symbol: str) -> Emit:
    return lambda o: f"{symbol}{o.args[0]}"


def _method(name: str, *names: str, spread: bool = False) -> Emit:
    """`x.name(…)`; with `spread`, its single tuple argument is written without parentheses."""

    def emit(o: Operands) -> str:
        if spread and o.items[1]:
            return f"{o.args[0]}.{name}({', '.join(o.items[1])})"
        return f"{o.args[0]}.{name}({arguments(o.args[1:], names, o.attrs)})"

    return emit


def _function(name: str, *names: str) -> Emit:
    return lambda o: f"{o.named(name)}({arguments(o.args, names, o.attrs)})"


def _creation(name: str, *names: str) -> Emit:
    """A tensor made from numbers: on this rank's device."""

    def emit(o: Operands) -> str:
        device = f"device={o.named('comm.device')}"
        return f"{o.named(name)}({', '.join(filter(None, (arguments(o.args, names, o.attrs), device)))})"

    return emit


def _collective(name: str) -> Emit:
    defaults = ("outer", "split_outer", "concat_outer")

    def emit(o: Operands) -> str:
        attrs = {key: value for key, value in o.attrs.items() if not (key in defaults and value == "1")}
        return f"{o.named('comm')}.{o.axis}.{'start_' * o.started}{name}({arguments(o.args, (), attrs)})"

    return emit


def _all_reduce(o: Operands) -> str:
    op = (o.attrs["op"],) if o.value("op") not in ("", "sum") else ()
    name = f"{'start_' * o.started}all_reduce{'_' * o.exclusive}"
    return f"{o.named('comm')}.{o.axis}.{name}({', '.join((*o.args, *op))})"


def _aten(o: Operands) -> str:
    namespace, _, name = o.op.name.rpartition("::")
    device = f"device={o.named('comm.device')}" if _takes_device(o.op) else ""
    given = ", ".join(filter(None, (arguments(o.args, (), o.attrs), device)))
    return f"{o.named('torch.ops')}.{namespace or 'aten'}.{name}.{overload(o.op, o.types)}({given})"


def _takes_device(op: Op) -> bool:
    """Whether an operation creates a tensor from numbers."""
    if any(True for _ in op.refs()) or "::" in op.name:
        return False
    packet = getattr(torch.ops.aten, op.name, None)
    overloads = [getattr(packet, name) for name in packet.overloads()] if packet is not None else []
    return any(argument.name == "device" for each in overloads for argument in each._schema.arguments)


def _slice(o: Operands) -> str:
    dim, start, end, step = (*(arg if isinstance(arg, int) else None for arg in o.op.args[1:]), 1)[:4]
    assert dim is not None
    first = str(start) if start else ""
    last = "" if end is None or end >= o.shape(0)[dim] else str(end)
    return f"{o.args[0]}[{':, ' * dim}{first}:{last}{'' if step == 1 else f':{step}'}]"


def _permute(o: Operands) -> str:
    order = integers(o.op.args[1])
    moved = [index for index, dim in enumerate(order) if index != dim]
    if len(moved) == 2 and order[moved[0]] == moved[1]:
        return (
            f"{o.args[0]}.mT"
            if moved == [len(order) - 2, len(order) - 1]
            else (f"{o.args[0]}.transpose({moved[0]}, {moved[1]})")
        )
    return f"{o.args[0]}.permute({', '.join(map(str, order))})"


def _at_rank(name: str) -> Emit:
    """A function with this rank's position on an axis as an argument."""
    return lambda o: f"{o.named(name)}({', '.join((*o.args, o.rank))})"


def _routed(o: Operands) -> str:
    """A function with an axis as its last argument."""
    name = f"functional.{'start_' * o.started}{o.op.name}"
    return f"{o.named(name)}({', '.join(o.args)}, {o.named('comm')}.{o.axis})"


def _route(o: Operands) -> str:
    """The call of `route`. Options that have their default values are left out."""
    axis = f"{o.named('comm')}.{o.axis}"
    given = arguments((*o.args[:2], axis, *o.args[2:]), ("", "", "", "stay=False", "most=0.0"), {})
    return f"{o.named('functional.route')}({given})"


def _fused(o: Operands, *options: str) -> str:
    """One kernel for several operations."""
    scalars = (_launch_scalar(op, o) for op in kernels.launch_scalars(o.op.body).values())
    return f"{o.named('kernels')}.{o.value('kernel')}({', '.join((*o.args, *scalars, *options))})"


def _launch_scalar(op: Op, o: Operands) -> str:
    """A scalar argument of a kernel: the offset of this rank's classes, or the start of its random numbers."""
    if kernels.rank_axis(op):
        return f"{o.named('comm')}.{kernels.rank_axis(op)}.rank"
    return _draw(str(op.args[1]), o, op.result.type.layout.dims, "counter")


def _dropout(o: Operands) -> str:
    dims, number = int(o.args[2]), o.args[3]
    draw = _draw(number, o, o.op.results[0].type.layout.dims[:dims])
    return f"{o.named('functional.dropout')}({o.args[0]}, {o.args[1]}, {draw})"


_SCORES = ("is_causal=False", "scale=None", "window=0", "p=0.0", "draw=None")


def _attention(o: Operands) -> str:
    """Attention, or its derivative; with the positions of this rank's queries if the result depends on them."""
    attention = Attention.of(o.op)
    assert attention is not None
    backward, learned, rows = attention.backward, attention.learned, attention.rows
    args, first = list(o.args), 1 if backward else 0
    if attention.drops:
        q, k = (o.types[name].layout for name in (attention.q, attention.k))
        args[-1] = _draw(args[-1], o, (*q.dims[:3], (SubDim(k.shape[ROWS]),)))
    more = [f"{name}={o.attrs[name]}" for name in ("sinks", "limits", "keys") if name in o.attrs]
    if rows is None and attention.drops:
        return f"{o.named('functional')}.{o.op.name}({', '.join((*args, *more))})"
    names = ["mask=", "out=", "lse=", *_SCORES] if backward else ["mask=None", *_SCORES]
    operands, rest = args[: first + 3], args[first + 3 :]
    if learned and rows is None:
        operands, rest, names = args[: first + 4], args[first + 4 :], names[1:]
    given = arguments((*operands, *rest), ("",) * len(operands) + tuple(names), {})
    if rows is None:
        return f"{o.named('functional')}.{o.op.name}({', '.join((given, *more))})"
    comm, here = o.named("comm"), literal(str(rows))
    form = "ring_attention" if attention.ring else "attention_rows"
    if attention.ring:
        around = f"ring={comm}.{attention.ring}, rows={comm}.positions_along({literal(attention.ring)}, {here})"
    else:
        around = f"rows={comm}.positions({here})"
        if rows.order.parts:  # the keys are in the same order
            columns = Positions(str(o.types[attention.k].shape[ROWS]), rows.order)
            around += f", columns={comm}.positions({literal(str(columns))})"
    more += [around, "learned=True"] if learned else [around]
    return f"{o.named('functional')}.{form}{'_backward' * backward}({', '.join((given, *more))})"


def _where(o: Operands) -> str:
    """torch.where. Numbers are filled in, since torch.where would copy them to the device and wait."""
    condition, *chosen = o.args
    numbers = [not isinstance(arg, Ref) for arg in o.op.args[1:]]
    if not any(numbers):
        return f"{o.named('torch.where')}({', '.join(o.args)})"
    if all(numbers):
        dtype = o.dtype(o.op.result.type.dtype)
        return f"torch.full_like({condition}, {chosen[1]}, dtype={dtype}).masked_fill({condition}, {chosen[0]})"
    place, wanted = numbers.index(False), o.op.result.type.dtype
    (name,) = (arg.name for arg in o.op.args[1:] if isinstance(arg, Ref))
    cast = "" if o.types[name].dtype == wanted else f".to({o.dtype(wanted)})"
    taken = f"~{condition}" if place == 0 else condition
    return f"{chosen[place]}{cast}.masked_fill({taken}, {chosen[1 - place]})"


def _random(kind: str) -> Emit:
    def emit(o: Operands) -> str:
        type = o.op.result.type
        return f"{_draw(o.args[-1], o, type.layout.dims)}.{kind}({o.dtype(type.dtype)})"

    return emit


def _draw(number: str, o: Operands, dims: tuple[tuple[SubDim, ...], ...], what: str = "draw") -> str:
    """The random draw of a tensor: the operation's number in its call, and the part that this rank holds."""
    small = [axis for axis, size in o.sizes.items() if size == 1]
    orders = dict(Orders.parse(str(dict(o.op.attrs).get("order", ""))).dims)
    cuts = [" · ".join(map(str, dim)) for dim in Layout(dims).without(*small).dims]
    places = (str(Positions(cut, orders.get(dim, Order()))) for dim, cut in enumerate(cuts))
    o.used.add("number")
    return f"{o.named('comm')}.{what}(number{f' + {number}' if number != '0' else ''}, {literal(', '.join(places))})"


_VIEWS = frozenset({"reshape", "permute", "expand", "slice", "to"})

_TABLE: Mapping[str, Emit] = {
    # arithmetic
    "add": _infix("+"),
    "sub": _infix("-"),
    "mul": _infix("*"),
    "div": _infix("/"),
    "pow": _infix("**"),
    "remainder": _infix("%"),
    "rsub": lambda o: f"{o.args[1]} - {o.args[0]}",
    "neg": _prefix("-"),
    "reciprocal": lambda o: f"1 / {o.args[0]}",
    "square": lambda o: f"{o.args[0]} * {o.args[0]}",
    "eq": _infix("=="),
    "ne": _infix("!="),
    "lt": _infix("<"),
    "le": _infix("<="),
    "gt": _infix(">"),
    "ge": _infix(">="),
    "bitwise_and": _infix("&"),
    "bitwise_or": _infix("|"),
    "bitwise_not": _prefix("~"),
    "alias": lambda o: o.args[0],
    "wait": lambda o: f"{o.args[0]}.wait()",
    # elementwise
    **{
        name: _method(name)
        for name in ["exp", "log", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid", "abs", "erf", "relu", "clamp"]
    },
    "outer": _function("torch.outer"),
    "logical_and": _function("torch.logical_and"),
    "logical_or": _function("torch.logical_or"),
    "logical_not": _function("torch.logical_not"),
    "maximum": _function("torch.maximum"),
    "minimum": _function("torch.minimum"),
    "count_nonzero": _function("torch.count_nonzero"),
    "where": _where,
    "masked_fill": _method("masked_fill"),
    "silu": _function("F.silu"),
    "gelu": _function("F.gelu"),
    "to": _method("to"),
    "binary_cross_entropy": lambda o: (
        f'{o.named("F.binary_cross_entropy")}({o.args[0]}, {o.args[1]}, reduction="none")'
    ),
    # views and joins
    "reshape": _method("reshape", spread=True),
    "permute": _permute,
    "expand": _method("expand", spread=True),
    "slice": _slice,
    "split": _method("split", "", "dim=0"),
    "cat": _function("torch.cat", "", "dim=0"),
    "gather": _function("torch.gather"),
    "scatter": _function("torch.scatter"),
    "scatter_add": _function("torch.scatter_add"),
    "index": _index,
    "index_put": _index,
    "pad": _function("F.pad"),
    "tril": _method("tril"),
    "triu": _method("triu"),
    # reductions
    "sum": _method("sum", "dim=", "keepdim=False"),
    "topk": _function("torch.topk"),
    "amax": _method("amax", "dim=", "keepdim=False"),
    "amin": _method("amin", "dim=", "keepdim=False"),
    "cumsum": _method("cumsum", "dim="),
    "softmax": _method("softmax", "dim="),
    "log_softmax": _method("log_softmax", "dim="),
    # tensors from numbers
    "arange": _creation("torch.arange"),
    "full": _creation("torch.full"),
    "zeros": _creation("torch.zeros"),
    "ones": _creation("torch.ones"),
    "scalar_tensor": _creation("torch.scalar_tensor"),
    "zeros_like": _function("torch.zeros_like"),
    "ones_like": _function("torch.ones_like"),
    "full_like": _function("torch.full_like"),
    # matrix products
    "linear": _function("F.linear"),
    "matmul": _infix("@"),
    "linear_grad_input": _infix("@"),
    "linear_grad_weight": _function("functional.linear_grad_weight"),
    "linear_grad_bias": _function("functional.linear_grad_bias"),
    "matmul_grad_left": lambda o: f"{o.args[0]} @ {o.args[1]}.mT",
    "matmul_grad_right": lambda o: (
        f"{o.flat(1)}.mT @ {o.flat(0)}" if o.op.args[2] is True else f"{o.args[1]}.mT @ {o.args[0]}"
    ),
    "expert_matmul": _function("functional.expert_matmul"),
    "expert_matmul_grad_rows": _function("functional.expert_matmul_grad_rows"),
    "expert_matmul_grad_weight": _function("functional.expert_matmul_grad_weight"),
    "expert_places": _function("functional.expert_places"),
    "expert_order": _function("functional.expert_order"),
    "permute_rows": lambda o: f"{o.args[0]}.index_select(0, {' // '.join((o.args[1], *o.args[3:]))})",
    "selected_places": _function("functional.selected_places"),
    "linear_sum_assignment": _function("functional.linear_sum_assignment"),
    "times_loss_scale": lambda o: f"{o.named('comm')}.times_scale({o.args[0]})",
    "expert_rows": lambda o: f"{o.args[1]}[{o.args[0]}]",
    **{name: _function(f"functional.{name}") for name in ("bag_max", "bag_max_grad", "bag_sum", "bag_sum_grad")},
    "expert_rows_grad": _function("functional.expert_rows_grad"),
    "divide_rows": _function("functional.divide_rows"),
    "join_rows": lambda o: f"{o.named('torch.cat')}({o.args[0]})",
    "route": _route,
    "dispatch": _routed,
    "combine": _routed,
    "bmm": _infix("@"),
    "mm": _infix("@"),
    # norms, attention, embedding, loss: runtime/ops/functional.py has the functions that torch lacks
    "rms_norm": _function("functional.rms_norm"),
    "rms_norm_backward": _function("functional.rms_norm_backward"),
    "layer_norm": _function("functional.layer_norm"),
    **{
        name: _function(f"functional.{name}", "", "", "", "rotated=None", "interleaved=False")
        for name in ["rotary", "rotary_backward"]
    },
    "fourier": _function("functional.fourier"),
    "layer_norm_backward": _function("functional.layer_norm_backward"),
    "attention": _attention,
    "attention_backward": _attention,
    "attention_bias_backward": _attention,
    "attention_sinks_backward": _function("functional.attention_sinks_backward"),
    "embedding": _function("torch.embedding"),
    "embedding_shard": _at_rank("functional.embedding_shard"),
    "embedding_dense_backward": lambda o: (
        f"{o.named('functional.embedding_rows')}({arguments((*o.args[:2], o.args[3]), ('', '', 'padding_idx=-1'), {})})"
        if SPARSE in o.attrs
        else f"{o.named('functional.embedding_grad')}({arguments(o.args[:4], ('', '', '', 'padding_idx=-1'), {})})"
    ),
    "embedding_shard_backward": lambda o: (
        f"{o.named('functional.embedding_shard_rows')}({', '.join((*o.args[:3], o.rank, o.ways, *o.args[3:4]))})"
        if SPARSE in o.attrs
        else f"{o.named('functional.embedding_shard_grad')}({', '.join((*o.args[:3], o.rank, *o.args[3:4]))})"
    ),
    "mask_classes": lambda o: (
        f"{o.named('functional.mask_classes')}({', '.join((*o.args, *((o.rank,) if 'axis' in o.attrs else ())))})"
    ),
    "cross_entropy": _function(
        "functional.cross_entropy", "", "", "weight=None", "ignore_index=-100", "label_smoothing=0.0"
    ),
    "shard_max": _function("functional.shard_max"),
    "sum_exp": _function("functional.sum_exp"),
    "pick": losses.pick,
    "smooth_sum": losses.smooth_sum,
    "log_sum_exp": _function("functional.log_sum_exp"),
    "cross_entropy_rows": losses.cross_entropy_rows,
    "linear_cross_entropy": losses.linear_cross_entropy,
    "linear_cross_entropy_backward": losses.linear_cross_entropy_backward,
    "linear_cross_entropy_grad_input": lambda o: losses.linear_cross_entropy_add_grad(("None",), o),
    "cross_entropy_backward": losses.cross_entropy_backward,
    "clone": lambda o: f"{o.args[0]}.clone()",
    # random numbers
    "dropout": _dropout,
    "dropout_backward": _function("functional.dropout_backward"),
    "drop": _function("functional.dropout_backward"),
    "drawn": lambda o: f"{_draw(o.args[1], o, o.op.result.type.layout.dims)}.below({1 - float(o.args[0])!r})",
    "attention_dropout": _attention,
    "attention_dropout_backward": _attention,
    "attention_dropout_bias_backward": _attention,
    "rand": _random("uniform"),
    "rand_like": _random("uniform"),
    "randn": _random("normal"),
    "randn_like": _random("normal"),
    # fused kernels
    "fused": _fused,
    # movement between ranks
    "all_reduce": _all_reduce,
    "all_gather": _collective("all_gather"),
    "reduce_scatter": _collective("reduce_scatter"),
    "all_to_all": _collective("all_to_all"),
    "take": _collective("take"),
    "put": _collective("put"),
}


_ACCUMULATE_MORE: Mapping[str, Callable[[Sequence[str], Operands], str]] = {
    "linear_cross_entropy_backward": losses.linear_cross_entropy_add_grad
}
# Operations that can add to a gradient buffer without a temporary of the buffer's size.
_ACCUMULATE: Mapping[str, Callable[[str, Operands], str]] = {
    "linear_grad_weight": lambda g, o: f"{o.named('functional.linear_add_grad_weight')}({g}, {o.args[0]}, {o.args[1]})",
    "expert_matmul_grad_weight": lambda g, o: (
        f"{o.named('functional.expert_matmul_add_grad_weight')}({arguments((g, *o.args[:3]), (), o.attrs)})"
    ),
    "matmul_grad_right": lambda g, o: f"{o.named('functional.add_product')}({g}, {o.flat(1)}.mT, {o.flat(0)})",
    "fused": lambda g, o: (
        _fused(o, f"into={o.named('functional.materialized')}({g})")
        if o.op.body[0].name in kernels.TABLES
        else f"{o.named('functional.add_sum')}({g}, {unsummed(o)})"
        if summed_by_programs(o.op)
        else f"{g}.add_({_fused(o)})"
    ),
    "embedding_dense_backward": lambda g, o: (
        f"{o.named('functional.embedding_add_grad')}"
        f"({g}, {arguments((*o.args[:2], o.args[3]), ('', '', 'padding_idx=-1'), {})})"
    ),
    "embedding_shard_backward": lambda g, o: (
        f"{o.named('functional.embedding_shard_add_grad')}({', '.join((g, *o.args[:2], o.rank, *o.args[3:4]))})"
    ),
}
