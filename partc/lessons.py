"""What each function of the emitted code does to memory: learnt when it first runs, played again from then on.

    def block_forward(comm, p, x):                 def block_forward(comm, p, x):
        h = x @ p.w                                    _call = _lessons.enter("block_forward", (p, x))
        …                                              if _call.known:
        return y, (h, x)                 ->                _held = [p, x]
                                                           del p, x
                                                           return _call.play(_held)
                                                       p, x = _call.stand_ins(p, x)
                                                       _call.at(2)
                                                       h = x @ p.w
                                                       _call.named("h", h)
                                                       …
                                                       return _call.leave((y, (h, x)))

Whoever calls the function refers to what he passed, or has handed it over: Python's own rules decide when a tensor
ends, in a function that is played as in one that runs. So an argument has a stand-in while the function is learnt,
whose end tells from where on the function needs it no longer.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from partc.errors import InternalError
from partc.ledger import Block, Event, Leaf, Ledger, Owned, Sight, Surge, sight
from partc.runtime.torch_private import storage_key

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Argument:
    """A result that is one of the arguments' tensors, by its number; `sight` is another one of it, if any."""

    number: int
    sight: Sight | None


@dataclass(frozen=True, slots=True)
class _New:
    """A result whose memory the function made, by the number of that."""

    number: int
    sight: Sight


@dataclass(slots=True)
class Lesson:
    """What a function does: for a while it has memory of its own, then lets go of arguments, and so on."""

    steps: list[tuple[Surge, tuple[int, ...]]] = field(default_factory=list)
    blocks: list[tuple[int, str, str]] = field(default_factory=list)  # of results: bytes, category, name
    result: Any = None


class Lessons:
    """All that has been learnt, by function: functions of equal text do the same."""

    def __init__(self) -> None:
        self.learnt: dict[Key, Lesson] = {}
        self.ledger = Ledger()
        self.turns: Mapping[str, Iterator[str]] = {}  # of functions, the calls that they run for, in order

    def enter(self, function: Learnt, arguments: tuple[Any, ...]) -> Call:
        """Called by a function that begins."""
        self.ledger.call = next(self.turns.get(function.name, iter(())), "")
        places: dict[int, int] = {}
        leaves = list(_leaves(arguments))
        same = tuple(places.setdefault(self._memory(leaf), len(places)) for leaf in leaves)
        # What a function does to memory doesn't depend on where in theirs its arguments begin.
        seen = tuple(_sight(leaf)[:3] for leaf in leaves)
        return Call(self, function, (function.text, seen, same), same)

    def _memory(self, leaf: Leaf | Tensor) -> int:
        """The identity of what is behind a tensor."""
        owner = leaf.owner if isinstance(leaf, Leaf) else leaf
        block = owner.block if isinstance(owner, Owned) else self.ledger.block(owner)
        return storage_key(owner) if block is None and isinstance(owner, Tensor) else id(block)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """A function of a stage's module: `region` is in front of its values' names."""

    name: str
    region: str
    text: str
    file: str


class Call:
    """One call of a function."""

    def __init__(self, lessons: Lessons, function: Learnt, key: Key, same: tuple[int, ...]) -> None:
        self._lessons = lessons
        self._ledger = lessons.ledger
        self._function = function
        self._key = key
        self._same = same
        self._held: list[Leaf | Tensor | None] = []
        self._stood: dict[int, int] = {}  # stand-ins' storages -> an argument's number

    @property
    def known(self) -> bool:
        return self._key in self._lessons.learnt

    def play(self, arguments: list[Any]) -> Any:
        """Do what the function did. Nothing else may refer to what the list has."""
        lesson = self._lessons.learnt[self._key]
        leaves: list[Leaf | Tensor | None] = list(_leaves(arguments))
        arguments.clear()
        passed = {item.number: leaves[item.number] for item in _leaves(lesson.result, _Argument)}
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
        """Other tensors like the arguments: their ends are the function's doing."""
        self._held = list(_leaves(arguments))
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
        """The function comes to a line of its file."""
        self._ledger.line = f"{self._function.file}:{line}"

    def named(self, name: str, value: Any) -> None:
        """What the function calls a value."""
        block = self._ledger.block(value) if isinstance(value, Tensor) else None
        if block is not None and not block.name:
            block.name = f"{self._function.region}.{name}"

    def leave(self, result: Any) -> Any:
        """Called with what the function returns."""
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
        tensors = list(_leaves(result))

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
        """Tensors for the caller to compute with; those in plain tuples of a result are saved, and wait."""
        self._ledger.call = self._ledger.line = ""

        def handed(item: Any) -> Any:
            if hasattr(item, "_fields"):
                return _mapped(item, lambda x: self._tensor(x, returned, "gradients"))
            return self._saved(item, returned) if isinstance(item, tuple) else self._tensor(item, returned)

        if isinstance(result, tuple) and not hasattr(result, "_fields"):
            return tuple(map(handed, result))
        return None if result is None else handed(result)

    def _saved(self, items: tuple[Any, ...], returned: Callable[[Any], Leaf | Tensor]) -> Any:
        def waiting(item: Any) -> Leaf | Tensor:
            leaf = returned(item)
            self._outlives(leaf, "activations")
            return leaf

        return _mapped(items, waiting)

    def _outlives(self, leaf: Leaf | Tensor, category: str) -> None:
        """What was made in passing is kept for something."""
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
            base = torch.empty(owner.block.bytes, dtype=torch.uint8, device="meta")
            kept = [owner]
            self._ledger.watch(base, owner.block, kept.clear)
            return _seen(base, leaf.sight)


