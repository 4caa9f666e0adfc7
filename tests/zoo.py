"""The models that partc is proved on: plain files beside this one, and Hugging Face configurations."""

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
        """What `partc compile` takes; a configuration is written into `folder` first."""
        if self.file is not None:
            return str(self.file)
        path = folder / self.name / "config.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.config))
        return f"hf:{path}"


TOKENS: dict[str, object] = {"batch": 16, "seq": 16}

MODELS = {
    model.name: model
    for model in (
        Model(name="gpt", file=EXAMPLES / "gpt.py"),
        Model(name="mlp", file=EXAMPLES / "mlp.py"),
        Model(name="crossing", file=HERE / "models" / "crossing.py"),
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
    )
}  # fmt: skip
