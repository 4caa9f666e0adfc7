"""Tiny models of any class of diffusers: sizes by the names of a constructor's arguments, batches by signatures."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from derived import BATCH, LARGEST, Recipe, Unbuildable, noise, trained
from torch import Tensor, nn

TEXT, WIDTH, PLACES = 32, 64, 6

# Upper bounds of numbers by the names of arguments; the first pattern that fits decides. 0 leaves a number as it is.
LIMITS: tuple[tuple[str, int], ...] = (
    (r"group|ratio|factor|kernel|theta|scale|patch|sampling|hop|eps|freq_dim|timestep_channels", 0),
    (r"kv_heads|key_value_heads", 2),
    (r"heads$", 4),
    (r"head_dim", 16),
    (r"(text|cap|caption|context|cross_attention|joint_attention|llm|pooled|image|encoder|audio).*(dim|channels|size|features)", TEXT),
    (r"num_experts", 4),
    (r"intermediate|ffn|ff_dim|mlp_dim", 128),
    (r"layers|blocks$|layers_per_block|depth", 2),
    (r"sample_size|image_size", 16),
    (r"in_channels|out_channels|latent_channels|z_dim", 16),
    (r"hidden|dim$|size$|width|channels", WIDTH),
)  # fmt: skip
AXES: Mapping[int, tuple[int, ...]] = {1: (16,), 2: (8, 8), 3: (4, 6, 6), 4: (4, 4, 4, 4)}  # of a head of 16


def shrunk(name: str, value: Any) -> Any:
    """The value of a constructor's argument in the tiny model."""
    if isinstance(value, bool | str | float | None):
        return value
    if isinstance(value, int):
        bound = next((bound for pattern, bound in LIMITS if re.search(pattern, name)), 0)
        return min(value, bound) if bound else value
    if isinstance(value, list | tuple) and value and all(type(v) is int for v in value):
        if re.search(r"axes_dim|axes_dims|rope.*dim|dim_list", name) and len(value) in AXES:
            return type(value)(AXES[len(value)])
        if re.search(r"out_channels|channel_sizes|_dims$|embed_dim", name):
            return type(value)(min(v, WIDTH) for v in value)
        if re.search(r"layers|blocks|depths", name):
            return type(value)(min(v, 1) for v in value)
    return value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """The arguments of a constructor, of which shapes are read."""

    given: Mapping[str, Any]

    def one(self, pattern: str, default: int) -> int:
        """The number of the first argument whose name fits."""
        found = (v for name, v in self.given.items() if re.search(pattern, name) and isinstance(v, int | list | tuple))
        value = next(found, default)
        return int(value if isinstance(value, int) else value[0])

    @property
    def text(self) -> int:
        return self.one(
            r"(text|cap|caption|context|cross_attention|joint_attention|llm|encoder).*(dim|channels|size|features)",
            self.one(r"hidden_size|^dim$", TEXT),
        )

    @property
    def channels(self) -> int:
        return self.one(r"^in_channels|in_visual_dim|input_channels|^num_channels|^z_dim|in_dim", 4)

    @property
    def axes(self) -> int:
        found = (v for name, v in self.given.items() if "axes" in name and isinstance(v, list | tuple))
        return len(next(found, (0, 0, 0)))


