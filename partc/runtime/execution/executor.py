"""One training step on one rank: the actions of its schedule, in order, over its stages."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.comm import Axis, Comm, Pending
from ..layout import Returned, Shard, cutting
from ..ops.accumulation import Gradient, materialized
from ..ops.row_gradients import RowGradient
from .parts import NOTHING, Unit, whole_shape, without_spare
from .stage import PipelineStage

_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|REDUCE_GRAD|F|B|I|W)(\d*)(?:>([\dFBIW,]+))?")
_AHEAD = re.compile(r"(\d+)([FBIW])")
_ALIGNMENT = 64  # elements


@dataclass(frozen=True, slots=True)
class Action:
    """An entry of the schedule: 2F0, 0SEND_F1, 1REDUCE_GRAD.

    `ahead` are the actions (stage and kind) whose first gathers this action starts: 0F1>0B.
    """

    stage: int
    kind: str
    microbatch: int
    ahead: tuple[tuple[int, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.kind in ('UNSHARD', 'REDUCE_GRAD') else self.microbatch}"


def parse_schedule(text: str) -> tuple[Action, ...]:
    """Read actions separated by spaces."""
    actions = []
    for word in text.split():
        match = _ACTION.fullmatch(word)
        if not match:
            raise ValueError(f"not an action: {word!r}")
        ahead = tuple((int(stage), kind) for stage, kind in _AHEAD.findall(match.group(4) or ""))
        actions.append(Action(int(match.group(1)), match.group(2), int(match.group(3) or 0), ahead))
    return tuple(actions)


Slot = tuple[int, int]  # stage, microbatch
Acks = Mapping[Slot, Sequence[int]]  # implicit acknowledgements (see `acknowledged_by`)


def acknowledged_by(actions: Sequence[Action]) -> dict[Slot, tuple[int, ...]]:
    """Implicit acknowledgements: by sending a microbatch's value forward, a rank confirms that it has used gradients.

    Maps the stage and microbatch of each sent value to the microbatches whose gradients the rank has used since it
    sent the previous value.
    """
    found: dict[Slot, tuple[int, ...]] = {}
    used: dict[int, list[int]] = {}
    for action in actions:
        if action.kind in ("B", "I"):
            used.setdefault(action.stage, []).append(action.microbatch)
        elif action.kind == "SEND_F" and action.stage in used:
            found[action.stage, action.microbatch] = tuple(used.pop(action.stage))
    return found


class Step:
    """One step over the stages of this rank. Values between two of them are passed directly, all others are sent."""

    def __init__(
        self, stages: Mapping[int, PipelineStage], comm: Comm, microbatches: Sequence[dict[str, Tensor]], acks: Acks
    ) -> None:
        self.stages = stages
        self.acks = acks
        self.comm = comm
        self.microbatches = microbatches
        self.loss: Tensor | None = None
        self.arriving: dict[Slot, dict[str, Pending[Tensor]]] = {}  # filled by RECV_F, read by F
        self.received: dict[Slot, dict[str, Tensor]] = {}  # filled by another stage's F, read by F
        self.sent: dict[Slot, dict[str, Tensor]] = {}  # filled by F, read by SEND_F
        self.saved: dict[Slot, Any] = {}  # filled by F, read by B or I
        self.weight_saved: dict[Slot, Any] = {}  # filled by I, read by W
        # Gradients of sent values: filled by RECV_B, read by B or I.
        self.returning: dict[Slot, list[tuple[str, Pending[Tensor]]]] = {}
        self.incoming: dict[Slot, dict[str, Tensor]] = {}  # gradients of values passed to another stage of this rank
        # Gradients of received values: filled by B or I, read by SEND_B.
        self.outgoing: dict[Slot, dict[str, Tensor]] = {}
        self.shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    def run(self, action: Action, *, first: bool = False, last: bool = False) -> None:
        """Run an action; `first` marks its stage's first forward pass after an update, `last` the last backward before
        one.
        """
        stage = self.stages[action.stage]
        slot = action.stage, action.microbatch
        self.comm.mb = Axis(action.microbatch, len(self.microbatches))
        ahead = self._units_ahead(action)
        match action.kind:
            case "F":
                self.comm.loads.enter(action.stage)
                self._f(stage, slot, [first, *ahead] if stage.refreshes else ahead)
            case "B":
                self._hand_back(stage, slot, stage.backward(self.saved.pop(slot), self._returned(slot), last, *ahead))
            case "I":
                self._i(stage, slot, ahead)
            case "W":
                stage.backward_weight(self.weight_saved.pop(slot), last, *ahead)
            case "SEND_F":
                self._send_f(stage, slot)
            case "RECV_F":
                self._recv_f(stage, slot)
            case "SEND_B":
                self._send_b(stage, slot)
            case "RECV_B":
                self._recv_b(stage, slot)
            case "UNSHARD":
                for unit in ahead:
                    unit.gather()
                for unit in ahead[: len(ahead) - 1]:
                    unit.advance()
            case "REDUCE_GRAD":
                stage.reduce_gradients(last)

    def _units_ahead(self, action: Action) -> list[Unit]:
        """The first units of later actions, whose gathers this action starts; `NOTHING` stands for missing ones."""
        stage = self.stages[action.stage]
        if action.kind != "UNSHARD" and action.kind not in stage.first_units:
            return []
        units = [unit for number, kind in action.ahead for unit in self.stages[number].first_units[kind]]
        return [*units, NOTHING, NOTHING][: stage.lookahead]

    def _recv_f(self, stage: PipelineStage, slot: Slot) -> None:
        self.arriving[slot] = {
            name: self.comm.recv(origin.shape, origin.torch_dtype, (origin.source, slot[0]))
            for name, origin in stage.receives.items()
            if origin.source not in self.stages
        }

    def _f(self, stage: PipelineStage, slot: Slot, ahead: Sequence[bool | Unit]) -> None:
        microbatch, received = slot[1], self.received.pop(slot, {})
        arriving = self.arriving.pop(slot, {})
        received.update((name, value.wait()) for name, value in arriving.items())
        for source in {stage.receives[name].source for name in arriving}:
            for earlier in self.acks.get((source, microbatch), ()):
                self.comm.release_sent((slot[0], source), earlier)
        values, self.saved[slot] = stage.forward(self.microbatches[microbatch], received, *ahead)
        self._keep(stage, slot, values)
        leaving: dict[str, Tensor] = {}
        for name, targets in stage.sends.items():
            for target in targets:
                if target in self.stages:
                    self.received.setdefault((target, microbatch), {})[name] = values[name]
                else:
                    leaving[name] = values[name]
        if leaving:
            self.sent[slot] = leaving

    def _keep(self, stage: PipelineStage, slot: Slot, values: Mapping[str, Tensor]) -> None:
        if stage.loss is not None:
            self.loss = values[stage.loss] if self.loss is None else self.loss + values[stage.loss]

    def _send_f(self, stage: PipelineStage, slot: Slot) -> None:
        for name, value in self.sent.pop(slot).items():
            self.shapes[name] = tuple(value.shape), value.dtype
            for target in stage.sends[name]:
                if target not in self.stages:
                    self.comm.send(value, (slot[0], target))

    def _recv_b(self, stage: PipelineStage, slot: Slot) -> None:
        self.returning[slot] = [
            (name, self.comm.recv(*self.shapes[name], (target, slot[0])))
            for name, targets in stage.gradients_from.items()
            for target in targets
            if target not in self.stages
        ]

    def _i(self, stage: PipelineStage, slot: Slot, ahead: Sequence[Unit]) -> None:
        gradients, self.weight_saved[slot] = stage.backward_input(self.saved.pop(slot), self._returned(slot), *ahead)
        self._hand_back(stage, slot, gradients)

    def _returned(self, slot: Slot) -> dict[str, Tensor]:
        returning = self.returning.pop(slot, ())
        for name, gradient in returning:
            self._add(slot, name, gradient.wait())
        # A rank that sends back a microbatch's gradients has received all values sent to it for this microbatch.
        for target in {target for name, _ in returning for target in self.stages[slot[0]].gradients_from[name]}:
            self.comm.release_sent((slot[0], target), slot[1])
        return self.incoming.pop(slot, {})

    def _hand_back(self, stage: PipelineStage, slot: Slot, gradients: Mapping[str, Tensor]) -> None:
        leaving: dict[str, Tensor] = {}
        for name, origin in stage.receives.items():
            if not origin.gradient:
                continue
            if origin.source in self.stages:
                self._add((origin.source, slot[1]), name, gradients[name])
            else:
                leaving[name] = gradients[name]
        if leaving:
            self.outgoing[slot] = leaving

    def _send_b(self, stage: PipelineStage, slot: Slot) -> None:
        for name, gradient in self.outgoing.pop(slot).items():
            self.comm.send(gradient, (slot[0], stage.receives[name].source))

    def _add(self, slot: Slot, name: str, gradient: Tensor) -> None:
        """Add a gradient that a reader of a value sends back; the value's gradient is the sum over its readers."""
        there = self.incoming.setdefault(slot, {})
        there[name] = there[name] + gradient if name in there else gradient


