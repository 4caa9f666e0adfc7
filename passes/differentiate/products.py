"""Rewrites of products in a joint graph into cheaper equivalents.

The gradient of a matrix times its own transpose is one product instead of two:

    y     = matmul(x, permute(x))
    left  = matmul_grad_left(g, permute(x))              mirrored = permute(g)
    right = matmul_grad_right(g, x)                ->    both     = add(g, mirrored)
    grad  = add(left, permute(right))                    grad     = matmul(both, x)

Scores of all pairs, as in recommenders and contrastive losses, are products of this kind.

If a model transposes its experts' matrices, their gradient is computed in the layout of the parameter, so that it is
added to the parameter's gradient without a transposed copy:

    y      = expert_matmul(x, experts, permute(w, (0, 2, 1)))
    grad_t = expert_matmul_grad_weight(g, experts, x, n)      ->   grad = expert_matmul_grad_weight(x, experts, g, n)
    grad   = permute(grad_t, (0, 2, 1))

If the rows to sort are copies of fewer rows, such as a token's copies for its experts, the originals are gathered
instead of the copies:

    copies = reshape(expand(x, (n, k, h)), (n·k, h))          once   = reshape(x, (n, h))
    sorted = permute_rows(copies, order, places)        ->    sorted = permute_rows(once, order, places, k)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from partc.ir.program import Op, Ref, Value


def with_cheaper_products(ops: Sequence[Op], fresh: Callable[[str], str]) -> tuple[Op, ...]:
    """The operations of a joint graph with products rewritten; `fresh` returns a new name that begins with a stem."""
    makers = {value.name: op for op in ops for value in op.results}
    reads = Counter(name for op in ops for name in op.refs())
    found: list[Op] = []
    for op in ops:
        found.extend(
            _one_product(op, makers, reads, fresh)
            or _in_layout_of_parameter(op, makers, reads)
            or _from_originals(op, makers, fresh)
            or (op,)
        )
    return tuple(found)


def _from_originals(op: Op, makers: dict[str, Op], fresh: Callable[[str], str]) -> tuple[Op, ...] | None:
    if op.name != "permute_rows":
        return None
    joined = makers.get(next(op.refs()))
    if joined is None or joined.name != "reshape":
        return None
    copied, cast = makers.get(next(joined.refs())), None
    if copied is not None and copied.name == "to":
        copied, cast = makers.get(next(copied.refs())), copied
    if copied is None or copied.name != "expand":
        return None
    shape, [single] = copied.args[1], [*copied.refs()]
    rows, copies, *rest = copied.result.type.layout.dims
    before = makers.get(single)
    if before is None or any(sub.axes for sub in copies) or joined.result.type.layout.dims[1:] != (*rest,):
        return None
    given = next(value.type for value in before.results if value.name == single)
    if (
        not isinstance(shape, tuple)
        or given.layout.dims[:1] != (rows,)
        or given.shape[1] != 1
        or given.layout.dims[2:] != (*rest,)
    ):
        return None
    layout = replace(given.layout, dims=(rows, *rest))
    once = Value(name=fresh(f"{single}_once"), type=replace(given, layout=layout))
    ops = [Op(name="reshape", args=(Ref(single), (shape[0], *shape[2:])), results=(once,), source=op.source)]
    if cast is not None:
        once = Value(name=fresh(f"{single}_cast"), type=replace(op.result.type, layout=layout))
        ops.append(replace(cast, args=(Ref(ops[0].result.name), *cast.args[1:]), results=(once,)))
    return (*ops, replace(op, args=(Ref(once.name), *op.args[1:], shape[1])))


def _in_layout_of_parameter(op: Op, makers: dict[str, Op], reads: Counter[str]) -> tuple[Op, ...] | None:
    if op.name != "permute" or op.args[1] != (0, 2, 1):
        return None
    product = makers.get(next(op.refs()))
    if product is None or product.name != "expert_matmul_grad_weight" or reads[product.result.name] != 1:
        return None
    grad, experts, x, *rest = product.args
    return (replace(product, args=(x, experts, grad, *rest), results=op.results),)


def _one_product(
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
