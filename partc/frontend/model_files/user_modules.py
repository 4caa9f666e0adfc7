"""The user's own modules that a model imports; its package contains their files, in `sources/`."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from partc.errors import PartcError, Source
from partc.installed import is_installed

FOLDER = "sources"
# The names of a package's own modules.
RESERVED = frozenset({"regions", "stages", "ranks", "runtime", "kernels", "evaluation"})


def imported_by(path: Path, package: str = "") -> dict[str, bytes]:
    """The user's own modules that a file imports, directly and indirectly.

    `path` is the file of a module in `package`. Keys are paths in the package. Imports inside functions count
    once they have run. Raises PartcError P0215 for a name that packages use themselves.
    """
    found: dict[str, bytes] = {}
    waiting = [(path, package)]
    while waiting:
        at, package = waiting.pop()
        for name, line in _imports(at, package):
            file = _own_file(name)
            if file is None:
                continue
            if name.partition(".")[0] in RESERVED:
                raise PartcError(
                    "P0215",
                    f"{at.name} imports {name}, which is also a module of every package",
                    help=f"rename {file.name}; taken are {', '.join(sorted(RESERVED))}",
                    source=Source(file=str(at), line=line),
                )
            is_package = file.name == "__init__.py"
            target = f"{FOLDER}/{name.replace('.', '/')}{'/__init__' if is_package else ''}.py"
            if target not in found:
                found[target] = file.read_bytes()
                waiting.append((file, name if is_package else name.rpartition(".")[0]))
    return found


def with_imports(module: str, name: str) -> dict[str, bytes]:
    """The files of a loaded module under another name, of its packages and of their imports; empty if installed."""
    file = _own_file(module)
    if file is None:
        return {}
    found = {f"{FOLDER}/{name.replace('.', '/')}.py": file.read_bytes()}
    parents = [name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)]
    for parent in parents:
        above = _own_file(parent)
        if above is not None:
            found[f"{FOLDER}/{parent.replace('.', '/')}/__init__.py"] = above.read_bytes()
            found |= imported_by(above, parent)
    return found | imported_by(file, module.rpartition(".")[0])


def _imports(path: Path, package: str) -> Iterator[tuple[str, int]]:
    """All modules that the file's import statements may name, with their lines."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            if node.level and not package:
                continue
            base = importlib.util.resolve_name(start, package) if node.level else start
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            yield from ((".".join(parts[:count]), node.lineno) for count in range(1, len(parts) + 1))


def _own_file(module: str) -> Path | None:
    """The Python file of a loaded module; None if it is installed or belongs to partc or the standard library."""
    name = getattr(sys.modules.get(module), "__file__", None)
    if name is None:
        return None
    path = Path(name).resolve()
    return None if path.suffix != ".py" or is_installed(path) else path
