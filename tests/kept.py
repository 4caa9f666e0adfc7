"""Traces and derivatives that are made once in a process of tests, however often a model is compiled there.

Most of the time to compile is PyTorch's, for the trace of a model and of its regions' backward passes. Both are pure
functions: of a model file's text, options and precision, and of a region. Only files of this repository and
configurations are kept, under their text; modules and functions that a test defines are always traced again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from partc.frontend import origin
from partc.frontend.captured_program import ONE_BATCH
from partc.frontend.model_files.huggingface import PREFIX, is_configuration
from partc.frontend.trace import Traced
from partc.passes import differentiate as derivatives

ROOT = Path(__file__).parents[1]


def keep() -> None:
    """From here on in this process."""
    origin.trace_file = _kept_traces(origin.trace_file)
    derivatives.differentiate_region = _kept_derivatives(derivatives.differentiate_region)


def _kept_traces(trace: Callable[..., Traced]) -> Callable[..., Traced]:
    kept: dict[Hashable, Traced] = {}

    def found(
        path: Path,
        options: Mapping[str, str],
        *,
        mesh: Any,
        batches: Any = ONE_BATCH,
        precision: str,
        purpose: str = "loss",
    ) -> Traced:
        how = batches if batches.separate else None
        key = (str(path), _text(path), tuple(sorted(options.items())), how, precision, purpose)
        anew = lambda: trace(path, options, mesh=mesh, batches=batches, precision=precision, purpose=purpose)  # noqa: E731
        if key[1] is None:
            return anew()
        if key not in kept:
            kept[key] = anew()
        program = replace(kept[key].program, mesh=mesh, microbatches=batches.microbatches)
        return replace(kept[key], program=program)

    return found


def _text(path: Path) -> str | None:
    """The text that a trace depends on; None where it may depend on more."""
    file = Path(str(path).removeprefix(PREFIX))
    try:
        if is_configuration(path) or path.resolve().is_relative_to(ROOT):
            return file.read_text(encoding="utf-8")
    except (OSError, RuntimeError, ValueError):  # what is wrong with the file is the compiler's to say
        pass
    return None


def _kept_derivatives(differentiate: Callable[..., Any]) -> Callable[..., Any]:
    kept: dict[Hashable, Any] = {}

    def found(region: Any, inputs: frozenset[str], params: frozenset[str], sizes: Mapping[str, int]) -> Any:
        key = (region, inputs, params, tuple(sorted(sizes.items())))
        if key not in kept:
            kept[key] = differentiate(region, inputs, params, sizes)
        return kept[key]

    return found
