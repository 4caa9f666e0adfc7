"""The configuration of each kernel: the fastest on this GPU, timed once and kept in a file.

    {"NVIDIA H200, Triton 3.7.1": {"silu_mul 1f0c88a2": {"BLOCK": 2048, "num_warps": 8}}}

A kernel is identified by its name and a digest of its source. The first rank times the candidates, before other memory
is allocated, and all ranks use its choices: the last bits of some kernels' results depend on the configuration, and
copies of parameters must stay equal.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..checkpoint.restore import Say
from ..documents import Malformed, contents, decoded, parsed
from ..errors import UsageError
from ..processes.agreement import Together
from ..whole_files import write_whole

FILE = "tuned.json"  # in the package's folder of kernels
BETTER = 0.98  # a candidate is chosen only below this share of the default configuration's time
RUNS, WARM = 20, 3
FLUSHED = 256 << 20  # bytes, more than the caches' size, so that each timed run reads its operands from memory
OPTIONS = ("num_warps", "num_stages")
MOST_OPTION = 32
_WRONG = "wrong: "  # prefix of an error's cause, sent in place of choices

Configuration = Mapping[str, int]
Choices = dict[str, dict[str, int]]  # kernel -> configuration
Table = dict[str, Choices]  # "GPU, version of Triton" -> choices, as in files


@dataclass(frozen=True, slots=True)
class TunableKernel:
    """A module of the package's kernels."""

    name: str
    module: ModuleType

    @property
    def candidates(self) -> Sequence[Configuration]:
        """All candidates; the first is the default."""
        found: Sequence[Configuration] = self.module.CANDIDATES
        return found

    @property
    def key(self) -> str:
        assert self.module.__file__ is not None
        return f"{self.name} {hashlib.sha256(Path(self.module.__file__).read_bytes()).hexdigest()[:8]}"

    def allows(self, choice: object) -> bool:
        """Whether the configuration is valid: with values that some candidate has; Triton's own options may have
        others.
        """
        if not isinstance(choice, dict) or not set(self.candidates[0]) <= {*choice, *OPTIONS}:
            return False
        return all(type(value) is int and self._allows(key, value) for key, value in choice.items())

    def _allows(self, key: str, value: int) -> bool:
        if key in OPTIONS:
            return 1 <= value <= MOST_OPTION and (key != "num_warps" or value.bit_count() == 1)
        return any(each.get(key) == value for each in self.candidates)

    def run_with(self, choice: Configuration) -> None:
        self.module.CONFIGURATION.update(choice)


def configure_kernels(
    package: ModuleType, folder: Path, device: torch.device, together: Together, *, file: Path | None, say: Say
) -> None:
    """Configure the kernels in `folder` by a user's `file`, or by timing them here. All ranks must call this.

    Raises UsageError P0532.
    """
    kernels = kernels_of(package)
    text = ""
    if together.rank == 0:
        place = gpu_and_triton(device)
        try:
            if file is not None:
                text = json.dumps(from_given(kernels, file, place, say))
            else:
                text = json.dumps(tuned_choices(kernels, folder / FILE, place, Clocked(device), say))
        except UsageError as error:
            text = f"{_WRONG}{error.cause}"
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    text = together.broadcast(text)
    if text.startswith(_WRONG):
        raise _unusable(text.removeprefix(_WRONG))
    run_with(kernels, json.loads(text))


def kernels_of(package: ModuleType) -> tuple[TunableKernel, ...]:
    """The kernels of a package that have candidates."""
    names = sorted(package.__all__)
    modules = ((name, importlib.import_module(f"{package.__name__}.{name}")) for name in names)
    return tuple(TunableKernel(name, module) for name, module in modules if hasattr(module, "CANDIDATES"))


def fastest(candidates: Sequence[Configuration], seconds: Callable[[Configuration], float]) -> dict[str, int]:
    """The fastest candidate, or the first one unless another is clearly faster. NaN marks a candidate that cannot
    run.
    """
    times = [seconds(each) for each in candidates]
    own = times[0] if times[0] == times[0] else math.inf
    best = min(range(len(times)), key=lambda index: times[index] if times[index] == times[index] else math.inf)
    return dict(candidates[best] if times[best] < BETTER * own else candidates[0])


