"""The samples of a shard, read ahead of the encoders by loader processes.

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
from fluxtrain.data.tar.dataset import SampleError
from fluxtrain.precompute.target import Target


@dataclass(frozen=True)
class Piece:
    """The samples of one forward pass, read; a row of zeros stands where one could not be."""

    images: UInt8[Tensor, "b 3 H W"]
    captions: list[str]
    keys: list[str]
    timesteps: list[int | None]
    faults: list[str | None]


@dataclass(frozen=True)
class Job:
    """One shard to make."""

    target: Target
    shard: int

    def pieces(self, batch_size: int) -> Iterator[range]:
        """Yield the samples of each forward pass; the first one begins with the shard."""
        samples = self.target.samples(self.shard)
        for begin in range(samples.start, samples.stop, batch_size):
            yield range(begin, min(begin + batch_size, samples.stop))


def read_ahead(config: RunConfig, jobs: list[Job]) -> Iterator[Piece]:
    """Yield the pieces of ``jobs`` in order, read by the loader processes."""
    size = config.preprocess.batch_size
    spans = [(job.target, samples) for job in jobs for samples in job.pieces(size)]
    workers = min(config.data.num_workers, len(spans))
    loader = DataLoader(
        _Pieces(spans),
        sampler=range(len(spans)),
        batch_size=None,  # an item is a whole piece
        num_workers=workers,
        prefetch_factor=config.data.prefetch if workers else None,
    )
    return iter(loader)


@dataclass
class _Pieces(TorchDataset[Piece]):
    """The pieces of some jobs by number."""

    spans: list[tuple[Target, range]]

    def __getitem__(self, number: int) -> Piece:
        target, samples = self.spans[number]
        return _read(target, samples)


def _read(target: Target, samples: range) -> Piece:
    pictures = target.pictures
    images = torch.zeros(len(samples), 3, pictures.side, pictures.side, dtype=torch.uint8)
    captions, faults = list[str](), list[str | None]()
    for index, image in zip(samples, images, strict=True):
        try:
            captions.append(pictures.read(index, image))
            faults.append(None)
        except SampleError as error:
            captions.append("")
            faults.append(str(error))
    keys = [pictures.key(index) for index in samples]
    steps = [pictures.timestep(index) for index in samples]
    return Piece(images, captions, keys, steps, faults)
