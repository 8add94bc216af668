"""T5, CLIP and the autoencoder below the models root, as the presets name them.

    MODELS/t5/                          config, weights, tokenizer
    MODELS/clip/                        the same
    MODELS/autoencoder/ae.safetensors
    MODELS/encoders.json                size and SHA-256 of every file

An encoder appears when all of it is there and its tensors, shapes and tokenizer are those of its config.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from fluxtrain.encode.autoencoder import load_autoencoder
from fluxtrain.encode.text_folder import Kind, check_text_folder
from fluxtrain.errors import DataError
from fluxtrain.files import exclusive_lock
from fluxtrain.prepare.encoders.place import Place
from fluxtrain.prepare.encoders.record import compare_or_record, sums_of
from fluxtrain.prepare.staging_dir import storage_errors

AUTOENCODER = "ae.safetensors"
_TEXT_FILES = ("*.json", "*.safetensors", "*.model", "*.txt")
PATTERNS: Mapping[str, tuple[str, ...]] = {
    "t5": _TEXT_FILES,
    "clip": _TEXT_FILES,
    "autoencoder": (AUTOENCODER,),
}
"""The files of each encoder; a folder in transformers' format may have others, such as pickles."""
PUBLISHED: Mapping[str, tuple[str, ...]] = {
    "t5": ("text_encoder_2", "tokenizer_2"),
    "clip": ("text_encoder", "tokenizer"),
    "autoencoder": ("",),
}
"""Folders of each encoder in FLUX.1 as it is published."""


def prepare_encoders(
    wanted: Mapping[str, Sequence[Place]], models: Path, force: bool = False
) -> None:
    """Collect the ``wanted`` encoders from their places and verify them; verify those that are there.

    ``force`` collects them again. Raises DataError if one is not whole, is another model's, or differs from
    the record; DownloadError if it cannot be downloaded, StorageError if it cannot be written.
    """
    with storage_errors(models):
        models.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(models), storage_errors(models):
        for name, places in wanted.items():
            folder = models / name
            if force or not folder.is_dir() or not any(folder.iterdir()):
                text = _collect(name, places, models)
            else:
                text = _verify(name, folder, models, "; --force collects it anew")
            print(f"{folder}: {text}", file=sys.stderr, flush=True)
        for downloaded in models.glob(".*.download"):
            shutil.rmtree(downloaded)


def _collect(name: str, places: Sequence[Place], models: Path) -> str:
    """Copy the files of ``name`` to a partial folder, verify it, put it in its place; return what it is."""
    partial = models / f".{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for place in places:
        place.copy(PATTERNS[name], partial)
    text = _verify(name, partial, models)
    shutil.rmtree(models / name, ignore_errors=True)
    partial.replace(models / name)
    return text


def _verify(name: str, folder: Path, models: Path, hint: str = "") -> str:
    """Return what is in ``folder``; raise DataError unless it is whole, and as recorded if it was.

    ``hint`` follows an error about what is not whole.
    """
    try:
        text = _describe(name, folder)
    except DataError as error:
        raise DataError(f"{error}{hint}") from None
    known = compare_or_record(models, name, sums_of(folder))
    return f"{text}; checksums {'as recorded before' if known else 'recorded'}"


def _describe(name: str, folder: Path) -> str:
    """Return what is in ``folder`` in one line; raise DataError unless it is the whole encoder ``name``."""
    if name in ("t5", "clip"):
        return check_text_folder(folder, cast(Kind, name))
    path = folder / AUTOENCODER
    if not path.is_file():
        raise DataError(f"{path}: missing")
    state = load_autoencoder(path).state_dict()
    return f"{sum(tensor.numel() for tensor in state.values()):,} parameters, {len(state)} tensors"
