"""The IR: a program is a sequence of calls of a few regions; a region holds graphs of typed operations.

All classes here are frozen. Passes return new objects. Besides this module, only the printer and the parser enumerate
the fields of these classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from operator import attrgetter
from typing import Any, Literal, TypeVar, Union

from partc.errors import InternalError, Source
from partc.ir.layout import Layout, Sizes, SubDim
from partc.ir.mesh import PIPELINE_AXIS, TIME_AXIS, Mesh
from partc.runtime.dims import Sectioned
from partc.runtime.first_steps import FirstSteps
from partc.runtime.place import stacked_names

Derived = TypeVar("Derived")
K = TypeVar("K")
DType = Literal["f64", "f32", "bf16", "f16", "i64", "i32", "i16", "i8", "u8", "bool"]
ITEMSIZE: Mapping[str, int] = {
    "f64": 8, "f32": 4, "bf16": 2, "f16": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "bool": 1,
}  # fmt: skip
PRECISIONS = ("fp32", "bf16", "fp16", "fp64")  # the types of computation
NO_GRAD = "no_grad"  # marks a traced change in place whose new values have no gradient
BY_PATH = "by_path"  # marks a traced change in place of a model with branches, whose paths have changes of their own
PASSED_BY = "passed_by"  # also marks it if the changed tensor has a gradient, which passes by the change
HOOK_PARTS = "parts"  # an attribute of the own gradients of hooks: the number of parts into which the loss is divided
SPARSE = "sparse"  # marks a table's gradient that is kept as rows
RAGGED = "ragged"  # a kernel's argument whose number of rows depends on the data
SCAN = "scan"  # a loop over time: `scan(starts, sequences, constants, step=…)`, see `Scan`
# The places that a mask selects, along one of its dimensions: `selected(mask, dim)`; its length is the mask's size.
SELECTED = "selected"
# The mark of a call of a module that equals another one: `module_call(tensors, call, path)`, see `CallMark`.
MODULE_MARK = "module_call"
FLOATING = frozenset({"f64", "f32", "bf16", "f16"})


@dataclass(frozen=True, slots=True)
class Ref:
    """The use of a value, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class DTypeArg:
    """A dtype given to an operation as an argument."""

    name: DType


