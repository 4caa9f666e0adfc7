"""Recurrent networks with dropout between layers: one operation for each layer, with a dropout after all but the last.

Torch transposes the operands so that time comes first; elements are counted in that order.
"""

from __future__ import annotations

from partc.ir.program import Arg, Op, Ref, Value
from partc.passes.normalize.random import dropped, refuse_unknown
from partc.passes.normalize.writer import Writer, ref
from partc.rules.rule import argument, number

_TIME_FIRST = (1, 0, 2)


def recurrent(w: Writer, op: Op) -> None:
    """lstm(x, (h, c), weights, biased, layers, p, train, both, batch_first); gru and rnn with one state."""
    packed = isinstance(argument(op, 3, "params"), tuple)
    p, training = (argument(op, index + packed, name) for index, name in ((5, "dropout"), (6, "train")))
    if not p or not training:
        w.keep(op)
        return
    if packed:
        refuse_unknown(op)
    x, states, weights, biased, layers, _, _, both, batch_first = op.args
    assert isinstance(p, float) and isinstance(weights, tuple)
    out, *ends = op.results
    if batch_first:
        shape = w.shape(x)
        x = w.add(op, "permute", (x, _TIME_FIRST), _transposed(w, f"{ref(x).name}_t", shape, out))
    last: list[tuple[Value, ...]] = []
    for layer in range(number(layers)):
        if layer:
            x = dropped(w, op, x, p, 3, w.value(f"{out.name}_dropped", w.shape(x), out.type.dtype))
        part = weights[layer * len(weights) // number(layers) : (layer + 1) * len(weights) // number(layers)]
        starts = _starts(w, op, states, layer, 2 if both else 1)
        made = (
            _transposed(w, f"{out.name}_layer", out.type.shape, out)
            if batch_first
            else _value_like(w, f"{out.name}_layer", out)
        )
        last.append(tuple(_value_like(w, f"{end.name}_layer", end, rows=2 if both else 1) for end in ends))
        args = (x, starts, part, biased, 1, 0.0, True, both, False)
        w.keep(Op(name=op.name, args=args, results=(made, *last[-1]), source=op.source))
        x = Ref(made.name)
    if batch_first:
        w.add(op, "permute", (x, _TIME_FIRST), out)
    else:
        w.alias(out.name, ref(x).name)
    for end, parts in zip(ends, zip(*last, strict=True), strict=True):
        w.add(op, "cat", (tuple(Ref(part.name) for part in parts), 0), end)


def _starts(w: Writer, op: Op, states: Arg, layer: int, ways: int) -> Arg:
    """A layer's rows of the initial states."""
    if isinstance(states, tuple):
        return tuple(_starts(w, op, state, layer, ways) for state in states)
    value = w.value(f"{ref(states).name}_layer", (ways, *w.shape(states)[1:]), w.types[ref(states).name].dtype)
    return w.add(op, "slice", (states, 0, layer * ways, (layer + 1) * ways, 1), value)


def _transposed(w: Writer, name: str, shape: tuple[int, ...], like: Value) -> Value:
    return w.value(name, (shape[1], shape[0], shape[2]), like.type.dtype)


def _value_like(w: Writer, name: str, like: Value, *, rows: int | None = None) -> Value:
    shape = like.type.shape
    return w.value(name, shape if rows is None else (rows, *shape[1:]), like.type.dtype)
