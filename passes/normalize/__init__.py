"""Give every operation one spelling.

    linear  = linear(layer_norm, …up_weight, …up_bias)
    flatten = view(linear_4, (32, 13))
    cross_entropy_loss = cross_entropy_loss(flatten, flatten_1)
  ->
    linear_product     = linear(layer_norm, …up_weight)
    linear             = add(linear_product, …up_bias)
    flatten            = reshape(linear_4, (32, 13))
    nll                = cross_entropy(flatten, flatten_1, None, -100, 0.0)
    nll_sum            = sum(nll, (0,), False)
    cross_entropy_loss = div(nll_sum, count)

The rewrites are a table with one entry for each ATen name that has another spelling in the IR. Sizes and dimensions are
explicit and non-negative, views are reshapes and permutations, a bias is an addition, a mean is a sum, and losses are
per-row losses and a sum over a count. Operations without effect are dropped, then all dead operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from partc.errors import PartcError
from partc.ir.naming import PRODUCT, unique
from partc.ir.operations import spelling
from partc.ir.program import Arg, DTypeArg, Op, Program, Ref, Region, Value
from partc.passes.normalize import lookups, losses, views
from partc.passes.normalize.attention import attention
from partc.passes.normalize.identities import IDENTITIES, keep
from partc.passes.normalize.inner_gradients import with_inner_gradients
from partc.passes.normalize.inplace import without_mutation
from partc.passes.normalize.norms import plain_norms
from partc.passes.normalize.own_gradients import with_dims
from partc.passes.normalize.random import RANDOM, draws_random_numbers
from partc.passes.normalize.recurrent import gru_cell, lstm_cell, recurrent, rnn_cell
from partc.passes.normalize.solves import with_solves
from partc.passes.normalize.writer import Rewrite, Writer, ref
from partc.passes.normalize.writes import with_joins
from partc.passes.normalize.zero_gradients import with_zero_gradients
from partc.quoting import identifier
from partc.rules.rule import argument, number


def normalize(program: Program, *, forward_only: bool = False) -> Program:
    """Apply the table to every region, then drop dead operations. With `forward_only`, no parameter is trained.

    Raises PartcError P0207 (random numbers that cannot be drawn by position), P0212 (an in-place change of a view or an
    input), P0213.
    """
    (main,), (call,) = program.regions, program.calls
    region, drawn, updated = _normalized(main, program, forward_only)
    stored = dict(zip((value.name for value in region.params), call.params, strict=True))
    types = region.forward.types()
    taken = {value.name for value in program.values}
    results = tuple(unique(identifier(f"next {stored[buffer]}"), taken) for buffer in updated)
    return replace(
        program,
        parameters=lookups.with_sparse(program.parameters, main, call),
        regions=(region,),
        calls=(replace(call, results=(*call.results, *results)),),
        values=(
            *program.values,
            *(Value(name=name, type=types[made]) for name, made in zip(results, updated.values(), strict=True)),
        ),
        updates=tuple((stored[buffer], name) for buffer, name in zip(updated, results, strict=True)),
        draws=drawn,
    )


def _normalized(region: Region, program: Program, forward_only: bool) -> tuple[Region, int, dict[str, str]]:
    """The normalized region, its number of random operations, and the next values of the buffers that it updates.

    The next values are the region's outputs after the loss.
    """
    values = (*region.forward.inputs, *region.params)
    frozen = {parameter.name for parameter in program.parameters if not parameter.trainable}
    call = program.calls_to(region.name)[0]
    trained = {value.name for value, name in zip(region.params, call.params, strict=True) if name not in frozen}
    given = dict(zip(call.args, region.forward.inputs, strict=True))
    entries = [given[name] for name in program.batch_entries]
    writer = Writer(
        types={value.name: value.type for value in values},
        batch=entries[0].type.shape[0] if entries else 0,
        separate=program.separate_batches,
        batched={value.name for value in entries},
        trained=trained,
    )
    types = {value.name: value.type for value in region.params}
    graph, updated = without_mutation(plain_norms(region.forward, types), types, trained)
    for op in with_inner_gradients(graph, types | {value.name: value.type for value in values}).ops:
        op = replace(op.renamed(writer.same), name=_ALIASES.get(op.name, op.name))
        first = len(writer.ops)
        (_without_elements if _is_empty(op) else REWRITES.get(op.name, keep))(writer, op)
        if op.wide:
            writer.ops[first:] = [replace(made, wide=True) for made in writer.ops[first:]]
    outputs = tuple(writer.same.get(name, name) for name in graph.outputs)
    nexts: dict[str, str] = {}
    for buffer, made in updated.items():
        nexts[buffer] = _next_value(writer, buffer, writer.same.get(made, made))
    forward = replace(graph, ops=tuple(writer.ops), outputs=(*outputs, *nexts.values())).without_dead()
    read = {name for op in region.forward.ops for name in op.refs()}
    still = {name for op in forward.ops for name in op.refs()} | {*forward.outputs}
    lost = [name for name in types if name in trained and name in read - still and 0 not in types[name].shape]
    forward = with_solves(with_joins(forward), writer.types)
    all_types = {**writer.types, **forward.types()}
    found = replace(region, forward=with_dims(forward, all_types))
    # The loss reads parameters only through tensors without elements. A loss without any gradient is refused later.
    if lost and not forward_only and not trained.isdisjoint(still):
        found = with_zero_gradients(found, {forward.outputs[0]: lost})
    return found, writer.drawn, nexts


def _next_value(w: Writer, buffer: str, made: str) -> str:
    """A buffer's next value, detached and in the buffer's dtype."""
    type = w.types[buffer]
    value = w.value(f"next_{buffer.removeprefix('b_model_')}", type.shape, type.dtype)
    cast = w.types[made].dtype != type.dtype
    source = w.made[made].source if made in w.made else None
    args: tuple[Arg, ...] = (Ref(made), *((DTypeArg(type.dtype),) if cast else ()))
    w.keep(Op(name="to" if cast else "detach", args=args, results=(value,), source=source))
    # The copy belongs to the module that computed its operand, not to the last module.
    place = next((index + 1 for index, op in enumerate(w.ops) if op is w.made.get(made)), len(w.ops) - 1)
    w.ops.insert(place, w.ops.pop())
    return value.name


def _is_empty(op: Op) -> bool:
    """Whether results have no elements. Random operations other than dropouts count as not empty: each has a number."""
    return (
        bool(op.results)
        and all(0 in value.type.shape for value in op.results)
        and (not draws_random_numbers(op.name) or "dropout" in op.name)
    )


def _without_elements(w: Writer, op: Op) -> None:
    for value in op.results:
        w.add(op, "full", (value.type.shape, 0), value, dtype=DTypeArg(value.type.dtype))


def _cast(w: Writer, op: Op) -> None:
    if w.types[ref(op.args[0]).name].dtype == op.result.type.dtype:
        w.drop(op)
    else:
        w.add(op, "to", (op.args[0], DTypeArg(op.result.type.dtype)))


def _detach(w: Writer, op: Op) -> None:
    """Drop a detach if its operand has no gradient."""
    if ref(op.args[0]).name in w.trained:
        w.keep(replace(op, name="detach"))
    else:
        w.drop(op)


def _linear(w: Writer, op: Op) -> None:
    """Add the bias separately, so that it is added once however the product is cut."""
    bias = argument(op, 2, "bias")
    if bias is None:
        w.add(op, "linear", op.args[:2])
        return
    product = w.value(f"{op.result.name}{PRODUCT}", op.result.type.shape, op.result.type.dtype)
    w.add(op, "linear", op.args[:2], product)
    w.add(op, "add", (Ref(product.name), bias))


def _addmm(w: Writer, op: Op) -> None:
    if any(dict(op.attrs).get(key, 1) != 1 for key in ("beta", "alpha")):
        _baddbmm(w, op)
        return
    product = w.value(f"{op.result.name}{PRODUCT}", op.result.type.shape, op.result.type.dtype)
    w.add(op, "matmul", op.args[1:3], product)
    w.add(op, "add", (Ref(product.name), op.args[0]))


def _baddbmm(w: Writer, op: Op) -> None:
    """beta * bias + alpha * (x @ y)."""
    beta, alpha = (dict(op.attrs).get(key, 1) for key in ("beta", "alpha"))
    shape, dtype = op.result.type.shape, op.result.type.dtype
    product = w.step(op, "matmul", op.args[1:3], "matmul", shape, dtype)
    if alpha != 1:
        product = w.step(op, "mul", (product, alpha), "scaled")
    bias = op.args[0]
    if beta == 0:
        w.alias(op.result.name, product.name)
        return
    if beta != 1:
        bias = w.step(op, "mul", (bias, beta), "bias", None, dtype)
    w.add(op, "add", (product, bias))


def _matmul(w: Writer, op: Op) -> None:
    """`x @ w.T` is linear(x, w); a vector times a matrix becomes a matrix of one row or column."""
    left, right = op.args[:2]
    ranks = (len(w.shape(left)), len(w.shape(right)))
    if ranks == (1, 1):
        w.add(op, "dot", (left, right))
        return
    if 1 in ranks:
        if ranks[0] == 1:
            left = w.add(op, "reshape", (left, (1, *w.shape(left))), _row(w, op, left, (1, *w.shape(left))))
        else:
            right = w.add(op, "reshape", (right, (*w.shape(right), 1)), _row(w, op, right, (*w.shape(right), 1)))
        batch = w.shape(left)[:-2] if ranks[1] == 1 else w.shape(right)[:-2]
        shape = (*batch, w.shape(left)[-2], w.shape(right)[-1])
        product = w.add(op, "matmul", (left, right), w.value(f"{op.result.name}{PRODUCT}", shape, op.result.type.dtype))
        w.add(op, "reshape", (product, op.result.type.shape))
        return
    made = w.made.get(ref(right).name)
    if made is not None and made.name == "permute" and made.args[1] == (1, 0) and len(w.shape(left)) > 1:
        w.add(op, "linear", (left, made.args[0]))
        return
    if ranks[0] == 2 < ranks[1]:  # torch would swap the operands
        left = w.step(op, "expand", (left, (*w.shape(right)[:-2], *w.shape(left))), "left")
    w.add(op, "matmul", (left, right))


def _row(w: Writer, op: Op, vector: Arg, shape: tuple[int, ...]) -> Value:
    """A vector as a matrix."""
    return w.value(f"{ref(vector).name}_matrix", shape, w.types[ref(vector).name].dtype)


def _reduction(w: Writer, op: Op) -> None:
    dims, keep = _dims(w, op)
    w.add(op, "sum" if op.name == "sum" else op.name, (_as_float(w, op), dims, keep))


def _any_or_all(w: Writer, op: Op) -> None:
    """Test the number of nonzero elements, where all are tested: ranks exchange numbers instead of their elements."""
    shape = w.shape(op.args[0])
    if op.result.type.shape or not shape:
        IDENTITIES["any"](w, op)
        return
    found = w.step(op, "count_nonzero", (op.args[0], tuple(range(len(shape)))), "count", (), "i64")
    w.add(op, *(("gt", (found, 0)) if op.name == "any" else ("eq", (found, math.prod(shape)))))


def _equality(w: Writer, op: Op) -> None:
    """A comparison of integers with a constant tensor of one integer, as one with a Python integer."""
    one, other = op.args
    if _integer(w, one) is not None:
        one, other = other, one
    number = _integer(w, other)
    integers = isinstance(one, Ref) and w.types[one.name].dtype.startswith(("i", "u"))
    op = op if number is None or not integers else replace(op, args=(one, number))
    IDENTITIES.get(op.name, Writer.keep)(w, op)


def _integer(w: Writer, arg: Arg) -> int | None:
    """The integer that a constant tensor without dimensions holds; None for other arguments."""
    maker = w.made.get(arg.name) if isinstance(arg, Ref) else None
    if maker is None or maker.name != "full" or maker.args[0] != ():
        return None
    number = maker.args[1]
    return number if isinstance(number, int) and not isinstance(number, bool) else None


def _as_float(w: Writer, op: Op) -> Arg:
    """The operand, cast to the dtype of the reduction's result."""
    dtype = op.result.type.dtype
    if w.types[ref(op.args[0]).name].dtype == dtype:
        return op.args[0]
    value = w.value(f"{ref(op.args[0]).name}_{dtype}", w.shape(op.args[0]), dtype)
    return w.add(op, "to", (op.args[0], DTypeArg(dtype)), value)


