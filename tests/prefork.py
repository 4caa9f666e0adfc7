"""Processes that start with torch imported, since the import takes most of a short run's time.

A server imports it once, and forks for every command: `python FILE ...` or `python -m MODULE ...`, in the environment
and the folder that are given, as a new interpreter would run it. Of partc and packages it has no module in memory; the
files of the runtime, which every package has a copy of, are compiled. A second server, for commands of partc alone, has
partc's modules as well.
"""

from __future__ import annotations

import _imp
import contextlib
import gc
import inspect
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
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "safetensors.torch",
    "transformers.modeling_utils",
    "pytest",  # test files that define models import it
)
REFERENCE = "partc.package.reference"
OF_PARTC = ("partc.api", "partc.frontend.trace", REFERENCE)
RUNTIME = Path(__file__).parents[1] / "partc" / "runtime"


def quick_starts() -> Server:
    """From here on `verify` starts the single-device model and all ranks from such a server."""
    from partc.package import launch

    server = shared()

    def start(command: list[str], output: Path, variables: Mapping[str, str]) -> Forked | Ranks:
        environment = {**launch.local_environment(), **variables}
        if "--nproc-per-node" in command:  # torchrun's, before the script and its arguments
            place = command.index("--nproc-per-node") + 1
            return server.ranks(int(command[place]), command[place + 1 :], output, environment)
        return server.start(command[1:], output, environment)

    launch.started = start  # type: ignore[assignment]
    return server


def shared() -> Server:
    """The server of this process of tests."""
    return _SERVER


