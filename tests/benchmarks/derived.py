"""Tiny models of any model type of transformers: sizes by the names of a configuration's fields, batches by signatures.

`small` shrinks a configuration: widths, depths and vocabularies get the sizes of one tiny model, so that the parts of
a composite model fit. `derived` finds a class of the library for it and a batch that the class's forward takes.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import itertools
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from partc.errors import PartcError
from partc.frontend.model_files.huggingface import model_source
from partc.frontend.model_files.model_file import load

BATCH, LENGTH, WORDS, CLASSES, WIDTH = 8, 16, 256, 4, 64

# Upper bounds of numbers by the names of their fields; the first pattern that fits decides. 0 leaves a number as it is.
LIMITS: tuple[tuple[str, int], ...] = (
    (r"upsample_groups", WIDTH),
    (r"kernel|stride|ratio|factor|rate$|merge|temporal|num_channels|in_chans|groups|frequency|temperature|period", 0),
    (r"mel|n_fft|hop_length|chunk", 0),
    (r"_token$|tokens?_ids?$|token_index$|_id$|_loss|_cost|coefficient|_idx$|pretraining_tp|initializer", 0),
    (r"vocab|num_embeddings|codebook_size|num_codes", WORDS),
    (r"experts_per_tok|top_?k$|moe_k$", 2),
    (r"experts$|num_experts|num_local_experts|n_group", 4),
    (r"key_value_heads|kv_heads|n_head_kv", 2),
    (r"head_dim|head_size|d_kv|kv_channels|size_per_head|attention_head_dim", 16),
    (r"lora_rank", 16),
    (r"heads$|n_head$|num_head$", 4),
    (r"position_embeddings|max_.*position|max_.*len|context_length|n_positions|n_ctx", 64),
    (r"moe.*(intermediate|hidden)|expert.*intermediate", 32),
    (r"intermediate|ffn|mlp_dim|feed_?forward|d_ff|inner", 128),
    (r"image_size|img_size|crop_size", 32),
    (r"patch_size", 8),
    (r"num_queries|num_query_tokens|num_latents|n_latents", 6),
    (r"num_quantizers|num_codebooks|n_codebooks", 2),
    (r"layers?$|depths?$|blocks?$|num_layers|n_layer|repeats$|_depth$|loops$", 2),
    (r"hidden|width|d_model|dim$|dim_|dims$|embed|channels?|size$|units$|features?$|filters", WIDTH),
)  # fmt: skip


def limit(name: str) -> int:
    return next((bound for pattern, bound in LIMITS if re.search(pattern, name)), 0)


def shortened(values: Sequence[Any], count: int) -> list[Any]:
    """`count` of the values: each kind that occurs, in its order, then the first ones."""
    kinds = list(dict.fromkeys(values))
    return (kinds + [values[0]] * count)[:count]


class Shrinking:
    """Shrinks one configuration and its parts."""

    def __init__(self, plain: Any, level: int) -> None:
        self.plain, self.level = plain, level
        self.layers = next((n for name in ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth")
                            if isinstance(n := getattr(plain, name, None), int)), 0)  # fmt: skip
        name = type(plain).__module__.replace(".configuration_", ".modeling_")
        spec = importlib.util.find_spec(name)
        source = "" if spec is None or spec.origin is None else Path(spec.origin).read_text(encoding="utf-8")
        self.sections = "mrope_section" in source  # positions of three kinds

    def value(self, name: str, value: Any) -> Any:
        """The value of a field in the tiny configuration."""
        from transformers import PreTrainedConfig

        if isinstance(value, PreTrainedConfig):
            return small(value, self.level)
        if isinstance(value, bool | str | float | None):
            return value
        if isinstance(value, int):
            return self.number(name, value)
        if isinstance(value, Mapping):
            return self.mapping(name, value)
        if isinstance(value, list | tuple) and value:
            return type(value)(self.sequence(name, value))
        return value

    def number(self, name: str, value: int) -> int:
        if name.endswith("key_value_heads") and value == getattr(self.plain, "num_attention_heads", 0):
            return min(value, 4)
        bound = limit(name)
        return min(value, bound) if bound and (self.level < 2 or bound == 2) else value

    def mapping(self, name: str, value: Mapping[str, Any]) -> Mapping[str, Any]:
        if name == "rope_parameters" and "rope_type" in value and self.sections:
            half = 8 * value.get("partial_rotary_factor", 1)
            return {**value, "mrope_section": [2, 3, 3] if half == 8 else [1, 1, 2]}
        return value

    def sequence(self, name: str, values: Sequence[Any]) -> Sequence[Any]:
        if self.layers > 2 and len(values) == self.layers:
            return shortened(values, 2)
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
            return [self.sequence(name, v) if isinstance(v, list | tuple) and v else v for v in values]
        if re.search(r"index|indices|layer_ids|_layers$", name) and self.layers:
            return list(range(min(len(values), 2)))
        if re.search(r"depths|num_blocks|^layers$", name):
            return [min(v, 1) for v in values]
        if re.search(r"image_size|patch_size", name):
            return [min(v, limit(name)) for v in values]
        if self.level < 1 and limit(name) >= WIDTH and max(values) > WIDTH:
            scale = max(1, min(v for v in values if v) // 16)
            return [max(v // scale, 1) for v in values]
        return values


def small(plain: Any, level: int = 0) -> Any:
    """The tiny configuration of the class of `plain`.

    Level 1 keeps lists of sizes, level 2 all sizes but depths.
    """
    plain.allow_global_per_layer_attribute_access = True
    shrinking = Shrinking(plain, level)
    fields = {field.name: field for field in dataclasses.fields(plain)}
    known: dict[str, Any] = {}
    for name, field in fields.items():
        value = getattr(plain, name, None)
        derived = (
            field.default is None
            and not hasattr(value, "to_dict")
            and name not in ("layer_types", "mlp_layer_types", "rope_parameters")
        )
        if value is None or (derived and not isinstance(value, int)) or name.startswith("_"):
            continue
        made = shrinking.value(name, value)
        if made is not value or hasattr(value, "to_dict"):
            known[name] = made
    if level < 2:
        known |= {name: value for name, value in identifiers(plain) if name in fields}
    if "mask_time_prob" in fields:
        known["mask_time_prob"] = 0.0  # masks are drawn with numpy, and no shorter than long sounds
    config = type(plain)(**known)
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return config


def identifiers(plain: Any) -> Iterator[tuple[str, int]]:
    """Small numbers for the ids of special tokens."""
    fixed = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    yield from ((name, value) for name, value in fixed.items() if getattr(plain, name, None) is not None)
    words = [name for name in vars(plain) if re.search(r"token_(id|index)$", name) and name not in fixed]
    for place, name in enumerate(sorted(words)):
        if isinstance(getattr(plain, name), int) and getattr(plain, name) >= 0:
            yield name, WORDS - 1 - place


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The numbers that shapes of inputs depend on; `places` of a text hold the rows of a picture or sound."""

    config: Any
    places: int = 0
    length: int = LENGTH
    pixels: int = 32

    def find(self, *names: str, default: int) -> Any:
        """The first of these fields that exists in the configuration or in a nested one."""
        for name in names:
            for config in parts(self.config):
                value = getattr(config, name, None)
                if value is not None and not isinstance(value, bool):
                    return value
        return default

    def one(self, *names: str, default: int) -> int:
        value = self.find(*names, default=default)
        return int(value[0] if isinstance(value, list | tuple) else value)

    @property
    def words(self) -> int:
        return min(self.one("vocab_size", "text_vocab_size", default=WORDS), WORDS - 40)

    @property
    def width(self) -> int:
        return self.one("hidden_size", "d_model", "embed_dim", "dim", default=WIDTH)

    @property
    def image(self) -> int:
        return self.one("image_size", "img_size", "crop_size", default=self.pixels)

    @property
    def channels(self) -> int:
        return self.one("num_channels", "in_channels", "in_chans", default=3)

    @property
    def patch(self) -> int:
        return self.one("patch_size", default=8)

    @property
    def merge(self) -> int:
        return self.one("spatial_merge_size", "merge_size", default=1)


