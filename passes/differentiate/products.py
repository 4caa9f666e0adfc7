"""The gradient of a matrix times its own transpose: one product instead of two.

    y     = matmul(x, permute(x))
    left  = matmul_grad_left(g, permute(x))              mirrored = permute(g)
    right = matmul_grad_right(g, x)                ->    both     = add(g, mirrored)
    grad  = add(left, permute(right))                    grad     = matmul(both, x)

Scores of all pairs, as in recommenders and contrastive losses, are products of this kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from partc.ir.program import Op, Ref, Value


def with_one_product(ops: Sequence[Op], fresh: Callable[[str], str]) -> tuple[Op, ...]:
    """The operations of a joint graph with such gradients rewritten; `fresh` returns a new name that begins with a
    stem.
    """
    makers = {value.name: op for op in ops for value in op.results}
    reads = Counter(name for op in ops for name in op.refs())
    found: list[Op] = []
    for op in ops:
        found.extend(_rewritten(op, makers, reads, fresh) or (op,))
    return tuple(found)


def _rewritten(
    op: Op, makers: dict[str, Op], reads: Counter[str], fresh: Callable[[str], str]
) -> tuple[Op, ...] | None:
    if op.name != "add" or op.attrs:
        return None
    match [makers.get(name) for name in op.refs()]:
        case [
            Op(name="matmul_grad_left", args=(Ref(g), Ref(transposed))) as left,
            Op(name="permute", args=(Ref(product), order)) as last,
        ]:
            right, before = makers.get(product), makers.get(transposed)
        case _:
            return None
    if right is None or right.name != "matmul_grad_right" or before is None or before.name != "permute":
        return None
    x = next(before.refs())
    rank = len(left.result.type.shape)
    swapped = (*range(rank - 2), rank - 1, rank - 2)
    type = next((value.type for value in makers[g].results if value.name == g), None) if g in makers else None
    if (
        type is None
        or (order, before.args[1]) != (swapped, swapped)
        or right.args[:2] != (Ref(g), Ref(x))
        or type.layout.dims[-2] != type.layout.dims[-1]
        or any(sub.axes for sub in type.layout.dims[-1])
        or any(reads[each.result.name] != 1 for each in (left, right, last))
    ):
        return None
    mirrored = Value(name=fresh(f"{g}_mirrored"), type=type)
    both = Value(name=fresh(f"{g}_both"), type=type)
    return (
        Op(name="permute", args=(Ref(g), swapped), results=(mirrored,), source=right.source),
        Op(name="add", args=(Ref(g), Ref(mirrored.name)), results=(both,), source=right.source),
        replace(op, name="matmul", args=(Ref(both.name), Ref(x)), source=left.source),
    )
