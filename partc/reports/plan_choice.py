"""A table of the best plans of a search, with the reason why each is not the best.

plan                         step   compute   exposed  bubble  memory    samples/s
dp=8, 4 microbatches, ...  1.51 s    1.49 s   21.0 ms     0 s  67.3 GiB       42.3  the best
...
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from partc.compilation.phase_notes import count_text
from partc.compilation.plan import ParallelPlan
from partc.ir.printer import readable
from partc.planner.planning import PlanChoice
from partc.planner.reasons import reason, shown_plans
from partc.planner.variations import Variation

_UNPROVED = 0.999  # a larger gap comes from a search without bounds


def page(choice: PlanChoice, top: int, *, width: int = 140) -> str:
    """The table of the best plans, and the figures of the proof."""
    from rich.console import Console
    from rich.table import Table

    best, outcome = choice.best, choice.outcome
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    table.add_column("plan", overflow="fold")
    for name in ("step", "compute", "exposed", "bubble", "memory", "samples/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for played in shown_plans(choice, top):
        found: Any = played.prediction
        times = [duration_text(each) for each in (found.step_seconds, found.compute, found.exposed, found.bubble)]
        why = "the best" if played is best else reason(best, played, choice.request.limit)
        rate = figure_text(choice.space.batch / found.step_seconds)
        table.add_row(plan_text(played.plan), *times, readable(found.memory_bytes), rate, why)
    out = io.StringIO()
    console = Console(file=out, width=max(width, 100), highlight=False, markup=False, emoji=False)
    console.print(table)
    simulated = len(outcome.fitting) + len(outcome.others)
    ranks, batch = count_text(choice.space.ranks, "rank"), f"{choice.space.batch:,}"
    console.print(
        f"\n{outcome.space:,} plans for {ranks} of {choice.request.cluster.name}, a batch of {batch}: "
        f"{outcome.too_large:,} hold too much, {simulated:,} were simulated, all others are bounded; "
        f"{outcome.seconds:.1f} s",
        soft_wrap=True,
    )
    console.print(gap_statement(choice), soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def variation_table(choice: PlanChoice, found: Sequence[Variation]) -> str:
    """The table of other requests' best plans, with the change of throughput that each brings."""
    rows = [("if", "step", "throughput", "memory", "best plan")]
    rate = choice.space.batch / choice.best.seconds
    for each in found:
        if each.best is None:
            rows.append((each.name, "", "", "", each.error))
        else:
            change = f"{each.rate / rate - 1:+.1%}" if each.rate < 2 * rate else f"x {each.rate / rate:.2f}"
            size = readable(each.best.bytes)
            rows.append((each.name, duration_text(each.best.seconds), change, size, plan_text(each.best.plan)))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = (
        f"{name:<{widths[0]}}  {step:>{widths[1]}}  {more:>{widths[2]}}  {size:>{widths[3]}}  {plan}".rstrip()
        for name, step, more, size, plan in rows
    )
    return "\n".join(lines) + "\n"


def gap_statement(choice: PlanChoice) -> str:
    """The statement that is proved about all other plans."""
    outcome = choice.outcome
    if outcome.wrong:
        return (
            f"no gap is proved: the bound of {plan_text(outcome.wrong[0].plan)} is above its prediction, a bug in partc"
        )
    if outcome.complete:
        return "no other plan of the space is quicker"
    if outcome.gap > _UNPROVED:
        return "stopped early: nothing is proved about the plans that were not simulated"
    return f"stopped early: no other plan is quicker by more than {outcome.gap:.1%}"


def plan_text(plan: ParallelPlan) -> str:
    """A plan in short: its mesh, and the options that differ from the defaults."""
    parts = [plan.mesh, f"{plan.microbatches} microbatch{'es' if plan.microbatches > 1 else ''}"]
    if plan.experts is not None:
        parts.insert(1, f"experts {plan.experts}")
    if plan.batch_over is not None:
        parts.append(f"batch over {plan.batch_over}")
    if "pp=" in plan.mesh:
        parts.append(plan.schedule)
    if plan.virtual_stages is not None:
        parts.append(f"{plan.virtual_stages} virtual stages")
    if plan.stage_calls is not None:
        parts.append(f"{plan.stage_calls} calls by stage")
    if plan.level:
        parts.append(f"zero {plan.zero}")
    if plan.nodes is not None:
        parts.append(f"sums in nodes of {plan.nodes}")
    if plan.recompute != "none":
        parts.append(f"recompute {plan.recompute}")
    if plan.loss_chunks > 1:
        parts.append(f"{plan.loss_chunks} loss chunks")
    return ", ".join(parts)


def figure_text(number: float) -> str:
    """A number with at least four digits, without an exponent."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def duration_text(seconds: float) -> str:
    """A time with three digits."""
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
