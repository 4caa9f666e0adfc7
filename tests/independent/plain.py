"""A training loop as anyone would write it: one device, eager autograd, torch.optim. It reads nothing of a package."""

from __future__ import annotations

import fnmatch
import importlib.util
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a model is trained; every field is an option of train.py, with train.py's default."""

    steps: int = 4
    optimizer: str = "adamw"
    lr: float = 1e-3
    weight_decay: float | None = None
    no_decay: tuple[str, ...] = ()
    clip: float | None = None
    accumulate: int = 1
    lr_schedule: str = "constant"
    warmup: int = 0
    min_lr: float = 0.0

    @property
    def arguments(self) -> list[str]:
        """The same on train.py's command line."""
        given = [("steps", self.steps), ("optimizer", self.optimizer), ("lr", self.lr), ("accumulate", self.accumulate)]
        given += [("lr-schedule", self.lr_schedule), ("warmup", self.warmup), ("min-lr", self.min_lr)]
        given += [("weight-decay", self.weight_decay), ("clip", self.clip)]
        given += [("no-decay", glob) for glob in self.no_decay]
        return [word for name, value in given if value is not None for word in (f"--{name}", str(value))]

    def rate(self, step: int) -> float:
        """Up to `lr` in `warmup` steps, then down to `min_lr`, which the last step has."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.lr_schedule == "constant":
            return self.lr
        peak, last = max(self.warmup - 1, 0), self.steps - 1
        way = (step - peak) / (last - peak) if last > peak else 0.0
        share = 1 - way if self.lr_schedule == "linear" else 0.5 + 0.5 * math.cos(math.pi * way)
        return self.min_lr + (self.lr - self.min_lr) * share


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The end of a training."""

    state: dict[str, Tensor]
    losses: tuple[float, ...]
    gone_without: frozenset[str]  # parameters whose grad was None at the end
    skipped: frozenset[int] = frozenset()  # steps whose gradients were too large for fp16


_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def train(
    path: Path,
    recipe: Recipe,
    *,
    microbatches: int = 1,
    seed: int = 0,
    precision: Literal["fp64", "bf16", "fp16"] = "fp64",
    skip: frozenset[int] = frozenset(),
) -> Trained:
    """Train a model file's model in fp64, or in fp32 with forward passes under torch's autocast, in fp16 with its
    GradScaler. `microbatches` is more than 1 where each is a batch of its own. Steps in `skip` update no parameter.
    """
    module, low = load(path), _TYPES.get(precision)
    wide = low is None
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    model: nn.Module = module.model()
    for x in (*model.parameters(), *model.buffers()) if wide else ():
        x.data = double(x.data)  # buffers of two names stay one, which model.double() would part
    optimizer = _optimizer(model, recipe)
    scaler = torch.amp.GradScaler("cpu", enabled=low == torch.float16)
    losses, skipped = [], set(skip)
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for number in range(step * recipe.accumulate, (step + 1) * recipe.accumulate):
            batch = module.data(number)
            parts = _parts(over_tensors(double, batch) if wide else batch, microbatches)
            with doubles() if wide else nullcontext(), _drawing(module, seed, number):
                for part in parts:
                    with nullcontext() if low is None else torch.autocast("cpu", low):
                        loss = module.loss(model, part) if hasattr(module, "loss") else model(**part)
                    scaler.scale(loss / (len(parts) * recipe.accumulate)).backward()
                    total += loss.item() / (len(parts) * recipe.accumulate)
        if recipe.clip is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        if step not in skip:
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped |= {step} if scaler.get_scale() < scale else set()
        losses.append(total)
    without = frozenset(name for name, x in model.named_parameters() if x.grad is None)
    state = {
        name: torch.view_as_real(x.detach()).clone() if x.is_complex() else x.detach().clone()
        for name, x in model.state_dict().items()
    }
    return Trained(state=state, losses=tuple(losses), gone_without=without, skipped=frozenset(skipped))


def double(x: Tensor) -> Tensor:
    if x.is_complex():
        return x.cdouble()
    return x.double() if x.is_floating_point() else x


def _optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    spared: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for name, x in model.named_parameters():
        spared[any(fnmatch.fnmatchcase(name, glob) for glob in recipe.no_decay)].append(x)
    decay = {} if recipe.weight_decay is None else {"weight_decay": recipe.weight_decay}
    groups: list[dict[str, Any]] = [{"params": spared[False], **decay}, {"params": spared[True], "weight_decay": 0.0}]
    name, _, options = recipe.optimizer.partition(":")
    kind = next(kind for kind in vars(torch.optim).values() if getattr(kind, "__name__", "").lower() == name)
    given = {key: float(value) for key, value in (option.split("=") for option in options.split(",") if option)}
    return kind([group for group in groups if group["params"]], lr=recipe.lr, **given)


def over_tensors(change: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """A batch with each of its tensors changed, in the containers that it nests."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {name: over_tensors(change, x) for name, x in batch.items()}
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{x.name: over_tensors(change, getattr(batch, x.name)) for x in fields(batch)})
    if isinstance(batch, list | tuple):
        inside = [over_tensors(change, x) for x in batch]
        return type(batch)(*inside) if hasattr(batch, "_fields") else type(batch)(inside)
    return batch


def examples(batch: Any) -> int:
    """The number of examples in a batch: the rows of its first tensor that is not a number."""
    found: list[Tensor] = []
    over_tensors(lambda x: found.append(x) or x, batch)
    return next(x.shape[0] for x in found if x.dim())


def _parts(batch: Any, count: int) -> list[Any]:
    rows = examples(batch)

    def part(index: int, x: Tensor) -> Tensor:
        return x.chunk(count)[index] if x.dim() and x.shape[0] == rows else x

    return [over_tensors(partial(part, index), batch) for index in range(count)]


def _drawing(module: ModuleType, seed: int, number: int) -> Any:
    """Random numbers inside a model are partc's own, element by element; torch's have another order on every mesh."""
    if not getattr(module, "RANDOM", False):
        return nullcontext()
    from partc.package.sampling import Sampling

    return Sampling(seed, number)


_WIDE = {torch.complex64: torch.complex128} | dict.fromkeys(
    (torch.float32, torch.bfloat16, torch.float16), torch.float64
)


class _Widened(TorchFunctionMode):
    """The model's own casts to narrower types stay in fp64, as `--precision fp64` says."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            func = Tensor.double
        named = {name: _WIDE.get(x, x) if isinstance(x, torch.dtype) else x for name, x in (kwargs or {}).items()}
        return func(*(_WIDE.get(x, x) if isinstance(x, torch.dtype) else x for x in args), **named)


@contextmanager
def doubles() -> Iterator[None]:
    """While fp64 is torch's default, as the model makes tensors of its own in it, and casts stay in it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widened():
            yield
    finally:
        torch.set_default_dtype(before)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"independent_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
