"""Functions of torch that a trace cannot follow, in operations that it can. Their parameters have torch's names.

cov(x)                       compares values               ->  centered @ centered.T / (n - 1)
sparse_coo_tensor(ij, v, n)  makes a sparse tensor         ->  zeros(n).index_put(ij, v, accumulate=True)
linalg.lstsq(a, b)           has a size that values set    ->  linalg.pinv(a) @ b
deepcopy(weight)             copies memory                 ->  weight.detach().clone().requires_grad_()
copy(weight)                 makes a tensor of a storage   ->  weight.detach().requires_grad_()
bincount(x, minlength=8)     has a size that values set    ->  zeros(8).scatter_add(0, x, 1)
one_hot(x, n)[..., :8]       has a size that values set    ->  x[..., None] == arange(8)
combinations(x)              selects by a mask             ->  x[[[0, 1], [0, 2], …]]
affine_grid(theta, size)     reads the batch's length      ->  (grid @ theta.mT).view(-1, height, width, 2)
pad(x, (1, 2), "circular")   writes into an empty tensor   ->  cat([x[..., -1:], x, x[..., :2]], -1)
_foreach_mul_(xs, 0.9)       is one call for many tensors  ->  x.mul_(0.9) for x in xs
result_type(x, 1)            has a constant as its result  ->  torch.float32
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partc.errors import PartcError, untraced
from partc.torch_private import said_class, say_class, without_modes

_FOREACH = "_foreach_"
# What torch's own functions require of values, and the forms below do not check.
UNCHECKED: Mapping[str, str] = {
    "ctc_loss": "input_lengths <= len(log_probs) and target_lengths <= targets.shape[1]",
    "gaussian_nll_loss": "var >= 0",
    "multilabel_margin_loss": "target >= -1",
    "one_hot": "tensor < num_classes, of which there are as many as are read",
}


def traceable_form(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result of a torch function by name, in traceable operations; NotImplemented if there is no such form."""
    form = _FORMS.get(name)
    return NotImplemented if form is None else form(*args, **kwargs)


def is_for_each(name: str) -> bool:
    """Whether an operation applies to lists of tensors, such as the update of a teacher."""
    return name.startswith(_FOREACH)


def fixed_bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    """bincount with a `minlength`, which fixes the size of the result; NotImplemented without it.

    A number of `minlength` or more is an error in the step that reads it.
    """
    if not minlength:
        return NotImplemented
    if weights is None:
        return fixed_bincount(input, torch.ones_like(input, dtype=torch.float64), minlength).to(torch.int64)
    dtype = weights.dtype if weights.dtype == torch.float32 else torch.float64
    return torch.zeros(minlength, dtype=dtype).scatter_add(0, input.to(torch.int64), weights.to(dtype))


class OneHot:
    """One-hot vectors of a number of classes that a tensor holds. Only the first classes can be read."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, index: Any) -> Tensor:
        match index:
            case (first, slice(start=None | 0, stop=int(classes), step=None | 1)) if first is ... and classes > 0:
                return (self._tensor.unsqueeze(-1) == torch.arange(classes)).to(torch.int64)
        raise self._refusal()

    def __getattr__(self, name: str) -> Any:
        raise self._refusal()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise cls._refusal()

    @staticmethod
    def _refusal() -> PartcError:
        return untraced(
            "the number of classes of one_hot is a value of a tensor",
            help="give num_classes as an integer; one_hot(x, n)[..., :8], the first classes alone, traces with any n",
        )


def one_hot(tensor: Tensor, num_classes: int | Tensor = -1) -> Any:
    """Vectors of a number of classes that a tensor holds; NotImplemented for Python numbers."""
    return OneHot(tensor) if isinstance(num_classes, Tensor) else NotImplemented


def combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = [place for chosen in choose(range(len(input)), r) for place in chosen]
    return input.index_select(0, torch.tensor(places, dtype=torch.int64)).reshape(-1, r) if r else input[:0]


def for_each(name: str, tensors: Sequence[Tensor], *operands: Any, **named: Any) -> list[Tensor] | None:
    """A `_foreach_` operation as one operation for each tensor of a list. Operations in place return None."""
    name = name.removeprefix(_FOREACH)
    if name in ("norm", "addcmul", "addcmul_", "addcdiv", "addcdiv_"):  # their scalar arguments have names
        lists, word = (0, "ord") if name == "norm" else (2, "value")
        named = {word if key == "scalars" else key: x for key, x in named.items()}
        named.update(zip([word], operands[lists:], strict=False))
        operands = operands[:lists]
    run = torch.linalg.vector_norm if name == "norm" else getattr(Tensor, name)
    part = lambda x, index: x[index] if isinstance(x, list | tuple) else x  # noqa: E731
    found = [
        run(x, *(part(each, i) for each in operands), **{key: part(each, i) for key, each in named.items()})
        for i, x in enumerate(tensors)
    ]
    return None if name.endswith("_") else found


def fake_quantized(input: Tensor, scale: Any, zero_point: Any, quant_min: int, quant_max: int) -> Any:
    """torch.fake_quantize_per_tensor_affine in fp32; torch has no kernel for tensors without memory.

    NotImplemented if the scale or the zero point is a tensor.
    """
    if isinstance(scale, Tensor) or isinstance(zero_point, Tensor):
        return NotImplemented
    single = torch.tensor(scale, dtype=torch.float32)
    step, inverse = float(single), float(1 / single)
    number = torch.round(input.detach() * inverse) + zero_point
    inside = (number >= quant_min) & (number <= quant_max)
    passed = torch.where(inside, input, input.detach())
    value = (number.clamp(quant_min, quant_max) - zero_point).to(torch.float32) * step
    return value.to(input.dtype) + (passed - passed.detach())


def covariance(input: Tensor, *, correction: int = 1, **weights: Any) -> Any:
    """torch.cov; torch's own function compares values. NotImplemented with weights."""
    if weights:
        return NotImplemented
    input = input if input.dim() == 2 else input.reshape(1, -1)
    centered = input - input.mean(1, keepdim=True)
    return (centered @ centered.T / max(input.shape[1] - correction, 0)).squeeze()


