"""Encoded data sets: text encodings and latents' distributions in safetensors shards, read at random.

    folder/
      shard_000000.safetensors   txt [n l d], vec [n v], mean and logvar [n ch h w], timestep [n];
                                 h and w may differ from shard to shard
      shard_000000.json          keys, captions and CRC-32 of every record
      dataset.json               written last: lists the shards

Reading a sample takes four reads straight into the batch, without parsing or copying.
Axes: n samples, l text tokens, d text width, v pooled width, ch h w latent image.
"""

from __future__ import annotations

import zlib
from functools import cached_property
from pathlib import Path

import numpy as np

from fluxtrain.data.file_dataset import TEXT_FIELDS, FileDataset
from fluxtrain.data.open_files import OpenFiles, read_into
from fluxtrain.data.shards import (
    FIELDS,
    attribution,
    open_shards,
    read_listing,
    shapes_of,
)
from fluxtrain.draws import Array


class ShardDataset(FileDataset):
    """The samples of a folder that :class:`ShardWriter` wrote."""

    def __init__(self, folder: Path, verify: bool = False) -> None:
        """Open ``folder``; with ``verify`` the CRC-32 of every sample read is compared.

        Raises DataError, naming the file, if a shard is missing, cut off or of another shape.
        """
        listing = read_listing(folder)
        self._shards = open_shards(folder, listing)
        super().__init__(folder, (shard.num_samples for shard in self._shards), verify)
        self._shapes = shapes_of(self._shards)
        self.shape = self._shapes[0]
        self.attribution = attribution(listing)
        self._files = OpenFiles([shard.path for shard in self._shards])
        self._sums: dict[int, Array] = {}

    @cached_property
    def latent_sizes(self) -> Array:
        """Return height and width of the latents of every sample, "n 2"."""
        if all(shape == self.shape for shape in self._shapes):
            return super().latent_sizes
        sizes = np.array([shape.latent[1:] for shape in self._shapes])
        return np.repeat(sizes, [shard.num_samples for shard in self._shards], axis=0)

    @property
    def files(self) -> list[Path]:
        """Return the shards."""
        return [shard.path for shard in self._shards]

    def caption(self, index: int) -> str:
        """Return the prompt of sample ``index``, "" if it is not stored."""
        number, record = self._place(index)
        return self._shards[number].caption(record)

    def key(self, index: int) -> str:
        """Return the key of sample ``index`` in its source data set, "" if it has none."""
        number, record = self._place(index)
        return self._shards[number].key(record)

    def _read_timesteps(self, part: int) -> Array | None:
        return self._shards[part].timesteps()

    def _location(self, part: int, record: int) -> str:
        return f"{self._shards[part].path} record {record}"

    def _read_one(
        self, part: int, record: int, sample: tuple[memoryview, ...], skip_text: bool
    ) -> str | None:
        spans, crc = self._shards[part].spans, 0
        try:
            file = self._files.get(part)
            for field, view in zip(FIELDS, sample, strict=True):
                if skip_text and field in TEXT_FIELDS:
                    continue
                span = spans[field]
                if not read_into(file, [view], span.offset + record * span.row_bytes):
                    return "cut off"
                if self._verify:
                    crc = zlib.crc32(view, crc)
        except OSError as error:
            return error.strerror or "not readable"
        return self._compare(crc, part, record) if self._verify else None

    def _compare(self, crc: int, number: int, record: int) -> str | None:
        if number not in self._sums:
            self._sums[number] = self._shards[number].checksums()
        stored = int(self._sums[number][record])
        if stored < 0:
            return "no CRC-32 is stored"
        return None if stored == crc else "CRC-32 differs"
