"""The memory account of a package: its step runs on meta tensors, and a ledger counts the bytes that they would hold.

The emitted modules and the runtime run unchanged, with a communicator without peers; ledger.py counts their
allocations. A region's function runs once, and its effects are replayed for all other calls (call_replay.py). An
action runs once in each of its circumstances, and its effects are composed for all other microbatches and equal stages
(composition.py). One rank stands for all ranks at its pipeline coordinate.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from partc.codegen.package import EVALUATION, Modules, emit
from partc.cost.memory import Account, Moment, grouped_by_name
from partc.ir.gradients import touched_rows
from partc.ir.mesh import PIPELINE_AXIS
from partc.ir.program import Action as ScheduledAction
from partc.ir.program import Program
from partc.ir.routers import routers
from partc.rehearsal.call_replay import Recordings, first_steps, region_module, stage_class
from partc.rehearsal.composition import Acks, Composer, Course
from partc.rehearsal.exchange_replay import ExchangeEffects, ReplayedExchange, Start, exchange_effects
from partc.rehearsal.ledger import Block, Leaf, Ledger, Owned, counting_meta_operations
from partc.rehearsal.meta_kernels import META, stand_ins
from partc.runtime.checkpoint.boxes import numbered_copy, pieces, written_copy
from partc.runtime.checkpoint.state import by_rows, compressed_sums
from partc.runtime.clock import Clock, Kind
from partc.runtime.comm.comm import Axis, Link, Pending, completed
from partc.runtime.comm.distributed import DistributedComm, GlooAxis, NcclAxis
from partc.runtime.dims import Dims, global_shape
from partc.runtime.execution.executor import (
    GradientMemory,
    acknowledged_by,
    gradient_memory,
    make_stages,
    parse_schedule,
    run_forward,
    run_step,
)
from partc.runtime.execution.parts import Parts
from partc.runtime.execution.stage import PipelineStage
from partc.runtime.execution.sums import Bucket, Sums
from partc.runtime.layout import ModelView, Shard, cutting
from partc.runtime.ops.accumulation import clear
from partc.runtime.ops.row_gradients import RowGradient, TouchedRows
from partc.runtime.ops.scan import scan
from partc.runtime.optimizer.optimizer import attach_gradients
from partc.runtime.optimizer.recipe import DEFAULT, Recipe, UpdateRule
from partc.runtime.optimizer.update import make_update
from partc.runtime.train.data import local_batch
from partc.torch_private import TorchDispatchMode

Steps = tuple[Course | Ledger, ...]  # of the ranks at each pipeline coordinate
KnownSteps = tuple[tuple[Program, Steps], ...]  # with the default optimizer
Sizes = Mapping[str, int]
Coordinate = Mapping[str, int]
MakeAxis = Callable[[int, int], Axis]  # of a rank and a number of ranks
_ROWS = 5  # the rows of a sum that suffice to show its peak memory
MOST_COUNTED = 64  # the most ranks at a place that are examined one by one


def rehearse(program: Program, *, optimizer: str = DEFAULT, groups: Sequence[str] = ()) -> Account:
    """The account of a scheduled program, in a step after the first.

    `optimizer` and `groups` are values of train.py's options.
    """
    return rehearsed(program, optimizer=optimizer, groups=groups)[0]


def with_evaluation(account: Account, courses: Sequence[Course | Ledger], evaluation: Program) -> Account:
    """The account of a training whose steps are followed by evaluations; `courses` are the steps of its ranks.

    An evaluation reads the training's parameters. Everything else that the training holds between two steps stays.
    """
    alone = Rehearsal(evaluation, Recipe.of(DEFAULT), emit(evaluation, folder=EVALUATION)).courses()
    ranks = []
    for rank, step, course in zip(account.ranks, courses, alone, strict=True):
        mine = course.rank(rank.place, rank.stages, 0)
        kept = grouped_by_name(step.base())
        beside = tuple(item for item in mine.alive if item.category != "parameters")
        after = sum(item.bytes for item in kept)
        peak = after + sum(item.bytes for item in beside)
        timeline = (*rank.timeline, Moment(action="an evaluation", peak=peak, after=after))
        if peak > rank.peak:
            alive = tuple(sorted((*kept, *beside), key=lambda item: -item.bytes))
            at = replace(mine.at, action=f"an evaluation, {mine.at.action}")
            rank = replace(rank, peak=peak, at=at, alive=alive)
        ranks.append(replace(rank, timeline=timeline))
    return replace(account, ranks=tuple(ranks))


def steps(program: Program) -> Steps:
    """The step of each pipeline rank with the default optimizer, without the rest of the account."""
    return Rehearsal(program, Recipe.of(DEFAULT), None).courses()


def rehearsed(
    program: Program,
    *,
    optimizer: str = DEFAULT,
    groups: Sequence[str] = (),
    modules: Modules | None = None,
    whole: bool = False,
    known: KnownSteps = (),
) -> tuple[Account, Steps]:
    """The account, and the step of each pipeline rank. With `whole`, all ranks play all their actions, and loops over
    time run all their steps.

    Ranks also play all their actions if `groups` is given, since equal stages may then have parameters with different
    states. The program may be one of the `known` ones, whose steps are not played again.
    """
    every_step, whole = whole, whole or bool(groups)
    alike = (each for each in known if not whole and optimizer == DEFAULT and each[0] == program)
    program, played = next(alike, (program, None))
    rehearsal = Rehearsal(program, Recipe.of(optimizer, groups=groups), modules, every_step=every_step)
    courses = played or rehearsal.courses(whole=whole)
    ranks = tuple(
        course.rank(place, program.stages_at(place), rehearsal.copied(place)) for place, course in enumerate(courses)
    )
    return Account(optimizer=optimizer, ranks=ranks), courses


_ROW_TEMPORARIES = 4  # tensors of a sparse gradient's size that an update holds at once


class Rehearsal:
    """The rehearsal of one program."""

    def __init__(self, program: Program, recipe: Recipe, modules: Modules | None, *, every_step: bool = False) -> None:
        """With `every_step`, loops over time run all their steps."""
        self._program = program
        self._modules = emit(program) if modules is None else modules
        self._recordings = Recordings()
        kernels = stand_ins(program)
        self._given = {"Parts": _NamedParts, "Sums": Sums, "Bucket": Bucket, "kernels": kernels}
        for module in self._modules.regions:
            self._given |= region_module(module, self._recordings, kernels, scan if every_step else first_steps)
        self._recipe = recipe
        self._composer = Composer(program, self._acks, self.play)
        self._classes: dict[int, Any] = {}
        self._hosts: dict[object, int] = {}
        self._counted: dict[tuple[Dims, tuple[int, ...]], list[int]] = {}
        self._numbered: dict[tuple[frozenset[str], int, int], tuple[list[int], int]] = {}

    def courses(self, *, whole: bool = False) -> Steps:
        rows = self._program.schedule
        return tuple(
            self.play(place, row, self._acks) if whole else self._composer.course(place)
            for place, row in enumerate(rows)
        )

    @cached_property
    def _acks(self) -> Acks:
        rows: Iterable[Any] = self._program.schedule
        return {slot: found for row in rows for slot, found in acknowledged_by(row).items()}

    def _class(self, stage: int) -> Any:
        if stage not in self._classes:
            self._classes[stage] = stage_class(self._modules.stages[stage], self._given)
        return self._classes[stage]

    def play(self, place: int, row: Sequence[ScheduledAction], acks: Acks) -> Ledger:
        """The ledger of a rank at a pipeline coordinate, after a step of these actions."""
        program, recordings = self._program, self._recordings
        with counting_meta_operations() as ledger:
            recordings.ledger = ledger
            comm = _QuietComm(recordings, program, place)
            shards = self._shards(place)
            parameters = self._parameters(ledger, shards)
            memory = self._gradient_memory(ledger, place, shards, parameters)
            gradients = memory.gradients
            with ledger.making("copies", "copies"):
                stages = make_stages(self._classes_at(place), comm, parameters, memory)
            own = ModelView(shards, program.mesh.sizes, comm.coordinate)
            updated, trained = own.tensors(parameters), own.tensors(gradients)
            for name in own.counters:
                del trained[name]
            attach_gradients(updated, trained)
            states: list[Owned] = []
            for name in trained:
                with ledger.making("optimizer", name):
                    kept = self._states(name, own.shards[name])
                    states.extend(ledger.holds(state.bytes(updated[name])) for state in kept)
            self._set_up(ledger, comm, stages)
            actions = parse_schedule(" ".join(map(str, row)))
            comm.clock.on_enter = _CallTracker(program, self._modules, ledger, recordings).entering
            batch, microbatches = self._batch(ledger, comm, place)
            for stage in stages.values():
                stage.prepare(batch)
            ledger.starts()
            comm.clock.entering("data")
            batch, microbatches = self._batch(ledger, comm, place)
            clear(gradients.values())
            if program.results:
                forward: Any = stages
                found: Any = run_forward(forward, comm, actions, batch, microbatches, program.mesh.sizes)
            else:
                found = run_step(stages, comm, actions, batch, microbatches, acks=acks)
            comm.clock.entering("the update")
            self._update(ledger, comm, {name: updated[name] for name in trained}, trained, own.shards)
            del found
            comm.clock.entering("the step's end")
            ledger.stops()
            del states
            return ledger

    def _parameters(self, ledger: Ledger, shards: Mapping[str, Shard]) -> dict[str, Tensor]:
        """The rank's parts of the parameters."""
        found: dict[str, Tensor] = {}
        for name, shard in shards.items():
            with ledger.making("parameters", name):
                shape = shard.local_shape(self._program.mesh.sizes)
                found[name] = torch.empty(shape, dtype=shard.dtype, device=META)
        return found

    def _gradient_memory(
        self, ledger: Ledger, place: int, shards: Mapping[str, Shard], parameters: Mapping[str, Tensor]
    ) -> GradientMemory:
        """The gradients of the rank's parameters; sparse ones count the rows that a step touches."""
        with ledger.making("gradients", "gradients"):
            classes = self._classes_at(place).values()
            memory = gradient_memory(shards, parameters, classes, self._program.mesh.sizes)
        rows = touched_rows(self._program, self._program.stages_at(place))
        for name, gradient in memory.gradients.items():
            if isinstance(gradient, RowGradient):
                with ledger.making("gradients", name):
                    memory.gradients[name] = _CountedRows(parameters[name], rows[name])
        return memory

    def _set_up(self, ledger: Ledger, comm: _QuietComm, stages: Mapping[int, PipelineStage]) -> None:
        """Allocate the memory that a run holds from its start: residuals of compressed sums, and constants."""
        program = self._program
        with ledger.making("communication", "left out of compressed sums"):
            for _, compressed in compressed_sums(stages):
                compressed.restore({kind: torch.empty(n, device=META) for kind, n in compressed.numbers.items()})
        with ledger.making("constants", "constants"):
            comm.loads.expect(routers(program), stages, META, counted=True)
            comm.expect(program.draws, program.microbatches if program.separate_batches else 1)
            if any(value.type.dtype == "f16" for region in program.regions for value in region.params):
                comm.scales(1.0)
            for stage in stages.values():
                stage.setup()

    def _batch(self, ledger: Ledger, comm: _QuietComm, place: int) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        """The rank's part of a batch, and the same part in microbatches."""
        program = self._program
        classes = self._classes_at(place).values()
        inputs: dict[str, Shard] = {name: shard for stage in classes for name, shard in stage.inputs.items()}
        with ledger.making("batch", "batch"):
            whole = {name: torch.empty(shard.shape, dtype=shard.dtype, device=META) for name, shard in inputs.items()}
            return local_batch(whole, inputs, program.mesh.sizes, comm.coordinate, program.microbatches, META)

    def _classes_at(self, place: int) -> dict[int, Any]:
        """The classes of a rank's stages, by number."""
        return {stage: self._class(stage) for stage in self._program.stages_at(place)}

    def _shards(self, place: int) -> dict[str, Shard]:
        classes = self._classes_at(place).values()
        return {name: shard for stage in classes for name, shard in stage.parameters.items()}

    def _rule(self, name: str, shard: Shard) -> UpdateRule:
        return self._recipe.settings(name, len(shard.dims))

    def _states(self, name: str, shard: Shard) -> list[_State]:
        """The tensors that the optimizer keeps for a parameter."""
        rule = self._rule(name, shard)
        uncut = rule.uncut(shard.holds or shard.shape)
        rows = rule.kind.cls.by_rows if rule.kind.by_rows else ()
        return [
            _State(key, None if key in rows else uncut.get(key), shard.dtype.itemsize, rows=key in rows)
            for key in rule.states(len(shard.dims))
        ]

    def _update(
        self,
        ledger: Ledger,
        comm: _QuietComm,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Any],
        shards: Mapping[str, Shard],
    ) -> None:
        """Count the temporary memory of the update: for each optimizer without a fused kernel, that of its largest
        parameter.
        """
        sizes, largest = self._program.mesh.sizes, dict[UpdateRule, str]()
        rows = [gradient for gradient in gradients.values() if isinstance(gradient, RowGradient)]
        with ledger.making("temporaries", "sums of rows"):
            touched = [gradient.touched().numel() * gradient.shape[1:].numel() for gradient in rows]
        with ledger.making("temporaries", "update"):
            for count, gradient in sorted(zip(touched, rows, strict=True), key=lambda item: item[0])[-1:]:
                torch.empty(_ROW_TEMPORARIES * count, dtype=gradient.dtype, device=META)
        for name in sorted(parameters, key=lambda name: math.prod(shards[name].shape)):
            if not shards[name].sparse:
                largest[self._rule(name, shards[name])] = name
        for rule, name in largest.items():
            if rule.kind.fused:
                continue
            with ledger.muted(), _Numbers():
                mine = {name: torch.empty_like(parameters[name])}
                read = {name: torch.empty_like(mine[name])}
                how: dict[str, Any] = {"shards": shards, "comm": comm, "sizes": sizes, "lr": 1.0}
                optimizer, _ = make_update({name: rule}, mine, read, {}, None, **how)
                assert optimizer is not None
                optimizer.begin(1.0)
                optimizer.step()
            for x in (*mine.values(), *read.values(), *optimizer.state_of(name).values()):
                ledger.watch(x, Block(0, "optimizer", name), lambda: None)  # the account counts them already
            with ledger.making("temporaries", "update"), _Numbers():
                optimizer.step()

    @cached_property
    def _is_small_group(self) -> bool:
        """Whether the ranks at a pipeline coordinate are few enough to be examined one by one."""
        mesh = self._program.mesh
        return mesh.size // mesh.axis(PIPELINE_AXIS) <= MOST_COUNTED

    @cached_property
    def _holders(self) -> Mapping[str, list[int]]:
        """The pipeline coordinates that hold each parameter, under each of its names."""
        program = self._program
        return {
            each: sorted({program.place(stage) for stage in stages})
            for item in program.parameters
            if (stages := program.holders().get(item.name))
            for each in item.names
        }

    def copied(self, place: int) -> int:
        """The bytes that a rank at a place writes into a checkpoint. On large meshes, equal ranks are taken to write
        equally much.

        Zero for programs that only run forward, which write no checkpoint.
        """
        if self._program.results:
            return 0
        key = place if self._is_small_group else self._composer.signature(place)
        if key not in self._hosts:
            self._hosts[key] = self._copied(place, self._shards(place))
        return self._hosts[key]

    def _copied(self, place: int, shards: Mapping[str, Shard]) -> int:
        """The most bytes that any rank at this place writes into a checkpoint. Only one rank writes each of several
        copies.

        On large meshes this is an upper bound: all bytes that a rank holds.
        """
        ranks = self._examined(place)
        found = [0] * len(ranks)
        written: dict[object, list[int]] = {}
        alike = not any(shard.stacked or shard.members for shard in shards.values())
        own = ModelView(shards, self._program.mesh.sizes, ranks[0]).shards
        for index, coordinate in enumerate(ranks):
            mine = own if alike else ModelView(shards, self._program.mesh.sizes, coordinate).shards
            for name, shard in mine.items():
                # In small groups, the name of a tensor decides which ranks write it.
                key = name if self._is_small_group else (shard, shard.trainable and self._rule(name, shard))
                if key not in written:
                    written[key] = self._written(name, shard, place, ranks)
                found[index] += written[key][index]
        return max(found)

    def _examined(self, place: int) -> list[Coordinate]:
        """The coordinates of the ranks at a place; if they are many, only the first rank's."""
        mesh = self._program.mesh
        first = mesh.rank({PIPELINE_AXIS: place})
        equal = tuple(name for name in mesh.sizes if name != PIPELINE_AXIS)
        return [mesh.coordinate(rank) for rank in (mesh.group(first, equal) if self._is_small_group else (first,))]

    def _written(self, name: str, shard: Shard, place: int, ranks: Sequence[Coordinate]) -> list[int]:
        """The bytes that each rank at a place writes of a parameter and its optimizer states."""
        dims, size = shard.dims, shard.dtype.itemsize
        shape = shard.holds or global_shape(dims)
        whole = [(name, dims, size)]
        for state in self._states(name, shard) if shard.trainable else ():
            cut = () if state.shape is not None else by_rows(shard).dims if state.rows else dims
            whole.append((f"{state.name}/{name}", cut, size if cut else state.size))
        found = [0] * len(ranks)
        for tensor, cut, each in whole:
            counts = self._elements(cut, shape if cut == dims else global_shape(cut), ranks)
            if self._is_small_group:
                copies, number = self._copies(cutting(cut) | {*shard.apart}, self._holders[name], place, ranks)
                chosen = written_copy(tensor, number)
                counts = [count if copy == chosen else 0 for count, copy in zip(counts, copies, strict=True)]
            found = [before + each * count for before, count in zip(found, counts, strict=True)]
        return found

    def _elements(self, dims: Dims, shape: tuple[int, ...], ranks: Sequence[Coordinate]) -> list[int]:
        """The elements of a tensor on each of the ranks at a place, which are the same at every place."""
        if (dims, shape) not in self._counted:
            sizes = self._program.mesh.sizes
            self._counted[dims, shape] = [
                sum(math.prod(piece.whole.sizes) for piece in pieces(dims, shape, sizes, each)) for each in ranks
            ]
        return self._counted[dims, shape]

    def _copies(
        self, cut: frozenset[str], holders: Sequence[int], place: int, ranks: Sequence[Coordinate]
    ) -> tuple[list[int], int]:
        """The number of a tensor's copy on each rank at a place, and the total number of copies."""
        key = cut, len(holders), holders.index(place)
        if key not in self._numbered:
            found = [numbered_copy(cut, self._program.mesh.sizes, each, holders) for each in ranks]
            self._numbered[key] = [copy for copy, _ in found], found[0][1]
        return self._numbered[key]


