"""Readable names for values, from the model's modules and variables."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from partc.errors import Source
from partc.ir.naming import COUNTED, EXTENDED, PRODUCT, WHOLE, ZIGZAG, unique, unreserved
from partc.ir.program import Op, makers
from partc.quoting import identifier

# Values that passes derive from a loss; their names are descriptive already.
_GIVEN = frozenset(
    {"nll", "nll_sum", "counted", "counted_as_number", "count", "error", "squares", "squares_sum", "added"}
)
# Operations that are usually a whole module, whose name is the best name for the result.
_LEAVES = frozenset({"linear", "matmul", "embedding", "rms_norm", "layer_norm", "conv1d", "conv2d"})
_SHOWING = frozenset({"reshape", "permute", "expand", "to"})  # their results are named after their operands
_VAGUE = frozenset({"x", "y", "h", "output"})  # variables that say less than a module's name


_MADE = (EXTENDED, ZIGZAG, COUNTED)


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement of the model's code: its start, and the variables that it assigns ('out' for a return)."""

    file: str
    line: int
    targets: tuple[str, ...]


def name_values(ops: Sequence[Op], prefix: str, taken: Iterable[str]) -> dict[str, str]:
    """A readable name for every value that `ops` define, for operations inside the module `prefix`.

    The last value of a statement gets the variable's name, prefixed by the module: `attn_q`. Earlier values are named
    after their module, or after the module and the operation. A view is named after its operand.
    """
    statements = [statement_of(op.source) for op in ops]
    reused, owners = _reused(statements), _owners(ops, statements)
    names: dict[str, str] = {}
    used = set(taken)
    made_by = makers(ops)
    for index, (op, at) in enumerate(zip(ops, statements, strict=True)):
        ends = at is not None and _ends(index, statements, owners)
        targets = at.targets if at is not None and ends and len(at.targets) == len(op.results) else ()
        path = _path_parts(op.module, prefix)
        for position, value in enumerate(op.results):
            stem = value.name.removesuffix(WHOLE)
            if stem in _GIVEN:
                names[value.name] = unique(stem, used)
                continue
            if op.source is None and (made := next((each for each in _MADE if stem.endswith(each)), "")):
                root = _root(op, made_by)
                names[value.name] = unique(names.get(root, root) + made, used)
                continue
            if not targets and op.name in _SHOWING and (viewed := next(op.refs())) in names:
                names[value.name] = unique(re.sub(r"_\d+$", "", names[viewed]), used)
                continue
            parts = _parts(op, path, targets[position] if targets else None, position, reused)
            names[value.name] = unique(unreserved(identifier("_".join(parts))), used)
    return names


def _root(op: Op, made_by: Mapping[str, Op]) -> str:
    """The value from which operations without a source computed this one."""
    name = next(op.refs())
    while name in made_by and made_by[name].source is None and [*made_by[name].refs()]:
        name = next(made_by[name].refs())
    return name


def _ends(index: int, statements: Sequence[Statement | None], owners: Sequence[str]) -> bool:
    """Whether no later operation belongs to the same execution of the statement.

    Between two operations of one execution there are only operations of modules that the statement calls.
    """
    at, owner = statements[index], owners[index]
    if at in statements[index + 1 : index + 2]:
        return False
    for other, place in zip(statements[index + 1 :], owners[index + 1 :], strict=True):
        if other == at and place == owner:
            return False
        if place == owner or not place.startswith(f"{owner}." if owner else ""):
            return True
    return True


def _owners(ops: Sequence[Op], statements: Sequence[Statement | None]) -> list[str]:
    """For each operation, the module whose forward contains its statement; this may be an outer module."""
    modules: dict[Statement | None, set[str]] = {}
    paths = [op.module for op in ops]
    for path, at in zip(paths, statements, strict=True):
        modules.setdefault(at, set()).add(path)
    return [
        min((other for other in modules[at] if not other or f"{path}.".startswith(f"{other}.")), key=len)
        for path, at in zip(paths, statements, strict=True)
    ]


def _reused(statements: Sequence[Statement | None]) -> frozenset[str]:
    """Variables that several statements assign; their names say less than the module's."""
    places: dict[str, set[tuple[str, int]]] = {}
    for at in statements:
        for target in at.targets if at else ():
            places.setdefault(target, set()).add((at.file, at.line) if at else ("", 0))
    return frozenset(target for target, found in places.items() if len(found) > 1)


def _parts(op: Op, path: list[str], target: str | None, position: int, reused: frozenset[str]) -> list[str]:
    if op.results[position].name.removesuffix(WHOLE).endswith(PRODUCT) and path:
        return [*path[-2:], "product"]
    leaf = bool(path) and (op.name in _LEAVES or _adds_bias(op))
    if path and (target == "out" or (leaf and (target in reused or target in _VAGUE))):
        return path[-2:] if leaf else path[-1:]
    if target is not None:
        parts = [*(path[-2:-1] if leaf else path[-1:]), target]
    elif leaf:
        parts = path[-2:]
    else:
        parts = [*path[-1:], op.name.strip("_") if len(op.results) == 1 else f"{op.name}_{position}"]
    return [part for index, part in enumerate(parts) if not index or part != parts[index - 1]]


def _adds_bias(op: Op) -> bool:
    """Whether the operation is the bias addition that normalize split off a linear operation."""
    first = next(op.refs(), "").removesuffix(WHOLE)
    return op.name == "add" and first == f"{op.results[0].name.removesuffix('_whole')}{PRODUCT}"


def _path_parts(module: str, prefix: str) -> list[str]:
    rest = module.removeprefix(prefix).removeprefix(".") if prefix and module.startswith(prefix) else module
    return [part for part in rest.split(".") if part]


def statement_of(source: Source | None) -> Statement | None:
    """The assignment or return that contains a line of code, if the file can be read."""
    if source is None or not source.line:
        return None
    return _statements(source.file).get(source.line)


@lru_cache(maxsize=256)
def _statements(file: str) -> Mapping[int, Statement]:
    path = next((p for p in (Path(file), *(Path(folder) / file for folder in sys.path)) if p.is_file()), None)
    if path is None:
        return {}
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return {}
    found: dict[int, Statement] = {}
    for node in ast.walk(tree):
        targets = _targets(node)
        if targets is None or not isinstance(node, ast.stmt):
            continue
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            found[line] = Statement(file, node.lineno, targets)
    return found


def _targets(node: ast.AST) -> tuple[str, ...] | None:
    match node:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AugAssign(target=ast.Name(id=name)):
            return (name,)
        case ast.AnnAssign(target=ast.Name(id=name)):
            return (name,)
        case ast.Assign(targets=[ast.Tuple(elts=elements)]) if all(isinstance(e, ast.Name) for e in elements):
            return tuple(e.id for e in elements if isinstance(e, ast.Name))
        case ast.Return():
            return ("out",)
    return None
