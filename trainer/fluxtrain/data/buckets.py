"""The bucket of an image: the size that it is brought to, and the rectangle that is kept of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fluxtrain.contract.run.buckets import PIXELS_PER_LATENT, BucketsConfig, Size
from fluxtrain.contract.run.data import DataConfig


@dataclass(frozen=True)
class Placement:
    """How an image is brought to the size of its bucket: it is resized, cropped, and may be mirrored."""

    size: Size
    """Width and height of the bucket, in pixels."""
    resized: Size
    """Width and height of the whole image before the crop; neither is below that of the bucket."""
    corner: tuple[int, int] | None = None
    """Left and top of the crop in the resized image; None: its middle is kept."""
    is_flipped: bool = False
    """Whether left and right are exchanged after the crop."""

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Return left, top, right and bottom of the crop in the resized image."""
        left, top = self.corner or (
            (whole - kept) // 2 for whole, kept in zip(self.resized, self.size, strict=True)
        )
        return left, top, left + self.size[0], top + self.size[1]

    @property
    def latent_size(self) -> Size:
        """Return height and width of the latents, which have eight pixels each way."""
        width, height = self.size
        return height // PIXELS_PER_LATENT, width // PIXELS_PER_LATENT


@dataclass(frozen=True)
class Buckets:
    """The buckets of one or several resolutions."""

    config: BucketsConfig
    resolutions: tuple[int, ...]
    """Square roots of the number of pixels."""

    @staticmethod
    def of(data: DataConfig) -> Buckets:
        """Return the buckets of ``data``, which has some."""
        assert data.buckets is not None
        return Buckets(data.buckets, data.resolutions)

    def placements(self, width: int, height: int) -> tuple[Placement, ...]:
        """Return how an image of ``width`` x ``height`` pixels is brought to each resolution.

        Equal ones are returned once. Raises ValueError if the image is too small for any.
        """
        found = [self._placement(width, height, resolution) for resolution in self.resolutions]
        return tuple(dict.fromkeys(found))

    def _placement(self, width: int, height: int, resolution: int) -> Placement:
        if self.config.upscale:
            return _cover(width, height, self._nearest(width, height, resolution))
        return self._shrunk(width, height, resolution)

    def _nearest(self, width: int, height: int, resolution: int) -> Size:
        """Return the bucket with the nearest aspect ratio, the image's own size if that is one."""
        sizes = self._sizes[resolution]
        if (width, height) in sizes:
            return width, height
        return min(sizes, key=lambda size: abs(size[0] / size[1] - width / height))

    @cached_property
    def _sizes(self) -> dict[int, Sequence[Size]]:
        return {resolution: self.config.sizes(resolution) for resolution in self.resolutions}

    def _shrunk(self, width: int, height: int, resolution: int) -> Placement:
        """Return a placement that does not enlarge: its bucket is the resized image, rounded down."""
        step, (_, longest) = self.config.step, self.config.sides(resolution)
        resized = width, height
        if width * height > resolution**2:
            resized = self._fitting(width / height, resolution)
        kept = [min(side // step * step, longest) for side in resized]
        if not all(kept):
            raise ValueError(
                f"{width} x {height} pixels: a side is shorter than {step} and images are not enlarged"
            )
        return Placement((kept[0], kept[1]), resized)

    def _fitting(self, aspect: float, resolution: int) -> Size:
        """Return a size of the aspect ratio, of about ``resolution`` squared pixels.

        Of the two whose width, or height, is rounded to steps, that whose bucket has the nearer aspect ratio.
        """
        width, height = resolution * math.sqrt(aspect), resolution / math.sqrt(aspect)
        wide, high = self._rounded(width), self._rounded(height)
        by_width = wide, _round(wide / aspect)
        by_height = _round(high * aspect), high
        return min(by_height, by_width, key=lambda size: self._error(size, aspect))

    def _error(self, size: Size, aspect: float) -> float:
        """Return how much the aspect ratio of the bucket of ``size`` differs from ``aspect``."""
        width, height = (self._rounded(side) for side in size)
        return abs(width / height - aspect) if height else math.inf

    def _rounded(self, side: float) -> int:
        return _round(side) // self.config.step * self.config.step


def _cover(width: int, height: int, size: Size) -> Placement:
    """Return the placement that fills ``size``: one side fits, the other is as long or longer."""
    scale = max(size[0] / width, size[1] / height)
    return Placement(
        size, (max(size[0], _round(width * scale)), max(size[1], _round(height * scale)))
    )


def _round(side: float) -> int:
    return int(side + 0.5)
