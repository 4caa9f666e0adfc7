"""Parameters whose results the rewrites cut off.

both = cat((old, new), 1)
part = slice(both, 1, 4, 8)    ->    part = new      # and zeros for the weights of `old`
"""

from __future__ import annotations

from partc.ir.gradients import passing, reached
from partc.ir.program import Graph, Region
from partc.passes.normalize.zero_gradients import with_zero_gradients


def with_cut_off_parameters(region: Region, before: Graph, trained: frozenset[str]) -> Region:
    """Give zeros to trained parameters whose gradients only came from operations that the graph has no longer.

    Of the values that once depended on such a parameter, the first that is left takes the zeros along.
    """
    graph = region.forward
    left = passing(graph)
    gone = (passing(before) & trained) - left
    lost = [value.name for value in region.params if value.name in gone]
    places: dict[str, list[str]] = {}
    for name in lost:
        once = reached(before, (name,)) & left
        made = (value.name for op in graph.ops for value in op.results if value.name in once)
        places.setdefault(next(made, graph.outputs[0]), []).append(name)
    return with_zero_gradients(region, places) if places else region
