"""Small encoders with random weights, their tokenizers, images with captions, and a config that uses them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data.tiny_tokenizers import COLOURS, caption, clip_tokenizer, t5_tokenizer
from PIL import Image, ImageDraw
from safetensors.torch import save_file
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.data.formats.tar_writer import TarWriter
from fluxtrain.encode.codec import Autoencoder

SIDE, WIDTH, CHANNELS, TOKENS = 32, 16, 4, 8


def small_image(index: int, side: int = SIDE) -> Image.Image:
    rng = np.random.default_rng(index)
    image = Image.fromarray(rng.integers(150, 256, (side, side, 3), dtype=np.uint8))
    box = tuple(sorted(rng.integers(0, side, 2).tolist())) * 2
    corners = (box[0], box[0], box[1], box[1])
    ImageDraw.Draw(image).ellipse(corners, fill=COLOURS[index % 6])
    return image


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def write_images(
    folder: Path, count: int, timesteps: bool = False, first: int = 0, shard_size: int = 20
) -> Path:
    """Write ``count`` images and captions from index ``first`` on to tars, like a prepared data set."""
    with TarWriter(folder, shard_size) as writer:
        for index in range(first, first + count):
            metadata: dict[str, Any] = {"n": index}
            if timesteps:
                metadata = {"id": str(index), "timestep": (index * 5) % 8}
            writer.add(f"{index:09d}", png(small_image(index)), "png", caption(index), metadata)
    return folder


def write_t5(folder: Path, **changes: Any) -> T5EncoderModel:
    """Write a T5 encoder with random weights, and its tokenizer, to ``folder``; return it."""
    tokenizer = t5_tokenizer()
    tokenizer.save_pretrained(folder)
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    model = T5EncoderModel(T5Config(**{"vocab_size": len(tokenizer), **sizes, **changes}))
    model.save_pretrained(folder)
    return model


def write_clip(folder: Path, **changes: Any) -> CLIPTextModel:
    """Write a CLIP text encoder with random weights, and its tokenizer, to ``folder``; return it."""
    tokenizer = clip_tokenizer()
    tokenizer.save_pretrained(folder)
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = CLIPTextConfig(**{"vocab_size": len(tokenizer), **sizes, **tokens, **changes})
    model = CLIPTextModel(config)
    model.save_pretrained(folder)
    return model


def write_encoders(root: Path) -> Path:
    """Write T5, CLIP and autoencoder with random weights to the presets' paths below ``root``."""
    torch.manual_seed(0)
    write_t5(root / "t5")
    write_clip(root / "clip")
    (root / "autoencoder").mkdir(exist_ok=True)
    weights = Autoencoder(width=32, latent_channels=CHANNELS).state_dict()
    save_file(weights, root / "autoencoder" / "ae.safetensors")
    return root


BASE: dict[str, Any] = {
    "preset": "micro",
    "data": {
        "source": "images",
        "image_size": SIDE,
        "latent_size": SIDE // 8,
        "text_length": TOKENS,
    },
    "encoders": {"precision": "float32", "latent_shift": 0.1159, "latent_scale": 0.3611},
    "preprocess": {"shard_size": 4, "batch_size": 3},
    "logging": {"metrics_port": 0},
}
"""``spec.run`` of a small run on images."""


def config(**changes: Any) -> RunConfig:
    """Return BASE with ``changes`` to its sections."""
    return resolve(merge(BASE, changes))