def parts(config: Any) -> Iterator[Any]:
    """A configuration, and the configurations in it, those of texts first."""
    from transformers import PreTrainedConfig

    yield config
    held = sorted(vars(config).items(), key=lambda item: ("text" not in item[0], "vision" not in item[0]))
    for _, value in held:
        if isinstance(value, PreTrainedConfig):
            yield from parts(value)


Maker = Callable[[Sizes], Any]


def noise(*shape: int) -> Tensor:
    return torch.randn(BATCH, *shape)


def below(limit: int, *shape: int) -> Tensor:
    return torch.randint(limit, (BATCH, *shape))


def words(sizes: Sizes) -> Tensor:
    """Random tokens, of which some at the beginning stand for a picture or sound."""
    made = torch.randint(min(3, sizes.words - 1), sizes.words, (BATCH, sizes.length + sizes.places))
    token = place_token(sizes.config)
    if sizes.places and token is not None:
        made[:, 1 : 1 + sizes.places] = token
    return made


def place_token(config: Any) -> int | None:
    """The id of the token that stands in a text where features of a picture or sound belong."""
    names = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index", "video_token_id")
    found = (getattr(part, name, None) for part in parts(config) for name in names)
    return next((each for each in found if isinstance(each, int)), None)


def plain_words(sizes: Sizes) -> Tensor:
    return torch.randint(min(3, sizes.words - 1), sizes.words, (BATCH, sizes.length))


