"""The shards of an encoded data set: their listing, spans and metadata, validated on opening."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fluxtrain.data.dataset import SampleShape, sample_shape
from fluxtrain.draws import NUM_TIMESTEPS, Array
from fluxtrain.errors import DataError
from fluxtrain.safetensors_file import Span, read_header, read_tensor

FIELDS = ("txt", "vec", "mean", "logvar")
FORMAT = 1
LISTING = "dataset.json"
_MAX_JSON_BYTES = 1 << 26
"""Of a listing, or of the texts of one shard; parsed, JSON takes at most some 30 times its size."""
_MAX_ATTRIBUTION = 400


@dataclass(frozen=True)
class Shard:
    """One file of samples and the spans of its tensors."""

    path: Path
    num_samples: int
    spans: dict[str, Span]

    def key(self, record: int) -> str:
        """Return the name of ``record``, "" if none is stored."""
        return self._text("keys", record)

    def caption(self, record: int) -> str:
        """Return the prompt of ``record``, "" if none is stored."""
        return self._text("captions", record)

    def checksums(self) -> Array:
        """Return the CRC-32 of every record, -1 if none is stored."""
        stored = _metadata(self.path).get("crc32")
        sums = stored if isinstance(stored, list) else []
        sums = [crc if type(crc) is int and 0 <= crc < 1 << 32 else -1 for crc in sums]
        sums += [-1] * (self.num_samples - len(sums))
        return np.array(sums[: self.num_samples], dtype=np.int64)

    def timesteps(self) -> Array | None:
        """Return the evaluation timesteps (0 ... 7), None if none are stored; DataError if one is invalid."""
        if "timestep" not in self.spans:
            return None
        steps = read_tensor(self.path, self.spans["timestep"]).numpy().astype(np.int64)
        if ((steps < 0) | (steps >= NUM_TIMESTEPS)).any():
            raise DataError(f"{self.path}: a timestep is not one of 0 to {NUM_TIMESTEPS - 1}")
        return steps

    def _text(self, name: str, record: int) -> str:
        texts = _metadata(self.path).get(name)
        return str(texts[record]) if isinstance(texts, list) and record < len(texts) else ""


def read_listing(folder: Path) -> dict[str, Any]:
    """Return the listing of ``folder``; DataError if it is not an encoded data set."""
    path = folder / LISTING
    try:
        listing = _read_json(path)
        if listing.get("format") != FORMAT:
            raise ValueError(f"format {listing.get('format')!r}, this version reads {FORMAT}")
        if not isinstance(listing.get("shards"), list) or not listing["shards"]:
            raise ValueError("it lists no shards")
        return listing
    except FileNotFoundError:
        raise DataError(
            f"{path.parent}: no encoded data set is here ({path.name} is missing)"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not the listing of an encoded data set ({error})") from None


def open_shards(folder: Path, listing: dict[str, Any]) -> list[Shard]:
    """Return the shards that ``listing`` names; DataError, naming the file, if one is unusable."""
    path = folder / LISTING
    shards = [_open(path, entry) for entry in listing["shards"]]
    if not any(shard.num_samples for shard in shards):
        raise DataError(f"{path}: its shards hold no samples")
    return shards


def attribution(listing: dict[str, Any]) -> str:
    """Return the attribution of the images and texts in ``listing``, "" if there is none."""
    provenance = listing.get("provenance")
    text = provenance.get("attribution") if isinstance(provenance, dict) else None
    return text[:_MAX_ATTRIBUTION] if isinstance(text, str) and text.isprintable() else ""


def shapes_of(shards: list[Shard]) -> list[SampleShape]:
    """Return the shape of the samples of each shard; only height and width of latents may differ.

    Raises DataError, naming the shard, if anything else does.
    """
    shapes = [_shape(shard) for shard in shards]
    for shard, shape in zip(shards, shapes, strict=True):
        if shape.at((0, 0)) != shapes[0].at((0, 0)):
            raise DataError(
                f"{shard.path}: its samples differ in shape from {shards[0].path.name}'s"
            )
    return shapes


def _shape(shard: Shard) -> SampleShape:
    stored = [(shard.spans[field].shape[1:], shard.spans[field].dtype) for field in FIELDS]
    shape = sample_shape(*zip(*stored, strict=True))
    if shape is None:
        raise DataError(f"{shard.path}: its shapes are not those of encoded samples")
    if not shape.dtype.is_floating_point:
        raise DataError(f"{shard.path}: its samples are of type {shape.dtype}")
    return shape


def _open(listing: Path, entry: object) -> Shard:
    if not isinstance(entry, dict) or not isinstance(entry.get("file"), str):
        raise DataError(f"{listing}: a shard's entry names no file")
    name, count = entry["file"], entry.get("samples")
    if Path(name).name != name or name in ("", ".."):
        raise DataError(f"{listing}: shard {name!r} is outside the folder")
    path = listing.parent / name
    spans = read_header(path)
    for field in FIELDS:
        if field not in spans or type(count) is not int or spans[field].shape[:1] != (count,):
            raise DataError(f"{path}: tensor {field!r} does not hold {count} samples")
        if 0 in spans[field].shape[1:]:  # any number of them would need no bytes
            raise DataError(f"{path}: the samples of tensor {field!r} are empty")
    steps = spans.get("timestep")
    if steps is not None and (steps.shape, steps.dtype) != ((count,), torch.int32):
        raise DataError(f"{path}: tensor 'timestep' does not hold {count} integers")
    return Shard(path, int(entry["samples"]), spans)


@lru_cache(maxsize=8)
def _metadata(shard: Path) -> dict[str, Any]:
    try:
        return _read_json(shard.with_suffix(".json"))
    except (OSError, ValueError, RecursionError):
        return {}  # samples are usable without names


def _read_json(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        text = file.read(_MAX_JSON_BYTES + 1)
    if len(text) > _MAX_JSON_BYTES:
        raise ValueError(f"more than {_MAX_JSON_BYTES} bytes")
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return content
