"""Operations that couple the examples of a batch: microbatches share one batch, unless a model has such operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from partc.errors import PartcError

_Made = TypeVar("_Made")


def apart_if_coupled(make: Callable[[bool], _Made]) -> tuple[_Made, PartcError | None]:
    """The result of `make(False)`, for microbatches that share one batch, and None.

    If an operation couples the examples of the batch: the result of `make(True)`, for microbatches that are batches of
    their own, and the error P0402 that names the operation.
    """
    try:
        return make(False), None
    except PartcError as error:
        if error.code != "P0402":
            raise
        coupling = error.with_traceback(None)
    return make(True), coupling


def coupling_sentence(coupling: PartcError, microbatches: int) -> str:
    """A warning about microbatches that are batches of their own."""
    where = f"{coupling.source}: " if coupling.source else ""
    return (
        f"{where}{coupling.cause}. Each of the {microbatches} microbatches is a batch of its own: statistics are "
        "those of a microbatch, the loss is the mean of theirs, as where one device accumulates gradients (P0402)."
    )
