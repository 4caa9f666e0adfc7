"""The effects of emitted functions on memory: recorded when a function first runs, and replayed from then on.

    def block_forward(comm, p, x):                 def block_forward(comm, p, x):
        h = x @ p.w                                    _call = _recordings.enter("block_forward", (p, x))
        …                                              if _call.known:
        return y, (h, x)                 ->                del p, x
                                                           return _call.play()
                                                       p, x = _call.stand_ins(p, x)
                                                       with _EvenRouting():
                                                           _call.at(2)
                                                           h = x @ p.w
                                                           _call.named("h", h)
                                                           …
                                                           return _call.leave((y, (h, x)))

The caller of a function may or may not keep its references to the arguments, so that Python's reference counting
decides when a tensor's memory is freed, in a replayed function as in a running one. For this reason substitutes replace
the arguments while a function is recorded; a substitute is freed at the point at which the function no longer needs the
argument.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from partc.errors import InternalError
from partc.ir.naming import starred
from partc.rehearsal.ledger import (
    Block,
    EvenRouting,
    Event,
    Label,
    Leaf,
    Ledger,
    Owned,
    Sight,
    Surge,
    as_tensor,
    sight,
)
from partc.runtime.ops.scan import steps as scan_steps
from partc.runtime.torch_private import storage_key

if TYPE_CHECKING:
    from partc.codegen.package import RegionModule, StageModule

T = TypeVar("T")
Key = tuple[object, ...]
_NO_CALLS: Iterator[str] = iter(())


@dataclass(frozen=True, slots=True)
class Given:
    """A result that is a tensor of the arguments, by its number; `sight` describes the view, if it is another view."""

    number: int
    sight: Sight | None


@dataclass(frozen=True, slots=True)
class New:
    """A result in memory that the function allocated; it holds the number of the allocation."""

    number: int
    sight: Sight


@dataclass(slots=True)
class CallEffects:
    """The effects of a function: temporary memory and releases of arguments, in alternation."""

    steps: list[tuple[Surge, tuple[int, ...]]] = field(default_factory=list)
    blocks: list[Label] = field(default_factory=list)  # of results
    result: Any = None
    passed: list[int] = field(default_factory=list)  # the arguments among the results


class Recordings:
    """All recorded functions; functions of equal text have equal effects."""

    def __init__(self) -> None:
        self.calls: dict[Key, CallEffects] = {}
        self.exchanges: dict[Key, Any] = {}  # steps of exchanges (exchange_replay.py)
        self.ledger = Ledger()
        self.callers: Mapping[str, Iterator[str]] = {}  # function -> the calls that it runs for, in order

    def enter(self, function: RegionFunction, arguments: tuple[Any, ...]) -> RecordedCall:
        """Begin a call of a function. The result holds the tensors of the arguments until the call ends."""
        self.ledger.call = next(self.callers.get(function.name, _NO_CALLS), "")
        held = leaves_of(arguments)
        seen, same = self.ledger.seen(held)  # effects on memory do not depend on storage offsets
        return RecordedCall(self, function, (function.text, seen, same), held)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionFunction:
    """A function of a region's module. `region` is the prefix of its values' names."""

    name: str
    region: str
    text: str
    file: str


def stand_ins(
    ledger: Ledger, arguments: T, same: Sequence[int], ended: Callable[[tuple[int, ...]], None]
) -> tuple[T, dict[int, int]]:
    """The arguments with substitutes for their tensors, and for each live storage the number of its first tensor.

    Tensors with equal numbers in `same` share a storage; `ended` is called with their numbers when it is freed.
    """
    numbers: dict[int, int] = {}
    bases: dict[int, Tensor] = {}
    groups = iter(same)

    def stand_in(leaf: Leaf | Tensor) -> Tensor:
        group = next(groups)
        dtype, shape, stride, offset = _sight(leaf)
        with ledger.muted():
            if group in bases:
                return bases[group].view(dtype).as_strided(shape, stride, offset)
            together = tuple(number for number, other in enumerate(same) if other == group)
            alone = len(together) == 1
            made = (
                torch.empty_strided(shape, stride, dtype=dtype, device="meta")
                if alone
                else torch.empty(_bytes(leaf), dtype=torch.uint8, device="meta")
            )
            key = storage_key(made)
            numbers[key] = together[0]
            ledger.watch(made, Block(0, "", ""), partial(_ends, numbers, key, ended, together))
            if alone:
                return made
            bases[group] = made
            return made.view(dtype).as_strided(shape, stride, offset)

    return map_leaves(arguments, stand_in), numbers


def _ends(
    numbers: dict[int, int], key: int, ended: Callable[[tuple[int, ...]], None], together: tuple[int, ...]
) -> None:
    del numbers[key]
    ended(together)


def _bytes(leaf: Leaf | Tensor) -> int:
    owner = leaf.owner if isinstance(leaf, Leaf) else leaf
    return owner.block.bytes if isinstance(owner, Owned) else owner.untyped_storage().nbytes()


class RecordedCall:
    """One call of a function."""

    def __init__(
        self, recordings: Recordings, function: RegionFunction, key: Key, held: list[Leaf | Tensor | None]
    ) -> None:
        self._recordings = recordings
        self._ledger = recordings.ledger
        self._function = function
        self._key = key
        self._same: tuple[int, ...] = key[-1]  # type: ignore[assignment]
        self._held = held
        self._stood: dict[int, int] = {}  # storage of a stand-in -> number of its argument
        self.known = key in recordings.calls

    def play(self) -> Any:
        """Replay the function's effects, and return its result. The function must no longer hold references to its
        arguments.
        """
        effects, ledger, held = self._recordings.calls[self._key], self._ledger, self._held
        passed = {number: held[number] for number in effects.passed}
        for surge, dropped in effects.steps:
            if surge.bytes:
                ledger.surges(surge)
            for number in dropped:
                held[number] = None
        owners = [ledger.owned(Block(size, category, name)) for category, name, size in effects.blocks]

        def returned(item: Any) -> Leaf | Tensor:
            if item.__class__ is New:
                return Leaf(owners[item.number], item.sight)
            return seen_as(passed[item.number], item.sight)

        return self._for_caller(effects.result, returned)

    def stand_ins(self, *arguments: Any) -> tuple[Any, ...]:
        """Substitutes for the arguments, which are freed where the function drops its last references to them."""
        substitutes, self._stood = stand_ins(self._ledger, arguments, self._same, self._dropped)
        self._ledger.recorded = []
        return substitutes

    def _dropped(self, numbers: tuple[int, ...]) -> None:
        if self._ledger.recorded is not None:
            self._ledger.recorded.append(Event("drop", numbers))
        for number in numbers:
            self._held[number] = None

    def at(self, line: int) -> None:
        """Record that the function has reached a line of its file."""
        self._ledger.line = f"{self._function.file}:{line}"

    def named(self, name: str, value: Any) -> None:
        """Record the name that the function gives to a value."""
        block = self._ledger.block(value) if isinstance(value, Tensor) else None
        if block is not None and not block.label[1]:
            block.label = block.label[0], starred(f"{self._function.region}.{name}"), block.bytes

    def leave(self, result: Any) -> Any:
        """End the recording of the function with its result; return the result that the caller gets."""
        recorded, self._ledger.recorded = self._ledger.recorded, None
        assert recorded is not None
        numbers: dict[Block, int] = {}

        def known(x: Leaf | Tensor) -> Given | New:
            if not isinstance(x, Tensor):
                raise InternalError(f"{self._function.name} returns {x!r}")
            stood = self._stood.get(storage_key(x))
            if stood is not None:
                own = self._held[stood]
                return Given(stood, None if own is not None and _sight(own) == sight(x) else sight(x))
            block = self._ledger.block(x)
            if block is None:
                raise InternalError(f"{self._function.name} returns what it did not make")
            return New(numbers.setdefault(block, len(numbers)), sight(x))

        passed = dict(enumerate(self._held))
        effects = CallEffects(steps=_steps(recorded), result=map_leaves(result, known))
        effects.passed = [item.number for item in leaves_of(effects.result) if isinstance(item, Given)]
        tensors = leaves_of(result)

        def returned(x: Leaf | Tensor) -> Leaf | Tensor:
            item = known(x)
            if isinstance(item, New):
                return Leaf(x, item.sight) if isinstance(x, Tensor) else x
            return seen_as(passed[item.number], item.sight)

        handed = self._for_caller(result, returned)
        effects.blocks = [block.label for block in numbers]
        self._recordings.calls[self._key] = effects
        del tensors
        return handed

    def _for_caller(self, result: Any, returned: Callable[[Any], Leaf | Tensor]) -> Any:
        """The result with tensors for the caller to compute with. Tensors in records are saved values, and those in
        named tuples are gradients of parameters: dense ones are only passed on, as leaves.
        """
        self._ledger.call = self._ledger.line = ""

        def handed(item: Any) -> Any:
            if hasattr(item, "_fields"):
                return type(item)(*map(gradients, item))
            return map_leaves(item, saved) if _is_record(item) else as_tensor(returned(item))

        def gradients(item: Any) -> Any:
            """A dense gradient, or a record of rows with tensors."""
            if isinstance(item, _LEAVES):
                return gradient(item)
            return map_leaves(item, lambda x: as_tensor(gradient(x)))

        def gradient(item: Any) -> Leaf | Tensor:
            self._outlives(leaf := returned(item), "gradients")
            return leaf

        def saved(item: Any) -> Leaf | Tensor:
            leaf = returned(item)
            if item.__class__ is not New:  # its block has the category that the recording gave it
                self._outlives(leaf, "activations")
            return leaf

        if isinstance(result, tuple) and not hasattr(result, "_fields"):
            return tuple(map(handed, result))
        return None if result is None else handed(result)

    def _outlives(self, leaf: Leaf | Tensor, category: str) -> None:
        """Record that a temporary value outlives the function."""
        owner = leaf.owner if isinstance(leaf, Leaf) else leaf
        block = owner.block if isinstance(owner, Owned) else self._ledger.block(owner)
        if block is not None and block.label[0] in ("temporaries", "communication"):
            block.label = category, *block.label[1:]


def seen_as(leaf: Leaf | Tensor | None, sight: Sight | None) -> Leaf | Tensor:
    """An argument as a result; as another view if `sight` is given."""
    assert leaf is not None
    if sight is None:
        return leaf
    return Leaf(leaf.owner if isinstance(leaf, Leaf) else leaf, sight)


def _steps(recorded: Iterable[Event]) -> list[tuple[Surge, tuple[int, ...]]]:
    """The function's peaks of temporary memory, up to the end of each argument and up to its own."""
    steps: list[tuple[Surge, tuple[int, ...]]] = []
    alive: dict[Block, None] = {}
    now = 0
    most = Surge(0, "", "", ())
    for event in recorded:
        if event.kind == "drop":
            steps.append((most, event.what))
            most = Surge(now, "", "", tuple(alive))
        elif event.kind == "+":
            alive[event.what] = None
            now += event.what.bytes
            if now > most.bytes:
                most = Surge(now, event.line, event.op, tuple(alive))
        elif event.what in alive:
            del alive[event.what]
            now -= event.what.bytes
    return [*steps, (most, ())]


