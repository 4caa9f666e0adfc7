"""Regions' functions compiled by torch.compile, which fuses the operations between collectives.

Collectives, random numbers (which depend on an element's position) and attention (whose kernel is chosen at the call)
are not compiled: graphs break before them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from .. import random
from ..comm.comm import Axis, Comm, Pending
from ..loads import Loads
from ..torch_private import recompile_limit
from . import attention, attention_rows, functional

Function = TypeVar("Function", bound=Callable[..., object])
# One function serves every layer, every rank in the process, the training step and its rehearsal.
MOST_VARIANTS = 256


def compiled(function: Function) -> Function:
    """The function, compiled at its first call."""
    made: Function = torch.compile(function)  # type: ignore[assignment]
    return made


def _as_they_are() -> None:
    methods = [(Axis, name) for name, held in vars(Axis).items() if callable(held) and not name.startswith("_")]
    for owner, name in (
        *methods,
        (Comm, "draw"),
        (Pending, "wait"),
        (Pending, "then"),
        (Loads, "count"),
        (Loads, "note_received"),
    ):
        setattr(owner, name, torch.compiler.disable(getattr(owner, name)))
    for name, function in vars(functional).copy().items():
        if getattr(function, "__module__", "") in (attention.__name__, attention_rows.__name__, random.__name__):
            setattr(functional, name, torch.compiler.disable(function))


recompile_limit(MOST_VARIANTS)
_as_they_are()
