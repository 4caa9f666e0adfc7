"""The user's model file: its required functions, its options, and its errors."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from partc.errors import PartcError, Source, first_line
from partc.frontend.model_files.example_files import example_hint
from partc.frontend.model_files.user_modules import FOLDER
from partc.installed import is_machinery

Option = int | float | bool | str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A loaded model file: its functions with the options applied, and its text.

    `options` are the given ones, converted to the types of the parameters' defaults.
    """

    name: str
    path: Path
    source: str
    options: Mapping[str, Option]
    model: Callable[[], Any]
    batch: Callable[[], Any]
    loss: Callable[[Any, Any], Any] | None
    evaluate: Callable[[Any, Any], Any] | None
    infer: Callable[[Any, Any], Any] | None
    optimizer: Callable[[Any], Any] | None


def load(path: Path, options: Mapping[str, str]) -> ModelFile:
    """Import a model file and apply `-D` options to its functions.

    Raises PartcError P0201 (no such file), P0202 (the import fails), P0203 (a function is missing), P0204 (an unknown
    option, or a wrong type).
    """
    if not is_file(path):
        raise PartcError("P0201", f"there is no model file {path}", help=example_hint(path))
    source = _text(path)
    module = _imported(path)
    known = ("model", "batch", "loss", "data", "evaluate", "infer", "optimizer")
    functions = {name: getattr(module, name, None) for name in known}
    for name in ("model", "batch"):
        if not callable(functions[name]):
            raise PartcError(
                "P0203",
                f"{path} defines no function {name}()",
                help="a model file has model(**options) and batch(**options); partc explain P0203 shows one",
                source=Source(file=str(path), line=1),
            )
    converted = _converted(options, [functions["model"], functions["batch"]], functions["data"], path)
    model, batch = (_applied(functions[name], converted, path) for name in ("model", "batch"))
    loss, evaluate, infer, optimizer = (
        functions[name] if callable(functions[name]) else None for name in ("loss", "evaluate", "infer", "optimizer")
    )
    return ModelFile(
        name=path.stem,
        path=path,
        source=source,
        options=converted,
        model=model,
        batch=batch,
        loss=loss,
        evaluate=evaluate,
        infer=infer,
        optimizer=optimizer,
    )


def is_file(path: Path) -> bool:
    """Whether the path is a file; False for invalid names."""
    try:
        return path.is_file()
    except OSError:  # an invalid file name
        return False


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise PartcError("P0201", f"{path} cannot be read: {error.strerror}", help="give a readable file") from error
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise PartcError(
            "P0202", f"{path} is not UTF-8 text", help="save it as UTF-8", source=Source(file=str(path), line=line)
        ) from error


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"partc_model_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise PartcError("P0202", f"{path} is not a Python file", help="model files end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up while it runs
    try:
        with _importable(path):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise PartcError(
            "P0202",
            f"{path} does not import: {type(error).__name__}: {first_line(error)}",
            help="run it with python to see the whole error",
            source=user_line(error, path),
        ) from error
    return module


@contextmanager
def _importable(path: Path) -> Iterator[None]:
    """A context in which modules in the file's folder, and a package's sources, can be imported."""
    folder = path.parent.resolve()
    inside = [folder / FOLDER] if is_file(folder / "plan.json") else []
    added = [str(each) for each in (*inside, folder)]
    sys.path[:0] = added
    try:
        yield
    finally:
        for each in added:
            sys.path.remove(each)


def user_line(error: BaseException, path: Path | None = None) -> Source | None:
    """The innermost line of the user's own file in the traceback; else the innermost line outside torch and partc."""
    if isinstance(error, SyntaxError) and error.filename:
        return Source(file=error.filename, line=error.lineno or 1)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    own = [frame for frame in frames if path is not None and Path(frame.filename) == path]
    foreign = [frame for frame in frames if not is_machinery(frame.filename)]
    chosen = (own or foreign)[-1:]
    return Source(file=chosen[0].filename, line=chosen[0].lineno or 1) if chosen else None


def _converted(options: Mapping[str, str], functions: list[Any], data: Any, path: Path) -> dict[str, Option]:
    from partc.runtime.train.data import takes_step  # which loads torch

    known = {name: parameter for function in functions for name, parameter in _parameters(function).items()}
    if callable(data) and not hasattr(data, "__iter__"):
        known = dict(list(_parameters(data).items())[takes_step(data) :]) | known
    open_ended = any(_takes_any(function) for function in (*functions, *([data] if callable(data) else [])))
    found: dict[str, Option] = {}
    for name, text in options.items():
        if name not in known and not open_ended:
            raise PartcError(
                "P0204",
                f"{path} has no option {name!r}",
                help=f"its options are {', '.join(sorted(known)) or 'none'}",
                source=Source(file=str(path), line=1),
            )
        found[name] = _value(name, text, known.get(name), path)
    return found


def _value(name: str, text: str, parameter: inspect.Parameter | None, path: Path) -> Option:
    if parameter is None:
        return text
    default = parameter.default
    kind = type(default) if default is not inspect.Parameter.empty and default is not None else parameter.annotation
    kind = {"int": int, "float": float, "bool": bool, "str": str}.get(kind, kind) if isinstance(kind, str) else kind
    if kind is bool and text.lower() in ("1", "true", "yes", "0", "false", "no"):
        return text.lower() in ("1", "true", "yes")
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    elif kind is not bool:
        return text
    raise PartcError(
        "P0204",
        f"option {name}={text!r} is not {'an' if kind is int else 'a'} {kind.__name__}",
        help=f"{path} has {name}: {kind.__name__}",
        source=Source(file=str(path), line=1),
    )


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in _signature(function).parameters.items() if p.kind in named}


def _takes_any(function: Any) -> bool:
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in _signature(function).parameters.values())


def _signature(function: Any) -> inspect.Signature:
    """The parameters of a callable; none for builtins such as dict, which do not report them."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return inspect.Signature()


def _applied(function: Any, options: Mapping[str, Option], path: Path) -> Callable[[], Any]:
    taken = options if _takes_any(function) else {k: v for k, v in options.items() if k in _parameters(function)}

    def call() -> Any:
        with _importable(path):
            return function(**taken)

    return call
