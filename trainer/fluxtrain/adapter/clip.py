"""Updates of the CLIP text encoder: found in adapters, and added to a loaded encoder."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import torch

from fluxtrain.adapter.file import AdapterFile
from fluxtrain.adapter.merge import MergedWeights
from fluxtrain.encode.clip import with_prefix
from fluxtrain.encode.text import T5Clip, TextEncoder, TextModel
from fluxtrain.errors import DataError
from fluxtrain.model.adapted_layers import TEXT_ENCODER, is_clip
from fluxtrain.weights.reader import Weights

Added = Sequence[tuple[AdapterFile, float]]
"""Adapters that are added, each with its strength."""


def clip_adapters(weights: Weights | None) -> list[tuple[AdapterFile, float]]:
    """Return the adapters that are merged into ``weights`` and have updates of CLIP too, in order."""
    if not isinstance(weights, MergedWeights):
        return []
    own = [pair for pair in weights.adapters if any(map(is_clip, pair[0].adapter))]
    return [*clip_adapters(weights.base), *own]


def left_out(weights: Weights) -> str:
    """Return a sentence on the updates of CLIP, which no weights of the transformer hold; "" without them."""
    files = clip_adapters(weights)
    count = sum(sum(map(is_clip, file.adapter)) for file, _ in files)
    if not count:
        return ""
    names = ", ".join(str(file.path) for file, _ in files)
    return f"{names}: {count} layers of CLIP-L are left out: these are the transformer's weights"


def with_updates(text: TextEncoder, added: Added) -> TextEncoder:
    """Return ``text`` with the updates of CLIP in ``added``; DataError if they do not fit."""
    if not added:
        return text
    if not isinstance(text, T5Clip):
        path = added[0][0].path
        raise DataError(f"{path}: it adapts CLIP-L, and spec.run.encoders.text is minilm")
    return replace(text, clip=updated(text.clip, added))


@torch.no_grad()
def updated(clip: TextModel, added: Added) -> TextModel:
    """Return a copy of ``clip`` with the updates of ``added``, in turn; they are added in float32."""
    encoder = deepcopy(clip.encoder)
    parameters = {with_prefix(name): each for name, each in encoder.named_parameters()}
    for file, strength in added:
        for layer, update in file.adapter.items():
            if not is_clip(layer):
                continue
            weight = parameters.get(f"{layer.removeprefix(f'{TEXT_ENCODER}.')}.weight")
            own = update.outputs, update.inputs
            if weight is None or tuple(weight.shape) != own:
                has = "does not exist" if weight is None else f"is {list(weight.shape)}"
                raise DataError(f"{file.path}: {layer} is {list(own)}; in CLIP it {has}")
            total = weight.float().cpu()
            weight.copy_(torch.add(total, update.change(total), alpha=strength))
    return replace(clip, encoder=encoder)
