"""Model files for Hugging Face configurations: the architecture from transformers, with a random batch."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from partc.errors import PartcError, first_line
from partc.frontend.model_files.image_places import ImagePlaces, image_places, is_size
from partc.frontend.model_files.model_file import is_file
from partc.quoting import environment
from partc.runtime.documents import Malformed, contents, decoded, parsed

PREFIX = "hf:"
# The task of an architecture by the end of its name: which batch it takes.
_TASKS = {
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForMaskedLM": "masked",
    "ForConditionalGeneration": "translation",
    "ForSequenceClassification": "sequence",
    "ForNextSentencePrediction": "sequence",
    "ForMultipleChoice": "choice",
    "ForTokenClassification": "token",
    "ForQuestionAnswering": "question",
    "ForImageClassification": "image",
    "ForSemanticSegmentation": "segmentation",
    "ForVideoClassification": "film",
    "ForMaskedImageModeling": "hidden",
    "ForDepthEstimation": "depth",
    "ForCTC": "transcript",
    "ForXVector": "sound",
    "ForAudioFrameClassification": "frames",
    "ForAudioClassification": "spectrum",
    "ForObjectDetection": "boxes",
    "ForUniversalSegmentation": "masks",
    "ForInstanceSegmentation": "masks",
    "ElectraForPreTraining": "replaced",
    "FunnelForPreTraining": "replaced",
    "ForPreTraining": "pretraining",
    "ForPretraining": "series",
    "ForPrediction": "series",
    "ForRegression": "series",
    "ForTimeSeriesClassification": "series",
    "PatchTSTForClassification": "series",
    "Model": "features",
}
# The tasks of names that stand for several: the first whose arguments forward has.
_BY_ARGUMENTS: dict[str, tuple[tuple[str, set[str]], ...]] = {
    "sequence": (("sound", {"input_values"}),),
    "translation": (("speech", {"input_features", "decoder_input_ids"}), ("picture", {"input_ids", "pixel_values"})),
    "masks": (("masks", {"mask_labels", "pixel_values"}),),
    "boxes": (("boxes", {"labels"}),),
    "pretraining": (
        ("next", {"input_ids", "next_sentence_label"}),
        ("order", {"input_ids", "sentence_order_label"}),
        ("contrast", {"input_values", "sampled_negative_indices"}),
        ("pixels", {"pixel_values", "noise"}),
    ),
    "series": (
        ("dated", {"past_time_features", "future_values"}),
        ("forecast", {"past_values", "future_values"}),
        ("targets", {"past_values", "target_values"}),
        ("series", {"past_values"}),
    ),
    "features": (
        ("pairs", {"input_ids", "pixel_values", "return_loss"}),
        ("text features", {"input_ids"}),
        ("image features", {"pixel_values"}),
        ("sound features", {"input_values"}),
    ),
}
_MAIN_INPUTS = {
    **dict.fromkeys(
        ("image", "segmentation", "film", "hidden", "depth", "boxes", "masks", "pixels", "image features"),
        "pixel_values",
    ),
    **dict.fromkeys(("sound", "transcript", "frames", "spectrum", "contrast", "sound features"), "input_values"),
    **dict.fromkeys(("dated", "forecast", "targets", "series"), "past_values"),
    "speech": "input_features",
}
MOST_MODULES, MOST_LABELS = 1 << 14, 1 << 20  # transformers makes lists of as many entries
_COUNTS_MODULES = re.compile("(layers?|depth|blocks?|experts)$")
_COUNTS_LABELS = frozenset({"num_labels", "num_classes"})
_COUNTED = {"hidden": "patch_size", "film": "num_frames"}  # a number on which the shapes of a task's inputs depend
# The tables of transformers that have the architecture of a model type whose configuration names none.
_TABLES = (
    "MASKED_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "CAUSAL_LM",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "CTC",
)


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
    _check_quantities(path, config)
    architecture = _architecture(path, config)
    image, text_config = config.get("vision_config") or config, config.get("text_config") or config
    _expect(path, isinstance(image, dict), "vision_config is not an object")
    _expect(path, isinstance(text_config, dict), "text_config is not an object")
    size = image.get("image_size", 224)
    height, width = size if isinstance(size, list) and len(size) == 2 else (size, size)
    _expect(path, is_size(height) and is_size(width), "image_size is neither a number nor two")
    task, places, features = _inputs(path, config, architecture, height, width)
    sizes = _sizes(path, config, task)
    end = text_config.get("eos_token_id")
    return (
        environment()
        .get_template("hf_model.py.jinja")
        .render(
            architecture=architecture,
            config=json.dumps(config, indent=2, sort_keys=True),
            task=task,
            batch=batch,
            seq=seq or min(sizes["longest"], 128),
            **sizes,
            height=height,
            width=width,
            end=end if is_size(end) and end < sizes["vocabulary"] else None,
            mels=config.get("num_mel_bins"),
            frames=2 * config.get("max_source_positions", 0),
            places=places,
            decoder="decoder_input_ids" in _arguments(architecture),
            features=features,
        )
    )


def _check_quantities(path: Path, config: Mapping[str, Any]) -> None:
    """Raise PartcError P0231 for numbers that cost transformers much work, and kernels that it would fetch and run."""
    for name, count, most in _counts(config):
        _expect(path, count <= most, f"{name} is more than {most:,}")
    for kernel in _implementations(config):
        _expect(path, kernel is None or kernel in _OWN, f"attn_implementation is none of {', '.join(_OWN)}")


def _architecture(path: Path, config: Mapping[str, Any]) -> str:
    """The architecture that a configuration names, or the default one of its model type; empty if it has none."""
    named = config.get("architectures") or [_default_architecture(str(config["model_type"]))]
    _expect(path, isinstance(named, list) and isinstance(named[0], str), "architectures is not a list of names")
    return str(named[0])


def _inputs(
    path: Path, config: Mapping[str, Any], architecture: str, height: int, width: int
) -> tuple[str, ImagePlaces | None, int]:
    """The task of an architecture, the places of images in its texts, and the width of its features (0 for others).

    Raises PartcError P0232 if partc makes no batch for it.
    """
    task, places, features = _task(architecture), None, 0
    if task is not None:
        _require_transformers(architecture, config["model_type"], path)
        task = _task_of_input(task, architecture, config)
    if task == "picture":
        made = _configuration(config, path)
        places = image_places(_class(architecture), _arguments(architecture), made, height, width)
        task = "translation" if places is None else task
    elif task is not None and task.endswith(" features"):
        features = _feature_width(_configuration(config, path)) or 0
        task = task if features else None
    if task is None:
        raise PartcError(
            "P0232",
            f"{path} has {architecture or config.get('model_type')!r}, which partc has no batch for",
            help=f"name one of {', '.join(f'...{suffix}' for suffix in _TASKS)} in its `architectures`,"
            " or write a model file with your own batch()",
        )
    return task, places, features


def _sizes(path: Path, config: Mapping[str, Any], task: str) -> dict[str, Any]:
    """The sizes of a task's batch, as variables of the model file's template. Raises PartcError P0231."""
    image, text_config = config.get("vision_config") or config, config.get("text_config") or config
    _expect(path, isinstance(config.get("id2label") or {}, dict), "id2label is not an object")
    longest = text_config.get("max_position_embeddings") or text_config.get("n_positions") or _LONGEST.get(task, 2048)
    _expect(path, is_size(longest), "max_position_embeddings is not a number of positions")
    named = {
        "channels": ("num_channels", image.get("num_channels", 3)),
        "classes": ("num_labels", len(config.get("id2label") or {}) or config.get("num_labels") or 2),
    }
    if task in ("transcript", "speech") or task not in _MAIN_INPUTS:
        named["vocabulary"] = "vocab_size", text_config.get("vocab_size") or _default(text_config, "vocab_size")
    count = _COUNTED.get(task) or ("num_frames" if task == "image features" and "num_frames" in config else None)
    if count is not None:
        named["count"] = count, image.get(count) or config.get(count) or _default(config, count)
    for name, found in named.values():
        _expect(path, is_size(found), f"{name} is not a number")
    sizes = {variable: found for variable, (_, found) in named.items()}
    return {"vocabulary": 0, "count": None, **sizes, "longest": longest}


def _default_architecture(model_type: str) -> str:
    """The first architecture of a model type in transformers' tables that has a task here."""
    try:
        from transformers.models.auto import modeling_auto
    except ImportError:
        raise _not_installed() from None
    for table in _TABLES:
        found = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").get(model_type, "")
        if isinstance(found, str) and _task(found) is not None:
            return found
    return ""


