"""The values that operations of a traced graph change in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from partc.ir.operations import memory_owner
from partc.ir.program import Arg, Op, Ref, is_change, makers


def changed_by(op: Op) -> Iterator[str]:
    """The values that an operation changes in place."""
    changed: Iterable[Arg] = op.args[:1] if is_change(op) else ()
    if op.name in ("batch_norm", "instance_norm") and op.args[5] is True:
        changed = op.args[3:5]
    yield from (each.name for each in changed if isinstance(each, Ref))


def changed_outside(ops: Sequence[Op]) -> Iterator[str]:
    """Yield the values from before some operations that these change in place: for a view, the tensor that it shows."""
    own = makers(ops)
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


def before_changes(count: int, bodies: Sequence[tuple[Sequence[Op], Callable[[str], str]]]) -> int:
    """The number of operations, of the first `count` of every body, before the first with a result in memory that
    later operations of a body change. A function finds the owner of the memory of a body's values.
    """
    while (fewer := min(_before_changes(ops, owner, count) for ops, owner in bodies)) < count:
        count = fewer
    return count


def _before_changes(ops: Sequence[Op], owner: Callable[[str], str], count: int) -> int:
    changed = {owner(name) for op in ops[count:] for name in changed_by(op)}
    made = ((place, value.name) for place, op in enumerate(ops[:count]) for value in op.results)
    return next((place for place, name in made if owner(name) in changed), count)
