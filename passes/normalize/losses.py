"""Losses as per-row losses and a sum over a count, so that the parts of a batch can be added."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from partc.ir.operators import DTYPES
from partc.ir.program import Arg, DType, DTypeArg, Op, Ref, Value
from partc.passes.normalize.views import unpermuted
from partc.passes.normalize.writer import Rewrite, Writer, ref
from partc.rules.rule import argument, integers, number


def cross_entropy(w: Writer, op: Op) -> None:
    """Move classes last; compute the losses of rows, then their sum over the count (or weight) of unignored rows."""
    logits, labels = op.args[:2]
    weight, smoothing = argument(op, 2, "weight"), argument(op, 5, "label_smoothing", 0.0)
    ignore = argument(op, 4, "ignore_index", -100)
    if w.types[ref(labels).name].dtype not in ("i64", "i32"):
        _of_probabilities(w, op)
        return
    args = (_classes_last(w, op, logits), labels, weight, ignore, smoothing)
    _over_counted(w, op, lambda result: w.add(op, "cross_entropy", args, result))


def _of_probabilities(w: Writer, op: Op) -> None:
    """The cross-entropy of class probabilities: -(p log q) by row, with p mixed with equal ones for label smoothing."""
    logits, target = op.args[:2]
    weight, smoothing = argument(op, 2, "weight"), argument(op, 5, "label_smoothing", 0.0)
    assert isinstance(smoothing, int | float)
    shape, dtype = w.shape(logits), op.result.type.dtype
    dim = min(len(shape) - 1, 1)
    step = _Steps(w, op)
    if smoothing:
        target = step("add", (step("mul", (target, 1 - smoothing)), smoothing / shape[dim]))
    loss = step("mul", (step("log_softmax", (logits, dim)), target))
    if weight is not None:
        column = (shape[dim], *[1] * (len(shape) - dim - 1))
        loss = step("mul", (loss, w.add(op, "reshape", (weight, column), w.value("class_weights", column, dtype))))
    rows = (*shape[:dim], *shape[dim + 1 :])
    total = w.add(op, "sum", (loss, (dim,), False), w.value("loss_by_row", rows, dtype))
    _reduced(w, op, 3, w.add(op, "neg", (total,), w.value("losses", rows, dtype)))


def nll_loss(w: Writer, op: Op) -> None:
    """The negative of each row's value at its label.

    For the values of a log_softmax, whose log-sum-exp is 0, this is a cross-entropy.
    """
    logits, labels = op.args[:2]
    if _is_normalized(w, logits):
        cross_entropy(w, op)
        return
    rows, dtype = w.shape(labels), w.types[ref(logits).name].dtype
    number_type = w.types[ref(labels).name].dtype
    ignore = argument(op, 4, "ignore_index", -100)
    values = _classes_last(w, op, logits)

    def losses(result: Value | None) -> Ref:
        counted = w.add(op, "ne", (labels, ignore), w.value("counted", rows, "bool"))
        safe = w.add(op, "mul", (labels, counted), w.value("counted_labels", rows, number_type))
        index = w.add(op, "reshape", (safe, (*rows, 1)), w.value("label_column", (*rows, 1), number_type))
        column = w.add(op, "gather", (values, len(rows), index), w.value("label_values", (*rows, 1), dtype))
        picked = w.add(op, "reshape", (column, rows), w.value("label_value", rows, dtype))
        found = w.add(op, "neg", (picked,), w.value("label_loss", rows, dtype))
        if (weight := argument(op, 2, "weight")) is not None:
            scale = _label_weights(w, op, weight, labels, counted)
            found = w.add(op, "mul", (found, scale), w.value("label_loss", rows, dtype))
        ignored = w.add(op, "eq", (labels, ignore), w.value("ignored", rows, "bool"))
        return w.add(op, "masked_fill", (found, ignored, 0.0), result)

    _over_counted(w, op, losses)


def _is_normalized(w: Writer, arg: Arg) -> bool:
    """Whether the values come from a log_softmax along the classes, behind views that keep the classes apart."""
    name = ref(arg).name
    at = min(len(w.shape(arg)) - 1, 1)
    while (op := w.made.get(name)) is not None:
        shape = w.types[name].shape
        if op.name in ("log_softmax", "_log_softmax"):
            return number(op.args[1]) % len(shape) == at
        name = next(op.refs(), "")
        if op.name == "reshape":
            before = w.types[name].shape
            if at == len(shape) - 1 and before[-1:] == shape[-1:]:
                at = len(before) - 1
            elif before[: at + 1] != shape[: at + 1]:
                return False
        elif op.name == "permute":
            at = integers(op.args[1])[at]
        elif op.name == "slice":
            if number(argument(op, 1, "dim", 0)) % len(shape) == at:
                return False
        elif op.name not in ("to", "contiguous", "clone"):
            return False
    return False


def _classes_last(w: Writer, op: Op, logits: Arg) -> Arg:
    """The logits with their classes in the last dimension.

    If the model has moved the classes from there, also below a cast, its permutation is undone.
    """
    shape = w.shape(logits)
    if len(shape) <= 2:
        return logits
    order = (0, *range(2, len(shape)), 1)
    if (back := unpermuted(w, ref(logits), order)) is not None:
        return back
    dtype = w.types[ref(logits).name].dtype
    moved = w.value(f"{op.result.name}_logits", tuple(shape[dim] for dim in order), dtype)
    cast = w.made.get(ref(logits).name)
    if cast and cast.name == "to" and (back := unpermuted(w, ref(cast.args[0]), order)) is not None:
        return w.add(cast, "to", (back, *cast.args[1:]), moved)
    return w.add(op, "permute", (logits, order), moved)


def _label_weights(w: Writer, op: Op, weight: Arg, labels: Arg, counted: Ref) -> Ref:
    """The weight of each row's label; ignored rows get the weight of the first class."""
    rows, dtype = w.shape(labels), w.types[ref(op.args[0]).name].dtype
    labels_type, flat = w.types[ref(labels).name].dtype, (math.prod(w.shape(labels)),)
    safe = w.add(op, "mul", (labels, counted), w.value("counted_labels", rows, labels_type))
    line = w.add(op, "reshape", (safe, flat), w.value("counted_labels_line", flat, labels_type))
    found = w.add(op, "index_select", (weight, 0, line), w.value("label_weights_line", flat, dtype))
    return w.add(op, "reshape", (found, rows), w.value("label_weights", rows, dtype))


