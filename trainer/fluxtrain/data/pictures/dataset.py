"""The encodings of pictures: their cache, the data set on it, and the samples that a run keeps.

    folder/
      pictures/ID.json          what became of a picture: its latents, or why it cannot be used
      latents/ID.safetensors    mean, logvar [ch h w]
      masks/ID.safetensors      mask [h w], the weights of latents in the loss
      texts/ID.safetensors      txt [l d], vec [v]
      listings/ID.json          what a shard that was streamed holds

An ID is a hash of all that the content depends on, so a file that exists is right and whole; there is no
other state. A picture is known by name, size and modification time; if one of them changed, it is read
again, but encoded again only if its bytes changed. Files that nothing refers to any more are left:
several runs may share the folder, which may be deleted between runs.

Each picture is a part of the data set, its repeats are the records. It may have several latents, crops
or mirror images, and several captions: its variants, each of which is one of the latents with one of the
captions. An index beyond the length n of the set, i + k n, is variant k of sample i.

Which samples a global batch has depends on their number, so a run that goes on reads the list in its
output, not the folder: a picture that is added, or repaired, while it is stopped would change all
batches that follow.

Axes: l text tokens, d text width, v pooled width, ch h w latent image.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fluxtrain.contract.run.data import Size
from fluxtrain.data.dataset import SampleShape, sample_shape
from fluxtrain.data.order import Placement
from fluxtrain.data.pictures.picture import DECODER
from fluxtrain.data.pictures.subset import TrainingPicture
from fluxtrain.data.shard_dataset import FileDataset
from fluxtrain.data.shards import sample_views, save_aligned
from fluxtrain.errors import DataError
from fluxtrain.runtime.draws import Array
from fluxtrain.runtime.files import (
    OpenFiles,
    atomic_write,
    atomic_write_by_several,
    read_into,
    sync,
    write_to_disk,
)
from fluxtrain.runtime.safetensors import Span, read_header, read_tensor

_TEXT, _LATENTS = ("txt", "vec"), ("mean", "logvar")


@dataclass(frozen=True)
class Entry:
    """One picture at one size, with its captions."""

    name: str
    captions: tuple[str, ...]
    repeats: int
    latents: tuple[Path, ...]
    texts: tuple[Path, ...]
    """Of the captions."""
    latent_size: tuple[int, int]
    """Height and width."""
    masks: tuple[Path, ...] = ()
    """One for each of ``latents``; none if all of the picture counts."""
    weight: float = 1.0
    """Of the loss."""


class PictureDataset(FileDataset):
    """The samples of ``entries``; sample numbers go through the pictures, each as often as it repeats."""

    def __init__(self, folder: Path, entries: list[Entry], verify: bool = False) -> None:
        """Open the first picture's files; with ``verify`` the CRC-32 of all that is read is compared.

        Raises DataError if there are no entries, or the files are damaged.
        """
        super().__init__(folder, (entry.repeats for entry in entries), verify)
        self.entries = entries
        self.shape = _shape(entries[0])
        self._latents = OpenFiles([path for entry in entries for path in entry.latents])
        self._texts = OpenFiles([path for entry in entries for path in entry.texts])
        self._first_latents = np.cumsum([0, *(len(entry.latents) for entry in entries)])
        self._first_texts = np.cumsum([0, *(len(entry.texts) for entry in entries)])
        self._num_variants = np.array(
            [len(entry.latents) * len(entry.captions) for entry in entries]
        )
        self._spans: dict[Path, dict[str, Span]] = {}
        self._token_ids: Array | None = None  # of each caption, and last of the empty prompt

    @property
    def captions(self) -> Iterator[str]:
        return (text for entry in self.entries for text in entry.captions)

    def use_token_ids(self, ids: Mapping[str, Array]) -> None:
        """Let `token_ids` have ``ids``, those of CLIP by caption."""
        self._token_ids = np.stack([*(ids[text] for text in self.captions), ids[""]])

    def token_ids(
        self, indices: Array, is_replaced: Bool[np.ndarray, " n"]
    ) -> Int[Tensor, "n i"] | None:
        if self._token_ids is None:
            return None
        rows = np.full(len(is_replaced), len(self._token_ids) - 1)
        for row, index in enumerate(indices.tolist()):
            if not is_replaced[row]:
                part, record = self._place(index)
                rows[row] = self._first_texts[part] + self._variant(part, record)[1]
        return torch.from_numpy(self._token_ids[rows])

    def with_variants(self, indices: Array, drawn: Array) -> Array:
        variants = (drawn * self._num_variants[self._parts(indices)]).astype(np.int64)
        chosen: Array = indices + variants * len(self)
        return chosen

    @cached_property
    def has_masks(self) -> bool:
        """Return whether the loss of some samples, or of parts of them, has another weight than 1."""
        return any(entry.masks or entry.weight != 1 for entry in self.entries)

    def masks(
        self, indices: Array, count: int, latent_size: Size, faults: list[str | None]
    ) -> Float[Tensor, "b h w"] | None:
        if not self.has_masks:
            return None
        masks = torch.ones(count, *latent_size)
        for row, index in enumerate(indices.tolist()):
            try:
                masks[row] = self.loss_mask(index)
            except DataError as error:
                faults[row] = faults[row] or str(error)
        return masks

    def loss_mask(self, index: int) -> Float[Tensor, "h w"]:
        """Return the weights of the latents of variant ``index`` in the loss; DataError if not readable."""
        part, record = self._place(index)
        entry = self.entries[part]
        if not entry.masks:
            return torch.full(entry.latent_size, entry.weight)
        path = entry.masks[self._variant(part, record)[0]]
        mask = read_tensor(path, _span(path, "mask"))
        if mask.shape != entry.latent_size or not torch.isfinite(mask).all():
            raise DataError(f"{path}: no mask of {entry.latent_size[0]} x {entry.latent_size[1]}")
        return mask * entry.weight

    @cached_property
    def latent_sizes(self) -> Array:
        sizes = np.array([entry.latent_size for entry in self.entries])
        return np.repeat(sizes, np.diff(self.starts), axis=0)

    @property
    def files(self) -> list[Path]:
        """Return the files of latents and texts, each once."""
        latents = (p for entry in self.entries for p in (*entry.latents, *entry.masks))
        texts = (path for entry in self.entries for path in entry.texts)
        return list(dict.fromkeys([*latents, *texts]))

    def caption(self, index: int) -> str:
        part, record = self._place(index)
        return self.entries[part].captions[self._variant(part, record)[1]]

    def key(self, index: int) -> str:
        """Return the name of the picture of sample ``index``."""
        return self.entries[self._place(index)[0]].name

    def _read_timesteps(self, part: int) -> None:
        return None

    def _location(self, part: int, record: int) -> str:
        return str(self.entries[part].latents[self._variant(part, record)[0]])

    def _places(self, indices: Array) -> Iterator[tuple[int, int]]:
        """Yield the part and the record of each of ``indices``; a record counts on in its variants."""
        variants, samples = np.divmod(indices, len(self))
        repeats = np.diff(self.starts)
        for (part, record), variant in zip(super()._places(samples), variants, strict=True):
            yield part, record + int(variant * repeats[part])

    def _variant(self, part: int, record: int) -> tuple[int, int]:
        entry = self.entries[part]
        return divmod(record // entry.repeats, len(entry.captions))

    def _read_one(
        self, part: int, record: int, sample: tuple[memoryview, ...], skip_text: bool
    ) -> str | None:
        entry, (txt, vec, mean, logvar) = self.entries[part], sample
        latents, text = self._variant(part, record)
        number, path = self._first_latents[part] + latents, entry.latents[latents]
        fault = self._read_file(self._latents, int(number), path, _LATENTS, [mean, logvar])
        if fault is None and not skip_text:
            number, path = self._first_texts[part] + text, entry.texts[text]
            fault = self._read_file(self._texts, int(number), path, _TEXT, [txt, vec])
        return fault

    def _read_file(
        self,
        files: OpenFiles,
        number: int,
        path: Path,
        names: tuple[str, ...],
        views: list[memoryview],
    ) -> str | None:
        try:
            if path not in self._spans:
                self._spans[path] = read_header(path)
            spans, file, crc = self._spans[path], files.get(number), 0
            for name, view in zip(names, views, strict=True):
                if name not in spans or spans[name].num_bytes != len(view):
                    return "of another shape"
                if not read_into(file, [view], spans[name].offset):
                    return "cut off"
                if self._verify:
                    crc = zlib.crc32(view, crc)
            return self._compare(crc, path, spans) if self._verify else None
        except DataError as error:
            return str(error)
        except OSError as error:
            return error.strerror or "not readable"

    def _compare(self, crc: int, path: Path, spans: dict[str, Span]) -> str | None:
        if CRC not in spans:
            return "no CRC-32 is stored"
        stored = int(read_tensor(path, spans[CRC])[0]) % (1 << 32)
        return None if stored == crc else "CRC-32 differs"


def _span(path: Path, name: str) -> Span:
    spans = read_header(path)
    if name not in spans:
        raise DataError(f"{path}: lacks {name}")
    return spans[name]


def _shape(entry: Entry) -> SampleShape:
    spans = {**read_header(entry.latents[0]), **read_header(entry.texts[0])}
    if missing := {*_TEXT, *_LATENTS} - set(spans):
        raise DataError(f"{entry.latents[0]}: lacks {', '.join(sorted(missing))}")
    ordered = [spans[name] for name in (*_TEXT, *_LATENTS)]
    shape = sample_shape([span.shape for span in ordered], [span.dtype for span in ordered])
    if shape is None:
        raise DataError(f"{entry.latents[0]}: its shapes are not those of encoded samples")
    return shape


FORMAT = 1
CRC = "crc32"
FOLDERS = ("pictures", "latents", "masks", "texts", "listings")
_ID_DIGITS = 32


@dataclass(frozen=True)
class Latents:
    """The latents of a picture at one size in pixels, cropped and mirrored in one way."""

    id: str
    width: int
    height: int
    sample: int = 0
    """Number of the size: latents of the same one are variants of one sample."""
    mask: str = ""
    """ID of its mask, "" if it has none."""


@dataclass(frozen=True)
class Record:
    """What became of a picture: its size and its latents, or a fault."""

    name: str
    sha256: str = ""
    width: int = 0
    height: int = 0
    latents: tuple[Latents, ...] = ()
    fault: str = ""
    mask_sha256: str = ""
    """Of the file of which its mask is made."""


@dataclass(frozen=True)
class PictureCache:
    """A cache folder; ``images`` and ``texts`` say what encodes, and are part of the IDs.

    ``sizes`` says what else the latents of a picture depend on: those of its record.
    """

    folder: Path
    images: str
    texts: str
    sizes: str = ""

    def record_path(self, picture: TrainingPicture) -> Path:
        """Return the file of what became of ``picture``."""
        file = picture.file
        known = [str(picture.path), file.size, file.modified]
        own = [self.sizes, picture.resolution, picture.variants.flip, picture.variants.crops]
        if picture.mask_path is not None:
            mask = picture.mask or file
            own += [str(picture.mask_path), mask.size, mask.modified]
        if picture.control is not None:
            control = picture.control
            own += ["control", str(picture.control_path), control.size, control.modified]
        return self.folder / "pictures" / f"{_digest(self.images, *known, *own)}.json"

    def latents_id(self, sha256: str, placement: Placement) -> str:
        """Return the ID of the latents, at ``placement``, of the picture whose bytes have ``sha256``."""
        changed = [placement.corner, placement.is_flipped]
        known = changed if any(changed) else []
        return _digest(self.images, sha256, placement.size, placement.resized, *known)

    def mask_id(self, kind: str, sha256: str, placement: Placement) -> str:
        """Return the ID of the mask that is made of the bytes with ``sha256``, at ``placement``."""
        changed = [placement.corner, placement.is_flipped]
        return _digest("mask", DECODER, kind, sha256, placement.size, placement.resized, *changed)

    def mask_path(self, mask_id: str) -> Path:
        return self.folder / "masks" / f"{mask_id}.safetensors"

    def latents_path(self, latents_id: str) -> Path:
        return self.folder / "latents" / f"{latents_id}.safetensors"

    def text_path(self, caption: str) -> Path:
        """Return the file of the encodings of ``caption``."""
        return self.folder / "texts" / f"{_digest(self.texts, caption)}.safetensors"

    def listing_path(self, key: str) -> Path:
        """Return the file of what the shard that is known by ``key`` holds."""
        return self.folder / "listings" / f"{_digest('listing', key)}.json"

    def make_folders(self) -> None:
        for name in FOLDERS:
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def existing(self) -> set[str]:
        """Return the paths of all files."""
        folders = [path for name in FOLDERS if (path := self.folder / name).is_dir()]
        return {f"{folder}/{name}" for folder in folders for name in os.listdir(folder)}

    def files_of(self, latents: Iterable[str], masks: Iterable[str]) -> set[str]:
        """Return the paths of latents and masks with these IDs."""
        paths = {*map(self.latents_path, latents), *map(self.mask_path, masks)}
        return set(map(str, paths))

    def read_record(self, picture: TrainingPicture) -> Record | None:
        """Return what became of ``picture``, None if it was not looked at or the record is damaged."""
        try:
            values = json.loads(self.record_path(picture).read_text(encoding="utf-8"))
            latents = tuple(Latents(**each) for each in values.pop("latents"))
            return Record(**values, latents=latents)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def write_record(self, picture: TrainingPicture, record: Record) -> None:
        """Write what became of ``picture``, after its latents."""
        values = {**vars(record), "latents": [vars(each) for each in record.latents]}
        with atomic_write_by_several(self.record_path(picture)) as partial:
            write_to_disk(partial, json.dumps(values, indent=1, ensure_ascii=False))


def write_encodings(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write ``tensors`` with their CRC-32 to ``path``, whole or not at all."""
    stored = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    crc = np.array([checksum(stored)], dtype=np.uint32).view(np.int32)
    with atomic_write_by_several(path) as partial:
        save_aligned(partial, {**stored, CRC: torch.from_numpy(crc)})
        sync(partial)


