"""Chains of equal modules, of which a trace has only four.

    repeat layers.0, layers.1, layers.2, layers.3, …, layers.125
    x_0 = …(ids)  x_1 = …(x_0)  x_2 = …(x_1)  x_125 = …(x_2)
  ->
    x_0 = …(ids)  x_1 = …(x_0)  x_2 = …(x_1)  x_3 = …(x_2)  …  x_125 = …(x_124)

A unit reads its own values and weights, values of the unit before it, and values that all units read alike. The passes
before `outline` see the first three units and the last one, for any depth. `outline` adds the calls of the others;
`restore_units` adds their operations, for passes that find the units unlike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from partc.ir.naming import unique
from partc.ir.operations import RANDOM
from partc.ir.program import Arg, Op, Parameter, Program, Ref, Repetition

_UPDATING = frozenset({"batch_norm", "instance_norm"})  # of running statistics
KEPT = 3  # units at the beginning whose operations a trace has; the last unit is the fourth


class UnlikeError(Exception):
    """Units of a repetition are not alike."""

    def __init__(self, repetition: Repetition) -> None:
        super().__init__(repetition)
        self.repetition = repetition


def restore_units(program: Program) -> Program:
    """The program with the operations of all units. Raises UnlikeError."""
    for repetition in program.repetitions:
        program = Unfolding(program, repetition).run()
    return replace(program, repetitions=())


def check(program: Program) -> None:
    """Raise UnlikeError unless the units of every repetition of a traced program are alike and change no buffer."""
    for repetition in program.repetitions:
        if Unfolding(program, repetition).changes_buffers():
            raise UnlikeError(repetition)


@dataclass(frozen=True)
class _Unit:
    """The operations of a unit, with their indices in the region; constants come first."""

    paths: tuple[str, ...]
    ops: Mapping[int, Op]

    @cached_property
    def made(self) -> tuple[str, ...]:
        return tuple(value.name for op in self.ops.values() for value in op.results)

    @cached_property
    def draws(self) -> tuple[int, ...]:
        return tuple(number for op in self.ops.values() if (number := _number(op)) is not None)

    def relative(self, name: str) -> tuple[int, str] | None:
        """The module of the unit that has a weight or runs an operation, and the name below it."""
        for index, path in enumerate(self.paths):
            if name == path or name.startswith(f"{path}."):
                return index, name[len(path) :]
        return None

    def moved(self, name: str, paths: Sequence[str]) -> str:
        """The name that corresponds to `name` in the unit with these paths."""
        found = self.relative(name)
        return name if found is None else paths[found[0]] + found[1]


class Unfolding:
    """The copies of the third unit. Raises UnlikeError if units are not alike."""

    def __init__(self, program: Program, repetition: Repetition) -> None:
        self._program, self.repetition = program, repetition
        self.left_out = repetition.units[KEPT:-1]
        (self._main,), (self._call,) = program.regions, program.calls
        self._params = {value.name: value for value in self._main.params}
        self._stored = dict(zip(self._params, self._call.params, strict=True))
        self._ops = self._main.forward.ops
        self._readers = self._main.forward.readers()
        units = repetition.units
        self._before, self._like, self._last = map(self._unit, (units[KEPT - 2], units[KEPT - 1], units[-1]))
        self.ahead = self._pairs(self._before, self._like, {})  # values of a unit -> those of the next one
        self._pairs(self._like, self._last, self.ahead)
        inside = {id(op) for unit in (self._like, self._last) for op in unit.ops.values()}
        read = {name for name in self._like.made for op in self._readers.get(name, ()) if id(op) not in inside}
        if read or not read.isdisjoint(self._main.forward.outputs) or not self._drawn_alike():
            raise UnlikeError(repetition)

    def _unit(self, paths: tuple[str, ...]) -> _Unit:
        """The operations that these modules run, and constants that only they read."""
        unit = _Unit(paths, {})
        found = {index: op for index, op in enumerate(self._ops) if unit.relative(op.module) is not None}
        inside = {id(op) for op in found.values()}
        for index, op in enumerate(self._ops):
            readers = [reader for value in op.results for reader in self._readers.get(value.name, ())]
            if not op.module and not [*op.refs()] and readers and inside.issuperset(map(id, readers)):
                found[index] = op
        return _Unit(paths, dict(sorted(found.items(), key=lambda item: (bool(item[1].module), item[0]))))

    def _pairs(self, one: _Unit, other: _Unit, ahead: Mapping[str, str]) -> dict[str, str]:
        """Map the values of one unit to those of the next, which reads values of the first in place of those in
        `ahead`.

        Raises UnlikeError if they do not compute the same.
        """
        pairs = dict(zip(one.made, other.made, strict=False))
        numbered = bool(self._program.draws)
        alike = len(one.ops) == len(other.ops)
        for a, b in zip(one.ops.values(), other.ops.values(), strict=False):
            alike = alike and _shape(a, numbered) == _shape(b, numbered)
            alike = alike and b.module == one.moved(a.module, other.paths)
            for x, y in zip(a.refs(), b.refs(), strict=False):
                if x in pairs:
                    same = pairs[x] == y
                elif x in self._stored:
                    same = y in self._stored and self._stored[y] == one.moved(self._stored[x], other.paths)
                else:
                    same = ahead.get(x, x) == y or (not ahead and y in pairs)
                alike = alike and same
        if not alike or not one.ops:
            raise UnlikeError(self.repetition)
        return pairs

    def _drawn_alike(self) -> bool:
        """Whether random operations are numbered consecutively from unit to unit."""
        count = len(self._like.draws) if self._program.draws else 0
        pairs = zip(self._like.draws, self._last.draws, strict=True)
        return not count or all(later - number == count for number, later in pairs)

    def changes_buffers(self) -> bool:
        """Whether an operation of the trace writes a parameter or buffer."""
        writing = (op for op in self._like.ops.values() if op.name.endswith("_") or op.name in _UPDATING)
        return any(name in self._stored for op in writing for name in op.refs())

    @cached_property
    def places(self) -> Mapping[int, int]:
        """For each operation, by its id: the unit that contains it, the second (1), third (2) or last one (-1)."""
        units = {1: self._before, 2: self._like, -1: self._last}
        return {id(op): place for place, unit in units.items() for op in unit.ops.values()}

    @property
    def made(self) -> tuple[str, ...]:
        """The values of the third unit."""
        return self._like.made

    @property
    def draws(self) -> int:
        """The number of random operations of a unit."""
        return len(self._like.draws) if self._program.draws else 0

    @property
    def last_draw(self) -> int:
        """The number of the third unit's last random operation."""
        return max(self._like.draws, default=-1)

    def moved(self, name: str, paths: Sequence[str]) -> str:
        """The name, in the unit with these paths, of the counterpart of a module or weight of the third unit."""
        return self._like.moved(name, paths)

    def run(self) -> Program:
        like, units, draws = self._like, self.left_out, self.draws
        taken = {*self._main.forward.definitions(), *self._params}
        values = {stored: name for name, stored in self._stored.items()}
        read = [name for op in like.ops.values() for name in op.refs() if name in self._stored]
        templates: dict[str, str] = {}  # parameters of the copies -> those of the third unit
        copies: list[Op] = []
        given = dict(zip(self._call.results, self._main.forward.outputs, strict=True))
        reached = [(name, given[value]) for name, value in self._program.reached if like.relative(name) is not None]
        counted: list[tuple[str, str]] = []  # parameters of the copies, and the values that count them
        previous = {name: name for name in like.made}
        for number, paths in enumerate(units, start=1):
            names = {name: previous[later] for name, later in self.ahead.items()}
            for name in dict.fromkeys(read):
                stored = like.moved(self._stored[name], paths)
                if stored not in values:
                    values[stored] = unique(f"{name}_{number}", taken)
                    templates[stored] = self._stored[name]
                names[name] = values[stored]
            previous = {name: unique(f"{name}_{number}", taken) for name in like.made}
            counted += [(like.moved(name, paths), previous[value]) for name, value in reached]
            for op in like.ops.values():
                copy = _drawn(op.renamed(names | previous), number * draws)
                source = copy.source and replace(copy.source, module=like.moved(copy.source.module, paths))
                copies.append(replace(copy, source=source))
        program = self._with_copies(copies, values, templates, previous, draws * len(units))
        return _with_counts(program, counted)

    def _with_copies(
        self,
        copies: Sequence[Op],
        values: Mapping[str, str],
        templates: Mapping[str, str],
        end: Mapping[str, str],
        draws: int,
    ) -> Program:
        """The program with the copies behind the third unit, and with the last unit behind the last copy."""
        program, like = self._program, self._like
        after = self.last_draw if draws else None
        ops = [op.renamed(end) if index in self._last.ops else op for index, op in enumerate(self._ops)]
        if after is not None:
            ops = [_drawn(op, draws) if (_number(op) or 0) > after else op for op in ops]
        place = 1 + max(like.ops)
        parameters = like_templates(program, templates)
        params = [
            replace(self._params[values[templates.get(item.name, item.name)]], name=values[item.name])
            for item in parameters
            if item.name in values
        ]
        stored = {name: parameter for parameter, name in values.items()}
        forward = replace(self._main.forward, ops=(*ops[:place], *copies, *ops[place:]))
        return replace(
            program,
            regions=(replace(self._main, params=tuple(params), forward=forward),),
            calls=(replace(self._call, params=tuple(stored[value.name] for value in params)),),
            parameters=parameters,
            draws=program.draws + draws,
        )