def ended_words(sizes: Sizes) -> Tensor:
    """Random tokens; each row ends in an end-of-sequence token and padding, at unequal lengths."""
    made, last = plain_words(sizes), torch.randint(sizes.length // 2, sizes.length, (BATCH, 1))
    places = torch.arange(sizes.length)
    made = made.masked_fill(places == last, sizes.one("eos_token_id", default=2))
    return made.masked_fill(places > last, sizes.one("pad_token_id", default=0))


def picture(sizes: Sizes) -> Tensor:
    return noise(sizes.channels, sizes.image, sizes.image)


def grid(sizes: Sizes) -> list[list[int]]:
    side = 2 * sizes.merge
    return [[1, side, side]] * BATCH


def patches(sizes: Sizes) -> Tensor:
    """Rows of patches of all pictures."""
    side, deep = 2 * sizes.merge, sizes.one("temporal_patch_size", default=1)
    return torch.randn(BATCH * side * side, sizes.channels * deep * sizes.patch**2)


def kinds(sizes: Sizes) -> list[list[int]]:
    return [[0] + [1] * sizes.places + [0] * (sizes.length - 1)] * BATCH


def absent(sizes: Sizes) -> None:
    """An input that is left out."""


PICTURES: tuple[Maker, ...] = (
    picture,
    patches,
    lambda s: noise(1, s.channels, s.image, s.image),
    lambda s: noise(s.channels, 64, 64),
    lambda s: noise(s.channels, 128, 128),
    lambda s: patches(s).unflatten(0, (BATCH, -1)),
    lambda s: noise(2, s.channels, s.image, s.image),
    lambda s: noise(16, s.channels * s.patch**2),
    lambda s: torch.randn(BATCH * 4, s.channels, s.patch, s.patch),
)
FEATURES: tuple[Maker, ...] = (
    lambda s: noise(s.one("num_mel_bins", "n_mels", "feature_size", "input_feat_size", default=64), 64),
    lambda s: noise(64, s.one("num_mel_bins", "n_mels", "feature_size", "input_feat_size", default=64)),
    lambda s: noise(1, 64, s.one("num_mel_bins", default=64)),
    lambda s: noise(s.one("num_mel_bins", default=64), 2 * s.one("max_source_positions", default=64)),
    lambda s: noise(s.one("num_mel_bins", default=64), 200),
)
INPUTS: dict[str, tuple[Maker, ...]] = {
    "input_ids": (words,), "decoder_input_ids": (plain_words,), "qformer_input_ids": (plain_words,),
    "pixel_values": PICTURES, "pixel_values_videos": (lambda s: noise(s.one("num_frames", "frames_per_clip", default=2), s.channels, s.image, s.image), patches),
    "input_features": FEATURES, "audio_mel": FEATURES,
    "input_values": (lambda s: noise(640), lambda s: noise(1, 640), lambda s: noise(1, 3840), lambda s: noise(3840), lambda s: noise(8000),
                     lambda s: noise(s.one("max_length", default=64), s.one("num_mel_bins", default=64))),
    "hidden_states": (lambda s: noise(s.length, s.width), patches, picture, lambda s: torch.randn(BATCH * 16, s.width)),
    "inputs_embeds": (lambda s: noise(s.length, s.width),),
    "query_embeds": (lambda s: noise(s.length, s.width),),
    "encoder_hidden_states": (lambda s: noise(s.length, s.one("encoder_hidden_size", "cross_hidden_size", "hidden_size", default=WIDTH)),),
    "grid_thw": (grid,), "image_grid_thw": (grid,), "video_grid_thw": (grid,), "mm_token_type_ids": (kinds,),
    "image_sizes": (lambda s: [[s.image, s.image]] * BATCH,),
    "flattened_patches": (lambda s: torch.cat([noise(16, 2).abs().ceil(), noise(16, s.channels * s.patch**2)], -1),),
    "attention_mask": (lambda s: torch.ones(BATCH, s.length + s.places, dtype=torch.long), lambda s: torch.ones(BATCH, 64, dtype=torch.bool)),
    "input_features_mask": (lambda s: torch.ones(BATCH, 64, dtype=torch.long), lambda s: torch.ones(BATCH, 64, dtype=torch.bool)),
    "spectrogram": (lambda s: noise(16, s.one("model_in_dim", "num_mel_bins", default=64)),),
    "audio_mel_mask": (lambda s: torch.zeros(BATCH, 64, dtype=torch.bool),),
    "mask": (lambda s: torch.ones(BATCH, s.length, dtype=torch.bool),),
    "image": (picture,), "context": (lambda s: noise(s.length, s.width),), "mel_spectrogram": (lambda s: noise(80, 16),),
    "audio_input_ids": (plain_words,), "patch_embeds": (lambda s: noise(16, s.width),),
    "noise_embeds": (lambda s: noise(s.length, s.width),), "context_hidden_states": (lambda s: noise(s.length, s.width),),
    "high_res_pixel_values": (picture, lambda s: noise(3, 64, 64)), "state": (lambda s: noise(s.one("max_state_dim", default=32)),),
    "vision_features": (lambda s: noise(16, s.width),), "text_features": (lambda s: noise(6, s.width),),
    "vision_pos_encoding": (lambda s: noise(16, s.width),), "decoder_queries": (lambda s: noise(6, s.width),),
    "task_inputs": (plain_words,), "merge_sizes": (lambda s: [1] * BATCH,), "target_sizes": (lambda s: [[4, 4]] * BATCH,),
    "image_features": (lambda s: noise(16, s.width),), "aspect_ratio_ids": (lambda s: torch.ones(BATCH, 1, dtype=torch.long),),
    "aspect_ratio_mask": (lambda s: torch.ones(BATCH, 1, 1, dtype=torch.long),),
    "spatial_shapes": (lambda s: [[4, 4]] * BATCH,), "pixel_attention_mask": (lambda s: torch.ones(BATCH, 16, dtype=torch.long),),
    "input_points": (lambda s: torch.rand(BATCH, 1, 2, 2) * s.image,),
    "past_values": (lambda s: noise(s.one("context_length", default=64), s.one("num_input_channels", "input_size", default=1)),
                    lambda s: noise(s.one("context_length", default=64)), lambda s: [torch.randn(64) for _ in range(BATCH)]),
    "past_observed_mask": (lambda s: torch.ones(BATCH, s.one("context_length", default=64), s.one("num_input_channels", default=1)),),
    "future_values": (lambda s: noise(s.one("prediction_length", default=24), s.one("num_input_channels", default=1)),),
    "target_values": (lambda s: below(s.one("num_targets", default=2)), lambda s: noise(s.one("num_targets", default=2))),
    "latents": (lambda s: noise(s.width, 8), lambda s: noise(8, s.width)),
}  # fmt: skip
UNSURE = {"input_features_mask", "image_sizes", "encoder_hidden_states"}  # tried without and with
LABELS: tuple[tuple[str, tuple[Maker, ...]], ...] = (
    ("MultipleChoice|NextSentence", (lambda s: below(2),)),
    ("TokenClassification|FrameClassification", (lambda s: below(2, s.length + s.places), lambda s: below(2, 64))),
    ("CausalLM|ConditionalGeneration|MaskedLM|Seq2Seq|ImageTextToText|Text2Text|PreTraining", (words, plain_words)),
    ("Classification", (lambda s: below(2), lambda s: below(2, s.length + s.places))),
    ("CTC|RNNT|TDT", (lambda s: torch.randint(3, 20, (BATCH, 4)),)),
    ("SemanticSegmentation", (lambda s: below(2, s.image, s.image),)),
    ("DepthEstimation", (lambda s: noise(s.image, s.image).abs() + 0.5,)),
)
# Pictures or sounds: a batch has the first kind that a class takes.
SENSES = ("pixel_values", "pixel_values_videos", "flattened_patches", "input_features", "input_values")
# Inputs that may be left out, and are given where the class has them.
WANTED = {
    "input_ids", "grid_thw", "image_grid_thw", "image_sizes", "decoder_input_ids", "input_features_mask", "mm_token_type_ids",
    "hidden_states", "encoder_hidden_states", "high_res_pixel_values", "target_values", "future_values", "input_points", "target_sizes", *SENSES,
}  # fmt: skip


def classes(config: Any) -> list[type[nn.Module]]:
    """The models of the library that a configuration belongs to, those with a loss first."""
    from transformers import PreTrainedModel

    name = type(config).__module__.replace(".configuration_", ".modeling_")
    module = importlib.import_module(name)
    found = [
        held for held in vars(module).values()
        if inspect.isclass(held) and issubclass(held, PreTrainedModel) and held.__module__ == name
        and held.config_class is type(config) and "forward" in vars(held)
    ]  # fmt: skip
    order = ("ForConditionalGeneration", "ForCausalLM", "ForMaskedLM", "For", "Model", "")

    def rank(model: type[nn.Module]) -> tuple[int, int]:
        place = next(place for place, word in enumerate(order) if word in model.__name__)
        return "labels" not in inspect.signature(model.forward).parameters and place < 4, place

    return sorted(found, key=rank)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the batch of a model is made: the maker of each input, and the shape of a target where there are no labels."""

    model: type[nn.Module]
    config: Any
    sizes: Sizes
    inputs: Mapping[str, Maker]
    target: tuple[int, ...] | None = None

    def batch(self) -> dict[str, Any]:
        torch.manual_seed(0)
        made = {name: make(self.sizes) for name, make in self.inputs.items() if make is not absent}
        return made if self.target is None else {**made, "target": torch.randn(self.target)}


class Unbuildable(Exception):
    """No batch was found; the text says what each class of the library said last."""


def first_numbers(value: Any) -> Tensor | None:
    """The first tensor of real numbers that carries a gradient, of a result or of the values in it."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    held = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next((x for v in held if (x := first_numbers(v)) is not None), None)


LARGEST = 60_000_000  # parameters


def recipe(config: Any, candidates: Sequence[type[nn.Module]]) -> Recipe:
    """The first batch with which forward and backward of a model of one of these classes run."""
    said: list[str] = []
    for kind in candidates:
        try:
            with torch.device("meta"):
                if sum(p.numel() for p in kind(config).parameters()) > LARGEST:
                    raise ValueError("too large")
            with torch.random.fork_rng(), torch.device("cpu"):
                torch.manual_seed(0)
                model = kind(config)
        except Exception as error:  # whatever a library says of a configuration
            said.append(f"{kind.__name__}: {type(error).__name__} {error}"[:300])
            continue
        found = of_model(model, kind, config, said) or of_configuration(model, kind, config, said)
        if found is not None:
            return found
    raise Unbuildable(" || ".join(said) or "no class")


def of_model(model: nn.Module, kind: type[nn.Module], config: Any, said: list[str]) -> Recipe | None:
    """The first batch that a model takes; None, and what it says of others in `said`, if it takes none."""
    signature = inspect.signature(model.forward).parameters
    senses = [name for name in SENSES if name in signature][1:]
    names = [p.name for p in signature.values() if p.name in INPUTS
             and ((p.name in WANTED and p.name not in senses) or p.default is inspect.Parameter.empty)]  # fmt: skip
    missing = [p.name for p in signature.values() if p.default is inspect.Parameter.empty and p.name not in INPUTS
               and p.kind is p.POSITIONAL_OR_KEYWORD]  # fmt: skip
    if missing:
        said.append(f"{kind.__name__}: inputs {' '.join(missing)}")
        return None
    choices = {name: (absent, *INPUTS[name]) if name in UNSURE and signature[name].default is None else INPUTS[name]
               for name in names}  # fmt: skip
    if "labels" in signature:
        for pattern, makers in LABELS:
            if re.search(pattern, kind.__name__):
                choices["labels"] = (*makers, absent)
                break
    if {"start_positions", "end_positions"} <= signature.keys():
        choices |= dict.fromkeys(("start_positions", "end_positions"), (lambda s: below(s.length),))
    if "input_ids" in choices and kind.__name__.endswith("ForSequenceClassification"):
        choices["input_ids"] = (ended_words, words)
    if kind.__name__.endswith("ForMultipleChoice"):
        choices["input_ids"] = (lambda s: torch.stack((plain_words(s), plain_words(s)), 1),)
    if "return_loss" in signature:
        choices["return_loss"] = (lambda s: True,)
    tried = 0
    for makers in itertools.product(*choices.values()):
        chosen = dict(zip(choices, makers, strict=True))
        sizes = Sizes(config=config)
        for _ in range(3):
            tried += 1
            if tried > 60:
                return None
            attempt = Recipe(model=kind, config=config, sizes=sizes, inputs=chosen)
            error = trained(model, attempt)
            if isinstance(error, Recipe):
                return with_places(model, error)
            shapes = {name: tuple(x.shape) for name, x in attempt.batch().items() if isinstance(x, Tensor)}
            said.append(f"{kind.__name__} {shapes}: {error}"[:300])
            places = counted(model, attempt) if "tokens" in error else 0
            if places in (0, sizes.places):
                break
            sizes = dataclasses.replace(sizes, places=places)
    return None


def with_places(model: nn.Module, found: Recipe) -> Recipe:
    """The recipe with places for the picture or sound, if the model also takes a text without any."""
    reads_both = "input_ids" in found.inputs and not {*SENSES}.isdisjoint(found.inputs)
    if not reads_both or found.sizes.places or place_token(found.config) is None:
        return found
    placed = dataclasses.replace(found, sizes=dataclasses.replace(found.sizes, places=counted(model, found)))
    made = trained(model, placed) if placed.sizes.places else ""
    return made if isinstance(made, Recipe) else found


def of_configuration(model: nn.Module, kind: type[nn.Module], config: Any, said: list[str]) -> Recipe | None:
    """The recipe with the batch that partc makes for a configuration of a vision-language model."""
    written = {**json.loads(config.to_json_string(use_diff=False)), "architectures": [kind.__name__]}
    vision = written.get("vision_config")
    if not isinstance(vision, dict) or "pixel_values" not in inspect.signature(model.forward).parameters:
        return None
    if not vision.get("image_size"):
        vision["image_size"] = 4 * vision.get("patch_size", 8)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(written))
            net = Path(folder) / "net.py"
            net.write_text(model_source(f"hf:{path}", batch=BATCH, seq=LENGTH))
            made = load(net, {}).batch()
    except PartcError as error:
        said.append(f"{kind.__name__}: {error}"[:300])
        return None
    inputs: dict[str, Maker] = {name: lambda _, entry=entry: entry for name, entry in made.items()}
    found = trained(model, Recipe(model=kind, config=config, sizes=Sizes(config=config), inputs=inputs))
    if isinstance(found, Recipe):
        return found
    said.append(f"{kind.__name__} with the batch of hf: {found}"[:300])
    return None


