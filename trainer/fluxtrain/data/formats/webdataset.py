"""MLCommons' preprocessed sets repacked as WebDataset tars, as NVIDIA's and AMD's submissions do.

    folder/
      shard_000000.tar   00000000.json, .t5.bytes, .clip.bytes, .mean.bytes, .logvar.bytes, ...
      index.txt          lists the tars

The JSON holds ``key`` and, in validation sets, ``timestep``. Tars are indexed once and then read at random.
Axes: n samples, f fields.
"""

from __future__ import annotations

import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fluxtrain.data.formats.mlcommons import (
    CellTable,
    NpyDataset,
    SampleMetadata,
    to_bytes,
    validate_timesteps,
)
from fluxtrain.data.formats.tar_index import METADATA, MemberSpec, SampleFormat, open_index
from fluxtrain.data.formats.tar_writer import add_member, open_tar
from fluxtrain.data.shards import FIELDS, Sample, StreamWriter
from fluxtrain.errors import DataError
from fluxtrain.runtime.draws import Array
from fluxtrain.runtime.files import atomic_write

INDEX = "index.txt"
SUFFIXES = dict(zip(FIELDS, ("t5.bytes", "clip.bytes", "mean.bytes", "logvar.bytes"), strict=True))
ENCODINGS = SampleFormat(
    "encodings",
    (METADATA, *(MemberSpec(suffix, "a", (suffix,)) for suffix in SUFFIXES.values())),
)
"""A preprocessed sample: JSON metadata and four .npy files."""


def open_webdataset(folder: Path) -> NpyDataset:
    """Return the samples of all tars in ``folder``, by file name; DataError if a tar is not whole."""
    return NpyDataset(folder, [_cells(path) for path in sorted(folder.glob("*.tar"))])


def _cells(path: Path) -> CellTable:
    index = open_index(path, sample_format=ENCODINGS)
    if index.skipped.count:
        # Unlike a bad image of a scraped set, a missing encoding is lost data.
        raise DataError(f"{path}: {index.skipped.messages[0]} (and {index.skipped.count - 1} more)")
    metadata = _JsonMetadata(index.keys, None, path, index.spans)
    return CellTable(path, index.spans[:, 2::2], index.spans[:, 3::2], metadata)


@dataclass(frozen=True)
class _JsonMetadata(SampleMetadata):
    """The JSON members; read on demand, because a large set has a million of them."""

    path: Path
    spans: Array

    def key(self, record: int) -> str:
        with self.path.open("rb") as file:
            return str(self._read(file, record).get("key", self.keys[record]))

    def timesteps(self) -> Array | None:
        with self.path.open("rb") as file:
            records = range(len(self.keys))
            steps = (self._read(file, record).get("timestep") for record in records)
            return validate_timesteps(self.path, steps)

    def _read(self, file: BinaryIO, record: int) -> dict[str, Any]:
        """Return a sample's JSON; {} if it is absent or malformed."""
        offset, size = self.spans[record, :2].tolist()
        file.seek(offset)
        try:
            content = json.loads(file.read(size) or b"{}")
        except (ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}


class WebDatasetWriter(StreamWriter):
    """Writes the tars and index.txt; equal samples give equal bytes."""

    def __init__(self, folder: Path, shard_size: int, timesteps: bool) -> None:
        super().__init__(folder, shard_size)
        self._timesteps, self._num_samples = timesteps, 0

    def _file_name(self, number: int) -> str:
        return f"shard_{number:06d}.tar"

    def _open(self, path: Path) -> tarfile.TarFile:
        return open_tar(path)

    def _write(self, file: tarfile.TarFile, samples: list[Sample]) -> None:
        for sample in samples:
            base, metadata = f"{self._num_samples:08d}", dict[str, object](key=sample.key)
            if self._timesteps:
                metadata["timestep"] = sample.timestep
            add_member(file, f"{base}.json", json.dumps(metadata).encode())
            for field, suffix in SUFFIXES.items():
                add_member(file, f"{base}.{suffix}", to_bytes(getattr(sample, field)))
            self._num_samples += 1

    def _write_listing(self) -> None:
        with atomic_write(self.folder / INDEX) as partial:
            partial.write_text("".join(f"{name}\n" for name in self.names), encoding="utf-8")