@dataclass(frozen=True, slots=True)
class _State:
    """A tensor that an optimizer keeps for a parameter: cut like the parameter, or like its rows, or with a shape of
    its own.
    """

    name: str
    shape: tuple[int, ...] | None
    itemsize: int
    rows: bool = False

    @property
    def size(self) -> int:
        """The bytes of a state with a shape of its own, whose numbers are in fp32."""
        return math.prod(self.shape) * self.itemsize if self.shape else torch.float32.itemsize

    def bytes(self, parameter: Tensor) -> int:
        if self.rows:
            return parameter.nbytes // max(1, parameter.shape[1:].numel())
        return parameter.nbytes if self.shape is None else self.size


class _CountedRows(RowGradient):
    """A sparse gradient that counts all rows of a step from the start, so that functions can be replayed."""

    def __init__(self, parameter: Tensor, counts: Sequence[int]) -> None:
        super().__init__(parameter)
        self._numbers = [torch.empty(count, dtype=torch.int64, device=META) for count in counts]
        self._values = [parameter.new_empty(count, *parameter.shape[1:]) for count in counts]

    def add_(self, rows: TouchedRows) -> None:
        pass

    def zero_(self) -> RowGradient:
        return self


class _Numbers(TorchDispatchMode):
    """Gives meta tensors a number where an optimizer reads one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device == META:
            return 1.0
        return func(*args, **(kwargs or {}))


class _CallTracker:
    """Reports to the ledger the rank's current action, and the calls that its functions run for."""

    def __init__(self, program: Program, modules: Modules, ledger: Ledger, recordings: Recordings) -> None:
        self._calls = {
            stage: [(call.name, call.region) for call in program.calls_of(stage)] for stage in range(program.stages)
        }
        self._functions = {
            function.name: module.region for module in modules.regions for function in module.code.functions
        }
        self._ledger, self._recordings = ledger, recordings

    def entering(self, what: str) -> None:
        self._ledger.enters(what)
        stage, kind = re.match(r"(\d*)([A-Z_]*)", what).groups()  # type: ignore[union-attr]
        calls = self._calls.get(int(stage or -1), [])
        if kind in ("B", "I"):
            calls = calls[::-1]
        self._recordings.callers = {
            function: iter([name for name, other in calls if other == region])
            for function, region in self._functions.items()
        }


