"""Tensors that modules keep in plain attributes, also within lists, tuples, dicts and the user's own objects.

self.table = torch.ones(8)                            the buffer table
self.freqs = [torch.ones(4), {"a": torch.ones(6)}]    the buffers freqs[0] and freqs[1][a]
self.weights = [self.first.weight, …]                 no buffer: this list refers to a parameter
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..torch_private import storage_key

_DEPTH, _LONGEST = 4, 4096
_MEMBERS = frozenset(vars(nn.Module()))  # parameters, buffers, modules and hooks
# Classes of values whose tensors, if any, are not looked for.
_PLAIN = frozenset({
    bool, int, float, str, bytes, complex, torch.dtype, torch.device, type(None), set, frozenset,
})  # fmt: skip


def modules_by_path(model: nn.Module, *, repeated: bool = False) -> dict[str, nn.Module]:
    """The modules of a model like `named_modules`, in one walk; under all of their paths if `repeated`."""
    found: dict[str, nn.Module] = {}
    known: set[nn.Module] = set()

    def walk(path: str, module: nn.Module) -> None:
        if module in known and not repeated:
            return
        known.add(module)
        found[path] = module
        below = f"{path}." if path else ""
        for name, part in module._modules.items():
            if part is not None:
                walk(below + name, part)

    walk("", model)
    return found


def named_tensors(
    modules: Mapping[str, nn.Module], store: Literal["_parameters", "_buffers"], *, repeated: bool = False
) -> dict[str, Tensor]:
    """The parameters or buffers of modules by their paths, each under its first name, or under all if `repeated`."""
    named = {
        f"{path}.{name}" if path else name: x
        for path, module in modules.items()
        for name, x in getattr(module, store).items()
        if x is not None
    }
    if repeated:
        return named
    first = {id(x): name for name, x in reversed(named.items())}
    return {name: x for name, x in named.items() if first[id(x)] == name}


def with_registered_tensors(model: Any, wanted: Callable[[str], bool] = lambda name: True) -> Any:
    """The model; plain tensors of its modules become non-persistent buffers.

    Not so tensors that require gradients, those in the memory of a weight, and those whose names are not `wanted`.
    """
    places = [*places_of(model)] if isinstance(model, nn.Module) else []
    known = {id(x) for x in (*model.parameters(), *model.buffers())} if places else set()
    plain = [
        place
        for place in places
        if not (place.path and id(place.held) in known)
        and place.held.layout == torch.strided
        and not place.held.requires_grad
        and wanted(place.name)
    ]
    weights = {storage_key(x) for x in model.parameters() if x.layout == torch.strided} if plain else set()
    for place in plain:
        if storage_key(place.held) in weights:
            continue
        if not place.path:
            delattr(place.part, place.name)
        if not hasattr(place.part, place.name):
            place.part.register_buffer(place.name, place.held, persistent=False)
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainTensor:
    """A tensor that a module keeps as an attribute (`path` is empty), or within one."""

    part: nn.Module
    attribute: str
    path: tuple[Any, ...]
    held: Tensor

    @property
    def name(self) -> str:
        return self.attribute + "".join(f"[{key}]" for key in self.path).replace(".", "_")

    @property
    def now(self) -> Any:
        """The object there now; None if there is none."""
        found = vars(self.part).get(self.attribute)
        for key in self.path:
            found = _item(found, key)
        return found

    def put(self, x: Tensor) -> None:
        """Put another tensor there; tuples are made anew."""
        vars(self.part)[self.attribute] = _with(vars(self.part)[self.attribute], self.path, x)


@dataclass(frozen=True, slots=True)
class Members:
    """Parameters and buffers to which places within attributes refer: each place with all names of its weight, as
    modules that share a dict of tensors have them as buffers each.
    """

    found: tuple[tuple[PlainTensor, tuple[tuple[nn.Module, str], ...]], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Members:
        places = [place for place in places_of(model) if place.path]
        names: dict[int, tuple[tuple[nn.Module, str], ...]] = {}
        for part in modules_by_path(model).values() if places else ():
            for store in (part._parameters, part._buffers):
                for name, x in store.items():
                    names[id(x)] = (*names.get(id(x), ()), (part, name))
        return cls(tuple((place, names[id(place.held)]) for place in places if id(place.held) in names))

    @contextmanager
    def current(self) -> Iterator[None]:
        """A context in which the places have the tensors that are the weights now."""
        weights = [
            (place, owner._parameters.get(name, owner._buffers.get(name)), names)
            for place, names in self.found
            for owner, name in names[:1]
        ]
        put = Members(tuple((replace(place, held=x), names) for place, x, names in weights if x is not None))
        for place, _ in put.found:
            place.put(place.held)
        try:
            yield
            put.take()
        finally:
            for place, _ in self.found:
                if isinstance(place.now, Tensor):
                    place.put(place.held)

    def take(self) -> None:
        """Tensors that forward has put in the places of buffers become these buffers, under all of their names."""
        for place, names in self.found:
            now = place.now
            if isinstance(now, Tensor) and now is not place.held:
                for owner, name in names:
                    if name in owner._buffers:
                        owner._buffers[name] = now


def places_of(model: nn.Module) -> Iterator[PlainTensor]:
    """The tensors in attributes of the model's modules."""
    empty: set[int] = set()
    for part in modules_by_path(model).values():
        for attribute, value in () if isinstance(part, torch.jit.ScriptModule) else [*vars(part).items()]:
            if type(value) not in _PLAIN and attribute not in _MEMBERS:
                for path, x in _tensors(value, (), empty):
                    yield PlainTensor(part=part, attribute=attribute, path=path, held=x)


def _tensors(value: Any, path: tuple[Any, ...], empty: set[int]) -> list[tuple[tuple[Any, ...], Tensor]]:
    """The tensors in a value, each with its keys. `empty` has the ids of containers in which there are none."""
    if isinstance(value, Tensor):
        return [(path, value)]
    if len(path) >= _DEPTH or id(value) in empty:
        return []
    items = _items(value)
    if items:
        empty.add(id(value))  # while its items are read, so that no cycle is followed
    found = [each for key, item in items for each in _tensors(item, (*path, key), empty)]
    if found:
        empty.remove(id(value))
    return found


def _items(value: Any) -> list[tuple[Any, Any]]:
    """The keys and values of a list, a tuple, a dict, or an object of a Python class."""
    if isinstance(value, dict):
        found = [*value.items()]
    elif isinstance(value, list | tuple):
        found = [*enumerate(value)]
    else:
        closed = isinstance(value, nn.Module | ModuleType | type) or callable(value)
        found = [] if closed else [*getattr(value, "__dict__", {}).items()]
    return found if len(found) <= _LONGEST else []


def _item(value: Any, key: Any) -> Any:
    """The item of a key; None if there is none."""
    if isinstance(value, list | tuple):
        return value[key] if key in range(len(value)) else None
    return value.get(key) if isinstance(value, dict) else getattr(value, "__dict__", {}).get(key)


def _with(value: Any, path: tuple[Any, ...], x: Tensor) -> Any:
    """The value with a tensor at a path: the same object, or another one for a tuple."""
    if not path:
        return x
    key, *rest = path
    new = _with(_item(value, key), tuple(rest), x)
    if isinstance(value, tuple):
        made = [*value[:key], new, *value[key + 1 :]]
        return value._make(made) if hasattr(value, "_make") else tuple(made)
    if isinstance(value, dict | list):
        value[key] = new
    else:
        vars(value)[key] = new  # of frozen dataclasses as well
    return value
