"""Makers of small things of the real kinds: encoders with random weights, tokenizers, tars of pictures."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from safetensors.torch import save_file
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.data.tar.writer import TarWriter
from fluxtrain.encode.autoencoder import Autoencoder

COLOURS = ("red", "green", "blue", "black", "orange", "purple")
SHAPES = ("circle", "square", "line")
SIDE, WIDTH, CHANNELS, TOKENS = 32, 16, 4, 8


def caption(index: int) -> str:
    return f"a {COLOURS[index % 6]} {SHAPES[index % 3]}, number {index}"


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


def write_pictures(
    folder: Path, count: int, timesteps: bool = False, first: int = 0, shard_size: int = 20
) -> Path:
    """Write pictures ``first`` and on, with captions, as prepared sets have them."""
    with TarWriter(folder, shard_size) as writer:
        for index in range(first, first + count):
            notes = {"id": str(index), "timestep": (index * 5) % 8} if timesteps else {"n": index}
            writer.add(f"{index:09d}", png(small_image(index)), "png", caption(index), notes)
    return folder


def t5_tokenizer() -> PreTrainedTokenizerFast:
    """Return a Unigram tokenizer with T5's pipeline, trained on the captions."""
    words = Tokenizer(models.Unigram())
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=80, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    words.train_from_iterator([caption(index) for index in range(60)], trainer)
    words.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )


def clip_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with CLIP's pipeline, trained on the captions."""
    words = Tokenizer(models.BPE(unk_token="<|endoftext|>", end_of_word_suffix="</w>"))
    words.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    special = ["<|startoftext|>", "<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=120, special_tokens=special, end_of_word_suffix="</w>", show_progress=False
    )
    words.train_from_iterator([caption(index) for index in range(60)], trainer)
    words.post_processor = processors.TemplateProcessing(
        single="<|startoftext|> $A <|endoftext|>",
        special_tokens=[("<|startoftext|>", 0), ("<|endoftext|>", 1)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<|startoftext|>",
        eos_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )


def write_encoders(root: Path) -> Path:
    """Write T5, CLIP and autoencoder with random weights where the presets look for them."""
    torch.manual_seed(0)
    tokenizer = t5_tokenizer()
    tokenizer.save_pretrained(root / "t5")
    T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer), d_model=WIDTH, d_kv=8, d_ff=32, num_layers=2, num_heads=2
        )
    ).save_pretrained(root / "t5")
    tokenizer = clip_tokenizer()
    tokenizer.save_pretrained(root / "clip")
    CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    ).save_pretrained(root / "clip")
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
"""``spec.run`` of a small run that reads pictures."""


def config(**changes: Any) -> RunConfig:
    """Return BASE with ``changes`` to its sections."""
    return resolve(merge(BASE, changes))
