"""Reorder sequences so that, under a causal mask, equal parts over cp are equal work.

    embedding   = embedding(…, ids)                      # f32[4, 16, 24]
    scaled_…    = attention(transpose, transpose_1, transpose_2, None, True, None, by_rows=True)
  ->
    ids_first   = slice(ids, 1, 0, 8, 1)            # i64[4, 8]
    ids_second  = slice(ids, 1, 8, 16, 1)           # i64[4, 8]
    ids_parts   = reshape(ids_second, (4, 2, 4))    # i64[4, 2, 4]
    ids_back    = flip(ids_parts, (1,))             # i64[4, 2, 4]
    ids_flipped = reshape(ids_back, (4, 8))         # i64[4, 8]
    ids_zigzag  = cat((ids_first, ids_flipped), 1)  # i64[4, 16]
    embedding   = embedding(…, ids_zigzag)          # f32[4, 16, 24]
    …
    scaled_…    = attention(transpose, transpose_1, transpose_2, None, True, None, by_rows=True, zigzag=4)

With parts of consecutive positions the last rank would compute nearly twice as many scores as all compute on average.
In this order the cut `2 · 8@cp` gives each rank an early and a late part, which together read as many positions as any
other such pair (Brandon et al. 2023, Striped Attention, section 3; Llama Team 2024, section 3.3.2).

The layout `2 · 8@cp` describes the values in their new order. Sequences are reordered at their origins: ids, labels,
position numbers. Operations that treat positions alike keep the new order, and attention takes it into account. If
anything else depends on the order (a convolution, a result of the model), the whole program keeps the old one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from partc import fuel
from partc.ir.attention import ROWS, Attention
from partc.ir.mesh import CONTEXT_AXIS
from partc.ir.naming import ZIGZAG, unique
from partc.ir.operations import RANDOM
from partc.ir.program import Arg, Op, Program, Ref, Region, TensorType, Value
from partc.passes.sequences import (
    ORDERED,
    SUMS,
    Place,
    carriers,
    drawn_dims,
    draws_apart,
    factor_at,
    numbered,
)
from partc.rules import OpRule, resolve
from partc.rules.strided_cuts import tensors


def zigzag(program: Program) -> Program:
    """Order the sequences of attention by rows over cp, as `extend` decided it, if everything between allows it."""
    try:
        order = _order(program)
    except _OrderedError:
        return program
    if order is None or not fuel.may_rewrite("zigzag"):
        return program
    return replace(program, regions=(order.region(),))


def kept_order(program: Program) -> tuple[str, ...]:
    """A note for the user if sequences keep their order, so that later ranks of cp have more work; else empty."""
    try:
        _order(program)
    except _OrderedError as error:
        op, readers = error.op, program.regions[0].forward.readers()
        while op.source is None and op.results and readers.get(op.results[0].name):  # the operation comes from a pass
            op = readers[op.results[0].name][0]
        where = f"{op.source}: " if op.source else ""
        return (
            f"{where}{op.name} depends on the order of positions, so that the last ranks of cp compute up to "
            "twice as many scores of attention as all do on average",
        )
    return ()


def _order(program: Program) -> _Order | None:
    """The order, with every value that has it; None without causal attention by rows over cp.

    Raises _OrderedError.
    """
    n = program.sizes.get(CONTEXT_AXIS, 1)
    (main,) = program.regions
    if n == 1:
        return None
    types = main.types(main.forward)
    found = [(op, attention) for op in main.forward.ops if (attention := Attention.of(op)) and attention.by_rows]
    length = {types[attention.q].shape[ROWS] for _, attention in found}
    if len(length) != 1 or (size := length.pop()) % (2 * n):
        return None
    order = _Order(main, size, 2 * n)
    order.follow(found)
    return order


class _OrderedError(Exception):
    """An operation depends on the order of positions."""

    def __init__(self, op: Op) -> None:
        super().__init__(op.name)
        self.op = op


@dataclass(slots=True)
class _Order:
    main: Region
    size: int
    parts: int
    types: dict[str, TensorType] = field(init=False)
    found: set[Place] = field(default_factory=set)
    attentions: set[str] = field(default_factory=set)
    made: dict[Place, None] = field(default_factory=dict)  # places whose values are reordered here

    def __post_init__(self) -> None:
        self.types = self.main.types(self.main.forward)

    def follow(self, attentions: Sequence[tuple[Op, Attention]]) -> None:
        """Find every place that gets the new order. Raises _OrderedError if an operation does not allow it."""
        graph = self.main.forward
        makers, readers = graph.makers(), graph.readers()
        queue: list[Place] = []
        for op, attention in attentions:
            made = op.results[0].name
            self.attentions.add(made)
            queue += [(name, ROWS, 1) for name in (attention.q, attention.k, attention.v, made)]
        rules = {id(op): resolve(op, self.types) for op in graph.ops}
        while queue:
            place = queue.pop()
            if place in self.found:
                continue
            name = place[0]
            maker = makers.get(name)
            if name in graph.outputs:
                raise _OrderedError(maker or readers[name][0])
            self.found.add(place)
            through = None if maker is None else self._ordered_places(maker, rules[id(maker)], place)
            if through is None:
                if place[2] != 1 or self.types[name].shape[place[1]] != self.size:
                    raise _OrderedError(maker or readers[name][0])
                self.made[place] = None
            else:
                queue += through
            for op in readers.get(name, ()):
                reached = self._ordered_places(op, rules[id(op)], place)
                if reached is not None:
                    queue += reached
                elif place not in self.made:  # otherwise it reads the value in its old order
                    raise _OrderedError(op)

    def _ordered_places(self, op: Op, rule: OpRule | None, place: Place) -> list[Place] | None:
        """The places of an operation that have the order if one of them has; None if it depends on the order."""
        if rule is None or op.name in ORDERED:
            return None
        if draws_apart(op, self.types[place[0]], *place[1:], self.size):
            return None
        attention = Attention.of(op)
        found: dict[tuple[str, int], None] = {}
        for name, dims in tensors(op, rule):
            if name == place[0]:
                spot = factor_at(rule, dims, place[1], place[2], self.size)
                if spot is None:
                    return None
                found[spot] = None
        reached: list[Place] = []
        for factor_name, inside in found:
            factor = rule.factor(factor_name)
            rows = attention is not None and factor_name in rule.ring
            if not rows and (
                factor.kind == "blocked"
                or (factor.kind == "contracted" and op.name not in SUMS)
                or dict(rule.sharded).get(factor_name)
            ):
                return None
            reached += carriers(op, rule, rule.ring if rows else (factor_name,), inside)
        if attention is not None and (attention.causal or attention.window or attention.limits):
            self.attentions.add(op.results[0].name)
        return reached

    def region(self) -> Region:
        graph = self.main.forward
        taken = {*self.types}
        names: dict[str, str] = {}
        ops: list[Op] = []

        def order(name: str) -> Iterator[Op]:
            for place in self.made:
                if place[0] == name:
                    new = list(self._ordered(names.get(name, name), place[1], taken))
                    names[name] = new[-1].result.name
                    yield from new

        for value in (*self.main.params, *graph.inputs):
            ops += order(value.name)
        readers = {place[0] for place in self.made}
        rules = {op.results[0].name: resolve(op, self.types) for op in graph.ops if op.results}
        for op in graph.ops:
            renamed = {
                name: names[name]
                for name in op.refs()
                if name in readers
                and all(
                    self._ordered_places(op, rules.get(op.results[0].name), place) is not None
                    for place in self.made
                    if place[0] == name
                )
            }
            new = op.reading([renamed.get(name, name) for name in op.refs()])
            if op.results and op.results[0].name in self.attentions:
                new = replace(new, attrs=(*op.attrs, ("zigzag", self.parts)))
            if op.name in RANDOM and op.results:
                new = self._drawing(new)
            ops.append(new)
            for value in op.results:
                ops += order(value.name)
        return replace(self.main, forward=replace(graph, ops=tuple(ops)))

    def _drawing(self, op: Op) -> Op:
        """The operation with random draws numbered by positions in the model's order."""
        name = op.results[0].name
        reordered = [place[1] for place in self.found if place[0] == name and place not in self.made]
        attention = Attention.of(op)
        more = [ROWS + 1] if attention is not None and (attention.k, ROWS, 1) in self.found else []
        return numbered(op, [*drawn_dims(op, reordered), *more], self.size, self.parts) if reordered else op

    def _ordered(self, name: str, dim: int, taken: set[str]) -> Iterator[Op]:
        """The value with the parts of its second half in reverse order."""
        type = self.types[name]
        half, count = self.size // 2, self.parts // 2

        def write(suffix: str, op: str, args: tuple[Arg, ...], shape: Sequence[int]) -> Op:
            value = Value(name=unique(f"{name}{suffix}", taken), type=type.shaped(shape))
            return Op(name=op, args=args, results=(value,))

        shape = list(type.shape)
        halves = [*shape[:dim], half, *shape[dim + 1 :]]
        first = write("_first", "slice", (Ref(name), dim, 0, half, 1), halves)
        second = write("_second", "slice", (Ref(name), dim, half, self.size, 1), halves)
        apart = [*shape[:dim], count, half // count, *shape[dim + 1 :]]
        parts = write("_parts", "reshape", (Ref(second.result.name), tuple(apart)), apart)
        back = write("_back", "flip", (Ref(parts.result.name), (dim,)), apart)
        flipped = write("_flipped", "reshape", (Ref(back.result.name), tuple(halves)), halves)
        whole = write(ZIGZAG, "cat", ((Ref(first.result.name), Ref(flipped.result.name)), dim), shape)
        self.types[whole.result.name] = whole.result.type
        yield from (first, second, parts, back, flipped, whole)