# -- a communicator without peers --------------------------------------------------------------


class _Quiet:
    """A process group without peers: every operation ends immediately, and receives nothing."""

    def __getattr__(self, name: str) -> Callable[..., _Quiet]:
        return lambda *args, **kwargs: self


class _Clock(Clock):
    """A clock that reports each action to a function."""

    on_enter: Callable[[str], None] = staticmethod(lambda what: None)

    def entering(self, what: str, kind: Kind = "aside") -> None:
        self.on_enter(what)


class _QuietAxis(NcclAxis):
    """The ranks of GPUs along an axis, without peers."""

    def __init__(self, ledger: Ledger, rank: int, size: int) -> None:
        super().__init__(_Quiet(), rank, size)
        self._ledger = ledger

    def start_exchange(self, x: Tensor, sent: Tensor, received: Tensor, *, rows: int) -> Pending[Tensor]:
        with self._ledger.making("communication", "exchange"):
            return completed(x.new_empty(rows, *x.shape[1:]))


def _communicating(name: str) -> Callable[..., Any]:
    kind = name.removeprefix("start_").removesuffix("_many")

    def run(self: _QuietAxis, *args: Any, **kwargs: Any) -> Any:
        with self._ledger.making("communication", kind):
            return getattr(super(_QuietAxis, self), name)(*args, **kwargs)

    return run


