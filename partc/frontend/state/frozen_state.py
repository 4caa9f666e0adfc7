"""State that a trace would silently freeze: changes outside the graph, and random draws, in forward.

    def forward(self, x):
        self.calls += 1                       # harmless: nothing that is traced reads it
        return x * self.calls                 # refused: every step of a package would multiply by the first number

A model is traced a second time if its first trace changed attributes, globals or random states, or if the user's code
names clocks or random numbers. If both traces give the same graph, the change is harmless. Tensors that forward keeps
are caches if they consist of constants.
"""

from __future__ import annotations

import ast
import inspect
import operator
import random
import sys
import textwrap
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx, nn

from partc.errors import PartcError, Source
from partc.frontend.state.caches import cached_values, caches
from partc.frontend.state.comparable import CONSTANTS, DEPTH, comparable_copy, is_code, is_users, parts
from partc.frontend.state.counters import LATE, Counters, Key, Put, ValuePlace, counters, part_put
from partc.frontend.state.generator_states import KeptStates
from partc.frontend.state.kept_attributes import MEMBERS, Contents
from partc.frontend.state.opposite_numbers import Uses, numbers_in
from partc.frontend.state.other_numbers import TRIES, is_generator, other_numbers
from partc.frontend.state.set_by_data import check_data
from partc.frontend.state.stateful_code import CLOCKS, may_keep_state, stateful_lines, user_modules
from partc.frontend.state.trace_comparison import TracedNode, effects_signature, first_difference
from partc.installed import line_of, shortened, user_frame
from partc.replaced import all_replaced, replaced
from partc.torch_private import FakeTensor

_NEXT = 8  # steps, and numbers of code, that are tried one by one
SHIFT = 200_451.37  # seconds by which a second trace sets clocks ahead: another hour and another weekday
_INTERNAL = MEMBERS - {"training"}  # members and hooks


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A value that the trace left changed; `what` names it for the user."""

    key: tuple[str, str]
    what: str
    owner: Any  # the class, module or function whose code changes it
    name: str
    tensors: bool  # whether tensors are all that changed
    always: bool = False  # whether it is refused even if the graphs are equal
    source: Source | None = None  # the line that makes the change, where it is known


@dataclass(slots=True)
class _Held:
    """The attributes and members of a module. Most values are constants; `others` has copies of those that are not."""

    path: str
    kind: type
    constants: dict[str, Any]
    others: dict[str, Any]
    parameters: dict[str, Any]
    modules: dict[str, Any]
    buffers: dict[str, Any]
    hidden: frozenset[str]  # non-persistent buffers: one without values is treated like an attribute
    trained: dict[str, bool]

    @classmethod
    def of(cls, path: str, module: nn.Module, copy: Callable[[Any], Any]) -> _Held:
        constants: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for name, value in vars(module).items():
            if type(value) in CONSTANTS:
                constants[name] = value
            elif name not in _INTERNAL:
                others[name] = copy(value)
        stores: list[Any] = [module._parameters, module._modules, module._buffers]
        parameters, modules, buffers = [{**store} if type(store) is dict else _copied(store) for store in stores]
        trained = {name: x.requires_grad for name, x in parameters.items() if x is not None} if parameters else {}
        hidden = frozenset(module._non_persistent_buffers_set)
        return cls(path, type(module), constants, others, parameters, modules, buffers, hidden, trained)

    def same(self, other: _Held) -> bool:
        """Whether all values are the same objects."""
        return (
            _identical(self.constants, other.constants)
            and _identical(self.parameters, other.parameters)
            and _identical(self.modules, other.modules)
            and self.others == other.others
            and self.trained == other.trained
            and self.hidden == other.hidden
            and (not (self.buffers or other.buffers) or {*self._buffers()} == {*other._buffers()})
        )

    def _buffers(self) -> Iterator[tuple[str, bool]]:
        """The buffers, each with whether it has values."""
        return ((name, x is not None) for name, x in self.buffers.items())

    def entries(self) -> Iterator[tuple[tuple[str, str], Any]]:
        """The values in comparable form, by (kind, name)."""
        plain = lambda value: comparable_copy(value, [], DEPTH, {})  # noqa: E731
        where = f"self of {self.path}" if self.path else "self"
        for name, value in self.constants.items():
            if name not in _INTERNAL:
                yield (where, name), plain(value)
        yield from (((where, name), value) for name, value in self.others.items())
        yield from (((where, name), plain(filled)) for name, filled in self._buffers() if name in self.hidden)
        where = f"members {self.path}"
        yield (where, "parameters"), plain({name: id(x) for name, x in self.parameters.items()})
        yield (where, "modules"), plain({name: id(x) for name, x in self.modules.items()})
        yield (where, "buffers"), plain({name: filled or name in self.hidden for name, filled in self._buffers()})
        yield (where, "requires_grad"), plain(self.trained)


def _identical(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two dictionaries have the same objects under the same names."""
    return len(one) == len(other) and (
        not one or (one.keys() == other.keys() and all(map(operator.is_, one.values(), other.values())))
    )


