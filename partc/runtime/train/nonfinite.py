"""The region that produced a non-finite loss: the step runs again, with checks of each call's inputs and results."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ..comm.comm import Comm
from ..errors import UsageError

_SUFFIX = "_forward"  # suffix of a region's forward function in a stage's module
_found: dict[int, dict[str, Any]] = {}  # thread -> findings; ranks in one process share a stage's module


def explain(
    comm: Comm,
    step: int,
    loss: float | None,
    stages: Mapping[int, Any],
    parameters: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    calls: list[dict[str, Any]],
    rerun: Callable[[], object],
) -> UsageError:
    """The error with which to stop, equal on every rank. All ranks must call this. `calls` are the plan's."""
    mine: dict[str, Any] = {"order": [], "text": "", "loss": loss}
    held = {**{f"parameter {name}": x for name, x in parameters.items()}, **{f"input {n}": x for n, x in batch.items()}}
    before = next((name for name, x in held.items() if not _finite(x)), None)
    for number, stage in stages.items():
        _watch(sys.modules[type(stage).__module__], number, calls)
    _found[threading.get_ident()] = {"counts": {}, "comm": comm}
    rerun()
    first = _found.pop(threading.get_ident()).get("first")
    if before is not None:
        mine |= {"order": [-1], "text": f"{before} was not finite when the step began"}
    elif first is not None:
        mine |= first
    said = [json.loads(text) | {"rank": at} for at, text in enumerate(comm.gather_texts(json.dumps(mine)))]
    value = next((each["loss"] for each in said if each["loss"] is not None), float("nan"))
    origin = min((each for each in said if each["text"]), key=lambda each: each["order"], default=None)
    where = "no region's result is" if origin is None else f"{origin['text']}, on rank {origin['rank']}"
    return UsageError(
        "P0528",
        f"the loss of step {step + 1} is {value}: {where}",
        "continue from a checkpoint with --resume, perhaps with another --lr",
        alike=True,
        exit_code=1,
    )


def _watch(module: Any, stage: int, calls: list[dict[str, Any]]) -> None:
    for name, function in list(vars(module).items()):
        if name.endswith(_SUFFIX) and callable(function) and not hasattr(function, "watched"):
            region = name.removesuffix(_SUFFIX)
            names = [call["name"] for call in calls if call["stage"] == stage and call["region"] == region]
            setattr(module, name, _watched(function, region, stage, names))


def _watched(function: Callable[..., Any], region: str, stage: int, names: list[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*operands: Any, **named: Any) -> Any:
        results = function(*operands, **named)
        here = _found.get(threading.get_ident())
        if here is not None:
            place = here["comm"].mb.rank, stage
            counts = here["counts"]
            total = counts[place] = counts.get(place, 0) + 1
            number = counts[place, region] = counts.get((place, region), 0) + 1
            order = [place[0], stage, total]
            earlier = "first" not in here or order < here["first"]["order"]
            if earlier and not _all_finite(results) and _all_finite((operands, tuple(named.values()))):
                name = names[number - 1] if number <= len(names) else region
                text = f"region {region} made it so first, at {name} of stage {stage}, microbatch {place[0]}"
                here["first"] = {"order": order, "text": text}
        return results

    call.watched = True  # type: ignore[attr-defined]
    return call


def _all_finite(values: Any) -> bool:
    return all(_finite(x) for x in _tensors(values))


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(values):
        for field in dataclasses.fields(values):
            yield from _tensors(getattr(values, field.name))


def _finite(x: Tensor) -> bool:
    return not x.is_floating_point() or bool(x.isfinite().all())
