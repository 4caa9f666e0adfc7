"""Processes that begin with torch imported: most of what a short run of a package takes is that.

A server imports it once, and forks for every command: `python FILE ...` or `python -m MODULE ...`, in the environment
and the folder that are given, as a new interpreter would run it. Of partc and packages it has nothing in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = ("torch", "torch.distributed", "torch._dynamo", "safetensors.torch", "transformers.modeling_utils")


def quick_starts() -> Server:
    """From here on `verify` in one process starts its two from such a server; torchrun starts its own."""
    import partc.verify
    from partc.launch import local_environment

    plain, server = partc.verify._start, Server()

    def start(command: list[str], output: Path, variables: Mapping[str, str]) -> Any:
        if "--virtual" not in command and "partc.reference" not in command:
            return plain(command, output, variables)
        return server.start(command[1:], output, {**local_environment(), **variables})

    partc.verify._start = start
    return server


class Server:
    """One that is started with the first command, and ends when whoever made it does."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="partc-prefork-")
        self._place = str(Path(self._folder.name) / "socket")

    def start(self, command: Sequence[str], output: Path, environment: Mapping[str, str]) -> Forked:
        """Run a Python command whose words follow the interpreter's; what it says goes into a file."""
        if self._process is None:
            server = [sys.executable, __file__, self._place]
            self._process = subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert self._process.stdout is not None and self._process.stdout.readline() == b"ready\n"
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._place)
        job = {"command": list(command), "output": str(output), "cwd": os.getcwd(), "environment": dict(environment)}
        connection.sendall(json.dumps(job).encode() + b"\n")
        return Forked(connection)

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()
        self._folder.cleanup()


class Forked:
    """A running command, as subprocess.Popen shows one."""

    def __init__(self, connection: socket.socket) -> None:
        self._answers = connection.makefile("r")
        connection.close()
        self._pid = int(self._answers.readline())
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = int(self._answers.readline())
            self._answers.close()
        return self.returncode

    def terminate(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)


def serve(place: str) -> NoReturn:
    """Fork for every connection: a keeper that waits for the command, which is a process of its own."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            __import__(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen(64)
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            sys.exit()
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _keep(connection)
        connection.close()


def _keep(connection: socket.socket) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with connection.makefile("rw") as talk:
        job = json.loads(talk.readline())
        pid = os.fork()
        if pid == 0:
            connection.close()
            os._exit(_run(job))
        talk.write(f"{pid}\n")
        talk.flush()
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):
            talk.write(f"{os.waitstatus_to_exitcode(status)}\n")
            talk.flush()
    os._exit(0)


def _run(job: Mapping[str, Any]) -> int:
    """The command; returns its exit code."""
    with open(job["output"], "wb", buffering=0) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["cwd"])
    first, *rest = job["command"]
    searched = [path for path in job["environment"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[0:1] = [job["cwd"] if first == "-m" else str(Path(first).parent), *searched]
    try:
        if first == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [first, *rest]
            runpy.run_path(first, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    serve(sys.argv[1])
