"""What data sets answer: samples by index, their sizes, and batches; encoded sets are read into tensors.

Axes: n samples, b batch, l text tokens, d text width, v pooled width, ch h w latent image, H W image, i
token ids of CLIP.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from fluxtrain.contract.run.data import Size
from fluxtrain.data.order import PADDING
from fluxtrain.runtime.draws import NUM_TIMESTEPS, Array, Draw


@dataclass(frozen=True)
class SampleShape:
    """The shapes and the dtype of one sample."""

    txt: tuple[int, int]  # tokens, width
    vec: int
    latent: tuple[int, int, int]  # ch h w
    dtype: torch.dtype = torch.float32

    def at(self, latent_size: Size) -> SampleShape:
        """Return the shapes of a sample whose latents have this height and width."""
        return replace(self, latent=(self.latent[0], *latent_size))


@dataclass(frozen=True)
class Encodings:
    """The encodings of the samples of one batch, in the dtype they are stored in."""

    txt: Float[Tensor, "n l d"]
    vec: Float[Tensor, "n v"]
    mean: Float[Tensor, "n ch h w"]
    logvar: Float[Tensor, "n ch h w"]

    @staticmethod
    def empty(count: int, shape: SampleShape) -> Encodings:
        """Return uninitialised tensors for ``count`` samples."""
        return Encodings(
            torch.empty(count, *shape.txt, dtype=shape.dtype),
            torch.empty(count, shape.vec, dtype=shape.dtype),
            torch.empty(count, *shape.latent, dtype=shape.dtype),
            torch.empty(count, *shape.latent, dtype=shape.dtype),
        )

    def first(self, count: int) -> Encodings:
        """Return a view of the first ``count`` samples."""
        return Encodings(self.txt[:count], self.vec[:count], self.mean[:count], self.logvar[:count])

    def finite(self, skip_text: Array) -> list[bool]:
        """Return whether each sample's latents and pooled text are finite; ``txt`` is not checked.

        ``vec`` is not checked either for samples with ``skip_text``.
        """
        # A sum is finite only if all its terms are, short of overflow, which no encoding reaches.
        latents = self.mean.flatten(1).sum(1, dtype=torch.float32)
        latents += self.logvar.flatten(1).sum(1, dtype=torch.float32)
        vec = self.vec.sum(1, dtype=torch.float32)
        text = torch.isfinite(vec) | torch.from_numpy(skip_text)
        ok: list[bool] = (torch.isfinite(latents) & text).tolist()
        return ok


def same_sizes(shape: SampleShape, count: int) -> Array:
    """Return the height and width of ``shape`` for each of ``count`` samples, "n 2"; it takes no memory."""
    return np.broadcast_to(np.array(shape.latent[1:]), (count, 2))


def sample_shape(
    shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]
) -> SampleShape | None:
    """Return the shape of samples whose four encodings have ``shapes`` and ``dtypes``, None if none can."""
    txt, vec, latent, logvar = shapes
    if (len(txt), len(vec), len(latent)) != (2, 1, 3) or latent != logvar or len(set(dtypes)) != 1:
        return None
    return SampleShape((txt[0], txt[1]), vec[0], (latent[0], latent[1], latent[2]), dtypes[0])


_HOST_FIELDS = ("dropped", "indices")
"""Tensors that only the host reads."""


@dataclass(frozen=True, kw_only=True)
class DrawnBatch:
    """The indices, weights and random draws of a batch's samples."""

    latent_noise: Float[Tensor, "b ch h w"]
    noise: Float[Tensor, "b ch h w"]
    timesteps: Float[Tensor, b]
    weights: Float[Tensor, b]  # 1; 0 for an unreadable sample and for padding
    keys: Int[Tensor, b]  # below 2**32: what adapters drop
    dropped: Bool[Tensor, b]
    indices: Int[Tensor, b]  # into the data set; -1 for padding
    faults: tuple[str, ...] = ()  # one message per unreadable sample, with its name

    def __len__(self) -> int:
        """Return the number of samples, padding included."""
        return len(self.weights)

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that are tensors, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def pin_memory(self) -> Self:
        """Return this batch in page-locked memory; torch's DataLoader calls it."""
        pinned: dict[str, Any] = {name: t.pin_memory() for name, t in self.tensors().items()}
        return replace(self, **pinned)

    def device_tensors(self) -> dict[str, Tensor]:
        """Return the fields that are on the device after `to`, by name: what the model and the loss need."""
        return {name: t for name, t in self.tensors().items() if name not in _HOST_FIELDS}

    def to(self, device: torch.device) -> Self:
        """Return this batch on ``device``, copied asynchronously if it is pinned; `_HOST_FIELDS` stay."""
        moved: dict[str, Any] = {
            name: t.to(device, non_blocking=True) for name, t in self.device_tensors().items()
        }
        return replace(self, **moved)


