"""`--kernels inductor` passes the regions' functions to torch.compile; the numbers stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import partc
from partc.ir.parser import parse
from partc.ir.printer import print_program
from tests.zoo import EXAMPLES, MODELS


def test_functions_of_microbatches_are_compiled_and_others_not() -> None:
    package = partc.compile(str(EXAMPLES / "gpt.py"), mesh="2x1x2", microbatches=2, kernels="inductor")
    phases = {region.kernels: region.phase for region in parse(print_program(package.program)).regions}
    assert phases.pop("inductor") == "microbatch" and "microbatch" not in phases.values()
    texts = {path: str(text) for path, text in package.files() if path.startswith("regions/")}
    for region, name, marked in (
        ("block", "block_forward", True),
        ("block", "block_backward", True),
        ("rotary", "rotary", False),
    ):
        text = texts[f"regions/{region}.py"]
        assert (f"@compiled\ndef {name}(" in text) == marked
        assert ("from runtime.ops.compiled import compiled\n" in text) == marked
    assert "kernels" not in {path.split("/")[0] for path, _ in package.files()}
    assert package.memory is not None


linked = pytest.mark.skipif(" " in torch.__file__, reason="torch's compiler links nothing from a path with a space")


@pytest.mark.slow
@linked
@pytest.mark.parametrize("mesh", ["2"])
def test_compiled_regions_equal_one_device(mesh: str) -> None:
    package = partc.compile(str(EXAMPLES / "mlp.py"), mesh=mesh, microbatches=2, precision="fp64", kernels="inductor")
    assert package.verify(steps=2).ok


@linked
@pytest.mark.matrix
@pytest.mark.parametrize("mesh", ["1x1x2", "2x2x1"])
@pytest.mark.parametrize("name", ["gpt", "gpt2_dropout", "resnet"])
def test_families_compiled_equal_one_device(name: str, mesh: str, tmp_path: Path) -> None:
    model = MODELS[name]
    package = partc.compile(
        model.source(tmp_path), mesh=mesh, microbatches=2, precision="fp64", kernels="inductor", options=model.options
    )
    assert package.verify(steps=2).ok
