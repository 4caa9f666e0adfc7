"""The base class of the stages in `stages/`, with the defaults of everything that a stage's module may define."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..comm.comm import Comm
from ..layout import Received, Returned, Shard
from .parts import Parts, Unit
from .sums import Bucket, Sums

Values = Mapping[str, Tensor]


class PipelineStage:
    """A stage of a rank: its tables, and its part of a training step.

    If its calls gather parameters, an action starts `lookahead` gathers of later actions, whose units its methods
    receive as arguments; `first_units` maps each kind of action to the units that it gathers first.
    """

    parameters: Mapping[str, Shard] = {}
    inputs: Mapping[str, Shard] = {}
    sends: Mapping[str, tuple[int, ...]] = {}  # value -> stages that read it
    gradients_from: Mapping[str, tuple[int, ...]] = {}  # value -> stages that send its gradient back
    receives: Mapping[str, Received] = {}
    shared: Mapping[tuple[int, ...], tuple[str, ...]] = {}  # pipeline ranks -> weights that all of them use
    buckets: Mapping[str, Bucket] = {}  # gradients that are summed over ranks together
    loss: str | None = None  # the value to minimise, if this stage computes it
    loss_partial: tuple[str, ...] = ()  # the axes over which the loss is summed
    results: Mapping[str, Returned] = {}  # results of a forward pass, by path in the object that the model file returns
    compiled = False  # whether torch.compile makes kernels of the regions' functions
    refreshes = False  # whether the first forward pass after an update waits for parameters that stay whole
    lookahead = 0
    first_units: Mapping[str, tuple[Unit, ...]] = {}
    parts: Parts | None = None  # parameters whose stored form differs from the one that calls read
    sums: Sums | None = None

    def __init__(self, comm: Comm, parameters: Values, gradients: Values, *sums: Values) -> None:
        """`memory.sums` has the gradients of whole parameters that are scattered once (see
        executor.gradient_memory).
        """
        self.comm = comm
        self.gradients = gradients

    def setup(self) -> None:
        """Compute constants, once per run."""

    def prepare(self, batch: Values) -> None:
        """Compute values that depend on this rank's whole batch, once per step."""

    def refresh(self) -> None:
        """Start the gathers of parameters that stay whole, as a step begins."""

    def forward(self, batch: Values, received: Values, *more: Any) -> tuple[Values, Any]:
        """Run one microbatch; returns the values that later stages (or the loss) read, and the tensors saved for
        backward.
        """
        raise NotImplementedError

    def backward(self, saved: Any, gradients: Values, last: bool, *ahead: Unit) -> Values:
        """Compute the gradients of received values from those of sent ones; `last`: the last backward before an
        update.
        """
        raise NotImplementedError

    def backward_input(self, saved: Any, gradients: Values, *ahead: Unit) -> tuple[Values, Any]:
        """The first half of a backward pass: gradients of inputs, and the tensors kept for `backward_weight`."""
        raise NotImplementedError

    def backward_weight(self, kept: Any, last: bool, *ahead: Unit) -> None:
        """The second half of a backward pass: gradients of weights."""
        raise NotImplementedError

    def reduce_gradients(self, last: bool) -> None:
        """After a batch's last microbatch: wait for scatters and sums; `last` as in `backward`."""