def _copied(store: Any) -> dict[str, Any]:
    """The members in a store, without those that a trace leaves out."""
    return dict.copy(store) if isinstance(store, dict) else dict(store.items())


@dataclass(slots=True)
class State:
    """A snapshot of everything that forward could change outside the graph."""

    model: nn.Module
    modules: tuple[types.ModuleType, ...]
    held: dict[str, _Held] = field(default_factory=dict)
    values: dict[tuple[str, str], Any] = field(default_factory=dict)
    owners: dict[tuple[str, str], Any] = field(default_factory=dict)
    objects: dict[tuple[str, str], Any] = field(default_factory=dict)  # the values themselves
    known: dict[int, Any] = field(default_factory=dict)  # objects that several modules share, such as a configuration
    kept: list[Any] = field(default_factory=list)  # keeps objects alive, so that their identities are not reused

    @classmethod
    def of(cls, model: nn.Module, loss: Any, named: Mapping[str, nn.Module], *, clear_caches: bool = False) -> State:
        """A snapshot of the model with these modules, and of the user's code."""
        kinds = {kind for found in {type(module) for module in named.values()} for kind in found.__mro__}
        classes = [kind for kind in kinds if is_users(kind)]
        homes = {sys.modules.get(item.__module__) for item in (*classes, loss) if getattr(item, "__module__", None)}
        own = (home for home in homes if isinstance(home, types.ModuleType) and is_users(home))
        modules = user_modules(own, is_users)
        state = cls(model=model, modules=modules)
        copy = lambda value: comparable_copy(value, state.kept, DEPTH, state.known)  # noqa: E731
        state.held = {path: _Held.of(path, module, copy) for path, module in named.items()}
        state._add_code(classes, {"loss": loss}, {*named.values()})
        for cache in caches(named.values(), modules):
            if clear_caches:
                cache.cache_clear()
            state._add_cache(cache.__wrapped__, copy(cached_values(cache)))
        state._add_generators()
        return state

    def _add_code(self, classes: list[Any], functions: dict[str, Any], own_modules: Set[nn.Module]) -> None:
        """Add the values that the user's code holds: globals, attributes of classes, variables of functions."""
        for home in self.modules:
            for name, value in vars(home).items():
                outside = isinstance(value, nn.Module) and value not in own_modules
                inside = [vars(module) for module in value.modules()] if outside else value
                if isinstance(value, types.FunctionType):
                    functions[f"{home.__name__}.{name}"] = value
                elif isinstance(value, type) and value not in classes and is_users(value):
                    classes.append(value)
                elif not name.startswith("__") and not is_code(inside):
                    self._add((f"module {home.__name__}", name), value, home, inside)
        for kind in classes:  # which grows
            where = f"{kind.__module__}.{kind.__qualname__}"
            for name, value in vars(kind).items():
                if isinstance(value, types.FunctionType | property | staticmethod | classmethod):
                    functions |= {f"{where}.{name} {part}": held for part, held in _functions_of(value)}
                elif isinstance(value, type) and value not in classes and is_users(value):
                    classes.append(value)
                elif not name.startswith("__") and not is_code(value):
                    self._add((f"class {where}", name), value, kind)
        for where, function in functions.items():
            for name, value in parts(function).items():
                if name != "__wrapped__":
                    self._add((f"function {where}", name), value, function)

    def _add_cache(self, function: Any, values: Any) -> None:
        """Keep what the cache of a function holds, if it has tensors."""
        if _has_tensors(values):
            key = "cache", getattr(function, "__qualname__", str(function))
            self.values[key], self.owners[key] = values, function

    def _add_generators(self) -> None:
        """Keep the states of random generators, and the default dtype."""
        self._add(("torch", "default dtype"), str(torch.get_default_dtype()), None)
        self._add(("torch", "generator"), torch.initial_seed(), None)
        self._add(("random", "state"), hash(random.getstate()), None)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            drawn = numpy.random.get_state()
            self._add(("numpy.random", "state"), hash((drawn[1].tobytes(), *drawn[2:])), None)

    def _add(self, key: tuple[str, str], value: Any, owner: Any, inside: Any = None) -> None:
        """Keep a value with a comparable copy of it, or of its contents `inside`."""
        self.values[key] = comparable_copy(value if inside is None else inside, self.kept, DEPTH, self.known)
        self.owners[key], self.objects[key] = owner, value

    def _entries(self, paths: Iterable[str]) -> dict[tuple[str, str], Any]:
        return {key: value for path in paths if path in self.held for key, value in self.held[path].entries()}

    def _owner(self, key: tuple[str, str]) -> Any:
        kind, _, path = key[0].partition(" ")
        held = self.held.get(path.removeprefix("of ")) if kind in ("self", "members") else None
        return self.owners.get(key) if held is None else held.kind

    def value(self, key: tuple[str, str]) -> Any:
        """A value in comparable form; None if the state lacks it."""
        path = key[0].partition(" ")[2].removeprefix("of ")
        return {**self._entries([path] if path in self.held else []), **self.values}.get(key)

    def changes(self, now: State) -> list[Change]:
        """The differences to a later snapshot, tensors last."""
        found = []
        paths = dict.fromkeys((*self.held, *now.held))
        unlike = [path for path in paths if not _same_module(self.held.get(path), now.held.get(path))]
        before, after = ({**state._entries(unlike), **state.values} for state in (self, now))
        for key in dict.fromkeys((*before, *after)):
            old, new = before.get(key), after.get(key)
            if old == new:
                continue
            where, name = key
            owner = now._owner(key) or self._owner(key)
            found.append(
                Change(
                    key=key,
                    what=_named(where, name, owner),
                    owner=owner,
                    name=_member(old, new) if where.startswith("members ") and name != "requires_grad" else name,
                    tensors=_without_tensors(old) == _without_tensors(new) or _is_tensor(new),
                    always=where.startswith("members ") or key == ("torch", "default dtype"),
                )
            )
        return sorted(found, key=lambda change: (not change.always, change.tensors))


