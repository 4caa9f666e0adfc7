"""Compiling with the mesh `auto`: the planner's decisions, and their record in the package."""

from __future__ import annotations

from typing import Any

from partc.compilation.plan import DECIDED, ParallelPlan
from partc.planner.planning import PlanChoice, Planner, Request
from partc.planner.variations import required_choice


def choose(request: Request) -> PlanChoice:
    """The planner's choice for a request. Raises PartcError as the planner does, and P0813 if no plan fits."""
    return required_choice(Planner(request))


def decisions(plan: ParallelPlan) -> dict[str, Any]:
    """The options of a compile that a plan decides."""
    return {name: getattr(plan, name) for name in DECIDED}


def record(choice: PlanChoice) -> dict[str, Any]:
    """The entry `planned` of a package's plan.json: the prediction on which the decisions rest."""
    best, request = choice.best, choice.request
    return {
        "cluster": request.cluster.name,
        "memory_limit": request.limit,
        "step_seconds": best.seconds,
        "memory_bytes": best.bytes,
        "gap": None if choice.outcome.wrong else choice.outcome.gap,
    }
