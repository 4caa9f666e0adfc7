"""One rank of a package whose collectives take as long as on a slow link: `slow.py PACKAGE REPORT STEPS BANDWIDTH`.

Steps take turns: without the link; with it, every collective waited for where it starts; with it, as emitted. The link
carries one thing at a time. It sleeps, so that it takes nothing from the processor. BANDWIDTH is in bytes a second; with
0 all steps are without it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

KINDS = ("free", "waited for", "overlapped")
RECEIVED = {  # bytes that a rank receives, from those of its operand and the ranks (Thakur et al. 2005, by rings)
    "all_reduce": lambda size, ranks: 2 * size * (ranks - 1) / ranks,
    "all_gather": lambda size, ranks: size * (ranks - 1),
    "reduce_scatter": lambda size, ranks: size * (ranks - 1) / ranks,
    "all_to_all": lambda size, ranks: size * (ranks - 1) / ranks,
}


def main(package: Path, report: Path, steps: int, bandwidth: float) -> int:
    sys.path.insert(0, str(package))
    from runtime.comm import comm
    from runtime.train import steps as training
    from runtime.train import train

    state: dict[str, Any] = {"step": -1, "free": 0.0, "bytes": 0.0, "kind": "free"}
    taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
    start_for_real, step_for_real = comm.Axis.start, training.run_step

    def start(self: Any, name: str, begin: Any, x: Any, *rest: Any) -> Any:
        going = start_for_real(self, name, begin, x, *rest)
        size = RECEIVED[name](x.nbytes, self.size)
        state["bytes"] += size
        if state["kind"] == "free":
            return going
        state["free"] = due = max(time.perf_counter(), state["free"]) + size / bandwidth

        def finish() -> Any:
            result = going.wait()
            time.sleep(max(0.0, due - time.perf_counter()))
            return result

        late = comm.Pending(finish)
        return late if state["kind"] == "overlapped" else comm.completed(late.wait())

    def step(stages: Any, here: Any, *args: Any, **named: Any) -> Any:
        state["step"] += 1
        kind = state["kind"] = KINDS[state["step"] % 3] if bandwidth else "free"
        here.barrier()
        began, state["bytes"] = time.perf_counter(), 0.0
        result = step_for_real(stages, here, *args, **named)
        here.barrier()
        if state["step"] > 2:  # the first of each kind is slower
            taken[kind].append(time.perf_counter() - began)
        state["moved"] = state["bytes"]
        state["kind"] = "free"
        return result

    comm.Axis.start, training.run_step = start, step
    code = train.main(["--steps", str(steps), "--optimizer", "sgd", "--lr", "1e-3"], package)
    report.write_text(json.dumps({"seconds": taken, "bytes": state["moved"]}))
    return int(code)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
