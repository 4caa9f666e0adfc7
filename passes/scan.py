"""Unrolled loops over time become scans.

    select_1_row   = slice(sigmoid, 1, 0, 1, 1)         # f32[4, 1, 6]
    select_1       = reshape(select_1_row, (4, 6))      # f32[4, 6]
    mul            = mul(select_1, zeros_like)          # f32[4, 6]
    select_2_row   = slice(linear_1, 1, 0, 1, 1)        # f32[4, 1, 6]
    select_2       = reshape(select_2_row, (4, 6))      # f32[4, 6]
    add            = add(mul, select_2)                 # f32[4, 6]
    …
    add_19         = add(mul_19, select_40)             # f32[4, 6]
    …
    stack          = cat(…, 1)                          # f32[4, 20, 6]
  ->
    add_19, stack  = scan((zeros_like,), (sigmoid, linear_1), (), length=20, dims=(1, 1, 1), reverse=False)
    | input state: f32[4, 6]
    | input element: f32[4, 6]
    | input element_2: f32[4, 6]
    | mul = mul(element, state)  # f32[4, 6]
    | add = add(mul, element_2)  # f32[4, 6]
    | return add, add

Tracing runs a loop of the model step by step. A run of equal steps is found by their signatures: names, types, source
lines. It is a scan if each step reads constants, its elements of sequences, and values of the step before. Elements are
slices that move by their own width. The first steps of a loop may differ: they stay as they are. So do loops without a
sequence (layers that share weights), without a value from the step before, or with fewer steps than `LEAST`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from partc.ir.naming import unique
from partc.ir.operations import RANDOM
from partc.ir.program import SCAN, Arg, Graph, Op, Program, Ref, Region, TensorType, Value, needed
from partc.ir.scans import Scan, result_shapes, with_time
from partc.rules.rule import integers

LEAST = 8  # the fewest steps of a scan
_WITHIN = 8  # the most operations of one step with equal signatures
_FAR = 1000  # the distance that stands for a value read later than in the next step


def scan(program: Program) -> Program:
    """Replace the loops of every region."""
    return replace(program, regions=tuple(map(_scanned, program.regions)))


def _scanned(region: Region) -> Region:
    loops = _Loops(region)
    return region if not loops.found else replace(region, forward=loops.rewritten())


@dataclass(frozen=True, slots=True)
class _Place:
    """A value of a loop: the result of an operation of one step."""

    loop: int
    step: int
    op: int
    result: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements `first` to `first + width` of a tensor along a dimension."""

    source: str
    dim: int
    first: int
    width: int


@dataclass(frozen=True, slots=True)
class _Sequence:
    """Consecutive pieces of equal width, one for each step; `first` is the lowest index. `falling`: the first step
    reads the last piece.
    """

    source: str
    dim: int
    first: int
    width: int
    falling: bool


_State = tuple[int, int, str]  # (operation, result) in the step before, and the initial value


@dataclass(slots=True)
class _Loop:
    """A run of `count` equal steps of `period` operations each, which begins at the index `start`.

    Operands have the key (operation, operand) within a step. An operand that is not a value of the same step is a state
    (operation and result in the step before, and the initial value), an element of a sequence, or a constant.
    """

    start: int
    period: int
    count: int
    states: dict[tuple[int, int], _State] = field(default_factory=dict)
    sequences: dict[tuple[int, int], _Sequence] = field(default_factory=dict)
    constants: dict[tuple[int, int], str] = field(default_factory=dict)
    same: set[int] = field(default_factory=set)  # operations with the same value in every step
    moving: dict[int, _Sequence] = field(default_factory=dict)  # slices whose position moves from step to step
    made: dict[tuple[int, int, int, bool], str] = field(default_factory=dict)  # (op, result, dim, flipped) -> sequence

    @property
    def end(self) -> int:
        return self.start + self.period * self.count


