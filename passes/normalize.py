"""Spell every operation one way.

    v = view(x, (4, 16, -1, 8))              v = reshape(x, (4, 16, 2, 8))
    t = transpose(v, 1, -2)             ->   t = permute(v, (0, 2, 1, 3))
    d = dropout(t, 0.0, True)                m = sum(t, (3,), False)
    m = mean(d, (-1,))                       m = mul(m, 0.125)

The rewrites are a table, one entry for each ATen name that has another spelling here: sizes and
dimensions are explicit and not negative, views are reshapes and permutations, a bias is an addition,
a mean is a sum, losses are per-row losses and a sum over a count. What does nothing is dropped, then
everything that nobody reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from partc.errors import PartcError
from partc.layout import Layout
from partc.program import Arg, DType, DTypeArg, Graph, Op, Program, Ref, Region, TensorType, Value

_MAKERS = frozenset({"arange", "linspace", "logspace", "eye", "scalar_tensor", "full"})
Rewrite = Callable[["Writer", Op], None]


def normalize(program: Program) -> Program:
    """Apply the table to every region, then drop dead operations.

    Raises PartcError P0207 (dropout), P0212 (an operation that changes its input in place), P0213.
    """
    return replace(program, regions=tuple(_normalized(region) for region in program.regions))


def _normalized(region: Region) -> Region:
    values = (*region.forward.inputs, *region.params)
    trained = {value.name for value in region.params}
    writer = Writer(types={value.name: value.type for value in values}, trained=trained)
    for op in region.forward.ops:
        op = op.renamed(writer.same)
        rewrite = _TABLE.get(op.name)
        if rewrite is not None:
            rewrite(writer, op)
        elif op.name.endswith("_") and not op.name.startswith("_") and "::" not in op.name:
            writer.in_place(op)
        else:
            writer.keep(_with_dtypes(writer, op))
    outputs = tuple(writer.same.get(name, name) for name in region.forward.outputs)
    graph = Graph(inputs=region.forward.inputs, ops=tuple(writer.ops), outputs=outputs)
    return without_dead(replace(region, forward=graph))


def _with_dtypes(w: Writer, op: Op) -> Op:
    """Where torch would take its default dtype for numbers made of integers, say which one it was."""
    result = op.results[0].type if op.results else None
    if result is None or not result.differentiable or any(w.types[name].differentiable for name in op.refs()):
        return op
    if not any(True for _ in op.refs()):
        attrs = tuple(item for item in op.attrs if item[0] != "dtype")
        return replace(op, attrs=(*attrs, ("dtype", DTypeArg(result.dtype)))) if op.name in _MAKERS else op
    cast: dict[str, str] = {}
    for name in dict.fromkeys(op.refs()):
        value = w.value(f"{name}_{result.dtype}", w.types[name].shape, result.dtype)
        w.add(op, "to", (Ref(name), DTypeArg(result.dtype)), value)
        cast[name] = value.name
    return replace(op.renamed(cast), results=op.results)


def without_dead(region: Region) -> Region:
    """Drop operations and parameters that no output depends on."""
    live = set(region.forward.outputs)
    kept = []
    for op in reversed(region.forward.ops):
        if any(value.name in live for value in op.results):
            kept.append(op)
            live.update(op.refs())
    return replace(region, forward=replace(region.forward, ops=tuple(reversed(kept))))


@dataclass(slots=True)
class Writer:
    """The graph being written; `same` maps results of dropped operations to what they equal."""

    types: dict[str, TensorType]
    trained: set[str] = field(default_factory=set)  # values that depend on a parameter
    ops: list[Op] = field(default_factory=list)
    made: dict[str, Op] = field(default_factory=dict)  # what defines each value written so far
    same: dict[str, str] = field(default_factory=dict)

    def keep(self, op: Op) -> None:
        self.ops.append(op)
        self.types.update((value.name, value.type) for value in op.results)
        self.made.update((value.name, op) for value in op.results)
        if not self.trained.isdisjoint(op.refs()):
            self.trained.update(value.name for value in op.results)

    def add(self, op: Op, name: str, args: tuple[Arg, ...], result: Value | None = None, **attrs: Arg) -> Ref:
        """Write an operation in the place of `op`, defining its result unless another is given."""
        result = result or op.result
        self.keep(Op(name=name, args=args, attrs=tuple(attrs.items()), results=(result,), source=op.source))
        return Ref(result.name)

    def drop(self, op: Op) -> None:
        """The operation returns its first operand."""
        self.alias(op.result.name, ref(op.args[0]).name)

    def alias(self, name: str, to: str) -> None:
        self.same[name] = self.same.get(to, to)

    def value(self, stem: str, shape: tuple[int, ...], dtype: DType) -> Value:
        name, count = stem, 1
        while name in self.types:
            count += 1
            name = f"{stem}_{count}"
        return Value(name=name, type=TensorType(dtype=dtype, layout=Layout.replicated(shape)))

    def shape(self, arg: Arg) -> tuple[int, ...]:
        return self.types[ref(arg).name].shape

    def in_place(self, op: Op) -> None:
        """`add_` and the like: later readers of the operand must read the result."""
        target = ref(op.args[0]).name
        source = self.made.get(target)
        if source is None or source.name in ("reshape", "permute", "expand", "slice", "split"):
            raise PartcError(
                "P0212",
                f"{op.name} changes {'a view' if source else 'an input or parameter'} in place",
                help=f"use {op.name.removesuffix('_')} and the value it returns",
                source=op.source,
            )
        rewritten = replace(op, name=op.name.removesuffix("_"))
        rewrite = _TABLE.get(rewritten.name)
        if rewrite is not None:
            rewrite(self, rewritten)
        else:
            self.keep(rewritten)
        self.same[target] = self.same.get(op.result.name, op.result.name)


def ref(arg: Arg) -> Ref:
    if not isinstance(arg, Ref):
        raise PartcError("P0213", f"a tensor was expected where {arg!r} stands", help="report this model's operation")
    return arg


def number(arg: Arg) -> int:
    assert isinstance(arg, int)
    return arg


def argument(op: Op, index: int, name: str, default: Arg = None) -> Arg:
    return op.args[index] if index < len(op.args) else dict(op.attrs).get(name, default)


def _reshape(w: Writer, op: Op) -> None:
    if w.shape(op.args[0]) == op.result.type.shape:
        w.drop(op)
    else:
        w.add(op, "reshape", (op.args[0], op.result.type.shape))


def _permute(order: Callable[[Op, int], tuple[int, ...]]) -> Rewrite:
    def rewrite(w: Writer, op: Op) -> None:
        rank = len(op.result.type.shape)
        dims = order(op, rank)
        if dims == tuple(range(rank)):
            w.drop(op)
        else:
            w.add(op, "permute", (op.args[0], dims))

    return rewrite


def _swapped(op: Op, rank: int) -> tuple[int, ...]:
    order = list(range(rank))
    a, b = (number(arg) % rank for arg in (op.args[1:3] if len(op.args) > 2 else (0, 1)))
    order[a], order[b] = order[b], order[a]
    return tuple(order)


def _moved(op: Op, rank: int) -> tuple[int, ...]:
    to_tuple = lambda arg: tuple(d % rank for d in arg) if isinstance(arg, tuple) else (arg % rank,)  # noqa: E731
    sources, targets = to_tuple(op.args[1]), to_tuple(op.args[2])
    order = [dim for dim in range(rank) if dim not in sources]
    for target, source in sorted(zip(targets, sources, strict=True)):
        order.insert(target, source)
    return tuple(order)


def _expand(w: Writer, op: Op) -> None:
    if w.shape(op.args[0]) == op.result.type.shape:
        w.drop(op)
    else:
        w.add(op, "expand", (op.args[0], op.result.type.shape))


def _broadcast(w: Writer, op: Op) -> None:
    operands = op.args[0] if isinstance(op.args[0], tuple) else op.args
    for operand, value in zip(operands, op.results, strict=True):
        if w.shape(operand) == value.type.shape:
            w.alias(value.name, ref(operand).name)
        else:
            w.add(op, "expand", (operand, value.type.shape), value)


def _split(w: Writer, op: Op) -> None:
    dim = argument(op, 1 if op.name == "unbind" else 2, "dim", 0)
    rank = len(w.shape(op.args[0]))
    dim = number(dim) % rank
    if op.name == "unbind":
        shape = w.shape(op.args[0])
        parts = tuple(
            w.value(f"{v.name}_part", (*shape[:dim], 1, *shape[dim + 1 :]), v.type.dtype) for v in op.results
        )
        split = replace(op, name="split", args=(op.args[0], (1,) * len(parts), dim), attrs=(), results=parts)
        w.keep(split)
        for part, value in zip(parts, op.results, strict=True):
            w.add(op, "reshape", (Ref(part.name), value.type.shape), value)
        return
    sizes = tuple(value.type.shape[dim] for value in op.results)
    w.keep(replace(op, name="split", args=(op.args[0], sizes, dim), attrs=()))


def _select(w: Writer, op: Op) -> None:
    shape = w.shape(op.args[0])
    dim, index = number(op.args[1]) % len(shape), number(op.args[2])
    index %= shape[dim]
    part = w.value(f"{op.result.name}_row", (*shape[:dim], 1, *shape[dim + 1 :]), op.result.type.dtype)
    w.add(op, "slice", (op.args[0], dim, index, index + 1, 1), part)
    w.add(op, "reshape", (Ref(part.name), op.result.type.shape))


def _slice(w: Writer, op: Op) -> None:
    shape = w.shape(op.args[0])
    dim = number(argument(op, 1, "dim", 0)) % len(shape)
    start, end, step = argument(op, 2, "start") or 0, argument(op, 3, "end"), argument(op, 4, "step", 1)
    size = shape[dim]
    first, last, stride = slice(start, end, step).indices(size)
    if (first, last, stride) == (0, size, 1):
        w.drop(op)
    else:
        w.add(op, "slice", (op.args[0], dim, first, max(first, last), stride))


def _cat(w: Writer, op: Op) -> None:
    """Parts without elements (an empty cache) are left out."""
    dim = number(argument(op, 1, "dim", 0)) % len(op.result.type.shape)
    assert isinstance(op.args[0], tuple)
    parts = tuple(part for part in op.args[0] if 0 not in w.shape(part))
    if len(parts) == 1:
        w.alias(op.result.name, ref(parts[0]).name)
    else:
        w.add(op, "cat", (parts, dim))


def _stack(w: Writer, op: Op) -> None:
    shape = op.result.type.shape
    dim = number(argument(op, 1, "dim", 0)) % len(shape)
    assert isinstance(op.args[0], tuple)
    single = (*shape[:dim], 1, *shape[dim + 1 :])
    parts = []
    for part in op.args[0]:
        value = w.value(f"{ref(part).name}_layer", single, op.result.type.dtype)
        parts.append(w.add(op, "reshape", (part, single), value))
    w.add(op, "cat", (tuple(parts), dim))


def _cast(w: Writer, op: Op) -> None:
    if w.types[ref(op.args[0]).name].dtype == op.result.type.dtype:
        w.drop(op)
    else:
        w.add(op, "to", (op.args[0], DTypeArg(op.result.type.dtype)))


def _drop(w: Writer, op: Op) -> None:
    w.drop(op)


def _detach(w: Writer, op: Op) -> None:
    """Without a gradient to stop, it does nothing."""
    if ref(op.args[0]).name in w.trained:
        w.keep(replace(op, name="detach"))
    else:
        w.drop(op)


def _dropout(w: Writer, op: Op) -> None:
    p, training = op.args[1], argument(op, 2, "train", True)
    if training and p:
        raise PartcError(
            "P0207",
            f"dropout with p={p}: random numbers are not yet the same on every mesh",
            help="set dropout to 0, or call model.eval()",
            source=op.source,
        )
    w.drop(op)


def _linear(w: Writer, op: Op) -> None:
    """A bias is added apart, so that it is added once however the product is cut."""
    bias = argument(op, 2, "bias")
    if bias is None:
        w.add(op, "linear", op.args[:2])
        return
    product = w.value(f"{op.result.name}_product", op.result.type.shape, op.result.type.dtype)
    w.add(op, "linear", op.args[:2], product)
    w.add(op, "add", (Ref(product.name), bias))


def _addmm(w: Writer, op: Op) -> None:
    scales = [dict(op.attrs).get(key, 1) for key in ("beta", "alpha")]
    if scales != [1, 1]:
        w.keep(op)
        return
    product = w.value(f"{op.result.name}_product", op.result.type.shape, op.result.type.dtype)
    w.add(op, "matmul", op.args[1:3], product)
    w.add(op, "add", (Ref(product.name), op.args[0]))


def _matmul(w: Writer, op: Op) -> None:
    """`x @ w.T` is linear(x, w); vectors are matrices of one row or column."""
    left, right = op.args[:2]
    made = w.made.get(ref(right).name)
    if made is not None and made.name == "permute" and made.args[1] == (1, 0) and len(w.shape(left)) > 1:
        w.add(op, "linear", (left, made.args[0]))
    elif op.name == "bmm" or min(len(w.shape(left)), len(w.shape(right))) > 1:
        w.add(op, "matmul", (left, right))
    else:
        w.keep(op)


def _reduction(w: Writer, op: Op) -> None:
    dims, keep = _dims(w, op)
    w.add(op, "sum" if op.name == "sum" else op.name, (_as_float(w, op), dims, keep))


def _as_float(w: Writer, op: Op) -> Arg:
    """The operand in the dtype that the reduction gives."""
    dtype = op.result.type.dtype
    if w.types[ref(op.args[0]).name].dtype == dtype:
        return op.args[0]
    value = w.value(f"{ref(op.args[0]).name}_{dtype}", w.shape(op.args[0]), dtype)
    return w.add(op, "to", (op.args[0], DTypeArg(dtype)), value)


def _dims(w: Writer, op: Op) -> tuple[tuple[int, ...], bool]:
    rank = len(w.shape(op.args[0]))
    given = argument(op, 1, "dim")
    dims = (given,) if isinstance(given, int) else given
    every = tuple(dim % rank for dim in dims) if isinstance(dims, tuple) and dims else tuple(range(rank))  # type: ignore[operator]
    return tuple(sorted(every)), bool(argument(op, 2, "keepdim", False))


def _mean(w: Writer, op: Op) -> None:
    dims, keep = _dims(w, op)
    count = math.prod(w.shape(op.args[0])[dim] for dim in dims)
    total = w.value(f"{op.result.name}_sum", op.result.type.shape, op.result.type.dtype)
    w.add(op, "sum", (_as_float(w, op), dims, keep), total)
    w.add(op, "div", (Ref(total.name), count))


def _softmax(w: Writer, op: Op) -> None:
    rank = len(op.result.type.shape)
    w.add(op, op.name.removeprefix("_"), (_as_float(w, op), number(op.args[1]) % rank))


def _attention(w: Writer, op: Op) -> None:
    dropout = argument(op, 4, "dropout_p", 0.0)
    if dropout:
        _dropout(w, replace(op, args=(op.args[0], dropout, True)))
    mask, causal = argument(op, 3, "attn_mask"), argument(op, 5, "is_causal", False)
    w.add(op, "attention", (*op.args[:3], mask, bool(causal), argument(op, 6, "scale")))


def _rms_norm(w: Writer, op: Op) -> None:
    w.add(op, "rms_norm", (op.args[0], op.args[1], argument(op, 2, "weight"), argument(op, 3, "eps")))


def _layer_norm(w: Writer, op: Op) -> None:
    args = (op.args[0], op.args[1], argument(op, 2, "weight"), argument(op, 3, "bias"), argument(op, 4, "eps", 1e-5))
    w.add(op, "layer_norm", args)


def _embedding(w: Writer, op: Op) -> None:
    """A third argument names the row that gets no gradient."""
    padding = argument(op, 2, "padding_idx", -1)
    if padding is not None and padding != -1:
        w.add(op, "embedding", (*op.args[:2], padding))
    else:
        w.add(op, "embedding", op.args[:2])


def _cross_entropy(w: Writer, op: Op) -> None:
    """Classes last; rows' losses, then their sum over the count (or the weights) of those not ignored."""
    logits, labels = op.args[:2]
    weight, reduction = argument(op, 2, "weight"), number(argument(op, 3, "reduction", 1))
    ignore, smoothing = argument(op, 4, "ignore_index", -100), argument(op, 5, "label_smoothing", 0.0)
    shape, dtype = w.shape(logits), w.types[ref(logits).name].dtype
    name = op.result.name
    if w.types[ref(labels).name].dtype not in ("i64", "i32"):
        w.keep(op)  # class probabilities: no rule knows them, so they are reported
        return
    if len(shape) > 2:
        order = (0, *range(2, len(shape)), 1)
        moved = w.value(f"{name}_logits", tuple(shape[dim] for dim in order), dtype)
        logits = w.add(op, "permute", (logits, order), moved)
    rows = w.shape(labels)
    args = (logits, labels, weight, ignore, smoothing)
    if reduction == 0:
        w.add(op, "cross_entropy", args)
        return
    nll = w.add(op, "cross_entropy", args, w.value("nll", rows, dtype))
    every = tuple(range(len(rows)))
    if reduction == 2:
        w.add(op, "sum", (nll, every, False))
        return
    total = w.add(op, "sum", (nll, every, False), w.value("nll_sum", (), dtype))
    counted = w.add(op, "ne", (labels, ignore), w.value("counted", rows, "bool"))
    ones = w.add(op, "to", (counted, DTypeArg(dtype)), w.value("counted_as_number", rows, dtype))
    if weight is not None:
        safe = w.add(op, "mul", (labels, counted), w.value("counted_labels", rows, w.types[ref(labels).name].dtype))
        picked = w.add(op, "index_select_rows", (weight, safe), w.value("label_weights", rows, dtype))
        ones = w.add(op, "mul", (picked, ones), w.value("counted_weights", rows, dtype))
    count = w.add(op, "sum", (ones, every, False), w.value("count", (), dtype))
    w.add(op, "div", (total, count))


