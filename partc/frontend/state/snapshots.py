"""Snapshots of the Python values that forward may change: those of the modules, and of the user's code."""

from __future__ import annotations

import operator
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from partc.errors import Source
from partc.frontend.state.caches import cached_values, caches
from partc.frontend.state.comparable import CONSTANTS, DEPTH, comparable_copy, is_code, is_users, parts
from partc.frontend.state.kept_attributes import MEMBERS
from partc.frontend.state.stateful_code import user_modules

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
        if holds_tensors(values):
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


def holds_tensors(frozen: Any) -> bool:
    return isinstance(frozen, tuple) and (_is_tensor(frozen) or any(map(holds_tensors, frozen)))


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