def _functions_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The functions of a method or a property, which may be wrapped."""
    if isinstance(value, types.FunctionType):
        yield "", value
    else:
        for name, held in parts(value).items():
            if held is not None:
                yield name, held


def _same_module(one: _Held | None, other: _Held | None) -> bool:
    return one is not None and other is not None and one.same(other)


def _member(old: Any, new: Any) -> str:
    """The name of the first changed member of a module."""
    if old is None or new is None:
        return ""
    changed = sorted({*new[1]} ^ {*old[1]}, key=repr)
    name = changed[0][0] if changed and new[0] == "mapping" else changed[0][1] if changed else ""
    return str(name).strip("'")


def _is_tensor(frozen: Any) -> bool:
    return isinstance(frozen, tuple) and frozen[:1] == ("tensor",)


def _has_tensors(frozen: Any) -> bool:
    return isinstance(frozen, tuple) and (_is_tensor(frozen) or any(map(_has_tensors, frozen)))


def _without_tensors(frozen: Any) -> Any:
    if _is_tensor(frozen) or frozen == ("NoneType", "None"):
        return None
    return tuple(map(_without_tensors, frozen)) if isinstance(frozen, tuple) else frozen


def _named(where: str, name: str, owner: Any) -> str:
    match where.split(" ", 1):
        case ["torch"] if name == "generator":
            return "the seed or state of torch's generator"
        case ["torch"]:
            return "torch's default dtype"
        case ["random" | "numpy.random"]:
            return f"a number of Python's {where} module"
        case ["cache"]:
            return f"the cache of {name}"
        case ["function", _]:
            return f"{name} of {getattr(owner, '__qualname__', 'the loss')}"
        case ["class", _]:
            return f"{owner.__name__}.{name}"
        case ["self", *_]:
            return f"self.{name} of {owner.__name__}"
        case ["members", path] if name == "requires_grad":
            return f"requires_grad of parameters of {path or owner.__name__}"
        case ["members", path]:
            return f"the {name} of {path or owner.__name__}"
    return f"the global {name}"


# -- watching forward --------------------------------------------------------------------------


class _Seeds:
    """Torch's generator, which records every seeding, even one that sets the same seed or is undone later, and the
    states to which forward returns.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator, self.given = generator, False
        self._kept = KeptStates()
        self.source: Source | None = None

    def _note(self) -> None:
        frame = user_frame(sys._getframe(2))
        if frame is not None and not self.given:
            self.source = line_of(frame)
        self.given = True

    def manual_seed(self, seed: int) -> torch.Generator:
        self._note()
        return self._generator.manual_seed(seed)

    def get_state(self) -> Tensor:
        return self._kept.keep(self._generator.get_state())

    def set_state(self, state: Tensor) -> torch.Generator:
        if self._kept.come_back(state):
            return self._generator
        self._note()
        return self._generator.set_state(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


@dataclass(slots=True)
class StateWatch:
    """Records the changes that forward makes while it is traced; an export undoes those of attributes."""

    model: nn.Module
    named: Mapping[str, nn.Module]  # its modules
    loss: Any
    changes: dict[tuple[str, str], Change] = field(default_factory=dict)
    # (store, name, value) of attributes as forward left them.
    ends: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    contents: Contents = field(default_factory=lambda: Contents.reached(()))  # of lists and dicts among them
    first: State | None = None  # before the first trace
    changed: set[tuple[str, str]] = field(default_factory=set)  # the keys of all traces' changes
    state: State | None = None
    modules: tuple[types.ModuleType, ...] = ()  # the user's own
    again: bool = False  # whether the next trace starts where the last one ended

    @contextmanager
    def watching(self) -> Iterator[None]:
        # Tensors that an earlier trace cached have no values here, unless this one tries what they do.
        before = State.of(self.model, self.loss, self.named, clear_caches=not self.again)
        self.first = self.first or before
        self.modules = before.modules
        seeds = _Seeds(torch.default_generator)
        with replaced(torch.random, default_generator=seeds):  # which torch.manual_seed seeds
            yield
        self.state = State.of(self.model, self.loss, self.named)
        if seeds.given:
            self.state.values["torch", "generator"] = "another seed"
        for change in before.changes(self.state):
            seeding = seeds.given and change.key == ("torch", "generator")
            self.changes[change.key] = replace(change, source=seeds.source) if seeding else change
        self.changed.update(self.changes)
        for where, name in self.changes:
            if where.split(" ")[0] == "self" and name != "training":
                module = self.named[where.removeprefix("self").removeprefix(" of ")]
                store: Any = module._buffers if name in module._buffers else vars(module)
                if name in store:
                    self.ends.append((store, name, store[name]))
        self.contents = Contents.reached(value for _, _, value in self.ends)

    def left(self) -> dict[tuple[str, str], Any]:
        """The Python values that forward has changed, as it left them; None for tensors.

        Functions' caches, whose objects differ between traces, are left out: `check` tries what they do.
        """
        assert self.state is not None
        kept = ((key, change) for key, change in self.changes.items() if key[0] != "cache")
        return {key: None if change.tensors else self.state.value(key) for key, change in kept}

    def forget(self) -> None:
        """Empty functions' caches, and give globals and attributes of classes their old values, without the tensors of
        the traces, which have no values.
        """
        if self.first is None:
            return
        for key in self.changed:
            owner, old = self.first.owners.get(key), self.first.objects.get(key)
            if isinstance(owner, types.ModuleType | type):
                if vars(owner).get(key[1]) is not old:
                    setattr(owner, key[1], old)
                Contents.reached((old,)).remove(_is_fake)
        for cache in caches(self.named.values(), self.modules):
            cache.cache_clear()

    def line_of(self, name: str) -> Source | None:
        """The user's line that assigns to an attribute."""
        change = Change(key=("members", "buffers"), what="", owner=None, name=name, tensors=True)
        return None if self.state is None else change_source(change, self.state)

    def has_tensors(self, key: tuple[str, str]) -> bool:
        """Whether a value has tensors after the last trace."""
        return self.state is not None and _has_tensors(self.state.value(key))

    def settled(self, attribute: str) -> bool:
        """Whether the last trace has left an attribute of this path as it was."""
        owner, _, name = attribute.rpartition(".")
        return (f"self of {owner}" if owner else "self", name) not in self.changes

    def go_on(self) -> None:
        """Restore the attributes that forward left, with fake tensors in place of its new ones, and keep its caches."""
        self.again = True
        for store, name, value in self.ends:
            store[name] = _renewed(value)
        self.contents.restore(_renewed)
        self.ends.clear()
        self.changes.clear()


def _is_fake(value: Any) -> bool:
    """Whether a value is a traced tensor, or has one in tuples and lists."""
    return isinstance(value, FakeTensor) or (isinstance(value, tuple | list) and any(map(_is_fake, value)))


def _renewed(value: Any) -> Any:
    """The value with new tensors: in place of itself, or of the tensors in its tuples."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype)
    return tuple(map(_renewed, value)) if type(value) is tuple else value


def check(
    exported: torch.export.ExportedProgram,
    watch: StateWatch,
    again: Callable[[], torch.export.ExportedProgram],
    assume: Callable[[str], None],
    *,
    kept: bool,
    tried: Set[tuple[str, str]] = frozenset(),
    stops: tuple[type[Exception], ...] = (),
) -> None:
    """Refuse changes and random draws in forward that affect the trace; list draws that do not, as assumptions. Raises
    PartcError P0225.

    `again` traces once more. It is called only if something has changed, or if a package may be built from the trace
    (`kept`) and the code names clocks or random numbers, or may keep state. Where no package is built from the trace,
    changes of state that another trace has `tried` do not count. An error among `stops` means that the model has to be
    captured in another way.
    """
    state, first = watch.state, dict(watch.changes)
    if state is None:
        return
    for change in first.values():
        seeds = change.key == ("torch", "generator")
        if change.always or (seeds and draws_random_numbers(exported)):
            raise refusal(change, state)
    if kept:
        check_data(state.modules)
    changed = first.keys() if kept else first.keys() - tried
    if not changed and not (kept and may_keep_state(state.modules)):
        return
    plain, known = effects_signature(exported), {*exported.graph_signature.inputs_to_buffers.values()}
    stores = (vars(each) for each in (*watch.model.modules(), *state.modules))
    generators = [value for store in stores for value in [*store.values()] if is_generator(value)]
    drawn = [key for key in first if key[0] in ("random", "numpy.random")]
    begun: Counters | None = None
    for attempt in range(1, 1 + TRIES):
        with _attributes_restored(watch.model):
            watch.go_on()
            begun = counters(_places(watch, first.values()))
            try:
                with other_times(state, attempt), other_numbers(attempt, generators) as moved:
                    other = effects_signature(again(), known)
            except (PartcError, AssertionError):  # the export meets a tensor that the first trace kept
                other = ()
        settled = not any(
            change.tensors or watch.has_tensors(key) for key, change in watch.changes.items() if key in first
        )
        if (node := first_difference(plain, other, filled=settled)) is not None:
            still = [change for key, change in first.items() if key in watch.changes] or list(first.values())
            source = node.source if other else None
            # An object may have several names, of which the user's lines change one.
            located = (change for change in still if change_source(change, state) is not None)
            raise refusal(next(located, next(iter(still), None)), state, source)
        if not drawn and not moved:
            break
    for change in map(first.__getitem__, drawn):
        line = change_source(change, state)
        where = "" if line is None else f" ({line})"
        drawing = f"Packages draw nothing from Python's {change.key[0]} module"
        assume(f"{drawing}: {TRIES} traces with other numbers were equal{where}.")
    assert begun is not None
    traces = _LaterTraces(
        plain=plain, known=known, watch=watch, again=again, changes=[*first.values()], stops=stops,
        ends=(*watch.ends,), contents=watch.contents,
    )  # fmt: skip
    for sentence in traces.check(begun):
        assume(sentence)


_Moved = Mapping[Key, tuple[ValuePlace, ValuePlace]]  # each value before and behind the second trace


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The outcome of a trace that is equal to the first one, or fails."""

    tried: frozenset[Key]  # the values in whose places others were
    kept: frozenset[int]  # the identities of the values that forward left
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LaterTraces:
    """Traces with other values in place of those that forward changes in each step."""

    plain: tuple[TracedNode, ...]  # the first trace
    known: Set[str]
    watch: StateWatch  # behind the second trace, which was equal
    again: Callable[[], torch.export.ExportedProgram]
    changes: Sequence[Change]
    stops: tuple[type[Exception], ...]
    ends: tuple[tuple[dict[str, Any], str, Any], ...]
    contents: Contents

    def check(self, begun: Counters) -> Iterator[str]:
        """Refuse changes whose later values affect the trace, and yield a sentence for each assumption: where forward
        fails with values of a later step, as past the end of a schedule, and where later values are not known.

        `begun` are the values with which the second trace began. Raises PartcError P0225.
        """
        with self._second_step():
            ended = counters(_places(self.watch, self.changes))
            moved = {
                key: (begun[key], now) for key, now in ended.items() if key in begun and begun[key].state != now.state
            }
        if not moved:
            return
        uses = {root: Uses() for root, *_ in moved}
        hook = partial(_length, [*uses.values()])
        with all_replaced((home, "len", hook) for home in self.watch.modules if "len" not in vars(home)):
            first = self._trace(moved, lambda key, before, now: now.oppose(before, uses[key[0]]), late=False)
        last = self._trace(moved, lambda key, before, now: now.advance(before, LATE))
        if last.failure:
            yield f"Packages repeat the first step. With a later value of {self._named(moved)}, {last.failure}."
        for root, each in uses.items():
            own = {key: pair for key, pair in moved.items() if key[0] == root}
            lines = each.unseen(first.kept)
            exact = frozenset(key for key, (_, now) in own.items() if now.exact)
            known = all(_lies_below(key, exact & first.tried & last.tried) for key in own)
            if lines or not known:
                self._try_numbers(own, lines.values())
            for line in lines:
                yield f"Packages repeat the first step. A later value of {self._named(own)} may matter at {line}."
            if not lines and not last.failure and not known:
                yield f"Packages repeat the first step. Later values of {self._named(own)} are not all known."

    def _try_numbers(self, moved: _Moved, code: Iterable[CodeType]) -> None:
        """Try the values of the next steps, and the numbers in the code that reads them."""
        for steps in range(1, _NEXT):
            self._trace(moved, lambda key, before, now, n=steps: now.advance(before, n))  # type: ignore[misc]
        numbers = dict.fromkeys(number for each in code for number in numbers_in(each.co_consts))
        for number in islice(numbers, _NEXT):
            for ahead in (True, False):  # forward reads a number before or behind its change
                self._trace(moved, lambda key, before, now, n=number, a=ahead: now.reach(before, n, a))  # type: ignore[misc]

    def _trace(
        self, moved: _Moved, put: Callable[[Key, ValuePlace, ValuePlace], bool], *, late: bool = True
    ) -> _Outcome:
        """Trace with other values. Raises PartcError P0225 if the trace differs."""
        failure, other = "", None
        tried, kept = frozenset[Key](), frozenset[int]()
        with self._second_step():
            try:
                tried = frozenset(key for key, (before, now) in moved.items() if put(key, before, now))
                if tried:
                    other = effects_signature(self.again(), self.known)
                    left = [(value, None) for _, _, value in self.watch.ends]
                    found = counters([*left, *_places(self.watch, self.changes)])
                    kept = frozenset(id(each.value) for each in found.values())
            except self.stops:
                raise
            except Exception as error:  # such as a report of values: the branch's code cannot be traced
                if isinstance(error, PartcError) and error.code == "P0225":
                    raise
                failure = str(getattr(error, "cause", error))
            finally:
                for _, now in moved.values():
                    now.restore()
        node = None if other is None else first_difference(self.plain, other, filled=True)
        always = any(change.always for change in self.watch.changes.values())
        if node is not None or (other is not None and always):
            does = "computes something else in a later step: a package would repeat the first step"
            if not late:
                does = "compares it: a package would have the first step's outcome"
            change = self._change(moved)
            raise PartcError(
                "P0225",
                f"forward changes {change.what}, and {does}",
                help="keep the number in a registered buffer, and choose between results with torch.where",
                source=change_source(change, self._state) or (None if node is None else node.source),
            )
        return _Outcome(tried, kept, failure)

    @contextmanager
    def _second_step(self) -> Iterator[None]:
        """A context in which the model is as the second trace has left it."""
        with _attributes_restored(self.watch.model):
            self.watch.ends[:], self.watch.contents = self.ends, self.contents
            self.watch.go_on()
            yield

    def _change(self, moved: Iterable[Key]) -> Change:
        """The first of the changes, if possible one whose line is known."""
        found: list[Change] = [self.changes[root] for root in dict.fromkeys(key[0] for key in moved)]
        return next((change for change in found if change_source(change, self._state) is not None), found[0])

    def _named(self, moved: Iterable[Key]) -> str:
        change = self._change(moved)
        source = change_source(change, self._state)
        return change.what if source is None else f"{change.what} ({source})"

    @property
    def _state(self) -> State:
        assert self.watch.state is not None
        return self.watch.state


def _lies_below(key: Key, keys: Set[Key]) -> bool:
    return any(key[:n] in keys for n in range(1, len(key) + 1))


def _length(uses: Sequence[Uses], x: Any, /) -> int:
    """Python's `len`, opposite for containers that forward changes in each step."""
    return next((each for each in uses if id(x) in each.lengths), uses[0]).length(x, sys._getframe(1))


def _places(watch: StateWatch, changes: Iterable[Change]) -> Iterator[tuple[Any, Put | None]]:
    """Each changed value, and the function that puts another one in its place."""
    for change in changes:
        kind, _, path = change.key[0].partition(" ")
        owner = watch.named.get(path.removeprefix("of ")) if kind == "self" else change.owner
        yield _place(owner, change.name) if kind in ("self", "class", "module", "function") else (None, None)


def _place(owner: Any, name: str) -> tuple[Any, Put | None]:
    """The value that a module, a class or a function has under a name, and the function that replaces it."""
    if isinstance(owner, types.ModuleType | type | nn.Module):
        own = vars(owner)
        return own.get(name), partial(setattr, owner, name) if isinstance(owner, type) else partial(
            own.__setitem__, name
        )
    return parts(owner).get(name), part_put(owner, name)


@contextmanager
def _attributes_restored(model: nn.Module) -> Iterator[None]:
    """A context after which the attributes and buffers of the model's modules are the objects that they were, and lists
    and dicts among them have the contents that they had.
    """
    stores = (store for module in model.modules() for store in (vars(module), module._buffers))
    before = [(store, dict(store)) for store in stores if isinstance(store, dict)]
    contents = Contents.reached(value for _, held in before for value in held.values())
    try:
        yield
    finally:
        contents.restore()
        for store, held in before:
            store.clear()
            store.update(held)


def draws_random_numbers(exported: torch.export.ExportedProgram) -> bool:
    """Whether the graph draws random numbers."""
    nodes = (node for module in exported.graph_module.modules() for node in getattr(module, "graph", fx.Graph()).nodes)
    return any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in nodes)


