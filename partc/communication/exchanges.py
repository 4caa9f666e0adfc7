"""The collectives of each exchange of parameters or gradients, derived from their types.

A gather or scatter of ZeRO carries all parameters of a call that share an element type and axes in one collective. A
sum of gradients carries a bucket. If only some ranks share a node (`Transport.near`), an exchange is a chain of several
collectives: gathers cross nodes first and then run inside each node; scatters and sums run inside each node first. Each
byte crosses from node to node only once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest

from partc.ir.naming import gradient_name
from partc.ir.program import Bucket, Call, Collective, DType, Graph, GraphKind, Parameter, Program, Region

Chain = tuple[Collective, ...]  # consecutive collectives
Chains = tuple[Chain, ...]  # chains that run concurrently


def in_turn(chains: Chains) -> tuple[tuple[Collective | None, ...], ...]:
    """For a start and each `advance` after it, the next collective of every chain; None where a chain has ended."""
    return tuple(zip_longest(*chains))


@dataclass(frozen=True)
class Exchanges:
    """The exchanges of a program, by call and stage."""

    program: Program

    @cached_property
    def read_dtypes(self) -> Mapping[str, DType]:
        """The element type in which calls read each parameter; its own if none reads it."""
        found = {item.name: item.type.dtype for item in self.program.parameters}
        for call in self.program.calls:
            values = self.program.region(call.region).params
            found.update((name, value.type.dtype) for name, value in zip(call.params, values, strict=True))
        return found

    @cached_property
    def converted(self) -> Mapping[str, Parameter]:
        """Parameters whose stored form differs from the one that calls read: in parts, or in another element type."""
        return {
            parameter.name: parameter
            for parameter in self.program.parameters
            if parameter.gather or self.read_dtypes[parameter.name] != parameter.type.dtype
        }

    def has_unit(self, call: Call) -> bool:
        """Whether some call of its region reads `converted` parameters: calls of a region are emitted alike."""
        return call.region in self._with_units

    @cached_property
    def _with_units(self) -> frozenset[str]:
        calls = self.program.calls
        return frozenset(call.region for call in calls if any(name in self.converted for name in call.params))

    def gathers(self, call: Call, kind: GraphKind) -> bool:
        """Whether a call gathers parameters for one run and frees them afterwards."""
        region = self.program.region(call.region)
        return self.program.zero == 3 and self.has_unit(call) and _reads(region, graph_of(region, kind))

    def scatters(self, call: Call, kind: GraphKind) -> bool:
        """Whether the gradients of a run are scattered right after it."""
        return bool(self._scattered(call, kind))

    def _scattered(self, call: Call, kind: GraphKind) -> list[str]:
        if self.program.zero < 2 or kind == "F" or not self.has_unit(call):
            return []
        return gradients_of(self.program.region(call.region), call, kind)

    def whole_copies(self, stage: int) -> dict[str, list[str]]:
        """Parameters that ranks also keep whole, by the first call that reads them."""
        found: dict[str, list[str]] = {}
        seen: set[str] = set()
        for call in self.program.calls_of(stage) if self.program.zero in (1, 2) else ():
            if self.program.region(call.region).phase == "microbatch":
                found[call.name] = [name for name in call.params if name not in seen]
                seen.update(call.params)
        return found

    def refreshed(self, call: Call) -> set[str]:
        """The calls that are the first to read parameters of this call which ranks also keep whole."""
        found = (self._first_readers.get((call.stage, name)) for name in call.params)
        return {name for name in found if name is not None}

    @cached_property
    def _first_readers(self) -> Mapping[tuple[int, str], str]:
        copies = ((stage, self.whole_copies(stage)) for stage in range(self.program.stages))
        return {(stage, name): call for stage, found in copies for call, names in found.items() for name in names}

    @cached_property
    def levels(self) -> int:
        """The number of levels of a gather: 2 if its ranks share nodes only in part, else 1."""
        levels = self.program.transport.levels
        return max((1 + all(levels(item.gather)) for item in self.program.parameters), default=1)

    def gather(self, names: Iterable[str]) -> Chains:
        """The all-gathers of parameters."""
        none: frozenset[str] = frozenset()
        sizes = self._sizes([(self.read_dtypes[item.name], none, item) for item in self._sharded_parameters(names)])
        return tuple(self._gathered(dtype, over, size) for (dtype, over, _), size in sizes.items())

    def scatter(self, call: Call, kind: GraphKind) -> Chains:
        """The reduce-scatters of the gradients of a run."""
        return self.reduce_scatters(self._sharded_parameters(self._scattered(call, kind)))

    def reduce_scatters(self, parameters: Iterable[Parameter]) -> Chains:
        """The reduce-scatters of gradients of whole parameters."""
        transport = self.program.transport
        trained = [item for item in parameters if item.trainable]
        sizes = self._sizes([(transport.wire or item.type.dtype, transport.apart(item), item) for item in trained])
        return tuple(self._cut(dtype, over, size) for (dtype, over, _), size in sizes.items())

    def _sharded_parameters(self, names: Iterable[str]) -> list[Parameter]:
        converted = self.converted
        return [converted[name] for name in dict.fromkeys(names) if name in converted]

    def _sizes(
        self, moved: Iterable[tuple[DType, frozenset[str], Parameter]]
    ) -> dict[tuple[DType, tuple[str, ...], frozenset[str]], int]:
        """The number of elements of whole parameters, spare ones too, by (element type, axes, `Transport.apart`)."""
        sizes: dict[tuple[DType, tuple[str, ...], frozenset[str]], int] = {}
        known = self._whole_elements
        for dtype, apart, item in moved:
            if item.gather:
                held = id(item.type), item.gather
                if held not in known:
                    known[held] = item.type.local_elements(self.program.sizes) * self.group_size(item.gather)
                key = dtype, item.gather, apart
                sizes[key] = sizes[key] + known[held] if key in sizes else known[held]
        return sizes

    @cached_property
    def _whole_elements(self) -> dict[tuple[int, tuple[str, ...]], int]:
        """The elements of whole parameters by the identities of their types, which equal layers share."""
        return {}

    def _gathered(self, dtype: DType, over: tuple[str, ...], size: int) -> Chain:
        """One all-gather, or one between nodes and then one inside; `size` is the number of gathered elements."""
        near, far = self.program.transport.levels(over)
        parts = (far, size // self.group_size(over)), (near, size // self.group_size(near))
        return tuple(Collective(op="all_gather", axes=axes, shape=(part,), dtype=dtype) for axes, part in parts if axes)

    def _cut(self, dtype: DType, over: tuple[str, ...], size: int) -> Chain:
        """One reduce-scatter, or one inside nodes and then one between them, which may be a compressed all-to-all."""
        near, far = self.program.transport.levels(over)
        share, compress = size // self.group_size(near), self.program.transport.compress
        found = [Collective(op="reduce_scatter", axes=near, shape=(size,), dtype=dtype)] if near else []
        if far and compress:
            found.append(_codes(far, self.group_size(far), share // self.group_size(far), compress))
        elif far:
            found.append(Collective(op="reduce_scatter", axes=far, shape=(share,), dtype=dtype))
        return tuple(found)

    def bucket_collectives(self, bucket: Bucket) -> Chains:
        """The collectives of a bucket's sum: a chain for each piece of memory that holds its gradients."""
        sums = self.sums(bucket.stage)
        if bucket.scattered:
            return self.reduce_scatters(sums.parameters_in(bucket))
        return tuple(self._sum(dtype, bucket.over, size) for dtype, size in sums.pieces.get(bucket.name, ()))

    def _sum(self, dtype: DType, over: tuple[str, ...], size: int) -> Chain:
        transport = self.program.transport
        near, far = transport.levels(over)
        dtype = transport.wire or dtype
        compress = transport.compress
        if not far or not (near or compress):
            return (Collective(op="all_reduce", axes=over, shape=(size,), dtype=dtype),)
        share = -(-size // self.group_size(near))
        parts = Collective(op="reduce_scatter", axes=near, shape=(share * self.group_size(near),), dtype=dtype)
        between = [Collective(op="all_reduce", axes=far, shape=(share,), dtype=dtype)]
        if compress:
            ways = self.group_size(far)
            codes = _codes(far, ways, -(-share // ways), compress)
            between = [codes, replace(codes, op="all_gather", shape=(codes.shape[0] // ways,))]
        if not near:
            return tuple(between)
        return parts, *between, Collective(op="all_gather", axes=near, shape=(share,), dtype=dtype)

    def group_size(self, axes: Iterable[str]) -> int:
        """The number of ranks that differ only on the axes."""
        return math.prod([self.program.sizes[axis] for axis in axes])

    def shared_sums(self, place: int) -> Mapping[str, Chains]:
        """The sums of shared weights' gradients at a pipeline coordinate, in an order common to all coordinates."""
        found: dict[str, Chains] = {}
        for places, name in sorted((places, name) for name, places in self.sharers.items() if place in places):
            type = self.program.parameter(name).type
            size = type.local_elements(self.program.sizes)
            found[name] = ((Collective(op="all_reduce", axes=(), places=places, shape=(size,), dtype=type.dtype),),)
        return found

    @cached_property
    def sharers(self) -> Mapping[str, tuple[int, ...]]:
        """The pipeline coordinates that sum the gradient of each trained weight that several of them use."""
        return {
            name: tuple(sorted(map(self.program.place, stages)))
            for name, stages in self.program.owners().items()
            if len(stages) > 1 and self.program.parameter(name).trainable
        }

    def result_sums(self, place: int) -> Mapping[str, Chains]:
        """The sums of the loss, or of the results of a pipeline coordinate, over the axes over which they are
        partial.
        """
        program = self.program
        types = program.value_types()
        made = {name for call in program.calls if program.place(call.stage) == place for name in call.results}
        found: dict[str, Chains] = {}
        for path, name in program.results or ((program.loss, program.loss),):
            axes = [axis for axis in types[name].layout.partial if axis in program.mesh.names and name in made]
            if axes:
                shape, dtype = types[name].layout.local_shape(program.mesh.sizes), types[name].dtype
                each = (Collective(op="all_reduce", axes=(axis,), shape=shape, dtype=dtype) for axis in axes)
                found[path] = (tuple(each),)
        return found

    def sums(self, stage: int) -> GradientSums:
        """The sums of a stage's gradients."""
        if stage not in self._sums:
            self._sums[stage] = GradientSums(self.program, stage)
        return self._sums[stage]

    @cached_property
    def _sums(self) -> dict[int, GradientSums]:
        return {}


@dataclass(frozen=True)
class GradientSums:
    """The gradients that a stage sums over ranks once per step: their buckets, and the coordinates that share them.

    If several stages of one rank use a weight, the last of them sums its gradient.
    """

    program: Program
    stage: int

    @cached_property
    def trained(self) -> tuple[Parameter, ...]:
        """Trained parameters of this stage, in order of use."""
        here = dict.fromkeys(name for call in self.program.calls_of(self.stage) for name in call.params)
        return tuple(item for item in map(self.program.parameter, here) if item.trainable)

    def axes(self, parameter: Parameter) -> tuple[str, ...]:
        """The axes over which this stage sums a gradient."""
        if not parameter.reduce or not parameter.trainable or not self._owns(parameter):
            return ()
        return tuple([axis for axis in parameter.reduce if self.program.sizes[axis] > 1])

    def _owns(self, parameter: Parameter) -> bool:
        return self.stage in self.program.owners()[parameter.name]

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(bucket for bucket in self.program.buckets if bucket.stage == self.stage)

    def parameters_in(self, bucket: Bucket) -> tuple[Parameter, ...]:
        """The parameters whose gradients are in a bucket, in order of use."""
        return tuple(self._in_buckets.get(bucket.name, ()))

    @cached_property
    def _in_buckets(self) -> Mapping[str, list[Parameter]]:
        found: dict[str, list[Parameter]] = {}
        for parameter in self.trained:
            for name in parameter.buckets:
                found.setdefault(name, []).append(parameter)
        return found

    @cached_property
    def pieces(self) -> Mapping[str, list[tuple[DType, int]]]:
        """The element type and length of each contiguous piece of memory that holds a bucket's gradients.

        Gradients that are summed over the same axes are adjacent, in order of use, unless compression keeps them apart
        (`Transport.apart`). The gradient of a weight that several pipeline ranks share has a sum of its own.
        """
        holders = self.program.holders()
        place = self.program.place(self.stage)
        found: dict[str, list[tuple[DType, int]]] = {}
        # The buckets of the preceding gradient with this key.
        beside: dict[tuple[tuple[str, ...], str, frozenset[str]], set[str]] = {}
        for parameter in self.trained:
            here = next(stage for stage in holders[parameter.name] if self.program.place(stage) == place)
            # The first stage that uses a weight has the memory of its gradient.
            alone = here != self.stage or bool(self.sharers(parameter))
            key = parameter.reduce, parameter.type.dtype, self.program.transport.apart(parameter)
            before = beside.setdefault(key, set())
            for name in parameter.buckets:
                size = parameter.type.local_elements(self.program.sizes)
                mine = found.setdefault(name, [])
                if name in before and not alone:
                    size += mine.pop()[1]
                mine.append((parameter.type.dtype, size))
            if alone:
                before.difference_update(parameter.buckets)
            else:
                beside[key] = {*parameter.buckets}
        return found

    def sharers(self, parameter: Parameter) -> tuple[int, ...]:
        """The pipeline coordinates that sum the gradient of a shared weight; none for other weights."""
        shared = self.program.derived(Exchanges).sharers.get(parameter.name, ())
        return shared if self._owns(parameter) else ()

    def shared(self) -> dict[tuple[int, ...], list[Parameter]]:
        """The shared weights, by the set of pipeline coordinates that share them."""
        found: dict[tuple[int, ...], list[Parameter]] = {}
        for parameter in self.trained:
            if places := self.sharers(parameter):
                found.setdefault(places, []).append(parameter)
        return found

    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The groups of axes with communication: each axis of the mesh, and axes summed or gathered over together."""
        single = ((name,) for name, size in self.program.mesh.axes if size > 1)
        here = {name for call in self.program.calls_of(self.stage) for name in call.params}
        summed = [self.axes(parameter) for parameter in self.trained]
        gathered = [parameter.gather for parameter in self.program.parameters if parameter.name in here]
        several = (each for axes in (*summed, *gathered) for each in (axes, *self.program.transport.levels(axes)))
        return tuple(dict.fromkeys((*single, *(axes for axes in several if axes))))


def _codes(axes: tuple[str, ...], ways: int, size: int, compress: str) -> Collective:
    """The compressed all-to-all, with `size` numbers for each rank."""
    from partc.runtime.comm.compression import room

    dtype: DType = "bf16" if compress == "bf16" else "u8"
    return Collective(op="all_to_all", axes=axes, shape=(ways * room(compress, size),), dtype=dtype, code=compress)


def graph_of(region: Region, kind: GraphKind) -> Graph | None:
    """The graph of a run of this kind; B is the whole backward pass, or its first half."""
    return {"F": region.forward, "B": region.backward, "I": region.backward, "W": region.weight}[kind]


def gradients_of(region: Region, call: Call, kind: GraphKind) -> list[str]:
    """The parameters of a call whose gradients its graph of this kind computes."""
    graph = graph_of(region, kind)
    made = set(graph.outputs) if graph is not None else set()
    pairs = zip(region.params, call.params, strict=True)
    return [name for value, name in pairs if gradient_name(value.name) in made]


def _reads(region: Region, graph: Graph | None) -> bool:
    names = {value.name for value in region.params}
    return graph is not None and any(name in names for op in graph.ops for name in op.refs())
