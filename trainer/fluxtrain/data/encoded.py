"""Encoded data sets: text encodings and latents' distributions in safetensors shards, read at random.

    folder/
      shard_000000.safetensors   txt [n l d], vec [n v], mean and logvar [n ch h w], timestep [n]
      shard_000000.json          keys, captions and CRC-32 of every record
      dataset.json               written last: lists the shards

A sample is four reads straight into the batch, no parsing and no copy.
Axes: n samples, l text tokens, d text width, v pooled width, ch h w latent image.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor

from fluxtrain.data.dataset import Rows, SampleShape
from fluxtrain.data.safetensors import Span, read_header
from fluxtrain.draws import Array
from fluxtrain.errors import DataError

_FIELDS = ("txt", "vec", "mean", "logvar")
_TEXT = ("txt", "vec")
_FORMAT = 1


@dataclass(frozen=True)
class _Shard:
    path: Path
    num_samples: int
    spans: dict[str, Span]


class EncodedDataset:
    """The samples of a folder that :class:`EncodedWriter` wrote."""

    def __init__(self, folder: Path, verify: bool = False) -> None:
        """Open ``folder``; with ``verify`` every record's CRC-32 is compared as it is read.

        Raises DataError, naming the file, where a shard is missing, cut off or of another shape.
        """
        self.folder, self._verify = folder, verify
        self._shards = [_open_shard(folder, entry) for entry in _listed(folder)]
        self._starts = np.cumsum([0, *(shard.num_samples for shard in self._shards)])
        self.shape = _common_shape(self._shards)
        self._files: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self._starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        """Leave open files behind when sent to another process."""
        return {**self.__dict__, "_files": {}}

    def read(self, indices: Array, rows: Rows, skip_text: Array) -> list[str | None]:
        """Fill ``rows`` with the samples at ``indices``; say per sample what is wrong, or None."""
        views = {name: _bytes(getattr(rows, name)) for name in _FIELDS}
        faults = []
        for row, index in enumerate(indices):
            skip = _TEXT if skip_text[row] else ()
            faults.append(self._read_one(int(index), row, views, skip))
        finite = _finite(rows)
        return [
            fault or (None if ok else f"{self.name(int(index))}: not finite")
            for fault, ok, index in zip(faults, finite, indices, strict=True)
        ]

    def timesteps(self, indices: Array) -> Array:
        """Return the stored evaluation timesteps (0 ... 7), by index where none are stored."""
        stored = self._timesteps()
        return indices % 8 if stored is None else stored[indices]

    def caption(self, index: int) -> str:
        """Return the prompt of sample ``index``."""
        return str(self._note(index, "captions"))

    def key(self, index: int) -> str:
        """Return the name of sample ``index`` in the set it was made from."""
        return str(self._note(index, "keys"))

    def name(self, index: int) -> str:
        """Return what a person needs to find sample ``index``."""
        shard, row = self._place(index)
        return f"{shard.path} record {row} (key {self.key(index)!r})"

    def empty_text(self) -> None:
        """Return None: the empty prompt's encodings lie in a file of their own."""

    def _place(self, index: int) -> tuple[_Shard, int]:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._shards[number], index - int(self._starts[number])

    def _read_one(
        self, index: int, row: int, views: dict[str, Array], skip: tuple[str, ...]
    ) -> str | None:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        shard, record, crc = self._shards[number], index - int(self._starts[number]), 0
        try:
            file = self._file(number)
            for field in _FIELDS:
                view, span = views[field][row], shard.spans[field]
                if field in skip:
                    view[:] = 0
                elif os.preadv(file, [view], span.offset + record * span.row_bytes) != len(view):
                    return f"{self.name(index)}: cut off"
                if self._verify:
                    crc = zlib.crc32(view, crc)
        except OSError as error:
            return f"{self.name(index)}: {error.strerror}"
        if self._verify and not skip and crc != self._note(index, "crc32"):
            return f"{self.name(index)}: CRC-32 differs"
        return None

    def _file(self, number: int) -> int:
        if number not in self._files:
            self._files[number] = os.open(self._shards[number].path, os.O_RDONLY)
        return self._files[number]

    def _note(self, index: int, kind: str) -> object:
        shard, row = self._place(index)
        notes = _notes(shard.path.with_suffix(".json")).get(kind, [])
        return notes[row] if row < len(notes) else ""

    def _timesteps(self) -> Array | None:
        if any("timestep" not in shard.spans for shard in self._shards):
            return None
        return np.concatenate([_timesteps_of(shard.path) for shard in self._shards])


def _listed(folder: Path) -> list[dict[str, Any]]:
    path = folder / "dataset.json"
    try:
        listing = json.loads(path.read_text())
        if listing["format"] != _FORMAT:
            raise ValueError(f"format {listing['format']}, this version reads {_FORMAT}")
        shards = list(listing["shards"])
        if not shards:
            raise ValueError("it lists no shards")
        return shards
    except FileNotFoundError:
        raise DataError(f"{folder}: no encoded data set is here ({path.name} is missing)") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not the listing of an encoded data set ({error})") from None


