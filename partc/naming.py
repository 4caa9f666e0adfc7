"""Names for values, from the model's own words: its modules and its variables."""

from __future__ import annotations

import ast
import keyword
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from partc.errors import Source
from partc.program import Op

_PLAIN = re.compile(r"\W+")
# Values that normalize makes of a loss: their names say what they are.
GIVEN = frozenset({"nll", "nll_sum", "counted", "counted_as_number", "count", "error", "squares", "squares_sum"})
# Operations that a module of their own usually stands for: its name is the best one for the result.
_LEAVES = frozenset({"linear", "matmul", "embedding", "rms_norm", "layer_norm", "conv1d", "conv2d"})


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement of the model's code: where it starts, and the variables it assigns ('out' if it returns)."""

    file: str
    line: int
    targets: tuple[str, ...]


def identifier(text: str) -> str:
    """A Python identifier that reads like `text`."""
    name = _PLAIN.sub("_", text).strip("_") or "value"
    return f"_{name}" if name[0].isdigit() or keyword.iskeyword(name) else name


def unique(stem: str, taken: set[str]) -> str:
    """`stem`, or `stem_2`, `stem_3`, …; the name is then taken."""
    name, count = stem, 1
    while name in taken:
        count += 1
        name = f"{stem}_{count}"
    taken.add(name)
    return name


def name_values(ops: Sequence[Op], prefix: str, taken: Iterable[str]) -> dict[str, str]:
    """A readable name for every value that `ops` define, for operations inside the module `prefix`.

    What a statement ends with has the variable's name, under that of the module: `attn_q`. What
    comes before is called after its module, or after the module and the operation.
    """
    statements = [statement_of(op.source) for op in ops]
    names: dict[str, str] = {}
    used = set(taken)
    for index, (op, at) in enumerate(zip(ops, statements, strict=True)):
        ends = at is not None and (index + 1 == len(ops) or statements[index + 1] != at)
        targets = at.targets if at is not None and ends and len(at.targets) == len(op.results) else ()
        path = _inside(op.source.module if op.source else "", prefix)
        for position, value in enumerate(op.results):
            if (given := value.name.removesuffix("_whole")) in GIVEN:
                names[value.name] = unique(given, used)
                continue
            parts = _parts(op, path, targets[position] if targets else None, position)
            names[value.name] = unique(identifier("_".join(parts)), used)
    return names


def _parts(op: Op, path: list[str], target: str | None, position: int) -> list[str]:
    leaf = op.name in _LEAVES and bool(path)
    if target == "out" and path:
        return path[-2:] if leaf else path[-1:]
    if target is not None:
        parts = [*(path[-2:-1] if leaf else path[-1:]), target]
    elif leaf:
        parts = path[-2:]
    else:
        parts = [*path[-1:], op.name if len(op.results) == 1 else f"{op.name}_{position}"]
    return [part for index, part in enumerate(parts) if not index or part != parts[index - 1]]


def _inside(module: str, prefix: str) -> list[str]:
    rest = module.removeprefix(prefix).removeprefix(".") if prefix and module.startswith(prefix) else module
    return [part for part in rest.split(".") if part]


def statement_of(source: Source | None) -> Statement | None:
    """The assignment or return that a line of code belongs to, if the file can be read."""
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
