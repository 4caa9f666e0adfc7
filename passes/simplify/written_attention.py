"""Attention that models write out.

    s = matmul(q, permute(k, (0, 1, 3, 2)))
    s = add(div(s, 8.0), mask)             # hides the future
    y = matmul(softmax(s, 3), v)                            ->    y = attention(q, k, v, None, True, 0.125)

Masks of known structure may be several, before or after the factor; one other mask may follow it, such as padding or
slopes by distance. A row's maximum may be subtracted, and examples and heads may be one dimension. Written-out scores
take memory quadratic in the sequence; attention computes them in blocks. With dropout on the softmax the result is
`attention_dropout`, which draws the same numbers. Scores that are read elsewhere stay written out.

A score per head that is joined to every row but has no value is a sink (Xiao et al. 2024; gpt-oss learns it):

    c = cat((s, expand(sinks)), 3)
    y = matmul(slice(softmax(c, 3), 3, 0, t, 1), v)         ->    y = attention(q, k, v, None, True, 0.125, sinks=sinks)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from partc import fuel
from partc.ir.naming import unique
from partc.ir.program import Arg, DTypeArg, Op, Ref, Region, TensorType, Value
from partc.passes.simplify.limits import LimitWriter
from partc.passes.simplify.masks import Constants, structured
from partc.passes.simplify.matrices import Runs
from partc.rules.rule import integers

# A hidden score is at most the least fp32 number; scaled by a factor above this one, it still gets no weight.
_LEAST = 2**-20


def written_attention(region: Region) -> Region:
    """Replace products with the softmax of scores by attention."""
    graph = region.forward
    types, made, readers = region.types(graph), graph.makers(), graph.readers()
    once = {name for name, ops in readers.items() if len(ops) == 1 and name not in graph.outputs}
    constants, taken = Constants(made), {*types}
    ops: list[Op] = []
    for op in graph.ops:
        found = _Reading(made, types, readers, once, graph.outputs, constants).attention(op, taken)
        ops += found if found and fuel.may_rewrite("written attention", op.source) else [op]
    return replace(region, forward=replace(graph, ops=tuple(ops)))


@dataclass(frozen=True, slots=True)
class _Weights:
    """The weights of attention."""

    softmax: Op
    kept: Op | None  # the slice that removes the sinks' column
    dropout: Op | None


@dataclass(frozen=True, slots=True)
class _Scores:
    """The scores of attention: a product of queries and keys, times a factor, with masks."""

    product: Op
    scale: float
    seen: Runs | None  # the elements that masks of known structure show; None if there are no such masks
    bias: tuple[Op, Ref, Ref] | None  # the operation that applies another mask, the scores and the mask


@dataclass(frozen=True, slots=True)
class _Reading:
    made: Mapping[str, Op]
    types: Mapping[str, TensorType]
    readers: Mapping[str, Sequence[Op]]
    once: set[str]  # values with a single reader
    outputs: tuple[str, ...]
    constants: Constants

    def attention(self, op: Op, taken: set[str]) -> list[Op]:
        """The operations that replace a product of softmax weights and values; none if it does not compute
        attention.
        """
        heads = self._heads(op)
        weights = None if heads is None else self._weights(op.args[0], heads)
        if heads is None or weights is None:
            return []
        scores, sinks = self._shifted(weights.softmax.args[0]), list[Op]()
        if weights.kept is not None:
            scores, sinks = self._joined(scores, weights.kept, taken)
        read = self._scores(scores, heads)
        if read is None:
            return []
        writing = LimitWriter(taken, weights.softmax.source)
        shape, limits = structured(read.seen, writing, in_chunks=True)
        q, transposed, v = *read.product.args[:2], op.args[1]
        if shape is None or shape.chunk or (limits and read.bias):
            return []
        if not isinstance(q, Ref) or not isinstance(transposed, Ref) or not isinstance(v, Ref):
            return []
        if not self._fits(q, transposed, v):
            return []
        more = _Writing(op, self.made, self.types, taken, heads)
        k = more.keys(transposed)
        mask = None if read.bias is None else more.mask(*read.bias)
        drops: tuple[Arg, ...] = () if shape.window == 0 else (shape.window,)
        if weights.dropout is not None:
            drops = (shape.window, weights.dropout.args[1], weights.dropout.args[3])
        name = "attention" if weights.dropout is None else "attention_dropout"
        attrs = (("sinks", Ref(sinks[-1].result.name)),) if sinks else ()
        args = (more.by_head(q), k, more.by_head(v), mask, shape.causal, read.scale, *drops)
        made = replace(op, name=name, args=args, attrs=(*attrs, *limits))
        return [*more.ops, *sinks, *writing.ops, *more.result(made)]

    def _weights(self, arg: Arg, heads: tuple[int, int]) -> _Weights | None:
        """The softmax over the last dimension behind a dropout and a slice; None if there is no such softmax."""
        op, dropout = self._viewed(arg, heads), None
        if op is not None and op.name == "dropout":
            if op.args[2] != 4:
                return None
            dropout, op = op, self._maker(op.args[0])
        kept = op if op is not None and op.name == "slice" else None
        softmax = op if kept is None else self._maker(kept.args[0])
        if softmax is None or softmax.name != "softmax" or softmax.attrs:
            return None
        last = len(softmax.result.type.shape) - 1
        return _Weights(softmax, kept, dropout) if softmax.args[1:] == (last,) else None

    def _scores(self, op: Op | None, heads: tuple[int, int]) -> _Scores | None:
        """The product behind factors and masks; None if other operations lie between."""
        seen, scale = None, 1.0
        bias: tuple[Op, Ref, Ref] | None = None
        while op is not None and op.name != "matmul":
            if op.name == "reshape" and (below := self._viewed(Ref(op.result.name), heads)) is not op:
                op = below
            elif op.name in ("mul", "div") and isinstance(op.args[1], int | float):
                number = op.args[1]
                scale *= float(number) if op.name == "mul" else 1 / number if number else math.nan
                op = self._maker(op.args[0])
            elif (masked := self._masked(op)) is not None:
                if not scale > _LEAST:
                    return None
                op, runs = masked
                seen = runs if seen is None else seen & runs
            elif bias is None and scale == 1.0 and (found := self._mask(op)) is not None:
                bias, op = (op, *found), self._maker(found[0])
            else:
                return None
        return None if op is None or not math.isfinite(scale) else _Scores(op, scale, seen, bias)

    def _heads(self, op: Op) -> tuple[int, int] | None:
        """The numbers (b, h) of a product [b, h, s, d], or [b * h, s, d] of values that were [b, h, t, d]; else
        None.
        """
        if op.name != "matmul" or op.attrs or len(op.args) != 2 or not isinstance(op.args[1], Ref):
            return None
        shape = self.types[op.args[1].name].shape
        if len(shape) == 4 and len(op.result.type.shape) == 4:
            return shape[0], shape[1]
        view = self.made.get(op.args[1].name)
        if len(shape) != 3 or len(op.result.type.shape) != 3 or view is None or view.name != "reshape":
            return None
        whole = self.types[next(view.refs())].shape
        return (whole[0], whole[1]) if len(whole) == 4 and whole[2:] == shape[1:] else None

    def _viewed(self, arg: Arg, heads: tuple[int, int]) -> Op | None:
        """The operation that computes the scores, behind a view that joins or splits the dimensions of examples and
        heads.
        """
        op = self._maker(arg)
        if op is None or op.name != "reshape" or not isinstance(op.args[0], Ref):
            return op
        shapes = {op.result.type.shape[:-2], self.types[op.args[0].name].shape[:-2]}
        return self._maker(op.args[0]) if shapes == {heads, (math.prod(heads),)} else op

    def _shifted(self, arg: Arg) -> Op | None:
        """The operation that computes scores which only a softmax reads, behind the subtraction of a row's maximum."""
        op = self._maker(arg)
        if op is None or op.name != "sub" or not all(isinstance(each, Ref) for each in op.args) or op.attrs:
            return op
        whole, most = op.refs()
        top = self.made.get(most)
        if top is None or top.name not in ("max", "amax") or next(top.refs()) != whole or top.results[0].name != most:
            return op
        along = top.args[1:2] in ((3,), (-1,), ((3,),), ((-1,),)) and self.types[most].shape[-1] == 1
        names = (whole, *(value.name for value in top.results))
        read = {id(each) for name in names for each in self.readers.get(name, ())}
        alone = read == {id(op), id(top)} and whole not in self.outputs
        return self.made.get(whole) if along and alone else op

    def _joined(self, op: Op | None, kept: Op, taken: set[str]) -> tuple[Op | None, list[Op]]:
        """The operation that computes the scores without sinks, which `kept` cuts off, and the operations that compute
        sinks[h].
        """
        if op is None or op.name != "cat" or op.args[1:] != (3,) or len(op.args[0]) != 2:  # type: ignore[arg-type]
            return None, []
        parts = [*op.refs()]
        t = op.result.type.shape[3] - 1
        place = {(3, 0, t, 1): 1, (3, 1, t + 1, 1): 0}.get(kept.args[1:])  # type: ignore[arg-type]
        if place is None or self.types[parts[place]].shape[3] != 1:
            return None, []
        heads, name = op.result.type.shape[1], parts[place]
        type = self.types[name].shaped((heads,))
        value = Value(name=unique(f"{name}_sinks", taken), type=type)
        constant = self.constants.value(name)
        if isinstance(constant, torch.Tensor) and bool((constant == constant.flatten()[0]).all()):
            attrs = (("dtype", DTypeArg(type.dtype)),)
            made = Op(name="full", args=((heads,), float(constant.flatten()[0])), attrs=attrs, results=(value,))
            return self._maker(Ref(parts[1 - place])), [replace(made, source=op.source)]
        while math.prod(self.types[name].shape) > heads and name in self.made and self.made[name].name == "expand":
            name = next(self.made[name].refs())
        shape = self.types[name].shape
        if (1, *shape)[-4:] not in ((1, heads, 1, 1), (heads, 1, 1)):
            return None, []
        made = Op(name="reshape", args=(Ref(name), (heads,)), results=(value,), source=op.source)
        return self._maker(Ref(parts[1 - place])), [made]

    def _maker(self, arg: Arg) -> Op | None:
        """The operation that computes a value with a single reader; None if it has several."""
        op = self.made.get(arg.name) if isinstance(arg, Ref) and arg.name in self.once else None
        return op if op is not None and len(op.results) == 1 else None

    def _masked(self, op: Op) -> tuple[Op | None, Runs] | None:
        """The operation behind a constant mask, and the elements that the mask shows; None for other operations."""
        if op.name not in ("add", "masked_fill", "where"):
            return None
        order: Sequence[int] = (0, 1) if op.name != "where" else (1, 0)
        for first, second in (order, order[::-1]) if op.name == "add" else (order,):
            scores, mask = op.args[first], op.args[second]
            if not isinstance(scores, Ref) or not isinstance(mask, Ref):
                continue
            if self.types[scores.name].shape != op.result.type.shape:
                continue
            runs = self.constants.seen(mask.name)
            if runs is None:
                continue
            if op.name != "add" and not _hides(op.args[2], self.constants):
                return None
            return self._maker(scores), ~runs if op.name == "masked_fill" else runs
        return None

    def _mask(self, op: Op) -> tuple[Ref, Ref] | None:
        """The scores and a non-constant, broadcast mask: numbers to add, or booleans that hide scores. Else None."""
        for first, second in {"add": ((0, 1), (1, 0)), "masked_fill": ((0, 1),), "where": ((1, 0),)}.get(op.name, ()):
            scores, mask = op.args[first], op.args[second]
            if not isinstance(scores, Ref) or not isinstance(mask, Ref) or scores.name not in self.once:
                continue
            while mask.name in self.made and self.made[mask.name].name == "expand":
                mask = Ref(next(self.made[mask.name].refs()))
            shape = op.result.type.shape
            if self.types[scores.name].shape != shape or self.types[mask.name].shape == shape:
                continue
            if op.name == "add" or _hides(op.args[2], self.constants):
                return scores, mask
        return None

    def _fits(self, q: Ref, transposed: Ref, v: Ref) -> bool:
        """Whether the shapes are attention's, with equal numbers of key and query heads."""
        queries, keys, values = (self.types[each.name].shape for each in (q, transposed, v))
        return (
            len(queries) == len(keys) == len(values)
            and queries[:-2] == keys[:-2] == values[:-2]
            and queries[-1] == keys[-2]
            and keys[-1] == values[-2]
        )


