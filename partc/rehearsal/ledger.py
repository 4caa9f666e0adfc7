"""A ledger of tensor memory: counts every storage from the operation that allocates it until it is freed.

The tensors are on the device meta. They have shapes and storages, which live as long as they are referenced, but no
bytes. Code that runs on them shows its memory over time, by Python's own reference counting.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from partc.cost.memory import Moment, RankMemory, StepPosition, grouped_by_name
from partc.ir.naming import starred
from partc.runtime.torch_private import storage_key, tree_flatten
from partc.torch_private import TorchDispatchMode, tree_unflatten

Label = tuple[str, str, int]  # category, name, bytes


class Block:
    """The memory of one storage. Its label may become more precise while it lives."""

    __slots__ = ("bytes", "label")

    def __init__(self, bytes: int, category: str, name: str) -> None:
        self.bytes = bytes
        self.label: Label = category, name, bytes


def _of_zeros(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The results of an operation that has no kernel for the device meta: their shapes are found by running it on
    zeros.
    """
    leaves, form = tree_flatten((args, kwargs))
    zeros = [torch.zeros(x.shape, dtype=x.dtype, device="cpu") if isinstance(x, Tensor) else x for x in leaves]
    again, named = tree_unflatten(zeros, form)
    results, made = tree_flatten(func(*again, **named))
    return tree_unflatten([x.to("meta") if isinstance(x, Tensor) else x for x in results], made)


class Owned:
    """Holds a block without a tensor: the block ends with the last reference to this object."""

    __slots__ = ("__weakref__", "block", "ledger")

    def __init__(self, ledger: Ledger, block: Block) -> None:
        self.ledger = ledger
        self.block = block

    def __del__(self) -> None:
        self.ledger.ends(self.block)


Sight = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]  # dtype, shape, stride, offset


class Leaf:
    """A tensor that is not in use at present: the owner of its memory, and its view of that memory."""

    __slots__ = ("owner", "sight")

    def __init__(self, owner: Owned | Tensor, sight: Sight) -> None:
        self.owner = owner
        self.sight = sight

    def tensor(self) -> Tensor:
        """A tensor in this memory to compute with; the memory lives at least as long as the tensor."""
        owner = self.owner
        if isinstance(owner, Tensor):
            return owner if sight(owner) == self.sight else _view(owner, self.sight)
        ledger, block = owner.ledger, owner.block
        dtype, shape, stride, offset = self.sight
        base = ledger.uncounted(shape, stride, dtype)
        whole = not offset and base.untyped_storage().nbytes() == block.bytes
        if not whole:
            base = ledger.uncounted((block.bytes,), (1,), torch.uint8)
        kept = [owner]
        ledger.watch(base, block, kept.clear)
        return base if whole else _view(base, self.sight)

    def __add__(self, other: Leaf | Tensor) -> Tensor:
        return self.tensor() + as_tensor(other)

    def __radd__(self, other: Tensor) -> Tensor:
        return other + self.tensor()


def as_tensor(leaf: Leaf | Tensor) -> Tensor:
    return leaf if isinstance(leaf, Tensor) else leaf.tensor()


def _view(x: Tensor, sight: Sight) -> Tensor:
    """Another view of the same memory."""
    dtype, shape, stride, offset = sight
    flat = x if x.dtype == dtype else x.view(-1).view(dtype)
    return flat.as_strided(shape, stride, offset)


def sight(x: Tensor) -> Sight:
    return x.dtype, tuple(x.shape), x.stride(), int(x.storage_offset())


@dataclass(frozen=True)
class Surge:
    """The temporary memory of recorded code: its peak, the place of the peak, and its contents."""

    bytes: int
    line: str
    op: str
    alive: tuple[Block, ...]

    @cached_property
    def label(self) -> tuple[Any, ...]:
        """The peak and the labels of the contents. They are final once a step has been played."""
        return self.bytes, *(block.label for block in self.alive)


@dataclass(frozen=True, slots=True)
class Event:
    """An event while a function runs: "+" or "-" and a block, or "drop" and the numbers of arguments."""

    kind: str
    what: Any
    line: str = ""
    op: str = ""


Place = tuple[str, str, str]  # call, line, operation
# "+" block, "-" block, "^" surge, "." at an action's start; and the place where memory grows
Entry = tuple[str, Block | Surge | None, Place]
NOWHERE: Place = ("", "", "")
RELEASED: Place = ("", "", "released")


