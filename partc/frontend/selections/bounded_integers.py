"""Upper bounds of integers, while a model is traced. Places along a dimension are below its size.

chosen = scores.topk(2).indices             below scores.shape[-1]
chosen.view(-1).to(torch.int32)             the same bound
chosen.unique()                     ->      torch.bincount(chosen, minlength=bound).nonzero()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from partc.frontend.by_tensor import ByTensor
from partc.ir.operations import KEEPING, SHOWING

# Functions that return places along a dimension: the position of the argument that names it, and its default.
_PLACES: Mapping[str, tuple[int, int | None]] = {
    "argmax": (1, None), "argmin": (1, None), "max": (1, None), "min": (1, None), "argsort": (1, -1), "sort": (1, -1),
    "topk": (2, -1), "kthvalue": (2, -1), "multinomial": (3, -1),
}  # fmt: skip
# Every element of a result is an element of the first operand.
_FROM_FIRST = KEEPING | SHOWING | {"__getitem__", "ravel", "long", "int", "cpu", "index_select", "gather", "repeat"}


class BoundedIntegers:
    """The tensors of a trace whose integers are at least zero and below a bound."""

    def __init__(self) -> None:
        self._bounds: ByTensor[tuple[int, int]] = ByTensor()  # tensor -> bound, its version

    def of(self, x: Any) -> int | None:
        """The bound of a tensor's numbers; None if there is none, or if the tensor has changed in place."""
        found = self._bounds.get(x)
        return found[0] if found is not None and found[1] == x._version else None

    def follow(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Any) -> None:
        """Follow the result of a call."""
        if not args or not isinstance(args[0], Tensor):
            return
        if name in _PLACES:
            position, default = _PLACES[name]
            dim = args[position] if len(args) > position else kwargs.get("dim", default)
            places = made[1] if isinstance(made, tuple) and len(made) == 2 else made
            whole = dim is None and name.startswith("arg")
            if isinstance(places, Tensor) and (whole or isinstance(dim, int)) and args[0].dim():
                self._bounds[places] = args[0].numel() if whole else args[0].shape[dim], places._version
        elif name in _FROM_FIRST and (bound := self.of(args[0])) is not None:
            for part in made if isinstance(made, tuple | list) else [made]:
                if isinstance(part, Tensor):
                    self._bounds[part] = bound, part._version
        elif name in ("remainder", "__mod__") and isinstance(made, Tensor):
            divisor = args[1]
            if isinstance(divisor, int) and divisor > 0 and not made.is_floating_point():
                self._bounds[made] = divisor, made._version
