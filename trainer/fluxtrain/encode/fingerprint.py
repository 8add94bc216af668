"""Fingerprints of the encoders' files: whether encodings were made with the same weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from fluxtrain import scaled_fp8
from fluxtrain.contract.run.encoders import EncodersConfig
from fluxtrain.safetensors_file import read_header

_SAMPLED_OF_TENSOR = 4096
_CLIP_DTYPES = {**scaled_fp8.DTYPES, "I64": torch.int64}
"""Types of tensors of CLIP's files beside the usual ones; published files have position ids in int64."""
_SAMPLED_BYTES = (
    1 << 20
)  # of each weights file: contains its header, with the names and spans of all tensors


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
