"""Recorded device work: run normally at first, then recorded once, and replayed.

A recording holds the device's operations and addresses, but no Python code and no numbers of the host. So values that
change from step to step are in memory that the host writes before a replay, and nothing inside may wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch

from ..errors import PeerLost, UsageError
from .sending import finish

WARM = 2  # the number of normal runs before the recording, in which allocations and compilations happen

T = TypeVar("T")


class RecordedGraph(Protocol):
    """One recording."""

    def capture(self, work: Callable[[], T]) -> T:
        """Record the device work of `work` without running it. Each replay rewrites its results."""

    def replay(self) -> None:
        """Run the recording."""

    def reset(self) -> None:
        """Discard the recording."""


class RecordedWork(Generic[T]):
    """A callable that runs the work; from its third call on it replays a recording, and returns the same tensors each
    time.
    """

    def __init__(self, work: Callable[[], T], graph: RecordedGraph) -> None:
        self._work = work
        self._graph = graph
        self._done = 0
        self._result: list[T] = []  # the result, after recording

    def __call__(self) -> T:
        if self._done < WARM:
            self._done += 1
            return self._work()
        if not self._result:
            self._result.append(self._graph.capture(self._work))
        self._graph.replay()
        return self._result[0]


class CudaGraph:
    """A CUDA graph, captured on the current stream; graphs run one after the other and share memory."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, work: Callable[[], T]) -> T:
        # Other threads (watchdog, checkpoints) may use the device meanwhile.
        here = torch.cuda.graph(self._graph, self._pool, torch.cuda.current_stream(), capture_error_mode="thread_local")
        try:
            with here:
                return work()
        except RuntimeError as error:
            # Ending a failed recording only reports that it failed; the cause is an earlier error.
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
def recording(wanted: bool, device: torch.device) -> Iterator[Callable[[], RecordedGraph] | None]:
    """A factory of graphs for the context, if they are wanted. Raises UsageError P0533."""
    if not wanted:
        yield None
    else:
        need_gpus(device.type == "cuda")
        with _cuda_graphs(device) as make:
            yield make


def need_gpus(there: bool) -> None:
    """Raise UsageError P0533 for processes without GPUs."""
    if not there:
        raise UsageError(
            "P0533",
            "a step cannot be recorded as CUDA graphs: it is not on GPUs here, each of a process of its own",
            "leave out --cuda-graphs, or add --no-cuda-graphs",
            alike=True,
        )


@contextmanager
def _cuda_graphs(device: torch.device) -> Iterator[Callable[[], RecordedGraph]]:
    """A context with a factory of graphs. They end with the context, because a communicator cannot be destroyed while a
    recording contains its work.

    The context runs on its own stream, since the default stream cannot be captured.
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
