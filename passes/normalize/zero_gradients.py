"""Gradients of zeros for parameters that an operation read before a rewrite cut it off.

    return loss    ->    loss_value    = detach(loss)
                         loss_gradient = incoming_gradient(loss_value)
                         zeros         = full((4, 4), 0)
                         loss_zeros    = own_gradient((loss_value,), (loss, old.weight), (loss_gradient, zeros))
                         return loss_zeros

Autograd gives such a parameter a gradient of zeros, and weight decay and moments apply to it, as they do not to
parameters without a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from partc.ir.program import DTypeArg, Ref, Region
from partc.passes.route.rows import RowWriter


def with_zero_gradients(region: Region, places: Mapping[str, Sequence[str]]) -> Region:
    """Give zeros to parameters. `places` has the parameters by the value whose gradient takes the zeros along."""
    graph, types = region.forward, region.types(region.forward)
    w = RowWriter(types=types, taken=set(types))
    given = (value.name for value in (*region.params, *graph.inputs) if value.name in places)
    same = {name: _with_zeros(w, name, places[name]) for name in given}
    for op in graph.ops:
        w.source = op.source
        w.keep(op.with_operands(same))
        for value in op.results:
            if value.name in places:
                same[value.name] = _with_zeros(w, value.name, places[value.name])
    return replace(region, forward=graph.rewritten(w.ops, same))


def _with_zeros(w: RowWriter, value: str, params: Sequence[str]) -> str:
    """Write an `own_gradient` that returns the value and gives zeros to the parameters. Returns its result's name."""
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
