"""The choice of the attention kernel, and the limits of torch's fused kernels.

On GPUs the order is cuDNN, flash, efficient. A kernel is skipped if torch's own switch for it is off
(set by `enable_kernels`), if the operands exceed its limits, or if
torch refuses them. If no fused kernel remains, attention runs in blocks of plain operations.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import torch

from ..errors import UsageError

BLOCKS = "blocks"  # attention by plain operations, one block of scores at a time
WANTED = ("auto", "cudnn", "flash3", "flash", "efficient", BLOCKS)
HALF = (torch.bfloat16, torch.float16)
# Earlier versions of cuDNN are wrong, or slower than flash, at lengths that are not multiples of 128; torch has the
# same limit.
GOOD_CUDNN = 91501


@dataclass(frozen=True, slots=True)
class Case:
    """The properties of an attention that determine its kernel. `s`, `t` are lengths, `d`, `e` the head sizes of k and
    v.
    """

    dtype: torch.dtype
    heads: int
    groups: int
    s: int
    t: int
    d: int
    e: int
    masked: bool = False
    learned: bool = False  # the mask has a gradient
    causal: bool = False
    drops: bool = False
    window: int = 0  # positions at this distance or farther are not read; 0: no window
    limits: int = 0  # the number of elements of the mask that limits describe, if it is too large to be materialised

    def __str__(self) -> str:
        kinds = {"causal": self.causal, "masked": self.masked, "learned mask": self.learned, "dropout": self.drops}
        shape = f"{self.heads}{f'/{self.groups}' if self.groups != self.heads else ''} heads of {self.d}"
        size = f"{self.s} x {self.t}" if self.s != self.t else str(self.s)
        dtype = str(self.dtype).removeprefix("torch.")
        near = (f"window {self.window}",) if self.window else ("limits of rows",) if self.limits else ()
        return ", ".join((f"{dtype}, {shape}, length {size}", *(name for name, is_so in kinds.items() if is_so), *near))


@dataclass(frozen=True, slots=True)
class Gpu:
    """The properties of a GPU on which the limits depend."""

    capability: tuple[int, int]
    cudnn: int  # cuDNN's version, 91501 for 9.15.1; 0 without cuDNN


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """A fused kernel. Head sizes are padded to a multiple of `multiple`."""

    name: str
    dtypes: tuple[torch.dtype, ...]
    most: int  # the largest head size
    multiple: int = 1
    grouped: bool = True  # whether query heads may share key and value heads
    masks: bool = False
    equal: bool = True  # whether keys and values must have the same head size
    square: bool = True  # whether a causal mask requires as many queries as keys

    def obstacle(self, case: Case) -> str:
        """The reason why the kernel cannot compute this case on any device; empty if it can."""
        if case.drops:
            return "it cannot draw the weights to drop by their place in the whole tensor"
        if case.window:
            return "no windows"
        if case.limits:
            return f"no limits of rows, and their mask would have {case.limits:,} elements"
        if 0 in (case.heads, case.s, case.t, case.d, case.e):
            return "nothing to compute"
        if case.dtype not in self.dtypes:
            return f"no {str(case.dtype).removeprefix('torch.')}"
        if (case.masked or case.learned) and not self.masks:
            return "no masks"
        if max(case.d, case.e) > self.most:
            return f"heads of at most {self.most}"
        if self.square and case.causal and case.s != case.t:
            return "causal only for as many queries as keys"
        return ""


CPU = AttentionKernel("cpu", (torch.float64, torch.float32, *HALF), most=1 << 30, masks=True, square=False)
# Only `efficient` gets masks: cuDNN's gradients under masks have been wrong in several versions.
GPUS = (
    AttentionKernel("cudnn", HALF, most=128, multiple=8, equal=False),
    AttentionKernel("flash", HALF, most=256, multiple=8),
    AttentionKernel(
        "efficient", (torch.float32, *HALF), most=1 << 16, multiple=8, grouped=False, masks=True, equal=False
    ),
)


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernel for a case, and the reasons against the kernels preferred to it."""

    kernel: AttentionKernel | None  # None: attention runs in blocks
    passed: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return BLOCKS if self.kernel is None else self.kernel.name


def on_cpu(case: Case) -> AttentionKernel | None:
    """The fused kernel for CPUs, if it can compute the case."""
    return None if CPU.obstacle(case) else CPU


def on_gpu(
    case: Case, gpu: Gpu, off: Iterable[str] = (), refusal: Callable[[str, Case], str] | None = None
) -> KernelChoice:
    """The first possible kernel. Kernels in `off` are switched off; `refusal(name)` returns torch's objection to a
    kernel.
    """
    passed: list[tuple[str, str]] = []
    for kernel in GPUS:
        reason = "switched off" if kernel.name in off else kernel.obstacle(case) or _device_obstacle(kernel, case, gpu)
        reason = reason or ("" if refusal is None else refusal(kernel.name, case))
        if not reason:
            return KernelChoice(kernel, tuple(passed))
        passed.append((kernel.name, reason))
    return KernelChoice(None, tuple(passed))


def chosen_kernel(case: Case, device: int) -> KernelChoice:
    """The choice for a GPU of this process, under torch's current switches."""
    return preferred_kernel(case, device, tuple(name for name, is_on in _SWITCHES.items() if not is_on()))


@cache
def preferred_kernel(case: Case, device: int, off: tuple[str, ...]) -> KernelChoice:
    """The choice for a GPU of this process when these kernels are switched off."""
    return on_gpu(case, gpu_at(device), off, lambda name, case: refusal(name, case, device))


def gpu_at(device: int) -> Gpu:
    """The properties of the GPU with this index."""
    return Gpu(torch.cuda.get_device_capability(device), torch.backends.cudnn.version() or 0)


