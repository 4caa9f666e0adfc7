"""The batch of each step: the same on every run, cut to this rank and to microbatches."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..layout import Shard, microbatch_part


def load_model_file(path: Path) -> ModuleType:
    """Import the package's copy of the user's model file, and what it imports from `sources/`."""
    sys.path.insert(0, str(path.parent / "sources"))
    spec = importlib.util.spec_from_file_location("partc_model_file", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def call_with_options(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Call a function of the model file with the options that it accepts."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return function(**options)
    names = {parameter.name for parameter in parameters}
    return function(**{name: value for name, value in options.items() if name in names})


def global_batch(
    module: ModuleType, options: Mapping[str, Any], *, seed: int, step: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The whole batch of a step: `data(step)` if the model file has it, else `batch()` under the step's own seed.

    Both receive the options that they accept. Raises UsageError P0530 if `data` fails.
    """
    generator = torch.get_rng_state()
    torch.default_generator.manual_seed(seed * 1_000_003 + step + 1)  # the host's alone: a device may be recording
    try:
        batch = _data(module, options, step) if hasattr(module, "data") else call_with_options(module.batch, options)
    finally:
        torch.set_rng_state(generator)
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}


def _data(module: ModuleType, options: Mapping[str, Any], step: int) -> dict[str, Tensor]:
    try:
        batch: dict[str, Tensor] = call_with_options(partial(module.data, step), options)
    except Exception as error:
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == module.__file__]
        where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
        cause = f"data({step}) of the model file fails{where}: {type(error).__name__}: {error}"
        raise UsageError("P0530", cause, "what it reads must be where each rank runs; -D options name it") from error
    return batch


def local_batch(
    batch: Mapping[str, Tensor],
    inputs: Mapping[str, Shard],
    sizes: Mapping[str, int],
    coordinate: Mapping[str, int],
    count: int,
    device: torch.device,
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """This rank's part of the entries that its stage reads, whole and in `count` microbatches."""
    local = {name: x.to(device) for name, x in own_part(batch, inputs, sizes, coordinate).items()}
    return local, in_microbatches(local, inputs, sizes, count)


def own_part(
    batch: Mapping[str, Tensor], inputs: Mapping[str, Shard], sizes: Mapping[str, int], coordinate: Mapping[str, int]
) -> dict[str, Tensor]:
    """This rank's part of the entries that its stage reads, on the batch's device."""
    return {name: _alone(shard.local(batch[name], sizes, coordinate)) for name, shard in inputs.items()}


def in_microbatches(
    local: Mapping[str, Tensor], inputs: Mapping[str, Shard], sizes: Mapping[str, int], count: int
) -> list[dict[str, Tensor]]:
    """A rank's part in `count` microbatches."""
    return [
        {name: microbatch_part(x, inputs[name].dims, sizes, count, m).contiguous() for name, x in local.items()}
        for m in range(count)
    ]


def _alone(part: Tensor) -> Tensor:
    """A contiguous copy, unless the part owns its memory: a view would keep the whole alive."""
    part = part.contiguous()
    return part if part.untyped_storage().nbytes() == part.nbytes else part.clone()
