"""How a picture is brought to the sizes at which it is trained."""

from __future__ import annotations

from fluxtrain.contract.run.data import DataConfig
from fluxtrain.data.buckets import Buckets, Placement
from fluxtrain.data.pictures.picture import PictureError


def placements(width: int, height: int, config: DataConfig) -> tuple[Placement, ...]:
    """Return how a picture of ``width`` x ``height`` pixels is resized and cropped: to a bucket or a square.

    Raises PictureError if it is too small for any bucket.
    """
    if config.buckets is not None:
        try:
            return Buckets.of(config).placements(width, height)
        except ValueError as error:
            raise PictureError(str(error)) from None
    side = config.image_size
    scale = max(side / width, side / height)
    resized = max(side, round(width * scale)), max(side, round(height * scale))
    return (Placement((side, side), resized),)
