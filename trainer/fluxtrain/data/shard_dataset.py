"""Encoded data sets: text encodings and latents' distributions in safetensors shards, read at random.

    folder/
      shard_000000.safetensors   txt [n l d], vec [n v], mean and logvar [n ch h w], timestep [n]
      shard_000000.json          keys, captions and CRC-32 of every record
      dataset.json               written last: lists the shards

A sample is four reads straight into the batch, no parsing and no copy.
Axes: n samples, l text tokens, d text width, v pooled width, ch h w latent image.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from fluxtrain.data.dataset import Rows
from fluxtrain.data.open_files import OpenFiles, fill
from fluxtrain.data.shard_writer import row_bytes
from fluxtrain.data.shards import (
    FIELDS,
    NUM_TIMESTEPS,
    attribution,
    common_shape,
    open_shards,
    read_listing,
)
from fluxtrain.draws import Array

_TEXT = ("txt", "vec")


class EncodedDataset:
    """The samples of a folder that :class:`EncodedWriter` wrote."""

    def __init__(self, folder: Path, verify: bool = False) -> None:
        """Open ``folder``; with ``verify`` every record's CRC-32 is compared as it is read.

        Raises DataError, naming the file, where a shard is missing, cut off or of another shape.
        """
        self.folder, self._verify = folder, verify
        listed = read_listing(folder)
        self._shards = open_shards(folder, listed)
        self._starts = np.cumsum([0, *(shard.num_samples for shard in self._shards)])
        self.shape = common_shape(self._shards)
        self.attribution = attribution(listed)
        self._files = OpenFiles([shard.path for shard in self._shards])
        self._sums: dict[int, Array] = {}

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self._starts[-1])

    def read(self, indices: Array, rows: Rows, skip_text: Array) -> list[str | None]:
        """Fill ``rows`` with the samples at ``indices``; say per sample what is wrong, or None."""
        views = zip(*(row_bytes(getattr(rows, field)) for field in FIELDS), strict=True)
        faults = [
            self._read_one(*place, sample, skip)
            for place, sample, skip in zip(
                self._places(indices), views, skip_text.tolist(), strict=True
            )
        ]
        finite = rows.finite(skip_text & (not self._verify))
        return [
            f"{self.name(int(index))}: {fault}" if (fault := found or _unless(ok)) else None
            for found, ok, index in zip(faults, finite, indices, strict=True)
        ]

    def timesteps(self, indices: Array) -> Array:
        """Return the stored evaluation timesteps (0 ... 7), by index where none are stored.

        Raises DataError where a stored one is none of them.
        """
        stored = self.stored_timesteps
        chosen: Array = indices % NUM_TIMESTEPS if stored is None else stored[indices]
        return chosen

    @cached_property
    def stored_timesteps(self) -> Array | None:
        """Return the evaluation timestep of every sample, None where not all have one."""
        stored = [steps for shard in self._shards if (steps := shard.timesteps()) is not None]
        return np.concatenate(stored) if len(stored) == len(self._shards) else None

    def caption(self, index: int) -> str:
        """Return the prompt of sample ``index``."""
        number, record = self._place(index)
        return self._shards[number].caption(record)

    def key(self, index: int) -> str:
        """Return the name of sample ``index`` in the set it was made from."""
        number, record = self._place(index)
        return self._shards[number].key(record)

    def name(self, index: int) -> str:
        """Return what a person needs to find sample ``index``."""
        number, record = self._place(index)
        return f"{self._shards[number].path} record {record} (key {self.key(index)!r})"

    def empty_text(self) -> None:
        """Return None: the empty prompt's encodings lie in a file of their own."""

    def _place(self, index: int) -> tuple[int, int]:
        """Return the number of the shard that holds sample ``index``, and its record there."""
        return next(self._places(np.array([index])))

    def _places(self, indices: Array) -> Iterator[tuple[int, int]]:
        """Return the place of each of ``indices``, found for all of them at once."""
        numbers = np.searchsorted(self._starts, indices, side="right") - 1
        records = indices - self._starts[numbers]
        return zip(numbers.tolist(), records.tolist(), strict=True)

    def _read_one(
        self, number: int, record: int, sample: tuple[memoryview, ...], skip: bool
    ) -> str | None:
        """Fill the views of ``sample`` with ``record`` of shard ``number``; return what is wrong with it."""
        spans, crc = self._shards[number].spans, 0
        try:
            file = self._files.get(number)
            for field, view in zip(FIELDS, sample, strict=True):
                if skip and field in _TEXT and not self._verify:  # a checksum is over all of it
                    continue
                span = spans[field]
                if not fill(file, [view], span.offset + record * span.row_bytes):
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


def _unless(finite: bool) -> str | None:
    return None if finite else "not finite"
