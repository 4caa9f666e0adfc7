"""A run that is cut in two: examples/text_gpt.py on one mesh, stopped half-way, continued on another.

    python tests/benchmarks/text_run.py

Trains 300 steps three times, with the same data and initial weights: as a package on 2x2x1 that is told
to stop (SIGTERM) half-way and saves, then on 1x2x2 from there; the same with a rank killed (SIGKILL)
and the newest checkpoint continued; and the plain model on one device in a loop of its own here, with
torch.optim.AdamW. Prints how far the losses are apart, writes docs/text_run.svg, and lets the exported
model go on with a sentence. Exit code 1 where a loss is further off than --allowed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import text_gpt
import torch
from safetensors.torch import load_file
from torch import Tensor

import partc
from partc.package.export import export
from partc.package.launch import local_environment

ROOT = Path(__file__).parents[2]
FIRST, SECOND = "2x2x1", "1x2x2"
WIDTH, HEIGHT, LEFT, GAP = 860, 460, 70, 40


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--precision", choices=("fp32", "fp64"), default="fp32")
    parser.add_argument("--allowed", type=float, default=2e-3, help="largest difference of two losses")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "text_run.svg")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="partc-text-") as place:
        folder = Path(place)
        for mesh in (FIRST, SECOND):
            path = ROOT / "examples" / "text_gpt.py"
            package = partc.compile(str(path), mesh=mesh, microbatches=4, precision=given.precision)
            package.write(folder / mesh)
            shutil.copy(ROOT / text_gpt.TEXT, folder / mesh)
        plain = single_device(text_gpt, given.steps, given.lr, given.precision)
        found = {}
        for name, how in (("SIGTERM", signal.SIGTERM), ("SIGKILL", signal.SIGKILL)):
            losses, resumed = cut_run(folder, name, how, given.steps, given.lr)
            apart = [abs(a - b) for a, b in zip(losses, plain, strict=True)]
            worst = max(range(len(apart)), key=apart.__getitem__)
            found[name] = max(apart)
            print(
                f"{name}: {FIRST} to step {resumed}, then {SECOND} to step {given.steps}: loss {losses[0]:.4f} to "
                f"{losses[-1]:.4f}, single device {plain[-1]:.4f}; furthest apart by {apart[worst]:.1e} at step "
                f"{worst + 1}, by {max(apart[:20]):.1e} in the first 20"
            )
            if how == signal.SIGTERM:
                given.picture.write_text(picture(losses, plain, resumed), encoding="utf-8")
        state = folder / "model.safetensors"
        export(folder / SECOND, folder / "SIGTERM", state, say=print)
        print(f"the exported model goes on:\n{written_on(text_gpt, load_file(state), 'Alice was ', 160)}")
    return 0 if all(apart <= given.allowed for apart in found.values()) else 1


def single_device(module: ModuleType, steps: int, lr: float, precision: str) -> list[float]:
    """The losses of a training loop as anyone would write it."""
    torch.manual_seed(0)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    model = module.model().to(dtype)
    torch.set_default_dtype(dtype)  # of the rotations that the model makes on its way
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = module.loss(model, module.data(step, str(ROOT / module.TEXT)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.set_default_dtype(torch.float32)
    return losses


def cut_run(folder: Path, name: str, how: signal.Signals, steps: int, lr: float) -> tuple[list[float], int]:
    """The losses of a run that is cut half-way, and the step after which the second package went on."""
    log = folder / f"{name}.jsonl"
    options = [
        "--steps",
        str(steps),
        "--lr",
        str(lr),
        "--save",
        str(folder / name),
        "--save-every",
        str(max(1, steps // 15)),
    ]
    options += ["--metrics", str(log), "--resume"]
    running = subprocess.Popen(command(folder / FIRST, options), env=local_environment(), stderr=subprocess.DEVNULL)
    while running.poll() is None and (lines(log) < steps // 2 or not any((folder / name).glob("step_*"))):
        time.sleep(0.05)
    os.kill(ranks_of(running.pid)[-1], how)
    ended_well = running.wait(120) == 0
    assert ended_well == (how == signal.SIGTERM), "told to stop, it saves and ends well; a dead rank fails the run"
    done = subprocess.run(command(folder / SECOND, options), env=local_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = next(line for line in done.stderr.splitlines() if line.startswith("continuing from"))
    found = [json.loads(line) for line in log.read_text().splitlines()]
    assert [entry["step"] for entry in found] == list(range(1, steps + 1))
    return [entry["loss"] for entry in found], int(said.rpartition(" ")[2])


def command(package: Path, options: list[str]) -> list[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    return [*launch, str(package / "train.py"), *options]


def lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def ranks_of(launcher: int) -> list[int]:
    """The processes that torchrun has started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(child) for child in children if "train.py" in Path(f"/proc/{child}/cmdline").read_text()]