def checksum(tensors: dict[str, Tensor]) -> int:
    """Return the CRC-32 of ``tensors`` in their order."""
    crc = 0
    for tensor in tensors.values():
        (view,) = sample_views(tensor.unsqueeze(0))
        crc = zlib.crc32(view, crc)
    return crc


def _digest(*parts: Any) -> str:
    text = json.dumps([FORMAT, *parts])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_ID_DIGITS]


FILE = "training_set.json"
"""Its name in the run's output."""
_FORMAT = 1


@dataclass(frozen=True)
class TrainingSample:
    """One picture at one size, as it is trained."""

    name: str
    captions: tuple[str, ...]
    repeats: int
    latents: tuple[str, ...]
    """IDs in the cache."""
    width: int
    height: int
    caption: str
    """That of the picture, of which ``captions`` are variants."""
    masks: tuple[str, ...] = ()
    """IDs in the cache, one for each of ``latents``; none if all of the picture counts."""
    weight: float = 1.0
    """Of its loss."""


@dataclass(frozen=True)
class TrainingSet:
    """The samples of a run in their order, and the pictures that could not be used."""

    samples: tuple[TrainingSample, ...]
    skipped: tuple[str, ...]
    validation: tuple[TrainingSample, ...] = ()
    """Those that are held out for the evaluation."""

    @property
    def every(self) -> tuple[TrainingSample, ...]:
        """Return the samples of the training and of the evaluation."""
        return (*self.samples, *self.validation)

    def write(self, output: Path) -> None:
        """Write the file in the run's ``output``."""
        values = {"format": _FORMAT, **asdict(self)}
        with atomic_write(output / FILE) as partial:
            partial.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")

    def changes(self, pictures: Sequence[TrainingPicture]) -> str:
        """Return how ``pictures`` differ from those that the run began with, "" if they do not."""
        names = {picture.label for picture in pictures}
        own = {sample.name: (sample.caption, sample.repeats) for sample in self.every}
        known = [picture for picture in pictures if picture.label in own]
        captions = sum(own[picture.label][0] != picture.caption for picture in known)
        counts = {
            "added": len(names - own.keys() - set(self.skipped)),
            "removed": len(own.keys() - names),
            "with another caption": captions,
            "with other repeats": sum(own[each.label][1] != each.repeats for each in known),
        }
        return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)


def read_training_set(output: Path) -> TrainingSet | None:
    """Return the set that is stored in the run's ``output``, None if there is none.

    Raises DataError if it is malformed.
    """
    path = output / FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.pop("format") != _FORMAT:
            raise DataError(f"{path}: is of another version")
        samples = tuple(_sample(**each) for each in values["samples"])
        validation = tuple(_sample(**each) for each in values.get("validation", ()))
        return TrainingSet(samples, tuple(values["skipped"]), validation)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        text = f"{path}: cannot be read ({error}); without it the order of the samples is unknown"
        raise DataError(text) from None


def _sample(**values: Any) -> TrainingSample:
    lists: dict[str, Any] = {
        name: tuple(values.pop(name)) for name in ("captions", "latents", "masks")
    }
    return TrainingSample(**lists, **values)
