"""The writer of normalize's rewrites, and its readers of arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from partc.errors import PartcError
from partc.ir.program import Arg, DType, DTypeArg, Op, Ref, TensorType, Value
from partc.rules.integer_bounds import OPPOSITE
from partc.rules.rule import integers

Rewrite = Callable[["Writer", Op], None]


@dataclass(slots=True)
class Writer:
    """The graph under construction; `same` maps results of dropped operations to the equal values."""

    types: dict[str, TensorType]
    batch: int = 0  # the number of examples
    separate: bool = False  # whether each microbatch is a batch of its own
    batched: set[str] = field(default_factory=set)  # values that depend on entries with a row for each example
    trained: set[str] = field(default_factory=set)  # values that depend on a parameter
    ops: list[Op] = field(default_factory=list)
    made: dict[str, Op] = field(default_factory=dict)  # the operation of each value written so far
    same: dict[str, str] = field(default_factory=dict)
    next_draw: int = 0  # the number of the next random operation
    drawn: int = 0  # different numbers so far
    kept: dict[int, int] = field(default_factory=dict)  # states of the generator, as the next number in each

    def keep(self, op: Op) -> None:
        self.ops.append(op)
        self.types.update((value.name, value.type) for value in op.results)
        self.made.update((value.name, op) for value in op.results)
        for known in (self.trained, self.batched):
            if not known.isdisjoint(op.refs()):
                known.update(value.name for value in op.results)

    def add(self, op: Op, name: str, args: tuple[Arg, ...], result: Value | None = None, **attrs: Arg) -> Ref:
        """Write an operation that replaces `op`; it defines the result of `op` unless `result` is given."""
        result = result or op.result
        self.keep(Op(name=name, args=args, attrs=tuple(attrs.items()), results=(result,), source=op.source))
        return Ref(result.name)

    def step(
        self,
        op: Op,
        name: str,
        args: tuple[Arg, ...],
        stem: str,
        shape: tuple[int, ...] | None = None,
        dtype: DType | None = None,
        /,
        **attrs: Arg,
    ) -> Ref:
        """Write an operation on the way to the result of `op`: the name of its result ends with `stem`.

        By default, the result has the shape of the operands, and the dtype of the first one. Views have their own
        shape, casts and tests their own dtype.
        """
        operands = [self.types[arg.name] for arg in args if isinstance(arg, Ref)]
        if shape is None and name in ("reshape", "expand"):
            shape = integers(args[1])
        if shape is None:
            shape = tuple(torch.broadcast_shapes(*(type.shape for type in operands)))
        if dtype is None:
            named = [arg.name for arg in (*args, *attrs.values()) if isinstance(arg, DTypeArg)]
            dtype = (
                "bool"
                if name in OPPOSITE or name.startswith("logical_")
                else (*named, *(type.dtype for type in operands))[0]
            )
        return self.add(op, name, args, self.value(f"{op.results[0].name}_{stem}", shape, dtype), **attrs)

    def draw(self) -> int:
        """The number of the next random operation, in the order in which one device runs them."""
        self.next_draw += 1
        self.drawn = max(self.drawn, self.next_draw)
        return self.next_draw - 1

    def drop(self, op: Op) -> None:
        """Drop the operation: its result equals its first operand."""
        self.alias(op.result.name, ref(op.args[0]).name)

    def alias(self, name: str, to: str) -> None:
        self.same[name] = self.same.get(to, to)

    def value(self, stem: str, shape: tuple[int, ...], dtype: DType) -> Value:
        name, count = stem, 1
        while name in self.types:
            count += 1
            name = f"{stem}_{count}"
        return Value(name=name, type=TensorType.replicated(dtype, shape))

    def shape(self, arg: Arg) -> tuple[int, ...]:
        return self.types[ref(arg).name].shape


def ref(arg: Arg) -> Ref:
    if not isinstance(arg, Ref):
        raise PartcError("P0213", f"expected a tensor argument, got {arg!r}", help="report this model's operation")
    return arg


def with_dtypes(w: Writer, op: Op) -> Op:
    """Add an explicit dtype where the result of an operation on integers would have torch's default dtype."""
    result = op.results[0].type if op.results else None
    if result is None or not result.differentiable or any(w.types[name].differentiable for name in op.refs()):
        return op
    if not any(True for _ in op.refs()):
        attrs = tuple(item for item in op.attrs if item[0] != "dtype")
        return replace(op, attrs=(*attrs, ("dtype", DTypeArg(result.dtype)))) if _takes_dtype(op.name) else op
    if op.name == "where":  # with two numbers; its condition stays a bool
        return replace(op, args=(op.args[0], *(_number(w, op, arg, result.dtype) for arg in op.args[1:])))
    cast: dict[str, str] = {}
    for name in dict.fromkeys(op.refs()):
        value = w.value(f"{name}_{result.dtype}", w.types[name].shape, result.dtype)
        w.add(op, "to", (Ref(name), DTypeArg(result.dtype)), value)
        cast[name] = value.name
    return op.with_operands(cast)


@cache
def _takes_dtype(name: str) -> bool:
    """Whether torch's operation of this name has a dtype argument."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = () if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    return any(argument.name == "dtype" for each in overloads for argument in each._schema.arguments)


def _number(w: Writer, op: Op, arg: Arg, dtype: DType) -> Ref:
    """A number, or an integer tensor, in a dtype."""
    if isinstance(arg, Ref):
        value = w.value(f"{arg.name}_{dtype}", w.types[arg.name].shape, dtype)
        return w.add(op, "to", (arg, DTypeArg(dtype)), value)
    return w.step(op, "full", ((), arg), "number", (), dtype=DTypeArg(dtype))
