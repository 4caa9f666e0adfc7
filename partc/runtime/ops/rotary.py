"""Rotary position embeddings (Su et al. 2021): pairs of a row's elements are rotated by the angles of its position.

The first `rotated` elements of x[*rows, d] form pairs: of halves, (i, i + rotated / 2), or of neighbours if
`interleaved`, (2i, 2i + 1). The other elements pass through. cos and sin broadcast to the rows and have a column for
each rotated element, or for each pair.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(x: Tensor, cos: Tensor, sin: Tensor, rotated: int | None = None, interleaved: bool = False) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin) for each pair."""
    head, rest = _split(x, rotated)
    first, second = pairs(head, interleaved)
    turned = joined(-second, first, interleaved).mul_(_wide(sin, head, interleaved))
    return _with_rest((head * _wide(cos, head, interleaved)).add_(turned), rest)


def rotary_backward(
    grad: Tensor, cos: Tensor, sin: Tensor, rotated: int | None = None, interleaved: bool = False
) -> Tensor:
    """The gradient of x; the two elements of a pair may have different angles."""
    head, rest = _split(grad, rotated)
    first, second = pairs(head * _wide(sin, head, interleaved), interleaved)
    turned = joined(second, -first, interleaved)
    del first, second
    return _with_rest((head * _wide(cos, head, interleaved)).add_(turned), rest)


def pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second elements of all pairs, as views."""
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def joined(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    """The inverse of `pairs`, as a new tensor."""
    return torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)


def _split(x: Tensor, rotated: int | None) -> tuple[Tensor, Tensor | None]:
    return (x, None) if rotated is None else (x[..., :rotated], x[..., rotated:])


def _wide(table: Tensor, x: Tensor, interleaved: bool) -> Tensor:
    return table if table.shape[-1] == x.shape[-1] else joined(table, table, interleaved)


def _with_rest(head: Tensor, rest: Tensor | None) -> Tensor:
    return head if rest is None else torch.cat((head, rest), -1)
