"""Bytes a second of emitted kernels at 4096 x 8192 in bf16, against a copy of as many bytes in the same run."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from partc.codegen.kernels.fixed import FixedKernels
from partc.codegen.kernels.fused import kernel
from partc.codegen.kernels.kernel import Kernel
from partc.ir.operators import DTYPES
from partc.ir.printer import fused_bytes
from partc.ir.program import DTypeArg, Graph, Op, Ref, TensorType
from partc.passes.fuse import fuse
from partc.runtime.train import tuning
from tests.gpu.results import Deadline, Results
from tests.kernels.test_kernels import program_of
from tests.kernels.test_rows import normed
from tests.programs import op, value
from tests.triton_runs import Kernels

SHAPE = (4096, 8192)
LEAST = 0.9  # of a copy's bytes a second


def graphs() -> dict[str, Graph]:
    """The sizes of these kernels in a transformer."""
    item = {name: value(name, *SHAPE, dtype="bf16") for name in ("a", "b", "c", "x", "y", "z")}
    bias = value("bias", SHAPE[1], dtype="bf16")

    def graph(inputs: str, outputs: str, *ops: Any) -> Graph:
        return Graph(inputs=tuple(item[name] for name in inputs), ops=ops, outputs=tuple(outputs.split()))

    return {
        "silu, mul": graph("ab", "y", op("silu", "a", makes=item["x"]), op("mul", "x", "b", makes=item["y"])),
        "add, add": graph("abc", "y", op("add", "a", "b", makes=item["x"]), op("add", "x", "c", makes=item["y"])),
        "mul, silu_backward": graph(
            "abc", "x z", op("mul", "a", "b", makes=item["x"]), op("silu_backward", "x", "c", makes=item["z"])
        ),
        "gelu_backward, bias": graph(
            "ab", "x bias", op("gelu_backward", "a", "b", makes=item["x"]), op("linear_grad_bias", "x", makes=bias)
        ),
        "mul, softmax": graph("a", "y", op("mul", "a", 0.5, makes=item["x"]), op("softmax", "x", -1, makes=item["y"])),
        "dropout, add, rms_norm": dropped(),
        "cross_entropy": losses(),
        "cross_entropy_backward": gradients(),
        **{
            name: normed(name, SHAPE, 1, "bf16")
            for name in ("rms_norm", "rms_norm_backward", "layer_norm", "layer_norm_backward")
        },
    }


def dropped() -> Graph:
    """A residual stream's dropout and norm, which is written too."""
    a, b, y, z, n = (value(name, *SHAPE, dtype="bf16") for name in "abyzn")
    kept, weight = value("kept", *SHAPE, dtype="bool"), value("weight", SHAPE[1], dtype="bf16")
    rstd = value("rstd", SHAPE[0], 1)
    drop = Op(name="dropout", args=(Ref("a"), 0.1, 2, 0), results=(y, kept))
    norm = Op(name="rms_norm", args=(Ref("z"), SHAPE[1:], Ref("weight"), 1e-5), results=(n, rstd))
    return Graph(inputs=(a, b, weight), ops=(drop, op("add", "y", "b", makes=z), norm), outputs=("z", "n"))


def losses() -> Graph:
    """Of logits in bf16."""
    x, wide, labels = value("x", *SHAPE, dtype="bf16"), value("wide", *SHAPE), value("labels", SHAPE[0], dtype="i64")
    rows = (value("nll", SHAPE[0]), value("lse", SHAPE[0]))
    loss = Op(name="cross_entropy", args=(Ref("wide"), Ref("labels"), None, -100, 0.0), results=rows)
    return Graph(inputs=(x, labels), ops=(op("to", "x", DTypeArg("f32"), makes=wide), loss), outputs=("nll", "lse"))


def gradients() -> Graph:
    """Of the same."""
    x, y = (value(name, *SHAPE, dtype="bf16") for name in "xy")
    wide, made = (value(name, *SHAPE) for name in ("wide", "made"))
    grad, lse, labels = value("grad", SHAPE[0]), value("lse", SHAPE[0]), value("labels", SHAPE[0], dtype="i64")
    back = op("cross_entropy_backward", "grad", "wide", "labels", "lse", None, -100, 0.0, makes=made)
    ops = (op("to", "x", DTypeArg("f32"), makes=wide), back, op("to", "made", DTypeArg("bf16"), makes=y))
    return Graph(inputs=(x, grad, lse, labels), ops=ops, outputs=("y",))


