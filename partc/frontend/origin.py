"""The origin of a model, a model file or Python objects, and the model file that its package gets."""

from __future__ import annotations

import ast
import copy
import hashlib
import inspect
import io
import keyword
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partc.errors import PartcError, first_line
from partc.frontend.captured_program import Batches
from partc.frontend.model_files.huggingface import is_configuration
from partc.frontend.model_files.user_modules import RESERVED, imported_by, with_imports
from partc.frontend.results import Purpose, in_evaluation, read_for
from partc.frontend.state.flags import is_flag
from partc.frontend.trace import Traced, trace_model
from partc.frontend.trace_cache import trace_file
from partc.ir.gradients import trains
from partc.ir.mesh import Mesh
from partc.ir.program import Program
from partc.quoting import environment
from partc.runtime.documents import Malformed
from partc.runtime.train.entries import entries, rebuilt_batch, types
from partc.settings import PASSES, settings

WEIGHTS, BATCH = "model.pt", "batch.pt"
_RENAMED = "given_model"  # replaces the name of a function's file if packages use that name


@dataclass(frozen=True, slots=True, kw_only=True)
class Functions:
    """The user's functions that accompany a model given as an object."""

    loss: Callable[..., Any] | None = None
    evaluate: Callable[..., Any] | None = None
    infer: Callable[..., Any] | None = None

    def lines(self, extra: dict[str, bytes]) -> list[str]:
        """The lines that import the functions; their files are added to `extra`."""
        given = {"loss": self.loss, "evaluate": self.evaluate, "infer": self.infer}
        return [_import(function, name, extra) for name, function in given.items() if function is not None]


def trace(
    model: Any,
    batch: Any,
    functions: Functions,
    *,
    options: Mapping[str, Any],
    mesh: Mesh,
    batches: Batches,
    precision: str,
    purpose: Purpose = "loss",
) -> Traced:
    """Trace any model that `partc.compile` accepts. Raises PartcError P0214, P0215 and the errors of the trace."""
    with _quiet():
        if isinstance(model, str | os.PathLike):
            text = {name: str(value) for name, value in options.items()}
            traced = trace_file(Path(model), text, mesh=mesh, batches=batches, precision=precision, purpose=purpose)
            _check_trains(traced.program)
            return replace(traced, extra={} if is_configuration(model) else imported_by(Path(model)))
        given = _batch(batch)
        packed = saved_model_source if isinstance(model, nn.Module) else _imported
        if isinstance(model, nn.Module):
            build: Callable[[], nn.Module] = lambda: _without_memory(model)  # noqa: E731
            name = type(model).__name__
        elif callable(model):
            build, name = model, getattr(model, "__name__", "model")
        else:
            raise PartcError(
                "P0214",
                f"expected a module, a function or a path, got {type(model).__name__}",
                help="give a path, a module or a function that builds one",
            )
        source, extra = ("", {}) if purpose == "evaluate" else packed(model, given, functions)
        own = getattr(functions, purpose)
        traced = trace_model(
            build if purpose == "loss" else lambda: in_evaluation(build()),
            lambda: given,
            functions.loss if purpose == "evaluate" and own is None else own,
            name=name.lower(),
            mesh=mesh,
            batches=batches,
            precision=precision,
            read=read_for(purpose, own=own is not None),
        )
    _check_trains(traced.program)
    return replace(traced, model_source=source, extra=extra, evaluates=functions.evaluate is not None)