def _sight(leaf: Leaf | Tensor) -> Sight:
    return leaf.sight if isinstance(leaf, Leaf) else sight(leaf)


def _is_record(value: Any) -> bool:
    """Whether a value is an instance of an emitted dataclass, in which one function keeps values for another."""
    return is_dataclass(value) and not isinstance(value, Leaf | Given | New)


_LEAVES: Any = (Leaf, Tensor, Given, New)
Inside = Callable[[Any], Iterable[Any]]  # the items of a value


class _Forms(dict[type, Inside | bool]):
    """For each class of values, how to find the items of a tuple, list, dict or record; other values are leaves."""

    def __missing__(self, kind: type) -> Inside | bool:
        found: Inside | bool = issubclass(kind, _LEAVES)
        if issubclass(kind, tuple | list):
            found = iter
        elif issubclass(kind, dict):
            found = kind.values
        elif is_dataclass(kind) and not found:
            found = partial(_held_by, tuple(field.name for field in fields(kind)))
        self[kind] = found
        return found


_FORMS = _Forms()


def _held_by(names: tuple[str, ...], record: Any) -> list[Any]:
    return [getattr(record, name) for name in names]


def leaves_of(value: Any) -> list[Any]:
    """All leaves of a value, in order."""
    found: list[Any] = []
    _collect((value,), found)
    return found


