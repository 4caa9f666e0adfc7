"""Find the model's repeated bodies: each distinct one becomes a region, each use a call.

    region main phase microbatch:
      …
      embedding        = embedding(…embed_weight, ids)
      …
      linear_1_product = linear(gelu, …blocks_0_down_weight)
      …
      linear_3_product = linear(gelu_1, …blocks_1_down_weight)
      …
  ->
    call embed    = embed(ids; embed.weight) -> embed
    call blocks.0 = block(embed; blocks.0.…) -> out
    call blocks.1 = block(out; blocks.1.…) -> out_2
    call head     = head(out_2, labels, count; head.weight) -> loss
    region block phase microbatch:
      …
      down_product = linear(gelu, down.weight)
      …

Operations are grouped by the numbered module that ran them, or else by the number in the name of their weight. Groups
that are equal operation by operation share a region. If a pipeline has more stages than there are groups, the groups
are cut further, at inner modules and finally at every weight. Values that depend on no parameter leave the bodies:
constants are computed once, in a region of their own; a value that depends on inputs only (a mask, a count) has a
region of its own. Equal modules that the trace has left out get calls like that of the third module of their row.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from partc.ir.gradients import input_only
from partc.ir.naming import is_number, unique, unreserved
from partc.ir.operations import KEEPING, RANDOM
from partc.ir.program import Arg, Call, Graph, Program, Ref, Region, Value
from partc.ir.repetitions import Unfolding, UnlikeError, like_templates
from partc.passes.outline.segments import (
    ModuleSegment,
    by_module,
    by_number,
    by_weight,
    container_path,
    functions_whole,
    lookups_joined,
    segments,
)
from partc.passes.outline.updates import move_updates_ahead, with_old_values
from partc.passes.outline.value_names import name_values
from partc.quoting import identifier


def outline(program: Program, *, places: tuple[int, ...] = ()) -> Program:
    """Split the single region of a normalized program into calls, if possible into one per stage in `places`."""
    main = program.regions[0]
    rows = tuple(Unfolding(program, repetition) for repetition in program.repetitions)
    changing = {buffer for buffer, _ in program.updates}
    weights = {v.name: name for v, name in _stored(program) if program.parameter(name).trainable or name in changing}
    trained = set(weights)
    deepest = max((op.module.count(".") + 1 for op in main.forward.ops), default=0)
    modules = lookups_joined(main, weights, by_number(main, weights, by_module(main.forward.ops)))

    def linked(keys: Mapping[int, str]) -> Program:
        whole = functions_whole(main, keys)
        return Linker(program, main, _segments(program, main, trained, whole, len(places) > 1), rows).run()

    found = linked(modules)
    depth = 0
    while _stageable(found) < len(places) and depth <= deepest:
        depth += 1
        found = linked(by_module(main.forward.ops, depth) if depth <= deepest else by_weight(main, weights))
    return found


def _segments(
    program: Program, main: Region, trained: set[str], keys: Mapping[int, str], cut: bool
) -> list[ModuleSegment]:
    """The segments, with updates of buffers in their places; `cut`: a pipeline will be cut between them."""
    lifted, body = segments(main, trained, keys)
    written = _written(program, main)
    if cut:
        body = move_updates_ahead(body, main, written)
    return [*lifted, *with_old_values(body, main, written)]


def _written(program: Program, main: Region) -> dict[str, str]:
    """Map the value that each update stores to the parameter of main that it changes."""
    made = dict(zip(program.calls[0].results, main.forward.outputs, strict=True))
    params = {name: value.name for value, name in _stored(program)}
    return {made[value]: params[buffer] for buffer, value in program.updates}


def _stageable(program: Program) -> int:
    return len(program.calls) - len(input_only(program))


def _stored(program: Program) -> tuple[tuple[Value, str], ...]:
    return tuple(zip(program.regions[0].params, program.calls[0].params, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Link:
    """A segment's call, in the region's names: the body's key, its parameters by name, and its values."""

    key: str
    region: Region
    params: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    random: int | None


