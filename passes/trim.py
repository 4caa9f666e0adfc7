"""Copy the saved parts of a larger value, whose memory would otherwise be kept until backward.

    …, mix_split_2      = split(mix_qkv, (24, 12, 12), 2)  # …
    mix_split_6         = reshape(mix_split_2, …)          # f32[8, 4096, 6, 2]
  ->
    …, mix_split_2_part = split(mix_qkv, (24, 12, 12), 2)  # …
    mix_split_2         = clone(mix_split_2_part)          # f32[8, 4096, 12]
    mix_split_6         = reshape(mix_split_2, …)          # f32[8, 4096, 6, 2]

Attention with rotary embeddings saves rotated queries and keys, which are new tensors, and values, which are not. Where
one product makes all three, the values are a view, which keeps the memory of the whole product. Parts are copied if the
copies take at most half of the bytes and free a mebibyte, and if the region neither saves nor returns the larger value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from partc import fuel
from partc.cost.saved_tensors import memory_of
from partc.ir.layout import Sizes
from partc.ir.naming import unique
from partc.ir.program import Op, Program, Ref, Region, Value

LEAST = 1 << 20  # bytes that the copies of one value free


def trim(program: Program) -> Program:
    """Rewrite the forward graphs of all regions that save values."""
    return replace(program, regions=tuple(_trimmed(region, program.sizes) for region in program.regions))


def _trimmed(region: Region, sizes: Sizes) -> Region:
    makers = region.forward.makers()
    values = region.forward.definitions()
    size = {name: value.type.local_bytes(sizes) for name, value in values.items()}
    parts: defaultdict[str, set[str]] = defaultdict(set)
    memory = memory_of(region.forward)
    for name in region.saved:
        if memory[name] in makers:
            parts[memory[name]].add(_part(name, memory[name], makers, size))
    handed_on = {memory[name] for name in region.forward.outputs}
    copied: set[str] = set()
    for whole, found in parts.items():
        kept = sum(size[name] for name in found)
        if whole not in handed_on and 2 * kept <= size[whole] and size[whole] - kept >= LEAST:
            copied |= found if fuel.may_rewrite("trim", makers[whole].source) else set()
    if not copied:
        return region
    taken = {*region.types(region.forward)}
    ops: list[Op] = []
    for op in region.forward.ops:
        mine = {value.name: value for value in op.results if value.name in copied}
        part = {name: replace(value, name=unique(f"{name}_part", taken)) for name, value in mine.items()}
        ops.append(replace(op, results=tuple(part.get(value.name, value) for value in op.results)))
        ops.extend(_copy(part[name], value, op) for name, value in mine.items())
    return replace(region, forward=replace(region.forward, ops=tuple(ops)))


def _part(name: str, whole: str, makers: Mapping[str, Op], size: Mapping[str, int]) -> str:
    """The smallest part of `whole` of which `name` is a view: the last view on the way that leaves out elements."""
    while name != whole:
        shown = next(makers[name].refs())
        if size[name] < size[shown]:
            break
        name = shown
    return name


def _copy(part: Value, value: Value, op: Op) -> Op:
    return Op(name="clone", args=(Ref(part.name),), results=(value,), source=op.source)
