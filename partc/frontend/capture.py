"""Export of a model's forward pass without allocating weights."""

from __future__ import annotations

import functools
import re
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from partc.errors import PartcError, Source, first_line
from partc.frontend.branches.builtin_numbers import using_traceable_builtins
from partc.frontend.branches.random_branches import Outcomes
from partc.frontend.branches.value_branches import ValueWatch
from partc.frontend.gradients.own_backward import Hook, following_own_backward, module_hooks, own_hooks
from partc.frontend.gradients.transforms import following_transforms
from partc.frontend.model_files.model_file import user_line
from partc.frontend.repeats.marks import CallMark, Excluded, ModuleTree, Repeats
from partc.frontend.repeats.module_rows import ModuleRows, UnequalError, WholeTrace
from partc.frontend.results import Read
from partc.frontend.selections.selections import Selections
from partc.frontend.state.caches import caches
from partc.frontend.state.constant_buffers import Recipe, Recipes, is_flag, recomputed
from partc.frontend.state.constructor_values import with_values
from partc.frontend.state.frozen_state import StateWatch, check
from partc.frontend.state.replaced_buffers import Buffers, ReplacedError
from partc.frontend.state.shared_memory import Pair, pairs_in_memory, shared_with, untrained_pairs
from partc.frontend.trace_errors import explained_error, innermost_user_line
from partc.frontend.traceable_forms.untraceable_modules import untraceable_modules
from partc.installed import is_machinery
from partc.ir.program import Repetition
from partc.quoting import encodable
from partc.runtime.documents import Malformed
from partc.runtime.train.entries import constants_as_text, entries, of_model, rebuilt_batch
from partc.runtime.train.plain_tensors import Members, modules_by_path, with_registered_tensors
from partc.runtime.train.precision import computing_in, dtype_held, held_in
from partc.torch_private import STACK_FILTER, FakeTensorMode, TracerBase, fake_stored, without_modes

Loss = Callable[[Any, Any], Any]
_Given = ParamSpec("_Given")


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
    numbers: tuple[Source, ...] = ()  # lines that use the number of selected rows as an integer
    pairs: Mapping[str, str] = field(default_factory=dict)  # buffers, each with another in its memory


class _ChangedError(Exception):
    """Forward changes the buffers of these names, whose values were taken for constants."""


