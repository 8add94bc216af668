"""MLCommons' preprocessed sets repacked as WebDataset tars, as NVIDIA's and AMD's submissions do.

    folder/
      shard_000000.tar   00000000.json, .t5.bytes, .clip.bytes, .mean.bytes, .logvar.bytes, ...
      index.txt          lists the tars

The JSON holds ``key`` and, in validation sets, ``timestep``. Tars are indexed once and read at random.
Axes: n samples, f fields.
"""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from fluxtrain.data.layouts.mlcommons import Cells, NpyDataset, checked_timesteps
from fluxtrain.data.layouts.npy import to_bytes
from fluxtrain.data.shard_writer import Sample
from fluxtrain.data.shards import FIELDS
from fluxtrain.data.tar.index import METADATA, Kind, Slot, open_index
from fluxtrain.draws import Array
from fluxtrain.errors import DataError
from fluxtrain.files import atomic_write

INDEX = "index.txt"
SUFFIXES = dict(zip(FIELDS, ("t5.bytes", "clip.bytes", "mean.bytes", "logvar.bytes"), strict=True))
ENCODINGS = Kind(
    "encodings",
    (METADATA, *(Slot(suffix, "a", (suffix,)) for suffix in SUFFIXES.values())),
)
"""A preprocessed sample: metadata and four .npy files."""


def open_repack(folder: Path) -> NpyDataset:
    """Return the samples of all tars in ``folder``, by file name; DataError where one is not whole."""
    return NpyDataset(folder, [_cells(path) for path in sorted(folder.glob("*.tar"))])


def _cells(path: Path) -> Cells:
    index = open_index(path, kind=ENCODINGS)
    if index.skipped.count:
        # A tar of encodings is made by a program: what it lacks is lost data, not somebody's bad picture.
        raise DataError(f"{path}: {index.skipped.texts[0]} (and {index.skipped.count - 1} more)")
    return Cells(
        path, index.spans[:, 2::2], index.spans[:, 3::2], _TarNotes(path, index.keys, index.spans)
    )


@dataclass(frozen=True)
class _TarNotes:
    """The JSON members: a million small reads, so they are left alone until somebody asks."""

    path: Path
    names: list[str]
    spans: Array

    def key(self, record: int) -> str:
        with self.path.open("rb") as file:
            return str(self._read(file, record).get("key", self.names[record]))

    def timesteps(self) -> Array | None:
        with self.path.open("rb") as file:
            found = (self._read(file, record).get("timestep") for record in range(len(self.names)))
            return checked_timesteps(self.path, found)

    def _read(self, file: BinaryIO, record: int) -> dict[str, Any]:
        """Return what a sample's JSON says; nothing where it is absent or malformed."""
        offset, size = self.spans[record, :2].tolist()
        file.seek(offset)
        try:
            content = json.loads(file.read(size) or b"{}")
        except (ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}


class RepackWriter:
    """Writes the tars; equal samples give equal bytes."""

    def __init__(self, folder: Path, shard_size: int, timesteps: bool) -> None:
        """Write tars of ``shard_size`` samples; each appears whole or not at all."""
        self.folder, self._shard_size, self._timesteps = folder, shard_size, timesteps
        self._count, self._names = 0, list[str]()
        self._tar: tarfile.TarFile | None = None

    def __enter__(self) -> RepackWriter:
        """Return the writer."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish the last tar and list them all, unless something went wrong."""
        self._finish_tar(whole=kind is None)
        if kind is None:
            with atomic_write(self.folder / INDEX) as partial:
                partial.write_text("".join(f"{name}\n" for name in self._names))

    def add(self, sample: Sample) -> None:
        """Append ``sample``."""
        base, note = f"{self._count:08d}", dict[str, object](key=sample.key)
        if self._timesteps:
            note["timestep"] = sample.timestep
        self._put(f"{base}.json", json.dumps(note).encode())
        for field, suffix in SUFFIXES.items():
            self._put(f"{base}.{suffix}", to_bytes(getattr(sample, field)))
        self._count += 1
        if self._count % self._shard_size == 0:
            self._finish_tar(whole=True)

    def _put(self, name: str, content: bytes) -> None:
        if self._tar is None:
            self._names.append(f"shard_{len(self._names):06d}.tar")
            self._tar = tarfile.TarFile(self._partial, "w", format=tarfile.USTAR_FORMAT)
        header = tarfile.TarInfo(name)
        header.size = len(content)
        self._tar.addfile(header, io.BytesIO(content))

    @property
    def _partial(self) -> Path:
        return self.folder / f"{self._names[-1]}.partial"

    def _finish_tar(self, whole: bool) -> None:
        if self._tar is not None:
            self._tar.close()
            self._tar = None
            if whole:
                self._partial.replace(self.folder / self._names[-1])
