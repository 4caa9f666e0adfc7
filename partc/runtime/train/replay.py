"""Building a model one tensor at a time: its constructor runs on fake tensors, and its operations are replayed.

`record` runs the constructor without memory and records its operations on every storage, in order. `Recording.replay`
repeats them with real memory and the same random draws: a storage is filled from its first relevant operation to its
last, passed on, and freed. If the constructor reads a value (`.item()`, a rejection loop), it is computed at once,
draws included.

Every rank replays the draws of the whole model, so their speed determines the start-up time of a large model. One
thread advances the generator from draw to draw. If the number of random words of a draw is known, it skips them without
computing numbers. Other threads compute the wanted tensors, each from the generator's state at its draw.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_private import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    storage_key,
    tree_flatten,
    tree_map_only,
    without_modes,
)
from .plain_tensors import with_registered_tensors
from .precision import as_real
from .without_values import WithoutValues, built_without_values

# Operations that overwrite their first argument without reading it.
_FILLS = frozenset(
    {
        "uniform_",
        "normal_",
        "zero_",
        "fill_",
        "random_",
        "exponential_",
        "log_normal_",
        "cauchy_",
        "geometric_",
        "copy_",
    }
)
_EMPTY = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted"})
# For each draw: 32-bit random words per element, and the number of elements drawn at a time.
_WORDS = {torch.float32: 1, torch.float64: 2, torch.bfloat16: 1, torch.float16: 1}
_NORMALS = 16
_SKIPPED = 1 << 16  # the number of words skipped at a time
MOST_WAITING = 1 << 28  # the most bytes of finished tensors that wait to be passed on
_RECORDING_STATE = 0x9A57C0DE  # a state of the generator that constructors do not set


class CannotReplay(Exception):
    """The constructor did something that cannot be replayed reliably."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a view of a storage."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, memory: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(memory, self.offset, self.shape, self.stride)

    @property
    def end(self) -> int:
        """The end of the view, in bytes of its storage."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return (self.offset + last + 1) * self.dtype.itemsize


@dataclass(slots=True, kw_only=True)
class RecordedOp:
    """One recorded operation: tensors in `args` and `kwargs` are views, results are in `results`."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    fills: int | None  # the storage that it overwrites completely
    results: tuple[View, ...]
    random: bool
    state: Tensor | None = None  # the generator's state before it, when known