@contextmanager
def other_times(state: State, seed: int) -> Iterator[None]:
    """A context with shifted clocks."""
    originals = {name: getattr(time, name) for name in CLOCKS}
    shifted = {name: _shifted_clock(clock, SHIFT * seed, name) for name, clock in originals.items()}
    places: list[tuple[Any, str]] = [(time, name) for name in CLOCKS]
    by_identity = {id(clock): name for name, clock in originals.items()}
    for home in state.modules:
        places += [(home, name) for name, value in vars(home).items() if id(value) in by_identity]
    clocks = [(home, name, shifted[by_identity[id(getattr(home, name))]]) for home, name in places]
    with all_replaced(clocks):
        yield


def _shifted_clock(clock: Any, shift: float, name: str) -> Any:
    by = int(shift * 1e9) if name.endswith("_ns") else shift
    return lambda: clock() + by


# -- where and what ----------------------------------------------------------------------------


def refusal(change: Change | None, state: State, source: Source | None = None) -> PartcError:
    """P0225 for a change that affects the traced program, or at a line that computes something else in each trace.

    The line of forward says more than one of a function that it calls.
    """
    if change is not None:
        what = f"forward changes {change.what}"
        helped = (
            "keep state in a registered buffer and update it with tensor operations; decide options before training"
        )
        if change.always:
            helped = "do so in the constructor, or in model() before it returns"
        if change.key[1] == "parameters":
            helped = (
                "make parameters in the constructor, and change their values in place, as weight.data.copy_(values) "
                "does: an optimizer does not know a parameter that forward makes"
            )
        if change.key[0] in ("random", "numpy.random") or change.key == ("torch", "generator"):
            what = f"forward takes {change.what}" if change.key[0] != "torch" else f"forward sets {change.what}"
            helped = "draw with torch.rand, torch.randn or dropout, which packages draw anew in every step"
        if source is None or not change.key[0].startswith("function "):
            source = change_source(change, state) or source
        return PartcError(
            "P0225",
            f"{what}{'' if change.always else ', and then computes something else'}:"
            " a package would repeat the first step",
            help=helped,
            source=source
            if source and change.key[0].startswith("function ")
            else change_source(change, state) or source,
        )
    return PartcError(
        "P0225",
        "forward computes something else each time it is traced, though no state of the model has changed",
        help="clocks, Python's random numbers, iterators and counters would be frozen: draw with torch.rand, keep state"
        " in a registered buffer, or pass the values in the batch",
        source=source if source is not None and source.line else next(stateful_lines(state.modules), None),
    )