def drawn_fields(indices: Array, drawn: Sequence[Draw]) -> dict[str, Any]:
    """Return the fields of a batch that are given by its samples' indices and draws."""
    return {
        "latent_noise": torch.from_numpy(np.stack([draw.latent_noise for draw in drawn])),
        "noise": torch.from_numpy(np.stack([draw.noise for draw in drawn])),
        "timesteps": torch.tensor([draw.timestep for draw in drawn], dtype=torch.float32),
        "keys": torch.tensor([draw.key for draw in drawn], dtype=torch.int64),
        "dropped": torch.tensor([draw.dropped for draw in drawn]),
        "indices": torch.from_numpy(indices),
    }


@dataclass(frozen=True, kw_only=True)
class Batch(DrawnBatch):
    """Encoded samples in the order of their positions; a dropped prompt has the empty prompt's encodings."""

    mean: Float[Tensor, "b ch h w"]
    logvar: Float[Tensor, "b ch h w"]
    txt: Float[Tensor, "b l d"]
    vec: Float[Tensor, "b v"] | Int[Tensor, "b i"]  # token ids if adapters of CLIP are trained
    mask: Float[Tensor, "b h w"] | None = None  # weights of latents in the loss; None: all are 1


@dataclass(frozen=True, kw_only=True)
class ImageBatch(DrawnBatch):
    """Images and captions in the order of their positions; a dropped prompt is ""."""

    images: UInt8[Tensor, "b 3 H W"]
    captions: tuple[str, ...]


AnyBatch = Batch | ImageBatch
EmptyText = tuple[Float[Tensor, "l d"], Float[Tensor, " v"]]
Encode = Callable[[UInt8[Tensor, "b 3 H W"], list[str]], Encodings]
"""Returns the encodings of images and their captions."""


class Source(ABC):
    """A data set: samples by index; may be used in several processes after it was opened in one."""

    attribution: str = ""
    """The attribution that the images' licence requires; empty if it requires none."""
    advice: str = ""
    """What is printed when a run trains from it, empty for nothing."""

    @property
    @abstractmethod
    def latent_sizes(self) -> Array:
        """Return height and width of the latents of every sample, "n 2"."""

    @property
    def files(self) -> Sequence[Path]:
        return ()

    @property
    def starts(self) -> Array | None:
        """Return the number of samples before each part, and of all; None without files."""
        return None

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def batch(
        self, indices: Array, drawn: Sequence[Draw], empty: EmptyText | None = None
    ) -> AnyBatch:
        """Return the batch of the samples at ``indices``, padding last, with their draws.

        Dropped and unreadable prompts have the encodings ``empty``; None: of an evaluation, or of images.
        """

    @abstractmethod
    def encodings(self, indices: Array, encode: Encode | None) -> list[Encodings]:
        """Return the encodings of the samples at ``indices``, in order; ``encode`` those of images."""

    def timesteps(self, indices: Array) -> Array:
        """Return the stored evaluation timesteps (0 ... 7), index modulo 8 where none are stored."""
        timesteps: Array = indices % NUM_TIMESTEPS
        return timesteps

    def read_timesteps(self) -> None:
        """Read the timesteps of all samples at once, if they are in files of many samples."""
        return

    def caption(self, index: int) -> str:
        """Return the prompt of sample ``index``, "" if it is not stored."""
        return ""

    @property
    def captions(self) -> Iterator[str]:
        """Yield the captions whose token ids `Dataset.token_ids` may have; none if a set has no others."""
        yield from ()

    def use_token_ids(self, ids: Mapping[str, Array]) -> None:
        """Let a set that yields `captions` give ``ids``, those of CLIP by caption, in place of vectors."""
        return


