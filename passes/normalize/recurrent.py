"""Recurrent networks.

With dropout between layers, a network becomes one operation for each layer, with a dropout after all but the last.
Torch transposes the operands so that time comes first; elements are counted in that order.

A cell, which computes one step, becomes its products and gates, so that their rules cut the batch and the weights:

    h1, c1 = lstm_cell(x, (h, c), w, u, b, v)
  ->
    i, f, g, o = split(x @ w.T + b + h @ u.T + v)
    c1         = sigmoid(f) * c + sigmoid(i) * tanh(g)
    h1         = sigmoid(o) * tanh(c1)
"""

from __future__ import annotations

from partc.ir.naming import PRODUCT
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
    if w.shape(states)[0] == ways:
        return states
    value = w.value(f"{ref(states).name}_layer", (ways, *w.shape(states)[1:]), w.types[ref(states).name].dtype)
    return w.add(op, "slice", (states, 0, layer * ways, (layer + 1) * ways, 1), value)


def _transposed(w: Writer, name: str, shape: tuple[int, ...], like: Value) -> Value:
    return w.value(name, (shape[1], shape[0], shape[2]), like.type.dtype)


def _value_like(w: Writer, name: str, like: Value, *, rows: int | None = None) -> Value:
    shape = like.type.shape
    return w.value(name, shape if rows is None else (rows, *shape[1:]), like.type.dtype)


class _Cell:
    """The writer of one cell: elementwise operations on values of one dtype, named after the cell's first result."""

    def __init__(self, w: Writer, op: Op) -> None:
        self.w, self.op, self.like = w, op, op.results[0]

    def value(self, word: str, shape: tuple[int, ...]) -> Value:
        return self.w.value(f"{self.like.name}_{word}", shape, self.like.type.dtype)

    def add(self, name: str, *args: Arg, word: str = "", result: Value | None = None) -> Ref:
        """An elementwise operation; its result has the shape of its first operand."""
        return self.w.add(self.op, name, args, result or self.value(word or name, self.w.shape(args[0])))

    def product(self, word: str, x: Arg, weight: Arg, bias: Arg) -> Ref:
        """A row of the gates: x @ weight.T + bias."""
        shape = (*self.w.shape(x)[:-1], self.w.shape(weight)[0])
        name = word if bias is None else f"{word}{PRODUCT}"
        made = self.w.add(self.op, "linear", (x, weight), self.value(name, shape))
        return made if bias is None else self.add("add", made, bias, word=word)

    def products(self, state: Arg) -> tuple[Ref, Ref]:
        """The products of the input and of the state."""
        x, _, weight, recurrent_weight = self.op.args[:4]
        given = self.product("input", x, weight, argument(self.op, 4, "b_ih"))
        return given, self.product("state", state, recurrent_weight, argument(self.op, 5, "b_hh"))

    def gates(self, row: Ref, words: str) -> tuple[Ref, ...]:
        """Equal parts of a row of gates."""
        *lead, width = self.w.shape(row)
        names = words.split()
        parts = tuple(self.value(word, (*lead, width // len(names))) for word in names)
        sizes = tuple(part.type.shape[-1] for part in parts)
        self.w.keep(Op(name="split", args=(row, sizes, len(lead)), results=parts, source=self.op.source))
        return tuple(Ref(part.name) for part in parts)


def lstm_cell(w: Writer, op: Op) -> None:
    """lstm_cell(x, (h, c), weight, recurrent_weight, bias, recurrent_bias)"""
    cell, states = _Cell(w, op), op.args[1]
    assert isinstance(states, tuple)
    before, memory = states
    written, held, news, shown = cell.gates(cell.add("add", *cell.products(before), word="gates"), "i f g o")
    kept = cell.add("mul", cell.add("sigmoid", held), memory, word="kept")
    added = cell.add("mul", cell.add("sigmoid", written), cell.add("tanh", news), word="added")
    now = cell.add("add", kept, added, result=op.results[1])
    cell.add("mul", cell.add("sigmoid", shown), cell.add("tanh", now), result=op.results[0])


def gru_cell(w: Writer, op: Op) -> None:
    """gru_cell(x, h, weight, recurrent_weight, bias, recurrent_bias): (h - n) * z + n"""
    cell, before = _Cell(w, op), op.args[1]
    given, known = cell.products(before)
    reset, update, new = cell.gates(given, "r z n")
    own_reset, own_update, own_new = cell.gates(known, "own_r own_z own_n")
    opened = cell.add("sigmoid", cell.add("add", reset, own_reset, word="reset"))
    held = cell.add("sigmoid", cell.add("add", update, own_update, word="update"))
    found = cell.add("tanh", cell.add("add", new, cell.add("mul", opened, own_new), word="new"))
    cell.add("add", cell.add("mul", cell.add("sub", before, found), held), found, result=op.results[0])


def rnn_cell(w: Writer, op: Op) -> None:
    """rnn_tanh_cell(x, h, weight, recurrent_weight, bias, recurrent_bias), and rnn_relu_cell"""
    cell = _Cell(w, op)
    total = cell.add("add", *cell.products(op.args[1]), word="sum")
    cell.add(op.name.removeprefix("rnn_").removesuffix("_cell"), total, result=op.results[0])
