"""plan.json: the declared schema of a package's decisions, for all its readers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from .dims import Sectioned, global_shape
from .documents import Malformed, Natural, Positive, at_least, contents, decoded, parsed

FORMAT = 1  # the format of plan.json; readers refuse others
NAME = "plan.json"
MOST_RANKS = 1 << 20
ONE_MACHINE = 64  # the most processes to expect on one machine, also on CPUs
NODE = 8  # the number of GPUs in a node, unless --nodes was given
# The most bytes that a rank receives in a sum between CPUs in which all ranks send everything to all, with fewer steps
# than a ring.
DIRECT = 1 << 20
_AXIS = re.compile(r"([a-z][a-z0-9_]*)=([1-9][0-9]{0,6})")
_LAYOUT = re.compile(r"\[([^\[\]]*)\](?: (?:partial|vary)\([a-z0-9_,]+\))*")
_FACTOR = re.compile(r"([0-9]{1,18})(?:@([a-z][a-z0-9_]*(?:,[a-z][a-z0-9_]*)*))?")


def mesh(text: str) -> str:
    """Check the form `pp=2,dp=2,tp=2`."""
    axes = [_AXIS.fullmatch(part) for part in text.split(",")]
    found = {axis[1]: int(axis[2]) for axis in axes if axis}
    fits = len(found) == len(axes) and math.prod(found.values()) <= MOST_RANKS
    return "" if fits else "no mesh"


def _layout(text: str) -> str:
    match = _LAYOUT.fullmatch(text)
    factors = re.split(r", |\s*[·*]\s*", match[1]) if match and match[1] else []
    return "" if match and all(map(_FACTOR.fullmatch, factors)) else "no layout"


def _schedule(name: str) -> str:
    """Check the name of a schedule, or of the package's own file."""
    return "" if re.fullmatch(r"[a-z0-9-]*|schedule\.csv", name) else "no schedule"


