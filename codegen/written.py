"""Kernels that don't depend on a model's operations: what packages update parameters and send gradients with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from partc.codegen.collectives import readable_bytes
from partc.program import ITEMSIZE, Program
from partc.runtime import compression
from partc.runtime.flat import BETAS, EPS, GRANULE

INTERPRETED = 1 << 16  # numbers of a block where kernels are interpreted, each program at some cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A module of kernels that a package has whatever its model is.

    `block` is how many numbers a program has; `alone`, whether the module is called for one function of its name.
    """

    name: str
    each: str = ""  # bytes that are moved for one number
    moved: str = ""  # in a step, by the rank with most
    block: int = 4 * GRANULE
    interpreted: int = INTERPRETED
    warps: int = 4
    alone: bool = True

    # Of AdamW.
    betas = BETAS
    eps = EPS
    granule = GRANULE
    # Of int8: a block's numbers, a byte each, and its scale.
    numbers = compression.BLOCK
    bytes = compression.room("int8", compression.BLOCK)
    words = bytes // 4
    numbers_words = numbers // 4

    @property
    def template(self) -> str:
        return self.name

    @property
    def rows(self) -> int:
        """Blocks of int8 of a program."""
        return self.block // self.numbers

    @property
    def interpreted_rows(self) -> int:
        return self.interpreted // self.numbers


def written(program: Program) -> Iterator[Written]:
    """Those of a package, if it trains something."""
    trained = [parameter for parameter in program.parameters if parameter.trainable]
    sizes = sorted({ITEMSIZE[parameter.type.dtype] for parameter in trained})
    if not sizes:
        return
    moved = max(
        sum(7 * parameter.type.local_bytes(program.sizes) for parameter in trained if parameter.name in names)
        for names in _places(program)
    )
    yield Written(name="adamw", block=GRANULE, each=_each([7 * size for size in sizes]), moved=readable_bytes(moved))
    yield Written(name="squares", each=_each(sizes))
    if program.compress:
        yield Written(name=program.compress, alone=False)


def _places(program: Program) -> Iterator[set[str]]:
    """The parameters that ranks at each coordinate on the pipeline axis hold."""
    holders = program.holders()
    for place in range(max(map(program.place, range(program.stages))) + 1):
        yield {name for name, stages in holders.items() if any(program.place(stage) == place for stage in stages)}


def _each(sizes: list[int]) -> str:
    return f"{' or '.join(map(str, sizes))} bytes"
