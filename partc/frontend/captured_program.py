"""A captured model as a program of one region, called once."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from torch import Tensor, nn

from partc.errors import PartcError
from partc.frontend.batch_indices import check_indices, check_writes
from partc.frontend.branches.random_branches import RandomBranch
from partc.frontend.capture import Captured
from partc.frontend.changed_memory import check_changes
from partc.frontend.graph_reader import GraphReader, tensor_type
from partc.frontend.repeats.module_rows import UnequalError, container_of
from partc.ir.mesh import Mesh
from partc.ir.naming import unique
from partc.ir.program import Call, Graph, Op, Parameter, Program, Ref, Region, TensorType, Value
from partc.ir.repetitions import UnlikeError, check
from partc.quoting import identifier, shown
from partc.runtime.train.plain_tensors import modules_by_path, named_tensors

MAIN = "main"


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
    _check_results(captured, graph, made)
    taken = {*inputs, *(name for item in parameters for name in (item.name, *item.aliases))}
    stems = [identifier(path) if path else "result" for path in captured.results] or ["loss"]
    named = {output: unique(stem, taken) for output, stem in reversed([*zip(graph.outputs, stems, strict=True)])}
    results = tuple((path, named[output]) for path, output in zip(captured.results, graph.outputs, strict=False))
    graph = replace(graph, outputs=tuple(dict.fromkeys(graph.outputs)))
    values = tuple(Value(name=named[output], type=made[output].type) for output in graph.outputs)
    if batches.separate:
        graph = _shared(graph, made, batches.microbatches)
    region = Region(name=MAIN, params=tuple(reader.params), forward=graph)
    check_changes(graph, region.types(graph), _sharing_memory(captured, graph, reader.states))
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


def _sharing_memory(captured: Captured, graph: Graph, buffers: Mapping[str, str]) -> dict[str, str]:
    """For each buffer (name -> value) and batch entry that shares memory with another one: its value, described."""
    entries = {name: value.name for name, value in zip(captured.batch, graph.inputs, strict=True)}
    kinds = ("buffer", buffers, captured.pairs), ("batch's entry", entries, captured.entry_pairs)
    return {
        values[name]: f"the {kind} {name}, which has memory in common with {other}"
        for kind, values, pairs in kinds
        for name, other in pairs.items()
        if name in values
    }


def _check_results(captured: Captured, graph: Graph, made: Mapping[str, Value]) -> None:
    """Check that the loss is a number, or that results are computed values. Raises PartcError P0208."""
    if not captured.results:
        _check_loss(graph, made[graph.outputs[0]])
    for path, output in zip(captured.results, graph.outputs, strict=False):
        if output not in made:
            raise PartcError(
                "P0208",
                f"the result {path or 'of the function'} is an entry of the batch or a parameter, unchanged",
                help="leave it out of the results, which are computed values",
            )


def _check_loss(graph: Graph, loss: Value) -> None:
    """Raise PartcError P0208 unless the loss is one floating-point number."""
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
