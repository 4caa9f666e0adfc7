"""What a checkpoint holds of a rank: its tensors, and what the optimizer keeps of those it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .checkpoint import Held
from .layout import Shard
from .manifest import LOSS_SCALE
from .restore import Checkpoint
from .update import LossScale

Owned = Mapping[str, tuple[Shard, Tensor]]  # by parameter: how the tensor is cut, and the tensor


def state(
    parameters: Owned,
    trained: Owned,
    optimizer: torch.optim.Optimizer | None,
    plan: Mapping[str, Any],
    scale: LossScale | None = None,
) -> dict[str, Held]:
    """All tensors by name. `trained` are those that the optimizer updates, cut as it holds them.

    Its own tensors are cut alike (`exp_avg/NAME`), but for those without dimensions (`step/NAME`).
    """
    found = {name: Held(shard, tensor, holders(plan, name)) for name, (shard, tensor) in parameters.items()}
    for name, (shard, tensor) in trained.items() if optimizer is not None else ():
        assert optimizer is not None
        for key, value in optimizer.state.get(tensor, {}).items():
            cut = shard if value.dim() or not tensor.dim() else _SCALAR
            found[f"{key}/{name}"] = Held(cut, value, holders(plan, name))
    if scale is not None:
        found[LOSS_SCALE] = Held(Shard("f64[2]"), scale.state(), tuple(sorted(set(plan["places"]))))
    return found


def restore_scale(scale: LossScale, checkpoint: Checkpoint) -> None:
    """Where the checkpoint was made in other bits, the scale starts anew."""
    if LOSS_SCALE in checkpoint.tensors:
        scale.restore(checkpoint.part(LOSS_SCALE, Shard("f64[2]"), {}, {}))


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    trained: Owned,
    checkpoint: Checkpoint,
    sizes: Mapping[str, int],
    coordinate: Mapping[str, int],
) -> None:
    """Give the optimizer what the checkpoint has of each tensor that it trains."""
    for name, (shard, tensor) in trained.items():
        for key in checkpoint.states(name):
            whole = checkpoint.tensors[f"{key}/{name}"].shape
            cut = shard if whole or not tensor.dim() else _SCALAR
            part = checkpoint.part(f"{key}/{name}", cut, sizes, coordinate)
            optimizer.state[tensor][key] = part.to(tensor.device)


def holders(plan: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """The pipeline ranks that have a parameter."""
    return tuple(sorted({plan["places"][stage] for stage in plan["parameters"][name]["stages"]}))


_SCALAR = Shard("f32[]")
