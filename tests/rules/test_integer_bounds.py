"""Bounds of integers against execution, and the masks that the bounds decide."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import partc
from partc.ir.interpreter import results_of
from partc.ir.operators import DTYPE_NAMES, DTYPES
from partc.ir.program import Arg, DType, DTypeArg, Op, Ref, TensorType, Value
from partc.rules.integer_bounds import (
    FORMULAS,
    OPPOSITE,
    BoundedCall,
    IntegerBounds,
    bounds_of,
    bounds_of_dtype,
    bounds_of_graph,
)
from tests.programs import fused_graph

HERE = Path(__file__).parents[1]
SHAPE = (3, 4)
WHOLE: tuple[DType, ...] = ("i64", "i32", "i8", "u8", "bool")


@dataclass(slots=True)
class Program:
    """Operations on integers, with the results that torch computes and the bounds that are claimed for them."""

    draw: random.Random
    made: dict[str, Tensor] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)  # of `made`
    known: dict[str, IntegerBounds] = field(default_factory=dict)
    ops: dict[str, Op] = field(default_factory=dict)

    def holds(self, x: Tensor, bounds: IntegerBounds | None = None) -> Ref:
        ref = Ref(f"x{len(self.made)}")
        self.made[ref.name] = x
        self.types[ref.name] = TensorType.replicated(DTYPE_NAMES[x.dtype], x.shape)
        if bounds is not None:
            self.known[ref.name] = bounds
        return ref

    def given(self, dtype: DType) -> Ref:
        """Integers that reach both of their bounds."""
        whole = bounds_of_dtype(dtype)
        near = (max(whole.least, -9), min(whole.most, 9))
        ends = [self.draw.randint(*self.draw.choice((near, near, (whole.least, whole.most)))) for _ in range(2)]
        numbers = [*ends, *(self.draw.randint(min(ends), max(ends)) for _ in range(math.prod(SHAPE) - 2))]
        self.draw.shuffle(numbers)
        return self.holds(
            torch.tensor(numbers, dtype=DTYPES[dtype]).reshape(SHAPE), IntegerBounds(min(ends), max(ends))
        )

    def x(self) -> Ref:
        """A tensor of integers."""
        return Ref(self.draw.choice([name for name in self.known if self.made[name].shape == SHAPE]))

    def mask(self) -> Ref:
        masks = [name for name in self.known if self.made[name].shape == SHAPE and self.made[name].dtype == torch.bool]
        return Ref(self.draw.choice(masks))

    def compared(self) -> tuple[Ref, Ref]:
        """A mask, and integers that it may compare with a number."""
        own = [(Ref(name), x) for name, op in self.ops.items() if op.name in OPPOSITE for x in op.args[:1]]
        mask, x = self.draw.choice([*own, (self.mask(), self.x())])
        assert isinstance(x, Ref)
        return mask, x

    def scores(self) -> Ref:
        return self.holds(torch.randn(SHAPE, generator=torch.Generator().manual_seed(self.draw.randint(0, 99))))

    def places(self, size: int, *shape: int) -> Ref:
        return self.holds(torch.tensor([self.draw.randrange(size) for _ in range(math.prod(shape))]).reshape(shape))

    def number(self) -> int:
        return self.draw.choice((self.draw.randint(-12, 12), self.draw.randint(-400, 400)))

    def y(self) -> Arg:
        return self.draw.choice((self.x(), self.number()))

    def near(self) -> tuple[Ref, Arg]:
        """Integers, and one that is equal to some of them."""
        x = self.x()
        return x, self.draw.choice((self.y(), int(self.draw.choice(self.made[x.name].flatten().tolist()))))

    def dim(self) -> int:
        return self.draw.choice((0, 1, -1))

    def run(self, name: str, args: tuple[Arg, ...], attrs: tuple[tuple[str, Arg], ...] = ()) -> None:
        """Add an operation, and check its results; what torch refuses is left out."""
        op = Op(name=name, args=args, attrs=attrs, results=tuple(Value(name=f"{name}{i}", type=NONE) for i in range(2)))
        try:
            found = [*results_of(replace_results(op, 1 if name not in SEVERAL else 2), self.made).values()]
        except (RuntimeError, TypeError, IndexError, ZeroDivisionError):
            return
        refs = [self.holds(x) for x in found]
        op = Op(
            name=name, args=args, attrs=attrs,
            results=tuple(Value(name=ref.name, type=self.types[ref.name]) for ref in refs),
        )  # fmt: skip
        for made, bounds in bounds_of(BoundedCall(op, self.types, self.known, self.ops)).items():
            x = self.made[made].to(torch.int64)
            assert not x.numel() or (bounds.least <= int(x.min()) and int(x.max()) <= bounds.most), (op, bounds)
            self.known[made] = bounds
        self.ops |= {ref.name: op for ref in refs}


NONE = TensorType.replicated("i64", ())
SEVERAL = ("topk", "sort", "max", "min", "split")


def replace_results(op: Op, count: int) -> Op:
    return Op(name=op.name, args=op.args, attrs=op.attrs, results=op.results[:count])


Call = Callable[[Program], tuple[Arg, ...]]
ELEMENTS: dict[str, Call] = {
    "reshape": lambda p: (p.x(), (4, 3)),
    "permute": lambda p: (p.x(), (1, 0)),
    "expand": lambda p: (p.x(), (2, *SHAPE)),
    "slice": lambda p: (p.x(), p.draw.choice((0, 1)), 1, 3, 1),
    "split": lambda p: (p.x(), (1, 2), 0),
    "flip": lambda p: (p.x(), (p.dim(),)),
    "roll": lambda p: (p.x(), (1,), (0,)),
    "repeat": lambda p: (p.x(), (1, 2)),
    "repeat_interleave": lambda p: p.draw.choice(((p.x(), 2, p.dim()), (p.places(5, 3),))),
    "unfold": lambda p: (p.x(), 1, 2, 1),
    "diagonal": lambda p: (p.x(),),
    **dict.fromkeys(("alias", "clone", "contiguous", "detach"), lambda p: (p.x(),)),
    "index": lambda p: (p.x(), (p.places(3, 5),)),
    "index_select": lambda p: (p.x(), 1, p.places(4, 4)),
    "gather": lambda p: (p.x(), p.draw.choice((1, -1)), p.draw.choice((p.x(), p.places(4, 3, 4)))),
    "embedding": lambda p: (p.x(), p.places(3, 6)),
    **dict.fromkeys(("amax", "amin"), lambda p: (p.x(), (p.dim(),), p.draw.choice((True, False)))),
    "cat": lambda p: ((p.x(), p.x()), p.dim()),
    "where": lambda p: p.draw.choice(((p.mask(), p.y(), p.y()), (*p.compared(), p.y()))),
    "masked_fill": lambda p: (*reversed(p.compared()), p.number()),
    "index_put": lambda p: (p.x(), (p.places(3, 3),), p.x(), *p.draw.choice(((), (False,), (True,)))),
    "scatter": lambda p: (p.x(), 1, p.places(4, *SHAPE), p.y()),
    "index_copy": lambda p: (p.x(), 0, p.places(3, 3), p.x()),
    "constant_pad_nd": lambda p: (p.x(), (1, 0), p.number()),
    **dict.fromkeys(("tril", "triu"), lambda p: (p.x(),)),
}
PLACES: dict[str, Call] = {
    "topk": lambda p: (p.draw.choice((p.x(), p.scores())), 2, p.dim()),
    "sort": lambda p: (p.draw.choice((p.x(), p.scores())), p.dim()),
    **dict.fromkeys(("max", "min"), lambda p: (p.x(), p.dim(), True)),
    "argsort": lambda p: (p.draw.choice((p.x(), p.scores())), p.dim()),
    **dict.fromkeys(("argmax", "argmin"), lambda p: (p.draw.choice((p.x(), p.scores())), p.draw.choice((None, 0, 1)))),
    "arange": lambda p: p.draw.choice(((12,), (p.number(), 400), (5, -7, -3))),
}
NUMBERS: dict[str, Call] = {
    "full": lambda p: (SHAPE, p.number()),
    "to": lambda p: (p.x(), DTypeArg(p.draw.choice(WHOLE))),
    **dict.fromkeys(("add", "sub"), lambda p: (p.x(), p.y())),
    **dict.fromkeys(("mul", "floor_divide", "remainder"), lambda p: (p.x(), p.y())),
    **dict.fromkeys(("minimum", "maximum"), lambda p: (p.x(), p.x())),
    "neg": lambda p: (p.x(),),
    "div": lambda p: (p.x(), p.y()),
    "clamp": lambda p: (p.x(), *p.draw.choice(((None, p.number()), (p.number(), None), (p.number(), p.number())))),
    **dict.fromkeys(("clamp_min", "clamp_max"), lambda p: (p.x(), p.number())),
    "sum": lambda p: (p.x(), (p.dim(),), False),
    "cumsum": lambda p: (p.x(), p.dim()),
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne"), lambda p: p.near()),
    **dict.fromkeys(("__and__", "bitwise_and", "__or__", "bitwise_or"), lambda p: (p.x(), p.x())),
    **dict.fromkeys(("logical_and", "logical_or"), lambda p: (p.x(), p.x())),
    **dict.fromkeys(("bitwise_not", "logical_not"), lambda p: (p.x(),)),
    **dict.fromkeys(("any", "all"), lambda p: (p.x(), p.dim(), True)),
}
CALLS = ELEMENTS | PLACES | NUMBERS
ATTRS: dict[str, tuple[tuple[tuple[str, Arg], ...], ...]] = {
    "add": ((), (("alpha", -3),)),
    "sub": ((), (("alpha", 2),)),
    "div": ((("rounding_mode", "floor"),), (("rounding_mode", "trunc"),)),
    "cumsum": ((), (("dtype", DTypeArg("i8")),)),
    "full": ((("dtype", DTypeArg("i64")),), (("dtype", DTypeArg("i32")),)),
}


def test_collectives_that_move_numbers_keep_their_bounds() -> None:
    graph = fused_graph(
        """
  forward:
    input scores: f32[12@tp, 4]
    s, chosen = topk(scores, 2)  # f32[12@tp, 2] ; i64[12@tp, 2]
    every = all_gather(chosen, dim=0, outer=1, axis="tp")  # i64[12, 2]
    total = all_reduce(every, axis="tp")  # i64[12, 2]
    return s