def _check_trains(program: Program) -> None:
    if not program.results and not trains(program):
        raise PartcError(
            "P0217",
            "no gradient of the loss reaches a parameter: nothing would be trained",
            help="something must require gradients, and forward must not detach it from the loss",
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """A context that suppresses torch's log messages before an error that partc explains."""
    before = logging.root.manager.disable
    if settings().debug < PASSES:
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _batch(batch: Any) -> Any:
    """The batch on the CPU. Raises PartcError P0214."""
    found = batch() if callable(batch) and not isinstance(batch, Mapping) else batch
    try:
        held = entries(found)
    except Malformed as error:
        raise PartcError(
            "P0214",
            f"a model given as an object needs its batch, and this one {error}",
            help="partc.compile(model, {'x': tensor, ...}, mesh=...): one global batch, by argument names",
        ) from error
    held = {name: x.detach().cpu() if isinstance(x, Tensor) else x for name, x in held.items()}
    return rebuilt_batch(found, held)


def _without_memory(model: nn.Module) -> nn.Module:
    """A copy of the model on the meta device. Flags are literals, whose values a trace may know."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if is_flag(tensor) and not tensor.is_meta:
            bare = torch.tensor(tensor.tolist(), device="meta")
        else:
            bare = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
    return copy.deepcopy(model, memo)


def saved_model_source(model: nn.Module, batch: Any, functions: Functions) -> tuple[str, dict[str, bytes]]:
    """A model file that loads the pickled model, and the code of its classes unless they are installed."""
    extra = {WEIGHTS: _saved(model)}
    for kind in {type(module) for module in model.modules()}:
        module = _module_of(kind)
        if module == "__main__" or module.partition(".")[0] in RESERVED or not _is_importable(module):
            raise PartcError(
                "P0215",
                f"{kind.__name__} is defined in {module}, which its package could not import",
                help="move the class to a module of another name, or give a function that builds the model",
            )
        extra |= with_imports(module, module)
    imports = functions.lines(extra)
    return _text(batch, extra, imports=imports, weights=WEIGHTS), extra


def _imported(build: Callable[..., Any], batch: Any, functions: Functions) -> tuple[str, dict[str, bytes]]:
    """A model file that imports the function, and the function's code unless it is installed."""
    extra: dict[str, bytes] = {}
    imports = [_import(build, "model", extra), *functions.lines(extra)]
    return _text(batch, extra, imports=sorted(imports), weights=""), extra


def _import(function: Callable[..., Any], name: str, extra: dict[str, bytes]) -> str:
    """The line that imports a function under a name; the function's file is added to `extra`."""
    own = getattr(function, "__qualname__", "")
    if not _is_importable(own) or "." in own:
        raise PartcError(
            "P0215",
            f"{own or function!r} is not a function that a package could import",
            help="define it with a name, at the top level of a module",
        )
    module = _module_of(function)
    if getattr(sys.modules.get(module), own, None) is not function:
        raise PartcError(
            "P0215",
            f"the module {module!r} of {own} is not in sys.modules, or has another object of this name",
            help="add the module to sys.modules before it runs, or give the path of its file to partc.compile",
        )
    target = module
    if module == "__main__":
        target = Path(inspect.getsourcefile(function) or "script.py").stem
        _require_guard(function)
    if target.partition(".")[0] in RESERVED or not _is_importable(target):
        target = _RENAMED
    extra |= with_imports(module, target)
    return f"from {target} import {own}" + ("" if own == name else f" as {name}")


def _is_importable(name: str) -> bool:
    """Whether the name is valid in an import statement."""
    return all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split("."))


def _module_of(item: Any) -> str:
    return str(getattr(item, "__module__", "") or "__main__")


def _require_guard(function: Any) -> None:
    """Check that a script only defines names on import, since its package imports it. Raises PartcError P0215."""
    path = inspect.getsourcefile(function)
    statements = ast.parse(Path(path).read_text()).body if path and Path(path).is_file() else [ast.Pass()]
    defines = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for node in statements:
        guarded = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        calls = isinstance(node, ast.Assign) and "compile(" in ast.unparse(node)
        if calls or not (guarded or text or isinstance(node, defines)):
            raise PartcError(
                "P0215",
                f"{function.__qualname__} is defined in a script that does more than define names when it is imported",
                help='put its actions under `if __name__ == "__main__":`, or the function in a module',
            )


def _saved(item: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(item, buffer)
    except Exception as error:  # pickle raises anything for objects that it cannot name
        raise PartcError(
            "P0215",
            f"torch.save cannot save the model or its batch for a package: {first_line(error)}",
            help="define classes at the top level of a module, or give a function that builds the model",
        ) from error
    return buffer.getvalue()


def _text(batch: Any, extra: dict[str, bytes], *, imports: list[str], weights: str) -> str:
    """The text of the model file. The batch's file is added to `extra`, with the code of types that are not
    installed.
    """
    extra[BATCH] = _saved(dict(batch) if type(batch) is dict else batch)
    plain = _is_plain(extra[BATCH])
    for module in set() if plain else {_module_of(kind) for kind in types(batch)}:
        if module != "builtins":
            extra |= with_imports(module, module)
    digests = {name: hashlib.sha256(extra[name]).hexdigest() for name in (weights, "" if plain else BATCH) if name}
    template = environment().get_template("object_model.py.jinja")
    return template.render(imports=imports, weights=weights, batch=BATCH, digests=digests)


def _is_plain(saved: bytes) -> bool:
    """Whether a saved batch can be read without the code of further types."""
    try:
        torch.load(io.BytesIO(saved), weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True