class _Forward(Step):
    """A forward pass whose results are kept by path and microbatch."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.results: dict[str, tuple[Returned, dict[int, Tensor]]] = {}

    def _keep(self, stage: PipelineStage, slot: Slot, values: Mapping[str, Tensor]) -> None:
        self.saved.pop(slot)
        for path, result in stage.results.items():
            self.results.setdefault(path, (result, {}))[1][slot[1]] = values[result.value]


def run_forward(
    stages: Mapping[int, PipelineStage],
    comm: Comm,
    actions: Sequence[Action],
    batch: dict[str, Tensor],
    microbatches: Sequence[dict[str, Tensor]],
    sizes: Mapping[str, int],
) -> dict[str, Tensor]:
    """Run one batch forward; returns this rank's parts of the results of its stages, by path.

    Arguments are as in `run_step`; `sizes` are the sizes of the mesh's axes.
    """
    step = _Forward(stages, comm, microbatches, {})
    _play(step, actions, batch)
    found: dict[str, Tensor] = {}
    for path, (result, parts) in step.results.items():
        value = result.joined([parts[number] for number in sorted(parts)], sizes)
        comm.clock.entering("the sum of a result", "work")
        for axis in result.partial:
            if axis != "mb":
                value = comm.group((axis,)).all_reduce(value)
        found[path] = value
    comm.clock.entering("the last transfers of the step", "work")
    comm.drain()
    return found


def run_step(
    stages: Mapping[int, PipelineStage],
    comm: Comm,
    actions: Sequence[Action],
    batch: dict[str, Tensor],
    microbatches: Sequence[dict[str, Tensor]],
    *,
    first: bool = True,
    last: bool = True,
    acks: Acks | None = None,
) -> Tensor | None:
    """Run one step; returns the loss (of the whole batch) on ranks of the stage that computes it.

    `stages` are this rank's, by number; `batch` is its part of the step's batch, `microbatches` the same part in
    pieces. Parameters are gathered if this is the `first` batch after an update; gradients are summed over ranks if it
    is the `last` one before the next. `acks` are the implicit acknowledgements of other ranks (see `acknowledged_by`).
    A received value confirms that its sender has used some gradients, whose buffers are then released. Each action is
    reported to the communicator's clock before it starts.
    """
    entering = comm.clock.entering
    step = Step(stages, comm, microbatches, acks or {})
    _play(step, actions, batch, first=first, last=last)
    entering("the sum of shared weights' gradients", "work")
    for ranks, gradients in _shared_gradients(stages).items() if last else ():
        comm.pipeline(ranks).reduce_gradients(gradients)
    loss = step.loss
    if loss is not None:
        entering("the loss's reduction", "work")
        for axis in next(stage.loss_partial for stage in stages.values() if stage.loss is not None):
            loss = comm.group((axis,)).all_reduce(loss)
    entering("the last transfers of the step", "work")
    comm.drain()
    return loss


def _play(
    step: Step, actions: Sequence[Action], batch: dict[str, Tensor], *, first: bool = False, last: bool = True
) -> None:
    """Run the actions of a batch: the `first` one after an update, the `last` one before the next, or neither."""
    entering = step.comm.clock.entering
    entering("prepare", "work")
    opening = list(takewhile(lambda action: action.kind == "UNSHARD", actions))
    for action in opening:
        step.run(action)
    for stage in step.stages.values():
        stage.prepare(batch)
    for stage in step.stages.values() if first else ():
        stage.refresh()
    begun = {action.stage: action for action in reversed(actions) if first and action.kind == "F"}
    final = {action.stage: action for action in actions if last and action.kind in ("B", "W")}
    for action in actions[len(opening) :]:
        entering(str(action), "work")
        ends = action == final.get(action.stage) or (last and action.kind == "REDUCE_GRAD")
        step.run(action, first=action == begun.get(action.stage), last=ends)


def _shared_gradients(stages: Mapping[int, PipelineStage]) -> dict[tuple[int, ...], list[Tensor]]:
    """Gradients of shared weights by the pipeline ranks that share them, in an order common to these ranks."""
    found: dict[tuple[int, ...], dict[str, Tensor]] = {}
    for stage in stages.values():
        for ranks, names in stage.shared.items():
            found.setdefault(ranks, {}).update((name, materialized(stage.gradients[name])) for name in names)
    return {ranks: [found[ranks][name] for name in sorted(found[ranks])] for ranks in sorted(found)}


class GradientMemory(NamedTuple):
    """The gradients of a rank, zeroed."""

    gradients: dict[str, Tensor]  # of every trainable parameter, or of the part that the rank holds
    buffers: dict[tuple[str, ...], Tensor]  # names of parameters -> the memory of their dense gradients
    sums: dict[str, Tensor]  # gradients of whole parameters; gradients of their parts later reuse the memory


def gradient_memory(
    shards: Mapping[str, Shard],
    parameters: Mapping[str, Tensor],
    stages: Iterable[type[PipelineStage]] = (),
    sizes: Mapping[str, int] | None = None,
    *,
    compiled: bool = False,
    compressed: bool = False,
) -> GradientMemory:
    """Allocate the gradients of a rank's parameters; `sizes` are the mesh's axes.

    Gradients that are reduced over the same axes share a buffer, so that one collective moves them. If torch.compile
    compiles the functions that add to them, they are plain tensors, to which even the first gradient is added. Sparse
    gradients have no buffer. Compressed gradients share a buffer only with those of parameters that the same axes
    cut, so that ranks with copies of a parameter round its gradient alike.

    A step's sums of whole gradients are no longer read after they have been scattered. The gradients of a bucket's
    parts then reuse the beginning of the bucket's memory, as in Megatron-LM's distributed optimizer.
    """
    bucket_of = _scattered_once(shards, stages)
    together: dict[tuple[object, ...], list[str]] = {}
    gradients: dict[str, Any] = {}
    for name, shard in shards.items():
        if shard.sparse:
            gradients[name] = RowGradient(parameters[name])
        elif shard.trainable:
            # A shared weight has its own buffer: on the ranks that share it, its neighbours differ.
            alone = name if shard.shared else None
            cut = cutting(shard.dims) if compressed else None
            key = (shard.reduce, parameters[name].dtype, alone, bucket_of.get(name), cut)
            together.setdefault(key, []).append(name)
    buffers: dict[tuple[str, ...], Tensor] = {}
    sums: dict[str, Tensor] = {}
    for names in together.values():
        whole = {name: _whole_shape(shards[name], parameters[name], sizes or {}) for name in names if name in bucket_of}
        places = list(accumulate((_aligned(math.prod(shape)) for shape in whole.values()), initial=0))
        length = sum(parameters[name].numel() for name in names)
        memory = parameters[names[0]].new_zeros(max(length, places[-1]))
        for (name, shape), place in zip(whole.items(), places, strict=False):
            piece = memory[place : place + math.prod(shape)].view(shape)
            sums[name] = without_spare(piece, shards[name].seam(sizes or {}))
        buffers[tuple(names)] = buffer = memory[:length]
        pieces = pieces_of(buffer, names, parameters)
        gradients |= pieces if compiled else {name: Gradient.of(piece) for name, piece in pieces.items()}
    return GradientMemory({name: gradients[name] for name in shards if name in gradients}, buffers, sums)


def _scattered_once(shards: Mapping[str, Shard], stages: Iterable[type[PipelineStage]]) -> dict[str, tuple[str, ...]]:
    """The buckets of parameters whose gradients one stage accumulates whole and scatters afterwards."""
    buckets: dict[str, list[tuple[str, ...]]] = {}
    for stage in stages:
        for bucket in stage.buckets.values():
            for name in (names := bucket.among(stage.parameters)) if bucket.scatter else ():
                buckets.setdefault(name, []).append(names)
    usual = {name for name, shard in shards.items() if not shard.reduce and not shard.shared}
    return {name: found[0] for name, found in buckets.items() if len(found) == 1 and name in usual}


def scatters(stage: type[PipelineStage]) -> bool:
    """Whether a stage accumulates gradients of whole parameters and scatters them after the last microbatch (ZeRO
    1).
    """
    return any(bucket.scatter for bucket in stage.buckets.values())


def make_stages(
    classes: Mapping[int, type[PipelineStage]], comm: Comm, parameters: dict[str, Tensor], memory: GradientMemory
) -> dict[int, PipelineStage]:
    """The stages of a rank, by number."""
    found: dict[int, PipelineStage] = {}
    for number, stage in classes.items():
        gradients = {name: memory.gradients[name] for name in stage.parameters if name in memory.gradients}
        found[number] = stage(comm, parameters, gradients, *([memory.sums] if scatters(stage) else []))
    return found


def _whole_shape(shard: Shard, part: Tensor, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return whole_shape(part.shape, shard.seam(sizes), math.prod(sizes[axis] for axis in shard.gather))


def _aligned(elements: int) -> int:
    """The number of elements, rounded up so that matrix products write aligned vectors."""
    return -(-elements // _ALIGNMENT) * _ALIGNMENT


def pieces_of(buffer: Tensor, names: Sequence[str], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Consecutive views of a buffer, with the shapes of these parameters."""
    cut = torch.split(buffer, [parameters[name].numel() for name in names])
    return {name: piece.view(parameters[name].shape) for name, piece in zip(names, cut, strict=True)}
