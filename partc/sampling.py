"""The single device's random operations, drawn by element as packages draw them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from partc.runtime.random import Draw, dropout, stream
from partc.torch_private import TorchDispatchMode


class Sampling(TorchDispatchMode):
    """Replaces torch's generator while a model runs eagerly; random operations are numbered as they come.

    A dropout is one Bernoulli draw to torch, and so it is here: its place in the order is all that counts.
    """

    def __init__(self, seed: int, step: int) -> None:
        super().__init__()
        self.seed = seed
        self.step = step
        self.drawn = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        rule = _RANDOM.get(func._schema.name.removeprefix("aten::"))
        if rule is None:
            return func(*args, **(kwargs or {}))
        names = [argument.name for argument in func._schema.arguments]
        return rule(self, func, dict(zip(names, args, strict=False)) | dict(kwargs or {}))

    def draw(self, shape: Sequence[int], device: torch.device) -> Draw:
        """Numbers for the next random operation."""
        self.drawn += 1
        return Draw.everything(stream(self.seed, self.step, self.drawn - 1), shape, device)


Given = dict[str, Any]
Rule = Callable[[Sampling, Any, Given], Any]


def _bernoulli(sampling: Sampling, func: Any, given: Given) -> Tensor:
    x = given["self"]
    p = given.get("p", 0.5 if func._schema.name.endswith("_") else None)
    result = (sampling.draw(x.shape, x.device).uniform(torch.float64) < (x if p is None else p)).to(x.dtype)
    return _given_back(func, x, result)


def _uniform(sampling: Sampling, func: Any, given: Given) -> Tensor:
    x, low, high = given["self"], given.get("from", 0.0), given.get("to", 1.0)
    u = sampling.draw(x.shape, x.device).uniform(x.dtype)
    return _given_back(func, x, u * (high - low) + low)


def _normal(sampling: Sampling, func: Any, given: Given) -> Tensor:
    x, mean, std = given["self"], given.get("mean", 0.0), given.get("std", 1.0)
    return _given_back(func, x, sampling.draw(x.shape, x.device).normal(x.dtype) * std + mean)


def _like(kind: str) -> Rule:
    def rule(sampling: Sampling, func: Any, given: Given) -> Tensor:
        x = given["self"]
        draw = sampling.draw(x.shape, x.device)
        found: Tensor = getattr(draw, kind)(given.get("dtype") or x.dtype)
        return found

    return rule


def _made(kind: str) -> Rule:
    def rule(sampling: Sampling, func: Any, given: Given) -> Tensor:
        draw = sampling.draw(given["size"], given.get("device") or torch.device("cpu"))
        found: Tensor = getattr(draw, kind)(given.get("dtype") or torch.get_default_dtype())
        return found

    return rule


def _randint(sampling: Sampling, func: Any, given: Given) -> Tensor:
    x = given.get("self")
    shape, device = (x.shape, x.device) if x is not None else (given["size"], given.get("device"))
    low, high = given.get("low", 0), given["high"]
    u = sampling.draw(shape, device or torch.device("cpu")).uniform(torch.float64)
    whole: Tensor = (u * (high - low)).floor() + low
    return whole.to(given.get("dtype") or (x.dtype if x is not None else torch.int64))


def _randperm(sampling: Sampling, func: Any, given: Given) -> Tensor:
    device = given.get("device") or torch.device("cpu")
    return sampling.draw((given["n"],), device).uniform(torch.float64).argsort(0)


def _native_dropout(sampling: Sampling, func: Any, given: Given) -> tuple[Tensor, Tensor]:
    x = given["input"]
    if given.get("train") is False or not given["p"]:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    return dropout(x, given["p"], sampling.draw(x.shape, x.device))


def _given_back(func: Any, x: Tensor, result: Tensor) -> Tensor:
    """In place where the operation is."""
    return x.copy_(result) if func._schema.name.endswith("_") else result


_RANDOM: Mapping[str, Rule] = {
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli,
    "uniform": _uniform,
    "uniform_": _uniform,
    "normal_": _normal,
    "normal_functional": _normal,
    "rand_like": _like("uniform"),
    "randn_like": _like("normal"),
    "rand": _made("uniform"),
    "randn": _made("normal"),
    "randint": _randint,
    "randint_like": _randint,
    "randperm": _randperm,
    "native_dropout": _native_dropout,
}
