"""The model of a trace: built without values, checked, and with fake parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from partc.errors import PartcError, first_line
from partc.frontend.model_files.model_file import user_line
from partc.frontend.state.constant_buffers import Recipes
from partc.frontend.state.constructor_values import with_values
from partc.frontend.state.shared_memory import Pair, shared_with
from partc.quoting import encodable
from partc.replaced import replaced
from partc.runtime.train.plain_tensors import modules_by_path
from partc.runtime.train.precision import dtype_held
from partc.runtime.train.without_values import WithoutValues, built_without_values
from partc.torch_private import FakeTensorMode, fake_stored, storage_identity


def built_model(build: Callable[[], Any], path: Path | None, recipes: Recipes) -> nn.Module:
    """The model, built without values; `recipes` record its constants. Raises PartcError P0205."""
    try:
        with torch.device("meta"), _pointers_of_meta_tensors(), inference_as_no_grad(), recipes:
            plain = WithoutValues()
            try:
                model = built_without_values(build, plain)
            except (NotImplementedError, RuntimeError, TypeError) as error:
                try:
                    model = built_without_values(build, _ValuesOfRanges())
                except Exception:
                    if not plain.needs_values(error):
                        raise error from None
                    with torch.device("cpu"):
                        model = with_values(build)
    except PartcError as error:
        error.source = error.source or user_line(error, path)
        raise
    except (Exception, SystemExit) as error:
        raise PartcError(
            "P0205",
            f"model() fails: {type(error).__name__}: {first_line(error)}",
            help="models are built without values, or in up to 4 GiB of memory if their constructors read values",
            source=user_line(error, path),
        ) from error
    if not isinstance(model, nn.Module):
        raise PartcError(
            "P0205", f"model() returns {type(model).__name__}, not a torch.nn.Module", help="return the model"
        )
    return model


@contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """A context in which inference mode acts like no_grad. A trace would not record it, and tensors in it have no
    versions, which tell whether a constant of a constructor was written to.
    """
    inside: list[torch.set_grad_enabled] = []

    def entered(each: Any) -> None:
        inside.append(torch.set_grad_enabled(not each.mode))
        inside[-1].__enter__()

    left = lambda each, *error: inside.pop().__exit__(*error)  # noqa: E731
    with replaced(torch.inference_mode, __enter__=entered, __exit__=left):
        yield


def walkable(model: Any) -> Any:
    """The model. Raises PartcError P0205 if its modules are nested too deeply."""
    try:
        if isinstance(model, nn.Module):
            modules_by_path(model)
    except RecursionError as error:
        raise PartcError(
            "P0205",
            "the modules of model() are nested deeper than Python's recursion limit",
            help="nest them less deeply: nn.Sequential and nn.ModuleList hold any number side by side",
        ) from error
    return model


@contextmanager
def _pointers_of_meta_tensors() -> Iterator[None]:
    """A context in which tensors on the meta device have pointers, which constructors compare to find tied weights."""
    own, stored = Tensor.data_ptr, torch.UntypedStorage.data_ptr

    def pointer(x: Tensor) -> int:
        if not x.is_meta:
            return own(x)
        return storage_identity(x.untyped_storage()) + int(x.storage_offset()) * x.element_size()

    def pointer_of_storage(x: torch.UntypedStorage) -> int:
        return storage_identity(x) if x.device.type == "meta" else stored(x)

    Tensor.data_ptr = pointer  # type: ignore[method-assign, assignment]
    torch.UntypedStorage.data_ptr = pointer_of_storage  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del Tensor.data_ptr, torch.UntypedStorage.data_ptr


class _ValuesOfRanges(WithoutValues):
    """Gives ranges and literals on the meta device values, from which constructors compute rates and sizes."""

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if func in (torch.arange, torch.linspace, torch.logspace, torch.tensor, torch.as_tensor):
            named = {"device": "cpu", **named}
        return func(*args, **named)


# Members that a subclass of Tensor may define: those that every class has, and those that matter only while a model is
# built.
_OF_CONSTRUCTION = frozenset(vars(type("_", (), {}))) | {
    *("__annotations__", "__new__", "__init__", "__repr__", "__deepcopy__"),
    *("__firstlineno__", "__static_attributes__"),  # of classes in Python 3.13
}


def check_members(modules: Mapping[str, nn.Module]) -> None:
    """Raises PartcError P0205 for weights of kinds that packages do not have, and for names without an encoding."""
    held = (
        (f"{path}.{name}" if path else name, tensor)
        for path, module in modules.items()
        for store in (module._parameters, module._buffers)
        for name, tensor in store.items()
        if tensor is not None
    )
    for name, tensor in held:
        if is_lazy(tensor):
            raise PartcError(
                "P0205",
                f"{name} of model() has no shape yet",
                help="use modules that are given their sizes, not lazy ones",
            )
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
            kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else "sparse"
            raise PartcError(
                "P0205",
                f"{name} of model() is {kind}; parameters and buffers are dense",
                help="store it dense, or its parts in buffers of their own: a sparse matrix has places and values",
            )
        own = [cls for cls in type(tensor).__mro__ if cls.__module__.split(".")[0] != "torch" and cls is not object]
        if member := next((member for cls in own for member in vars(cls) if member not in _OF_CONSTRUCTION), None):
            raise PartcError(
                "P0205",
                f"{name} of model() is a {type(tensor).__name__}, whose class has a member {member} of its own",
                help="use nn.Parameter, and write what the class does in forward",
            )
    names: dict[str, None] = {}
    for part in modules.values():
        for store in (part._modules, part._parameters, part._buffers):
            names |= dict.fromkeys(store.keys())
    for name in names:
        if not encodable(name):
            raise PartcError(
                "P0205",
                f"model() has a part named {name!a}, which UTF-8 cannot encode",
                help="give it another name",
            )


def check_pairs(pairs: Iterable[Pair]) -> None:
    """Raises PartcError P0205 for a trained weight in the memory of another tensor."""
    if (shared := shared_with(pairs)) is not None:
        raise PartcError(
            "P0205",
            f"{shared[0]} and {shared[1]} of model() are different tensors in one memory, which training changes twice",
            help=f"tie them by one tensor under both names ({shared[1]} = {shared[0]}), or copy: .clone()",
        )


def make_fake(modules: Mapping[str, nn.Module], dtype: torch.dtype, mode: FakeTensorMode, left_out: Set[str]) -> None:
    """Replace every parameter and buffer by a fake one on the CPU; ties are kept, floats are cast.

    Tensors of modules that the trace leaves out stay as they are if no cast is needed.
    """
    made: dict[int, Tensor] = {}

    def fake(old: Tensor) -> Tensor:
        if id(old) not in made:
            empty = torch.empty(old.shape, dtype=dtype_held(old.dtype, dtype), device="meta")
            made[id(old)] = fake_stored(mode, empty, old)
        return made[id(old)]

    for path, module in modules.items():
        for store in (module._parameters, module._buffers):
            for name, old in store.items():
                if old is not None and (path not in left_out or old.dtype != dtype_held(old.dtype, dtype)):
                    store[name] = fake(old)  # type: ignore[assignment]