def _collect(items: Iterable[Any], found: list[Any]) -> None:
    """Add the leaves to `found`; a closure would be a cycle of references, and keep them alive."""
    for item in items:
        form = _FORMS[item.__class__]
        if form is True:
            found.append(item)
        elif form:
            _collect(form(item), found)


def map_leaves(value: Any, each: Callable[[Any], Any]) -> Any:
    """The same structure, with `each` applied to its leaves."""
    form = _FORMS[value.__class__]
    if form is True or not form:
        return each(value) if form else value
    items = [each(item) if _FORMS[item.__class__] is True else map_leaves(item, each) for item in form(value)]
    if isinstance(value, dict):
        return dict(zip(value, items, strict=True))
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return type(value)(items)
    return type(value)(*items)


# -- the emitted modules -----------------------------------------------------------------------


def region_module(
    module: RegionModule, recordings: Recordings, kernels: Any, scan: Callable[..., Any]
) -> dict[str, Any]:
    """The namespace of an emitted region, with functions that record. `kernels` replaces the package's kernels, and
    `scan` its loops over time.

    The text comes directly from codegen: no file is executed.
    """
    functions: dict[str, RegionFunction] = {}
    lines = module.text.split("\n")
    given = {"kernels": kernels, "scan": scan}
    tree = _tree(module.text, given)
    steps = {function.name: [step.name for step in function.steps] for function in module.code.functions}
    sources: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            sources[node.name] = source.replace(ast.get_docstring(node, clean=False) or "", "", 1)
        if isinstance(node, ast.FunctionDef) and node.name in steps:  # but not a step of a scan
            source = "\n".join(sources[name] for name in (*steps[node.name], node.name))
            functions[node.name] = RegionFunction(name=node.name, region=module.region, text=source, file=module.path)
            node.decorator_list = []  # compiled code holds as much as its operations, or less
            _instrument(node)
    return _run(
        tree,
        module.path,
        {"_recordings": recordings, "_functions": functions, "_EvenRouting": EvenRouting, **given},
    )


