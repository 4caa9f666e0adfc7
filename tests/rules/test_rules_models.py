"""Every operation of common Hugging Face models has a rule after normalization."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from partc.frontend.trace import trace_model
from partc.ir.mesh import Mesh
from partc.ir.program import Op, TensorType
from partc.passes.normalize import normalize
from partc.rules import choices, factor_cuts, propagate_cuts, resolve

transformers = pytest.importorskip("transformers")

SMALL: Mapping[str, Any] = {"num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 48, "vocab_size": 60}
WIDE: Mapping[str, Any] = {**SMALL, "intermediate_size": 72, "use_cache": False}
STILL: Mapping[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2: Mapping[str, Any] = {
    **{"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 60, "n_positions": 16, "use_cache": False},
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0},
}
IMAGES: Mapping[str, Any] = {**WIDE, **STILL, "image_size": 24, "patch_size": 8, "num_labels": 5}


def tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.zeros(6, 9, dtype=torch.long), "labels": torch.zeros(6, 9, dtype=torch.long)}


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.zeros(6, 3, 24, 24), "labels": torch.zeros(6, dtype=torch.long)}


MODELS: Mapping[str, tuple[str, Mapping[str, Any], Callable[[], dict[str, Tensor]]]] = {
    "Llama": ("LlamaForCausalLM", {**WIDE, "num_key_value_heads": 2}, tokens),
    "GPT2": ("GPT2LMHeadModel", GPT2, tokens),
    "Bert": ("BertForMaskedLM", {**WIDE, **STILL}, tokens),
    "ViT": ("ViTForImageClassification", IMAGES, images),
    "GPTNeoX": ("GPTNeoXForCausalLM", WIDE, tokens),
    "Qwen3": ("Qwen3ForCausalLM", {**WIDE, "num_key_value_heads": 2, "head_dim": 12}, tokens),
}


def traced(name: str) -> tuple[tuple[Op, ...], dict[str, TensorType], Mapping[str, tuple[frozenset[int], ...]]]:
    model, options, batch = MODELS[name]
    config = getattr(transformers, f"{name}Config")(**options)
    build = lambda: getattr(transformers, model)(config)  # noqa: E731
    [region] = normalize(trace_model(build, batch, name=name, mesh=Mesh.parse("2")).program).regions
    types = {key: value.type for key, value in region.forward.definitions().items()}
    types.update((value.name, value.type) for value in region.params)
    return region.forward.ops, types, propagate_cuts(region.forward, types)


@pytest.mark.parametrize("name", MODELS)
def test_no_operation_lacks_a_rule(name: str) -> None:
    ops, types, _ = traced(name)
    assert [op.name for op in ops if resolve(op, types) is None] == []


def test_fused_projections_can_be_cut_by_heads() -> None:
    """GPT-2's c_attn makes q, k and v at once; its columns are cut inside each third."""
    ops, types, cuts = traced("GPT2")
    products = [op for op in ops if op.name in ("matmul", "linear") and op.result.type.shape[-1] == 3 * 48]
    assert len(products) == 2
    for op in products:
        rule = resolve(op, types)
        assert rule is not None
        found = choices(op, rule, "tp", 4, factor_cuts(op, rule, cuts))
        strided = [choice for choice in found if choice.outer == 3]
        assert strided and all(rule.factor(str(choice.factor)).kind == "parallel" for choice in strided)
