"""Encodes images and captions with the frozen encoders of the config.

Axes: b batch, H W image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.precision import EncodersConfig, is_single_file
from fluxtrain.data.dataset import AnyBatch, Batch, DrawnBatch, EmptyText, Encodings, ImageBatch
from fluxtrain.encode.codec import Codec, load_encoder
from fluxtrain.encode.text import TextEncoder, check_file, load_text_encoder
from fluxtrain.errors import ConfigError, DataError


@dataclass(frozen=True)
class Encoders:
    """A text encoder and an autoencoder on one device, and the dtype of encodings."""

    text: TextEncoder
    codec: Codec
    device: torch.device
    dtype: torch.dtype

    @torch.no_grad()
    def encode(self, images: UInt8[Tensor, "b 3 H W"], captions: list[str]) -> Encodings:
        """Return the encodings of ``images`` and their ``captions``, on this device."""
        txt, vec = self.text.encode(captions)
        scaled = images.to(self.device, non_blocking=True).float() / 127.5 - 1
        mean, logvar = self.codec.encode(scaled.to(self.dtype))
        return Encodings(txt, vec, mean, logvar)

    def empty_text(self) -> EmptyText:
        txt, vec = self.text.encode([""])
        return txt[0], vec[0]

    def encode_batch(self, batch: ImageBatch) -> Batch:
        """Return ``batch`` encoded, like a batch of an encoded data set."""
        rows = self.encode(batch.images, list(batch.captions))
        moved = batch.to(self.device)
        drawn = {field.name: getattr(moved, field.name) for field in fields(DrawnBatch)}
        return Batch(
            mean=rows.mean.float(),
            logvar=rows.logvar.float(),
            txt=rows.txt,
            vec=rows.vec,
            **drawn,
        )


def load_encoders(config: RunConfig, models_root: Path, device: torch.device) -> Encoders:
    """Return the frozen encoders of ``config``; they are cached, because T5-XXL alone has 9.5 GB.

    Raises DataError if a file is missing or another model's, ConfigError if the encodings do not fit the
    transformer.
    """
    encoders = _load(config.encoders, config.data.text_length, models_root, device)
    _check_fits(config, encoders)
    return encoders


@lru_cache(maxsize=1)
def _load(
    encoders: EncodersConfig, text_length: int, models_root: Path, device: torch.device
) -> Encoders:
    dtype: torch.dtype = getattr(torch, encoders.precision)
    text = load_text_encoder(encoders, text_length, models_root, device, dtype)
    codec = load_encoder(encoders, models_root, device)
    return Encoders(text, codec, device, dtype)


def batch_encoder(
    config: RunConfig,
    models_root: Path,
    device: torch.device,
    change: Callable[[TextEncoder], TextEncoder] = lambda text: text,
) -> Callable[[AnyBatch], Batch]:
    """Return a function that moves a batch of the loader to ``device`` and encodes it if necessary.

    Captions are encoded by what ``change`` makes of the text encoder.
    """
    encoders = None
    if config.data.source == "images":
        encoders = load_encoders(config, models_root, device)
        encoders = replace(encoders, text=change(encoders.text))

    def encode(batch: AnyBatch) -> Batch:
        if isinstance(batch, Batch):
            return batch.to(device)
        assert encoders is not None
        return encoders.encode_batch(batch)

    return encode


def _files(encoders: EncodersConfig, with_text: bool) -> list[str]:
    """Return a file of each encoder, below the models root."""
    files = [encoders.autoencoder]
    if with_text and encoders.text == "t5-clip":
        for weights, tokenizer in encoders.text_encoder_paths():
            files.append(weights if is_single_file(weights) else f"{weights}/config.json")
            if tokenizer is not None:
                files.append(f"{tokenizer}/tokenizer_config.json")
    return files


def missing_models(config: RunConfig, models_root: Path) -> list[str]:
    """Return what a new run of ``config`` reads below ``models_root`` that is not there."""
    return [name for name in wanted_models(config) if not (models_root / name).exists()]


def wanted_models(config: RunConfig) -> list[str]:
    """Return what a new run of ``config`` reads below its models root, one file of each folder."""
    given = [config.initial_weights, *(adapter.path for adapter in config.added_adapters)]
    given += [config.adapter.initial] if config.adapter else []
    wanted = [str(path) for path in given if path is not None]
    samples = config.sampling.is_on or config.task == "sample"
    if config.data.source == "images" or config.data.images or samples:
        has_prompts = config.sampling.prompts or config.sampling.prompt_file
        with_text = config.data.source == "images" or config.data.images or has_prompts
        wanted += _files(config.encoders, bool(with_text))
    return wanted


def next_step(config: RunConfig) -> str:
    """Return what makes or gets missing models of a run of ``config``, for people."""
    if config.encoders.text == "minilm":
        return "`make run`, or `fluxtrain prepare openmoji` and a run of examples/openmoji.yaml, makes them"
    if config.task == "sample":
        place = "hf://black-forest-labs/FLUX.1-schnell"
        return f"`fluxtrain prepare encoders --from {place} --output DIR` gets them; --models names DIR"
    return "`fluxtrain fetch` with this file gets what FLUX.1's publisher has of them"


def check_files(encoders: EncodersConfig, models_root: Path, with_text: bool = True) -> None:
    """Raise DataError if a file of the encoders is missing, or a single one of another kind by its header.

    Files of the text encoders are checked only ``with_text``.
    """
    for name in _files(encoders, with_text):
        if not (models_root / name).is_file():
            raise DataError(f"{models_root / name}: missing; the encoders need it")
    if with_text and encoders.text == "t5-clip":
        for kind, name in (("t5", encoders.t5), ("clip", encoders.clip)):
            if is_single_file(name):
                check_file(models_root / name, kind)


def _check_fits(config: RunConfig, encoders: Encoders) -> None:
    side = config.data.image_size
    rows = encoders.encode(torch.zeros(1, 3, side, side, dtype=torch.uint8), [""])
    for path, expected, actual in (
        ("model.context_in_dim", config.model.context_in_dim, rows.txt.shape[2]),
        ("model.vec_in_dim", config.model.vec_in_dim, rows.vec.shape[1]),
        ("model.in_channels", config.model.out_channels, rows.mean.shape[1] * 4),
        ("data.latent_size", config.data.latent_size, rows.mean.shape[2]),
    ):
        if expected != actual:
            raise ConfigError(f"spec.run.{path}", expected, f"the encoders give {actual}")
