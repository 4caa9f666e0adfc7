"""Regions as the simulator has them, lowered for every way of recomputing."""

from __future__ import annotations

from dataclasses import dataclass, field

from partc import passes
from partc.compilation.options import RECOMPUTE
from partc.compilation.plan import ParallelPlan
from partc.compilation.simulation import Simulator
from partc.errors import PartcError
from partc.ir.program import Program
from partc.planner.tables import Lowered, RegionBody


@dataclass
class RegionBodies:
    """The programs of a simulator before their stages, finished alike for all plans that share their regions."""

    simulator: Simulator
    calls: int  # that stages share; for more stages, the simulator finds finer ones
    _shared: dict[tuple[object, ...], tuple[tuple[object, ...], Program] | None] = field(default_factory=dict)
    _lowered: dict[RegionBody, Lowered] = field(default_factory=dict)

    def shared(self, plan: ParallelPlan) -> tuple[RegionBody, Program] | None:
        """The plan's program before recomputation; None where microbatches are batches of their own, or budgets decide
        about recomputation call by call.
        """
        if plan.recompute not in RECOMPUTE:
            return None
        stages = len(plan.compile_options().places)
        key = plan.mesh, plan.microbatches, plan.zero, plan.loss_chunks, stages if stages > self.calls else 0
        if key not in self._shared:
            self._shared[key] = self._made(plan)
        found = self._shared[key]
        return None if found is None else (RegionBody(found[0], plan.recompute), found[1])

    def _made(self, plan: ParallelPlan) -> tuple[tuple[object, ...], Program] | None:
        try:
            return self.simulator.differentiated(plan)
        except PartcError as error:
            if error.code != "P0402":
                raise
            return None

    def lowered(self, plan: ParallelPlan, body: RegionBody, program: Program) -> Lowered:
        """The finished regions of a body, with whole backward passes and with halves."""
        if body not in self._lowered:
            options = plan.on(self.simulator.cluster).compile_options().for_passes

            def rest(halves: bool) -> Program:
                known = {**options, "halves": halves, "budget": None}
                names = ("recompute", "split", "bias", "fuse", "overlap")
                done = program
                for name in names:
                    done = passes.alone(name, done, known)
                return done

            self._lowered[body] = Lowered(whole=rest(halves=False), halves=rest(halves=True))
        return self._lowered[body]
