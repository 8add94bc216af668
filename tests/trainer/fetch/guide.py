"""What the guide for kohya's container has, at small size: its models, data set, files and variables."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import torch
from benchmarks.reference_model import random_model
from safetensors.torch import load_file, save_file
from tests.trainer.picture_cache.folders import file_of
from tests.trainer.tiny_encoders import (
    CHANNELS,
    SIDE,
    TOKENS,
    caption,
    small_image,
    write_clip,
    write_t5,
)
from tests.trainer.tiny_model import save_flux, tiny_model
from transformers import AutoTokenizer

from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.encode.codec import Autoencoder

NAME = "amitkumargurjar/car-detection-and-tracking-dataset"
PICTURES, BATCH, EPOCHS, STEPS = 12, 4, 4, 24
CLIP_WIDTH, T5_WIDTH = 64, 24
MODEL = tiny_model(vec_in_dim=CLIP_WIDTH, context_in_dim=T5_WIDTH, guidance_embed=True)
SMALL = [
    *(f"--model.{name}={json.dumps(value)}" for name, value in MODEL.model_dump(mode="json").items()
      if value != getattr(ModelConfig(), name)),
    f"--data.text_length={TOKENS}", f"--data.latent_size={SIDE // 8}", "--data.num_workers=0",
    "--parallel.compile=false", "--logging.metrics_port=0",
]  # fmt: skip
"""Options that make the guide's model small."""


def published(root: Path) -> Path:
    """Write the models to ``root`` as publishers name them: FLUX.1's, and text encoders in one file each."""
    torch.manual_seed(0)
    sizes = {"d_model": T5_WIDTH, "vocab_size": 108, "feed_forward_proj": "gated-gelu"}
    write_t5(root / "t5", **sizes)
    sizes = {"hidden_size": CLIP_WIDTH, "num_attention_heads": 1, "num_hidden_layers": 12}
    sizes |= {"intermediate_size": 4 * CLIP_WIDTH}
    write_clip(root / "clip", **sizes, hidden_act="quick_gelu")  # adapters need CLIP-L's layers
    for name, file, tokenizer in (
        ("t5", "t5xxl_fp16", "tokenizer_2"), ("clip", "clip_l", "tokenizer")
    ):  # fmt: skip
        state = load_file(root / name / "model.safetensors")
        if name == "clip":
            state = {
                f"text_model.{key.removeprefix('text_model.')}": value
                for key, value in state.items()
            }
        save_file({key: value.half() for key, value in state.items()}, root / f"{file}.safetensors")
        AutoTokenizer.from_pretrained(root / name).save_pretrained(root / tokenizer)
    save_file(Autoencoder(width=32, latent_channels=CHANNELS).state_dict(), root / "ae.safetensors")
    save_flux(random_model(MODEL), root).rename(root / "flux1-dev.safetensors")
    return root


def archive() -> bytes:
    """Return the data set as Kaggle sends it: a zip with a folder of pictures and captions."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for index in range(PICTURES):
            picture = small_image(index, SIDE).resize((SIDE + 8, SIDE + 8))
            file.writestr(f"images/{index:03d}.jpg", file_of(picture, "JPEG"))
            file.writestr(f"images/{index:03d}.txt", caption(index))
    return buffer.getvalue()


def write_files(folder: Path, images: str) -> dict[str, str]:
    """Write ``dataset.json`` and ``prompts.txt`` to ``folder``; return the variables that name them."""
    config = {
        "general": {"enable_bucket": True, "bucket_reso_steps": 16, "caption_extension": ".txt"},
        "datasets": [
            {
                "resolution": SIDE,
                "min_bucket_reso": SIDE // 2,
                "max_bucket_reso": 2 * SIDE,
                "batch_size": BATCH,
                "subsets": [{"image_dir": images, "num_repeats": 2}],
            }
        ],
    }
    (folder / "dataset.json").write_text(json.dumps(config))
    (folder / "prompts.txt").write_text("a red circle --w 32 --h 32 --d 42 --s 2\n")
    return {
        "DATASET_CONFIG": str(folder / "dataset.json"),
        "SAMPLE_PROMPTS": str(folder / "prompts.txt"),
    }


def variables(**changes: str) -> dict[str, str]:
    """Return the guide's variables of a short training, with ``changes``."""
    values = {
        "BASE_MODEL": "flux",
        "DATASET_NAME": NAME,
        "PARAMS_MAX_EPOCHS": str(EPOCHS),
        "PARAMS_NETWORK_DIM": "4",
        "PARAMS_SAVE_EVERY_N_STEPS": "2",
        "PARAMS_SAMPLE_EVERY_N_STEPS": "12",
    }
    return {**values, **changes}
