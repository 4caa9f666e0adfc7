"""From a model to the IR: one region with the operations of the whole forward pass."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from partc.errors import PartcError
from partc.frontend.branches.outcomes import Outcomes
from partc.frontend.capture import Captured, capture
from partc.frontend.capture.traced_step import Loss
from partc.frontend.captured_program import ONE_BATCH, Batches, program_of
from partc.frontend.every_outcome import OneTrace, Trace, trace_every_outcome
from partc.frontend.model_files.huggingface import PREFIX, is_configuration, model_source
from partc.frontend.model_files.model_file import ModelFile, load
from partc.frontend.model_files.own_optimizer import OwnOptimizer, own_optimizer
from partc.frontend.permissions import BOTH_OUTCOMES, LARGEST_NUMBERS, UNKNOWN_NUMBERS, permission
from partc.frontend.repeats.marks import Excluded
from partc.frontend.repeats.module_rows import UnequalError
from partc.frontend.results import Purpose, Read, in_evaluation, read_for
from partc.frontend.state.first_values import FirstStepsFound
from partc.frontend.trace_errors import RaisedError
from partc.ir.mesh import Mesh
from partc.ir.program import Program
from partc.settings import PASSES, tell
from partc.torch_private import not_compiling, optimized_execution

TRIES = 6  # the most traces; each excludes one more group or row of modules


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A traced model: its program, and the means by which a package builds the model again.

    `model_source` is the text of the package's model.py, which takes `options` and reads the files `extra`. `constants`
    are the entries of the batch that are not tensors, as text.
    """

    program: Program
    constants: Mapping[str, str]
    model_source: str
    options: Mapping[str, Any]
    extra: Mapping[str, bytes] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()  # guards on values, which packages do not run
    optimizer: OwnOptimizer | None = None  # the model file's own
    evaluates: bool = False  # whether there is a function evaluate()


def trace_file(
    path: Path,
    options: Mapping[str, str],
    *,
    mesh: Mesh,
    batches: Batches = ONE_BATCH,
    precision: str = "fp32",
    purpose: Purpose = "loss",
) -> Traced:
    """Trace a model file, or the model of `hf:PATH/config.json`: its loss, or the function of another purpose.

    Raises PartcError P0201 to P0233.
    """
    how: dict[str, Any] = {"mesh": mesh, "batches": batches, "precision": precision, "purpose": purpose}
    if is_configuration(path):
        with generated_model_file(str(path), model_source(str(path))) as file:  # the package gets the same one
            return trace_file(file, options, **how)
    return trace_loaded(load(path, options), **how)


def trace_loaded(file: ModelFile, *, mesh: Mesh, batches: Batches, precision: str, purpose: Purpose = "loss") -> Traced:
    """Trace a model file that has been loaded. Raises PartcError P0205 to P0209."""
    own = {"loss": file.loss, "evaluate": file.evaluate, "infer": file.infer}[purpose]
    function = file.loss if purpose == "evaluate" and own is None else own
    build = file.model if purpose == "loss" else lambda: in_evaluation(file.model())
    read = read_for(purpose, own=own is not None)
    captured, program = _traced(
        build, file.batch, function, name=file.name, mesh=mesh, batches=batches, precision=precision, read=read,
        path=file.path,
    )  # fmt: skip
    return Traced(
        program=program,
        constants=captured.constants,
        model_source=file.source,
        options=file.options,
        assumed=captured.assumed,
        optimizer=own_optimizer(file.optimizer, captured.model, file.path)
        if file.optimizer is not None and purpose == "loss"
        else None,
        evaluates=file.evaluate is not None,
    )


