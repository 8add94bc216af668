"""Decodes pictures as people have them into 8-bit sRGB; fits them to a size; their masks and variants.

A mask of the loss is a picture of the same name, or the picture's own transparency. Crops, mirror images
and shuffled tags are pure functions of the seed and of the bytes, or the caption, that they are made
from: the same on any ranks, after any restart, and whatever the file is called.

Axes: H W image or mask, h w latents.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path, PurePosixPath
from threading import Lock

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageChops, ImageCms, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.nn.functional import interpolate

from fluxtrain.contract.run.data import ALPHA, DataConfig, VariantsConfig
from fluxtrain.contract.run.model import Condition
from fluxtrain.data.images import in_bands, on_white, reason_of, resize_crop
from fluxtrain.data.order import Buckets, Placement
from fluxtrain.data.pictures.folder import Listing, PictureFile, list_pictures, similar
from fluxtrain.runtime import draws

DECODER = 1
"""Version of this module's output; it is part of the names in a cache."""
MAX_BYTES = 1 << 29
MAX_PIXELS = 1 << 27
"""Largest picture that is decoded: 134 megapixels, 400 MB of RGB; a WebP may have half, see SECURITY.md."""
MAX_ENLARGEMENT = 8
"""A picture that would be enlarged by more than this factor is no training data."""
_LARGE_PIXELS = 1 << 25
_LARGE_ONES = Lock()
"""Held while a large picture is decoded: of those that threads decode at once, one may be large."""
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "AVIF")
_ORIENTATION, _QUARTER_TURNS = 0x0112, (5, 6, 7, 8)
_SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I", "F")


class PictureError(ValueError):
    """A picture cannot be used; the message says why."""


def read_bytes(path: Path) -> bytes:
    """Return the contents of ``path``; PictureError if it is too large, OSError if it cannot be read."""
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise PictureError(f"has more than {MAX_BYTES:,} bytes")
    return content


def picture_size(content: bytes) -> tuple[int, int]:
    """Return width and height of the picture in ``content`` as it is seen.

    Raises PictureError if it is no picture, or has too many pixels.
    """
    with _opened(content) as image, _alone_if_large(image):  # Pillow decodes a PNG for its EXIF
        width, height = image.size  # of a TIFF as it is seen
        turned = image.format != "TIFF" and image.getexif().get(_ORIENTATION) in _QUARTER_TURNS
        return (height, width) if turned else (width, height)


def decode(content: bytes, at_least: tuple[int, int] | None = None) -> Image.Image:
    """Return the picture in ``content`` in RGB, turned by its EXIF orientation, its transparent parts white.

    Of an animation the first frame. Colour profiles are converted to sRGB. A JPEG may be decoded at a half,
    a quarter or an eighth of its size, but no smaller than ``at_least``, width and height.

    Raises PictureError, with the reason, if it is corrupt, cut off or too large.
    """
    with _opened(content) as image:
        if at_least is not None and image.format in ("JPEG", "MPO"):
            turned = image.getexif().get(_ORIENTATION) in _QUARTER_TURNS
            image.draft(None, at_least[::-1] if turned else at_least)
        with _alone_if_large(image):
            _turn(image)
            return _rgb_in_bands(image)


def decode_alpha(content: bytes) -> Image.Image:
    """Return the opacity of the picture in ``content``, white where it is opaque, turned as `decode` does.

    Raises PictureError, with the reason, if it is corrupt, cut off or too large.
    """
    with _opened(content) as image, _alone_if_large(image):
        _turn(image)
        if not image.has_transparency_data:
            return Image.new("L", image.size, 255)
        return image.convert("RGBA").getchannel("A")


def _turn(image: Image.Image) -> None:
    """Decode ``image`` and turn it by its EXIF orientation; its other EXIF may be malformed."""
    image.load()
    image.getexif()  # is kept; Pillow would fail to write what is malformed
    for name in ("exif", "Raw profile type exif"):
        image.info.pop(name, None)
    ImageOps.exif_transpose(image, in_place=True)