for _name in ("all_reduce", "all_reduce_", "all_gather", "reduce_scatter", "all_to_all"):
    setattr(_QuietAxis, _name, _communicating(_name))
    setattr(_QuietAxis, f"start_{_name}", _communicating(f"start_{_name}"))
for _name in ("start_all_gather_many", "start_reduce_scatter_many", "start_shift", "reduce_gradients"):
    setattr(_QuietAxis, _name, _communicating(_name))


class _QuietGlooAxis(_QuietAxis, GlooAxis):
    """The ranks of CPUs along an axis, without peers."""

    def _exchange(self, to: Callable[[int], Tensor], into: Callable[[int], Tensor]) -> list[Any]:
        """An exchange that moves nothing. It creates no views for the many peers: views take no memory, and no peer
        keeps them.
        """
        return []

    def _total(self, rows: Iterator[Tensor]) -> Tensor:
        """The sum of the first few rows: each further row reuses the memory of the row before it."""
        return super()._total(itertools.islice(rows, _ROWS))


class _NamedParts(Parts):
    """Replays exchanges of calls and buckets, and gives the ledger the names of the tensors that they allocate."""

    _comm: _QuietComm

    def gather(self, names: Sequence[str], *, kept: bool = False) -> Pending[list[Tensor]]:
        start = lambda _: self._gathered(names, kept)  # noqa: E731
        whole = [self._kept[name] for name in names] if kept else []
        return self._replayed("gather", tuple(names), start, [*[self._held[name] for name in names], *whole], kept=True)

    def scatter_sums(self, *names: str) -> Pending[None]:
        if self.compressed:
            return super().scatter_sums(*names)
        start = lambda _: super(_NamedParts, self).scatter_sums(*names)  # noqa: E731
        given = [*self.sums(*names), *(self._gradients[name] for name in names)]
        return self._replayed("sums", names, start, given, kept=True)

    def _gathered(self, names: Sequence[str], kept: bool) -> Pending[list[Tensor]]:
        with self._named("copies", "gathered parameters"):
            going = super().gather(names, kept=kept)

        def finish() -> list[Tensor]:
            with self._named("copies", "gathered parameters"):
                return going.wait()

        def advance() -> None:
            with self._named("copies", "gathered parameters"):
                going.advance()

        return Pending(finish, advance)

    def scatter(self, gradients: Mapping[str, Tensor]) -> Pending[None]:
        if self.compressed or not all(isinstance(x, Tensor | Leaf) for x in gradients.values()):
            return self._scattered({name: x.tensor() if isinstance(x, Leaf) else x for name, x in gradients.items()})
        names = tuple(gradients)
        start = lambda given: self._scattered(dict(zip(names, given, strict=True)))  # noqa: E731
        return self._replayed("scatter", names, start, tuple(gradients.values()))

    def _replayed(
        self, kind: str, names: tuple[str, ...], start: Start, given: Sequence[Any], *, kept: bool = False
    ) -> ReplayedExchange:
        """An exchange of the tensors `given`. Those that are `kept` are the same ones for equal names."""
        known = kind, names, len(given)
        effects = self._effects.get(known) if kept else None
        if effects is None:
            shards = tuple((self._shards[name], name in self._taken_over) for name in names)
            key = kind, self._near, self._wire, shards
            effects = self._effects[known] = exchange_effects(self._comm.recordings, key, start, given, kept=kept)
        return ReplayedExchange(self._comm.ledger, effects, given)

    @cached_property
    def _effects(self) -> dict[tuple[str, tuple[str, ...], int], ExchangeEffects]:
        return {}

    def _scattered(self, gradients: Mapping[str, Tensor]) -> Pending[None]:
        with self._named("communication", "scattered gradients"):
            return super().scatter(gradients)

    def _named(self, category: str, name: str) -> AbstractContextManager[None]:
        return self._comm.ledger.making(category, name)


