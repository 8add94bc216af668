"""Loads the batches of a run in worker processes; a batch is a pure function of its number.

A resume starts at another number and needs no state.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.data import Size
from fluxtrain.data.dataset import Batch, Dataset, Encodings, ImageBatch, drawn_fields
from fluxtrain.data.images import ImageDataset, build_image_batch
from fluxtrain.data.order import PADDING, BatchShares, BucketOrder, Order
from fluxtrain.data.pictures.dataset import PictureDataset
from fluxtrain.data.sources import EmptyText, Source, Sources
from fluxtrain.errors import DataError
from fluxtrain.runtime import draws
from fluxtrain.runtime.draws import NUM_TIMESTEPS, Array, Draw

AnyBatch = Batch | ImageBatch
AnyOrder = Order | BucketOrder
Build = Callable[[Array, list[Draw]], AnyBatch]
"""Returns the batch of the samples at the given indices with their draws."""
START_METHOD = "fork"
"""Of worker processes; with Python 3.14's default, a server, they would end when Slurm's SIGTERM ends it."""


def training_batches(
    config: RunConfig,
    sources: Sources,
    shares: BatchShares,
    rank: int,
    first_batch: int = 0,
    pin: bool = False,
) -> Iterator[AnyBatch]:
    """Yield this rank's micro batches from global batch ``first_batch`` (from 0) to the last one."""
    order = training_order(config, sources.train)
    build_batch = _builder(sources.train, sources.empty_text)
    batches = TrainingBatches(config, build_batch, order, shares, rank)
    numbers = _MicroBatches(batches, range(first_batch, config.schedule.steps))
    return iter(_loader(config, batches, numbers, pin))


def training_order(config: RunConfig, source: Source) -> AnyOrder:
    """Return the order of the training samples."""
    if isinstance(source, ImageDataset):
        return order_of(config, len(source), None)
    sizes = None if config.data.buckets is None else np.ascontiguousarray(source.latent_sizes)
    return order_of(config, len(source), sizes)


def order_of(config: RunConfig, num_samples: int, latent_sizes: Array | None) -> AnyOrder:
    """Return the order of samples whose latents have ``latent_sizes``, "n 2"; None: all the same."""
    seed, size = config.drawn_seed, config.schedule.global_batch_size
    is_sequential = config.data.order == "sequential"
    if latent_sizes is None or config.data.buckets is None:
        return Order(seed, num_samples, size, is_sequential)
    return BucketOrder(seed, latent_sizes, size, is_sequential)