def counted(model: nn.Module, attempt: Recipe) -> int:
    """The number of text positions that a picture or sound of a batch takes, by the library's own count."""
    batch = {name: torch.tensor(x) if isinstance(x, list) else x for name, x in attempt.batch().items()}
    for owner, name in itertools.product((getattr(model, "model", None), model, *model.children()),
                                         ("get_image_features", "get_audio_features", "get_video_features")):  # fmt: skip
        features = getattr(owner, name, None)
        wanted = inspect.signature(features).parameters if features is not None else {}
        given = {key: x for key, x in batch.items() if key in wanted}
        try:
            made = features(**given)
        except Exception:  # no such part, or another kind of input
            continue
        made = getattr(made, "pooler_output", made)
        tensors = [made] if isinstance(made, Tensor) else [x for x in made if isinstance(x, Tensor)]
        return sum(x.numel() for x in tensors) // BATCH // WIDTH
    return 0


def trained(model: nn.Module, attempt: Recipe) -> Recipe | str:
    """Forward and backward; the recipe with its target, or what went wrong."""
    try:
        batch = attempt.batch()
        given = {name: torch.tensor(x) if isinstance(x, list) else x for name, x in batch.items()}
        model.zero_grad()
        made = model(**given)
        loss = made.get("loss") if isinstance(made, Mapping) else None
        if loss is None and ("labels" in given or "return_loss" in given):
            raise ValueError("no loss")
        found = attempt
        if loss is None:
            first = first_numbers(made)
            if first is None or not first.requires_grad:
                raise ValueError("no result with a gradient")
            found = dataclasses.replace(attempt, target=tuple(first.shape))
            loss = (first - 1).square().mean()  # some models start with results of zero
        if loss.dim() or not loss.isfinite():
            raise ValueError("loss is not a finite number")
        loss.backward()
        if not any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters()):
            raise ValueError("no gradient")
        return found
    except Exception as error:  # whatever a library says of a batch
        return f"{type(error).__name__} {error}"


