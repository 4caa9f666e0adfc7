"""Kernels that stream over rows of logits: statistics of each row in one pass, and the losses that follow from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy

from partc.codegen.kernels.indexing import ZERO, Index
from partc.codegen.kernels.kernel import Configuration, Draft, Kernel, is_long, statement_lines, stored
from partc.codegen.kernels.lowering import STREAMS
from partc.codegen.kernels.rows import collapsed_rows, row_loops
from partc.codegen.kernels.spaces import variables
from partc.codegen.kernels.statements import TRITON, Reduce, Statement, cast
from partc.ir.layout import Sizes
from partc.ir.program import Op, Ref, TensorType
from partc.rules import kernels

STEP = 4096  # logits that a program holds at a time
LOWEST = {"tl.float32": "-3.4028234663852886e38", "tl.float64": "-1.7976931348623157e308"}
_OWN = ("row", "column", "start", "inside", "place", "here", "most", "total", "COLUMNS", "STAGES", *STREAMS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy(Kernel):
    """A program for each row: the lines before, in and after the loop over its classes."""

    rows: int
    classes: int
    step: int
    long: bool  # positions need 64 bits
    dtype: str
    logit: str  # the variable of a logit in `lines`
    label: str  # the label's index among this rank's classes; "" without `pick`
    picked: str  # the variable of the label's logit in `picking`
    share: str  # a logit's weight in label smoothing; "" without smoothing
    before: tuple[str, ...]
    labels: tuple[str, ...]
    picking: tuple[str, ...]
    after: tuple[str, ...]

    template = "cross_entropy"

    @property
    def configuration(self) -> Configuration:
        return {"COLUMNS": self.step, "STAGES": 1, "num_warps": self.warps}

    @property
    def candidates(self) -> list[Configuration]:
        """The default configuration and other step sizes; if the default divides the classes, only sizes that do, too:
        they need no mask.

        Step sizes up to the default also come with software pipelining, which loads the next steps' logits ahead.
        """
        own, warps = self.step, self.warps
        small, large = (own // 2, max(1, warps // 2)), (2 * own, 2 * warps)
        each = [(own, warps, 1), (own, 2 * warps, 1), (*small, 1), (*large, 1)]
        each += [(step, count, stages) for stages in (2, 3) for step, count in ((own, warps), small)]
        return [
            {"COLUMNS": step, "STAGES": stages, "num_warps": count}
            for step, count, stages in each
            if step and (step == own or self.cuts or self.classes % step == 0)
        ]

    @property
    def below(self) -> int:
        return self.classes

    @property
    def lowest(self) -> str:
        """A finite number below every logit, so that differences stay numbers."""
        return LOWEST[self.dtype]

    @property
    def cuts(self) -> bool:
        """Whether the last step is partly masked."""
        return self.classes % self.step != 0

    @property
    def warps(self) -> int:
        return max(1, min(8, self.step // 512))

    @property
    def parameters(self) -> list[str]:
        return [
            *self.read,
            *(f"{result.name}_ptr" for result in self.results),
            "COLUMNS: tl.constexpr",
            "STAGES: tl.constexpr",
        ]


def cross_entropy(op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> CrossEntropy:
    """The kernel of a fused operation with pieces of a cross-entropy."""
    draft = Draft.of(op, types, sizes)
    pieces = {step.name: step for step in op.body if step.name in kernels.STREAMED}
    logits = next(next(iter(pieces.values())).refs())
    shape = draft.types[logits].layout.local_shape(sizes)
    each = (variables(shape[:-1], "r"), variables(shape[-1:], "c"))
    rows: Index = tuple(ZERO if loop.size == 1 else loop.symbol for loop in each[0])
    place = sympy.Symbol("place", integer=True, nonnegative=True)
    classes = shape[-1]
    every = {loop.symbol: loop.size for loops in each for loop in loops} | {place: classes}
    lowering = draft.lowering([*_OWN, *(f"row_{number}" for number in range(len(shape)))], every)
    column = each[1][0].symbol if classes > 1 else ZERO
    logit = lowering.value(logits, (*rows, column))
    smooth = pieces.get("smooth_sum")
    share = logit.text
    if smooth is not None and smooth.args[1] is not None:
        weight = lowering.class_weight(smooth, smooth.args[1], classes, column)
        share = f"{logit.text} * {cast(weight, logit.dtype)}"
    ends = [len(lowering.statements)]
    pick = pieces.get("pick")
    label = picked = None
    if pick is not None:
        labels = pick.args[1]
        assert isinstance(labels, Ref)
        label = lowering.value(labels.name, rows)
        ends.append(len(lowering.statements))
        picked = lowering.value(logits, (*rows, place))
    ends.append(len(lowering.statements))
    made = [lowering.value(value.name, rows) for value in op.results]
    statements, few, over = collapsed_rows(lowering.statements, each, lowering.over)
    ranges = {loop.symbol: loop.size for loops in few for loop in loops} | {place: classes} | lowering.beyond
    ranges[sympy.Symbol("row", integer=True, nonnegative=True)] = math.prod(shape[:-1])
    step = min(STEP, 1 << (classes - 1).bit_length())

    def text(part: Sequence[Statement], mask: str = "") -> tuple[str, ...]:
        return tuple(
            line
            for item in part
            if not isinstance(item, Reduce)
            for line in statement_lines(item, ranges, mask, lowering.names)
        )

    each_logit = [item for item in statements[: ends[0]] if 1 in over.get(item.target, ())]
    each_row = [item for item in statements[: ends[0]] if 1 not in over.get(item.target, ())]
    stores = (
        f"tl.store({result.name}_ptr + row, {stored(found, value.type.dtype)})"
        for found, value, result in zip(made, op.results, draft.results, strict=True)
    )
    first = f"{kernels.rank_axis(pick)}_rank * {classes}" if pick is not None and kernels.rank_axis(pick) else ""
    return CrossEntropy(
        **draft.common_fields(),  # type: ignore[arg-type]
        rows=math.prod(shape[:-1]),
        classes=classes,
        step=step,
        long=is_long(math.prod(shape[:-1]) * -(-classes // step) * step, statements, ranges),
        dtype=TRITON[logit.dtype],
        logit=logit.text,
        label=f"{label.text} - {first}" if label and first else label.text if label else "",
        picked=picked.text if picked else "",
        share=share if smooth is not None else "",
        before=(*row_loops(few[0], statements, "row"), *text(each_row)),
        lines=text(each_logit, "inside" if classes % step else ""),
        labels=text(statements[ends[0] : ends[-2]]) if pick is not None else (),
        picking=text(statements[ends[-2] : ends[-1]]) if pick is not None else (),
        after=(*text(statements[ends[-1] :]), *stores),
    )
