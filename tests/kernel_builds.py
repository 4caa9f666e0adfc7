"""Compile kernels ahead of time for GPUs that aren't here, and say what ptxas says of them.

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
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

ARCHITECTURES = (80, 90)
TYPES = {
    "float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "i1",
}  # fmt: skip
Built = dict[str, Any]


def said_by_ptxas(ptx: str, architecture: int) -> Built:
    """Triton's own metadata has neither registers nor spills."""
    import triton

    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        name = f"sm_{architecture}{'a' if architecture == 90 else ''}"
        command = [str(ptxas), "-v", f"--gpu-name={name}", str(source), "-o", str(Path(folder) / "kernel.cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", said)))
    return {"registers": max(map(int, re.findall(r"Used (\d+) registers", said))), "spilled": spilled}


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
        wide = {"bytes": max((int(count or 1) * int(bits) // 8 for count, bits in loads), default=0)}
        said = said_by_ptxas(built.asm["ptx"], architecture)
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

        options = {key: given.pop(key) for key in ("num_warps", "num_stages") if key in given}
        types, aligned, constants = {}, [], dict(given)
        for parameter, arg in zip((parameter.name for parameter in self.function.params), args, strict=False):
            if isinstance(arg, torch.Tensor):
                types[parameter] = f"*{TYPES[str(arg.dtype).removeprefix('torch.')]}"
                aligned.append(parameter)
            elif arg == 1:
                constants[parameter] = 1
            else:
                types[parameter] = "i32" if arg < 2**31 else "i64"
                aligned += [parameter] if arg % 16 == 0 else []
        self.found.extend(build(self.function, types, constants, aligned, options))


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


def recorded(launcher: Any, found: list[Built]) -> Any:
    """A launcher whose kernels are built in place of being launched."""
    from triton.runtime.jit import JITFunction

    for name, item in list(launcher.__globals__.items()):
        if isinstance(item, JITFunction) and f"{name}[" in inspect.getsource(launcher):
            launcher.__globals__[name] = Recorder(item, found)
    return launcher


def launches(name: str, x: Any) -> Iterator[tuple[Any, ...]]:
    """What a written kernel is launched with, for as much flat memory as x."""
    import torch

    rates = x.new_empty(3, 3)
    first, starts = (torch.empty(14, dtype=dtype, device="meta") for dtype in (torch.int32, torch.int64))
    if name == "adamw":
        yield x, x, x, x, x.new_empty(()), rates
        yield x, x, x, x, x.new_empty(()), rates, first, starts
    if name == "squares":
        yield (x,)


def builds(model: str, options: dict[str, str], *, precision: str, mesh: str) -> list[Built]:
    """Every kernel of a compiled model, launched on tensors without memory."""
    import torch

    from partc.api import compilation
    from partc.codegen.kernels import kernels
    from partc.codegen.written import written
    from partc.operators import DTYPES
    from partc.options import Options
    from tests.triton_runs import Kernels

    wanted = Options.checked(
        mesh=mesh, microbatches=1, schedule="1f1b", precision=precision, seed=0, shard=(), kernels="triton"
    )
    program = compilation(model, None, wanted, model_options=options).program
    found: list[Built] = []
    with tempfile.TemporaryDirectory() as folder:
        loader = Kernels(Path(folder))
        for kernel in kernels(program):
            launcher = recorded(loader.load(kernel), found)
            tensors = (torch.empty(item.shape, dtype=DTYPES[item.dtype], device="meta") for item in kernel.arguments)
            launcher(*tensors, *(3 if name.endswith("_rank") else 2**40 + 1 for name in kernel.numbers))
        for each in written(program):
            launcher = recorded(loader.load(replace(each, interpreted=each.block)), found)
            for dtype in DTYPES["f32"], DTYPES["f64"]:
                for tensors in launches(each.name, torch.empty(12345, dtype=dtype, device="meta")):
                    launcher(*tensors)
    return found


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    given = dict(word.split("=", 1) for word in sys.argv[2:])
    how = {"precision": given.pop("precision", "bf16"), "mesh": given.pop("mesh", "1")}
    print(json.dumps(control() if sys.argv[1] == "control" else builds(sys.argv[1], given, **how)))
