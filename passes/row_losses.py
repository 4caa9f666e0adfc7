"""Losses over classes as statistics of rows, which kernels, chunks and ranks can compute from parts of the logits.

nll, lse = cross_entropy(x, labels, …)   ->   most, sums, picked = shard_max(x), sum_exp(x, most), pick(x, labels)
                                              lse = log_sum_exp(most, sums)
                                              nll = cross_entropy_rows(lse, picked, labels, …)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from partc.ir.naming import unique
from partc.ir.program import DType, DTypeArg, Graph, Op, Ref, Region, TensorType, Value
from partc.rules.kernels import lacks_total


def in_pieces(op: Op, classes: int, taken: set[str]) -> Iterator[Op]:
    """A loss of whole rows in the pieces into which `expand` divides a loss over cut classes."""
    logits, labels, weight, ignore, smoothing, *total = op.args
    nll, lse = op.results

    def new_value(word: str) -> Value:
        return replace(lse, name=unique(f"{nll.name}_{word}", taken))

    most, sums, picked = new_value("max"), new_value("sums"), new_value("picked")
    smooth = new_value("smooth") if smoothing else None
    yield Op(name="shard_max", args=(logits,), results=(most,), source=op.source)
    yield Op(name="sum_exp", args=(logits, Ref(most.name)), results=(sums,), source=op.source)
    yield Op(name="pick", args=(logits, labels), results=(picked,), source=op.source)
    if smooth is not None:
        yield Op(name="smooth_sum", args=(logits, weight), results=(smooth,), source=op.source)
    yield Op(name="log_sum_exp", args=(Ref(most.name), Ref(sums.name)), results=(lse,), source=op.source)
    last = None if smooth is None else Ref(smooth.name)
    rows = (Ref(lse.name), Ref(picked.name), labels, weight, ignore, smoothing, last, classes, *total)
    yield Op(name="cross_entropy_rows", args=rows, results=(nll,), source=op.source)


def log_sum_exp(op: Op, logits: str, made: Value, taken: set[str]) -> Iterator[Op]:
    """The log-sum-exp of rows in the same pieces."""
    most, sums = (replace(made, name=unique(f"{made.name}_{word}", taken)) for word in ("max", "sums"))
    yield Op(name="shard_max", args=(Ref(logits),), results=(most,), source=op.source)
    yield Op(name="sum_exp", args=(Ref(logits), Ref(most.name)), results=(sums,), source=op.source)
    yield Op(name="log_sum_exp", args=(Ref(most.name), Ref(sums.name)), results=(made,), source=op.source)


def below_own(op: Op, most: str, taken: set[str]) -> tuple[Op, tuple[Op, ...]]:
    """A `sum_exp` relative to this rank's own maximum, and the operations that scale it to the global maximum."""
    part, largest = op.result, op.args[1]
    own, below, factor = (
        Value(name=unique(f"{part.name}_{word}", taken), type=part.type) for word in ("own", "below", "factor")
    )
    scaling = (
        Op(name="sub", args=(Ref(most), largest), results=(below,), source=op.source),
        Op(name="exp", args=(Ref(below.name),), results=(factor,), source=op.source),
        Op(name="mul", args=(Ref(own.name), Ref(factor.name)), results=op.results, source=op.source),
    )
    return replace(op, args=(op.args[0], Ref(most)), results=(own,)), scaling


def with_shared_weight_sums(region: Region) -> Region:
    """The region with the sum of class weights computed once, instead of for every row, in losses with label
    smoothing.
    """
    taken = set().union(*(region.types(graph) for graph in region.graphs))

    def with_totals(graph: Graph) -> Graph:
        known: dict[str, Ref] = {}
        ops: list[Op] = []
        for op in graph.ops:
            table = lacks_total(op)
            if table is not None and table.name not in known:
                steps = list(_total(op, table, region.types(graph)[table.name], taken))
                ops += steps
                known[table.name] = Ref(steps[-1].result.name)
            ops.append(op if table is None else replace(op, args=(*op.args, known[table.name])))
        return replace(graph, ops=tuple(ops))

    return region.mapped(with_totals)


def _total(op: Op, table: Ref, type: TensorType, taken: set[str]) -> Iterator[Op]:
    dtype: DType = "f64" if "f64" in (type.dtype, op.results[0].type.dtype) else "f32"
    if type.dtype != dtype:
        wide = Value(name=unique(f"{table.name}_wide", taken), type=replace(type, dtype=dtype))
        yield Op(name="to", args=(table, DTypeArg(dtype)), results=(wide,), source=op.source)
        table = Ref(wide.name)
    total = Value(name=unique(f"{table.name}_total", taken), type=TensorType.replicated(dtype, ()))
    yield Op(name="sum", args=(table, (0,), False), results=(total,), source=op.source)
