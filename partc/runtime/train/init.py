"""Initial parameters, equal to those of the single-device model after `torch.manual_seed(seed)`.

Python's and NumPy's generators get the same seed, so that all ranks build the same model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_private import storage_key
from .data import call_with_options, seeded_outside_torch
from .plain_tensors import with_registered_tensors
from .replay import CannotReplay, Recording, named_tensors, record
from .without_values import WithoutValues, built_without_values

SMALL = 64 << 20  # bytes; replaying loads modules of torch that take more


def initialise(
    module: ModuleType,
    options: Mapping[str, Any],
    seed: int,
    wanted: Collection[str],
    take: Callable[[str, Tensor], None],
    *,
    size: int | None = None,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> None:
    """Pass the wanted parameters and buffers to `take(name, tensor)`: whole tensors, one at a time, not kept
    afterwards.

    Memory for one tensor at a time suffices (see replay.py). The whole model is built if it is small (`size` bytes), or
    if its constructor cannot be replayed; `say` receives the reason.
    """

    def build() -> nn.Module:
        with seeded_outside_torch(seed):
            model = call_with_options(module.model, options)
        assert isinstance(model, nn.Module)
        return model

    recording = None if size is not None and size <= SMALL else _recorded(build, seed, say)
    if recording is not None:
        recording.replay(wanted, take, threads=replay_threads())
        return
    torch.manual_seed(seed)
    for name, x in named_tensors(with_registered_tensors(build())):
        if name in wanted:
            take(name, x)


def replay_threads() -> int:
    """This process's share of the machine's processors."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, processors // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def state_dtypes(module: ModuleType, options: Mapping[str, Any]) -> dict[str, torch.dtype]:
    """The names and dtypes of the tensors in the model's state dict, which omits some buffers, without the extra states
    of modules; computed without memory if possible.
    """
    return {name: dtype for name, (dtype, _) in state_entries(module, options).items()}


def state_entries(module: ModuleType, options: Mapping[str, Any]) -> dict[str, tuple[torch.dtype, str]]:
    """The dtype of each entry of the state dict, and the name of the parameter or buffer that it holds, as hooks may
    rename entries. The name is empty for a tensor that the state dict computes.
    """
    try:
        with torch.device("meta"):
            model = built_without_values(lambda: call_with_options(module.model, options), WithoutValues())
    except Exception:  # constructors may fail in any way without values
        model = call_with_options(module.model, options)
    tensors = {name: x for name, x in model.state_dict().items() if isinstance(x, Tensor)}
    held = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    names, places = {name for name, _ in held}, {_place(x): name for name, x in held if x.numel()}
    return {
        name: (x.dtype, name if name in names else places.get(_place(x), ""))
        for name, x in tensors.items()
        if name.rpartition(".")[2] != "_extra_state"
    }


def _place(x: Tensor) -> tuple[int, int, torch.Size]:
    """The memory of a tensor, without values too."""
    return storage_key(x), int(x.storage_offset()), x.shape


def _recorded(build: Callable[[], nn.Module], seed: int, say: Callable[[str], None]) -> Recording | None:
    try:
        return record(build, seed)
    except CannotReplay as reason:
        why = str(reason)
    except Exception as error:  # the plain constructor has no such limits, or raises the error again
        why = f"{type(error).__name__} on fake tensors: {str(error).partition(chr(10))[0][:120]}"
    say(f"building the whole model in memory to initialise it: {why}")
    return None
