"""A stand-in for CUDA graphs on a CPU: a step's operations are recorded without being executed, and then replayed.

As on a GPU, a recording holds operations with the memory addresses of their operands and the host's numbers at that
time. Operations that wait for the device, or copy from the host, are refused. A replay reads and writes the same memory,
which must still exist: that of tensors made in the recording, and that of older ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_leaves

from partc.runtime.comm.comm import Pending
from partc.runtime.comm.virtual import VirtualAxis
from partc.runtime.torch_private import TorchDispatchMode, storage_key, without_modes

T = TypeVar("T")
EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
COPIES_FROM_HOST = frozenset({"lift_fresh", "lift_fresh_copy"})  # torch.tensor, torch.as_tensor
IGNORED = "profiler::"
_recording = threading.local()  # by thread, as ranks in one process are: the recording under way


class Refused(RuntimeError):
    """An operation that CUDA would refuse in a capture, or repeat wrongly in a replay."""


@dataclass(frozen=True)
class Place:
    """An operand that is older than the recording: not held by it."""

    storage: StorageWeakRef
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @property
    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise Refused("a replay reads or writes memory that has been freed since it was recorded")
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


@dataclass
class CpuGraph:
    """One recording of one rank."""

    nodes: list[Callable[[], None]] = field(default_factory=list)
    made: dict[int, Tensor] = field(default_factory=dict)  # by storage: what the recording made
    before: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # older memory, and what it held

    def capture(self, work: Callable[[], T]) -> T:
        _recording.now = self
        try:
            with Recorder(self):
                result = work()
        finally:
            _recording.now = None
            for x, held in self.before.values():
                x.untyped_storage().copy_(held.untyped_storage())
            self.before.clear()
        self.spoil()
        return result

    def replay(self) -> None:
        self.spoil()
        for node in self.nodes:
            node()

    def spoil(self) -> None:
        """Nothing may depend on what memory of the recording's held before a replay."""
        for x in self.made.values():
            x.untyped_storage().fill_(0xA5)

    def touches(self, *values: Any) -> None:
        """Before something is done for real: what it may write to is put back at the end."""
        for x in tree_leaves(values):
            if isinstance(x, Tensor) and storage_key(x) not in self.made and storage_key(x) not in self.before:
                whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
                self.before[storage_key(x)] = whole, whole.clone()

    def makes(self, values: Any) -> None:
        for x in tree_leaves(values):
            if isinstance(x, Tensor) and storage_key(x) not in self.before:
                self.made.setdefault(storage_key(x), x)

    def kept(self, values: Any) -> Callable[[], Any]:
        """Operands as they are for replays."""
        leaves, spec = tree_flatten(values)
        places = [self._place(x) if isinstance(x, Tensor) else x for x in leaves]
        return lambda: spec.unflatten([x.tensor if isinstance(x, Place) else x for x in places])

    def _place(self, x: Tensor) -> Tensor | Place:
        if storage_key(x) in self.made:
            return x
        return Place(StorageWeakRef(x.untyped_storage()), x.dtype, x.shape, x.stride(), x.storage_offset())


class Recorder(TorchDispatchMode):
    def __init__(self, graph: CpuGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name.startswith(IGNORED):
            return func(*args, **kwargs)
        _check(func, args)
        graph = self.graph
        graph.touches(args, kwargs)
        operands = graph.kept((args, kwargs))
        result = func(*args, **kwargs)
        graph.makes(result)
        if name.removeprefix("aten::") in EMPTY:
            return result
        outputs = graph.kept(result)

        def again() -> None:
            args, kwargs = operands()
            found = func(*args, **kwargs)
            for there, x in zip(tree_leaves(outputs()), tree_leaves(found), strict=True):
                if isinstance(x, Tensor) and x.data_ptr() != there.data_ptr():
                    there.copy_(x)

        if not func.is_view:
            graph.nodes.append(again)
        return result


def _check(func: Any, args: Any) -> None:
    name = func._schema.name.removeprefix("aten::")
    masked = name.startswith(("index", "_index")) and any(
        isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in tree_leaves(args[1:2])
    )
    dynamic = torch.Tag.dynamic_output_shape in func.tags and not name.startswith("index")
    if torch.Tag.data_dependent_output in func.tags or dynamic or masked:
        raise Refused(f"{func} waits for the device")
    if name in COPIES_FROM_HOST or name == "_pin_memory":
        raise Refused(f"{func} copies from the host")
    if torch.Tag.nondeterministic_seeded in func.tags and "dropout" not in name and "attention" not in name:
        raise Refused(f"{func} draws from a generator of the host's")


@contextmanager
def cpu_graphs(monkeypatch: Any) -> Iterator[list[CpuGraph]]:
    """`--cuda-graphs` records like this; collectives of virtual ranks and kernels in Triton's interpreter, too."""
    from partc.runtime.train import train, training

    made: list[CpuGraph] = []

    @contextmanager
    def recording(wanted: bool, device: torch.device) -> Iterator[Callable[[], CpuGraph] | None]:
        def graph() -> CpuGraph:
            made.append(CpuGraph())
            return made[-1]

        yield graph if wanted else None

    monkeypatch.setattr(training, "recording", recording)
    monkeypatch.setattr(train, "need_gpus", lambda there: None)
    monkeypatch.setattr(VirtualAxis, "meet", _meeting(VirtualAxis.meet))
    try:
        from triton.runtime.interpreter import InterpretedFunction
    except ImportError:
        pass
    else:
        monkeypatch.setattr(InterpretedFunction, "run", _launching(InterpretedFunction.run), raising=False)
    yield made


def _meeting(meet: Any) -> Any:
    """A collective: started and waited for at the same places of every replay, by all ranks."""

    def recorded(axis: VirtualAxis, operation: str, x: Tensor, combine: Any) -> Pending[Tensor]:
        graph: CpuGraph | None = getattr(_recording, "now", None)
        if graph is None:
            return meet(axis, operation, x, combine)
        with without_modes():
            going = meet(axis, operation, x, combine)
        graph.touches(x)
        operand, again = graph.kept(x), []
        graph.nodes.append(lambda: again.append(meet(axis, operation, operand(), combine)))

        def finish() -> Tensor:
            with without_modes():
                result = going.wait().clone()
            graph.makes(result)
            graph.nodes.append(lambda: result.copy_(again.pop(0).wait()))
            return result

        return Pending(finish)

    return recorded


def _launching(run: Any) -> Any:
    def recorded(function: Any, *args: Any, grid: Any, warmup: Any, **kwargs: Any) -> Any:
        graph: CpuGraph | None = getattr(_recording, "now", None)
        if graph is None:
            return run(function, *args, grid=grid, warmup=warmup, **kwargs)
        with without_modes():
            graph.touches(args, kwargs)
            operands = graph.kept((args, kwargs))
            result = run(function, *args, grid=grid, warmup=warmup, **kwargs)

        def again() -> None:
            args, kwargs = operands()
            run(function, *args, grid=grid, warmup=warmup, **kwargs)

        graph.nodes.append(again)
        return result

    return recorded
