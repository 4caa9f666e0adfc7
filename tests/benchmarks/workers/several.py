"""A rank of several packages, one after the other: `torchrun ... several.py LIST.json`, with torch imported once.

LIST.json has [package, metrics, steps] for each run. A run is a fork of this process, and its ranks meet at a port of
their own, behind MASTER_PORT. A run that fails leaves no complete metrics, and the next one begins. Other sessions of
the machine wait while this one computes, where Linux schedules by session and the user may say so.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from contextlib import suppress
from pathlib import Path

import torch  # noqa: F401  every fork has it

SESSION = Path("/proc/self/autogroup")


def main() -> None:
    with suppress(OSError):
        SESSION.write_text("-19")
    port = int(os.environ["MASTER_PORT"])
    for number, (package, metrics, steps) in enumerate(json.loads(Path(sys.argv[1]).read_text()), 1):
        process = os.fork()
        if process == 0:
            os.environ["MASTER_PORT"] = str(port + number)
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
            os.environ.pop("TORCHELASTIC_RUN_ID", None)
            sys.argv = [f"{package}/train.py", "--steps", str(steps), "--metrics", metrics, "--timeout", "60"]
            sys.path[0] = package
            runpy.run_path(sys.argv[0], run_name="__main__")
            os._exit(0)
        _, status = os.waitpid(process, 0)
        print(f"{package}: {os.waitstatus_to_exitcode(status)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
