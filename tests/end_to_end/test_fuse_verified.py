"""Packages with Triton kernels train like the single-device model; on a CPU, Triton's interpreter runs the kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

import partc
from tests.zoo import MODELS

WIDE = Path(__file__).parents[1] / "models" / "wide.py"
ACTIVATIONS = Path(__file__).parents[1] / "models" / "activations.py"
ONE_VECTOR = Path(__file__).parents[1] / "independent" / "models" / "one_vector.py"
BY_HAND = Path(__file__).parents[1] / "models" / "by_hand.py"
SMALL = {"batch": 2, "seq": 4}


def verified(name: str, folder: Path, **how: object) -> tuple[float, str]:
    """The worst error, and the stages' text."""
    model = MODELS[name]
    options = {**model.options, **SMALL} if model.config else {**SMALL, "depth": 2}
    package = partc.compile(model.source(folder), options=options, kernels="triton", **how)  # type: ignore[arg-type]
    text = "".join(str(body) for path, body in package.files() if path.startswith("regions/"))
    result = package.verify(steps=2)
    assert result.ok
    return result.worst.rel_err, text


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [("gpt", "2x2"), ("gpt2_dropout", "1x2")])
def test_packages_with_kernels_equal_the_single_device_model(tmp_path: Path, name: str, mesh: str) -> None:
    error, text = verified(name, tmp_path, mesh=mesh, precision="fp64")
    assert error < 1e-13
    assert text.count("kernels.") >= 3
    assert "kernels.embedding_grad" in text and "functional.embedding_shard_add_grad" not in text
    assert "functional.dropout" not in text and text.count("comm.counter(") == (6 if "dropout" in name else 0)


def test_derivatives_of_one_vector_that_ranks_hold_parts_of() -> None:
    """The mean of a batch that dp cuts: the gradients of norms and slopes of it are partial sums."""
    result = partc.compile(ONE_VECTOR, kernels="triton", mesh="dp=2", precision="fp64").verify(virtual=True, steps=2)
    assert result.ok and result.worst.rel_err < 1e-13, result.worst


@pytest.mark.slow
def test_norms_of_wide_rows_in_packages(tmp_path: Path) -> None:
    """Two microbatches: gradients of several weights are written to their buffers together, and then added."""
    package = partc.compile(WIDE, kernels="triton", mesh="2", microbatches=2, precision="fp64", options={"batch": 4})
    text = "".join(str(body) for path, body in package.files() if path.startswith("regions/"))
    assert "layer_norm_grad_input" in text and "rms_norm_grad_weight" in text
    assert "functional.add_sums((g.norm_weight, g.norm_bias), parts)" in text
    result = package.verify(virtual=True, steps=2)
    assert result.ok, result.worst


@pytest.mark.slow
def test_functions_of_elements_are_all_in_kernels() -> None:
    """Under the names that they and their derivatives reach kernels by."""
    program = partc.compile(ACTIVATIONS, options={"functions": "all"}, mesh="1", kernels="triton").program
    left = {op.name for region in program.regions for graph in region.graphs for op in graph.ops if not op.body}
    assert {name for name in left if not name.startswith("linear")} <= {"sum", "div", "reshape", "full"}


@pytest.mark.slow
def test_functions_of_elements_equal_the_single_device_model() -> None:
    names = "softplus+elu+mish+log1p+round+odd+bounded+hardswish+lerp+prelu+log_sigmoid"
    package = partc.compile(ACTIVATIONS, options={"functions": names}, mesh="2x2", kernels="triton", precision="fp64")
    result = package.verify(steps=2)
    assert result.ok
    assert result.worst.rel_err < 1e-13


@pytest.mark.sampled
@pytest.mark.parametrize("what", ["normed", "varied", "shared", "weighed", "raised", "summed"])
def test_what_is_spelled_out_of_sums_of_rows_is_one_kernel(what: str) -> None:
    """Each way; the other one is the loss's."""
    package = partc.compile(BY_HAND, options={"what": what}, mesh="1", kernels="triton", precision="fp64")
    for side in ("forward", "backward"):
        graphs = [getattr(region, side) for region in package.program.regions]
        assert sum(bool(op.body) for graph in graphs if graph for op in graph.ops) == 2
    result = package.verify(steps=2)
    assert result.ok
    assert result.worst.rel_err < 1e-13


@pytest.mark.matrix
@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_with_kernels(tmp_path: Path, name: str) -> None:
    model = MODELS[name]
    package = partc.compile(
        model.source(tmp_path), options=model.options, kernels="triton", mesh="2x2", precision="fp64", microbatches=2
    )
    result = package.verify(steps=1)
    assert result.ok
    assert result.worst.rel_err < 1e-11
