"""The devices of ranks: a GPU for each rank, the CPU for all, or one GPU for the virtual ranks of a process."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Literal

import torch

from ..errors import UsageError
from .agreement import Together

# The number of a process' hardware queues on its GPU (default 8). Streams that share a queue wait for each other, so
# that a receive posted ahead might wait for a later send.
QUEUES = ("CUDA_DEVICE_MAX_CONNECTIONS", "32")

Wanted = Literal["auto", "cpu", "cuda"]
WANTED: tuple[Wanted, ...] = ("auto", "cpu", "cuda")


def own_device(wanted: Wanted, together: Together, environment: MutableMapping[str, str] | None = None) -> torch.device:
    """This process's own GPU if all processes have one, the CPU if none has. Raises UsageError P0540 on all ranks
    otherwise.

    Sets `QUEUES` in the environment, which CUDA reads when it starts.
    """
    environment = os.environ if environment is None else environment
    environment.setdefault(*QUEUES)
    count = 0 if wanted == "cpu" else torch.cuda.device_count()
    place = int(environment.get("LOCAL_RANK", "0"))
    index = place if place < count else 0 if count == 1 else None  # a launcher may show each process only its own GPU
    here = "cpu" if count == 0 else "cuda"
    first = together.broadcast(here)
    problem = ""
    if here != first or (wanted == "cuda" and count == 0):
        sees = f"{count} GPUs" if count else "no GPU"
        problem = f"rank {together.rank} ({hostname()}) sees {sees}" + (
            f", and rank 0 {_sight(first)}" * (here != first)
        )
    elif count and index is None:
        problem = f"rank {together.rank} is process {place} of {hostname()}, where it sees {count} GPUs"
    elif count and index is not None:
        problem = _other_user(index, together)
    problem = together.first_problem(problem)
    if problem:
        raise UsageError(
            "P0540",
            f"not every rank has a GPU of its own: {problem}",
            "start as many processes on each machine as it has GPUs, or train on CPUs with --device cpu",
            alike=True,
        )
    if index is None or count == 0:
        return torch.device("cpu")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def shared_device(wanted: Wanted) -> torch.device:
    """The device of all virtual ranks: the CPU, unless a GPU is `wanted`. Raises UsageError P0540 without a GPU."""
    if wanted != "cuda":
        return torch.device("cpu")
    if torch.cuda.device_count() == 0:
        raise UsageError("P0540", "this process sees no GPU", "leave out --device cuda", alike=True)
    return torch.device("cuda", 0)


def _other_user(index: int, together: Together) -> str:
    """A description of another rank that uses this GPU; '' if none does."""
    if together.size == 1:
        return ""
    gpu = str(torch.cuda.get_device_properties(index).uuid)
    other = together.claimed(gpu)
    return (
        f"ranks {other} and {together.rank} ({hostname()}) both see one alone, {gpu}" if other != together.rank else ""
    )


def _sight(backend: str) -> str:
    return "some" if backend == "cuda" else "none"


def hostname() -> str:
    """The name of this machine."""
    return os.uname().nodename