def _open_shard(folder: Path, entry: dict[str, Any]) -> _Shard:
    name, count = str(entry.get("file")), entry.get("samples")
    if Path(name).name != name:
        raise DataError(f"{folder / 'dataset.json'}: shard {name!r} lies outside the folder")
    spans = read_header(folder / name)
    for field in _FIELDS:
        if field not in spans or spans[field].shape[:1] != (count,):
            raise DataError(f"{folder / name}: tensor {field!r} does not hold {count} samples")
    return _Shard(folder / name, int(count or 0), spans)


def _common_shape(shards: list[_Shard]) -> SampleShape:
    shapes = {tuple((s.spans[f].shape[1:], s.spans[f].dtype) for f in _FIELDS) for s in shards}
    if len(shapes) != 1:
        raise DataError(f"{shards[0].path.parent}: its shards hold samples of different shapes")
    (txt, dtype), (vec, _), (latent, _), _ = next(iter(shapes))
    ranks = (len(txt), len(vec), len(latent))
    if ranks != (2, 1, 3) or len({kind for _, kind in next(iter(shapes))}) != 1:
        raise DataError(f"{shards[0].path}: shapes are not those of encoded samples")
    return SampleShape((txt[0], txt[1]), vec[0], (latent[0], latent[1], latent[2]), dtype)


def _bytes(rows: Tensor) -> Array:
    """Return the memory of ``rows``, one line of bytes per sample."""
    return rows.view(torch.uint8).flatten(1).numpy()


def _finite(rows: Rows) -> list[bool]:
    # A sum is finite only where all its terms are, short of overflow, which is no encoding either.
    sums = [
        getattr(rows, name).flatten(1).sum(1, dtype=torch.float32)
        for name in ("vec", "mean", "logvar")
    ]
    return torch.isfinite(torch.stack(sums)).all(0).tolist()


@lru_cache(maxsize=8)
def _notes(path: Path) -> dict[str, list[Any]]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return {}  # names are for people; a sample is still usable without one


@lru_cache(maxsize=64)
def _timesteps_of(path: Path) -> Array:
    return load_file(path)["timestep"].numpy().astype(np.int64)


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
        self._provenance, self._waiting = provenance or {}, list[Sample]()
        self._shards: list[dict[str, Any]] = []

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
            listing = {"format": _FORMAT, "shards": self._shards, "provenance": self._provenance}
            _write_text(self.folder / "dataset.json", json.dumps(listing, indent=1))

    def add(self, sample: Sample) -> None:
        """Append ``sample``."""
        self._waiting.append(sample)
        if len(self._waiting) == self.shard_size:
            self._flush()

    def add_all(self, samples: Iterable[Sample]) -> None:
        """Append every sample of ``samples``."""
        for sample in samples:
            self.add(sample)

    def _flush(self) -> None:
        if not self._waiting:
            return
        samples, self._waiting = self._waiting, []
        path = self.folder / f"shard_{len(self._shards):06d}.safetensors"
        tensors = {
            field: torch.stack([getattr(sample, field) for sample in samples]).to(self.dtype)
            for field in _FIELDS
        }
        steps = [sample.timestep for sample in samples]
        stored = [step for step in steps if step is not None]
        if len(stored) == len(steps):
            tensors["timestep"] = torch.tensor(stored, dtype=torch.int32)
        notes = {
            "keys": [sample.key for sample in samples],
            "captions": [sample.caption for sample in samples],
            "crc32": _checksums([_bytes(tensors[field]) for field in _FIELDS]),
        }
        _write_text(path.with_suffix(".json"), json.dumps(notes, ensure_ascii=False))
        partial = path.with_suffix(".partial")
        save_file(tensors, partial)
        partial.replace(path)
        self._shards.append({"file": path.name, "samples": len(samples)})


def _checksums(views: list[Array]) -> list[int]:
    sums = []
    for row in range(len(views[0])):
        crc = 0
        for view in views:
            crc = zlib.crc32(view[row], crc)
        sums.append(crc)
    return sums


def _write_text(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def write_empty_text(path: Path, txt: Float[Tensor, "l d"], vec: Float[Tensor, " v"]) -> None:
    """Write the empty prompt's encodings."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file({"txt": txt.contiguous(), "vec": vec.contiguous()}, partial)
    partial.replace(path)


def read_empty_text(path: Path) -> tuple[Float[Tensor, "l d"], Float[Tensor, " v"]]:
    """Return the empty prompt's encodings; DataError where the file does not hold them."""
    if {"txt", "vec"} - set(read_header(path)):
        raise DataError(f"{path}: does not hold the tensors txt and vec of the empty prompt")
    tensors = load_file(path)
    return tensors["txt"], tensors["vec"]
