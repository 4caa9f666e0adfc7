"""Losses over classes as numbers of rows, which kernels, chunks and ranks make of the logits that they have.

nll, lse = cross_entropy(x, labels, …)   ->   most, sums, picked = shard_max(x), sum_exp(x, most), pick(x, labels)
                                              lse = log_sum_exp(most, sums)
                                              nll = cross_entropy_rows(lse, picked, labels, …)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from partc.naming import unique
from partc.program import Op, Ref, Value


def in_pieces(op: Op, classes: int, taken: set[str]) -> Iterator[Op]:
    """A loss of whole rows in the pieces that one over cut classes is made of (passes/expand.py)."""
    logits, labels, weight, ignore, smoothing = op.args
    nll, lse = op.results

    def made(word: str) -> Value:
        return replace(lse, name=unique(f"{nll.name}_{word}", taken))

    most, sums, picked = made("max"), made("sums"), made("picked")
    smooth = made("smooth") if smoothing else None
    yield Op(name="shard_max", args=(logits,), results=(most,), source=op.source)
    yield Op(name="sum_exp", args=(logits, Ref(most.name)), results=(sums,), source=op.source)
    yield Op(name="pick", args=(logits, labels), results=(picked,), source=op.source)
    if smooth is not None:
        yield Op(name="smooth_sum", args=(logits, weight), results=(smooth,), source=op.source)
    yield Op(name="log_sum_exp", args=(Ref(most.name), Ref(sums.name)), results=(lse,), source=op.source)
    last = None if smooth is None else Ref(smooth.name)
    rows = (Ref(lse.name), Ref(picked.name), labels, weight, ignore, smoothing, last, classes)
    yield Op(name="cross_entropy_rows", args=rows, results=(nll,), source=op.source)


def below_own(op: Op, most: str, taken: set[str]) -> tuple[Op, tuple[Op, ...]]:
    """A `sum_exp` below this rank's own maximum in place of that of all ranks, and what scales it to that again."""
    part, largest = op.result, op.args[1]
    local = replace(part.type, layout=replace(part.type.layout, partial=()))
    own, below, factor = (
        Value(name=unique(f"{part.name}_{word}", taken), type=local) for word in ("own", "below", "factor")
    )
    scaling = (
        Op(name="sub", args=(Ref(most), largest), results=(below,), source=op.source),
        Op(name="exp", args=(Ref(below.name),), results=(factor,), source=op.source),
        Op(name="mul", args=(Ref(own.name), Ref(factor.name)), results=op.results, source=op.source),
    )
    return replace(op, args=(op.args[0], Ref(most)), results=(own,)), scaling
