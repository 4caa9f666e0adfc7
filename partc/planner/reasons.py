"""The reasons of a choice: the parts of a step on which other plans lose, and the constraint that binds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from partc.ir.printer import readable
from partc.planner.planning import PlanChoice
from partc.planner.search import Played


def reason(best: Played, other: Played, limit: int) -> str:
    """The part of a step on which a plan loses most against the best one."""
    if other.error is not None:
        return f"does not compile: {other.error}"
    words = []
    if other.bytes > limit:
        words.append(f"holds {readable(other.bytes - limit)} too much")
    slower = other.seconds - best.seconds
    if slower <= 0:
        words.append(f"would be {-slower / best.seconds:.1%} quicker")
        return ", ".join(words)
    parts = sorted(_parts(best, other), key=lambda part: -part[1])
    cause, seconds = parts[0] if parts else ("time", slower)
    words.append(f"{slower / best.seconds:.1%} slower: {1e3 * seconds:.3g} ms more {cause}")
    return ", ".join(words)


def _parts(best: Played, other: Played) -> Iterator[tuple[str, float]]:
    """The differences of the parts of a step: computation, waits for each kind of communication, and for stages."""
    mine, theirs = _split(best), _split(other)
    for name in dict.fromkeys((*mine, *theirs)):
        yield name, theirs.get(name, 0.0) - mine.get(name, 0.0)


def _split(played: Played) -> Mapping[str, float]:
    found: Any = played.prediction
    causes = {f"wait for {name}": seconds for name, seconds in getattr(found, "causes", {}).items()}
    exposed = causes or {"wait for communication": getattr(found, "exposed", 0.0)}
    return {
        "computation": getattr(found, "compute", 0.0),
        "idle time in the pipeline": getattr(found, "bubble", 0.0),
        **exposed,
    }


def binding(choice: PlanChoice) -> str:
    """The constraint that keeps a quicker plan from being chosen, and its price."""
    limit, best = choice.request.limit, choice.best
    quicker = [
        played
        for played in choice.outcome.others
        if played.error is None and played.seconds < best.seconds and played.bytes > limit
    ]
    if not quicker:
        return "memory does not bind: of the plans that were simulated, none that holds more is quicker"
    least = min(quicker, key=lambda played: (played.bytes, played.seconds))
    gain = 1 - least.seconds / best.seconds
    return (
        f"memory binds: with {readable(least.bytes)} on a rank, {readable(least.bytes - limit)} more, a step would "
        f"take {gain:.1%} less ({least.plan.flags})"
    )


def shown(choice: PlanChoice, top: int) -> tuple[Played, ...]:
    """The best plans that fit, then the quickest of those that were simulated and do not."""
    others = [played for played in choice.outcome.others if played.error is None]
    quickest = sorted(others, key=lambda played: played.seconds)
    return (*choice.outcome.fitting, *quickest)[:top]


def document(choice: PlanChoice, top: int) -> dict[str, Any]:
    """The choice as a JSON document."""
    outcome, best = choice.outcome, choice.best
    return {
        "plan": best.plan.document(),
        "command": best.plan.flags,
        "ranks": choice.space.ranks,
        "batch": choice.space.batch,
        "tokens_per_sample": choice.tokens,
        "memory_limit": choice.request.limit,
        "space": outcome.space,
        "too_large": outcome.too_large,
        "simulated": len(outcome.fitting) + len(outcome.others),
        "bound_seconds": outcome.bound,
        "gap": None if outcome.wrong else outcome.gap,
        "complete": outcome.complete,
        "seconds": outcome.seconds,
        "binding": binding(choice),
        "plans": [_document(best, played, choice) for played in shown(choice, top)],
    }


def _document(best: Played, played: Played, choice: PlanChoice) -> dict[str, Any]:
    found: Any = played.prediction
    names = ("step_seconds", "memory_bytes", "compute", "exposed", "bubble", "causes")
    return {
        "plan": played.plan.document(),
        "fits": played.bytes <= choice.request.limit,
        "bound_seconds": played.bound.seconds,
        "bound_bytes": played.bound.bytes,
        **{name: getattr(found, name) for name in names if hasattr(found, name)},
        "why": "" if played is best else reason(best, played, choice.request.limit),
    }
