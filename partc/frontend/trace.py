"""From a model to the IR: one region with the operations of the whole forward pass."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from partc.errors import PartcError, Source
from partc.frontend.batch_indices import check_indices, check_writes
from partc.frontend.branches.outcome_trees import JoinedPaths, join_paths
from partc.frontend.branches.outcomes import (
    ABOVE,
    EMPTY,
    HALF_THE_ROWS,
    ONE_ROW,
    PARTLY_EMPTY,
    Outcomes,
    told_apart,
)
from partc.frontend.branches.random_branches import Branching, Joined, RandomBranch, join_outcomes
from partc.frontend.capture import Captured, capture
from partc.frontend.capture.traced_step import Loss
from partc.frontend.graph_reader import GraphReader, tensor_type
from partc.frontend.model_files.huggingface import PREFIX, is_configuration, model_source
from partc.frontend.model_files.model_file import ModelFile, load
from partc.frontend.model_files.own_optimizer import OwnOptimizer, own_optimizer
from partc.frontend.permissions import BOTH_OUTCOMES, LARGEST_NUMBERS, UNKNOWN_NUMBERS, permission
from partc.frontend.repeats.marks import Excluded
from partc.frontend.repeats.module_rows import UnequalError, WholeTrace, container_of
from partc.frontend.results import Purpose, Read, in_evaluation, read_for
from partc.frontend.selections.conditional_gradients import conditions
from partc.frontend.selections.empty_selections import ChangedError, check_empty, without_tests
from partc.frontend.selections.reached_parameters import Reached, sometimes_reached, with_counts
from partc.frontend.selections.row_counts import check_numbers
from partc.frontend.state.first_values import FirstStepsFound
from partc.frontend.state.shared_memory import check_changes
from partc.frontend.trace_errors import RaisedError
from partc.ir.mesh import Mesh
from partc.ir.naming import unique
from partc.ir.program import (
    BY_PATH,
    Call,
    Graph,
    Op,
    Parameter,
    Program,
    Ref,
    Region,
    TensorType,
    Value,
    is_change,
)
from partc.ir.repetitions import UnlikeError, check
from partc.quoting import identifier, shown
from partc.runtime.train.plain_tensors import modules_by_path, named_tensors
from partc.settings import PASSES, tell
from partc.torch_private import not_compiling, optimized_execution

MAIN = "main"
MOST_JOINED = 4  # the most lines on which tests of masks are branches
TRIES = 6  # the most traces; each excludes one more group or row of modules


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A traced model: its program, and the means by which a package builds the model again.

    `constants` are the entries of the batch that are not tensors, as text.
    """

    program: Program
    constants: Mapping[str, str]
    model_source: str
    options: Mapping[str, Any]
    assumed: tuple[str, ...] = ()  # guards on values, which packages do not run
    optimizer: OwnOptimizer | None = None  # the model file's own
    evaluates: bool = False  # whether the model file defines evaluate()


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The number of microbatches of a step, and whether each is a batch of its own (`separate`)."""

    microbatches: int = 1
    separate: bool = False

    @property
    def parts(self) -> int:
        """The number of parts into which the batch is cut; the model sees one part at a time."""
        return self.microbatches if self.separate else 1


ONE_BATCH = Batches()


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
    found = FirstStepsFound() if purpose == "loss" else None
    captured, program = _traced(
        lambda excluded, outcomes, joined: capture(
            build,
            file.batch,
            function,
            precision=precision,
            path=file.path,
            parts=batches.parts,
            excluded=excluded,
            outcomes=outcomes,
            joined=joined,
            read=read_for(purpose, own=own is not None),
            found=found,
        ),
        found,
        name=file.name,
        mesh=mesh,
        batches=batches,
    )
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
    found = FirstStepsFound() if read is None else None
    captured, program = _traced(
        lambda excluded, outcomes, joined: capture(
            build,
            batch,
            loss,
            precision=precision,
            parts=batches.parts,
            excluded=excluded,
            outcomes=outcomes,
            joined=joined,
            read=read,
            found=found,
        ),
        found,
        name=name,
        mesh=mesh,
        batches=batches,
    )
    return Traced(program=program, constants=captured.constants, model_source="", options={}, assumed=captured.assumed)


Capture = Callable[[Excluded | None, Outcomes, Collection[str]], Captured]  # joined lines: see ValueWatch


def _traced(
    captured: Capture, found: FirstStepsFound | None, *, name: str, mesh: Mesh, batches: Batches
) -> tuple[Captured, Program]:
    """Trace a model. If one with first steps does not trace, its refusal is that of the trace without them."""
    try:
        return _with_permissions(captured, name=name, mesh=mesh, batches=batches)
    except PartcError as error:
        if found is None or found.refusal is None:
            raise
        raise found.refusal from error


def _with_permissions(captured: Capture, *, name: str, mesh: Mesh, batches: Batches) -> tuple[Captured, Program]:
    """Trace a model. If it does not trace otherwise, the largest numbers of entries are constants of the trace,
    branches on values of tensors are followed both ways, and numbers of tensors are places and factors.
    """
    with (
        permission(LARGEST_NUMBERS) as reading,
        permission(BOTH_OUTCOMES) as joining,
        permission(UNKNOWN_NUMBERS) as placing,
    ):
        try:
            return _with_equal_modules(captured, name=name, mesh=mesh, batches=batches)
        except PartcError as error:
            if error.code != "P0206" or not (reading.asked or joining.asked or placing.asked):
                raise
            refusal = error
        if reading.asked:
            reading.allowed = True
            tell(PASSES, "the model is traced with the largest numbers of entries as constants")
            try:
                return _with_equal_modules(captured, name=name, mesh=mesh, batches=batches)
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
                return _with_equal_modules(captured, name=name, mesh=mesh, batches=batches)
        raise refusal


def _with_equal_modules(captured: Capture, *, name: str, mesh: Mesh, batches: Batches) -> tuple[Captured, Program]:
    """Trace equal modules once. Groups that prove unequal are excluded; if that fails too, every call is traced.

    torch.compiler.is_compiling() returns False in the trace; if the trace fails and code asked, it returns True in
    another one.
    """
    excluded: Excluded = frozenset()
    # TorchScript's optimizer detaches the operands of functions that it differentiates itself.
    with not_compiling() as asked, optimized_execution(False):
        for _ in range(TRIES):
            try:
                return _of_all_outcomes(captured, excluded, name=name, mesh=mesh, batches=batches)
            except UnequalError as error:
                tell(PASSES, f"modules like those of {error.group} differ in their calls: each is traced")
                excluded |= {error.group}
            except Exception as error:
                tell(PASSES, f"the model is traced as a whole: {type(error).__name__}")
                break
        try:
            return _of_all_outcomes(captured, None, name=name, mesh=mesh, batches=batches)
        except PartcError as error:
            if error.code != "P0206":
                raise
            refusal = error
    if not asked:
        raise refusal
    tell(PASSES, "the model is traced with is_compiling() returning True")
    try:
        return _of_all_outcomes(captured, None, name=name, mesh=mesh, batches=batches)
    except PartcError as later:  # the refusal of an operation says more than a failure in code that asks
        raise (later if isinstance(refusal, RaisedError) else refusal) from None


def _of_all_outcomes(
    captured: Capture, excluded: Excluded | None, *, name: str, mesh: Mesh, batches: Batches
) -> tuple[Captured, Program]:
    """Trace a model, and both outcomes of its branches on random numbers.

    A test whether a mask selects anything is such a branch if its body does more than to write the selected rows.
    """
    joined: set[str] = set()
    refusal: ChangedError | None = None
    while True:
        try:
            return _of_branches(captured, excluded, joined, name=name, mesh=mesh, batches=batches)
        except ChangedError as error:
            if len(joined) == MOST_JOINED or error.line in {"", *joined}:
                raise (refusal or error) from error
            refusal = refusal or error
            joined.add(error.line)
        except PartcError as error:
            if refusal is None:
                raise
            raise refusal from error


def _of_branches(
    captured: Capture, excluded: Excluded | None, joined: Collection[str], *, name: str, mesh: Mesh, batches: Batches
) -> tuple[Captured, Program]:
    """Trace a model, and both outcomes of its branches on random numbers and of tests on the lines `joined`."""
    made: dict[Outcomes, tuple[Captured, Program]] = {}
    traced: dict[Outcomes, Branching] = {}
    paths: JoinedPaths | None = None

    def trace(outcomes: Outcomes) -> Branching:
        if outcomes in traced:
            return traced[outcomes]
        tried = frozenset(next(iter(made.values()))[0].left) if made else frozenset()
        capture = captured(excluded, replace(outcomes, tried=tried), joined)
        program, branches = program_of(capture, name=name, mesh=mesh, batches=batches)
        if branches and program.repetitions:
            raise UnequalError(container_of(program.repetitions[0]))
        made[outcomes] = capture, program
        states = {value.name: value.type for value in program.regions[0].params}
        traced[outcomes] = Branching(graph=program.regions[0].forward, states=states, branches=branches)
        return traced[outcomes]

    def without_some(outcomes: Outcomes) -> Graph:
        graph = trace(outcomes).graph
        full, partly = made[first][0].passed, made[outcomes][0].passed
        if any(not values <= full.get(path, values) for path, values in partly.items()):
            raise WholeTrace  # a whole trace numbers the tests of all calls differently
        return graph

    first = ABOVE
    try:
        found = trace(first)
    except RaisedError as error:  # with another outcome of a test, forward may not raise
        if not error.tests:
            raise
        paths = join_paths(trace)
        first = paths.paths[0]
        found = trace(first)
    tests = made[first][0].tests
    reached = Reached()
    if tests:
        try:
            empty = without_some(EMPTY)
        except RaisedError as error:
            changed = ChangedError("P0206", error.cause, help=error.help, source=error.source)
            changed.line = str(tests[0])
            raise changed from error
        tested = check_empty(found.graph, empty, found.states, tests[0])
        reached = sometimes_reached(found.graph, empty, _trained(made[first][1]), tested)
    numbers = made[first][0].numbers
    if numbers:
        for outcomes in (ONE_ROW, HALF_THE_ROWS):
            try:
                with _unlogged():
                    other = trace(outcomes).graph
            except PartcError:
                other = None
            check_numbers(found.graph, other, numbers[0])
    if tests:  # last, because earlier checks most often end in another trace of the whole model
        for outcomes in PARTLY_EMPTY[: 2 * told_apart(made[first][0].most_tests, tests)]:
            try:
                with _unlogged():
                    partly = without_some(outcomes)
            except RaisedError:
                continue  # if these outcomes occur at all, they also raise eagerly
            check_empty(found.graph, partly, found.states, tests[0])
    graph = found.graph
    capture, program = made[first]
    if found.branches:
        both, program, assumed = _joined(found, trace, made) if paths is None else _of_paths(paths, made)
        for branch in found.branches:
            if branch.of_values and any(one.left != made[first][0].left for one, _ in made.values()):
                raise PartcError(
                    "P0225",
                    "a branch on the values of a tensor changes Python values, of which a package has only one",
                    help="keep state in a registered buffer, and choose between its values with torch.where",
                    source=branch.source,
                )
        graph, capture = both.graph, made[both.outcomes][0]
        capture = replace(capture, assumed=(*capture.assumed, *assumed))
        requiring = {name for name, x in capture.model.named_parameters(remove_duplicate=False) if x.requires_grad}
        reached = reached.joined(graph, conditions(graph, both.choices, _own_names(program, requiring)))
        program = _with_trained(program, reached.conditions)
        marked = (replace(op, attrs=(*op.attrs, (BY_PATH, True))) if is_change(op) else op for op in graph.ops)
        graph = replace(graph, ops=tuple(marked))
    source = next(iter(tests), found.branches[0].source if found.branches else None)
    program = with_counts(replace(program, regions=(replace(program.regions[0], forward=graph),)), reached)
    skipped = _skipped(program, [one for _, one in made.values()], source)
    capture = replace(capture, assumed=(*capture.assumed, *skipped))
    (region,) = program.regions
    return capture, replace(program, regions=(replace(region, forward=without_tests(region.forward)),))


def _joined(
    found: Branching,
    trace: Callable[[Outcomes], Branching],
    made: Mapping[Outcomes, tuple[Captured, Program]],
) -> tuple[Joined, Program, tuple[str, ...]]:
    """The joined outcomes of all branches, a program with all parameters that they read, and assumptions. If the
    outcomes differ in more than left-out operations, each path is traced.
    """
    try:
        both = join_outcomes(found, trace)
        return both, made[both.outcomes][1], ()
    except PartcError as error:
        if error.code != "P0206":
            raise
        refusal = error
    tell(PASSES, "every path through the branches is traced")
    try:
        with _unlogged():
            paths = join_paths(trace)
    except PartcError:
        raise refusal from None
    return _of_paths(paths, made)


def _of_paths(
    paths: JoinedPaths, made: Mapping[Outcomes, tuple[Captured, Program]]
) -> tuple[Joined, Program, tuple[str, ...]]:
    """The joined outcomes of all branches, a program with all parameters that they read, and assumptions, by the traces
    of every path.
    """
    both = Joined(graph=paths.graph, outcomes=paths.paths[0], choices=paths.choices)
    assumed = tuple(
        f"Packages never take the outcome of a test after which forward raises ({x})." for x in paths.assumed
    )
    return both, _with_all_parameters([made[path][1] for path in paths.paths]), assumed


def _with_all_parameters(programs: Sequence[Program]) -> Program:
    """The first of several programs, with the parameters and branches of all; what one of them trains is trained."""
    first = programs[0]
    params = {
        value.name: (value, name)
        for program in programs
        for value, name in zip(program.regions[0].params, program.calls[0].params, strict=True)
    }
    values, names = zip(*params.values(), strict=True) if params else ((), ())
    trained = {parameter.name for program in programs for parameter in program.parameters if parameter.trainable}
    return replace(
        first,
        branches=tuple(dict.fromkeys(place for program in programs for place in program.branches)),
        parameters=tuple(replace(item, trainable=item.name in trained) for item in first.parameters),
        regions=(replace(first.regions[0], params=values),),
        calls=(replace(first.calls[0], params=names),),
    )


def _trained(program: Program) -> list[str]:
    """The trained parameters of the traced region, by its own names."""
    return _own_names(program, {item.name for item in program.parameters if item.trainable})


def _own_names(program: Program, names: Container[str]) -> list[str]:
    """The names of parameters within the traced region."""
    (call,), (region,) = program.calls, program.regions
    return [value.name for value, name in zip(region.params, call.params, strict=True) if name in names]


def _with_trained(program: Program, own_names: Container[str]) -> Program:
    """The program that also trains these parameters: in this trace, a later layer that reads none of them runs."""
    (call,), (region,) = program.calls, program.regions
    more = {name for value, name in zip(region.params, call.params, strict=True) if value.name in own_names}
    parameters = (replace(item, trainable=item.trainable or item.name in more) for item in program.parameters)
    return replace(program, parameters=tuple(parameters))


def _skipped(program: Program, others: Sequence[Program], source: Source | None) -> Iterator[str]:
    """A warning about trained parameters that some outcomes of branches do not read, and whose reads are not
    counted.
    """
    always: set[str] = set.intersection(*map(_read_parameters, others))
    sometimes = _read_parameters(program) - always - {name for name, _ in program.reached}
    skipped = [item.name for item in program.parameters if item.trainable and item.name in sometimes]
    if skipped:
        more = f" and {len(skipped) - 1} more" if len(skipped) > 1 else ""
        yield (
            f"Packages update {skipped[0]}{more} with a gradient of zero in a step in which no example reaches them "
            f"({source}); eagerly they have none, and the optimizer leaves their moments and weight decay out."
        )


def _read_parameters(program: Program) -> set[str]:
    """The names of the parameters that operations of the traced region read."""
    (call,), (region,) = program.calls, program.regions
    read = {name for op in region.forward.ops for name in op.refs()}
    return {name for name, value in zip(call.params, region.params, strict=True) if value.name in read}


@contextmanager
def _unlogged() -> Iterator[None]:
    """A context without torch's log messages about failing operations, such as on sizes that do not fit."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def program_of(
    captured: Captured, *, name: str, mesh: Mesh, batches: Batches
) -> tuple[Program, tuple[RandomBranch, ...]]:
    """The program of an exported model (the region `main`, called once), and its branches on random numbers."""
    parameters = _parameters(captured.model, captured.trained)
    owners = {alias: p.name for p in parameters for alias in (p.name, *p.aliases)}
    check_indices(captured.exported, tuple(captured.batch), captured.whole, captured.integers)
    check_writes(captured.exported, batches.parts)
    reader = GraphReader(captured, owners)
    graph = reader.read()
    used = {value: name for name, value in reader.states.items()}
    inputs = tuple(captured.batch)
    made = {value.name: value for op in graph.ops for value in op.results}
    if not captured.results:
        _check_loss(graph, made[graph.outputs[0]])
    taken = {*inputs, *(name for item in parameters for name in (item.name, *item.aliases))}
    stems = [identifier(path) if path else "result" for path in captured.results] or ["loss"]
    named = {output: unique(stem, taken) for output, stem in reversed([*zip(graph.outputs, stems, strict=True)])}
    results = tuple((path, named[output]) for path, output in zip(captured.results, graph.outputs, strict=False))
    for path, output in zip(captured.results, graph.outputs, strict=False):
        if output not in made:
            raise PartcError(
                "P0208",
                f"the result {path or 'of the function'} is an entry of the batch or a parameter, unchanged",
                help="leave it out of the results, which are computed values",
            )
    graph = replace(graph, outputs=tuple(dict.fromkeys(graph.outputs)))
    values = tuple(Value(name=named[output], type=made[output].type) for output in graph.outputs)
    if batches.separate:
        graph = _shared(graph, made, batches.microbatches)
    region = Region(name=MAIN, params=tuple(reader.params), forward=graph)
    check_changes(graph, region.types(graph), reader.states, captured.pairs)
    call = Call(
        name=MAIN,
        region=MAIN,
        params=tuple(used[v.name] for v in reader.params),
        args=inputs,
        results=tuple(value.name for value in values),
    )
    program = Program(
        name=shown(name),
        mesh=mesh,
        microbatches=batches.microbatches,
        separate_batches=batches.separate,
        inputs=inputs,
        whole_inputs=captured.whole,
        largest=tuple(captured.largest.items()),
        branches=captured.branches,
        steps=captured.steps,
        values=(
            *(replace(value, name=name) for name, value in zip(inputs, graph.inputs, strict=True)),
            *values,
        ),
        parameters=parameters,
        regions=(region,),
        calls=(call,),
        loss=call.results[0],
        results=results,
        repetitions=captured.rows,
    )
    try:
        check(program)
    except UnlikeError as error:
        raise UnequalError(container_of(error.repetition)) from None
    return program, tuple(reader.branches)


