"""One update of the parameters: unscaling of gradients, their norm over all ranks, clipping, the step's learning
rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from ..comm.comm import Comm
from ..execution.stage import PipelineStage
from ..layout import Shard, cutting
from ..ops.row_gradients import RowGradient
from .flat import FLAT, Buffers, flat
from .gradients import Gradients, Scaled
from .kinds import refusal
from .optimizer import Optimizer, Several, TorchOptimizer, attach_gradients, make_optimizers
from .reach import Reach
from .recipe import UpdateRule, recipe_text
from .rows import RowwiseAdagrad
from .whole import WholeOptimizer

Decline = Literal["constant", "linear", "cosine"]

FIRST_SCALE, GROWTH, BACKOFF, PATIENCE = 2.0**16, 2.0, 0.5, 2000  # torch.amp.GradScaler's


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The learning rate by step: a linear warm-up to `base`, then constant or down to `least`, the last step's rate.

    It only depends on the step, so that a continued run needs no state. Cosine: Loshchilov and Hutter 2017,
    SGDR, equation 5 without restarts.
    """

    base: float
    warmup: int = 0
    decline: Decline = "constant"
    least: float = 0.0
    steps: int = 0

    def at(self, step: int) -> float:
        """The rate of a step, counted from 0."""
        if step < self.warmup:
            return self.base * (step + 1) / self.warmup
        if self.decline == "constant":
            return self.base
        peak = max(0, self.warmup - 1)  # the first step with the full rate
        done = min(1.0, (step - peak) / max(1, self.steps - 1 - peak))
        left = 1 - done if self.decline == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.least + (self.base - self.least) * left


