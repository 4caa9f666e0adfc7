"""Masks and sizes that a constructor makes and keeps in buffers, as constants of the trace.

    register_buffer("bias", torch.tril(torch.ones(s, s)).view(1, 1, s, s))   ->   view(tril(ones(s, s)), (1, 1, s, s))

Models are built without values. `Recipes` notes the calls that make tensors from sizes alone. A buffer whose recipe has
`tril` or `triu` is computed again while the model is traced, so that the structure of an attention mask is known at any
size. Equal recipes give one tensor.

    register_buffer("stride", torch.tensor(4), persistent=False)

While the model is traced, the values of some buffers are known: of masks and a few integers outside of state dicts, and
of single booleans in state dicts, such as `initialized`. Buffers that forward changes are not among them. Packages keep
all of them as buffers.

    mask = ~torch.eye(n, dtype=torch.bool)
    mask[0, 1] = False                         the values of small constants follow writes, also through views
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from partc.frontend.by_tensor import ByTensor
from partc.frontend.state.flags import is_flag
from partc.runtime.train.plain_tensors import named_tensors
from partc.torch_private import tree_flatten, tree_unflatten, without_modes

_MADE = frozenset({"ones", "zeros", "full", "arange", "tensor"})
_FACTORIES = _MADE | {"eye", "linspace", "ones_like", "zeros_like"}
_CHANGED = frozenset({
    "tril", "triu", "view", "reshape", "unsqueeze", "expand", "bool", "to", "float", "logical_not", "eq", "ne", "lt",
    "gt", "__invert__", "masked_fill", "bitwise_xor", "bitwise_and", "bitwise_or", "__xor__", "__and__", "__or__",
    "add", "sub", "mul", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__floordiv__", "cumsum",
})  # fmt: skip
_PLAIN = (bool, int, float, str, torch.dtype, type(None))
LARGEST = 64  # integers of one buffer
LARGEST_MASK = 1 << 16  # booleans of one buffer, and elements of a constant with values
_SAME = frozenset({"detach", "requires_grad_", "clone", "contiguous"})  # the result has the values of the operand
_EXPOSING = frozenset({"numpy", "__array__", "__dlpack__"})
_MASKS = frozenset({"tril", "triu"})
# Functions that also have values where their operands have: others may draw random numbers.
_VALUED = _CHANGED | _SAME | {"fill_diagonal_", "__setitem__", "__getitem__", "fill_", "zero_", "masked_fill_", "t"}
_INITIALIZING = "torch.nn.init"
_IGNORED = frozenset({"device", "requires_grad", "pin_memory", "layout"})

Recipe = tuple[Any, ...]  # the function, its arguments with recipes in place of tensors, and its keywords


class Recipes(TorchFunctionMode):
    """A mode that records how constants are computed while a model is built.

    A tensor that is written to afterwards, directly or through a view, changes its version and loses its recipe; a copy
    into the whole tensor gives it the recipe of its source. Writes through `.data` do not change the version, so such
    an access drops all recipes. Nor do writes through arrays of NumPy.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: ByTensor[tuple[int, Recipe]] = ByTensor()  # (tensor version, recipe)
        self._values = WeakTensorKeyDictionary()  # small constants -> tensors with their values, of the same version
        self._drawn: set[tuple[Any, ...]] = set()  # initializations that have been tried

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", "") == _INITIALIZING and kwargs:
            return self._initialized(func, **kwargs)
        name = getattr(func, "__name__", "")
        operands = self._operands(name, args, kwargs or {})
        made = func(*args, **(kwargs or {}))
        if operands is not None:
            self._follow(func, args, made, *operands)
        if name in _EXPOSING:
            self._known.pop(args[0])
            self._values.clear()
        elif getattr(func, "__self__", None) is Tensor.data and not isinstance(args[0], nn.Parameter):
            self._known.clear()
            self._values.clear()
        elif name in _SAME or (name == "copy_" and _copies_source(*args[:2])):
            same = self._recipe_of(args[1 if name == "copy_" else 0])
            if same is not None:
                self._known[made] = made._version, same
        elif isinstance(made, Tensor) and (
            name in _MADE or (name in _CHANGED and self._recipe_of(args[0]) is not None)
        ):
            given = tuple(_Inner(self._recipe_of(arg)) if isinstance(arg, Tensor) else _frozen(arg) for arg in args)
            named = tuple((key, _frozen(arg)) for key, arg in (kwargs or {}).items() if key not in _IGNORED)
            if all(map(_is_plain, (*given, *(arg for _, arg in named)))):
                self._known[made] = made._version, (func, given, named)
        return made

    def _initialized(self, func: Callable[..., Tensor], tensor: Tensor, **options: Any) -> Tensor:
        """The tensor, which has no values to initialize. Each combination of function, shape and dtype is tried once,
        as the function may refuse it.
        """
        key = func, tensor.dtype, tensor.shape, *options.items()
        if not tensor.is_meta or key not in self._drawn:
            self._drawn.add(key)
            return func(tensor, **options)
        self._known.pop(tensor)
        return tensor

    def _operands(self, name: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any] | None:
        """The operands of a call with values in place of tensors; None if one has none, or the call has no values."""
        if name not in _VALUED and name not in _FACTORIES:
            return None
        leaves, spec = tree_flatten((args, {key: x for key, x in kwargs.items() if key not in _IGNORED}))
        found = [self._value_of(x) if isinstance(x, Tensor) else x for x in leaves]
        if any(x is None and isinstance(leaf, Tensor) for x, leaf in zip(found, leaves, strict=True)):
            return None
        made: tuple[Any, Any] = tree_unflatten(found, spec)
        return made

    def _follow(self, func: Callable[..., Any], args: tuple[Any, ...], made: Any, given: Any, named: Any) -> None:
        """Note the values of a call's result, or of the tensor that it writes to."""
        written = made if isinstance(made, Tensor) else args[0]
        if not isinstance(written, Tensor) or written.numel() > LARGEST_MASK:
            return
        with without_modes(), torch.device("cpu"):
            real = func(*given, **named)
        real = real if isinstance(made, Tensor) else given[0]
        equal = (real.shape, real.dtype, real._version) == (written.shape, written.dtype, written._version)
        if equal and real.device.type == "cpu":
            self._values[written] = real
        else:
            self._values.clear()

    def _value_of(self, x: Tensor) -> Tensor | None:
        real: Tensor | None = self._values.get(x)
        return real if real is not None and real._version == x._version else None

    def _recipe_of(self, x: Any) -> Recipe | None:
        found = self._known.get(x)
        return found[1] if found is not None and found[0] == x._version else None

    def masks(self, modules: Mapping[str, nn.Module]) -> dict[str, Recipe]:
        """The buffers that hold masks, by name, with their recipes."""
        buffers = named_tensors(modules, "_buffers").items() if self._known else ()
        found = {name: self._recipe_of(buffer) for name, buffer in buffers}
        return {name: recipe for name, recipe in found.items() if recipe is not None and _has_mask(recipe)}

    def numbers(self, modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
        """The values of small buffers, by name: non-persistent integers and masks, and flags."""
        found: dict[str, Tensor] = {}
        masks = self.masks(modules)
        for path, module in modules.items():
            for name, buffer in module._buffers.items():
                whole = f"{path}.{name}".removeprefix(".")
                if buffer is None or buffer.numel() > _largest(buffer) or whole in masks:
                    continue
                kept = name in module._non_persistent_buffers_set or is_flag(buffer)
                if kept and (value := self._value_of(buffer)) is not None:
                    found[whole] = value
        return found


class _Inner:
    """A tensor among the arguments of a recipe."""

    def __init__(self, recipe: Recipe | None) -> None:
        self.recipe = recipe

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Inner) and self.recipe == other.recipe

    def __hash__(self) -> int:
        return hash(self.recipe)