class _Loops:
    """The loops of a region's forward graph."""

    def __init__(self, region: Region) -> None:
        self.graph = region.forward
        self.ops = list(region.forward.ops)
        self.types = region.forward.types()
        self.types |= {value.name: value.type for value in region.params}
        self.taken = set(self.types)
        self.makers = {value.name: (op, index) for op in self.ops for index, value in enumerate(op.results)}
        self.places: dict[str, _Place] = {}
        self.found: list[_Loop] = []
        self._find()

    # -- finding ---------------------------------------------------------------------------------

    def _find(self) -> None:
        numbers: dict[object, int] = {}
        keys = [numbers.setdefault(_signature(op), len(numbers)) for op in self.ops]
        following: list[int | None] = [None] * len(keys)
        last: dict[int, int] = {}
        for index in reversed(range(len(keys))):
            following[index] = last.get(keys[index])
            last[keys[index]] = index
        tried: dict[int, int] = {}  # period -> the end of the last run of that period
        at = done = 0
        while at < len(keys):
            then, found = following[at], None
            for _ in range(_WITHIN):
                if then is None or found is not None:
                    break
                period = then - at
                if tried.get(period, 0) <= at and at + LEAST * period <= len(keys):
                    end = then
                    while end < len(keys) and keys[end] == keys[end - period]:
                        end += 1
                    tried[period] = end
                    if end - at >= LEAST * period:
                        start = at
                        while start > done and keys[start - 1] == keys[start - 1 + period]:
                            start -= 1
                        found = self._loop(start, period, end)
                then = following[then]
            if found is None:
                at += 1
            else:
                self._add(found)
                at = done = found.end

    def _loop(self, start: int, period: int, end: int) -> _Loop | None:
        """The loop of a run. Its steps begin where the fewest values cross from one step to the next. None if it is not
        a scan.
        """
        start += self._rotation(start, period)
        for first in (start, start + period):  # the first step may have initial values of other types
            count = (end - first) // period
            if count >= LEAST:
                found = self._read(_Loop(first, period, count))
                if found is not None:
                    return found
        return None

    def _rotation(self, start: int, period: int) -> int:
        middle = start + 2 * period
        made = {value.name: at for at in range(middle, middle + period) for value in self.ops[at].results}
        last: dict[str, int] = {}
        for at in range(middle, min(middle + 3 * period, len(self.ops))):
            last.update((name, at) for name in self.ops[at].refs() if name in made)
        cost = [0] * period
        for name, until in last.items():
            for boundary in range(made[name] + 1, until + 1):
                cost[(boundary - start) % period] += 1 if boundary - made[name] <= period else _FAR
        return cost.index(min(cost))

    def _read(self, loop: _Loop) -> _Loop | None:
        """The loop with every operand classified; None if it is not a scan."""
        places = self._places(loop)
        steps = [self.ops[loop.start + i * loop.period : loop.start + (i + 1) * loop.period] for i in range(loop.count)]
        for number in range(loop.period):
            ops = [step[number] for step in steps]
            if ops[0].name in RANDOM or not self._operands(loop, number, ops, places):
                return None
        if not loop.states or not (loop.sequences or loop.moving):
            return None
        for op, result, first in loop.states.values():
            if steps[0][op].results[result].type != self.types[first]:
                return None
        return loop

    def _places(self, loop: _Loop) -> dict[str, _Place]:
        number = len(self.found)
        return {
            value.name: _Place(number, (at - loop.start) // loop.period, (at - loop.start) % loop.period, index)
            for at in range(loop.start, loop.end)
            for index, value in enumerate(self.ops[at].results)
        }

    def _operands(self, loop: _Loop, number: int, ops: Sequence[Op], places: Mapping[str, _Place]) -> bool:
        """Classify the operands of an operation, which `ops` has of every step; False if they fit no scan."""
        same = True
        for slot, names in enumerate(zip(*[list(op.refs()) for op in ops], strict=True)):
            equal = self._operand(loop, (number, slot), names, places)
            if equal is None:
                return False
            same = same and equal
        masked = {_masked(op) for op in ops}
        if len(masked) == 1:
            if same:
                loop.same.add(number)
            return True
        if ops[0].name != "slice" or not same:
            return False
        source = next(ops[0].refs())
        pieces = [_Piece(source, *numbers) for op in ops if (numbers := _moved(op)) is not None]
        sequence = self._sequence(pieces) if len(pieces) == len(ops) else None
        if sequence is not None:
            loop.moving[number] = sequence
        return sequence is not None

    def _operand(
        self, loop: _Loop, key: tuple[int, int], names: Sequence[str], places: Mapping[str, _Place]
    ) -> bool | None:
        """Record an operand, which is `names[i]` in step i. Returns whether all steps read an equal value; None if the
        operand fits no scan.
        """
        where = [places.get(name) for name in names]
        inside = [each for each in where if each is not None]
        if inside:
            if len({(each.op, each.result) for each in inside}) > 1:
                return None
            behind = [None if each is None else step - each.step for step, each in enumerate(where)]
            if set(behind) == {0}:
                return inside[0].op in loop.same
            if behind[0] is None and set(behind[1:]) == {1}:
                loop.states[key] = (inside[0].op, inside[0].result, names[0])
                return False
            return None
        if len(set(names)) == 1:
            loop.constants[key] = names[0]
            return True
        sequence = self._sequence([self._piece(name) for name in names])
        if sequence is None or names[0] not in self.types:
            return None
        loop.sequences[key] = sequence
        return False

    def _piece(self, name: str) -> _Piece | None:
        """The piece of a tensor of which a value is a reshape; None for other values."""
        op, index = self.makers.get(name, (None, 0))
        if op is not None and op.name == "reshape":
            op, index = self.makers.get(next(op.refs()), (None, 0))
        if op is None or op.name not in ("slice", "split"):
            return None
        source = next(op.refs())
        if op.name == "slice":
            numbers = _moved(op)
            return _Piece(source, *numbers) if numbers is not None else None
        sizes, dim = integers(op.args[1]), integers(op.args[2])[0]
        return _Piece(source, dim, sum(sizes[:index]), sizes[index])

    @staticmethod
    def _sequence(pieces: Sequence[_Piece | None]) -> _Sequence | None:
        known = [piece for piece in pieces if piece is not None]
        if len(known) < len(pieces) or len({(piece.source, piece.dim, piece.width) for piece in known}) > 1:
            return None
        first, last = known[0], known[-1]
        step = known[1].first - first.first
        if abs(step) != first.width or any(each.first != first.first + i * step for i, each in enumerate(known)):
            return None
        return _Sequence(first.source, first.dim, min(first.first, last.first), first.width, step < 0)

    def _add(self, loop: _Loop) -> None:
        self.places |= self._places(loop)
        self.found.append(loop)

    # -- rewriting -------------------------------------------------------------------------------

    def rewritten(self) -> Graph:
        """The graph with scans in place of the loops."""
        outside: list[Op] = []
        starts = {loop.start: number for number, loop in enumerate(self.found)}
        at = 0
        while at < len(self.ops):
            if at in starts:
                loop = self.found[starts[at]]
                outside.append(self._stand_in(loop))
                at = loop.end
            else:
                outside.extend(self._joined(self.ops[at]))
                at += 1
        outside = [self._with_made(op) for op in outside]
        live = needed(outside, self.graph.outputs)
        read = {*self.graph.outputs, *(name for op in live for name in op.refs())} & {*self.places}
        ops: list[Op] = []
        for op in live:
            ops.extend(self._scan(int(op.name), read) if op.name.isdigit() else (op,))
        return replace(self.graph, ops=tuple(ops)).without_dead()

    def _stand_in(self, loop: _Loop) -> Op:
        """A stand-in for a loop: an operation with the loop's operands and results, named by the loop's number."""
        number = self.places[self.ops[loop.start].results[0].name].loop
        ops = self.ops[loop.start : loop.end]
        results = tuple(value for op in ops for value in op.results)
        inside = {value.name for value in results}
        reads = dict.fromkeys(name for op in ops for name in op.refs() if name not in inside)
        reads |= dict.fromkeys(sequence.source for sequence in loop.sequences.values())
        return Op(name=str(number), args=tuple(map(Ref, reads)), results=results)

    def _with_made(self, op: Op) -> Op:
        """The stand-in of a loop, whose results also are the sequences that rewritten joins read."""
        if not op.name.isdigit():
            return op
        loop = self.found[int(op.name)]
        return replace(op, results=(*op.results, *(self._made_value(loop, key) for key in loop.made)))

    def _made_value(self, loop: _Loop, key: tuple[int, int, int, bool]) -> Value:
        number, result, dim, _ = key
        value = self.ops[loop.start + number].results[result]
        shape = with_time(value.type.shape, dim, loop.count)
        return Value(name=loop.made[key], type=value.type.shaped(shape))

    def _joined(self, op: Op) -> Iterator[Op]:
        """A join in which the values of all steps are replaced by the scan's result sequence."""
        if op.name != "cat" or not isinstance(op.args[0], tuple):
            yield op
            return
        parts = [ref.name for ref in op.args[0] if isinstance(ref, Ref)]
        dim = integers(op.args[1])[0]
        found: list[Arg] = []
        ops: list[Op] = []
        at = 0
        while at < len(parts):
            place, single = self._row(parts[at], dim)
            loop = self.found[place.loop] if place is not None else None
            rows = [self._row(name, dim) for name in parts[at : at + loop.count]] if loop is not None else []
            if place is None or loop is None or not self._complete(rows, loop.count):
                found.append(Ref(parts[at]))
                at += 1
                continue
            flipped = place.step != 0
            key = (place.op, place.result, dim, flipped)
            whole = loop.count == len(parts)
            wanted = op.result.name if whole and single else f"{op.result.name}_rows"
            if key not in loop.made:
                loop.made[key] = wanted if whole and single else unique(wanted, self.taken)
            name = loop.made[key]
            if not single:
                element = self.types[parts[at]]
                size = (*element.shape[:dim], loop.count * element.shape[dim], *element.shape[dim + 1 :])
                value = Value(name=unique(f"{name}_flat", self.taken), type=element.shaped(size))
                ops.append(Op(name="reshape", args=(Ref(name), size), results=(value,), source=op.source))
                name = value.name
            found.append(Ref(name))
            at += loop.count
        if found == [Ref(op.result.name)]:
            return
        yield from ops
        if len(found) == 1:
            (only,) = found
            yield replace(op, name="reshape", args=(only, op.result.type.shape))
        else:
            yield replace(op, args=(tuple(found), dim))

    def _row(self, name: str, dim: int) -> tuple[_Place | None, bool]:
        """The loop's value behind a part of a join, and whether the join adds a dimension to it."""
        if name in self.places:
            return self._varying(self.places[name]), False
        op, _ = self.makers.get(name, (None, 0))
        if op is None or op.name != "reshape" or name in self.places:
            return None, False
        source = next(op.refs())
        shape = self.types[name].shape
        fits = shape[dim] == 1 and self.types[source].shape == (*shape[:dim], *shape[dim + 1 :])
        return (self._varying(self.places[source]) if fits and source in self.places else None), True

    def _varying(self, place: _Place) -> _Place | None:
        return None if place.op in self.found[place.loop].same else place

    @staticmethod
    def _complete(rows: Sequence[tuple[_Place | None, bool]], count: int) -> bool:
        """Whether the parts are one value of all steps, in order or in reverse."""
        places = [place for place, _ in rows if place is not None]
        if len(places) < count or len({(each.loop, each.op, each.result) for each in places}) > 1:
            return False
        steps = [each.step for each in places]
        return len({single for _, single in rows}) == 1 and steps in ([*range(count)], [*reversed(range(count))])

    def _scan(self, number: int, read: set[str]) -> Iterator[Op]:
        """The operations that replace a loop. `read` are the loops' values that are read outside joins."""
        loop = self.found[number]
        step = self.ops[loop.start : loop.start + loop.period]
        source = next((op.source for op in step if op.source is not None), None)
        yield from (step[index] for index in sorted(loop.same))
        builder = _StepBuilder(loop, step, self.types)
        sequences = []
        for sequence in builder.sequences:
            name = sequence.source
            for op in self._prepared(loop, sequence, builder.reverse):
                yield replace(op, args=(Ref(name), *op.args[1:]), source=source)
                name = op.result.name
            sequences.append(name)
        rows = self._rows_read(loop, number, read, {(op, result) for op, result, _ in builder.states})
        for op_at, result in rows:
            name = unique(f"{step[op_at].results[result].name}_rows", self.taken)
            loop.made.setdefault((op_at, result, 0, builder.reverse), name)
        scan = builder.scan(sequences, tuple((op_at, result, dim) for op_at, result, dim, _ in loop.made))
        names = self._ends(loop, builder)
        backwards: dict[str, tuple[str, int]] = {}
        for (_, _, dim, flipped), name in loop.made.items():
            names.append(name if flipped == builder.reverse else unique(f"{name}_flipped", self.taken))
            if flipped != builder.reverse:
                backwards[names[-1]] = name, dim
        results = tuple(
            Value(name=name, type=type) for name, type in zip(names, builder.result_types(scan), strict=True)
        )
        yield Op(name=SCAN, args=scan.args, attrs=scan.attrs, results=results, source=source)
        for value in results:
            if value.name in backwards:
                name, dim = backwards[value.name]
                made = (replace(value, name=name),)
                yield Op(name="flip", args=(Ref(value.name), (dim,)), results=made, source=source)
        for (op_at, result), values in rows.items():
            for name in values:
                yield from self._row_of(loop, loop.made[op_at, result, 0, builder.reverse], name, builder.reverse)

    def _ends(self, loop: _Loop, builder: _StepBuilder) -> list[str]:
        """The names of the final states, from the last step."""
        last = self.ops[loop.end - loop.period : loop.end]
        names: list[str] = []
        for op, result, _ in builder.states:
            name = last[op].results[result].name
            names.append(name if name not in names else unique(f"{name}_too", self.taken))
        return names

    def _rows_read(
        self, loop: _Loop, number: int, read: set[str], states: set[tuple[int, int]]
    ) -> dict[tuple[int, int], list[str]]:
        """The values of single steps that are read outside the loop, by (operation, result), except final states."""
        found: dict[tuple[int, int], list[str]] = {}
        for name in sorted(read):
            place = self.places[name]
            end = place.step == loop.count - 1 and (place.op, place.result) in states
            if place.loop == number and place.op not in loop.same and not end:
                found.setdefault((place.op, place.result), []).append(name)
        return found

    def _row_of(self, loop: _Loop, rows: str, name: str, reverse: bool) -> Iterator[Op]:
        """The operations that take the value of one step from a result sequence."""
        at, type = self.places[name].step, self.types[name]
        at = loop.count - 1 - at if reverse else at
        row = Value(name=unique(f"{name}_row", self.taken), type=type.shaped((1, *type.shape)))
        yield Op(name="slice", args=(Ref(rows), 0, at, at + 1, 1), results=(row,))
        yield Op(name="reshape", args=(Ref(row.name), type.shape), results=(Value(name=name, type=type),))

    def _prepared(self, loop: _Loop, sequence: _Sequence, reverse: bool) -> Iterator[Op]:
        """A chain of operations that gives a sequence's tensor one element for each step."""
        type, dim, width = self.types[sequence.source], sequence.dim, sequence.width
        stem, size = sequence.source, loop.count * width

        def made(shape: tuple[int, ...]) -> tuple[Value, ...]:
            return (Value(name=unique(f"{stem}_steps", self.taken), type=type.shaped(shape)),)

        shape = (*type.shape[:dim], size, *type.shape[dim + 1 :])
        if type.shape != shape:
            yield Op(name="slice", args=(Ref(""), dim, sequence.first, sequence.first + size, 1), results=made(shape))
        if width > 1:
            shape = (*shape[:dim], loop.count, width, *shape[dim + 1 :])
            yield Op(name="reshape", args=(Ref(""), shape), results=made(shape))
        if sequence.falling != reverse:
            yield Op(name="flip", args=(Ref(""), (dim,)), results=made(shape))


class _StepBuilder:
    """The graph of one step, from the first step's operations."""

    def __init__(self, loop: _Loop, step: Sequence[Op], types: Mapping[str, TensorType]) -> None:
        self.loop = loop
        self.step = step
        self.types = types
        self.states = tuple(dict.fromkeys(loop.states.values()))
        self.sequences = tuple(dict.fromkeys((*loop.moving.values(), *loop.sequences.values())))
        self.reverse = all(sequence.falling for sequence in self.sequences)
        self.taken = {value.name for op in step for value in op.results}

    def result_types(self, scan: Scan) -> Iterator[TensorType]:
        known = scan.step.definitions()
        for name, shape in zip(scan.step.outputs, result_shapes(scan), strict=True):
            yield known[name].type.shaped(shape)

    def scan(self, sequences: Sequence[str], made: Sequence[tuple[int, int, int]]) -> Scan:
        """The scan that reads `sequences` and returns sequences of the results in `made`: (operation, result,
        dimension).
        """
        states = {
            state: Value(
                name=unique(f"{self.step[state[0]].results[state[1]].name}_before", self.taken),
                type=self.types[state[2]],
            )
            for state in self.states
        }
        elements = {
            sequence: Value(name=unique(f"{sequence.source}_t", self.taken), type=self._element(sequence))
            for sequence in self.sequences
        }
        constants = self._constants()
        known = {name: Value(name=unique(name, self.taken), type=self.types[name]) for name in constants}
        ops, same = self._operations(states, elements, known)
        wanted = (*((op, result) for op, result, _ in self.states), *((op, result) for op, result, _ in made))
        ends = (self.step[op].results[result].name for op, result in wanted)
        graph = Graph(
            inputs=(*states.values(), *elements.values(), *known.values()),
            ops=tuple(ops),
            outputs=tuple(same.get(name, name) for name in ends),
        )
        scan = Scan(
            starts=tuple(first for _, _, first in self.states),
            sequences=tuple(sequences),
            constants=constants,
            length=self.loop.count,
            dims=(*(sequence.dim for sequence in self.sequences), *(dim for _, _, dim in made)),
            reverse=self.reverse,
            step=graph.without_dead(),
        )
        return replace(scan, step=_plainly_named(scan))

    def _constants(self) -> tuple[str, ...]:
        """The values that every step reads."""
        loop = self.loop
        fixed = {value.name for index in loop.same for value in self.step[index].results}
        read = (
            name
            for number, op in enumerate(self.step)
            if number not in loop.same and number not in loop.moving
            for slot, name in enumerate(op.refs())
            if name in fixed or (number, slot) in loop.constants
        )
        return tuple(dict.fromkeys(read))

    def _operations(
        self, states: Mapping[_State, Value], elements: Mapping[_Sequence, Value], constants: Mapping[str, Value]
    ) -> tuple[list[Op], dict[str, str]]:
        """The operations of one step, and the names of values that stand for others."""
        loop, ops, same = self.loop, list[Op](), dict[str, str]()
        for number, op in enumerate(self.step):
            if number in loop.same:
                continue
            if number in loop.moving:
                ops.extend(self._shaped(elements[loop.moving[number]], op.result, same, op))
                continue
            names = []
            for slot, name in enumerate(op.refs()):
                key = (number, slot)
                if key in loop.states:
                    names.append(states[loop.states[key]].name)
                elif key in loop.sequences:
                    element = elements[loop.sequences[key]]
                    value = Value(name=unique(f"{element.name}_shaped", self.taken), type=self.types[name])
                    ops.extend(self._shaped(element, value, same, op))
                    names.append(same.get(value.name, value.name))
                else:
                    names.append(constants[name].name if name in constants else same.get(name, name))
            op = op.reading(names)
            if op.name == "reshape" and (alias := self._alias(op, ops, [*elements.values()])):
                same[op.result.name] = alias
            else:
                ops.append(op)
        return ops, same

    def _element(self, sequence: _Sequence) -> TensorType:
        type, dim = self.types[sequence.source], sequence.dim
        wide = () if sequence.width == 1 else (sequence.width,)
        return type.shaped((*type.shape[:dim], *wide, *type.shape[dim + 1 :]))

    @staticmethod
    def _shaped(element: Value, wanted: Value, same: dict[str, str], op: Op) -> Iterator[Op]:
        """The element in the shape of the slice that it replaces."""
        if element.type.shape == wanted.type.shape:
            same[wanted.name] = element.name
        else:
            yield Op(name="reshape", args=(Ref(element.name), wanted.type.shape), results=(wanted,), source=op.source)

    @staticmethod
    def _alias(op: Op, ops: Sequence[Op], elements: Sequence[Value]) -> str:
        """The element that a reshape restores; "" for other operations."""
        (name,) = op.refs()
        maker = next((each for each in reversed(ops) if any(value.name == name for value in each.results)), None)
        if maker is None or maker.name != "reshape":
            return ""
        (first,) = maker.refs()
        return next((v.name for v in elements if v.name == first and v.type == op.result.type), "")


def _plainly_named(scan: Scan) -> Graph:
    """The scan with names in its step that do not depend on the module, so that equal steps are equal."""
    taken: set[str] = set()
    groups = {"state": scan.states, "element": scan.elements, "constant": scan.fixed}
    names = {value.name: unique(kind, taken) for kind, values in groups.items() for value in values}
    names |= {value.name: unique(op.name, taken) for op in scan.step.ops for value in op.results}
    return Graph(
        inputs=tuple(replace(value, name=names[value.name]) for value in scan.step.inputs),
        ops=tuple(replace(op.renamed(names), source=None) for op in scan.step.ops),
        outputs=tuple(names[name] for name in scan.step.outputs),
    )


def _moved(op: Op) -> tuple[int, int, int] | None:
    """The dimension, start and width of a slice of consecutive elements; None for other operations."""
    numbers = [arg for arg in op.args[1:] if isinstance(arg, int)]
    if len(numbers) != 4 or numbers[3] != 1:
        return None
    dim, first, last, _ = numbers
    return dim, first, last - first


def _signature(op: Op) -> object:
    place = (op.source.file, op.source.line) if op.source else None
    args = () if op.name == "slice" else _masked(op)
    return op.name, args, op.types, sum(1 for _ in op.refs()), place


def _masked(op: Op) -> object:
    """The arguments of an operation without the names of values."""

    def masked(arg: Arg) -> object:
        if isinstance(arg, tuple):
            return tuple(map(masked, arg))
        return Ref("") if isinstance(arg, Ref) else arg

    return tuple(map(masked, op.args)), tuple((key, masked(arg)) for key, arg in op.attrs)
