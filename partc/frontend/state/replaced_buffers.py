"""Buffers that forward replaces by other tensors.

self.old, self.new = self.new, x.mean(0)      the buffers' next values, which an export would drop
self.mean = self.weight                       refused: from now on, both names have one memory
self.places = torch.arange(n)                 of another shape, a constant: each step makes it again
self.table = self.make() if self.table is None else self.table       left to frozen_state
self.register_buffer("cos", angles.cos(), persistent=False)          a plain attribute, left to frozen_state
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from partc.errors import PartcError, Source
from partc.replaced import replaced
from partc.runtime.torch_private import storage_key


class ReplacedError(PartcError):
    """P0225 for a model that may trace if the buffer of this name becomes a plain attribute."""

    def __init__(self, name: str, cause: str, help: str, source: Source | None) -> None:
        super().__init__("P0225", cause, help=help, source=source)
        self.name = name


def with_plain_buffers(model: nn.Module, names: Set[str]) -> nn.Module:
    """Make the model's non-persistent buffers of these names plain attributes, and return the model."""
    for module in model.modules() if names else ():
        for name in names & module._non_persistent_buffers_set:
            module._non_persistent_buffers_set.discard(name)
            vars(module)[name] = module._buffers.pop(name)
    return model


@contextmanager
def registering(known: Container[int]) -> Iterator[None]:
    """A context in which a new non-persistent buffer becomes a plain attribute of its module, as it does not outlive
    the process. `known` has the identities of the dictionaries of the model's modules.
    """
    register = nn.Module.register_buffer

    def registered(module: nn.Module, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        own = vars(module)
        if persistent or id(own) not in known or name in module._buffers or (name not in own and hasattr(module, name)):
            register(module, name, tensor, persistent)
        else:
            own[name] = tensor

    with replaced(nn.Module, register_buffer=registered):
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class _Name:
    """A name of a buffer, with the tensor and the number of its changes before forward."""

    store: dict[str, Tensor | None]
    name: str
    buffer: Tensor | None
    version: int
    persistent: bool

    @property
    def now(self) -> Tensor | None:
        return self.store[self.name] if self.name in self.store else None  # noqa: SIM401 (scripted modules have no get)

    @property
    def changed(self) -> bool:
        return self.buffer is not None and self.buffer._version != self.version


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """The buffers of a model before forward."""

    model: nn.Module
    places: tuple[_Name, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Buffers:
        places = (
            _Name(
                store=module._buffers, name=name, buffer=buffer,
                version=0 if buffer is None else buffer._version,
                persistent=name not in module._non_persistent_buffers_set,
            )
            for module in model.modules() for name, buffer in module._buffers.items()
        )  # fmt: skip
        return cls(model=model, places=tuple(places))

    def restore(self) -> None:
        """Give each name its tensor again."""
        for each in self.places:
            each.store[each.name] = each.buffer

    def keep(self, line: Callable[[str], Source | None], is_constant: Callable[[Tensor], bool]) -> None:
        """Copy each new tensor into the buffer that it replaced, and restore all buffers.

        A constant of another shape in place of a non-persistent buffer is not copied: each step computes it again.
        `line` finds the user's line that assigns to a name. Raises PartcError P0225 where the next step would differ
        from an eager one: a ReplacedError.
        """
        for each in self.places:
            buffer, now = each.buffer, each.now
            if buffer is None or now is None or each.persistent or now.shape == buffer.shape or not is_constant(now):
                continue
            each.store[each.name] = buffer
        replaced = [each for each in self.places if each.now is not each.buffer]
        if not replaced:  # switching gradients off would add a subgraph
            return
        weights = {storage_key(x): name for name, x in self.model.named_parameters()}
        for each in replaced:
            for plain, wrong, help in self._differences(each, weights):
                cause = f"forward replaces the tensor {each.name} {wrong}"
                raise ReplacedError(plain.name, cause, help, line(each.name))
        memory = {storage_key(each.buffer) for each in replaced if each.buffer is not None}
        once = {id(each.buffer): each for each in replaced}.values()  # buffers of several names
        with torch.no_grad():
            found = [
                (each.buffer, each.now.clone() if storage_key(each.now) in memory else each.now)
                for each in once
                if each.buffer is not None and each.now is not None
            ]
            for buffer, now in found:
                buffer.copy_(now)
        self.restore()

    def _differences(self, each: _Name, weights: Mapping[int, str]) -> Iterator[tuple[_Name, str, str]]:
        """The reasons why the next step of a package would differ from an eager one. Each stands behind the name that
        would have to be a plain attribute, and before the help.
        """
        buffer, now = each.buffer, each.now
        if buffer is None or now is None:
            return
        if now.shape != buffer.shape:
            yield (
                each,
                f"of shape {tuple(buffer.shape)} by one of {tuple(now.shape)}",
                "give it its shape in the constructor",
            )
        if now.dtype != buffer.dtype and not (now.is_floating_point() and buffer.is_floating_point()):
            yield each, f"of {buffer.dtype} by one of {now.dtype}", "give it its dtype in the constructor"
        shared = "put a copy there: .clone()"
        if storage_key(now) in weights:
            yield each, f"by the memory of the parameter {weights[storage_key(now)]}, which training changes", shared
        for other in self.places:
            if other.buffer is buffer:
                if other.now is not now:
                    kept = other if other.now is buffer and not other.persistent else each
                    yield kept, f"that is also {other.name}", "change it in place, or replace it in both"
            elif (
                other.now is not None and storage_key(other.now) == storage_key(now) and (each.changed or other.changed)
            ):
                yield each, f"by the memory of the buffer {other.name}, which changes in place", shared
