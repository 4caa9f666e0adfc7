"""The effects of emitted functions on memory: recorded when a function first runs, replayed from then on.

    def block_forward(comm, p, x):                 def block_forward(comm, p, x):
        h = x @ p.w                                    _call = _lessons.enter("block_forward", (p, x))
        …                                              if _call.known:
        return y, (h, x)                 ->                _held = [p, x]
                                                           del p, x
                                                           return _call.play(_held)
                                                       p, x = _call.stand_ins(p, x)
                                                       with _EvenRouting():
                                                           _call.at(2)
                                                           h = x @ p.w
                                                           _call.named("h", h)
                                                           …
                                                           return _call.leave((y, (h, x)))

The caller of a function keeps its references to the arguments, or has given them up: Python's own rules decide when a
tensor ends, in a replayed function as in a running one. For this reason arguments have substitutes while a function is
recorded; the end of a substitute is the point at which the function no longer needs the argument.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from partc.errors import InternalError
from partc.rehearsal.ledger import Block, EvenRouting, Event, Leaf, Ledger, Owned, Sight, Surge, sight
from partc.runtime.torch_private import storage_key

if TYPE_CHECKING:
    from partc.codegen.package import RegionModule, StageModule

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Argument:
    """A result that is one of the arguments' tensors, by its number; `sight` is another view of it, if any."""

    number: int
    sight: Sight | None


@dataclass(frozen=True, slots=True)
class _New:
    """A result in memory that the function allocated, by the number of the allocation."""

    number: int
    sight: Sight


@dataclass(slots=True)
class Lesson:
    """The effects of a function: alternately temporary memory and releases of arguments."""

    steps: list[tuple[Surge, tuple[int, ...]]] = field(default_factory=list)
    blocks: list[tuple[int, str, str]] = field(default_factory=list)  # of results: bytes, category, name
    result: Any = None
    passed: list[int] = field(default_factory=list)  # the arguments among the results


class Lessons:
    """All recorded functions; functions of equal text have equal effects."""

    def __init__(self) -> None:
        self.learnt: dict[Key, Lesson] = {}
        self.ledger = Ledger()
        self.turns: Mapping[str, Iterator[str]] = {}  # of functions, the calls that they run for, in order

    def enter(self, function: Learnt, arguments: tuple[Any, ...]) -> RecordedCall:
        """Called at the start of a function."""
        self.ledger.call = next(self.turns.get(function.name, iter(())), "")
        places: dict[int, int] = {}
        leaves = _leaves(arguments)
        same = tuple(places.setdefault(self._memory(leaf), len(places)) for leaf in leaves)
        # A function's effects on memory do not depend on the storage offsets of its arguments.
        seen = tuple(_sight(leaf)[:3] for leaf in leaves)
        return RecordedCall(self, function, (function.text, seen, same), same)

    def _memory(self, leaf: Leaf | Tensor) -> int:
        """The identity of the memory behind a tensor."""
        owner = leaf.owner if isinstance(leaf, Leaf) else leaf
        block = owner.block if isinstance(owner, Owned) else self.ledger.block(owner)
        return storage_key(owner) if block is None and isinstance(owner, Tensor) else id(block)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """A function of a region's module: `region` prefixes the names of its values."""

    name: str
    region: str
    text: str
    file: str