def tuned_choices(
    kernels: Sequence[TunableKernel],
    file: Path,
    place: str,
    seconds: Callable[[TunableKernel, Configuration], float],
    say: Say,
) -> Choices:
    """A choice for every kernel: from the file for this `place` (GPU and version of Triton), or a new one.

    New choices are added to the file. Entries that cannot be read or do not fit are reported and chosen again.
    """
    table = _read(file, say)
    there = table.get(place)
    known = there if isinstance(there, dict) else {}
    choices = {kernel.name: known[kernel.key] for kernel in kernels if kernel.allows(known.get(kernel.key))}
    damaged = [kernel.name for kernel in kernels if kernel.key in known and kernel.name not in choices]
    if damaged or there not in (None, known):
        say(f"{file} has choices that do not fit {', '.join(damaged) or place}: these are made again")
    new = [kernel for kernel in kernels if kernel.name not in choices]
    if not new:
        return choices
    if any(len(kernel.candidates) > 1 for kernel in new):
        say(f"timing configurations of {len(new)} kernels for {place}, this once: {file} will have the fastest")
    for kernel in new:
        choices[kernel.name] = fastest(kernel.candidates, lambda each, kernel=kernel: seconds(kernel, each))  # type: ignore[misc]
    write_choices(file, place, {kernel.key: choices[kernel.name] for kernel in new}, say)
    return choices


def read_table(file: Path) -> Table:
    """The table in a user's file, in the format of `tuned_choices`; digests are optional. Raises UsageError P0532."""
    try:
        return decoded(Table, parsed(contents(file)))
    except Malformed as error:
        raise _unusable(f"{file} {error}") from None


def from_given(kernels: Sequence[TunableKernel], file: Path, place: str, say: Say) -> Choices:
    """A user's choices; kernels that are not in the file keep their defaults. Raises UsageError P0532."""
    table = read_table(file)
    if place not in table:
        say(f"{file} has nothing for {place}: kernels keep their own configurations")
    here = table.get(place, {})
    choices = {}
    for kernel in kernels:
        found = here.get(kernel.key, here.get(kernel.name))
        if found is None:
            continue
        if not kernel.allows(found):
            raise _unusable(f"{file} has {json.dumps(found)} for {kernel.name}, which cannot run so")
        choices[kernel.name] = dict(found)
    return choices


def run_with(kernels: Sequence[TunableKernel], choices: Mapping[str, Configuration]) -> None:
    """Use these configurations from now on."""
    for kernel in kernels:
        if kernel.name in choices:
            kernel.run_with(choices[kernel.name])


def gpu_and_triton(device: torch.device) -> str:
    """`NVIDIA H200, Triton 3.7.1`."""
    return f"{torch.cuda.get_device_name(device)}, Triton {sys.modules['triton'].__version__}"


class Clocked:
    """Measures the seconds of a launch on a GPU: the median of several, with operands in memory rather than in
    caches.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flushed = torch.empty(FLUSHED, dtype=torch.uint8, device=device)
        self._trial: tuple[str, Callable[[], object]] | None = None

    def __call__(self, kernel: TunableKernel, choice: Configuration) -> float:
        kernel.run_with(choice)
        reload_kernels(kernel.module)
        try:
            if self._trial is None or self._trial[0] != kernel.name:
                self._trial = None  # releases the previous trial's memory first
                self._trial = kernel.name, kernel.module.trial(self._device)
            launch = self._trial[1]
            for _ in range(WARM):
                launch()
            if spills(kernel.module):
                return math.nan
            return statistics.median(self._seconds(launch) for _ in range(RUNS))
        except Exception:  # the GPU lacks some resource; training reports it if this is the chosen configuration
            return math.nan
        finally:
            kernel.run_with(kernel.candidates[0])

    def _seconds(self, launch: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flushed.zero_()
        start.record()
        launch()
        end.record()
        end.synchronize()
        return 1e-3 * float(start.elapsed_time(end))


def reload_kernels(module: ModuleType) -> None:
    """Make Triton load a module's kernels again, from its disk cache or by compiling them."""
    for function in _compiled(module):
        function.device_caches.clear()


def spills(module: ModuleType) -> int:
    """The number of spilled registers of a module's kernels, as the driver reports it."""
    return sum(
        kernel.n_spills
        for function in _compiled(module)
        for known, *_ in function.device_caches.values()
        for kernel in known.values()
    )


def _compiled(module: ModuleType) -> list[Any]:
    return [item for item in vars(module).values() if hasattr(item, "device_caches")]


def _read(file: Path, say: Say) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        return decoded(dict[str, Any], parsed(contents(file)))
    except Malformed as error:
        say(f"{file} is left aside: it {error}")
        return {}


def write_choices(file: Path, place: str, new: Mapping[str, Configuration], say: Say) -> None:
    """Merge new choices into the file, since another run may have added others meanwhile."""
    table = _read(file, lambda line: None)
    there = table.get(place)
    table[place] = {**(there if isinstance(there, dict) else {}), **new}
    try:
        write_whole(file, json.dumps(table, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        say(f"{file} cannot be written, and the next run will time kernels again: {error.strerror}")


def _unusable(cause: str) -> UsageError:
    help = "leave out --tuned, and kernels are timed; kernels/tuned.json of a package that has run shows the form"
    return UsageError("P0532", cause, help, alike=True)
