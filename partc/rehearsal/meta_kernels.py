"""Substitutes for a package's kernels: functions on meta tensors that allocate as much as the kernels do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from partc.codegen.kernels.fused import held_beside
from partc.codegen.kernels.rows import unsummed_shapes
from partc.codegen.lifetimes import overwritten
from partc.ir.program import RAGGED, DType, Op, Program, TensorType
from partc.runtime.comm.compression import room
from partc.runtime.layout import DTYPES

META = torch.device("meta")


def stand_ins(program: Program) -> SimpleNamespace:
    """Substitutes for a program's kernels, by name: they allocate as much memory, and do nothing else."""

    def stand_in(op: Op, types: Mapping[str, TensorType]) -> Callable[..., Tensor | tuple[Tensor, ...]]:
        shapes = [(value.type.layout.local_shape(program.sizes), DTYPES[value.type.dtype]) for value in op.results]
        passing: list[tuple[tuple[int, ...], DType]] = [*held_beside(op, types, program.sizes)]
        over = overwritten(op)
        ragged = dict(op.attrs).get(RAGGED)

        def made(shape: tuple[int, ...], dtype: torch.dtype, given: Sequence[Tensor]) -> Tensor:
            sized = (given[ragged].shape[0], *shape[1:]) if isinstance(ragged, int) else shape
            return torch.empty(sized, dtype=dtype, device=META)

        def make(*given: Tensor, into: Tensor | None = None, summed: bool = True) -> Tensor | tuple[Tensor, ...]:
            held = [torch.empty(shape, dtype=DTYPES[dtype], device=META) for shape, dtype in passing if summed]
            if into is not None:
                return into
            apart = {} if summed else unsummed_shapes(op, types, program.sizes)
            sums = {name for _, names in apart.values() for name in names}
            found = (
                *(
                    given[over[number]] if number in over else made(shape, dtype, given)
                    for number, (shape, dtype) in enumerate(shapes)
                    if op.results[number].name not in sums
                ),
                *(torch.empty(shape, dtype=DTYPES[dtype], device=META) for (dtype, _), (shape, _) in apart.items()),
            )
            del held
            return found if len(found) > 1 else found[0]

        return make

    nothing = SimpleNamespace(numbers=lambda *given, **how: None, gradient_=lambda *given: None)
    found: dict[str, Any] = {"logits": nothing}
    if code := program.transport.compress:
        found[code] = _Codec(code)
    for region in program.regions:
        for graph in region.graphs:
            types = region.types(graph)
            for op in graph.ops:
                if op.body:
                    found.setdefault(str(dict(op.attrs)["kernel"]), stand_in(op, types))
    return SimpleNamespace(**found)


@dataclass(frozen=True, slots=True)
class _Codec:
    """A substitute for the kernels that compress gradients."""

    kind: str

    def encode(self, x: Tensor, left: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        dtype = torch.bfloat16 if self.kind == "bf16" else torch.uint8
        coded = torch.empty((len(x), room(self.kind, x.shape[1])), dtype=dtype, device=META)
        return coded, torch.empty(x.shape, device=META) if left is None else left

    def decode(self, coded: Tensor, size: int) -> Tensor:
        return torch.empty((len(coded), size), device=META)

    def decode_sum(self, coded: Tensor, size: int) -> Tensor:
        return torch.empty(size, device=META)
