"""FLUX.1's published encoders without weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.encode.autoencoder import Autoencoder
from fluxtrain.encode.encoders import Encoders
from fluxtrain.encode.sizes import CLIP_L, CLIP_POSITIONS, T5_XXL, has_published_text_encoders
from fluxtrain.encode.text import T5Clip, TextModel


def encodes(config: RunConfig) -> bool:
    """Return whether the step encodes images, which only FLUX.1's published encoders can be made for."""
    published = has_published_text_encoders(config) and config.encoders.autoencoder_kind == "flux"
    return config.data.source == "images" and published


def empty_encoders(config: RunConfig) -> Encoders:
    """Return the encoders of ``config`` on the meta device, in their dtype; every caption is token 0."""
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    dtype: torch.dtype = getattr(torch, config.encoders.precision)
    with torch.device("meta"):
        t5 = T5EncoderModel(
            T5Config(
                vocab_size=T5_XXL.vocabulary,
                d_model=T5_XXL.width,
                d_kv=T5_XXL.width // T5_XXL.heads,
                d_ff=T5_XXL.hidden,
                num_layers=T5_XXL.layers,
                num_heads=T5_XXL.heads,
                feed_forward_proj="gated-gelu",
            )
        )
        clip = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=CLIP_L.vocabulary,
                hidden_size=CLIP_L.width,
                intermediate_size=CLIP_L.hidden,
                num_hidden_layers=CLIP_L.layers,
                num_attention_heads=CLIP_L.heads,
                max_position_embeddings=CLIP_POSITIONS,
            )
        )
        codec = Autoencoder()

    def load(module: nn.Module) -> Any:
        return module.to(dtype).eval().requires_grad_(False)

    text = T5Clip(
        TextModel(_tokens, load(t5), config.data.text_length),
        TextModel(_tokens, load(clip), CLIP_POSITIONS),
    )
    return Encoders(text, load(codec), torch.device("meta"), dtype)


def allocated(encoders: Encoders, device: torch.device) -> Encoders:
    """Return ``encoders`` on ``device``, their weights not set."""
    t5, clip, codec = modules_of(encoders)
    for module in (t5, clip, codec):
        module.to_empty(device=device)
    t5.encoder.embed_tokens.weight = t5.shared.weight  # one tensor, until it was moved
    return replace(encoders, device=device)


def modules_of(encoders: Encoders) -> list[Any]:
    """Return the modules of `empty_encoders`."""
    assert isinstance(encoders.text, T5Clip)
    return [encoders.text.t5.encoder, encoders.text.clip.encoder, encoders.codec]


def _tokens(captions: list[str], max_length: int, **_: object) -> Any:
    """Tokenize like transformers' tokenizers, without a vocabulary."""
    from transformers import BatchEncoding

    ids = torch.zeros(len(captions), max_length, dtype=torch.int64)
    return BatchEncoding({"input_ids": ids})