def _dims(w: Writer, op: Op) -> tuple[tuple[int, ...], bool]:
    rank = len(w.shape(op.args[0]))
    given = argument(op, 1, "dim")
    dims = (given,) if isinstance(given, int) else given
    named = [number(dim) % rank for dim in dims] if isinstance(dims, tuple) and rank else []
    return tuple(sorted(named or range(rank))), bool(argument(op, 2, "keepdim", False))


def _mean(w: Writer, op: Op) -> None:
    dims, keep = _dims(w, op)
    count = math.prod(w.shape(op.args[0])[dim] for dim in dims)
    if count == 1:
        w.add(op, "sum", (_as_float(w, op), dims, keep))
        return
    total = w.step(op, "sum", (_as_float(w, op), dims, keep), "sum", op.result.type.shape)
    w.add(op, "div", (total, count))


def _softmax(w: Writer, op: Op) -> None:
    rank = len(op.result.type.shape)
    w.add(op, op.name.removeprefix("_"), (_as_float(w, op), number(op.args[1]) % max(rank, 1)))


def _rms_norm(w: Writer, op: Op) -> None:
    w.add(op, "rms_norm", (op.args[0], op.args[1], argument(op, 2, "weight"), argument(op, 3, "eps")))


def _layer_norm(w: Writer, op: Op) -> None:
    args = (op.args[0], op.args[1], argument(op, 2, "weight"), argument(op, 3, "bias"), argument(op, 4, "eps", 1e-5))
    w.add(op, "layer_norm", args)


