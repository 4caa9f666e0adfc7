"""Losses as per-row losses and a sum over a count, so that the parts of a batch can be added."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from partc.ir.operators import DTYPES
from partc.ir.program import Arg, DType, DTypeArg, Op, Ref
from partc.passes.normalize.writer import Rewrite, Writer, argument, number, ref


def cross_entropy(w: Writer, op: Op) -> None:
    """Move classes last; compute the losses of rows, then their sum over the count (or weight) of those not ignored."""
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
        flat = (math.prod(rows),)
        labels_type = w.types[ref(labels).name].dtype
        line = w.add(op, "reshape", (safe, flat), w.value("counted_labels_line", flat, labels_type))
        found = w.add(op, "index_select", (weight, 0, line), w.value("label_weights_line", flat, dtype))
        picked = w.add(op, "reshape", (found, rows), w.value("label_weights", rows, dtype))
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
    """Squares of small errors, distances of large ones: smooth_l1 (`scaled` by 1 / beta) and Huber's loss."""

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
    """-(t log p + (1 - t) log(1 - p)), with logarithms clamped at -100."""
    p, target, weight = op.args[0], op.args[1], argument(op, 2, "weight")
    step = _Steps(w, op)
    log_p = step("clamp_min", (step("log", (p,)), -100))
    log_q = step("clamp_min", (step("log1p", (step("neg", (p,)),)), -100))
    # t * (log q - log p) - log q
    loss = step("sub", (step("mul", (target, step("sub", (log_q, log_p)))), log_q))
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
    """A loss of torch's that has no rewrite of its own: without its reduction, then the mean or the sum."""
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
    """The mean or the sum of the rows' losses, or all of them."""
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
