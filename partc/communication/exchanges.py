"""The collectives of each statement in an action: their parameters or gradients, axes and sizes.

A gather or scatter of ZeRO carries all parameters of a call that share an element type and axes in one collective. A
sum of gradients carries a bucket. If only some ranks share a node (`Parameter.near`), an exchange has two levels:
gathers cross nodes first and then run inside each node; scatters and sums run inside each node first. Each byte crosses
between two nodes once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest

from partc.errors import Source
from partc.ir.collectives import cost
from partc.ir.layout import Sizes
from partc.ir.program import ITEMSIZE, Call, DType, Graph, GraphKind, Parameter, Program, Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """An operation that every rank of a group enters together, with an operand of `shape`.

    The group is the ranks that differ on `axes`; with `places`, the ranks at those pipeline
    coordinates that agree on every other axis.
    """

    op: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    attrs: tuple[tuple[str, object], ...] = ()
    places: tuple[int, ...] = ()
    action: str = ""
    source: Source | None = None

    @property
    def content(self) -> tuple[object, ...]:
        """The facts that the ranks must agree on."""
        return self.op, self.shape, self.dtype, self.attrs

    @property
    def bytes(self) -> int:
        """Bytes of the operand."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    def ways(self, sizes: Sizes) -> int:
        """The number of ranks in the group."""
        return len(self.places) or math.prod(sizes[axis] for axis in self.axes)

    def received(self, sizes: Sizes) -> int:
        """The bytes that one rank receives, with ring algorithms."""
        return cost(self.op, self.ways(sizes), self.bytes)

    def __str__(self) -> str:
        where = f"pipeline ranks {self.places}" if self.places else " and ".join(self.axes)
        at = f" ({self.source})" if self.source is not None and self.source.line else ""
        return f"{self.action}: {self.op} of {self.dtype}{list(self.shape)} over {where}{at}"