class Linker:
    """Turns segments into regions and calls; equal segments share a region."""

    def __init__(
        self, program: Program, main: Region, segments: list[ModuleSegment], rows: Sequence[Unfolding]
    ) -> None:
        self.program = program
        self.main = main
        self.segments = segments
        self.stored = {value.name: name for value, name in _stored(program)}
        self.trained = {parameter.name: parameter.trainable for parameter in program.parameters}
        self.written = _written(program, main)
        self.types = main.forward.types()
        made = (value for segment in segments for op in segment.ops for value in op.results)
        self.types.update((value.name, value.type) for value in (*main.params, *made))
        self.regions: dict[Hashable, Region] = {}
        self.region_names: set[str] = set()
        self.call_names: set[str] = set()
        given = zip(main.forward.inputs, program.calls[0].args, strict=True)
        self.values: dict[str, str] = {value.name: name for value, name in given}
        returned = zip(main.forward.outputs, program.calls[0].results, strict=True)
        self.returned = {old: name for old, name in reversed(list(returned)) if name in program.returned}
        self.taken = set(program.inputs) | set(self.returned.values())
        self.calls: list[Call] = []
        self.rows = rows
        self.copies: dict[str, list[str]] = {}  # value of a third unit -> the corresponding values of left-out units
        self.templates: dict[str, str] = {}  # parameter of a left-out unit -> the third unit's

    def run(self) -> Program:
        readers = self._readers()
        before: dict[int, list[_Link]] = {}
        for (row, place), run in groupby(enumerate(self.segments), key=lambda item: self._place(item[1])):
            links = [self.link(index, segment, readers, last=place < 0) for index, segment in run]
            if row is not None and place == 1:
                before.setdefault(id(row), []).extend(links)
            if row is not None and place == 2:
                alike = before.pop(id(row), [])
                if [link.region.name for link in alike] != [link.region.name for link in links]:
                    raise UnlikeError(row.repetition)
                self._repeat(row, links)
        values = [*self.program.inputs, *(name for call in self.calls for name in call.results)]
        typed = {new: self.types[old] for old, new in self.values.items()}
        typed |= {new: self.types[old] for old, copies in self.copies.items() for new in copies}
        given = dict(zip(self.program.calls[0].results, self.main.forward.outputs, strict=True))
        updates = tuple(
            each for buffer, value in self.program.updates for each in self.updates_of(buffer, given[value])
        )
        return replace(
            self.program,
            results=tuple((path, self.values[given[value]]) for path, value in self.program.results),
            regions=tuple(self.regions.values()),
            calls=tuple(self.calls),
            updates=updates,
            values=tuple(Value(name=name, type=typed[name]) for name in dict.fromkeys(values)),
            parameters=like_templates(self.program, self.templates),
            draws=self.program.draws + sum(row.draws * len(row.left_out) for row in self.rows),
            repetitions=(),
        )

    def updates_of(self, buffer: str, value: str) -> Iterator[tuple[str, str]]:
        """The update of a parameter, and those of its counterparts in left-out units."""
        yield buffer, self.values[value]
        counterparts = (new for new, old in self.templates.items() if old == buffer)
        yield from zip(counterparts, self.copies.get(value, ()), strict=True)

    def _readers(self) -> dict[str, set[int]]:
        """For each value, the segments that read it; the program's result is read after the last segment."""
        found: dict[str, set[int]] = {name: {len(self.segments)} for name in self.main.forward.outputs}
        for index, segment in enumerate(self.segments):
            made = {value.name for op in segment.ops for value in op.results}
            for name in {name for op in segment.ops for name in op.refs()} - made:
                found.setdefault(name, set()).add(index)
        return found

    def _place(self, segment: ModuleSegment) -> tuple[Unfolding | None, int]:
        """The row of equal modules to which a segment belongs, and its unit: the second (1), third (2) or last (-1)."""
        for row in self.rows:
            for op in segment.ops:
                if id(op) in row.places:
                    return row, row.places[id(op)]
        return None, 0

    def link(self, index: int, segment: ModuleSegment, readers: Mapping[str, set[int]], *, last: bool) -> _Link:
        """Add a segment's call, and its region if it is the first of its kind; `last` segments end rows of modules."""
        made = [value.name for op in segment.ops for value in op.results]
        inside = set(made)
        read = dict.fromkeys(name for op in segment.ops for name in op.refs() if name not in inside)
        params = [name for name in read if name in self.stored]
        params += [buffer for value, buffer in self.written.items() if value in inside and buffer not in params]
        inputs = [name for name in read if name not in self.stored]
        outputs = [name for name in made if readers.get(name, set()) - {index}]
        if segment.gives is not None:
            outputs = [name for name in outputs if name in segment.gives]
        elif lifted := set(self.values).intersection(outputs):
            outputs = [name for name in outputs if name not in lifted]
        args = {name: self.copies[name][-1] if last and name in self.copies else self.values[name] for name in inputs}
        locals_: set[str] = set()
        relative = {name: unique(_relative(self.stored[name], segment.key), locals_) for name in params}
        segment, random = _counted(segment)
        signature = self._signature(segment, inputs, params, relative, outputs)
        region = self.regions.get(signature)
        if region is None:
            region = self._region(index, segment, args, params, relative, outputs)
            self.regions[signature] = region
        order = {value.name: position for position, value in enumerate(region.params)}
        link = _Link(
            key=segment.key,
            region=region,
            params=tuple(self.stored[name] for name in sorted(params, key=lambda name: order[relative[name]])),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            random=random,
        )
        self.values |= zip(outputs, self._call(link, args.values()), strict=True)
        return link

    def _call(self, link: _Link, args: Iterable[str], draws: int = 0) -> tuple[str, ...]:
        """Add a call, whose random operations follow `draws` ones of left-out units; returns its results' names."""
        bare = link.key.startswith(".")
        name = unique(link.region.name + link.key if bare else link.key or link.region.name, self.call_names)
        results = tuple(map(self._value_name, link.outputs, link.region.forward.outputs))
        self.calls.append(
            Call(
                name=name,
                region=link.region.name,
                params=link.params,
                args=tuple(args),
                results=results,
                random=None if link.random is None else draws + self._number(link.random),
            )
        )
        return results

    def _number(self, random: int) -> int:
        """The number of a random operation, counting those of the left-out units before it."""
        before = (row for row in self.rows if row.draws and row.last_draw < random)
        return random + sum(row.draws * len(row.left_out) for row in before)

    def _repeat(self, row: Unfolding, links: Sequence[_Link]) -> None:
        """Add the calls of the left-out units after those of the third unit."""
        made = set(row.made)
        for number, paths in enumerate(row.left_out):

            def value(name: str, number: int = number) -> str:
                if name in made:
                    return self.copies[name][number]
                after = row.ahead.get(name, name)  # a value of the previous unit
                return self.copies[after][number - 1] if number and after != name else self.values[after]

            for link in links:
                params = tuple(row.moved(name, paths) for name in link.params)
                self.templates |= {new: old for new, old in zip(params, link.params, strict=True) if new != old}
                moved = replace(link, key=row.moved(link.key, paths), params=params)
                results = self._call(moved, map(value, link.inputs), (number + 1) * row.draws)
                for old, new in zip(link.outputs, results, strict=True):
                    self.copies.setdefault(old, []).append(new)

    def _value_name(self, old: str, local: str) -> str:
        if old in self.returned:
            return self.returned[old]
        return unique(identifier(local), self.taken)

    def _signature(
        self,
        segment: ModuleSegment,
        inputs: list[str],
        params: list[str],
        relative: Mapping[str, str],
        outputs: list[str],
    ) -> Hashable:
        """A key that is equal for segments that can share a region: everything but the names of values."""
        names: dict[str, Hashable] = {name: ("in", i) for i, name in enumerate(inputs)}
        names.update((name, ("param", relative[name])) for name in params)
        ops = []
        for op in segment.ops:
            canonical = (_canonical(op.args, names), tuple((key, _canonical((arg,), names)) for key, arg in op.attrs))
            ops.append((op.name, canonical, op.types))
            for value in op.results:
                names[value.name] = len(names)
        types = tuple((names[name], self.types[name]) for name in (*inputs, *params))
        trained = tuple(self.trained[self.stored[name]] for name in params)
        return segment.phase, tuple(ops), types, trained, tuple(names[name] for name in outputs)

    def _region(
        self,
        index: int,
        segment: ModuleSegment,
        inputs: Mapping[str, str],
        params: list[str],
        relative: Mapping[str, str],
        outputs: list[str],
    ) -> Region:
        taken = set(relative.values())
        names = {name: relative[name] for name in params}
        for name, given in inputs.items():
            names[name] = unique(self._input_name(given), taken)
        names.update(name_values(segment.ops, segment.key, taken | set(names.values())))
        for result in self.returned:
            if result in outputs:
                others = {new for old, new in names.items() if old != result}
                names[result] = unique(self.returned[result], taken | others)
        return Region(
            name=unique(self._region_name(index, segment, params, outputs), self.region_names),
            params=tuple(Value(name=relative[name], type=self.types[name]) for name in params),
            forward=Graph(
                inputs=tuple(Value(name=names[name], type=self.types[name]) for name in inputs),
                ops=tuple(op.renamed(names) for op in segment.ops),
                outputs=tuple(names[name] for name in outputs),
            ),
            phase=segment.phase,
        )

    def _input_name(self, local: str) -> str:
        """Model inputs and lifted values keep their names; a value that flows from body to body is `x`."""
        if local in self.program.inputs:
            return unreserved(identifier(local))
        maker = next(call for call in self.calls if local in call.results)
        region = next(region for region in self.regions.values() if region.name == maker.region)
        flows = bool(region.params) and region.phase == "microbatch"
        return "x" if flows else re.sub(r"_\d+$", "", local)

    def _region_name(self, index: int, segment: ModuleSegment, params: list[str], outputs: list[str]) -> str:
        if segment.phase == "setup":
            return "rotary" if self._turns(outputs) else "constants"
        if segment.key:
            own = segment.key.rpartition(".")[2]
            if not is_number(own) and any(map(is_number, segment.key.split("."))):
                return identifier(own)
            word = container_path(segment.key).rpartition(".")[2]
            return _singular(word) if len(word) > 1 else "block"
        if not params:
            names = name_values(segment.ops, "", ())
            return f"make_{list(names.values())[-1]}"
        first = min(i for i, s in enumerate(self.segments) if s.phase == "microbatch" and self._has_params(s))
        last = max(i for i, s in enumerate(self.segments) if s.phase == "microbatch")
        if first == last:
            return identifier(self.program.name)
        return "embed" if index == first else "head" if index == last else "bridge"

    def _turns(self, names: Sequence[str]) -> bool:
        """Whether only rotary embeddings read the values, directly or through views."""
        found = set(names)
        for op in (op for segment in self.segments for op in segment.ops):
            if not found.isdisjoint(op.refs()):
                if op.name != "rotary" and op.name not in KEEPING:
                    return False
                found.update(value.name for value in op.results if op.name in KEEPING)
        return True

    def _has_params(self, segment: ModuleSegment) -> bool:
        return any(name in self.stored for op in segment.ops for name in op.refs())


