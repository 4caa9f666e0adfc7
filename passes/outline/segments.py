"""Segments of a program for outline: operations grouped by module, in an executable order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import cast

from partc.ir.naming import is_number
from partc.ir.operations import RANDOM, VIEWS
from partc.ir.program import Op, Phase, Ref, Region
from partc.rules.kernels import CONSTANTS

_FEWEST_EQUAL = 3  # the fewest equal bodies that count as a repetition, for weights numbered outside modules


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSegment:
    """Consecutive operations of one module that will be one call; `key` is the module, "" between numbered ones."""

    key: str
    ops: tuple[Op, ...]
    phase: Phase = "microbatch"
    gives: tuple[str, ...] | None = None  # its results; None: all values that others read


def segments(
    main: Region, trained: set[str], keys: Mapping[int, str]
) -> tuple[list[ModuleSegment], list[ModuleSegment]]:
    """The operations of the region, cut into calls in an executable order: (lifted values, bodies)."""
    free, constant = _free_values(main, trained)
    constant = constant - set(main.forward.outputs)  # buffers are set to these in every microbatch
    fills = _fills(main) & constant
    free, constant = free - fills, constant - fills
    ops = main.forward.ops
    made = main.forward.makers()
    still = [op for op in ops if not all(value.name in constant for value in op.results)]
    lifted = _shared(_runs(still, keys), free - constant, set(main.forward.outputs))
    bound = [op for op in still if not all(value.name in free for value in op.results)]
    wanted = [*main.forward.outputs, *(name for op in bound for name in op.refs())]
    inline = {id(op) for op in _slice(wanted, made, constant | lifted)}
    bound_ids = {id(op) for op in bound}
    body = _runs([op for op in still if id(op) in bound_ids or id(op) in inline], keys)
    body = _own_views(body, main, fills)
    body = _joined(body, {value.name for value in main.params}, trained)
    order = {id(op): index for index, op in enumerate(ops)}
    return _lifted_segments(sorted(lifted, key=lambda n: order[id(made[n])]), made, constant, body, order), body


def _runs(ops: Sequence[Op], keys: Mapping[int, str]) -> list[ModuleSegment]:
    """Runs of consecutive operations with the same key."""
    found: list[tuple[str, list[Op]]] = []
    for op in ops:
        if found and found[-1][0] == keys[id(op)]:
            found[-1][1].append(op)
        else:
            found.append((keys[id(op)], [op]))
    return [ModuleSegment(key=key, ops=tuple(run)) for key, run in found]


def _fills(main: Region) -> set[str]:
    """Tensors of one number, such as `zeros_like(x)`. They are cheaper to make where they are read, where they have the
    size of a rank's part of a microbatch, than to keep.
    """
    return {op.result.name for op in main.forward.ops if op.name in CONSTANTS and op.result.type.shape}


def _own_views(body: list[ModuleSegment], main: Region, fills: set[str]) -> list[ModuleSegment]:
    """Let every segment compute the fills and the views of parameters that it reads, so that none passes from call to
    call.

    A segment that only has such views stays, since a pipeline may be cut there.
    """
    types, params = main.types(main.forward), {value.name for value in main.params}
    views: dict[str, Op] = {}
    for segment in body:
        own: dict[str, Op] = {}
        for op in segment.ops:
            if op.name in CONSTANTS and op.result.name in fills:
                own[op.result.name] = op
            elif op.name in VIEWS and len(op.results) == 1 and op.result.name not in main.forward.outputs:
                (base,) = op.refs()
                read = base in views or base in own or base in params
                if read and prod(types[base].shape) == prod(op.result.type.shape):
                    own[op.result.name] = op
        if len(own) < len(segment.ops):
            views |= own
    return [replace(each, ops=with_views(each.ops, views)) for each in without_views(body, views)]


def without_views(body: Sequence[ModuleSegment], views: Mapping[str, Op]) -> list[ModuleSegment]:
    """The segments without these views; `with_views` writes them where they are read."""

    def without(segment: ModuleSegment) -> tuple[Op, ...]:
        return tuple(op for op in segment.ops if not any(value.name in views for value in op.results))

    return [replace(segment, ops=without(segment)) for segment in body]


def with_views(ops: Sequence[Op], views: Mapping[str, Op]) -> tuple[Op, ...]:
    """The operations, with the views that each reads first in front of it."""
    order = {name: index for index, name in enumerate(views)}
    made: set[str] = set()
    found: list[Op] = []
    for op in ops:
        first = sorted(_slice(list(op.refs()), views, made), key=lambda view: order[view.result.name])
        made.update(view.result.name for view in first)
        found += [*first, op]
    return tuple(found)


def _shared(segments: list[ModuleSegment], free: set[str], outputs: set[str]) -> set[str]:
    """Values that depend on inputs only and get a region: several bodies read them, or they are one number for the
    batch.
    """
    readers: dict[str, set[int]] = {}
    scalars: set[str] = set()
    for index, segment in enumerate(segments):
        for op in segment.ops:
            if not all(value.name in free for value in op.results):
                for name in op.refs():
                    readers.setdefault(name, set()).add(index)
            scalars.update(value.name for value in op.results if not value.type.shape)
    return {name for name in free if len(readers.get(name, ())) > 1 or (name in scalars and name in readers)} - outputs


def _free_values(main: Region, trained: set[str]) -> tuple[set[str], set[str]]:
    """The values that depend on no trained parameter, and those among them that depend on no input either.

    Rows of one frozen weight, which the pass `stack` makes a parameter, stay with their readers, and so do values whose
    gradients are read, such as constants that forward writes into a trained weight.
    """
    read = {name for op in main.forward.ops if op.name == "incoming_gradient" for name in op.refs()}
    bound = trained | _rows(main) | read
    fed = {value.name for value in main.forward.inputs}
    for op in main.forward.ops:
        names = set(op.refs())
        for value in op.results:
            if names & bound:
                bound.add(value.name)
            if names & fed or op.name in RANDOM:  # redrawn in every step
                fed.add(value.name)
    made = {value.name for op in main.forward.ops for value in op.results}
    return made - bound, made - bound - fed


def _rows(main: Region) -> set[str]:
    """The results of concatenations whose operands are reshaped parameters, and these operands."""
    stored = {value.name for value in main.params}
    reshaped = {op.result.name for op in main.forward.ops if op.name == "reshape" and stored.issuperset(op.refs())}
    joined = [op for op in main.forward.ops if op.name == "cat" and reshaped.issuperset(op.refs())]
    return {name for op in joined for name in (*op.refs(), op.result.name)}


def _container_depths(ops: Sequence[Op]) -> dict[str, int]:
    """For each outermost numbered container, the number of numbered levels in a body's path: the first level that
    repeats.

    Constants are not part of a body, because only the first body that reads one would have it.
    """
    bodies: dict[str, dict[str, list[Hashable]]] = {}
    constant: set[str] = set()
    for op in ops:
        levels = _levels(op)
        if op.name not in RANDOM and constant.issuperset(op.refs()):
            constant.update(value.name for value in op.results)
        elif levels:
            bodies.setdefault(container_path(levels[0]), {}).setdefault(levels[0], []).append(_shape_of(op))
    depths = {}
    for holder, instances in bodies.items():
        found = [tuple(body) for body in instances.values()]
        nested = any(len(_levels(op)) > 1 and container_path(_levels(op)[0]) == holder for op in ops)
        depths[holder] = 2 if nested and len(set(found)) == len(found) and len(found) > 1 else 1
    return depths


def _levels(op: Op) -> tuple[str, ...]:
    """Prefixes of the module path that end in a number: layers.0, then layers.0.blocks.1."""
    return _numbered_prefixes(op.module)


@lru_cache(1 << 16)
def _numbered_prefixes(path: str) -> tuple[str, ...]:
    parts = path.split(".")
    return tuple(".".join(parts[: index + 1]) for index, part in enumerate(parts) if is_number(part))


def container_path(level: str) -> str:
    """The path without the number at its end: layers of layers.0, block of block3."""
    return level.rstrip("0123456789").rstrip(".")


def _shape_of(op: Op) -> Hashable:
    return op.name, tuple(str(value.type) for value in op.results)


def by_module(ops: Sequence[Op], inside: int = 0) -> dict[int, str]:
    """For each operation the module that groups it: a numbered module, or one `inside` levels deeper; "" outside
    these.
    """
    depth = _container_depths(ops)
    keys = {}
    for op in ops:
        levels = _levels(op)
        key = levels[min(depth[container_path(levels[0])], len(levels)) - 1] if levels else ""
        more = op.module.removeprefix(key).strip(".").split(".")[:inside]
        keys[id(op)] = ".".join(part for part in (key, *more) if part)
    return keys


def by_number(main: Region, weights: Mapping[str, str], keys: Mapping[int, str]) -> dict[int, str]:
    """Keys for operations outside numbered modules, from numbers in names of modules and weights, if bodies repeat.

    An operation of the module `block3`, or one that reads `block3.w`, has the key `block3`. One that reads `w3` or
    `w.3` has the key `.3`: models written as functions of their weights have such bodies. Between the last such
    operation of a body and the first of the next, the cut is at the first position that the fewest values cross. A
    shared weight without a number does not end a body. Rows of one weight of all experts are no bodies.
    """
    ops = main.forward.ops
    passing, rows = _passing(main), _rows(main)
    reads = Counter(name for op in ops if not keys[id(op)] for name in op.refs() if name in weights)
    owned = {name: key for name, count in reads.items() if (key := _number_key(weights[name])) or count < _FEWEST_EQUAL}
    numbers = [""] * len(ops)
    key, first = "", 0  # `first`: the earliest position at which the body may end
    for index, op in enumerate(ops):
        path = _numbered_name(op.module)
        named = [] if any(value.name in rows for value in op.results) else [*op.refs()]
        found = [path] if path else [owned[name] for name in named if name in owned]
        if keys[id(op)] or found:
            now = "" if keys[id(op)] else found[0]
            if now != key and not keys[id(op)] and first < index:
                cut = min(range(first, index + 1), key=lambda place: passing[place])
                numbers[cut:index] = [now] * (index - cut)
            key, first = now, index + 1
        numbers[index] = key
    bodies: dict[str, list[Hashable]] = {}
    for op, number in zip(ops, numbers, strict=True):
        if number:
            bodies.setdefault(number, []).append(_shape_of(op))
    repeated = Counter((container_path(key), tuple(body)) for key, body in bodies.items())
    many = {holder for (holder, _), count in repeated.items() if count >= _FEWEST_EQUAL}
    return {
        id(op): number if number and container_path(number) in many else keys[id(op)]
        for op, number in zip(ops, numbers, strict=True)
    }


def _passing(main: Region) -> list[int]:
    """For each position between operations, the number of values that are computed before it and read after it."""
    ops = main.forward.ops
    last = {name: index for index, op in enumerate(ops) for name in op.refs()}
    last |= dict.fromkeys(main.forward.outputs, len(ops))
    change = [0] * (len(ops) + 2)
    for index, op in enumerate(ops):
        for value in op.results:
            change[index + 1] += 1
            change[max(last.get(value.name, index), index) + 1] -= 1
    return list(accumulate(change[: len(ops) + 1]))


def _number_key(weight: str) -> str:
    """The key of a weight's body, from the first number in its name; "" if it has no number."""
    number = re.search(r"\d+", weight)
    return _numbered_name(weight.rpartition(".")[0]) or (f".{number[0]}" if number else "")