class _Groups(dict[str, Axis]):
    """The process groups by name: axes joined by commas, or some ranks of a pipeline (`pp 0,3`)."""

    def __init__(self, make: MakeAxis, sizes: Sizes) -> None:
        super().__init__()
        self._make, self._sizes = make, sizes

    def __missing__(self, key: str) -> Axis:
        names = key.removeprefix("pp ").split(",")
        size = len(names) if key.startswith("pp ") else math.prod(self._sizes[name] for name in names)
        self[key] = self._make(0, size)
        return self[key]


class _QuietComm(DistributedComm):
    """The communicator of the first rank at a pipeline coordinate. Packages with Triton kernels run on GPUs, whose
    collectives hold less memory.
    """

    clock: _Clock

    def __init__(self, recordings: Recordings, program: Program, place: int) -> None:
        sizes = program.mesh.sizes
        self.device = META
        self.coordinate = {name: place if name == PIPELINE_AXIS else 0 for name in sizes}
        self.recordings = recordings
        self.ledger = recordings.ledger
        self._posted = {}
        make = partial(_QuietAxis if program.kernels == "triton" else _QuietGlooAxis, self.ledger)
        self._link = make(0, 2)
        axes = {name: make(self.coordinate[name], size) for name, size in sizes.items()}
        super(DistributedComm, self).__init__(axes, {}, _Clock())
        self._groups = _Groups(make, sizes)
        self._links = _Queues(self._link)

    def _word(self, number: int, index: int) -> Tensor:
        return self.words.blocks[0][0, 0]

    def _send(self, x: Tensor, link: Link) -> None:
        with self.ledger.making("communication", "sent"):
            super()._send(x, link)

    def release_sent(self, link: Link, microbatch: int) -> None:
        with self.ledger.releasing():
            super().release_sent(link, microbatch)

    def _recv(self, shape: Sequence[int], dtype: torch.dtype, link: Link) -> Pending[Tensor]:
        with self.ledger.making("communication", "received"):
            return super()._recv(shape, dtype, link)


class _Queues(dict[Link, Any]):
    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self._axis = axis

    def __missing__(self, link: Link) -> Axis:
        return self._axis
