"""Architectures of Hugging Face, torchvision, timm and diffusers at tiny sizes, as one model file: `-D name=bloom`.

Blocks, norms, activations, masks, dropout and losses are the library's own; widths, depths and vocabularies are small.
"""

from __future__ import annotations

import importlib
import inspect
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import derived
import derived_diffusion
import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, LENGTH, WORDS, CLASSES, PIXELS = 8, 16, 256, 4, 32
# The sizes that configurations of Hugging Face take, under the names that they have there.
SIZES: dict[str, Any] = {
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "dim": 64, "embedding_size": 64, "num_hidden_layers": 2,
    "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "num_attention_heads": 4,
    "n_head": 4, "n_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "ffn_dim": 128, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "d_ff": 128,
    "d_inner": 128, "n_inner": 128, "hidden_dim": 128, "head_dim": 16, "kv_channels": 16, "d_kv": 16,
    "vocab_size": WORDS, "max_position_embeddings": 64, "n_positions": 64, "type_vocab_size": 2, "rotary_dim": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "q_lora_rank": 32,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "qk_head_dim": 16, "v_head_dim": 16,
    "image_size": PIXELS, "patch_size": 8, "num_labels": CLASSES, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "projection_dim": 32,
}  # fmt: skip

Batch = Mapping[str, Tensor]

# Operators of torchvision's wheel: its kernels need a build of torch with CUDA, and importing it needs their schemas.
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float limit) -> Tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One row of the zoo: the library that has the architecture, a tiny model, and a batch for it."""

    library: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]


def model(name: str = "llama") -> nn.Module:
    return ARCHITECTURES[name].build()


def batch(name: str = "llama") -> Batch:
    torch.manual_seed(0)
    return ARCHITECTURES[name].batch()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """The library's own loss of `labels`; of other models, the distance of the first result of numbers from `target`.

    Lists of numbers, such as the sizes of pictures, are constants, which models take as tensors.
    """
    given = {name: torch.tensor(x) if isinstance(x, list) else x for name, x in batch.items() if name != "target"}
    made = model(**given)
    if "target" not in batch:
        return made["loss"]
    first = derived.first_numbers(made)
    target = batch["target"]
    if target.is_floating_point():
        return F.mse_loss(first, target)
    return F.cross_entropy(first.flatten(0, -2), target.flatten())


def tokens(count: int = LENGTH) -> Tensor:
    return torch.randint(3, WORDS, (BATCH, count))


def noise(*shape: int) -> Tensor:
    return torch.randn(BATCH, *shape)


def classes() -> Tensor:
    return torch.randint(CLASSES, (BATCH,))


# Hugging Face


def configured(kind: str, without: str = "", **given: Any) -> Any:
    """The tiny configuration of a model type: SIZES as far as it has them as numbers, and the given values."""
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind]
    plain = made()
    plain.allow_global_per_layer_attribute_access = True
    fixed = {name for name, held in inspect.getmembers(made) if isinstance(held, property) and held.fset is None}
    known = {
        name: value
        for name, value in SIZES.items()
        if isinstance(getattr(plain, name, ""), int | float)
        and name not in {*fixed, *getattr(plain, "attribute_map", {}), *without.split()}
    }
    if getattr(plain, "layer_types", None) and not {"layer_types"} & {*fixed, *given, *plain.attribute_map}:
        known["layer_types"] = list(plain.layer_types)[: known.get("num_hidden_layers", 2)]
    config = made(**{**known, **given})
    config.use_cache = False
    return config


def transformer(kind: str, task: str, inputs: Callable[[], Batch], **given: Any) -> Architecture:
    def build() -> nn.Module:
        import transformers

        config = configured(kind, **given)
        made = getattr(transformers, task)
        return made.from_config(config) if task.startswith("AutoModel") else made(config)

    return Architecture(library="transformers", build=build, batch=inputs)


def text() -> Batch:
    return {"input_ids": tokens(), "labels": tokens()}


def large_images() -> Batch:
    return {"pixel_values": noise(3, 64, 64), "labels": classes()}


def masked_text() -> Batch:
    labels = tokens()
    labels[:, ::2] = -100
    return {"input_ids": tokens(), "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long), "labels": labels}


def images() -> Batch:
    return {"pixel_values": noise(3, PIXELS, PIXELS), "labels": classes()}


def sequences() -> Batch:
    return {"input_ids": tokens(), "labels": tokens()}


def pairs() -> Batch:
    return {"input_ids": tokens(), "decoder_input_ids": tokens(), "labels": tokens()}


def both() -> Any:
    return {"input_ids": tokens(), "pixel_values": noise(3, PIXELS, PIXELS), "return_loss": True}


ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
CAUSAL: dict[str, dict[str, Any]] = {
    "apertus": {}, "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8,
                             "attn_layer_indices": [1]},
    "bitnet": {}, "bloom": {}, "codegen": {}, "cohere": {}, "cohere2": {}, "ctrl": {"dff": 128},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}, "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4,
                                                              "moe_top_k": 2, "hidden_size": 64}},
    "deepseek_v2": {"num_key_value_heads": 4, "head_dim": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": 8, "first_k_dense_replace": 1},
    "diffllama": {}, "ernie4_5": {}, "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2}, "exaone4": {}, "falcon": {},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16,
                  "mamba_chunk_size": 8},
    "falcon_mamba": {"state_size": 8}, "gemma": {}, "gemma2": {}, "gemma3_text": {}, "glm": {}, "glm4": {},
    "glm4_moe": {}, "gpt2": {}, "gpt_bigcode": {}, "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gpt_neox": {}, "gpt_oss": {}, "gptj": {}, "granite": {}, "granitemoe": {}, "helium": {},
    "hunyuan_v1_dense": {"head_dim": 16}, "jamba": {"mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1,
                                      "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_dt_rank": 4},
    "jetmoe": {}, "lfm2": {}, "llama": {}, "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 8}, "minimax": {},
    "mistral": {}, "mixtral": {}, "modernbert-decoder": {}, "mpt": {}, "nemotron": {"head_dim": 16, "num_key_value_heads": 2}, "olmo": {}, "olmo2": {},
    "olmo3": {}, "olmoe": {}, "opt": {"word_embed_proj_dim": 64}, "persimmon": {}, "phi": {}, "phi3": {},
    "phimoe": {}, "qwen2": {}, "qwen2_moe": {}, "qwen3": {}, "qwen3_moe": {},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
                   "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "recurrent_gemma": {"lru_width": 64, "block_types": ["recurrent", "attention"], "attention_window_size": 8},
    "rwkv": {"attention_hidden_size": 64, "context_length": 64}, "seed_oss": {}, "smollm3": {}, "stablelm": {},
    "starcoder2": {}, "xglm": {"attention_heads": 4},
    "zamba2": {"mamba_d_state": 16, "n_mamba_heads": 8, "mamba_headdim": 16, "mamba_ngroups": 1, "chunk_size": 8,
               "num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"], "adapter_rank": 8,
               "hybrid_layer_ids": [1], "num_mem_blocks": 1, "attention_head_dim": 32, "attention_hidden_size": 128},
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": WORDS, "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
LATENT: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 8, "num_experts_per_tok": 2}
INDEXED: dict[str, Any] = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}
SMALL_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
NEWER_CAUSAL: dict[str, dict[str, Any]] = {
    "afmoe": {}, "arcee": {}, "axk1": LATENT, "axk2": {**LATENT, **INDEXED},
    "bailing_hybrid": {"mlp_layer_types": ["dense", "sparse"], "num_experts": 4, "num_expert_group": 1,
                       "num_experts_per_token": 2},
    "bert-generation": {}, "biogpt": {}, "cohere2_moe": {}, "cwm": {},
    "deepseek_v32": {**LATENT, **INDEXED, "mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v4": {}, "doge": {}, "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "exaone_moe": {}, "flex_olmo": {}, "flint": {"mlp_only_layers": [0]}, "glm4_moe_lite": {},
    "glm_moe_dsa": {**LATENT, **INDEXED, "mlp_layer_types": ["dense", "sparse"]}, "gpt_neox_japanese": {},
    "granite_swa": {}, "granitemoe_swa": {}, "gpt-sw3": {}, "iquestcoder": {},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8,
                         "shared_intermediate_size": 64, "layer_types": ["mamba", "attention"]},
    "granitemoeshared": {"shared_intermediate_size": 64}, "hrm_text": {},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2}, "hy_v3": {}, "hy_v4": {},
    "internlm3": {}, "jais2": {},
    "kimi_linear": {"num_experts_per_token": 2, "linear_head_dim": 16, "linear_num_heads": 4, "num_key_value_heads": 4,
                    "layer_types": ["linear_attention", "full_attention"]},
    "kolibri1": {}, "laguna": {},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}, "lfm3": {}, "llama4_text": {},
    "longcat_flash": {"num_key_value_heads": 4, "head_dim": 8, "moe_topk": 2, "zero_expert_num": 2,
                      "ffn_hidden_size": 128, "expert_ffn_hidden_size": 32},
    "mellum": {}, "mimo_v2_flash": {}, "minicpm3": {}, "minimax_m2": {}, "ministral": {"head_dim": 16},
    "ministral3": {}, "moshi": {}, "nanochat": {},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mlp"], "ssm_state_size": 16,
                   "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 8,
                   "moe_shared_expert_intermediate_size": 32},
    "openai-gpt": {},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"], **SMALL_DELTA},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"], **SMALL_DELTA},
    "solar_open": {}, "trocr": {}, "vaultgemma": {}, "xlm": {"emb_dim": 64}, "xlstm": {}, "youtu": LATENT,
    "zamba": {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid"] * 2, "attention_hidden_size": 128, "attention_head_dim": 32,
              "mamba_dt_rank": 4},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip
LATEST_CAUSAL: dict[str, dict[str, Any]] = {
    "beam": {}, "cpmant": {"dim_head": 16, "dim_ff": 128}, 
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": WORDS,
                    "num_kv_shared_layers": 0, "global_head_dim": 16},
    "gemma4_unified_text": {"layer_types": ["sliding_attention", "full_attention"]}, "hyperclovax": {}, "inkling_text": {}, "inkling2_text": {},
    "minimax_m3_vl_text": {}, "qwen4_exp_text": {},
}  # fmt: skip
NEWER_MASKED: dict[str, dict[str, Any]] = {
    "data2vec-text": {}, "ernie": {}, "esmc": {"num_key_value_heads": 4}, "eurobert": {}, "flaubert": {"emb_dim": 64},
    "gte": {}, "jina_embeddings_v3": {}, "luke": {"entity_vocab_size": 16, "entity_emb_size": 32}, "mra": {},
    "nomic_bert": {},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [4, 4], "is_decoder": False,
                 "attn_layers": ["local", "local"], "local_attn_chunk_length": 8, "feed_forward_size": 128,
                 "attention_head_size": 16},
    "roberta-prelayernorm": {}, "tapas": {}, "ultrabert": {}, "xlm-roberta-xl": {},
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip
NEWER_TWO_SIDED: dict[str, dict[str, Any]] = {
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blenderbot-small": {},
    "fsmt": {"src_vocab_size": WORDS, "tgt_vocab_size": WORDS},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "t5gemma": {"encoder": GEMMA, "decoder": GEMMA},
}
MASKED: dict[str, dict[str, Any]] = {
    "albert": {}, "bert": {}, "big_bird": {"attention_type": "original_full"}, "camembert": {}, "convbert": {},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, "distilbert": {}, "electra": {},
    "esm": {"vocab_size": WORDS, "mask_token_id": 4, "pad_token_id": 0, "position_embedding_type": "rotary", "token_dropout": False}, "fnet": {}, "funnel": {"without": "num_hidden_layers", "block_sizes": [1, 1]},
    "ibert": {}, "layoutlm": {}, "longformer": {"attention_window": [4, 4]}, "megatron-bert": {}, "mobilebert": {
        "intra_bottleneck_size": 32, "true_hidden_size": 32, "embedding_size": 32},
    "modernbert": {"global_attn_every_n_layers": 2}, "mpnet": {}, "nystromformer": {"num_landmarks": 4, "segment_means_seq_len": LENGTH},
    "rembert": {}, "roberta": {}, "roformer": {}, "squeezebert": {}, "xlm-roberta": {}, "yoso": {"use_expectation": True},
}  # fmt: skip
TWO_SIDED: dict[str, dict[str, Any]] = {
    "bart": {}, "blenderbot": {}, "led": {"attention_window": [4, 4], "max_encoder_position_embeddings": 64,
                                         "max_decoder_position_embeddings": 64},
    "longt5": {}, "m2m_100": {}, "marian": {}, "mbart": {}, "mt5": {}, "mvp": {}, "pegasus": {}, "pegasus_x": {},
    "plbart": {}, "prophetnet": {"without": "num_hidden_layers", "num_encoder_layers": 2, "num_decoder_layers": 2, "num_encoder_attention_heads": 4,
                                 "num_decoder_attention_heads": 4, "ngram": 2},
    "switch_transformers": {"dropout_rate": 0.0}, "t5": {}, "umt5": {},
}  # fmt: skip
VISION: dict[str, dict[str, Any]] = {
    "beit": {}, "bit": {"hidden_sizes": [16, 32], "depths": [1, 1], "embedding_size": 16, "num_groups": 4},
    "convnext": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2},
    "convnextv2": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2},
    "data2vec-vision": {}, "dinov2": {}, "focalnet": {"embed_dim": 16, "depths": [1, 1],
                                                                 "focal_levels": [2, 2], "focal_windows": [3, 3],
                                                                 "hidden_sizes": [16, 32]},
    "ijepa": {},
    "mobilenet_v1": {"depth_multiplier": 0.25}, "mobilevit": {"hidden_sizes": [16, 24, 32],
                                                              "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32]},
    "poolformer": {"hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1]},
    "pvt": {"num_attention_heads": [1, 2, 2, 4], "hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1], "patch_sizes": [4, 2, 2, 2]},
    "regnet": {"hidden_sizes": [16, 32], "depths": [1, 1], "embedding_size": 16, "groups_width": 8},
    "resnet": {"hidden_sizes": [16, 32], "depths": [1, 1], "embedding_size": 16},
    "segformer": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_encoder_blocks": 2, "num_attention_heads": [1, 2],
                  "sr_ratios": [2, 1], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2]},
    "swin": {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 4},
    "swinv2": {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 4},
    "swiftformer": {"embed_dims": [16, 24], "depths": [1, 1], "downsamples": [True, True]},
    "vit": {}, "vit_msn": {},
}  # fmt: skip


def video() -> Batch:
    return {"pixel_values": torch.randn(BATCH, 4, 3, PIXELS, PIXELS), "labels": classes()}


def sound() -> Batch:
    return {"input_values": noise(640), "labels": classes()}


def spectra() -> Batch:
    return {"input_features": noise(80, 32), "labels": tokens()}


def series() -> Batch:
    times = torch.arange(20.0).expand(BATCH, -1)[..., None]
    return {
        "past_values": noise(15).exp(), "past_time_features": times[:, :15] / 20,
        "past_observed_mask": torch.ones(BATCH, 15), "future_values": noise(5).exp(),
        "future_time_features": times[:, 15:] / 20,
    }  # fmt: skip


def picture_in_text() -> Batch:
    """Four places of each text hold a picture's patches."""
    words = tokens()
    words[:, 1:17] = WORDS - 1
    return {"input_ids": words, "pixel_values": noise(3, PIXELS, PIXELS), "labels": tokens()}


SMALL_TEXT: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
SMALL_SIGHT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": PIXELS, "patch_size": 8,
}  # fmt: skip
SPEECH: dict[str, Any] = {
    "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16,
    "mask_time_prob": 0.0,
}  # fmt: skip
NEWER_VISION: dict[str, dict[str, Any]] = {
    "dinov2_with_registers": {},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "without": "hidden_dim"},
    "hgnet_v2": {}, "hiera": {"embed_dim": 16, "image_size": [64, 64], "depths": [1, 1, 1, 1]},
    "mobilenet_v2": {"depth_multiplier": 0.25},
    "pvt_v2": {"hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]},
    "siglip": {"vision_config": SMALL_SIGHT},
    "textnet": {},
}  # fmt: skip
LARGER_IMAGES = {"hiera", "efficientnet", "mobilenet_v2", "textnet"}
RESNET: dict[str, Any] = {
    "model_type": "resnet", "hidden_sizes": [16, 32], "depths": [1, 1], "embedding_size": 16,
    "out_features": ["stage2"],
}  # fmt: skip
PAIR: dict[str, Any] = {"text_config": SMALL_TEXT, "vision_config": SMALL_SIGHT, "projection_dim": 32}
TIMES: dict[str, Any] = {
    "prediction_length": 5, "context_length": 8, "lags_sequence": [1, 2, 3, 4, 5, 6, 7], "num_time_features": 1,
}  # fmt: skip


