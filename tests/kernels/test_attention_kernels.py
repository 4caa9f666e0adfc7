"""The choice among attention kernels, and calls of those that only GPUs have, on stand-ins that compute."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import partc
from partc.codegen.attentions import attentions, without_kernel
from partc.runtime.errors import UsageError
from partc.runtime.layout import DTYPES
from partc.runtime.ops import attention, attention_kernels, functional
from partc.runtime.ops.attention_kernels import (
    BLOCKS,
    GOOD_CUDNN,
    GPUS,
    WANTED,
    Case,
    Gpu,
    cases,
    enable_kernels,
    on_cpu,
    on_gpu,
)
from partc.runtime.random import Draw
from partc.runtime.torch_private import TorchDispatchMode

F64 = torch.float64
H100, A100, L40, V100 = (Gpu(at, GOOD_CUDNN) for at in ((9, 0), (8, 0), (8, 9), (7, 0)))
LLAMA = Case(torch.bfloat16, heads=32, groups=8, s=4096, t=4096, d=128, e=128, causal=True)


@pytest.mark.parametrize(
    ("case", "gpu", "name", "passed"),
    [
        (LLAMA, H100, "cudnn", []),
        (LLAMA, replace(H100, cudnn=0), "flash", ["not there"]),
        (replace(LLAMA, d=256, e=256), H100, "flash", ["heads of at most 128"]),
        (replace(LLAMA, d=256, e=256), L40, "efficient", ["128", "heads of at most 192 on this GPU"]),
        (replace(LLAMA, d=512, e=512), H100, "efficient", ["128", "256"]),
        (replace(LLAMA, masked=True), A100, "efficient", ["no masks", "no masks"]),
        (replace(LLAMA, learned=True, masked=True), A100, "efficient", ["no masks", "no masks"]),
        (replace(LLAMA, dtype=torch.float32), H100, "efficient", ["no float32", "no float32"]),
        (replace(LLAMA, dtype=torch.float16), V100, "efficient", ["8.0", "8.0"]),
        (LLAMA, V100, BLOCKS, ["8.0", "8.0", "no bfloat16"]),
        (replace(LLAMA, dtype=F64), H100, BLOCKS, ["no float64"] * 3),
        (replace(LLAMA, drops=True), H100, BLOCKS, ["cannot draw"] * 3),
        (replace(LLAMA, s=2048), H100, BLOCKS, ["as many queries as keys"] * 3),
        (replace(LLAMA, s=2048, causal=False), H100, "cudnn", []),
        (replace(LLAMA, s=1, t=1), H100, "flash", ["more than one key"]),
        (replace(LLAMA, s=0), H100, BLOCKS, ["nothing to compute"] * 3),
    ],
)
def test_the_first_kernel_that_can_is_taken(case: Case, gpu: Gpu, name: str, passed: list[str]) -> None:
    choice = on_gpu(case, gpu)
    assert choice.name == name
    assert [reason for _, reason in choice.passed] == [
        next(reason for each, reason in choice.passed if each == kernel.name) for kernel in GPUS[: len(choice.passed)]
    ]
    for said, (_, reason) in zip(passed, choice.passed, strict=True):
        assert said in reason


def test_switches_and_torch_have_a_say() -> None:
    assert on_gpu(LLAMA, H100, off=("cudnn",)).name == "flash"
    refused = on_gpu(LLAMA, H100, refusal=lambda name, case: "it says no" if name == "cudnn" else "")
    assert (refused.name, refused.passed) == ("flash", (("cudnn", "it says no"),))
    assert on_gpu(LLAMA, H100, off=("cudnn", "flash", "efficient")).kernel is None


def test_on_cpus_one_kernel_takes_all_but_dropout() -> None:
    for dtype in (F64, torch.float32, torch.bfloat16, torch.float16):
        assert on_cpu(replace(LLAMA, dtype=dtype, masked=True, e=64, s=7)) is not None
    assert on_cpu(replace(LLAMA, drops=True)) is None


class Switches:
    """In the place of torch's, on a machine with a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpu: Gpu, flash3: bool) -> None:
        self.on = {"cudnn": True, "flash": True, "efficient": True}
        self.activated: list[str] = []
        for name, switch in (("cudnn", "cudnn"), ("flash", "flash"), ("efficient", "mem_efficient")):
            put = lambda is_on, name=name: self.on.__setitem__(name, is_on)  # noqa: E731
            monkeypatch.setattr(torch.backends.cuda, f"enable_{switch}_sdp", put)
            monkeypatch.setattr(torch.backends.cuda, f"{switch}_sdp_enabled", lambda name=name: self.on[name])
        monkeypatch.setattr(attention_kernels, "gpu_at", lambda device: gpu)
        monkeypatch.setattr(attention_kernels, "refusal", lambda *_: "")
        monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", self.activated.append)
        found = object() if flash3 else None
        monkeypatch.setattr(attention_kernels.importlib.util, "find_spec", lambda name: found)
        attention_kernels.preferred_kernel.cache_clear()


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    attention_kernels.preferred_kernel.cache_clear()