def done(
    command: Sequence[object], environment: Mapping[str, str] | None = None, *, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """A Python command's end; all that it said counts as said to stderr."""
    words = [str(word) for word in command]
    with tempfile.TemporaryDirectory(prefix="partc-done-") as folder:
        output = Path(folder) / "output"
        code = shared().start(words, output, os.environ if environment is None else environment, cwd).wait()
        return subprocess.CompletedProcess(words, code, "", output.read_text())


class Server:
    """One that is started with the first command, and ends when whoever made it does."""

    def __init__(self) -> None:
        self.processor_seconds = 0.0  # of all commands that have ended; 0 once the server has ended
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._place = ""

    def start(
        self, command: Sequence[str], output: Path, environment: Mapping[str, str], cwd: Path | None = None
    ) -> Forked:
        """Run a Python command whose words follow the interpreter's; what it says goes into a file."""
        if self._process is None:
            self._folder = tempfile.TemporaryDirectory(prefix="partc-prefork-")
            self._place = str(Path(self._folder.name) / "socket")
            server = [sys.executable, __file__, self._place]
            self._process = subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert self._process.stdout is not None
            assert [self._process.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2
        connection = socket.socket(socket.AF_UNIX)
        own = command[0] == "-m" and command[1].partition(".")[0] == "partc"
        connection.connect(_of_partc(self._place) if own else self._place)
        job = {
            "command": list(command),
            "output": str(output),
            "cwd": str(cwd or Path.cwd()),
            "environment": dict(environment),
        }
        connection.sendall(json.dumps(job).encode() + b"\n")
        return Forked(connection, self._add)

    def ranks(self, size: int, command: Sequence[str], output: Path, environment: Mapping[str, str]) -> Ranks:
        """Run a command as every rank of a job, with the variables that torchrun sets."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        outputs = [output.with_name(f"{output.name}.{rank}") for rank in range(size)]
        running = []
        for rank, path in enumerate(outputs):
            own = {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
            running.append(self.start(command, path, {**environment, **own}))
        return Ranks(running, outputs, output)

    def _add(self, seconds: float) -> None:
        self.processor_seconds += seconds

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()
            self.processor_seconds = 0.0  # the system now counts all of them with those of the server
        if self._folder is not None:
            self._folder.cleanup()


_SERVER = Server()  # not a function's cache: compiles clear those that a model's module holds


class Forked:
    """A running command, as subprocess.Popen shows one."""

    def __init__(self, connection: socket.socket, ended: Callable[[float], None]) -> None:
        self._ended = ended
        self._answers = connection.makefile("r")
        connection.close()
        self._pid = int(self._answers.readline())
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            code, _, spent = self._answers.readline().partition(" ")
            self.returncode = int(code)
            self._ended(float(spent))
            self._answers.close()
        return self.returncode

    def terminate(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)


class Ranks:
    """The running ranks of a job, as one process; its exit code is the first that is not 0."""

    def __init__(self, running: Sequence[Forked], outputs: Sequence[Path], output: Path) -> None:
        self._running, self._outputs, self._output = running, outputs, output

    @property
    def returncode(self) -> int | None:
        codes = [rank.returncode for rank in self._running]
        return None if None in codes else next(filter(None, codes), 0)

    def wait(self) -> int:
        codes = [rank.wait() for rank in self._running]
        self._output.write_bytes(b"".join(path.read_bytes() for path in self._outputs))
        return next(filter(None, codes), 0)

    def terminate(self) -> None:
        for rank in self._running:
            rank.terminate()


def _of_partc(place: str) -> str:
    """The socket of the second server."""
    return f"{place}-partc"


def both(place: str) -> NoReturn:
    """Run both servers; the second one is a fork of the first."""
    _preload(PRELOADED)
    _compile_once()
    second = os.fork()
    if second:
        serve(place, second)
    sys.path.insert(0, str(RUNTIME.parents[1]))
    _preload(OF_PARTC)
    sys.path.pop(0)
    sys.modules.pop(REFERENCE, None)  # commands run it as their main module
    serve(_of_partc(place))


def _preload(names: Sequence[str]) -> None:
    for name in names:
        with contextlib.suppress(ImportError):
            __import__(name)


def serve(place: str, second: int | None = None) -> NoReturn:
    """Fork a process for the command of every connection, and answer there with its end.

    The server ends when its input does, and after the `second` one, whose time then counts with its own.
    """
    _note_files_of_modules()
    gc.collect()
    gc.freeze()  # children search what they allocate alone
    ended, wakes = socket.socketpair()
    for each in (ended, wakes):
        each.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # wakes the server
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen(64)
    print("ready", flush=True)
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([listener, ended, sys.stdin], [], [])
        if sys.stdin in ready:
            if second is not None:
                os.waitpid(second, 0)
            sys.exit()
        if ended in ready:
            ended.recv(1024)
            _answer_ends(running)
        if listener in ready:
            connection, _ = listener.accept()
            with connection.makefile("r") as lines:
                line = lines.readline()
            if not line:  # a client that ended
                connection.close()
                continue
            job = json.loads(line)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (listener, ended, wakes, connection, *running.values()):
                    other.close()
                os._exit(run_command(job))
            running[pid] = connection
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(f"{pid}\n".encode())


def _answer_ends(running: dict[int, socket.socket]) -> None:
    """Tell the connections of commands that have ended their exit code and processor seconds."""
    while running:
        pid, status, used = os.wait4(-1, os.WNOHANG)
        if pid == 0:
            return
        with running.pop(pid) as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            spent = used.ru_utime + used.ru_stime
            connection.sendall(f"{os.waitstatus_to_exitcode(status)} {spent}\n".encode())


def _note_files_of_modules() -> None:
    """Fill the table of files and modules that `inspect` keeps. Filling it takes a tenth of a second.

    Custom operations of the runtime look up the module of their code. Looking up a file of no module fills the table.
    """
    inspect.getmodule(compile("", "no module's", "exec"))


def _compile_once() -> None:
    """From here on in children, imports take the runtime's code by the text of its files, wherever copies lie."""
    compiled = {path.read_bytes(): compile(path.read_bytes(), path, "exec") for path in RUNTIME.rglob("*.py")}
    usual = SourceFileLoader.source_to_code

    def found(loader: SourceFileLoader, data: Any, path: Any, **how: Any) -> Any:
        code = compiled.pop(data, None)
        if code is None:
            return usual(loader, data, path, **how)
        _imp._fix_co_filename(code, str(path))  # as importlib does with a file of bytecode
        return code

    SourceFileLoader.source_to_code = found  # type: ignore[method-assign, assignment]


def run_command(job: Mapping[str, Any]) -> int:
    """The command; returns its exit code."""
    with open(job["output"], "wb", buffering=0) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["cwd"])
    first, *rest = job["command"]
    searched = [path for path in job["environment"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [job["cwd"] if first == "-m" else str(Path(first).parent), *searched]
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
    del sys.path[0]  # this folder, in which preloaded modules would find `kernels`
    both(sys.argv[1])
