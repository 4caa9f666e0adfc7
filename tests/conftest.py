"""The conditions of every test: one thread per process, as local ranks have; kept traces; no skip without a known reason."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Machines differ in speed, so examples have no deadline; every run of the suite draws the same ones.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read while Triton is imported: kernels are interpreted, unless tests.gpu runs them. What builds them is another process.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["PARTC_CACHE"] = ""  # tests of tests.kept keep traces; those of the cache name a folder
gc.set_threshold(100_000, 20, 10)  # compiles keep most of what they allocate: rare searches save an eighth of the time
for name in ("PARTC_DEBUG", "PARTC_FUEL", "PARTC_DISABLE"):
    os.environ.pop(name, None)


@pytest.fixture(scope="session", autouse=True)
def _quick_starts(request: pytest.FixtureRequest) -> Iterator[None]:
    from tests.kept import keep
    from tests.prefork import quick_starts

    keep()
    server = quick_starts()
    request.config.stash[FORKED] = lambda: server.processor_seconds
    yield
    server.close()


FORKED = pytest.StashKey[Callable[[], float]]()
BEGAN = pytest.StashKey[float]()


def _spent(config: pytest.Config) -> float:
    """Processor seconds of this process, of its children that have ended, and of what the server has forked."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system + config.stash.get(FORKED, lambda: 0.0)()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[BEGAN] = _spent(item.config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    yield
    item.user_properties.append(("processor_seconds", round(_spent(item.config) - item.stash[BEGAN], 3)))


class ProcessorTimes:
    """With PROCESSOR_TIMES=FILE, the processor seconds of every test as lines of JSON, which unlike their durations does not depend on what else the machine does."""

    def __init__(self, file: Path) -> None:
        self.file = file
        file.write_text("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            found = dict(report.user_properties).get("processor_seconds", 0.0)
            with self.file.open("a") as out:
                out.write(json.dumps([report.nodeid, found]) + "\n")


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _spaced() -> bool:
    import torch

    return " " in torch.__file__


# Reasons to skip a test, and where each holds. Every other skip makes the run fail: a test that nobody runs proves nothing.
SKIPS = {
    r"needs a CUDA device|no CUDA device|takes a GPU": lambda: not _cuda() or os.environ["TRITON_INTERPRET"] == "1",
    r"of machines without GPUs": _cuda,
    r"virtual ranks have no GPU": lambda: os.environ["TRITON_INTERPRET"] != "1",
    r"torch's compiler links nothing from a path with a space": _spaced,
    r"no network namespaces: .*(no command|permitted|denied|not supported|[Uu]nknown)": lambda: True,
    r"not a git checkout": lambda: not (Path(__file__).parents[1] / ".git").exists(),
    r"the kernel's tables are Linux's": lambda: platform.system() != "Linux",
    r"root may write anywhere": lambda: os.geteuid() == 0,
    r"chromium is not installed": lambda: shutil.which("chromium") is None,
    r"could not import 'tensorboard": lambda: importlib.util.find_spec("tensorboard") is None,
    r"no file of a tebibyte here": lambda: True,
    r"Hugging Face's datasets is not installed": lambda: importlib.util.find_spec("datasets") is None,
}


class Skips:
    """Collects the skips that no entry of SKIPS explains; the run fails where there are any."""

    def __init__(self) -> None:
        self.unexpected: list[str] = []

    def _look(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(re.search(known, reason) and holds() for known, holds in SKIPS.items()):
            self.unexpected.append(f"{report.nodeid}: {reason}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._look(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unexpected and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.unexpected:
            terminalreporter.section("skipped without a known reason (SKIPS in tests/conftest.py)", red=True)
            for line in self.unexpected:
                terminalreporter.line(line)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All cases of a sampled test but the first are slow."""
    seen: set[str] = set()
    for item in items:
        if item.get_closest_marker("sampled") is not None and not item.get_closest_marker("slow"):
            function = item.nodeid.partition("[")[0]
            if function in seen:
                item.add_marker("slow")
            seen.add(function)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the process that hears of all tests
        config.pluginmanager.register(Skips(), "skips")
        if "PROCESSOR_TIMES" in os.environ:
            config.pluginmanager.register(ProcessorTimes(Path(os.environ["PROCESSOR_TIMES"])), "processor-times")
