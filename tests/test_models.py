"""The proof, over models and meshes: packages train as the single-device model does, to 1e-10 in fp64."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import partc
from partc.verify import verify

EXAMPLES = Path(__file__).parents[1] / "examples"
MESHES = ("2", "tp=2", "pp=2", "2x2", "2x2x2", "1x4x2", "2x1x4")

CONFIGURATIONS = {
    "llama": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 96, "n_embd": 32, "n_layer": 3,
        "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "bert": {
        "architectures": ["BertForMaskedLM"], "model_type": "bert", "vocab_size": 96, "hidden_size": 32,
        "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 64,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    },
    "vit": {
        "architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": 32, "num_hidden_layers": 3,
        "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32, "patch_size": 8, "num_labels": 8,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    },
}  # fmt: skip


# What `make test` runs of every model; `make models` runs the rest too.
ALWAYS = {("tp=2", 1, "1f1b"), ("2", 4, "1f1b"), ("1x4x2", 4, "1f1b"), ("2x2x2", 4, "1f1b"), ("2x2x2", 4, "gpipe")}


def _cases() -> list[object]:
    """Every model on every mesh, with 1 and 4 microbatches, and both schedules where they differ."""
    found = []
    for model in ("gpt", "mlp", *CONFIGURATIONS):
        for mesh in MESHES:
            cases = [(mesh, 1, "1f1b"), (mesh, 4, "1f1b")]
            if partc.Mesh.parse(mesh).axis("pp") > 1:
                cases.append((mesh, 4, "gpipe"))
            for case in cases:
                marks = () if case in ALWAYS or model == "gpt" else (pytest.mark.matrix,)
                found.append(pytest.param(model, *case, marks=marks, id="-".join(map(str, (model, *case)))))
    return found


def _source(model: str, folder: Path) -> tuple[str, dict[str, object]]:
    if model not in CONFIGURATIONS:
        return str(EXAMPLES / f"{model}.py"), {"batch": 16}
    path = folder / model / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(CONFIGURATIONS[model]))
    return f"hf:{path}", {"batch": 16} if model == "vit" else {"batch": 16, "seq": 16}


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where configurations and the single-device models' runs are kept."""
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(("model", "mesh", "microbatches", "schedule"), _cases())
def test_package_equals_single_device(
    model: str, mesh: str, microbatches: int, schedule: str, shared: Path, tmp_path: Path
) -> None:
    if model in CONFIGURATIONS:
        pytest.importorskip("transformers")
    source, options = _source(model, shared)
    package = partc.compile(
        source, mesh=mesh, microbatches=microbatches, schedule=schedule, precision="fp64", options=options
    )
    package.write(tmp_path / "build")
    result = verify(tmp_path / "build", steps=2, virtual=True, reference=shared / f"{model}_run")
    assert result.ok, result.worst
    assert result.compared > 2 * len(package.program.parameters)


@pytest.mark.parametrize(("mesh", "microbatches"), [("2", 1), ("tp=2", 1), ("pp=2", 4), ("2x2x2", 4)])
def test_real_processes(mesh: str, microbatches: int, tmp_path: Path) -> None:
    package = partc.compile(EXAMPLES / "gpt.py", mesh=mesh, microbatches=microbatches, precision="fp64")
    package.write(tmp_path / "build")
    result = verify(tmp_path / "build", steps=2)
    assert result.ok, result.worst


def test_fp32_is_as_close_as_rounding_allows(tmp_path: Path) -> None:
    partc.compile(EXAMPLES / "gpt.py", mesh="2x2x2", microbatches=4).write(tmp_path / "build")
    result = verify(tmp_path / "build", steps=2, virtual=True)
    assert result.ok, result.worst


def test_sixty_four_ranks(tmp_path: Path) -> None:
    partc.compile(EXAMPLES / "gpt.py", mesh="2x8x4", microbatches=2, precision="fp64").write(tmp_path / "build")
    result = verify(tmp_path / "build", steps=1, virtual=True)
    assert result.ok, result.worst


@pytest.mark.parametrize(
    ("mesh", "microbatches"), [("tp=2", 1), ("pp=3,dp=2,tp=2", 4), ("pp=2,tp=3", 2), ("4x2", 3), ("pp=6,dp=2", 4)]
)
def test_everything_awkward(mesh: str, microbatches: int, shared: Path, tmp_path: Path) -> None:
    """Names of a Sequential's parameters; a weight used alike by ranks in one region and differently in another."""
    source = Path(__file__).parent / "models" / "crossing.py"
    package = partc.compile(source, mesh=mesh, microbatches=microbatches, precision="fp64")
    package.write(tmp_path / "build")
    result = verify(tmp_path / "build", steps=2, virtual=True, reference=shared / "crossing_run")
    assert result.ok, result.worst
