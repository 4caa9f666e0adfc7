"""Counts the memory behind tensors that have none: every storage from the operation that makes it to its end.

Tensors are those of the device meta: they have shapes and storages, which live as long as someone refers to them, and
no bytes. So whoever runs code on them learns what it would hold and when, from Python's own rules.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from partc.memory import Moment, Place, RankMemory, together
from partc.runtime.torch_private import storage_key, tree_flatten
from partc.torch_private import TorchDispatchMode


class Block:
    """Memory of one storage. Its category may become a more precise one while it lives."""

    __slots__ = ("bytes", "category", "name")

    def __init__(self, bytes: int, category: str, name: str) -> None:
        self.bytes = bytes
        self.category = category
        self.name = name


class Owned:
    """Holds a block without a tensor: the block ends with the last reference to this."""

    __slots__ = ("__weakref__", "block", "ledger")

    def __init__(self, ledger: Ledger, block: Block) -> None:
        self.ledger = ledger
        self.block = block

    def __del__(self) -> None:
        self.ledger.ends(self.block)


Sight = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]  # dtype, shape, stride, offset


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that nobody computes with for now: who holds its memory, and how it sees that."""

    owner: Owned | Tensor
    sight: Sight


def sight(x: Tensor) -> Sight:
    return x.dtype, tuple(x.shape), tuple(x.stride()), int(x.storage_offset())


@dataclass(frozen=True, slots=True)
class Surge:
    """What a stretch of code that has run before makes for itself: at most, where, and what that is."""

    bytes: int
    line: str
    op: str
    alive: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that is heard of while a function runs: "+" or "-" and a block, or "drop" and arguments' numbers."""

    kind: str
    what: Any
    line: str = ""
    op: str = ""


Entry = tuple[str, Block | Surge | None]  # "+" block, "-" block, "^" surge, "." at an action's start


