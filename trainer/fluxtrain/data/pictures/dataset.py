"""The encoded pictures of a cache as a data set: each picture is a part, its repeats are the records.

A picture may have several latents, crops or mirror images, and several captions: its variants, each of which
is one of the latents with one of the captions. An index beyond the length n of the set, i + k n, is variant k
of sample i.

Axes: l text tokens, d text width, v pooled width, ch h w latent image.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fluxtrain.data.dataset import SampleShape, sample_shape
from fluxtrain.data.file_dataset import FileDataset
from fluxtrain.data.open_files import OpenFiles, read_into
from fluxtrain.data.pictures.cache import CRC
from fluxtrain.draws import Array
from fluxtrain.errors import DataError
from fluxtrain.safetensors_file import Span, read_header, read_tensor

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

    @property
    def num_variants(self) -> int:
        """Return the number of latents times that of captions."""
        return len(self.latents) * len(self.captions)


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
        self._num_variants = np.array([entry.num_variants for entry in entries])
        self._spans: dict[Path, dict[str, Span]] = {}
        self._token_ids: Array | None = None  # of each caption, and last of the empty prompt

    def use_token_ids(self, ids: Mapping[str, Array]) -> None:
        """Let `token_ids` have ``ids``, those of CLIP by caption."""
        texts = (text for entry in self.entries for text in entry.captions)
        self._token_ids = np.stack([*(ids[text] for text in texts), ids[""]])

    def token_ids(
        self, indices: Array, is_replaced: Bool[np.ndarray, " n"]
    ) -> Int[Tensor, "n i"] | None:
        """Return CLIP's token ids of the captions of samples ``indices``; None if they are not needed.

        Those that are replaced, and those past ``indices``, are of the empty prompt.
        """
        if self._token_ids is None:
            return None
        rows = np.full(len(is_replaced), len(self._token_ids) - 1)
        for row, index in enumerate(indices.tolist()):
            if not is_replaced[row]:
                part, record = self._place(index)
                rows[row] = self._first_texts[part] + self._variant(part, record)[1]
        return torch.from_numpy(self._token_ids[rows])

    def with_variants(self, indices: Array, drawn: Array) -> Array:
        """Return the indices of the variants of samples ``indices`` that ``drawn``, in [0, 1), chooses."""
        variants = (drawn * self._num_variants[self._parts(indices)]).astype(np.int64)
        chosen: Array = indices + variants * len(self)
        return chosen

    @cached_property
    def has_masks(self) -> bool:
        """Return whether the loss of some samples, or of parts of them, has another weight than 1."""
        return any(entry.masks or entry.weight != 1 for entry in self.entries)

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
        """Return height and width of the latents of every sample, "n 2"."""
        sizes = np.array([entry.latent_size for entry in self.entries])
        return np.repeat(sizes, np.diff(self.starts), axis=0)

    @property
    def files(self) -> list[Path]:
        """Return the files of latents and texts, each once."""
        latents = (p for entry in self.entries for p in (*entry.latents, *entry.masks))
        texts = (path for entry in self.entries for path in entry.texts)
        return list(dict.fromkeys([*latents, *texts]))

    def caption(self, index: int) -> str:
        """Return the prompt of sample ``index``."""
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
        """Return the numbers of the latents and of the caption of ``record``."""
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