def _constant(w: Writer, op: Op) -> None:
    """new_zeros and similar become zeros: their operand only supplies a dtype. Uninitialized memory becomes zeros,
    too.
    """
    word = next((word for word in ("zero", "one", "empty") if word in op.name), "")
    position = 2 if op.name == "new_full" else 1
    fill = {"zero": 0, "one": 1, "empty": 0}[word] if word else argument(op, position, "fill_value")
    if isinstance(fill, Ref):
        _copy(w, op)
        return
    w.add(op, "full", (op.result.type.shape, fill), dtype=DTypeArg(op.result.type.dtype))


def _written_out(w: Writer, op: Op) -> None:
    """A small constant tensor as operations: a repeated number, a range, or a concatenation of numbers."""
    numbers, shape = op.args
    assert isinstance(numbers, tuple) and isinstance(shape, tuple)
    dtype = op.result.type.dtype
    if len(set(numbers)) == 1:
        w.add(op, "full", (shape, numbers[0]), dtype=DTypeArg(dtype))
        return
    flat = w.value(f"{op.result.name}_numbers", (len(numbers),), dtype)
    if numbers == tuple(range(len(numbers))):
        w.add(op, "arange", (len(numbers),), flat, dtype=DTypeArg(dtype))
    else:
        parts = tuple(w.step(op, "full", ((1,), item), "number", (1,), dtype=DTypeArg(dtype)) for item in numbers)
        w.add(op, "cat", (parts, 0), flat)
    w.add(op, "reshape", (Ref(flat.name), shape))


