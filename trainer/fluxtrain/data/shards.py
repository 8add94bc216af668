"""The shards of an encoded data set: listing, spans and metadata, validated on opening; their writers.

Axes: n samples, l text tokens, d text width, v pooled width, ch h w latent image.
"""

from __future__ import annotations

import json
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fluxtrain.data.dataset import SampleShape, sample_shape
from fluxtrain.errors import DataError
from fluxtrain.runtime.draws import NUM_TIMESTEPS, Array
from fluxtrain.runtime.files import atomic_write
from fluxtrain.runtime.safetensors import DTYPES, Span, read_header, read_tensor

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
    for each_field in FIELDS:
        if (
            each_field not in spans
            or type(count) is not int
            or spans[each_field].shape[:1] != (count,)
        ):
            raise DataError(f"{path}: tensor {each_field!r} does not hold {count} samples")
        if 0 in spans[each_field].shape[1:]:  # any number of them would need no bytes
            raise DataError(f"{path}: the samples of tensor {each_field!r} are empty")
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


@dataclass
class Sample:
    """One encoded sample."""

    key: str
    caption: str
    txt: Float[Tensor, "l d"]
    vec: Float[Tensor, " v"]
    mean: Float[Tensor, "ch h w"]
    logvar: Float[Tensor, "ch h w"]
    timestep: int | None = None


class SampleWriter(ABC):
    """Writes samples to files of ``shard_size``; each file appears whole or not at all."""

    def __init__(self, folder: Path, shard_size: int) -> None:
        """Create ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.shard_size = folder, shard_size
        self._in_file = 0  # samples added to the current file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish the last file and write the listing; discard the last file if an exception was raised."""
        if kind is not None:
            self._discard_file()
            return
        self._finish_file()
        self._write_listing()

    def add(self, sample: Sample) -> None:
        self._append(sample)
        self._in_file += 1
        if self._in_file == self.shard_size:
            self._finish_file()

    def add_all(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            self.add(sample)

    def _finish_file(self) -> None:
        if self._in_file:
            self._close_file()
        self._in_file = 0

    @abstractmethod
    def _append(self, sample: Sample) -> None:
        """Append ``sample`` to the current file."""

    @abstractmethod
    def _close_file(self) -> None:
        """Write what is pending and give the current file its name."""

    @abstractmethod
    def _discard_file(self) -> None:
        """Release the current file."""

    @abstractmethod
    def _write_listing(self) -> None:
        """Write the files that list the others."""


class StreamWriter(SampleWriter):
    """Writes batches of samples to an open file, which is renamed when it is closed."""

    batch_size: ClassVar[int] = 1

    def __init__(self, folder: Path, shard_size: int) -> None:
        super().__init__(folder, shard_size)
        self.names, self._pending = list[str](), list[Sample]()
        self._file: Any = None

    def _append(self, sample: Sample) -> None:
        self._pending.append(sample)
        if len(self._pending) == self.batch_size:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        if self._file is None:
            self.names.append(self._file_name(len(self.names)))
            self._file = self._open(self._partial)
        self._write(self._file, self._pending)
        self._pending = []

    @property
    def _partial(self) -> Path:
        return self.folder / f"{self.names[-1]}.partial"

    def _close_file(self) -> None:
        self._flush()
        self._discard_file()
        self._partial.replace(self.folder / self.names[-1])

    def _discard_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    @abstractmethod
    def _file_name(self, number: int) -> str:
        """Return the name of file ``number``, from 0."""

    @abstractmethod
    def _open(self, path: Path) -> Any:
        """Return a new file at ``path`` that has a method ``close``."""

    @abstractmethod
    def _write(self, file: Any, samples: list[Sample]) -> None:
        """Append ``samples`` to ``file``."""


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
        for name, tensor in self.tensors.items():
            value = getattr(sample, name)
            assert tensor.shape[1:] == value.shape, name
            tensor[len(self.keys)] = value
        self.keys.append(sample.key)
        self.captions.append(sample.caption)
        self.timesteps.append(sample.timestep)

    def write(self, path: Path) -> None:
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
    sums = [
        reduce(lambda crc, view: zlib.crc32(view, crc), sample, 0)
        for sample in zip(*[sample_views(stored[field]) for field in FIELDS], strict=True)
    ]
    _write_text(path.with_suffix(".json"), json.dumps({**texts, "crc32": sums}, ensure_ascii=False))
    save_aligned(path, stored)


def _write_text(path: Path, text: str) -> None:
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


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