@dataclass(slots=True)
class Recording:
    """The operations of a constructor, and its final parameters and buffers."""

    steps: list[RecordedOp] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)  # storage -> bytes
    constants: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    tensors: dict[str, View] = field(default_factory=dict)
    drawn: int = 0  # the number of steps whose draws have been made while recording
    state: Tensor = field(default_factory=torch.default_generator.get_state)  # the generator's state after these draws

    def replay(self, wanted: Collection[str], take: Callable[[str, Tensor], None], *, threads: int = 1) -> None:
        """Pass each wanted tensor to `take(name, tensor)`, and make the constructor's draws from the generator.

        `take` runs on the calling thread, in the order in which the constructor finished the tensors.
        """
        names: dict[int, list[str]] = {}
        for name, view in self.tensors.items():
            if name in wanted:
                names.setdefault(view.storage, []).append(name)
        live = self._live(set(names))
        last = {storage: -1 for storage in names}
        for index, step in enumerate(self.steps):
            if index in live:
                last.update(dict.fromkeys((*step.reads, *step.writes), index))
        ends: dict[int, list[int]] = {}
        for storage, index in last.items():
            ends.setdefault(index, []).append(storage)

        memory = dict(self.constants)
        with ThreadPoolExecutor(threads) as pool:
            workers = _Workers(pool)
            finished: deque[int] = deque()
            waiting = 0

            def hand_over() -> None:
                storage = finished.popleft()
                workers.wait((storage,))
                for name in names.get(storage, ()):
                    take(name, self.tensors[name].of(self._memory(memory, storage)))
                memory.pop(storage, None)

            for index in range(-1, len(self.steps)):
                if index >= 0:
                    self._step(index, index in live, memory, workers)
                for storage in ends.get(index, ()):
                    finished.append(storage)
                    waiting += self.sizes[storage]
                while waiting > MOST_WAITING:
                    waiting -= self.sizes[finished[0]]
                    hand_over()
            while finished:
                hand_over()
        torch.default_generator.set_state(self.state)

    def value(self, view: View) -> Tensor:
        """The value of a tensor at this point of the recording; draws that it depends on happen now."""
        live = self._live({view.storage})
        memory = dict(self.constants)
        outside = torch.default_generator.get_state()
        with ThreadPoolExecutor(1) as pool:
            workers = _Workers(pool)
            for index in range(len(self.steps)):
                self._step(index, index in live, memory, workers)
            workers.wait(self.sizes)
        torch.default_generator.set_state(outside)
        return view.of(self._memory(memory, view.storage))

    def _step(self, index: int, live: bool, memory: dict[int, torch.UntypedStorage], workers: _Workers) -> None:
        """Repeat a step, or only its draws, and track the generator's state."""
        step, generator = self.steps[index], torch.default_generator
        first = index >= self.drawn
        if step.random and (first or live):
            step.state = self.state if step.state is None else step.state
            generator.set_state(step.state)
        touched = {*step.reads, *step.writes}
        if live and step.random and step.fills is None:
            workers.wait(touched)
            self._run(step, memory)
        elif live:
            workers.submit(touched, functools.partial(self._run, step, memory, step.state))
        if step.random and first and (step.fills is not None or not live):
            self._draw(step)
        if first:
            self.drawn = index + 1
            if step.random:
                self.state = generator.get_state()

    def _live(self, needed: set[int]) -> set[int]:
        """The steps that determine the final contents of the needed storages.

        Includes steps whose draws may depend on values that they read, because scratch memory cannot replace these.
        """
        needed, live = set(needed), set()
        for index in range(len(self.steps) - 1, -1, -1):
            step = self.steps[index]
            if needed.isdisjoint(step.writes) and not (step.random and step.fills is None):
                continue
            live.add(index)
            fresh = {view.storage for view in step.results} - set(step.reads)
            needed -= fresh
            if step.fills is not None:
                needed.discard(step.fills)
            needed.update(step.reads)
        return live

    def _memory(self, memory: dict[int, torch.UntypedStorage], storage: int) -> torch.UntypedStorage:
        if storage not in memory:
            memory[storage] = torch.zeros(self.sizes[storage], dtype=torch.uint8).untyped_storage()
        return memory[storage]

    def _run(self, step: RecordedOp, memory: dict[int, torch.UntypedStorage], state: Tensor | None = None) -> None:
        """Repeat a step, with the default generator or with one in the given state."""
        real = lambda view: view.of(self._memory(memory, view.storage))  # noqa: E731
        args, kwargs = tree_map_only(View, real, (step.args, step.kwargs))
        if state is not None:
            own = torch.Generator()
            own.set_state(state)
            kwargs = {**kwargs, "generator": own}
        flat, _ = tree_flatten(step.operation(*args, **kwargs))
        results = [x for x in flat if isinstance(x, Tensor)]
        for x, view in zip(results, step.results, strict=True):
            if view.storage in step.reads or view.storage == step.fills:
                continue
            if (tuple(x.shape), x.stride(), x.storage_offset()) == (view.shape, view.stride, view.offset):
                memory[view.storage] = x.untyped_storage()
            else:
                view.of(self._memory(memory, view.storage)).copy_(x)

    def _draw(self, step: RecordedOp) -> None:
        """Advance the default generator past a draw whose numbers are not needed."""
        if step.fills is not None:
            target, name = step.args[0], step.operation.overloadpacket.__name__
            words = random_words(name, target.dtype, math.prod(target.shape), _is_dense(target))
            if words is not None and draws_as_predicted(name, target.dtype):
                skip_words(torch.default_generator, words)
                return
        scratch = lambda view: torch.empty_strided(view.shape, view.stride, dtype=view.dtype)  # noqa: E731
        args, kwargs = tree_map_only(View, scratch, (step.args, step.kwargs))
        step.operation(*args, **kwargs)


