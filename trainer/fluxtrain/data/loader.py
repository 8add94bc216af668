"""From a run's configuration to its batches: a pure function of the batch number, read ahead.

Item n of a rank is its n-th micro batch; a resume starts at another n and needs no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from fluxtrain import draws
from fluxtrain.contract.config import RunConfig
from fluxtrain.data.batch import Batch, PictureBatch
from fluxtrain.data.dataset import Dataset, Rows, SampleShape
from fluxtrain.data.empty_text import EmptyText, read_empty_text
from fluxtrain.data.layouts import open_encoded
from fluxtrain.data.order import FILLER, Order, Share
from fluxtrain.data.pictures import Pictures, build_pictures, open_pictures
from fluxtrain.data.shards import NUM_TIMESTEPS
from fluxtrain.data.synthetic import SyntheticDataset
from fluxtrain.draws import Array, Draw
from fluxtrain.errors import ConfigError

PARTS = ("train", "validation")
AnyBatch = Batch | PictureBatch
Build = Callable[[Array, list[Draw]], AnyBatch]
"""Makes the batch of the samples at the given indices with their draws."""


def open_source(config: RunConfig, data_root: Path, part: str) -> Dataset | Pictures:
    """Return the ``part`` ("train" or "validation") of the run's data, encoded or not."""
    if config.data.source == "images":
        return open_pictures(config, data_root, part)
    return open_dataset(config, data_root, part)


def open_dataset(config: RunConfig, data_root: Path, part: str) -> Dataset:
    """Return the encoded ``part`` of the run's data; ConfigError where it does not fit the model."""
    if config.data.source == "synthetic":
        sizes = config.data.synthetic
        count = sizes.train_samples if part == "train" else sizes.validation_samples
        return SyntheticDataset(config, count)
    folder = data_root / getattr(config.data, part)
    layout = None if config.data.layout == "auto" else config.data.layout
    dataset = open_encoded(folder, layout, config.data.verify_checksums)
    _check_fits(config, dataset.shape, folder)
    return dataset


def open_empty_text(config: RunConfig, data_root: Path, dataset: Dataset) -> EmptyText:
    """Return the empty prompt's encodings, in the type that ``dataset`` stores."""
    known = dataset.empty_text()
    if known is None:
        path = data_root / config.data.empty_encodings
        known = read_empty_text(path)
        shape = (tuple(known[0].shape), known[1].shape[0])
        if shape != (dataset.shape.txt, dataset.shape.vec):
            raise ConfigError(
                "spec.run.data.empty_encodings",
                str(path),
                f"its shapes {shape} differ from the data set's {dataset.shape.txt, dataset.shape.vec}",
            )
    return known[0].to(dataset.shape.dtype), known[1].to(dataset.shape.dtype)


def _check_fits(config: RunConfig, shape: SampleShape, folder: Path) -> None:
    model, data = config.model, config.data
    for path, wanted, stored in (
        ("data.text_length", data.text_length, shape.txt[0]),
        ("model.context_in_dim", model.context_in_dim, shape.txt[1]),
        ("model.vec_in_dim", model.vec_in_dim, shape.vec),
        ("model.in_channels", model.in_channels, shape.latent[0] * 4),
        ("data.latent_size", data.latent_size, shape.latent[1]),
        ("data.latent_size", data.latent_size, shape.latent[2]),
    ):
        if wanted != stored:
            raise ConfigError(f"spec.run.{path}", wanted, f"the data in {folder} has {stored}")


def training_batches(
    config: RunConfig,
    data_root: Path,
    first_batch: int,
    rank: int,
    world_size: int,
    micro_batch_size: int,
    pin: bool = False,
) -> Iterator[AnyBatch]:
    """Yield this rank's micro batches from global batch ``first_batch`` (from 0) to the last one."""
    source = open_source(config, data_root, "train")
    size = config.schedule.global_batch_size
    share = Share(size, micro_batch_size, rank, world_size)
    empty = open_empty_text(config, data_root, source) if not isinstance(source, Pictures) else None
    items = TrainingItems(
        config, _builder(source, empty), Order(config.seed, len(source), size), share
    )
    numbers = range(first_batch * share.accumulation, config.schedule.steps * share.accumulation)
    return _ahead(config, items, numbers, pin)