def _numbered_name(path: str) -> str:
    """The path to the outermost module whose name ends in a number: layers.0, or block3."""
    found = re.match(r".*?\d(?=\.|$)", path)
    return found[0] if found else ""


def lookups_joined(main: Region, weights: Collection[str], keys: Mapping[int, str]) -> dict[int, str]:
    """Keys without modules that only look up rows of tables, if there are several: they can then exchange rows
    together.
    """
    stored = {value.name for value in main.params}
    reads: dict[str, set[bool]] = {}
    for op in main.forward.ops:
        for position, name in enumerate(op.refs()):
            if name in stored:
                table = op.name == "embedding" and position == 0 and name in weights
                reads.setdefault(keys[id(op)], set()).add(table)
    found = {key for key, tables in reads.items() if key and tables == {True}}
    return {op: "" if key in found and len(found) > 1 else key for op, key in keys.items()}


def by_weight(main: Region, weights: Mapping[str, str]) -> dict[int, str]:
    """For each operation, the last trained weight that was read before it."""
    keys, key = {}, ""
    for op in main.forward.ops:
        key = next((weights[name] for name in op.refs() if name in weights), key)
        keys[id(op)] = key
    return keys


def functions_whole(main: Region, keys: Mapping[int, str]) -> dict[int, str]:
    """Keys that put all operations of a function with its own backward pass where the function ends."""
    found, ops = dict(keys), main.forward.ops
    counters = {op.args[1][1].name for op in ops if op.name == "own_gradient" and "whole" in dict(op.attrs)}  # type: ignore[index,union-attr]
    made = main.forward.makers()
    for end, op in enumerate(ops):
        if op.name == "own_gradient":
            results, operands = ({arg.name for arg in cast("tuple[Ref, ...]", op.args[place])} for place in (0, 1))
            operands -= counters
            inside = {
                id(each)
                for each in _slice(list(op.refs()), made, operands)
                if not operands.isdisjoint(each.refs())
                or (each.name == "incoming_gradient" and not results.isdisjoint(each.refs()))
            }
            first = next((index for index, each in enumerate(ops) if id(each) in inside), end)
            found.update((id(each), found[id(op)]) for each in ops[first:end])
    return found


