"""The places that an image has in the texts of a vision-language model of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeGuard


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlaces:
    """How texts refer to images: each image has `count` places, which hold the token `token`."""

    token: int
    count: int
    kinds: str  # the argument that says which places are images'; empty if there is none
    side: int = 0  # patches along each side of an image, if images are given as rows of patches
    row: int = 0  # numbers in a row of patches
    sized: bool = False  # the model is told the sizes of images


def image_places(kind: Any, arguments: Set[str], configuration: Any, height: int, width: int) -> ImagePlaces | None:
    """The places of one image of this size; None if the model's own code does not tell.

    `arguments` are those of the forward pass of the class `kind`.
    """
    tokens = (getattr(configuration, name, None) for name in ("image_token_id", "image_token_index"))
    token = next((each for each in tokens if isinstance(each, int)), None)
    if token is None:
        return None
    kinds = next((name for name in ("mm_token_type_ids", "token_type_ids") if name in arguments), "")
    if "image_grid_thw" in arguments:
        vision = getattr(configuration, "vision_config", None)
        merged, patch = _size(vision, "spatial_merge_size"), _size(vision, "patch_size")
        channels, frames = _size(vision, "in_channels", "in_chans") or 3, _size(vision, "temporal_patch_size") or 1
        if merged is None or patch is None:
            return None
        side = max(height // patch // merged, 1) * merged
        count, row = (side // merged) ** 2, channels * frames * patch**2
        return ImagePlaces(token=token, count=count, kinds=kinds, side=side, row=row)
    channels = _size(getattr(configuration, "vision_config", None), "num_channels") or 3
    model = _without_memory(kind, configuration)
    for sizes in ({}, {"image_sizes": [[height, width]]}) if model is not None else ():
        rows = _feature_rows(model, (1, channels, height, width), sizes) if sizes.keys() <= arguments else None
        if rows is not None:
            return ImagePlaces(token=token, count=rows, kinds=kinds, sized=bool(sizes))
    return None


def is_size(found: object) -> TypeGuard[int]:
    return isinstance(found, int) and not isinstance(found, bool) and found > 0


def _size(owner: Any, *names: str) -> int | None:
    """The first of these attributes that is a positive number."""
    return next((found for name in names if is_size(found := getattr(owner, name, None))), None)


def _without_memory(kind: Any, config: Any) -> Any:
    """A model whose tensors have no memory; None if the library cannot build it."""
    import torch

    from partc.frontend.state.constant_buffers import Recipes

    try:
        with torch.device("meta"), Recipes():  # which leave out random initialization
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
        features = getattr(made, "pooler_output", made)
        parts: Iterable[Any] = (features,) if isinstance(features, torch.Tensor) else features
        return int(sum(part.shape[:-1].numel() for part in parts))
    except Exception:  # whatever the model's own code says
        return None
