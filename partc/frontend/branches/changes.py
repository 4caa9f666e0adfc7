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
    """The earlier values that operations change in place; for a view, the tensor that it shows."""
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
    """The number of operations, at most `count`, at the start of every body whose results no later operation of a body
    changes in place. Each body comes with a function that finds the owner of a value's memory.
    """
    while (fewer := min(_before_changes(ops, owner, count) for ops, owner in bodies)) < count:
        count = fewer
    return count


def _before_changes(ops: Sequence[Op], owner: Callable[[str], str], count: int) -> int:
    changed = {owner(name) for op in ops[count:] for name in changed_by(op)}
    made = ((place, value.name) for place, op in enumerate(ops[:count]) for value in op.results)
    return next((place for place, name in made if owner(name) in changed), count)
