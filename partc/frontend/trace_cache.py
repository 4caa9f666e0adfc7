"""Traced programs of earlier compiles, as text in a folder of the user's.

A trace follows from the model's sources, its options, the precision, and the versions of partc and of the packages that
the sources import. These form an entry's key; mesh and microbatches do not. An entry also names the files that were
read while the model was built, and is valid as long as they are unchanged.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from partc.errors import PartcError
from partc.frontend.captured_program import ONE_BATCH, Batches
from partc.frontend.model_files.huggingface import is_configuration, model_source
from partc.frontend.model_files.model_file import load
from partc.frontend.model_files.own_optimizer import OwnOptimizer
from partc.frontend.model_files.user_modules import imported_by
from partc.frontend.results import Purpose
from partc.frontend.trace import Traced, configuration_name, generated_model_file, trace_loaded
from partc.frontend.trace import trace_file as traced_anew
from partc.installed import is_installed
from partc.ir.mesh import Mesh
from partc.ir.operators import resolve
from partc.ir.parser import parse
from partc.ir.printer import print_program
from partc.ir.program import Program
from partc.quoting import shown
from partc.runtime.documents import contents
from partc.runtime.whole_files import replacing
from partc.settings import settings

MOST_ENTRIES = 64  # the oldest is removed first
_MODEL = "model.py"  # the model file's name in entries
_ENVIRONMENT = ("environ", "getenv")


def trace_file(
    path: Path,
    options: Mapping[str, str],
    *,
    mesh: Mesh,
    batches: Batches = ONE_BATCH,
    precision: str = "fp32",
    purpose: Purpose = "loss",
) -> Traced:
    """`trace.trace_file`, of an earlier trace where nothing has changed. Raises PartcError P0201 to P0233."""
    folder = _folder()
    if folder is None:
        return traced_anew(path, options, mesh=mesh, batches=batches, precision=precision, purpose=purpose)
    separate = batches.microbatches if batches.separate else 0
    how = {"precision": precision, "separate": separate, "purpose": purpose}
    if not is_configuration(path):
        return _cached(folder, path, options, how, mesh=mesh, batches=batches)
    source = model_source(str(path))
    entry = folder / f"{_key({_MODEL: source.encode()}, options, how)}.json"
    known = _read(entry, configuration_name(str(path)), str(path), mesh=mesh, batches=batches)
    if known is not None:
        return replace(known, model_source=source)
    with generated_model_file(str(path), source) as file:
        return _cached(folder, file, options, how, mesh=mesh, batches=batches)


def _cached(
    folder: Path,
    path: Path,
    options: Mapping[str, str],
    how: Mapping[str, Any],
    *,
    mesh: Mesh,
    batches: Batches,
) -> Traced:
    with _reading() as read:
        file = load(path, options)
        given = {name: str(value) for name, value in file.options.items()}
        own = imported_by(path)
        key = _key({_MODEL: file.source.encode(), **own}, given, how)
        known = _read(folder / f"{key}.json", file.name, str(path.absolute()), mesh=mesh, batches=batches)
        if known is not None:
            evaluates = file.evaluate is not None
            return replace(known, model_source=file.source, options=file.options, evaluates=evaluates)
        traced = trace_loaded(file, mesh=mesh, batches=batches, precision=how["precision"], purpose=how["purpose"])
    if imported_by(path) == own:  # otherwise forward imports modules that are not in the key
        _write(folder / f"{key}.json", traced, path, read)
    return traced


def _key(sources: Mapping[str, bytes], options: Mapping[str, str], how: Mapping[str, Any]) -> str:
    """The digest of everything on which a trace depends."""
    imported = {name for text in sources.values() for name in _imported(text)}
    facts: dict[str, Any] = {
        "sources": {name: hashlib.sha256(text).hexdigest() for name, text in sorted(sources.items())},
        "options": dict(sorted(options.items())),
        "how": how,
        "versions": {name: _version(name) for name in sorted({"torch", *imported})},
        "python": sys.version,
        "partc": _compiler(),
        "cuda": torch.cuda.is_available(),
    }
    if any(word.encode() in text for text in sources.values() for word in _ENVIRONMENT):
        facts["environment"] = dict(sorted(os.environ.items()))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _imported(text: bytes) -> Iterator[str]:
    """The top-level packages that a source imports."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(package), "__version__", ""))


