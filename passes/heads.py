"""Prepare the heads of attention that the tensor axes do not divide, so that query heads can be cut.

    scaled_… = attention(transpose, slice_1, slice_1, None, False, None)
  ->
    slice_1_heads   = repeat_interleave(slice_1, 2, 1)  # f32[8, 2, 4, 2]
    slice_1_heads_2 = repeat_interleave(slice_1, 2, 1)  # f32[8, 2, 4, 2]
    scaled_…        = attention(transpose, slice_1_heads, slice_1_heads_2, None, False, None)

Key and value heads are repeated until each rank can have whole heads. Their projections do not change: annotate cuts
them finer than heads, and an all-to-all gives each rank the heads that its queries read.

Over cp, attention may keep rows cut and gather keys and values. Heads are repeated for an exchange of rows for heads
only if this moves fewer bytes, and no heads are padded for cp.

Where the query heads do not divide (14 on tp=4), heads of zeros are added: the weights that make queries, keys and
values get rows of zeros, the weight that reads the result gets columns of zeros. An added head has values of zero, so
its result is zero and so are all its gradients: it stays zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from partc import fuel
from partc.ir.attention import FORWARD, HEADS, Attention
from partc.ir.naming import unique
from partc.ir.program import Arg, Op, Program, Ref, Region, TensorType, Value
from partc.rules import resolve
from partc.rules.strided_cuts import tensors
from partc.sharding.choices import placed_axes, weight_axes

_MOST = 2  # the most heads after padding, as a multiple of those before
Place = tuple[str, int]  # a value and one of its dimensions
# Operations that keep heads apart and map zeros to zeros; the argument at this position holds literal sizes.
_PARALLEL: Mapping[str, int | None] = {
    "linear": None, "reshape": 1, "expand": 1, "permute": None, "to": None, "neg": None, "mul": None, "add": None,
    "sub": None, "cat": None, "slice": None, "rotary": None, "rms_norm": None, "contiguous": None, "clone": None,
}  # fmt: skip
_OF_SCORES = frozenset({"layer_norm"})  # also allowed on queries and keys, whose added heads need not be zero
_ZEROS_IN_ALL = frozenset({"add", "sub", "expand"})  # the result is zero if all tensors have the added heads


def heads(program: Program) -> Program:
    """Repeat key and value heads, and pad query heads, where the tensor axes do not divide them."""
    ways = math.prod(program.sizes[axis] for axis in weight_axes(program.sizes))
    rows = math.prod(program.sizes[axis] for axis in placed_axes(program.sizes)) // ways
    (main,), (call,) = program.regions, program.calls
    if ways * rows == 1 or not any(op.name in FORWARD for op in main.forward.ops):
        return program
    found = _Heads(main, ways, rows)
    region = found.region()
    stored = dict(zip((value.name for value in main.params), call.params, strict=True))
    wide = {stored[value.name]: value.type for value in region.params if value.type != found.types[value.name]}
    parameters = tuple(
        replace(item, type=wide[item.name], holds=item.holds or item.type.shape) if item.name in wide else item
        for item in program.parameters
    )
    return replace(program, regions=(region,), parameters=parameters)


class _UnpaddableError(Exception):
    """An operation that reads or makes heads cannot be padded."""


@dataclass(slots=True)
class _Heads:
    main: Region
    ways: int  # ranks over which heads are cut in any case
    rows: int  # ranks over which rows are cut, or exchanged for heads
    types: dict[str, TensorType] = field(init=False)
    makers: Mapping[str, Op] = field(init=False)
    readers: Mapping[str, Sequence[Op]] = field(init=False)
    padded: dict[Place, int] = field(default_factory=dict)  # the new size of a dimension
    repeats: dict[str, int] = field(
        default_factory=dict
    )  # result of attention -> the number of repetitions of its key heads

    def __post_init__(self) -> None:
        graph = self.main.forward
        self.types = self.main.types(graph)
        self.makers, self.readers = graph.makers(), graph.readers()

    def region(self) -> Region:
        for op in self.main.forward.ops:
            attention = Attention.of(op)
            if attention is not None and len(op.results[0].type.shape) == 4:
                self._attention(op, attention)
        if not self.padded and not self.repeats:
            return self.main
        taken = {*self.types}
        ops = [new for op in self.main.forward.ops for new in self._rewritten(op, taken)]
        params = tuple(replace(value, type=self._wider(value)) for value in self.main.params)
        return replace(self.main, params=params, forward=replace(self.main.forward, ops=tuple(ops)))

    def _attention(self, op: Op, attention: Attention) -> None:
        """Decide on one attention."""
        count, groups = (self.types[name].shape[HEADS] for name in (attention.q, attention.k))
        every = self.ways * self.rows
        # All-to-alls move queries, keys, values and results; gathers only keys and values.
        whole = math.lcm(groups, every)
        if count % every == 0 and groups % every and count + whole < groups * self.rows:
            if fuel.may_rewrite("repeated heads", op.source):
                self.repeats[op.results[0].name] = whole // groups
            return
        if groups % self.ways == 0:
            return
        if count % self.ways == 0:
            if fuel.may_rewrite("repeated heads", op.source):
                self.repeats[op.results[0].name] = math.lcm(groups, self.ways) // groups
            return
        whole = -(-count // self.ways) * self.ways
        if whole > _MOST * count or attention.drops:  # random numbers depend on the number of heads
            return
        try:
            found = _HeadPadding(self, op, attention, whole).run()
        except _UnpaddableError:
            return
        if fuel.may_rewrite("padded heads", op.source):
            self.padded |= found
            if groups < count:
                self.repeats[op.results[0].name] = count // groups

    def _wider(self, value: Value) -> TensorType:
        shape = [self.padded.get((value.name, dim), size) for dim, size in enumerate(value.type.shape)]
        return value.type if tuple(shape) == value.type.shape else value.type.shaped(shape)

    def _rewritten(self, op: Op, taken: set[str]) -> Iterator[Op]:
        results = tuple(replace(value, type=self._wider(value)) for value in op.results)
        position = _PARALLEL.get(op.name)
        if results != op.results and position is not None:
            op = replace(op, args=(*op.args[:position], results[0].type.shape, *op.args[position + 1 :]))
        times = self.repeats.get(op.results[0].name) if op.results else None
        if times is not None:
            args: list[Arg] = list(op.args)
            for index in (1, 2):
                made = list(self._repeated(op, index, times, results[0].type.shape[HEADS], taken))
                yield from made
                args[index] = Ref(made[-1].result.name)
            op = replace(op, args=tuple(args))
        yield replace(op, results=results)

    def _repeated(self, op: Op, index: int, times: int, whole: int, taken: set[str]) -> Iterator[Op]:
        """Repeat the heads of an operand, then add heads of zeros up to the number of query heads."""
        operand = op.args[index]
        assert isinstance(operand, Ref)
        type = self.types[operand.name]
        shape = list(type.shape)
        shape[HEADS] *= times
        name = unique(f"{operand.name}_heads", taken)
        value = Value(name=name, type=type.shaped(shape))
        yield Op(name="repeat_interleave", args=(operand, times, HEADS), results=(value,), source=op.source)
        if (op.results[0].name, HEADS) in self.padded:
            shape[HEADS], before = whole, shape[HEADS]
            padded = Value(name=unique(f"{operand.name}_padded", taken), type=type.shaped(shape))
            pads = (*(0,) * (2 * (len(shape) - 1 - HEADS)), 0, whole - before)
            yield Op(name="constant_pad_nd", args=(Ref(name), pads, 0), results=(padded,), source=op.source)


@dataclass(slots=True)
class _HeadPadding:
    """Pads one attention's heads, followed through all producers and readers to the weights."""

    heads: _Heads
    op: Op
    attention: Attention
    whole: int
    found: dict[Place, int] = field(default_factory=dict)

    def run(self) -> dict[Place, int]:
        """The new sizes of padded dimensions. Raises _UnpaddableError if an operation does not keep heads apart."""
        q, k, v = self.attention.q, self.attention.k, self.attention.v
        types = self.heads.types
        mask = types[self.attention.mask].shape if self.attention.mask else ()
        if len(mask) > 2 and mask[-3] != 1:
            raise _UnpaddableError
        if self.attention.sinks:
            self._follow((self.attention.sinks, 0), self.whole, frozenset())
        equal = types[q].shape[HEADS] == types[k].shape[HEADS]
        for name in (q, k) if equal else (q,):
            self._follow((name, HEADS), self.whole, _OF_SCORES)
        for name in (v, self.op.results[0].name) if equal else (self.op.results[0].name,):
            self._follow((name, HEADS), self.whole, frozenset())
        return self.found

    def _follow(self, place: Place, size: int, more: frozenset[str]) -> None:
        name, _ = place
        known = self.found.get(place, self.heads.padded.get(place))
        if known is not None:
            if known != size:
                raise _UnpaddableError
            return
        heads = self.heads
        graph = heads.main.forward
        if name in graph.outputs or any(value.name == name for value in graph.inputs):
            raise _UnpaddableError
        if name not in heads.makers and not any(value.name == name for value in heads.main.params):
            raise _UnpaddableError
        self.found[place] = size
        maker = heads.makers.get(name)
        for op in (*([maker] if maker is not None else []), *heads.readers.get(name, ())):
            if op is not self.op:
                self._widen(op, place, size, more)

    def _widen(self, op: Op, place: Place, size: int, more: frozenset[str]) -> None:
        """Widen every dimension of the operation that consists of the same heads."""
        types = self.heads.types
        rule = resolve(op, types) if op.name in _PARALLEL or op.name in more else None
        if rule is None:
            raise _UnpaddableError
        name, dim = place
        every = list(tensors(op, rule))
        old = types[name].shape[dim]
        names = {dims[dim][0] for each, dims in every if each == name and dims[dim]}
        if len(names) != 1 or (op.name == "linear" and op.args[0] == op.args[1]):
            raise _UnpaddableError
        factor = rule.factor(names.pop())
        if (
            factor.kind == "blocked"
            or (factor.kind == "contracted" and op.name != "linear")
            or factor.size * size % old
        ):
            raise _UnpaddableError
        carried = 0
        for each, dims in every:
            for index, parts in enumerate(dims):
                if factor.name not in parts:
                    continue
                if parts[0] != factor.name:
                    raise _UnpaddableError
                carried += 1
                self._follow((each, index), types[each].shape[index] * size // old, more)
        if op.name in _ZEROS_IN_ALL and carried < len(every):
            raise _UnpaddableError