def _decode_mask(content: bytes) -> Image.Image:
    """Return the mask in ``content`` as `decode` does, but its transparent parts black."""
    mask = decode(content)
    with _opened(content) as image:
        if not image.has_transparency_data:
            return mask
    return ImageChops.multiply(mask, decode_alpha(content).convert("RGB"))


def _alone_if_large(image: Image.Image) -> AbstractContextManager[object]:
    """Return what is held while ``image`` is decoded."""
    return _LARGE_ONES if image.width * image.height > _LARGE_PIXELS else nullcontext()


def fit(image: Image.Image, placement: Placement) -> UInt8[Tensor, "3 H W"]:
    """Return ``image``, resized, cropped and mirrored by ``placement``."""
    part = resize_crop(image, placement.resized, placement.box, Image.Resampling.LANCZOS)
    pixels = np.array(part)
    if placement.is_flipped:
        pixels = np.ascontiguousarray(pixels[:, ::-1])
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def require_enough_pixels(width: int, height: int, placement: Placement) -> None:
    """Raise PictureError if a picture of ``width`` x ``height`` would be enlarged too much."""
    factor = max(placement.resized[0] / width, placement.resized[1] / height)
    if factor > MAX_ENLARGEMENT:
        raise PictureError(
            f"{width} x {height} pixels would be enlarged {factor:.0f} times; "
            f"at most {MAX_ENLARGEMENT} times is allowed"
        )


@contextmanager
def _opened(content: bytes) -> Iterator[Image.Image]:
    """Yield the picture, of which nothing is decoded yet; any error of a decoder becomes a PictureError."""
    if not content:
        raise PictureError("the file is empty")
    try:
        with warnings.catch_warnings():  # of large pictures, which have a limit here, and odd EXIF
            warnings.filterwarnings("ignore", module=r"PIL\.")
            with Image.open(io.BytesIO(content), formats=_readable()) as image:
                width, height = image.size
                most = MAX_PIXELS // 2 if image.format == "WEBP" else MAX_PIXELS
                if width * height > most:
                    text = f"{width} x {height} pixels; at most {most:,} pixels are decoded"
                    raise PictureError(text)
                yield image
    except PictureError:
        raise
    except Image.DecompressionBombError:
        raise PictureError(f"at most {MAX_PIXELS:,} pixels are decoded, and it has more") from None
    except UnidentifiedImageError:
        raise PictureError("no picture in a format that is read (PNG, JPEG, WebP ...)") from None
    except Exception as error:  # decoders may raise anything on malformed bytes, warnings too
        raise PictureError(f"corrupt or cut off ({reason_of(error)})") from None


@cache
def _readable() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _rgb_in_bands(image: Image.Image) -> Image.Image:
    """Return ``image`` in RGB; converted in bands, so that what is between takes little memory."""
    is_unit = image.mode == "F" and float(image.getextrema()[1]) <= 1  # type: ignore[arg-type]
    if image.mode == "RGB" and not image.info:
        return _rgb(image, is_unit)
    return in_bands(image, partial(_rgb, is_unit=is_unit))


def _rgb(image: Image.Image, is_unit: bool) -> Image.Image:
    """Return ``image`` in RGB; floats are from 0 to 1 if ``is_unit``."""
    if image.mode in _SIXTEEN_BITS:
        # Pillow would clip 16-bit or float greys
        values = np.asarray(image).astype(np.float64)
        if is_unit:
            values = values * 65535
        return Image.fromarray(np.clip(values / 256, 0, 255).astype(np.uint8)).convert("RGB")
    mode = {"CMYK": "CMYK", "L": "L", "LA": "L"}.get(image.mode, "RGB")  # that of its profile
    seen = on_white(image) if image.has_transparency_data else image
    converted = seen if seen.mode == mode else seen.convert(mode)
    return _srgb(converted, _profile(image)).convert("RGB")


def _profile(image: Image.Image) -> bytes | None:
    profile = image.info.get("icc_profile")
    return profile if isinstance(profile, bytes) and profile else None