class _Workers:
    """Threads that run tasks on storages; the tasks of one storage run in order."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._last: dict[int, Future[None]] = {}

    def submit(self, storages: Collection[int], task: Callable[[], None]) -> None:
        before = {future for storage in storages if (future := self._last.get(storage)) is not None}

        def run() -> None:
            for future in before:  # submitted earlier, so some thread is working on it
                future.result()
            with torch.no_grad():
                task()

        future = self._pool.submit(run)
        self._last.update(dict.fromkeys(storages, future))

    def wait(self, storages: Iterable[int]) -> None:
        """Wait for all tasks on the storages. Raises the error of a task."""
        for storage in storages:
            if (future := self._last.pop(storage, None)) is not None:
                future.result()


def _is_dense(view: View) -> bool:
    expected = 1
    for size, stride in zip(reversed(view.shape), reversed(view.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def random_words(name: str, dtype: torch.dtype, count: int, dense: bool) -> int | None:
    """The number of random words of a draw of `count` elements; None if unknown."""
    if name == "uniform_" and dtype in _WORDS:
        return count * _WORDS[dtype]
    if name == "normal_" and dtype in _WORDS and dense and count >= _NORMALS:
        # The last, incomplete group of elements is drawn again as a whole group (padded in 16 bits).
        rest = count % _NORMALS
        more = 0 if not rest else _NORMALS if dtype.itemsize > 2 else _NORMALS - rest
        return (count + more) * _WORDS[dtype]
    return None


@functools.cache
def draws_as_predicted(name: str, dtype: torch.dtype) -> bool:
    """Whether this version of torch uses as many random words for a draw as `random_words` predicts."""
    drawn, skipped = torch.Generator(), torch.Generator()
    for count in (16, 35, 64):
        drawn.manual_seed(count)
        skipped.manual_seed(count)
        getattr(torch.empty(count, dtype=dtype), name)(generator=drawn)
        skip_words(skipped, random_words(name, dtype, count, True) or 0)
        if not torch.equal(drawn.get_state(), skipped.get_state()):
            return False
    return True


def skip_words(generator: torch.Generator, words: int) -> None:
    """Advance a generator by this number of words: drawing one byte takes one word."""
    scratch = torch.empty(min(words, _SKIPPED), dtype=torch.uint8)
    for start in range(0, words, _SKIPPED):
        scratch[: words - start].random_(generator=generator)


class _Recorder(TorchDispatchMode):
    """Records each operation, then lets the fake mode below compute the shape of its result."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording
        self._kept: list[Tensor] = []  # keeps storages alive, so that ids are not reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None:
            raise CannotReplay("the constructor draws from a generator of its own")
        recording, name = self.recording, func.overloadpacket.__name__
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        views = [self._view(x) for x in inputs]
        written = _written(func, args, kwargs)
        if any(not isinstance(x, FakeTensor) for x in written):
            raise CannotReplay("the constructor writes to a tensor that it did not make")
        if name == "_local_scalar_dense":
            with without_modes():
                return recording.value(views[0]).item()
        seen_args, seen_kwargs = tree_map_only(Tensor, self._view, (args, kwargs))

        result = func(*args, **kwargs)

        outputs = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]
        results = tuple(self._view(x) for x in outputs)
        known = {view.storage for view in views}
        writes = {storage_key(x) for x in written} | {view.storage for view in results if view.storage not in known}
        random = torch.Tag.nondeterministic_seeded in func.tags
        if writes and name not in _EMPTY:
            fills = self._fills(name, args, views)
            reads = {view.storage for view in views[1:]} if fills is not None else known
            recording.steps.append(
                RecordedOp(
                    operation=func,
                    args=seen_args,
                    kwargs=seen_kwargs,
                    reads=tuple(sorted(reads)),
                    writes=tuple(sorted(writes)),
                    fills=fills,
                    results=results,
                    random=random,
                )
            )
        return result

    def _fills(self, name: str, args: tuple[Any, ...], views: list[View]) -> int | None:
        if name not in _FILLS or not isinstance(args[0], Tensor):
            return None
        target = views[0]
        whole = (
            target.end == self.recording.sizes[target.storage] and args[0].numel() * target.dtype.itemsize == target.end
        )
        return target.storage if whole and all(view.storage != target.storage for view in views[1:]) else None

    def _view(self, x: Tensor) -> View:
        storage = storage_key(x)
        if storage not in self.recording.sizes:
            self._kept.append(x)
            self.recording.sizes[storage] = x.untyped_storage().nbytes()
            if not isinstance(x, FakeTensor):
                self.recording.constants[storage] = x.untyped_storage()
        return View(storage, x.dtype, tuple(x.shape), tuple(x.stride()), int(x.storage_offset()))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments to which an operation writes."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [x for x in tree_flatten(value)[0] if isinstance(x, Tensor)]
    return found


def record(build: Callable[[], nn.Module], seed: int) -> Recording:
    """Run a constructor on fake tensors. Raises CannotReplay, or the constructor's own errors on fake tensors."""
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    recording = Recording()
    generator.manual_seed(_RECORDING_STATE)
    untouched = generator.get_state()
    try:
        recorder = _Recorder(recording)
        with FakeTensorMode(allow_non_fake_inputs=True), recorder, _Surroundings():
            model = with_registered_tensors(built_without_values(build, _OnFakeTensors()))
            for name, x in named_tensors(model):
                recording.tensors[name] = recorder._view(x)
        if not torch.equal(generator.get_state(), untouched):
            raise CannotReplay("the constructor sets the generator's state")
    finally:
        generator.set_state(before)
    return recording


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers, under each of their names; complex ones as pairs of real numbers."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, as_real(parameter.detach() if not isinstance(parameter, FakeTensor) else parameter)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield name, as_real(buffer)


class _OnFakeTensors(WithoutValues):
    """Keeps any error of a torch function. The model is then built on real tensors, which may raise it too."""

    def needs_values(self, error: Exception) -> bool:
        return True


class _Surroundings:
    """The environment of a constructor while it is recorded.

    The default generator cannot be saved, set or seeded: fake tensors do not draw, so its state is meaningless.
    `module.to(...)` replaces a parameter's data, as on real tensors; on fake tensors torch would try to swap them, and
    fail.
    """

    _REFUSED = ("manual_seed", "seed", "get_rng_state", "set_rng_state", "initial_seed")

    def __enter__(self) -> None:
        def refuse(*args: object, **kwargs: object) -> None:
            raise CannotReplay("the constructor reads or sets the generator's state")

        def set_data(parameter: Tensor, converted: Tensor) -> None:
            parameter.data = converted.data

        replaced = [(module, name, refuse) for module in (torch, torch.random) for name in self._REFUSED]
        self._saved = []
        for module, name, function in (*replaced, (torch.utils, "swap_tensors", set_data)):
            self._saved.append((module, name, getattr(module, name)))
            setattr(module, name, function)

    def __exit__(self, *exception: object) -> None:
        for module, name, function in self._saved:
            setattr(module, name, function)
