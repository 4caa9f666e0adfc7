"""Loops over time as one operation.

    last, ys = scan((h0,), (a, b), (), length=512, dims=(1, 1, 1), reverse=False)  # f32[8, 4] ; f32[8, 512, 4]
    | input h: f32[8, 4]
    | input a_t: f32[8, 4]
    | input b_t: f32[8, 4]
    | decayed = mul(a_t, h)  # f32[8, 4]
    | next = add(decayed, b_t)  # f32[8, 4]
    | return next, next

The operands are the first states, sequences, of which each step reads one element along a dimension, and constants. The
attribute `step` is the graph of one step: from states, elements and constants to the next states and one element of
each result sequence. The results are the last states and these sequences. `dims` are the time dimensions of the operand
sequences, then of the result sequences. `reverse` runs from the last element to the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from partc.errors import InternalError
from partc.ir.program import SCAN, Arg, Graph, Op, Ref, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """The parts of a scan; `starts`, `sequences` and `constants` are names of values."""

    starts: tuple[str, ...]
    sequences: tuple[str, ...]
    constants: tuple[str, ...]
    length: int
    dims: tuple[int, ...]
    reverse: bool
    step: Graph

    @property
    def states(self) -> tuple[Value, ...]:
        """The states before a step."""
        return self.step.inputs[: len(self.starts)]

    @property
    def elements(self) -> tuple[Value, ...]:
        """The elements that a step reads."""
        return self.step.inputs[len(self.starts) : len(self.starts) + len(self.sequences)]

    @property
    def fixed(self) -> tuple[Value, ...]:
        """The constants under their names in the step."""
        return self.step.inputs[len(self.starts) + len(self.sequences) :]

    @property
    def following(self) -> tuple[str, ...]:
        """The states after a step."""
        return self.step.outputs[: len(self.starts)]

    @property
    def made(self) -> tuple[str, ...]:
        """The elements that a step adds to the result sequences."""
        return self.step.outputs[len(self.starts) :]

    @property
    def dims_read(self) -> tuple[int, ...]:
        return self.dims[: len(self.sequences)]

    @property
    def dims_made(self) -> tuple[int, ...]:
        return self.dims[len(self.sequences) :]

    @property
    def args(self) -> tuple[Arg, ...]:
        return tuple(tuple(map(Ref, names)) for names in (self.starts, self.sequences, self.constants))

    @property
    def attrs(self) -> tuple[tuple[str, Arg], ...]:
        return (("length", self.length), ("dims", self.dims), ("reverse", self.reverse), ("step", self.step))


def scan_of(op: Op) -> Scan:
    """The parts of a scan."""
    attrs = dict(op.attrs)
    names = [tuple(ref.name for ref in each if isinstance(ref, Ref)) for each in op.args if isinstance(each, tuple)]
    length, dims, reverse, step = (attrs.get(key) for key in ("length", "dims", "reverse", "step"))
    if op.name != SCAN or not isinstance(step, Graph) or not isinstance(dims, tuple) or not isinstance(length, int):
        raise InternalError(f"{op.name} is not a scan")
    starts, sequences, constants = names
    return Scan(
        starts=starts,
        sequences=sequences,
        constants=constants,
        length=length,
        dims=tuple(dim for dim in dims if isinstance(dim, int)),
        reverse=reverse is True,
        step=step,
    )


def with_time(shape: Sequence[int], dim: int, length: int) -> tuple[int, ...]:
    """The shape of a sequence of elements of this shape."""
    return (*shape[:dim], length, *shape[dim:])


def result_shapes(scan: Scan) -> tuple[tuple[int, ...], ...]:
    """The shapes of the results, by those in the step."""
    known: Mapping[str, Value] = scan.step.definitions()
    states = tuple(value.type.shape for value in scan.states)
    made = zip(scan.made, scan.dims_made, strict=True)
    return (*states, *(with_time(known[name].type.shape, dim, scan.length) for name, dim in made))
