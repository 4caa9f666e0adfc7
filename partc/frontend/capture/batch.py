"""The batch of a trace: its entries, checked, and one of the equal parts into which it is divided."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partc.errors import PartcError, first_line
from partc.frontend.model_files.model_file import user_line
from partc.quoting import encodable
from partc.runtime.documents import Malformed
from partc.runtime.train.entries import batches_of_parts, constants_as_text, entries
from partc.runtime.train.precision import dtype_held
from partc.torch_private import FakeTensorMode, without_modes


def made_batch(make: Callable[[], Any], path: Path | None) -> tuple[Any, dict[str, Any]]:
    """The batch, and its entries by path. Raises PartcError P0205."""
    try:
        try:
            batch = make()
        except Exception:  # code that reads values, such as a DataLoader's order, needs tensors with memory
            with without_modes():
                batch = make()
    except (Exception, SystemExit) as error:
        raise PartcError(
            "P0205", f"batch() fails: {type(error).__name__}: {first_line(error)}", source=user_line(error, path)
        ) from error
    try:
        found = entries(batch)
    except Malformed as error:
        help = "return the whole batch: a tensor, or dicts, lists, tuples and dataclasses of tensors, numbers and text"
        raise PartcError("P0205", f"the batch of batch() {error}", help=help) from error
    for name, x in found.items():
        _check_entry(name, x)
    return batch, found


def _check_entry(name: str, x: Any) -> None:
    """Check that an entry can be distributed over ranks. Raises PartcError P0205."""
    if not encodable(name):
        raise PartcError(
            "P0205", f"batch() names an entry {name!a}, which UTF-8 cannot encode", help="give it another name"
        )
    if not isinstance(x, Tensor):
        return
    wrong = None
    if x.layout is not torch.strided:
        wrong = "is sparse"
    elif x.device.type != "cpu":
        wrong = f"is on {x.device.type}"
    elif x.numel() == 0:
        wrong = f"is empty: its shape is {tuple(x.shape)}"
    if wrong is not None:
        raise PartcError("P0205", f"batch() makes {name!r}, which {wrong}", help="entries are dense CPU tensors")


def fake_batch(tensors: Mapping[str, Tensor], mode: FakeTensorMode, dtype: torch.dtype) -> dict[str, Tensor]:
    cast = {name: x.to(dtype_held(x.dtype, dtype)) for name, x in tensors.items()}
    # Entries that share one tensor would be traced as one input.
    return {name: torch.empty_like(mode.from_tensor(x)) if not _is_fake(x) else x.clone() for name, x in cast.items()}


def example_count(batch: Mapping[str, Tensor]) -> int:
    """The number of examples: the rows of the first entry that has rows; 0 without such an entry."""
    return next((x.shape[0] for x in batch.values() if x.dim()), 0)


def first_part(batch: dict[str, Tensor], parts: int) -> dict[str, Tensor]:
    """The first of `parts` equal parts of every entry that is as long as the batch."""
    rows = example_count(batch)
    if rows % parts:
        raise PartcError(
            "P0401",
            f"a batch of {rows} does not divide into {parts} microbatches",
            help=f"make it a multiple of {parts}, or lower --microbatches",
        )
    return {
        name: x[: rows // parts].clone() if parts > 1 and x.dim() and x.shape[0] == rows else x
        for name, x in batch.items()
    }


def form_of_part(batch: Any, rows: int, parts: int) -> Any:
    """The batch with the constants of one of `parts` equal parts.

    Raises PartcError P0401 if the parts have different constants, as one program computes all of them.
    """
    forms = batches_of_parts(batch, rows, parts)
    texts = [constants_as_text(entries(form)) for form in forms]
    for text in texts[1:]:
        for name, constant in text.items():
            if constant != texts[0][name]:
                raise PartcError(
                    "P0401",
                    f"each of {parts} microbatches is a batch of its own, and the list of the entry {name} has other "
                    f"constants in the later ones: {texts[0][name]} and {constant}",
                    help="make the list a tensor, or a tuple if it is not about examples, or use --microbatches 1",
                )
    return forms[0]


def rows_read_whole(batch: Mapping[str, Tensor], whole: Iterable[str]) -> Iterator[str]:
    """A sentence for each of the `whole` entries, which no part cuts, that seems to have several rows an example."""
    examples = example_count(batch)
    for name in whole:
        rows = batch[name].shape[0] if batch[name].dim() else 0
        if rows > examples and rows % examples == 0:
            each = rows // examples
            yield f"Each microbatch reads all {rows} rows of the entry {name}, {each} for each example."


def integer_parts(make: Callable[[], Any], parts: int) -> tuple[dict[str, Tensor], ...]:
    """The integer entries of every part of the batch."""
    with without_modes():
        every = {name: x for name, x in entries(make()).items() if isinstance(x, Tensor)}
        rows = example_count(every)
        cut = {
            name: x.chunk(parts) if x.dim() and x.shape[0] == rows else (x,) * parts
            for name, x in every.items()
            if not (x.is_floating_point() or x.is_complex() or _is_fake(x))
        }
        return tuple({name: pieces[part] for name, pieces in cut.items()} for part in range(parts))


def _is_fake(x: Tensor) -> bool:
    return hasattr(x, "fake_mode")
