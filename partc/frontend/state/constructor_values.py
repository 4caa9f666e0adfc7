"""Models whose constructors read values of their weights, such as orthogonal parametrisations and pruning.

They are built in memory. The numbers and plain tensors that a trace keeps from a constructor must not depend on random
weights: a package may start from other weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from partc.errors import PartcError
from partc.torch_private import TorchDispatchMode

LARGEST = 4 << 30  # bytes


class _Bounded(TorchDispatchMode):
    """Refuses to allocate tensors of more than `LARGEST` bytes in total."""

    made = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not any(isinstance(x, Tensor) for x in args):
            self.made += result.numel() * result.element_size()
            if self.made > LARGEST:
                raise MemoryError("the constructor reads values of a model of more than 4 GiB")
        return result


def with_values(build: Callable[[], Any]) -> Any:
    """The model, built in memory. Raises PartcError P0205 if its attributes depend on random weights."""
    models = []
    for seed in (0, 1):
        with torch.random.fork_rng(devices=[]), _Bounded():
            torch.manual_seed(seed)
            models.append(build())
    if not all(isinstance(model, nn.Module) for model in models):
        return models[0]
    if any(isinstance(value, torch.ScriptObject) for part in models[0].modules() for value in vars(part).values()):
        raise PartcError(
            "P0205", "model() has packed weights, which cannot be trained", help="leave out the quantization of modules"
        )
    one, other = (dict(_attributes(model)) for model in models)
    differing = sorted(name for name in one.keys() | other.keys() if not _equal(one.get(name), other.get(name)))
    if differing:
        raise PartcError(
            "P0205",
            f"the attribute {differing[0]} of the model depends on random weights",
            help="register it as a buffer, so that a package computes it from its own weights",
        )
    for part, name, value in list(_of_weights(models[0])):
        setattr(part, name, value.detach().to("meta"))
    return models[0]


def _of_weights(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """The plain tensors that are computed from weights, or share their memory; hooks recompute them before forward.

    They have no values, so they cannot become constants of a trace: a forward that reads one is refused.
    """
    weights = {x.untyped_storage().data_ptr() for x in model.parameters() if x.numel()}
    for part in model.modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and (value.grad_fn or value.untyped_storage().data_ptr() in weights):
                yield part, name, value


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The numbers, texts and plain tensors of all modules, by their names.

    Parameters, buffers and tensors of weights are left out, also within lists, such as an LSTM's list of its weights.
    """
    left_out = {id(x) for x in (*model.parameters(), *model.buffers(), *(value for _, _, value in _of_weights(model)))}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, bool | int | float | complex | str | tuple | list | Tensor):
                yield f"{path}.{name}".removeprefix("."), _without(value, left_out)
        yield f"{path}: parts", (*module._parameters, *module._buffers, type(module).__name__)


def _without(value: Any, left_out: Set[int]) -> Any:
    """A copy of the value in which None replaces the objects with these ids."""
    if isinstance(value, tuple | list):
        return [_without(each, left_out) for each in value]
    return None if id(value) in left_out else value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, bool | int | float | complex | str):
        return type(one) is type(other) and (one == other or one != one)
    return type(one) is type(other)
