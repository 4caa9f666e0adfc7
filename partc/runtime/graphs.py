"""Work that is the same for the device in every step: done as it is at first, then recorded once, and repeated.

A recording holds what the device does, and where: neither Python nor the host's numbers are in it. So what changes from
step to step stands in memory that the host writes before a repetition, and nothing inside may wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch

from .errors import PeerLost, UsageError
from .sending import finish

WARM = 2  # times that work is done as it is: what is made once is there by then, and kernels are compiled

T = TypeVar("T")


class Graph(Protocol):
    """One recording."""

    def capture(self, work: Callable[[], T]) -> T:
        """Remember what `work` does on the device, without doing it. What it returns, each replay writes."""

    def replay(self) -> None:
        """Do it."""

    def reset(self) -> None:
        """Forget it."""


class Repeated(Generic[T]):
    """Called, does the work; from its third call on as a repetition, which returns the same tensors each time."""

    def __init__(self, work: Callable[[], T], graph: Graph) -> None:
        self._work = work
        self._graph = graph
        self._done = 0
        self._result: list[T] = []  # once it is recorded

    def __call__(self) -> T:
        if self._done < WARM:
            self._done += 1
            return self._work()
        if not self._result:
            self._result.append(self._graph.capture(self._work))
        self._graph.replay()
        return self._result[0]


class CudaGraph:
    """One of CUDA's, captured on the current stream, with other graphs' memory: they run one after the other."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, work: Callable[[], T]) -> T:
        # Threads beside this one may ask the device what they like meanwhile: those that watch and write checkpoints.
        here = torch.cuda.graph(self._graph, self._pool, torch.cuda.current_stream(), capture_error_mode="thread_local")
        try:
            with here:
                return work()
        except RuntimeError as error:
            # The end of a recording that failed says only that it did: the cause came before it.
            cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
            if isinstance(cause, PeerLost):
                raise cause from None
            raise UsageError(
                "P0534",
                f"a step cannot be recorded as CUDA graphs: {str(cause).strip().partition(chr(10))[0]}",
                "leave out --cuda-graphs, or add --no-cuda-graphs: the host has a part in some operation",
            ) from cause

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self._graph.reset()


@contextmanager
def recording(wanted: bool, device: torch.device) -> Iterator[Callable[[], Graph] | None]:
    """What makes graphs inside, if they are wanted. Raises UsageError P0533."""
    if not wanted:
        yield None
    else:
        need_gpus(device.type == "cuda")
        with _cuda_graphs(device) as make:
            yield make


def need_gpus(there: bool) -> None:
    """Raises UsageError P0533 where processes have no GPUs."""
    if not there:
        raise UsageError(
            "P0533",
            "a step cannot be recorded as CUDA graphs: it is not on GPUs here, each of a process of its own",
            "leave out --cuda-graphs, or add --no-cuda-graphs",
            alike=True,
        )


@contextmanager
def _cuda_graphs(device: torch.device) -> Iterator[Callable[[], Graph]]:
    """Makes graphs, which end with the context: a communicator cannot be destroyed while a recording has its work.

    All that is done inside is on a stream of its own, as the default one cannot be captured.
    """
    before, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    stream.wait_stream(before)
    pool = torch.cuda.graph_pool_handle()
    made: list[CudaGraph] = []

    def make() -> CudaGraph:
        made.append(CudaGraph(pool))
        return made[-1]

    try:
        with torch.cuda.stream(stream):
            yield make
        before.wait_stream(stream)
        finish(device)
    finally:
        for graph in made:
            graph.reset()