_recipes: dict[tuple[str, str], Recipe] = {}


def of_kind(kind: str, head: str = "") -> Recipe:
    """The recipe of a model type of transformers, and of one of its classes."""
    import transformers
    from transformers import CONFIG_MAPPING

    if (kind, head) not in _recipes:
        said = []
        for level in range(3):
            try:
                with torch.device("cpu"):
                    config = small(CONFIG_MAPPING[kind](), level)
                    candidates = [getattr(transformers, head)] if head else classes(config)
                    _recipes[kind, head] = recipe(config, candidates)
                break
            except Exception as error:
                said.append(f"{level}: {error}")
        else:
            raise Unbuildable(" @@ ".join(said))
    return _recipes[kind, head]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Classifier:
    """A named model of timm with fewer layers and narrower ones, as far as its constructor takes them."""

    name: str
    pixels: int
    given: Mapping[str, Any]

    def model(self) -> nn.Module:
        import timm

        return timm.create_model(self.name, num_classes=CLASSES, **self.given)


@functools.cache
def classifier(name: str) -> Classifier:
    """The smallest variant of a named model of timm that takes pictures and passes a gradient."""
    arguments, kind = constructor(name)
    sized = inspect.isclass(kind) and "img_size" in inspect.signature(kind.__init__).parameters
    for pixels, level in itertools.product((64, 96, 224, 256), range(4)):
        shrinking = Shrinking(SimpleNamespace(**arguments), level)
        given = {key: shrinking.value(key, value) for key, value in arguments.items()} if level < 3 else {}
        given = {key: value for key, value in given.items() if value != arguments[key]}
        found = Classifier(name=name, pixels=pixels, given={**given, **({"img_size": pixels} if sized else {})})
        try:
            with torch.device("cpu"), torch.random.fork_rng():
                found.model()(torch.randn(2, 3, pixels, pixels)).sum().backward()
            return found
        except Exception:  # whatever a library says of sizes
            continue
    raise Unbuildable(name)


def constructor(name: str) -> tuple[dict[str, Any], Any]:
    """The numbers that a named model of timm gives the constructor of its class, and the class."""
    from timm.models import model_entrypoint

    class Seen(Exception):
        pass

    def note(kind: Any, *_: Any, **given: Any) -> None:
        raise Seen(
            {key: v for key, v in given.items() if isinstance(v, int | tuple | list) and not isinstance(v, bool)}, kind
        )

    entry = model_entrypoint(name)
    try:
        with mock.patch.object(sys.modules[entry.__module__], "build_model_with_cfg", note):
            entry()
    except Seen as seen:
        given, kind = seen.args
        return {key: v for key, v in given.items() if key != "out_indices"}, kind
    raise Unbuildable(name)