Arg = Union[Ref, DTypeArg, "Graph", int, float, bool, str, None, tuple["Arg", ...]]


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
        """The number of elements that one rank holds."""
        return math.prod(self.layout.local_shape(sizes))

    def local_bytes(self, sizes: Sizes) -> int:
        """The number of bytes that one rank holds."""
        return self.local_elements(sizes) * ITEMSIZE[self.dtype]

    @classmethod
    def replicated(cls, dtype: DType, shape: Iterable[int]) -> TensorType:
        """The type of a tensor that every rank has whole."""
        return cls(dtype=dtype, layout=Layout.replicated(tuple(shape)))

    def shaped(self, shape: Iterable[int]) -> TensorType:
        """The type of another shape, whole on every rank."""
        return TensorType.replicated(self.dtype, shape)

    def local(self, sizes: Sizes) -> TensorType:
        """The type of one rank's shard."""
        return self.shaped(self.layout.local_shape(sizes))

    def __str__(self) -> str:
        return f"{self.dtype}{self.layout}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A name and its type. Names are unique within a graph (or, for program values, a program)."""

    name: str
    type: TensorType


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The distribution of one operation over one axis.

    `factor` names a factor of the operation's rule that is cut after `outer` elements (see layout.Shard). None means
    that every rank of the axis repeats the operation on operands whose gradients are partial sums. On an axis without a
    choice the operation is repeated on replicated operands.
    """

    axis: str
    factor: str | None
    outer: int = 1


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation: `results = name(*args, **attrs)`.

    `name` is a key of the rule table: an ATen packet name ("linear", "mul"), a composite ("cross_entropy"), a
    collective ("all_gather") or a user's "mylib::op". An operation named "fused" brackets the operations in `body`,
    which one kernel computes: its arguments are the values that the body reads from outside, its results are the body's
    results that are read outside. A `wide` operation computes in fp32 under mixed precision, as the model demands; the
    pass `precision` reads and clears this mark.
    """

    name: str
    args: tuple[Arg, ...] = ()
    attrs: tuple[tuple[str, Arg], ...] = ()
    results: tuple[Value, ...] = ()
    choices: tuple[Choice, ...] = ()
    source: Source | None = None
    body: tuple[Op, ...] = ()
    wide: bool = False

    @property
    def result(self) -> Value:
        if len(self.results) != 1:
            raise InternalError(f"{self.name} has {len(self.results)} results, not one")
        return self.results[0]

    @property
    def module(self) -> str:
        """The path of the module whose code the operation comes from; "" if it is unknown."""
        return self.source.module if self.source else ""

    @property
    def types(self) -> tuple[TensorType, ...]:
        """The types of the results."""
        return tuple(value.type for value in self.results)

    def refs(self) -> Iterator[str]:
        """Names of the values read, in order, repeats included."""
        return iter(self._refs)

    @cached_property
    def _refs(self) -> tuple[str, ...]:
        return tuple(_refs((*self.args, *self.attrs)))

    def renamed(self, names: Mapping[str, str]) -> Op:
        """The same operation reading (and defining) values under other names."""
        results = tuple(Value(name=names.get(value.name, value.name), type=value.type) for value in self.results)
        attrs = tuple((key, _renamed(arg, names)) for key, arg in self.attrs)
        args = tuple(_renamed(arg, names) for arg in self.args)
        body = tuple(op.renamed(names) for op in self.body)
        return replace(self, args=args, attrs=attrs, results=results, body=body)

    def with_operands(self, names: Mapping[str, str]) -> Op:
        """The same operation on operands of other names; its results keep their names."""
        return replace(self.renamed(names), results=self.results)

    @property
    def content(self) -> tuple[object, ...]:
        """The operation without the names of its results and its source: equal operations have equal contents."""
        return self.name, self.args, self.attrs, self.types, self.wide

    @property
    def form(self) -> tuple[object, ...]:
        """The operation without the names of its values, its source and the choices of its cuts."""
        plain = self.renamed(dict.fromkeys(self.refs(), ""))
        return self.name, plain.args, plain.attrs, self.types, self.wide

    def reading(self, names: Iterable[str]) -> Op:
        """The same operation with other operands, in the order of `refs`."""
        given = iter(names)

        def swap(arg: Arg) -> Arg:
            if isinstance(arg, Ref):
                return Ref(next(given))
            return tuple(map(swap, arg)) if isinstance(arg, tuple) else arg

        args = tuple(map(swap, self.args))
        return replace(self, args=args, attrs=tuple((key, swap(arg)) for key, arg in self.attrs))

    def laid_out(self, layouts: Iterable[Layout]) -> Op:
        """The same operation with these layouts of its results."""
        pairs = zip(self.results, layouts, strict=True)
        results = tuple(replace(value, type=replace(value.type, layout=layout)) for value, layout in pairs)
        return replace(self, results=results)


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


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Straight-line code: inputs, operations in order, names of the outputs."""

    inputs: tuple[Value, ...]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]

    def definitions(self) -> Mapping[str, Value]:
        """Every value by name, inputs included."""
        return self._definitions

    def makers(self) -> Mapping[str, Op]:
        """The operation that makes each value."""
        return self._makers

    def readers(self) -> Mapping[str, Sequence[Op]]:
        """The operations that read each value, in order, each of them once."""
        return self._readers

    def types(self) -> dict[str, TensorType]:
        """The type of every value by name, inputs included."""
        return {name: value.type for name, value in self.definitions().items()}

    # Derived once: passes ask for each of many operations.
    @cached_property
    def _definitions(self) -> Mapping[str, Value]:
        made = (value for op in self.ops for value in op.results)
        return {value.name: value for value in (*self.inputs, *made)}

    @cached_property
    def _makers(self) -> Mapping[str, Op]:
        return makers(self.ops)

    @cached_property
    def _readers(self) -> Mapping[str, Sequence[Op]]:
        return readers(self.ops)

    def rewritten(self, ops: Iterable[Op], same: Mapping[str, str]) -> Graph:
        """The graph with other operations. `same` maps values to equal ones, which the graph returns in their place."""
        return replace(self, ops=tuple(ops), outputs=tuple(same.get(name, name) for name in self.outputs))

    def without_dead(self) -> Graph:
        """The graph without the operations that no output depends on."""
        return replace(self, ops=needed(self.ops, self.outputs))


def is_in_place(name: str) -> bool:
    """Whether torch's operation of this name returns its first operand: `add_`, but not `__and__`."""
    return name.endswith("_") and not name.startswith("_") and "::" not in name


