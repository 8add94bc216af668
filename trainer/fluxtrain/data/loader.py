"""From a run's configuration to its batches: a pure function of the batch number, read ahead.

Item n of a rank is its n-th micro batch; a resume starts at another n and needs no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from fluxtrain import draws
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.batch import Batch, ImageBatch
from fluxtrain.data.dataset import Dataset, Rows
from fluxtrain.data.empty_text import EmptyText
from fluxtrain.data.images.dataset import ImageSet, build_image_batch
from fluxtrain.data.order import FILLER, BatchShares, Order
from fluxtrain.data.shards import NUM_TIMESTEPS
from fluxtrain.data.sources import Source, Sources
from fluxtrain.draws import Array, Draw

AnyBatch = Batch | ImageBatch
Build = Callable[[Array, list[Draw]], AnyBatch]
"""Makes the batch of the samples at the given indices with their draws."""


def training_batches(
    config: RunConfig,
    sources: Sources,
    shares: BatchShares,
    rank: int,
    first_batch: int = 0,
    pin: bool = False,
) -> Iterator[AnyBatch]:
    """Yield this rank's micro batches from global batch ``first_batch`` (from 0) to the last one."""
    order = Order(config.seed, len(sources.train), shares.global_batch_size)
    build = _builder(sources.train, sources.empty_text)
    items = TrainingItems(config, build, order, shares, rank)
    steps = shares.accumulation_steps
    numbers = range(first_batch * steps, config.schedule.steps * steps)
    return _ahead(config, items, numbers, pin)


def evaluation_batches(
    config: RunConfig, source: Source, rank: int, world_size: int, pin: bool = False
) -> Iterator[AnyBatch]:
    """Yield this rank's part of all of ``source``: equally many equal batches on every rank."""
    largest = -(-len(source) // world_size)
    size = min(config.evaluation.batch_size, largest)
    items = EvaluationItems(config, source, _builder(source, None), size)
    rounds = -(-len(source) // (size * world_size))
    return _ahead(config, items, range(rank, rounds * world_size, world_size), pin)


def _builder(source: Source, empty: EmptyText | None) -> Build:
    if isinstance(source, ImageSet):
        return partial(build_image_batch, source)
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


@dataclass
class TrainingItems(TorchDataset[AnyBatch]):
    """A rank's micro batches by number."""

    config: RunConfig
    build: Build
    order: Order
    shares: BatchShares
    rank: int

    def __getitem__(self, number: int) -> AnyBatch:
        """Return micro batch ``number``, counted from 0 over the whole run."""
        batch, micro_step = divmod(number, self.shares.accumulation_steps)
        positions = self.shares.positions(self.rank, micro_step)
        shape, flow, seed = self.config.latent_shape, self.config.flow, self.config.seed
        chosen = [draws.training_draw(seed, batch, int(p), shape, flow) for p in positions]
        return self.build(self.order.indices(batch, positions), chosen)


@dataclass
class EvaluationItems(TorchDataset[AnyBatch]):
    """The validation set in order, batch by batch; the last ones are filled up."""

    config: RunConfig
    source: Source
    build: Build
    size: int

    def __getitem__(self, number: int) -> AnyBatch:
        """Return batch ``number``."""
        indices = np.arange(number * self.size, (number + 1) * self.size)
        indices[indices >= len(self.source)] = FILLER
        read = np.maximum(indices, 0)
        times = self.source.timesteps(read) / NUM_TIMESTEPS
        shape, seed = self.config.latent_shape, self.config.seed
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
