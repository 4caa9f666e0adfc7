"""Attention that models write out, where its mask has a structure that kernels know.

    s = matmul(q, permute(k, (0, 1, 3, 2)))
    s = add(div(s, 8.0), mask)             # hides the future
    y = matmul(softmax(s, 3), v)                            ->    y = attention(q, k, v, None, True, 0.125)

Masks may be several, before or after the factor, and a row's maximum may be subtracted. The scores are as large as the
sequence's square; attention computes them in blocks. With dropout of the softmax it is `attention_dropout`, which draws
the same numbers. Scores that are read elsewhere stay written out.

A score of each head that is joined to every row and has no value is a sink (Xiao et al. 2024; gpt-oss learns it):

    c = cat((s, expand(sinks)), 3)
    y = matmul(slice(softmax(c, 3), 3, 0, t, 1), v)         ->    y = attention(q, k, v, None, True, 0.125, sinks=sinks)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from partc import fuel
from partc.ir.layout import Layout
from partc.ir.naming import unique
from partc.ir.program import Arg, DTypeArg, Op, Ref, Region, TensorType, Value
from partc.passes.simplify.limits import LimitWriter
from partc.passes.simplify.masks import Constants, structured
from partc.passes.simplify.matrices import Runs
from partc.rules.rule import integers

# Hidden scores are at most the least number of single precision; times a factor above this one they get no weight.
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
        ops += found if found and fuel.allowed("written attention", op.source) else [op]
    return replace(region, forward=replace(graph, ops=tuple(ops)))


@dataclass(frozen=True, slots=True)
class _Reading:
    made: Mapping[str, Op]
    types: Mapping[str, TensorType]
    readers: Mapping[str, Sequence[Op]]
    once: set[str]  # values with one reader
    outputs: tuple[str, ...]
    constants: Constants

    def attention(self, op: Op, taken: set[str]) -> list[Op]:
        """The operations instead of a product with weights; none if it is no attention."""
        if op.name != "matmul" or op.attrs or len(op.result.type.shape) != 4 or not isinstance(op.args[1], Ref):
            return []
        weights, dropped = self._maker(op.args[0]), None
        if weights is not None and weights.name == "dropout":
            if weights.args[2] != 4:
                return []
            dropped, weights = weights, self._maker(weights.args[0])
        kept = weights if weights is not None and weights.name == "slice" else None
        weights = weights if kept is None else self._maker(kept.args[0])
        if weights is None or weights.name != "softmax" or weights.args[1:] != (3,) or weights.attrs:
            return []
        scores, seen, scale = self._shifted(weights.args[0]), None, 1.0
        sinks: list[Op] = []
        if kept is not None:
            scores, sinks = self._joined(scores, kept, taken)
        while scores is not None and scores.name != "matmul":
            if scores.name in ("mul", "div") and isinstance(scores.args[1], int | float):
                number = scores.args[1]
                scale *= float(number) if scores.name == "mul" else 1 / number if number else math.nan
                scores = self._maker(scores.args[0])
                continue
            masked = self._masked(scores)
            if masked is None or not scale > _LEAST:
                return []
            scores, runs = masked
            seen = runs if seen is None else seen & runs
        writing = LimitWriter(taken, weights.source)
        shape, limits = structured(seen, writing)
        if scores is None or shape is None or shape.chunk or not math.isfinite(scale):
            return []
        q, turned = scores.args[:2]
        if not isinstance(q, Ref) or not isinstance(turned, Ref) or not self._fits(q, turned, op.args[1]):
            return []
        k, more = self._keys(op, turned, taken)
        drops: tuple[Arg, ...] = () if shape.window == 0 else (shape.window,)
        if dropped is not None:
            drops = (shape.window, dropped.args[1], dropped.args[3])
        name = "attention" if dropped is None else "attention_dropout"
        attrs = (("sinks", Ref(sinks[-1].result.name)),) if sinks else ()
        args = (q, k, op.args[1], None, shape.causal, scale, *drops)
        return [*more, *sinks, *writing.ops, replace(op, name=name, args=args, attrs=(*attrs, *limits))]

    def _shifted(self, arg: Arg) -> Op | None:
        """The operation that makes scores for a softmax alone; it does not see a row's maximum that is subtracted."""
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
        """The scores without the sinks that `kept` cuts off their softmax, and the operations that make sinks[h]."""
        if op is None or op.name != "cat" or op.args[1:] != (3,) or len(op.args[0]) != 2:  # type: ignore[arg-type]
            return None, []
        parts = [*op.refs()]
        t = op.result.type.shape[3] - 1
        place = {(3, 0, t, 1): 1, (3, 1, t + 1, 1): 0}.get(kept.args[1:])  # type: ignore[arg-type]
        if place is None or self.types[parts[place]].shape[3] != 1:
            return None, []
        heads, name = op.result.type.shape[1], parts[place]
        type = replace(self.types[name], layout=Layout.replicated((heads,)))
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
        """The operation that makes a value for this reader alone."""
        op = self.made.get(arg.name) if isinstance(arg, Ref) and arg.name in self.once else None
        return op if op is not None and len(op.results) == 1 else None

    def _masked(self, op: Op) -> tuple[Op | None, Runs] | None:
        """The scores below a mask, and the elements that it leaves; None for an unknown mask and other operations."""
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

    def _fits(self, q: Ref, turned: Ref, v: Ref) -> bool:
        """Whether the shapes are those of attention with as many heads of keys as of queries."""
        queries, keys, values = (self.types[each.name].shape for each in (q, turned, v))
        return (
            len(queries) == len(keys) == len(values) == 4
            and queries[:2] == keys[:2] == values[:2]
            and queries[3] == keys[2]
            and keys[3] == values[2]
        )

    def _keys(self, op: Op, turned: Ref, taken: set[str]) -> tuple[Ref, list[Op]]:
        """Keys [b, h, t, d] from their transpose."""
        made = self.made.get(turned.name)
        base, order = turned, (0, 1, 3, 2)
        if made is not None and made.name == "permute" and isinstance(made.args[0], Ref):
            before = integers(made.args[1])
            base, order = made.args[0], (before[0], before[1], before[3], before[2])
        if order == (0, 1, 2, 3):
            return base, []
        b, h, d, t = self.types[turned.name].shape
        type = self.types[turned.name]
        value = Value(
            name=unique(f"{turned.name}_keys", taken), type=replace(type, layout=type.layout.replicated((b, h, t, d)))
        )
        return Ref(value.name), [Op(name="permute", args=(base, order), results=(value,), source=op.source)]


def _hides(arg: Arg, constants: Constants) -> bool:
    """Whether scores of this number get no weight beside others: no finite score is less in single precision."""
    number = constants.number(arg.name) if isinstance(arg, Ref) else arg
    return isinstance(number, int | float) and number <= torch.finfo(torch.float32).min
