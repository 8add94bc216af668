"""Encoded data sets: text encodings and latents' distributions in safetensors shards, read at random.

    folder/
      shard_000000.safetensors   txt [n l d], vec [n v], mean and logvar [n ch h w], timestep [n];
                                 h and w may differ from shard to shard
      shard_000000.json          keys, captions and CRC-32 of every record
      dataset.json               written last: lists the shards

Reading a sample takes four reads straight into the batch, without parsing or copying.
Axes: n samples, l text tokens, d text width, v pooled width, ch h w latent image.

A part is a file or a section of one that is read on its own; a record is the number of a sample in its
part.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from fluxtrain.data.dataset import Dataset, Encodings, same_sizes
from fluxtrain.data.shards import (
    FIELDS,
    attribution,
    open_shards,
    read_listing,
    sample_views,
    shapes_of,
)
from fluxtrain.errors import DataError
from fluxtrain.runtime.draws import Array
from fluxtrain.runtime.files import OpenFiles, read_into

TEXT_FIELDS = ("txt", "vec")


class FileDataset(Dataset):
    """Encoded samples in the files of one folder."""

    def __init__(self, folder: Path, sizes: Iterable[int], verify: bool = False) -> None:
        """Number the samples of parts of ``sizes`` in order; DataError if there are none.

        With ``verify`` text that is not needed is read too: the checksums include it.
        """
        self.folder, self._verify = folder, verify
        self._starts = np.cumsum([0, *sizes])
        self._timesteps: dict[int, Array | None] = {}  # by part, of those that were needed
        if not len(self):
            raise DataError(f"{folder}: its files hold no samples")

    @property
    def starts(self) -> Array:
        return self._starts

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indices: Array, out: Encodings, skip_text: Array) -> list[str | None]:
        skipped = skip_text & (not self._verify)
        views = list(zip(*(sample_views(getattr(out, field)) for field in FIELDS), strict=True))
        places, faults = list(self._places(indices)), list[str | None]([None] * len(indices))
        for row in np.argsort(indices, kind="stable").tolist():  # each part is read in one pass
            part, record = places[row]
            faults[row] = self._read_one(part, record, views[row], bool(skipped[row]))
        return [
            f"{self.name(index)}: {fault or 'not finite'}" if fault or not finite else None
            for index, fault, finite in zip(
                indices.tolist(), faults, out.finite(skipped), strict=True
            )
        ]

    @property
    def latent_sizes(self) -> Array:
        return same_sizes(self.shape, len(self))

    @property
    def stored_timesteps(self) -> Array | None:
        """Return the evaluation timestep (0 ... 7) of every sample, None if not all have one.

        Raises DataError if one is invalid.
        """
        parts = [self._timesteps_of(part) for part in range(len(self._starts) - 1)]
        stored = [part for part in parts if part is not None]
        return np.concatenate(stored) if len(stored) == len(parts) else None

    def timesteps(self, indices: Array) -> Array:
        """Return the stored evaluation timesteps; index modulo 8 in parts that do not have all of theirs.

        Only the parts of ``indices`` are read, once. Raises DataError if a timestep is invalid.
        """
        timesteps = super().timesteps(indices)
        parts = self._parts(indices)
        for part in np.unique(parts).tolist():
            stored = self._timesteps_of(part)
            if stored is not None:
                inside = parts == part
                timesteps[inside] = stored[indices[inside] - self._starts[part]]
        return timesteps

    def read_timesteps(self) -> None:
        """Read the timesteps of all parts, which are kept; DataError if one is invalid."""
        for part in range(len(self._starts) - 1):
            self._timesteps_of(part)

    def _timesteps_of(self, part: int) -> Array | None:
        if part not in self._timesteps:
            self._timesteps[part] = self._read_timesteps(part)
        return self._timesteps[part]

    def name(self, index: int) -> str:
        """Return the file, the record and the key of sample ``index``, for messages."""
        return f"{self._location(*self._place(index))} (key {self.key(index)!r:.80})"

    @abstractmethod
    def key(self, index: int) -> str:
        """Return the key of sample ``index`` in its source data set, "" if it has none."""

    @abstractmethod
    def _read_timesteps(self, part: int) -> Array | None:
        """Return the timesteps of the samples of ``part``, None if not all of them have one."""

    @abstractmethod
    def _location(self, part: int, record: int) -> str:
        """Return the file and the place of ``record`` in it."""

    @abstractmethod
    def _read_one(
        self, part: int, record: int, sample: tuple[memoryview, ...], skip_text: bool
    ) -> str | None:
        """Fill the views of ``sample`` with ``record``; return a fault message or None."""

    def _place(self, index: int) -> tuple[int, int]:
        return next(self._places(np.array([index])))

    def _places(self, indices: Array) -> Iterator[tuple[int, int]]:
        parts = self._parts(indices)
        return zip(parts.tolist(), (indices - self._starts[parts]).tolist(), strict=True)

    def _parts(self, indices: Array) -> Array:
        parts: Array = np.searchsorted(self._starts, indices, side="right") - 1
        return parts


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
        if all(shape == self.shape for shape in self._shapes):
            return super().latent_sizes
        sizes = np.array([shape.latent[1:] for shape in self._shapes])
        return np.repeat(sizes, [shard.num_samples for shard in self._shards], axis=0)

    @property
    def files(self) -> list[Path]:
        return [shard.path for shard in self._shards]

    def caption(self, index: int) -> str:
        number, record = self._place(index)
        return self._shards[number].caption(record)

    def key(self, index: int) -> str:
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