def _task(architecture: str) -> str | None:
    return next((task for suffix, task in _TASKS.items() if architecture.endswith(suffix)), None)


def _task_of_input(task: str, architecture: str, config: Mapping[str, Any]) -> str | None:
    """The task of an architecture with its arguments; None for one whose input partc does not make."""
    arguments, main = _arguments(architecture), _class(architecture).main_input_name
    several = _BY_ARGUMENTS.get(task, ())
    default = None if several and task not in ("sequence", "translation") else task
    found = next((name for name, needed in several if needed <= arguments), default)
    if found is None or found == "pairs":
        return found
    if found == "speech" and not all(is_size(config.get(name)) for name in ("num_mel_bins", "max_source_positions")):
        return None
    return found if main == _MAIN_INPUTS.get(found, "input_ids") else None


def _arguments(architecture: str) -> Set[str]:
    """The names of forward's arguments."""
    return inspect.signature(_class(architecture).forward).parameters.keys()


def _class(architecture: str) -> Any:
    import transformers

    return getattr(transformers, architecture)


def _configuration(config: Mapping[str, Any], path: Path) -> Any:
    """The configuration as transformers reads it. Raises PartcError P0231."""
    import transformers

    try:
        return transformers.AutoConfig.for_model(**config)
    except Exception as error:  # transformers raises anything for unexpected values
        raise PartcError(
            "P0231",
            f"{path} is not a configuration: {type(error).__name__}: {first_line(error)}",
            help="give a model's config.json",
        ) from error