def _mse(w: Writer, op: Op) -> None:
    shape, dtype = w.shape(op.args[0]), op.result.type.dtype
    reduction = number(argument(op, 2, "reduction", 1))
    error = w.add(op, "sub", op.args[:2], w.value("error", shape, dtype))
    if reduction == 0:
        w.add(op, "mul", (error, error))
        return
    squares = w.add(op, "mul", (error, error), w.value("squares", shape, dtype))
    every = tuple(range(len(shape)))
    if reduction == 2:
        w.add(op, "sum", (squares, every, False))
        return
    total = w.add(op, "sum", (squares, every, False), w.value("squares_sum", (), dtype))
    w.add(op, "div", (total, math.prod(shape)))


def _constant(w: Writer, op: Op) -> None:
    """new_zeros and the like make what zeros makes: their operand gives only a dtype."""
    name = {"new_zeros": "zeros", "new_ones": "ones", "new_full": "full", "zeros_like": "zeros", "ones_like": "ones"}
    made = {"zeros": 0, "ones": 1}.get(name.get(op.name, op.name), None)
    fill = made if made is not None else argument(op, 2 if op.name == "new_full" else 1, "fill_value")
    w.add(op, "full", (op.result.type.shape, fill), dtype=DTypeArg(op.result.type.dtype))


