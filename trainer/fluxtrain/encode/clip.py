"""The CLIP text encoder whose adapters are trained: its weights, and the token ids of captions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.precision import EncodersConfig
from fluxtrain.data.sources import Sources
from fluxtrain.encode.text import PREFIX, load_clip, load_tokenizer
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.model.clip import CLIP_LENGTH, ClipShape, ClipWeights
from fluxtrain.model.layers import CLIP_LAYERS, CLIP_MLP_RATIO
from fluxtrain.runtime.draws import Array

_ACTIVATION = "quick_gelu"
_LEGACY_END = 2
"""End token in the config of CLIP's published files, which is not its tokenizer's."""


def clip_weights(config: RunConfig, models_root: Path, dtype: torch.dtype) -> ClipWeights | None:
    """Return the weights of CLIP in ``dtype`` if the run trains its adapters; else None.

    Raises DataError if a file is missing or of another model than CLIP-L, ConfigError if its pooled vector
    does not fit the transformer.
    """
    if not config.trains_clip:
        return None
    path = models_root / config.encoders.clip
    loaded = load_clip(config.encoders, models_root, dtype)
    settings = loaded.encoder.config
    if settings.hidden_size != config.model.vec_in_dim:
        text = f"{path} gives {settings.hidden_size}"
        raise ConfigError("spec.run.model.vec_in_dim", config.model.vec_in_dim, text)
    _require_known(path, settings)
    end = settings.eos_token_id
    shape = ClipShape(
        width=settings.hidden_size,
        vocabulary=settings.vocab_size,
        positions=settings.max_position_embeddings,
        num_heads=settings.num_attention_heads,
        end_token=loaded.tokenizer.eos_token_id if end == _LEGACY_END else end,
        eps=settings.layer_norm_eps,
    )
    state = loaded.encoder.state_dict().items()
    tensors = {with_prefix(name): tensor for name, tensor in state if "position_ids" not in name}
    return ClipWeights(shape, tensors)


def with_prefix(name: str) -> str:
    """Return ``name`` as in CLIP's published files."""
    return name if name.startswith(PREFIX) else f"{PREFIX}{name}"


def caption_ids(
    encoders: EncodersConfig, models_root: Path, captions: Iterable[str]
) -> Mapping[str, Array]:
    """Return CLIP's token ids of each of ``captions``, by caption, as its pooled vector is computed from."""
    tokenizer = load_tokenizer(models_root / (encoders.clip_tokenizer or encoders.clip))
    texts = list(dict.fromkeys(captions))
    tokens = tokenizer(
        texts, padding="max_length", truncation=True, max_length=CLIP_LENGTH, return_tensors="np"
    )
    return dict(zip(texts, tokens.input_ids.astype(np.int32), strict=True))


def add_token_ids(sources: Sources, config: RunConfig, models_root: Path) -> None:
    """Give the pictures of ``sources`` the token ids of their captions, if the run trains CLIP's adapters."""
    if not config.trains_clip:
        return
    sets = [each for each in (sources.train, sources.validation) if each is not None]
    captions = (text for each in sets for text in each.captions)
    ids = caption_ids(config.encoders, models_root, ["", *captions])
    for each in sets:
        each.use_token_ids(ids)


def _require_known(path: Path, settings: Any) -> None:
    hidden = CLIP_MLP_RATIO * settings.hidden_size
    wanted = {
        "num_hidden_layers": CLIP_LAYERS,
        "intermediate_size": hidden,
        "hidden_act": _ACTIVATION,
    }
    for name, value in wanted.items():
        if (found := getattr(settings, name)) != value:
            text = f"{name} is {found}, of one with CLIP-L's layers it is {value}"
            raise DataError(f"{path}: adapters of CLIP are of CLIP-L only; {text}")