@contextmanager
def generated_model_file(model: str, source: str) -> Iterator[Path]:
    """A context in which the model file of a configuration exists, under the name of the configuration's folder.

    The file is temporary, so errors name the configuration instead.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{configuration_name(model)}.py"
        path.write_text(source, encoding="utf-8")
        try:
            yield path
        except PartcError as error:
            cause, help = (text.replace(str(path), model) for text in (error.cause, error.help))
            own = error.source is not None and error.source.file == str(path)
            raise PartcError(error.code, cause, help=help, source=None if own else error.source) from error


def configuration_name(model: str) -> str:
    return Path(model.removeprefix(PREFIX)).resolve().parent.name or "model"


def trace_model(
    build: Callable[[], nn.Module],
    batch: Callable[[], Any],
    loss: Loss | None = None,
    *,
    name: str,
    mesh: Mesh,
    batches: Batches = ONE_BATCH,
    precision: str = "fp32",
    read: Read | None = None,
) -> Traced:
    """Trace a model given as functions. Raises PartcError P0205 to P0209."""
    captured, program = _traced(
        build, batch, loss, name=name, mesh=mesh, batches=batches, precision=precision, read=read
    )
    return Traced(program=program, constants=captured.constants, model_source="", options={}, assumed=captured.assumed)


def _traced(
    build: Callable[[], nn.Module],
    batch: Callable[[], Any],
    function: Loss | None,
    *,
    name: str,
    mesh: Mesh,
    batches: Batches,
    precision: str,
    read: Read | None,
    path: Path | None = None,
) -> tuple[Captured, Program]:
    """Trace a model. If one with first steps does not trace, its refusal is that of the trace without them."""
    found = FirstStepsFound() if read is None else None

    def trace(excluded: Excluded | None, outcomes: Outcomes, joined: Collection[str]) -> OneTrace:
        captured = capture(
            build, batch, function, precision=precision, path=path, parts=batches.parts, excluded=excluded,
            outcomes=outcomes, joined=joined, read=read, found=found,
        )  # fmt: skip
        return captured, *program_of(captured, name=name, mesh=mesh, batches=batches)

    try:
        return _with_permissions(trace)
    except PartcError as error:
        if found is None or found.refusal is None:
            raise
        raise found.refusal from error


def _with_permissions(trace: Trace) -> tuple[Captured, Program]:
    """Trace a model. If it does not trace otherwise, the largest numbers of entries are constants of the trace,
    branches on values of tensors are followed both ways, and numbers of tensors are places and factors.
    """
    with (
        permission(LARGEST_NUMBERS) as reading,
        permission(BOTH_OUTCOMES) as joining,
        permission(UNKNOWN_NUMBERS) as placing,
    ):
        try:
            return _with_equal_modules(trace)
        except PartcError as error:
            if error.code != "P0206" or not (reading.asked or joining.asked or placing.asked):
                raise
            refusal = error
        if reading.asked:
            reading.allowed = True
            tell(PASSES, "the model is traced with the largest numbers of entries as constants")
            try:
                return _with_equal_modules(trace)
            except PartcError as error:
                refusal = error
        further = {
            "the model is traced with both outcomes of its branches on values": joining,
            "the model is traced with numbers of tensors as places and factors": placing,
        }
        while refusal.code == "P0206":
            sentence = next((text for text, step in further.items() if step.asked), None)
            if sentence is None:
                break
            further.pop(sentence).allowed = True
            tell(PASSES, sentence)
            with suppress(PartcError):
                return _with_equal_modules(trace)
        raise refusal


def _with_equal_modules(trace: Trace) -> tuple[Captured, Program]:
    """Trace equal modules once. Groups that prove unequal are excluded; if that fails too, every call is traced.

    torch.compiler.is_compiling() returns False in the trace; if the trace fails and code asked, it returns True in
    another one.
    """
    excluded: Excluded = frozenset()
    # TorchScript's optimizer detaches the operands of functions that it differentiates itself.
    with not_compiling() as asked, optimized_execution(False):
        for _ in range(TRIES):
            try:
                return trace_every_outcome(trace, excluded)
            except UnequalError as error:
                tell(PASSES, f"modules like those of {error.group} differ in their calls: each is traced")
                excluded |= {error.group}
            except Exception as error:
                tell(PASSES, f"the model is traced as a whole: {type(error).__name__}")
                break
        try:
            return trace_every_outcome(trace, None)
        except PartcError as error:
            if error.code != "P0206":
                raise
            refusal = error
    if not asked:
        raise refusal
    tell(PASSES, "the model is traced with is_compiling() returning True")
    try:  # forward may raise only because it is told that it is compiled
        return trace_every_outcome(trace, None, complete=True)
    except PartcError as later:  # the refusal of an operation says more than a failure in code that asks
        raise (later if isinstance(refusal, RaisedError) else refusal) from None