def _over_counted(w: Writer, op: Op, losses: Callable[[Value | None], Ref]) -> None:
    """The losses of rows, their sum, or their sum over the count (or weight) of unignored rows."""
    logits, labels = op.args[:2]
    reduction, ignore = number(argument(op, 3, "reduction", 1)), argument(op, 4, "ignore_index", -100)
    weight, rows, dtype = argument(op, 2, "weight"), w.shape(labels), w.types[ref(logits).name].dtype
    if reduction == 0:
        losses(None)
        return
    nll = losses(w.value("nll", rows, dtype))
    every = tuple(range(len(rows)))
    if reduction == 2:
        w.add(op, "sum", (nll, every, False))
        return
    total = w.add(op, "sum", (nll, every, False), w.value("nll_sum", (), dtype))
    counted = w.add(op, "ne", (labels, ignore), w.value("counted", rows, "bool"))
    ones = w.add(op, "to", (counted, DTypeArg(dtype)), w.value("counted_as_number", rows, dtype))
    if weight is not None:
        picked = _label_weights(w, op, weight, labels, counted)
        ones = w.add(op, "mul", (picked, ones), w.value("counted_weights", rows, dtype))
    count = w.add(op, "sum", (ones, every, False), w.value("count", (), dtype))
    w.add(op, "div", (total, count))


def mse(w: Writer, op: Op) -> None:
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


def absolute(w: Writer, op: Op) -> None:
    """|x - y|."""
    step = _Steps(w, op)
    _reduced(w, op, 2, step("abs", (step("sub", op.args[:2]),)))


def smooth(*, scaled: bool) -> Rewrite:
    """Quadratic for small errors, linear for large ones: smooth_l1 (`scaled` by 1 / beta) and Huber's loss."""

    def rewrite(w: Writer, op: Op) -> None:
        bound = argument(op, 3, "beta" if scaled else "delta", 1.0)
        assert isinstance(bound, int | float)
        step = _Steps(w, op)
        distance = step("abs", (step("sub", op.args[:2]),))
        square = step("mul", (step("mul", (distance, distance)), 0.5 / bound if scaled and bound else 0.5))
        line = step("sub", (distance, 0.5 * bound))
        line = line if scaled else step("mul", (line, bound))
        small = step("lt" if scaled else "le", (distance, bound), "bool")
        _reduced(w, op, 2, step("where", (small, square, line)))

    return rewrite