def _joined(body: list[ModuleSegment], params: set[str], trained: set[str]) -> list[ModuleSegment]:
    """Join each segment without parameters, of a module or after an inner one, to the segment before it.

    Operations after a module may read buffers, such as the class weights of a loss. Fills and views that both segments
    compute stand once.
    """
    joined: list[ModuleSegment] = []
    for segment in body:
        own = params if segment.key else trained
        bare = own.isdisjoint(name for op in segment.ops for name in op.refs())
        inside = joined and (segment.key or not is_number(joined[-1].key.rpartition(".")[2]))
        if inside and bare and joined[-1].key:
            once = {id(op): op for op in (*joined[-1].ops, *segment.ops)}
            joined[-1] = replace(joined[-1], ops=tuple(once.values()))
        else:
            joined.append(segment)
    return joined


def _lifted_segments(
    shared: Sequence[str],
    made: Mapping[str, Op],
    constant: set[str],
    body: list[ModuleSegment],
    order: Mapping[int, int],
) -> list[ModuleSegment]:
    """The segments of values that depend on no parameter: one for all constants, one for each other value."""
    in_order = lambda ops: tuple(sorted(ops, key=lambda op: order[id(op)]))  # noqa: E731
    values = [ModuleSegment(key="", ops=in_order(_slice([name], made, constant)), gives=(name,)) for name in shared]
    used = {name for segment in (*body, *values) for op in segment.ops for name in op.refs()} & constant
    ops = in_order(_slice(sorted(used), made, set()))
    gives = tuple(value.name for op in ops for value in op.results if value.name in used)
    return [*([ModuleSegment(key="", ops=ops, phase="setup", gives=gives)] if ops else []), *values]


def _slice(names: Sequence[str], made: Mapping[str, Op], stop: set[str]) -> list[Op]:
    """The operations that compute these values, except those that `stop` names."""
    found: dict[int, Op] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in made and name not in stop and id(made[name]) not in found:
            found[id(made[name])] = made[name]
            waiting.extend(made[name].refs())
    return list(found.values())
