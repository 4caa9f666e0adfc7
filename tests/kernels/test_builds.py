"""Kernels built ahead of time for GPUs: none spills registers, and loads take 16 bytes at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.training import QWEN
from tests.zoo import MODELS

ROOT = Path(__file__).parents[2]
LARGE = {
    "gpt2_dropout": {"n_embd": 768, "n_head": 12, "n_layer": 1, "vocab_size": 50257, "n_positions": 1024},
    "llama": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 1, "vocab_size": 128256, "max_position_embeddings": 2048,
    },
    "wide_gpt2_dropout": {"n_embd": 12288, "n_head": 96, "n_layer": 1, "vocab_size": 1024, "n_positions": 1024},
    "wide_llama": {
        "hidden_size": 16384, "intermediate_size": 1024, "num_attention_heads": 128, "num_key_value_heads": 8,
        "num_hidden_layers": 1, "vocab_size": 1024, "max_position_embeddings": 2048,
    },
}  # fmt: skip
WIDE = [name for name in LARGE if name.startswith("wide")]


def built(*arguments: str) -> list[dict[str, Any]]:
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernel_builds", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def _of(model: str, folder: Path) -> list[str]:
    if model == "gpt":
        return [str(ROOT / "examples" / "gpt.py"), "size=1b", "depth=1", "batch=4"]
    path = folder / model / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(MODELS[model.removeprefix("wide_")].config | LARGE[model]))
    return [f"hf:{path}", "batch=1" if model in WIDE else "batch=4", "seq=1024"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.matrix), "fp32"])
def test_wide_rows_spill_nothing(precision: str) -> None:
    found = built("rows", "columns=16384", f"precision={precision}")
    assert {entry["sm"] for entry in found} == {80, 90}
    long = {entry["kernel"] for entry in found if entry["configuration"]["COLUMNS"] == 16384}
    assert len(long) == 8  # norms, softmax and its logarithm, and their derivatives
    assert [entry for entry in found if entry["spilled"] or entry["bytes"] < 16] == []


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("model", WIDE)
def test_models_with_wide_rows_spill_nothing(tmp_path: Path, model: str, precision: str) -> None:
    """Their derivatives are two kernels: along rows, and down columns."""
    found = built(*_of(model, tmp_path), f"precision={precision}", "candidates=all")
    assert {entry["sm"] for entry in found} == {80, 90}
    names = {entry["kernel"] for entry in found}
    for half in ("norm_grad_input", "norm_grad_weight"):
        assert any(half in name for name in names)
    wide = [entry for entry in found if entry["configuration"].get("COLUMNS", 0) > 8192]
    assert wide and [entry for entry in wide if entry["bytes"] < 16] == []
    assert [entry for entry in found if entry["spilled"]] == []


@pytest.mark.slow
@pytest.mark.parametrize("model", [pytest.param("gpt", marks=pytest.mark.matrix), "gpt2_dropout", "llama"])
def test_nothing_spills(tmp_path: Path, model: str) -> None:
    """Registers alone say nothing: a kernel far over its budget reports few, and spills thousands of bytes."""
    found = built(*_of(model, tmp_path))
    assert {entry["sm"] for entry in found} == {80, 90}
    assert [entry for entry in found if entry["spilled"]] == []
    assert [entry for entry in found if entry["shared"] > 48 * 1024] == []
    assert [entry for entry in found if entry["bytes"] < 16] == []
    losses = {entry["kernel"] for entry in found if "cross_entropy" in entry["kernel"]}
    assert {entry.removeprefix("_mask_classes") for entry in losses} >= {"_cross_entropy", "_cross_entropy_backward"}


@pytest.mark.slow
def test_each_row_that_a_kernel_gathers_is_read_16_bytes_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN | {"num_hidden_layers": 1, "vocab_size": 1024}))
    found = [entry for entry in built(f"hf:{path}", "batch=1", "seq=1024") if "permute_rows_sum" in entry["kernel"]]
    assert {entry["sm"] for entry in found} == {80, 90}
    rows = int(str(QWEN["num_experts_per_tok"]))
    assert [entry for entry in found if entry["bytes"] < 16 or entry["widest"] <= rows or entry["spilled"]] == []


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("model", ["gpt", "gpt2_dropout", "llama", "apart"])
def test_nothing_that_the_tuner_may_choose_spills(tmp_path: Path, model: str) -> None:
    found = built(*(["apart"] if model == "apart" else _of(model, tmp_path)), "candidates=all")
    assert len({tuple(entry["configuration"].items()) for entry in found}) > 3
    assert [entry for entry in found if entry["spilled"] or entry["shared"] > 48 * 1024] == []


@pytest.mark.slow
@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.matrix), "fp64"])
def test_functions_of_elements_are_built(precision: str) -> None:
    model = str(ROOT / "tests" / "models" / "activations.py")
    found = built(model, "functions=all", "width=512", "batch=512", f"precision={precision}")
    names = " ".join(entry["kernel"] for entry in found)
    assert all(word in names for word in ("softplus", "elu_backward", "log1p", "expm1", "round", "remainder", "lerp"))
    assert [entry for entry in found if entry["spilled"] or entry["bytes"] < 16] == []


@pytest.mark.slow
@pytest.mark.parametrize("what", ["normed", "raised"])
def test_sums_that_models_spell_out_spill_nothing(what: str) -> None:
    """In the widest rows that a kernel of derivatives holds."""
    found = built(str(ROOT / "tests" / "models" / "by_hand.py"), f"what={what}", "width=8192", "batch=512")
    assert any(word in entry["kernel"] for entry in found for word in ("sum", "amin"))
    assert [entry for entry in found if entry["spilled"] or entry["shared"] > 48 * 1024] == []


@pytest.mark.slow
def test_nothing_spills_of_what_is_written_for_all_models() -> None:
    found = built("apart")
    assert {"_numbers", "_gradient", "_encode"} <= {entry["kernel"] for entry in found}
    assert [entry for entry in found if entry["spilled"] or entry["bytes"] < 16] == []


@pytest.mark.slow
def test_the_gate_sees_what_spills() -> None:
    found = built("control")
    assert len(found) == 2
    assert all(entry["spilled"] > 1000 for entry in found)
