"""The loads of experts in a single-device run, from which their routers' biases are updated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from partc.runtime.torch_private import TorchDispatchMode

_CHOOSING = (torch.ops.aten.topk.default, torch.ops.aten.sort.default, torch.ops.aten.argmax.default)


class LoadCounts(TorchDispatchMode):
    """Counts how often each expert is chosen by scores that depend on a bias. Only the last such choice counts."""

    def __init__(self, biases: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._biases = biases
        self._behind: dict[int, tuple[Tensor, str]] = {}  # values that depend on a bias
        self._chosen: dict[str, Tensor] = {}
        self.loads = {name: torch.zeros(bias.numel(), dtype=torch.int64) for name, bias in biases.items()}

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for name in [*self._chosen]:
            self._count(name)
        self._behind.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        name = next(filter(None, (self._bias(x) for x in args if isinstance(x, Tensor))), None)
        if name is not None:
            if any(x is self._biases[name] for x in args):
                self._count(name)
            for x in made if isinstance(made, tuple | list) else (made,):
                if x.is_floating_point():
                    self._behind[id(x)] = x, name
                elif func in _CHOOSING:
                    self._chosen[name] = x
        return made

    def _bias(self, x: Tensor) -> str | None:
        found = self._behind.get(id(x))
        return found[1] if found else next((name for name, bias in self._biases.items() if bias is x), None)

    def _count(self, name: str) -> None:
        """Count the last choice before the bias is read again."""
        chosen = self._chosen.pop(name, None)
        if chosen is not None:
            self.loads[name] += torch.bincount(chosen.flatten(), minlength=self.loads[name].numel())
