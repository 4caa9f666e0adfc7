"""Packages of many models and meshes on one GPU, against the single-device model on the CPU.

Ranks share the GPU as threads of one process, so every kernel, layout and buffer of a rank is tried on a device that
has neither NCCL nor peers.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.commands import PARTC, ROOT, TOLD, environment
from tests.gpu.results import Deadline, Results
from tests.zoo import MODELS

PLACES = 10  # cases at a time; each is one process after another, or two that wait for each other


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and the options that `partc compile` takes after it."""

    model: str  # a file, or a model of tests/zoo.py
    options: str


GPT = (
    "--mesh 1", "--mesh dp=4 --zero 3", "--mesh tp=2", "--mesh pp=2 --microbatches 4 --schedule zbv",
    "--mesh cp=2,tp=2 --seq 32", "--mesh 2x2x2 --microbatches 4 --zero 1", "--mesh dp=4 --nodes 2 --zero 2",
    "--mesh tp=2 --recompute selective", "--mesh dp=2 --recompute full --loss-chunks 4",
    "--mesh dp=2 --compress-grads int8", "--mesh 1 --optimizer adafactor",
)  # fmt: skip
EXPERTS = ("--mesh 1", "--mesh dp=2 --experts ep=2@dp", "--mesh dp=2,tp=2 --experts ep=4@dp,tp")
DROPS = ("--mesh 1", "--mesh dp=2,tp=2")


def cases() -> Iterator[Case]:
    """The most common cases come first, since time may run out."""
    for precision in ("fp64", "bf16"):
        yield from (Case("examples/gpt.py", f"{options} --precision {precision}") for options in GPT)
        yield from (Case("tests/models/moe.py", f"{options} --precision {precision}") for options in EXPERTS)
        yield from (Case("tests/models/noisy.py", f"{options} --precision {precision}") for options in DROPS)
    yield from (Case(name, "--mesh dp=2,tp=2 --precision fp64") for name in MODELS)
    for folder in ("models", "independent/models"):
        files = sorted(path for path in (ROOT / "tests" / folder).glob("*.py") if not path.name.startswith("_"))
        yield from (Case(str(path.relative_to(ROOT)), "--mesh dp=2 --precision fp64") for path in files)


def table(results: Results, deadline: Deadline, only: tuple[str, ...]) -> bool:
    """Whether all packages are equal to their models, or refused by the compiler."""
    results.table("Packages of many ranks on one GPU, in one process", "model", "options", "result")
    wanted = [case for case in cases() if not only or any(text in f"{case.model} {case.options}" for text in only)]
    found: dict[str, int] = {}
    with ThreadPoolExecutor(PLACES) as pool:
        runs = {pool.submit(compared, case, deadline): case for case in wanted}
        for run in as_completed(runs):
            case, said = runs[run], run.result()
            kind = said.split()[0]
            found[kind] = found.get(kind, 0) + 1
            if kind != "late":
                results.row(case.model, case.options, said)
    results.say("\n" + ", ".join(f"{count} {kind}" for kind, count in sorted(found.items())))
    return not found.get("failed", 0)


def compared(case: Case, deadline: Deadline) -> str:
    """'equal', 'refused' with the code, 'failed' with the cause, or 'late' where no time was left."""
    with tempfile.TemporaryDirectory(prefix="partc-gpu-") as name:
        folder = Path(name)
        source, own = case.model, ""
        if not case.model.endswith(".py"):
            entry = MODELS[case.model]
            source, own = entry.source(folder), "".join(map(option, entry.options.items()))
        compiled = _run(
            [*PARTC, "compile", source, *f"{case.options}{own} --kernels triton".split(), "-o", name + "/build"],
            deadline,
        )
        if compiled is None:
            return "late"
        if compiled.returncode == 2:
            return f"refused {code(compiled.stdout)}"
        if compiled.returncode:
            return failed("compile", compiled.stdout)
        verified = _run([*PARTC, "verify", name + "/build", "--virtual", "--", "--device", "cuda"], deadline)
        if verified is None:
            return "late"
        return failed("verify", verified.stdout) if verified.returncode else "equal"


def _run(command: Sequence[str], deadline: Deadline) -> subprocess.CompletedProcess[str] | None:
    if deadline.left <= 0:
        return None
    try:
        return subprocess.run(
            command,
            cwd=ROOT,
            env=environment(PARTC_CACHE=""),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=deadline.left,
        )
    except subprocess.TimeoutExpired:
        return None


def option(item: tuple[str, object]) -> str:
    key, value = item
    return f" --{key} {value}" if key in ("batch", "seq") else f" -D {key}={value}"


def code(said: str) -> str:
    found = re.search(r"P\d{4}", said)
    return found.group() if found else said.strip().splitlines()[-1][:80]


def failed(what: str, said: str) -> str:
    """The cause in a cell; all of its output goes to the screen."""
    print(f"\n{what} said:\n{said[-TOLD:]}", flush=True)
    lines = [line.strip() for line in said.strip().splitlines() if "rror" in line or "differ" in line]
    return f"failed {what}: {(lines or ['no word'])[-1][:160]}".replace("|", "/")