def is_change(op: Op) -> bool:
    """Whether an operation of a traced graph changes its first operand in place."""
    return is_in_place(op.name) and op.name != "detach_"


def makers(ops: Iterable[Op]) -> dict[str, Op]:
    """The operation that makes each value."""
    return {value.name: op for op in ops for value in op.results}


def readers(ops: Iterable[Op]) -> dict[str, list[Op]]:
    """The operations that read each value, in order, each of them once."""
    found: dict[str, list[Op]] = {}
    for op in ops:
        for name in dict.fromkeys(op.refs()):
            found.setdefault(name, []).append(op)
    return found


def dependents(ops: Iterable[Op], roots: Iterable[str]) -> set[str]:
    """The roots, and all values that depend on them."""
    found = set(roots)
    for op in ops:
        if any(name in found for name in op.refs()):
            found.update(value.name for value in op.results)
    return found


def needed(
    ops: Sequence[Op],
    wanted: Iterable[str],
    given: Collection[str] = (),
    removable: Callable[[Op], bool] = lambda op: True,
) -> tuple[Op, ...]:
    """The operations, in order, that `wanted` needs, given the values in `given`; others stay unless `removable`."""
    live = {name for name in wanted if name not in given}
    found: list[Op] = []
    for op in reversed(ops):
        if not removable(op) or any(value.name in live for value in op.results):
            found.append(op)
            live.update(name for name in op.refs() if name not in given)
    return tuple(reversed(found))