def written_on(module: ModuleType, state: dict[str, Tensor], start: str, count: int) -> str:
    """A trained model's continuation of a text, drawn byte by byte."""
    model = module.model()
    model.load_state_dict(state)
    model.float().eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([list(start.encode())])
    with torch.no_grad():
        for _ in range(count):
            likely = (model(ids[:, -module.LENGTH :])[0, -1] / 0.7).softmax(0)
            ids = torch.cat([ids, torch.multinomial(likely, 1, generator=generator)[None]], dim=1)
    return bytes(ids[0].tolist()).decode(errors="replace")


def picture(losses: list[float], plain: list[float], resumed: int) -> str:
    """Both curves in one frame, the single device's wide and pale below the packages', and their difference."""
    top, middle, low = 40, 330, 420
    high, least = max(plain), min(plain)
    apart = [abs(a - b) for a, b in zip(losses, plain, strict=True)]
    most = max(apart) or 1.0

    def across(step: float) -> float:
        return LEFT + (WIDTH - LEFT - GAP) * step / len(losses)

    def curve(values: list[float], bottom: int, up: int, low_value: float, high_value: float) -> str:
        scale = (bottom - up) / (high_value - low_value)
        return " ".join(f"{across(i + 1):.1f},{bottom - (v - low_value) * scale:.1f}" for i, v in enumerate(values))

    def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{words}</text>'

    marks = [text(across(step), low + 20, str(step)) for step in range(0, len(losses) + 1, 50)]
    for value in range(int(least) + 1, int(high) + 1):
        y = middle - (value - least) * (middle - top) / (high - least)
        marks.append(text(LEFT - 10, y + 4, str(value), "end"))
        marks.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - GAP}" stroke="#ddd"/>')
    cut = across(resumed)
    body = [
        *marks,
        f'<path d="M{cut:.1f} {top}V{low}" stroke="#888" stroke-dasharray="4 4"/>',
        text(cut - 8, top + 14, f"partc, {FIRST}", "end"),
        text(cut + 8, top + 14, f"partc, {SECOND}", "start"),
        f'<polyline points="{curve(plain, middle, top, least, high)}" stroke="#f4b183" stroke-width="6"/>',
        f'<polyline points="{curve(losses, middle, top, least, high)}" stroke="#1f4e79" stroke-width="1.5"/>',
        text(LEFT, 24, "loss (nats a byte): one device in orange, the package in blue", "start"),
        f'<polyline points="{curve(apart, low, 360, 0.0, most)}" stroke="#1f4e79"/>',
        f'<path d="M{LEFT} {low}H{WIDTH - GAP}" stroke="#888"/>',
        text(LEFT, 352, f"their difference, at most {most:.1e}", "start"),
        text(WIDTH - GAP, low + 36, "step", "end"),
    ]
    style = "text{font:13px sans-serif;fill:#333}polyline{fill:none;stroke-linejoin:round}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
    return "\n".join(
        [head, f"<style>{style}</style>", '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>\n"]
    )


if __name__ == "__main__":
    sys.exit(main())