@functools.cache
def _compiler() -> str:
    """The digest of partc's sources on which a trace depends."""
    root = Path(__file__).parents[1]
    folders = [root.glob("*.py"), *((root / name).rglob("*.py") for name in ("frontend", "ir", "rules", "runtime"))]
    texts = (path.read_bytes() for found in folders for path in sorted(found))
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def _folder() -> Path | None:
    """PARTC_CACHE, or a folder among the user's caches; None if PARTC_CACHE is empty."""
    named = settings().cache
    if named is not None:
        return Path(named) if named else None
    above = os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME") or tempfile.gettempdir()) / ".cache"
    return Path(above) / "partc" / "traces"


# -- entries -----------------------------------------------------------------------------------


def _read(entry: Path, name: str, path: str, *, mesh: Mesh, batches: Batches) -> Traced | None:
    """The entry's trace with this mesh, if the entry exists and the files that it names are unchanged."""
    try:
        digest, _, text = contents(entry).partition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() != digest:
            return None  # damaged
        found = json.loads(text)
        if any(_state(Path(file)) != state for file, state in found["files"].items()):
            return None
        program = parse(found["program"])
        for op in (op for region in program.regions for op in region.forward.ops if "::" in op.name):
            resolve(op.name)  # fails where model() itself imports the library of an operation
        entry.touch()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, PartcError):  # truncated, or not an entry
        return None
    program = _placed(program, _MODEL, path)
    own = found["optimizer"]
    return Traced(
        program=replace(program, name=shown(name), mesh=mesh, microbatches=batches.microbatches),
        constants=found["constants"],
        model_source="",
        options=found["options"],
        assumed=tuple(found["assumed"]),
        optimizer=own and OwnOptimizer(**own | {"groups": tuple(own["groups"])}),
    )


def _write(entry: Path, traced: Traced, path: Path, read: Iterable[str]) -> None:
    """Add an entry, unless the folder cannot be written."""
    others = (file for file in dict.fromkeys(read) if Path(file).parent != entry.parent.absolute())
    files = {file: _state(Path(file)) for file in others}
    document = {
        "files": {file: state for file, state in files.items() if state},
        "options": dict(traced.options),
        "constants": dict(traced.constants),
        "assumed": traced.assumed,
        "optimizer": traced.optimizer and asdict(traced.optimizer),
        "program": print_program(_placed(traced.program, str(path.absolute()), _MODEL), sources=True),
    }
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(document).encode()
        with replacing(entry) as file:
            file.write(b"%s\n%s" % (hashlib.sha256(text).hexdigest().encode(), text))
        entries = sorted(entry.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)
        for old in entries[:-MOST_ENTRIES]:
            old.unlink(missing_ok=True)
    except OSError:
        return


def _placed(program: Program, before: str, after: str) -> Program:
    """The program with the source file of its operations replaced."""

    def op(each: Any) -> Any:
        moved = each.source is not None and each.source.file == before
        return replace(each, source=replace(each.source, file=after)) if moved else each

    return replace(
        program,
        regions=tuple(
            replace(region, forward=replace(region.forward, ops=tuple(map(op, region.forward.ops))))
            for region in program.regions
        ),
    )


def _state(path: Path) -> list[int]:
    """A file's size and modification time; empty if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns] if stat.S_ISREG(found.st_mode) else []


# -- files that a model reads ------------------------------------------------------------------


@contextmanager
def _reading() -> Iterator[list[str]]:
    """A context whose list names the user's files that are read inside it."""
    read: list[str] = []
    readers = _readers()
    readers.append(read)
    try:
        yield read
    finally:
        readers.pop()


@functools.cache
def _readers() -> list[list[str]]:
    """The lists that receive the path of every opened file. The audit hook stays until the process ends."""
    readers: list[list[str]] = []

    def opened(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not readers or not isinstance(arguments[0], str | bytes):
            return
        path = Path(os.fsdecode(arguments[0])).absolute()
        code = path.suffix in (".py", ".pyc")  # imported modules are in the key
        if not code and not is_installed(path):
            for each in readers:
                each.append(str(path))

    sys.addaudithook(opened)
    return readers
