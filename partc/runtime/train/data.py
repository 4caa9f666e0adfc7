"""The batches of a training: the same in every run, cut to this rank and to microbatches.

The model file's `data` is a function of the step, an iterable, or a function that returns one. Every rank that needs
the batches of an iterable reads them in order; a checkpoint keeps the position. A token file takes the place of `data`.
"""

from __future__ import annotations

import importlib.util
import inspect
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from ..documents import Malformed
from ..errors import UsageError
from ..layout import Shard, microbatch_part
from .entries import check_indices, constants_as_text, entries, rebuilt_batch, short_text
from .examples import ExampleRows, as_entry, batch_rows, is_stream, is_table
from .position import decoded, encoded
from .precision import as_real, dtype_held
from .tokens import TokenFile, TokenRows, ordered

Say = Callable[[str], None]
_APART = 1 << 40  # the number from which on batches are not used by any training
_KEPT = 80  # the number of stored batch positions: more than are read ahead


def load_model_file(path: Path) -> ModuleType:
    """Import the package's copy of the user's model file, which may import modules from `sources/`."""
    sys.path.insert(0, str(path.parent / "sources"))
    spec = importlib.util.spec_from_file_location("partc_model_file", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def call_with_options(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Call a function of the model file with those options that it accepts."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return function(**options)
    names = {parameter.name for parameter in parameters}
    return function(**{name: value for name, value in options.items() if name in names})


def global_batch(
    module: ModuleType,
    options: Mapping[str, Any],
    *,
    seed: int,
    step: int,
    dtype: torch.dtype,
    name: str = "data",
    first: int = 0,
) -> Any:
    """The whole batch of a step: `data(step)` if the model file has it, else `batch()` under the step's own seed.

    Both receive the options that they accept. `name` is the function's name if it is not `data`; seeds are numbered
    from `first`. Raises UsageError P0530 if `data` fails.
    """
    with _seeded(seed, first + step):
        batch = (
            _call_user(module, name, step, lambda: call_with_options(partial(getattr(module, name), step), options))
            if hasattr(module, name)
            else call_with_options(module.batch, options)
        )
    return _cast(batch, dtype)


def takes_step(data: Any) -> bool:
    """Whether a model file's `data` is a function of the step, rather than an iterable or a function that returns
    one.
    """
    if hasattr(data, "__iter__") or not callable(data):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first = next(iter(inspect.signature(data).parameters.values()), None)
    if first is None or first.kind not in positional:
        return False
    return first.name == "step" or first.default is inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Tokens:
    """A token file, the type of its numbers if it has no header, and whether labels are the `next` tokens or the
    `same`.
    """

    path: str
    dtype: str | None = None
    labels: str | None = None
    shuffles: bool = True


class BatchSource(Protocol):
    """The batches of a training by number."""

    def batch(self, number: int) -> Any:
        """A whole batch, in the user's own form."""

    def part(
        self, number: int, inputs: Mapping[str, Shard], sizes: Mapping[str, int], coordinate: Mapping[str, int]
    ) -> dict[str, Tensor]:
        """A rank's part of the entries that its stages read."""

    def position(self, number: int) -> str:
        """The position behind a batch, for a checkpoint; '' if the batch's number determines it."""


class MadeWhole:
    """Batches that are created whole, by a function of their number; the last `kept` stay for other ranks of this
    process.

    `plan` describes the entries; every batch must have them. Raises UsageError P0543.
    """

    def __init__(self, make: Callable[[int], Any], plan: Mapping[str, Any], name: str, *, kept: int) -> None:
        self._make, self._plan, self._name, self._kept = make, plan, name, kept
        self._held: dict[int, tuple[Any, dict[str, Tensor]]] = {}

    def batch(self, number: int) -> Any:
        return self._entries(number)[0]

    def part(
        self, number: int, inputs: Mapping[str, Shard], sizes: Mapping[str, int], coordinate: Mapping[str, int]
    ) -> dict[str, Tensor]:
        return own_part(self._entries(number)[1], inputs, sizes, coordinate) if inputs else {}

    def position(self, number: int) -> str:
        return ""

    def _entries(self, number: int) -> tuple[Any, dict[str, Tensor]]:
        found = self._held.get(number)
        if found is None:
            batch = self._make(number)
            found = batch, fitting_batch(batch, self._plan, f"batch {number} of {self._name}")
            self._held[number] = found
            for old in sorted(self._held)[: len(self._held) - self._kept]:
                del self._held[old]
        return found


class InOrder(MadeWhole):
    """The batches of an iterable, in order. Every pass over it is an epoch; `again`: another epoch may follow.

    If it has `state_dict` and `load_state_dict` (like torchdata's StatefulDataLoader), it continues from `state` behind
    the first `start` batches. Any other iterable is read again from the beginning. Raises UsageError P0530 (it fails),
    P0543 (a batch of another form) and P0544 (it ends).
    """

    def __init__(
        self,
        module: ModuleType,
        plan: Mapping[str, Any],
        *,
        name: str,
        seed: int,
        dtype: torch.dtype,
        kept: int,
        again: bool,
        start: int,
        state: str,
        say: Say,
        made: Any,
    ) -> None:
        """`made` is the iterable, if it already exists."""
        super().__init__(self._read, plan, name, kept=kept)
        self._shards: dict[str, Shard] | None = None  # the shards of the entries that a stream of examples fills
        self._module, self._seed, self._dtype, self._again = module, seed, dtype, again
        self._say = say
        data = getattr(module, name)
        make = lambda: call_with_options(data, plan["options"])  # noqa: E731
        given = hasattr(data, "__iter__")
        self._iterable = made
        # Creates the iterator of a further epoch.
        self._renew = make if not given and hasattr(self._iterable, "__next__") else None
        if not hasattr(self._iterable, "__iter__"):
            kind = type(self._iterable).__name__
            help = "data is data(step), an iterable of batches, or a function that returns one"
            raise UsageError(
                "P0543", f"{name} of the model file gives {kind}, which is not an iterable", help, alike=True
            )
        if is_stream(self._iterable):
            self._shards = {entry: Shard(kind["dtype"] + kind["layout"]) for entry, kind in plan["inputs"].items()}
            with _seeded(seed, 0):
                self._form = call_with_options(module.batch, plan["options"])
            self._iterable = self._iterable.batch(batch_rows(self._shards), drop_last_batch=True)
        self._next, self._epoch, self._since = 0, 0, 0
        self._iterator: Iterator[Any] | None = None
        self._positions: dict[int, str] = {}
        protocol = ("state_dict", "load_state_dict")
        self._stateful = all(callable(getattr(self._iterable, name, None)) for name in protocol)
        if start and state and self._stateful:
            self._next = start
            self._epoch, self._since, found = _restored(state)
            with _seeded(seed, start):
                self._start_epoch(lambda: self._iterable.load_state_dict(found))
        elif start:
            say(f"data has no state to restore: its first {start:,} batches are read again and skipped")

    def position(self, number: int) -> str:
        return self._positions.get(number, "")

    def _read(self, number: int) -> Any:
        while True:
            with _seeded(self._seed, self._next):
                batch = _call_user(self._module, self._name, self._next, self._next_item)
                self._next += 1
                if self._stateful:
                    self._keep_position()
            if self._next > number:
                return _cast(self._entry_form(batch), self._dtype)

    def _entry_form(self, batch: Any) -> Any:
        """A batch of a stream of examples, in the form of batch()."""
        if self._shards is None:
            return batch
        rows = batch_rows(self._shards)
        absent = [name for name in self._shards if name not in batch]
        if absent:
            cause = f"{self._name} of the model file has no column {absent[0]!r}"
            raise _unfit(cause, "name columns like the entries of batch(): rename_column")
        found = {name: as_entry(batch[name], name, shard, rows) for name, shard in self._shards.items()}
        return rebuilt_batch(self._form, found)

    def _next_item(self) -> Any:
        if self._iterator is None:
            self._start_epoch()
        assert self._iterator is not None
        for batch in self._iterator:
            self._since += 1
            return batch
        if not self._again or not self._since or (self._renew is None and self._iterator is self._iterable):
            raise UsageError(
                "P0544",
                f"{self._name} of the model file ends after {self._next:,} batch{'es' * (self._next != 1)}",
                "--data-end repeat starts it again, if it can be read twice; --steps and --accumulate count batches",
                alike=True,
            )
        if self._renew is not None:
            self._iterable = self._renew()
        self._epoch, self._since, self._iterator = self._epoch + 1, 0, None
        return self._next_item()

    def _start_epoch(self, prepare: Callable[[], object] = lambda: None) -> None:
        """Start an epoch: create its iterator."""
        for each in (self._iterable, getattr(self._iterable, "sampler", None)):
            set_epoch = getattr(each, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self._epoch)
        prepare()
        self._iterator = iter(self._iterable)

    def _keep_position(self) -> None:
        try:
            self._positions[self._next - 1] = encoded((self._epoch, self._since, self._iterable.state_dict()))
        except Malformed as error:
            self._stateful = False
            self._say(f"data's state {error}, which no checkpoint can hold: --resume will read its batches again")
        self._positions.pop(self._next - 1 - _KEPT, None)


def _restored(position: str) -> tuple[int, int, Any]:
    """Decode a position: the epoch, the number of batches read in it, and the iterable's state."""
    help = "resume from an older one; nothing was changed"
    try:
        found = decoded(position)
    except Malformed as error:
        raise UsageError("P0524", f"the checkpoint's position {error}", help, alike=True) from None
    match found:
        case (int(epoch), int(since), state):
            return epoch, since, state
    raise UsageError("P0524", "the checkpoint's position has no epoch", help, alike=True)


def source(
    module: ModuleType,
    plan: Mapping[str, Any],
    *,
    seed: int,
    dtype: torch.dtype,
    kept: int = 0,
    again: bool = True,
    start: int = 0,
    state: str = "",
    say: Say = lambda line: None,
    tokens: Tokens | None = None,
    name: str = "data",
) -> BatchSource:
    """The batches of a token file, of the model file's `name`, or of `batch()`; `start` of them have already been read.
    Raises UsageError P0545 if a token file cannot be used.
    """
    how: dict[str, Any]
    if tokens is not None:
        with _seeded(seed, 0):
            form = call_with_options(module.batch, plan["options"])
        names = ordered(plan)
        shifts = names[-1].split(".")[-1] == "labels" and not hasattr(module, "loss")
        labels = tokens.labels or ("same" if shifts else "next")
        file = TokenFile(Path(tokens.path), tokens.dtype)
        how = {"seed": seed, "labels": labels, "again": again, "shuffles": tokens.shuffles}
        rows = TokenRows(file, plan, form, **how)
        say(str(rows))
        return rows
    if hasattr(module, name) and not takes_step(getattr(module, name)):
        data = getattr(module, name)
        if not hasattr(data, "__iter__"):
            with _seeded(seed, 0):
                data = _call_user(module, name, 0, lambda: call_with_options(data, plan["options"]))
        if is_table(data):
            with _seeded(seed, 0):
                form = _cast(call_with_options(module.batch, plan["options"]), dtype)
            return ExampleRows(data, plan, form, name=name, again=again)
        how = {"name": name, "seed": seed, "dtype": dtype, "kept": kept}
        return InOrder(module, plan, **how, again=again, start=start, state=state, say=say, made=data)
    first = 0 if name == "data" else _APART
    how = {"seed": seed, "dtype": dtype, "name": name, "first": first}
    make = lambda number: global_batch(module, plan["options"], step=number, **how)  # noqa: E731
    return MadeWhole(make, plan, f"{name}(step)" if hasattr(module, name) else "batch()", kept=kept)


def fitting_batch(batch: Any, plan: Mapping[str, Any], what: str) -> dict[str, Tensor]:
    """The tensors of a batch by path, if it has the form that was compiled. Raises UsageError P0543."""
    try:
        found = entries(batch)
    except Malformed as error:
        raise _unfit(f"{what} {error}", "return what batch() returns") from None
    tensors = {name: as_real(x) for name, x in found.items() if isinstance(x, Tensor)}
    others = constants_as_text(found)
    expected: dict[str, str] = plan.get("constants", {})
    for name in (*plan["inputs"], *expected):
        if name not in found:
            raise _unfit(f"{what} has no entry {name!a}", "return what batch() returns")
    for name, x in tensors.items():
        if name not in plan["inputs"]:
            raise _unfit(f"{what} has the tensor {name!a}, and batch() has none there", "return what batch() returns")
        shape = Shard(plan["inputs"][name]["dtype"] + plan["inputs"][name]["layout"]).shape
        if tuple(x.shape) != shape:
            help = "every batch has the sizes of batch(); a DataLoader leaves a shorter last one out by drop_last=True"
            raise _unfit(f"{name!a} in {what} has shape {list(x.shape)}, of batch() {list(shape)}", help)
        check_indices(x, plan["inputs"][name].get("indices", ()), f"{name!a} in {what}", alike=True)
        largest = plan["inputs"][name].get("largest")
        for part in x.chunk(plan["microbatches"] if plan["repeated"] else 1) if largest is not None else ():
            if part.max() != largest:
                cause = f"the largest number of {name!a} in {what} is {part.max()}, of batch() {largest}"
                raise _unfit(cause, "the model reads this number in Python: the compiled one is part of the package")
    for name, text in others.items():
        if text != expected.get(name):
            known = f"{short_text(expected[name])} was compiled" if name in expected else "batch() has none there"
            help = "an entry that changes is a tensor; one that neither model nor loss reads can be left out"
            raise _unfit(f"{name!a} in {what} is {short_text(text)}, and {known}", help)
    return tensors


def _unfit(cause: str, help: str) -> UsageError:
    return UsageError("P0543", cause, help, alike=True)


@contextmanager
def _seeded(seed: int, number: int) -> Iterator[None]:
    """A context in which the host's generators (torch, Python, NumPy) are seeded for a batch, equally on all ranks."""
    own = seed * 1_000_003 + number + 1
    held = torch.get_rng_state()
    torch.default_generator.manual_seed(own)  # only the host's generator: a device may be recording
    try:
        with seeded_outside_torch(own):
            yield
    finally:
        torch.set_rng_state(held)


@contextmanager
def seeded_outside_torch(seed: int) -> Iterator[None]:
    """A context in which the generators of Python and NumPy are seeded."""
    numpy: Any = sys.modules.get("numpy")
    held = random.getstate(), numpy and numpy.random.get_state()
    random.seed(seed)
    if numpy:
        numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(held[0])
        if numpy:
            numpy.random.set_state(held[1])


def _call_user(module: ModuleType, name: str, number: int, ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except UsageError:
        raise
    except Exception as error:
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == module.__file__]
        where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
        cause = f"{name}({number}) of the model file fails{where}: {type(error).__name__}: {error}"
        raise UsageError("P0530", cause, "what it reads must be where each rank runs; -D options name it") from error


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating-point tensors in the dtype in which the package computes."""
    try:
        found = entries(batch)
    except Malformed:  # `fitting_batch` explains the error
        return batch
    held = {name: x.to(dtype_held(x.dtype, dtype)) for name, x in found.items() if isinstance(x, Tensor)}
    return rebuilt_batch(batch, {name: x for name, x in held.items() if x is not found[name]})


def local_batch(
    batch: Mapping[str, Tensor],
    inputs: Mapping[str, Shard],
    sizes: Mapping[str, int],
    coordinate: Mapping[str, int],
    count: int,
    device: torch.device,
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """This rank's part of the entries that its stages read, as a whole and in `count` microbatches."""
    local = {name: x.to(device) for name, x in own_part(batch, inputs, sizes, coordinate).items()}
    return local, in_microbatches(local, inputs, sizes, count)


def own_part(
    batch: Mapping[str, Tensor], inputs: Mapping[str, Shard], sizes: Mapping[str, int], coordinate: Mapping[str, int]
) -> dict[str, Tensor]:
    """This rank's part of the entries that its stages read, on the batch's device."""
    return {name: _unshared(shard.local(batch[name], sizes, coordinate)) for name, shard in inputs.items()}


def in_microbatches(
    local: Mapping[str, Tensor], inputs: Mapping[str, Shard], sizes: Mapping[str, int], count: int
) -> list[dict[str, Tensor]]:
    """A rank's part, divided into `count` microbatches."""
    return [
        {name: microbatch_part(x, inputs[name].dims, sizes, count, m).contiguous() for name, x in local.items()}
        for m in range(count)
    ]


def _unshared(part: Tensor) -> Tensor:
    """The part, copied if it is a view, which would keep the whole batch alive."""
    part = part.contiguous()
    return part if part.untyped_storage().nbytes() == part.nbytes else part.clone()
