"""The comparison of a package with its single-device model: result, tolerances, and measures of difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# Tolerances for rounding. fp64 leaves no room for anything else; fp32 sums in another order. Parameters are measured
# against torch.optim's update from the package's own gradients, which are measured against the model's. Constants are
# buffers, and parameters without gradients or that forward changes.
TOLERANCES: Mapping[str, Mapping[str, float]] = {
    "fp64": {"loss": 1e-10, "gradient": 1e-10, "parameter": 1e-10, "constant": 1e-10},
    # Against torch's autocast, which rounds in other places: significands have 8 (bf16) or 11 (fp16) bits.
    "bf16": {"loss": 2e-2, "gradient": 1e-1, "parameter": 2e-6, "constant": 1e-2},
    "fp16": {"loss": 5e-3, "gradient": 5e-2, "parameter": 2e-6, "constant": 1e-2},
    "fp32": {"loss": 1e-5, "gradient": 2e-4, "parameter": 2e-6, "constant": 2e-4},
    # Gradients that cross nodes with 255 levels for 256 numbers; the next step corrects a step's error.
    "int8": {"loss": 2e-2, "gradient": 3e-1, "parameter": 2e-6, "constant": 1e-2},
}
MIXED = ("bf16", "fp16", "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One comparison: a loss, gradient, parameter or constant, on one rank after one step (counted from 1)."""

    kind: str
    name: str
    rel_err: float
    step: int = 1
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """The document that `partc verify --json` prints."""

    ok: bool
    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    worst: Difference
    tolerance: float  # the tolerance for the worst difference's kind
    rounding: str  # the precision from which the tolerance follows
    compared: int  # the number of compared tensors and losses
    # Whether the model's steps after the first started from the package's own values.
    restarted: bool = False


def relative_error(mine: Tensor | float, theirs: Tensor | float, scale: float) -> float:
    """The largest difference divided by `scale`; infinite if either is not a number."""
    error = (
        float((torch.as_tensor(mine) - torch.as_tensor(theirs)).abs().amax()) if torch.as_tensor(mine).numel() else 0.0
    )
    if not math.isfinite(error):
        return math.inf
    return error / scale if scale > 0 else (0.0 if error == 0 else math.inf)


def largest_magnitude(x: Tensor) -> float:
    """The largest magnitude of the finite numbers. Infinities occur in masks, and do not set a scale."""
    return _over_numbers(x, lambda numbers: numbers.abs().amax())


def root_mean_square(x: Tensor) -> float:
    """The root of the mean square. It measures rounding in a whole tensor, of which single elements may cross a relu's
    zero.
    """
    return _over_numbers(x, lambda numbers: numbers.double().square().mean().sqrt())


def difference(mine: Tensor, theirs: Tensor, measure: Callable[[Tensor], float]) -> float:
    """The measure of a difference; infinite if integers, booleans or infinities differ, or if a number is NaN."""
    if not theirs.is_floating_point():
        return 0.0 if torch.equal(mine, theirs) else math.inf
    apart = torch.where(mine == theirs, 0, mine - theirs)
    return measure(apart) if bool(apart.isfinite().all()) else math.inf


def _over_numbers(x: Tensor, measure: Callable[[Tensor], Tensor]) -> float:
    if not x.is_floating_point():
        return 0.0
    numbers = x[x.isfinite()]
    return float(measure(numbers)) if numbers.numel() else 0.0
