"""The values that operations of a traced graph change in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from partc.ir.operations import memory_owner
from partc.ir.program import Arg, Op, Ref, is_change


def changed_by(op: Op) -> Iterator[str]:
    """The values that an operation changes in place."""
    changed: Iterable[Arg] = op.args[:1] if is_change(op) else ()
    if op.name in ("batch_norm", "instance_norm") and op.args[5] is True:
        changed = op.args[3:5]
    yield from (each.name for each in changed if isinstance(each, Ref))


def changed_outside(ops: Sequence[Op]) -> Iterator[str]:
    """Yield the values from before some operations that these change in place: for a view, the tensor that it shows."""
    own = {value.name: op for op in ops for value in op.results}
    for op in ops:
        for name in changed_by(op):
            changed = memory_owner(name, own)
            if changed not in own:
                yield changed


def changed_tensor(name: str, makers: Mapping[str, Op]) -> str:
    """The value whose memory a chain of in-place changes has changed; the value itself without any."""
    while (op := makers.get(name)) is not None and is_change(op):
        name = next(op.refs())
    return name