class LossScale:
    """The factor of an fp16 model's loss, which keeps small gradients from vanishing.

    It is halved when a gradient overflows, and that update is skipped; it is doubled after 2000 steps without overflow
    (Micikevicius et al. 2018, Mixed Precision Training, section 3.2; constants of torch.amp.GradScaler).
    """

    def __init__(self, first: float = FIRST_SCALE) -> None:
        self.value = first
        self.good = 0  # updates without overflow since it changed
        self.skipped = 0

    def after(self, finite: bool) -> None:
        if not finite:
            self.value, self.good, self.skipped = self.value * BACKOFF, 0, self.skipped + 1
        else:
            self.good += 1
            if self.good == PATIENCE:
                self.value, self.good = self.value * GROWTH, 0

    def state(self) -> Tensor:
        return torch.tensor([self.value, self.good], dtype=torch.float64)

    def restore(self, state: Tensor) -> None:
        self.value, self.good = float(state[0]), int(state[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """The outcome of an update."""

    rate: float
    norm: float | None  # the norm of all gradients before clipping; None if the host did not read it
    skipped: bool = False


class Update:
    """The optimizer's step on one rank; all ranks take it together."""

    def __init__(
        self,
        optimizer: Optimizer | None,
        gradients: Gradients,
        shards: Mapping[str, Shard],
        comm: Comm,
        sizes: Mapping[str, int],
        rate: Rate,
        *,
        clip: float | None = None,
        scale: LossScale | None = None,
        norms: bool = False,
        reach: Reach | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._reach = reach
        self._unreached: frozenset[str] = frozenset()
        self._gradients = gradients
        self._groups = tuple(_by_copies(shards, sizes))
        self._axes = tuple(axis for axis, size in sizes.items() if size > 1)
        self._comm = comm
        self._rate = rate
        self._clip = clip
        self._scale = scale
        self._reports_norm = norms or scale is not None  # whether the host reads the norm

    @property
    def partly(self) -> bool:
        """Whether steps may leave out parameters, so that steps differ."""
        return bool(self._reach)

    def measure(self, batches: int = 1) -> Tensor | None:
        """Scale gradients, which are summed over batches of a scaled loss, to gradients of the mean loss.

        Returns their norm if it is needed.
        """
        self._gradients.begin(batches if self._scale is None else self._comm.scale_here * batches)
        return self._norm() if self._reports_norm or self._clip is not None else None

    def begin(self, step: int, norm: Tensor | None) -> bool:
        """On the host: send the step's numbers to the device. False if gradients overflow and the update is skipped."""
        if self._scale is not None and norm is not None:
            finite = math.isfinite(float(norm))
            self._scale.after(finite)
            if not finite:
                return False
        if self._reach:
            self._unreached = self._reach.unreached()
        if self._optimizer is not None:
            self._optimizer.begin(self._rate.at(step))
        return True

    def apply(self, norm: Tensor | None) -> None:
        """Update the parameters; the gradients have this norm."""
        if self._clip is not None and norm is not None:
            self._gradients.clip(norm, self._clip)
        if self._optimizer is not None:
            self._optimizer.step(self._unreached)

    def ended(self, step: int, norm: Tensor | None, *, skipped: bool) -> Updated:
        """The outcome of an update; waits for the device if the host reads the norm."""
        reported = float(norm) if self._reports_norm and norm is not None else None
        return Updated(rate=self._rate.at(step), norm=reported, skipped=skipped)

    def _norm(self) -> Tensor:
        """The norm of the whole model's gradient; every element counts once, whatever the number of its copies."""
        total = torch.zeros((), dtype=torch.float64, device=self._comm.device)
        for copies, names in self._groups:
            total += self._gradients.squares(names) / copies
        for name in self._axes:
            total = self._comm.group((name,)).all_reduce(total)
        return total.sqrt()


def make_update(
    settings: Mapping[str, UpdateRule],
    parameters: MutableMapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    buffers: Buffers,
    kernels: ModuleType | None,
    *,
    shards: Mapping[str, Shard],
    comm: Comm,
    sizes: Mapping[str, int],
    lr: float,
    graphs: bool = False,
    partly: bool = False,
) -> tuple[Optimizer | None, Gradients]:
    """The optimizer of a rank's parameters, if it trains any, and the scaling of their gradients.

    If the package has a kernel for the updates, `parameters` move into flat memory. With `graphs`, no number on the
    host may change between steps. In fused updates on GPUs none ever does, so that steps are equal with and without
    graphs. If steps update the parameters `partly`, torch's optimizers do it.
    """
    if not gradients:
        return None, Gradients((), {})
    mine = {name: settings[name] for name in gradients}
    every: Mapping[str, object] = gradients
    rows = {name: x for name, x in every.items() if isinstance(x, RowGradient)}
    _check_rows(mine, rows)
    parts: list[tuple[Optimizer, Collection[str]]] = []
    dense = {name: rule for name, rule in mine.items() if name not in rows}
    name = flat(dense.values()) if dense and not partly else None
    scaled = Gradients(list(buffers.values()), gradients)
    if kernels is not None and name is not None and hasattr(kernels, name):
        scaled = Scaled(list(buffers.values()), gradients, kernels.squares)
        parts.append((FLAT[name](getattr(kernels, name), parameters, buffers, scaled, dense), dense))
        mine = {name: rule for name, rule in mine.items() if name in rows}
    trained = {name: x for name, x in attach_gradients(parameters, gradients).items() if name in mine}
    for kind, made, some in make_optimizers(mine, trained, lr, rows, partly=partly):
        if kind.whole:
            uncut = {name: mine[name].uncut(shards[name].shape) for name in some}
            parts.append((WholeOptimizer(made, some, shards, uncut, comm, sizes), some))
        else:
            device = next(iter(some.values())).device
            sparse = {name: rows[name] for name in some if name in rows}
            on_device = kind.fused and not sparse and graphs
            if isinstance(made, RowwiseAdagrad):
                made.over.update(_columns(some, shards, comm, sizes))
            parts.append((TorchOptimizer(made, some, device if on_device else None, sparse), some))
    return parts[0][0] if len(parts) == 1 else Several(parts), scaled


def _check_rows(settings: Mapping[str, UpdateRule], rows: Collection[str]) -> None:
    """Raise UsageError P0551 if an optimizer does not accept a parameter's gradient, sparse or dense, as the package
    computes it.
    """
    for name, rule in settings.items():
        if name in rows and not rule.takes_rows:
            raise refusal(
                f"the gradient of {name} is sparse in this package, and {recipe_text(rule.name, dict(rule.options))} "
                "needs a dense one",
                "compile with this optimizer: partc compile --optimizer, --group",
            )
        if rule.kind.sparse and name not in rows:
            raise refusal(
                f"{rule.name} needs sparse gradients, and that of {name} is dense",
                "compile with it, and make the table with nn.Embedding(sparse=True) or nn.EmbeddingBag(sparse=True)",
            )


def _columns(
    parameters: Mapping[str, Tensor], shards: Mapping[str, Shard], comm: Comm, sizes: Mapping[str, int]
) -> Iterator[tuple[Tensor, tuple[int, Callable[[Tensor], Tensor]]]]:
    """For parameters whose columns are cut: the length of a whole row, and a function that sums over the ranks with its
    parts.
    """
    for name, x in parameters.items():
        axes = [axis for axis in sizes if axis in cutting(shards[name].dims[1:]) and sizes[axis] > 1]
        if axes:
            held = math.prod((shards[name].holds or shards[name].shape)[1:])

            def over(x: Tensor, axes: Sequence[str] = axes) -> Tensor:
                for axis in axes:
                    x = comm.group((axis,)).all_reduce(x)
                return x

            yield x, (held, over)


def write_casts(optimizer: Optimizer, stages: Iterable[PipelineStage]) -> None:
    """Make updates write the low-precision copies that stages read, if the optimizer supports it."""
    parted = [stage.parts for stage in stages if stage.parts is not None]
    read: dict[str, Tensor] = {}
    for parts in parted:
        read = parts.cast() | read
    taken = optimizer.copy_to(read)
    for parts in parted:
        parts.leave([name for name, x in parts.cast().items() if name in taken and x is read[name]])


def _by_copies(shards: Mapping[str, Shard], sizes: Mapping[str, int]) -> Iterator[tuple[int, list[str]]]:
    """Groups of parameters by the number of ranks that hold the same part."""
    found: dict[int, list[str]] = {}
    for name, shard in shards.items():
        equal = math.prod(size for axis, size in sizes.items() if axis not in shard.cut and axis != "pp")
        found.setdefault(equal * max(1, len(shard.shared)), []).append(name)
    yield from found.items()
