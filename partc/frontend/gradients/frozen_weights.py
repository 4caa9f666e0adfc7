"""Weights that forward stops training for a while, as an adversarial loss does.

self.critic.requires_grad_(False)
generated = self.critic(fake)        ->   generated = critic(fake, detach(weight))
self.critic.requires_grad_(True)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from partc.errors import PartcError
from partc.frontend.repeats.module_rows import WholeTrace
from partc.runtime.torch_private import tree_map_only


class FrozenWeights:
    """The weights that forward has stopped training. Traces that are not `whole` leave calls out, which may read
    them.
    """

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self._frozen: set[int] = set()

    def follow(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Follow `weight.requires_grad_(…)` and `weight.requires_grad = …`. Raises PartcError P0225 if forward begins
        to train a weight.
        """
        sets = name == "requires_grad_" or (
            name == "__set__" and getattr(func, "__self__", None) is Tensor.requires_grad
        )
        if not sets or not isinstance(args[0], nn.Parameter):
            return
        weight, wanted = args[0], bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
        if wanted == weight.requires_grad:
            return
        if not self._whole:
            raise WholeTrace
        if not wanted:
            self._frozen.add(id(weight))
        elif id(weight) in self._frozen:
            self._frozen.remove(id(weight))
        else:
            raise PartcError(
                "P0225",
                "forward begins to train a weight, which earlier operations may have read",
                help="train it from the constructor on, and detach it where no gradient is wanted",
            )

    def detached(self, name: str, item: Any) -> Any:
        """The arguments of a call, with frozen weights detached."""
        if not self._frozen or name in ("__get__", "__set__", "requires_grad_"):
            return item
        return tree_map_only(nn.Parameter, lambda x: x.detach() if id(x) in self._frozen else x, item)
