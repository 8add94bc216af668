"""Conversions of options for aspect-ratio buckets to ``data.buckets``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fluxtrain.other_trainers import common
from fluxtrain.other_trainers.option import Convert, Values
from fluxtrain.other_trainers.reading import InertError, Reading

Read = Callable[[Reading, str], object]
_NO_UPSCALE = "bucket_no_upscale"
SETTINGS: Sequence[tuple[str, str, Read, object]] = (
    ("bucket_reso_steps", "data.buckets.step", Reading.positive, 64),
    ("min_bucket_reso", "data.buckets.min_side", Reading.positive, 256),
    ("max_bucket_reso", "data.buckets.max_side", Reading.positive, 1024),
    (_NO_UPSCALE, "data.buckets.upscale", Reading.flag, False),
)
"""Options of kohya's sd-scripts with their fields, types and defaults."""
FIELDS = tuple(path for _, path, _, _ in SETTINGS)
"""The fields that enable_bucket sets."""


def kohya(reading: Reading, name: str) -> Values:
    """Return kohya's buckets, whose rule is that of ``data.buckets``."""
    if not reading.flag(name):
        reading.notes[name] = "images are squares of data.image_size"
        return {}
    values = {path: read(reading, option) for option, path, read, _ in SETTINGS}
    return {**values, "data.buckets.upscale": not reading.flag(_NO_UPSCALE)}


def of_kohya(read: Read) -> Convert:
    """Return the conversion of a setting that enable_bucket writes."""

    def convert(reading: Reading, name: str) -> Values:
        read(reading, name)
        if not reading.is_on("enable_bucket"):
            raise InertError("only enable_bucket uses it")
        reading.notes[name] = "written with enable_bucket"
        return {}

    return convert


def ai_toolkit(reading: Reading, name: str) -> Values:
    """Return ai-toolkit's resolutions, one or several, in buckets without enlarged images."""
    given = reading.value(name)
    sides = given if isinstance(given, list) else [given]
    if not sides:
        raise reading.wrong(name, "must be a number of pixels, or a list of them")
    squares = [common.square(reading, name, side) for side in sides]
    largest = max(squares, key=lambda square: int(str(square["data.image_size"])))
    has_buckets = not reading.has("datasets.buckets") or reading.flag("datasets.buckets")
    if not has_buckets or reading.is_on("datasets.square_crop"):
        return largest
    values = {"data.buckets.step": 64, "data.buckets.upscale": False}
    if len(sides) == 1:
        return {**largest, **values}
    resolutions = [square["data.image_size"] for square in squares]
    return {**largest, **values, "data.buckets.resolutions": resolutions}
