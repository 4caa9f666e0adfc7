"""The zoo: architectures of model libraries at tiny sizes, compiled and verified. `make zoo` runs it.

Every architecture and mesh is one process with limits of time and memory. A row ends as one of these:

    ok       loss, gradients and parameters equal the single-device model's in fp64
    refused  a PartcError with its code, before anything runs
    wrong    a difference above 1e-10
    crash    another exception
    slow     no answer within the limits of processor time and memory
    no model the library itself cannot build or train the model here

Rows are added to a file as they come; a second run does the rows that the file lacks.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import math
import os
import resource
import signal
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import architectures  # noqa: E402

import partc.package.verify  # noqa: E402
from partc.api import Compilation, compilation, package  # noqa: E402
from partc.compilation.options import Options  # noqa: E402
from partc.errors import PartcError  # noqa: E402
from partc.ir.program import Program  # noqa: E402
from partc.package.launch import local_environment  # noqa: E402
from partc.package.verify import verify  # noqa: E402
from partc.rules import PARTIAL, flops, resolve  # noqa: E402
from tests.prefork import run_command  # noqa: E402

MESHES = ("dp=2,tp=2", "pp=2,tp=2")
ROTATED = (*MESHES, "pp=2,dp=2 zero=1", "cp=2,tp=2", "tp=3", "dp=2 zero=3")
PRELOADED = (
    "torchvision.transforms", "transformers.modeling_utils", "transformers.models.auto.modeling_auto",
    "timm.models", "diffusers.models.modeling_utils",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The outcome of one architecture on one mesh."""

    name: str
    library: str
    mesh: str
    outcome: str
    detail: str = ""  # the refusal, the exception, or the worst error
    compile_s: float = 0.0
    total_s: float = 0.0
    cut: float = 0.0  # the share of flops that tp cuts
    uncovered: str = ""  # operations without a rule


def cut_share(program: Program) -> float:
    """The share of the flops of matrix products whose factors tp cuts. `program` is the result of annotate."""
    whole = cut = 0
    for region in program.regions:
        types = region.types(region.forward)
        calls = sum(call.region == region.name for call in program.calls)
        for op in region.forward.ops:
            rule = resolve(op, types) if op.results and region.phase != "setup" else None
            work = calls * flops(op, rule) if rule is not None else 0
            whole += work
            if any(c.axis == "tp" and c.factor and not c.factor.startswith(PARTIAL) for c in op.choices):
                cut += work
    return cut / whole if whole else 0.0


def options(mesh: str) -> Options:
    """The options of a mesh, with its level of ZeRO after a space."""
    axes, _, zero = mesh.partition(" zero=")
    return Options.checked(
        mesh=axes, microbatches=2 if "pp=" in axes else 1, precision="fp64", schedule="1f1b", seed=0, shard=(),
        zero=zero or "0",
    )  # fmt: skip


def failure(text: str) -> str:
    """The outcome of a row that ends with this error."""
    return "slow" if "allocate memory" in text or "MemoryError" in text else "crash"


def trains(name: str) -> str:
    """Train the model one step without partc; returns the cause of a failure."""
    try:
        model = architectures.model(name)
        architectures.loss(model, architectures.batch(name)).backward()
    except Exception as error:  # whatever a library says of sizes that it does not take
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
    return ""


def proved(name: str, mesh: str, folder: Path) -> Row:
    """Compile, verify in fp64 on virtual ranks."""
    library = architectures.ARCHITECTURES[name].library
    start = processor_time()
    compiled = 0.0
    program: Program | None = None
    unruled = ""

    def row(outcome: str, detail: str) -> Row:
        return Row(
            name=name, library=library, mesh=mesh, outcome=outcome, detail=detail, compile_s=round(compiled, 1),
            total_s=round(processor_time() - start, 1), uncovered=unruled,
            cut=round(cut_share(program), 3) if program is not None else 0.0,
        )  # fmt: skip

    try:
        architectures.batch(name)
    except Exception as error:  # whatever a library says of sizes that it does not take
        return row("no model", f"{type(error).__name__}: {error}"[:600])
    try:
        done: Compilation = compilation(
            str(HERE / "architectures.py"), None, options(mesh), model_options={"name": name}
        )
        made = package(done)
        program, compiled = done.after("annotate"), processor_time() - start
        unruled = ", ".join(sorted({item.op for item in made.replicated_ops if not item.rule}))
        found = verify(made.write(folder / "build"), steps=1, virtual=True)
    except PartcError as error:
        if error.code.startswith("P05"):
            return row(failure(str(error)), f"{error.code} {error}"[-600:])
        if cause := trains(name):
            return row("no model", cause)
        return row("refused", f"{error.code} {error.source or ''}: {error.cause}")
    except Exception as error:  # every other exception is a fault of partc, which the table shows
        said = f"{type(error).__name__}: {error}"
        return row(failure(said), said[:600])
    return row("ok" if found.ok else "wrong", f"{found.worst.rel_err:.0e} {found.worst.kind} {found.worst.name}")


def processor_time() -> float:
    """Seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def limited(name: str, mesh: str, limit: int, memory: int) -> Row:
    """`proved` in a process of its own with `limit` seconds of processor time and `memory` GiB."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.close(read)
        silence()
        spent = math.ceil(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (spent + limit, spent + limit + 1))
        resource.setrlimit(resource.RLIMIT_DATA, (memory << 30, memory << 30))
        with tempfile.TemporaryDirectory(prefix="partc-zoo-") as folder:
            os.write(write, json.dumps(asdict(proved(name, mesh, Path(folder)))).encode())
        os._exit(0)
    os.close(write)
    previous = signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGXCPU))
    signal.alarm(20 * limit)
    with os.fdopen(read) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)
    if text:
        return Row(**json.loads(text))
    ended = -os.waitstatus_to_exitcode(status)
    outcome, detail = {
        signal.SIGXCPU: ("slow", f"over {limit} s"),
        signal.SIGKILL: ("slow", "killed for its memory"),
    }.get(ended, ("crash", f"process ended with {ended}"))
    library = architectures.ARCHITECTURES[name].library
    return Row(name=name, library=library, mesh=mesh, outcome=outcome, detail=detail, total_s=float(limit))


