"""Writes encoded data sets as safetensors shards, in the layout that data/shard_dataset.py reads."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fluxtrain.data.sample_writer import Sample, SampleWriter
from fluxtrain.data.shards import FIELDS, FORMAT, LISTING
from fluxtrain.files import atomic_write
from fluxtrain.safetensors_file import DTYPES

_ALIGNMENT = 64


@dataclass
class _Shard:
    """The samples of the current shard; ``tensors`` have room for a whole one."""

    tensors: dict[str, Tensor]
    keys: list[str] = field(default_factory=list)
    captions: list[str] = field(default_factory=list)
    timesteps: list[int | None] = field(default_factory=list)

    def takes(self, sample: Sample) -> bool:
        """Return whether the latents of ``sample`` are of the size of those before."""
        return self.tensors["mean"].shape[1:] == sample.mean.shape

    def append(self, sample: Sample) -> None:
        """Copy ``sample``."""
        for name, tensor in self.tensors.items():
            value = getattr(sample, name)
            assert tensor.shape[1:] == value.shape, name
            tensor[len(self.keys)] = value
        self.keys.append(sample.key)
        self.captions.append(sample.caption)
        self.timesteps.append(sample.timestep)

    def write(self, path: Path) -> None:
        """Write the shard to ``path``."""
        tensors = {name: tensor[: len(self.keys)] for name, tensor in self.tensors.items()}
        texts = {"keys": self.keys, "captions": self.captions}
        write_shard(path, tensors, self.timesteps, texts)


class ShardWriter(SampleWriter):
    """Writes an encoded data set; the encodings of an added sample are copied.

    A shard ends where the size of the latents changes, so add samples of one size after one another.
    """

    def __init__(
        self,
        folder: Path,
        shard_size: int = 1024,
        dtype: torch.dtype = torch.bfloat16,
        provenance: dict[str, Any] | None = None,
    ) -> None:
        """Write shards of ``shard_size`` samples in ``dtype``; ``provenance`` goes into the listing."""
        super().__init__(folder, shard_size)
        self.dtype, self._provenance = dtype, provenance or {}
        self._entries = list[dict[str, Any]]()
        self._shard: _Shard | None = None

    def _append(self, sample: Sample) -> None:
        if self._shard is not None and not self._shard.takes(sample):
            self._finish_file()
        if self._shard is None:
            self._shard = _Shard({name: self._empty(getattr(sample, name)) for name in FIELDS})
        self._shard.append(sample)

    def _empty(self, value: Tensor) -> Tensor:
        return torch.empty(self.shard_size, *value.shape, dtype=self.dtype)

    def _close_file(self) -> None:
        assert self._shard is not None
        path = self.folder / shard_name(len(self._entries))
        self._shard.write(path)
        self._entries.append({"file": path.name, "samples": len(self._shard.keys)})
        self._discard_file()

    def _discard_file(self) -> None:
        self._shard = None

    def _write_listing(self) -> None:
        write_listing(self.folder, self._entries, self._provenance)


def shard_name(number: int) -> str:
    """Return the file name of shard ``number``, from 0."""
    return f"shard_{number:06d}.safetensors"


def write_listing(folder: Path, shards: list[dict[str, Any]], provenance: dict[str, Any]) -> None:
    """Write dataset.json, which lists the ``shards`` of ``folder``, each with file and samples."""
    listing = {"format": FORMAT, "shards": shards, "provenance": provenance}
    _write_text(folder / LISTING, json.dumps(listing, indent=1))


def write_shard(
    path: Path,
    tensors: Mapping[str, Tensor],
    timesteps: list[int | None],
    texts: dict[str, list[str]],
) -> None:
    """Write the samples in ``tensors``, by the names in FIELDS, to ``path``, and before it its JSON.

    Timesteps are stored if every sample has one. ``texts`` go into the JSON, such as the keys.
    """
    stored = dict(tensors)
    steps = [step for step in timesteps if step is not None]
    if len(steps) == len(timesteps):
        stored["timestep"] = torch.tensor(steps, dtype=torch.int32)
    sums = _checksums([sample_views(stored[field]) for field in FIELDS])
    _write_text(path.with_suffix(".json"), json.dumps({**texts, "crc32": sums}, ensure_ascii=False))
    save_aligned(path, stored)


def _checksums(fields: list[list[memoryview]]) -> list[int]:
    """Return each sample's CRC-32 over its ``fields`` in their order."""
    return [
        reduce(lambda crc, view: zlib.crc32(view, crc), sample, 0)
        for sample in zip(*fields, strict=True)
    ]


def _write_text(path: Path, text: str) -> None:
    with atomic_write(path) as partial:
        partial.write_text(text)


def save_aligned(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write ``tensors`` to ``path`` as safetensors, whole or not at all.

    The data begins on a 64-byte boundary, which the safetensors library does not guarantee: reading
    into a batch is 1.5 times as fast from there (docs/log.md).
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


def sample_views(tensor: Tensor) -> list[memoryview]:
    """Return the memory of ``tensor``, one view per entry along its first dim."""
    return [memoryview(entry) for entry in tensor.view(torch.uint8).flatten(1).numpy()]
