"""The models that tests verify: model files in `tests/models/`, and Hugging Face configurations."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model, small and with its architecture unchanged: a file, or a configuration in place of one."""

    name: str
    file: Path | None = None
    config: dict[str, object] = field(default_factory=dict)
    options: dict[str, object] = field(default_factory=lambda: {"batch": 16})

    def source(self, folder: Path) -> str:
        """The model argument of `partc compile`; a configuration is first written into `folder`."""
        if self.file is not None:
            return str(self.file)
        path = folder / self.name / "config.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.config))
        return f"hf:{path}"


TOKENS: dict[str, object] = {"batch": 16, "seq": 16}

SIZES: dict[str, object] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
DECODER = {**SIZES, "num_key_value_heads": 2}

MODELS = {
    model.name: model
    for model in (
        Model(name="gpt", file=EXAMPLES / "gpt.py"),
        Model(name="mlp", file=EXAMPLES / "mlp.py"),
        Model(name="crossing", file=HERE / "models" / "crossing.py"),
        Model(name="skips", file=HERE / "models" / "skips.py", options={"batch": 16, "depth": 4}),
        Model(name="noisy", file=HERE / "models" / "noisy.py"),
        Model(name="resnet", file=HERE / "models" / "resnet.py"),
        Model(name="unet", file=HERE / "models" / "unet.py"),
        Model(name="mixture", file=HERE / "models" / "mixture.py"),
        Model(name="dlrm", file=HERE / "models" / "dlrm.py"),
        Model(
            name="llama",
            options=TOKENS,
            config={
                "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 32,
                "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
                "max_position_embeddings": 64,
            },
        ),
        Model(
            name="gpt2",
            options=TOKENS,
            config={
                "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 96, "n_embd": 32,
                "n_layer": 3, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
            },
        ),
        Model(
            name="bert",
            options=TOKENS,
            config={
                "architectures": ["BertForMaskedLM"], "model_type": "bert", "vocab_size": 96, "hidden_size": 32,
                "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64,
                "max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
            },
        ),
        Model(
            name="vit",
            config={
                "architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": 32,
                "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32,
                "patch_size": 8, "num_labels": 8, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
            },
        ),
        Model(
            name="mistral",
            options=TOKENS,
            config={**DECODER, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8},
        ),
        Model(
            name="qwen2",
            options=TOKENS,
            config={**DECODER, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        ),
        Model(
            name="gemma",
            options=TOKENS,
            config={
                **DECODER, "architectures": ["GemmaForCausalLM"], "model_type": "gemma", "num_key_value_heads": 1,
                "head_dim": 8,
            },
        ),
        Model(
            name="gpt_neox",
            options=TOKENS,
            config={**SIZES, "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"},
        ),
        Model(
            name="roberta",
            options=TOKENS,
            config={
                **SIZES, "architectures": ["RobertaForMaskedLM"], "model_type": "roberta", "pad_token_id": 1,
                "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
            },
        ),
        Model(
            name="t5",
            options=TOKENS,
            config={
                "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "vocab_size": 96, "d_model": 32,
                "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 4, "dropout_rate": 0.0,
                "decoder_start_token_id": 0,
            },
        ),
        Model(
            name="swin",
            config={
                "architectures": ["SwinForImageClassification"], "model_type": "swin", "image_size": 32,
                "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
                "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0,
                "num_labels": 8,
            },
        ),
        Model(
            name="mixtral",
            options=TOKENS,
            config={
                **DECODER, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4,
                "num_experts_per_tok": 2,
            },
        ),
        Model(
            name="gpt2_dropout",
            options=TOKENS,
            config={
                "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 96, "n_embd": 32,
                "n_layer": 3, "n_head": 4, "n_positions": 64,
            },
        ),
        Model(
            name="bert_dropout",
            options=TOKENS,
            config={**SIZES, "architectures": ["BertForMaskedLM"], "model_type": "bert"},
        ),
        Model(
            name="t5_dropout",
            options=TOKENS,
            config={
                "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "vocab_size": 96, "d_model": 32,
                "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
                "decoder_start_token_id": 0,
            },
        ),
        Model(
            name="clip",
            options=TOKENS,
            config={
                "architectures": ["CLIPModel"], "model_type": "clip", "projection_dim": 16,
                "text_config": {**SIZES, "num_hidden_layers": 2, "max_position_embeddings": 16},
                "vision_config": {**SIZES, "num_hidden_layers": 2, "image_size": 32, "patch_size": 8},
            },
        ),
    )
}  # fmt: skip