@pytest.mark.parametrize(
    ("wanted", "gpu", "flash3", "kernel", "activated"),
    [
        ("auto", H100, False, "cudnn", []),
        ("auto", replace(H100, cudnn=90100), False, "flash", []),
        ("auto", replace(H100, cudnn=90100), True, "flash", ["FA3"]),
        ("auto", A100, True, "flash", []),
        ("cudnn", A100, False, "cudnn", []),
        ("flash3", H100, True, "flash", ["FA3"]),
        ("flash", H100, True, "flash", []),
        ("efficient", H100, False, "efficient", []),
        (BLOCKS, H100, False, BLOCKS, []),
    ],
)
def test_a_wish_is_kept_and_told(
    wanted: str, gpu: Gpu, flash3: bool, kernel: str, activated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    switches = Switches(monkeypatch, gpu, flash3)
    said: list[str] = []
    enable_kernels(wanted, {"block.a": LLAMA, "block.b": LLAMA}, torch.device("cuda", 0), said.append)
    assert switches.activated == activated
    [line] = said
    assert line.startswith(f"attention in block.a, block.b ({LLAMA}): {kernel}")
    assert attention_kernels.chosen_kernel(LLAMA, 0).name == kernel


@pytest.mark.parametrize(
    ("wanted", "gpu", "device"),
    [
        ("flash3", H100, "cuda"), ("flash3", A100, "cuda"), ("cudnn", replace(H100, cudnn=0), "cuda"),
        ("flash", H100, "cpu"), ("cudnn", H100, "cpu"),
    ],
)  # fmt: skip
def test_a_wish_that_cannot_be_had_is_refused(
    wanted: str, gpu: Gpu, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Switches(monkeypatch, gpu, flash3=False)
    with pytest.raises(UsageError, match="P0541") as raised:
        enable_kernels(wanted, {}, torch.device(device, 0 if device == "cuda" else None), print)
    assert f"--attention {wanted}" in str(raised.value) and raised.value.alike


def test_all_wishes_are_tried_here() -> None:
    assert set(WANTED) == {"auto", "cudnn", "flash3", "flash", "efficient", BLOCKS}


class Computing(TorchDispatchMode):
    """In the place of the kernels of GPUs: what they compute, of operands as they demand them.

    What they save differs in form, and their backward takes no other's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::_scaled_dot_product_")
        if name == func._schema.name or name.endswith("for_cpu") or "cpu_" in name:
            return func(*args, **(kwargs or {}))
        given = {
            argument.name: args[place]
            if place < len(args)
            else (kwargs or {}).get(argument.name, argument.default_value)
            for place, argument in enumerate(func._schema.arguments)
        }
        self.called.append(name)
        kernel, _, back = name.partition("_attention")
        q, k, v, scale = (given[key] for key in ("query", "key", "value", "scale"))
        bias = given.get("attn_bias")
        for x in (
            q,
            k,
            v,
            *((given["out"], given["grad_out_" if kernel == "efficient" else "grad_out"]) if back else ()),
        ):
            assert x.stride(-1) == 1 and x.shape[-1] % 8 == 0
            assert all(x.stride(dim) * x.element_size() % 16 == 0 for dim in range(3) if x.shape[dim] > 1)
        assert kernel == "efficient" or q.shape[1] % k.shape[1] == 0
        assert kernel != "efficient" or q.shape[1] == k.shape[1]
        assert kernel != "flash" or q.shape[-1] == v.shape[-1]
        assert not given["is_causal"] or q.shape[2] == k.shape[2]
        if bias is not None:
            assert kernel == "efficient" and bias.shape == (*q.shape[:3], k.shape[2]) and bias.dtype == q.dtype
            assert bias.stride(-1) == 1 and all(bias.stride(dim) % 16 == 0 for dim in range(3))
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ keys.mT * scale
        if given["is_causal"]:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        scores = scores if bias is None else scores + bias
        weights = torch.ops.aten._safe_softmax(scores, -1)
        out = weights @ values
        lse = scores.logsumexp(-1)
        saved = {
            "cudnn": lse.unsqueeze(-1),
            "flash": lse,
            "efficient": torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32)),
        }
        if not back:
            assert kernel == "flash" or given["compute_log_sumexp"]
            rest = [0 if str(each.type) != "Tensor" else q.new_empty(0) for each in func._schema.returns[2:]]
            return (out, saved[kernel], *rest)
        assert given["logsumexp"].shape == saved[kernel].shape and given["out"].shape == out.shape
        weights = (scores - given["logsumexp"].reshape(*q.shape[:2], -1)[..., : q.shape[2], None]).exp().nan_to_num(0.0)
        assert given["philox_seed"] is not None and given["dropout_p"] == 0
        grad = given["grad_out_" if kernel == "efficient" else "grad_out"]
        grad_weights = grad @ values.mT
        grad_scores = weights * (grad_weights - (grad * given["out"]).sum(-1, keepdim=True))
        group = lambda x: x.unflatten(1, (k.shape[1], -1)).sum(2)  # noqa: E731
        found = (grad_scores @ keys * scale, group(grad_scores.mT @ q * scale), group(weights.mT @ grad))
        if kernel != "efficient":
            return found
        assert given["grad_input_mask"][:3] == [True, True, True]
        return (*found, grad_scores if given["grad_input_mask"][3] else None)


def _case(shape: tuple[int, ...], mask: str, seed: int = 0) -> tuple[list[Tensor], Tensor | None]:
    torch.manual_seed(seed)
    b, h, g, s, t, d, e = shape
    q, k, v = torch.randn(b, h, s, d, dtype=F64), torch.randn(b, g, t, d, dtype=F64), torch.randn(b, g, t, e, dtype=F64)
    if mask == "strided":  # as a transposed projection leaves them
        q, k, v = (x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in (q, k, v))
    masks = {
        "flat": torch.randn(s, t, dtype=F64), "heads": torch.randn(h, s, t, dtype=F64),
        "batch": torch.randn(b, 1, s, t, dtype=F64), "keys": torch.rand(b, 1, 1, t) > 0.4,
        "row": torch.randn(t, dtype=F64), "queries": torch.randn(1, h, s, 1, dtype=F64),
        "bool": torch.rand(b, h, s, t) > 0.4,
    }  # fmt: skip
    given = masks.get(mask)
    if mask == "bool" and given is not None:
        given[0, :, 0] = False  # a row that reads nothing
    return [q, k, v], given


def _oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    kept: Tensor | None,
    p: float,
    sinks: Tensor | None = None,
) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    weights = torch.ops.aten._safe_softmax(scores, -1)[..., : k.shape[2]]
    return (weights if kept is None else weights * kept / (1 - p)) @ v


SHAPES = [(2, 4, 4, 16, 16, 16, 16), (1, 4, 2, 10, 10, 12, 12), (2, 2, 1, 9, 21, 8, 24), (3, 2, 2, 1, 5, 5, 3)]
MASKS = ["none", "strided", "causal", "flat", "heads", "batch", "keys", "row", "queries", "bool"]


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "efficient", "cpu", BLOCKS])
@pytest.mark.parametrize("mask", MASKS)
def test_every_path_equals_autograd(kernel: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64, which the stand-ins take; with gradients of masks, in blocks of every size."""
    wide = [replace(each, dtypes=(F64,)) for each in GPUS if each.name == kernel]
    if kernel not in ("cpu", BLOCKS):
        monkeypatch.setattr(Tensor, "is_cuda", property(lambda x: True), raising=False)
        chosen = lambda case, device: attention_kernels.KernelChoice(None if wide[0].obstacle(case) else wide[0])  # noqa: E731
        monkeypatch.setattr(attention, "chosen_kernel", chosen)
    elif kernel == BLOCKS:
        monkeypatch.setattr(attention, "fused_kernel", lambda *_: None)
    for index, shape in enumerate(SHAPES):
        monkeypatch.setattr(attention, "MOST", (1, 50, 1 << 22, 7)[index])
        (q, k, v), given = _case(shape, mask)
        causal = mask == "causal"
        taken = kernel != BLOCKS and (kernel == "cpu" or not wide[0].obstacle(_as_case(q, k, v, given, causal)))
        for scale, sinks in ((None, None), (0.3, None), (0.3, torch.randn(q.shape[1], dtype=F64, requires_grad=True))):
            learned = given is not None and given.dtype != torch.bool
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            bias = given.detach().requires_grad_() if learned and given is not None else given
            expected = _oracle(*inputs, bias, causal, scale, None, 0.0, sinks)
            grad = torch.randn_like(expected)
            leaves = [*inputs, *([bias] if learned else []), *([] if sinks is None else [sinks])]
            wanted = torch.autograd.grad(expected, leaves, grad)
            with Computing() as gpu, torch.no_grad():
                out, lse = functional.attention(q, k, v, given, causal, scale, sinks=sinks)
                grads = list(functional.attention_backward(grad, q, k, v, out, lse, given, causal, scale))
                if learned and given is not None:
                    more = functional.attention_bias_backward(grad, q, k, v, given, out, lse, causal, scale)
                    grads.append(more[3])
                    for mine, again in zip(grads, more, strict=True):
                        torch.testing.assert_close(mine, again, rtol=1e-10, atol=1e-10)
                if sinks is not None:
                    grads.append(functional.attention_sinks_backward(grad, out, lse, sinks))
            torch.testing.assert_close(out, expected.detach(), rtol=1e-10, atol=1e-10)
            for mine, theirs in zip(grads, wanted, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
            calls = (
                []
                if kernel in ("cpu", BLOCKS) or not taken
                else [f"{kernel}_attention", f"{kernel}_attention_backward"]
            )
            assert gpu.called == [*calls, *(calls[1:] if learned else [])]


def _as_case(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Case:
    (_, h, s, d), (_, g, t, e) = q.shape, v.shape
    return Case(F64, h, g, s, t, d, e, masked=mask is not None, causal=causal)


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "efficient"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_takes_the_calls(kernel: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its schemas and by the shapes that it infers, of tensors without memory."""
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda x: True), raising=False)
    [item] = (each for each in GPUS if each.name == kernel)
    monkeypatch.setattr(attention, "chosen_kernel", lambda case, device: attention_kernels.KernelChoice(item))
    q, grad = (torch.empty(2, 8, 33, 20, dtype=dtype, device="meta") for _ in range(2))
    k, v = (torch.empty(2, 2, 33, 20, dtype=dtype, device="meta") for _ in range(2))
    mask = torch.empty(2, 1, 33, 33, dtype=torch.bool, device="meta") if item.masks else None
    out, lse = functional.attention(q, k, v, mask, mask is None)
    grads = functional.attention_backward(grad, q, k, v, out, lse, mask, mask is None)
    assert [x.shape for x in (out, *grads)] == [x.shape for x in (q, q, k, v)]
    assert {x.dtype for x in (out, *grads)} == {dtype} and lse.dtype == torch.float32
    if mask is not None:
        bias = torch.empty(8, 33, 33, device="meta")
        assert functional.attention_bias_backward(grad, q, k, v, bias, out, lse)[3].shape == bias.shape


class Largest(TorchDispatchMode):
    """The most elements that a new tensor has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor) and x.device.type != "meta":
                self.elements = max(self.elements, min(x.numel(), x.untyped_storage().nbytes() // x.element_size()))
        return result


@pytest.mark.parametrize("most", [1, 37, 300, 1 << 22])
@pytest.mark.parametrize("mask", MASKS)
def test_dropout_equals_that_of_whole_weights(mask: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers belong to elements of the whole tensor, however blocks and ranks cut it; gradients are autograd's."""
    p, start = 0.4, 12345
    monkeypatch.setattr(attention, "MOST", most)
    for shape in SHAPES:
        (q, k, v), given = _case(shape, mask)
        causal = mask == "causal"
        draw = Draw.everything(start, (*q.shape[:3], k.shape[2]), q.device)
        kept = draw.below(1 - p)
        learned = given is not None and given.dtype != torch.bool
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        bias = given.detach().requires_grad_() if learned and given is not None else given
        expected = _oracle(*inputs, bias, causal, None, kept, p)
        grad = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, [*inputs, *([bias] if learned else [])], grad)
        with torch.no_grad():
            out, lse = functional.attention_dropout(q, k, v, given, causal, None, 0, p, draw)
            rest = (out, lse, causal, None, 0, p, draw)
            grads: tuple[Tensor, ...] = functional.attention_dropout_backward(grad, q, k, v, given, *rest)
            if learned and given is not None:
                grads = functional.attention_dropout_bias_backward(grad, q, k, v, given, *rest)
        torch.testing.assert_close(out, expected.detach(), rtol=1e-10, atol=1e-10)
        for mine, theirs in zip(grads, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("drops", [False, True])
def test_no_tensor_is_as_large_as_the_scores(drops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MOST", 1 << 12)
    b, h, s = 2, 2, 256
    q, k, v, grad = (torch.randn(b, h, s, 8) for _ in range(4))
    mask = torch.rand(b, 1, 1, s) > 0.2
    draw = Draw.everything(7, (b, h, s, s), q.device)
    with Largest() as largest, torch.no_grad():
        if drops:
            out, lse = functional.attention_dropout(q, k, v, mask, False, None, 0, 0.1, draw)
            functional.attention_dropout_backward(grad, q, k, v, mask, out, lse, False, None, 0, 0.1, draw)
        else:
            out, lse = functional.attention(q, k, v, mask)
            functional.attention_backward(grad, q, k, v, out, lse, mask)
    assert 0 < largest.elements <= max(1 << 12, b * h * s * 8 * 4) < b * h * s * s
    with Largest() as largest, torch.no_grad():  # the control
        _oracle(q, k, v, mask, False, None, None, 0.0)
    assert largest.elements >= b * h * s * s


ROOT = Path(__file__).parents[2]


def test_packages_say_what_they_compute() -> None:
    package = partc.compile(ROOT / "examples/gpt.py", mesh="1x1x2", precision="bf16")
    [(place, (case, source))] = attentions(package.program).items()
    assert place == "block.attn_heads" and source is not None and source.file.endswith("gpt.py")
    assert (case.heads, case.groups, case.s, case.d, case.causal, case.drops) == (2, 1, 32, 16, True, False)
    assert case.dtype == torch.bfloat16
    assert package.warnings == () and list(without_kernel(package.program)) == []
    import json

    plan = json.loads(str(dict(package.files())["plan.json"]))
    assert cases(plan["attention"], DTYPES) == {place: case}


def test_dropout_in_attention_is_warned_of() -> None:
    package = partc.compile(ROOT / "tests/models/noisy.py", mesh="1", precision="fp32")
    dropped = [source for case, source in attentions(package.program).values() if case.drops]
    assert dropped
    [warning] = package.warnings
    assert f"noisy.py:{dropped[0].line}: on GPUs attention runs in blocks" in warning  # type: ignore[union-attr]
    assert partc.compile(ROOT / "tests/models/noisy.py", mesh="1", precision="fp64").warnings == ()


class Prefixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x, place = x * self.scale, torch.arange(x.shape[2])
        read = (place[None, :] <= place[:, None]) | (place[None, :] < 100)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=read).sum()


@pytest.mark.parametrize(("length", "reason"), [(4096, ""), (8192, "their mask would have 67,108,864 elements")])
def test_limits_of_long_sequences_are_warned_of(length: int, reason: str) -> None:
    """A fused kernel takes the mask that is made of the limits of shorter ones."""
    package = partc.compile(Prefixed, {"x": torch.randn(1, 2, length, 8)}, mesh="1")
    assert [reason in warning for warning in package.warnings] == [True] * bool(reason)


@pytest.mark.parametrize("mesh", ["1", "1x1x2"])
def test_gradients_of_a_joint_projection_are_copied_once(mesh: str) -> None:
    """From where attention's backward leaves them into one buffer, of which the product's gradients are made."""
    package = partc.compile(ROOT / "tests/models/between.py", mesh=mesh, precision="fp64")
    graph = package.program.region("block").backward
    assert graph is not None
    [joint] = (op for op in graph.ops if op.name == "cat")
    makers = {value.name: op for op in graph.ops for value in op.results}
    parts = [makers[name] for name in joint.refs()]
    assert [op.name for op in parts] == ["permute"] * 3
    assert {makers[name].name for op in parts for name in op.refs()} == {"attention_backward"}
    [merged] = (op for op in graph.ops if joint.result.name in op.refs())
    assert merged.name == "reshape" and len(merged.result.type.shape) == 3
    assert package.verify(steps=1, virtual=True).ok
