"""torch's flex_attention is traced as attention with masks and biases, and computes the same as scores and masks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import partc
from partc import passes
from partc.frontend.trace import trace_file
from partc.ir.interpreter import evaluate_program
from partc.ir.mesh import Mesh
from partc.package.verify import verify
from tests.models import flexible

FILE = Path(flexible.__file__)
BY_KERNELS = ("causal", "grouped", "sliding", "documents", "empty", "slopes", "distances", "hidden")
WRITTEN_OUT = ("capped", "sinks")


@pytest.mark.parametrize("style", [*BY_KERNELS, *WRITTEN_OUT])
def test_losses_equal_those_of_scores_and_masks(style: str) -> None:
    torch.manual_seed(0)
    plain, batch = flexible.model(style, plain=True).double(), flexible.batch()
    traced = trace_file(FILE, {"style": style}, mesh=Mesh.parse("1"), precision="fp64")
    program = passes.run(traced.program, {}, until="simplify")[-1].program
    ops = {op.name for region in program.regions for op in region.forward.ops}
    assert ("attention" in ops) == (style in BY_KERNELS) and ("softmax" in ops) == (style in WRITTEN_OUT)
    given = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    torch.testing.assert_close(evaluate_program(program, batch, given), plain(**batch), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("style", "words"), [("causal", "is_causal=True"), ("sliding", "window=5")])
def test_masks_of_known_structure_are_arguments_of_attention(style: str, words: str, tmp_path: Path) -> None:
    package = partc.compile(FILE, mesh="1", options={"style": style}).write(tmp_path / "build")
    assert words in (package / "regions/layer.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("style", "mesh"),
    [("documents", "cp=2,tp=2"), ("distances", "dp=2,tp=2"), ("capped", "pp=2,tp=2"), ("sinks", "dp=2,cp=2")],
)
def test_packages_train_like_scores_and_masks(style: str, mesh: str, tmp_path: Path) -> None:
    reference = tmp_path / "reference"

    def compiled(plain: bool, mesh: str) -> Path:
        options = {"style": style, "plain": plain}
        made = partc.compile(FILE, mesh=mesh, precision="fp64", options=options)
        return made.write(tmp_path / mesh.replace(",", "-"))

    assert verify(compiled(True, "1"), steps=2, virtual=True, reference=reference).ok
    found = verify(compiled(False, mesh), steps=2, virtual=True, reference=reference)
    assert found.ok, str(found.worst)
    assert verify(compiled(False, mesh), steps=2, virtual=True).ok
