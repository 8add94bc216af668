"""Loads the batches of a run in worker processes; a batch is a pure function of its number.

A resume starts at another number and needs no state.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.data import Size
from fluxtrain.data.dataset import AnyBatch, EmptyText, Source
from fluxtrain.data.order import PADDING, BatchShares, BucketOrder, Order
from fluxtrain.data.sources import Sources
from fluxtrain.runtime import draws
from fluxtrain.runtime.draws import NUM_TIMESTEPS, Array

AnyOrder = Order | BucketOrder
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
    batches = TrainingBatches(config, sources.train, sources.empty_text, order, shares, rank)
    numbers = _MicroBatches(batches, range(first_batch, config.schedule.steps))
    return iter(_loader(config, batches, numbers, pin))


def training_order(config: RunConfig, source: Source) -> AnyOrder:
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
    batches = EvaluationBatches(config, source, size)
    rounds = -(-batches.count // world_size)
    return _loader(config, batches, range(rank, rounds * world_size, world_size), pin)


def evaluation_batch_size(config: RunConfig, num_samples: int, world_size: int) -> int:
    """Return the samples of one batch of one rank, with a validation set of ``num_samples``."""
    return min(config.evaluation.batch_size, -(-num_samples // world_size))


def _loader(
    config: RunConfig, batches: TorchDataset[AnyBatch], numbers: Numbers, pin: bool
) -> DataLoader[AnyBatch]:
    workers = min(config.data.num_workers, len(numbers))
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than CPUs
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
    source: Source
    empty: EmptyText | None
    order: AnyOrder
    shares: BatchShares
    rank: int

    def __getitem__(self, number: int) -> AnyBatch:
        """Return a micro batch: ``number`` is its global batch x ``accumulation_steps`` + its own in it."""
        batch, micro_step = divmod(number, self.shares.accumulation_steps)
        positions = self.shares_of(batch).positions(self.rank, micro_step)
        size = self.order.latent_size(batch) or self.config.latent_shape[1:]
        shape, flow, seed = (
            (self.config.latent_channels, *size),
            self.config.flow,
            self.config.drawn_seed,
        )
        drawn = [draws.training_draw(seed, batch, int(p), shape, flow) for p in positions]
        return self.source.batch(self.order.indices(batch, positions), drawn, self.empty)

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
        for batch in self.batches:
            first = batch * self.of.shares.accumulation_steps
            yield from range(first, first + self.of.shares_of(batch).accumulation_steps)


Numbers = range | _MicroBatches


@dataclass
class EvaluationBatches(TorchDataset[AnyBatch]):
    """The validation set, size by size and in order, batch by batch; the last of a size is padded."""

    config: RunConfig
    source: Source
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
        return self.source.batch(indices, drawn)

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
        seed, sizes = self.config.drawn_seed, self.source.latent_sizes
        return BucketOrder(seed, sizes, self.size, is_sequential=True)


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