def change_source(change: Change, state: State) -> Source | None:
    """The first line of the user's code that makes the change."""
    if change.source is not None:
        return change.source
    code = getattr(change.owner, "__code__", None)
    if change.key[0] == "cache" and code is not None:
        return Source(file=shortened(code.co_filename), line=code.co_firstlineno)
    name = change.name
    members = change.key[0].startswith("members ") and change.key[1] != "requires_grad"
    if not members and (change.always or change.key[0] in ("random", "numpy.random", "torch")):
        words = {
            "requires_grad": {"requires_grad_", "requires_grad"},
            "default dtype": {"set_default_dtype"},
        }.get(name, {change.key[0].split(".")[0]})
        return next(
            _lines(state, lambda node: isinstance(node, ast.Attribute | ast.Name) and _word(node) in words), None
        )

    variables = change.key[0].startswith(("module ", "function "))

    def names(node: ast.AST) -> bool:
        return name in _words(node, variables)

    def changes(node: ast.AST) -> bool:
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            return any(names(each) for target in targets for each in _targets(target))
        if isinstance(node, ast.Call) and any(_word(given.value) == name for given in node.keywords):
            return True  # a generator
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("train", "eval"):
                return name == "training"
            if node.func.attr in ("register_parameter", "register_buffer", "add_module", "register_module"):
                return any(isinstance(arg, ast.Constant) and arg.value == name for arg in node.args)
            return names(node.func.value) or node.func.attr == name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called = node.args[:1] if node.func.id == "next" else [node.func]  # an iterator, or an object
            if any(map(names, called)):
                return True
        if isinstance(node, ast.Call) and _word(node.func) == "setattr":
            return any(map(names, node.args[:2]))
        if isinstance(node, ast.FunctionDef):
            return node.name == name and "cached_property" in map(_word, node.decorator_list)
        return False

    return next(_lines(state, changes), None)


