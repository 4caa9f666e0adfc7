"""Compiles with different options share passes, and give the programs of separate compiles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from partc import passes
from partc.api import Compilation, compilation
from partc.compilation.lowering import UNPROVED
from partc.compilation.options import Options
from partc.ir.mesh import Mesh

EXAMPLES = Path(__file__).parents[2] / "examples"
BASE: dict[str, Any] = {
    "mesh": "pp=2,dp=2,tp=2",
    "microbatches": 4,
    "schedule": "1f1b",
    "precision": "fp32",
    "seed": 0,
    "shard": (),
}
CHANGES: tuple[dict[str, Any], ...] = (
    {"zero": 1, "recompute": "1400KB"},
    {"zero": 3, "microbatches": 8},
    {"recompute": "selective", "loss_chunks": 2},
    {"precision": "bf16", "casts": ("softmax=bf16",)},
    {"schedule": "interleaved", "virtual_stages": 2},
    {"mesh": "pp=2,tp=4"},
    {"mesh": "dp=4", "shard": ("blocks.*.attn.wq.weight=[_, _]",)},
)


def options(**changes: Any) -> Options:
    return Options.checked(**(BASE | changes))


def compiled(model: str, given: Options, until: str = UNPROVED) -> Compilation:
    return compilation(EXAMPLES / model, None, given, model_options={}, until=until)


@pytest.mark.slow
def test_programs_with_other_options_are_those_of_their_own_compiles() -> None:
    first = compiled("gpt.py", options())
    assert first.again is not None
    for changes in CHANGES:
        assert first.again(options(**changes)) == compiled("gpt.py", options(**changes)).program, changes


def test_only_passes_behind_a_change_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled("gpt.py", options())
    ran: list[str] = []
    apply = passes.apply_pass
    monkeypatch.setattr(passes, "apply_pass", lambda entry, *given: ran.append(entry.name) or apply(entry, *given))
    assert first.again is not None
    changes = ({"recompute": "full"}, {"zero": 1}, {"microbatches": 8}, {"mesh": "2x4x1"})
    for change, earliest in zip(changes, ("recompute", "tables", "batch", "pad"), strict=True):
        ran.clear()
        for _ in range(2):
            first.again(options(**change))
        behind = passes.NAMES[passes.NAMES.index(earliest) : passes.NAMES.index(UNPROVED) + 1]
        assert tuple(ran) == behind, change


@pytest.mark.parametrize("model", ["gpt.py", "mlp.py"])
def test_passes_read_the_facts_that_they_name(model: str) -> None:
    """Under other meshes and microbatches, a pass that does not name them does the same."""
    given = options()
    done = compiled(model, given, until="precision")
    before = done.traced
    for step in done.steps:
        entry = next(entry for entry in passes.PIPELINE if entry.name == step.name)
        others = {"mesh": Mesh.parse("dp=3,tp=5"), "microbatches": 7}
        elsewhere = replace(before, **{name: value for name, value in others.items() if name not in entry.reads})
        taken = {name: given.for_passes[name] for name in entry.options if name in given.for_passes}
        assert replace(entry.run(elsewhere, **taken), mesh=given.mesh, microbatches=4) == step.program
        before = step.program
