"""Kernels that do not depend on the model's operations: updates of parameters, compression of gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from partc.codegen.kernels.cross_entropy import LOWEST
from partc.codegen.kernels.kernel import Configuration
from partc.communication.exchanges import Exchanges
from partc.ir.printer import readable
from partc.ir.program import ITEMSIZE, DType, Parameter, Program
from partc.rules.kernels import CHUNKED
from partc.runtime.comm import compression
from partc.runtime.optimizer.flat import BETAS, EPS, EVEN, GRANULE, UNCOPIED

TRIAL = 1 << 24
INTERPRETED = 1 << 16  # elements per program in Triton's interpreter, where each program is costly


# Operands: gradients of the rows' losses, logits, labels, log-sum-exps.
LOGITS_TRIED = (
    "scratch((1024,), torch.float32, device)", "scratch((1024, 16384), torch.bfloat16, device)",
    "scratch((1024,), torch.int64, device, 16384)", "scratch((1024,), torch.float32, device)",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedKernels:
    """A module of kernels that does not depend on the model.

    `block` is the number of elements per program; `alone`: the module has a single function with its name.
    """

    name: str
    each: str = ""  # bytes moved per element
    moved: str = ""  # bytes moved in a step, on the rank that moves most
    block: int = 4 * GRANULE
    interpreted: int = INTERPRETED
    warps: int = 4
    alone: bool = True

    # Of AdamW.
    betas = BETAS
    eps = EPS
    granule = GRANULE
    even = EVEN
    uncopied = UNCOPIED
    lowest = tuple(LOWEST.values())  # Of logits.
    # Of int8: a block's numbers, a byte each, and its scale.
    numbers = compression.BLOCK
    bytes = compression.room("int8", compression.BLOCK)
    words = bytes // 4
    numbers_words = numbers // 4

    @property
    def template(self) -> str:
        return "update" if self.name in ("adamw", "sgd") else self.name

    @property
    def configuration(self) -> Configuration:
        return self._configuration(self.block, self.warps)

    @property
    def interpreting(self) -> Configuration:
        """The configuration for Triton's interpreter, if different."""
        return self._configuration(self.interpreted, self.warps) if self.interpreted else {}

    @property
    def candidates(self) -> list[Configuration]:
        sizes = (
            [(1, 1), (2, 1), (2, 2), (4, 2)] if self.name != "logits" else [(1, 1), (0.5, 1), (0.25, 1), (0.25, 0.5)]
        )
        return [self._configuration(int(size * self.block), int(warps * self.warps)) for size, warps in sizes]

    def _configuration(self, block: int, warps: int) -> Configuration:
        own = {"BLOCK": block}
        if self.name in ("int8", "logits"):
            own = {"ROWS": block // self.numbers} if self.name == "int8" else {"COLUMNS": block}
        return {**own, "num_warps": warps}

    @property
    def tried(self) -> str:
        return self.name if self.alone else "gradient_" if self.name == "logits" else "encode"

    @property
    def scratch(self) -> list[str]:
        """The operands for timing candidates, as source."""
        flat, none = f"scratch(({TRIAL},), torch.float32, device)", "torch.ones((), device=device)"
        rows = f"scratch((4, {TRIAL // 4}), torch.float32, device)"
        return {
            "adamw": [flat, flat, flat, f"{flat}.abs()", none, "torch.ones((1, 3), device=device)"],
            "sgd": [flat, flat, none, "torch.ones((1, 2), device=device)"],
            "squares": [flat],
            "logits": [*LOGITS_TRIED, "None", "None", "-100", "0.0", "0", "16384"],
        }.get(self.name, [rows, rows, "1.0"])


LOGITS = FixedKernels(name="logits", alone=False, block=4096, interpreted=0, warps=8)


def fixed_modules(program: Program) -> Iterator[FixedKernels]:
    """The fixed modules of a package; none if nothing is trained."""
    trained = [parameter for parameter in program.parameters if parameter.trainable]
    sizes = sorted({ITEMSIZE[parameter.type.dtype] for parameter in trained})
    if not sizes:
        return
    read = program.derived(Exchanges).read_dtypes
    for name, times in (("adamw", 7), ("sgd", 3)):
        moved = max(
            sum(_updated(item, times, read[item.name], program) for item in trained if item.name in names)
            for names in _places(program)
        )
        each = _sizes_text([times * size for size in sizes])
        yield FixedKernels(name=name, block=GRANULE, each=each, moved=readable(moved))
    yield FixedKernels(name="squares", each=_sizes_text(sizes))
    if any(op.name in CHUNKED for region in program.regions for graph in region.graphs for op in graph.ops):
        yield LOGITS
    if code := program.transport.compress:
        yield FixedKernels(name=code, alone=False)


def _updated(parameter: Parameter, times: int, read: DType, program: Program) -> int:
    """The bytes that the update of a parameter moves: `times` its own bytes, and those of its low-precision copy."""
    size = parameter.type.local_bytes(program.sizes)
    cast = read != parameter.type.dtype and not parameter.gather
    return times * size + (size // ITEMSIZE[parameter.type.dtype] * ITEMSIZE[read] if cast else 0)


def _places(program: Program) -> Iterator[set[str]]:
    """The parameters that the ranks at each pipeline coordinate hold."""
    holders = program.holders()
    for place in range(max(map(program.place, range(program.stages))) + 1):
        yield {name for name, stages in holders.items() if any(program.place(stage) == place for stage in stages)}


def _sizes_text(sizes: list[int]) -> str:
    return f"{' or '.join(map(str, sizes))} bytes"