def _counted(segment: ModuleSegment) -> tuple[ModuleSegment, int | None]:
    """The segment with its random operations numbered from 0, and the original number of the first."""
    numbers = [op.args[-1] for op in segment.ops if op.name in RANDOM]
    first = min((number for number in numbers if isinstance(number, int)), default=None)
    if first is None:
        return segment, None
    ops = tuple(
        replace(op, args=(*op.args[:-1], op.args[-1] - first))  # type: ignore[operator]
        if op.name in RANDOM
        else op
        for op in segment.ops
    )
    return replace(segment, ops=ops), first


def _relative(name: str, key: str) -> str:
    """A parameter's name in a body: without the body's path, or without the number if the body has no path."""
    if key.startswith("."):
        return unreserved(re.sub(rf"\.?(?<!\d){key[1:]}(?!\d)", "", name, count=1))
    return unreserved(name.removeprefix(f"{key}.") if key else name)


def _singular(word: str) -> str:
    word = identifier(word)
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def _canonical(args: tuple[Arg, ...], names: Mapping[str, Hashable]) -> Hashable:
    return tuple(
        names[arg.name]
        if isinstance(arg, Ref)
        else ("tuple", _canonical(arg, names))
        if isinstance(arg, tuple)
        else (type(arg).__name__, arg)
        for arg in args
    )