def like_templates(program: Program, templates: Mapping[str, str]) -> tuple[Parameter, ...]:
    """The parameters of the program, those of copies with the facts of their templates."""
    return tuple(
        program.parameter(templates[item.name]).replaced(name=item.name, aliases=item.aliases, counts=item.counts)
        if item.name in templates
        else item
        for item in program.parameters
    )


def _with_counts(program: Program, counted: Sequence[tuple[str, str]]) -> Program:
    """The program with these parameters and the values that count them."""
    (main,), (call,) = program.regions, program.calls
    made = main.forward.definitions()
    results = {value: f"{value}_result" for _, value in counted}
    return replace(
        program,
        reached=(*program.reached, *((name, results[value]) for name, value in counted)),
        values=(*program.values, *(replace(made[value], name=name) for value, name in results.items())),
        calls=(replace(call, results=(*call.results, *results.values())),),
        regions=(replace(main, forward=replace(main.forward, outputs=(*main.forward.outputs, *results))),),
    )


def _number(op: Op) -> int | None:
    """The number of a random operation in its program."""
    number = op.args[-1] if op.name in RANDOM and op.args else None
    return number if isinstance(number, int) and not isinstance(number, bool) else None


def _drawn(op: Op, more: int) -> Op:
    number = _number(op) if more else None
    return op if number is None else replace(op, args=(*op.args[:-1], number + more))


def _shape(op: Op, numbered: bool) -> tuple[object, ...]:
    """An operation without the names of its values, and without its number if it is random."""
    args = op.args[:-1] if numbered and _number(op) is not None else op.args
    return (op.name, _blank(args), tuple((key, _blank((arg,))) for key, arg in op.attrs), op.types, op.body)


def _blank(args: tuple[Arg, ...]) -> tuple[object, ...]:
    return tuple(
        Ref if isinstance(arg, Ref) else _blank(arg) if isinstance(arg, tuple) else (type(arg), arg) for arg in args
    )
