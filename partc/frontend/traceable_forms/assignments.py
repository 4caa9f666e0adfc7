"""scipy's `linear_sum_assignment` of tensors, by which detectors match predictions with objects (Carion et al. 2020).

    rows, columns = linear_sum_assignment(cost)     ->     an operation; both results are tensors

Their numbers of elements follow from the shape of `cost`, so that no size depends on values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from partc.replaced import all_replaced

_NAME = "linear_sum_assignment"


@contextmanager
def traceable_assignments(modules: Iterable[ModuleType]) -> Iterator[None]:
    """A context in which all loaded modules that name scipy's function use an operation for tensors. The user's
    `modules` may have other names for it.
    """
    plain = getattr(sys.modules.get("scipy.optimize"), _NAME, None)
    if plain is None:
        yield
        return
    own = [(home, name) for home in modules for name, value in vars(home).items() if value is plain]
    loaded = [home for home in [*sys.modules.values()] if isinstance(home, ModuleType)]
    named = [(home, _NAME) for home in loaded if vars(home).get(_NAME) is plain]
    with all_replaced((home, name, _of_tensors(plain)) for home, name in (*own, *named)):
        yield


def _of_tensors(plain: Callable[..., Any]) -> Callable[..., Any]:
    def linear_sum_assignment(cost_matrix: Any, maximize: bool = False) -> Any:
        if not isinstance(cost_matrix, Tensor):
            return plain(cost_matrix, maximize)
        if cost_matrix.dim() != 2:
            raise ValueError(f"expected a matrix (2-D array), got a {cost_matrix.dim()} array")  # as scipy does
        return torch.ops.partc.linear_sum_assignment(cost_matrix.detach(), maximize)

    return linear_sum_assignment