def _check_loss(graph: Graph, loss: Value) -> None:
    """Raise PartcError P0208 unless the loss is a floating-point scalar."""
    if not loss.type.shape and loss.type.differentiable:
        return
    wrong = f"has shape {loss.type.shape}" if loss.type.shape else f"is {loss.type.dtype}"
    raise PartcError(
        "P0208",
        f"the loss {wrong}: it must be a floating-point scalar",
        help="return its mean or sum",
        source=next(op.source for op in graph.ops if loss in op.results),
    )


def _shared(graph: Graph, made: Mapping[str, Value], count: int) -> Graph:
    """The graph with the loss, or the scalars, of one of `count` batches divided by `count`."""
    shares = [Value(name=f"{name}_share", type=made[name].type) for name in graph.outputs]
    ops = [
        Op(name="div", args=(Ref(name), count), results=(share,))
        for name, share in zip(graph.outputs, shares, strict=True)
    ]
    return replace(graph, ops=(*graph.ops, *ops), outputs=tuple(share.name for share in shares))


def _parameters(model: nn.Module, trained: Container[str]) -> tuple[Parameter, ...]:
    """All parameters and buffers, each under its first name; further names of tied ones are aliases."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    modules = modules_by_path(model, repeated=True)
    held = (named_tensors(modules, store, repeated=True) for store in ("_parameters", "_buffers"))
    for name, tensor in chain.from_iterable(each.items() for each in held):
        if (number := id(tensor)) in names:
            names[number].append(name)
        else:
            names[number], tensors[number] = [name], tensor
    types: dict[object, TensorType] = {}  # layers that are equal share types

    def type_of(tensor: Tensor, name: str) -> TensorType:
        kind = tensor.dtype, tensor.shape
        if kind not in types:
            types[kind] = tensor_type(tensor, f"{name} of the model")
        return types[kind]

    return tuple(
        Parameter(
            name=found[0],
            type=type_of(tensors[key], found[0]),
            trainable=found[0] in trained,
            aliases=tuple(found[1:]),
        )
        for key, found in names.items()
    )
