"""The base of the stages in `stages/`: everything that a stage has unless its module says otherwise."""

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

    If its calls gather parameters, an action starts `lookahead` gathers of later ones, which its methods get as
    arguments; `first_units` has, by kind of action, as many units that the action gathers first.
    """

    parameters: Mapping[str, Shard] = {}
    inputs: Mapping[str, Shard] = {}
    sends: Mapping[str, tuple[int, ...]] = {}  # value -> stages that read it
    gradients_from: Mapping[str, tuple[int, ...]] = {}  # value -> stages that send its gradient back
    receives: Mapping[str, Received] = {}
    shared: Mapping[tuple[int, ...], tuple[str, ...]] = {}  # pipeline ranks -> weights that all of them use
    buckets: Mapping[str, Bucket] = {}  # gradients that are summed over ranks together
    loss: str | None = None  # the value to minimise, if this stage makes it
    loss_partial: tuple[str, ...] = ()  # the axes over which the loss is summed
    results: Mapping[str, Returned] = {}  # of a forward pass, by path in the object that the model file returns
    compiled = False  # whether torch.compile makes kernels of the regions' functions
    refreshes = False  # whether the first forward pass after an update waits for parameters that stay whole
    lookahead = 0
    first_units: Mapping[str, tuple[Unit, ...]] = {}
    parts: Parts | None = None  # parameters that are held in another form than calls read
    sums: Sums | None = None

    def __init__(self, comm: Comm, parameters: Values, gradients: Values, *sums: Values) -> None:
        """`sums` has the memory of whole gradients that are scattered once (see executor.gradient_memory)."""
        self.comm = comm
        self.gradients = gradients

    def setup(self) -> None:
        """Constants, made once."""

    def prepare(self, batch: Values) -> None:
        """Values that depend on the whole of this rank's batch, once per step."""

    def refresh(self) -> None:
        """As a step begins: the gathers of parameters that stay whole."""

    def forward(self, batch: Values, received: Values, *more: Any) -> tuple[Values, Any]:
        """One microbatch: the values that later stages (or the loss) read, and the tensors saved for backward."""
        raise NotImplementedError

    def backward(self, saved: Any, gradients: Values, last: bool, *ahead: Unit) -> Values:
        """From the gradients of sent values to those of received ones; `last` marks the last one before an update."""
        raise NotImplementedError

    def backward_input(self, saved: Any, gradients: Values, *ahead: Unit) -> tuple[Values, Any]:
        """The half for inputs, of a backward pass in two halves."""
        raise NotImplementedError

    def backward_weight(self, kept: Any, last: bool, *ahead: Unit) -> None:
        """The half for weights."""
        raise NotImplementedError

    def reduce_gradients(self, last: bool) -> None:
        """After the last microbatch of a batch: the ends of scatters and sums; `last` as for `backward`."""
