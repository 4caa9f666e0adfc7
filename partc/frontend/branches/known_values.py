"""Constants of a trace, whose values are computed during it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from partc.frontend.branches.largest_numbers import LargestNumbers
from partc.frontend.by_tensor import ByTensor
from partc.frontend.index_items import with_dims
from partc.frontend.torch_call import TorchCall
from partc.torch_private import FakeTensor, outside_functorch, without_modes, without_overriding

LARGEST = 1 << 16  # the most elements of a constant whose values are computed
_DRAWS = frozenset({
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "poisson",
    "multinomial", "dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d",
    "dropout3d", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "rrelu", "gumbel_softmax",
    "uniform_", "normal_", "bernoulli_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_",
})  # fmt: skip
# Factories that only read the shape and dtype of their operand.
_SHAPED = frozenset({"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_tensor"})
# Operations that use integer tensors as sizes or indices: in all arguments (factories), or in all but the first.
_FACTORIES = frozenset({"arange", "linspace", "zeros", "ones", "full", "empty", "eye"})
_PLACED = frozenset({
    "new_zeros", "new_ones", "new_full", "narrow", "select", "split", "split_with_sizes", "chunk",
    "view", "reshape", "unflatten", "expand", "repeat", "tile", "unfold", "pad", "roll", "interpolate",
    "permute", "transpose", "movedim", "flip", "unsqueeze", "squeeze", "flatten", "diagonal", "tril", "triu",
})  # fmt: skip
# The operations by which torch.Tensor(...), torch.LongTensor(...) and torch.from_numpy(...) bring values into a trace.
_BROUGHT = frozenset({"lift_fresh.default", "lift_fresh_copy.default"})
_ADOPTING = frozenset({"as_tensor", "asarray", "from_numpy", "frombuffer"})  # may share the memory of NumPy's arrays
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


class KnownValues:
    """The values of the constants of one trace. Of other tensors, `largest` may know the largest numbers of entries."""

    def __init__(self, largest: LargestNumbers) -> None:
        self._values: ByTensor[Tensor] = ByTensor()
        self._largest = largest

    def get(self, x: Any) -> Tensor | None:
        """The values of a tensor; None if they are unknown."""
        return self._values.get(x)

    def with_sizes(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments of a call, in which known integer tensors that are sizes or bounds are numbers."""
        if name in _FACTORIES:
            return self.numbers(args), self.numbers(kwargs)
        if name == "one_hot":
            args, kwargs = (*args[:1], *self.numbers(args[1:])), self.numbers(kwargs)
            if (classes := self._classes(*args, **kwargs)) is not None:
                return args[:1], {**kwargs, "num_classes": classes}
        if name in _PLACED:
            return (*args[:1], *self.numbers(args[1:])), self.numbers(kwargs)
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            bounded = tuple(self.numbers(item) if isinstance(item, slice) else item for item in index)
            return (args[0], bounded if isinstance(args[1], tuple) else bounded[0], *args[2:]), kwargs
        return args, kwargs

    def _classes(self, input: Tensor, num_classes: int | Tensor = -1) -> int | None:
        """The number of classes that one_hot finds in known labels; None if it is given, or the labels are unknown."""
        known = self._values.get(input)
        if isinstance(num_classes, Tensor) or num_classes != -1 or known is None or not known.numel():
            return None
        with without_modes():
            return int(known.max()) + 1

    def numbers(self, item: Any) -> Any:
        """The arguments of a call, with known integer tensors of one element replaced by numbers."""
        if isinstance(item, Tensor):
            if item.dim() or item.dtype not in _INTEGERS:
                return item
            known = self._values.get(item)
            if known is None:
                number = self._largest.number(item)
                return item if number is None else number
            with without_modes():
                return known.item()
        if isinstance(item, slice):
            return slice(*map(self.numbers, (item.start, item.stop, item.step)))
        if isinstance(item, dict):
            return {key: self.numbers(one) for key, one in item.items()}
        return type(item)(map(self.numbers, item)) if type(item) in (tuple, list) else item

    def knows(self, x: Tensor) -> bool:
        """Whether a tensor is a constant whose values are known."""
        return x in self._values

    def know(self, x: Any, real: Any) -> None:
        """Note that a tensor is a constant with these values."""
        if isinstance(x, Tensor) and isinstance(real, Tensor):
            if x.shape == real.shape and x.dtype == real.dtype and real.device.type == "cpu":
                self._values[x] = real
        elif isinstance(x, tuple | list) and isinstance(real, tuple | list):
            for one, other in zip(x, real, strict=False):
                self.know(one, other)

    def constant(self, real: Any) -> Any:
        """Known integer values as a constant of the trace; NotImplemented for others."""
        if isinstance(real, tuple | list):
            found = [self.constant(each) for each in real]
            return NotImplemented if any(each is NotImplemented for each in found) else tuple(found)
        if not isinstance(real, Tensor) or real.is_floating_point() or real.is_complex() or real.numel() > LARGEST:
            return NotImplemented
        with without_modes():
            values = real.tolist()
        made = torch.tensor(values, dtype=real.dtype).reshape(real.shape)
        self.know(made, real)
        return made

    def check_places(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise IndexError for a lookup at known places outside of a tensor; fake tensors are not checked."""
        for size, places in _lookups(name, args, kwargs):
            known = self._values.get(places)
            if known is None or not known.numel():
                continue
            with without_modes():
                least, most = int(known.min()), int(known.max())
            if most >= size or least < (0 if name in ("index_select", "gather") else -size):
                raise IndexError(f"index {most if most >= size else least} is out of bounds for size {size}")

    def follow(self, call: TorchCall, made: Any, *, known: bool) -> None:
        """Compute the values of a result, also of a change in place; forget them if they are unknown."""
        changed = _changed_operand(call)
        if changed is None and not isinstance(made, Tensor | tuple | list):
            return
        real = self.computed(call) if known and _elements(made) <= LARGEST else NotImplemented
        if real is not NotImplemented:
            self.know(made, real)
        elif changed is not None:
            self._forget(changed)

    def _forget(self, written: Tensor) -> None:
        """Forget the values of a tensor that is changed to unknown values, and of all views of its memory."""
        held = self._values.get(written)
        if held is None:
            return
        memory = held.untyped_storage().data_ptr()
        self._values.drop(lambda own: own.untyped_storage().data_ptr() == memory)

    def computed(self, call: TorchCall) -> Any:
        """The result on known values; NotImplemented if an operand is unknown or the result is random."""
        if call.name in _DRAWS or call.kwargs.get("training"):
            return NotImplemented
        if call.name in _BROUGHT and not isinstance(call.given, FakeTensor):
            with without_modes():
                return call.given.clone()
        try:
            given = self.operands((call.args, dict(call.kwargs)), shaped=call.name in _SHAPED)
        except UnknownError:
            return NotImplemented
        with without_modes(), outside_functorch():  # no_grad would be recorded by the tracer
            try:
                found = call.func(*given[0], **given[1])
                # The trace has the memory as a constant, which changes in place would reach.
                return found.clone() if call.name in _ADOPTING and not isinstance(call.given, Tensor) else found
            except Exception:  # the traced call has succeeded, or will raise the same
                return NotImplemented

    def operands(self, item: Any, *, shaped: bool) -> Any:
        """The arguments of a call with values in place of tensors, for `shaped` calls of the right shape only. Raises
        UnknownError if the values of a tensor are unknown.
        """
        if isinstance(item, Tensor):
            found = self._values.get(item)
            if found is None and shaped and not isinstance(item, torch.nn.Parameter):
                with without_modes():
                    found = torch.empty((), dtype=item.dtype).expand(tuple(map(int, item.shape)))
            if found is None or found.numel() > LARGEST:
                raise UnknownError
            return found
        if isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise UnknownError
        if isinstance(item, dict):
            return {key: self.operands(one, shaped=shaped) for key, one in item.items()}
        if isinstance(item, tuple | list):
            made = [self.operands(one, shaped=shaped) for one in item]
            return made if isinstance(item, list) else tuple(made)
        return item


class UnknownError(Exception):
    """The values of an operand are unknown."""


def _changed_operand(call: TorchCall) -> Tensor | None:
    """The tensor that a call changes in place."""
    changed = call.kwargs.get("out")
    if changed is None and (call.name == "__setitem__" or (call.name.endswith("_") and not call.name.endswith("__"))):
        changed = call.given
    return changed if isinstance(changed, Tensor) else None


def _lookups(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[int, Tensor]]:
    """The sizes of the dimensions that a call indexes by tensors, with these tensors."""
    if name == "take":
        yield args[0].numel(), kwargs.get("index", args[-1])
    elif name in ("index_select", "gather"):
        dim, index = (*args[1:3], *(kwargs[word] for word in ("dim", "index") if word in kwargs))
        yield args[0].shape[dim] if args[0].dim() else 1, index
    elif name == "__getitem__" and isinstance(args[0], Tensor):
        items = args[1] if isinstance(args[1], tuple) else (args[1],)
        for item, dim in with_dims(items, args[0].dim()):
            if isinstance(item, Tensor) and item.dtype in _INTEGERS and dim < args[0].dim():
                yield args[0].shape[dim], item


def _elements(made: Any) -> int:
    """The number of elements of a result's largest tensor; data-dependent sizes count as large."""
    if isinstance(made, Tensor):
        with without_overriding():  # the trace's modes would intercept every read of a size
            count = made.numel()
        return count if isinstance(count, int) else LARGEST + 1
    return max(map(_elements, made), default=0) if isinstance(made, tuple | list) else 0
