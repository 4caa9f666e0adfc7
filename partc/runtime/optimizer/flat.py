"""AdamW and SGD by the package's own kernels: one pass over all parameters of a rank, in flat memory.

Parameters and moments are laid out like the gradients (executor.gradient_memory): one launch for each buffer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..device.sending import send
from ..execution.executor import pieces_of
from .gradients import Scaled
from .recipe import UpdateRule

BETAS, EPS, DECAY = (0.9, 0.999), 1e-8, 0.01  # torch.optim.AdamW's
EVEN = 8  # 16-bit numbers that are written at once
UNCOPIED = -(1 << 62)  # the shift of elements without a copy
GRANULE = 1024  # elements per entry of the table of segments: the kernel's smallest block
Buffers = Mapping[tuple[str, ...], Tensor]  # names of parameters -> their flat memory


def _moved(parameters: MutableMapping[str, Tensor], names: Sequence[str], like: Tensor) -> Tensor:
    """Move parameters into one flat tensor, and return it."""
    flat = torch.empty_like(like)
    for name, view in pieces_of(flat, names, parameters).items():
        parameters[name] = view.copy_(parameters[name])
    return flat


@dataclass(frozen=True, slots=True)
class _Flat:
    """The flat buffers of a set of parameters: values, gradients and moments."""

    names: tuple[str, ...]
    gradient: Tensor
    parameter: Tensor
    moments: tuple[Tensor, ...]

    @property
    def wide(self) -> torch.dtype:
        """The type for computation."""
        return torch.float64 if self.parameter.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class _Segments:
    """The segments of a buffer: runs of parameters with equal weight decay, learning rate, number of steps, and
    copying.

    `first` holds the index of the segment in which each granule of the buffer begins, then the last segment's. `first`
    and `starts` are None if there is only one segment; `shifts` is None if nothing is copied.
    """

    decays: tuple[float, ...]
    scales: tuple[float, ...]  # factors of the learning rate
    ages: tuple[float, ...]  # numbers of steps, relative to the buffer's first parameter
    starts: Tensor | None
    first: Tensor | None
    shifts: Tensor | None
    even: bool


class FlatSGD:
    """torch.optim.SGD's step with its defaults, by `launch`: the package's kernel, `kernels.sgd`.

    Trains the parameters of the gradient `buffers`, and moves them into memory of the same layout.
    """

    moments: tuple[str, ...] = ()
    decay = 0.0

    def __init__(
        self,
        launch: Callable[..., None],
        parameters: MutableMapping[str, Tensor],
        buffers: Buffers,
        gradients: Scaled,
        settings: Mapping[str, UpdateRule],
    ) -> None:
        self._launch = launch
        self._gradients = gradients
        self._decays = {name: _decay(each, self.decay) for name, each in settings.items()}
        self._scales = {name: each.lr_scale for name, each in settings.items()}
        self._sizes = {name: parameters[name].numel() for names in buffers for name in names}
        self._flats = [
            _Flat(
                names, buffer, _moved(parameters, names, buffer), tuple(torch.zeros_like(buffer) for _ in self.moments)
            )
            for names, buffer in buffers.items()
        ]
        self._moments: dict[str, dict[str, Tensor]] = {name: {} for name in self._sizes}
        for each in self._flats:
            for key, buffer in zip(self.moments, each.moments, strict=True):
                for name, piece in pieces_of(buffer, each.names, parameters).items():
                    self._moments[name][key] = piece
        # The step count of every parameter, as in checkpoints; on the host, which reads them.
        self._steps = torch.zeros(len(self._sizes))
        self._step_of = dict(zip(self._sizes, self._steps.unbind(), strict=True))
        self._copies: dict[tuple[str, ...], tuple[Tensor, frozenset[str]]] = {}
        self._segments: list[_Segments] | None = None
        self._rates: dict[tuple[str, ...], Tensor] = {}  # buffer -> this step's numbers, a row for each segment

    def copy_to(self, read: Mapping[str, Tensor]) -> frozenset[str]:
        """Move the low-precision copies into flat memory; all copies in a buffer have the same dtype."""
        taken: set[str] = set()
        for each in self._flats:
            names = [name for name in each.names if name in read and name not in taken and read[name].numel()]
            names = [name for name in names if read[name].dtype == read[names[0]].dtype]
            if not names or each.names in self._copies:
                continue
            whole = {name: read[name] for name in names}
            flat = whole[names[0]].new_empty(sum(x.numel() for x in whole.values()))
            for name, piece in pieces_of(flat, names, whole).items():
                piece.copy_(whole[name])
                whole[name].set_(piece.untyped_storage(), piece.storage_offset(), piece.shape, piece.stride())
            self._copies[each.names] = flat, frozenset(names)
            taken.update(names)
        self._segments = None
        return frozenset(taken)

    def state_of(self, name: str) -> Mapping[str, Tensor]:
        """The optimizer's state of a parameter, under torch's names."""
        return self._moments[name]

    def uncut(self, name: str) -> Collection[str]:
        return [key for key in self.state_of(name) if key not in self.moments]

    def by_rows(self, name: str) -> Collection[str]:
        return ()

    def restore(self, name: str, key: str, value: Tensor) -> None:
        """Restore one entry of the state."""
        self.state_of(name)[key].copy_(value)
        self._segments = None

    def begin(self, rate: float) -> None:
        """Send the numbers that the host computes for a step to the device."""
        self._steps += 1
        if self._segments is None:
            self._segments = [self._cut(each) for each in self._flats]
            self._rates = {
                each.names: torch.tensor(
                    self._rows(rate, each, segments), dtype=each.wide, device=each.parameter.device
                )
                for each, segments in zip(self._flats, self._segments, strict=True)
            }
        for each, segments in zip(self._flats, self._segments, strict=True):
            send(self._rows(rate, each, segments), self._rates[each.names])

    def _rows(self, rate: float, each: _Flat, segments: _Segments) -> list[tuple[float, ...]]:
        """The kernel's arguments for each segment."""
        return [(decay, rate * scale) for decay, scale in zip(segments.decays, segments.scales, strict=True)]

    def step(self, without: Collection[str] = ()) -> None:
        """Update every parameter; the kernel leaves out none."""
        assert not without
        assert self._segments is not None, "a step that has not begun"
        for each, segments in zip(self._flats, self._segments, strict=True):
            if not each.parameter.numel():
                continue
            copy, _ = self._copies.get(each.names, (None, None))
            self._launch(
                each.gradient,
                each.parameter,
                *each.moments,
                self._gradients.factor.to(each.wide),
                self._rates[each.names],
                segments.first,
                segments.starts,
                copy,
                segments.shifts,
                segments.even,
            )

    def _cut(self, each: _Flat) -> _Segments:
        """Divide a buffer into segments by the properties of its parameters."""
        begun = float(self._step_of[each.names[0]])
        _, copied = self._copies.get(each.names, (None, frozenset[str]()))
        kinds: list[tuple[float, float, float]] = []
        starts, shifts, at, there = [], [], 0, 0

        def kind(name: str) -> tuple[bool, float, float, float]:
            return name in copied, self._decays[name], self._scales[name], float(self._step_of[name]) - begun

        for (copies, decay, scale, age), names in itertools.groupby(each.names, kind):
            size = sum(self._sizes[name] for name in names)
            kinds.append((decay, scale, age))
            starts.append(at)
            shifts.append(there - at if copies else UNCOPIED)
            at, there = at + size, there + size * copies
        decays, scales, ages = zip(*kinds, strict=True)
        device = each.parameter.device
        moved = torch.tensor(shifts).to(device) if copied else None
        even = all(shift % EVEN == 0 for shift in shifts)
        if len(kinds) == 1:
            return _Segments(decays, scales, ages, None, None, moved, even)
        bounds = torch.tensor(starts)
        granules = torch.arange(-(-at // GRANULE) + 1) * GRANULE
        first = torch.searchsorted(bounds, granules.clamp(max=at - 1), right=True, out_int32=True) - 1
        return _Segments(decays, scales, ages, bounds.to(device), first.to(device), moved, even)


class FlatAdamW(FlatSGD):
    """torch.optim.AdamW's step, by `kernels.adamw`."""

    moments = ("exp_avg", "exp_avg_sq")
    decay = DECAY

    def state_of(self, name: str) -> Mapping[str, Tensor]:
        return {"step": self._step_of[name], **self._moments[name]}

    def _rows(self, rate: float, each: _Flat, segments: _Segments) -> list[tuple[float, ...]]:
        first = float(self._step_of[each.names[0]])
        return [
            (
                1 - rate * scale * decay,
                rate * scale / (1 - BETAS[0] ** (first + age)),
                (1 - BETAS[1] ** (first + age)) ** 0.5,
            )
            for decay, scale, age in zip(segments.decays, segments.scales, segments.ages, strict=True)
        ]


FLAT: Mapping[str, type[FlatSGD]] = {"adamw": FlatAdamW, "sgd": FlatSGD}  # also the names of the kernels


def flat(settings: Iterable[UpdateRule]) -> str | None:
    """The name of the kernel for these updates; None if there is none, for example for other betas."""
    names = {each.name for each in settings}
    plain = all(
        key == "weight_decay" or value == each.kind.parameters[key].default
        for each in settings
        for key, value in each.options
    )
    name = next(iter(names))
    return name if len(names) == 1 and name in FLAT and plain else None


def _decay(settings: UpdateRule, default: float) -> float:
    decay = dict(settings.options).get("weight_decay", default)
    assert isinstance(decay, int | float)
    return float(decay)
