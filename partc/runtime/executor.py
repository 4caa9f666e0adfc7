"""One training step on one rank: the actions of its schedule, in order, over its stage."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .comm import Axis, Comm
from .layout import Received, Shard

_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|REDUCE_GRAD|F|B)(\d*)")


@dataclass(frozen=True, slots=True)
class Action:
    """What to do next, and for which microbatch: 2F0, 0SEND_F1, 1REDUCE_GRAD."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.kind == 'REDUCE_GRAD' else self.microbatch}"


def parse_schedule(text: str) -> tuple[Action, ...]:
    """Read actions separated by spaces."""
    actions = []
    for word in text.split():
        match = _ACTION.fullmatch(word)
        if not match:
            raise ValueError(f"not an action: {word!r}")
        actions.append(Action(int(match.group(1)), match.group(2), int(match.group(3) or 0)))
    return tuple(actions)


class Stage(Protocol):
    """What an emitted stage module offers: see any `stages/stage_<i>.py`."""

    parameters: dict[str, Shard]
    inputs: dict[str, Shard]
    sends: dict[str, tuple[int, ...]]  # value -> stages that read it
    gradients_from: dict[str, tuple[int, ...]]  # value -> stages that send its gradient back
    receives: dict[str, Received]
    loss: str | None
    loss_partial: tuple[str, ...]

    def setup(self) -> None: ...
    def prepare(self, batch: dict[str, Tensor]) -> None: ...
    def forward(self, batch: dict[str, Tensor], received: dict[str, Tensor]) -> tuple[dict[str, Tensor], Any]: ...
    def backward(self, saved: Any, gradients: dict[str, Tensor]) -> dict[str, Tensor]: ...
    def reduce_gradients(self) -> None: ...


def run_step(
    stage: Stage,
    comm: Comm,
    actions: Sequence[Action],
    batch: dict[str, Tensor],
    microbatches: Sequence[dict[str, Tensor]],
    entering: Callable[[str], None] = lambda what: None,
) -> Tensor | None:
    """Run one step; returns the loss (of the whole batch) on ranks of the last stage.

    `batch` is this rank's part of the step's batch, `microbatches` the same in pieces. `entering` is
    told each action before it starts, so that a report on a rank that hangs can say where.
    """
    received: dict[int, dict[str, Tensor]] = {}  # per microbatch, from RECV_F to F
    sent: dict[int, dict[str, Tensor]] = {}  # from F to SEND_F
    saved: dict[int, Any] = {}  # from F to B
    incoming: dict[int, dict[str, Tensor]] = {}  # gradients of sent values, from RECV_B to B
    outgoing: dict[int, dict[str, Tensor]] = {}  # gradients of received values, from B to SEND_B
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    loss: Tensor | None = None

    entering("prepare")
    stage.prepare(batch)
    for action in actions:
        entering(str(action))
        m = action.microbatch
        if action.kind == "RECV_F":
            received[m] = {
                name: comm.recv(origin.shape, origin.torch_dtype, origin.source)
                for name, origin in stage.receives.items()
            }
        elif action.kind == "F":
            values, saved[m] = stage.forward(microbatches[m], received.pop(m, {}))
            if stage.loss is not None:
                loss = values[stage.loss] if loss is None else loss + values[stage.loss]
            sent[m] = {name: values[name] for name in stage.sends}
            del values
        elif action.kind == "SEND_F":
            for name, value in sent.pop(m).items():
                shapes[name] = tuple(value.shape), value.dtype
                for target in stage.sends[name]:
                    comm.send(value, target)
        elif action.kind == "RECV_B":
            incoming[m] = {
                name: _sum([comm.recv(*shapes[name], target) for target in targets])
                for name, targets in stage.gradients_from.items()
            }
        elif action.kind == "B":
            sent.pop(m, None)
            outgoing[m] = stage.backward(saved.pop(m), incoming.pop(m, {}))
        elif action.kind == "SEND_B":
            gradients = outgoing.pop(m)
            for name, origin in stage.receives.items():
                if origin.gradient:
                    comm.send(gradients[name], origin.source)
        else:
            stage.reduce_gradients()
    if loss is not None:
        entering("the loss's reduction")
        for axis in stage.loss_partial:
            loss = _axis(comm, axis).all_reduce(loss)
    entering("the last transfers of the step")
    comm.drain()
    return loss


def _axis(comm: Comm, name: str) -> Axis:
    axis = getattr(comm, name)
    assert isinstance(axis, Axis)
    return axis


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def gradient_buffers(
    shards: Mapping[str, Shard], parameters: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """A zeroed gradient for every trainable parameter, and the buffers behind them.

    Gradients that are reduced over the same axes stand in one buffer, so that one collective moves them.
    """
    together: dict[tuple[object, ...], list[str]] = {}
    for name, shard in shards.items():
        if shard.trainable:
            # A tied weight stands alone: the stages that share it have different neighbours for it.
            alone = name if shard.stages else None
            together.setdefault((shard.reduce, parameters[name].dtype, alone), []).append(name)
    gradients: dict[str, Tensor] = {}
    buffers = []
    for names in together.values():
        buffer = parameters[names[0]].new_zeros(sum(parameters[name].numel() for name in names))
        buffers.append(buffer)
        for name, piece in zip(names, torch.split(buffer, [parameters[name].numel() for name in names]), strict=True):
            gradients[name] = piece.view(parameters[name].shape)
    return {name: gradients[name] for name in shards if name in gradients}, buffers
