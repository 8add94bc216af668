"""Writes encoded data sets in the layout that data/encoded.py reads.

Axes: l text tokens, d text width, v pooled width, ch h w latent image.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fluxtrain.data.safetensors import DTYPES
from fluxtrain.data.shards import FIELDS, FORMAT, LISTING
from fluxtrain.files import replacing

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
            listing = {"format": FORMAT, "shards": self._shards, "provenance": self._provenance}
            _write_text(self.folder / LISTING, json.dumps(listing, indent=1))

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
            for field in FIELDS
        }
        steps = [sample.timestep for sample in samples]
        stored = [step for step in steps if step is not None]
        if len(stored) == len(steps):
            tensors["timestep"] = torch.tensor(stored, dtype=torch.int32)
        notes = {
            "keys": [sample.key for sample in samples],
            "captions": [sample.caption for sample in samples],
            "crc32": _checksums([row_bytes(tensors[field]) for field in FIELDS]),
        }
        _write_text(path.with_suffix(".json"), json.dumps(notes, ensure_ascii=False))
        save_aligned(path, tensors)
        self._shards.append({"file": path.name, "samples": len(samples)})


def _checksums(fields: list[list[memoryview]]) -> list[int]:
    """Return each record's CRC-32 over its ``fields`` in their order."""
    return [
        reduce(lambda crc, view: zlib.crc32(view, crc), row, 0) for row in zip(*fields, strict=True)
    ]


def _write_text(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text)


def write_empty_text(path: Path, txt: Float[Tensor, "l d"], vec: Float[Tensor, " v"]) -> None:
    """Write the empty prompt's encodings."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_aligned(path, {"txt": txt, "vec": vec})


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
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for tensor in tensors.values():
            content: Any = tensor.reshape(-1).view(torch.uint8).numpy()
            file.write(memoryview(content))


def row_bytes(rows: Tensor) -> list[memoryview]:
    """Return the memory of ``rows``, one view per sample."""
    return [memoryview(row) for row in rows.view(torch.uint8).flatten(1).numpy()]
