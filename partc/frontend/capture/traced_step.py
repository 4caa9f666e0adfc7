"""The module that is traced: it maps the tensors of a batch to the loss, or to the results that a package returns."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from partc.errors import PartcError, untraced
from partc.frontend.branches.builtin_numbers import keeping_unknown_numbers, using_traceable_builtins
from partc.frontend.branches.largest_numbers import LargestNumbers
from partc.frontend.branches.outcomes import Outcomes
from partc.frontend.branches.value_branches import ValueWatch
from partc.frontend.capture.built_model import inference_as_no_grad
from partc.frontend.gradients.hooks import Hook
from partc.frontend.model_precision import computing_in, mark_disabled_autocast
from partc.frontend.repeats.copied_calls import UncopiedError
from partc.frontend.repeats.marks import Repeats
from partc.frontend.repeats.module_rows import UnequalError, WholeTrace
from partc.frontend.results import Read
from partc.frontend.selections.row_counts import RowCount, noting_known_numbers
from partc.frontend.selections.selections import Selections
from partc.frontend.state.constant_buffers import Recipe, recomputed
from partc.frontend.state.first_steps import UnsettledError, step_of
from partc.frontend.state.first_values import Attributes
from partc.frontend.state.flags import is_counter, is_flag
from partc.frontend.state.kept_attributes import kept_attributes
from partc.frontend.state.replaced_buffers import Buffers, registering
from partc.frontend.state.state_watch import StateWatch
from partc.frontend.state.weight_identity import ConstructedWeights
from partc.frontend.trace_errors import RaisedError, explained_error
from partc.frontend.traceable_forms.assignments import traceable_assignments
from partc.frontend.traceable_forms.masked_spans import traceable_spans
from partc.frontend.traceable_forms.untraceable_modules import untraceable_modules
from partc.replaced import replaced
from partc.runtime.first_steps import FirstSteps, FirstValue
from partc.runtime.train.entries import of_model, rebuilt_batch
from partc.runtime.train.plain_tensors import Members
from partc.torch_private import attributes_kept_by, copied_modules, disabled_autocasts_as, without_modes

Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """A model and a part of its batch, with the facts about them that a trace reads.

    `form` is the batch with its constants, into which the tensors of `names` are put. `read` finds the results in the
    output of `loss`, or of the model; without it, the result is the loss.
    """

    model: nn.Module
    loss: Loss | None
    read: Read | None
    path: Path | None  # of the model file
    form: Any
    names: tuple[str, ...]
    parts: int  # into which the batch is divided
    dtype: torch.dtype
    outcomes: Outcomes  # of branches on random numbers
    joined: Collection[str]  # lines on which tests of masks are branches
    hooks: Mapping[str, Sequence[Hook]]  # of parameters
    weights: ConstructedWeights
    members: Members
    masks: Mapping[str, Recipe]  # buffers of masks that the constructor makes
    integers: Sequence[Mapping[str, Tensor]]  # for each part of the batch: its integer entries
    steps: FirstSteps | None  # attributes that forward sets in the first step


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFindings:
    """The facts that a trace finds besides its graph."""

    trained: frozenset[str]  # parameters with a gradient
    paths: tuple[str, ...]  # of the results
    repeats: Repeats  # the marked calls
    selections: Selections  # of rows
    largest: Mapping[str, int]  # the largest numbers of entries, where forward reads them
    branches: tuple[tuple[str, int], ...]  # the function and the line of each branch on values
    changed: tuple[tuple[FirstValue, Tensor | None], ...]  # attributes that have their first values, with tensors


class _ChangedError(Exception):
    """Forward changes the buffers of these names, whose values were taken for constants."""


class _ReshapedError(Exception):
    """Forward gives the entries of the batch of these names another shape in place, which an export cannot follow."""


class TracedStep(nn.Module):
    """The traced module. `numbers` are buffers with known values; `report` receives the findings of each trace, and
    `assume` a sentence for each assumption.
    """

    def __init__(
        self,
        traced: TracedModel,
        watch: StateWatch,
        repeats: Callable[[], Repeats],
        numbers: Mapping[str, Tensor],
        report: Callable[[TraceFindings], None],
        assume: Callable[[str], None],
    ) -> None:
        super().__init__()
        self.model = traced.model
        self._traced = traced
        self._watch = watch
        self._repeats = repeats
        self._numbers = dict(numbers)
        self._flags: list[str] = []  # boolean buffers that forward changes
        self._copying = True  # whether repeated calls are copied
        self._reshaped: set[str] = set()  # entries of the batch of which forward gets views
        self._report, self._assume = report, assume  # callbacks, because an export restores attributes

    def exported(self, batch: Mapping[str, Tensor]) -> torch.export.ExportedProgram:
        """Trace the step. Buffers that turn out to change are no constants when it is traced again, and calls are not
        copied if copies turn out not to suffice.
        """
        while True:
            try:
                with attributes_kept_by(kept_attributes):
                    return torch.export.export(self, tuple(batch.values()), strict=False)
            except UncopiedError:
                self._copying = False
            except _ReshapedError as error:
                self._reshaped.update(error.args)
            except _ChangedError as error:
                self._flags.extend(name for name in error.args if is_flag(self._numbers[name]))
                self._numbers = {name: x for name, x in self._numbers.items() if name not in error.args}

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        traced = self._traced
        versions, forms = [x._version for x in tensors], [(x.shape, x.stride()) for x in tensors]
        buffers, attributes = Buffers.of(self.model), Attributes.of(self._watch.named)
        repeats = self._repeats()
        largest = LargestNumbers(traced.integers)
        for name, entry in zip(traced.names, tensors, strict=True):
            largest.enter(name, entry)
        values = ValueWatch(
            traced.outcomes,
            repeats.refuse_branch,
            repeats.call,
            runner=__file__,
            largest=largest,
            whole=repeats.whole,
            joined=traced.joined,
            copying=self._copying,
        )
        try:
            with self._constants_unchanged(values), noting_known_numbers() as lines:
                found = self._watched_forward(tensors, repeats, values)
            reshaped = [
                name
                for name, x, form in zip(traced.names, tensors, forms, strict=True)
                if (x.shape, x.stride()) != form
            ]
            if reshaped:
                raise _ReshapedError(*reshaped)
        except (UncopiedError, _ChangedError, _ReshapedError):  # forward is traced once more
            buffers.restore()
            raise
        for name, entry, version in zip(traced.names, tensors, versions, strict=True):
            if entry._version != version:
                self._assume(f"The batch's entry {name} is changed in a copy: the next step reads it unchanged.")
        for line in lines:
            known = "where forward takes a number that a tensor holds for a known one"
            self._assume(f"Packages repeat the first step at {line}, {known}.")
        first = next(iter(found.values()))
        self._report(
            TraceFindings(
                trained=parameters_with_gradient(self.model, first, repeats),
                paths=tuple(found),
                repeats=repeats,
                selections=values.selections,
                largest=largest.read,
                branches=tuple(values.branches),
                changed=attributes.changed(),
            )
        )
        buffers.keep(self._watch.line_of, values.known.knows)
        return first if traced.read is None else tuple(found.values())

    def _watched_forward(self, tensors: Sequence[Tensor], repeats: Repeats, values: ValueWatch) -> Mapping[str, Tensor]:
        """The results of forward, by path, with everything in place that makes its code traceable."""
        traced = self._traced
        entries = zip(traced.names, tensors, strict=True)
        given = {name: x.view_as(x) if name in self._reshaped else x for name, x in entries}
        batch = rebuilt_batch(traced.form, given)
        try:
            with (
                computing_in(traced.dtype), repeats.rows.with_parts(),
                traced.weights.known(repeats.rows.left_out, tensors, repeats.identity, self._watch.line_of) as identity,
                self._watch.watching(), using_traceable_builtins(self._watch.modules, id=identity), values.watching(),
                keeping_unknown_numbers(self._homes()),
                repeats.marking(), registering({id(vars(x)) for x in self._watch.named.values()}), _conversions(),
                _known_seeds(), inference_as_no_grad(), disabled_autocasts_as(mark_disabled_autocast), copied_modules(),
                untraceable_modules(), traceable_assignments(self._watch.modules),
                traceable_spans(self._watch.named.values()), self._with_masks(), traced.members.current(),
            ):  # fmt: skip
                found = self._forward(batch)
        except (PartcError, UnequalError, WholeTrace, UncopiedError):
            raise
        except Exception as error:  # torch.export would also print the graph so far, or a long message
            explained = explained_error(
                error, self.model, traced.path, traced.parts, values.selections.any, bool(values.selections.numbers)
            )
            if isinstance(explained, RaisedError):
                if traced.steps is not None:  # no guard: eager code would stop in the second step
                    explained = PartcError(
                        explained.code, explained.cause, help=explained.help, source=explained.source
                    )
                else:
                    explained.tests = values.test_count
            raise explained from error
        values.copies.check()
        for sentence in values.sentences:
            self._assume(sentence)
        return found

    def _homes(self) -> Iterator[ModuleType]:
        """The modules of the user's code, and those that define the classes of the model's layers."""
        classes = {type(layer).__module__ for layer in self._watch.named.values()}
        homes = (sys.modules.get(name) for name in sorted(classes) if name.partition(".")[0] != "torch")
        yield from dict.fromkeys((*self._watch.modules, *(home for home in homes if home is not None)))

    @contextmanager
    def _constants_unchanged(self, values: ValueWatch) -> Iterator[None]:
        """A context in which buffers with known values are constants. Raises _ChangedError if forward changes them."""
        constants = {name: self.model.get_buffer(name) for name in self._numbers}
        for name, constant in constants.items():
            with without_modes():
                own = self._numbers[name].clone()  # changes in place compute with the values
            values.known.know(constant, own)
        for name in self._flags:
            values.flag(self.model.get_buffer(name))
        for name, buffer in self.model.named_buffers():
            if is_counter(buffer) and name not in self._numbers:
                values.flag(buffer)
        before = {name: constant._version for name, constant in constants.items()}
        yield
        changed = [
            name
            for name, constant in constants.items()
            if self.model.get_buffer(name) is not constant or constant._version != before[name]
        ]
        if changed:
            raise _ChangedError(*changed)

    @contextmanager
    def _with_masks(self) -> Iterator[None]:
        """A context in which buffers of masks are constants. Raises PartcError P0225 if one is changed."""
        stores: list[tuple[dict[str, Tensor | None], str, Tensor | None, Tensor, int]] = []
        for path, mask in recomputed(self._traced.masks):
            owner, _, name = path.rpartition(".")
            store = self.model.get_submodule(owner)._buffers
            buffer = store[name]
            if buffer is not None and mask.shape == buffer.shape and mask.dtype == buffer.dtype:
                stores.append((store, name, buffer, mask, mask._version))
                store[name] = mask
        try:
            yield
            for store, name, _, mask, version in stores:
                if store[name] is not mask or mask._version != version:
                    raise PartcError(
                        "P0225",
                        f"forward changes the buffer {name}, a mask that the constructor makes",
                        help="keep a mask that changes as an attribute of its own, made in forward",
                    )
        finally:
            for store, name, buffer, _, _ in stores:
                store[name] = buffer

    def _forward(self, batch: Any) -> Mapping[str, Tensor]:
        for name, hooks in self._traced.hooks.items():
            for hook in hooks:
                self.model.get_parameter(name).register_hook(hook)
        traced = self._traced
        try:
            with nullcontext() if traced.steps is None else step_of(self.model, traced.steps):
                out = of_model(self.model, batch) if traced.loss is None else traced.loss(self.model, batch)
        except UnsettledError as error:
            raise PartcError(
                "P0225",
                f"forward changes {error}, and leaves something else there in a later step",
                help="keep state in a registered buffer, and update it with tensor operations",
            ) from error
        if traced.read is not None:
            return traced.read(out)
        found = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", out)
        if not isinstance(found, Tensor):
            given = "the model" if traced.loss is None else "loss()"
            raise PartcError(
                "P0206",
                f"{given} returns {type(found).__name__} where the loss is expected",
                help="return a tensor or an object with .loss from the model, or define loss(model, batch)",
            )
        if found.is_complex():
            raise PartcError("P0208", "the loss is complex: it must be a real number", help="return its real part")
        return {"": found.reshape(()) if found.dim() and found.numel() == 1 else found}  # torch takes one element too


def parameters_with_gradient(model: nn.Module, loss: Tensor, repeats: Repeats) -> frozenset[str]:
    """The names of the parameters at the leaves of the loss's autograd graph, aliases included.

    This is torch's own definition of differentiability: `round(w)` has a gradient of zeros; `argmax(w)` and values that
    are detached or computed under no_grad have none.
    """
    leaves = repeats.leaves(loss)
    return frozenset(name for name, x in model.named_parameters(remove_duplicate=False) if id(x) in leaves)


@contextmanager
def _conversions() -> Iterator[None]:
    """A context in which conversions that would change no tensor are skipped; others fail on traced weights.

    Traces do not follow `as_subclass`: a plain tensor of it is a view.
    """
    convert, converted = nn.Module._apply, Tensor.as_subclass

    def unchanged(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        held = (*module.parameters(recurse), *module.buffers(recurse))
        return module if all(function(x) is x for x in held) else convert(module, function, recurse)

    def plain(x: Tensor, cls: Any) -> Any:
        return x.view_as(x) if cls is Tensor else converted(x, cls)

    with replaced(nn.Module, _apply=unchanged), replaced(Tensor, as_subclass=plain):
        yield


@contextmanager
def _known_seeds() -> Iterator[None]:
    """A context in which no number that a tensor holds is the seed of a generator of Python's module random.

    The seed would be the integer that stands for the number, in every step. Raises PartcError P0206.
    """
    seed = random.Random.seed

    def seeded(generator: random.Random, a: Any = None, version: int = 2) -> None:
        if isinstance(a, RowCount):
            raise untraced(
                "a tensor holds the seed of a generator of Python's module random",
                help="draw with torch's random functions: a package draws their numbers anew in each step",
            )
        seed(generator, a, version)

    with replaced(random.Random, seed=seeded):
        yield
