"""Weights as keys of tables: while a model is traced, other tensors stand for its weights.

scales = {self.up.weight: 0.5}             scales[self.up.weight]        found by hash and equality
rates = {id(self.up.weight): 0.5}          rates[id(self.up.weight)]     found by Python's `id`
self.up.weight.decayed = False             self.up.weight.decayed        an attribute
self.up.weight = Low(torch.ones(8))        isinstance(self.up.weight, Low)    the class
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from partc.errors import PartcError, Source
from partc.frontend.by_tensor import ByTensor
from partc.installed import is_machinery
from partc.torch_private import say_class, saying_classes


class ConstructedWeights:
    """The weights of a model as its constructor made them, by module and name."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._made = {
            (path, store, name): x
            for path, module in modules.items()
            for store in ("_parameters", "_buffers")
            for name, x in getattr(module, store).items()
            if x is not None
        }
        self._stood: ByTensor[Tensor] = ByTensor()  # the weight of each stand-in, also of earlier traces

    def stand_ins(self, left_out: Set[str] = frozenset()) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The name of each weight, the tensor that stands for it now, and the weight, without modules left out."""
        for (path, store, name), weight in self._made.items():
            if path not in left_out:
                held = getattr(self._modules[path], store)
                now = held[name] if name in held else None  # noqa: SIM401 (a script module's store has no `get`)
                if now is not None:
                    yield f"{path}.{name}".lstrip("."), now, weight

    def give_attributes(self, left_out: Set[str] = frozenset()) -> None:
        """Give the tensors that stand for weights the attributes that the model gave the weights."""
        for _, now, weight in self.stand_ins(left_out):
            vars(now).update(vars(weight))

    @contextmanager
    def known(
        self,
        left_out: Set[str],
        batch: Sequence[Tensor],
        identity: Callable[[Any], int],
        line: Callable[[str], Source | None],
    ) -> Iterator[Callable[[Any], int]]:
        """A context in which forward finds the weights in tables, and reads their attributes and the classes of all
        tensors. It yields the function that stands for Python's `id`.

        `identity` is the `id` of other objects, and `line` finds the line that assigns to an attribute. Raises
        PartcError P0225 if tensors, numbers or texts among the attributes have changed.
        """
        for _, now, weight in self.stand_ins(left_out):
            self._stood[now] = weight
        self.give_attributes(left_out)
        before = [(name, x, _attributes(x)) for name, x, _ in self.stand_ins(left_out)]
        equal = Tensor.__eq__
        own_hash: Callable[[Tensor], int] = Tensor.__hash__

        def weight_of(x: Any) -> Any:
            weight = self._stood.get(x)
            return x if weight is None else weight

        def identity_made(x: Any) -> int:
            return identity(weight_of(x))

        def hashed(x: Tensor) -> int:
            if x not in self._stood or is_machinery(sys._getframe(1).f_code.co_filename):
                return own_hash(x)
            Tensor.__eq__ = same  # type: ignore[method-assign, assignment]
            return identity_made(x)

        def same(x: Tensor, other: Any) -> Any:
            alike = isinstance(other, Tensor) and weight_of(x) is weight_of(other)
            return (alike and x is not other) or equal(x, other)

        Tensor.__hash__ = hashed  # type: ignore[method-assign]
        weights = [(now, type(weight)) for _, now, weight in self.stand_ins(left_out)]
        for now, kind in weights:
            say_class(now, kind)
        try:
            with saying_classes((*batch, *(now for now, _ in weights)), _asked_by_user):
                yield identity_made
        finally:
            Tensor.__hash__ = own_hash  # type: ignore[method-assign]
            if "__eq__" in vars(Tensor):
                del Tensor.__eq__
        for name, x, attributes in before:
            for attribute in sorted({key for key, _ in attributes.items() ^ _attributes(x).items()}):
                raise PartcError(
                    "P0225",
                    f"forward changes {name}.{attribute}: a package would repeat the first step",
                    help="keep state in a registered buffer",
                    source=line(attribute),
                )


def _asked_by_user() -> bool:
    """Whether the user's code reads a class: its frame is two above this one."""
    return not is_machinery(sys._getframe(2).f_code.co_filename)


def _attributes(x: Tensor) -> dict[str, Any]:
    """The numbers and texts among the attributes of a tensor, and the identities of its tensors."""
    kept = ((key, value) for key, value in vars(x).items() if key[0] != "_")
    return {
        key: ("tensor", id(value)) if isinstance(value, Tensor) else value
        for key, value in kept
        if isinstance(value, int | float | str | Tensor)
    }