class _TracedStep(nn.Module):
    """The traced module: maps the tensors of a batch, in the order of `names`, to a loss or to the tensors that `read`
    finds.

    `form` is a batch with its constants, into which the tensors are put. `report` receives
    the parameters with a gradient, the paths of what `read` finds, the marked calls and the selections of rows.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        path: Path | None,
        form: Any,
        names: Sequence[str],
        report: Callable[[frozenset[str], tuple[str, ...], Repeats, Selections], None],
        assumed: dict[str, None],
        watch: StateWatch,
        repeats: Callable[[], Repeats],
        hooks: Mapping[str, Sequence[Hook]],
        outcomes: Outcomes,
        dtype: torch.dtype,
        members: Members,
        read: Read | None = None,
        masks: Mapping[str, Recipe] | None = None,
        numbers: dict[str, Tensor] | None = None,
        parts: int = 1,
    ) -> None:
        super().__init__()
        self._parts = parts
        self._members = members
        self._masks = masks or {}
        self.numbers = numbers or {}
        self.flags: list[str] = []  # boolean buffers that forward changes
        self._hooks = hooks
        self._outcomes = outcomes
        self._dtype = dtype
        self.model = model
        self._watch = watch
        self._repeats = repeats
        self._loss = loss
        self._read = read
        self._path = path
        self._form = form
        self._names = names
        self._assumed = assumed
        self._report = report  # a callback, because an export restores attributes

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        batch = rebuilt_batch(self._form, dict(zip(self._names, tensors, strict=True)))
        versions = [x._version for x in tensors]
        for cached in caches(self.model):
            cached.cache_clear()  # tensors of an earlier trace have no values here
        buffers = Buffers.of(self.model)
        repeats = self._repeats()
        values = ValueWatch(self._outcomes, repeats.refuse_branch, repeats.call, whole=repeats.whole)
        constants = {name: self.model.get_buffer(name) for name in self.numbers}
        for name, constant in constants.items():
            with without_modes():
                own = self.numbers[name].clone()  # changes in place compute with the values
            values.know(constant, own)
        for name in self.flags:
            values.flag(self.model.get_buffer(name))
        before = {name: constant._version for name, constant in constants.items()}
        try:
            with (
                computing_in(self._dtype), repeats.rows.with_parts(), self._watch.watching(),
                using_traceable_builtins(self._watch.modules), values.watching(), repeats.marking(), _conversions(),
                _inference(), untraceable_modules(), self._with_masks(), self._members.current(),
            ):  # fmt: skip
                found = self._forward(batch)
            self._assumed.update(dict.fromkeys(values.sentences))
        except (PartcError, UnequalError, WholeTrace):
            raise
        except Exception as error:  # torch.export would also print the graph so far, or a long message
            raise explained_error(error, self.model, self._path, self._parts, values.selections.any) from error
        changed = [name for name, constant in constants.items()
                   if self.model.get_buffer(name) is not constant or constant._version != before[name]]  # fmt: skip
        if changed:
            raise _ChangedError(*changed)
        for name, entry, version in zip(self._names, tensors, versions, strict=True):
            if entry._version != version:
                text = f"The batch's entry {name} is changed in a copy: the next step reads it unchanged."
                self._assumed[text] = None
        first = next(iter(found.values()))
        self._report(_with_gradient(self.model, first, repeats), tuple(found), repeats, values.selections)
        buffers.keep(self._watch.line_of, values.knows)
        return first if self._read is None else tuple(found.values())

    @contextmanager
    def _with_masks(self) -> Iterator[None]:
        """A context in which buffers of masks are constants. Raises PartcError P0225 if one is changed."""
        stores: list[tuple[dict[str, Tensor | None], str, Tensor | None, Tensor, int]] = []
        for path, mask in recomputed(self._masks):
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
        for name, hooks in self._hooks.items():
            for hook in hooks:
                self.model.get_parameter(name).register_hook(hook)
        out = of_model(self.model, batch) if self._loss is None else self._loss(self.model, batch)
        if self._read is not None:
            return self._read(out)
        found = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", out)
        if not isinstance(found, Tensor):
            given = "the model" if self._loss is None else "loss()"
            raise PartcError(
                "P0206",
                f"{given} returns {type(found).__name__} where the loss is expected",
                help="return a tensor or an object with .loss from the model, or define loss(model, batch)",
            )
        if found.is_complex():
            raise PartcError("P0208", "the loss is complex: it must be a real number", help="return its real part")
        return {"": found}


def _with_plain_tensors(
    captured: Callable[Concatenate[Callable[[], Any], _Given], Captured],
) -> Callable[Concatenate[Callable[[], Any], _Given], Captured]:
    """A capture in which plain tensors are buffers, except those in whose places forward puts tensors of other kinds.

    Forward may well assign these before it reads them. `frozen_state` refuses the others.
    """

    @functools.wraps(captured)
    def capture(build: Callable[[], Any], /, *given: _Given.args, **named: _Given.kwargs) -> Captured:
        without: set[str] = set()
        while True:
            try:
                return captured(
                    lambda: with_registered_tensors(_walkable(build()), lambda each: each not in without),
                    *given,
                    **named,
                )
            except PartcError as error:
                assigned = re.search(r"cannot assign '.*' (?:as|object to) buffer '(.+?)'", error.cause)
                name = error.name if isinstance(error, ReplacedError) else assigned and assigned[1]
                if name is None or name in without:  # another error, or a buffer of the model's own
                    raise
                without.add(name)

    return capture


@_with_plain_tensors
def capture(
    build: Callable[[], nn.Module],
    make_batch: Callable[[], Any],
    loss: Loss | None,
    *,
    precision: str,
    path: Path | None = None,
    parts: int = 1,
    excluded: Excluded | None = None,
    outcomes: Outcomes = Outcomes.ABOVE,
    read: Read | None = None,
) -> Captured:
    """Build the model under fake tensors and export it, for one of `parts` equal parts of the batch.

    With `read`, the outputs are the tensors that it finds in the result of `loss`, or of the model. Equal modules are
    traced once, except the groups and rows `excluded`; None traces all calls. `outcomes` are
    the outcomes of branches on random numbers.

    Raises PartcError P0205 (the model or the batch cannot be built), P0206 (it does not trace), P0208 (the loss is not
    a scalar), P0225 (it depends on state that packages do not have), P0401 (the batch does not divide).
    """
    dtype = held_in(precision)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    recipes = Recipes()
    model = _built(build, path, recipes)
    named = modules_by_path(model)
    _check_members(named)
    pairs = pairs_in_memory(named)
    _check_pairs(pairs)
    masks, numbers = recipes.masks(named), recipes.numbers(named)
    members, modules = Members.of(model), ModuleTree(named)
    rows = ModuleRows(modules.named, modules.groups, modules.weights, excluded)
    if any(name.rpartition(".")[0] in rows.left_out for name in numbers):
        raise WholeTrace  # otherwise equal modules may have different numbers
    hooks = own_hooks(modules.named)
    reports: list[tuple[frozenset[str], tuple[str, ...], Repeats, Selections]] = []
    assumed: dict[str, None] = {}
    _make_fake(modules.named, dtype, mode, rows.left_out)
    with mode:
        form, found = _batch(make_batch, path)
        tensors = {name: x for name, x in found.items() if isinstance(x, Tensor)}
        every = _fake_batch(tensors, mode, dtype)
        batch = _part(every, parts)
        try:
            say = lambda sentence: assumed.update({sentence: None})  # noqa: E731
            with (
                following_own_backward(say, parts, whole=excluded is None),
                module_hooks(named, parts),
                stacks_of_losses(),
                following_transforms(whole=excluded is None),
            ):
                watch = StateWatch(model, modules.named, loss)
                report = lambda *found: reports.append(found)  # noqa: E731
                repeats = lambda: Repeats(modules, excluded, rows)  # noqa: E731
                step = _TracedStep(
                    model,
                    loss,
                    path,
                    form,
                    tuple(batch),
                    report,
                    assumed,
                    watch,
                    repeats,
                    hooks,
                    outcomes,
                    dtype,
                    members,
                    read,
                    masks,
                    numbers,
                    parts,
                )

                def trace() -> torch.export.ExportedProgram:
                    while True:
                        try:
                            return torch.export.export(step, tuple(batch.values()), strict=False)
                        except _ChangedError as error:
                            step.flags.extend(name for name in error.args if is_flag(step.numbers[name]))
                            step.numbers = {name: x for name, x in step.numbers.items() if name not in error.args}

                with rows.absent(), _without_advice():
                    exported = trace()
                    gained, paths, marked, selections = reports[-1]
                    check(exported, watch, trace)
        except PartcError as error:
            error.source = error.source or innermost_user_line(error)
            raise
        except (UnequalError, WholeTrace):
            raise
        except (Exception, SystemExit) as error:
            raise explained_error(error, model, path, parts) from error
    return Captured(
        exported=exported,
        model=model,
        batch=batch,
        whole=tuple(name for name, x in batch.items() if parts > 1 and x is every[name]),
        constants=constants_as_text(found),
        precision=precision,
        trained=rows.with_left_out(gained) if read is None else frozenset(_requiring(model)),
        calls=marked.calls,
        rows=rows.all,
        results=() if read is None else paths,
        assumed=tuple(assumed),
        tests=tuple(selections.tests.sources),
        most_tests=selections.tests.most,
        passed=marked.passed,
        integers=_integers(make_batch, parts) if parts > 1 else (),
        numbers=tuple(selections.numbers),
        pairs=untrained_pairs(pairs),
    )


def _with_gradient(model: nn.Module, loss: Tensor, repeats: Repeats) -> frozenset[str]:
    """The names of the parameters at the leaves of the loss's autograd graph, aliases included.

    This is torch's own definition of differentiability: `round(w)` has a gradient of zeros; `argmax(w)` and values that
    are detached or computed under no_grad have none.
    """
    leaves = repeats.leaves(loss)
    return frozenset(name for name, x in model.named_parameters(remove_duplicate=False) if id(x) in leaves)


def _requiring(model: nn.Module) -> Iterator[str]:
    return (name for name, x in model.named_parameters(remove_duplicate=False) if x.requires_grad)


@contextmanager
def stacks_of_losses() -> Iterator[None]:
    """A context in which traced operations of the loss record their stacks too, not only those of modules."""

    def user_frames(tracer: Any, frames: traceback.StackSummary) -> traceback.StackSummary:
        first = next((index for index, frame in enumerate(frames) if frame.name == "forward"), len(frames))
        users = [frame for frame in frames[first:] if not is_machinery(frame.filename)]
        return traceback.StackSummary.from_list([frame for frame in users if frame.name == "forward"] or users)

    original = vars(TracerBase).get(STACK_FILTER)
    if original is not None:
        setattr(TracerBase, STACK_FILTER, user_frames)
    try:
        yield
    finally:
        if original is not None:
            setattr(TracerBase, STACK_FILTER, original)


@contextmanager
def _without_advice() -> Iterator[None]:
    """A context without torch.export's advice on attributes, which partc checks and reports by itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"The tensor attributes? .* assigned during export", UserWarning)
        yield


