"""The IR: a program is calls of a few regions; a region is typed operations, one per line of its text.

Everything here is frozen. Passes return new objects; the printer and the parser (partc.printer)
are the only other code that knows the shape of these classes by heart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from partc.errors import InternalError, Source
from partc.layout import Layout, Sizes
from partc.mesh import TIME_AXIS, Mesh

DType = Literal["f64", "f32", "bf16", "f16", "i64", "i32", "i16", "i8", "u8", "bool"]
ITEMSIZE: Mapping[str, int] = {
    "f64": 8, "f32": 4, "bf16": 2, "f16": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "bool": 1,
}  # fmt: skip
PRECISIONS = ("fp32", "bf16", "fp16", "fp64")  # what a package computes in
# Operations that draw random numbers; the last argument says which one it is, counted through a call.
RANDOM = frozenset({"dropout", "attention_dropout", "rand", "randn", "rand_like", "randn_like", "drawn"})
# Between ranks. One whose result a `wait` reads is only started where it stands.
MOVING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all"})
# Operations whose results may be another sight of their first operand's memory.
VIEWS = frozenset({"reshape", "permute", "expand", "slice", "split", "alias", "wait"})
FLOATING = frozenset({"f64", "f32", "bf16", "f16"})


@dataclass(frozen=True, slots=True)
class Ref:
    """The use of a value, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class DTypeArg:
    """A dtype given to an operation as an argument."""

    name: DType


