"""Connectionist temporal classification (CTC) in operations on examples (Graves et al. 2006).

Torch's own function reads the lengths as numbers, which a trace does not have. Here lengths stay tensors: sums over
alignments are computed for the longest label, step by step, and a step beyond an example's end leaves its sums as they
are. The loop over time becomes a scan.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_NEVER = -1e30  # the logarithm of zero: differences of infinities have no gradient
_IMPOSSIBLE = 1e29  # a loss above it means that the label fits no alignment


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """`torch.nn.functional.ctc_loss` for lengths whose values the trace does not know."""
    alone = log_probs.dim() == 2
    scores = (log_probs.unsqueeze(1) if alone else log_probs).transpose(0, 1)
    rows, steps, _ = scores.shape
    inputs, lengths = (torch.as_tensor(each).reshape(rows).long() for each in (input_lengths, target_lengths))
    labels = targets if targets.dim() == 2 else _in_rows(targets, lengths, steps)
    places = 2 * labels.shape[1] + 1
    spelled = torch.stack([torch.full_like(labels, blank), labels], 2).flatten(1)
    spelled = F.pad(spelled, (0, 1), value=blank).long()
    skips = (spelled[:, 2:] != blank) & (spelled[:, 2:] != spelled[:, :-2])
    skipping = F.pad(torch.where(skips, 0.0, _NEVER).to(scores.dtype), (2, 0), value=_NEVER)
    emitted = scores.gather(2, spelled[:, None].expand(-1, steps, -1))
    running = torch.arange(steps) < inputs[:, None]
    first = torch.arange(places) < torch.where(lengths > 0, 2, 1)[:, None]
    state = torch.where(first, emitted[:, 0], _NEVER)
    for t in range(1, steps):
        moved = F.pad(state[:, :-1], (1, 0), value=_NEVER)
        skipped = F.pad(state[:, :-2], (2, 0), value=_NEVER) + skipping
        summed = torch.logsumexp(torch.stack([state, moved, skipped]), 0) + emitted[:, t]
        state = torch.where(running[:, t, None], summed, state)
    ends = torch.arange(places) - 2 * lengths[:, None]
    ending = (ends == 0) | ((ends == -1) & (lengths > 0)[:, None])
    losses = -torch.where(ending, state, _NEVER).logsumexp(1)
    # Torch's gradient is with respect to log-probabilities whose probabilities keep the sum one.
    total = torch.where(running[:, :, None], scores, -torch.inf).exp().sum((1, 2))
    losses = losses + (total - total.detach())
    losses = torch.where(losses < _IMPOSSIBLE, losses, 0.0 if zero_infinity else torch.inf)
    if reduction == "mean":
        return (losses / lengths.clamp(min=1)).mean()
    if reduction == "sum":
        return losses.sum()
    return losses.squeeze(0) if alone else losses


def _in_rows(targets: Tensor, lengths: Tensor, steps: int) -> Tensor:
    """Concatenated labels as a matrix with one row per example, cut at `steps`: longer labels never align."""
    most = max(1, min(len(targets), steps))
    places = (lengths.cumsum(0) - lengths)[:, None] + torch.arange(most)
    return targets[places.clamp(max=len(targets) - 1)]
