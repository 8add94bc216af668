"""Writes encoded data sets in the layout that data/encoded.py reads.

Axes: l text tokens, d text width, v pooled width, ch h w latent image.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fluxtrain.data.shards import FIELDS, FORMAT, LISTING
from fluxtrain.files import atomic_write
from fluxtrain.safetensors_file import DTYPES

_ALIGNMENT = 64


@dataclass
class Sample:
    """One encoded sample on its way into a shard."""

    key: str
    caption: str
    txt: Float[Tensor, "l d"]
    vec: Float[Tensor, " v"]
    mean: Float[Tensor, "ch h w"]
    logvar: Float[Tensor, "ch h w"]
    timestep: int | None = None


@dataclass
class _Notes:
    """What is kept of the samples of one shard beside their encodings."""

    keys: list[str] = field(default_factory=list)
    captions: list[str] = field(default_factory=list)
    timesteps: list[int | None] = field(default_factory=list)

    def add(self, sample: Sample) -> None:
        """Append what belongs to ``sample``."""
        self.keys.append(sample.key)
        self.captions.append(sample.caption)
        self.timesteps.append(sample.timestep)


class EncodedWriter:
    """Writes an encoded data set; each file appears whole or not at all."""

    def __init__(
        self,
        folder: Path,
        shard_size: int = 1024,
        dtype: torch.dtype = torch.bfloat16,
        provenance: dict[str, Any] | None = None,
    ) -> None:
        """Write shards of ``shard_size`` samples in ``dtype``; ``provenance`` goes into the listing."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.shard_size, self.dtype = folder, shard_size, dtype
        self._provenance, self._shards = provenance or {}, list[dict[str, Any]]()
        self._rows: dict[str, Tensor] | None = None  # room for one shard
        self._notes = _Notes()

    def __enter__(self) -> EncodedWriter:
        """Return the writer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write the last shard and the listing, unless something went wrong."""
        if kind is None:
            self._flush()
            write_listing(self.folder, self._shards, self._provenance)

    def add(self, sample: Sample) -> None:
        """Append ``sample``; its encodings are copied."""
        values = {name: getattr(sample, name) for name in FIELDS}
        if self._rows is None:
            self._rows = {
                name: torch.empty(self.shard_size, *value.shape, dtype=self.dtype)
                for name, value in values.items()
            }
        for name, room in self._rows.items():
            assert room.shape[1:] == values[name].shape, name
            room[len(self._notes.keys)] = values[name]
        self._notes.add(sample)
        if len(self._notes.keys) == self.shard_size:
            self._flush()

    def add_all(self, samples: Iterable[Sample]) -> None:
        """Append every sample of ``samples``."""
        for sample in samples:
            self.add(sample)

    def _flush(self) -> None:
        if self._rows is None:
            return
        (all_rows, self._rows), (notes, self._notes) = (self._rows, None), (self._notes, _Notes())
        count = len(notes.keys)
        path = self.folder / shard_name(len(self._shards))
        rows = {name: room[:count] for name, room in all_rows.items()}
        texts = {"keys": notes.keys, "captions": notes.captions}
        write_shard(path, rows, notes.timesteps, texts)
        self._shards.append({"file": path.name, "samples": count})


def shard_name(number: int) -> str:
    """Return the file name of shard ``number``, from 0."""
    return f"shard_{number:06d}.safetensors"


def write_listing(folder: Path, shards: list[dict[str, Any]], provenance: dict[str, Any]) -> None:
    """Write what makes ``folder`` a data set: its ``shards``, each with file and samples."""
    listing = {"format": FORMAT, "shards": shards, "provenance": provenance}
    _write_text(folder / LISTING, json.dumps(listing, indent=1))


def write_shard(
    path: Path,
    rows: Mapping[str, Tensor],
    timesteps: list[int | None],
    notes: dict[str, list[str]],
) -> None:
    """Write the samples in ``rows``, by the names in FIELDS, to ``path``; the notes go beside it, first.

    Timesteps are stored where every sample has one. ``notes`` are lists of texts, such as the keys.
    """
    tensors = dict(rows)
    stored = [step for step in timesteps if step is not None]
    if len(stored) == len(timesteps):
        tensors["timestep"] = torch.tensor(stored, dtype=torch.int32)
    sums = _checksums([row_bytes(tensors[field]) for field in FIELDS])
    _write_text(path.with_suffix(".json"), json.dumps({**notes, "crc32": sums}, ensure_ascii=False))
    save_aligned(path, tensors)


def _checksums(fields: list[list[memoryview]]) -> list[int]:
    """Return each record's CRC-32 over its ``fields`` in their order."""
    return [
        reduce(lambda crc, view: zlib.crc32(view, crc), row, 0) for row in zip(*fields, strict=True)
    ]


def _write_text(path: Path, text: str) -> None:
    with atomic_write(path) as partial:
        partial.write_text(text)


def save_aligned(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write ``tensors`` to ``path`` as safetensors, whole or not at all.

    The data begins on a 64-byte boundary, which the safetensors library leaves to chance: reading
    into a batch is half as fast again there (docs/log.md).
    """
    spans, end = dict[str, Any](), 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        dtype = next(code for code, known in DTYPES.items() if known == tensor.dtype)
        spans[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(spans).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    with atomic_write(path) as partial, partial.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for tensor in tensors.values():
            content: Any = tensor.reshape(-1).view(torch.uint8).numpy()
            file.write(memoryview(content))


def row_bytes(rows: Tensor) -> list[memoryview]:
    """Return the memory of ``rows``, one view per sample."""
    return [memoryview(row) for row in rows.view(torch.uint8).flatten(1).numpy()]
