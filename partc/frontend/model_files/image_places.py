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
    channels = getattr(made.vision_config, "num_channels", 3) if hasattr(made, "vision_config") else 3
    count = _feature_rows(kind, made, channels, height, width)
    return None if count is None else ImagePlaces(token=token, count=count, kinds=kinds)


def _feature_rows(kind: Any, config: Any, channels: int, height: int, width: int) -> int | None:
    """The rows of features that a model makes of one image, found on tensors without memory."""
    import torch

    try:
        with torch.device("meta"):
            model = kind(config)
            owner = model if hasattr(model, "get_image_features") else model.model
            made = owner.get_image_features(pixel_values=torch.empty(1, channels, height, width))
    except Exception:  # a model that needs more arguments, or values
        return None
    features = getattr(made, "pooler_output", made)
    parts: Iterable[Any] = (features,) if isinstance(features, torch.Tensor) else features
    return int(sum(part.numel() // part.shape[-1] for part in parts))