def _targets(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Tuple | ast.List):
        for each in node.elts:
            yield from _targets(each)
    else:
        yield node


def _words(node: ast.AST, variables: bool) -> Iterator[str]:
    """The names of attributes and keys along a chain such as `self.known["n"].value`, and of its variable."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            yield str(node.slice.value)
        node = node.value
    if isinstance(node, ast.Constant):
        yield str(node.value)
    elif isinstance(node, ast.Name) and variables:
        yield node.id


def _word(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _lines(state: State, wanted: Any) -> Iterator[Source]:
    """The lines of the user's functions (without constructors) that contain a wanted syntax node."""
    homes = dict.fromkeys((*state.modules, *(m for m in map(_home, state.model.modules()) if m is not None)))
    for home in homes:
        file = getattr(home, "__file__", None)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(home)))
        except (OSError, TypeError, SyntaxError):
            continue
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and function.name not in ("__init__", "model", "batch", "data"):
                yield from (
                    Source(file=str(file), line=node.lineno)
                    for node in ast.walk(function)
                    if isinstance(node, ast.stmt | ast.expr) and wanted(node)
                )


def _home(module: nn.Module) -> types.ModuleType | None:
    home = sys.modules.get(type(module).__module__)
    return (
        home
        if isinstance(home, types.ModuleType) and getattr(home, "__name__", "").partition(".")[0] != "torch"
        else None
    )