def _largest(x: Tensor) -> int:
    """The largest number of elements up to which a buffer's values are known."""
    if x.is_floating_point() or x.is_complex():
        return -1
    return LARGEST_MASK if x.dtype is torch.bool else LARGEST


def _is_plain(arg: Any) -> bool:
    """Whether an argument of a recipe is a recipe, a number or text, or a container of these."""
    if isinstance(arg, _Inner):
        return arg.recipe is not None
    return all(map(_is_plain, arg)) if isinstance(arg, tuple) else isinstance(arg, _PLAIN)


def _copies_source(written: Tensor, source: Any) -> bool:
    """Whether a copy leaves the tensor equal to its source, so that the source's recipe describes it."""
    return isinstance(source, Tensor) and source.shape == written.shape and source.dtype == written.dtype


def _frozen(arg: Any) -> Any:
    return tuple(map(_frozen, arg)) if isinstance(arg, list | tuple) else arg


def _has_mask(recipe: Recipe) -> bool:
    func, args, _ = recipe
    return func.__name__ in _MASKS or any(
        arg.recipe is not None and _has_mask(arg.recipe) for arg in args if isinstance(arg, _Inner)
    )


def recomputed(recipes: Mapping[str, Recipe]) -> Iterator[tuple[str, Tensor]]:
    """The buffers by name, computed again."""
    done: dict[Recipe, Tensor] = {}

    def make(recipe: Recipe) -> Tensor:
        if recipe not in done:
            func, args, named = recipe
            given = [make(arg.recipe) if isinstance(arg, _Inner) and arg.recipe else arg for arg in args]
            done[recipe] = func(*given, **dict(named))
        return done[recipe]

    for name, recipe in recipes.items():
        yield name, make(recipe)
