"""How other tools name the layers of the blocks: each layer of ours, and parts of its rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.layers import TEXT_ENCODER, clip_linear_layers, is_clip, linear_layers

KOHYA, BFL, DIFFUSERS, ONETRAINER = (
    "lora_unet_",
    "diffusion_model.",
    "transformer.",
    "lora_transformer_",
)
"""Prefixes of the layouts' keys."""
KOHYA_CLIP, BARE_CLIP, COMFY_CLIP = "lora_te1_", "lora_te_", "text_encoders.clip_l.transformer."
"""Other tools' prefixes of CLIP's layers: kohya's and OneTrainer's, theirs for a single text encoder, and the
names of ComfyUI's own model. Elsewhere it is diffusers', which is ours."""
CLIP_PREFIXES = (KOHYA_CLIP, BARE_CLIP, COMFY_CLIP, f"{TEXT_ENCODER}.")
_BLOCK = re.compile(
    r"(double_blocks|single_blocks|single_transformer_blocks|transformer_blocks)([._])(\d+)\2"
)
_HIDDEN = 64
_ONE_OF_EACH = ModelConfig(
    hidden_size=_HIDDEN, num_heads=1, axes_dim=(16, 24, 24), depth=1, depth_single_blocks=1
)


class LayerName(NamedTuple):
    """A layer of ours, and which of diffusers' parts of it; None: all rows."""

    layer: str
    part: int | None
    num_parts: int


def part_names(layer: str) -> tuple[str, ...]:
    """Return diffusers' names of the parts of ``layer``, in the order of its rows."""
    if is_clip(layer):
        return (layer,)
    block, number, rest = layer.split(".", 2)
    parts = _parts()[f"{block}.0.{rest}"]
    return tuple(re.sub(r"\.0\.", f".{number}.", part, count=1) for part in parts)


def diffusers_key(part: str) -> str:
    """Return the key of diffusers' layer ``part`` in its files."""
    return part if is_clip(part) else DIFFUSERS + part


def kohya_key(layer: str) -> str:
    """Return kohya's name of ``layer``."""
    prefix = KOHYA_CLIP if is_clip(layer) else KOHYA
    return prefix + layer.removeprefix(f"{TEXT_ENCODER}.").replace(".", "_")


def bfl_key(layer: str) -> str:
    """Return the name of ``layer`` in BFL's layout; CLIP's is that which readers of that layout know."""
    return layer if is_clip(layer) else BFL + layer


def is_of_text_encoder(module: str) -> bool:
    """Return whether the tensor or module ``module`` belongs to a text encoder."""
    return module.startswith(("lora_te", TEXT_ENCODER))


def is_of_clip(module: str) -> bool:
    """Return whether the tensor or module ``module`` has a prefix of CLIP's layers."""
    return module.startswith(CLIP_PREFIXES)


def find_clip(module: str) -> LayerName | None:
    """Return the place of ``module``, with its prefix, in CLIP; None if it is none of its layers."""
    prefix = next((each for each in CLIP_PREFIXES if module.startswith(each)), None)
    layer = None if prefix is None else _clip_layers().get(module.removeprefix(prefix))
    return None if layer is None else LayerName(layer, None, 1)


def find(module: str) -> LayerName | None:
    """Return the place of ``module``, named in any layout without its prefix; None if it is none of ours."""
    block = _BLOCK.match(module)
    if block is None:
        return None
    start, separator, number = block.groups()
    template = f"{start}{separator}0{separator}{module[block.end() :]}"
    place = _places().get(template)
    if place is None:
        return None
    kind, _, rest = place.layer.partition(".0.")
    return place._replace(layer=f"{kind}.{int(number)}.{rest}")


def part_rows(place: LayerName, hidden: int, mlp: int) -> tuple[int, int]:
    """Return the first row of ``place`` in its layer and the row after its last one.

    ``hidden`` is the model's width, ``mlp`` that of the MLP. Only fused layers have parts: q, k, v, and in
    single blocks the MLP.
    """
    assert place.part is not None
    first = place.part * hidden
    return first, first + (mlp if place.part == 3 else hidden)


@cache
def _parts() -> dict[str, tuple[str, ...]]:
    layers = linear_layers(_ONE_OF_EACH)
    return {layer: tuple(name for name, _ in parts) for layer, (_, parts) in layers.items()}


@cache
def _clip_layers() -> dict[str, str]:
    """Return the layers of CLIP by their names in each layout, without a prefix."""
    layers = {name.removeprefix(f"{TEXT_ENCODER}."): name for name in clip_linear_layers(1)}
    return layers | {name.replace(".", "_"): layer for name, layer in layers.items()}


@cache
def _places() -> dict[str, LayerName]:
    spellings: list[Callable[[str], str]] = [str, lambda name: name.replace(".", "_")]
    places = {}
    for layer, parts in _parts().items():
        count = len(parts)
        for spell in spellings:
            places[spell(layer)] = LayerName(layer, None, count)
            for index, part in enumerate(parts):
                places[spell(part)] = LayerName(layer, index if count > 1 else None, count)
    return places