def evaluation_batches(
    config: RunConfig, source: Source, rank: int, world_size: int, pin: bool = False
) -> Iterable[AnyBatch]:
    """Return this rank's part of all of ``source``: equally many equal batches on every rank.

    It can be iterated once for each evaluation; its worker processes start with the first and live on.
    """
    size = evaluation_batch_size(config, len(source), world_size)
    batches = EvaluationBatches(config, source, _builder(source, None), size)
    rounds = -(-batches.count // world_size)
    return _loader(config, batches, range(rank, rounds * world_size, world_size), pin)


def evaluation_batch_size(config: RunConfig, num_samples: int, world_size: int) -> int:
    """Return the samples of one batch of one rank, with a validation set of ``num_samples``."""
    return min(config.evaluation.batch_size, -(-num_samples // world_size))


def _builder(source: Source, empty: EmptyText | None) -> Build:
    if isinstance(source, ImageDataset):
        return partial(build_image_batch, source)
    return partial(build, source, empty=empty)


def _loader(
    config: RunConfig, batches: TorchDataset[AnyBatch], numbers: Numbers, pin: bool
) -> DataLoader[AnyBatch]:
    workers = min(config.data.num_workers, len(numbers))
    return DataLoader(
        batches,
        sampler=numbers,
        batch_size=None,  # an item is a whole micro batch
        num_workers=workers,
        prefetch_factor=config.data.prefetch if workers else None,
        pin_memory=pin,
        persistent_workers=workers > 0,
        worker_init_fn=_end_with_trainer if workers else None,
        multiprocessing_context=START_METHOD if workers else None,
    )


def _end_with_trainer(worker: int) -> None:
    """Let a worker end with its trainer only.

    Slurm sends SIGTERM to every process; the trainer still needs batches until all ranks agree to stop.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_wait_for_trainer, daemon=True).start()


def _wait_for_trainer() -> None:
    trainer = multiprocessing.parent_process()
    assert trainer is not None, "this is a worker"
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer.pid:
        pass
    os._exit(0)


@dataclass
class TrainingBatches(TorchDataset[AnyBatch]):
    """A rank's micro batches by number."""

    config: RunConfig
    build: Build
    order: AnyOrder
    shares: BatchShares
    rank: int

    def __getitem__(self, number: int) -> AnyBatch:
        """Return a micro batch: ``number`` is its global batch x ``accumulation_steps`` + its own in it."""
        batch, micro_step = divmod(number, self.shares.accumulation_steps)
        positions = self.shares_of(batch).positions(self.rank, micro_step)
        shape, flow, seed = self.config.latent_shape, self.config.flow, self.config.drawn_seed
        if isinstance(self.order, BucketOrder):
            shape = shape[0], *self.order.latent_size(batch)
        drawn = [draws.training_draw(seed, batch, int(p), shape, flow) for p in positions]
        return self.build(self.order.indices(batch, positions), drawn)

    def shares_of(self, batch: int) -> BatchShares:
        """Return how global batch ``batch`` is divided."""
        return self.shares.of_batch(self.order.count(batch))


@dataclass(frozen=True)
class _MicroBatches:
    """The numbers of the micro batches of some global batches."""

    of: TrainingBatches
    batches: range

    def __len__(self) -> int:
        """Return the most numbers that there can be."""
        return len(self.batches) * self.of.shares.accumulation_steps

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers in order."""
        for batch in self.batches:
            first = batch * self.of.shares.accumulation_steps
            yield from range(first, first + self.of.shares_of(batch).accumulation_steps)


Numbers = range | _MicroBatches


@dataclass
class EvaluationBatches(TorchDataset[AnyBatch]):
    """The validation set, size by size and in order, batch by batch; the last of a size is padded."""

    config: RunConfig
    source: Source
    build: Build
    size: int

    def __getitem__(self, number: int) -> AnyBatch:
        """Return batch ``number``, padding only if the set has fewer."""
        indices, latent_size = self._indices(number)
        read = np.where(indices == PADDING, 0, indices)
        times = self.source.timesteps(read) / NUM_TIMESTEPS
        shape, seed = (self.config.latent_channels, *latent_size), self.config.drawn_seed
        drawn = [
            draws.evaluation_draw(seed, int(i), float(t), shape)
            for i, t in zip(read, times, strict=True)
        ]
        return self.build(indices, drawn)

    @property
    def count(self) -> int:
        """Return the batches of the whole set."""
        return self._order.batches_per_epoch

    def _indices(self, number: int) -> tuple[Array, Size]:
        """Return the samples of batch ``number``, and the size of their latents."""
        if number >= self.count:  # other ranks still have one
            return np.full(self.size, PADDING), self._order.latent_size(0)
        return self._order.indices(number, np.arange(self.size)), self._order.latent_size(number)

    @cached_property
    def _order(self) -> BucketOrder:
        if isinstance(self.source, ImageDataset):
            sizes = np.broadcast_to(self.config.latent_shape[1:], (len(self.source), 2))
        else:
            sizes = self.source.latent_sizes
        return BucketOrder(self.config.drawn_seed, sizes, self.size, is_sequential=True)


def build(
    dataset: Dataset, indices: Array, drawn: list[Draw], empty: EmptyText | None = None
) -> Batch:
    """Return the batch of the samples at ``indices``, padding last, with their draws."""
    dropped = np.array([draw.dropped for draw in drawn])
    real = int((indices != PADDING).sum())
    latent = drawn[0].noise.shape
    encodings = Encodings.empty(len(indices), dataset.shape.at((latent[1], latent[2])))
    read = _with_variants(dataset, indices[:real], drawn)
    faults = dataset.read(read, encodings.first(real), dropped[:real]) if real else []
    mask = None
    if isinstance(dataset, PictureDataset) and dataset.has_masks:
        mask = _read_masks(dataset, read, len(indices), latent[1:], faults)
    if empty is None:
        faults = _check_text(dataset, indices[:real], encodings.first(real), faults)
    bad = np.ones(len(indices), dtype=bool)  # padding is not read
    bad[:real] = [fault is not None for fault in faults]
    if empty is not None and (replaced := dropped | bad).any():
        encodings.txt[replaced], encodings.vec[replaced] = empty[0], empty[1]
    vec: Tensor = encodings.vec
    if isinstance(dataset, PictureDataset):
        ids = dataset.token_ids(read, dropped | bad)
        vec = vec if ids is None else ids
    if bad.any():
        _zero(encodings, torch.from_numpy(bad), text=empty is None)
    return Batch(
        mean=encodings.mean.float(),
        logvar=encodings.logvar.float(),
        txt=encodings.txt,
        vec=vec,
        mask=mask,
        weights=torch.from_numpy((~bad).astype(np.float32)),
        faults=tuple(fault for fault in faults if fault),
        **drawn_fields(indices, drawn),
    )


def _read_masks(
    dataset: PictureDataset,
    indices: Array,
    count: int,
    latent_size: tuple[int, int],
    faults: list[str | None],
) -> Tensor:
    """Return the weights of the latents of ``count`` samples in the loss; those past ``indices`` are padding.

    An entry is set in ``faults`` for each that cannot be read.
    """
    masks = torch.ones(count, *latent_size)
    for row, index in enumerate(indices.tolist()):
        try:
            masks[row] = dataset.loss_mask(index)
        except DataError as error:
            faults[row] = faults[row] or str(error)
    return masks


def _with_variants(dataset: Dataset, indices: Array, drawn: list[Draw]) -> Array:
    """Return the indices of the variants of samples ``indices`` that their draws choose."""
    if not isinstance(dataset, PictureDataset):
        return indices
    return dataset.with_variants(
        indices, np.array([each.variant for each in drawn[: len(indices)]])
    )


def _check_text(
    dataset: Dataset, indices: Array, encodings: Encodings, faults: list[str | None]
) -> list[str | None]:
    """Return ``faults`` and those of samples whose ``txt`` is not finite.

    Training leaves this to the checksums; in an evaluation a NaN would look like a diverged model.
    """
    finite = torch.isfinite(encodings.txt.flatten(1).sum(1, dtype=torch.float32)).tolist()
    return [
        fault or (None if ok else f"{dataset.name(int(index))}: not finite")
        for fault, ok, index in zip(faults, finite, indices, strict=True)
    ]


def _zero(encodings: Encodings, bad: Tensor, text: bool) -> None:
    """Zero the samples that could not be read: NaN times weight 0 is NaN."""
    names = ("txt", "vec", "mean", "logvar") if text else ("mean", "logvar")
    for name in names:
        getattr(encodings, name)[bad] = 0


class DeviceBatches(Iterator[AnyBatch]):
    """An iterator over batches on ``device``.

    On a GPU copies have a stream of their own, and the stream that computes waits for them: so a batch whose
    copy was begun with `stage` costs no time. The host waits for nothing but the loader.
    """

    def __init__(self, batches: Iterable[AnyBatch], device: torch.device) -> None:
        """Begin to load ``batches``, which are in page-locked memory if ``device`` is a GPU."""
        self._batches, self._device = iter(batches), device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._staged: tuple[AnyBatch, torch.cuda.Event] | None = None

    def stage(self) -> None:
        """Begin to copy the next batch to a GPU, if there is one; wait until the loader has it."""
        if self._stream is None or self._staged is not None:
            return
        batch = next(self._batches, None)
        if batch is None:
            return
        with torch.cuda.stream(self._stream):
            self._staged = batch.to(self._device), self._stream.record_event()

    def __next__(self) -> AnyBatch:
        """Return the next batch, for work of the current stream."""
        if self._stream is None:
            return next(self._batches).to(self._device)
        self.stage()
        if self._staged is None:
            raise StopIteration
        (batch, copied), self._staged = self._staged, None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copied)
        # memory of the batch is not used again before the work of this stream is done
        for tensor in batch.device_tensors().values():
            tensor.record_stream(current)
        return batch


class EvaluationData:
    """The batches of each evaluation, on the device."""

    def __init__(self, batches: Iterable[AnyBatch], device: torch.device) -> None:
        """Iterate over ``batches`` for each evaluation; nothing is loaded yet."""
        self._batches, self._device = batches, device
        self._begun: DeviceBatches | None = None

    def begin(self) -> None:
        """Begin to load for the next evaluation, and to copy its first batch to a GPU."""
        if self._begun is None:
            self._begun = DeviceBatches(self._batches, self._device)
            self._begun.stage()

    def __iter__(self) -> DeviceBatches:
        """Return all batches, from the first."""
        self.begin()
        assert self._begun is not None
        begun, self._begun = self._begun, None
        return begun
