"""Order sequences so that, under a causal mask, equal parts over cp are equal work.

    add         = add(embedding, position)
    scaled_…    = attention(transpose, transpose_1, transpose_2, None, True, None)
  ->
    ids_first   = slice(ids, 1, 0, 8, 1)
    …                                        # the second half of the ids, with its 2 parts in reverse order
    ids_zigzag  = cat((ids_first, ids_turned), 1)
    …
    scaled_…    = attention(transpose, transpose_1, transpose_2, None, True, None, zigzag=4)

With parts of consecutive positions the last rank would compute nearly twice as many scores as all compute on average.
In this order the cut `2 · 8@cp` gives each rank an early and a late part, which together read as many positions as any
other such pair (Brandon et al. 2023, Striped Attention, section 3; Llama Team 2024, section 3.3.2).

A layout `2 · 8@cp` is true of the values in their new order. The order is made where sequences come from: ids, labels,
position numbers. Everything that treats positions alike takes it over, attention knows it, and anything else (a
convolution, a random number, a result of the model) keeps the order as it is in the whole program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from partc import fuel
from partc.ir.layout import Layout
from partc.ir.mesh import CONTEXT_AXIS
from partc.ir.naming import unique
from partc.ir.program import RANDOM, Arg, Op, Program, Ref, Region, TensorType, Value
from partc.rules import flops, resolve
from partc.rules.rule import OpRule
from partc.sharding.choices import weight_axes
from partc.sharding.pins import Pin
from partc.sharding.placements import prefers_rows

_ROWS = 2  # their dimension in attention
Place = tuple[str, int, int]  # a value, one of its dimensions, and the elements of that before the sequence
# Operations whose sums do not depend on the order of what they add.
_SUMS = frozenset({"linear", "matmul", "mm", "bmm", "einsum", "sum", "mean", "amax", "amin", "any", "all"})
_ORDERED = frozenset({"argmax", "argmin", "sort", "argsort", "topk", "scan", "arange", "index_put"})


def zigzag(program: Program, *, pins: Sequence[Pin] = ()) -> Program:
    """Order the sequences of causal attention, if its rows are cut over cp, and everything between allows it."""
    n = program.sizes.get(CONTEXT_AXIS, 1)
    (main,) = program.regions
    if n == 1:
        return program
    types = main.types(main.forward)
    heads = n * math.prod(program.sizes[axis] for axis in weight_axes(program.sizes))
    found = [op for op in main.forward.ops if _is_causal(op, types) and _is_by_rows(op, types, n, heads, pins)]
    length = {types[next(op.refs())].shape[_ROWS] for op in found}
    if len(length) != 1 or (size := length.pop()) % (2 * n) or not fuel.allowed("zigzag"):
        return program
    order = _Order(main, size, 2 * n)
    try:
        order.follow(found)
    except _OrderedError:
        return program
    return replace(program, regions=(order.region(),))


def _is_causal(op: Op, types: Mapping[str, TensorType]) -> bool:
    """Whether later rows read more than earlier ones."""
    if op.name != "attention" or op.args[4] is not True or (len(op.args) > 6 and op.args[6]):
        return False
    q, k = (types[name].shape for name in list(op.refs())[:2])
    return q[_ROWS] == k[_ROWS]


def _is_by_rows(op: Op, types: Mapping[str, TensorType], n: int, heads: int, pins: Sequence[Pin]) -> bool:
    """Whether a pin cuts rows of scores over cp, or without a pin their price."""
    pinned = [pin for pin in pins if pin.decides(CONTEXT_AXIS)]
    if pinned:
        return any(pin.form for pin in pinned)
    q, k, v = (types[name] for name in list(op.refs())[:3])
    rule = resolve(op, types)
    work = 0 if rule is None else flops(op, rule)
    return q.shape[1] % heads > 0 or k.shape[1] % heads > 0 or prefers_rows(q, k, v, work, n)


class _OrderedError(Exception):
    """An operation depends on the order of positions."""


@dataclass(slots=True)
class _Order:
    main: Region
    size: int
    parts: int
    types: dict[str, TensorType] = field(init=False)
    found: set[Place] = field(default_factory=set)
    attentions: set[str] = field(default_factory=set)
    made: dict[Place, None] = field(default_factory=dict)  # places whose values get the order here

    def __post_init__(self) -> None:
        self.types = self.main.types(self.main.forward)

    def follow(self, attentions: Sequence[Op]) -> None:
        """Find every place that takes over the order. Raises _OrderedError if something cannot."""
        graph = self.main.forward
        makers, readers = graph.makers(), graph.readers()
        params = {value.name for value in self.main.params}
        queue: list[Place] = []
        for op in attentions:
            self.attentions.add(op.results[0].name)
            queue += [(name, _ROWS, 1) for name in (*list(op.refs())[:3], op.results[0].name)]
        rules = {id(op): resolve(op, self.types) for op in graph.ops}
        while queue:
            place = queue.pop()
            if place in self.found:
                continue
            name = place[0]
            if name in graph.outputs:
                raise _OrderedError
            self.found.add(place)
            maker = makers.get(name)
            through = None if maker is None else self._through(maker, rules[id(maker)], place)
            if through is None:
                if place[2] != 1 or self.types[name].shape[place[1]] != self.size or name in params:
                    raise _OrderedError
                self.made[place] = None
            else:
                queue += through
            for op in readers.get(name, ()):
                reached = self._through(op, rules[id(op)], place)
                if reached is not None:
                    queue += reached
                elif place not in self.made:  # else it reads the value in its old order
                    raise _OrderedError

    def _through(self, op: Op, rule: OpRule | None, place: Place) -> list[Place] | None:
        """The places of an operation that have the order if one of them has; None if it depends on the order."""
        if rule is None or op.name in RANDOM or op.name in _ORDERED:
            return None
        tensors = [
            *zip(op.refs(), rule.operands, strict=True),
            *((value.name, dims) for value, dims in zip(op.results, rule.results, strict=True)),
        ]
        found: dict[tuple[str, int], None] = {}
        for name, dims in tensors:
            if name == place[0]:
                spot = self._factor(rule, dims, place)
                if spot is None:
                    return None
                found[spot] = None
        reached: list[Place] = []
        for factor_name, inside in found:
            factor = rule.factor(factor_name)
            rows = op.name == "attention" and factor_name in rule.ring
            if not rows and (
                factor.kind == "blocked"
                or (factor.kind == "contracted" and op.name not in _SUMS)
                or dict(rule.sharded).get(factor_name)
            ):
                return None
            names = rule.ring if rows else (factor_name,)
            for name, dims in tensors:
                for dim, parts in enumerate(dims):
                    before = 1
                    for part in parts:
                        if part in names:
                            reached.append((name, dim, before * inside))
                        before *= rule.factor(part).size
        if op.name == "attention" and (op.args[4] is True or (len(op.args) > 6 and op.args[6])):
            self.attentions.add(op.results[0].name)
        return reached

    def _factor(self, rule: OpRule, dims: tuple[tuple[str, ...], ...], place: Place) -> tuple[str, int] | None:
        """The factor that holds the sequence, and the elements of it before the sequence."""
        _, dim, outer = place
        before = 1
        for name in dims[dim]:
            size = rule.factor(name).size
            if outer % before == 0 and before * size % (outer * self.size) == 0:
                return name, outer // before
            before *= size
        return None

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

        for value in graph.inputs:
            ops += order(value.name)
        readers = {place[0] for place in self.made}
        rules = {op.results[0].name: resolve(op, self.types) for op in graph.ops if op.results}
        for op in graph.ops:
            renamed = {
                name: names[name]
                for name in op.refs()
                if name in readers
                and all(
                    self._through(op, rules.get(op.results[0].name), place) is not None
                    for place in self.made
                    if place[0] == name
                )
            }
            new = op.reading([renamed.get(name, name) for name in op.refs()])
            if op.results and op.results[0].name in self.attentions:
                new = replace(new, attrs=(*op.attrs, ("zigzag", self.parts)))
            ops.append(new)
            for value in op.results:
                ops += order(value.name)
        return replace(self.main, forward=replace(graph, ops=tuple(ops)))

    def _ordered(self, name: str, dim: int, taken: set[str]) -> Iterator[Op]:
        """The value with the parts of its second half in reverse order."""
        type = self.types[name]
        half, count = self.size // 2, self.parts // 2

        def made(suffix: str, op: str, args: tuple[Arg, ...], shape: Sequence[int]) -> Op:
            value = Value(name=unique(f"{name}_{suffix}", taken), type=replace(type, layout=Layout.replicated(shape)))
            return Op(name=op, args=args, results=(value,))

        shape = list(type.shape)
        halves = [*shape[:dim], half, *shape[dim + 1 :]]
        first = made("first", "slice", (Ref(name), dim, 0, half, 1), halves)
        second = made("second", "slice", (Ref(name), dim, half, self.size, 1), halves)
        apart = [*shape[:dim], count, half // count, *shape[dim + 1 :]]
        parts = made("parts", "reshape", (Ref(second.result.name), tuple(apart)), apart)
        back = made("back", "flip", (Ref(parts.result.name), (dim,)), apart)
        turned = made("turned", "reshape", (Ref(back.result.name), tuple(halves)), halves)
        whole = made("zigzag", "cat", ((Ref(first.result.name), Ref(turned.result.name)), dim), shape)
        self.types[whole.result.name] = whole.result.type
        yield from (first, second, parts, back, turned, whole)