class Forked:
    """A Python command in a fork of this process, which has the libraries loaded; verify waits for it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    @classmethod
    def started(cls, command: list[str], output: Path, variables: Mapping[str, str]) -> Forked:
        pid = os.fork()
        if pid == 0:
            for cached in (held for held in gc.get_objects() if isinstance(held, functools._lru_cache_wrapper)):
                cached.cache_clear()  # tensors of the trace, which have no memory
            job = {"output": str(output), "environment": {**local_environment(), **variables}}
            os._exit(run_command({**job, "command": command[1:], "cwd": os.getcwd()}))
        return cls(pid)

    def wait(self) -> int:
        if self._pid:
            _, status = os.waitpid(self._pid, 0)
            self._pid, self._code = 0, os.waitstatus_to_exitcode(status)
        return self._code

    def terminate(self) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGTERM)
            self.wait()


def silence() -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)


def read(results: Path) -> dict[tuple[str, str], Row]:
    """The rows of a results file; of two for one architecture and mesh, the later."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    rows = (Row(**json.loads(line)) for line in lines)
    return {(row.name, row.mesh): row for row in rows}


def of_name(name: str, meshes: Sequence[str]) -> Sequence[str]:
    """The one mesh of an architecture where meshes rotate."""
    return [meshes[zlib.crc32(name.encode()) % len(meshes)]]


def report(rows: Sequence[Row]) -> Iterator[str]:
    """The table in Markdown: one line per architecture, a cell per mesh."""
    meshes = list(dict.fromkeys(row.mesh for row in rows))
    yield f"| architecture | library | {' | '.join(meshes)} | flops cut by tp | compile s |"
    yield f"|---|---|{'---|' * len(meshes)}---:|---:|"
    names = dict.fromkeys(row.name for row in rows)
    for name in names:
        found = {row.mesh: row for row in rows if row.name == name}
        cells = [f"{r.outcome} {r.detail.split(' ')[0] if r.outcome in ('ok', 'refused') else ''}".strip()
                 if (r := found.get(mesh)) else "" for mesh in meshes]  # fmt: skip
        some = next(iter(found.values()))
        cut = " / ".join(f"{row.cut:.0%}" for row in found.values())
        took = " / ".join(f"{row.compile_s:.1f}" for row in found.values())
        yield f"| {name} | {some.library} | {' | '.join(cells)} | {cut} | {took} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", help="architectures whose name matches this pattern; may be repeated"
    )
    parser.add_argument(
        "--derived", action="store_true", help="instead, the model types of transformers without a row of their own"
    )
    parser.add_argument("--heads", action="store_true", help="instead, the classes of transformers for each task")
    parser.add_argument("--mesh", action="append", help="instead of all; with ZeRO: 'dp=2 zero=3'")
    parser.add_argument("--rotate", action="store_true", help="every architecture on one of six meshes")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "build" / "zoo.jsonl", help="the rows, added as they come"
    )
    parser.add_argument("--again", action="append", default=[], help="outcomes to do once more, such as crash")
    parser.add_argument("--limit", type=int, default=60, help="seconds of processor time for a row")
    parser.add_argument("--memory", type=int, default=8, help="GiB of memory for a row")
    parser.add_argument("--part", default="0/1", help="1/3: the second third of the rows")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    given = parser.parse_args()
    meshes = given.mesh or list(ROTATED if given.rotate else MESHES)
    part, parts = map(int, given.part.split("/"))
    own = architectures.ARCHITECTURES.keys() - architectures.DERIVED.keys() - architectures.HEADS.keys()
    kinds = architectures.DERIVED if given.derived else architectures.HEADS if given.heads else own
    names = [
        n for n in architectures.ARCHITECTURES if n in kinds and any(fnmatchcase(n, p) for p in given.only or ["*"])
    ]
    chosen = [name for index, name in enumerate(names) if index % parts == part]
    wanted = [(name, mesh) for name in chosen for mesh in (of_name(name, meshes) if given.rotate else meshes)]
    known = read(given.results)
    todo = [key for key in wanted if key not in known or known[key].outcome in given.again or "all" in given.again]
    if todo:
        warnings.simplefilter("ignore")
        partc.package.verify.started = Forked.started
        for module in PRELOADED:
            with contextlib.suppress(ImportError):
                __import__(module)
        given.results.parent.mkdir(parents=True, exist_ok=True)
    for name, mesh in todo:
        row = known[name, mesh] = limited(name, mesh, given.limit, given.memory)
        with given.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        print(f"{row.outcome:8} {name:24} {mesh} {row.compile_s:5} {row.total_s:5} {row.cut:.0%} {row.uncovered} "
              f"{row.detail[:200] if row.outcome != 'ok' else row.detail[:5]}", flush=True)  # fmt: skip
    rows = [known[key] for key in wanted if key in known]
    if given.markdown:
        given.markdown.write_text("\n".join(report(rows)) + "\n", encoding="utf-8")
    counts = Counter(row.outcome for row in rows)
    print(f"{len({row.name for row in rows})} architectures, {len(rows)} rows: "
          + ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))  # fmt: skip
    return 1 if {"wrong", "crash", "slow", "no model"} & set(counts) else 0


if __name__ == "__main__":
    sys.exit(main())
