"""The sides of images and of latents, ``data.image_size`` and ``latent_size``: one decides the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fluxtrain.contract.run.buckets import PIXELS_PER_LATENT, PIXELS_PER_TOKEN

IMAGE: Final = "image_size"
LATENT: Final = "latent_size"
_LATENT_SIDES = range(2, 4097, 2)
_IMAGE_SIDES = range(PIXELS_PER_TOKEN, 4096 * PIXELS_PER_LATENT + 1, PIXELS_PER_TOKEN)


def with_both(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields ``values`` with both sides if one is given; a wrong one is left to its own check."""
    if LATENT not in values and values.get(IMAGE) in _IMAGE_SIDES:
        return {**values, LATENT: int(values[IMAGE]) // PIXELS_PER_LATENT}
    if IMAGE not in values and values.get(LATENT) in _LATENT_SIDES:
        return {**values, IMAGE: int(values[LATENT]) * PIXELS_PER_LATENT}
    return values


def without_decided(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` without the side that ``over``, which overrides them, decides by the other one."""
    decided = {IMAGE: LATENT, LATENT: IMAGE}
    return {
        key: value
        for key, value in values.items()
        if not (decided.get(key) in over and key not in over)
    }
