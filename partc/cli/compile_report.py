"""The report of a finished compile, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partc.cli import console


def print_report(report: Mapping[str, Any]) -> None:
    from partc.compilation.phase_notes import count_text, padding_sentences
    from partc.ir.printer import readable

    moved = ", ".join(f"{readable(size)} over {axis}" for axis, size in report["communication"].items() if size)
    counts = {"rank": report["ranks"], "stage": report["stages"], "region": len(report["regions"])}
    console.echo("\n" + ", ".join(count_text(count, noun) for noun, count in counts.items()))
    console.echo(f"each rank receives a step: {moved or 'nothing'}")
    if not report["forward_only"]:
        console.echo(f"a rank saves for backward passes: {readable(max(report['saved']))} at most")
    if report["memory"] is not None:
        console.echo(f"a rank holds at most: {report['memory']['worst']}")
    console.echo(f"rules cover {report['rules']['ops']:.1%} of operations, {report['rules']['flops']:.1%} of flops")
    for warning in report["warnings"]:
        console.echo(f"warning: {warning}")
    for line in padding_sentences(report["padded"]):
        console.echo(line)
    for item in report["replicated_ops"]:
        place = f"{console.shortened(item['source'])}: " if item["source"] else ""
        why = "is repeated" if item["rule"] else "has no rule, so it is repeated"
        cost = f"{item['flops']:,} flops a step"
        console.echo(f"{place}{item['op']} ({item['place']}) {why} on every rank of {item['axis']}: {cost}")
