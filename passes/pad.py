"""Pad vocabularies to multiples of the tensor axes, so that they can be cut, and to whole cache lines for kernels.

    parameter head.weight: f32[13, 8]                   parameter head.weight: f32[14, 8] holds(13,8)
    linear_4  = linear(add_1, …head_weight)         ->  linear_4         = linear(add_1, …head_weight)
    nll_whole = cross_entropy(linear_4, labels, …)      linear_4_classes = mask_classes(linear_4, 13)
                                                        nll_whole        = cross_entropy(linear_4_classes, labels, …)

The added rows are zeros. No id looks them up, and the softmax excludes their logits, so their gradients are zero and
they stay zero: loss, gradients and saved files equal those of the model (Shoeybi et al. 2019, section 3, pad
vocabularies for the same reason). Other readers of logits get a slice without them. With Triton kernels, a rank's rows
of logits begin at memory lines: products and kernels then move 16 bytes at a time instead of one number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from partc import fuel
from partc.ir.program import Op, Program, Ref, Region, TensorType, Value
from partc.rules import is_elementwise
from partc.runtime.ops.chunked_loss import LINE
from partc.sharding.choices import weight_axes

_LEAST = 4  # the fewest rows on a rank for which a cut is worth a mask
_PIECE = 8  # 16-bit numbers of a memory line
_SPARE = 16  # at most 1/16 of the rows may be added to fill lines
Sizes = tuple[int, int]  # the number of classes, and of rows with padding


def pad(program: Program, *, kernels: str = "aten") -> Program:
    """Pad the tables and heads that need it, with their biases; for Triton `kernels` also to whole lines."""
    ways = math.prod(program.sizes[axis] for axis in weight_axes(program.sizes))
    (main,), (call,) = program.regions, program.calls
    found = _Padding(main, ways, lines=kernels == "triton").run()
    if not found.padded:
        return program
    stored = dict(zip((value.name for value in main.params), call.params, strict=True))
    wide = {stored[name]: size for name, size in found.padded.items()}
    parameters = tuple(
        replace(item, type=_wider(item.type, 0, wide[item.name]), holds=item.type.shape) if item.name in wide else item
        for item in program.parameters
    )
    return replace(program, regions=(found.region(),), parameters=parameters)


def _wider(type: TensorType, dim: int, size: int) -> TensorType:
    shape = list(type.shape)
    shape[dim] = size
    return type.shaped(shape)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@dataclass(slots=True)
class _Padding:
    """Pads a region: parameters with their new sizes, and values whose last dimension is classes."""

    main: Region
    ways: int
    lines: bool
    padded: dict[str, int] = field(default_factory=dict)
    classes: dict[str, Sizes] = field(default_factory=dict)  # value -> sizes of its last dimension
    readers: Mapping[str, Sequence[Op]] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)

    def run(self) -> _Padding:
        graph = self.main.forward
        self.types = self.main.types(graph)
        self.readers = graph.readers()
        for value in self.main.params:
            shape = value.type.shape
            if len(shape) == 2 and (whole := self._padded_rows(shape[0], value.name)) > shape[0] >= _LEAST * self.ways:
                self._try(value.name, (shape[0], whole))
        return self

    def _padded_rows(self, size: int, name: str) -> int:
        """The padded number of rows of a table or head."""
        whole = _round_up(size, self.ways)
        lines = _round_up(size, self.ways * LINE)
        head = any(op.name == "linear" and op.args[1:] == (Ref(name),) for op in self.readers.get(name, ()))
        even = whole // self.ways % _PIECE == 0 or not (self.lines and head)
        return whole if even or (lines - size) * _SPARE > size else lines

    def _try(self, name: str, sizes: Sizes) -> None:
        """Pad a table if all its readers look rows up, or compute logits that end in a cross-entropy."""
        classes: dict[str, Sizes] = {}
        biases: dict[str, int] = {}
        for op in self.readers.get(name, ()):
            if op.name == "linear" and op.args[1:] == (Ref(name),) and op.args[0] != Ref(name):
                if not self._follow(op.result.name, sizes, classes, biases):
                    return
            elif op.name != "embedding" or op.args[0] != Ref(name) or Ref(name) in op.args[1:]:
                return
        if fuel.may_rewrite("padding"):
            self.padded |= {name: sizes[1], **biases}
            self.classes |= classes

    def _follow(self, name: str, sizes: Sizes, classes: dict[str, Sizes], biases: dict[str, int]) -> bool:
        """Follow the logits and note all padded values. Returns False if no cross-entropy reads them."""
        classes[name] = sizes
        ends = False
        for op in self.readers.get(name, ()):
            if self._is_loss(op, name):
                ends = True
            elif self._passes(op, name, sizes, biases):
                ends |= self._follow(op.result.name, sizes, classes, biases)
        return ends

    def _is_loss(self, op: Op, name: str) -> bool:
        return op.name == "cross_entropy" and op.args[0] == Ref(name) and op.args[2] is None and not op.args[4]

    def _passes(self, op: Op, name: str, sizes: Sizes, biases: dict[str, int]) -> bool:
        """Whether an operation treats every class alike, so that padded classes stay separate."""
        size, whole = sizes
        names = list(op.refs())
        if len(op.results) != 1:
            return False
        shape, rank = op.result.type.shape, len(self.types[name].shape)
        if names == [name]:
            if op.name == "reshape":
                return shape[-1:] == (size,)
            return is_elementwise(op.name) or (op.name == "slice" and op.args[1] not in (-1, rank - 1))
        bias = next((other for other in names if other != name), "")
        own = any(value.name == bias for value in self.main.params) and self.types[bias].shape == (size,)
        if op.name == "add" and len(names) == 2 and own and len(self.readers[bias]) == 1 and shape[-1:] == (size,):
            biases[bias] = whole
            return True
        return False

    def region(self) -> Region:
        """The region with wider parameters and logits, masks before losses and slices before other readers."""
        ops: list[Op] = []
        masked: dict[str, str] = {}
        slices: dict[str, str] = {}
        for op in self.main.forward.ops:
            made = {value.name for value in op.results}
            for name in dict.fromkeys(op.refs()):
                if name in self.classes and not made & set(self.classes):
                    if self._is_loss(op, name):
                        op = replace(op, args=(Ref(self._masked(name, op, masked, ops)), *op.args[1:]))
                    else:
                        op = op.with_operands({name: self._sliced(name, op, slices, ops)})
            ops.append(self._widened(op))
        params = tuple(
            replace(value, type=_wider(value.type, 0, self.padded[value.name])) if value.name in self.padded else value
            for value in self.main.params
        )
        return replace(self.main, params=params, forward=replace(self.main.forward, ops=tuple(ops)))

    def _widened(self, op: Op) -> Op:
        if not op.results or op.results[0].name not in self.classes:
            return op
        (_, size), type = self.classes[op.results[0].name], op.results[0].type
        result = replace(op.results[0], type=_wider(type, len(type.shape) - 1, size))
        args = (op.args[0], (*type.shape[:-1], size)) if op.name == "reshape" else op.args
        return replace(op, args=args, results=(result,))

    def _masked(self, name: str, op: Op, masked: dict[str, str], ops: list[Op]) -> str:
        """The logits with minus infinity for padded classes."""
        if name not in masked:
            type, (classes, size) = self.types[name], self.classes[name]
            value = Value(name=f"{name}_classes", type=_wider(type, len(type.shape) - 1, size))
            ops.append(Op(name="mask_classes", args=(Ref(name), classes), results=(value,), source=op.source))
            masked[name] = value.name
        return masked[name]

    def _sliced(self, name: str, op: Op, slices: dict[str, str], ops: list[Op]) -> str:
        """The logits of true classes only."""
        if name not in slices:
            type = self.types[name]
            value = Value(name=f"{name}_true", type=type)
            args = (Ref(name), len(type.shape) - 1, 0, self.classes[name][0], 1)
            ops.append(Op(name="slice", args=args, results=(value,), source=op.source))
            slices[name] = value.name
        return slices[name]
