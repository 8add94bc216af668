"""Masks of the loss: a picture beside each picture, or its own transparency; brought to the grid of latents.

Axes: H W mask, h w latents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate

from fluxtrain.contract.run.data import ALPHA
from fluxtrain.data.buckets import Placement
from fluxtrain.data.pictures.folder import Listing, PictureFile, list_pictures
from fluxtrain.data.pictures.picture import PictureError, decode, decode_alpha, fit, picture_size

_SAME_ASPECT = 0.02
"""Part by which the aspect ratio of a mask may differ from that of its picture, by rounding."""


def mask_files(folder: Path, root: Path | None = None) -> dict[str, PictureFile]:
    """Return the masks in ``folder`` by their names without suffix; links are as in `list_pictures`.

    Raises DataError if there is no such folder.
    """
    hint = "; it should have a mask for each picture"
    found = list_pictures(folder, hint, root).pictures
    return {_stem(mask.name): mask for mask in reversed(found)}


def with_masks(listing: Listing, by_stem: Mapping[str, PictureFile] | None, place: str) -> Listing:
    """Return ``listing`` with the masks ``by_stem`` of ``place``; pictures without one are skipped.

    They have the pictures' names with any suffix. None: there are no masks.
    """
    if by_stem is None:
        return listing
    masks = {picture.name: by_stem.get(_stem(picture.name)) for picture in listing.pictures}
    missing = [name for name, mask in masks.items() if mask is None]
    skipped = listing.skipped | dict.fromkeys(missing, f"has no mask in {place}")
    kept = [picture for picture in listing.pictures if masks[picture.name] is not None]
    known = {name: mask for name, mask in masks.items() if mask is not None}
    return replace(listing, pictures=kept, skipped=dict(sorted(skipped.items())), masks=known)


def mask_of(
    content: bytes, kind: str, size: tuple[int, int], placement: Placement
) -> Float[Tensor, "h w"]:
    """Return the weights, 0 to 1, of the latents at ``placement`` of a picture of ``size``, width and height.

    ``content`` is the mask, whose red weighs; or, of ``kind`` alpha, the picture, whose opacity does. Raises
    PictureError if it is no picture or has another aspect ratio.
    """
    try:
        width, height = picture_size(content)
    except PictureError as error:
        raise PictureError(f"its mask: {error}") from None
    if abs(width * size[1] / (height * size[0]) - 1) > _SAME_ASPECT:
        text = f"its mask has {width} x {height} pixels, another aspect ratio than {size[0]} x {size[1]}"
        raise PictureError(text)
    mask = decode_alpha(content) if kind == ALPHA else decode(content)
    pixels = fit(mask.convert("RGB"), placement)[:1].float() / 255
    height, width = placement.latent_size
    weights: Tensor = interpolate(pixels[None], size=(height, width), mode="area")[0, 0]
    if not torch.any(weights > 0):
        raise PictureError("its mask is black: nothing of it would be trained")
    return weights


def _stem(name: str) -> str:
    return str(PurePosixPath(name).with_suffix(""))