Maker = Callable[[Named], Any]
LATENTS: tuple[Maker, ...] = (
    lambda n: noise(16, n.channels),
    lambda n: noise(n.channels, 8, 8),
    lambda n: noise(n.channels, 2, 8, 8),
    lambda n: noise(2, 8, 8, n.channels),
    lambda n: noise(n.channels, 16),
    lambda n: noise(16, n.channels // 2),
)
INPUTS: dict[str, tuple[Maker, ...]] = {
    "hidden_states": LATENTS, "latents": LATENTS, "x": LATENTS,
    "sample": (
        lambda n: noise(n.channels, 16, 16), lambda n: noise(n.channels, 5, 16, 16), lambda n: noise(n.channels, 2048),
        lambda n: noise(n.channels, 1, 32, 32), lambda n: noise(n.channels, 64, 64), lambda n: noise(n.channels, 224, 224),
    ),
    "timestep": (lambda n: torch.rand(BATCH), lambda n: torch.randint(1000, (BATCH,))),
    "t": (lambda n: torch.rand(BATCH),), "timestep_r": (lambda n: torch.rand(BATCH),),
    "encoder_hidden_states": (lambda n: noise(PLACES, n.text), lambda n: noise(PLACES, 2, n.text)),
    "text_bth": (lambda n: noise(PLACES, n.text),), "text_lens": (lambda n: torch.full((BATCH,), PLACES),),
    "pooled_projections": (lambda n: noise(n.one(r"pooled|in_text_dim2", TEXT)),),
    "guidance": (lambda n: torch.ones(BATCH),),
    "img_ids": (lambda n: places(16, n.axes), lambda n: places(16, n.axes).expand(BATCH, -1, -1).clone()),
    "txt_ids": (lambda n: torch.zeros(PLACES, n.axes), lambda n: torch.zeros(BATCH, PLACES, n.axes)),
    "position_ids": (lambda n: places(16 + PLACES, n.axes), lambda n: places(16 + PLACES, n.axes).expand(BATCH, -1, -1).clone()),
    "encoder_attention_mask": (lambda n: torch.ones(BATCH, PLACES), lambda n: torch.ones(BATCH, PLACES, dtype=torch.bool)),
    "encoder_hidden_states_mask": (lambda n: torch.ones(BATCH, PLACES, dtype=torch.long),),
    "img_shapes": (lambda n: (1, 4, 4),), "image_embeds": (lambda n: noise(PLACES, n.one("image.*dim", TEXT)),),
    "target_size": (lambda n: torch.full((BATCH, 2), 64.0),), "crop_coords": (lambda n: torch.zeros(BATCH, 2),),
    "text_encoder_layers": (lambda n: None,), "context_latents": (lambda n: noise(16, n.channels),),
    "audio_hidden_states": (lambda n: noise(8, n.one("audio_in_channels|in_audio", 16)),),
    "audio_encoder_hidden_states": (lambda n: noise(PLACES, n.one("audio_cross_attention_dim", TEXT)),),
    "r_timestep": (lambda n: torch.rand(BATCH),), "img_mask": (lambda n: torch.ones(BATCH, 16, dtype=torch.bool), lambda n: torch.ones(BATCH, 16 + PLACES, dtype=torch.bool)),
    "controlnet_cond": LATENTS, "global_hidden_states": (lambda n: noise(n.text),), "mask": (lambda n: torch.ones(BATCH, PLACES),),
    "visual_rope_pos": (lambda n: [torch.arange(2), torch.arange(4), torch.arange(4)],), "text_rope_pos": (lambda n: torch.arange(PLACES),),
    "indicator": (lambda n: torch.ones(BATCH, 16 + PLACES, dtype=torch.long),), "condition_mask": (lambda n: noise(1, 2, 8, 8),), "padding_mask": (lambda n: torch.zeros(BATCH, 1, 8, 8),),
    "segment_ids": (lambda n: torch.zeros(BATCH, 16 + PLACES, dtype=torch.long),),
    "prior_token_id": (lambda n: torch.randint(64, (BATCH, 16)),), "prior_token_drop": (lambda n: torch.zeros(BATCH, 16, dtype=torch.bool),),
    "num_frames": (lambda n: 1,), "height": (lambda n: 4,), "width": (lambda n: 4,), "audio_num_frames": (lambda n: 8,),
}  # fmt: skip
WANTED = {"timestep", "encoder_hidden_states", "hidden_states", "num_frames", "height", "width", "audio_num_frames"}
MOST = 400  # batches that are tried


def places(count: int, axes: int) -> Tensor:
    return torch.arange(count)[:, None].repeat(1, axes).remainder(torch.tensor([4, *[16] * (axes - 1)])).float()


@functools.cache
def recipe(name: str) -> Recipe:
    """The first batch that the tiny model of a class of diffusers takes, forward and backward."""
    import diffusers

    kind = getattr(diffusers, name)
    arguments = [*inspect.signature(kind.__init__).parameters.values()][1:]
    plain = {p.name: p.default for p in arguments if p.default is not inspect.Parameter.empty}
    given = {key: shrunk(key, value) for key, value in plain.items()}
    given |= {key: value for key, value in relations(given).items() if key in given}
    said: list[str] = []
    with torch.device("cpu"), torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            model = kind(**given)
        except Exception as error:  # whatever a library says of sizes
            raise Unbuildable(f"{type(error).__name__} {error}"[:300]) from error
        if sum(p.numel() for p in model.parameters()) > LARGEST:
            raise Unbuildable("too large")
        for attempt in attempts(kind, given, inspect.signature(model.forward).parameters):
            found: Recipe | str = ""
            fitting: Recipe | None = attempt
            while fitting is not None:
                found = trained(model, attempt := fitting)
                if isinstance(found, Recipe):
                    return found
                fitting = fitted(attempt, found)
            said.append(str(found)[:150])
    raise Unbuildable(" || ".join(dict.fromkeys(said)))


def fitted(attempt: Recipe, error: str) -> Recipe | None:
    """The recipe with another width of one input, if a product says which widths it has and wants."""
    product = re.search(r"shapes cannot be multiplied \(\d+x(\d+) and (\d+)x", error)
    convolution = re.search(r"groups=1, weight of size \[\d+, (\d+).*\], expected input\[\d+, (\d+)", error)
    if product is not None:
        has, wants, dim = int(product[1]), int(product[2]), -1
    elif convolution is not None:
        has, wants, dim = int(convolution[2]), int(convolution[1]), 1
    else:
        return None
    for name, x in attempt.batch().items():
        if (
            isinstance(x, Tensor)
            and x.is_floating_point()
            and x.dim() > 1
            and x.shape[dim] == has
            and "ids" not in name
        ):
            shape = [*x.shape]
            shape[dim] = wants
            make = functools.partial(_noise, tuple(shape))
            return (
                None
                if attempt.inputs[name].func is _noise
                else dataclasses.replace(attempt, inputs={**attempt.inputs, name: make})
            )  # type: ignore[attr-defined]
    return None


def _noise(shape: tuple[int, ...], sizes: Any) -> Tensor:
    return torch.randn(shape)


def relations(given: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes that follow from others: a width of all heads."""
    heads = next(
        (v for key, v in given.items() if re.fullmatch(r"(num_attention|n)_heads", key) and isinstance(v, int)), 4
    )
    return {"dim": 16 * heads, "hidden_size": 16 * heads, "n_kv_heads": heads, "model_dim": 16 * heads}


def attempts(
    kind: type[nn.Module], given: Mapping[str, Any], signature: Mapping[str, inspect.Parameter]
) -> Sequence[Recipe]:
    """Recipes of all combinations of the inputs that the class needs."""
    named = Named(given=given)
    names = [p.name for p in signature.values() if p.kind is p.POSITIONAL_OR_KEYWORD
             and (p.default is inspect.Parameter.empty or p.name in WANTED or (p.name == "guidance" and given.get("guidance_embeds")))]  # fmt: skip
    if missing := [name for name in names if name not in INPUTS]:
        raise Unbuildable(f"inputs {' '.join(missing)}")
    makers = [[functools.partial(_call, make, named) for make in INPUTS[name]] for name in names]
    sizes: Any = SimpleNamespace()
    build = functools.partial(kind, **given)
    return [
        Recipe(model=lambda config: build(), config=None, sizes=sizes, inputs=dict(zip(names, chosen, strict=True)))  # type: ignore[arg-type]
        for chosen in itertools.islice(itertools.product(*makers), MOST)
    ]


def _call(make: Maker, named: Named, sizes: Any) -> Any:
    return make(named)
