"""Encodes pictures into a cache on one rank: latents, masks, and the record of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.order import Placement
from fluxtrain.data.pictures.dataset import Latents, PictureCache, Record, write_encodings
from fluxtrain.data.pictures.picture import control_of, decode, drawn_hole, fit, mask_of
from fluxtrain.data.pictures.subset import (
    FAULTS,
    ReadPicture,
    TrainingPicture,
    read_picture,
    reason_of,
)
from fluxtrain.encode.codec import Codec, condition_of, load_encoder, scaled
from fluxtrain.errors import ConfigError, StorageError
from fluxtrain.parallel.distributed import World
from fluxtrain.picture_cache.work import required_latents

Pixels = UInt8[Tensor, "3 H W"]
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class _Decoded:
    """A picture that is read: at each size its pixels, those of its control, and its mask; or a fault."""

    picture: TrainingPicture
    record: Record
    crops: tuple[tuple[Latents, Pixels, Pixels | None], ...] = ()
    masks: tuple[tuple[str, Float[Tensor, "h w"]], ...] = ()
    """By ID."""


@dataclass
class PictureEncoder:
    """The autoencoder of a run, which is loaded for the first picture that needs it."""

    config: RunConfig
    paths: RunPaths
    world: World
    cache: PictureCache
    _codec: Codec | None = None

    def encode(
        self,
        pictures: Sequence[TrainingPicture],
        check: Callable[[], object],
        report: Callable[[Record], object] = lambda record: None,
        folder: Path | None = None,
    ) -> None:
        """Encode ``pictures``, which threads read ahead; call ``check`` before each, ``report`` after it.

        Their files are in ``folder`` now, if it is not that by which they are known.
        """
        threads = max(1, self.config.data.num_workers)
        for decoded in _ahead(partial(self._read, folder=folder), pictures, threads):
            check()
            for latents, pixels, control in decoded.crops:
                self._encode(latents, pixels, control)
            for mask_id, mask in decoded.masks:
                write_encodings(self.cache.mask_path(mask_id), {"mask": mask})
            self.cache.write_record(decoded.picture, decoded.record)
            report(decoded.record)

    def free(self) -> None:
        self._codec = None
        free_memory(self.world)

    @torch.no_grad()
    def _encode(self, latents: Latents, pixels: Pixels, control: Pixels | None) -> None:
        dtype = encoders_dtype(self.config)
        if self._codec is None:
            place = self.paths.models, self.world.device
            self._codec = load_encoder(self.config.encoders, *place)
        image = scaled(pixels, self.world.device, dtype)
        mean, logvar = self._codec.encode(image)
        require_equal("in_channels", self.config.model.out_channels, mean.shape[1] * 4)
        if control is not None:
            given = scaled(control, self.world.device, dtype)
            condition = condition_of(self._codec, image, given, self.config.model.condition)
            mean = torch.cat([mean, condition], dim=1)
            logvar = torch.cat([logvar, torch.zeros_like(condition)], dim=1)
        path = self.cache.latents_path(latents.id)
        write_encodings(path, {"mean": mean[0], "logvar": logvar[0]})

    def _read(self, picture: TrainingPicture, folder: Path | None) -> _Decoded:
        name, cache = picture.label, self.cache
        file = picture if folder is None else replace(picture, folder=folder)
        try:
            read = read_picture(file, self.config.data, self.config.drawn_seed)
            wanted = required_latents(self.config, cache, picture, read)
            latents = [each for each, _ in wanted]
            missing = [pair for pair in wanted if not cache.latents_path(pair[0].id).exists()]
            crops = tuple(
                (
                    each,
                    fit(decode(read.content, at_least=placement.resized), placement),
                    self._control(picture, read, placement),
                )
                for each, placement in missing
            )
            masks = tuple(
                (each.mask, mask_of(read.mask, picture.mask_kind, read.size, placement))
                for each, placement in wanted
                if read.mask is not None and not cache.mask_path(each.mask).exists()
            )
        except FAULTS as error:
            if folder is not None and isinstance(error, OSError):  # it was fetched
                raise StorageError(f"{file.path}: {reason_of(error)}") from None
            return _Decoded(picture, Record(name, fault=reason_of(error)))
        record = Record(name, read.sha256, *read.size, tuple(latents), mask_sha256=read.mask_sha256)
        return _Decoded(picture, record, crops, masks)

    def _control(
        self, picture: TrainingPicture, read: ReadPicture, placement: Placement
    ) -> Pixels | None:
        """Return the control of ``picture`` at ``placement``; None if the model has no condition."""
        if picture.takes is None:
            return None
        if read.control is not None:
            return control_of(read.control, read.size, placement, picture.takes)
        return drawn_hole(self.config.drawn_seed, read.sha256, placement)


def encoders_dtype(config: RunConfig) -> torch.dtype:
    """Return the type in which the encoders of ``config`` compute."""
    dtype: torch.dtype = getattr(torch, config.encoders.precision)
    return dtype


def require_equal(field: str, expected: int, actual: int) -> None:
    """Raise ConfigError if the model expects other encodings than the encoders give."""
    if expected != actual:
        raise ConfigError(f"spec.run.model.{field}", expected, f"the encoders give {actual}")


def free_memory(world: World) -> None:
    """Give the memory of what was freed back to the device."""
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def _ahead(
    function: Callable[[Item], Result], items: Sequence[Item], threads: int
) -> Iterator[Result]:
    """Yield the results for ``items`` in order, computed by ``threads``, at most two each ahead."""
    remaining = iter(items)
    with ThreadPoolExecutor(threads, thread_name_prefix="picture") as pool:
        pending = list[Future[Result]]()
        try:
            pending += [pool.submit(function, item) for item in islice(remaining, 2 * threads)]
            while pending:
                result = pending.pop(0).result()
                pending += [pool.submit(function, item) for item in islice(remaining, 1)]
                yield result
        finally:
            for future in pending:
                future.cancel()