def binary(w: Writer, op: Op) -> None:
    """torch's loss of each element, times its weight.

    The operation has torch's derivative, which is finite where p is 0 or 1, unlike that of the formula.
    """
    weight = argument(op, 2, "weight")
    step = _Steps(w, op)
    loss = step("binary_cross_entropy", (*op.args[:2], None, 0))
    _reduced(w, op, 3, step("mul", (loss, weight)) if weight is not None else loss)


def binary_logits(w: Writer, op: Op) -> None:
    """(1 - t) x - log sigmoid(x), with the second term weighted by 1 + (w - 1) t for a positive weight w."""
    x, target = op.args[:2]
    weight, positive = argument(op, 2, "weight"), argument(op, 3, "pos_weight")
    step = _Steps(w, op)
    rest = step("rsub", (target, 1))
    log = step("log_sigmoid", (x,))
    if positive is not None:
        more = w.add(op, "sub", (positive, 1), w.value("more", w.shape(positive), op.result.type.dtype))
        log = step("mul", (log, step("add", (step("mul", (target, more)), 1))))
    loss = step("sub", (step("mul", (rest, x)), log))
    _reduced(w, op, 4, step("mul", (loss, weight)) if weight is not None else loss)


def divergence(w: Writer, op: Op) -> None:
    """t (log t - x), and 0 where t is 0; with `log_target` the target is log t."""
    x, target = op.args[:2]
    step = _Steps(w, op)
    if argument(op, 3, "log_target", False):
        loss = step("mul", (step("exp", (target,)), step("sub", (target, x))))
    else:
        loss = step("sub", (step("xlogy", (target, target)), step("mul", (target, x))))
    _reduced(w, op, 2, loss)


def without_reduction(w: Writer, op: Op) -> None:
    """A torch loss without a rewrite of its own: the loss with reduction "none", then its mean or sum."""
    schema = getattr(torch.ops.aten, op.name).default._schema
    index = [parameter.name for parameter in schema.arguments].index("reduction")
    if number(argument(op, index, "reduction", 1)) == 0:
        w.keep(op)
        return
    args = (*op.args[:index], *(() if len(op.args) <= index else (0, *op.args[index + 1 :])))
    attrs = {**dict(op.attrs), **({} if len(op.args) > index else {"reduction": 0})}

    def plain(arg: Arg) -> Arg | torch.Tensor:
        if not isinstance(arg, Ref):
            return arg
        return torch.empty(w.shape(arg), dtype=DTYPES[w.types[arg.name].dtype], device="meta")

    shape = getattr(torch.ops.aten, op.name)(*map(plain, args), **attrs).shape
    rows = w.add(op, op.name, args, w.value("losses", tuple(shape), op.result.type.dtype), **attrs)
    _reduced(w, op, index, rows)


@dataclass(frozen=True, slots=True)
class _Steps:
    """Writes elementwise operations of a loss, in the broadcast shape of its operands."""

    w: Writer
    op: Op

    def __call__(self, name: str, args: tuple[Arg, ...], dtype: DType | None = None) -> Ref:
        shapes = [self.w.shape(arg) for arg in args if isinstance(arg, Ref)]
        shape = tuple(torch.broadcast_shapes(*shapes))
        return self.w.add(self.op, name, args, self.w.value(f"loss_{name}", shape, dtype or self.op.result.type.dtype))


def _reduced(w: Writer, op: Op, index: int, rows: Ref) -> None:
    """The mean or sum of the rows' losses, or the losses themselves."""
    reduction = number(argument(op, index, "reduction", 1))
    shape = w.shape(rows)
    if reduction == 0:
        w.alias(op.result.name, rows.name)
        return
    every = tuple(range(len(shape)))
    if reduction == 2:
        w.add(op, "sum", (rows, every, False))
        return
    total = w.add(op, "sum", (rows, every, False), w.value("loss_sum", (), op.result.type.dtype))
    w.add(op, "div", (total, math.prod(shape)))
