"""The quotes and pictures in README.md and docs/, made from the compiler: `python -m tests.documentation` refreshes them.

A quote is a comment in front of a block of code, whose text follows from it:

    <!-- quote: SOURCE | PATTERN | PATTERN+2 | ... -->

SOURCE is a file, a folder (of which the first file with the first pattern is read), `after PASS` for the program that
`partc compile examples/gpt.py --mesh 2x2x2 --microbatches 4` has after a pass, or `rank N` for its ranks. Each pattern, a regular expression,
selects the next line that it matches, with `+N` and N lines more. Lines that are left out show as `…`.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from partc.cli import main
from partc.package.rank_view import rank_view
from partc.reports.schedule_comparison import Candidate, candidates

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PICTURES = ROOT / "docs" / "pictures"
QUOTE = re.compile(r"<!-- quote: (?P<what>.*?) -->\n```(?P<language>\w*)\n(?P<text>.*?)```\n", re.DOTALL)
COLORS = {"F": "#4b86c6", "B": "#d08b3c", "I": "#b8742a", "W": "#6d9c5c"}
DARKER = {"F": "#2f5f96", "B": "#9c6520", "I": "#85511a", "W": "#4a7040"}
TEXT = 'font-family="sans-serif" font-size="12" fill="#30363d"'


@dataclass(frozen=True)
class Example:
    """The package of `examples/gpt.py` on 2x2x2, and its program after each pass."""

    folder: Path

    @classmethod
    def made(cls, folder: Path) -> Example:
        build = folder / "build"
        line = ["examples/gpt.py", "--mesh", "2x2x2", "--microbatches", "4", "--dump-after", "all", "-o", str(build)]
        assert main(["compile", *(str(ROOT / word) if word.startswith("examples/") else word for word in line)]) == 0
        return cls(folder)

    def after(self, name: str) -> list[str]:
        """The printed program after a pass, without the places in the model file and with columns set closely."""
        (path,) = (self.folder / "build-dump").glob(f"*-{name}.txt")
        lines = (line.split(" | at ")[0] for line in path.read_text().splitlines())
        return [re.sub(r"(?<=\S) {2,}(?=(#?))", lambda gap: "  " if gap[1] else " ", line) for line in lines]

    @cached_property
    def memory(self) -> Sequence[tuple[str, int, int]]:
        """Rank 0's step: an action, its peak, and the bytes held after it."""
        plan = json.loads((self.folder / "build" / "plan.json").read_text())
        return [(item["action"], item["peak"], item["after"]) for item in plan["memory"]["ranks"][0]["timeline"]]

    def shards(self, rank: int) -> dict[str, str]:
        """The elements of each sharded parameter that a rank holds."""
        return dict(re.findall(r"^  (\S+)(\[.*\])$", "\n".join(self.rank(rank)), re.MULTILINE))

    def rank(self, number: int) -> list[str]:
        return rank_view(self.folder / "build", number).splitlines()


def refreshed(text: str, example: Example) -> str:
    """A page with its quotes as they are now."""

    def quoted(match: re.Match[str]) -> str:
        source, *patterns = (part.strip() for part in match["what"].split(" | "))
        lines = "\n".join(selected(lines_of(source, patterns[0], example), patterns))
        return f"<!-- quote: {match['what']} -->\n```{match['language']}\n{lines}\n```\n"

    return QUOTE.sub(quoted, text)


def lines_of(source: str, first: str, example: Example) -> list[str]:
    """The lines of a quote's source."""
    if source.startswith("after "):
        return example.after(source.removeprefix("after "))
    if source.startswith("rank "):
        return example.rank(int(source.removeprefix("rank ")))
    path = ROOT / source
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    pattern = re.compile(first.split("+")[0] if re.search(r"\+\d+$", first) else first)
    found = (lines for file in files if any(map(pattern.search, lines := file.read_text().splitlines())))
    lines = next(found, None)
    if lines is None:
        raise LookupError(f"nothing in {source} matches {first!r}")
    return lines


def selected(lines: Sequence[str], patterns: Sequence[str]) -> Iterator[str]:
    """The lines that the patterns select, in their order."""
    position = 0
    for index, pattern in enumerate(patterns):
        match = re.fullmatch(r"(.*?)(?:\+(\d+))?", pattern)
        assert match is not None
        start = next((k for k in range(position, len(lines)) if re.search(match[1], lines[k])), None)
        if start is None:
            raise LookupError(f"no line matches {match[1]!r} after line {position}")
        if index and start > position:
            yield re.match(r" *", lines[start])[0] + "…"  # type: ignore[index]
        position = start + 1 + int(match[2] or 0)
        yield from lines[start:position]


def pictures(example: Example) -> dict[str, str]:
    """The pictures by their names."""
    found = candidates(4, 8)
    return {
        "schedules.svg": timelines(found),
        "1f1b.svg": timelines([item for item in found if item.name == "1f1b"]),
        "memory.svg": memory(example.memory),
        "weight.svg": weight({rank: example.shards(rank)["blocks.*.attn.wq.weight"] for rank in range(4)}),
        "compiler.svg": compiler(),
    }


