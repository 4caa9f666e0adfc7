"""Gradients of zeros for parameters that the rewrites leave unread.

    both = cat((old, new), 1)              new_value    = detach(new)
    part = slice(both, 1, 4, 8)    ->      new_gradient = incoming_gradient(new_value)
                                           zeros        = full((4, 4), 0)
                                           new_zeros    = own_gradient((new_value,), (new, old.weight), (…, zeros))

Autograd gives a weight of `old` a gradient of zeros, and weight decay and moments apply to it, as they do not to
parameters without a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from partc.ir.gradients import passing, reached
from partc.ir.program import DTypeArg, Graph, Ref, Region
from partc.passes.route.rows import RowWriter


def with_zero_gradients(region: Region, before: Graph, trained: frozenset[str]) -> Region:
    """Give zeros to trained parameters whose gradients only came from operations that the graph has no longer.

    Of the values that once depended on such a parameter, the first that is left has them.
    """
    graph = region.forward
    left = passing(graph)
    lost = [value.name for value in region.params if value.name in (passing(before) & trained) - left]
    if not lost:
        return region
    places: dict[str, list[str]] = {}
    for name in lost:
        once = reached(before, (name,)) & left
        made = (value.name for op in graph.ops for value in op.results if value.name in once)
        places.setdefault(next(made, graph.outputs[0]), []).append(name)
    types = region.types(graph)
    w = RowWriter(types=types, taken=set(types))
    same: dict[str, str] = {}
    for op in graph.ops:
        w.source = op.source
        w.keep(replace(op.renamed(same), results=op.results))
        for value in op.results:
            if value.name in places:
                same[value.name] = _reading(w, value.name, places[value.name])
    outputs = tuple(same.get(name, name) for name in graph.outputs)
    return replace(region, forward=replace(graph, ops=tuple(w.ops), outputs=outputs))


def _reading(w: RowWriter, value: str, params: Sequence[str]) -> str:
    """The value as the result of an `own_gradient` that gives zeros to the parameters."""
    type = w.types[value]
    detached = w.add("detach", (Ref(value),), type.shape, type.dtype, f"{value}_value")
    gradients = [w.add("incoming_gradient", (Ref(detached),), type.shape, type.dtype, f"{value}_gradient")]
    ranks, dims = [len(type.shape)], [tuple(range(len(type.shape)))] * 2
    for name in params:
        shape, dtype = w.types[name].shape, w.types[name].dtype
        gradients.append(w.add("full", (shape, 0), shape, dtype, "zeros", dtype=DTypeArg(dtype)))
        dims.append(tuple(range(sum(ranks), sum(ranks) + len(shape))))
        ranks.append(len(shape))
    args = ((Ref(detached),), (Ref(value), *map(Ref, params)), tuple(map(Ref, gradients)))
    own = tuple(range(ranks[0], sum(ranks)))
    return w.add("own_gradient", args, type.shape, type.dtype, f"{value}_zeros", dims=tuple(dims), whole=own)
