"""Model files for Hugging Face configurations: the architecture from transformers, with a random batch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from partc.errors import PartcError
from partc.frontend.model_files.model_file import is_file
from partc.quoting import environment
from partc.runtime.documents import Malformed, contents, decoded, parsed

PREFIX = "hf:"
# The default architecture of each model type, and its kind of batch.
_DEFAULTS: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "mixtral": "MixtralForCausalLM",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
    "swin": "SwinForImageClassification",
    "clip": "CLIPModel",
}
_TASKS = {
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForMaskedLM": "masked",
    "ForConditionalGeneration": "translation",
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
    "ForQuestionAnswering": "question",
    "ForImageClassification": "image",
    "CLIPModel": "pairs",
}


# For any other implementation of attention, transformers would fetch and run code.
_IMPLEMENTATIONS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
_OWN = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
_LONGEST = {"pairs": 77}  # positions, if the configuration has no number


def is_configuration(model: object) -> bool:
    return str(model).startswith(PREFIX)


def model_source(model: str, *, batch: int = 8, seq: int | None = None) -> str:
    """The model file for `hf:PATH/config.json`.

    Raises PartcError P0231 (no such file, or no JSON), P0232 (an unknown architecture), P0233 (transformers is not
    installed).
    """
    path = Path(model.removeprefix(PREFIX))
    config = _read(path)
    named = config.get("architectures") or [_DEFAULTS.get(str(config.get("model_type")), "")]
    _expect(path, isinstance(named, list) and isinstance(named[0], str), "architectures is not a list of names")
    architecture = named[0]
    task = next((task for suffix, task in _TASKS.items() if architecture.endswith(suffix)), None)
    if task is None:
        raise PartcError(
            "P0232",
            f"{path} has {architecture or config.get('model_type')!r}, which partc has no batch for",
            help=f"name one of {', '.join(f'...{suffix}' for suffix in _TASKS)} in its `architectures`,"
            " or write a model file with your own batch()",
        )
    _require_transformers(architecture, config["model_type"], path)
    image, text_config = config.get("vision_config", config), config.get("text_config", config)
    _expect(path, isinstance(image, dict), "vision_config is not an object")
    _expect(path, isinstance(text_config, dict), "text_config is not an object")
    size = image.get("image_size", 224)
    height, width = size if isinstance(size, list) and len(size) == 2 else (size, size)
    _expect(path, _is_size(height) and _is_size(width), "image_size is neither a number nor two")
    _expect(path, isinstance(config.get("id2label") or {}, dict), "id2label is not an object")
    longest = text_config.get("max_position_embeddings") or text_config.get("n_positions") or _LONGEST.get(task, 2048)
    _expect(path, _is_size(longest), "max_position_embeddings is not a number of positions")
    sizes = {
        "vocab_size": 0 if task == "image" else text_config.get("vocab_size") or _default(text_config, "vocab_size"),
        "num_channels": image.get("num_channels", 3),
        "num_labels": len(config.get("id2label") or {}) or config.get("num_labels") or 2,
    }
    for name, found in sizes.items():
        _expect(path, _is_size(found) or (task == "image" and found == 0), f"{name} is not a number")
    for kernel in _implementations(config):
        _expect(path, kernel is None or kernel in _OWN, f"attn_implementation is none of {', '.join(_OWN)}")
    return (
        environment()
        .get_template("hf_model.py.jinja")
        .render(
            architecture=architecture,
            config=json.dumps(config, indent=2, sort_keys=True),
            task=task,
            batch=batch,
            seq=seq or min(longest, 128),
            vocabulary=sizes["vocab_size"],
            channels=sizes["num_channels"],
            height=height,
            width=width,
            classes=sizes["num_labels"],
        )
    )


def _implementations(config: Mapping[str, Any]) -> Iterator[object]:
    """The implementations of attention that a configuration names, and those of models inside it."""
    for name, found in config.items():
        if name in _IMPLEMENTATIONS:
            yield from found.values() if isinstance(found, dict) else (found,)
        elif isinstance(found, dict):
            yield from _implementations(found)


def _is_size(found: object) -> bool:
    return isinstance(found, int) and not isinstance(found, bool) and found > 0


def _expect(path: Path, holds: bool, otherwise: str) -> None:
    if not holds:
        raise PartcError("P0231", f"{path} is not a configuration: its {otherwise}", help="give a model's config.json")


def _read(path: Path) -> dict[str, Any]:
    if not is_file(path):
        raise PartcError("P0231", f"there is no configuration {path}", help="give hf:PATH/config.json")
    try:
        found = decoded(dict[str, Any], parsed(contents(path), finite=False))
    except Malformed as error:
        raise PartcError("P0231", f"{path} {error}", help="give a model's config.json") from None
    if not isinstance(found.get("model_type"), str):
        raise PartcError("P0231", f"{path} has no model_type", help="give a model's config.json")
    return found


def _require_transformers(architecture: str, model_type: str, path: Path) -> None:
    try:
        import transformers
    except ImportError:
        raise PartcError(
            "P0233", "hf: models need transformers, which is not installed", help="pip install 'partc[hf]'"
        ) from None
    if model_type not in transformers.CONFIG_MAPPING:
        cause = f"{path} has the model_type {model_type[:80]!r}, which transformers doesn't have"
        raise PartcError("P0232", cause, help="correct it")
    if not architecture.isidentifier() or not hasattr(transformers, architecture):
        raise PartcError("P0232", f"{path} names {architecture!r}, which transformers doesn't have", help="correct it")


def _default(config: Mapping[str, Any], key: str) -> object:
    import transformers

    try:
        return getattr(transformers.AutoConfig.for_model(**config), key, None)
    except Exception:  # transformers raises anything for unexpected values
        return None