Mesh = Annotated[str, mesh]
Layout = Annotated[str, _layout]
DType = Literal["f64", "f32", "bf16", "f16", "i64", "i32", "i16", "i8", "u8", "bool"]
Precision = Literal["fp32", "bf16", "fp16", "fp64"]
Option = str | int | float | bool
Names = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """An entry of the batch. `below` is the exclusive upper bound of an entry that indexes a table or classes."""

    dtype: DType
    layout: Layout
    below: Positive | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStack:
    """The package's parameter that contains a model's parameter as one or several rows; `rows` describes the cut of
    rows.
    """

    name: str
    rows: Layout
    row: Natural
    count: Natural | None = None  # for a whole table: the number of its rows, from `row` on


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOrder:
    """The order of a parameter's dimension, as in `Sectioned`."""

    dim: Natural
    ways: Positive
    sections: tuple[Positive, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanParameter:
    """A parameter. `shape` is the model's own, without the layout's padding.

    `balance` is the size of the update of a router's bias, whose gradient is the load of its experts. `counted` is the
    counter, and the place in it, that says whether a gradient reaches the parameter in a step.
    """

    dtype: DType
    layout: Layout
    shape: tuple[Natural, ...]
    trainable: bool
    reduce: Names
    gather: Names
    stages: tuple[Natural, ...]
    aliases: Names
    balance: float = 0.0
    counted: tuple[str, Natural] | None = None
    stack: PlanStack | None = None
    sectioned: PlanOrder | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The compile's other options that differ from the defaults."""

    schedule: Annotated[str, _schedule] = ""
    virtual_stages: Positive | None = None
    stage_calls: str = ""
    shard: Names = ()
    casts: Names = ()
    zero: str = ""
    recompute: str = ""
    kernels: Literal["", "aten", "triton", "inductor"] = ""
    bucket: str = ""
    nodes: Positive | None = None
    grad_reduce: Literal["", "fp32", "bf16"] = ""
    compress_grads: Literal["", "none", "bf16", "int8"] = ""
    loss_chunks: Positive = 1
    cuda_graphs: bool = False
    optimizer: str = ""
    group: Names = ()
    eval_every: Natural = 0
    forward_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The prediction for a plan that partc has chosen for a cluster."""

    cluster: str
    memory_limit: Natural
    step_seconds: Annotated[float, at_least(0)]
    memory_bytes: Natural
    gap: Annotated[float, at_least(0)] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """A result of a package that only runs forward; `place` is the pipeline rank that computes it."""

    dtype: DType
    layout: Layout
    place: Natural


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCollective:
    op: str
    axis: str
    bytes: Natural


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRegion:
    phase: Literal["setup", "step", "microbatch"]
    values: dict[str, str]
    saved: Names
    forward: tuple[PlanCollective, ...]
    backward: tuple[PlanCollective, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCall:
    name: str
    region: str
    stage: Natural
    reads: Names
    makes: Names


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRouter:
    """A layer of experts in a stage: its module, the number of experts, the axes that cut its rows."""

    name: str
    experts: Natural
    over: Names
    stage: Natural


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTransfer:
    value: str
    source: Natural
    target: Natural
    gradient: bool
    bytes: Natural


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The whole document. `memory` has its own schema, declared by its readers."""

    partc: int
    mesh: Mesh
    microbatches: Positive
    precision: Precision
    seed: int
    draws: Natural
    repeated: bool
    flops: Natural
    zero: Literal[0, 1, 2, 3]
    updates: Names
    options: dict[str, Option]
    command: Command
    stages: Positive
    places: tuple[Natural, ...]
    inputs: dict[str, Input]
    parameters: dict[str, PlanParameter]
    regions: dict[str, PlanRegion]
    calls: tuple[PlanCall, ...]
    transfers: tuple[PlanTransfer, ...]
    constants: dict[str, str] = field(default_factory=dict)
    results: dict[str, PlanResult] = field(default_factory=dict)
    routers: tuple[PlanRouter, ...] = ()
    name: str = ""
    schedule: dict[str, str] | None = None
    uncaptured: str = ""
    planned: Planned | None = None
    memory: Any = None


def order_of(entry: Mapping[str, Any]) -> Sectioned | None:
    """The order of a parameter's dimension; None if it is the model's."""
    order = entry.get("sectioned")
    return order and Sectioned(order["dim"], order["ways"], tuple(order["sections"]))


def launches(ranks: int, node: int | None, script: str = "train.py") -> tuple[str, ...]:
    """The commands that start all ranks, one for each node; `node` is the number of ranks given by --nodes."""
    if node is None:
        node = NODE if ranks > ONE_MACHINE and ranks % NODE == 0 else ranks
    if node >= ranks:
        return (f"torchrun --standalone --nproc-per-node {ranks} {script}",)
    where = "--master-addr FIRST_NODE --master-port 29500"
    nodes = ranks // node
    return tuple(
        f"torchrun --nnodes {nodes} --node-rank {index} --nproc-per-node {node} {where} {script}"
        for index in range(nodes)
    )


def read(root: Path) -> dict[str, Any]:
    """The plan of the package in `root`, in the form of `Plan`. Raises Malformed."""
    content = parsed(contents(root / NAME))
    if not isinstance(content, dict):
        raise Malformed("is not a plan")
    if content.get("partc") != FORMAT or isinstance(content["partc"], bool):
        raise Malformed(f"has format {content.get('partc')!r}; this partc reads {FORMAT}")
    plan = decoded(Plan, content, loose=True)
    for why in _contradictions(plan):
        raise Malformed(f"contradicts itself: {why}")
    return content


def _contradictions(plan: Plan) -> Iterator[str]:
    sizes = {axis[1]: int(axis[2]) for axis in map(_AXIS.fullmatch, plan.mesh.split(",")) if axis}
    if len(plan.places) != plan.stages:
        yield f"{plan.stages} stages have {len(plan.places)} places"
    if any(place >= sizes.get("pp", 1) for place in plan.places):
        yield f"a place in {list(plan.places)} is none of the {sizes.get('pp', 1)} pipeline ranks"
    for name, entry in plan.parameters.items():
        if any(stage >= plan.stages for stage in entry.stages):
            yield f"{name!r} is of stages {list(entry.stages)}, of {plan.stages}"
        shape = global_shape(_factors(entry.layout))
        if len(shape) != len(entry.shape) or any(map(int.__gt__, entry.shape, shape)):
            yield f"{name!r} has shape {list(entry.shape)} and layout {entry.layout}"
        order = entry.sectioned
        if order is not None and (
            entry.shape[order.dim : order.dim + 1] != (sum(order.sections),)
            or any(size % order.ways for size in order.sections)
        ):
            yield f"{name!r} has shape {list(entry.shape)} and sections {list(order.sections)} in {order.ways} parts"
    for call in plan.calls:
        if call.region not in plan.regions or call.stage >= plan.stages:
            yield f"call {call.name!r} is of region {call.region!r} and stage {call.stage}"
    for transfer in plan.transfers:
        if max(transfer.source, transfer.target) >= plan.stages:
            yield f"{transfer.value!r} goes from stage {transfer.source} to {transfer.target}, of {plan.stages}"
    for path, result in plan.results.items():
        if result.place >= sizes.get("pp", 1):
            yield f"result {path!r} is made on pipeline rank {result.place} of {sizes.get('pp', 1)}"
    typed_entries = (("input", plan.inputs), ("parameter", plan.parameters), ("result", plan.results))
    for kind, entries in typed_entries:
        for name, typed in entries.items():
            gathered = typed.gather if isinstance(typed, PlanParameter) else ()
            if why := _uncuttable(typed.layout, {**sizes, "mb": plan.microbatches}, gathered):
                yield f"{kind} {name!r}: {why}"


def _factors(layout: str) -> list[list[tuple[int, list[str]]]]:
    """The factors of each dimension, as (size, axes that cut it)."""
    inside = layout[1 : layout.index("]")]
    dims = [re.split(r"\s*[·*]\s*", dim) for dim in inside.split(", ")] if inside else []
    matches = [[_FACTOR.fullmatch(factor) for factor in dim] for dim in dims]
    return [[(int(found[1]), found[2].split(",") if found[2] else []) for found in dim if found] for dim in matches]


def _uncuttable(layout: str, sizes: Mapping[str, int], gathered: Names) -> str:
    """The reason why a layout is impossible; '' if it is possible. Parts that are `gathered` over axes may end with
    spare elements.
    """
    cut = [axis for dim in _factors(layout) for _, axes in dim for axis in axes]
    if len(set(cut)) != len(cut):
        return f"{layout} is cut over one axis twice"
    for dim in _factors(layout):
        for size, axes in dim:
            if size % math.prod(sizes.get(axis, 1) for axis in axes) and not set(axes) <= set(gathered):
                return f"{layout} does not divide"
    return ""