class RecordedCall:
    """One call of a function."""

    def __init__(self, lessons: Lessons, function: Learnt, key: Key, same: tuple[int, ...]) -> None:
        self._lessons = lessons
        self._ledger = lessons.ledger
        self._function = function
        self._key = key
        self._same = same
        self._held: list[Leaf | Tensor | None] = []
        self._stood: dict[int, int] = {}  # storage of a stand-in -> number of its argument

    @property
    def known(self) -> bool:
        return self._key in self._lessons.learnt

    def play(self, arguments: list[Any]) -> Any:
        """Replay the function's effects. Nothing else may refer to the contents of the list."""
        lesson = self._lessons.learnt[self._key]
        leaves: list[Leaf | Tensor | None] = _leaves(arguments)
        arguments.clear()
        passed = {number: leaves[number] for number in lesson.passed}
        for surge, dropped in lesson.steps:
            self._ledger.surges(surge)
            for number in dropped:
                leaves[number] = None
        owners = []
        for size, category, name in lesson.blocks:
            block = Block(size, category, name)
            self._ledger.add(block)
            owners.append(Owned(self._ledger, block))

        def returned(item: Any) -> Leaf | Tensor:
            if isinstance(item, _New):
                return Leaf(owners[item.number], item.sight)
            return _passed(passed[item.number], item.sight)

        return self._handed(lesson.result, returned)

    def stand_ins(self, *arguments: Any) -> tuple[Any, ...]:
        """Substitutes for the arguments, whose ends the function determines."""
        self._held = _leaves(arguments)
        bases: dict[int, Tensor] = {}
        numbers = iter(range(len(self._held)))

        def stand_in(leaf: Leaf | Tensor) -> Tensor:
            group = self._same[next(numbers)]
            dtype, shape, stride, offset = _sight(leaf)
            with self._ledger.muted():
                if group in bases:
                    return bases[group].view(dtype).as_strided(shape, stride, offset)
                numbered = tuple(number for number, other in enumerate(self._same) if other == group)
                alone = len(numbered) == 1
                made = (
                    torch.empty_strided(shape, stride, dtype=dtype, device="meta")
                    if alone
                    else torch.empty(self._bytes(leaf), dtype=torch.uint8, device="meta")
                )
                key = storage_key(made)
                self._ledger.watch(made, Block(0, "", ""), lambda: self._dropped(key, numbered))
                self._stood[key] = numbered[0]
                if alone:
                    return made
                bases[group] = made
                return made.view(dtype).as_strided(shape, stride, offset)

        self._ledger.heard = []
        return tuple(_mapped(argument, stand_in) for argument in arguments)

    def _bytes(self, leaf: Leaf | Tensor) -> int:
        owner = leaf.owner if isinstance(leaf, Leaf) else leaf
        return owner.block.bytes if isinstance(owner, Owned) else owner.untyped_storage().nbytes()

    def _dropped(self, key: int, numbers: tuple[int, ...]) -> None:
        del self._stood[key]
        if self._ledger.heard is not None:
            self._ledger.heard.append(Event("drop", numbers))
        for number in numbers:
            self._held[number] = None

    def at(self, line: int) -> None:
        """The function reaches a line of its file."""
        self._ledger.line = f"{self._function.file}:{line}"

    def named(self, name: str, value: Any) -> None:
        """The function names a value."""
        block = self._ledger.block(value) if isinstance(value, Tensor) else None
        if block is not None and not block.name:
            block.name = f"{self._function.region}.{name}"

    def leave(self, result: Any) -> Any:
        """Called with the function's result."""
        heard, self._ledger.heard = self._ledger.heard, None
        assert heard is not None
        numbers: dict[Block, int] = {}

        def known(x: Leaf | Tensor) -> _Argument | _New:
            if not isinstance(x, Tensor):
                raise InternalError(f"{self._function.name} returns {x!r}")
            stood = self._stood.get(storage_key(x))
            if stood is not None:
                own = self._held[stood]
                return _Argument(stood, None if own is not None and _sight(own) == sight(x) else sight(x))
            block = self._ledger.block(x)
            if block is None:
                raise InternalError(f"{self._function.name} returns what it did not make")
            return _New(numbers.setdefault(block, len(numbers)), sight(x))

        passed = dict(enumerate(self._held))
        lesson = Lesson(steps=_steps(heard), result=_mapped(result, known))
        lesson.passed = [item.number for item in _leaves(lesson.result, _Argument)]
        tensors = _leaves(result)

        def returned(x: Leaf | Tensor) -> Leaf | Tensor:
            item = known(x)
            if isinstance(item, _New):
                return Leaf(x, item.sight) if isinstance(x, Tensor) else x
            return _passed(passed[item.number], item.sight)

        handed = self._handed(result, returned)
        lesson.blocks = [(block.bytes, block.category, block.name) for block in numbers]
        self._lessons.learnt[self._key] = lesson
        del tensors
        return handed

    def _handed(self, result: Any, returned: Callable[[Any], Leaf | Tensor]) -> Any:
        """Tensors for the caller to compute with; tensors in records are saved values."""
        self._ledger.call = self._ledger.line = ""

        def handed(item: Any) -> Any:
            if hasattr(item, "_fields"):
                return _mapped(item, lambda x: self._tensor(x, returned, "gradients"))
            return self._saved(item, returned) if _is_record(item) else self._tensor(item, returned)

        if isinstance(result, tuple) and not hasattr(result, "_fields"):
            return tuple(map(handed, result))
        return None if result is None else handed(result)

    def _saved(self, record: Any, returned: Callable[[Any], Leaf | Tensor]) -> Any:
        def waiting(item: Any) -> Leaf | Tensor:
            leaf = returned(item)
            self._outlives(leaf, "activations")
            return leaf

        return _mapped(record, waiting)

    def _outlives(self, leaf: Leaf | Tensor, category: str) -> None:
        """Record that a temporary value is kept."""
        owner = leaf.owner if isinstance(leaf, Leaf) else leaf
        block = owner.block if isinstance(owner, Owned) else self._ledger.block(owner)
        if block is not None and block.category in ("temporaries", "communication"):
            block.category = category

    def _tensor(self, item: Any, returned: Callable[[Any], Leaf | Tensor], category: str = "") -> Tensor:
        leaf = returned(item)
        if category:
            self._outlives(leaf, category)
        if isinstance(leaf, Tensor):
            return leaf
        with self._ledger.muted():
            if isinstance(leaf.owner, Tensor):
                return leaf.owner if sight(leaf.owner) == leaf.sight else _seen(leaf.owner, leaf.sight)
            owner = leaf.owner
            dtype, shape, stride, offset = leaf.sight
            base = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            whole = not offset and base.untyped_storage().nbytes() == owner.block.bytes
            if not whole:
                base = torch.empty(owner.block.bytes, dtype=torch.uint8, device="meta")
            kept = [owner]
            self._ledger.watch(base, owner.block, kept.clear)
            return base if whole else _seen(base, leaf.sight)