@dataclass(slots=True)
class _Writing:
    """Writes attention and the operations around it in place of the product `op`."""

    op: Op
    made: Mapping[str, Op]
    types: Mapping[str, TensorType]
    taken: set[str]
    heads: tuple[int, int]
    ops: list[Op] = field(default_factory=list)

    def add(self, name: str, args: tuple[Arg, ...], shape: tuple[int, ...], stem: str) -> Ref:
        type = TensorType.replicated(self.op.result.type.dtype, shape)
        value = Value(name=unique(stem, self.taken), type=type)
        attrs = (("dtype", DTypeArg(type.dtype)),) if name == "full" else ()
        self.ops.append(Op(name=name, args=args, attrs=attrs, results=(value,), source=self.op.source))
        return Ref(value.name)

    def by_head(self, x: Ref) -> Ref:
        """An operand as [b, h, s, d], without a view that joins b and h."""
        shape = self.types[x.name].shape
        if len(shape) == 4:
            return x
        view, whole = self.made.get(x.name), (*self.heads, *shape[1:])
        if view is not None and view.name == "reshape" and self.types[next(view.refs())].shape == whole:
            return Ref(next(view.refs()))
        return self.add("reshape", (x, whole), whole, f"{x.name}_heads")

    def keys(self, transposed: Ref) -> Ref:
        """Keys [b, h, t, d] from their transpose."""
        made, rank = self.made.get(transposed.name), len(self.types[transposed.name].shape)
        order = (*range(rank - 2), rank - 1, rank - 2)
        base = transposed
        if made is not None and made.name == "permute" and isinstance(made.args[0], Ref):
            before = integers(made.args[1])
            base, order = made.args[0], (*before[:-2], before[-1], before[-2])
        if order != tuple(range(rank)):
            shape = self.types[transposed.name].shape
            base = self.add("permute", (base, order), (*shape[:-2], shape[-1], shape[-2]), f"{transposed.name}_keys")
            self.types = {**self.types, base.name: self.ops[-1].result.type}
        return self.by_head(base)

    def mask(self, op: Op, scores: Ref, mask: Ref) -> Ref:
        """Numbers [b, h, s, t] to add to the scores; dimensions may be 1.

        A number that hides a score absorbs it, so that rows that are hidden as a whole are unchanged.
        """
        stem, shape = f"{self.op.result.name}_mask", self.types[mask.name].shape
        if op.name != "add":
            zero, number = self.add("full", ((), 0.0), (), stem), op.args[2]
            both = (number, zero) if op.name == "masked_fill" else (zero, number)
            mask = self.add("where", (mask, *both), shape, stem)
        whole = (1,) * (len(self.types[scores.name].shape) - len(shape)) + tuple(shape)
        if len(whole) == 3:
            whole = (*(self.heads if whole[0] > 1 else (1, 1)), *whole[1:])
        return mask if whole == shape else self.add("reshape", (mask, whole), whole, stem)

    def result(self, op: Op) -> list[Op]:
        """Attention, with its result in the shape of the product's."""
        shape = op.result.type.shape
        if len(shape) == 4:
            return [op]
        type = op.result.type.shaped((*self.heads, *shape[1:]))
        value = Value(name=unique(f"{op.result.name}_heads", self.taken), type=type)
        return [
            replace(op, results=(value,)),
            Op(name="reshape", args=(Ref(value.name), shape), results=op.results, source=op.source),
        ]


def _hides(arg: Arg, constants: Constants) -> bool:
    """Whether a score of this number gets no weight next to others: no finite fp32 score is smaller."""
    number = constants.number(arg.name) if isinstance(arg, Ref) else arg
    return isinstance(number, int | float) and number <= torch.finfo(torch.float32).min