def written(loaded: Kernels) -> Iterator[tuple[str, int, Callable[[], object], bool]]:
    """Of the kernels that no model has a part in: the bytes they move, a launch, and whether they have to be fast."""
    count = SHAPE[0] * SHAPE[1]
    grad, param, first, second = (torch.rand(count, device="cuda") for _ in range(4))
    copy = torch.empty(count, dtype=torch.bfloat16, device="cuda")
    step = fastest(loaded, FixedKernels(name="adamw", block=1024))
    one, rates = torch.ones((), device="cuda"), torch.tensor([[0.999, 1e-4, 0.1]], device="cuda")
    shifts = torch.zeros(1, dtype=torch.int64, device="cuda")
    flat = (grad, param, first, second, one, rates)
    yield "adamw", 28 * count, partial(step, *flat), True
    yield "adamw, with bf16", 30 * count, partial(step, *flat, None, None, copy, shifts, True), True
    squares = fastest(loaded, FixedKernels(name="squares"))
    yield "squares", 4 * count, partial(squares, grad), True
    for kind, size in (("int8", 260 / 256), ("bf16", 2)):
        codec = fastest(loaded, FixedKernels(name=kind, alone=False))
        rows, left = grad.view(8, -1), first.view(8, -1)
        coded, _ = codec.encode(rows, left, 1.0)
        yield f"{kind}, encode", int((12 + size) * count), partial(codec.encode, rows, left, 1.0), True
        summed = partial(codec.decode_sum, coded, count // 8)
        yield f"{kind}, decode_sum", int((4 / 8 + size) * count), summed, True
    theirs = torch.nn.Parameter(param)
    theirs.grad = grad
    optimizer = torch.optim.AdamW([theirs], fused=True)
    yield "torch.optim.AdamW, fused", 28 * count, optimizer.step, False


def fastest(loaded: Kernels, built: Kernel | FixedKernels) -> Any:
    """A launch of a kernel in the configuration that a package would choose on this GPU."""
    module = loaded.module(built)
    if hasattr(module, "CANDIDATES"):
        each, clock = tuning.TunableKernel(built.name, module), tuning.Clocked(torch.device("cuda"))
        each.run_with(tuning.fastest(each.candidates, lambda choice: clock(each, choice)))
        tuning.reload_kernels(module)
    return loaded.launches(built, module)


def launched(loaded: Kernels) -> Iterator[tuple[str, int, Callable[[], object], bool]]:
    """The bandwidths of the kernels that models have."""
    for name, graph in graphs().items():
        after = fuse(program_of(graph, dense=True), kernels="triton").regions[0].forward
        (fused,) = after.ops
        types = {key: found.type for key, found in after.definitions().items()}
        built = kernel(fused, types, {})
        launch = fastest(loaded, built)
        word = torch.tensor(2**40 + 1, device="cuda")
        inputs = [*(_made(types[key]) for key in fused.refs()), *(word for _ in built.numbers)]
        size, _ = fused_bytes(fused, types, {})
        yield name, size, partial(launch, *inputs), True


def table(results: Results, deadline: Deadline, only: tuple[str, ...]) -> bool:
    """Whether every kernel is fast enough."""
    from triton.testing import do_bench

    results.table(
        "Kernels at 4096 x 8192 in bf16, or of as many", "kernel", "bytes", "µs", "GB/s", "of a copy", "result"
    )
    good = True
    with tempfile.TemporaryDirectory() as folder:
        loaded = Kernels(Path(folder) / "kernels")
        for name, size, launch, wanted in itertools.chain(launched(loaded), written(loaded)):
            source = torch.empty(size // 2, dtype=torch.uint8, device="cuda")
            target = torch.empty_like(source)
            copied = float(do_bench(lambda s=source, t=target: t.copy_(s), return_mode="median"))
            took = float(do_bench(launch, return_mode="median"))
            share = copied / took
            well = share >= LEAST or not wanted
            good = good and well
            speed = f"{size / took / 1e6:.0f}"
            results.row(name, f"{size:,}", f"{1e3 * took:.1f}", speed, f"{share:.0%}", "good" if well else "too slow")
            if deadline.left < 0:
                results.row("the rest", "", "", "", "", "no time left")
                return False
    return good


def _made(type: TensorType) -> torch.Tensor:
    if type.dtype == "i64":
        return torch.randint(0, SHAPE[1], type.shape, device="cuda")
    return torch.randn(type.shape, device="cuda").to(DTYPES[type.dtype])
