"""SpecAugment's masks of spans as random numbers of the trace (Park et al. 2019).

The speech models of transformers draw them by a function `_compute_mask_indices` with NumPy, whose numbers a package
would repeat in every step.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType

import torch
from torch import Tensor, nn

from partc.replaced import all_replaced

_NAME = "_compute_mask_indices"


@contextmanager
def traceable_spans(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context in which modules draw masks of spans with `masked_spans`."""
    homes = [sys.modules[name] for name in sorted({part.__class__.__module__ for part in modules})]
    drawing = [home for home in homes if isinstance(vars(home).get(_NAME), FunctionType)]
    with all_replaced((home, _NAME, masked_spans) for home in drawing), warnings.catch_warnings():
        # Models copy the mask into a tensor.
        warnings.filterwarnings("ignore", "To copy construct from a tensor", UserWarning)
        yield


def masked_spans(
    shape: tuple[int, int],
    mask_prob: float,
    mask_length: int,
    attention_mask: Tensor | None = None,
    min_masks: int = 0,
) -> Tensor:
    """Random spans of `mask_length` places, about `mask_prob` of each row; True inside of spans.

    Each row has `mask_prob * length / mask_length` spans with distinct starts; the number is rounded up or down at
    random. Spans end where the row's mask ends.
    """
    rows, length = shape
    if not 1 <= mask_length <= length:
        raise ValueError(f"spans of {mask_length} places are not within {length}")
    most = min(max(int(mask_prob * length / mask_length + 1), min_masks), length // mask_length)
    lengths = torch.full((rows,), length) if attention_mask is None else attention_mask.detach().sum(-1)
    starts = lengths - (mask_length - 1)  # the number of places where a span may start
    spans = (mask_prob * lengths / mask_length + torch.rand(())).long().clamp(min_masks, most)
    spans = torch.minimum(spans, starts.clamp(min=0))
    places = torch.arange(length - mask_length + 1)
    order = torch.rand(rows, len(places)).masked_fill(places >= starts[:, None], -1.0)
    first = order.topk(most, 1).indices[:, :, None]
    inside = (torch.arange(length) >= first) & (torch.arange(length) < first + mask_length)
    return (inside & (torch.arange(most) < spans[:, None])[:, :, None]).any(1)