class Dataset(Source):
    """Encoded samples, of one or several sizes."""

    shape: SampleShape
    """The shape of the samples; of a set of several sizes, with one of them."""

    @abstractmethod
    def read(self, indices: Array, out: Encodings, skip_text: Array) -> list[str | None]:
        """Fill ``out`` with the samples at ``indices`` and return a fault message, or None, per sample.

        Their latents are of one size, that of ``out``. The text encodings of samples with ``skip_text`` are
        not written: their prompts are dropped.
        """

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the file and the key of sample ``index``, for messages."""

    def empty_text(self) -> EmptyText | None:
        """Return the empty prompt's encodings, None if they are in a file of their own."""
        return None

    def with_variants(self, indices: Array, drawn: Array) -> Array:
        """Return the indices of the variants of samples ``indices`` that ``drawn``, in [0, 1), chooses."""
        return indices

    def masks(
        self, indices: Array, count: int, latent_size: Size, faults: list[str | None]
    ) -> Float[Tensor, "b h w"] | None:
        """Return the weights of the latents of ``count`` samples in the loss; None: all are 1.

        Samples past ``indices`` are padding. An entry of ``faults`` is set for each that cannot be read.
        """
        return None

    def token_ids(
        self, indices: Array, is_replaced: Bool[np.ndarray, " n"]
    ) -> Int[Tensor, "n i"] | None:
        """Return CLIP's token ids of the captions of samples ``indices``; None if they are not needed.

        Those that are replaced, and those past ``indices``, are of the empty prompt.
        """
        return None

    def batch(self, indices: Array, drawn: Sequence[Draw], empty: EmptyText | None = None) -> Batch:
        dropped = np.array([draw.dropped for draw in drawn])
        real = int((indices != PADDING).sum())
        latent = drawn[0].noise.shape
        encodings = Encodings.empty(len(indices), self.shape.at((latent[1], latent[2])))
        variants = np.array([draw.variant for draw in drawn[:real]])
        read = self.with_variants(indices[:real], variants)
        faults = self.read(read, encodings.first(real), dropped[:real]) if real else []
        mask = self.masks(read, len(indices), (latent[1], latent[2]), faults)
        if empty is None:
            faults = self._check_text(indices[:real], encodings.first(real), faults)
        bad = np.ones(len(indices), dtype=bool)  # padding is not read
        bad[:real] = [fault is not None for fault in faults]
        if empty is not None and (replaced := dropped | bad).any():
            encodings.txt[replaced], encodings.vec[replaced] = empty[0], empty[1]
        ids = self.token_ids(read, dropped | bad)
        if bad.any():
            _zero(encodings, torch.from_numpy(bad), text=empty is None)
        return Batch(
            mean=encodings.mean.float(),
            logvar=encodings.logvar.float(),
            txt=encodings.txt,
            vec=encodings.vec if ids is None else ids,
            mask=mask,
            weights=torch.from_numpy((~bad).astype(np.float32)),
            faults=tuple(fault for fault in faults if fault),
            **drawn_fields(indices, drawn),
        )

    def _check_text(
        self, indices: Array, encodings: Encodings, faults: list[str | None]
    ) -> list[str | None]:
        """Return ``faults`` and those of samples whose ``txt`` is not finite.

        Training leaves this to the checksums; in an evaluation a NaN would look like a diverged model.
        """
        finite = torch.isfinite(encodings.txt.flatten(1).sum(1, dtype=torch.float32)).tolist()
        return [
            fault or (None if ok else f"{self.name(int(index))}: not finite")
            for fault, ok, index in zip(faults, finite, indices, strict=True)
        ]

    def encodings(self, indices: Array, encode: Encode | None) -> list[Encodings]:
        """Return the encodings of the samples at ``indices``, read one by one."""
        rows = [
            Encodings.empty(1, shape_at(self, indices[at : at + 1])) for at in range(len(indices))
        ]
        for at, row in enumerate(rows):
            self.read(indices[at : at + 1], row, np.zeros(1, dtype=bool))
        return rows


def shape_at(dataset: Dataset, indices: Array) -> SampleShape:
    """Return the shape of the samples at ``indices``, whose latents are of one size."""
    if not len(indices):
        return dataset.shape
    height, width = dataset.latent_sizes[indices[0]].tolist()
    return dataset.shape.at((height, width))


def _zero(encodings: Encodings, bad: Tensor, text: bool) -> None:
    """Zero the samples that could not be read: NaN times weight 0 is NaN."""
    names = ("txt", "vec", "mean", "logvar") if text else ("mean", "logvar")
    for name in names:
        getattr(encodings, name)[bad] = 0
