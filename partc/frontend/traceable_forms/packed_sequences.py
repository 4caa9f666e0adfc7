"""Packed sequences whose lengths are values: recurrent networks over padded ones that stop at each sequence's end.

Torch packs sequences step by step, in the order of their lengths, which a trace does not know. Here packed data are the
padded sequences, one below the other. A network reads each sequence to its end, and backward from its end; results
beyond it are padding. Only recurrent networks and `pad_packed_sequence` may read packed data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import modules
from torch.nn.utils import rnn

from partc.errors import untraced
from partc.frontend.by_tensor import ByTensor
from partc.frontend.torch_call import TorchCall
from partc.torch_private import without_modes

_NETWORKS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_FACTS = frozenset({"dtype", "device", "dim", "is_cuda"})  # what modules ask of their operand
# What torch does with an order of sequences: its first operand is the result if they stay in order.
_ORDERING = frozenset({"to", "cpu", "empty_like", "scatter_", "index_select", "__getitem__"})
_FILES = (rnn.__file__, modules.rnn.__file__)
_CLOSED = 1e4  # a gate's operand whose sigmoid is 1, and that of its negative 0


@dataclass(slots=True)
class PackedSequences:
    """The packed data of a trace, with the padded shape and the lengths of their sequences."""

    knows: Callable[[Tensor], bool]
    know: Callable[[Tensor, Tensor], None]
    longest: Callable[[Tensor], int | float | None]  # the largest length, if the example batch determines it
    _packs: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # numbers of sequences by step, and lengths
    _orders: list[Tensor] = field(default_factory=list)  # of sequences by their lengths: packed data have none
    _data: ByTensor[None] = field(default_factory=ByTensor)

    def call(self, call: TorchCall, frame: FrameType) -> Any:
        """The result of a call that makes or reads packed data; NotImplemented of others. Raises PartcError P0206."""
        name, args = call.name, call.args
        if frame.f_code is rnn.pack_padded_sequence.__code__ and name == "sort" and not self.knows(args[0]):
            self._orders.append(torch.arange(len(args[0])))
            return args[0], self._orders[-1]
        if self._orders and any(x is order for x in args for order in self._orders):
            if frame.f_code.co_filename not in _FILES:
                raise untraced("the order of packed sequences is unknown", "leave sequences in the batch's order")
            return args[0] if name in _ORDERING else NotImplemented
        if name == "_pack_padded_sequence" and not self.knows(args[1]):
            return self._packed(*args)
        if name in _NETWORKS and len(args) > 1 and self._lengths_of(args[1]) is not None:
            return self._run(name, *args)
        if name == "_pad_packed_sequence" and self._lengths_of(args[1]) is not None:
            if frame.f_locals.get("total_length") is not None:
                return self._padded(*args)
            lengths = self._lengths_of(args[1])
            longest = None if lengths is None else self.longest(lengths)
            if longest is None:
                raise untraced(
                    "padded sequences are as long as the batch's longest one",
                    "give pad_packed_sequence the padded length: total_length=x.shape[1]",
                )
            x, lengths = self._padded(*args)
            return x.narrow(1 if args[2] else 0, 0, int(longest)), lengths
        fact = getattr(getattr(call.func, "__self__", None), "__name__", "") if name == "__get__" else name
        read = self._data and any(x in self._data for x in _listed((*args, *call.kwargs.values())))
        if read and fact not in _FACTS and not (name == "size" and args[1:] == (-1,)):
            raise untraced(
                f"{fact} reads the data of packed sequences, whose number is unknown",
                "compute with padded sequences, before packing or after pad_packed_sequence, and mask them",
            )
        return NotImplemented

    def _packed(self, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        x = x if batch_first else x.transpose(0, 1)
        sizes = torch.full((x.shape[1],), x.shape[0])
        with without_modes():
            self.know(sizes, torch.full((x.shape[1],), x.shape[0]))
        self._packs.append((sizes, lengths))
        data = x.reshape(-1, *x.shape[2:])
        self._data[data] = None
        return data, sizes

    def _lengths_of(self, sizes: Any) -> Tensor | None:
        """The lengths of packed sequences."""
        return next((lengths for own, lengths in self._packs if own is sizes), None)

    def _padded(
        self, data: Tensor, sizes: Tensor, batch_first: bool, padding: float, total: int
    ) -> tuple[Tensor, Tensor]:
        lengths, steps = self._lengths_of(sizes), len(sizes)
        assert lengths is not None
        x = data.view(len(lengths), steps, *data.shape[1:])
        x = torch.where(_column(torch.arange(steps) < lengths[:, None], x), x, padding)
        if total > steps:
            x = torch.cat([x, x.new_full((len(x), total - steps, *x.shape[2:]), padding)], 1)
        return x if batch_first else x.transpose(0, 1), lengths

    def _run(
        self,
        name: str,
        data: Tensor,
        sizes: Tensor,
        start: Any,
        weights: Sequence[Tensor],
        biased: bool,
        layers: int,
        dropout: float,
        training: bool,
        both: bool,
    ) -> tuple[Tensor, ...]:
        """A network layer by layer, and each direction apart."""
        if dropout and training and layers > 1:
            raise untraced(
                "packed sequences have a dropout between layers, which is drawn in the order of their lengths",
                "make each layer a module of its own, and put nn.Dropout on padded sequences between them",
            )
        lengths, steps = self._lengths_of(sizes), len(sizes)
        assert lengths is not None
        x = data.view(len(lengths), steps, -1)
        ended = torch.arange(steps) >= lengths[:, None]
        order = torch.where(ended, torch.arange(steps), lengths[:, None] - 1 - torch.arange(steps))
        states = start if isinstance(start, tuple | list) else (start,)
        ways = 2 if both else 1
        each = len(weights) // (layers * ways)
        ends: list[tuple[Tensor, ...]] = []
        for layer in range(layers):
            made = []
            for way in range(ways):
                place = layer * ways + way
                given = weights[place * each : (place + 1) * each]
                first = tuple(state[place : place + 1] for state in states)
                y, last = _steps(name, _reversed(x, order) if way else x, first, given, biased, ended, lengths)
                made.append(_reversed(y, order) if way else y)
                ends.append(last)
            x = torch.cat(made, 2)
        out = x.flatten(0, 1)
        self._data[out] = None
        return out, *(torch.cat(parts) for parts in zip(*ends, strict=True))


def _steps(
    name: str,
    x: Tensor,
    first: tuple[Tensor, ...],
    weights: Sequence[Tensor],
    biased: bool,
    ended: Tensor,
    lengths: Tensor,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The results of a layer in one direction, and its states at the ends of the sequences.

    The cell of an LSTM keeps its state beyond the end: one more element of its operand closes the gate of what comes
    in, and opens that of what stays.
    """
    if name == "lstm":
        size = weights[1].shape[0] // 4
        gates = weights[0].new_tensor([-_CLOSED, _CLOSED, 0.0, 0.0]).repeat_interleave(size)
        x = torch.cat([x, ended[..., None].to(x.dtype)], 2)
        weights = [torch.cat([weights[0], gates[:, None]], 1), *weights[1:]]
    hx = first if name == "lstm" else first[0]
    y, *last = getattr(torch, name)(x, hx, list(weights), biased, 1, 0.0, False, False, True)
    at_end = _column(lengths[:, None] - 1, y).expand(-1, 1, y.shape[2])
    return y, (y.gather(1, at_end).transpose(0, 1), *last[1:])


def _reversed(x: Tensor, order: Tensor) -> Tensor:
    """Each sequence from its end; padding stays."""
    return x.gather(1, _column(order, x).expand_as(x))


def _listed(args: Iterable[Any]) -> Iterator[Any]:
    """Arguments, and the items of lists among them."""
    for arg in args:
        yield from arg if isinstance(arg, tuple | list) else (arg,)


def _column(places: Tensor, like: Tensor) -> Tensor:
    return places.view(*places.shape, *(1 for _ in like.shape[2:]))
