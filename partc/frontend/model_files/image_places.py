"""The places that an image has in the texts of a vision-language model of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlaces:
    """How texts refer to images: each image has `count` places, which hold the token `token`."""

    token: int
    count: int
    kinds: str  # the argument that says which places are images'; empty if there is none
    side: int = 0  # patches in each direction, where images are given as rows of patches
    row: int = 0  # numbers in each of these rows
    sized: bool = False  # the model is told the sizes of images


def image_places(architecture: str, config: Mapping[str, Any], height: int, width: int) -> ImagePlaces | None:
    """The places of one image of this size; None if the model's own code does not tell."""
    import transformers

    kind = getattr(transformers, architecture)
    made = transformers.AutoConfig.for_model(**config)
    arguments = inspect.signature(kind.forward).parameters
    token = next(
        (t for n in ("image_token_id", "image_token_index") if isinstance(t := getattr(made, n, None), int)), None
    )
    if token is None:
        return None
    kinds = next((name for name in ("mm_token_type_ids", "token_type_ids") if name in arguments), "")
    if "image_grid_thw" in arguments:
        vision = made.vision_config
        merged, patch = getattr(vision, "spatial_merge_size", None), getattr(vision, "patch_size", None)
        if not isinstance(merged, int) or not isinstance(patch, int):
            return None
        side = max(height // patch // merged, 1) * merged
        channels = getattr(vision, "in_channels", getattr(vision, "in_chans", None)) or 3
        row = channels * getattr(vision, "temporal_patch_size", 1) * patch**2
        return ImagePlaces(token=token, count=(side // merged) ** 2, kinds=kinds, side=side, row=row)
    channels = getattr(getattr(made, "vision_config", None), "num_channels", 3)
    model = _without_memory(kind, made)
    for sizes in ({}, {"image_sizes": [[height, width]]}) if model is not None else ():
        count = _feature_rows(model, (1, channels, height, width), sizes) if sizes.keys() <= arguments.keys() else None
        if count is not None:
            return ImagePlaces(token=token, count=count, kinds=kinds, sized=bool(sizes))
    return None


def _without_memory(kind: Any, config: Any) -> Any:
    """A model whose tensors have no memory; None if the library cannot build it."""
    import torch

    try:
        with torch.device("meta"):
            return kind(config)
    except Exception:  # whatever a library says of a configuration; the trace repeats it
        return None


def _feature_rows(model: Any, shape: tuple[int, ...], sizes: Mapping[str, Any]) -> int | None:
    """The rows of features that a model makes of images; None if it needs other arguments, or values."""
    import torch

    try:
        owner = model if hasattr(model, "get_image_features") else model.model
        given = {name: torch.tensor(size, device="cpu") for name, size in sizes.items()}
        with torch.device("meta"):
            made = owner.get_image_features(pixel_values=torch.empty(shape), **given)
    except Exception:  # whatever the model's own code says
        return None
    features = getattr(made, "pooler_output", made)
    parts: Iterable[Any] = (features,) if isinstance(features, torch.Tensor) else features
    return int(sum(part.numel() // part.shape[-1] for part in parts))
