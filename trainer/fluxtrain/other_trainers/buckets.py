"""Conversions of options for aspect-ratio buckets to ``data.buckets``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from fluxtrain.contract.run.immutable_fields import value_at
from fluxtrain.other_trainers import common
from fluxtrain.other_trainers.kohya_values import resolution
from fluxtrain.other_trainers.option import Convert, Values
from fluxtrain.other_trainers.reading import InertError, NoCounterpartError, Reading

Read = Callable[[Reading, str], object]
_STEP, _NO_UPSCALE = "bucket_reso_steps", "bucket_no_upscale"
SETTINGS: Sequence[tuple[str, str, Read, object]] = (
    (_STEP, "data.buckets.step", Reading.positive, 64),
    ("min_bucket_reso", "data.buckets.min_side", Reading.positive, 256),
    ("max_bucket_reso", "data.buckets.max_side", Reading.positive, 1024),
    (_NO_UPSCALE, "data.buckets.upscale", Reading.flag, False),
)
"""Options of kohya's sd-scripts with their fields, types and defaults."""
FIELDS = tuple(path for _, path, _, _ in SETTINGS)
"""The fields that enable_bucket sets."""


def kohya(reading: Reading, name: str) -> Values:
    """Return kohya's buckets, whose rule is that of ``data.buckets``, but for settings that are given."""
    if not reading.flag(name):
        reading.notes[name] = "images are squares of data.image_size"
        return {}
    others = [row for row in SETTINGS if row[0] not in reading.given]
    values = {path: read(reading, option) for option, path, read, _ in others}
    return {**values, "data.buckets.upscale": not reading.flag(_NO_UPSCALE)}


def of_kohya(path: str, read: Read) -> Convert:
    """Return the conversion of a setting of enable_bucket, which writes it unless it is given."""

    def convert(reading: Reading, name: str) -> Values:
        value = read(reading, name)
        if not reading.is_on("enable_bucket"):
            raise InertError("only enable_bucket uses it")
        if name == _NO_UPSCALE or name not in reading.given:
            reading.notes[name] = "written with enable_bucket"
            return {}
        if name == _STEP:
            _check_step(reading, name)
        return {path: value}

    return convert


def _check_step(reading: Reading, name: str) -> None:
    """Raise ConfigError for a step that does not fit the resolution, or sides that are not given."""
    if value_at(reading.overrides, "data.buckets") is not None:
        return
    step = reading.positive(name)
    is_square = reading.has("resolution") and value_at(reading.overrides, "data.image_size") is None
    with suppress(NoCounterpartError):
        side = resolution(reading, "resolution")["data.image_size"] if is_square else step
        if step > int(str(side)):
            raise reading.wrong(name, f"must be at most resolution, {side}")
    for option, _, _, default in SETTINGS[1:3]:
        if option not in reading.given and int(str(default)) % step:
            raise reading.wrong(name, f"must divide {option}, which is {default} if not given")


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