def first_steps(
    step: Callable[..., tuple[Tensor, ...]],
    starts: Sequence[Tensor],
    sequences: Sequence[Tensor],
    constants: Sequence[Tensor],
    *,
    length: int,
    dims: Sequence[int],
    reverse: bool = False,
) -> tuple[Tensor, ...]:
    """A scan that runs its first steps only: in memory, further steps are like the last of these.

    A step may hand on the memory of a state as the next one of another state. After as many steps as there are states,
    each state is memory that an earlier step allocated, or that the loop reads and its caller holds. From then on all
    steps begin with equally much memory, and allocate and free the same.
    """
    times = range(length)[::-1] if reverse else range(length)
    return scan_steps(step, starts, sequences, constants, times=times[: len(starts) + 2], length=length, dims=dims)


def stage_class(module: StageModule, given: Mapping[str, Any]) -> Any:
    """The Stage class of an emitted module. `given` has the names that it imports from regions, and replacements for
    others.
    """
    return _run(_tree(module.text, given), module.path, given)["Stage"]


def _tree(text: str, given: Collection[str]) -> ast.Module:
    """The syntax tree of an emitted module that imports partc's own runtime, and none of the `given` names."""
    tree = ast.parse(text)
    left: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [alias for alias in node.names if alias.name not in given]
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "runtime":
            node.module = f"partc.{node.module}"
        if not isinstance(node, ast.Import | ast.ImportFrom) or (node.names and node.names[0].name != "compiled"):
            left.append(node)
    tree.body = left
    return tree


def _run(tree: ast.Module, file: str, given: Mapping[str, Any]) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": f"partc.rehearsed.{file}", **given}
    exec(compile(ast.fix_missing_locations(tree), file, "exec", dont_inherit=True), names)
    return names


def _instrument(function: ast.FunctionDef) -> None:
    """Insert the calls of `_recordings` into the function; see the module's docstring."""
    taken = [arg.arg for arg in function.args.args if arg.arg not in ("comm", "number")]
    listed = ", ".join(taken)
    opening = f"_call = _recordings.enter(_functions[{function.name!r}], ({listed}{',' if taken else ''}))\n"
    opening += "if _call.known:\n"
    opening += f"    del {listed}\n" if taken else ""
    opening += "    return _call.play()\n"
    opening += f"({listed},) = _call.stand_ins({listed})\n" if taken else "_call.stand_ins()\n"
    body: list[ast.stmt] = []
    last: ast.expr = ast.Constant(None)
    for statement in function.body:
        if isinstance(statement, ast.Return):
            last = statement.value or last
            break
        body.append(_recorded("at", ast.Constant(statement.lineno)))
        body.append(statement)
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                for name in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(name, ast.Name):
                        body.append(_recorded("named", ast.Constant(name.id), ast.Name(name.id, ast.Load())))
    leave = ast.Attribute(ast.Name("_call", ast.Load()), "leave", ast.Load())
    closing = ast.Return(ast.Call(leave, [last], []))
    even = ast.With([ast.withitem(ast.Call(ast.Name("_EvenRouting", ast.Load()), [], []))], [*body, closing])
    function.body = [*ast.parse(opening).body, even]


def _recorded(method: str, *arguments: ast.expr) -> ast.stmt:
    """`_call.method(arguments)`"""
    function = ast.Attribute(ast.Name("_call", ast.Load()), method, ast.Load())
    return ast.Expr(ast.Call(function, list(arguments), []))