def timelines(found: Sequence[Candidate]) -> str:
    """Schedules above each other, in one scale: a bar for each computation, with its microbatch."""
    wide, high, left = 820, 15, 24
    scale = wide / max(item.timeline.makespan for item in found)
    body: list[str] = []
    top = 6
    for item in found:
        body.append(
            f'<text x="4" y="{top + 12}" {TEXT}><tspan font-weight="bold">{item.name}</tspan>: {item.does}</text>'
        )
        top += 20
        for rank, spans in enumerate(item.timeline.ranks):
            body.append(f'<text x="8" y="{top + 11}" {TEXT}>{rank}</text>')
            first = min(span.compute.stage for span in spans)
            for span in spans:
                x, width = left + span.start * scale, (span.end - span.start) * scale - 1
                color = (COLORS if span.compute.stage == first else DARKER)[span.compute.kind]
                body.append(f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{high - 2}" fill="{color}"/>')
                text = f'<text x="{x + width / 2:.1f}" y="{top + 10}" class="n">{span.compute.microbatch}</text>'
                body.append(text)
            top += high
        top += 10
    return _svg(left + wide + 6, top, body)


def memory(moments: Sequence[tuple[str, int, int]]) -> str:
    """A bar for each action: the bytes that stay during the whole step below, the others above."""
    wide, high, left, top = 28, 150, 64, 12
    most, least = max(peak for _, peak, _ in moments), min(after for _, _, after in moments)
    scale = high / most
    body = [
        f'<text x="{left - 6}" y="{top + high - size * scale + 4:.1f}" text-anchor="end" {TEXT}>{size / 2**20:.2f} MiB</text>'
        for size in (most, least)
    ]
    for index, (action, peak, _) in enumerate(moments):
        x = left + index * wide
        for size, color in ((peak, "#d08b3c"), (least, "#5b91c4")):
            y = top + high - size * scale
            body.append(f'<rect x="{x}" y="{y:.1f}" width="{wide - 2}" height="{size * scale:.1f}" fill="{color}"/>')
        place = f"translate({x + wide / 2 + 3},{top + high + 6}) rotate(90)"
        body.append(f'<text transform="{place}" {TEXT} style="font-size:10px">{action}</text>')
    return _svg(left + len(moments) * wide + 6, top + high + 96, body)


def weight(shards: dict[int, str]) -> str:
    """A weight's rows, by the ranks of the first pipeline stage that hold them."""
    body: list[str] = []
    for rank, box in sorted(shards.items()):
        x, y = 20 + 200 * (rank // 2), 26
        rows = [int(number) for number in box.strip("[]").split(",")[0].split(":")]
        for low, high in ((0, rows[0]), (rows[0], rows[1]), (rows[1], 64)):
            held = (low, high) == (rows[0], rows[1])
            if high > low:
                fill = COLORS["F"] if held else "#e6eaf0"
                place = f'x="{x + 100 * (rank % 2)}" y="{y + low}" width="80" height="{high - low}"'
                body.append(f'<rect {place} fill="{fill}" stroke="#ffffff"/>')
        body.append(f'<text x="{x + 100 * (rank % 2)}" y="18" {TEXT}>rank {rank}: {box}</text>')
    return _svg(420, 100, body)


def compiler() -> str:
    """The compiler from the model file to the package."""
    stages = (
        ("model file", "single-device PyTorch"),
        ("trace", "torch.export, no memory"),
        ("regions", "distinct bodies, traced once"),
        ("layouts", "an integer program"),
        ("collectives", "where layouts differ"),
        ("stages, ZeRO", "who holds what, where"),
        ("backward", "autograd for each region"),
        ("schedule", "actions in order, proved"),
        ("package", "Python that torchrun runs"),
    )
    body: list[str] = []
    for index, (title, note) in enumerate(stages):
        row, column = divmod(index, 3)
        x, y = 10 + 270 * column, 10 + 76 * row
        end = index in (0, len(stages) - 1)
        body.append(
            f'<rect x="{x}" y="{y}" width="220" height="50" rx="6" fill="{"#fff3e0" if end else "#eaf1fa"}" stroke="#8a96a3"/>'
            f'<text x="{x + 110}" y="{y + 21}" text-anchor="middle" {TEXT} font-weight="bold">{title}</text>'
            f'<text x="{x + 110}" y="{y + 39}" text-anchor="middle" {TEXT}>{note}</text>'
        )
        if column < 2:
            body.append(f'<path d="M{x + 222} {y + 25}h44m-7 -5l7 5l-7 5" fill="none" stroke="#8a96a3"/>')
        elif not end:
            body.append(f'<path d="M{x + 110} {y + 52}v12h-540v10m-5 -7l5 7l5 -7" fill="none" stroke="#8a96a3"/>')
    return _svg(780, 230, body)


def _svg(width: float, height: float, body: Sequence[str]) -> str:
    style = "<style>.n{font:9px sans-serif;fill:#fff;text-anchor:middle}</style>"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}">'
    return "\n".join([head, style, '<rect width="100%" height="100%" fill="#fff"/>', *body, "</svg>", ""])


def refresh() -> None:
    """Write every page and picture anew."""
    with tempfile.TemporaryDirectory() as folder:
        example = Example.made(Path(folder))
        for page in PAGES:
            page.write_text(refreshed(page.read_text(), example))
        PICTURES.mkdir(exist_ok=True)
        for name, text in pictures(example).items():
            (PICTURES / name).write_text(text)


if __name__ == "__main__":
    sys.exit(refresh())
