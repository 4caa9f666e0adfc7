"""Where a model comes from: a model file, or Python objects; and the model file that its package gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partc.mesh import Mesh
from partc.program import Program
from partc.trace import trace_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A traced program, the text of its package's model.py with the options to call it with, and what that reads."""

    program: Program
    source: str
    options: Mapping[str, Any]
    extra: Mapping[str, bytes] = field(default_factory=dict)


def trace(
    model: Any,
    batch: Any,
    loss: Callable[..., Any] | None,
    *,
    options: Mapping[str, Any],
    mesh: Mesh,
    microbatches: int,
    precision: str,
) -> Origin:
    """Trace whatever `partc.compile` takes."""
    text = {name: str(value) for name, value in options.items()}
    traced = trace_file(Path(model), text, mesh=mesh, microbatches=microbatches, precision=precision)
    return Origin(program=traced.program, source=traced.model_source, options=traced.options)
