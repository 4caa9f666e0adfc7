"""Recognise softmaxes that models write out, below the largest number of each row.

    m = amax(x, (2,), True)        # or max(x, 2, True), detached or not
    e = exp(sub(x, m))                                                   ->    y = softmax(x, 2)
    y = div(e, sum(e, (2,), True))

What is subtracted cancels, and so does its gradient, wherever among equal numbers it goes. Without it, large numbers
overflow that a softmax holds: such a quotient stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from partc import fuel
from partc.program import Op, Ref, Region

Made = Mapping[str, Op]


def softmaxes(region: Region) -> Region:
    """Replace the quotient of each; the other operations are dead then."""
    made = {value.name: op for op in region.forward.ops for value in op.results}
    readers = Counter(name for op in region.forward.ops for name in op.refs()) + Counter(region.forward.outputs)
    ops = []
    for op in region.forward.ops:
        found = _softmax(op, made, readers) if op.name == "div" and not op.attrs else None
        ops.append(found if found is not None and fuel.allowed("softmax", op.source) else op)
    return replace(region, forward=replace(region.forward, ops=tuple(ops)))


def _softmax(op: Op, made: Made, readers: Mapping[str, int]) -> Op | None:
    power, total = (made.get(arg.name) if isinstance(arg, Ref) else None for arg in op.args[:2])
    if power is None or total is None or power.name != "exp" or total.name != "sum":
        return None
    below = made.get(next(power.refs()))
    if below is None or below.name != "sub" or below.attrs or not all(isinstance(arg, Ref) for arg in below.args):
        return None
    x, most = below.refs()
    dims = total.args[1]
    alone = readers[power.result.name] == 2 and readers[total.result.name] == readers[below.result.name] == 1
    if not alone or total.args != (Ref(power.result.name), dims, True) or not isinstance(dims, tuple) or len(dims) != 1:
        return None
    same = power.result.type == op.result.type and _is_most(most, x, dims[0], made, len(op.result.type.shape))
    return replace(op, name="softmax", args=(Ref(x), dims[0])) if same else None


def _is_most(name: str, x: str, dim: object, made: Made, rank: int) -> bool:
    """Whether a value is the largest of each row."""
    op = made.get(name)
    while op is not None and op.name == "detach":
        op = made.get(next(op.refs()))
    if op is None or op.attrs or op.name not in ("amax", "max") or len(op.args) != 3 or op.args[0] != Ref(x):
        return False
    along = op.args[1][0] if isinstance(op.args[1], tuple) and len(op.args[1]) == 1 else op.args[1]
    return isinstance(along, int) and along % rank == dim and op.args[2] is True