def derived_rows(known: set[str]) -> dict[str, Architecture]:
    """A row for each model type without one: its sizes and its batch are derived from the library."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return {f"hf_{kind}": derived_row(kind) for kind in CONFIG_MAPPING_NAMES if kind not in known}


def derived_row(kind: str, head: str = "") -> Architecture:
    def build() -> nn.Module:
        made = derived.of_kind(kind, head)
        return made.model(made.config)

    return Architecture(library="transformers", build=build, batch=lambda: derived.of_kind(kind, head).batch())


def head_rows() -> dict[str, Architecture]:
    """A row for each task-specific class, such as `BertForMaskedLM`, in transformers' tables of model types."""
    import transformers.models.auto.modeling_auto as auto

    return {
        head: derived_row(kind, head)
        for name, table in vars(auto).items() if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING_NAMES")
        for kind, found in table.items() for head in (found if isinstance(found, tuple) else (found,))
        if re.search("For(?!mer)", head)
    }  # fmt: skip


def newer_tasks() -> dict[str, Architecture]:
    """Families with inputs or losses of their own."""

    def boxes() -> Batch:
        corners = torch.randint(0, 500, (BATCH, LENGTH, 2))
        return {"input_ids": tokens(), "bbox": torch.cat([corners, corners + 100], -1), "labels": marks()}

    def marks() -> Tensor:
        return torch.randint(CLASSES, (BATCH, LENGTH))

    def spans() -> Batch:
        return {"input_ids": tokens(), "start_positions": torch.randint(LENGTH, (BATCH,)),
                "end_positions": torch.randint(LENGTH, (BATCH,))}  # fmt: skip

    def heard() -> Batch:
        return {"input_features": noise(32, 80), "decoder_input_ids": tokens(8), "labels": tokens(8)}

    def wave_in_words() -> Batch:
        return {"input_values": noise(1600), "decoder_input_ids": tokens(8), "labels": tokens(8)}

    def picture(*wanted: int, **more: Callable[[], Tensor]) -> Callable[[], Batch]:
        return lambda: {
            "pixel_values": noise(3, PIXELS, PIXELS), **{name: made() for name, made in more.items()},
            "target": noise(*wanted),
        }  # fmt: skip

    def past(**more: Tensor) -> Batch:
        return {"past_values": noise(16, 3), **more, "future_values": noise(4, 3)}

    def returns() -> Batch:
        return {"states": noise(6, 5), "actions": noise(6, 3), "rewards": noise(6, 1), "returns_to_go": noise(6, 1),
                "timesteps": torch.arange(6).expand(BATCH, -1), "attention_mask": torch.ones(BATCH, 6), "target": noise(6, 5)}  # fmt: skip

    def segments() -> Batch:
        return {"pixel_values": noise(3, PIXELS, PIXELS), "labels": torch.randint(CLASSES, (BATCH, PIXELS, PIXELS))}

    return {
        "bros": transformer("bros", "BrosForTokenClassification", boxes),
        "canine": transformer("canine", "CanineForTokenClassification",
                              lambda: {"input_ids": tokens(), "labels": marks()}, local_transformer_stride=8,
                              downsampling_rate=2, num_hash_buckets=64),
        "layoutlmv3": transformer("layoutlmv3", "LayoutLMv3ForTokenClassification", boxes, max_2d_position_embeddings=1024,
                                  coordinate_size=8, shape_size=16, visual_embed=False, rel_pos_bins=8, max_rel_pos=16,
                                  rel_2d_pos_bins=8, max_rel_2d_pos=32),
        "markuplm": transformer("markuplm", "MarkupLMForTokenClassification",
                                lambda: {"input_ids": tokens(), "labels": marks()}, xpath_unit_hidden_size=8),
        "splinter": transformer("splinter", "SplinterForQuestionAnswering", spans, question_token_id=5),
        "xlnet": transformer("xlnet", "XLNetForSequenceClassification",
                             lambda: {"input_ids": tokens(), "labels": classes()},
                             without="max_position_embeddings n_positions"),
        "dpr": transformer("dpr", "DPRQuestionEncoder", lambda: {"input_ids": tokens(), "target": noise(32)}),
        "imagegpt": transformer("imagegpt", "ImageGPTForImageClassification",
                                lambda: {"input_ids": torch.randint(WORDS, (BATCH, 64)), "labels": classes()}),
        "speech_to_text": transformer("speech_to_text", "Speech2TextForConditionalGeneration", heard, conv_channels=32,
                                      max_source_positions=64, max_target_positions=32),
        "moonshine": transformer("moonshine", "MoonshineForConditionalGeneration", wave_in_words, encoder_num_hidden_layers=2,
                                 decoder_num_hidden_layers=2, encoder_num_attention_heads=4, decoder_num_attention_heads=4,
                                 encoder_num_key_value_heads=4, decoder_num_key_value_heads=4),
        "wav2vec2-conformer": transformer("wav2vec2-conformer", "Wav2Vec2ConformerForSequenceClassification", sound, **SPEECH),
        "wav2vec2-bert": transformer("wav2vec2-bert", "Wav2Vec2BertForSequenceClassification",
                                     lambda: {"input_features": noise(24, 160), "labels": classes()},
                                     classifier_proj_size=16, mask_time_prob=0.0),
        "data2vec-audio": transformer("data2vec-audio", "Data2VecAudioForSequenceClassification", sound,
                                      **{**SPEECH, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 3}),
        "sew": transformer("sew", "SEWForSequenceClassification", sound, **SPEECH, squeeze_factor=2),
        "unispeech-sat": transformer("unispeech-sat", "UniSpeechSatForSequenceClassification", sound, **SPEECH),
        "patchtst": transformer("patchtst", "PatchTSTForPrediction", past, context_length=16, prediction_length=4,
                                patch_length=4, patch_stride=4, num_input_channels=3),
        "patchtsmixer": transformer("patchtsmixer", "PatchTSMixerForPrediction", past, context_length=16, prediction_length=4,
                                    patch_length=4, patch_stride=4, num_input_channels=3),
        "informer": transformer("informer", "InformerForPrediction", series, **TIMES, encoder_layerdrop=0.0),
        "decision_transformer": transformer("decision_transformer", "DecisionTransformerModel", returns, state_dim=5, act_dim=3,
                                            max_ep_len=16),
        "vit_mae_encoder": transformer("vit_mae", "ViTMAEModel", picture(17, 64), mask_ratio=0.0),
        "vitdet": transformer("vitdet", "VitDetModel", picture(64, 4, 4)),
        "yolos": transformer("yolos", "YolosForObjectDetection", picture(6, CLASSES + 1), num_detection_tokens=6,
                             image_size=[PIXELS, PIXELS]),
        "detr": transformer("detr", "DetrForObjectDetection", picture(6, CLASSES + 1), use_timm_backbone=False,
                            use_pretrained_backbone=False, backbone=None, num_queries=6, backbone_config=RESNET),
        "conditional_detr": transformer("conditional_detr", "ConditionalDetrForObjectDetection", picture(6, CLASSES),
                                        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, num_queries=6,
                                        backbone_config=RESNET),
        "segformer_pixels": transformer("segformer", "SegformerForSemanticSegmentation", segments,
                                        **VISION["segformer"], decoder_hidden_size=32),
        "glpn": transformer("glpn", "GLPNForDepthEstimation",
                            lambda: {"pixel_values": noise(3, 64, 64), "labels": noise(64, 64).abs() + 0.5},
                            hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2],
                            decoder_hidden_size=16),
        "swin2sr": transformer("swin2sr", "Swin2SRForImageSuperResolution", picture(3, 64, 64), embed_dim=16, depths=[2],
                               num_heads=[2], window_size=4, patch_size=1, image_size=PIXELS),
        "blip": transformer("blip", "BlipForConditionalGeneration",
                            lambda: {"input_ids": tokens(), "pixel_values": noise(3, PIXELS, PIXELS), "labels": tokens()},
                            text_config={**SMALL_TEXT, "encoder_hidden_size": 64, "projection_dim": 32}, vision_config=SMALL_SIGHT),
        "git": transformer("git", "GitForCausalLM",
                           lambda: {"input_ids": tokens(), "pixel_values": noise(3, PIXELS, PIXELS), "labels": tokens()},
                           vision_config=SMALL_SIGHT),
        "vilt": transformer("vilt", "ViltForImagesAndTextClassification",
                            lambda: {"input_ids": tokens(), "pixel_values": noise(1, 3, PIXELS, PIXELS), "labels": classes()},
                            num_images=1, max_image_length=-1),
        "chinese_clip": transformer("chinese_clip", "ChineseCLIPModel", both, **PAIR),
        "altclip": transformer("altclip", "AltCLIPModel", both, text_config={**SMALL_TEXT, "project_dim": 64},
                               vision_config=SMALL_SIGHT, projection_dim=32),
        "clipseg": transformer("clipseg", "CLIPSegForImageSegmentation",
                               lambda: {"input_ids": tokens(), "pixel_values": noise(3, PIXELS, PIXELS), "labels": noise(PIXELS, PIXELS).sigmoid()},
                               **PAIR, extract_layers=[0, 1], reduce_dim=16, decoder_num_attention_heads=2, decoder_intermediate_size=32),
        "owlvit": transformer("owlvit", "OwlViTModel", both, **PAIR),
        "paligemma": transformer("paligemma", "PaliGemmaForConditionalGeneration",
                                 lambda: {"input_ids": picture_tokens(24), "token_type_ids": torch.zeros(BATCH, 24, dtype=torch.long),
                                          "pixel_values": noise(3, PIXELS, PIXELS), "labels": tokens(24)},
                                 text_config={"model_type": "gemma", **SMALL_TEXT, "head_dim": 16}, vision_config={"model_type": "siglip_vision_model", **SMALL_SIGHT},
                                 image_token_id=WORDS - 1, projection_dim=64),
        "lxmert": transformer("lxmert", "LxmertModel",
                              lambda: {"input_ids": tokens(), "visual_feats": noise(6, 24), "visual_pos": noise(6, 4).sigmoid(), "target": noise(LENGTH, 64)},
                              visual_feat_dim=24, l_layers=1, x_layers=1, r_layers=1),
        "visual_bert": transformer("visual_bert", "VisualBertModel",
                                   lambda: {"input_ids": tokens(), "visual_embeds": noise(6, 24), "visual_attention_mask": torch.ones(BATCH, 6), "target": noise(LENGTH + 6, 64)},
                                   visual_embedding_dim=24),
        "vision_encoder_decoder": Architecture(library="transformers", build=_captioner,
                                               batch=lambda: {"pixel_values": noise(3, PIXELS, PIXELS), "labels": tokens()}),
        "encoder_decoder": Architecture(library="transformers", build=_bert2bert, batch=pairs),
        "vivit": transformer("vivit", "VivitForVideoClassification", video, num_frames=4, tubelet_size=[2, 8, 8]),
        "timesfm": transformer("timesfm", "TimesFmModel", lambda: {"past_values": noise(64), "past_values_padding": torch.zeros(BATCH, 64), "freq": torch.zeros(BATCH, 1, dtype=torch.long), "target": noise(2, 64)}, patch_length=32, context_length=64, horizon_length=8),
        "idefics3": transformer("idefics3", "Idefics3ForConditionalGeneration",
                                lambda: {"input_ids": picture_tokens(24), "pixel_values": noise(1, 3, PIXELS, PIXELS), "labels": tokens(24)},
                                text_config={"model_type": "llama", **SMALL_TEXT}, vision_config=SMALL_SIGHT, image_token_id=WORDS - 1, scale_factor=1),
        "gemma3": transformer("gemma3", "Gemma3ForConditionalGeneration",
                              lambda: {"input_ids": picture_tokens(24), "token_type_ids": (torch.arange(24).expand(BATCH, -1) < 18).long(), "pixel_values": noise(3, PIXELS, PIXELS), "labels": tokens(24)},
                              text_config={**SMALL_TEXT, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}, vision_config=SMALL_SIGHT, image_token_id=WORDS - 1, mm_tokens_per_image=16),
    }  # fmt: skip