def correlation(input: Tensor) -> Tensor:
    """torch.corrcoef."""
    found: Tensor = covariance(input)
    if not found.dim():
        return found / found
    deviations = found.diagonal().sqrt()
    return (found / deviations[:, None] / deviations).clamp(-1, 1)


def dense_by_places(indices: Any, values: Any, size: Any = None, *, dtype: Any = None, **_: Any) -> Any:
    """torch.sparse_coo_tensor as a dense tensor. NotImplemented without a size, which places would determine."""
    if size is None:
        return NotImplemented
    indices, values = torch.as_tensor(indices), torch.as_tensor(values, dtype=dtype)
    return values.new_zeros(size).index_put(indices.unbind(0), values, accumulate=True)


def dense_by_rows(crow_indices: Any, col_indices: Any, values: Any, size: Any = None, **named: Any) -> Any:
    """torch.sparse_csr_tensor of a matrix as a dense tensor."""
    starts, columns = torch.as_tensor(crow_indices), torch.as_tensor(col_indices)
    if starts.dim() != 1:
        return NotImplemented
    rows = torch.repeat_interleave(starts.diff(), output_size=len(columns))
    return dense_by_places(torch.stack([rows, columns]), values, size, **named)


def affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool | None = None) -> Tensor:
    """F.affine_grid; torch's operation has no rule that says that it treats examples alike."""
    F.affine_grid(theta, list(size), align_corners)  # checks the operands, and is then dead code
    space = [*size[2:]]

    def positions(n: int) -> Tensor:
        ends = torch.linspace(-1, 1, n, dtype=theta.dtype) if n > 1 else torch.zeros(1, dtype=theta.dtype)
        return ends if align_corners else ends * ((n - 1) / n)

    places = torch.meshgrid(*map(positions, space), indexing="ij")
    grid = torch.stack([*reversed(places), torch.ones_like(places[0])], -1).flatten(0, -2)
    return (grid @ theta.mT).view(size[0], *space, len(space))


