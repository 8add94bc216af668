"""How a picture is brought to the sizes at which it is trained."""

from __future__ import annotations

from dataclasses import replace

from fluxtrain.contract.run.data import DataConfig
from fluxtrain.data.buckets import Buckets, Placement
from fluxtrain.data.pictures.picture import PictureError


def placements(
    width: int, height: int, config: DataConfig, resolution: int | None = None
) -> tuple[Placement, ...]:
    """Return how a picture of ``width`` x ``height`` pixels is resized and cropped: to a bucket or a square.

    With a ``resolution`` only to that one of the buckets. Raises PictureError if it is too small for any.
    """
    if config.buckets is not None:
        try:
            found = Buckets.of(config)
            if resolution is not None:
                found = replace(found, resolutions=(resolution,))
            return found.placements(width, height)
        except ValueError as error:
            raise PictureError(str(error)) from None
    side = config.image_size
    scale = max(side / width, side / height)
    resized = max(side, round(width * scale)), max(side, round(height * scale))
    return (Placement((side, side), resized),)
