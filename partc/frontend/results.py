"""The results of forward-only functions: scalars from `evaluate`, tensors of any shape from `infer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from partc.errors import PartcError
from partc.runtime.documents import Malformed
from partc.runtime.train.entries import entries

Purpose = Literal["loss", "evaluate", "infer"]  # the function that a trace follows
Read = Callable[[Any], Mapping[str, Tensor]]


def read_for(purpose: Purpose, *, own: bool) -> Read | None:
    """The function that reads a result for this purpose; None for a loss. `own`: the user defined a function for it."""
    if purpose == "evaluate" and not own:
        return loss_alone
    return {"loss": None, "evaluate": returned_scalars, "infer": returned_tensors}[purpose]


def in_evaluation(model: Any) -> Any:
    return model.eval() if isinstance(model, nn.Module) else model


def loss_alone(found: Any) -> dict[str, Tensor]:
    """The loss, which is the default evaluation."""
    return returned_scalars({"": found["loss"] if isinstance(found, Mapping) else getattr(found, "loss", found)})


def returned_scalars(found: Any) -> dict[str, Tensor]:
    """The scalars that `evaluate` returns: one, or a dict of them. An object with a loss stands for its loss.

    Integers and booleans become fp64, in which counts are exact. Raises PartcError P0206 and P0208.
    """
    if not isinstance(found, Tensor) and type(found) is not dict:
        found = found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", found)
    named = found if isinstance(found, dict) else {"": found}
    if not named:
        raise PartcError("P0206", "evaluate() returns an empty dict", help="return scalars by name")
    for name, x in named.items():
        what = f"evaluate() returns {name!r}, which is" if name else "evaluate() returns"
        if not isinstance(x, Tensor) or not isinstance(name, str):
            help = "return a scalar tensor, or a dict of them by name"
            raise PartcError("P0206", f"{what} a {type(x).__name__}", help=help)
        if x.dim() or x.is_complex():
            wrong = f"of shape {tuple(x.shape)}" if x.dim() else "complex"
            raise PartcError("P0208", f"{what} {wrong}", help="return its mean or sum: a real scalar")
    return {name: x if x.is_floating_point() else x.to(torch.float64) for name, x in named.items()}


def returned_tensors(found: Any) -> dict[str, Tensor]:
    """The tensors that `infer`, or the model itself, returns: a tensor, or a nest of dicts, tuples and dataclasses.

    Raises PartcError P0206 and P0208.
    """
    if isinstance(found, Tensor):
        found = {"": found}
    try:
        named = entries(found)
    except Malformed as error:
        help = "define infer(model, batch), which returns a tensor, or a dict, tuple or dataclass of tensors"
        raise PartcError("P0206", f"the result of inference {error}", help=help) from None
    for name, x in named.items():
        if isinstance(x, Tensor) and x.is_complex():
            raise PartcError("P0208", f"the result {name!r} is complex", help="return torch.view_as_real of it")
    return {name: x for name, x in named.items() if isinstance(x, Tensor)}
