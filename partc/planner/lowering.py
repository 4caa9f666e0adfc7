"""The simulator's regions, lowered for every way of recomputing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from partc import passes
from partc.compilation.plan import ParallelPlan
from partc.compilation.simulation import Simulator
from partc.errors import PartcError
from partc.ir.program import Program, Region
from partc.passes.split import worthwhile
from partc.planner.space import inner_axes, sizes_of, stages_of
from partc.planner.tables import RegionBody
from partc.schedules.per_stage import RECOMPUTE

_UNREADABLE = ("P0201", "P0202", "P0203")


@dataclass
class RegionBodies:
    """The simulator's programs before the pass `stages`, finished in the same way for all plans that share their
    regions.
    """

    simulator: Simulator
    calls: int  # the number of calls that stages share; for more stages, the simulator outlines finer ones
    everywhere: bool = True  # whether regions are lowered once for all sizes of the batch's parts
    _shared: dict[tuple[object, ...], tuple[int, Program] | None] = field(default_factory=dict)
    _numbers: dict[tuple[object, ...], int] = field(default_factory=dict)  # of bodies, by the simulator's keys
    _recomputed: dict[RegionBody, Program] = field(default_factory=dict)
    _lowered: dict[tuple[RegionBody, bool], tuple[Program, frozenset[str]]] = field(default_factory=dict)
    # A representative of equal regions, which then share their costs.
    _regions: dict[Region, Region] = field(default_factory=dict)

    def separate_batches(self, plan: ParallelPlan) -> bool:
        """Whether each microbatch of the plan is a batch of its own, since the model couples examples."""
        return self.simulator.couples_examples(plan, everywhere=self.everywhere)

    def shared(self, plan: ParallelPlan) -> tuple[RegionBody, Program] | None:
        """The plan's program before the pass `stages`. None if it cannot be compiled, or if a budget decides about
        recomputation call by call.
        """
        if plan.recompute not in RECOMPUTE:
            return None
        sizes, stages = sizes_of(plan), stages_of(plan)
        level = max(1, plan.level)  # tables do not distinguish 0 from 1
        options = plan.microbatches, level, plan.loss_chunks, max(stages, self.calls)
        key: tuple[object, ...] = (*sizes.values(), inner_axes(plan), plan.experts, plan.batch_over, *options)
        if key not in self._shared:
            self._shared[key] = self._made(plan)
        found = self._shared[key]
        return None if found is None else (RegionBody(found[0], plan.recompute), found[1])

    def _made(self, plan: ParallelPlan) -> tuple[int, Program] | None:
        try:
            key, program = self.simulator.differentiated(plan, everywhere=self.everywhere)
            options = plan.on(self.simulator.cluster).compile_options().for_passes
            passes.between("stages", "chunk", program, options)  # raises if no loss can be computed in chunks
        except PartcError as error:
            if error.code in _UNREADABLE:
                raise
            return None
        return self._numbers.setdefault((key, plan.loss_chunks), len(self._numbers)), program

    def lowered(self, plan: ParallelPlan, body: RegionBody, *, halves: bool) -> Program:
        """The finished program of a body, with whole backward passes or, with `halves`, with their two halves."""
        return self._finished(plan, body, halves=halves)[0]

    def sending_first(self, plan: ParallelPlan, body: RegionBody) -> frozenset[str]:
        """The regions whose backward passes run in two halves on a stage that sends gradients to another rank. The
        pass `split` chooses them before operations are fused.
        """
        return self._finished(plan, body, halves=True)[1]

    def _finished(self, plan: ParallelPlan, body: RegionBody, *, halves: bool) -> tuple[Program, frozenset[str]]:
        """The finished program of a body, and the regions of `sending_first`."""
        key = body, halves
        if key not in self._lowered:
            options = plan.on(self.simulator.cluster).compile_options().for_passes
            known = {**options, "halves": halves, "budget": None, "fusions": self.simulator.fusions}
            if body not in self._recomputed:
                found = self.shared(plan)
                assert found is not None
                self._recomputed[body] = passes.between("stages", "recompute", found[1], known)
            steps = passes.run(self._recomputed[body], known, behind="recompute", until="overlap")
            parted = next((step.program for step in steps if step.name == "split"), None)
            regions = () if parted is None else parted.regions
            sending = frozenset(region.name for region in regions if worthwhile(region, steps[-1].program.sizes))
            alike = (self._regions.setdefault(region, region) for region in steps[-1].program.regions)
            self._lowered[key] = replace(steps[-1].program, regions=tuple(alike)), sending
        return self._lowered[key]