def _passed(leaf: Leaf | Tensor | None, sight: Sight | None) -> Leaf | Tensor:
    """An argument as a result, as another view if `sight` is given."""
    assert leaf is not None
    if sight is None:
        return leaf
    return Leaf(leaf.owner if isinstance(leaf, Leaf) else leaf, sight)


def _seen(x: Tensor, sight: Sight) -> Tensor:
    """The same memory under another view."""
    dtype, shape, stride, offset = sight
    flat = x if x.dtype == dtype else x.view(-1).view(dtype)
    return flat.as_strided(shape, stride, offset)


def _steps(heard: Iterable[Event]) -> list[tuple[Surge, tuple[int, ...]]]:
    """The function's peaks of temporary memory, up to the end of each argument and up to its own."""
    steps: list[tuple[Surge, tuple[int, ...]]] = []
    alive: dict[Block, None] = {}
    now = 0
    most = Surge(0, "", "", ())
    for event in heard:
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
    """Whether a value is an instance of an emitted dataclass, which a function keeps for another."""
    return is_dataclass(value) and not isinstance(value, Leaf | _Argument | _New)


@cache
def _fields(kind: type) -> tuple[str, ...]:
    """The names of the fields of a dataclass."""
    return tuple(field.name for field in fields(kind))


def _leaves(value: Any, kind: Any = (Leaf, Tensor)) -> list[Any]:
    """All objects of a kind in tuples, lists, dicts and records, in order."""
    found: list[Any] = []
    _collect(value, kind, found)
    return found


