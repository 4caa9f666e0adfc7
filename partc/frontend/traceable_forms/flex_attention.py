"""torch's flex_attention on whole tensors; torch has no gradient of it without a compiler and a GPU.

flex_attention(q, k, v, block_mask=mask)   ->  scaled_dot_product_attention(q, k, v, mask at all places)
flex_attention(q, k, v, score_mod=biased)  ->  scaled_dot_product_attention(q, k, v, bias at all places)
flex_attention(q, k, v, score_mod=capped)  ->  softmax(capped(q @ k.mT * scale) at all places) @ v
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.overrides import TorchFunctionMode

from partc.replaced import replaced
from partc.torch_private import FLEX_ATTENTION, tree_flatten, unchanged_scores


@contextmanager
def flexible_attention() -> Iterator[None]:
    """A context in which flex_attention computes on whole tensors, also where modules have imported it by name."""
    own = dict(zip(FLEX_ATTENTION, (_attention, _every_device, _options, nullcontext, True), strict=True))
    with replaced(flex_attention, **own):
        yield


def _every_device(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Accept every device: whole tensors have gradients on all of them."""


def _options(
    query: Tensor, key: Tensor, value: Tensor, return_lse: bool, kernel_options: Any, return_aux: Any = None
) -> dict[str, Any]:
    """The options of the kernel: whether the call returns sums and maxima of rows."""
    rows = return_lse or (return_aux is not None and (return_aux.lse or return_aux.max_scores))
    return {"rows": rows, "BACKEND": "TRITON"}


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """The attention of shape (batch, heads, length, width); of each row, the logarithm of the sum of exponentials and
    the largest score, both divided by log(2), or nothing.

    Rows without any place are zero. Scores are changed in fp32 at least.
    """
    batch, heads, length = query.shape[:3]
    key, value = key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)
    places = [torch.arange(size) for size in (batch, heads, length, key.shape[2])]
    allowed, changed = block_mask[-1], not unchanged_scores(score_mod)
    mask = None if allowed is flex_attention.noop_mask else _at_all_places(allowed)(*places)
    bias = _bias(score_mod, places) if changed and not options["rows"] else None
    if bias is not None:
        bias = bias.to(query.dtype)
        mask, changed = bias if mask is None else bias.masked_fill(~mask, -math.inf), False
    if not changed and not options["rows"]:
        found = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
        return found, query.new_empty(0), query.new_empty(0)
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    wide = query.dtype if query.dtype is torch.float64 else torch.float32
    scores = query.to(wide) @ key.to(wide).mT * scale
    if changed:
        scores = _at_all_places(score_mod, 0)(scores, *places)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    finite = scores.masked_fill(empty, 0.0)
    shares = finite.softmax(-1).masked_fill(empty, 0.0)
    sums = finite.logsumexp(-1).masked_fill(empty.squeeze(-1), -math.inf)
    return shares.to(query.dtype) @ value, sums / math.log(2), scores.amax(-1) / math.log(2)


def _bias(score_mod: Callable[..., Tensor], places: Sequence[Tensor]) -> Tensor | None:
    """The numbers that a function adds to all scores; None of a function that does not only add."""
    watched = _Sums()

    def biased(*place: Tensor) -> Tensor:
        watched.sums = [torch.zeros(())]
        with watched:
            made = score_mod(watched.sums[0], *place)
        watched.only &= watched.adds(made)
        return made

    found = _at_all_places(biased)(*places)
    return found if watched.only else None


class _Sums(TorchFunctionMode):
    """A mode that follows a score through additions, and through the choice between it and minus infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[Tensor] = []  # the score, and what it became
        self.only = True

    def adds(self, x: Any) -> bool:
        return any(x is each for each in self.sums)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        read = [self.adds(x) for x in tree_flatten((args, kwargs))[0]]
        if any(read) and isinstance(made, Tensor):
            name, first = func.__name__.strip("_"), read[0]
            added = name in ("add", "radd") or (name == "sub" and first)
            hidden = name == "where" and read[1] and isinstance(args[2], float) and args[2] == -math.inf
            self.only &= (added or hidden) and sum(read) == 1 and not kwargs
            if added and name != "sub" and self.only:
                x, other = args[:2] if first else args[1::-1]
                if x is self.sums[0] and _is_like(other, made):
                    made = other.view_as(other)  # the sum of zero and this number
            self.sums.append(made)
        return made


def _is_like(x: Any, other: Tensor) -> bool:
    return isinstance(x, Tensor) and x.dtype is other.dtype and x.shape == other.shape


def _at_all_places(function: Callable[..., Tensor], *scores: int) -> Callable[..., Tensor]:
    """A function of places in scores[example, head, query, key], for all places. With `scores` it also reads the score
    of its place, as its first argument.
    """
    for place in (3, 2, 1, 0):
        function = torch.vmap(function, (*scores, *(0 if each == place else None for each in range(4))))

    def run(*args: Tensor) -> Tensor:
        with _IndexedByScalars():
            return function(*args)

    return run


class _IndexedByScalars(TorchFunctionMode):
    """A mode in which table[i, j] looks up elements for scalar tensors i and j, which torch reads as Python numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            x, given = args
            items = given if isinstance(given, tuple) else (given,)
            if any(isinstance(item, Tensor) for item in items) and all(type(item) is not slice for item in items):
                return torch.ops.aten.index.Tensor(x, [torch.as_tensor(item) for item in items])
        return func(*args, **(kwargs or {}))