"""
    ).regions[0]
    found = bounds_of_graph(graph.forward, graph.types(graph.forward))
    assert found["every"] == IntegerBounds(0, 3) and found["total"] == bounds_of_dtype("i64")


def test_every_formula_is_tried() -> None:
    assert CALLS.keys() == FORMULAS.keys()


@given(st.integers(0, 1 << 40))
def test_results_are_within_their_bounds(seed: int) -> None:
    """Programs of all operations in any order, of every dtype of integers, whose numbers wrap around."""
    program = Program(random.Random(seed))
    for dtype in (*WHOLE, *WHOLE):
        program.given(dtype)
    names = [*CALLS, *CALLS, *("where", "masked_fill") * 4]
    program.draw.shuffle(names)
    for name in names:
        program.run(name, CALLS[name](program), program.draw.choice(ATTRS.get(name, ((),))))


def test_masks_are_dropped_where_bounds_decide_them_and_stay_elsewhere() -> None:
    package = partc.compile(HERE / "models" / "decided.py", mesh="dp=2", precision="fp64")
    ops = [op.name for region in package.program.regions for op in region.forward.ops]
    left = {name: ops.count(name) for name in ("masked_fill", "where", "ge", "eq", "gt", "clamp", "clamp_min")}
    assert left == {"masked_fill": 1, "where": 1, "ge": 2, "eq": 0, "gt": 0, "clamp": 0, "clamp_min": 0}
    assert package.verify(steps=2).ok
