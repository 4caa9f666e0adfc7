"""Which kernel computes attention: the limits of torch's fused kernels, and the choice among them.

On GPUs the order is cuDNN, flash, efficient. A kernel is passed over where torch's own switch for it is off
(`torch.backends.cuda.enable_flash_sdp` and its like, which `settle` sets), where the operands are beyond its limits,
and where torch refuses them. What no fused kernel takes is computed in blocks of plain operations.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import torch

from .errors import UsageError

BLOCKS = "blocks"  # plain operations on a block of the scores at a time
WANTED = ("auto", "cudnn", "flash3", "flash", "efficient", BLOCKS)
HALF = (torch.bfloat16, torch.float16)
# cuDNN before this one is wrong, or slower than flash, at lengths that 128 doesn't divide; torch has the same limit.
GOOD_CUDNN = 91501


@dataclass(frozen=True, slots=True)
class Case:
    """One attention: what the choice of its kernel depends on. `s`, `t` are lengths, `d`, `e` head sizes of k and v."""

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

    def __str__(self) -> str:
        kinds = {"causal": self.causal, "masked": self.masked, "learned mask": self.learned, "dropout": self.drops}
        shape = f"{self.heads}{f'/{self.groups}' if self.groups != self.heads else ''} heads of {self.d}"
        size = f"{self.s} x {self.t}" if self.s != self.t else str(self.s)
        dtype = str(self.dtype).removeprefix("torch.")
        return ", ".join((f"{dtype}, {shape}, length {size}", *(name for name, is_so in kinds.items() if is_so)))


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the limits depend on."""

    capability: tuple[int, int]
    cudnn: int  # its version, 91501 for 9.15.1; 0 where there is none


@dataclass(frozen=True, slots=True)
class Kernel:
    """A fused kernel. Head sizes are padded to a multiple of `multiple`."""

    name: str
    dtypes: tuple[torch.dtype, ...]
    most: int  # the largest head size
    multiple: int = 1
    grouped: bool = True  # query heads may share one of keys and values
    masks: bool = False
    equal: bool = True  # keys and values must have one head size
    square: bool = True  # a causal mask needs as many queries as keys

    def obstacle(self, case: Case) -> str:
        """Why the kernel cannot compute this, on any device; empty if it can."""
        if case.drops:
            return "it cannot draw the weights to drop by their place in the whole tensor"
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


CPU = Kernel("cpu", (torch.float64, torch.float32, *HALF), most=1 << 30, masks=True, square=False)
# A mask goes to `efficient` alone: cuDNN's gradients under masks have been wrong in several of its versions.
GPUS = (
    Kernel("cudnn", HALF, most=128, multiple=8, equal=False),
    Kernel("flash", HALF, most=256, multiple=8),
    Kernel("efficient", (torch.float32, *HALF), most=1 << 16, multiple=8, grouped=False, masks=True, equal=False),
)


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel for a case, and why none of those before it."""

    kernel: Kernel | None  # None: in blocks
    passed: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return BLOCKS if self.kernel is None else self.kernel.name


def on_cpu(case: Case) -> Kernel | None:
    """The fused kernel for CPUs, where it can."""
    return None if CPU.obstacle(case) else CPU


def on_gpu(case: Case, gpu: Gpu, off: Iterable[str] = (), refusal: Callable[[str, Case], str] | None = None) -> Choice:
    """The first kernel that can. `off` are switched off; `refusal` says what torch has against one."""
    passed: list[tuple[str, str]] = []
    for kernel in GPUS:
        reason = "switched off" if kernel.name in off else kernel.obstacle(case) or _device_obstacle(kernel, case, gpu)
        reason = reason or ("" if refusal is None else refusal(kernel.name, case))
        if not reason:
            return Choice(kernel, tuple(passed))
        passed.append((kernel.name, reason))
    return Choice(None, tuple(passed))


def chosen(case: Case, device: int) -> Choice:
    """The choice on a GPU of this process, by torch's switches as they are."""
    return _chosen(case, device, tuple(name for name, is_on in _SWITCHES.items() if not is_on()))


@cache
def _chosen(case: Case, device: int, off: tuple[str, ...]) -> Choice:
    return on_gpu(case, gpu_at(device), off, lambda name, case: refusal(name, case, device))


def gpu_at(device: int) -> Gpu:
    """The GPU of this number."""
    return Gpu(torch.cuda.get_device_capability(device), torch.backends.cudnn.version() or 0)


def _device_obstacle(kernel: Kernel, case: Case, gpu: Gpu) -> str:
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
    # Registers of these GPUs don't hold the gradients of such heads.
    if kernel.name == "flash" and ((major == 8 and minor in (6, 7, 9)) or major == 12) and case.d > 192:
        return "heads of at most 192 on this GPU"
    return ""


def refusal(name: str, case: Case, device: int) -> str:
    """Why torch would not run this kernel for such operands with gradients, in torch's words; empty if it would."""
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


def settle(wanted: str, cases: Mapping[str, Case], device: torch.device, say: Callable[[str], None]) -> None:
    """Set torch's switches to a user's wish, and say which kernel computes each of the program's attentions.

    Raises UsageError P0541 where the wish cannot be had on this machine.
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
    for line in told({place: (case, chosen(case, device.index)) for place, case in cases.items()}):
        say(line)


def told(choices: Mapping[str, tuple[Case, Choice]]) -> list[str]:
    """A line for each different case: its places, its kernel, and why not the ones before it."""
    places: dict[tuple[Case, Choice], list[str]] = {}
    for place, choice in choices.items():
        places.setdefault(choice, []).append(place)
    return [
        f"attention in {', '.join(found)} ({case}): {choice.name}"
        + "".join(f"; not {name}: {reason}" for name, reason in choice.passed)
        for (case, choice), found in places.items()
    ]


def cases(attentions: Mapping[str, Mapping[str, object]], dtypes: Mapping[str, torch.dtype]) -> dict[str, Case]:
    """Those that plan.json lists, by place."""
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