class Ledger(TorchDispatchMode):
    """All storages that operations make inside it, by category and name.

    `category` and `name` are what new ones get. `action`, `call`, `line` say where the code is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.category, self.name = "temporaries", ""
        self.action = self.call = self.line = ""
        self.now = 0
        self.peak = -1
        self.at = Place(action="")
        self.peaks: dict[tuple[str, str], int] = {}  # the most in every action and call
        self._found: dict[int, tuple[object, Block]] = {}  # by storage
        self._tape: list[Entry] = []
        self._end = 0  # of the tape, at the peak
        self._actions: list[str] = []
        self._muted = False
        self.heard: list[Event] | None = None  # what happens while someone listens

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.native_layer_norm.default:
            # Its kernel for CPUs keeps means and deviations in the bits of its operand, others in 32.
            result = (result[0], *(x.to(args[0].dtype) for x in result[1:]))
        if not self._muted:
            for x in tree_flatten(result)[0]:
                if isinstance(x, Tensor) and storage_key(x) not in self._found:
                    self.begins(x, str(func))
        return result

    def begins(self, x: Tensor, op: str = "") -> None:
        block = Block(x.untyped_storage().nbytes(), self.category, self.name)
        self.watch(x, block, lambda: self.ends(block))
        self.add(block, op)

    def add(self, block: Block, op: str = "") -> None:
        """From now on there is this block."""
        self.now += block.bytes
        self._tape.append(("+", block))
        if self.heard is not None:
            self.heard.append(Event("+", block, self.line, op))
        self._reaches(self.now, op, self.line)

    def holds(self, bytes: int) -> Owned:
        """Memory that nobody computes with: it is there as long as what this returns."""
        block = Block(bytes, self.category, self.name)
        self.add(block)
        return Owned(self, block)

    def ends(self, block: Block) -> None:
        self.now -= block.bytes
        self._tape.append(("-", block))
        if self.heard is not None:
            self.heard.append(Event("-", block))

    def surges(self, surge: Surge) -> None:
        """For a moment there is more."""
        self._tape.append(("^", surge))
        self._reaches(self.now + surge.bytes, surge.op, surge.line)

    def _reaches(self, bytes: int, op: str, line: str) -> None:
        here = self.action, self.call
        if bytes > self.peaks.get(here, -1):
            self.peaks[here] = bytes
        if bytes > self.peak:
            self.peak, self._end = bytes, len(self._tape)
            self.at = Place(action=self.action, call=self.call, line=line, op=op)

    def watch(self, x: Tensor, block: Block, ended: Callable[[], None]) -> None:
        """Know a storage by its block, and be told when it ends."""
        key = storage_key(x)

        def last(_: object) -> None:
            self._found.pop(key, None)
            ended()

        self._found[key] = (weakref.ref(x.untyped_storage(), last), block)

    def block(self, x: Tensor) -> Block | None:
        """What is known of a tensor's memory."""
        found = self._found.get(storage_key(x))
        return None if found is None else found[1]

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Operations in here make nothing that counts."""
        before, self._muted = self._muted, True
        try:
            yield
        finally:
            self._muted = before

    @contextmanager
    def making(self, category: str, name: str = "") -> Iterator[None]:
        """What operations in here make is of this kind."""
        before = self.category, self.name
        self.category, self.name = category, name
        try:
            yield
        finally:
            self.category, self.name = before

    def enters(self, action: str) -> None:
        """The next action of the step begins."""
        self._actions.append(action)
        self._tape.append((".", None))
        self.action, self.call, self.line = action, "", ""

    def starts(self) -> None:
        """The step begins: what was there before is there, and what was held at most before does not matter."""
        self.peak = -1
        self.peaks.clear()
        self._reaches(self.now, "", "")

    def rank(self, place: int, stages: tuple[int, ...], host: int) -> RankMemory:
        """What was found, since `starts`."""
        alive, surged = self._alive()
        return RankMemory(
            place=place,
            stages=stages,
            peak=self.peak,
            at=self.at,
            alive=together((block.category, block.name, block.bytes) for block in (*alive, *surged)),
            timeline=tuple(self._moments()),
            host=host,
        )

    def kinds(self) -> Iterator[tuple[str, Mapping[str, int]]]:
        """Of each action, its most bytes by category."""
        now: Counter[str] = Counter()
        total = most = 0
        found: Mapping[str, int] = {}
        names = iter(self._actions)
        action = ""
        for kind, what in self._tape:
            if kind == "+" and isinstance(what, Block):
                now[what.category] += what.bytes
                total += what.bytes
            elif kind == "-" and isinstance(what, Block):
                now[what.category] -= what.bytes
                total -= what.bytes
            passing = what.alive if isinstance(what, Surge) else ()
            here = total + (what.bytes if isinstance(what, Surge) else 0)
            if kind == ".":
                if action:
                    yield action, found
                action, most = next(names), -1
            if here > most:
                most, found = here, now + Counter(_by_category(passing))
        if action:
            yield action, found

    def _alive(self) -> tuple[list[Block], tuple[Block, ...]]:
        alive: dict[Block, None] = {}
        last: Block | Surge | None = None
        for kind, what in self._tape[: self._end]:
            last = what
            if kind == "+" and isinstance(what, Block):
                alive[what] = None
            elif kind == "-" and isinstance(what, Block):
                alive.pop(what, None)
        return list(alive), last.alive if isinstance(last, Surge) else ()

    def _moments(self) -> Iterator[Moment]:
        """Of each action that was entered."""
        now = peak = 0
        entered = -1
        for kind, what in self._tape:
            if kind == ".":
                if entered >= 0:
                    yield Moment(action=self._actions[entered], peak=peak, after=now)
                entered, peak = entered + 1, now
            elif isinstance(what, Surge):
                peak = max(peak, now + what.bytes)
            elif what is not None:
                now += what.bytes if kind == "+" else -what.bytes
                peak = max(peak, now)
        if entered >= 0:
            yield Moment(action=self._actions[entered], peak=peak, after=now)


def _by_category(blocks: Iterable[Block]) -> dict[str, int]:
    found: dict[str, int] = {}
    for block in blocks:
        found[block.category] = found.get(block.category, 0) + block.bytes
    return found


class _Even(TorchFunctionMode):
    """Where the batch decides which rows an expert gets, every one gets as many: its numbers are not there."""

    def __init__(self) -> None:
        super().__init__()
        self._rows = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.searchsorted:
            self._rows = args[0].numel()
        if func is Tensor.tolist and args[0].is_meta:
            count = args[0].numel()
            return [self._rows * (index + 1) // count for index in range(count)]
        return func(*args, **(kwargs or {}))


@contextmanager
def counting() -> Iterator[Ledger]:
    """Operations in here, on tensors of the meta device, are counted."""
    with _Even(), Ledger() as ledger, torch.no_grad():
        yield ledger