def _copy(w: Writer, op: Op) -> None:
    """copy(x, src): src in the shape and dtype of x."""
    source, type = op.args[1], op.result.type
    if w.types[ref(source).name].dtype != type.dtype:
        source = w.step(op, "to", (source, DTypeArg(type.dtype)), "cast")
    if w.shape(source) == type.shape:
        w.alias(op.result.name, ref(source).name)
    else:
        w.add(op, "expand", (source, type.shape))


def _index_put(w: Writer, op: Op) -> None:
    """x[mask] = y, where y is the same for all selected elements or rows, as where(mask, y, x).

    Other masks select rows of y by their number, so that examples depend on each other.
    """
    x, indices, y = op.args[:3]
    assert isinstance(indices, tuple)
    mask, shape = indices[0], op.result.type.shape
    alike = len(indices) == 1 and isinstance(mask, Ref) and w.types[mask.name].dtype == "bool"
    inner = len(shape) - len(w.shape(mask)) if alike else 0
    if not alike or len(w.shape(y)) > inner or argument(op, 3, "accumulate", False):
        keep(w, op)
        return
    if inner:
        mask = w.step(op, "reshape", (mask, (*w.shape(mask), *(1 for _ in range(inner)))), "mask")
    if w.shape(y) != shape:
        y = w.step(op, "expand", (y, shape), "same", None, op.result.type.dtype)
    w.add(op, "where", (mask, y, x))


