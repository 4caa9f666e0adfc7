"""Export of a model's forward pass without allocating weights."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from partc.errors import PartcError, Source
from partc.frontend.branches.outcomes import ABOVE, Outcomes
from partc.frontend.capture.batch import (
    example_count,
    fake_batch,
    first_part,
    form_of_part,
    integer_parts,
    made_batch,
    rows_read_whole,
)
from partc.frontend.capture.built_model import (
    built_model,
    check_members,
    check_pairs,
    make_fake,
    walkable,
)
from partc.frontend.capture.traced_step import Loss, TracedModel, TracedStep, TraceFindings
from partc.frontend.gradients.hooks import module_hooks, own_hooks
from partc.frontend.gradients.own_backward import following_own_backward
from partc.frontend.gradients.transforms import following_transforms
from partc.frontend.permissions import LARGEST_NUMBERS, permitted
from partc.frontend.repeats.marks import CallMark, Excluded, ModuleTree, Repeats
from partc.frontend.repeats.module_rows import ModuleRows, UnequalError, WholeTrace
from partc.frontend.results import Read
from partc.frontend.state.constant_buffers import Recipes
from partc.frontend.state.first_values import FirstStepsFound, first_steps
from partc.frontend.state.frozen_state import check
from partc.frontend.state.replaced_buffers import ReplacedError, with_plain_buffers
from partc.frontend.state.shared_memory import module_pairs, pairs_in_memory, untrained_pairs
from partc.frontend.state.state_watch import StateWatch
from partc.frontend.state.weight_identity import ConstructedWeights
from partc.frontend.trace_errors import explained_error, innermost_user_line
from partc.frontend.traceable_forms.flex_attention import flexible_attention
from partc.installed import is_machinery
from partc.ir.program import Repetition
from partc.runtime.first_steps import FirstSteps
from partc.runtime.train.entries import constants_as_text
from partc.runtime.train.plain_tensors import Members, modules_by_path, with_registered_tensors
from partc.runtime.train.precision import held_in
from partc.torch_private import FakeTensorMode, graphs_without_code, kept_tensors_returned, recorded_stacks


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """An exported program, and its module with names and ties.

    `batch` has the tensors of the batch by path, or their first parts and the `whole` entries that are not divided;
    `constants` has the text of its other entries.
    `trained` names the parameters to which autograd gives a gradient, zeros included. The `grad` of the others stays
    None in eager training, and an optimizer skips them: no decay, no moments, no share of the norm. Where only results
    are traced, it names those that require gradients.
    """

    exported: torch.export.ExportedProgram
    model: nn.Module
    batch: Mapping[str, Tensor]
    whole: tuple[str, ...]
    constants: Mapping[str, str]
    precision: str
    trained: frozenset[str]
    calls: Mapping[int, CallMark]  # the marks in the exported graph
    rows: tuple[Repetition, ...]  # chains of equal modules, of which the exported graph has only some
    results: tuple[str, ...] = ()  # paths of the graph's outputs, where it returns more than a loss
    assumed: tuple[str, ...] = ()  # guards on values, which packages do not run
    tests: tuple[Source, ...] = ()  # lines that test whether a mask selects anything
    most_tests: int = 0  # the largest number of different tests in one call
    passed: Mapping[str, Set[Hashable]] = field(default_factory=dict)  # Python values at calls of equal modules
    integers: tuple[Mapping[str, Tensor], ...] = ()  # for each part of the batch: its integer entries, with values
    largest: Mapping[str, int] = field(default_factory=dict)  # the largest numbers of entries that forward reads
    branches: tuple[tuple[str, int], ...] = ()  # the function and the line of each branch on values
    left: Mapping[tuple[str, str], Any] = field(default_factory=dict)  # Python values that forward changes
    numbers: tuple[Source, ...] = ()  # lines that use the number of selected rows as an integer
    pairs: Mapping[str, str] = field(default_factory=dict)  # buffers, each with another in its memory
    entry_pairs: Mapping[str, str] = field(default_factory=dict)  # entries of the batch, likewise
    steps: FirstSteps | None = None  # attributes that forward sets in the first step


class _FirstStepsError(Exception):
    """A refusal of a model that gives attributes their first values in forward."""

    def __init__(self, refusal: PartcError, steps: tuple[FirstSteps, Any]) -> None:
        super().__init__(str(refusal))
        self.refusal, self.steps = refusal, steps


def capture(
    build: Callable[[], nn.Module],
    make_batch: Callable[[], Any],
    loss: Loss | None,
    *,
    precision: str,
    path: Path | None = None,
    parts: int = 1,
    excluded: Excluded | None = None,
    outcomes: Outcomes = ABOVE,
    joined: Collection[str] = (),
    read: Read | None = None,
    found: FirstStepsFound | None = None,
) -> Captured:
    """Build the model under fake tensors and export it, for one of `parts` equal parts of the batch.

    With `read`, the outputs are the tensors that it finds in the result of `loss`, or of the model. Equal modules are
    traced once, except the groups and rows `excluded`; None traces all calls. `outcomes` are the outcomes of branches
    on random numbers, and of tests of masks on the lines `joined`. `found` receives the first steps of a model whose
    trace is refused because of them, and the model is then traced with them.

    Raises PartcError P0205 (the model or the batch cannot be built), P0206 (it does not trace), P0208 (the loss is not
    a scalar), P0225 (it depends on state that packages do not have), P0401 (the batch does not divide).
    """
    captured = partial(
        _captured, make_batch=make_batch, loss=loss, precision=precision, path=path, parts=parts, excluded=excluded,
        outcomes=outcomes, joined=joined, read=read,
    )  # fmt: skip
    with_states = build if found is None else lambda: found.installed(build())
    while True:
        try:
            return _with_plain_tensors(with_states, partial(captured, steps=None if found is None else found.steps))
        except _FirstStepsError as error:
            if found is None or found.steps is not None:
                raise error.refusal from error
            if excluded is not None:
                raise WholeTrace from error  # an equal module that a trace leaves out has states as well
            found.steps, found.shapes, found.refusal = *error.steps, error.refusal


def _with_plain_tensors(
    build: Callable[[], nn.Module], captured: Callable[[Callable[[], nn.Module]], Captured]
) -> Captured:
    """The capture of a model in which plain tensors are buffers. A plain tensor that forward replaces by a tensor of
    another kind stays one, and a non-persistent buffer that forward replaces in this way becomes one.

    Forward may assign such a tensor before it reads it. If it reads it first, `frozen_state` refuses the model.
    """
    plain: set[str] = set()
    replaced: list[ReplacedError] = []

    def with_buffers() -> nn.Module:
        model = with_registered_tensors(walkable(build()), lambda name: name not in plain)
        return with_plain_buffers(model, plain)

    while True:
        try:
            return captured(with_buffers)
        except PartcError as error:
            assigned = re.search(r"cannot assign '.*' (?:as|object to) buffer '(.+?)'", error.cause)
            name = error.name if isinstance(error, ReplacedError) else assigned and assigned[1]
            if name is None or name in plain:  # another error, or a buffer of the model's own
                for earlier in replaced:
                    if error.code == "P0206" and earlier.name in error.cause:  # read before it is written
                        raise earlier from error
                raise
            plain.add(name)
            if isinstance(error, ReplacedError):
                replaced.append(error)


def _captured(
    build: Callable[[], nn.Module],
    *,
    make_batch: Callable[[], Any],
    loss: Loss | None,
    precision: str,
    path: Path | None,
    parts: int,
    excluded: Excluded | None,
    outcomes: Outcomes,
    joined: Collection[str],
    read: Read | None,
    steps: FirstSteps | None,
) -> Captured:
    """One trace of the model."""
    dtype = held_in(precision)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    recipes = Recipes()
    model = built_model(build, path, recipes)
    named = modules_by_path(model)
    check_members(named)
    pairs = module_pairs(named)
    check_pairs(pairs)
    masks, numbers = recipes.masks(named), recipes.numbers(named)
    members = Members.of(model)
    modules = ModuleTree(named, {**masks, **{name: tuple(x.flatten().tolist()) for name, x in numbers.items()}})
    rows = ModuleRows(modules.named, modules.groups, modules.weights, excluded)
    if any(name.rpartition(".")[0] in rows.left_out for name in numbers):
        raise WholeTrace  # otherwise equal modules may have different numbers
    # Before fake tensors, which have none of their own, replace the weights.
    hooks, weights = own_hooks(modules.named), ConstructedWeights(modules.named)
    make_fake(modules.named, dtype, mode, rows.left_out)
    weights.give_attributes()
    with mode:
        form, entries = made_batch(make_batch, path)
        tensors = {name: x for name, x in entries.items() if isinstance(x, Tensor)}
        every = fake_batch(tensors, mode, dtype)
        batch = first_part(every, parts)
        integers = integer_parts(make_batch, parts) if parts > 1 or permitted(LARGEST_NUMBERS).allowed else ()
        traced = TracedModel(
            model=model,
            loss=loss,
            read=read,
            path=path,
            form=form_of_part(form, example_count(every), parts),
            names=tuple(batch),
            parts=parts,
            dtype=dtype,
            outcomes=outcomes,
            joined=joined,
            hooks=hooks,
            weights=weights,
            members=members,
            masks=masks,
            integers=integers,
            steps=steps,
        )
        exported, findings, assumed, left = _exported(traced, batch, modules, rows, numbers, excluded)
    marked, selections = findings.repeats, findings.selections
    whole = tuple(name for name, x in batch.items() if parts > 1 and x is every[name])
    return Captured(
        exported=exported,
        model=model,
        batch=batch,
        whole=whole,
        constants=constants_as_text(entries),
        precision=precision,
        trained=rows.with_left_out(findings.trained) if read is None else frozenset(_requiring(model)),
        calls=marked.calls,
        rows=rows.all,
        results=() if read is None else findings.paths,
        assumed=(*assumed, *_extra_states(named), *rows_read_whole(every, whole)),
        tests=tuple(selections.tests.sources),
        most_tests=selections.tests.most,
        passed=marked.passed,
        integers=integers if parts > 1 else (),
        largest=findings.largest,
        branches=findings.branches,
        left=left,
        numbers=tuple(selections.numbers),
        pairs=untrained_pairs(pairs),
        entry_pairs=untrained_pairs(pairs_in_memory(tensors)),
        steps=steps,
    )


def _extra_states(modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """A sentence for each module that adds an object of its own to the state dict."""
    for path, module in modules.items():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            name = f"{path}._extra_state".lstrip(".")
            kind = type(module).__name__
            yield f"Checkpoints and exports leave out {name}, the extra state of {kind}: load them with strict=False."


def _exported(
    traced: TracedModel,
    batch: Mapping[str, Tensor],
    modules: ModuleTree,
    rows: ModuleRows,
    numbers: Mapping[str, Tensor],
    excluded: Excluded | None,
) -> tuple[torch.export.ExportedProgram, TraceFindings, tuple[str, ...], Mapping[tuple[str, str], Any]]:
    """The exported step, the findings of its trace, the assumptions made, and the Python values that it changes; state
    that it freezes is refused.
    """
    findings: list[TraceFindings] = []
    watch = StateWatch(traced.model, modules.named, traced.loss)
    assumed: dict[str, None] = {}
    assume = lambda sentence: assumed.update({sentence: None})  # noqa: E731
    whole = excluded is None
    try:
        with (
            following_own_backward(modules.named, assume, traced.parts, whole=whole),
            module_hooks(modules.named, traced.parts),
            recorded_stacks(user_stack),
            graphs_without_code(),
            kept_tensors_returned(),
            following_transforms(whole=whole),
            flexible_attention(),
        ):
            changing: set[int] = set()
            repeats = lambda: Repeats(modules, excluded, rows, changing)  # noqa: E731
            step = TracedStep(traced, watch, repeats, numbers, findings.append, assume)
            with rows.absent():
                exported = step.exported(batch)
                found, left = findings[-1], watch.left()
                outcomes = traced.outcomes
                try:
                    again = lambda: step.exported(batch)  # noqa: E731
                    stops = (UnequalError, WholeTrace)
                    check(exported, watch, again, assume, kept=outcomes.kept, tried=outcomes.tried, stops=stops)
                except PartcError as refusal:
                    # An integer, unlike a boolean, may have another value after each step.
                    changed = tuple(
                        (value, tensor)
                        for value, tensor in found.changed
                        if value.is_tensor or isinstance(value.after, bool) or watch.settled(value.name)
                    )
                    if not changed or traced.steps is not None:
                        raise
                    refusal.source = refusal.source or innermost_user_line(refusal)
                    raise _FirstStepsError(refusal, first_steps(changed, traced.model)) from refusal
    except PartcError as error:
        error.source = error.source or innermost_user_line(error)
        raise
    except (UnequalError, WholeTrace, _FirstStepsError):
        raise
    except (Exception, SystemExit) as error:
        raise explained_error(error, traced.model, traced.path, traced.parts) from error
    finally:
        watch.forget()
    return exported, found, tuple(assumed), left


def _requiring(model: nn.Module) -> Iterator[str]:
    return (name for name, x in model.named_parameters(remove_duplicate=False) if x.requires_grad)


def user_stack() -> traceback.StackSummary:
    """The frames of the user's code within the traced step: those of modules, or of the loss."""
    step = TracedStep.forward.__code__
    users: list[tuple[CodeType, int]] = []  # innermost first
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (code := frame.f_code) is not step:  # audit hooks hear of each reading of f_code
        if not is_machinery(code.co_filename):
            users.append((code, frame.f_lineno))
        frame = frame.f_back
    if frame is None:  # outside of the step
        users.clear()
    users.reverse()
    modules = [(code, line) for code, line in users if code.co_name == "forward"]
    return traceback.StackSummary.from_list(
        traceback.FrameSummary(code.co_filename, line, code.co_name, line="") for code, line in modules or users
    )