def _device_obstacle(kernel: AttentionKernel, case: Case, gpu: Gpu) -> str:
    major, minor = gpu.capability
    if case.dtype in HALF and kernel.name != "efficient" and major < 8:
        return "compute capability 8.0 or newer"
    if case.dtype == torch.bfloat16 and major < 8:
        return "no bfloat16 before compute capability 8.0"
    if kernel.name == "cudnn" and not gpu.cudnn:
        return "not there"
    if kernel.name == "cudnn" and torch.are_deterministic_algorithms_enabled():
        return "not deterministic"
    if kernel.name == "cudnn" and case.t == 1:
        return "more than one key"
    # These GPUs have too few registers for the gradients of larger heads.
    if kernel.name == "flash" and ((major == 8 and minor in (6, 7, 9)) or major == 12) and case.d > 192:
        return "heads of at most 192 on this GPU"
    return ""


def refusal(name: str, case: Case, device: int) -> str:
    """torch's reason for not running this kernel on such operands with gradients; empty if it would."""
    width = {kernel.name: kernel.multiple for kernel in GPUS}[name]
    with torch.enable_grad():
        q, k, v = (
            torch.empty(-(-size // width) * width, dtype=case.dtype, device=torch.device("cuda", device))
            .requires_grad_()
            .expand(1, heads, length, -1)
            for heads, length, size in (
                (case.heads, case.s, case.d),
                (case.groups if name != "efficient" else case.heads, case.t, case.d),
                (case.groups if name != "efficient" else case.heads, case.t, case.e),
            )
        )
        grouped = k.shape[1] != q.shape[1]
        asked = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, case.causal, grouped)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            can = _QUESTIONS[name](asked, True)
    words = " ".join(str(warning.message).partition(" (Triggered")[0] for warning in said)
    return "" if can else words or "torch refuses it"


def enable_kernels(wanted: str, cases: Mapping[str, Case], device: torch.device, say: Callable[[str], None]) -> None:
    """Set torch's switches to the user's preference, and print the kernel of each of the program's attentions.

    Raises UsageError P0541 if the preference is impossible on this machine.
    """
    if device.type != "cuda":
        if wanted not in ("auto", BLOCKS):
            raise _unavailable(wanted, "kernels of GPUs", "leave out --attention on CPUs")
        return
    assert device.index is not None
    gpu = gpu_at(device.index)
    exact = torch.are_deterministic_algorithms_enabled()
    if exact and wanted in ("cudnn", "flash3"):
        raise _unavailable(wanted, "algorithms that are not deterministic", "leave out --attention or --deterministic")
    if wanted == "flash3" or (wanted == "auto" and not exact and not _prefers_cudnn(gpu) and _has_flash3(gpu)):
        if not _has_flash3(gpu):
            cause = "flash_attn_interface, which is not installed" if gpu.capability[0] == 9 else "a GPU such as H100"
            raise _unavailable(wanted, cause, "pip install flash-attn-3, or leave out --attention")
        torch.nn.attention.activate_flash_attention_impl("FA3")
    if wanted == "cudnn" and not gpu.cudnn:
        raise _unavailable(wanted, "cuDNN, which this torch does not have", "leave out --attention")
    torch.backends.cuda.enable_cudnn_sdp(wanted == "cudnn" or (wanted == "auto" and _prefers_cudnn(gpu)))
    torch.backends.cuda.enable_flash_sdp(wanted in ("auto", "cudnn", "flash", "flash3"))
    torch.backends.cuda.enable_mem_efficient_sdp(wanted != BLOCKS)
    for line in choice_lines({place: (case, chosen_kernel(case, device.index)) for place, case in cases.items()}):
        say(line)


def choice_lines(choices: Mapping[str, tuple[Case, KernelChoice]]) -> list[str]:
    """A line for each distinct case: its places, its kernel, and the reasons against the kernels preferred to it."""
    places: dict[tuple[Case, KernelChoice], list[str]] = {}
    for place, choice in choices.items():
        places.setdefault(choice, []).append(place)
    return [
        f"attention in {', '.join(found)} ({case}): {choice.name}"
        + "".join(f"; not {name}: {reason}" for name, reason in choice.passed)
        for (case, choice), found in places.items()
    ]


def cases(attentions: Mapping[str, Mapping[str, object]], dtypes: Mapping[str, torch.dtype]) -> dict[str, Case]:
    """The attention cases in plan.json, by place in the program."""
    return {
        place: Case(dtype=dtypes[str(entry["dtype"])], **{key: entry[key] for key in entry if key != "dtype"})  # type: ignore[arg-type]
        for place, entry in attentions.items()
    }


def _prefers_cudnn(gpu: Gpu) -> bool:
    return gpu.cudnn >= GOOD_CUDNN and gpu.capability[0] in (9, 10)


def _has_flash3(gpu: Gpu) -> bool:
    return gpu.capability[0] == 9 and importlib.util.find_spec("flash_attn_interface") is not None


def _unavailable(wanted: str, cause: str, help: str) -> UsageError:
    return UsageError("P0541", f"--attention {wanted} needs {cause}", help, alike=True)


_SWITCHES: Mapping[str, Callable[[], bool]] = {
    "cudnn": lambda: torch.backends.cuda.cudnn_sdp_enabled(),
    "flash": lambda: torch.backends.cuda.flash_sdp_enabled(),
    "efficient": lambda: torch.backends.cuda.mem_efficient_sdp_enabled(),
}
_QUESTIONS: Mapping[str, Callable[[torch.backends.cuda.SDPAParams, bool], bool]] = {
    "cudnn": torch.backends.cuda.can_use_cudnn_attention,
    "flash": torch.backends.cuda.can_use_flash_attention,
    "efficient": torch.backends.cuda.can_use_efficient_attention,
}
