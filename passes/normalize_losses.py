"""Rewrites of losses: per-row losses, then a sum over what counts, so that parts of a batch can be added."""

from __future__ import annotations

import math

from partc.passes.normalize_writer import Writer, argument, number, ref
from partc.program import DTypeArg, Op


def cross_entropy(w: Writer, op: Op) -> None:
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
