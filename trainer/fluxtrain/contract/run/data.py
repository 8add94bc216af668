"""DataConfig, ``spec.run.data``: the training and validation samples."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator

from fluxtrain.contract.model_base import (
    IMMUTABLE,
    Fraction,
    Label,
    OptionalPath,
    Path,
    Positive,
    Rule,
    Sha256,
    StrictModel,
)
from fluxtrain.errors import SECRET_QUERY

_READ = r"^(https?://[^/?#]+/|(s3|gs|az)://[^/?#]+(/|$)|hf://datasets/[^/?#]+/[^/?#]+)"
_USER = r"^[^:]*://[^/?#]*@"


class DownloadConfig(StrictModel):
    """How data with a URL are fetched to each node; credentials come from the environment (docs/data.md)."""

    folder: Path | None = None
    """Folder of the node, which runs may share; null: one in the temporary folder."""
    max_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 50)] = 200 << 30
    """Most bytes in ``folder``: the least recently used data are removed; what does not fit is refused."""
    connections: Annotated[int, Field(ge=1, le=64)] = 8
    """Files that each node fetches at the same time."""
    attempts: Annotated[int, Field(ge=1, le=100)] = 5
    """Times that a file is tried without getting further."""
    stream: bool = False
    """Fetch, encode and remove one shard, or a few images, after the other, divided over the ranks, instead
    of all of them on each node; the samples are the same."""


def is_url(text: str) -> bool:
    return "://" in text


def url_rules(field: str) -> tuple[Rule, ...]:
    """Return the rules for ``field``, a path or a URL that may be null."""
    return tuple(_rule(field, pattern, message, wanted) for pattern, message, wanted in _PATTERNS)


def url_fault(url: str) -> str | None:
    """Return what ``url`` must be and is not, or None; `url_rules` has the same for fields."""
    faults = (
        text for pattern, text, wanted in _PATTERNS if bool(re.search(pattern, url)) != wanted
    )
    return next(faults, None)


_PATTERNS = (
    (
        _READ,
        "must be a path, or a URL that begins with https://host/, s3://bucket, gs://bucket, az://container "
        "or hf://datasets/owner/name",
        True,
    ),
    (_USER, "must not contain a user name; credentials come from the environment", False),
    (
        SECRET_QUERY,
        "must not contain a key or a token; credentials come from the environment",
        False,
    ),
)


def _rule(field: str, pattern: str, message: str, wanted: bool) -> Rule:
    def holds(model: object) -> bool:
        value = getattr(model, field)
        return value is None or not is_url(value) or bool(re.search(pattern, value)) == wanted

    sign = "" if wanted else "!"
    cel = f"!has(self.{field}) || !self.{field}.contains('://') || {sign}self.{field}.matches('{pattern}')"
    return Rule(field, message, holds, cel)


class TableConfig(StrictModel):
    """Which Parquet files of ``images``, and which of their columns, hold images and captions."""

    split: Label | None = None
    """Part of the names of the files that are read; null: ``train``, or all files if none has a split."""
    image_column: Label | None = None
    """Column of the images, as bytes or as Hugging Face's images; null: the first one of that kind."""
    caption_column: Label | None = None
    """Column of the captions; null: ``text``, ``caption`` or ``prompt``, if there is one."""


class VariantsConfig(StrictModel):
    """Copies of each image and caption that are encoded. Each time that a sample is used, one of its
    images and one of its captions are drawn."""

    rules: ClassVar = (
        Rule(
            "captions",
            "must be at least 2 if shuffle_caption or tag_dropout is set",
            lambda it: it.captions > 1 or not (it.shuffle_caption or it.tag_dropout),
            "self.captions > 1 || !self.shuffle_caption",
            others=("shuffle_caption",),
        ),
    )

    flip: bool = False
    """Also mirrored, left to right: twice as many latents."""
    crops: Annotated[int, Field(ge=1, le=64)] = 1
    """Crops of each image: 1 is its middle; more are at places that are drawn from the seed."""
    captions: Annotated[int, Field(ge=1, le=256)] = 1
    """Captions of each image that are made from its own by ``shuffle_caption`` and ``tag_dropout``."""
    shuffle_caption: bool = False
    """Shuffle the tags of a caption: its parts between ``separator``."""
    keep_tokens: Annotated[int, Field(ge=0, le=1000)] = 0
    """Tags at the start of a caption that are neither shuffled nor dropped, of which the prefix is part."""
    tag_dropout: Fraction = 0.0
    """Probability that a tag is left out."""
    separator: Annotated[str, Field(min_length=1, max_length=16)] = ","
    """What is between the tags of a caption; ", " comes between them afterwards."""


