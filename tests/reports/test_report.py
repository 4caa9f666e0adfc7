"""The page of a program: complete, escaped, usable offline, and working in a real browser."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import partc
from partc.cost.simulation import simulate, timeline
from partc.rehearsal.rehearsal import rehearsed
from partc.reports.html_report import page
from partc.reports.memory_chart import HEIGHT, MOST_STACKS, stacked
from partc.schedules import SCHEDULES, compute_order

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def program() -> partc.Program:
    return partc.compile(EXAMPLES / "gpt.py", mesh="2x2x2", microbatches=4).program


def test_page_shows_calls_graphs_mesh_schedule_and_parameters(program) -> None:
    text = page(program)
    assert text.count('class="card graph"') == sum(1 + (r.backward is not None) for r in program.regions)
    for call in program.calls:
        assert call.name in text
    for parameter in program.parameters:
        assert f"{re.sub('[0-9]+', '*', parameter.name)}</td>" in text and f"{parameter.name} " in text
    assert text.count("<td title=") == program.mesh.size
    own, compared = text.split('id="schedule"')[1].split('id="schedules"')
    assert len(re.findall(r'<span class="[FB]"', own)) == 2 * 2 * program.microbatches
    for kind in SCHEDULES.values():
        assert f"<b>{kind.name}</b>: {kind.does}" in compared
    # Forwards and backwards; some of the latter in halves, and of twice as many stages.
    assert len(re.findall(r'<span class="F( second)?"', compared)) == (3 * 1 + 3 * 2) * 2 * program.microbatches
    assert "all_gather 32.0 KiB over tp" in text or "over tp" in text


def test_memory_is_drawn_from_the_account(program: partc.Program) -> None:
    """Stacks of kinds, as high as what the account says of each action."""
    account, ledgers = rehearsed(program)
    worst = account.worst
    kinds = list(ledgers[worst.place].kinds())
    assert [(action, sum(sizes.values())) for action, sizes in kinds] == [(m.action, m.peak) for m in worst.timeline]
    assert max((sizes for _, sizes in kinds), key=lambda sizes: sum(sizes.values())) == worst.categories
    picture = stacked(account, kinds)
    for stack, moment in zip(picture.stacks, worst.timeline, strict=True):
        assert sum(layer.height for layer in stack.layers) == pytest.approx(HEIGHT * moment.peak / worst.peak, abs=0.1)
    drawn = page(program).split('id="memory"')[1].split('id="mesh"')[0]
    assert drawn.count("<rect ") == sum(len(stack.layers) for stack in picture.stacks)
    assert len(stacked(account, kinds * 40).stacks) <= MOST_STACKS


def test_page_needs_no_network_and_is_the_same_twice(program) -> None:
    text = page(program)
    assert not re.search(r'(src|href)="(?!#)', text)
    assert text == page(program)


def test_names_are_escaped(program) -> None:
    text = page(replace(program, name="<script>alert(1)</script>"))
    assert "<script>alert" not in text


@pytest.mark.slow
def test_the_page_of_a_large_mesh_is_short_and_begins_with_a_summary() -> None:
    """16,384 ranks and 126 equal layers: axes instead of ranks, one line for the layers of a stage."""
    options = {"depth": 126, "batch": 4096, "width": 16, "hidden": 32}
    package = partc.compile(EXAMPLES / "mlp.py", mesh="16x128x8", microbatches=16, options=options)
    text = page(package.program)
    assert len(text) < 1_000_000
    order = [text.index(part) for part in ("<dt>memory of a rank", 'id="schedule"', 'id="memory"', 'id="mesh"')]
    assert order == sorted(order) and order[-1] < text.index('id="calls"') < text.index('id="parameters"')
    assert "<td title=" not in text and text.count('<tr><td class="mono">') == 3
    assert "<td>128</td><td>+8</td><td>128</td>" in text  # dp: 128 groups of 128 ranks, 8 apart
    assert len(re.findall(r'class="call mono"', text)) <= 3 * 16
    rows = text.split('id="parameters"')[1].split("</table>")[0].count("<tr data-search")
    assert rows == len({re.sub("[0-9]+", "*", parameter.name) for parameter in package.program.parameters})
    peaks = text.split('class="peaks"')[1].split("</div>")[0]
    assert peaks.count("<span") == 16


@pytest.mark.parametrize(("stages", "microbatches", "kind"), [(2, 4, "1f1b"), (4, 8, "gpipe"), (4, 4, "1f1b")])
def test_bubble_is_the_published_one(stages: int, microbatches: int, kind: str) -> None:
    """(p - 1) / (m + p - 1) on equal stages (Huang et al. 2019; Narayanan et al. 2021, section 2.2).

    With F, I and W of equal length, stages that return gradients before W wait for two of the three at either end.
    """
    package = partc.compile(
        EXAMPLES / "mlp.py", mesh=f"pp={stages}", microbatches=microbatches, schedule=kind, options={"depth": 6}
    )
    step = timeline(package.program)
    assert step.bubble == pytest.approx(2 * (stages - 1) / (3 * microbatches + 2 * (stages - 1)))
    whole = simulate(compute_order(SCHEDULES[kind], stages, microbatches, stages), range(stages))
    assert whole.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    for line in step.ranks:
        assert all(a.end <= b.start for a, b in itertools.pairwise(line))


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_page_works_in_a_browser(program, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page(program))
    probe = """
<script>
  const chosen = document.getElementById("region"), seen = [];
  for (const option of chosen.options) {
    chosen.value = option.value; chosen.dispatchEvent(new Event("change"));
    const open = [...document.querySelectorAll("[data-graph]")].filter(g => !g.hidden);
    seen.push(open.length === 1 && open[0].querySelectorAll("g.box").length > 0);
  }
  document.getElementById("larger").click();
  const search = document.getElementById("search");
  search.value = "norm1"; search.dispatchEvent(new Event("input"));
  document.body.dataset.found = document.querySelectorAll("g.found").length;
  document.body.dataset.shown = seen.every(Boolean) && seen.length === chosen.options.length;
  document.body.dataset.wide = document.documentElement.scrollWidth <= window.innerWidth;
</script></body>"""
    path.write_text(path.read_text().replace("</body>", probe))
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
    ]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}"]
    command = ["chromium", *flags, "--enable-logging=stderr", "--window-size=1280,1000", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    body = re.search(r"<body[^>]*>", done.stdout)
    assert body is not None, done.stderr[-2000:]
    assert 'data-shown="true"' in body[0]
    assert 'data-wide="true"' in body[0]
    assert int(re.search(r'data-found="(\d+)"', body[0])[1]) > 0
    assert "Uncaught" not in done.stderr