Levels = tuple[tuple[Collective, ...], ...]  # level by level, the collectives that start together
NearAndFar = tuple[tuple[str, ...], tuple[str, ...]]  # axes inside nodes and those between them


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients whose sum starts after the last backward of one call."""

    after: str
    over: tuple[str, ...]
    scattered: bool  # whether each rank keeps only its part of the sum
    parameters: tuple[Parameter, ...]  # in order of use; they travel in one way

    @property
    def near_and_far(self) -> NearAndFar:
        return near_and_far(self.over, self.parameters[0])


@dataclass(frozen=True)
class Exchanges:
    """The exchanges of a program, by call and stage."""

    program: Program

    @cached_property
    def regions(self) -> Mapping[str, Region]:
        return {region.name: region for region in self.program.regions}

    @cached_property
    def read(self) -> Mapping[str, DType]:
        """The element type in which calls read each parameter."""
        return {
            name: value.type.dtype
            for call in self.program.calls
            for name, value in zip(call.params, self.regions[call.region].params, strict=True)
        }

    @cached_property
    def parted(self) -> Mapping[str, Parameter]:
        """Parameters that ranks hold in another form than calls read: in parts, or in another element type."""
        return {
            parameter.name: parameter
            for parameter in self.program.parameters
            if parameter.gather or self.read.get(parameter.name, parameter.type.dtype) != parameter.type.dtype
        }

    def has_unit(self, call: Call) -> bool:
        """Whether a call, or another call of its region, reads `parted` parameters: they are emitted alike."""
        return call.region in self._with_units

    @cached_property
    def _with_units(self) -> frozenset[str]:
        calls = self.program.calls
        return frozenset(call.region for call in calls if any(name in self.parted for name in call.params))

    def gathers(self, call: Call, kind: GraphKind) -> bool:
        """Whether a call gathers parameters for one run, and frees them after it."""
        region = self.regions[call.region]
        return self.program.zero == 3 and self.has_unit(call) and _reads(region, graph_of(region, kind))

    def scatters(self, call: Call, kind: GraphKind) -> bool:
        """Whether the gradients of a run are scattered right after it."""
        return bool(self._scattered(call, kind))

    def _scattered(self, call: Call, kind: GraphKind) -> list[str]:
        if self.program.zero < 2 or kind == "F" or not self.has_unit(call):
            return []
        region = self.regions[call.region]
        graph = graph_of(region, kind)
        made = set(graph.outputs) if graph is not None else set()
        pairs = zip(region.params, call.params, strict=True)
        return [name for value, name in pairs if f"grad_{value.name}" in made]

    def kept(self, stage: int) -> dict[str, list[str]]:
        """Parameters that ranks keep whole besides their parts, by the first call that reads them."""
        found: dict[str, list[str]] = {}
        seen: set[str] = set()
        for call in self.program.calls if self.program.zero in (1, 2) else ():
            if call.stage == stage and self.regions[call.region].phase == "microbatch":
                found[call.name] = [name for name in call.params if name not in seen]
                seen.update(call.params)
        return found

    def gather(self, names: Iterable[str]) -> Levels:
        """The all-gathers of parameters."""
        return self._levels("all_gather", names)

    def scatter(self, call: Call, kind: GraphKind) -> Levels:
        """The reduce-scatters of the gradients of a run."""
        return self._levels("reduce_scatter", self._scattered(call, kind))

    def scattered_bucket(self, bucket: Bucket) -> Levels:
        """The reduce-scatters of a bucket of gradients that were accumulated over a step's microbatches."""
        return self._levels("reduce_scatter", (parameter.name for parameter in bucket.parameters))

    @cached_property
    def levels(self) -> int:
        """The number of levels of gathers: 2 if some of the ranks share a node and others do not, else 1."""
        return max((1 + all(near_and_far(item.gather, item)) for item in self.program.parameters), default=1)

    def _levels(self, op: str, names: Iterable[str]) -> Levels:
        sizes: dict[tuple[str, NearAndFar, str], int] = {}
        for parameter in (self.parted[name] for name in names if name in self.parted):
            whole = parameter.type.local_elements(self.program.sizes) * self.ways(parameter.gather)  # with spare ones
            summed = parameter.wire or parameter.type.dtype
            axes = near_and_far(parameter.gather, parameter)
            gathered = op == "all_gather"
            key = (self.read[parameter.name], axes, "") if gathered else (summed, axes, parameter.compress)
            if parameter.gather and (gathered or parameter.trainable):
                sizes[key] = sizes.get(key, 0) + whole
        chains = [self._chain(op, *key, size) for key, size in sizes.items()]
        count = max(map(len, chains), default=0)
        return tuple(tuple(chain[level] for chain in chains if level < len(chain)) for level in range(count))

    def _chain(self, op: str, dtype: str, axes: NearAndFar, compress: str, size: int) -> tuple[Collective, ...]:
        """One collective, or one between nodes and one inside; `size` elements make up the whole."""
        near, far = axes
        inside, across = self.ways(near), self.ways(far)
        gathered = op == "all_gather"
        found = []
        if far:
            share = size // inside  # the elements that cross nodes to one rank, or from it
            length = share // across if gathered else share
            found.append(_coded(Collective(op=op, axes=far, shape=(length,), dtype=dtype), across, compress))
        if near:
            length = size // inside if gathered else size
            found.append(Collective(op=op, axes=near, shape=(length,), dtype=dtype))
        return tuple(found if gathered else found[::-1])

    def ways(self, axes: Iterable[str]) -> int:
        """The ranks that differ on the axes."""
        return math.prod(self.program.sizes[axis] for axis in axes)

    def sums(self, stage: int) -> GradientSums:
        """The sums of a stage's gradients."""
        if stage not in self._sums:
            self._sums[stage] = GradientSums(self, stage)
        return self._sums[stage]

    @cached_property
    def _sums(self) -> dict[int, GradientSums]:
        return {}


