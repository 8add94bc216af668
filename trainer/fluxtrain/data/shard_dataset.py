"""Encoded data sets: text encodings and latents' distributions in safetensors shards, read at random.

    folder/
      shard_000000.safetensors   txt [n l d], vec [n v], mean and logvar [n ch h w], timestep [n]
      shard_000000.json          keys, captions and CRC-32 of every record
      dataset.json               written last: lists the shards

Reading a sample takes four reads straight into the batch, without parsing or copying.
Axes: n samples, l text tokens, d text width, v pooled width, ch h w latent image.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from fluxtrain.data.dataset import (
    Encodings,
    concatenate_timesteps,
    name_faults,
    timesteps_at,
)
from fluxtrain.data.open_files import OpenFiles, read_into
from fluxtrain.data.shard_writer import sample_views
from fluxtrain.data.shards import (
    FIELDS,
    attribution,
    common_shape,
    open_shards,
    read_listing,
)
from fluxtrain.draws import Array

_TEXT = ("txt", "vec")


class ShardDataset:
    """The samples of a folder that :class:`ShardWriter` wrote."""

    def __init__(self, folder: Path, verify: bool = False) -> None:
        """Open ``folder``; with ``verify`` the CRC-32 of every sample read is compared.

        Raises DataError, naming the file, if a shard is missing, cut off or of another shape.
        """
        self.folder, self._verify = folder, verify
        listing = read_listing(folder)
        self._shards = open_shards(folder, listing)
        self._starts = np.cumsum([0, *(shard.num_samples for shard in self._shards)])
        self.shape = common_shape(self._shards)
        self.attribution = attribution(listing)
        self._files = OpenFiles([shard.path for shard in self._shards])
        self._sums: dict[int, Array] = {}

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self._starts[-1])

    def read(self, indices: Array, out: Encodings, skip_text: Array) -> list[str | None]:
        """Fill ``out`` with the samples at ``indices`` and return a fault message, or None, per sample."""
        views = zip(*(sample_views(getattr(out, field)) for field in FIELDS), strict=True)
        faults = [
            self._read_one(*place, sample, skip)
            for place, sample, skip in zip(
                self._places(indices), views, skip_text.tolist(), strict=True
            )
        ]
        return name_faults(self.name, indices, faults, out.finite(skip_text & (not self._verify)))

    def timesteps(self, indices: Array) -> Array:
        """Return the stored evaluation timesteps (0 ... 7), index modulo 8 if none are stored.

        Raises DataError if a stored one is invalid.
        """
        return timesteps_at(self.stored_timesteps, indices)

    @cached_property
    def stored_timesteps(self) -> Array | None:
        """Return the evaluation timestep of every sample, None if not all have one."""
        return concatenate_timesteps([shard.timesteps() for shard in self._shards])

    def caption(self, index: int) -> str:
        """Return the prompt of sample ``index``."""
        number, record = self._place(index)
        return self._shards[number].caption(record)

    def key(self, index: int) -> str:
        """Return the key of sample ``index`` in its source data set."""
        number, record = self._place(index)
        return self._shards[number].key(record)

    def name(self, index: int) -> str:
        """Return the file and the key of sample ``index``, for messages."""
        number, record = self._place(index)
        return f"{self._shards[number].path} record {record} (key {self.key(index)!r})"

    def empty_text(self) -> None:
        """Return None: the empty prompt's encodings are in a file of their own."""

    def _place(self, index: int) -> tuple[int, int]:
        """Return the shard of sample ``index`` and its record there."""
        return next(self._places(np.array([index])))

    def _places(self, indices: Array) -> Iterator[tuple[int, int]]:
        """Yield the shard and the record of each of ``indices``."""
        numbers = np.searchsorted(self._starts, indices, side="right") - 1
        records = indices - self._starts[numbers]
        return zip(numbers.tolist(), records.tolist(), strict=True)

    def _read_one(
        self, number: int, record: int, sample: tuple[memoryview, ...], skip: bool
    ) -> str | None:
        """Fill the views of ``sample`` with ``record`` of shard ``number``; return a fault or None."""
        spans, crc = self._shards[number].spans, 0
        try:
            file = self._files.get(number)
            for field, view in zip(FIELDS, sample, strict=True):
                if skip and field in _TEXT and not self._verify:  # the checksum includes the text
                    continue
                span = spans[field]
                if not read_into(file, [view], span.offset + record * span.row_bytes):
                    return "cut off"
                if self._verify:
                    crc = zlib.crc32(view, crc)
        except OSError as error:
            return error.strerror or "not readable"
        return self._compare(crc, number, record) if self._verify else None

    def _compare(self, crc: int, number: int, record: int) -> str | None:
        if number not in self._sums:
            self._sums[number] = self._shards[number].checksums()
        stored = int(self._sums[number][record])
        if stored < 0:
            return "no CRC-32 is stored"
        return None if stored == crc else "CRC-32 differs"
