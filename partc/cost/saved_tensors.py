"""Saved values: the bytes that forward passes keep for backward passes, by call and for all microbatches in flight."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from partc.ir.layout import Sizes
from partc.ir.operations import SHOWING, VIEWS
from partc.ir.program import ITEMSIZE, Action, Graph, Program, Ref, Region
from partc.schedules import Compute

Flight = tuple[tuple[int, int], ...]  # stages, and how many microbatches of each are in flight at the same time
Slot = tuple[int, str]  # a stage and a region that it calls


Saving = tuple[Slot, int]  # calls of a slot, and how many bytes each of them saves


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """A moment of a rank's step: the microbatches that have saved all their values, and the other memory.

    `inside` are the calls that a further microbatch has entered; the values that it has saved up to the last of them
    count too. `given` are the choices of all calls for which `besides` was observed. Under any other choice, a moment
    holds at least the least `besides` of the equal moments. If `given` is empty, `besides` holds for every choice.
    """

    flight: Flight
    inside: Saving | None = None
    besides: int = 0
    given: frozenset[Saving] = frozenset()


_UNITS = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


def parse_bytes(text: str) -> int | None:
    """The bytes of `18GB`, `1.5GiB` or `64KiB`; None for other text."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([KMGT]?i?B)", text, flags=re.ASCII | re.IGNORECASE)
    return int(Fraction(found[1]) * _UNITS[found[2].upper()]) if found and found[2].upper() in _UNITS else None


def bytes_option(bytes: int, *, fewer: bool = False) -> str:
    """A number of bytes as options take it ("18GB"), rounded up to few digits, or down with `fewer`."""
    if bytes < 10**7:
        return f"{bytes}B"
    return f"{bytes // 10**6 if fewer else math.ceil(bytes / 1e6)}MB"


def held_inputs(program: Program) -> dict[str, frozenset[str]]:
    """For each region, the inputs that a stage keeps through the step anyway: batch entries, constants, counts."""
    lasting = set(program.inputs)
    for call in program.calls:
        if program.region(call.region).phase != "microbatch":
            lasting.update(call.results)
    found: dict[str, frozenset[str]] = {}
    for region in program.regions:
        calls = program.calls_to(region.name)
        found[region.name] = frozenset(
            value.name
            for index, value in enumerate(region.forward.inputs)
            if calls and all(call.args[index] in lasting for call in calls)
        )
    return found


def changed_buffers(program: Program) -> dict[str, frozenset[str]]:
    """For each region, the buffers whose value has changed when the backward pass runs."""
    updated = {buffer for buffer, _ in program.updates}
    found: dict[str, frozenset[str]] = {}
    for call in program.calls:
        local = {
            value.name
            for name, value in zip(call.params, program.region(call.region).params, strict=True)
            if name in updated
        }
        found[call.region] = found.get(call.region, frozenset()) | local
    return found


def memory_of(graph: Graph) -> dict[str, str]:
    """For each value, by name: the value whose memory it may alias. Parameters alias themselves."""
    found = {value.name: value.name for value in graph.inputs}
    for op in graph.ops:
        shown = op.args[0].name if op.name in SHOWING and isinstance(op.args[0], Ref) else ""
        found.update((value.name, found.get(shown, shown) or value.name) for value in op.results)
    return found


def saved_values(region: Region, held: frozenset[str]) -> tuple[str, ...]:
    """The values that one call saves for its backward pass, without parameters and `held` inputs.

    Views of a value count as that value.
    """
    values = region.forward.definitions()
    memory = memory_of(region.forward)
    owners = dict.fromkeys(memory[name] for name in region.saved)
    return tuple(name for name in owners if name in values and name not in held)


def saved_bytes(region: Region, held: frozenset[str], sizes: Sizes) -> int:
    """The bytes of the saved values."""
    values = region.forward.definitions()
    return sum(values[name].type.local_bytes(sizes) for name in saved_values(region, held))


def saved_in_eight_bits(region: Region, held: frozenset[str], sizes: Sizes, products: Collection[str]) -> int:
    """The bytes of the saved values where some products, which make gradients of weights, run in fp8.

    A 16-bit value that such products read is saved as a copy in 8 bits. The value itself is saved too if other
    operations read it.
    """
    values, inside = region.forward.definitions(), memory_of(region.forward)
    readers: dict[str, set[bool]] = {}
    for graph in region.graphs:
        if graph is region.forward:
            continue
        shown = {name: inside.get(name, name) for name in memory_of(graph)}
        for op in graph.ops:
            first = op.args[0].name if op.args and isinstance(op.args[0], Ref) else ""
            if op.name in VIEWS or op.name == "all_gather":
                shown.update((value.name, shown.get(first, first)) for value in op.results)
                continue
            for name in op.refs():
                readers.setdefault(shown.get(name, name), set()).add(op.name in products)
    total = 0
    for name in saved_values(region, held):
        size, width = values[name].type.local_bytes(sizes), ITEMSIZE[values[name].type.dtype]
        uses = readers.get(name, set()) if width == 2 else set()
        total += (size if uses != {True} else 0) + (size // 2 if True in uses else 0)
    return total


def stage_bytes(program: Program) -> tuple[int, ...]:
    """The bytes that each stage saves for one microbatch."""
    held = held_inputs(program)
    each = {region.name: saved_bytes(region, held[region.name], program.sizes) for region in program.regions}
    lasting = {region.name for region in program.regions if region.phase != "microbatch"}
    return tuple(
        sum(each[call.region] for call in program.calls_of(stage) if call.region not in lasting)
        for stage in range(program.stages)
    )


def microbatches_in_flight(row: Sequence[Action | Compute]) -> tuple[Flight, ...]:
    """The maximal sets of microbatches that a rank has in flight, from F to the end of B or W."""
    now: dict[int, int] = {}
    found: list[Mapping[int, int]] = []
    seen: set[tuple[tuple[int, int], ...]] = set()
    for action in row:
        if action.kind == "F":
            now[action.stage] = now.get(action.stage, 0) + 1
            key = tuple(now.items())
            if key in seen:
                continue
            seen.add(key)
            found = [other for other in found if any(count > now.get(stage, 0) for stage, count in other.items())]
            if not any(all(other.get(stage, 0) >= count for stage, count in now.items()) for other in found):
                found.append(dict(now))
        elif action.kind in ("B", "W"):
            now[action.stage] -= 1
    return tuple(tuple(sorted((stage, count) for stage, count in mix.items() if count)) for mix in found)


def most_saved(program: Program) -> tuple[int, ...]:
    """For each pipeline rank of a scheduled program, the most bytes of saved values at any time."""
    each = stage_bytes(program)
    return tuple(
        max((sum(count * each[stage] for stage, count in flight) for flight in microbatches_in_flight(row)), default=0)
        for row in program.schedule
    )
