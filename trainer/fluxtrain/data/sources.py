"""Opens the data sets of a run and validates them against its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.data import DataConfig
from fluxtrain.data.dataset import Dataset, SampleShape
from fluxtrain.data.empty_text import EmptyText, read_empty_text
from fluxtrain.data.images.dataset import ImageDataset, open_images
from fluxtrain.data.layouts.detect import open_encoded
from fluxtrain.data.synthetic import SyntheticDataset
from fluxtrain.draws import Array
from fluxtrain.errors import ConfigError

PARTS = ("train", "validation")
Source = Dataset | ImageDataset
Pictures = tuple[Dataset, EmptyText, Dataset | None]


@dataclass(frozen=True)
class Sources:
    """Both data sets of a run, and the empty prompt's encodings."""

    train: Source
    validation: Source | None
    """None: there is no evaluation."""
    empty_text: EmptyText | None
    """None for images: the text encoder computes them."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Digests of the indices, by part, as far as they were computed."""

    @property
    def attribution(self) -> str:
        """Return the attribution of the validation images, "" if they need none."""
        return "" if self.validation is None else self.validation.attribution

    @property
    def lengths(self) -> tuple[int, int]:
        """Return the numbers of training and of validation samples."""
        return len(self.train), 0 if self.validation is None else len(self.validation)


def open_sources(config: RunConfig, data_root: Path, pictures: Pictures | None = None) -> Sources:
    """Return the data of the run; DataError or ConfigError if a file is missing or does not fit.

    ``pictures`` are those of ``data.images``, encoded, the encodings of the empty prompt, and the pictures
    that are held out.
    """
    train: Source
    empty: EmptyText | None = None
    validation: Source | None = None
    if pictures is not None:
        train, empty, validation = pictures
        _check_fits(config, train.shape, Path(str(config.data.images)))
        require_sizes(config.data, train.latent_sizes, str(config.data.images))
    else:
        train = open_source(config, data_root, "train")
    if config.data.validation is not None:
        validation = open_source(config, data_root, "validation")
    if pictures is None and not isinstance(train, ImageDataset):
        empty = open_empty_text(config, data_root, train)
    return Sources(train, validation, empty)


def open_source(config: RunConfig, data_root: Path, part: str) -> Source:
    """Return the ``part`` ("train" or "validation") of the run's data: encodings or images."""
    if config.data.source == "images":
        return open_images(config, data_root, part)
    return _open_dataset(config, data_root, part)


def _open_dataset(config: RunConfig, data_root: Path, part: str) -> Dataset:
    """Return the encoded ``part``; ConfigError if its shapes do not fit the model."""
    if config.data.source == "synthetic":
        sizes = config.data.synthetic
        count = sizes.train_samples if part == "train" else sizes.validation_samples
        return SyntheticDataset(config, count)
    folder = data_root / getattr(config.data, part)
    layout = None if config.data.layout == "auto" else config.data.layout
    dataset = open_encoded(folder, layout, config.data.verify_checksums)
    _check_fits(config, dataset.shape, folder)
    require_sizes(config.data, dataset.latent_sizes, str(folder))
    return dataset


def open_empty_text(config: RunConfig, data_root: Path, dataset: Dataset) -> EmptyText:
    """Return the empty prompt's encodings, in the dtype of ``dataset``."""
    empty = dataset.empty_text()
    if empty is None:
        path = data_root / config.data.empty_encodings
        empty = read_empty_text(path)
        shape = (tuple(empty[0].shape), empty[1].shape[0])
        if shape != (dataset.shape.txt, dataset.shape.vec):
            raise ConfigError(
                "spec.run.data.empty_encodings",
                str(path),
                f"its shapes {shape} differ from the data set's {dataset.shape.txt, dataset.shape.vec}",
            )
    return empty[0].to(dataset.shape.dtype), empty[1].to(dataset.shape.dtype)


def require_sizes(data: DataConfig, latent_sizes: Array, name: str) -> None:
    """Raise ConfigError if ``data`` has no such sizes of latents; ``name`` is that of the set."""
    for height, width in np.unique(latent_sizes, axis=0).tolist():
        if data.takes_latents(height, width):
            continue
        found = f"the data in {name} has latents of {height} x {width}"
        if data.buckets is None:
            found += "" if height == width else "; set data.buckets for other sizes than squares"
            raise ConfigError("spec.run.data.latent_size", data.latent_size, found)
        found += f", {8 * width} x {8 * height} pixels, which are no bucket"
        raise ConfigError("spec.run.data.buckets", data.buckets.model_dump(), found)


def _check_fits(config: RunConfig, shape: SampleShape, folder: Path) -> None:
    model, data = config.model, config.data
    for path, configured, stored in (
        ("data.text_length", data.text_length, shape.txt[0]),
        ("model.context_in_dim", model.context_in_dim, shape.txt[1]),
        ("model.vec_in_dim", model.vec_in_dim, shape.vec),
        ("model.in_channels", model.in_channels, shape.latent[0] * 4),
    ):
        if configured != stored:
            raise ConfigError(f"spec.run.{path}", configured, f"the data in {folder} has {stored}")
