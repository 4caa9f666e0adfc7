"""A rank's part of a checkpoint: its tensors, and the optimizer's state of those that it trains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.compression import Remembers
from ..dims import written_dims
from ..layout import Shard, parse_mesh
from ..optimizer.optimizer import Optimizer
from ..optimizer.update import LossScale
from ..place import PIPELINE
from .checkpoint import Held
from .manifest import LEFT_OUT, LOSS_SCALE
from .restore import Checkpoint

Owned = Mapping[str, tuple[Shard, Tensor]]  # parameter -> (the tensor's cut, the tensor)


def state(
    parameters: Owned,
    trained: Owned,
    optimizer: Optimizer | None,
    plan: Mapping[str, Any],
    scale: LossScale | None = None,
) -> dict[str, Held]:
    """All tensors of a checkpoint by name. `trained` are the tensors that the optimizer updates, in their cut there.

    The optimizer's tensors are cut in the same way (`exp_avg/NAME`), except those of other shapes (`step/NAME`).
    """
    found = {name: Held(shard, tensor, holders(plan, name)) for name, (shard, tensor) in parameters.items()}
    for name, (shard, _) in trained.items() if optimizer is not None else ():
        assert optimizer is not None
        uncut, rows = optimizer.uncut(name), optimizer.by_rows(name)
        for key, value in optimizer.state_of(name).items():
            cut = by_rows(shard) if key in rows else _uncut(value.shape, shard.apart) if key in uncut else shard
            found[f"{key}/{name}"] = Held(cut, value, holders(plan, name))
    if scale is not None:
        found[LOSS_SCALE] = Held(Shard("f64[2]"), scale.state(), tuple(sorted(set(plan["places"]))))
    return found


def restore_scale(scale: LossScale, checkpoint: Checkpoint) -> None:
    """Restore the loss scale, unless the checkpoint has another precision."""
    if LOSS_SCALE in checkpoint.tensors:
        scale.restore(checkpoint.part(LOSS_SCALE, Shard("f64[2]"), {}, {}))


def left_out(stages: Mapping[int, Any], sizes: Mapping[str, int], coordinate: Mapping[str, int]) -> dict[str, Held]:
    """The errors of compressed gradient sums: each rank's own, as a row of a tensor."""
    return {
        _row_name(first, piece, kind, coordinate): Held(
            _row(x.numel(), sizes), x.view(1, -1), (coordinate.get(PIPELINE, 0),)
        )
        for (first, piece), compressed in compressed_sums(stages)
        for kind, x in compressed.left_out.items()
    }


def restore_left_out(
    stages: Mapping[int, Any],
    checkpoint: Checkpoint,
    sizes: Mapping[str, int],
    coordinate: Mapping[str, int],
    device: torch.device,
) -> bool:
    """Restore the errors of compressed sums; False if any is dropped, as on another mesh."""
    same = parse_mesh(checkpoint.run["mesh"]) == sizes
    restored = []
    for (first, piece), compressed in compressed_sums(stages):
        names = {kind: _row_name(first, piece, kind, coordinate) for kind in compressed.numbers}
        if not same or not checkpoint.tensors.keys() >= set(names.values()):
            restored.append(False)
            continue
        rows = {name: _row(checkpoint.tensors[name].shape[1], sizes) for name in names.values()}
        left = {kind: checkpoint.part(name, rows[name], sizes, coordinate).to(device) for kind, name in names.items()}
        restored.append(compressed.restore(left))
    here = (name for name in checkpoint.tensors if name.startswith(LEFT_OUT))
    mine = any(name.endswith(f".{PIPELINE}{coordinate.get(PIPELINE, 0)}") for name in here)
    return all(restored) and (bool(restored) or not mine)


def compressed_sums(stages: Mapping[int, Any]) -> Iterator[tuple[tuple[str, str], Remembers]]:
    """The compressed sums, by the name of a gradient and the index of its sum."""
    for number, stage in stages.items():
        if stage.sums is not None:
            yield from (((first, str(piece)), sums) for (first, piece), sums in stage.sums.compressed.items())
        if stage.parts is not None:
            yield from (((name, f"stage{number}"), sums) for name, sums in stage.parts.compressed.items())


def _row_name(first: str, piece: str, kind: str, coordinate: Mapping[str, int]) -> str:
    return f"{LEFT_OUT}{first}/{piece}.{kind}.{PIPELINE}{coordinate.get(PIPELINE, 0)}"


def _row(size: int, sizes: Mapping[str, int]) -> Shard:
    """The shard of a tensor with a row for every rank at one pipeline coordinate."""
    axes = [name for name, ways in sizes.items() if name != PIPELINE and ways > 1]
    return Shard(f"f32[{math.prod(sizes[name] for name in axes)}@{','.join(axes)}, {size}]")


def restore_optimizer(
    optimizer: Optimizer,
    trained: Owned,
    checkpoint: Checkpoint,
    sizes: Mapping[str, int],
    coordinate: Mapping[str, int],
) -> None:
    """Restore the optimizer's state of each tensor that it trains."""
    for name, (shard, _) in trained.items():
        uncut, rows = optimizer.uncut(name), optimizer.by_rows(name)
        for key in checkpoint.states(name):
            whole = checkpoint.tensors[f"{key}/{name}"].shape
            alike = key not in uncut and whole == checkpoint.tensors[name].shape
            cut = by_rows(shard) if key in rows else shard if alike else _uncut(whole)
            part = checkpoint.part(f"{key}/{name}", cut, sizes, coordinate)
            optimizer.restore(name, key, part)


def holders(plan: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """The pipeline ranks that have a parameter."""
    return tuple(sorted({plan["places"][stage] for stage in plan["parameters"][name]["stages"]}))


def by_rows(shard: Shard) -> Shard:
    """The cut of a tensor with one number for each row of a parameter."""
    dims = (shard.dims[0], *(((1, ()),) for _ in shard.dims[1:]))
    text = written_dims(dims)
    holds = (shard.holds[0], *(1 for _ in shard.holds[1:])) if shard.holds else ()
    order = shard.sectioned if shard.sectioned is not None and shard.sectioned.dim == 0 else None
    return Shard(f"{shard.type.partition('[')[0]}[{text}]", holds=holds, sectioned=order, apart=shard.apart)


def _uncut(shape: Sequence[int], apart: tuple[str, ...] = ()) -> Shard:
    """The cut of a tensor that every rank has whole, except along the axes `apart`."""
    return Shard(f"f32{list(shape)}", apart=apart)