def evaluation_batches(
    config: RunConfig, data_root: Path, rank: int, world_size: int, pin: bool = False
) -> Iterator[AnyBatch]:
    """Yield this rank's part of the whole validation set: equally many equal batches on every rank."""
    source = open_source(config, data_root, "validation")
    largest = -(-len(source) // world_size)
    size = min(config.evaluation.batch_size, largest)
    items = EvaluationItems(config, source, _builder(source, None), size)
    rounds = -(-len(source) // (size * world_size))
    return _ahead(config, items, range(rank, rounds * world_size, world_size), pin)


def _builder(source: Dataset | Pictures, empty: EmptyText | None) -> Build:
    if isinstance(source, Pictures):
        return partial(build_pictures, source)
    return partial(build, source, empty=empty)


def _ahead(
    config: RunConfig, items: TorchDataset[AnyBatch], numbers: range, pin: bool
) -> Iterator[AnyBatch]:
    workers = min(config.data.num_workers, len(numbers))
    loader = DataLoader(
        items,
        sampler=numbers,
        batch_size=None,  # an item is a whole micro batch
        num_workers=workers,
        prefetch_factor=config.data.prefetch if workers else None,
        pin_memory=pin,
    )
    return iter(loader)


def latent_shape(config: RunConfig) -> tuple[int, int, int]:
    """Return the shape "ch h w" of one sample's latents."""
    side = config.data.latent_size
    return config.latent_channels, side, side


@dataclass
class TrainingItems(TorchDataset[AnyBatch]):
    """A rank's micro batches by number."""

    config: RunConfig
    build: Build
    order: Order
    share: Share

    def __getitem__(self, number: int) -> AnyBatch:
        """Return micro batch ``number``, counted from 0 over the whole run."""
        batch, micro_step = divmod(number, self.share.accumulation)
        positions = self.share.positions(micro_step)
        shape, flow, seed = latent_shape(self.config), self.config.flow, self.config.seed
        chosen = [draws.training_draw(seed, batch, int(p), shape, flow) for p in positions]
        return self.build(self.order.indices(batch, positions), chosen)


@dataclass
class EvaluationItems(TorchDataset[AnyBatch]):
    """The validation set in order, batch by batch; the last ones are filled up."""

    config: RunConfig
    source: Dataset | Pictures
    build: Build
    size: int

    def __getitem__(self, number: int) -> AnyBatch:
        """Return batch ``number``."""
        indices = np.arange(number * self.size, (number + 1) * self.size)
        indices[indices >= len(self.source)] = FILLER
        read = np.maximum(indices, 0)
        times = self.source.timesteps(read) / NUM_TIMESTEPS
        shape, seed = latent_shape(self.config), self.config.seed
        chosen = [
            draws.evaluation_draw(seed, int(i), float(t), shape)
            for i, t in zip(read, times, strict=True)
        ]
        return self.build(indices, chosen)


def build(
    dataset: Dataset, indices: Array, chosen: list[Draw], empty: EmptyText | None = None
) -> Batch:
    """Return the batch of the samples at ``indices``, fillers last, with their draws."""
    dropped = np.array([draw.dropped for draw in chosen])
    rows = Rows.empty(len(indices), dataset.shape)
    real = int((indices != FILLER).sum())
    faults = dataset.read(indices[:real], rows.first(real), dropped[:real]) if real else []
    if empty is None:
        faults = _with_text(dataset, indices[:real], rows.first(real), faults)
    bad = np.ones(len(indices), dtype=bool)  # fillers are not even read
    bad[:real] = [fault is not None for fault in faults]
    if empty is not None and (replaced := dropped | bad).any():
        rows.txt[replaced], rows.vec[replaced] = empty[0], empty[1]
    if bad.any():
        _blank(rows, torch.from_numpy(bad), text=empty is None)
    return Batch(
        mean=rows.mean.float(),
        logvar=rows.logvar.float(),
        txt=rows.txt,
        vec=rows.vec,
        latent_noise=torch.from_numpy(np.stack([draw.latent_noise for draw in chosen])),
        noise=torch.from_numpy(np.stack([draw.noise for draw in chosen])),
        timesteps=torch.tensor([draw.timestep for draw in chosen], dtype=torch.float32),
        weights=torch.from_numpy((~bad).astype(np.float32)),
        dropped=torch.from_numpy(dropped),
        indices=torch.from_numpy(indices),
        faults=tuple(fault for fault in faults if fault),
    )


def _with_text(
    dataset: Dataset, indices: Array, rows: Rows, faults: list[str | None]
) -> list[str | None]:
    """Return ``faults`` and those of the long text, which training leaves to the checksums.

    In an evaluation a NaN there would be taken for a model that diverged.
    """
    finite = torch.isfinite(rows.txt.flatten(1).sum(1, dtype=torch.float32)).tolist()
    return [
        fault or (None if ok else f"{dataset.name(int(index))}: not finite")
        for fault, ok, index in zip(faults, finite, indices, strict=True)
    ]


def _blank(rows: Rows, bad: Tensor, text: bool) -> None:
    """Zero what could not be read: NaN times weight 0 would still be NaN."""
    names = ("txt", "vec", "mean", "logvar") if text else ("mean", "logvar")
    for name in names:
        getattr(rows, name)[bad] = 0
