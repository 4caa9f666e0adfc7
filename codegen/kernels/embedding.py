"""Kernels that add rows to a table: the gradient of a lookup, without atomics and in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from partc.codegen.kernels.kernel import Configuration, Draft, Kernel
from partc.codegen.kernels.statements import TRITON, computed_in
from partc.ir.layout import Sizes
from partc.ir.printer import readable
from partc.ir.program import DType, Op, Ref, TensorType
from partc.rules import kernels

CHUNK = 32  # positions per program
WIDEST = 1024  # the most columns per program


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding(Kernel):
    """`count` rows of width `width`, added to a table with `rows` rows."""

    grad: str
    ids: str
    count: int
    width: int
    rows: int
    first: str  # the offset of ids: the first row of this rank's table
    unpadded: str  # the condition that excludes the padding id
    dtype: str

    template = "embedding"

    @property
    def configuration(self) -> Configuration:
        return {"COLUMNS": self.columns, "num_warps": self.warps}

    @property
    def below(self) -> int:
        return self.rows

    @property
    def chunk(self) -> int:
        return CHUNK

    @property
    def chunks(self) -> int:
        return -(-self.count // CHUNK)

    @property
    def columns(self) -> int:
        return min(WIDEST, 1 << (self.width - 1).bit_length())

    @property
    def across(self) -> int:
        return -(-self.width // self.columns)

    @property
    def parts(self) -> tuple[int, int, int]:
        """The shape of the partial sums: first and last run of each program."""
        return self.chunks, 2, self.width

    @property
    def warps(self) -> int:
        return max(1, min(4, self.columns // 256))

    @property
    def numbers_(self) -> str:
        """The numbers as leading arguments."""
        return "".join(f"{name}, " for name in self.numbers)


def embedding(op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> Embedding:
    """The kernel of a fused operation that consists of an embedding's gradient."""
    (inner,) = op.body
    grad, ids = inner.args[:2]
    assert isinstance(grad, Ref) and isinstance(ids, Ref)
    draft = Draft.of(op, types, sizes)
    shape = types[grad.name].layout.local_shape(sizes)
    rows = inner.result.type.layout.local_shape(sizes)[0]
    padding = inner.args[3] if len(inner.args) > 3 else -1
    fields = draft.common_fields() | {"moved": readable(types[grad.name].local_bytes(sizes))}
    return Embedding(
        **fields,  # type: ignore[arg-type]
        lines=(),
        grad=draft.arguments[grad.name].name,
        ids=draft.arguments[ids.name].name,
        count=math.prod(shape[:-1]),
        width=shape[-1],
        rows=rows,
        first=f" - {kernels.rank_axis(inner)}_rank * {rows}" if kernels.rank_axis(inner) else "",
        unpadded=f" & (id != {padding})" if isinstance(padding, int) and padding >= 0 else "",
        dtype=TRITON[computed_in(types[grad.name].dtype)],
    )


def sorting_workspace(op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> list[tuple[tuple[int, ...], DType]]:
    """The shapes and types of a launch's workspace: sorted ids, their order, and partial sums of runs."""
    found = embedding(op, types, sizes)
    _, ids = op.body[0].args[:2]
    assert isinstance(ids, Ref)
    grad = types[next(op.refs())].dtype
    return [((found.count,), types[ids.name].dtype), ((found.count,), "i64"), (found.parts, computed_in(grad))]
