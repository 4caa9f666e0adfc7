"""The reasons for a choice: the parts of a step in which other plans are slower, and the binding constraint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partc.ir.printer import readable
from partc.planner.planning import PlanChoice
from partc.planner.search import Played
from partc.planner.variations import Variation

_LOSSES = 2  # the most parts of a step that a reason names
_WORTH = 0.05  # share of a plan's delay: smaller parts are not named
_ROUNDING = 1e-6


def reason(best: Played, other: Played, limit: int) -> str:
    """The parts of a step in which a plan loses most against the best one, and the part in which it gains most."""
    if other.error is not None:
        return f"does not compile: {other.error}"
    words = []
    if other.bytes > limit:
        words.append(f"holds {readable(other.bytes - limit)} too much")
    slower = other.seconds - best.seconds
    if abs(slower) <= _ROUNDING * best.seconds:
        return ", ".join((*words, "takes as long"))
    if slower < 0:
        words.append(f"would be {-slower / best.seconds:.1%} quicker")
        return ", ".join(words)
    parts = sorted(differences(best, other).items(), key=lambda part: -part[1])
    worth = _WORTH * slower
    lost = [f"{_short(seconds)} more {cause}" for cause, seconds in parts[:_LOSSES] if seconds > worth]
    cause, seconds = parts[-1]
    gained = [f"{_short(-seconds)} less {cause}"] if -seconds > worth else []
    words.append(f"{slower / best.seconds:.1%} slower: {', '.join((*lost, *gained))}")
    return ", ".join(words)


def _short(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def differences(best: Played, other: Played) -> dict[str, float]:
    """The seconds by which the parts of a plan's step are longer than those of the best one.

    The parts are computation, waits for each kind of communication, and idle time in the pipeline.
    """
    mine, theirs = parts(best), parts(other)
    return {name: theirs.get(name, 0.0) - mine.get(name, 0.0) for name in dict.fromkeys((*mine, *theirs))}


def parts(played: Played) -> Mapping[str, float]:
    """The seconds of a step by kind of work or waiting, as means over pipeline ranks."""
    found: Any = played.prediction
    causes = {f"wait for {name}": seconds for name, seconds in getattr(found, "causes", {}).items()}
    exposed = getattr(found, "exposed", 0.0)
    rest = exposed - sum(causes.values())  # messages between stages have no cause of their own
    if rest > _ROUNDING * exposed:
        causes["wait for values of other stages"] = rest
    return {
        "computation": getattr(found, "compute", 0.0),
        "idle time in the pipeline": getattr(found, "bubble", 0.0),
        **causes,
    }


def binding_constraint(choice: PlanChoice, found: Sequence[Variation] = ()) -> str:
    """The constraint that keeps a quicker plan from being chosen, and its price.

    The price comes from a search with more memory, if `found` has one; else from the plans that were simulated.
    """
    limit, best = choice.request.limit, choice.best
    quicker = [
        played
        for played in choice.outcome.others
        if played.error is None and played.seconds < best.seconds and played.bytes > limit
    ]
    more = next((each for each in found if each.change == "memory" and each.best is not None), None)
    if more is not None and more.best is not None:
        gain = 1 - more.best.seconds / best.seconds
        if gain > _ROUNDING and more.best.bytes <= limit:
            return (
                f"the search ended too early: a plan that fits takes {gain:.1%} less ({more.best.plan.flags}); give "
                "more --max-seconds"
            )
        if gain > _ROUNDING:
            return f"memory binds: with {more.name}, a step would take {gain:.1%} less ({more.best.plan.flags})"
        if not quicker:
            exists = "was found" if more.gap else "exists"
            return f"memory does not bind: with {more.name}, no quicker plan {exists}"
    if not quicker:
        return "memory does not bind: of the plans that were simulated, none that holds more is quicker"
    least = min(quicker, key=lambda played: (played.bytes, played.seconds))
    gain = 1 - least.seconds / best.seconds
    return (
        f"memory binds: with {readable(least.bytes)} on a rank, {readable(least.bytes - limit)} more, a step would "
        f"take {gain:.1%} less ({least.plan.flags})"
    )


def by_layer(choice: PlanChoice) -> str:
    """The gain of plans whose tp cuts the batch of some calls; empty if the search did not compare them."""
    if choice.single is None:
        return ""
    best, single = choice.best, choice.single.best
    if best.plan.batch_over is None:
        simulated = (*choice.outcome.fitting, *choice.outcome.others)
        if not choice.outcome.complete and all(played.plan.batch_over is None for played in simulated):
            return "no plan whose tp cuts the batch of some calls was simulated in time; a larger --max-seconds helps"
        known = "is" if choice.outcome.complete else "was found"
        return f"no plan whose tp cuts the batch of some calls {known} quicker"
    if single is None:
        return "no plan in which each axis has one use was found to fit"
    gain = 1 - best.seconds / single.seconds
    return f"{gain:.1%} less time than the best plan in which each axis has one use ({single.plan.flags})"


def shown_plans(choice: PlanChoice, top: int) -> tuple[Played, ...]:
    """The best plans that fit, then the quickest simulated plans that do not."""
    others = [played for played in choice.outcome.others if played.error is None]
    quickest = sorted(others, key=lambda played: played.seconds)
    return (*choice.outcome.fitting, *quickest)[:top]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledPlan:
    """The best plan on some number of ranks, and its scaling efficiency relative to the least number of ranks."""

    ranks: int
    best: Played
    rate: float  # samples per second
    share: float


def scaling(choice: PlanChoice, found: Sequence[Variation]) -> tuple[ScaledPlan, ...]:
    """The throughput over ranks, T_n / (n T): T is that of one rank, in the ranks' least number with a plan."""
    batch = choice.space.batch
    best = {each.ranks: each.best for each in found if each.change == "ranks" and each.best is not None}
    known = sorted((best | {choice.space.ranks: choice.best}).items())
    least, first = known[0]
    return tuple(
        ScaledPlan(
            ranks=ranks, best=each, rate=batch / each.seconds, share=first.seconds * least / (each.seconds * ranks)
        )
        for ranks, each in known
    )


def document(choice: PlanChoice, top: int, found: Sequence[Variation] = ()) -> dict[str, Any]:
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
        "binding": binding_constraint(choice, found),
        "by_layer": by_layer(choice),
        "plans": [_document(best, played, choice) for played in shown_plans(choice, top)],
        "what_if": [_varied(each, choice) for each in found],
        "scaling": [
            {"ranks": each.ranks, "samples_per_second": each.rate, "share": each.share}
            for each in scaling(choice, found)
        ],
    }


def _varied(each: Variation, choice: PlanChoice) -> dict[str, Any]:
    best = each.best
    return {
        "name": each.name,
        "ranks": each.ranks,
        "batch": each.batch,
        "memory_limit": each.limit,
        "plan": None if best is None else best.plan.document(),
        "step_seconds": None if best is None else best.seconds,
        "memory_bytes": None if best is None else best.bytes,
        "samples_per_second": each.rate if best is not None else None,
        "times_throughput": each.rate * choice.best.seconds / choice.space.batch if best is not None else None,
        "gap": each.gap if best is not None else None,
        "error": each.error or None,
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
        "differences": {} if played is best or played.error is not None else differences(best, played),
    }