def circular_padding(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    """F.pad with the mode `circular`. NotImplemented for other modes, and for paddings that torch refuses or that cut.

    torch's own decomposition copies the tensor once more for each side.
    """
    sizes = input.shape[2:]
    pairs = [*zip(pad[::2], pad[1::2], strict=False)][::-1]  # torch begins with the last dimension
    fits = len(pad) == 2 * len(sizes) and all(
        0 <= side <= size for pair, size in zip(pairs, sizes, strict=False) for side in pair
    )
    if mode != "circular" or not fits:
        return NotImplemented
    for dim, (before, after) in enumerate(pairs, 2):
        ends = input.narrow(dim, input.shape[dim] - before, before), input.narrow(dim, 0, after)
        if before or after:
            input = torch.cat([part for part in (ends[0], input, ends[1]) if part.shape[dim]], dim)
    return input


class LeastSquares(NamedTuple):
    """The result of torch.linalg.lstsq."""

    solution: Tensor
    residuals: Tensor
    rank: Tensor
    singular_values: Tensor


def least_squares(input: Tensor, b: Tensor, rcond: Any = None, *, driver: str | None = None) -> Any:
    """torch.linalg.lstsq by the pseudoinverse, of which torch's own gradient is computed too. NotImplemented for
    drivers other than the default one.
    """
    if driver not in (None, "gelsy"):
        return NotImplemented
    vectors = b.dim() == input.dim() - 1 and b.shape == input.shape[:-1]
    columns = b.unsqueeze(-1) if vectors else b
    solution = torch.linalg.pinv(input, rtol=rcond) @ columns
    rank = torch.linalg.matrix_rank(input, rtol=rcond)
    none = input.new_zeros(0)  # this driver returns neither residuals nor singular values
    return LeastSquares(solution.squeeze(-1) if vectors else solution, none, rank, none)


def multi_margin_loss(
    input: Tensor,
    target: Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Tensor:
    """F.multi_margin_loss in traceable operations; torch's decomposition has another gradient at the margin."""
    if p not in (1, 2):
        raise ValueError("only p == 1 and p == 2 supported")
    scores, labels = torch.atleast_2d(input), torch.atleast_1d(target)[:, None]
    gaps = (margin - scores.gather(1, labels) + scores).relu() ** p
    if weight is not None:
        gaps = gaps * weight[labels]
    classes = torch.arange(scores.shape[1], device=scores.device)
    each = gaps.masked_fill(labels == classes, 0).mean(1)
    return _reduced(each, input, size_average, reduce, reduction)


def multilabel_margin_loss(
    input: Tensor, target: Tensor, size_average: Any = None, reduce: Any = None, reduction: str = "mean"
) -> Tensor:
    """F.multilabel_margin_loss in traceable operations; torch's decomposition wrongly counts labels behind the first
    -1.
    """
    scores, labels = torch.atleast_2d(input), torch.atleast_2d(target)
    given = (labels < 0).cumsum(1) == 0
    labels = labels.masked_fill(~given, 0)
    classes = torch.arange(scores.shape[1], device=scores.device)
    chosen = ((labels[..., None] == classes) & given[..., None]).any(1)
    gaps = (1 - scores.gather(1, labels)[..., None] + scores[:, None]).relu()
    each = gaps.masked_fill(~given[..., None] | chosen[:, None], 0).sum((1, 2)) / scores.shape[1]
    return _reduced(each, input, size_average, reduce, reduction)


def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """F.gaussian_nll_loss; it clamps variances under no_grad, which no trace sees within a function of torch."""
    if not isinstance(var, Tensor) and var < 0:
        raise ValueError("var has negative entry/entries")
    variance = var if isinstance(var, Tensor) else torch.full_like(input, var)
    if variance.shape != input.shape and variance.shape == input.shape[:-1]:
        variance = variance.unsqueeze(-1)
    if variance.dim() != input.dim() or torch.broadcast_shapes(variance.shape, input.shape) != input.shape:
        raise ValueError("var is of incorrect size")
    clamped = torch.where(variance < eps, variance - variance.detach() + eps, variance)
    each: Tensor = 0.5 * (clamped.log() + (input - target) ** 2 / clamped)
    if full:
        each = each + 0.5 * math.log(2 * math.pi)
    return each if reduction == "none" else each.mean() if reduction == "mean" else each.sum()


def deep_copied(x: Tensor, memo: dict[int, Any]) -> Tensor:
    """copy.deepcopy of a weight, a buffer or a detached tensor, whose memory torch would copy."""
    if not x.is_leaf:
        raise RuntimeError("Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol")
    if id(x) not in memo:
        memo[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
        say_class(memo[id(x)], said_class(x))
    made: Tensor = memo[id(x)]
    return made


def copied(x: Tensor, protocol: int) -> tuple[Callable[..., Tensor], tuple[Tensor]]:
    """copy.copy of a tensor: how to make a leaf in the same memory. Of a class of weights, it makes a plain weight."""

    def made(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_(x.requires_grad)
        say_class(leaf, nn.Parameter if isinstance(x, nn.Parameter) else Tensor)
        return leaf

    return made, (x,)


def constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of dtypes and sizes alone. A trace would record its calls, whose results are not tensors."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with without_modes():
            return function(*args, **kwargs)

    return run


def _reduced(each: Tensor, input: Tensor, size_average: Any, reduce: Any, reduction: str) -> Tensor:
    """The losses of examples, or their mean or sum; `input` may be one example."""
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    if reduction == "none":
        return each if input.dim() == 2 else each[0]
    return each.mean() if reduction == "mean" else each.sum()


_FORMS: Mapping[str, Callable[..., Any]] = {
    "__deepcopy__": deep_copied,
    "__reduce_ex__": copied,
    "_sparse_mm": torch.matmul,
    "affine_grid": affine_grid,
    "affine_grid_generator": affine_grid,
    "bincount": fixed_bincount,
    "can_cast": constant(torch.can_cast),
    "coalesce": torch.clone,
    "combinations": combinations,
    "corrcoef": correlation,
    "cov": covariance,
    "fake_quantize_per_tensor_affine": fake_quantized,
    "gaussian_nll_loss": gaussian_nll_loss,
    "is_same_size": constant(Tensor.is_same_size),
    "linalg_lstsq": least_squares,
    "multi_margin_loss": multi_margin_loss,
    "multilabel_margin_loss": multilabel_margin_loss,
    "one_hot": one_hot,
    "pad": circular_padding,
    "promote_types": constant(torch.promote_types),
    "result_type": constant(torch.result_type),
    "sparse_coo_tensor": dense_by_places,
    "sparse_csr_tensor": dense_by_rows,
}
