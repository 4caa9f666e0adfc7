"""Reductions over the rows that a mask selects, as reductions over all rows in which the others do not count.

x[mask].amax(0)      ->   where(mask, x, -inf).amax(0)
x[mask].var(0)       ->   where(mask, x - mean, 0).square().sum(0) / (mask.sum() - 1)
x[mask].softmax(0)   ->   where(mask, x, lowest).softmax(0), of which the selected rows count
x[mask].T @ y[mask]  ->   where(mask, x, 0).T @ y
x[mask].argmax()     ->   the place among all rows, and its number among the selected ones: mask.cumsum(0) - 1
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from partc.frontend.selections.selected_rows import MaskedRows, SelectedRows
from partc.frontend.torch_call import TorchCall

Number = float | int | bool


def _least(dtype: torch.dtype) -> Number:
    if dtype is torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _most(dtype: torch.dtype) -> Number:
    if dtype is torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _lowest(dtype: torch.dtype) -> Number:
    """A finite number far below all others: a softmax of -inf alone would be nan, and so would its gradient."""
    return torch.finfo(dtype).min if dtype.is_floating_point else torch.iinfo(dtype).min


@dataclass(frozen=True, slots=True)
class _Filled:
    """A reduction over all rows. Rows that are not selected hold a number that does not change its result.

    `dim` is the place of the argument of that name. The result holds the selected rows again if `keeps`.
    """

    number: Callable[[torch.dtype], Number]
    dim: int = 1
    keeps: bool = False


_zero, _one = lambda dtype: 0, lambda dtype: 1
_FILLED: Mapping[str, _Filled] = {
    **dict.fromkeys(("sum", "any", "count_nonzero", "nansum"), _Filled(_zero)),
    **dict.fromkeys(("all", "prod"), _Filled(_one)),
    **dict.fromkeys(("amax", "max", "argmax", "logsumexp"), _Filled(_least)),
    **dict.fromkeys(("amin", "min", "argmin"), _Filled(_most)),
    **dict.fromkeys(("softmax", "log_softmax"), _Filled(_lowest, keeps=True)),
    "cumsum": _Filled(_zero, keeps=True),
    "cumprod": _Filled(_one, keeps=True),
    **dict.fromkeys(("norm", "linalg_vector_norm"), _Filled(_zero, dim=2)),
    "normalize": _Filled(_zero, dim=2, keeps=True),
}
_SPREADS = ("var", "std", "var_mean", "std_mean")
_PRODUCTS = ("matmul", "__matmul__", "mm", "bmm", "dot")
REDUCTIONS = frozenset({*_FILLED, *_SPREADS, "mean", "batch_norm", "cov"})
CONTRACTIONS = frozenset({*_PRODUCTS, "einsum"})


def reduced(rows: SelectedRows, call: TorchCall, held: MaskedRows) -> Any:
    """The result of a reduction over selected rows; NotImplemented if it does not run over the dimension of rows."""
    x, name, args, kwargs = call.given, call.name, call.args, call.kwargs
    if name == "batch_norm":
        return _normalized(rows, call, held)
    if name == "cov":
        return _covariance(x, held, **kwargs) if len(args) == 1 else NotImplemented
    dims = call.argument(_FILLED[name].dim if name in _FILLED else 1, "dim", kwargs.get("axis"))
    if isinstance(dims, Tensor) or "other" in kwargs or kwargs.get("out") is not None:
        return NotImplemented
    if name in _SPREADS and isinstance(dims, bool):
        return reduced(rows, replace(call, args=(x,), kwargs={**kwargs, "unbiased": dims}), held)
    if name == "normalize":
        dims = 1 if dims is None else dims
    over = _over(dims, x)
    if held.dim not in over:
        return NotImplemented
    if name in _SPREADS:
        return _spread(call, held, over)
    if name == "mean":
        total = torch.sum(held.only(x), *args[1:], **kwargs)
        return total / (held.count() * _others(x, held, over))
    rule = _FILLED[name]
    if name in ("norm", "linalg_vector_norm") and not _is_positive(call):
        return NotImplemented
    if name in ("argmax", "argmin") and dims is None and held.dim:
        return NotImplemented
    made = call.run_on(held.only(x, rule.number(x.dtype)))
    if rule.keeps:
        return rows.again(made, held)
    if name in ("argmax", "argmin"):
        inner = _others(x, held, over) if dims is None else 1
        return held.numbers(made // inner) * inner + made % inner
    if not isinstance(made, Tensor):  # values, places
        return type(made)((made[0], held.numbers(made[1])))
    return made


def contracted(rows: SelectedRows, call: TorchCall) -> Any:
    """A product that sums over selected rows; NotImplemented if the rows are no summed dimension."""
    args = call.args
    if call.name in _PRODUCTS:
        if len(args) != 2 or not all(isinstance(x, Tensor) for x in args):
            return NotImplemented
        left, right = args
        summed: list[tuple[Tensor, set[int]]] = [(left, {left.dim() - 1}), (right, {max(right.dim() - 2, 0)})]
        operands: Sequence[Any] = args
    else:
        if not isinstance(args[0], str) or "." in args[0]:
            return NotImplemented
        terms, _, result = args[0].replace(" ", "").partition("->")
        operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
        if "->" not in args[0]:
            return NotImplemented
        summed = [
            (x, {dim for dim, letter in enumerate(term) if letter not in result})
            for x, term in zip(operands, terms.split(","), strict=True)
        ]
    held = [rows.of(x) for x, _ in summed]
    if not any(each is not None and each.dim in dims for each, (_, dims) in zip(held, summed, strict=True)):
        return NotImplemented
    if any(each is not None and each.dim not in dims for each, (_, dims) in zip(held, summed, strict=True)):
        return NotImplemented
    only = [x if each is None else each.only(x) for x, each in zip(operands, held, strict=True)]
    return call.func(*([] if call.name in _PRODUCTS else args[:1]), *only, **call.kwargs)


def mean_loss(call: TorchCall, held: MaskedRows) -> Any:
    """A loss of the selected rows: the sum or the mean of their losses."""
    name = call.name
    try:
        given = inspect.signature(call.func).bind(*call.args, **call.kwargs).arguments
    except (TypeError, ValueError):
        return NotImplemented
    reduction = given.get("reduction", "mean")
    if reduction == "none" or held.dim or not (given.get("size_average") is given.get("reduce") is None):
        return NotImplemented
    weight = given.get("weight")
    counted = name in ("cross_entropy", "nll_loss")
    if weight is not None and not (counted or name.startswith("binary")):
        return NotImplemented
    losses = call.func(**{**given, "reduction": "none"})
    if losses.shape[:1] != (held.mask.numel(),):
        return NotImplemented
    total = held.only(losses).sum()
    if reduction == "sum":
        return total
    target = given.get("target")
    if counted and isinstance(target, Tensor) and not target.is_floating_point():
        ignored = target.eq(given.get("ignore_index", -100))
        shares = torch.ones_like(losses) if weight is None else weight[torch.where(ignored, 0, target)]
        return total / held.only(torch.where(ignored, 0, shares)).sum()
    if weight is not None and counted:
        return NotImplemented
    return total / (held.count() * (1 if reduction == "batchmean" else math.prod(losses.shape[1:])))


def _over(dims: Any, x: Tensor) -> set[int]:
    """The dimensions over which a reduction runs."""
    listed = range(x.dim()) if dims is None or dims == () else [dims] if isinstance(dims, int) else dims
    return {dim % x.dim() for dim in listed}


def _others(x: Tensor, held: MaskedRows, over: set[int]) -> int:
    """The number of elements of a row over which a reduction runs."""
    return math.prod(x.shape[dim] for dim in over - {held.dim})


def _is_positive(call: TorchCall) -> bool:
    """Whether a norm has an order in which zeros add nothing."""
    order = call.argument(1, "p", call.kwargs.get("ord", 2))
    return order in (None, "fro") or (isinstance(order, int | float) and order > 0)


def _spread(call: TorchCall, held: MaskedRows, over: set[int]) -> Any:
    """Variance or standard deviation; a second result is the mean."""
    correction = call.kwargs.get("correction")
    correction = int(bool(call.argument(2, "unbiased", True))) if correction is None else correction
    dims = sorted(over)
    mean, variance = moments(call.given, held, dims, correction)
    if call.name.startswith("std"):  # whose gradient at zero is zero
        still = variance == 0
        variance = torch.where(still, 0, torch.where(still, 1, variance).sqrt())
    kept = call.argument(3, "keepdim", False)
    found = [each if kept else each.squeeze(dims) for each in (variance, mean)]
    return tuple(found) if call.name.endswith("mean") else found[0]


def moments(x: Tensor, held: MaskedRows, dims: list[int], correction: float) -> tuple[Tensor, Tensor]:
    """Mean and variance over these dimensions, which stay with size one."""
    count = held.count() * _others(x, held, set(dims))
    mean = held.only(x).sum(dims, keepdim=True) / count
    squares = held.only(x - mean).square()
    return mean, squares.sum(dims, keepdim=True) / (count - correction).clamp(min=0)


def _covariance(x: Tensor, held: MaskedRows, correction: int = 1, **weights: Any) -> Any:
    """The covariance of the variables in a matrix's rows, whose columns are the selected observations."""
    if x.dim() != 2 or held.dim != 1 or any(given is not None for given in weights.values()):
        return NotImplemented
    apart = held.only(x - moments(x, held, [1], correction)[0])
    return apart @ apart.t() / (held.count() - correction).clamp(min=0)


def _normalized(rows: SelectedRows, call: TorchCall, held: MaskedRows) -> Any:
    """Batch norm with the statistics of the selected rows."""
    given = inspect.signature(call.func).bind(*call.args, **call.kwargs)
    given.apply_defaults()
    named = given.arguments
    x, mean, variance = named["input"], named["running_mean"], named["running_var"]
    if held.dim or not (named["training"] or mean is None):
        return NotImplemented
    own, spread = moments(x, held, [dim for dim in range(x.dim()) if dim != 1], 0)
    if mean is not None:
        count = held.count() * math.prod(x.shape[2:])
        with torch.no_grad():
            mean.lerp_(own.flatten().to(mean.dtype), named["momentum"])
            variance.lerp_((spread.flatten() * count / (count - 1)).to(variance.dtype), named["momentum"])
    made = (x - own) * (spread + named["eps"]).rsqrt()
    shape = [1, -1, *(1 for _ in x.shape[2:])]
    if named["weight"] is not None:
        made = made * named["weight"].reshape(shape)
    if named["bias"] is not None:
        made = made + named["bias"].reshape(shape)
    return rows.again(made, held)