def _glu(w: Writer, op: Op) -> None:
    """The first half, multiplied by the sigmoid of the second."""
    shape, dtype = op.result.type.shape, op.result.type.dtype
    dim = number(argument(op, 1, "dim", -1)) % len(shape)
    halves = tuple(w.value(f"{op.result.name}_{word}", shape, dtype) for word in ("half", "gate"))
    args = (op.args[0], (shape[dim], shape[dim]), dim)
    w.keep(Op(name="split", args=args, results=halves, source=op.source))
    w.add(op, "mul", (Ref(halves[0].name), w.step(op, "sigmoid", (Ref(halves[1].name),), "open")))


def _weight_norm(w: Writer, op: Op) -> None:
    """v * g / |v|, with norms along all dimensions but one."""
    v, g = op.args[:2]
    shape = op.result.type.shape
    dim = number(argument(op, 2, "dim", 0))
    others = tuple(range(len(shape))) if dim == -1 else tuple(i for i in range(len(shape)) if i != dim % len(shape))
    kept = tuple(1 if i in others else size for i, size in enumerate(shape))
    length = w.step(op, "linalg_vector_norm", (v, 2, others, True), "length", kept)
    w.add(op, "mul", (v, w.step(op, "div", (g, length), "scale")))


def _norm(w: Writer, op: Op) -> None:
    """linalg_norm of vectors or of all elements; other matrix norms are kept."""
    rank = len(w.shape(op.args[0]))
    order, dims, keep = argument(op, 1, "ord"), argument(op, 2, "dim"), argument(op, 3, "keepdim", False)
    given = dims if isinstance(dims, tuple) else range(rank) if dims is None else (dims,)
    listed = tuple(number(dim) % rank for dim in given)
    vectors = len(listed) == 1 or (order is None and dims is None)
    if vectors and not isinstance(order, str) and argument(op, 4, "dtype") is None:
        w.add(op, "linalg_vector_norm", (op.args[0], 2 if order is None else order, listed, keep))
    else:
        w.keep(op)


def _fill_diagonal(w: Writer, op: Op) -> None:
    """A matrix with one number on its diagonal."""
    x, number, *wrapped = op.args
    shape = op.result.type.shape
    if len(shape) != 2 or (any(wrapped) and shape[0] > shape[1]):
        raise PartcError(
            "P0212",
            "fill_diagonal_ is only supported for matrices, without wrap",
            help="use torch.where with a mask",
            source=op.source,
        )
    mask = w.step(op, "eye", shape, "diagonal", shape, dtype=DTypeArg("bool"))
    w.add(op, "masked_fill", (x, mask, number))


def _gelu(w: Writer, op: Op) -> None:
    approximate = argument(op, 1, "approximate", "none")
    if approximate == "none":
        w.add(op, "gelu", op.args[:1])
    else:
        w.add(op, "gelu", op.args[:1], approximate=approximate)


def _keep_state(w: Writer, op: Op) -> None:
    w.kept[number(op.args[1])] = w.next_draw


def _return_to_state(w: Writer, op: Op) -> None:
    w.next_draw = w.kept[number(op.args[1])]


def _shared_rewrite(names: str, rewrite: Rewrite) -> dict[str, Rewrite]:
    return dict.fromkeys(names.split(), rewrite)