def _srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Return ``image`` converted from the colours of ``profile``; unchanged if that is none of its mode."""
    if profile is None:
        return image
    with suppress(ImageCms.PyCMSError, OSError, ValueError):
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        target = ImageCms.createProfile("sRGB")
        converted = ImageCms.profileToProfile(image, source, target, outputMode="RGB")
        return converted if converted is not None else image
    return image


_BLACK, _MOST_GREY = 32, 0.5
"""How far from black and white a grey is, and the largest part of a mask that may be grey: a blurred edge."""
_LEAST_KEPT = 0.25
"""Part of a control of another aspect ratio that its picture must leave of it."""
_SAME_ASPECT = 0.02
"""Part by which the aspect ratio of a mask may differ from that of its picture, by rounding."""


def mask_files(
    folder: Path,
    root: Path | None = None,
    hint: str = "; it should have a mask for each picture",
) -> list[PictureFile]:
    """Return the masks in ``folder``; links are as in `list_pictures`.

    Raises DataError, which ends with ``hint``, if there is no such folder.
    """
    codec = "latin-1"  # decodes anything: their captions are not used
    return list_pictures(folder, hint, root, encoding=codec).pictures


def partners(names: Iterable[str], files: Sequence[PictureFile]) -> dict[str, PictureFile]:
    """Return by the ``names`` of pictures the one of ``files`` that belongs to each.

    It has the same name but for the suffix, and, if there is none, but for case or Unicode form.
    """
    by_stem = {stem(file.name): file for file in reversed(files)}
    stems = {name: stem(name) for name in names}
    nearly = similar(by_stem, {*stems.values()} - by_stem.keys())
    found = {name: by_stem.get(nearly.get(own, own)) for name, own in stems.items()}
    return {name: file for name, file in found.items() if file is not None}


def with_masks(listing: Listing, files: Sequence[PictureFile] | None, place: str) -> Listing:
    """Return ``listing`` with the masks ``files`` of ``place``; pictures without one are skipped.

    None: there are no masks.
    """
    if files is None:
        return listing
    masks = partners((picture.name for picture in listing.pictures), files)
    missing = [picture.name for picture in listing.pictures if picture.name not in masks]
    skipped = listing.skipped | dict.fromkeys(missing, f"has no mask in {place}")
    kept = [picture for picture in listing.pictures if picture.name in masks]
    return replace(listing, pictures=kept, skipped=dict(sorted(skipped.items())), masks=masks)


def control_of(
    content: bytes,
    size: tuple[int, int],
    placement: Placement,
    trained: Condition | None,
    is_mask: bool = False,
) -> UInt8[Tensor, "3 H W"]:
    """Return the control in ``content`` of a picture of ``size``, width and height, at ``placement``.

    ``trained`` is the condition of a training; without one it is a prompt's, which may be a mask. One of
    another aspect ratio is cut to the middle; in a training only if it adds tokens, and a quarter at least
    is kept. Raises PictureError if it is none.
    """
    is_mask |= trained is not None and trained.has_hole
    try:
        image = _decode_mask(content) if is_mask else decode(content)
    except PictureError as error:
        raise PictureError(f"its control: {error}") from None
    if abs(image.width * size[1] / (image.height * size[0]) - 1) > _SAME_ASPECT:
        if trained and not trained.adds_tokens:
            text = f"its control has {image.width} x {image.height} pixels, another aspect ratio"
            raise PictureError(f"{text} than {size[0]} x {size[1]}")
        scale = max(want / own for want, own in zip(placement.size, image.size, strict=True))
        resized = [
            max(want, round(scale * own))
            for want, own in zip(placement.size, image.size, strict=True)
        ]
        placement = replace(placement, resized=(resized[0], resized[1]), corner=None)
        kept = placement.size[0] * placement.size[1] / (resized[0] * resized[1])
        if trained and kept < _LEAST_KEPT:
            text = f"its control has {image.width} x {image.height} pixels"
            raise PictureError(f"{text}, of which {100 * kept:.0f} % would be kept")
    if trained and not is_mask:
        try:
            require_enough_pixels(*image.size, placement)
        except PictureError as error:
            raise PictureError(f"its control: {error}") from None
    pixels = fit(image, placement)
    if is_mask:
        _require_hole(pixels[0])
    return pixels


def _require_hole(mask: UInt8[Tensor, "H W"]) -> None:
    """Raise PictureError if ``mask`` fills nothing, or is a picture instead."""
    if not torch.any(mask > 127):
        text = f"its control's brightest pixel has {int(mask.max())}: nothing of it would be filled"
        raise PictureError(f"{text}; 255 is filled")
    grey = ((mask > _BLACK) & (mask < 255 - _BLACK)).float().mean().item()
    if grey > _MOST_GREY:
        text = f"its control is no mask: {100 * grey:.0f} % of it is neither black nor white"
        raise PictureError(f"{text}; white is filled, and what is transparent is black")


def drawn_hole(seed: int, sha256: str, placement: Placement) -> UInt8[Tensor, "3 H W"]:
    """Return a mask for the picture whose bytes have ``sha256``: a white rectangle on black.

    Its sides are a quarter of the picture's to all of them.
    """
    width, height = placement.size
    where = f"{sha256} {placement}".encode()
    number = int.from_bytes(hashlib.sha256(where).digest()[:7], "big")
    rng = draws.generator(seed, draws.HOLES, number)
    sides = [round(side * rng.uniform(0.25, 1)) for side in (width, height)]
    left, top = (
        rng.integers(0, whole - own + 1) for whole, own in zip((width, height), sides, strict=True)
    )
    mask = torch.zeros(3, height, width, dtype=torch.uint8)
    mask[:, top : top + sides[1], left : left + sides[0]] = 255
    return mask


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
    mask = decode_alpha(content) if kind == ALPHA else _decode_mask(content)
    pixels = fit(mask.convert("RGB"), placement)[:1].float() / 255
    height, width = placement.latent_size
    weights: Tensor = interpolate(pixels[None], size=(height, width), mode="area")[0, 0]
    if not torch.any(weights > 0):
        raise PictureError("its mask is black: nothing of it would be trained")
    if pixels.max() <= 1 / 255:
        raise PictureError("its mask's brightest pixel has 1: a place that counts fully has 255")
    return weights


def stem(name: str) -> str:
    """Return the name of a picture without its suffix."""
    return str(PurePosixPath(name).with_suffix(""))


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


def variant_placements(
    placement: Placement, variants: VariantsConfig, seed: int, sha256: str
) -> tuple[Placement, ...]:
    """Return the ways in which the picture whose bytes have ``sha256`` is cropped and mirrored, each once."""
    found = [placement]
    if variants.crops > 1:
        rng = draws.generator(seed, draws.CROPS, int(sha256[:15], 16))
        places = rng.random((variants.crops, 2))
        slack = [r - s for r, s in zip(placement.resized, placement.size, strict=True)]
        corners = [
            tuple(int(p * (room + 1)) for p, room in zip(at, slack, strict=True)) for at in places
        ]
        found = [replace(placement, corner=(left, top)) for left, top in dict.fromkeys(corners)]
    if variants.flip:
        found += [replace(each, is_flipped=True) for each in found]
    return tuple(found)


def variant_captions(caption: str, variants: VariantsConfig, seed: int) -> tuple[str, ...]:
    """Return the captions that are trained for ``caption``: as many as ``variants`` asks for, or itself.

    By kohya's rule: the tags after the kept ones are shuffled, then each is left out with a probability.
    """
    changes = variants.shuffle_caption or variants.tag_dropout > 0
    if variants.captions == 1 or not changes or not caption:
        return (caption,)
    digest = hashlib.sha256(caption.encode("utf-8", "surrogatepass")).digest()
    rng = draws.generator(seed, draws.CAPTIONS, int.from_bytes(digest[:7], "big"))
    tags = [tag.strip() for tag in caption.split(variants.separator)]
    kept, others = tags[: variants.keep_tokens], tags[variants.keep_tokens :]
    found = []
    for _ in range(variants.captions):
        order = rng.permutation(len(others)) if variants.shuffle_caption else range(len(others))
        used = rng.random(len(others)) >= variants.tag_dropout
        found.append(", ".join([*kept, *(others[i] for i in order if used[i])]))
    return tuple(found)
