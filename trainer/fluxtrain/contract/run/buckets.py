"""BucketsConfig: the sizes that images of other aspect ratios than 1 are brought to; ``data.buckets``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from fluxtrain.contract.strict_model import Rule, StrictModel

PIXELS_PER_LATENT = 8
"""Side of the image that one latent stands for."""
PIXELS_PER_TOKEN = 2 * PIXELS_PER_LATENT
"""Side of the image that one token stands for."""

Size = tuple[int, int]
"""Width and height of an image in pixels."""
Side = Annotated[int, Field(ge=16, le=32_768, multiple_of=PIXELS_PER_TOKEN)]


class BucketsConfig(StrictModel):
    """Buckets: each image is brought to the one of several sizes, of about equally many pixels, that has the
    nearest aspect ratio."""

    rules: ClassVar = (
        Rule(
            "min_side",
            "must be a multiple of step",
            lambda it: it.min_side is None or it.min_side % it.step == 0,
            "self.min_side % self.step == 0",
            others=("step",),
        ),
        Rule(
            "max_side",
            "must be a multiple of step",
            lambda it: it.max_side is None or it.max_side % it.step == 0,
            "self.max_side % self.step == 0",
            others=("step",),
        ),
        Rule(
            "resolutions",
            "must be at least step",
            lambda it: all(side >= it.step for side in it.resolutions),
            "self.resolutions.all(side, side >= self.step)",
            others=("step",),
        ),
        Rule(
            "min_side",
            "must be at most the smallest of resolutions",
            lambda it: it.min_side is None or all(side >= it.min_side for side in it.resolutions),
            "self.resolutions.all(side, side >= self.min_side)",
            others=("resolutions",),
        ),
        Rule(
            "max_side",
            "must be at least the largest of resolutions",
            lambda it: it.max_side is None or all(side <= it.max_side for side in it.resolutions),
            "self.resolutions.all(side, side <= self.max_side)",
            others=("resolutions",),
        ),
    )

    resolutions: Annotated[list[Side], Field(max_length=8)] = []
    """Square roots of the number of pixels, such as 1024 for 1024 x 1024 pixels in any aspect ratio. With
    several, an image is a sample in each of them; empty: data.image_size."""
    step: Side = 64
    """Widths and heights are multiples of this."""
    min_side: Side | None = None
    """Shortest side of a bucket; null: half the resolution."""
    max_side: Side | None = None
    """Longest side of a bucket; null: twice the resolution."""
    upscale: bool = True
    """Enlarge images that are smaller than their bucket. If false, the bucket of a smaller image has its own
    size, rounded down to ``step``, and ``min_side`` does not apply."""

    def sides(self, resolution: int) -> Size:
        """Return the shortest and the longest side of buckets of ``resolution``: multiples of the step."""
        shortest = -(-resolution // 2 // self.step) * self.step
        longest = 2 * resolution // self.step * self.step
        if not self.upscale:
            return self.step, self.max_side or longest
        return self.min_side or shortest, self.max_side or longest

    def sizes(self, resolution: int) -> Sequence[Size]:
        """Return the largest sizes of at most ``resolution`` x ``resolution`` pixels, sorted.

        The square, and for each width the greatest height, both also with their sides exchanged. Buckets that
        do not enlarge images may be smaller each way.
        """
        shortest, longest = self.sides(resolution)
        square = resolution // self.step * self.step
        found = {(square, square)}
        for width in range(shortest, longest + 1, self.step):
            height = min(longest, resolution**2 // width // self.step * self.step)
            if height >= shortest:
                found |= {(width, height), (height, width)}
        return sorted(found)

    def has(self, size: Size, resolution: int) -> bool:
        """Return whether ``size`` is one of a bucket of ``resolution``."""
        width, height = size
        sizes = self.sizes(resolution)
        if self.upscale:
            return size in sizes
        whole = width % self.step == height % self.step == 0
        return whole and any(width <= w and height <= h for w, h in sizes)
