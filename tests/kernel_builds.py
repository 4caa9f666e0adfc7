"""Compile kernels ahead of time for GPUs that this machine lacks, and report their registers and what they spill.

A process of its own, without the interpreter: `python -m tests.kernel_builds MODEL NAME=VALUE...` compiles a model
with Triton's kernels, builds every one, and prints a list of JSON: registers, bytes spilled, shared memory.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from partc.codegen.kernels.fixed import FixedKernels
    from partc.codegen.kernels.kernel import Kernel
    from partc.ir.program import DType
    from tests.triton_runs import Kernels

ARCHITECTURES = (80, 90)
TYPES = {
    "float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "i1",
}  # fmt: skip
BLOCKS = ("BLOCK", "ROWS", "COLUMNS")
Built = dict[str, Any]


def resources(binary: bytes, ptx: str, architecture: int) -> Built:
    """The registers of a kernel and the bytes that it spills; Triton's own metadata has neither.

    A spilled register has its place on the stack, so that only kernels with a stack are built once more by ptxas.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "kernel.cubin"
        place.write_bytes(binary)
        said = _said_by("cuobjdump", "-res-usage", str(place)).stdout
        registers, stack = (max(map(int, re.findall(rf"\b{word}:(\d+)", said))) for word in ("REG", "STACK"))
        if stack == 0:
            return {"registers": registers, "spilled": 0}
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        name = f"sm_{architecture}{'a' if architecture == 90 else ''}"
        said = _said_by("ptxas", "-v", f"--gpu-name={name}", str(source), "-o", str(place)).stderr
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", said)))
        return {"registers": max(map(int, re.findall(r"Used (\d+) registers", said))), "spilled": spilled}