SMALL_SWIN: dict[str, Any] = {
    "model_type": "swin", "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [2, 2, 2, 2], "window_size": 4,
    "patch_size": 4, "image_size": 64, "out_features": ["stage1", "stage2", "stage3", "stage4"],
}  # fmt: skip
SMALL_DEPTH: dict[str, Any] = {"neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16}


def further_tasks() -> dict[str, Architecture]:
    """Detection, segmentation, depth, video, speech, music, documents, and pictures within text."""

    def picture(*wanted: int, pixels: int = PIXELS) -> Callable[[], Batch]:
        return lambda: {"pixel_values": noise(3, pixels, pixels), "target": noise(*wanted)}

    def segments() -> Batch:
        return {"pixel_values": noise(3, 64, 64), "labels": torch.randint(CLASSES, (BATCH, 64, 64))}

    def told(places: int, *frames: int, length: int = LENGTH) -> Callable[[], Batch]:
        """Texts that begin with the places of a picture's patches."""
        return lambda: {
            "input_ids": torch.cat([torch.full((BATCH, places), WORDS - 1), tokens(length - places) - 3], 1),
            "pixel_values": noise(*frames, 3, PIXELS, PIXELS), "labels": tokens(length),
        }  # fmt: skip

    def seen_and_read() -> Batch:
        return {"input_ids": tokens(), "pixel_values": noise(3, PIXELS, PIXELS), "labels": torch.randint(2, (BATCH,))}

    def detector(name: str, task: str, classes: int, **given: Any) -> Architecture:
        return transformer(name, task, picture(6, classes, pixels=64), use_timm_backbone=False, backbone=None,
                           use_pretrained_backbone=False, num_queries=6, **{"backbone_config": RESNET, **given})  # fmt: skip

    def deep(stages: int, **given: Any) -> dict[str, Any]:
        return {**SMALL_SIGHT, "image_size": 64, "num_hidden_layers": stages, "reshape_hidden_states": False,
                "out_features": [f"stage{stage + 1}" for stage in range(stages)], **given}  # fmt: skip

    def patches() -> Batch:
        place = torch.arange(16.0).expand(BATCH, -1)[..., None]
        return {"flattened_patches": torch.cat([place // 4 + 1, place % 4 + 1, noise(16, 192)], -1),
                "attention_mask": torch.ones(BATCH, 16), "labels": tokens()}  # fmt: skip

    def grids() -> Batch:
        """Pictures of 4 by 4 patches, two by two of which are one place of a text."""
        image = torch.cat([torch.full((BATCH, 1), WORDS - 2), torch.full((BATCH, 4), WORDS - 1)], 1)
        place = torch.arange(LENGTH).expand(BATCH, -1)
        return {"input_ids": torch.cat([image, tokens(LENGTH - 5) - 3], 1), "pixel_values": torch.randn(BATCH * 16, 384),
                "image_grid_thw": [[1, 4, 4]] * BATCH, "labels": tokens(),
                "mm_token_type_ids": ((place > 0) & (place < 5)).long().tolist()}  # fmt: skip

    sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    tiles = {"aspect_ratio_ids": torch.ones(BATCH, 1, dtype=torch.long), "aspect_ratio_mask": torch.ones(BATCH, 1, 1).long(),
             "cross_attention_mask": torch.ones(BATCH, LENGTH, 1, 1).long()}  # fmt: skip
    return {
        "aria_text": transformer("aria_text", "AriaTextForCausalLM", text, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
        "blip-2": transformer("blip-2", "Blip2ForConditionalGeneration", told(16, length=24), vision_config=SMALL_SIGHT,
                              qformer_config={**SMALL_TEXT, "encoder_hidden_size": 64}, num_query_tokens=16, image_token_index=WORDS - 1,
                              text_config={"model_type": "opt", **SMALL_TEXT, "ffn_dim": 128, "word_embed_proj_dim": 64}),
        "bridgetower": transformer("bridgetower", "BridgeTowerForImageAndTextRetrieval", seen_and_read, text_config=SMALL_TEXT,
                                   vision_config=SMALL_SIGHT),
        "dab-detr": detector("dab-detr", "DabDetrForObjectDetection", CLASSES),
        "deformable_detr": detector("deformable_detr", "DeformableDetrForObjectDetection", CLASSES, num_feature_levels=2,
                                    backbone_config={**RESNET, "out_features": ["stage1", "stage2"]}),
        "depth_anything": transformer("depth_anything", "DepthAnythingForDepthEstimation", picture(64, 64, pixels=64), backbone=None,
                                      backbone_config=deep(4, model_type="dinov2"), patch_size=8, reassemble_hidden_size=64,
                                      head_in_index=-1, head_hidden_size=8, **SMALL_DEPTH),
        "dinov3_convnext": transformer("dinov3_convnext", "DINOv3ConvNextModel", picture(2, 32), hidden_sizes=[8, 16, 16, 32],
                                       depths=[1, 1, 1, 1]),
        "dinov3_vit": transformer("dinov3_vit", "DINOv3ViTModel", picture(17, 64)),
        "dpt": transformer("dpt", "DPTForSemanticSegmentation", segments, image_size=64, backbone_out_indices=[0, 1, 2, 3],
                           is_hybrid=False, num_hidden_layers=4, **SMALL_DEPTH),
        "flava": transformer("flava", "FlavaModel", lambda: {"input_ids": tokens(), "pixel_values": noise(3, PIXELS, PIXELS), "target": noise(17, 64)},
                             image_config=SMALL_SIGHT, text_config=SMALL_TEXT, multimodal_config=SMALL_SIGHT),
        "fuyu": transformer("fuyu", "FuyuForCausalLM", text, text_config={"model_type": "persimmon", **SMALL_TEXT}, **SMALL_TEXT),
        "gemma3n_text": transformer("gemma3n_text", "AutoModelForCausalLM", text, intermediate_size=128, hidden_size_per_layer_input=8,
                                    vocab_size_per_layer_input=WORDS, laurel_rank=4, num_kv_shared_layers=0, altup_num_inputs=2,
                                    activation_sparsity_pattern=[0.95, 0.0], layer_types=["sliding_attention", "full_attention"]),
        "groupvit": transformer("groupvit", "GroupViTModel", both, text_config=SMALL_TEXT,
                                vision_config={**SMALL_SIGHT, "depths": [1, 1, 1], "num_group_tokens": [4, 2, 0], "num_output_groups": [4, 2, 0]}),
        "idefics2": transformer("idefics2", "Idefics2ForConditionalGeneration", told(4, 1), text_config={"model_type": "mistral", **SMALL_TEXT},
                                vision_config=SMALL_SIGHT, image_token_id=WORDS - 1,
                                perceiver_config={"resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 4,
                                                  "resampler_head_dim": 16, "num_key_value_heads": 2, "hidden_size": 64}),
        "internvl": transformer("internvl", "InternVLForConditionalGeneration", told(4), text_config={"model_type": "qwen2", **SMALL_TEXT},
                                vision_config={**SMALL_SIGHT, "image_size": [PIXELS, PIXELS], "patch_size": [8, 8]},
                                image_token_id=WORDS - 1, image_seq_length=4),
        "kosmos-2": transformer("kosmos-2", "Kosmos2ForConditionalGeneration",
                                lambda: {**told(8, length=24)(), "image_embeds_position_mask": (torch.arange(24).expand(BATCH, -1) < 8).long()},
                                text_config={"vocab_size": WORDS, "embed_dim": 64, "layers": 2, "ffn_dim": 64, "attention_heads": 4,
                                             "max_position_embeddings": 64}, vision_config=SMALL_SIGHT, latent_query_num=8),
        "lilt": transformer("lilt", "LiltForTokenClassification",
                            lambda: {"input_ids": tokens(), "bbox": torch.randint(400, (BATCH, LENGTH, 4)).sort(-1)[0], "labels": torch.randint(CLASSES, (BATCH, LENGTH))},
                            max_2d_position_embeddings=1024, channel_shrink_ratio=4, hidden_size=48),
        "mask2former": transformer("mask2former", "Mask2FormerForUniversalSegmentation", picture(6, CLASSES + 1, pixels=64),
                                   backbone_config=SMALL_SWIN, feature_size=32, mask_feature_size=32, hidden_dim=32,
                                   encoder_feedforward_dim=32, dim_feedforward=64, encoder_layers=1, num_queries=6),
        "maskformer": transformer("maskformer", "MaskFormerForInstanceSegmentation", picture(6, CLASSES + 1, pixels=64), backbone_config=SMALL_SWIN,
                                  decoder_config={"model_type": "detr", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "num_queries": 6,
                                                  "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
                                  fpn_feature_size=32, mask_feature_size=32),
        "mllama": transformer("mllama", "MllamaForConditionalGeneration", lambda: {**told(0, 1, 1)(), **tiles}, image_token_index=WORDS - 1,
                              text_config={**SMALL_TEXT, "num_hidden_layers": 4, "cross_attention_layers": [1, 3], "pad_token_id": 0},
                              vision_config={**SMALL_SIGHT, "attention_heads": 4, "num_global_layers": 1, "max_num_tiles": 1,
                                             "intermediate_layers_indices": [0], "vision_output_dim": 128, "supported_aspect_ratios": [[1, 1]]}),
        "mobilevitv2": transformer("mobilevitv2", "AutoModelForImageClassification", lambda: {"pixel_values": noise(3, 128, 128), "labels": classes()},
                                   width_multiplier=0.25, n_attn_blocks=[1, 1, 1], without="patch_size"),
        "musicgen_decoder": transformer("musicgen_decoder", "MusicgenForCausalLM",
                                        lambda: {"input_ids": torch.randint(WORDS, (BATCH * 2, LENGTH)), "labels": torch.randint(WORDS, (BATCH, LENGTH, 2))},
                                        num_codebooks=2),
        "olmo_hybrid": transformer("olmo_hybrid", "AutoModelForCausalLM", text, layer_types=["linear_attention", "full_attention"],
                                   **{**SMALL_DELTA, "linear_num_key_heads": 4}),
        "owlv2": transformer("owlv2", "Owlv2Model", both, **PAIR),
        "parakeet_ctc": transformer("parakeet_ctc", "ParakeetForCTC",
                                    lambda: {"input_features": noise(64, 80), "attention_mask": torch.ones(BATCH, 64, dtype=torch.bool), "labels": torch.randint(3, 32, (BATCH, 4))},
                                    encoder_config={**SMALL_TEXT, "num_key_value_heads": 4, "num_mel_bins": 80, "subsampling_conv_channels": 8}, vocab_size=32),
        "pix2struct": transformer("pix2struct", "Pix2StructForConditionalGeneration", patches,
                                  text_config={"vocab_size": WORDS, "hidden_size": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
                                  vision_config={"hidden_size": 64, "patch_embed_hidden_size": 192, "d_ff": 128, "d_kv": 16, "num_hidden_layers": 2,
                                                 "num_attention_heads": 4, "seq_len": 32}),
        "pop2piano": transformer("pop2piano", "Pop2PianoForConditionalGeneration", lambda: {"inputs_embeds": noise(LENGTH, 64), "labels": tokens()},
                                 decoder_start_token_id=0),
        "qwen2_vl": transformer("qwen2_vl", "Qwen2VLForConditionalGeneration", grids, text_config={**SMALL_TEXT, "rope_parameters": sections},
                                vision_config={"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2, "patch_size": 8,
                                               "spatial_merge_size": 2, "temporal_patch_size": 2},
                                image_token_id=WORDS - 1, vision_start_token_id=WORDS - 2, video_token_id=WORDS - 3),
        "roc_bert": transformer("roc_bert", "AutoModelForMaskedLM", masked_text, pronunciation_vocab_size=16, shape_vocab_size=16,
                                pronunciation_embed_dim=16, shape_embed_dim=16, enable_pronunciation=True, enable_shape=True),
        "rt_detr": transformer("rt_detr", "RTDetrForObjectDetection", picture(6, CLASSES, pixels=64), backbone=None,
                               backbone_config={"model_type": "rt_detr_resnet", "embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1],
                                                "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"]},
                               encoder_hidden_dim=32, encoder_in_channels=[16, 32, 32], feat_strides=[8, 16, 32], d_model=32, num_queries=6,
                               decoder_in_channels=[32, 32, 32], num_denoising=0, encode_proj_layers=[2]),
        "sam_vision": transformer("sam_vision_model", "SamVisionModel", picture(16, 4, 4), output_channels=16, window_size=2, global_attn_indexes=[1]),
        "sew-d": transformer("sew-d", "SEWDForSequenceClassification", sound, **SPEECH, squeeze_factor=2),
        "smolvlm": transformer("smolvlm", "SmolVLMForConditionalGeneration", told(16, 1, length=24), text_config={"model_type": "llama", **SMALL_TEXT},
                               vision_config=SMALL_SIGHT, image_token_id=WORDS - 1, scale_factor=1),
        "speecht5": transformer("speecht5", "SpeechT5ForSpeechToText", lambda: {"input_values": noise(640), "labels": tokens(8)},
                                **{key: size for key, size in SPEECH.items() if key != "classifier_proj_size"}, encoder_layerdrop=0.0, decoder_layerdrop=0.0),
        "table-transformer": detector("table-transformer", "TableTransformerForObjectDetection", CLASSES + 1),
        "timesfm2_5": transformer("timesfm2_5", "TimesFm2_5Model", lambda: {"past_values": noise(64), "target": noise(2, 64)}, patch_length=32,
                                  context_length=64, horizon_length=32),
        "unispeech": transformer("unispeech", "UniSpeechForSequenceClassification", sound, **SPEECH),
        "upernet": transformer("upernet", "UperNetForSemanticSegmentation", segments, hidden_size=16, auxiliary_in_channels=16,
                               auxiliary_channels=16, pool_scales=[1, 2],
                               backbone_config={"model_type": "convnext", "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1],
                                                "out_features": ["stage1", "stage2", "stage3", "stage4"]}),
        "vjepa2": transformer("vjepa2", "VJEPA2ForVideoClassification", lambda: {"pixel_values_videos": noise(4, 3, PIXELS, PIXELS), "labels": classes()},
                              crop_size=PIXELS, frames_per_clip=4, num_pooler_layers=1, pred_hidden_size=32, pred_num_attention_heads=2,
                              pred_num_hidden_layers=1, pred_num_mask_tokens=2),
        "xclip": transformer("xclip", "XCLIPModel", lambda: {"input_ids": tokens(), "pixel_values": noise(4, 3, PIXELS, PIXELS), "return_loss": True},
                             text_config=SMALL_TEXT, projection_dim=64, prompt_num_attention_heads=4, prompt_layers=1,
                             vision_config={**SMALL_SIGHT, "num_frames": 4, "mit_hidden_size": 64, "mit_intermediate_size": 64,
                                            "mit_num_hidden_layers": 1, "mit_num_attention_heads": 4}),
        "zoedepth": transformer("zoedepth", "ZoeDepthForDepthEstimation", picture(128, 128, pixels=64), backbone=None, backbone_hidden_size=64,
                                backbone_config=deep(4, model_type="beit", use_relative_position_bias=True, use_shared_relative_position_bias=False),
                                bottleneck_features=16, num_attractors=[4, 2, 2, 1], bin_embedding_dim=8, **SMALL_DEPTH),
    }  # fmt: skip


def _captioner() -> nn.Module:
    from transformers import GPT2Config, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

    words = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=WORDS, n_positions=64)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(ViTConfig(**SMALL_SIGHT), words)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return VisionEncoderDecoderModel(config)


def _bert2bert() -> nn.Module:
    from transformers import BertConfig, EncoderDecoderConfig, EncoderDecoderModel

    given = {key: size for key, size in SMALL_TEXT.items() if key != "num_key_value_heads"}
    config = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**given), BertConfig(**given))
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return EncoderDecoderModel(config)


def of_transformers() -> dict[str, Architecture]:
    found = {name: transformer(name, "AutoModelForCausalLM", text, **given) for name, given in CAUSAL.items()}
    found |= {name: transformer(name, "AutoModelForCausalLM", text, **given) for name, given in NEWER_CAUSAL.items()}
    found |= {name: transformer(name, "AutoModelForMaskedLM", masked_text, **given) for name, given in MASKED.items()}
    found["nystromformer"] = transformer(  # which takes no mask of its full size
        "nystromformer", "AutoModelForMaskedLM", text, **MASKED["nystromformer"]
    )
    found |= {
        name: transformer(name, "AutoModelForMaskedLM", masked_text, **given) for name, given in NEWER_MASKED.items()
    }
    found |= {
        name: transformer(name, "AutoModelForSeq2SeqLM", pairs, **given) for name, given in NEWER_TWO_SIDED.items()
    }
    found |= {
        name: transformer(
            name, "AutoModelForImageClassification", large_images if name in LARGER_IMAGES else images, **given
        )
        for name, given in NEWER_VISION.items()
    }
    found |= {name: transformer(name, "AutoModelForCausalLM", text, **given) for name, given in LATEST_CAUSAL.items()}
    found["mistral4"] = transformer("mistral4", "Mistral4ForCausalLM", text, **{**LATENT, "head_dim": 16})
    found["emu3_text_model"] = transformer("emu3_text_model", "Emu3ForCausalLM", text)
    found |= newer_tasks()
    found |= recent_tasks()
    found |= further_tasks()
    found |= latest_tasks()
    found |= {name: transformer(name, "AutoModelForSeq2SeqLM", pairs, **given) for name, given in TWO_SIDED.items()}
    found |= {name: transformer(name, "AutoModelForImageClassification", images, **v) for name, v in VISION.items()}
    found |= {
        "autoformer": transformer("autoformer", "AutoformerForPrediction", series, **TIMES, label_length=4),
        "time_series_transformer": transformer(
            "time_series_transformer", "TimeSeriesTransformerForPrediction", series, **TIMES
        ),
        "clip": transformer("clip", "CLIPModel", lambda: {**both()}, **PAIR),
        "siglip": transformer("siglip", "SiglipModel", lambda: {**both()}, **PAIR),
        "llava": transformer(
            "llava",
            "LlavaForConditionalGeneration",
            lambda: {**picture_in_text(), "input_ids": picture_tokens(24), "labels": tokens(24)},
            text_config={"model_type": "llama", **SMALL_TEXT},
            vision_config={"model_type": "clip_vision_model", **SMALL_SIGHT},
            image_token_index=WORDS - 1,
        ),
        "videomae": transformer("videomae", "VideoMAEForVideoClassification", video, num_frames=4),
        "timesformer": transformer("timesformer", "TimesformerForVideoClassification", video, num_frames=4),
        "wav2vec2": transformer("wav2vec2", "Wav2Vec2ForSequenceClassification", sound, **SPEECH),
        "hubert": transformer("hubert", "HubertForSequenceClassification", sound, **SPEECH),
        "wavlm": transformer("wavlm", "WavLMForSequenceClassification", sound, **SPEECH),
        "deit": transformer("deit", "DeiTForImageClassification", images),
        "audio-spectrogram-transformer": transformer(
            "audio-spectrogram-transformer",
            "ASTForAudioClassification",
            lambda: {"input_values": noise(64, 32), "labels": classes()},
            max_length=64,
            num_mel_bins=32,
        ),
        "whisper": transformer(
            "whisper", "WhisperForConditionalGeneration", spectra, max_source_positions=16, max_target_positions=32
        ),
        "perceiver": transformer(
            "perceiver",
            "PerceiverForMaskedLM",
            masked_text,
            max_position_embeddings=LENGTH,
            d_latents=64,
            num_latents=8,
            num_blocks=1,
            num_self_attends_per_block=2,
            num_self_attention_heads=4,
            num_cross_attention_heads=4,
            qk_channels=64,
            v_channels=64,
        ),
    }
    return found


def latest_tasks() -> dict[str, Architecture]:
    """Labels aligned with sounds, codecs, vocoders, and pictures within text."""

    def spoken() -> Batch:
        return {"input_values": noise(640), "labels": torch.randint(3, 32, (BATCH, 4))}

    def heard() -> Batch:
        return {"input_features": noise(64, 80), "attention_mask": torch.ones(BATCH, 64, dtype=torch.bool),
                "labels": torch.randint(3, 32, (BATCH, 4))}  # fmt: skip

    def shown() -> Batch:
        return {"input_ids": picture_tokens(24), "pixel_values": noise(3, PIXELS, PIXELS), "labels": tokens(24)}

    llama = {"model_type": "llama", **SMALL_TEXT}
    siglip = {"model_type": "siglip_vision_model", **SMALL_SIGHT}
    letters = {**SPEECH, "vocab_size": 32}
    return {
        "hubert_ctc": transformer("hubert", "HubertForCTC", spoken, **letters),
        "wav2vec2_ctc": transformer("wav2vec2", "Wav2Vec2ForCTC", spoken, **letters),
        "lasr_ctc": transformer("lasr_ctc", "LasrForCTC", heard, vocab_size=32,
                                encoder_config={**SMALL_TEXT, "num_key_value_heads": 4, "num_mel_bins": 80, "subsampling_conv_channels": 8}),
        "dac": transformer("dac", "DacModel", lambda: {"input_values": noise(1, 640), "target": noise(1)},
                           encoder_hidden_size=8, downsampling_ratios=[2, 4], decoder_hidden_size=16, n_codebooks=2,
                           codebook_size=16, codebook_dim=4),
        "univnet": transformer("univnet", "UnivNetModel",
                               lambda: {"input_features": noise(8, 100), "noise_sequence": noise(8, 64), "target": noise(2048)},
                               model_hidden_channels=8),
        "donut-swin": transformer("donut-swin", "DonutSwinForImageClassification", images, embed_dim=16, depths=[2, 2],
                                  num_heads=[2, 4], window_size=4, patch_size=4),
        "metaclip_2": transformer("metaclip_2", "MetaClip2Model", both, **PAIR),
        "mlcd_vision_model": transformer("mlcd_vision_model", "MLCDVisionModel",
                                         lambda: {"pixel_values": noise(3, PIXELS, PIXELS), "target": noise(17, 64)}),
        "vipllava": transformer("vipllava", "VipLlavaForConditionalGeneration", shown, text_config=llama,
                                vision_config={"model_type": "clip_vision_model", **SMALL_SIGHT},
                                image_token_index=WORDS - 1, vision_feature_layers=[-1, -2]),
        "got_ocr2": transformer("got_ocr2", "GotOcr2ForConditionalGeneration", shown, image_token_id=WORDS - 1,
                                text_config={"model_type": "qwen2", **SMALL_TEXT},
                                vision_config={"hidden_size": 64, "output_channels": 32, "num_hidden_layers": 2,
                                               "num_attention_heads": 4, "image_size": PIXELS, "patch_size": 2,
                                               "mlp_dim": 64, "window_size": 4, "global_attn_indexes": [1]}),
        "aya_vision": transformer("aya_vision", "AyaVisionForConditionalGeneration", shown, image_token_index=WORDS - 1,
                                  text_config={"model_type": "cohere2", **SMALL_TEXT},
                                  vision_config={**siglip, "patch_size": 4}, downsample_factor=2),
        "deepseek_vl": transformer("deepseek_vl", "DeepseekVLForConditionalGeneration", shown, text_config=llama,
                                   vision_config=siglip, image_token_id=WORDS - 1),
        "janus": transformer("janus", "JanusForConditionalGeneration", shown, text_config=llama, image_token_id=WORDS - 1,
                             vision_config={**SMALL_SIGHT, "projection_dim": 64, "num_image_tokens": 16},
                             vq_config={"base_channels": 32, "latent_channels": 8, "embed_dim": 8, "num_embeddings": 16,
                                        "channel_multiplier": [1], "num_res_blocks": 1, "projection_dim": 64,
                                        "image_token_embed_dim": 64}),
    }  # fmt: skip


def recent_tasks() -> dict[str, Architecture]:
    """Pictures, grids, sounds and films within text; matting, poses, pixels by example, detection from words."""

    def shown(pixels: int = PIXELS, *frames: int, **more: Any) -> Callable[[], Batch]:
        return lambda: {
            "input_ids": picture_tokens(24),
            "pixel_values": noise(*frames, 3, pixels, pixels),
            **more,
            "labels": tokens(24),
        }

    def picture(*wanted: int, pixels: int = PIXELS, **more: Callable[[], Any]) -> Callable[[], Batch]:
        return lambda: {
            "pixel_values": noise(3, pixels, pixels),
            **{name: made() for name, made in more.items()},
            "target": noise(*wanted),
        }

    def heard(places: int, bins: int, frames: int, **more: Callable[[], Any]) -> Callable[[], Batch]:
        """Texts that begin with the places of a sound."""
        return lambda: {
            "input_ids": torch.cat([torch.full((BATCH, places), WORDS - 1), tokens(24 - places) - 3], 1),
            "input_features": noise(bins, frames),
            **{name: made() for name, made in more.items()},
            "labels": tokens(24),
        }

    def grids(channels: int = 384) -> Callable[[], Batch]:
        def made() -> Batch:
            image = torch.cat([torch.full((BATCH, 1), WORDS - 2), torch.full((BATCH, 4), WORDS - 1)], 1)
            place = torch.arange(LENGTH).expand(BATCH, -1)
            return {
                "input_ids": torch.cat([image, tokens(LENGTH - 5) - 3], 1),
                "pixel_values": torch.randn(BATCH * 16, channels),
                "image_grid_thw": [[1, 4, 4]] * BATCH,
                "labels": tokens(),
                "mm_token_type_ids": ((place > 0) & (place < 5)).long().tolist(),
            }

        return made

    llama = {"model_type": "llama", **SMALL_TEXT}
    qwen = {"model_type": "qwen2", **SMALL_TEXT}
    siglip = {"model_type": "siglip_vision_model", **SMALL_SIGHT}
    clip = {"model_type": "clip_vision_model", **SMALL_SIGHT}
    places = {"image_token_id": WORDS - 1, "vision_start_token_id": WORDS - 2, "video_token_id": WORDS - 3}
    sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    sound_encoder = {
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "num_mel_bins": 80,
        "max_source_positions": 16,
    }
    return {
        "levit": transformer("levit", "LevitForImageClassification", large_images, hidden_sizes=[16, 32, 32], num_attention_heads=[2, 2, 2], depths=[1, 1, 1],
                             key_dim=[8, 8, 8], without="patch_size", image_size=64),
        "siglip2": transformer("siglip2", "Siglip2Model",
                               lambda: {"input_ids": tokens(), "pixel_values": noise(16, 192), "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.int32),
                                        "spatial_shapes": [[4, 4]] * BATCH, "return_loss": True},
                               text_config=SMALL_TEXT, vision_config={**SMALL_SIGHT, "num_patches": 16}),
        "pixio": transformer("pixio", "PixioModel", picture(24, 64)),
        "radio": transformer("radio", "RadioModel", picture(128)),
        "aimv2_vision_model": transformer("aimv2_vision_model", "Aimv2VisionModel", picture(16, 64)),
        "aimv2": transformer("aimv2", "Aimv2Model", lambda: {"input_ids": tokens(), "pixel_values": noise(3, PIXELS, PIXELS), "target": noise(BATCH)}, **PAIR),
        "align": transformer("align", "AlignModel", lambda: {"input_ids": tokens(), "pixel_values": noise(3, 64, 64), "return_loss": True}, text_config=SMALL_TEXT,
                             vision_config={"image_size": 64, "width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 80}, projection_dim=80),
        "clap": transformer("clap", "ClapModel", lambda: {"input_ids": tokens(), "input_features": noise(1, 64, 64), "return_loss": True},
                            text_config=SMALL_TEXT, projection_dim=32,
                            audio_config={"spec_size": 64, "num_mel_bins": 64, "patch_embeds_hidden_size": 16, "depths": [1, 1], "num_attention_heads": [2, 2],
                                          "hidden_size": 32, "window_size": 4}),
        "vitmatte": transformer("vitmatte", "VitMatteForImageMatting", lambda: {"pixel_values": noise(4, 64, 64), "target": noise(1, 64, 64)}, hidden_size=64,
                                convstream_hidden_sizes=[8, 16], fusion_hidden_sizes=[16, 16, 8], backbone_config={"model_type": "vitdet", **SMALL_SIGHT,
                                "image_size": 64, "num_channels": 4, "out_features": ["stage2"], "patch_size": 8}),
        "vitpose": transformer("vitpose", "VitPoseForPoseEstimation", picture(CLASSES, 16, 16), backbone_config={"model_type": "vitpose_backbone", **SMALL_SIGHT,
                               "image_size": [PIXELS, PIXELS], "patch_size": [8, 8], "out_features": ["stage2"]}),
        "vitpose_experts": transformer("vitpose", "VitPoseForPoseEstimation", picture(CLASSES, 16, 16, dataset_index=lambda: torch.randint(2, (BATCH,))),
                                       backbone_config={"model_type": "vitpose_backbone", **SMALL_SIGHT, "image_size": [PIXELS, PIXELS], "patch_size": [8, 8],
                                                        "out_features": ["stage2"], "num_experts": 2, "part_features": 16}),
        "seggpt": transformer("seggpt", "SegGptForImageSegmentation",
                              lambda: {"pixel_values": noise(3, 32, 32), "prompt_pixel_values": noise(3, 32, 32), "prompt_masks": noise(3, 32, 32), "labels": noise(3, 32, 32)},
                              image_size=[64, 32], patch_size=8, pretrain_image_size=32, mlp_dim=128, decoder_hidden_size=16, merge_index=0,
                              intermediate_hidden_state_indices=[0, 1]),
        "encodec": transformer("encodec", "EncodecModel", lambda: {"input_values": noise(1, 320), "target": noise(1, 320)}, num_filters=4, upsampling_ratios=[4, 2],
                               hidden_size=16, codebook_dim=16, codebook_size=16, num_lstm_layers=1, sampling_rate=1600, target_bandwidths=[1.6]),
        "mimi": transformer("mimi", "MimiModel", lambda: {"input_values": noise(1, 320), "target": noise(1, 320)}, num_filters=4, upsampling_ratios=[4, 2], codebook_size=16,
                            codebook_dim=16, num_quantizers=4, vector_quantization_hidden_dimension=16, upsample_groups=8, frame_rate=None, sampling_rate=1600),
        "dia": transformer("dia", "DiaForConditionalGeneration", lambda: {"input_ids": tokens(), "decoder_input_ids": torch.randint(20, (BATCH, 8, 2)),
                           "labels": torch.randint(20, (BATCH * 2, 8))}, encoder_config={**SMALL_TEXT, "head_dim": 16, "num_key_value_heads": 4},
                           decoder_config={**SMALL_TEXT, "vocab_size": 32, "num_channels": 2, "head_dim": 16, "cross_hidden_size": 64, "cross_head_dim": 16,
                           "cross_num_attention_heads": 4, "cross_num_key_value_heads": 4}, delay_pattern=[0, 1], without="eos_token_id pad_token_id bos_token_id", eos_token_id=24, pad_token_id=25, bos_token_id=26),
        "udop": transformer("udop", "UdopForConditionalGeneration", lambda: {"input_ids": tokens(), "bbox": torch.rand(BATCH, LENGTH, 4), "labels": tokens()},
                            num_heads=4, num_decoder_layers=2, max_2d_position_embeddings=64, decoder_start_token_id=0),
        "instructblip": transformer("instructblip", "InstructBlipForConditionalGeneration", lambda: {**shown()(), "qformer_input_ids": tokens()}, vision_config=SMALL_SIGHT,
                                    qformer_config={**SMALL_TEXT, "encoder_hidden_size": 64}, num_query_tokens=16, image_token_index=WORDS - 1,
                                    text_config={"model_type": "opt", **SMALL_TEXT, "ffn_dim": 128, "word_embed_proj_dim": 64}),
        "llava_next": transformer("llava_next", "LlavaNextForConditionalGeneration", lambda: {"input_ids": torch.cat([torch.full((BATCH, 36), WORDS - 1), tokens(12) - 3], 1),
                                  "pixel_values": noise(2, 3, PIXELS, PIXELS), "image_sizes": [[32, 32]] * BATCH, "labels": tokens(48)},
                                  text_config=llama, vision_config=clip, image_token_index=WORDS - 1, image_grid_pinpoints=[[32, 32]]),
        "mistral3": transformer("mistral3", "Mistral3ForConditionalGeneration", lambda: {"input_ids": torch.cat([torch.full((BATCH, 4), WORDS - 1), tokens(20) - 3], 1),
                                "pixel_values": noise(3, PIXELS, PIXELS), "image_sizes": [[32, 32]] * BATCH, "labels": tokens(24)}, text_config={"model_type": "mistral", **SMALL_TEXT, "head_dim": 16},
                                vision_config={"model_type": "pixtral", **SMALL_SIGHT, "head_dim": 16}, image_token_index=WORDS - 1, spatial_merge_size=2),
        "cohere2_vision": transformer("cohere2_vision", "Cohere2VisionForConditionalGeneration", shown(), text_config={"model_type": "cohere2", **SMALL_TEXT},
                                      vision_config={**siglip, "patch_size": 4}, image_token_id=WORDS - 1, downsample_factor=2, alignment_intermediate_size=64),
        "florence2": transformer("florence2", "Florence2ForConditionalGeneration",
                                 lambda: {"input_ids": torch.cat([torch.full((BATCH, 5), WORDS - 1), tokens(11) - 3], 1), "pixel_values": noise(3, 64, 64),
                                          "decoder_input_ids": tokens(), "labels": tokens()}, image_token_id=WORDS - 1,
                                 text_config={"model_type": "bart", "vocab_size": WORDS, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
                                              "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64},
                                 vision_config={"embed_dim": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_heads": [2, 2, 2, 2], "num_groups": [2, 2, 2, 2], "window_size": 4, "projection_dim": 64}),
        "qwen2_5_vl": transformer("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", grids(), text_config={**SMALL_TEXT, "rope_parameters": sections},
                                  vision_config={"depth": 2, "hidden_size": 64, "out_hidden_size": 64, "num_heads": 4, "intermediate_size": 64, "patch_size": 8,
                                                 "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16, "fullatt_block_indexes": [1]}, **places),
        "qwen3_vl": transformer("qwen3_vl", "Qwen3VLForConditionalGeneration", grids(), text_config={**SMALL_TEXT, "head_dim": 16, "rope_parameters": sections},
                                vision_config={"depth": 2, "hidden_size": 64, "out_hidden_size": 64, "num_heads": 4, "intermediate_size": 64, "patch_size": 8,
                                               "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}, **places),
        "qwen3_vl_moe": transformer("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", grids(), text_config={**SMALL_TEXT, "head_dim": 16, "rope_parameters": sections, "num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
                                    vision_config={"depth": 2, "hidden_size": 64, "out_hidden_size": 64, "num_heads": 4, "intermediate_size": 64, "patch_size": 8,
                                                   "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}, **places),
        "glm4v": transformer("glm4v", "Glm4vForConditionalGeneration", grids(), text_config={**SMALL_TEXT, "rope_parameters": {**sections, "partial_rotary_factor": 1.0}},
                             vision_config={"depth": 2, "hidden_size": 64, "out_hidden_size": 64, "num_heads": 4, "intermediate_size": 64, "patch_size": 8, "image_size": 32,
                                            "spatial_merge_size": 2, "temporal_patch_size": 2}, image_token_id=WORDS - 1, image_start_token_id=WORDS - 2, video_token_id=WORDS - 3),
        "qwen2_audio": transformer("qwen2_audio", "Qwen2AudioForConditionalGeneration", heard(8, 80, 32, feature_attention_mask=lambda: torch.ones(BATCH, 32, dtype=torch.long)),
                                   audio_config=sound_encoder, text_config=qwen, audio_token_index=WORDS - 1),
        "voxtral": transformer("voxtral", "VoxtralForConditionalGeneration", heard(4, 80, 32), audio_config={**{k: v for k, v in sound_encoder.items() if "_" not in k or k == "num_mel_bins"}, "hidden_size": 64, "intermediate_size": 256,
                               "num_hidden_layers": 2, "num_attention_heads": 4, "max_source_positions": 16}, text_config={**llama, "head_dim": 16}, audio_token_id=WORDS - 1),
        "chameleon": transformer("chameleon", "ChameleonForConditionalGeneration", lambda: {"input_ids": tokens(), "labels": tokens().clamp(min=32)}, vq_config={"base_channels": 32, "embed_dim": 8, "latent_channels": 8, "num_embeddings": 16, "channel_multiplier": [1], "num_res_blocks": 1}, vocabulary_map={"<image>": 4, **{f"IMGIMG{chr(65 + i)}Z": i + 8 for i in range(16)}}),
        "video_llava": transformer("video_llava", "VideoLlavaForConditionalGeneration", lambda: {"input_ids": picture_tokens(24), "pixel_values_images": noise(3, PIXELS, PIXELS), "labels": tokens(24)}, text_config=llama,
                                   vision_config=clip, image_token_index=WORDS - 1, video_token_index=WORDS - 2),
        "moonshine_streaming": transformer("moonshine_streaming", "MoonshineStreamingForConditionalGeneration", lambda: {"input_values": noise(1600), "decoder_input_ids": tokens(8), "labels": tokens(8)},
                                          encoder_config={**SMALL_TEXT, "num_key_value_heads": 4, "head_dim": 16, "sliding_windows": [[16, 4], [16, 0]]}, num_key_value_heads=4),
        "rt_detr_v2": transformer("rt_detr_v2", "RTDetrV2ForObjectDetection", picture(6, CLASSES, pixels=64),
                                  backbone_config={"model_type": "rt_detr_resnet", "embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1],
                                                   "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"]},
                                  encoder_hidden_dim=32, encoder_in_channels=[16, 32, 32], feat_strides=[8, 16, 32], d_model=32, num_queries=6,
                                  decoder_in_channels=[32, 32, 32], num_denoising=0, encode_proj_layers=[2]),
        "grounding-dino": transformer("grounding-dino", "GroundingDinoForObjectDetection", lambda: {"pixel_values": noise(3, 64, 64), "input_ids": tokens(), "target": noise(6, LENGTH)},
                                      backbone_config=SMALL_SWIN, text_config={"model_type": "bert", **SMALL_TEXT}, num_queries=6, max_text_len=LENGTH),
        "seamless_m4t": transformer("seamless_m4t", "SeamlessM4TForTextToText", pairs, without="layerdrop", encoder_layerdrop=0.0, decoder_layerdrop=0.0),
        "musicgen_melody_decoder": transformer("musicgen_melody_decoder", "MusicgenMelodyForCausalLM",
                                               lambda: {"input_ids": torch.randint(WORDS, (BATCH * 2, LENGTH)), "labels": torch.randint(WORDS, (BATCH, LENGTH, 2))}, num_codebooks=2),
        "colpali": transformer("colpali", "ColPaliForRetrieval", lambda: {"input_ids": tokens(), "target": noise(LENGTH, 16)}, vlm_config={"model_type": "paligemma", "text_config": {"model_type": "gemma", **SMALL_TEXT, "head_dim": 16}, "vision_config": siglip, "image_token_id": WORDS - 1, "projection_dim": 64}, embedding_dim=16),
    }  # fmt: skip


def picture_tokens(count: int) -> Tensor:
    """Token ids of texts, each with 16 placeholder tokens for the patches of an image."""
    words = torch.randint(3, WORDS - 1, (BATCH, count))
    words[:, 2:18] = WORDS - 1
    return words


# torchvision, timm, diffusers


def pictures(pixels: int = PIXELS) -> Callable[[], Batch]:
    return lambda: {"x": noise(3, pixels, pixels), "target": classes()}


def _dense(kind: str, name: str = "x") -> Architecture:
    """A class for each pixel."""

    def build() -> nn.Module:
        from torchvision.models import segmentation

        return getattr(segmentation, kind)(num_classes=CLASSES, weights_backbone=None)

    return Architecture(
        library="torchvision", build=build, batch=lambda: {name: noise(3, 64, 64), "target": noise(CLASSES, 64, 64)}
    )


def _films(name: str) -> Architecture:
    def build() -> nn.Module:
        from torchvision.models import video

        return getattr(video, name)(num_classes=CLASSES)

    return Architecture(
        library="torchvision", build=build, batch=lambda: {"x": noise(3, 4, PIXELS, PIXELS), "target": classes()}
    )


def _convnext() -> Architecture:
    def build() -> nn.Module:
        from torchvision.models.convnext import CNBlockConfig, ConvNeXt

        return ConvNeXt([CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)], num_classes=CLASSES)

    return Architecture(library="torchvision", build=build, batch=pictures())


def _swin_v2_block(*given: Any, **more: Any) -> nn.Module:
    from torchvision.models.swin_transformer import SwinTransformerBlockV2

    return SwinTransformerBlockV2(*given, **more)


def _swin_v2_merging(*given: Any, **more: Any) -> nn.Module:
    from torchvision.models.swin_transformer import PatchMergingV2

    return PatchMergingV2(*given, **more)


def _flow() -> nn.Module:
    """Optical flow of two pictures, by two steps of its recurrent unit."""
    from torchvision.models.optical_flow import raft_small

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.raft = raft_small()

        def forward(self, image1: Tensor, image2: Tensor) -> Tensor:
            return self.raft(image1, image2, num_flow_updates=2)[-1]

    return Flow()


class Detection(nn.Module):
    """A detector of torchvision and the sum of its losses, for pictures with boxes."""

    def __init__(self, kind: str) -> None:
        from torchvision.models import detection
        from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

        super().__init__()
        if kind.startswith("ssd"):
            self.detector = getattr(detection, kind)(weights=None, weights_backbone=None, num_classes=CLASSES)
            return
        backbone = resnet_fpn_backbone(
            backbone_name="resnet18", weights=None, trainable_layers=5, norm_layer=nn.BatchNorm2d
        )
        self.detector = getattr(detection, kind)(backbone, num_classes=CLASSES, min_size=64, max_size=64)

    def forward(self, images: Tensor, boxes: Tensor, labels: Tensor) -> dict[str, Tensor]:
        targets = [{"boxes": box, "labels": label} for box, label in zip(boxes, labels, strict=True)]
        return {"loss": sum(self.detector(list(images), targets).values())}


def _detector(kind: str) -> Architecture:
    def batch() -> Batch:
        corners = torch.rand(BATCH, 2, 2) * 30
        return {"images": noise(3, 64, 64), "boxes": torch.cat([corners, corners + 20], -1),
                "labels": torch.randint(1, CLASSES, (BATCH, 2))}  # fmt: skip

    return Architecture(library="torchvision", build=lambda: Detection(kind), batch=batch)


def _mvit() -> nn.Module:
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    blocks = [
        MSBlockConfig(num_heads=heads, input_channels=given, output_channels=32, kernel_q=[3] * 3, kernel_kv=[3] * 3,
                      stride_q=[1, stride, stride], stride_kv=[1, 3 - stride, 3 - stride])
        for heads, given, stride in ((1, 16, 1), (2, 32, 2))
    ]  # fmt: skip
    return MViT(spatial_size=(PIXELS, PIXELS), temporal_size=4, block_setting=blocks, residual_pool=True,
                residual_with_cls_embed=False, rel_pos_embed=True, proj_after_attn=True, num_classes=CLASSES)  # fmt: skip


def _swin3d() -> nn.Module:
    from torchvision.models.video import SwinTransformer3d

    sizes: dict[str, Any] = {"patch_size": [2, 4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
    return SwinTransformer3d(**sizes, window_size=[2, 4, 4], num_classes=CLASSES)


def of_torchvision() -> dict[str, Architecture]:
    def seen(name: str, pixels: int = PIXELS, given: dict[str, Any] | None = None) -> Architecture:
        def build() -> nn.Module:
            from torchvision import models

            return operator.attrgetter(name)(models)(num_classes=CLASSES, **(given or {}))

        return Architecture(library="torchvision", build=build, batch=pictures(pixels))

    plain = "resnet18 mobilenet_v3_small shufflenet_v2_x0_5 squeezenet1_1 mnasnet0_5"
    found = {f"tv_{name}": seen(name) for name in plain.split()}
    # Batch norms over the last pixel of a few small pictures would magnify rounding to 1e-10.
    found |= {f"tv_{name}": seen(name, 64) for name in ("mobilenet_v2", "regnet_y_400mf")}
    further = "regnet_x_400mf shufflenet_v2_x1_0 squeezenet1_0 mobilenet_v3_large mnasnet1_0 densenet121"
    found |= {f"tv_{name}": seen(name, 64) for name in further.split()}
    found |= {
        f"tv_quantized_{name}": seen(f"quantization.{name}", 64, {"quantize": False})
        for name in ("resnet18", "mobilenet_v2", "mobilenet_v3_large", "shufflenet_v2_x0_5")
    }
    found["tv_deeplabv3_resnet50"] = _dense("deeplabv3_resnet50")
    found["tv_googlenet"] = seen("googlenet", given={"aux_logits": False, "init_weights": False})

    def small(kind: str, pixels: int = PIXELS, **given: Any) -> Architecture:
        def build() -> nn.Module:
            from torchvision import models

            return operator.attrgetter(kind)(models)(num_classes=CLASSES, **given)

        return Architecture(library="torchvision", build=build, batch=pictures(pixels))

    found["tv_vgg11"] = seen("vgg11_bn")
    found["tv_alexnet"] = seen("alexnet", 64)
    found["tv_efficientnet"] = seen("efficientnet_b0", 64)
    found["tv_inception_v3"] = seen("inception_v3", 96, {"aux_logits": False, "init_weights": False})
    found["tv_resnext50"] = seen("resnext50_32x4d")
    found |= {f"tv_{name}": _dense(name) for name in ("fcn_resnet50", "deeplabv3_mobilenet_v3_large")}
    found["tv_lraspp"] = _dense("lraspp_mobilenet_v3_large", "input")
    films = lambda: {"x": noise(3, 4, PIXELS, PIXELS), "target": classes()}  # noqa: E731
    found |= {f"tv_{name}": _films(name) for name in ("r2plus1d_18", "mc3_18", "r3d_18")}
    found |= {
        f"tv_{build.__name__.strip('_')}": Architecture(library="torchvision", build=build, batch=films)
        for build in (_mvit, _swin3d)
    }
    found |= {f"tv_{kind.lower()}": _detector(kind) for kind in ("RetinaNet", "FCOS", "ssdlite320_mobilenet_v3_large")}
    found["tv_convnext"] = _convnext()
    found["tv_swin_v2"] = small("SwinTransformer", patch_size=[4, 4], embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4],
                                block=_swin_v2_block, downsample_layer=_swin_v2_merging)  # fmt: skip
    found["tv_raft"] = Architecture(library="torchvision", build=_flow, batch=lambda: {"image1": noise(3, 128, 128)[:2], "image2": noise(3, 128, 128)[:2], "target": noise(2, 128, 128)[:2]})  # fmt: skip
    found["tv_densenet"] = small("DenseNet", growth_rate=8, block_config=(2, 2), num_init_features=16)
    found["tv_vit"] = small(
        "VisionTransformer", image_size=PIXELS, patch_size=8, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128
    )
    swin = {"patch_size": [4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
    found["tv_swin"] = small("SwinTransformer", **swin)
    found["tv_maxvit"] = small(
        "MaxVit",
        input_size=(PIXELS, PIXELS),
        stem_channels=16,
        partition_size=4,
        block_channels=[16, 32],
        block_layers=[1, 1],
        head_dim=8,
        stochastic_depth_prob=0.1,
    )
    return found


def _multiscale() -> nn.Module:
    from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg

    sizes = MultiScaleVitCfg(depths=(1, 1, 1, 1), embed_dim=16, num_heads=1)
    return MultiScaleVit(sizes, img_size=(64, 64), num_classes=CLASSES)


# Further named models of timm, whose sizes `derived.classifier` finds.
NAMED = (
    "mixnet_s tinynet_e efficientnet_cc_b0_4e mobilenet_edgetpu_v2_xs ecaresnet26t resnetblur50 halonet26t haloregnetz_b "
    "lamhalobotnet50ts_256 bat_resnext26ts vit_small_patch14_reg4_dinov2 vit_small_resnet26d_224 caformer_s18 convformer_s18 "
    "maxxvit_rmlp_nano_rw_256 coatnext_nano_rw_224 convnextv2_atto regnetv_040 eca_nfnet_l0 nf_regnet_b0 skresnext50_32x4d "
    "deit3_small_patch16_224 resnetv2_50x1_bit resnetv2_50d_evos cspresnet50 darknet53 ghostnetv2_100 mobilevitv2_050 "
    "edgenext_base fastvit_mci0 efficientvit_l1 swin_s3_tiny_224 beitv2_base_patch16_224 vit_pwee_patch16_reg1_gap_256 test_vit4 "
    "test_convnext3 test_efficientnet_gn vit_base_patch16_rope_mixed_224 vit_small_patch16_dinov3 xcit_tiny_12_p8_224 pvt_v2_b2_li "
    "cait_s24_224 visformer_small seresnet50 resnet33ts gernet_s mobilenetv3_small_050 fbnetc_100 spnasnet_100 vit_base_patch16_clip_224 "
    "eva_giant_patch14_224 test_resnet convnext_zepto_rms test_vit2 vit_base_patch16_xp_224 vit_base_r26_s32_224 seresnextaa101d_32x8d"
)


def of_timm() -> dict[str, Architecture]:
    def seen(name: str, pixels: int = PIXELS, **given: Any) -> Architecture:
        def build() -> nn.Module:
            import timm

            return timm.create_model(name, num_classes=CLASSES, **given)

        return Architecture(library="timm", build=build, batch=pictures(pixels))

    def small(kind: str, pixels: int = 64, **given: Any) -> Architecture:
        """A class of timm, of which the named variants fix the sizes."""

        def build() -> nn.Module:
            module, name = kind.split(".")
            return getattr(importlib.import_module(f"timm.models.{module}"), name)(num_classes=CLASSES, **given)

        return Architecture(library="timm", build=build, batch=pictures(pixels))

    def mixer(block: str, **given: Any) -> Architecture:
        def build() -> nn.Module:
            from timm.models import mlp_mixer

            sizes: dict[str, Any] = {"img_size": PIXELS, "patch_size": 8, "embed_dim": 64, "num_blocks": 2, **given}
            kinds = {"mlp_layer": mlp_mixer.GatedMlp} if block == "SpatialGatingBlock" else {}
            return mlp_mixer.MlpMixer(num_classes=CLASSES, block_layer=getattr(mlp_mixer, block), **kinds, **sizes)

        return Architecture(library="timm", build=build, batch=pictures())

    def named(name: str) -> Architecture:
        return Architecture(
            library="timm", build=lambda: derived.classifier(name).model(),
            batch=lambda: pictures(derived.classifier(name).pixels)(),
        )  # fmt: skip

    sight = {"img_size": PIXELS, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4}
    return {
        **{f"timm_{name}": named(name) for name in NAMED.split()},
        "timm_beit": seen("beit_base_patch16_224", **sight),
        "timm_cait": seen("cait_xxs24_224", **sight, depth_token_only=1),
        "timm_convnext": seen("convnext_atto", depths=(1, 1, 1, 1), dims=(16, 24, 32, 48)),
        "timm_convit": seen("convit_tiny", **sight),
        "timm_deit": seen("deit_tiny_distilled_patch16_224", **sight),
        "timm_eva": seen("eva02_tiny_patch14_224", **sight),
        "timm_ghostnet": seen("ghostnet_050"),
        "timm_pit": seen("pit_ti_224", img_size=64, pixels=64),
        "timm_pvt_v2": seen("pvt_v2_b0", depths=(1, 1, 1, 1)),
        "timm_res2net": seen("res2net50_14w_8s", layers=(1, 1, 1, 1)),
        "timm_resnest": seen("resnest14d"),
        "timm_rexnet": seen("rexnet_100"),
        "timm_sequencer": seen("sequencer2d_s", img_size=PIXELS, layers=(1, 1, 1, 1), embed_dims=(16, 32, 32, 32)),
        "timm_swin": seen("swin_tiny_patch4_window7_224", img_size=PIXELS, window_size=4, embed_dim=16,
                          depths=(2, 2), num_heads=(2, 4)),
        "timm_twins": seen("twins_svt_small", img_size=64, pixels=64, depths=(1, 1, 1, 1)),
        "timm_vit": seen("vit_tiny_patch16_224", **sight),
        "timm_xcit": seen("xcit_nano_12_p16_224", **sight),
        "timm_coat": seen("coat_lite_tiny", pixels=64, img_size=64, embed_dims=(16, 16, 32, 32), serial_depths=(1, 1, 1, 1)),
        "timm_cs3darknet": seen("cs3darknet_s", pixels=64),
        "timm_crossvit": seen("crossvit_tiny_240", pixels=48, img_size=48, img_scale=(1.0, 32 / 48), embed_dim=(32, 64), num_heads=(2, 2),
                              depth=((1, 2, 0),)),
        "timm_davit": seen("davit_tiny", pixels=64, depths=(1, 1), embed_dims=(16, 32), num_heads=(2, 2), window_size=4),
        "timm_densenet": seen("densenet121", growth_rate=8, block_config=(2, 2)),
        "timm_dpn": seen("dpn68", pixels=64),
        "timm_edgenext": seen("edgenext_x_small", pixels=64, dims=(16, 16, 32, 32), depths=(1, 1, 2, 1), heads=(2, 2, 2, 2)),
        "timm_efficientformer": seen("efficientformer_l1", pixels=224, embed_dims=(16, 16, 32, 32), depths=(1, 1, 1, 2)),
        "timm_efficientformerv2": seen("efficientformerv2_s0", pixels=64, img_size=64),
        "timm_efficientnet": seen("test_efficientnet"),
        "timm_efficientvim": seen("efficientvim_m1", pixels=64),
        "timm_efficientvit_mit": seen("efficientvit_b0", pixels=64),
        "timm_efficientvit_msra": seen("efficientvit_m0", pixels=64, img_size=64),
        "timm_fasternet": seen("fasternet_t0", embed_dim=16, depths=(1, 1, 1, 1)),
        "timm_fastvit": seen("fastvit_s12", pixels=64, layers=(1, 1, 1, 1), embed_dims=(16, 16, 32, 32)),
        "timm_hgnet": seen("hgnetv2_b0", pixels=64),
        "timm_hiera": seen("hiera_tiny_224", pixels=64, img_size=64, embed_dim=16, stages=(1, 1, 1, 1)),
        "timm_iformer": seen("iformer_t", pixels=64),
        "timm_inception_next": seen("inception_next_atto", dims=(16, 24, 32, 48), depths=(1, 1, 1, 1)),
        "timm_levit": seen("levit_128s", pixels=64, img_size=64, embed_dim=(16, 32, 32), num_heads=(2, 2, 2), depth=(1, 1, 1), key_dim=8),
        "timm_mambaout": seen("test_mambaout"),
        "timm_mobileone": seen("mobileone_s0", pixels=64),
        "timm_mobilevit": seen("mobilevit_xxs", pixels=64),
        "timm_nfnet": seen("test_nfnet"),
        "timm_rdnet": seen("rdnet_tiny", growth_rates=(16, 16), num_blocks_list=(2, 2), is_downsample_block=(None, True),
                           num_init_features=16, transition_compression_ratio=0.5, ls_init_value=1e-6),
        "timm_repvit": seen("repvit_m0_9", pixels=64),
        "timm_resnetv2": seen("resnetv2_18", layers=(1, 1, 1, 1)),
        "timm_samvit": seen("samvit_base_patch16", img_size=64, pixels=64, patch_size=8, embed_dim=64, depth=2, num_heads=4, global_attn_indexes=(1,), window_size=4),
        "timm_shvit": seen("shvit_s1", pixels=64),
        "timm_skresnet": seen("skresnet18", layers=(1, 1, 1, 1)),
        "timm_starnet": seen("starnet_s050", pixels=64),
        "timm_swiftformer": seen("swiftformer_xs", pixels=224, embed_dims=(16, 16, 32, 32), layers=(1, 1, 1, 1)),
        "timm_swinv2": seen("swinv2_tiny_window8_256", img_size=PIXELS, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4)),
        "timm_swinv2_cr": seen("swinv2_cr_tiny_224", img_size=PIXELS, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4)),
        "timm_tiny_vit": seen("tiny_vit_5m_224", pixels=64, embed_dims=(16, 16, 32, 32), depths=(1, 1, 1, 1), num_heads=(2, 2, 2, 2), window_sizes=(4, 4, 4, 2)),
        "timm_tnt": seen("tnt_s_patch16_224", img_size=PIXELS, patch_size=8, embed_dim=64, inner_dim=16, depth=2, num_heads_outer=4, num_heads_inner=2),
        "timm_visformer": seen("visformer_tiny", img_size=PIXELS, embed_dim=32, depth=(1, 1, 1), num_heads=2),
        "timm_vit_hybrid": seen("vit_tiny_r_s16_p8_224", img_size=64, pixels=64, depth=2, embed_dim=64, num_heads=4),
        "timm_vit_relpos": seen("vit_relpos_small_patch16_224", **sight),
        "timm_vovnet": seen("ese_vovnet19b_slim_dw", pixels=64),
        "timm_botnet": seen("botnet26t_256", img_size=64, pixels=64),
        "timm_byobnet": seen("test_byobnet"),
        "timm_coatnet": seen("test_coatnet", img_size=64, pixels=64),
        "timm_cpubone": seen("cpubone_b0_bfrobust", pixels=64),
        "timm_csatv2": seen("csatv2", pixels=64),
        "timm_cspnext": seen("cspnext_tiny", pixels=64),
        "timm_dla": seen("dla46_c", pixels=64),
        "timm_dla_res2net": seen("dla60_res2net", pixels=64),
        "timm_efficientnet_evos": seen("test_efficientnet_evos"),
        "timm_efficientnet_ln": seen("test_efficientnet_ln"),
        "timm_fbnetv3": seen("fbnetv3_b", pixels=64),
        "timm_gcresnext": seen("gcresnext26ts", pixels=64),
        "timm_hardcorenas": seen("hardcorenas_a", pixels=64),
        "timm_hrnet": seen("hrnet_w18_small", pixels=64),
        "timm_inception_resnet_v2": seen("inception_resnet_v2", pixels=96),
        "timm_inception_v3": seen("inception_v3", pixels=96),
        "timm_inception_v4": seen("inception_v4", pixels=96),
        "timm_lambda": seen("lambda_resnet26t", pixels=64),
        "timm_lcnet": seen("lcnet_035", pixels=64),
        "timm_lcnetv2": seen("lcnetv2_small", pixels=64),
        "timm_lowformer": seen("lowformer_b0", pixels=64),
        "timm_mobilenetv4": seen("mobilenetv4_hybrid_medium", pixels=64),
        "timm_naflexvit": seen("naflexvit_base_patch16_gap", img_size=PIXELS, patch_size=8, embed_dim=64, depth=2, num_heads=4),
        "timm_regnet": seen("regnety_002", pixels=64),
        "timm_regnetz": seen("regnetz_b16", pixels=64),
        "timm_repghost": seen("repghostnet_050", pixels=64),
        "timm_repvgg": seen("repvgg_a0", pixels=64),
        "timm_res2next": seen("res2next50", layers=(1, 1, 1, 1)),
        "timm_resnet_aa": seen("resnetaa34d", layers=(1, 1, 1, 1)),
        "timm_resnet_rs": seen("resnetrs50", layers=(1, 1, 1, 1)),
        "timm_selecsls": seen("selecsls42", pixels=64),
        "timm_senet": seen("legacy_seresnet18", pixels=64),
        "timm_tresnet": seen("tresnet_m", layers=(1, 1, 1, 1), pixels=64),
        "timm_vgg": seen("vgg11_bn"),
        "timm_vitamin": seen("vitamin_small_224", img_size=64, pixels=64),
        "timm_vit_parallel": seen("vit_small_patch16_36x1_224", **sight),
        "timm_vit_rope": seen("vit_small_patch16_rope_224", **sight),
        "timm_vit_siglip": seen("vit_base_patch16_siglip_224", **sight),
        "timm_poolformer": small("metaformer.MetaFormer", depths=(1, 1, 1, 1), dims=(16, 16, 32, 32)),
        "timm_convmixer": small("convmixer.ConvMixer", pixels=56, dim=32, depth=2),
        "timm_focalnet": small("focalnet.FocalNet", depths=(1, 1, 1, 1), embed_dim=16),
        "timm_gcvit": small("gcvit.GlobalContextVit", img_size=64, window_size=(4, 4, 4, 2), depths=(1, 1, 1, 1), embed_dim=16, num_heads=(2, 2, 2, 2)),
        "timm_mixer": mixer("MixerBlock"),
        "timm_resmlp": mixer("ResBlock", mlp_ratio=4),
        "timm_gmlp": mixer("SpatialGatingBlock", mlp_ratio=4),
        "timm_nasnet": small("nasnet.NASNetALarge", pixels=96, stem_size=16, num_features=192),
        "timm_nextvit": seen("nextvit_small", pixels=64, depths=(1, 2, 5, 2)),
        "timm_hieradet": seen("sam2_hiera_tiny", pixels=64, embed_dim=16),
        "timm_mvitv2": Architecture(library="timm", build=_multiscale, batch=pictures(64)),
        "timm_nest": small("nest.Nest", img_size=64, embed_dims=(16, 32, 64), depths=(1, 1, 2), num_heads=(2, 2, 4)),
        "timm_volo": small("volo.VOLO", img_size=64, layers=(1, 1, 1, 1), embed_dims=(32, 64, 64, 64), num_heads=(2, 4, 4, 4), outlook_attention=(True, False, False, False)),
        "timm_xception": seen("legacy_xception", pixels=96),
        "timm_xception41": seen("xception41p", pixels=64),
        "timm_deepseek_vit": seen("deepseek_vit_412m", img_size=PIXELS, patch_size=8, embed_dim=64, depth=2, num_heads=4),
        "timm_gemma4_vit": seen("gemma4_vit_167m", img_size=48, pixels=48, patch_size=8, embed_dim=64, depth=2, num_heads=4),
        "timm_qwen3_vit": seen("qwen3_vit_88m", img_size=PIXELS, patch_size=8, embed_dim=64, depth=2, num_heads=4),
        "timm_mobilenetv5": seen("mobilenetv5_base", pixels=64),
        "timm_pnasnet": seen("pnasnet5large", pixels=96),
    }  # fmt: skip


def diffusion(kind: str, inputs: Callable[[], Batch], **given: Any) -> Architecture:
    WITH_ROWS.add(kind)

    def build() -> nn.Module:
        import diffusers

        return getattr(diffusers, kind)(**given)

    return Architecture(library="diffusers", build=build, batch=inputs)


WITH_ROWS: set[str] = set()  # the classes of diffusers that have a row of their own


def derived_diffusion_rows() -> dict[str, Architecture]:
    """A row for each other network of diffusers."""
    try:
        from diffusers import _import_structure
    except ImportError:
        return {}

    def row(kind: str) -> Architecture:
        def build() -> nn.Module:
            made = derived_diffusion.recipe(kind)
            return made.model(made.config)

        return Architecture(library="diffusers", build=build, batch=lambda: derived_diffusion.recipe(kind).batch())

    kinds = [kind for kind in _import_structure["models"] if re.search(r"Model$|Transformer|Autoencoder|UNet", kind)]
    return {f"diffusers_{kind}": row(kind) for kind in kinds if kind not in WITH_ROWS}


def of_diffusers() -> dict[str, Architecture]:
    made = diffusion

    def denoised(channels: int = 4, size: int = 8, name: str = "sample", **others: Callable[[], Tensor]) -> Any:
        return lambda: {
            name: noise(channels, size, size),
            "timestep": torch.randint(1000, (BATCH,)),
            **{key: entry() for key, entry in others.items()},
            "target": noise(channels, size, size),
        }

    words = lambda width: lambda: noise(6, width)  # noqa: E731
    unet = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 8}
    return {
        "unet2d": made(
            "UNet2DModel", denoised(3), in_channels=3, out_channels=3, **unet, attention_head_dim=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        ),
        "unet2d_condition": made(
            "UNet2DConditionModel", denoised(encoder_hidden_states=words(32)), cross_attention_dim=32, **unet,
            attention_head_dim=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        ),
        "autoencoder_kl": made(
            "AutoencoderKL", lambda: {"sample": noise(3, 16, 16), "target": noise(3, 16, 16)},
            block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4, latent_channels=4,
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        ),
        "vq_model": made(
            "VQModel", lambda: {"sample": noise(3, 16, 16), "target": noise(3, 16, 16)},
            block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4, num_vq_embeddings=16,
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        ),
        "dit": made(
            "DiTTransformer2DModel", denoised(size=8, name="hidden_states", class_labels=classes),
            num_attention_heads=4, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=8, patch_size=2,
            num_embeds_ada_norm=1000, norm_num_groups=4,
        ),
        "sd3": made(
            "SD3Transformer2DModel",
            denoised(name="hidden_states", encoder_hidden_states=words(32), pooled_projections=lambda: noise(32)),
            sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=4,
            joint_attention_dim=32, caption_projection_dim=64, pooled_projection_dim=32, out_channels=4,
        ),
        "flux": made(
            "FluxTransformer2DModel",
            lambda: {
                "hidden_states": noise(16, 16), "encoder_hidden_states": noise(6, 32),
                "pooled_projections": noise(32), "timestep": torch.rand(BATCH),
                "img_ids": torch.randint(4, (16, 3)), "txt_ids": torch.zeros(6, 3, dtype=torch.long),
                "target": noise(16, 16),
            },
            in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=4,
            joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
        ),
        "pixart": made(
            "PixArtTransformer2DModel",
            denoised(name="hidden_states", encoder_hidden_states=words(32)),
            num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=2,
            cross_attention_dim=64, caption_channels=32, sample_size=8, use_additional_conditions=False,
        ),
        "sana": made(
            "SanaTransformer2DModel",
            denoised(name="hidden_states", encoder_hidden_states=words(32)),
            in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=16, num_layers=2,
            num_cross_attention_heads=4, cross_attention_head_dim=16, cross_attention_dim=64, caption_channels=32,
            sample_size=8, patch_size=1,
        ),
        "auraflow": made(
            "AuraFlowTransformer2DModel",
            lambda: {
                "hidden_states": noise(4, 8, 8), "encoder_hidden_states": noise(6, 32), "timestep": torch.rand(BATCH),
                "target": noise(4, 8, 8),
            },
            sample_size=8, patch_size=2, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=1,
            attention_head_dim=16, num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=64,
            out_channels=4, pos_embed_max_size=64,
        ),
        "wan": made(
            "WanTransformer3DModel",
            lambda: {
                "hidden_states": noise(4, 2, 8, 8), "timestep": torch.randint(1000, (BATCH,)),
                "encoder_hidden_states": noise(6, 32), "target": noise(4, 2, 8, 8),
            },
            num_attention_heads=4, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=32, freq_dim=16,
            ffn_dim=64, num_layers=2, rope_max_seq_len=32,
        ),
        "cogvideox": made(
            "CogVideoXTransformer3DModel",
            lambda: {
                "hidden_states": noise(2, 4, 8, 8), "timestep": torch.randint(1000, (BATCH,)),
                "encoder_hidden_states": noise(6, 32), "target": noise(2, 4, 8, 8),
            },
            num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4, text_embed_dim=32,
            time_embed_dim=16, num_layers=2, sample_width=8, sample_height=8, sample_frames=5, patch_size=2,
            temporal_compression_ratio=4, max_text_seq_length=6,
        ),
        "unet3d_condition": made(
            "UNet3DConditionModel",
            lambda: {"sample": noise(4, 2, 8, 8), "timestep": torch.randint(1000, (BATCH,)), "encoder_hidden_states": noise(6, 32), "target": noise(4, 2, 8, 8)},
            cross_attention_dim=32, **unet, attention_head_dim=4, down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
            up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        ),
        "unet_spatio_temporal": made(
            "UNetSpatioTemporalConditionModel",
            lambda: {"sample": noise(2, 8, 8, 8), "timestep": torch.randint(1000, (BATCH,)), "encoder_hidden_states": noise(1, 32),
                     "added_time_ids": torch.randint(9, (BATCH, 3)), "target": noise(2, 4, 8, 8)},
            block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32, num_attention_heads=(2, 4), sample_size=8,
            down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"), addition_time_embed_dim=8,
            up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), projection_class_embeddings_input_dim=24,
        ),
        "autoencoder_dc": made(
            "AutoencoderDC", lambda: {"sample": noise(3, 16, 16), "target": noise(3, 16, 16)}, latent_channels=4, attention_head_dim=8,
            encoder_block_out_channels=(16, 32), decoder_block_out_channels=(16, 32), encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1),
            encoder_block_types=("ResBlock", "EfficientViTBlock"), decoder_block_types=("ResBlock", "EfficientViTBlock"),
            encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)), decoder_norm_types="rms_norm", decoder_act_fns="silu",
        ),
        "autoencoder_tiny": made(
            "AutoencoderTiny", lambda: {"sample": noise(3, 16, 16), "target": noise(3, 16, 16)}, encoder_block_out_channels=(16, 16),
            decoder_block_out_channels=(16, 16), num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1),
        ),
        "autoencoder_oobleck": made(
            "AutoencoderOobleck", lambda: {"sample": noise(2, 64), "target": noise(2, 64)}, encoder_hidden_size=16, downsampling_ratios=[2, 4],
            channel_multiples=[1, 2], decoder_channels=16, decoder_input_channels=8,
        ),
        "autoencoder_wan": made(
            "AutoencoderKLWan", lambda: {"sample": noise(3, 1, 16, 16), "target": noise(3, 1, 16, 16)}, base_dim=8, z_dim=4, dim_mult=[1, 2],
            num_res_blocks=1, temperal_downsample=[True], latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
        ),
        "autoencoder_temporal": made(
            "AutoencoderKLTemporalDecoder", lambda: {"sample": noise(3, 16, 16), "num_frames": 2, "target": noise(3, 16, 16)},
            block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2, latent_channels=4,
        ),
        "hunyuan_video": made(
            "HunyuanVideoTransformer3DModel",
            lambda: {"hidden_states": noise(4, 2, 8, 8), "timestep": torch.randint(1000, (BATCH,)), "encoder_hidden_states": noise(6, 32),
                     "encoder_attention_mask": torch.ones(BATCH, 6, dtype=torch.long), "pooled_projections": noise(16), "guidance": torch.rand(BATCH), "target": noise(4, 2, 8, 8)},
            in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=16, num_layers=1, num_single_layers=1, num_refiner_layers=1,
            patch_size=2, patch_size_t=1, text_embed_dim=32, pooled_projection_dim=16, rope_axes_dim=(4, 6, 6),
        ),
        "ltx_video": made(
            "LTXVideoTransformer3DModel",
            lambda: {"hidden_states": noise(32, 8), "encoder_hidden_states": noise(6, 32), "timestep": torch.randint(1000, (BATCH,)),
                     "encoder_attention_mask": torch.ones(BATCH, 6), "num_frames": 2, "height": 4, "width": 4, "target": noise(32, 8)},
            in_channels=8, out_channels=8, num_attention_heads=4, attention_head_dim=16, cross_attention_dim=64, num_layers=2, caption_channels=32,
        ),
        "mochi": made(
            "MochiTransformer3DModel",
            lambda: {"hidden_states": noise(4, 2, 8, 8), "encoder_hidden_states": noise(6, 32), "timestep": torch.randint(1000, (BATCH,)),
                     "encoder_attention_mask": torch.ones(BATCH, 6, dtype=torch.bool), "target": noise(4, 2, 8, 8)},
            patch_size=2, num_attention_heads=4, attention_head_dim=8, num_layers=2, pooled_projection_dim=16, in_channels=4, text_embed_dim=32,
            time_embed_dim=4, max_sequence_length=6,
        ),
        "lumina2": made(
            "Lumina2Transformer2DModel",
            lambda: {"hidden_states": noise(4, 8, 8), "timestep": torch.rand(BATCH), "encoder_hidden_states": noise(6, 32),
                     "encoder_attention_mask": torch.ones(BATCH, 6, dtype=torch.bool), "target": noise(4, 8, 8)},
            sample_size=8, patch_size=2, in_channels=4, hidden_size=48, num_layers=2, num_refiner_layers=1, num_attention_heads=4, num_kv_heads=2,
            multiple_of=16, axes_dim_rope=(4, 4, 4), axes_lens=(32, 16, 16), cap_feat_dim=32,
        ),
        "cogview4": made(
            "CogView4Transformer2DModel",
            lambda: {"hidden_states": noise(4, 8, 8), "encoder_hidden_states": noise(6, 32), "timestep": torch.randint(1000, (BATCH,)),
                     "original_size": noise(2).abs(), "target_size": noise(2).abs(), "crop_coords": noise(2).abs(), "target": noise(4, 8, 8)},
            patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=4, text_embed_dim=32, time_embed_dim=16,
            condition_dim=8, sample_size=8, rope_axes_dim=(16, 16),
        ),
        "allegro": made(
            "AllegroTransformer3DModel",
            lambda: {"hidden_states": noise(4, 2, 8, 8), "encoder_hidden_states": noise(1, 6, 32), "timestep": torch.randint(1000, (BATCH,)),
                     "attention_mask": torch.ones(BATCH, 2, 8, 8), "encoder_attention_mask": torch.ones(BATCH, 1, 6),
                     "image_rotary_emb": None, "target": noise(4, 2, 8, 8)},
            num_attention_heads=4, attention_head_dim=12, num_layers=2, cross_attention_dim=48, sample_height=8, sample_width=8, sample_frames=2,
            caption_channels=32,
        ),
        "latte": made(
            "LatteTransformer3DModel",
            lambda: {"hidden_states": noise(4, 2, 8, 8), "timestep": torch.randint(1000, (BATCH,)), "encoder_hidden_states": noise(6, 32), "target": noise(4, 2, 8, 8)},
            num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=2, cross_attention_dim=64, sample_size=8, patch_size=2,
            caption_channels=32, norm_type="ada_norm_single", norm_elementwise_affine=False, video_length=2, attention_bias=True,
        ),
        "chroma": made(
            "ChromaTransformer2DModel",
            lambda: {"hidden_states": noise(16, 16), "encoder_hidden_states": noise(6, 32), "timestep": torch.rand(BATCH), "img_ids": torch.randint(4, (16, 3)),
                     "txt_ids": torch.zeros(6, 3, dtype=torch.long), "attention_mask": torch.ones(BATCH, 22, dtype=torch.bool), "target": noise(16, 16)},
            in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=4, joint_attention_dim=32, axes_dims_rope=(4, 6, 6),
            approximator_num_channels=16, approximator_hidden_dim=32, approximator_layers=1,
        ),
        "bria": made(
            "BriaTransformer2DModel",
            lambda: {"hidden_states": noise(16, 16), "encoder_hidden_states": noise(6, 32), "timestep": torch.rand(BATCH), "img_ids": torch.randint(4, (16, 3)),
                     "txt_ids": torch.zeros(6, 3, dtype=torch.long), "target": noise(16, 16)},
            in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=4, joint_attention_dim=32, axes_dims_rope=[4, 6, 6],
        ),
        "prx": made(
            "PRXTransformer2DModel",
            lambda: {"hidden_states": noise(4, 8, 8), "timestep": torch.rand(BATCH), "encoder_hidden_states": noise(6, 32), "target": noise(4, 8, 8)},
            in_channels=4, patch_size=2, context_in_dim=32, hidden_size=64, num_heads=4, depth=2, axes_dim=[8, 8],
        ),
        "prior_transformer": made(
            "PriorTransformer",
            lambda: {"hidden_states": noise(32), "timestep": torch.randint(1000, (BATCH,)), "proj_embedding": noise(32), "encoder_hidden_states": noise(7, 32), "target": noise(32)},
            num_attention_heads=4, attention_head_dim=16, num_layers=2, embedding_dim=32, num_embeddings=7,
        ),
        "cosmos": made(
            "CosmosTransformer3DModel",
            lambda: {"hidden_states": noise(4, 2, 8, 8), "timestep": torch.rand(BATCH), "encoder_hidden_states": noise(6, 32),
                     "padding_mask": torch.zeros(1, 1, 8, 8), "target": noise(4, 2, 8, 8)},
            in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=16, num_layers=2, text_embed_dim=32, adaln_lora_dim=4, max_size=(4, 8, 8),
        ),
        "flux2": made(
            "Flux2Transformer2DModel",
            lambda: {"hidden_states": noise(16, 16), "encoder_hidden_states": noise(6, 32), "timestep": torch.rand(BATCH), "guidance": torch.rand(BATCH),
                     "img_ids": torch.randint(4, (16, 4)), "txt_ids": torch.zeros(6, 4, dtype=torch.long), "target": noise(16, 16)},
            in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=4, joint_attention_dim=32,
            timestep_guidance_channels=16, axes_dims_rope=(4, 4, 4, 4),
        ),
        "stable_audio": made(
            "StableAudioDiTModel",
            lambda: {"hidden_states": noise(8, 16), "timestep": torch.rand(BATCH), "encoder_hidden_states": noise(6, 24), "global_hidden_states": noise(1, 32), "target": noise(8, 16)},
            sample_size=16, in_channels=8, num_layers=2, attention_head_dim=16, num_attention_heads=4, num_key_value_attention_heads=2, out_channels=8,
            cross_attention_dim=24, time_proj_dim=16, global_states_input_dim=32, cross_attention_input_dim=24,
        ),
        "skyreels": made(
            "SkyReelsV2Transformer3DModel",
            lambda: {"hidden_states": noise(4, 2, 8, 8), "timestep": torch.randint(1000, (BATCH,)), "encoder_hidden_states": noise(6, 32), "target": noise(4, 2, 8, 8)},
            num_attention_heads=4, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=32, freq_dim=16, ffn_dim=64, num_layers=2, rope_max_seq_len=32,
        ),
        "uvit": made(
            "UVit2DModel",
            lambda: {"input_ids": torch.randint(30, (BATCH, 4, 4)), "encoder_hidden_states": noise(6, 32), "pooled_text_emb": noise(32), "micro_conds": torch.rand(BATCH, 5),
                     "target": noise(32, 4, 4)},
            hidden_size=64, cond_embed_dim=32, micro_cond_encode_dim=8, micro_cond_embed_dim=40, encoder_hidden_size=32, vocab_size=34, codebook_size=32,
            in_channels=32, block_out_channels=32, num_res_blocks=1, block_num_heads=4, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, sample_size=4,
        ),
    }  # fmt: skip


class Called(nn.Module):
    """A network whose arguments a function makes of the entries of a batch: lists, positions, sizes."""

    def __init__(self, net: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self.call = net, call

    def forward(self, **entries: Tensor) -> Any:
        return self.call(self.net, **entries)


def called_diffusers() -> dict[str, Architecture]:
    """Networks that take lists of tensors, positions or sizes in addition to tensors of examples."""

    def called(
        kind: str, call: Callable[..., Any], shapes: Mapping[str, tuple[int, ...]], **given: Any
    ) -> Architecture:
        WITH_ROWS.add(kind)

        def build() -> nn.Module:
            import diffusers

            return Called(getattr(diffusers, kind)(**given), call)

        return Architecture(
            library="diffusers", build=build,
            batch=lambda: {name: noise(*shape) if shape else torch.rand(BATCH) for name, shape in shapes.items()},
        )  # fmt: skip

    heads: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 16}
    # fmt: off
    return {
        "z_image": called(
            "ZImageTransformer2DModel", lambda net, x, t, words: torch.stack(net([*x.unbind()], t, [*words.unbind()]).sample),
            {"x": (16, 1, 8, 8), "t": (), "words": (6, 32), "target": (16, 1, 8, 8)}, in_channels=16, dim=64, n_layers=2,
            n_refiner_layers=1, n_heads=4, n_kv_heads=4, cap_feat_dim=32, axes_dims=[4, 6, 6], axes_lens=[64, 32, 32],
        ),
        "ltx2": called(
            "LTX2VideoTransformer3DModel",
            lambda net, x, heard, words, said, t: torch.cat([each.flatten(1) for each in net(
                x, heard, words, said, t, num_frames=2, height=4, width=2, fps=24.0, audio_num_frames=10, return_dict=False)[:2]], 1),
            {"x": (16, 8), "heard": (10, 6), "words": (5, 24), "said": (5, 24), "t": (), "target": (188,)}, **heads, in_channels=8,
            out_channels=8, cross_attention_dim=64, audio_in_channels=6, audio_out_channels=6, audio_num_attention_heads=2,
            audio_attention_head_dim=16, audio_cross_attention_dim=32, num_layers=2, caption_channels=24,
        ),
        "kandinsky5": called(
            "Kandinsky5Transformer3DModel",
            lambda net, x, words, pooled, t: net(x, words, t, pooled, [torch.arange(n) for n in (2, 4, 4)], torch.arange(6)),
            {"x": (2, 8, 8, 4), "words": (6, 32), "pooled": (24,), "t": (), "target": (2, 8, 8, 4)}, in_visual_dim=4, in_text_dim=32,
            in_text_dim2=24, time_dim=64, out_visual_dim=4, model_dim=64, ff_dim=128, num_text_blocks=1, num_visual_blocks=2,
            axes_dims=(4, 6, 6), visual_cond=False,
        ),
        "kandinsky6": called(
            "Kandinsky6Transformer3DModel", lambda net, x, words, pooled, t: net(x, words, pooled, t),
            {"x": (2, 8, 8, 4), "words": (6, 32), "pooled": (24,), "t": (), "target": (2, 8, 8, 4)}, in_visual_dim=4, out_visual_dim=4,
            in_text_dim=32, in_text_dim2=24, time_dim=64, model_dim=64, ff_dim=128, num_text_blocks=1, num_visual_blocks=2,
            axes_dims=(4, 6, 6), in_audio_dim=4, out_audio_dim=4, visual_cond=False,
        ),
        "ace_step": called(
            "AceStepTransformer1DModel", lambda net, x, t, r, words, given: net(x, t, r, words, given),
            {"x": (16, 8), "t": (), "r": (), "words": (6, 64), "given": (16, 16), "target": (16, 8)}, hidden_size=64,
            intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, in_channels=24,
            audio_acoustic_hidden_dim=8, encoder_hidden_size=64, sliding_window=4,
        ),
        "wan_animate": called(
            "WanAnimateTransformer3DModel", lambda net, x, t, words, seen, pose, face: net(x, t, words, seen, pose, face),
            {"x": (12, 3, 8, 8), "t": (), "words": (6, 32), "seen": (4, 16), "pose": (4, 2, 8, 8), "face": (3, 5, 16, 16),
             "target": (4, 3, 8, 8)}, **heads, in_channels=12, latent_channels=4, out_channels=4, text_dim=32, freq_dim=32, ffn_dim=64,
            num_layers=2, image_dim=16, rope_max_seq_len=32, motion_encoder_channel_sizes={"4": 16, "8": 16, "16": 16},
            motion_encoder_size=16, motion_style_dim=16, motion_dim=4, motion_encoder_dim=16, face_encoder_hidden_dim=32,
            inject_face_latents_blocks=2,
        ),
        "bria_fibo": called(
            "BriaFiboTransformer2DModel",
            lambda net, x, words, layer, t: net(x, words, [layer] * 3, timestep=t, img_ids=torch.zeros(16, 3), txt_ids=torch.zeros(6, 3)),
            {"x": (16, 16), "words": (6, 32), "layer": (6, 16), "t": (), "target": (16, 16)}, **heads, in_channels=16, num_layers=1,
            num_single_layers=2, joint_attention_dim=32, axes_dims_rope=[4, 6, 6], text_encoder_dim=16,
        ),
        "ideogram4": called(
            "Ideogram4Transformer2DModel",
            lambda net, x, t, words: net(
                x, t, words, torch.arange(22)[:, None].expand(len(x), 22, 3), torch.ones(len(x), 22, dtype=torch.long),
                torch.tensor([3] * 6 + [2] * 16).expand(len(x), 22)),
            {"x": (22, 8), "t": (), "words": (22, 24), "target": (22, 8)}, **heads, in_channels=8, num_layers=2, intermediate_size=64,
            adaln_dim=32, llm_features_dim=24, mrope_section=(4, 2, 2),
        ),
    }
    # fmt: on


def further_diffusers() -> dict[str, Architecture]:
    """Control networks, and transformers and autoencoders that came later."""

    def step() -> Tensor:
        return torch.randint(1000, (BATCH,))

    def batch(target: tuple[int, ...], **inputs: Any) -> Callable[[], Batch]:
        """Inputs that a tuple gives are noise of that shape."""

        def made() -> Batch:
            entries = {
                key: noise(*given) if isinstance(given, tuple) else given() if callable(given) else given
                for key, given in inputs.items()
            }
            return {**entries, "target": noise(*target)}

        return made

    def coded(*shape: int, out: tuple[int, ...] = ()) -> Callable[[], Batch]:
        return batch(out or shape, sample=shape)

    ids = lambda rows, axes: lambda: torch.randint(4, (rows, axes))  # noqa: E731
    zeros = lambda rows, axes: lambda: torch.zeros(rows, axes, dtype=torch.long)  # noqa: E731
    whole = lambda *shape: lambda: torch.ones(BATCH, *shape, dtype=torch.bool)  # noqa: E731
    share = lambda: torch.rand(BATCH)  # noqa: E731
    heads: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 16}
    packed = {"hidden_states": (16, 16), "encoder_hidden_states": (6, 32), "timestep": share}
    films: dict[str, Any] = {"hidden_states": (4, 2, 8, 8), "timestep": step, "encoder_hidden_states": (6, 32)}
    flat: dict[str, Any] = {"hidden_states": (4, 8, 8), "timestep": step, "encoder_hidden_states": (6, 32)}
    double: dict[str, Any] = {
        "in_channels": 16, "num_layers": 1, "num_single_layers": 1, **heads, "joint_attention_dim": 32,
        "axes_dims_rope": [4, 6, 6],
    }  # fmt: skip
    wan: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 12, "text_dim": 32, "freq_dim": 16,
                           "ffn_dim": 64, "num_layers": 2, "rope_max_seq_len": 32}  # fmt: skip
    unet: dict[str, Any] = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4,
                            "cross_attention_dim": 32, "attention_head_dim": 4}  # fmt: skip
    stages = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4}
    hint = {"sample": (4, 8, 8), "timestep": step, "encoder_hidden_states": (6, 32), "controlnet_cond": (3, 64, 64)}
    return {
        "hunyuan_dit": diffusion(
            "HunyuanDiT2DModel",
            batch((8, 8, 8), **{**flat, "timestep": share}, text_embedding_mask=whole(6), encoder_hidden_states_t5=(5, 24), text_embedding_mask_t5=whole(5),
                  image_meta_size=lambda: torch.rand(BATCH, 6) * 64, style=lambda: torch.zeros(BATCH, dtype=torch.long), image_rotary_emb=None),
            **heads, in_channels=4, patch_size=2, sample_size=8, hidden_size=64, num_layers=2, cross_attention_dim=32, cross_attention_dim_t5=24,
            pooled_projection_dim=16, text_len=6, text_len_t5=5,
        ),
        "unet1d": diffusion(
            "UNet1DModel", batch((2, 64), sample=(2, 64), timestep=step), in_channels=2, out_channels=2, sample_size=64, extra_in_channels=64,
            block_out_channels=(32, 32, 64), layers_per_block=1,
        ),
        "transformer2d": diffusion(
            "Transformer2DModel", batch((16, 8, 8), hidden_states=(16, 8, 8), encoder_hidden_states=(6, 32)), **heads, in_channels=16, num_layers=2,
            norm_num_groups=4, cross_attention_dim=32,
        ),
        "lumina_next": diffusion(
            "LuminaNextDiT2DModel",
            batch((8, 8, 8), hidden_states=(4, 8, 8), timestep=share, encoder_hidden_states=(6, 32), encoder_mask=whole(6),
                  image_rotary_emb=lambda: torch.polar(torch.ones(384, 384, 8), torch.rand(384, 384, 8)), cross_attention_kwargs={}),
            sample_size=8, hidden_size=64, num_layers=2, num_attention_heads=4, num_kv_heads=4, multiple_of=16, cross_attention_dim=32,
        ),
        "controlnet": diffusion(
            "ControlNetModel", batch((16, 8, 8), **hint), **unet, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            conditioning_embedding_out_channels=(16, 16, 32, 32),
        ),
        "controlnet_sd3": diffusion(
            "SD3ControlNetModel",
            batch((16, 64), **flat, controlnet_cond=(4, 8, 8), pooled_projections=(16,)), **heads, sample_size=8, in_channels=4, num_layers=2,
            joint_attention_dim=32, caption_projection_dim=64, pooled_projection_dim=16, out_channels=4,
        ),
        "controlnet_flux": diffusion(
            "FluxControlNetModel",
            batch((16, 64), **packed, controlnet_cond=(16, 16), pooled_projections=(16,), img_ids=ids(16, 3), txt_ids=zeros(6, 3)),
            **double, pooled_projection_dim=16,
        ),
        "controlnet_sana": diffusion(
            "SanaControlNetModel", batch((64, 64), **flat, controlnet_cond=(4, 8, 8)), in_channels=4, out_channels=4, **heads, num_layers=2,
            num_cross_attention_heads=4, cross_attention_head_dim=16, cross_attention_dim=64, caption_channels=32, sample_size=8,
        ),
        "consisid": diffusion(
            "ConsisIDTransformer3DModel", batch((2, 4, 8, 8), hidden_states=(2, 4, 8, 8), encoder_hidden_states=(6, 32), timestep=step), **heads,
            in_channels=4, out_channels=4, time_embed_dim=16, text_embed_dim=32, num_layers=2, sample_width=8, sample_height=8, sample_frames=5,
            max_text_seq_length=6,
        ),
        "easyanimate": diffusion(
            "EasyAnimateTransformer3DModel", batch((4, 2, 8, 8), **films), **heads, in_channels=4, out_channels=4, patch_size=2, sample_width=8,
            sample_height=8, num_layers=2, mmdit_layers=1, time_embed_dim=16, text_embed_dim=32,
        ),
        "hidream": diffusion(
            "HiDreamImageTransformer2DModel",
            batch((4, 16, 4), hidden_states=(4, 8, 8), timesteps=step, encoder_hidden_states_t5=(6, 32),
                  encoder_hidden_states_llama3=lambda: torch.randn(2, BATCH, 6, 32), pooled_embeds=(16,)),
            patch_size=2, in_channels=4, num_layers=1, num_single_layers=1, **heads, caption_channels=[32, 32], text_emb_dim=16,
            axes_dims_rope=(8, 4, 4), max_resolution=(8, 8), llama_layers=[0, 1],
        ),
        "qwen_image": diffusion(
            "QwenImageTransformer2DModel",
            lambda: {"hidden_states": noise(16, 16), "encoder_hidden_states": noise(6, 32), "encoder_hidden_states_mask": torch.ones(BATCH, 6, dtype=torch.long),
                     "timestep": torch.rand(BATCH), "img_shapes": (1, 4, 4), "target": noise(16, 16)},
            in_channels=16, out_channels=4, num_layers=2, **heads, joint_attention_dim=32, axes_dims_rope=(4, 6, 6),
        ),
        "wan_vace": diffusion(
            "WanVACETransformer3DModel", batch((4, 2, 8, 8), **films, control_hidden_states=(6, 2, 8, 8)), in_channels=4, out_channels=4, **wan,
            vace_layers=[0], vace_in_channels=6,
        ),
        "chronoedit": diffusion("ChronoEditTransformer3DModel", batch((4, 2, 8, 8), **films), in_channels=4, out_channels=4, **wan),
        "longcat_image": diffusion(
            "LongCatImageTransformer2DModel", batch((16, 16), **packed, img_ids=ids(16, 3), txt_ids=zeros(6, 3)), **double, pooled_projection_dim=16,
        ),
        "ovis_image": diffusion(
            "OvisImageTransformer2DModel", batch((16, 16), **packed, img_ids=ids(16, 3), txt_ids=zeros(6, 3)), **double, out_channels=16,
        ),
        "sana_video": diffusion(
            "SanaVideoTransformer3DModel", batch((4, 2, 8, 8), **films), in_channels=4, out_channels=4, **heads, num_layers=2,
            num_cross_attention_heads=4, cross_attention_head_dim=16, cross_attention_dim=64, caption_channels=32, sample_size=8, rope_max_seq_len=32,
        ),
        "hunyuan_image": diffusion(
            "HunyuanImageTransformer2DModel", batch((4, 8, 8), **{**flat, "timestep": share}, encoder_attention_mask=whole(6)), in_channels=4, out_channels=4, **heads,
            num_layers=1, num_single_layers=1, num_refiner_layers=1, text_embed_dim=32, rope_axes_dim=(8, 8),
        ),
        "kandinsky3": diffusion(
            "Kandinsky3UNet", batch((4, 8, 8), sample=(4, 8, 8), timestep=step, encoder_hidden_states=(6, 32), encoder_attention_mask=whole(6)),
            time_embedding_dim=64, groups=4, attention_head_dim=8, layers_per_block=3, block_out_channels=(32, 64), cross_attention_dim=32,
            encoder_hid_dim=32,
        ),
        "stable_cascade": diffusion(
            "StableCascadeUNet", batch((4, 8, 8), sample=(4, 8, 8), timestep_ratio=share, clip_text_pooled=(1, 16)), in_channels=4, out_channels=4,
            timestep_ratio_embedding_dim=16, conditioning_dim=32, block_out_channels=(32, 32), num_attention_heads=(4, 4), down_num_layers_per_block=(1, 1),
            up_num_layers_per_block=(1, 1), clip_text_pooled_in_channels=16, dropout=(0.0, 0.0),
        ),
        "unet_motion": diffusion(
            "UNetMotionModel", batch((4, 2, 8, 8), sample=(4, 2, 8, 8), timestep=step, encoder_hidden_states=(6, 32)), block_out_channels=(16, 32),
            down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"), up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"),
            layers_per_block=1, norm_num_groups=4, cross_attention_dim=32, num_attention_heads=2, motion_num_attention_heads=2, motion_max_seq_length=4,
        ),
        "i2vgen": diffusion(
            "I2VGenXLUNet",
            batch((4, 2, 8, 8), sample=(4, 2, 8, 8), timestep=step, fps=lambda: torch.full((BATCH,), 8), image_latents=(4, 2, 8, 8),
                  image_embeddings=(32,), encoder_hidden_states=(6, 32)),
            block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4, cross_attention_dim=32, attention_head_dim=4,
            down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        ),
        "transformer_temporal": diffusion(
            "TransformerTemporalModel", batch((16, 4, 4), hidden_states=(16, 4, 4), num_frames=2), num_attention_heads=2, attention_head_dim=8,
            in_channels=16, num_layers=2, norm_num_groups=4,
        ),
        "cogview3plus": diffusion(
            "CogView3PlusTransformer2DModel",
            batch((4, 8, 8), **flat, original_size=lambda: torch.rand(BATCH, 2), target_size=lambda: torch.rand(BATCH, 2), crop_coords=lambda: torch.rand(BATCH, 2)),
            in_channels=4, out_channels=4, num_layers=2, **heads, text_embed_dim=32, time_embed_dim=16, condition_dim=8, pos_embed_max_size=8, sample_size=8,
        ),
        "omnigen": diffusion(
            "OmniGenTransformer2DModel",
            batch((4, 8, 8), hidden_states=(4, 8, 8), timestep=share, input_ids=lambda: tokens(6), input_img_latents=[], input_image_sizes={},
                  attention_mask=lambda: torch.ones(BATCH, 23, 23), position_ids=lambda: torch.arange(23).expand(BATCH, -1)),
            in_channels=4, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, intermediate_size=128, num_layers=2, pad_token_id=0,
            vocab_size=WORDS, max_position_embeddings=64, original_max_position_embeddings=64, pos_embed_max_size=8, time_step_dim=16,
            rope_scaling={"short_factor": [1.0] * 8, "long_factor": [1.0] * 8},
        ),
        "dreamlite": diffusion(
            "DreamLiteTransformer2DModel", batch((16, 8, 8), hidden_states=(16, 8, 8), encoder_hidden_states=(6, 32)), num_attention_heads=2,
            attention_head_dim=8, in_channels=16, num_layers=1, norm_num_groups=4, cross_attention_dim=32,
        ),
        "autoencoder_asymmetric": diffusion(
            "AsymmetricAutoencoderKL", coded(3, 16, 16), down_block_types=("DownEncoderBlock2D",) * 2, down_block_out_channels=(16, 32),
            up_block_types=("UpDecoderBlock2D",) * 2, up_block_out_channels=(16, 32), norm_num_groups=4, sample_size=16,
        ),
        "autoencoder_cogvideox": diffusion(
            "AutoencoderKLCogVideoX", coded(3, 1, 16, 16), **stages, down_block_types=("CogVideoXDownBlock3D",) * 2,
            up_block_types=("CogVideoXUpBlock3D",) * 2, temporal_compression_ratio=1, sample_height=16, sample_width=16,
        ),
        "autoencoder_magvit": diffusion(
            "AutoencoderKLMagvit", coded(3, 1, 16, 16), latent_channels=4, block_out_channels=(16, 32), norm_num_groups=4, layers_per_block=1,
            down_block_types=("SpatialDownBlock3D", "SpatialTemporalDownBlock3D"), up_block_types=("SpatialUpBlock3D", "SpatialTemporalUpBlock3D"),
        ),
        "autoencoder_ltx": diffusion(
            "AutoencoderKLLTXVideo", coded(3, 1, 32, 32), latent_channels=4, block_out_channels=(16, 16), decoder_block_out_channels=(16, 16),
            layers_per_block=(1, 1), decoder_layers_per_block=(1, 1, 1), spatio_temporal_scaling=(True, True), decoder_spatio_temporal_scaling=(True, True),
            decoder_inject_noise=(False, False, False), upsample_residual=(False, False), upsample_factor=(1, 1), patch_size=1, patch_size_t=1,
            down_block_types=("LTXVideoDownBlock3D",) * 2,
        ),
        "autoencoder_qwen": diffusion(
            "AutoencoderKLQwenImage", coded(3, 1, 16, 16), base_dim=8, z_dim=4, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[False],
            latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
        ),
        "autoencoder_cosmos": diffusion(
            "AutoencoderKLCosmos", coded(3, 1, 32, 32), latent_channels=4, encoder_block_out_channels=(8, 8, 8, 8), decode_block_out_channels=(8, 8, 8, 8),
            attention_resolutions=(8,), resolution=32, num_layers=1, patch_size=1, spatial_compression_ratio=4, temporal_compression_ratio=1,
        ),
        "autoencoder_flux2": diffusion(
            "AutoencoderKLFlux2", coded(3, 16, 16), **stages, down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        ),
        "autoencoder_mochi": diffusion(
            "AutoencoderKLMochi", coded(3, 7, 16, 16), in_channels=15, out_channels=3, latent_channels=4, encoder_block_out_channels=(32,) * 4,
            decoder_block_out_channels=(32,) * 4, layers_per_block=(1, 1, 1, 1, 1), latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
        ),
        "t2i_adapter": diffusion("T2IAdapter", batch((16, 8, 8), x=(3, 64, 64)), channels=[16, 16, 32, 32], num_res_blocks=1),
    }  # fmt: skip


# Files of our own: code that the libraries above have not, as published


class ComplexRotary(nn.Module):
    """Attention with Meta's rotary embedding: pairs of channels as complex numbers, turned by `freqs_cis`."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        frequencies = 1.0 / 10000 ** (torch.arange(0, self.size, 2, dtype=torch.float32, device="cpu") / self.size)
        self.angles = torch.outer(torch.arange(length, dtype=torch.float32, device="cpu"), frequencies).tolist()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, self.heads, self.size) for w in (self.wq, self.wk, self.wv))
        angles = torch.tensor(self.angles)
        turns = torch.polar(torch.ones_like(angles), angles)[None, :, None]
        q, k = (
            torch.view_as_real(torch.view_as_complex(t.float().reshape(*t.shape[:-1], -1, 2)) * turns).flatten(3)
            for t in (q, k)
        )
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(x.shape))


class MetaLlama(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, width)
        self.attentions = nn.ModuleList(ComplexRotary(width, heads, LENGTH) for _ in range(depth))
        self.w1, self.w3 = (nn.ModuleList(nn.Linear(width, 2 * width, bias=False) for _ in range(depth)) for _ in "13")
        self.w2 = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(depth))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * depth + 1))
        self.output = nn.Linear(width, WORDS, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tok_embeddings(input_ids)
        for i, attention in enumerate(self.attentions):
            x = x + attention(self.norms[2 * i](x))
            y = self.norms[2 * i + 1](x)
            x = x + self.w2[i](F.silu(self.w1[i](y)) * self.w3[i](y))
        return self.output(self.norms[-1](x))


class Translator(nn.Module):
    """torch's own encoder and decoder, with a causal mask of the target."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 64)
        self.body = nn.Transformer(64, 4, 2, 2, 128, batch_first=True)
        self.head = nn.Linear(64, WORDS)

    def forward(self, source: Tensor, given: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(given.shape[1])
        return self.head(self.body(self.words(source), self.words(given), tgt_mask=mask))


def of_files() -> dict[str, Architecture]:
    def own(build: Callable[[], nn.Module], inputs: Callable[[], Batch]) -> Architecture:
        return Architecture(library="own file", build=build, batch=inputs)

    return {
        "meta_llama": own(MetaLlama, lambda: {"input_ids": tokens(), "target": tokens()}),
        "nn_transformer": own(Translator, lambda: {"source": tokens(), "given": tokens(), "target": tokens()}),
    }


_of_transformers = of_transformers()
_of_diffusers = {**of_diffusers(), **further_diffusers(), **called_diffusers()}
DERIVED = {**derived_rows(set(_of_transformers)), **derived_diffusion_rows()}
HEADS = head_rows()
ARCHITECTURES = {
    **_of_transformers,
    **DERIVED,
    **HEADS,
    **of_torchvision(),
    **of_timm(),
    **_of_diffusers,
    **of_files(),
}
