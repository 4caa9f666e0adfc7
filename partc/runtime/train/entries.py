"""The entries of a batch: its tensors and constants by path; and the reverse, a batch with other entries.

    {"inputs": {"ids": x}, "weights": (y, 0.5)}  ->  inputs.ids: x, weights.0: y, weights.1: 0.5

Mappings, lists, tuples and dataclasses nest to any depth. A batch that is a tensor has the path "batch".
`rebuilt_batch` makes objects of the user's own types again.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..documents import Malformed
from ..errors import UsageError

Entries = dict[str, Any]
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, slice, range)
_LONGEST = 200
_WHOLE = "batch"  # the path of a batch that is a tensor


def entries(batch: Any) -> Entries:
    """The tensors and constants of a batch by path. Raises Malformed."""
    found: Entries = {}

    def add(path: str, item: Any) -> Any:
        if path in found:
            raise Malformed(f"has two entries of the path {path!a}")
        if not isinstance(item, (Tensor, *_CONSTANTS)):
            raise Malformed(f"has {path!a}, which is of {type(item).__name__}: neither a tensor nor a constant")
        found[path] = item
        return item

    if isinstance(batch, Tensor):
        return {_WHOLE: batch}
    if not (isinstance(batch, Mapping | list | tuple) or _is_dataclass(batch)):
        raise Malformed(f"is of {type(batch).__name__}, not a tensor, dict, list, tuple or dataclass")
    if isinstance(batch, Mapping) and not all(isinstance(key, str) for key in batch):
        raise Malformed(
            f"has the key {next(key for key in batch if not isinstance(key, str))!a}, which is not a string"
        )
    try:
        _mapped(batch, "", add)
    except RecursionError:
        raise Malformed("is nested deeper than Python's recursion limit") from None
    if not any(isinstance(item, Tensor) for item in found.values()):
        raise Malformed("has no tensor")
    return found


def rebuilt_batch(batch: Any, found: Mapping[str, Any]) -> Any:
    """A batch with the form and types of `batch`, and the entries in `found`."""
    if isinstance(batch, Tensor):
        return found.get(_WHOLE, batch)
    return _mapped(batch, "", lambda path, item: found.get(path, item))


def batches_of_parts(batch: Any, rows: int, parts: int) -> list[Any]:
    """The batch once for each of `parts` equal parts: lists of constants, one for each of its `rows` examples, are cut.

    Tensors are those of the whole batch.
    """
    size = rows // parts

    def piece(part: int, item: Any) -> Any:
        return item[part * size : (part + 1) * size] if isinstance(item, list) else item

    def of_part(part: int) -> Any:
        return _mapped(batch, "", lambda _, item: piece(part, item), lambda item: _of_examples(item, rows))

    return [of_part(part) for part in range(parts)]


def _of_examples(item: Any, rows: int) -> bool:
    """Whether an item of a batch is a list of constants, nested or not, with one for each example."""
    return type(item) is list and len(item) == rows and not any(isinstance(x, Tensor) for x in _leaves(item))


def _leaves(item: Any) -> list[Any]:
    found: list[Any] = []
    _mapped(item, "", lambda _, leaf: found.append(leaf))
    return found


def of_model(model: nn.Module, batch: Any) -> Any:
    """The model's result for a batch without a loss function: entries are arguments, by name or by position."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if type(batch) in (list, tuple) else model(batch)


def constants_as_text(found: Mapping[str, Any]) -> dict[str, str]:
    """The entries that are not tensors, as text."""
    return {path: repr(item) for path, item in found.items() if not isinstance(item, Tensor)}


def types(batch: Any) -> set[type]:
    """The types of the batch's containers and constants."""
    found = {type(batch)}
    if isinstance(batch, Mapping):
        below = list(batch.values())
    elif isinstance(batch, list | tuple):
        below = list(batch)
    else:
        below = [getattr(batch, each.name) for each in dataclasses.fields(batch)] if _is_dataclass(batch) else []
    return found.union(*map(types, below))


def short_text(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _mapped(
    item: Any, path: str, leaf: Callable[[str, Any], Any], is_leaf: Callable[[Any], bool] = lambda item: False
) -> Any:
    """The item with `leaf` of each tensor, constant and container for which `is_leaf` is true."""
    if is_leaf(item):
        return leaf(path, item)
    if isinstance(item, Mapping):
        return _mapping(item, {key: _mapped(x, _joined(path, key), leaf, is_leaf) for key, x in item.items()})
    if isinstance(item, list | tuple):
        made = [_mapped(x, _joined(path, index), leaf, is_leaf) for index, x in enumerate(item)]
        return item._make(made) if hasattr(item, "_make") else type(item)(made)
    if _is_dataclass(item):
        made_of = copy.copy(item)
        for field in dataclasses.fields(item):
            held = getattr(item, field.name)
            value = _mapped(held, _joined(path, field.name), leaf, is_leaf)
            if value is not held:
                object.__setattr__(made_of, field.name, value)  # also in frozen dataclasses
        return made_of
    return leaf(path, item)


def _mapping(item: Mapping[Any, Any], made: dict[Any, Any]) -> Any:
    if type(item) is dict:
        return made
    if not hasattr(item, "__setitem__"):
        return type(item)(made)  # type: ignore[call-arg]
    found = copy.copy(item)
    for key, value in made.items():
        found[key] = value
    return found


def _joined(path: str, key: Any) -> str:
    key = key.name if isinstance(key, enum.Enum) else key
    return f"{path}.{key}" if path else str(key)


def _is_dataclass(item: Any) -> bool:
    return dataclasses.is_dataclass(item) and not isinstance(item, type)


def check_indices(x: Tensor, limits: Sequence[Mapping[str, Any]], subject: str, *, alike: bool) -> None:
    """Raise UsageError P0543 for a number of an entry that selects no row of a table, or no class of a loss.

    Eager torch stops there as well; ranks that hold a part of a table take such a number for one of another rank.
    """
    for limit in limits:
        slices = limit.get("part", ())
        if slices is None:  # the part is unknown
            continue
        part, least, below = x, limit.get("least", 0), limit["below"]
        for dim, start, stop in slices:
            part = part.narrow(dim, start, stop - start)
        outside = (part < least) | (part >= below)
        if "ignored" in limit:
            outside &= part != limit["ignored"]
        if outside.any():
            ignored = f", or are {limit['ignored']}" if "ignored" in limit else ""
            cause = f"{subject} has the number {part[outside][0]}, which selects none of {below:,} rows or classes"
            raise UsageError("P0543", cause, f"such numbers are {least:,} to {below - 1:,}{ignored}", alike=alike)
