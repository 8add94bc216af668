"""How other tools name the layers of the blocks: each layer of ours, and parts of its rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.adapted_layers import linear_layers

KOHYA, BFL, DIFFUSERS, ONETRAINER = (
    "lora_unet_",
    "diffusion_model.",
    "transformer.",
    "lora_transformer_",
)
"""Prefixes of the layouts' keys."""
_BLOCK = re.compile(
    r"(double_blocks|single_blocks|single_transformer_blocks|transformer_blocks)([._])(\d+)\2"
)
_HIDDEN = 64
_ONE_OF_EACH = ModelConfig(
    hidden_size=_HIDDEN, num_heads=1, axes_dim=(16, 24, 24), depth=1, depth_single_blocks=1
)


class Place(NamedTuple):
    """A layer of ours, and which of diffusers' parts of it; None: all rows."""

    layer: str
    part: int | None
    num_parts: int


def part_names(layer: str) -> tuple[str, ...]:
    """Return diffusers' names of the parts of ``layer``, in the order of its rows."""
    block, number, rest = layer.split(".", 2)
    parts = _parts()[f"{block}.0.{rest}"]
    return tuple(re.sub(r"\.0\.", f".{number}.", part, count=1) for part in parts)


def find(module: str) -> Place | None:
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


def part_rows(place: Place, hidden: int, mlp: int) -> tuple[int, int]:
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
def _places() -> dict[str, Place]:
    """Return the place of each layer of the first blocks, by its name in each layout."""
    spellings: list[Callable[[str], str]] = [str, lambda name: name.replace(".", "_")]
    places = {}
    for layer, parts in _parts().items():
        count = len(parts)
        for spell in spellings:
            places[spell(layer)] = Place(layer, None, count)
            for index, part in enumerate(parts):
                places[spell(part)] = Place(layer, index if count > 1 else None, count)
    return places