def _feature_width(configuration: Any) -> int | None:
    """The width of the features that a model without a head computes."""
    for part in (configuration, configuration.get_text_config()):
        for name in ("hidden_size", "hidden_sizes", "d_model", "embed_dim", "hidden_dim"):
            found = getattr(part, name, None)
            width = found[-1] if isinstance(found, list | tuple) and found else found
            if is_size(width):
                return width
    return None


def _counts(config: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """The numbers of layers, blocks, experts and labels in a configuration and its parts, by name, and their limits."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _counts(value)
        elif isinstance(value, int) and (name in _COUNTS_LABELS or _COUNTS_MODULES.search(name)):
            yield name, value, MOST_LABELS if name in _COUNTS_LABELS else MOST_MODULES


def _implementations(config: Mapping[str, Any]) -> Iterator[object]:
    """The implementations of attention that a configuration names, and those of models inside it."""
    for name, found in config.items():
        if name in _IMPLEMENTATIONS:
            yield from found.values() if isinstance(found, dict) else (found,)
        elif isinstance(found, dict):
            yield from _implementations(found)


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
        raise _not_installed() from None
    if model_type not in transformers.CONFIG_MAPPING:
        cause = f"{path} has the model_type {model_type[:80]!r}, which transformers doesn't have"
        raise PartcError("P0232", cause, help="correct it")
    try:
        known = architecture.isidentifier() and hasattr(transformers, architecture)
    except ImportError as error:
        cause = f"transformers cannot import {architecture}: {first_line(error)}"
        raise PartcError(
            "P0233", cause, help=f"correct what `from transformers import {architecture}` reports"
        ) from None
    if not known:
        raise PartcError("P0232", f"{path} names {architecture!r}, which transformers doesn't have", help="correct it")


def _not_installed() -> PartcError:
    return PartcError("P0233", "hf: models need transformers, which is not installed", help="pip install 'partc[hf]'")


def _default(config: Mapping[str, Any], key: str) -> object:
    import transformers

    try:
        return getattr(transformers.AutoConfig.for_model(**config), key, None)
    except Exception:  # transformers raises anything for unexpected values
        return None
