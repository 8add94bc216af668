"""Reads the samples of shards in loader processes, ahead of the encoders.

Axes: b batch, H W image.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.images.files import SampleError
from fluxtrain.precompute.output import EncodedOutput


@dataclass(frozen=True)
class InputBatch:
    """The samples of one forward pass; an unreadable one has a fault and a black image."""

    images: UInt8[Tensor, "b 3 H W"]
    captions: list[str]
    keys: list[str]
    timesteps: list[int | None]
    faults: list[str | None]


@dataclass(frozen=True)
class PendingShard:
    """A shard that is not written yet."""

    output: EncodedOutput
    number: int

    def batches(self, batch_size: int) -> list[range]:
        """Return the samples of each forward pass; the first one starts with the shard."""
        samples = self.output.samples(self.number)
        starts = range(samples.start, samples.stop, batch_size)
        return [range(start, min(start + batch_size, samples.stop)) for start in starts]


def read_ahead(config: RunConfig, shards: list[PendingShard]) -> Iterator[InputBatch]:
    """Yield the batches of ``shards`` in order, read by the loader processes."""
    size = config.preprocess.batch_size
    ranges = [(shard.output, samples) for shard in shards for samples in shard.batches(size)]
    workers = min(config.data.num_workers, len(ranges))
    loader = DataLoader(
        _InputBatches(ranges),
        sampler=range(len(ranges)),
        batch_size=None,  # an item is a whole batch
        num_workers=workers,
        prefetch_factor=config.data.prefetch if workers else None,
    )
    return iter(loader)


@dataclass
class _InputBatches(TorchDataset[InputBatch]):
    ranges: list[tuple[EncodedOutput, range]]

    def __getitem__(self, number: int) -> InputBatch:
        output, samples = self.ranges[number]
        return _read(output, samples)


def _read(output: EncodedOutput, samples: range) -> InputBatch:
    dataset = output.dataset
    images = torch.zeros(len(samples), 3, dataset.side, dataset.side, dtype=torch.uint8)
    captions, faults = list[str](), list[str | None]()
    for index, image in zip(samples, images, strict=True):
        try:
            captions.append(dataset.read(index, image))
            faults.append(None)
        except SampleError as error:
            captions.append("")
            faults.append(str(error))
    keys = [dataset.key(index) for index in samples]
    steps = [dataset.timestep(index) for index in samples]
    return InputBatch(images, captions, keys, steps, faults)
