"""Architectures of Hugging Face, torchvision, timm and diffusers at tiny sizes, as one model file: `-D name=bloom`.

Blocks, norms, activations, masks, dropout and losses are the library's own; widths, depths and vocabularies are small.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
    """The library's own loss of `labels`; of other models, the distance of the first result from `target`."""
    made = model(**{name: x for name, x in batch.items() if name != "target"})
    if "target" not in batch:
        return made.loss
    first = made if isinstance(made, Tensor) else next(iter(made.values())) if isinstance(made, dict) else made[0]
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
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": 8},
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
PAIR: dict[str, Any] = {"text_config": SMALL_TEXT, "vision_config": SMALL_SIGHT, "projection_dim": 32}
TIMES: dict[str, Any] = {
    "prediction_length": 5, "context_length": 8, "lags_sequence": [1, 2, 3, 4, 5, 6, 7], "num_time_features": 1,
}  # fmt: skip


def of_transformers() -> dict[str, Architecture]:
    found = {name: transformer(name, "AutoModelForCausalLM", text, **given) for name, given in CAUSAL.items()}
    found |= {name: transformer(name, "AutoModelForMaskedLM", masked_text, **given) for name, given in MASKED.items()}
    found["nystromformer"] = transformer(  # which takes no mask of its full size
        "nystromformer", "AutoModelForMaskedLM", text, **MASKED["nystromformer"]
    )
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


def picture_tokens(count: int) -> Tensor:
    """Token ids of texts, each with 16 placeholder tokens for the patches of an image."""
    words = torch.randint(3, WORDS - 1, (BATCH, count))
    words[:, 2:18] = WORDS - 1
    return words


# torchvision, timm, diffusers


def pictures(pixels: int = PIXELS) -> Callable[[], Batch]:
    return lambda: {"x": noise(3, pixels, pixels), "target": classes()}


def of_torchvision() -> dict[str, Architecture]:
    def seen(name: str, pixels: int = PIXELS, given: dict[str, Any] | None = None) -> Architecture:
        def build() -> nn.Module:
            from torchvision import models

            return getattr(models, name)(num_classes=CLASSES, **(given or {}))

        return Architecture(library="torchvision", build=build, batch=pictures(pixels))

    plain = "resnet18 mobilenet_v3_small shufflenet_v2_x0_5 squeezenet1_1 mnasnet0_5"
    found = {f"tv_{name}": seen(name) for name in plain.split()}
    # Batch norms over the last pixel of a few small pictures would magnify rounding to 1e-10.
    found |= {f"tv_{name}": seen(name, 64) for name in ("mobilenet_v2", "regnet_y_400mf")}
    found["tv_googlenet"] = seen("googlenet", given={"aux_logits": False, "init_weights": False})

    def small(kind: str, pixels: int = PIXELS, **given: Any) -> Architecture:
        def build() -> nn.Module:
            from torchvision import models

            made: Any = models
            for part in kind.split("."):
                made = getattr(made, part)
            return made(num_classes=CLASSES, **given)

        return Architecture(library="torchvision", build=build, batch=pictures(pixels))

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


def of_timm() -> dict[str, Architecture]:
    def seen(name: str, pixels: int = PIXELS, **given: Any) -> Architecture:
        def build() -> nn.Module:
            import timm

            return timm.create_model(name, num_classes=CLASSES, **given)

        return Architecture(library="timm", build=build, batch=pictures(pixels))

    sight = {"img_size": PIXELS, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4}
    return {
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
    }  # fmt: skip


def of_diffusers() -> dict[str, Architecture]:
    def made(kind: str, inputs: Callable[[], Batch], **given: Any) -> Architecture:
        def build() -> nn.Module:
            import diffusers

            return getattr(diffusers, kind)(**given)

        return Architecture(library="diffusers", build=build, batch=inputs)

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


ARCHITECTURES = {
    **of_transformers(),
    **of_torchvision(),
    **of_timm(),
    **of_diffusers(),
    **of_files(),
}