def _passed(leaf: Leaf | Tensor | None, sight: Sight | None) -> Leaf | Tensor:
    """An argument that is a result, seen otherwise if a sight is given."""
    assert leaf is not None
    if sight is None:
        return leaf
    return Leaf(leaf.owner if isinstance(leaf, Leaf) else leaf, sight)


def _seen(x: Tensor, sight: Sight) -> Tensor:
    """The same memory otherwise."""
    dtype, shape, stride, offset = sight
    flat = x if x.dtype == dtype else x.view(-1).view(dtype)
    return flat.as_strided(shape, stride, offset)


def _steps(heard: Iterable[Event]) -> list[tuple[Surge, tuple[int, ...]]]:
    """What the function had for itself at most, up to the end of each argument and up to its own."""
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


def _leaves(value: Any, kind: Any = (Leaf, Tensor)) -> Iterator[Any]:
    """All of a kind in tuples, lists and dicts, in order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item, kind)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item, kind)


def _mapped(value: Any, each: Callable[[Any], Any]) -> Any:
    """The same structure of other leaves."""
    if isinstance(value, Leaf | Tensor | _Argument | _New):
        return each(value)
    if isinstance(value, tuple):
        items = [_mapped(item, each) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_mapped(item, each) for item in value]
    if isinstance(value, dict):
        return {key: _mapped(item, each) for key, item in value.items()}
    return value


# -- the emitted modules -----------------------------------------------------------------------


def stage_class(text: str, file: str, regions: Mapping[str, str], lessons: Lessons, given: Mapping[str, Any]) -> Any:
    """The Stage of an emitted module, whose functions learn. `regions` has those of functions; `given` replaces names.

    The module is what codegen has just made: nothing that a folder holds is run.
    """
    tree = ast.parse(text)
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.Import) and node.names[0].name in given)
        and not (isinstance(node, ast.ImportFrom) and node.module == "runtime.compiled")
    ]
    functions: dict[str, Learnt] = {}
    lines = text.split("\n")
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "runtime":
            node.module = f"partc.{node.module}"
        elif isinstance(node, ast.FunctionDef):
            source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            source = source.replace(ast.get_docstring(node, clean=False) or "", "", 1)
            region = regions.get(node.name, node.name)
            functions[node.name] = Learnt(name=node.name, region=region, text=source, file=file)
            node.decorator_list = []  # what is compiled holds what it is made of, or less
            _instrument(node)
    names: dict[str, Any] = {"__name__": f"partc.rehearsed.{file}", "_lessons": lessons, "_functions": functions}
    exec(compile(ast.fix_missing_locations(tree), file, "exec"), names)
    names.update(given)
    return names["Stage"]


def _instrument(function: ast.FunctionDef) -> None:
    """Tell `_lessons` what the function does; see the module's own words."""
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
    function.body = [*ast.parse(opening).body, *body, closing]


def _told(method: str, *arguments: ast.expr) -> ast.stmt:
    """`_call.method(arguments)`"""
    function = ast.Attribute(ast.Name("_call", ast.Load()), method, ast.Load())
    return ast.Expr(ast.Call(function, list(arguments), []))