def _collect(value: Any, kind: Any, found: list[Any]) -> None:
    """Add the objects to `found`; a closure would be a cycle of references, and keep them alive."""
    if isinstance(value, kind):
        found.append(value)
    elif isinstance(value, tuple | list):
        for item in value:
            _collect(item, kind, found)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, kind, found)
    elif _is_record(value):
        for name in _fields(value.__class__):
            _collect(getattr(value, name), kind, found)


def _mapped(value: Any, each: Callable[[Any], Any]) -> Any:
    """The same structure with other leaves."""
    if isinstance(value, Leaf | Tensor | _Argument | _New):
        return each(value)
    if _is_record(value):
        return type(value)(*(_mapped(getattr(value, name), each) for name in _fields(value.__class__)))
    if isinstance(value, tuple):
        items = [_mapped(item, each) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_mapped(item, each) for item in value]
    if isinstance(value, dict):
        return {key: _mapped(item, each) for key, item in value.items()}
    return value


# -- the emitted modules -----------------------------------------------------------------------


def region_module(module: RegionModule, lessons: Lessons, kernels: Any) -> dict[str, Any]:
    """The names of an emitted region, with recording functions. `kernels` are those of the package.

    The text comes directly from codegen: no file is executed.
    """
    functions: dict[str, Learnt] = {}
    lines = module.text.split("\n")
    tree = _tree(module.text, {"kernels"})
    steps = {function.name: [step.name for step in function.steps] for function in module.code.functions}
    sources: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            sources[node.name] = source.replace(ast.get_docstring(node, clean=False) or "", "", 1)
        if isinstance(node, ast.FunctionDef) and node.name in steps:  # and no step of a scan
            source = "\n".join(sources[name] for name in (*steps[node.name], node.name))
            functions[node.name] = Learnt(name=node.name, region=module.region, text=source, file=module.path)
            node.decorator_list = []  # compiled code holds as much as its operations, or less
            _instrument(node)
    return _run(
        tree,
        module.path,
        {"_lessons": lessons, "_functions": functions, "_EvenRouting": EvenRouting, "kernels": kernels},
    )


def stage_class(module: StageModule, given: Mapping[str, Any]) -> Any:
    """The Stage of an emitted module. `given` has the names that it imports from regions, and others to replace."""
    return _run(_tree(module.text, given), module.path, given)["Stage"]


def _tree(text: str, given: Collection[str]) -> ast.Module:
    """An emitted module that imports partc's own runtime, and none of the `given` names."""
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
    """Insert the calls of `_lessons` into the function; see the module's docstring."""
    taken = [arg.arg for arg in function.args.args if arg.arg not in ("comm", "number")]
    listed = ", ".join(taken)
    opening = f"_call = _lessons.enter(_functions[{function.name!r}], ({listed}{',' if taken else ''}))\n"
    opening += f"if _call.known:\n    _held = [{listed}]\n"
    opening += f"    del {listed}\n" if taken else ""
    opening += "    return _call.play(_held)\n"
    opening += f"({listed},) = _call.stand_ins({listed})\n" if taken else "_call.stand_ins()\n"
    body: list[ast.stmt] = []
    last: ast.expr = ast.Constant(None)
    for statement in function.body:
        if isinstance(statement, ast.Return):
            last = statement.value or last
            break
        body.append(_told("at", ast.Constant(statement.lineno)))
        body.append(statement)
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                for name in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(name, ast.Name):
                        body.append(_told("named", ast.Constant(name.id), ast.Name(name.id, ast.Load())))
    leave = ast.Attribute(ast.Name("_call", ast.Load()), "leave", ast.Load())
    closing = ast.Return(ast.Call(leave, [last], []))
    even = ast.With([ast.withitem(ast.Call(ast.Name("_EvenRouting", ast.Load()), [], []))], [*body, closing])
    function.body = [*ast.parse(opening).body, even]


def _told(method: str, *arguments: ast.expr) -> ast.stmt:
    """`_call.method(arguments)`"""
    function = ast.Attribute(ast.Name("_call", ast.Load()), method, ast.Load())
    return ast.Expr(ast.Call(function, list(arguments), []))
