"""FLOPs of one sample: what the matrix products cost, one FLOP being a multiplication or an addition.

Element-wise work is left out and attention counted in full (it is bidirectional), as
``torch.utils.flop_counter`` does. d is the hidden width; a linear layer from i to o costs 2 i o per row.
"""

from __future__ import annotations

from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.embed import TIMESTEP_DIM


def forward_flops(config: ModelConfig, image_tokens: int, text_tokens: int) -> int:
    """Return the FLOPs of the forward pass for one sample."""
    tokens = image_tokens + text_tokens
    blocks = config.depth * _double_block(config, tokens)
    blocks += config.depth_single_blocks * _single_block(config, tokens)
    inputs = _input_layers(config, image_tokens, text_tokens)
    return inputs + _vec_layers(config) + blocks + _last_layer(config, image_tokens)


def training_flops(config: ModelConfig, image_tokens: int, text_tokens: int) -> int:
    """Return the FLOPs of forward and backward for one sample, without recomputation.

    Each product costs two in the backward pass, one where the layer's input needs no gradient. A model
    without single blocks drops its last text stream, whose few backward FLOPs are counted here all the same.
    """
    forward = forward_flops(config, image_tokens, text_tokens)
    return 3 * forward - _input_layers(config, image_tokens, text_tokens)


def _input_layers(config: ModelConfig, image_tokens: int, text_tokens: int) -> int:
    """Return the FLOPs of the layers that see the model's inputs."""
    embedded = image_tokens * config.in_channels + text_tokens * config.context_in_dim
    times = 2 if config.guidance_embed else 1
    return 2 * config.hidden_size * (embedded + times * TIMESTEP_DIM + config.vec_in_dim)


def _vec_layers(config: ModelConfig) -> int:
    """Return the FLOPs of the second layers of time_in, vector_in and guidance_in."""
    embedders = 3 if config.guidance_embed else 2
    return int(2 * embedders * config.hidden_size**2)


def _double_block(config: ModelConfig, tokens: int) -> int:
    """Return the FLOPs of a block in which each token passes the layers of its own stream."""
    d, mlp = config.hidden_size, _mlp_hidden(config)
    modulations = 2 * (2 * d * 6 * d)
    qkv_proj_mlp = 2 * d * (3 * d + d + 2 * mlp)
    return modulations + tokens * qkv_proj_mlp + _attention(config, tokens)


def _single_block(config: ModelConfig, tokens: int) -> int:
    """Return the FLOPs of a block that projects attention and MLP together."""
    d, mlp = config.hidden_size, _mlp_hidden(config)
    modulation = 2 * d * 3 * d
    linear1, linear2 = 2 * d * (3 * d + mlp), 2 * (d + mlp) * d
    return modulation + tokens * (linear1 + linear2) + _attention(config, tokens)


def _attention(config: ModelConfig, tokens: int) -> int:
    """Return the FLOPs of queries times keys and of weights times values, all heads together."""
    return 2 * (2 * tokens * tokens * config.hidden_size)


def _last_layer(config: ModelConfig, image_tokens: int) -> int:
    d = config.hidden_size
    return 2 * d * 2 * d + image_tokens * 2 * d * config.in_channels


def _mlp_hidden(config: ModelConfig) -> int:
    return int(config.hidden_size * config.mlp_ratio)
