"""Programs as the planner reads them: lowered once for every body, from one trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from partc import passes
from partc.api import Compilation, OriginKey, compilation
from partc.compilation.options import Options
from partc.ir.program import Program
from partc.frontend.origin import Origin
from partc.planner.plan import Plan
from partc.planner.space import divisors
from partc.planner.tables import Body, Lowered

_SHARED, _LAST = "chunk", "overlap"  # up to the first, recomputation and halves make no difference; later costs none


@dataclass
class Lowering:
    """A model, its traces, and the programs that were made of them."""

    model: Any
    base: Plan
    batch: int = 1
    origins: dict[OriginKey, Origin] = field(default_factory=dict)
    _shared: dict[tuple[int, int, int], Compilation] = field(default_factory=dict)

    def compiled(self, plan: Plan, *, until: str | None = None) -> Compilation:
        """The compilation of a plan."""
        return compilation(
            self.model,
            None,
            plan.compile_options(),
            model_options=plan.model_options,
            origins=self.origins,
            until=until,
            alone=True,
        )

    def shared(self, body: Body) -> Program:
        """The program of a body before recomputation is chosen, whose batch is cut in time alone."""
        return self._until_shared(body).program

    def _until_shared(self, body: Body) -> Compilation:
        key = body.tp, body.cp, body.loss_chunks
        if key not in self._shared:
            self._shared[key] = self.compiled(self._plan(body), until=_SHARED)
        return self._shared[key]

    def lowered(self, body: Body) -> Lowered:
        """The finished programs of a body."""
        shared = self._until_shared(body)
        options = self._plan(body).compile_options().for_passes

        def rest(halves: bool) -> Program:
            known = {**options, "halves": halves, "recompute": body.recompute}
            return passes.run(shared.program, known, behind=_SHARED, until=_LAST)[-1].program

        whole = rest(halves=False)
        return Lowered(partitioned=shared.after("zero"), whole=whole, halves=rest(halves=True))

    def _plan(self, body: Body) -> Plan:
        axes = [f"{name}={size}" for name, size in (("cp", body.cp), ("tp", body.tp)) if size > 1]
        parts = divisors(self.batch)[1:2] or (1,)
        return Plan(
            mesh=",".join(axes) or "dp=1",
            microbatches=parts[0],
            loss_chunks=body.loss_chunks,
            precision=self.base.precision,
            kernels=self.base.kernels,
            options=self.base.options,
        )