class Ledger(TorchDispatchMode):
    """All storages that operations create inside it, by category and name.

    `category` and `name` apply to new storages. `action`, `call` and `line` give the current place in the code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.category, self.name = "temporaries", ""
        self.action = self.call = self.line = ""
        self.now = 0
        self.peak = -1
        self.at = StepPosition(action="")
        self.peaks: dict[tuple[str, str], int] = {}  # the peak bytes of every action and call
        self._found: dict[int, tuple[object, Block]] = {}  # by storage
        self.tape: list[Entry] = []
        self.begin = 0  # of the step on the tape
        self._end = 0  # of the tape, at the peak
        self.actions: list[str] = []
        self._muted = self._stopped = False
        self._end_of: Place = NOWHERE  # the place that the tape notes for blocks that end
        self.recorded: list[Event] | None = None  # events that are being recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            result = func(*args, **(kwargs or {}))
        except NotImplementedError:
            result = _of_zeros(func, args, kwargs or {})
        if func is torch.ops.aten.native_layer_norm.default:
            # The kernel for CPUs keeps means and deviations in its operand's type, other kernels in 32 bits.
            result = (result[0], *(x.to(args[0].dtype) for x in result[1:]))
        if not self._muted:
            for x in (result,) if isinstance(result, Tensor) else tree_flatten(result)[0]:
                if isinstance(x, Tensor) and storage_key(x) not in self._found:
                    self.begins(x, str(func))
        return result

    def begins(self, x: Tensor, op: str = "") -> None:
        block = Block(x.untyped_storage().nbytes(), self.category, self.name)
        self.watch(x, block, lambda: self.ends(block))
        self.add(block, op)

    def add(self, block: Block, op: str = "") -> None:
        """Register a new block."""
        self.now += block.bytes
        self.tape.append(("+", block, (self.call, self.line, op)))
        if self.recorded is not None:
            self.recorded.append(Event("+", block, self.line, op))
        self._reaches(self.now, op, self.line)

    def holds(self, bytes: int) -> Owned:
        """Count `bytes` that no tensor holds, until the returned object is dropped."""
        return self.owned(Block(bytes, self.category, self.name))

    def owned(self, block: Block, op: str = "") -> Owned:
        self.add(block, op)
        return Owned(self, block)

    def ends(self, block: Block) -> None:
        if self._stopped:
            return
        self.now -= block.bytes
        self.tape.append(("-", block, self._end_of))
        if self.recorded is not None:
            self.recorded.append(Event("-", block))

    def surges(self, surge: Surge) -> None:
        """Record a momentary surge."""
        self.tape.append(("^", surge, (self.call, surge.line, surge.op)))
        self._reaches(self.now + surge.bytes, surge.op, surge.line)

    def _reaches(self, bytes: int, op: str, line: str) -> None:
        here = self.action, self.call
        if here not in self.peaks or bytes > self.peaks[here]:
            self.peaks[here] = bytes
        if bytes > self.peak:
            self.peak, self._end = bytes, len(self.tape)
            self.at = StepPosition(action=self.action, call=self.call, line=line, op=op)

    def watch(self, x: Tensor, block: Block, ended: Callable[[], None]) -> None:
        """Associate a tensor's storage with its block, and call `ended` when the storage is freed."""
        key = storage_key(x)

        def last(_: object) -> None:
            self._found.pop(key, None)
            ended()

        self._found[key] = (weakref.ref(x.untyped_storage(), last), block)

    def seen(self, leaves: Iterable[Any]) -> tuple[tuple[object, ...], tuple[int, ...]]:
        """The types, shapes and strides of tensors; and for each, the number of the first tensor in the same
        storage.
        """
        places: dict[object, int] = {}
        views: list[object] = []
        same: list[int] = []
        for leaf in leaves:
            owner = leaf
            if leaf.__class__ is Leaf:
                owner = leaf.owner
                views += leaf.sight[:3]
            else:
                views += (leaf.dtype, leaf.shape, leaf.stride())
            if owner.__class__ is Owned:
                memory: object = owner.block
            else:
                key = storage_key(owner)
                memory = self._found[key][1] if key in self._found else key
            if memory not in places:
                places[memory] = len(places)
            same.append(places[memory])
        return tuple(views), tuple(same)

    def block(self, x: Tensor) -> Block | None:
        """The block of a tensor's storage, if known."""
        found = self._found.get(storage_key(x))
        return None if found is None else found[1]

    def uncounted(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A new tensor that does not count."""
        before, self._muted = self._muted, True
        try:
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        finally:
            self._muted = before

    @contextmanager
    def muted(self) -> Iterator[None]:
        """A context whose operations do not count."""
        before, self._muted = self._muted, True
        try:
            yield
        finally:
            self._muted = before

    @contextmanager
    def aside(self) -> Iterator[list[Entry]]:
        """A context whose operations go to a separate tape, and do not count. All that they allocate must be freed in
        it.
        """
        kept = self.tape, self.now, self.peak, self.peaks, self.at, self._end
        self.tape, self.peaks = [], {}
        try:
            yield self.tape
        finally:
            self.tape, self.now, self.peak, self.peaks, self.at, self._end = kept

    @contextmanager
    def releasing(self) -> Iterator[None]:
        """A context in which blocks end because a transfer of one microbatch has ended."""
        self._end_of = RELEASED
        try:
            yield
        finally:
            self._end_of = NOWHERE

    @contextmanager
    def making(self, category: str, name: str = "") -> Iterator[None]:
        """A context in which new storages get this category, and this name with `*` for its numbers."""
        before = self.category, self.name
        self.category, self.name = category, starred(name)
        try:
            yield
        finally:
            self.category, self.name = before

    def enters(self, action: str) -> None:
        """Begin the next action of the step."""
        self.actions.append(action)
        self.tape.append((".", None, NOWHERE))
        self.action, self.call, self.line = action, "", ""

    def starts(self) -> None:
        """Begin the step: keep existing blocks, and forget the earlier peak."""
        self.peak = -1
        self.begin = len(self.tape)
        self.peaks.clear()
        self._reaches(self.now, "", "")

    def stops(self) -> None:
        """End the step: whatever is freed from here on is not part of it."""
        self._stopped = True

    def base(self) -> Counter[Label]:
        """Everything held at the step's start."""
        found: Counter[Label] = Counter()
        for sign, what, _ in self.tape[: self.begin]:
            if isinstance(what, Block):
                found[what.label] += 1 if sign == "+" else -1
        return +found

    def rank(self, place: int, stages: tuple[int, ...], host: int) -> RankMemory:
        """The account since `starts`."""
        alive, surged = self._blocks_alive()
        return RankMemory(
            place=place,
            stages=stages,
            peak=self.peak,
            at=self.at,
            alive=grouped_by_name(Counter(block.label for block in (*alive, *surged))),
            timeline=tuple(self._moments()),
            host=host,
        )

    def kinds(self) -> Iterator[tuple[str, Mapping[str, int]]]:
        """For each action, its peak bytes by category."""
        now: Counter[str] = Counter()
        total = most = 0
        found: Mapping[str, int] = {}
        names = iter(self.actions)
        action = ""
        for kind, what, _ in self.tape:
            if kind == "+" and isinstance(what, Block):
                now[what.label[0]] += what.bytes
                total += what.bytes
            elif kind == "-" and isinstance(what, Block):
                now[what.label[0]] -= what.bytes
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

    def _blocks_alive(self) -> tuple[list[Block], tuple[Block, ...]]:
        alive: dict[Block, None] = {}
        last: Block | Surge | None = None
        for kind, what, _ in self.tape[: self._end]:
            last = what
            if kind == "+" and isinstance(what, Block):
                alive[what] = None
            elif kind == "-" and isinstance(what, Block):
                alive.pop(what, None)
        return list(alive), last.alive if isinstance(last, Surge) else ()

    def _moments(self) -> Iterator[Moment]:
        """The moment of each action that was entered."""
        now = peak = 0
        entered = -1
        for kind, what, _ in self.tape:
            if kind == ".":
                if entered >= 0:
                    yield Moment(action=self.actions[entered], peak=peak, after=now)
                entered, peak = entered + 1, now
            elif isinstance(what, Surge):
                peak = max(peak, now + what.bytes)
            elif what is not None:
                now += what.bytes if kind == "+" else -what.bytes
                peak = max(peak, now)
        if entered >= 0:
            yield Moment(action=self.actions[entered], peak=peak, after=now)


def _by_category(blocks: Iterable[Block]) -> dict[str, int]:
    found: dict[str, int] = {}
    for block in blocks:
        category, _, size = block.label
        found[category] = found.get(category, 0) + size
    return found


class EvenRouting(TorchFunctionMode):
    """Routing for tensors without values: every expert gets the same number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self._rows = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.searchsorted:
            ends = func(*args, **(kwargs or {}))
            ends.rows = args[0].numel()  # type: ignore[attr-defined]
            return ends
        if func is torch.bincount and args[0].is_meta:
            self._rows = args[0].numel()
            return args[0].new_empty(kwargs["minlength"])
        if func is Tensor.cpu and args[0].is_meta:
            return args[0]
        if func is Tensor.item and args[0].is_meta:
            return self._rows
        if func is Tensor.tolist and args[0].is_meta:
            rows, count = getattr(args[0], "rows", self._rows), args[0].numel()
            return [rows * (index + 1) // count for index in range(count)]
        return func(*args, **(kwargs or {}))


@contextmanager
def counting_meta_operations() -> Iterator[Ledger]:
    """A context that counts operations on tensors of the meta device."""
    with Ledger() as ledger, torch.no_grad():
        yield ledger
