"""Hugging Face families: each equals its single-device model, in few regions, with its products cut."""

from __future__ import annotations

from pathlib import Path

import pytest

import partc
from partc.package.verify import verify
from tests.zoo import MODELS

pytest.importorskip("transformers")

FAMILIES = ("mistral", "qwen2", "gemma", "gpt_neox", "roberta", "t5", "swin", "mixtral", "clip")
QUICK = ("mixtral", "swin")  # the others are for `make test-all`
COUPLED = ("clip",)  # every example is compared to every other


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where configurations and the single-device models' runs are kept."""
    return tmp_path_factory.mktemp("families")


def _compiled(name: str, shared: Path, **options: object) -> partc.Package:
    model = MODELS[name]
    return partc.compile(model.source(shared), precision="fp64", options=model.options, **options)  # type: ignore[arg-type]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else (pytest.mark.slow,)) for name in FAMILIES]
)
@pytest.mark.parametrize(
    ("mesh", "microbatches"),
    [
        ("2x2x2", 4),
        pytest.param("pp=3", 2, marks=pytest.mark.matrix),
        pytest.param("2x1x4", 1, marks=pytest.mark.matrix),
    ],
)
def test_families_equal_their_single_device_models(
    name: str, mesh: str, microbatches: int, shared: Path, tmp_path: Path
) -> None:
    """And no operation lacks a rule."""
    package = _compiled(name, shared, mesh=mesh, microbatches=1 if name in COUPLED else microbatches)
    assert not [item for item in package.replicated_ops if not item.rule]
    package.write(tmp_path / "build")
    result = verify(tmp_path / "build", steps=2, virtual=True, reference=shared / f"{name}_run")
    assert result.ok, result.worst
    assert result.compared > 2 * len(package.program.parameters)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "t5", pytest.param("gemma", marks=pytest.mark.matrix)])
def test_regions_do_not_grow_with_depth(name: str, tmp_path: Path) -> None:
    def regions(**more: object) -> list[str]:
        model = MODELS[name]
        deeper = type(model)(name=model.name, config={**model.config, **more}, options=model.options)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        package = partc.compile(deeper.source(folder), mesh="tp=2", options=deeper.options)
        return [region.name for region in package.program.regions]

    depth = {"num_layers": 6, "num_decoder_layers": 6} if name == "t5" else {"num_hidden_layers": 6}
    assert regions() == regions(**depth)


def test_experts_are_cut_inside(shared: Path) -> None:
    package = _compiled("mixtral", shared, mesh="tp=2")
    layouts = {parameter.name: str(parameter.type.layout) for parameter in package.program.parameters}
    assert layouts["model.layers.0.mlp.experts.gate_up_proj"].startswith("[4, 2 · 64@tp, 32]")
    assert layouts["model.layers.0.mlp.experts.down_proj"].startswith("[4, 32, 64@tp]")