def _said_by(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The output of one of NVIDIA's tools that Triton brings along."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    return subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True)


def build(
    function: Any, types: Mapping[str, str], constants: Mapping[str, Any], aligned: list[str], options: dict[str, int]
) -> Iterator[Built]:
    """One kernel for every architecture; the arguments that are `aligned` divide by 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = [parameter.name for parameter in function.params]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    for architecture in ARCHITECTURES:
        source = ASTSource(fn=function, signature=signature, constexprs=dict(constants), attrs=attrs)
        built = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
        loads = re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", built.asm["ptx"])
        ahead = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?\], (?:0x)?([0-9a-f]+)", built.asm["ptx"])
        sizes = [*(int(count or 1) * int(bits) // 8 for count, bits in loads), *(int(size, 16) for size in ahead)]
        wide = {"bytes": max(sizes, default=0), "widest": sizes.count(max(sizes, default=0))}
        said = resources(built.asm["cubin"], built.asm["ptx"], architecture)
        yield {"kernel": function.__name__, "sm": architecture, "shared": built.metadata.shared, **said, **wide}


class Recorder:
    """In a kernel's place: builds it for the arguments that its launcher gives it."""

    def __init__(self, function: Any, found: list[Built]) -> None:
        self.function = function
        self.found = found

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.launch

    def launch(self, *args: Any, **given: Any) -> None:
        import torch

        options = {key: given.pop(key) for key in ("num_warps", "num_stages", "enable_fp_fusion") if key in given}
        types, aligned, constants = {}, [], dict(given)
        for parameter, arg in zip((parameter.name for parameter in self.function.params), args, strict=False):
            if isinstance(arg, torch.Tensor):
                types[parameter] = f"*{TYPES[str(arg.dtype).removeprefix('torch.')]}"
                aligned.append(parameter)
            elif isinstance(arg, float):
                types[parameter] = "fp32"
            elif arg == 1:
                constants[parameter] = 1
            else:
                types[parameter] = "i32" if arg < 2**31 else "i64"
                aligned += [parameter] if arg % 16 == 0 else []
        with_what = {**options, **{name: item for name, item in given.items() if name in BLOCKS}}
        built = build(self.function, types, constants, aligned, options)
        self.found.extend({**entry, "configuration": with_what} for entry in built)


def control() -> list[Built]:
    """A kernel that no GPU has the registers for: if this one spills nothing, the gate is broken."""
    import triton

    source = [
        "import triton",
        "import triton.language as tl",
        "@triton.jit",
        "def spilling(x_ptr, SIZE: tl.constexpr):",
        "    index = tl.arange(0, SIZE)",
        "    x = tl.load(x_ptr + index)",
        "    y = tl.cumsum(x, 0)",
        "    tl.store(x_ptr + index, x * tl.sum(y, 0) + tl.exp(y) * tl.max(x, 0))",
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spilling.py"
        path.write_text("\n".join(source))
        sys.path.insert(0, folder)
        function = __import__("spilling").spilling
        assert isinstance(function, triton.runtime.jit.JITFunction)
        return list(build(function, {"x_ptr": "*fp32"}, {"SIZE": 8192}, ["x_ptr"], {"num_warps": 1}))


def record(module: dict[str, Any], found: list[Built]) -> None:
    """Have a module's launchers build their kernels in place of launching them."""
    from triton.runtime.jit import JITFunction

    launchers = "".join(inspect.getsource(item) for item in module.values() if inspect.isfunction(item))
    for name, item in list(module.items()):
        if isinstance(item, JITFunction) and f"{name}[" in launchers:
            module[name] = Recorder(item, found)


def launch(module: dict[str, Any], name: str) -> None:
    """The arguments of a kernel's launch: flat memory of a size that no block divides."""
    import torch

    empty = lambda *shape, dtype: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
    if name in ("int8", "bf16"):
        rows = empty(4, 16384, dtype=torch.float32)
        coded, left = module["encode"](rows, None, 1.0)
        module["encode"](rows, left, 2.0)
        module["decode"](coded, 16384)
        module["decode_sum"](coded, 16384)
    if name == "logits":
        for dtype, classes, held in (
            (torch.bfloat16, 50257, 50304),
            (torch.bfloat16, 32000, 32000),
            (torch.float64, 999, 1024),
        ):
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            logits = torch.empty((12, held), dtype=dtype, device="meta")[:, :classes]
            labels, row, weight = empty(12, dtype=torch.int64), empty(12, dtype=wide), empty(classes, dtype=wide)
            module["numbers"](logits, labels, row, row, row)
            module["numbers"](logits, labels, row, row, row, row, weight, 7)
            for given in ((None, None, -100, 0.0), (weight, row, -100, 0.1), (None, None, -100, 0.1)):
                module["gradient_"](row, logits, labels, row, *given, 0, classes)
    for dtype in (torch.float32, torch.float64) if name in ("adamw", "sgd", "squares") else ():
        x = empty(12345, dtype=dtype)
        if name == "squares":
            module[name](x)
            continue
        given = [x] * (4 if name == "adamw" else 2)
        rates, factor = empty(3, 3, dtype=dtype), empty(dtype=dtype)
        module[name](*given, factor, rates)
        first, starts, copy = (
            empty(14, dtype=torch.int32),
            empty(3, dtype=torch.int64),
            empty(999, dtype=torch.bfloat16),
        )
        module[name](*given, factor, rates, first, starts)
        module[name](*given, factor, rates, first, starts, copy, starts, True)
        module[name](*given, factor, rates, None, None, copy, starts)


def configurations(module: dict[str, Any], *, all: bool) -> Iterator[dict[str, int]]:
    """Has the module run with its own, and then with each that the tuner may choose in its place."""
    for chosen in module["CANDIDATES"] if all else module["CANDIDATES"][:1]:
        module["CONFIGURATION"].update(chosen)
        yield chosen


def builds(model: str, options: dict[str, str], *, precision: str, mesh: str, candidates: bool) -> list[Built]:
    """Every kernel of a compiled model, launched on tensors without memory."""
    from partc.api import compilation
    from partc.codegen.kernels.fixed import fixed_modules
    from partc.codegen.kernels.fused import kernels
    from partc.compilation.options import Options
    from tests.triton_runs import Kernels

    wanted = Options.checked(
        mesh=mesh, microbatches=1, schedule="1f1b", precision=precision, seed=0, shard=(), kernels="triton"
    )
    program = compilation(model, None, wanted, model_options=options).program
    found: list[Built] = []
    with tempfile.TemporaryDirectory() as folder:
        loader = Kernels(Path(folder))
        for kernel in kernels(program):
            launched(kernel, loader, found, candidates)
        written_ones(fixed_modules(program), loader, found, candidates)
    return found


def launched(kernel: Kernel, loader: Kernels, found: list[Built], candidates: bool) -> None:
    """One that is made of a program's operations."""
    import torch

    from partc.ir.operators import DTYPES

    launcher = loader.load(kernel)
    record(launcher.__globals__, found)
    tensors = [torch.empty(item.shape, dtype=DTYPES[item.dtype], device="meta") for item in kernel.arguments]
    word = torch.empty((), dtype=torch.int64, device="meta")
    for _ in configurations(launcher.__globals__, all=candidates):
        launcher(*tensors, *(3 if name.endswith("_rank") else word for name in kernel.numbers))


def rows(columns: int, dtype: DType) -> list[Built]:
    """Norms and softmaxes of such rows and their derivatives, with a neighbour each, in all configurations."""
    from partc.codegen.kernels.fused import kernel
    from partc.passes.fuse import fuse
    from tests.kernels.test_kernels import program_of
    from tests.kernels.test_rows import NORMS, normed, softmaxed
    from tests.triton_runs import Kernels

    shape = (2048, columns)
    graphs = [normed(name, shape, 1, dtype) for name in NORMS if "norm" in name]
    found: list[Built] = []
    with tempfile.TemporaryDirectory() as folder:
        loader = Kernels(Path(folder))
        softmaxes = (graph for name in ("softmax", "log_softmax") for graph in softmaxed(name, shape, dtype))
        for graph in (*graphs, *softmaxes):
            after = fuse(program_of(graph), kernels="triton").regions[0].forward
            types = {name: value.type for name, value in after.definitions().items()}
            for op in after.ops:
                launched(kernel(op, types, {}), loader, found, True)
    return found


def written_ones(kernels: Iterable[FixedKernels], loader: Kernels, found: list[Built], candidates: bool) -> None:
    """The kernels that do not depend on a model's operations."""
    for each in kernels:
        loaded = loader.load(replace(each, interpreted=each.block))
        module = loaded.__globals__ if each.alone else vars(loaded)
        record(module, found)
        for _ in configurations(module, all=candidates):
            launch(module, each.name)


def apart(candidates: bool) -> list[Built]:
    """The kernels of which few packages have all."""
    from partc.codegen.kernels.fixed import LOGITS, FixedKernels
    from tests.triton_runs import Kernels

    found: list[Built] = []
    with tempfile.TemporaryDirectory() as folder:
        every = (*(FixedKernels(name=name, alone=False) for name in ("int8", "bf16")), LOGITS)
        written_ones(every, Kernels(Path(folder)), found, candidates)
    return found


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    given = dict(word.split("=", 1) for word in sys.argv[2:])
    how: dict[str, Any] = {"precision": given.pop("precision", "bf16"), "mesh": given.pop("mesh", "1")}
    how["candidates"] = given.pop("candidates", "own") == "all"
    match sys.argv[1]:
        case "control":
            built = control()
        case "apart":
            built = apart(how["candidates"])
        case "rows":
            built = rows(int(given["columns"]), "bf16" if how["precision"] == "bf16" else "f32")
        case model:
            built = builds(model, given, **how)
    print(json.dumps(built))