# torch's aliases of operations.
_ALIASES: Mapping[str, str] = {
    "absolute": "abs", "arccos": "acos", "arccosh": "acosh", "arcsin": "asin", "arcsinh": "asinh", "arctan": "atan",
    "arctan2": "atan2", "arctanh": "atanh",
    "broadcast_to": "expand", "clip": "clamp", "divide": "div", "fix": "trunc", "ger": "outer",
    "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "moveaxis": "movedim",
    "multiply": "mul", "negative": "neg", "not_equal": "ne", "special_erf": "erf", "special_exp2": "exp2",
    "special_expit": "sigmoid", "special_expm1": "expm1", "special_log1p": "log1p",
    "special_log_softmax": "log_softmax", "special_logsumexp": "logsumexp", "special_round": "round",
    "special_softmax": "softmax", "subtract": "sub", "swapdims": "transpose", "true_divide": "div",
}  # fmt: skip
REWRITES: Mapping[str, Rewrite] = {
    # views
    **dict.fromkeys(spelling("reshape"), views.reshape),
    "permute": views.permute(lambda op, rank: tuple(number(d) % rank for d in op.args[1])),  # type: ignore[union-attr]
    **_shared_rewrite("transpose swapaxes", views.permute(views.swapped)),
    **_shared_rewrite("t numpy_T", views.permute(lambda op, rank: tuple(reversed(range(rank))))),
    "vdot": lambda w, op: w.keep(replace(op, name="dot")),
    **_shared_rewrite("mT matrix_H mH adjoint", views.permute(lambda op, rank: (*range(rank - 2), rank - 1, rank - 2))),
    "movedim": views.permute(views.moved),
    **_shared_rewrite("expand expand_as", views.expand),
    "broadcast_tensors": views.broadcast,
    "meshgrid": views.meshgrid,
    **dict.fromkeys(spelling("split"), views.split),
    "select": views.select,
    "slice": views.slice_,
    "narrow": views.narrow,
    "slice_scatter": views.slice_scatter,
    "select_scatter": views.select_scatter,
    **_shared_rewrite("cat concat concatenate", views.cat),
    "stack": views.stack,
    "pad_sequence": views.pad_sequence,
    "tile": views.tile,
    # nothing
    **_shared_rewrite("contiguous alias clone lift_fresh_copy view_of identity", lambda w, op: w.drop(op)),
    **_shared_rewrite("detach detach_", _detach),
    **_shared_rewrite("to _to_copy type_as float double", _cast),
    **IDENTITIES,
    # products
    "linear": _linear,
    "addmm": _addmm,
    "baddbmm": _baddbmm,
    **_shared_rewrite("matmul mm bmm", _matmul),
    **_shared_rewrite("eq ne", _equality),
    # reductions
    "mean": _mean,
    **_shared_rewrite("sum amax amin", _reduction),
    **_shared_rewrite("any all", _any_or_all),
    **_shared_rewrite("softmax log_softmax _softmax _log_softmax", _softmax),
    # composites
    "scaled_dot_product_attention": attention,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "_weight_norm": _weight_norm,
    "linalg_norm": _norm,
    "embedding": lookups.embedding,
    "embedding_bag": lookups.embedding_bag,
    "embedding_renorm": lookups.embedding_renorm,
    "one_hot": lookups.one_hot,
    "masked_scatter": lookups.masked_scatter,
    "take_along_dim": lookups.take_along,
    "take": lookups.take,
    "put": lookups.put,
    "fill_diagonal": _fill_diagonal,
    "gelu": _gelu,
    "glu": _glu,
    "cross_entropy_loss": losses.cross_entropy,
    **_shared_rewrite("nll_loss nll_loss_nd", losses.nll_loss),
    "mse_loss": losses.mse,
    "l1_loss": losses.absolute,
    "smooth_l1_loss": losses.smooth(scaled=True),
    "huber_loss": losses.smooth(scaled=False),
    "binary_cross_entropy": losses.binary,
    "binary_cross_entropy_with_logits": losses.binary_logits,
    "kl_div": losses.divergence,
    **_shared_rewrite(
        "poisson_nll_loss cosine_embedding_loss soft_margin_loss hinge_embedding_loss triplet_margin_loss"
        " margin_ranking_loss",
        losses.without_reduction,
    ),
    # states of the generator
    "generator_kept": _keep_state,
    "generator_returned": _return_to_state,
    # tensors from numbers
    **_shared_rewrite(
        "empty new_empty zeros ones new_zeros new_ones new_full zeros_like ones_like full_like zero fill", _constant
    ),
    "constant": _written_out,
    "copy": _copy,
    "index_put": _index_put,
    # random numbers
    **RANDOM,
    **_shared_rewrite("lstm gru rnn_tanh rnn_relu", recurrent),
    "lstm_cell": lstm_cell,
    "gru_cell": gru_cell,
    **_shared_rewrite("rnn_tanh_cell rnn_relu_cell", rnn_cell),
}