AS_THEY_ARE = VariantsConfig()
"""Each image and caption is encoded once, unchanged."""


PIXELS_PER_LATENT = 8
"""Side of the image that one latent stands for."""
PIXELS_PER_TOKEN = 2 * PIXELS_PER_LATENT
"""Side of the image that one token stands for."""

Size = tuple[int, int]
"""Width and height of an image in pixels."""
Side = Annotated[int, Field(ge=16, le=32_768, multiple_of=PIXELS_PER_TOKEN)]


def _multiple_of_step(field: str) -> Rule:
    return Rule(
        field,
        "must be a multiple of step",
        lambda it: (getattr(it, field) or 0) % it.step == 0,
        f"self.{field} % self.step == 0",
        others=("step",),
    )


class BucketsConfig(StrictModel):
    """Buckets: each image is brought to the one of several sizes, of about equally many pixels, that has the
    nearest aspect ratio."""

    rules: ClassVar = (
        _multiple_of_step("min_side"),
        _multiple_of_step("max_side"),
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
        return list(_sizes(resolution, self.step, *self.sides(resolution)))

    def has(self, size: Size, resolution: int) -> bool:
        """Return whether ``size`` is one of a bucket of ``resolution``."""
        width, height = size
        sizes = self.sizes(resolution)
        if self.upscale:
            return size in sizes
        whole = width % self.step == height % self.step == 0
        return whole and any(width <= w and height <= h for w, h in sizes)


@lru_cache(maxsize=64)  # a plan asks for them at each block
def _sizes(resolution: int, step: int, shortest: int, longest: int) -> Sequence[Size]:
    square = resolution // step * step
    found = {(square, square)}
    for width in range(shortest, longest + 1, step):
        height = min(longest, resolution**2 // width // step * step)
        if height >= shortest:
            found |= {(width, height), (height, width)}
    return tuple(sorted(found))


IMAGE: Final = "image_size"
LATENT: Final = "latent_size"
_LATENT_SIDES = range(2, 4097, 2)
_IMAGE_SIDES = range(PIXELS_PER_TOKEN, 4096 * PIXELS_PER_LATENT + 1, PIXELS_PER_TOKEN)


def without_decided(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` without the side, or the ``epochs``, that ``over`` decides by another field."""
    decided = {IMAGE: LATENT, LATENT: IMAGE, "epochs": "steps"}
    return {
        key: value
        for key, value in values.items()
        if not (decided.get(key) in over and key not in over)
    }


UTF_8: Final = "utf-8"
ALPHA: Final = "alpha"
"""The value of ``data.masks`` with which images are masked by their own transparency."""
Layout = Literal["shards", "arrow", "parquet", "webdataset"]
"""File formats of encoded samples: ``shards`` is our own; MLCommons and its submitters use the others."""


class SyntheticConfig(StrictModel):
    """A generated data set: one fixed latent per class, which the text encoding identifies."""

    train_samples: Positive = 4096
    """Training samples in one epoch."""
    validation_samples: Positive = 64
    """Validation samples; every evaluation uses all of them."""
    classes: Positive = 16
    """Number of distinct latents; sample i belongs to class i modulo this."""


def _needs_images(field: str, default: object = None) -> Rule:
    words: Mapping[object, object] = {None: "null", "": "empty"}
    unset = f"!has(self.{field})" if default is None else f"self.{field} == {default!r}"
    return Rule(
        field,
        f"must be {words.get(default, default)} unless images is set",
        lambda data: data.images is not None or getattr(data, field) == default,
        f"has(self.images) || {unset}",
    )


def _is_codec(name: str) -> bool:
    """Return whether Python decodes text by the codec ``name``."""
    try:
        bytes(4).decode(name)
    except (LookupError, ValueError):  # none, or one of bytes
        return False
    return True


class DataConfig(StrictModel):
    """The training and validation samples. Relative paths are below the data root (``--data``)."""

    rules: ClassVar = (
        Rule(
            "latent_size",
            "must be image_size / 8, or left out",
            lambda data: data.latent_size * PIXELS_PER_LATENT == data.image_size,
            "self.latent_size * 8 == self.image_size",
            others=("image_size",),
        ),
        Rule(
            "images",
            "must be null unless source is encoded",
            lambda data: data.images is None or data.source == "encoded",
            "!has(self.images) || self.source == 'encoded'",
            others=("source",),
        ),
        *url_rules("images"),
        _needs_images("repeats", 1),
        _needs_images("caption_prefix", ""),
        _needs_images("class_tokens", ""),
        _needs_images("variants"),
        _needs_images("masks"),
        *url_rules("masks"),
        _needs_images("controls"),
        Rule(
            "controls",
            "must be a folder: only images and masks are fetched from a URL",
            lambda data: data.controls is None or not is_url(data.controls),
            "!self.controls.contains('://')",
        ),
        Rule(
            "controls",
            "must be null if download.stream is set",
            lambda data: data.controls is None or not data.download.stream,
            "!self.download.stream",
            others=("download.stream",),
        ),
        _needs_images("prior_loss_weight", 1.0),
        _needs_images("validation_split", 0.0),
        Rule(
            "caption_encoding",
            "must be a codec of Python for text, such as utf-8, windows-1252, gbk, shift_jis or koi8-r",
            lambda data: _is_codec(data.caption_encoding),
            "self.caption_encoding.matches('^[A-Za-z0-9._ -]+$')",
        ),
        _needs_images("caption_encoding", UTF_8),
        _needs_images("max_skipped", 0.1),
    )

    source: Annotated[Literal["encoded", "images", "synthetic"], IMMUTABLE] = "encoded"
    """``encoded``: text encodings and latents on disk; ``images``: WebDataset tars of images and captions,
    encoded during training; ``synthetic``: generated by the trainer."""
    layout: Literal["auto", Layout] = "auto"
    """File format of encoded samples: ``shards`` is our own, MLCommons and its submitters use the rest;
    ``auto`` detects it from the folder."""
    images: Annotated[Path | None, IMMUTABLE] = None
    """Folder of images with captions to train on, instead of ``train``: text files next to them, or
    metadata.jsonl, .csv or .parquet. Or kohya's data set config, .toml or .json, whose repeats, class tokens
    and prefixes win over those below. They are encoded before the first step. A URL, ``https://``,
    ``s3://``, ``gs://``, ``az://`` or ``hf://datasets/``, is fetched to each node before that."""
    repeats: Annotated[int, Field(ge=1, le=100_000), IMMUTABLE] = 1
    """Times that each image of ``images`` is used in an epoch."""
    caption_prefix: Annotated[str, Field(max_length=1024), IMMUTABLE] = ""
    """Words before each caption of ``images``, such as a trigger word."""
    class_tokens: Annotated[str, Field(max_length=1024), IMMUTABLE] = ""
    """Caption of the images of ``images`` that have none."""
    caption_encoding: Label = UTF_8
    """Codec of the captions of ``images``, in text and metadata files and in shards, such as
    ``windows-1252``, ``gbk``, ``shift_jis`` or ``koi8-r``. A file that begins with a byte order mark is read
    by it. A run that has begun keeps its captions."""
    max_skipped: Fraction = 0.1
    """Refuse to begin if more than this share of the images of ``images`` cannot be used, and more than
    one; 0: if any. Thumbnails and hidden files do not count. Encodings that become unreadable later are
    those of ``max_bad_fraction``."""
    variants: Annotated[VariantsConfig | None, IMMUTABLE] = None
    """Encode changed copies of the images and captions of ``images`` too, such as {flip: true}; null: each
    once, as it is."""
    masks: Annotated[Path | None, IMMUTABLE] = None
    """Folder of masks of ``images``, each with the name of its image: its red, or grey, weighs the loss of
    that place, and black counts nothing. It may be a URL or shards too. ``alpha``: the images' own opacity.
    null: all counts."""
    controls: Annotated[Path | None, IMMUTABLE] = None
    """Folder of what ``model.condition`` takes, a picture for each image of ``images`` and of its name. With
    ``kontext`` the pictures that are edited to those of ``images``, with ``depth`` and ``canny`` their maps;
    with ``fill`` masks, whose white is filled. null: none; with ``fill`` rectangles drawn from the seed."""
    prior_loss_weight: Annotated[float, Field(ge=0, le=1000), IMMUTABLE] = 1.0
    """Weight of the loss of regularisation images, ``is_reg`` in kohya's data set config."""
    table: Annotated[TableConfig, IMMUTABLE] = TableConfig()
    """Which parts of the Parquet files of ``images`` are read."""
    download: DownloadConfig = DownloadConfig()
    """How ``images`` and ``masks`` with a URL are fetched."""
    cache: Path | None = None
    """Folder for the encodings of ``images``, which runs may share; null: ``cache`` in the run's output."""
    train: Path = "train"
    """Folder of the training samples."""
    validation: OptionalPath = "validation"
    """Folder of the validation samples; ``none``: there are none, and no evaluation."""
    validation_split: Annotated[float, Field(ge=0, le=0.5), IMMUTABLE] = 0.0
    """Part of the images of ``images`` that is held out of the training, at least one: an evaluation is
    their mean loss at all eight timesteps, instead of that of ``validation``. The seed chooses them, never
    regularisation images; one that equals an image that is held out is not trained. 0: none."""
    empty_encodings: Path = "empty.safetensors"
    """Encodings of the empty prompt, which replace those of a dropped prompt: a .safetensors file, or a
    folder with MLCommons' t5_empty.npy and clip_empty.npy."""
    train_digest: Sha256 | None = None
    """Digest of the training set's index, as the MLPerf log states it; another set is refused; null: any."""
    validation_digest: Sha256 | None = None
    """Digest of the validation set's index; null: any."""
    order: Annotated[Literal["shuffled", "sequential"], IMMUTABLE] = "shuffled"
    """Order of the training samples: a new permutation in each epoch, drawn from the seed, or the data set's
    own in all epochs, as MLPerf's reference reads them."""
    image_size: Annotated[Side, IMMUTABLE] = 256
    """Side length of the square images in pixels; 8 times ``latent_size`` where only that is given."""
    latent_size: Annotated[int, Field(ge=2, le=4096, multiple_of=2), IMMUTABLE] = 32
    """Side length of the latents: an eighth of ``image_size``, which is enough to give."""
    buckets: Annotated[BucketsConfig | None, IMMUTABLE] = None
    """Train on images of several aspect ratios, such as {}, each in its size; null: on squares. Each global
    batch has images of one size. Of what is left of a size in an epoch is a batch with fewer images."""
    text_length: Annotated[int, Field(ge=1, le=8192), IMMUTABLE] = 256
    """Text tokens per sample."""
    num_workers: Annotated[int, Field(ge=0, le=256)] = 4
    """Data loader processes per rank; 0 loads in the training process."""
    prefetch: Annotated[int, Field(ge=1, le=1024)] = 4
    """Micro batches that each data loader process loads ahead."""
    verify_checksums: bool = False
    """Verify the CRC-32 checksum of each record when it is read."""
    max_bad_fraction: Fraction = 0.01
    """Fail if more than this fraction of the samples read so far, or of a validation set, is unreadable."""
    synthetic: Annotated[SyntheticConfig, IMMUTABLE] = SyntheticConfig()
    """The synthetic data set."""

    @model_validator(mode="before")
    @classmethod
    def _complete_sides(cls, values: Any) -> Any:
        """Give both sides if one is given; a wrong one is left to its own check."""
        if not isinstance(values, Mapping):
            return values
        if LATENT not in values and values.get(IMAGE) in _IMAGE_SIDES:
            return {**values, LATENT: int(values[IMAGE]) // PIXELS_PER_LATENT}
        if IMAGE not in values and values.get(LATENT) in _LATENT_SIDES:
            return {**values, IMAGE: int(values[LATENT]) * PIXELS_PER_LATENT}
        return values

    @property
    def resolutions(self) -> tuple[int, ...]:
        """Return the square roots of the number of pixels of the images."""
        return tuple(self.buckets.resolutions if self.buckets else ()) or (self.image_size,)

    @property
    def latent_sizes(self) -> list[Size]:
        """Return height and width of the latents of all buckets, of which smaller ones may be cut."""
        if self.buckets is None:
            return [(self.latent_size, self.latent_size)]
        sizes = {size for resolution in self.resolutions for size in self.buckets.sizes(resolution)}
        return sorted(
            (height // PIXELS_PER_LATENT, width // PIXELS_PER_LATENT) for width, height in sizes
        )

    @property
    def largest_latent(self) -> Size:
        """Return height and width of the latents of the bucket with the most pixels."""
        return max(self.latent_sizes, key=lambda size: (size[0] * size[1], -abs(size[0] - size[1])))

    def takes_latents(self, height: int, width: int) -> bool:
        """Return whether samples may have latents of this size."""
        if self.buckets is None:
            return height == width == self.latent_size
        size = width * PIXELS_PER_LATENT, height * PIXELS_PER_LATENT
        return any(self.buckets.has(size, resolution) for resolution in self.resolutions)