def _gelu(w: Writer, op: Op) -> None:
    approximate = argument(op, 1, "approximate", "none")
    if approximate == "none":
        w.add(op, "gelu", op.args[:1])
    else:
        w.add(op, "gelu", op.args[:1], approximate=approximate)


_TABLE: Mapping[str, Rewrite] = {
    # views
    **dict.fromkeys("view _unsafe_view reshape flatten unflatten squeeze unsqueeze view_as".split(), _reshape),
    "permute": _permute(lambda op, rank: tuple(number(d) % rank for d in op.args[1])),  # type: ignore[union-attr]
    **dict.fromkeys("transpose swapaxes t numpy_T mT".split(), _permute(_swapped)),
    "mT": _permute(lambda op, rank: (*range(rank - 2), rank - 1, rank - 2)),
    "movedim": _permute(_moved),
    **dict.fromkeys("expand expand_as".split(), _expand),
    "broadcast_tensors": _broadcast,
    **dict.fromkeys("split split_with_sizes chunk unbind tensor_split unsafe_split unsafe_chunk".split(), _split),
    "select": _select,
    "slice": _slice,
    "cat": _cat,
    "concat": _cat,
    "stack": _stack,
    # nothing
    **dict.fromkeys("contiguous alias clone lift_fresh_copy view_of identity".split(), _drop),
    **dict.fromkeys("detach detach_".split(), _detach),
    **dict.fromkeys("dropout feature_dropout alpha_dropout".split(), _dropout),
    **dict.fromkeys("to _to_copy type_as float double".split(), _cast),
    # products
    "linear": _linear,
    "addmm": _addmm,
    **dict.fromkeys("matmul mm bmm".split(), _matmul),
    # reductions
    "mean": _mean,
    **dict.fromkeys("sum amax amin".split(), _reduction),
    **dict.fromkeys("softmax log_softmax _softmax _log_softmax".split(), _softmax),
    # composites
    "scaled_dot_product_attention": _attention,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "embedding": _embedding,
    "gelu": _gelu,
    "cross_entropy_loss": _cross_entropy,
    "mse_loss": _mse,
    # tensors from numbers
    **dict.fromkeys("zeros ones new_zeros new_ones new_full zeros_like ones_like full_like".split(), _constant),
}