Phase = Literal["setup", "step", "microbatch"]
Kernels = Literal["aten", "triton", "inductor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A distinct body of the model: traced, sharded, differentiated and printed once.

    `params` are the region's parameters and buffers, named relative to the module ("attn.wq.weight"); graphs read them
    by these names. `phase` says how often calls run: once ("setup": computed from constants only), once per step on the
    whole local batch ("step": computed from inputs only and reduced over the batch), or for every microbatch.

    After differentiation `forward` returns its outputs, followed by the values in `saved`. `backward` takes the
    gradients of the outputs and the saved values. It returns the gradients of the inputs and parameters that need one,
    named "grad_<input>". After the split pass, `backward` returns the gradients of inputs, followed by the values in
    `kept`; `weight` takes the latter and returns the gradients of parameters.

    `kernels` names the source of the kernels of its functions: PyTorch, Triton functions in the package, or
    torch.compile.

    `batch_over` names the axes of weights or sequences that cut the batch in this region.
    """

    name: str
    params: tuple[Value, ...]
    forward: Graph
    backward: Graph | None = None
    saved: tuple[str, ...] = ()
    weight: Graph | None = None
    kept: tuple[str, ...] = ()
    phase: Phase = "microbatch"
    kernels: Kernels = "aten"
    batch_over: tuple[str, ...] = ()

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The graphs that exist: forward, backward, weight."""
        return tuple(graph for graph in (self.forward, self.backward, self.weight) if graph is not None)

    def mapped(self, change: Callable[[Graph], Graph]) -> Region:
        """The region with `change` applied to each of its graphs."""
        return replace(
            self,
            forward=change(self.forward),
            backward=self.backward and change(self.backward),
            weight=self.weight and change(self.weight),
        )

    def read_outside(self, graph: Graph) -> set[str]:
        """The values of a graph that are read outside of it."""
        return {*graph.outputs, *(self.saved if graph is self.forward else ())}

    def values(self, graph: Graph) -> dict[str, Value]:
        """All values in a graph by name: parameters, inputs and results."""
        return {**{value.name: value for value in self.params}, **graph.definitions()}

    def types(self, graph: Graph) -> dict[str, TensorType]:
        """The types of all values in a graph."""
        return {**{value.name: value.type for value in self.params}, **graph.types()}


@lru_cache(maxsize=1024)
def _sizes(mesh: Mesh, parts: int) -> Mapping[str, int]:
    """The sizes of all axes. Programs share one mapping, by whose identity layouts find their last local shape."""
    return {**mesh.sizes, TIME_AXIS: parts}


def without_axes(region: Region, axes: Collection[str], sizes: Sizes) -> Region:
    """The region as it is on a mesh whose `axes` have size 1. Collectives over these axes are kept."""
    sizes = {**sizes, **dict.fromkeys(axes, 1)}

    def value(item: Value) -> Value:
        return replace(item, type=replace(item.type, layout=item.type.layout.normalized(sizes)))

    def op(item: Op) -> Op:
        choices = tuple(choice for choice in item.choices if choice.axis not in axes)
        return replace(item, choices=choices, results=tuple(map(value, item.results)), body=tuple(map(op, item.body)))

    def graph(item: Graph) -> Graph:
        return replace(item, inputs=tuple(map(value, item.inputs)), ops=tuple(map(op, item.ops)))

    return replace(region, params=tuple(map(value, region.params))).mapped(graph) if axes else region


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
    zero: int = 0  # sharded: the optimizer's state (1), also the gradient (2), also the parameter (3)
    buckets: tuple[str, ...] = ()  # the names of the buckets in which its gradient is summed over ranks
    holds: tuple[int, ...] = ()  # the model's own shape, where zeros were added to it
    sectioned: Sectioned | None = None  # the order of a dimension, if it is not the model's
    sparse: bool = False  # its gradient has only the rows that lookups read
    balance: float = 0.0  # the size of the update of a router's bias, whose gradient is the load of experts
    stacked: bool = False  # its rows are parameters of the model: their numbers replace `*` in its name
    members: tuple[tuple[str, int, int], ...] = ()  # the model's tables in it: name, first row, number of rows
    counts: tuple[tuple[str, ...], ...] = ()  # for each element, the model's parameters that gradients reach as often

    @property
    def facts(self) -> tuple[object, ...]:
        """Everything except its names and its buckets."""
        return _FACTS(self)

    def replaced(self, **changes: object) -> Parameter:
        """The parameter with other values of some fields, like `dataclasses.replace`: models have thousands of them."""
        held: dict[str, Any] = dict(zip(Parameter.__slots__, _FIELDS(self), strict=True))
        return Parameter(**{**held, **changes})

    @property
    def names(self) -> tuple[str, ...]:
        """The model's names of the parameters that it holds."""
        if self.members:
            return tuple(name for name, _, _ in self.members)
        return stacked_names(self.name, self.type.shape[0]) if self.stacked else (self.name,)


_FIELDS = attrgetter(*Parameter.__slots__)
_FACTS = attrgetter(*(name for name in Parameter.__slots__ if name not in ("name", "aliases", "buckets")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients of a stage that are summed over ranks together; parameters name their buckets."""

    name: str
    stage: int
    over: tuple[str, ...]
    after: str = ""  # the sum starts after the last backward of this call; "" at the step's end
    scattered: bool = False  # each rank keeps only its part of the sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """How parameters and gradients travel between ranks.

    If there are several nodes, an exchange is two collectives: inside nodes and between them.
    """

    near: tuple[str, ...] = ()  # the axes inside nodes; empty if there is one level
    wire: DType | Literal[""] = ""  # the element type in which gradients are sent; "": their own
    compress: str = ""  # bf16 or int8, for gradients between nodes, or everywhere if `near` is empty; "" for none

    def apart(self, parameter: Parameter) -> frozenset[str]:
        """The axes that cut a parameter, if its gradient is compressed: only gradients with equal ones travel together.

        Numbers that are compressed together share a scale. Ranks with copies of a parameter must round its gradient
        alike, so they must also have copies of its neighbours.
        """
        return frozenset(parameter.type.layout.sharded_axes) if self.compress else frozenset()

    def levels(self, over: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Split axes into those inside nodes and those between nodes."""
        return tuple(axis for axis in over if axis in self.near), tuple(axis for axis in over if axis not in self.near)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A program value that one stage computes and a later stage reads; `gradient` says that its gradient returns."""

    value: str
    source: int
    target: int
    gradient: bool


GraphKind = Literal["F", "B", "I", "W"]  # forward; backward, or its half for inputs; its half for weights
ActionKind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "REDUCE_GRAD"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """An entry of a rank's schedule, in the grammar of torch's pipeline schedules: 2F0, 0SEND_F1, 1REDUCE_GRAD.

    B is the whole backward pass; I and W are its halves, the gradients of inputs and of weights. SEND_F sends a
    microbatch's values to every stage that reads them. RECV_F receives all values that the stage reads from other
    stages. SEND_B and RECV_B do the same for gradients.
    `ahead` names the actions (0B) whose first gathers this one starts: 0F1>0B. UNSHARD only starts gathers.
    """

    stage: int
    kind: ActionKind
    microbatch: int | None = None
    ahead: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The action without its gathers ahead: 2F0."""
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    def __str__(self) -> str:
        return f"{self.name}{'>' if self.ahead else ''}{','.join(self.ahead)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """An operation that every rank of a group enters together, with an operand of `shape`.

    The group is the ranks that differ on `axes`; with `places`, the ranks at those pipeline coordinates that agree on
    every other axis. Numbers may travel encoded (`code`: int8, bf16); `dtype` is then the type of the encoded elements.
    """

    op: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: DType
    code: str = ""
    places: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of the operand."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    def ways(self, sizes: Sizes) -> int:
        """The number of ranks in the group."""
        return len(self.places) or math.prod(sizes[axis] for axis in self.axes)

    @property
    def group(self) -> str:
        """`dp,tp`, or `pp 0,3` for some pipeline coordinates."""
        return f"{PIPELINE_AXIS} {','.join(map(str, self.places))}" if self.places else ",".join(self.axes)

    def __str__(self) -> str:
        """`all_to_all(u8[16640] over dp_out in int8)`."""
        code = f" in {self.code}" if self.code else ""
        return f"{self.op}({self.dtype}{list(self.shape)} over {self.group}{code})"


Verb = Literal["start", "advance", "wait", "free", "run", "send", "receive"]
Subject = Literal["gather", "refresh", "scatter", "bucket", "shared", "result", "update", "F", "B", "I", "W", "value"]
When = Literal["", "first", "last", "early", "late"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionStatement:
    """One line of an action's body.

    run F CALL             the forward graph of a call; B, I and W likewise
    start gather CALL      the whole parameters that a call reads, which stay until `free`
    start refresh CALL     parameters that ranks keep whole, after an update
    start scatter CALL     the gradients that a call has computed, to the ranks that hold the parts
    start bucket NAME      the sum of a bucket of gradients
    start shared WEIGHT    the sum of the gradient of a weight that several pipeline ranks use
    start result VALUE     the sum of the loss, or of a result
    advance ...            wait for the collectives of an exchange, and start its next ones
    wait ...               wait for the last collectives of an exchange
    send VALUE -> STAGE    to a later stage, or a gradient to an earlier one; `receive` only says that a rank is ready

    An exchange consists of chains of collectives; `start` and `advance` state the next one of each chain, None where a
    chain has ended.

    `when` restricts a statement to the stage's first forward pass after an update, or to its last backward pass before
    one. An `early` statement runs in an earlier action, at its statement with `ahead`: the n-th gather that follows, in
    the actions that the schedule names. Parameters that are whole at that point stay so for one more use, and nothing
    moves. A `late` statement runs in a later action, at its statement with `behind`: the n-th scatter that earlier
    actions of the stage have left under way, the last one first; there is none before a batch's first backward pass.
    """

    verb: Verb
    subject: Subject
    of: str = ""
    collectives: tuple[Collective | None, ...] = ()
    ahead: int = 0
    behind: int = 0
    peer: int | None = None
    when: When = ""

    def __str__(self) -> str:
        """The statement as text; names are not quoted, which the printer adds."""
        return self.text(self.of)

    def text(self, of: str) -> str:
        name = f"ahead {self.ahead}" if self.ahead else f"behind {self.behind}" if self.behind else of
        arrow = {"send": f" -> {self.peer}"}.get(self.verb, f" <- {self.peer}") if self.peer is not None else ""
        moved = ", ".join("-" if each is None else str(each) for each in self.collectives)
        words = " ".join(filter(None, (self.when, self.verb, self.subject, name)))
        return f"{words}{arrow}{': ' if moved else ''}{moved}"


BodyKind = Literal[
    "INIT",
    "SETUP",
    "PREPARE",
    "F",
    "B",
    "I",
    "W",
    "SEND_F",
    "RECV_F",
    "SEND_B",
    "RECV_B",
    "REDUCE_GRAD",
    "END",
    "REFRESH",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """The statements of an action: of a stage, or (END) of a pipeline coordinate.

    A rank runs INIT of its stages and SETUP of its stages once; then, each step, PREPARE and REFRESH of its stages, its
    schedule, and END. UNSHARD at the head of a schedule runs before PREPARE. A batch whose gradients are only
    accumulated skips REFRESH and END.
    """

    kind: BodyKind
    index: int
    statements: tuple[ActionStatement, ...]

    @property
    def name(self) -> str:
        return f"{self.index}{self.kind}"


@dataclass(frozen=True, slots=True)
class Repetition:
    """A run of groups of layers that equal each other: `units[i]` has the paths of the modules of group i.

    Until `outline`, a program has the operations of the first three units and of the last one (`ir.repetitions`).
    """

    units: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A whole model on a mesh. Derived facts are cached.

    `values` types everything that passes between calls, the batch's entries (`inputs`) included;
    `loss` names the program value to minimise, a sum over every axis its layout calls partial. A program that only runs
    forward has `results` in its place: values by their paths in the returned object ("" for a lone tensor).
    `scaled` says that gradients are those of the loss times a scale, which the step chooses, as fp16 needs.
    `updates` names the buffers that a microbatch changes, and the values that they take. `reached` names parameters
    that no gradient reaches in a step in which a value is zero, and this value; the pass `reach` reads it.
    With `separate_batches` each microbatch is a batch of its own, whose loss counts by its share of the step: shapes
    are those of one microbatch, statistics and losses those of accumulated gradients; all of them read the entries
    `whole_inputs`, whatever their sizes.
    `largest` has the largest numbers of integer entries, where the model reads them; they are equal in all batches.
    `branches` has the lines whose tests of values are branches with both outcomes in the program: the function that
    contains the line, and the line's number. `steps` are attributes of the model that forward sets in its first step.
    `draws` is the number of random operations in a step; they are numbered in the order in which one device runs them.
    With `draws_for_rows` some draw for rows that masks select, by place, and one device draws by order.
    `places` has the coordinate on the pipeline axis of every stage (empty: each stage's own number);
    `schedule` holds one list of actions per coordinate on that axis, `bodies` the statements that actions stand for.
    """

    name: str
    mesh: Mesh
    microbatches: int = 1
    separate_batches: bool = False
    inputs: tuple[str, ...] = ()
    whole_inputs: tuple[str, ...] = ()
    largest: tuple[tuple[str, int], ...] = ()
    branches: tuple[tuple[str, int], ...] = ()
    steps: FirstSteps | None = None
    values: tuple[Value, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    transport: Transport = Transport()
    buckets: tuple[Bucket, ...] = ()
    regions: tuple[Region, ...] = ()
    calls: tuple[Call, ...] = ()
    loss: str = "loss"
    scaled: bool = False
    results: tuple[tuple[str, str], ...] = ()
    draws: int = 0
    draws_for_rows: bool = False
    updates: tuple[tuple[str, str], ...] = ()
    reached: tuple[tuple[str, str], ...] = ()
    transfers: tuple[Transfer, ...] = ()
    places: tuple[int, ...] = ()
    schedule: tuple[tuple[Action, ...], ...] = ()
    bodies: tuple[Body, ...] = ()
    repetitions: tuple[Repetition, ...] = ()

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The sizes of all axes that a layout may name: the mesh's, and `mb` where microbatches share one batch."""
        return _sizes(self.mesh, 1 if self.separate_batches else self.microbatches)

    @property
    def returned(self) -> tuple[str, ...]:
        """The program values that are read after the last call: the loss, or the results."""
        return tuple(dict.fromkeys(value for _, value in self.results)) or (self.loss,)

    @cached_property
    def batch_entries(self) -> tuple[str, ...]:
        """The batch entries whose first dimension has the length of the batch."""
        types = self.value_types()
        long = [name for name in self.inputs if types[name].shape and name not in self.whole_inputs]
        return tuple(name for name in long if types[name].shape[0] == types[long[0]].shape[0])

    def step_input(self, name: str) -> TensorType:
        """The type of an entry for a whole step; microbatches that are batches of their own follow each other in it."""
        type = self.value_types()[name]
        if not self.separate_batches or name not in self.batch_entries:
            return type
        first, *rest = type.layout.dims
        every = SubDim(self.microbatches, (TIME_AXIS,))
        return replace(type, layout=replace(type.layout, dims=((every, *first), *rest)))

    @cached_property
    def zero(self) -> int:
        """The highest ZeRO level of a parameter."""
        return max((parameter.zero for parameter in self.parameters), default=0)

    @property
    def kernels(self) -> Kernels:
        """The source of the kernels of microbatch regions, updates and compression."""
        return next((region.kernels for region in self.regions if region.phase == "microbatch"), "aten")

    @cached_property
    def stages(self) -> int:
        return 1 + max((call.stage for call in self.calls), default=0)

    @cached_property
    def split_stages(self) -> frozenset[int]:
        """The stages that call a region whose backward pass has two halves."""
        split = {region.name for region in self.regions if region.weight is not None}
        return frozenset(call.stage for call in self.calls if call.region in split)

    def place(self, stage: int) -> int:
        """The coordinate on the pipeline axis where a stage runs."""
        return self.places[stage] if self.places else stage

    def stages_at(self, place: int) -> tuple[int, ...]:
        """The stages that run at a coordinate on the pipeline axis, in order."""
        return self._stages_at.get(place, ())

    @cached_property
    def _stages_at(self) -> Mapping[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for stage in range(self.stages):
            found[self.place(stage)] = (*found.get(self.place(stage), ()), stage)
        return found

    def kinds(self, stage: int) -> frozenset[ActionKind]:
        """The kinds of actions that the schedule has of a stage."""
        return self._kinds.get(stage, frozenset())

    @cached_property
    def _kinds(self) -> Mapping[int, frozenset[ActionKind]]:
        found: dict[int, set[ActionKind]] = {}
        for row in self.schedule:
            for action in row:
                found.setdefault(action.stage, set()).add(action.kind)
        return {stage: frozenset(kinds) for stage, kinds in found.items()}

    def travels(self, transfer: Transfer) -> bool:
        """Whether a transfer crosses ranks (and not only stages of one rank)."""
        return self.place(transfer.source) != self.place(transfer.target)

    @cached_property
    def sent(self) -> tuple[Transfer, ...]:
        """The transfers that cross ranks."""
        return tuple(filter(self.travels, self.transfers))

    def mapped(self, change: Callable[[Region, Graph], Graph]) -> Program:
        """The program with `change` applied to each graph of each region."""
        return replace(self, regions=tuple(region.mapped(partial(change, region)) for region in self.regions))

    def region(self, name: str) -> Region:
        return self._regions[name]

    @cached_property
    def _regions(self) -> Mapping[str, Region]:
        return {region.name: region for region in reversed(self.regions)}

    def value_types(self) -> Mapping[str, TensorType]:
        return self._value_types

    @cached_property
    def _value_types(self) -> Mapping[str, TensorType]:
        return {value.name: value.type for value in self.values}

    def source_of(self, value: str) -> Source | None:
        """The place in the user's code that computes a result of a call, if it is known."""
        call = self.maker(value)
        graph = self.region(call.region).forward
        op = graph.makers().get(graph.outputs[call.results.index(value)])
        return op.source if op is not None else None

    def body(self, kind: BodyKind, index: int) -> tuple[ActionStatement, ...]:
        """The statements of an action; none where it has no body."""
        body = self.named_bodies.get(f"{index}{kind}")
        return () if body is None else body.statements

    @cached_property
    def named_bodies(self) -> Mapping[str, Body]:
        """The bodies by name (`0F`)."""
        return {body.name: body for body in self.bodies}

    def bucket(self, name: str) -> Bucket:
        return self._buckets[name]

    @cached_property
    def _buckets(self) -> Mapping[str, Bucket]:
        return {bucket.name: bucket for bucket in self.buckets}

    def derived(self, kind: Callable[[Program], Derived]) -> Derived:
        """The instance of `kind` for this program, created once."""
        if kind not in self._derived:
            self._derived[kind] = kind(self)
        return self._derived[kind]  # type: ignore[return-value]

    @cached_property
    def _derived(self) -> dict[Callable[[Program], object], object]:
        return {}

    def calls_of(self, stage: int) -> tuple[Call, ...]:
        """The calls of a stage, in order."""
        return self._calls_of.get(stage, ())

    @cached_property
    def _calls_of(self) -> Mapping[int, tuple[Call, ...]]:
        return self._calls_by(lambda call: call.stage)

    def call(self, stage: int, name: str) -> Call:
        return self._calls[stage, name]

    @cached_property
    def _calls(self) -> Mapping[tuple[int, str], Call]:
        return {(call.stage, call.name): call for call in self.calls}

    def calls_to(self, region: str) -> tuple[Call, ...]:
        """The calls of a region, in order."""
        return self._calls_to.get(region, ())

    @cached_property
    def _calls_to(self) -> Mapping[str, tuple[Call, ...]]:
        return self._calls_by(lambda call: call.region)

    def _calls_by(self, key: Callable[[Call], K]) -> Mapping[K, tuple[Call, ...]]:
        found: dict[K, list[Call]] = {}
        for call in self.calls:
            found.setdefault(key(call), []).append(call)
        return {each: tuple(calls) for each, calls in found.items()}

    def maker(self, value: str) -> Call:
        """The first call that computes a program value."""
        return next(call for call in self.calls if value in call.results)

    def parameter(self, name: str) -> Parameter:
        return self._parameters[name]

    @cached_property
    def _parameters(self) -> Mapping[str, Parameter]:
        return {parameter.name: parameter for parameter in reversed(self.parameters)}

    def holders(self) -> Mapping[str, tuple[int, ...]]:
        """For each parameter, the stages whose calls read it: a tied or shared weight may have several."""
        return self._holders

    @cached_property
    def _holders(self) -> Mapping[str, tuple[int, ...]]:
        found: dict[str, set[int]] = {}
        for call in self.calls:
            for name in call.params:
                found.setdefault(name, set()).add(call.stage)
        return {name: tuple(sorted(stages)) for name, stages in found.items()}

    def parameters_at(self, place: int) -> tuple[Parameter, ...]:
        """The parameters that ranks at a coordinate on the pipeline axis hold."""
        return self._parameters_at.get(place, ())

    @cached_property
    def _parameters_at(self) -> Mapping[int, tuple[Parameter, ...]]:
        found: dict[int, list[Parameter]] = {}
        for name, stages in self.holders().items():
            for place in {self.place(stage) for stage in stages}:
                found.setdefault(place, []).append(self.parameter(name))
        return {place: tuple(parameters) for place, parameters in found.items()}

    def owners(self) -> Mapping[str, tuple[int, ...]]:
        """For each parameter, the last stage that reads it at each pipeline coordinate; this stage reduces the
        gradient.
        """
        return self._owners

    @cached_property
    def _owners(self) -> Mapping[str, tuple[int, ...]]:
        found = {}
        for name, stages in self.holders().items():
            last = {self.place(stage): stage for stage in stages}
            found[name] = tuple(sorted(last.values()))
        return found
