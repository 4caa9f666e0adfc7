"""The precision of a model's own code: in float64, casts keep float64; grouped products accept any dtype; operations
inside a disabled autocast are marked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_WIDE = {
    torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}  # fmt: skip


class _AnyGrouped(TorchFunctionMode):
    """Computes torch's grouped products, which support few dtypes and only aligned rows, in any dtype."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in ("_grouped_mm", "grouped_mm"):
            given = dict(zip(("x", "w", "offs", "bias", "out_dtype"), args, strict=False)) | dict(kwargs or {})
            x, w, offs = given["x"], given["w"], given.get("offs")
            if (x.dim(), w.dim()) == (2, 3) and offs is not None and given.get("bias") is None:
                if torch.is_autocast_enabled(x.device.type):
                    x, w = (each.to(torch.get_autocast_dtype(x.device.type)) for each in (x, w))
                made = _grouped_mm(x, w, offs)
                return made if given.get("out_dtype") is None else made.to(given["out_dtype"])
        return self.compute(func, args, kwargs or {})

    def compute(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


class _Double(_AnyGrouped):
    """Replaces floating-point dtypes in arguments of functions by float64, and complex ones by complex128."""

    def compute(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in (torch.Tensor.float, torch.Tensor.bfloat16, torch.Tensor.half):
            return args[0].double()
        if getattr(func, "__name__", "") == "cfloat":
            return args[0].cdouble()
        wide = lambda arg: _WIDE.get(arg, arg) if isinstance(arg, torch.dtype) else arg  # noqa: E731
        return func(*map(wide, args), **{key: wide(arg) for key, arg in kwargs.items()})


WIDE_MARK = "wide_mark"  # in a traced graph: operations begin, or cease, to demand fp32
_library = torch.library.Library("partc", "FRAGMENT")
_library.define(f"{WIDE_MARK}(Tensor[] none, bool begins) -> ()")
_library.impl(WIDE_MARK, lambda none, begins: None, "CompositeExplicitAutograd")
torch.fx.node.has_side_effect(torch.ops.partc.wide_mark.default)
_depth = ContextVar("depth", default=0)  # of disabled autocasts around the code that runs


def mark_disabled_autocast(begins: bool) -> None:
    """Mark the begin or the end of a disabled autocast in the traced graph."""
    _depth.set(_depth.get() + (1 if begins else -1))
    torch.ops.partc.wide_mark.default([], begins)


def modes() -> tuple[Any, ...]:
    """The modes on which the result of a call depends besides its arguments."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        _depth.get() > 0,
    )


@torch.library.custom_op("partc_any::grouped_mm", mutates_args=())
def _grouped_mm(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """The product of each group's rows with its matrix, x[s, i] w[g, i, o] -> [s, o]; zero for rows of no group.

    torch's own function lacks double precision, and only traces in bf16.
    """
    parts = [x[start:end] @ w[group] for group, (start, end) in enumerate(_groups(offs))]
    return torch.cat([*parts, x.new_zeros(x.shape[0] - sum(map(len, parts)), w.shape[2])])


@_grouped_mm.register_fake
def _(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    if x.dtype != w.dtype:
        raise RuntimeError(f"rows and matrices must have the same type, got {x.dtype} and {w.dtype}")
    return x.new_empty(x.shape[0], w.shape[2])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


@torch.library.custom_op("partc_any::grouped_mm_grad_weight", mutates_args=())
def _grad_weight(grad: Tensor, x: Tensor, offs: Tensor) -> Tensor:
    return torch.stack([x[start:end].mT @ grad[start:end] for start, end in _groups(offs)])


@_grad_weight.register_fake
def _(grad: Tensor, x: Tensor, offs: Tensor) -> Tensor:
    return x.new_empty(offs.shape[0], x.shape[1], grad.shape[1])


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, w, offs = ctx.saved_tensors
    return _grouped_mm(grad, w.mT, offs), _grad_weight(grad, x, offs), None


_grouped_mm.register_autograd(_gradients, setup_context=_keep)


def _groups(offs: Tensor) -> Iterator[tuple[int, int]]:
    ends = offs.tolist()
    return zip([0, *ends[:-1]], ends, strict=True)


@contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` the default; for float64, also replace explicit float32, bfloat16 and float16.

    Otherwise a model that computes its norms or loss in float32, or products in bfloat16, would round there, and could
    not be compared to 1e-10.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _Double() if dtype == torch.float64 else _AnyGrouped():
            yield
    finally:
        torch.set_default_dtype(before)
