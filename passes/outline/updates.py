"""Updates of buffers among segments: where they run, and copies of old values for later segments.

    segment embed: h = …; next = lerp(mean, …)      segment embed: old = clone(mean); h = …; next = lerp(mean, …)
    segment head:  y = sub(h, mean)             ->  segment head:  y = sub(h, old)
    update mean = next                              update mean = next

A call stores the new value of a buffer when it ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from partc.ir.naming import unique
from partc.ir.program import Op, Ref, Region
from partc.passes.outline.segments import ModuleSegment, with_views, without_views


def move_updates_ahead(body: Sequence[ModuleSegment], main: Region, written: Mapping[str, str]) -> list[ModuleSegment]:
    """Move operations that only updates need to the first segments in which they can be computed.

    An update that reads only its buffer, such as a counter's, is computed where the buffer is read first. A pipeline
    can then be cut between readers of buffers. `written` maps each next value to its buffer. Views that several
    segments compute stay with all their readers.
    """
    every = [op for segment in body for op in segment.ops]
    counts = Counter(value.name for op in every for value in op.results)
    views = {op.result.name: op for op in every if any(counts[value.name] > 1 for value in op.results)}
    body = without_views(body, views)
    ops = [op for segment in body for op in segment.ops]
    needed = _needed(ops, set(main.forward.outputs).difference(written))
    home = {value.name: index for index, segment in enumerate(body) for op in segment.ops for value in op.results}
    moving = [op for op in ops if needed.isdisjoint(value.name for value in op.results)]
    reads = _first_reads(body, needed)
    place = _places(moving, home, {value: reads[buffer] for value, buffer in written.items() if buffer in reads})
    found = []
    for index, segment in enumerate(body):
        stay = tuple(op for op in segment.ops if place.get(id(op), index) == index)
        more = tuple(op for op in moving if place.get(id(op)) == index and home[op.results[0].name] != index)
        found.append(replace(segment, ops=with_views((*stay, *more), views)))
    return [segment for segment in found if segment.ops]


def _needed(ops: Sequence[Op], outputs: set[str]) -> set[str]:
    """The outputs, and all values from which they are computed."""
    needed = set(outputs)
    for op in reversed(ops):
        if needed.intersection(value.name for value in op.results):
            needed.update(op.refs())
    return needed


def _first_reads(body: Sequence[ModuleSegment], needed: set[str]) -> dict[str, int]:
    """The first segment that reads each operand of needed values."""
    first: dict[str, int] = {}
    for index, segment in enumerate(body):
        for op in segment.ops:
            if needed.intersection(value.name for value in op.results):
                for name in op.refs():
                    first.setdefault(name, index)
    return first


def _places(moving: Sequence[Op], home: Mapping[str, int], wanted: Mapping[str, int]) -> dict[int, int]:
    """The segment of each moving operation, by id: the wanted one of the next value that it computes, or the first
    later one in which it can be computed, but none behind its home.
    """
    earliest = dict(home)
    for op in moving:
        least = max((earliest[name] for name in op.refs() if name in earliest), default=-1)
        earliest.update((value.name, least) for value in op.results)
    place: dict[str, int] = {}
    for op in reversed(moving):
        for value in op.results:
            own = home[value.name]
            if value.name in wanted:
                own = min(own, max(earliest[value.name], wanted[value.name]))
            place[value.name] = min(own, place.get(value.name, own))
        index = min(place[value.name] for value in op.results)
        for name in op.refs():
            if name in home:
                place[name] = min(index, place.get(name, index))
    return {id(op): min(place[value.name] for value in op.results) for op in moving if op.results}


def with_old_values(body: Sequence[ModuleSegment], main: Region, written: Mapping[str, str]) -> list[ModuleSegment]:
    """Let segments after the update of a buffer read a copy of its old value."""
    found = list(body)
    taken = {*main.forward.definitions(), *(value.name for value in main.params)}
    params = {value.name: value for value in main.params}
    for index, segment in enumerate(body):
        for value in (value.name for op in segment.ops for value in op.results if value.name in written):
            buffer = written[value]
            late = [at for at in range(index + 1, len(found)) if any(buffer in op.refs() for op in found[at].ops)]
            if not late:
                continue
            old = replace(params[buffer], name=unique(f"{buffer}_before", taken))
            copy = Op(name="clone", args=(Ref(buffer),), results=(old,))
            found[index] = replace(found[index], ops=(copy, *found[index].ops))
            for at in late:
                found[at] = replace(found[at], ops=tuple(op.renamed({buffer: old.name}) for op in found[at].ops))
    return found
