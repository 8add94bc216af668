"""The shards of an encoded data set, checked as they are opened: sizes, shapes, names and notes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fluxtrain.data.dataset import SampleShape
from fluxtrain.draws import Array
from fluxtrain.errors import DataError
from fluxtrain.safetensors_file import Span, read_header, read_tensor

FIELDS = ("txt", "vec", "mean", "logvar")
FORMAT = 1
LISTING = "dataset.json"
NUM_TIMESTEPS = 8
_MAX_JSON_BYTES = 1 << 28
_MAX_ATTRIBUTION = 400


@dataclass(frozen=True)
class Shard:
    """One file of samples and where its tensors lie."""

    path: Path
    num_samples: int
    spans: dict[str, Span]

    def key(self, record: int) -> str:
        """Return the name of ``record``, empty where the notes have none."""
        return self._note("keys", record)

    def caption(self, record: int) -> str:
        """Return the prompt of ``record``, empty where the notes have none."""
        return self._note("captions", record)

    def checksums(self) -> Array:
        """Return the CRC-32 of every record, -1 where none is stored."""
        stored = _notes(self.path).get("crc32")
        sums = stored if isinstance(stored, list) else []
        known = [crc if type(crc) is int and 0 <= crc < 1 << 32 else -1 for crc in sums]
        known += [-1] * (self.num_samples - len(known))
        return np.array(known[: self.num_samples], dtype=np.int64)

    def timesteps(self) -> Array | None:
        """Return the stored evaluation timesteps (0 ... 7), or None; DataError where one is none."""
        if "timestep" not in self.spans:
            return None
        steps = read_tensor(self.path, self.spans["timestep"]).numpy().astype(np.int64)
        if ((steps < 0) | (steps >= NUM_TIMESTEPS)).any():
            raise DataError(f"{self.path}: a timestep is not one of 0 to {NUM_TIMESTEPS - 1}")
        return steps

    def _note(self, kind: str, record: int) -> str:
        notes = _notes(self.path).get(kind)
        return str(notes[record]) if isinstance(notes, list) and record < len(notes) else ""


def read_listing(folder: Path) -> dict[str, Any]:
    """Return what ``folder`` lists; DataError where it is no encoded data set."""
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


def open_shards(folder: Path, listed: dict[str, Any]) -> list[Shard]:
    """Return the ``listed`` shards of ``folder``; DataError, naming the file, where one is unusable."""
    listing = folder / LISTING
    shards = [_open(listing, entry) for entry in listed["shards"]]
    if not any(shard.num_samples for shard in shards):
        raise DataError(f"{listing}: its shards hold no samples")
    return shards


def attribution(listed: dict[str, Any]) -> str:
    """Return whom the data set's pictures and texts are by, as its listing says; empty where unsaid."""
    provenance = listed.get("provenance")
    said = provenance.get("attribution") if isinstance(provenance, dict) else None
    return said[:_MAX_ATTRIBUTION] if isinstance(said, str) and said.isprintable() else ""


def common_shape(shards: list[Shard]) -> SampleShape:
    """Return the shape of every sample; DataError, naming the shard, where one differs."""
    first = _shapes(shards[0])
    for shard in shards:
        if _shapes(shard) != first:
            raise DataError(
                f"{shard.path}: its samples differ in shape from {shards[0].path.name}'s"
            )
    (txt, dtype), (vec, _), (latent, _), (logvar, _) = first
    ranks = (len(txt), len(vec), len(latent))
    if ranks != (2, 1, 3) or latent != logvar or {kind for _, kind in first} != {dtype}:
        raise DataError(f"{shards[0].path}: its shapes are not those of encoded samples")
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise DataError(f"{shards[0].path}: its samples are of type {dtype}")
    return SampleShape((txt[0], txt[1]), vec[0], (latent[0], latent[1], latent[2]), dtype)


def _shapes(shard: Shard) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(shard.spans[field].shape[1:], shard.spans[field].dtype) for field in FIELDS]


def _open(listing: Path, entry: object) -> Shard:
    if not isinstance(entry, dict) or not isinstance(entry.get("file"), str):
        raise DataError(f"{listing}: a shard's entry names no file")
    name, count = entry["file"], entry.get("samples")
    if Path(name).name != name or name in ("", ".."):
        raise DataError(f"{listing}: shard {name!r} lies outside the folder")
    path = listing.parent / name
    spans = read_header(path)
    for field in FIELDS:
        if field not in spans or type(count) is not int or spans[field].shape[:1] != (count,):
            raise DataError(f"{path}: tensor {field!r} does not hold {count} samples")
    steps = spans.get("timestep")
    if steps is not None and (steps.shape, steps.dtype) != ((count,), torch.int32):
        raise DataError(f"{path}: tensor 'timestep' does not hold {count} whole numbers")
    return Shard(path, int(entry["samples"]), spans)


@lru_cache(maxsize=8)
def _notes(shard: Path) -> dict[str, Any]:
    try:
        return _read_json(shard.with_suffix(".json"))
    except (OSError, ValueError, RecursionError):
        return {}  # names are for people; a sample is still usable without one


def _read_json(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        text = file.read(_MAX_JSON_BYTES + 1)
    if len(text) > _MAX_JSON_BYTES:
        raise ValueError(f"more than {_MAX_JSON_BYTES} bytes")
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError("not a table")
    return content
