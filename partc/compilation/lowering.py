"""From a traced program to a finished one: all passes, and the decisions that need rehearsals between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from partc import passes
from partc.compilation.options import Options
from partc.cost.saved_tensors import Time
from partc.ir.mesh import Mesh
from partc.ir.program import Program
from partc.rules.layout_check import Verifier

if TYPE_CHECKING:
    from partc.rehearsal.rehearsal import KnownSteps

UNPROVED = "prefetch"  # the last pass before the proof; its result is the finished program
# The last passes before saved values are chosen, and before gathers are started ahead.
SAVING, AHEAD = passes.before("recompute")[-1], passes.before("prefetch")[-1]


@dataclass(frozen=True, slots=True)
class Lowered:
    """The results of the passes. `rehearsed` has the programs that were compared to decide which gathers start ahead;
    the finished program may be among them.
    """

    steps: tuple[passes.PassResult, ...]
    rehearsed: KnownSteps = ()


def budgeted(
    start: Program, options: Options, verify: Verifier | None = None, **known: Any
) -> tuple[passes.PassResult, ...]:
    """The results of the passes after `SAVING`, up to `UNPROVED`, with the least recomputation under which no rank
    holds more than the budget. Under ZeRO 3 nothing is gathered ahead. `known` is given to the passes as well. Raises
    PartcError P0415 if nothing fits.
    """
    from partc.compilation.fitting import within_budget
    from partc.passes.recompute import frontiers_of

    assert options.budget is not None
    given = options.for_passes | {"frontiers": frontiers_of(start), **known}

    def choose(times: Sequence[Sequence[Time]], lowest: bool) -> tuple[passes.PassResult, ...]:
        chosen = given | {"times": times, **({"recompute": "0B"} if lowest else {})}
        steps = passes.run(start, chosen, until=AHEAD, behind=SAVING, verify=verify)
        # Nothing is gathered ahead, so that the peaks are those of the finished program.
        return (*steps, *prefetched(steps[-1].program, options, ahead=False, verify=verify).steps)

    return within_budget(options.budget, start, choose, optimizer=options.optimizer, groups=options.group)


def prefetched(
    program: Program,
    options: Options,
    *,
    until: str | None = UNPROVED,
    ahead: bool = True,
    verify: Verifier | None = None,
    observe: passes.Observer = lambda step: None,
) -> Lowered:
    """The results of the passes after `AHEAD`, up to `until`.

    ZeRO 3 gathers ahead as far as this does not raise any rank's peak. Without `ahead` nothing is gathered ahead: the
    program has the same peaks and is found sooner.
    """
    from partc.rehearsal.late import LateActions, gathering_actions, late_actions

    late = late_actions(program) if ahead else LateActions(gathering_actions(program))
    known = options.for_passes | {"late": late.names}
    steps = passes.run(program, known, until=until, behind=AHEAD, verify=verify, observe=observe)
    return Lowered(steps, late.compared)


@dataclass(frozen=True, slots=True)
class PassRuns:
    """Runs the passes over the programs of one model. Programs under different options share passes with equal
    inputs.
    """

    _shared: passes.Shared = field(default_factory=passes.Shared)
    _verifiers: dict[tuple[Mesh, int], Verifier] = field(default_factory=dict)

    def lower(
        self,
        traced: Program,
        options: Options,
        *,
        until: str | None = None,
        observe: passes.Observer = lambda step: None,
        ahead: bool = True,
    ) -> Lowered:
        """Run the passes up to `until`; each step is reported once.

        With a budget, the cheapest recomputation that fits is chosen. `ahead` is as in `prefetched`.
        """
        if options.zero < 3 or (until is not None and until in passes.before("prefetch")):
            return Lowered(self._fitted(traced, options, until, observe))
        first = self._fitted(traced, options, AHEAD, observe)
        program, verify = first[-1].program, self._verifier(traced)
        rest = prefetched(program, options, until=until, ahead=ahead, verify=verify, observe=observe)
        return Lowered((*first, *rest.steps), rest.rehearsed)

    def _fitted(
        self, traced: Program, options: Options, until: str | None, observe: passes.Observer
    ) -> tuple[passes.PassResult, ...]:
        early = until is not None and until in passes.before("recompute")
        last = until if options.budget is None or early else SAVING
        verify = self._verifier(traced)
        first = passes.run(traced, options.for_passes, until=last, verify=verify, observe=observe, shared=self._shared)
        if options.budget is None or early:
            return first
        rest = budgeted(first[-1].program, options, verify)
        proof = passes.run(rest[-1].program, options.for_passes, until=until, behind=UNPROVED, verify=verify)
        wanted = {entry.name for entry in passes.up_to(until)}
        chosen = tuple(step for step in (*rest, *proof) if step.name in wanted)
        for step in chosen:
            observe(step)
        return (*first, *chosen)

    def _verifier(self, program: Program) -> Verifier:
        return self._verifiers.setdefault((program.mesh, program.microbatches), Verifier())