Arg = Ref | DTypeArg | int | float | bool | str | None | tuple["Arg", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """Element type and layout; the layout carries the global shape."""

    dtype: DType
    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def differentiable(self) -> bool:
        return self.dtype in FLOATING

    def local_elements(self, sizes: Sizes) -> int:
        """How many one rank holds of it."""
        return math.prod(self.layout.local_shape(sizes))

    def local_bytes(self, sizes: Sizes) -> int:
        """What one rank holds of it."""
        return self.local_elements(sizes) * ITEMSIZE[self.dtype]

    def local(self, sizes: Sizes) -> TensorType:
        """What one rank holds, as a type of its own."""
        return replace(self, layout=Layout.replicated(self.layout.local_shape(sizes)))

    def __str__(self) -> str:
        return f"{self.dtype}{self.layout}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A name and its type. Names are unique within a graph (or, for program values, a program)."""

    name: str
    type: TensorType


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How an operation is spread over one axis.

    `factor` is the name of one of its rule's factors, cut after `outer` (see layout.Shard), or
    None: repeated on every rank of the axis on operands whose gradients are partial sums.
    An axis without a choice repeats the operation on replicated operands.
    """

    axis: str
    factor: str | None
    outer: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation: `results = name(*args, **attrs)`.

    `name` is a key of the rule table: an ATen packet name ("linear", "mul"), a composite
    ("cross_entropy"), a collective ("all_gather") or a user's "mylib::op". One called "fused" is
    a bracket around the operations in `body`, which one kernel does: its arguments are what they
    read from outside, its results are those of theirs that others read.
    """

    name: str
    args: tuple[Arg, ...] = ()
    attrs: tuple[tuple[str, Arg], ...] = ()
    results: tuple[Value, ...] = ()
    choices: tuple[Choice, ...] = ()
    source: Source | None = None
    body: tuple[Op, ...] = ()

    @property
    def result(self) -> Value:
        if len(self.results) != 1:
            raise InternalError(f"{self.name} has {len(self.results)} results, not one")
        return self.results[0]

    def refs(self) -> Iterator[str]:
        """Names of the values read, in order, repeats included."""
        yield from _refs(self.args)
        yield from _refs(tuple(value for _, value in self.attrs))

    def renamed(self, names: Mapping[str, str]) -> Op:
        """The same operation reading (and defining) values under other names."""
        results = tuple(replace(value, name=names.get(value.name, value.name)) for value in self.results)
        attrs = tuple((key, _renamed(arg, names)) for key, arg in self.attrs)
        args = tuple(_renamed(arg, names) for arg in self.args)
        body = tuple(op.renamed(names) for op in self.body)
        return replace(self, args=args, attrs=attrs, results=results, body=body)


def _refs(args: tuple[Arg, ...]) -> Iterator[str]:
    for arg in args:
        if isinstance(arg, Ref):
            yield arg.name
        elif isinstance(arg, tuple):
            yield from _refs(arg)


def _renamed(arg: Arg, names: Mapping[str, str]) -> Arg:
    if isinstance(arg, Ref):
        return Ref(names.get(arg.name, arg.name))
    if isinstance(arg, tuple):
        return tuple(_renamed(item, names) for item in arg)
    return arg


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Straight-line code: inputs, operations in order, names of the outputs."""

    inputs: tuple[Value, ...]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]

    def definitions(self) -> dict[str, Value]:
        """Every value by name, inputs included."""
        values = {value.name: value for value in self.inputs}
        for op in self.ops:
            values.update((value.name, value) for value in op.results)
        return values


Phase = Literal["setup", "step", "microbatch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A distinct body of the model: traced, sharded, differentiated and printed once.

    `params` are the region's parameters and buffers under names relative to the module
    ("attn.wq.weight"); graphs read them by these names. `phase` says when calls run: once
    ("setup": made of constants alone), once per step on the whole local batch ("step": made of
    inputs alone and reduced over the batch), or for every microbatch.
    After differentiation `forward` returns its outputs followed by what `saved` names, and
    `backward` takes the gradients of the outputs, then the saved values; it returns gradients of
    those inputs and parameters that need one, named "grad_<input>". Once split, it returns those of
    the inputs followed by what `kept` names, which `weight` takes to return those of the parameters.
    """

    name: str
    params: tuple[Value, ...]
    forward: Graph
    backward: Graph | None = None
    saved: tuple[str, ...] = ()
    weight: Graph | None = None
    kept: tuple[str, ...] = ()
    phase: Phase = "microbatch"

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """All that there are: forward, backward, weight."""
        return tuple(graph for graph in (self.forward, self.backward, self.weight) if graph is not None)

    def mapped(self, change: Callable[[Graph], Graph]) -> Region:
        """The region with another graph for each that there is."""
        return replace(
            self,
            forward=change(self.forward),
            backward=self.backward and change(self.backward),
            weight=self.weight and change(self.weight),
        )

    def types(self, graph: Graph) -> dict[str, TensorType]:
        """Of all that one of its graphs names: parameters, inputs and results."""
        found = {value.name: value.type for value in self.params}
        found.update((name, value.type) for name, value in graph.definitions().items())
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A region applied: its parameters by full name, program values in, program values out.

    `random` is the number of its first random operation; the region counts its own from 0.
    """

    name: str  # module path or region name: "blocks.3", "embed"
    region: str
    params: tuple[str, ...]
    args: tuple[str, ...]
    results: tuple[str, ...]
    stage: int = 0
    random: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter or buffer of the model, under the name its state dict has."""

    name: str
    type: TensorType
    trainable: bool
    aliases: tuple[str, ...] = ()  # other names of the same tensor (tied weights)
    reduce: tuple[str, ...] = ()  # mesh axes over which its gradient is summed once per step
    gather: tuple[str, ...] = ()  # mesh axes over which parts of it are gathered for the calls that read it
    after: str = ""  # the call after whose last backward the sum of its gradient starts; else at the step's end
    holds: tuple[int, ...] = ()  # the model's own shape, where rows of zeros were added to it


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A program value that one stage makes and a later one reads; its gradient returns if `gradient`."""

    value: str
    source: int
    target: int
    gradient: bool


ActionKind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE_GRAD"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What a rank does next, in the grammar of torch's pipeline schedules: 2F0, 0SEND_F1, 1REDUCE_GRAD.

    B is the whole backward pass; I and W are its two halves, gradients of inputs and of weights.
    SEND_F sends a microbatch's values to every stage that reads them, RECV_F receives all that
    the stage reads from others; SEND_B and RECV_B do the same for their gradients.
    """

    stage: int
    kind: ActionKind
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A whole model on a mesh.

    `values` types everything that passes between calls, the batch's entries (`inputs`) included;
    `loss` names the program value to minimise, a sum over every axis its layout calls partial.
    `updates` names the buffers that a microbatch changes, and the values that they take.
    `repeated` says that each microbatch is a batch of its own, whose loss counts by its share of the
    step: shapes are then those of one microbatch, and statistics and losses those of accumulated gradients.
    `zero` says what is kept in parts where parameters are gathered: what the optimizer holds (1), gradients
    too (2), parameters too (3).
    `near` names the axes whose ranks share a node, if others don't: sums of gradients go over both in turn.
    `wire` is what they travel in, "" for their own type; `compress` is what crosses nodes (everything, if `near`
    is empty): bf16 or int8, with error feedback.
    `early` names actions of stages (0F) that gather what the action after them reads first, while they run.
    `compiled` says that torch.compile makes kernels of regions' functions; `fused`, that the package has its own.
    `draws` counts the random operations of a step, in the order in which one device runs them.
    `places` has the coordinate on the pipeline axis of every stage (empty: each stage's own number);
    `schedule` holds one list of actions per coordinate on that axis.
    """

    name: str
    mesh: Mesh
    microbatches: int = 1
    inputs: tuple[str, ...] = ()
    values: tuple[Value, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    regions: tuple[Region, ...] = ()
    calls: tuple[Call, ...] = ()
    loss: str = "loss"
    draws: int = 0
    zero: int = 0
    near: tuple[str, ...] = ()
    wire: str = ""
    compress: str = ""
    early: tuple[str, ...] = ()
    compiled: bool = False
    fused: bool = False
    updates: tuple[tuple[str, str], ...] = ()
    repeated: bool = False
    transfers: tuple[Transfer, ...] = ()
    places: tuple[int, ...] = ()
    schedule: tuple[tuple[Action, ...], ...] = ()

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes of every axis a layout may name: the mesh's, and the microbatches' where they share one batch."""
        return {**self.mesh.sizes, TIME_AXIS: 1 if self.repeated else self.microbatches}

    @property
    def batch_entries(self) -> tuple[str, ...]:
        """The batch's entries whose first dimension is the batch: as long as the first one's."""
        types = self.value_types()
        sizes = [types[name].shape[0] for name in self.inputs if types[name].shape]
        return tuple(name for name in self.inputs if types[name].shape and types[name].shape[0] == sizes[0])

    @property
    def stages(self) -> int:
        return 1 + max((call.stage for call in self.calls), default=0)

    def place(self, stage: int) -> int:
        """The coordinate on the pipeline axis where a stage runs."""
        return self.places[stage] if self.places else stage

    def stages_at(self, place: int) -> tuple[int, ...]:
        """The stages that run at a coordinate on the pipeline axis, in order."""
        return tuple(stage for stage in range(self.stages) if self.place(stage) == place)

    def travels(self, transfer: Transfer) -> bool:
        """Whether a transfer goes from rank to rank, and not between two stages of one."""
        return self.place(transfer.source) != self.place(transfer.target)

    def region(self, name: str) -> Region:
        return next(region for region in self.regions if region.name == name)

    def value_types(self) -> dict[str, TensorType]:
        return {value.name: value.type for value in self.values}

    def parameter(self, name: str) -> Parameter:
        return next(parameter for parameter in self.parameters if parameter.name == name)

    def holders(self) -> dict[str, tuple[int, ...]]:
        """Per parameter, the stages whose calls use it: a tied or shared weight may have several."""
        found: dict[str, set[int]] = {}
        for call in self.calls:
            for name in call.params:
                found.setdefault(name, set()).add(call.stage)
        return {name: tuple(sorted(stages)) for name, stages in found.items()}

    def owners(self) -> dict[str, tuple[int, ...]]:
        """Of the stages that use a parameter, the last at each pipeline coordinate: it reduces the gradient."""
        found = {}
        for name, stages in self.holders().items():
            last = {self.place(stage): stage for stage in stages}
            found[name] = tuple(sorted(last.values()))
        return found
