"""Opens the data sets of a run and the encodings of the empty prompt, and compares them with its config.

A synthetic set has no files: each class has one random latent and one random text encoding; with buckets
the classes have one size after the other, or the samples the sizes that are given, in turn.

Axes: l text tokens, d text width, v pooled width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.data import DataConfig, Size
from fluxtrain.data.dataset import Dataset, EmptyText, Encodings, SampleShape, Source
from fluxtrain.data.formats import mlcommons
from fluxtrain.data.formats.convert import open_encoded
from fluxtrain.data.images import ImageDataset, ImageFiles, TarImages
from fluxtrain.data.shards import save_aligned
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.runtime import draws
from fluxtrain.runtime.draws import Array
from fluxtrain.runtime.files import atomic_write
from fluxtrain.runtime.safetensors import read_header, read_tensor

T5_FILE, CLIP_FILE = "t5_empty.npy", "clip_empty.npy"


def read_empty_text(path: Path) -> EmptyText:
    """Return the encodings in the file or the folder ``path``; DataError if they are missing or malformed."""
    if path.is_dir():  # element 0 of both arrays, which have a batch axis
        txt, vec = _read_array(path / T5_FILE, dims=3), _read_array(path / CLIP_FILE, dims=2)
    else:
        txt, vec = _read_file(path)
    if (txt.ndim, vec.ndim) != (2, 1) or not (txt.isfinite().all() and vec.isfinite().all()):
        raise DataError(f"{path}: its tensors are not the encodings of a prompt")
    return txt, vec


def write_empty_text(path: Path, txt: Float[Tensor, "l d"], vec: Float[Tensor, " v"]) -> None:
    """Write the encodings to ``path``: a .safetensors file, else a folder in MLCommons' layout."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_aligned(path, {"txt": txt, "vec": vec})
        return
    path.mkdir(exist_ok=True)
    for name, values in ((T5_FILE, txt), (CLIP_FILE, vec)):
        # float32 represents every bfloat16 exactly; the reference reads these two files as float.
        with atomic_write(path / name) as partial:
            partial.write_bytes(mlcommons.to_bytes(values.float().unsqueeze(0)))


def _read_file(path: Path) -> tuple[Tensor, Tensor]:
    spans = read_header(path)
    if {"txt", "vec"} - set(spans):
        raise DataError(f"{path}: does not hold the tensors txt and vec of the empty prompt")
    return read_tensor(path, spans["txt"]), read_tensor(path, spans["vec"])


def _read_array(path: Path, dims: int) -> Tensor:
    try:
        if path.stat().st_size > mlcommons.MAX_CELL_BYTES:
            raise ValueError(f"more than {mlcommons.MAX_CELL_BYTES} bytes")
        content = path.read_bytes()
        values = mlcommons.to_tensor(content)
    except FileNotFoundError:
        raise DataError(f"{path}: missing") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not an array of encodings ({error})") from None
    if values.ndim != dims or not len(values):
        raise DataError(
            f"{path}: its shape {list(values.shape)} is not that of one prompt's encodings"
        )
    return values[0]


PARTS = ("train", "validation")
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
    if pictures is None and isinstance(train, Dataset):
        empty = open_empty_text(config, data_root, train)
    return Sources(train, validation, empty)


def open_source(config: RunConfig, data_root: Path, part: str) -> Source:
    """Return the ``part`` ("train" or "validation") of the run's data: encodings or images."""
    if config.data.source == "images":
        return open_images(config, data_root, part)
    return _open_dataset(config, data_root, part)


def open_images(config: RunConfig, data_root: Path, part: str) -> ImageDataset:
    """Return the images of ``part`` ("train" or "validation"); DataError if there are none."""
    side, folder = config.data.image_size, data_root / getattr(config.data, part)
    source: ImageFiles
    if any(folder.glob("*.arrow")) and not any(folder.glob("*.tar")):
        from fluxtrain.data.arrow_images import ArrowImages  # pyarrow takes a while to import

        source = ArrowImages(folder)
    else:
        source = TarImages(folder)
    # As in the reference: small images are left out of training; a validation set is always whole.
    return ImageDataset(source, side, side if part == "train" else 1)


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
        ("model.in_channels", 4 * config.latent_shape[0], shape.latent[0] * 4),
    ):
        if configured != stored:
            raise ConfigError(f"spec.run.{path}", configured, f"the data in {folder} has {stored}")


_LOGVAR = -20.0  # a standard deviation of 5e-5: the latent is its mean


class SyntheticDataset(Dataset):
    """Sample i is of class i modulo the number of classes; classes are drawn from the seed."""

    def __init__(
        self, config: RunConfig, num_samples: int, in_turn: Sequence[Size] | None = None
    ) -> None:
        """Draw the classes of ``config``; ``num_samples`` is the length of the set."""
        data, model = config.data, config.model
        self.num_samples, self.num_classes = num_samples, data.synthetic.classes
        self._of_classes = in_turn is None
        self._sizes = np.array(data.latent_sizes if in_turn is None else in_turn)
        self.shape = SampleShape(
            (data.text_length, model.context_in_dim), model.vec_in_dim, config.latent_shape
        )
        self._txt = _normal(config.drawn_seed, 0, (self.num_classes, *self.shape.txt))
        self._vec = _normal(config.drawn_seed, 1, (self.num_classes, self.shape.vec))
        channels, (height, width) = config.latent_shape[0], self._sizes.max(axis=0).tolist()
        self._mean = _normal(config.drawn_seed, 2, (self.num_classes, channels, height, width))

    @property
    def latent_sizes(self) -> Array:
        numbers = np.arange(len(self))
        if self._of_classes:
            numbers = numbers % self.num_classes
        return self._sizes[numbers % len(self._sizes)]

    def __len__(self) -> int:
        return self.num_samples

    def read(self, indices: Array, out: Encodings, skip_text: Array) -> list[str | None]:
        classes = torch.from_numpy(indices % self.num_classes)
        torch.index_select(self._txt, 0, classes, out=out.txt)
        torch.index_select(self._vec, 0, classes, out=out.vec)
        height, width = out.mean.shape[2:]
        torch.index_select(self._mean[:, :, :height, :width], 0, classes, out=out.mean)
        out.logvar.fill_(_LOGVAR)
        return [None] * len(indices)

    def caption(self, index: int) -> str:
        """Return the name of its class."""
        return f"class {index % self.num_classes}"

    def name(self, index: int) -> str:
        """Return the number of the sample."""
        return f"synthetic sample {index}"

    def empty_text(self) -> tuple[Tensor, Tensor]:
        """Return zeros."""
        return torch.zeros(self.shape.txt), torch.zeros(self.shape.vec)


def _normal(seed: int, part: int, shape: tuple[int, ...]) -> Tensor:
    rng = draws.generator(seed, draws.SYNTHETIC, part)
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