@dataclass(frozen=True)
class GradientSums:
    """The gradients that a stage sums over ranks once per step: their buckets, and the stages that share them.

    If several stages of one rank use a weight, the last of them sums its gradient.
    """

    exchanges: Exchanges
    stage: int

    @property
    def program(self) -> Program:
        return self.exchanges.program

    @cached_property
    def owners(self) -> Mapping[str, tuple[int, ...]]:
        return self.program.owners()

    @cached_property
    def trained(self) -> tuple[Parameter, ...]:
        """Trained parameters of this stage, in order of use."""
        parameters = {parameter.name: parameter for parameter in self.program.parameters}
        calls = [call for call in self.program.calls if call.stage == self.stage]
        here = dict.fromkeys(name for call in calls for name in call.params)
        return tuple(parameters[name] for name in here if parameters[name].trainable)

    def axes(self, parameter: Parameter) -> tuple[str, ...]:
        """The axes over which this stage sums a gradient."""
        if not parameter.trainable or self.stage not in self.owners[parameter.name]:
            return ()
        return tuple(axis for axis in parameter.reduce if self.program.sizes[axis] > 1)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Buckets that are scattered (ZeRO 1, by every stage that uses the weight), then those that are summed."""
        found: dict[tuple[bool, str, tuple[str, ...], str], list[Parameter]] = {}
        for parameter in self.trained:
            scattered = self.program.zero == 1 and bool(parameter.gather)
            if scattered:
                found.setdefault((True, parameter.after, parameter.gather, parameter.type.dtype), []).append(parameter)
            if self.axes(parameter):
                after = "" if scattered else parameter.after
                found.setdefault((False, after, self.axes(parameter), parameter.type.dtype), []).append(parameter)
        return tuple(
            Bucket(after=after, over=over, scattered=scattered, parameters=tuple(parameters))
            for (scattered, after, over, _), parameters in sorted(found.items(), key=lambda item: not item[0][0])
        )

    def after(self, call: str) -> tuple[Bucket, ...]:
        """The buckets that are complete after a call's last backward; with "" those of the step's end."""
        return tuple(bucket for bucket in self.buckets if bucket.after == call)

    @cached_property
    def early(self) -> bool:
        """Whether some sums start while backward goes on."""
        return any(bucket.after for bucket in self.buckets)

    @cached_property
    def relays(self) -> bool:
        """Whether sums that start while backward goes on have a level inside nodes and one between them."""
        return any(bucket.after and all(bucket.near_and_far) for bucket in self.buckets)

    def levels(self, bucket: Bucket) -> Levels:
        """The collectives of a bucket, level by level."""
        if bucket.scattered:
            return self.exchanges.scattered_bucket(bucket)
        steps = zip_longest(*self.chains(bucket))
        return tuple(tuple(each for each in step if each is not None) for step in steps)

    def chains(self, bucket: Bucket) -> tuple[tuple[Collective, ...], ...]:
        """For each piece of memory of a bucket's gradients, the collectives of its sum in order."""
        return tuple(self._chain(dtype, size, bucket) for dtype, size in self._pieces(bucket.parameters))

    def _chain(self, dtype: str, size: int, bucket: Bucket) -> tuple[Collective, ...]:
        near, far = bucket.near_and_far
        wire, compress = bucket.parameters[0].wire or dtype, bucket.parameters[0].compress
        if not far or not (near or compress):
            return (Collective(op="all_reduce", axes=bucket.over, shape=(size,), dtype=wire),)
        found: list[Collective] = []
        if near:
            ways = self.exchanges.ways(near)
            size = -(-size // ways) * ways
            found.append(Collective(op="reduce_scatter", axes=near, shape=(size,), dtype=wire))
            size //= ways
        if compress:
            ways = self.exchanges.ways(far)
            codes = _codes(far, ways, -(-size // ways), compress)
            found.append(codes)
            found.append(replace(codes, op="all_gather", shape=(codes.shape[0] // ways,)))
        else:
            found.append(Collective(op="all_reduce", axes=far, shape=(size,), dtype=wire))
        if near:
            found.append(Collective(op="all_gather", axes=near, shape=(size,), dtype=wire))
        return tuple(found)

    def _pieces(self, parameters: Collection[Parameter]) -> list[tuple[str, int]]:
        """The element type and length of each contiguous piece of memory that holds these gradients.

        Gradients that are summed over the same axes lie side by side in order of use. Gradients of weights that several
        pipeline ranks share lie apart, each by itself.
        """
        names = {parameter.name for parameter in parameters}
        holders = self.program.holders()
        place = self.program.place(self.stage)
        found: list[tuple[str, int]] = []
        beside: dict[tuple[tuple[str, ...], str], bool] = {}  # whether the preceding gradient is one of these
        for parameter in self.trained:
            here = [stage for stage in holders[parameter.name] if self.program.place(stage) == place]
            chosen = parameter.name in names
            key = (parameter.reduce, parameter.type.dtype)
            alone = (
                bool(self.sharers(parameter)) or here[0] != self.stage
            )  # the first stage that uses a weight has the memory of its gradient
            if chosen and beside.get(key) and not alone:
                found[-1] = (found[-1][0], found[-1][1] + parameter.type.local_elements(self.program.sizes))
            elif chosen:
                found.append((parameter.type.dtype, parameter.type.local_elements(self.program.sizes)))
            if chosen or not alone:
                beside[key] = chosen and not alone
        return found

    def sharers(self, parameter: Parameter) -> tuple[int, ...]:
        """The pipeline coordinates that sum the gradient of a shared weight; none for other weights."""
        owners = self.owners[parameter.name]
        if not parameter.trainable or self.stage not in owners or len(owners) == 1:
            return ()
        return tuple(sorted(map(self.program.place, owners)))

    def shared(self) -> dict[tuple[int, ...], list[Parameter]]:
        """The weights that each set of pipeline coordinates shares."""
        found: dict[tuple[int, ...], list[Parameter]] = {}
        for parameter in self.trained:
            if self.sharers(parameter):
                found.setdefault(self.sharers(parameter), []).append(parameter)
        return found

    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The groups of axes with communication: each axis of the mesh, and axes summed or gathered over together."""
        single = ((name,) for name, size in self.program.mesh.axes if size > 1)
        here = {name for call in self.program.calls if call.stage == self.stage for name in call.params}
        summed = [(self.axes(parameter), parameter) for parameter in self.trained]
        gathered = [(parameter.gather, parameter) for parameter in self.program.parameters if parameter.name in here]
        several = (level for axes, item in (*summed, *gathered) for level in (axes, *near_and_far(axes, item)))
        return tuple(dict.fromkeys((*single, *(axes for axes in several if axes))))


def near_and_far(over: tuple[str, ...], parameter: Parameter) -> NearAndFar:
    """The axes, of those that a parameter or its gradient travels over, inside nodes and between them."""
    near = parameter.near
    return tuple(axis for axis in over if axis in near), tuple(axis for axis in over if axis not in near)


def _coded(whole: Collective, ways: int, compress: str) -> Collective:
    """A compressed reduce-scatter: an all-to-all of codes, which each rank decodes and sums."""
    if whole.op != "reduce_scatter" or not compress:
        return whole
    return _codes(whole.axes, ways, whole.shape[0] // ways, compress)


def _codes(axes: tuple[str, ...], ways: int, size: int, compress: str) -> Collective:
    """The all-to-all of codes, of `size` numbers for each rank."""
    from partc.runtime.comm.compression import room

    kind = "bf16" if compress == "bf16" else "u8"
    return Collective(op="all_to_all", axes=axes, shape=(ways * room(compress, size),), dtype=kind)


def shared_sums(exchanges: Exchanges, place: int) -> Iterator[Collective]:
    """An all-reduce for each weight that pipeline coordinates share, in an order common to them."""
    program = exchanges.program
    together: dict[tuple[tuple[int, ...], str], Collective] = {}
    owners = program.owners()
    for parameter in program.parameters:
        places = tuple(sorted(map(program.place, owners.get(parameter.name, ()))))
        if parameter.trainable and len(places) > 1 and place in places:
            size = parameter.type.local_elements(program.sizes)
            together[places, parameter.name] = Collective(
                op="all_reduce", axes=(), places=places, shape=(size,), dtype=parameter.type.dtype
            )
    for key in sorted(together):
        yield together[key]


def loss_sums(program: Program, place: int) -> Iterator[Collective]:
    """The reduction of the loss, or of the results made at a place, over the axes where it is partial."""
    types = program.value_types()
    made = {name for call in program.calls if program.place(call.stage) == place for name in call.results}
    for _, name in program.results or (("", program.loss),):
        type = types[name]
        for axis in type.layout.partial if name in made else ():
            if axis in program.mesh.names:
                shape = type.layout.local_shape(program.mesh.sizes)
                yield Collective(op="all_reduce", axes=(axis,), shape=shape, dtype=type.dtype)


def graph_of(region: Region, kind: GraphKind) -> Graph | None:
    """The graph of a run of this kind; B is the whole backward pass, or its first half."""
    return {"F": region.forward, "B": region.backward, "I": region.backward, "W": region.weight}[kind]


def _reads(region: Region, graph: Graph | None) -> bool:
    names = {value.name for value in region.params}
    return graph is not None and any(name in names for op in graph.ops for name in op.refs())