class _ValuesOfRanges(TorchFunctionMode):
    """Gives ranges and literals on the meta device values, from which constructors compute rates and sizes."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.arange, torch.linspace, torch.logspace, torch.tensor, torch.as_tensor):
            return func(*args, **{"device": "cpu", **(kwargs or {})})
        return func(*args, **(kwargs or {}))


@contextmanager
def _conversions() -> Iterator[None]:
    """A context in which conversions that would change no tensor are skipped; others fail on traced weights."""
    convert = nn.Module._apply

    def unchanged(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        held = (*module.parameters(recurse), *module.buffers(recurse))
        return module if all(function(x) is x for x in held) else convert(module, function, recurse)

    nn.Module._apply = unchanged  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = convert  # type: ignore[method-assign]


@contextmanager
def _inference() -> Iterator[None]:
    """A context in which inference mode acts like no_grad; a trace would not record inference mode."""
    mode = torch.inference_mode
    enter, leave = mode.__enter__, mode.__exit__
    inside: list[torch.set_grad_enabled] = []

    def entered(each: Any) -> None:
        inside.append(torch.set_grad_enabled(not each.mode))
        inside[-1].__enter__()

    mode.__enter__ = entered  # type: ignore[method-assign]
    mode.__exit__ = lambda each, *error: inside.pop().__exit__(*error)  # type: ignore[method-assign]
    try:
        yield
    finally:
        mode.__enter__, mode.__exit__ = enter, leave  # type: ignore[method-assign]


def _walkable(model: Any) -> Any:
    """The model. Raises PartcError P0205 if its modules are nested too deeply."""
    try:
        if isinstance(model, nn.Module):
            modules_by_path(model)
    except RecursionError as error:
        raise PartcError(
            "P0205",
            "the modules of model() are nested deeper than Python's recursion limit",
            help="nest them less deeply: nn.Sequential and nn.ModuleList hold any number side by side",
        ) from error
    return model


def _built(build: Callable[[], Any], path: Path | None, recipes: Recipes) -> nn.Module:
    """The model, built without values; `recipes` record its constants. Raises PartcError P0205."""
    try:
        with torch.device("meta"), recipes:
            try:
                model = build()
            except (NotImplementedError, RuntimeError) as error:
                try:
                    with _ValuesOfRanges():
                        model = build()
                except Exception:
                    if "meta" not in str(error).lower():
                        raise error from None
                    with torch.device("cpu"):
                        model = with_values(build)
    except PartcError as error:
        error.source = error.source or user_line(error, path)
        raise
    except (Exception, SystemExit) as error:
        raise PartcError(
            "P0205",
            f"model() fails: {type(error).__name__}: {first_line(error)}",
            help="models are built without values, or in up to 4 GiB of memory if their constructors read values",
            source=user_line(error, path),
        ) from error
    if not isinstance(model, nn.Module):
        raise PartcError(
            "P0205", f"model() returns {type(model).__name__}, not a torch.nn.Module", help="return the model"
        )
    return model


def _check_members(modules: Mapping[str, nn.Module]) -> None:
    """Raises PartcError P0205 for weights of kinds that packages do not have, and for names without an encoding."""
    held = (
        (f"{path}.{name}" if path else name, tensor)
        for path, module in modules.items()
        for store in (module._parameters, module._buffers)
        for name, tensor in store.items()
        if tensor is not None
    )
    for name, tensor in held:
        if is_lazy(tensor):
            raise PartcError(
                "P0205",
                f"{name} of model() has no shape yet",
                help="use modules that are given their sizes, not lazy ones",
            )
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
            kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else "sparse"
            raise PartcError(
                "P0205",
                f"{name} of model() is {kind}; parameters and buffers are dense",
                help="store it dense, or its parts in buffers of their own: a sparse matrix has places and values",
            )
    names: dict[str, None] = {}
    for part in modules.values():
        for store in (part._modules, part._parameters, part._buffers):
            names |= dict.fromkeys(store.keys())
    for name in names:
        if not encodable(name):
            raise PartcError(
                "P0205",
                f"model() has a part of the name {name!a}, which UTF-8 cannot encode",
                help="give it another name",
            )


def _check_pairs(pairs: Iterable[Pair]) -> None:
    """Raises PartcError P0205 for a trained weight in the memory of another tensor."""
    if (shared := shared_with(pairs)) is not None:
        raise PartcError(
            "P0205",
            f"{shared[0]} and {shared[1]} of model() are different tensors in one memory, which training changes twice",
            help=f"tie them by one tensor under both names ({shared[1]} = {shared[0]}), or copy: .clone()",
        )


def _make_fake(modules: Mapping[str, nn.Module], dtype: torch.dtype, mode: FakeTensorMode, left_out: Set[str]) -> None:
    """Replace every parameter and buffer by a fake one on the CPU; ties are kept, floats are cast.

    Tensors of modules that the trace leaves out stay as they are if no cast is needed.
    """
    made: dict[int, Tensor] = {}

    def fake(old: Tensor) -> Tensor:
        if id(old) not in made:
            empty = torch.empty(old.shape, dtype=dtype_held(old.dtype, dtype), device="meta")
            made[id(old)] = fake_stored(mode, empty, old)
        return made[id(old)]

    for path, module in modules.items():
        for store in (module._parameters, module._buffers):
            for name, old in store.items():
                if old is not None and (path not in left_out or old.dtype != dtype_held(old.dtype, dtype)):
                    store[name] = fake(old)  # type: ignore[assignment]


def _batch(make: Callable[[], Any], path: Path | None) -> tuple[Any, dict[str, Any]]:
    """The batch, and its entries by path. Raises PartcError P0205."""
    try:
        try:
            batch = make()
        except Exception:  # code that reads values, such as a DataLoader's order, needs tensors with memory
            with without_modes():
                batch = make()
    except (Exception, SystemExit) as error:
        raise PartcError(
            "P0205", f"batch() fails: {type(error).__name__}: {first_line(error)}", source=user_line(error, path)
        ) from error
    try:
        found = entries(batch)
    except Malformed as error:
        help = "return the whole batch: dicts, lists, tuples and dataclasses of tensors, numbers, text and None"
        raise PartcError("P0205", f"the batch of batch() {error}", help=help) from error
    for name, x in found.items():
        _check_entry(name, x)
    return batch, found


def _fake_batch(tensors: Mapping[str, Tensor], mode: FakeTensorMode, dtype: torch.dtype) -> dict[str, Tensor]:
    cast = {name: x.to(dtype_held(x.dtype, dtype)) for name, x in tensors.items()}
    # Entries that share one tensor would be traced as one input.
    return {name: torch.empty_like(mode.from_tensor(x)) if not _is_fake(x) else x.clone() for name, x in cast.items()}


def _part(batch: dict[str, Tensor], parts: int) -> dict[str, Tensor]:
    """The first of `parts` equal parts of every entry that is as long as the batch."""
    rows = next((x.shape[0] for x in batch.values() if x.dim()), 0)
    if rows % parts:
        raise PartcError(
            "P0401",
            f"a batch of {rows} does not divide into {parts} microbatches",
            help=f"make it a multiple of {parts}, or lower --microbatches",
        )
    return {
        name: x[: rows // parts].clone() if parts > 1 and x.dim() and x.shape[0] == rows else x
        for name, x in batch.items()
    }


def _integers(make: Callable[[], Any], parts: int) -> tuple[dict[str, Tensor], ...]:
    """The integer entries of every part of the batch."""
    with without_modes():
        every = {name: x for name, x in entries(make()).items() if isinstance(x, Tensor)}
        rows = next((x.shape[0] for x in every.values() if x.dim()), 0)
        return tuple(
            {
                name: x.chunk(parts)[part] if x.dim() and x.shape[0] == rows else x
                for name, x in every.items()
                if not (x.is_floating_point() or x.is_complex() or _is_fake(x))
            }
            for part in range(parts)
        )


def _check_entry(name: str, x: Any) -> None:
    """Check that an entry can be distributed over ranks. Raises PartcError P0205."""
    if not encodable(name):
        raise PartcError(
            "P0205", f"batch() names an entry {name!a}, which UTF-8 cannot encode", help="give it another name"
        )
    if not isinstance(x, Tensor):
        return
    wrong = None
    if x.layout is not torch.strided:
        wrong = "is sparse"
    elif x.device.type != "cpu":
        wrong = f"is on {x.device.type}"
    elif x.numel() == 0:
        wrong = f"is empty: its shape is {tuple(x.shape)}"
    if wrong is not None:
        raise PartcError("P0205", f"batch() makes {name!r}, which {wrong}", help="entries are dense CPU tensors")


def _is_fake(x: Tensor) -> bool:
    return hasattr(x, "fake_mode")
