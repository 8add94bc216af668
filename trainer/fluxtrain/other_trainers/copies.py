"""Conversions of options that change pictures and captions while they are read to ``data.variants``."""

from __future__ import annotations

from collections.abc import Callable

from fluxtrain.other_trainers.option import Convert, Values
from fluxtrain.other_trainers.reading import NoCounterpartError, Reading

CROPS, CAPTIONS = 4, 8
"""Copies that are encoded where the other trainer changes a picture or a caption whenever it is read."""
NOTE = "copies are encoded beforehand: data.variants says how many"
SHUFFLED = ("data.variants.shuffle_caption", "data.variants.captions")
DROPPED = ("data.variants.tag_dropout", "data.variants.captions")


_IMAGES = ("train_data_dir", "dataset_config", "datasets.folder_path", "datasets.dataset_path")
"""The options of all trainers that become ``data.images``."""


def _require_images(reading: Reading) -> None:
    if not any(map(reading.has, _IMAGES)):
        raise NoCounterpartError("data.variants needs data.images")


def flip(reading: Reading, name: str) -> Values:
    """Return mirrored copies."""
    return _if_on(reading, name, {"data.variants.flip": True})


def crops(reading: Reading, name: str) -> Values:
    """Return several crops."""
    return _if_on(reading, name, {"data.variants.crops": CROPS})


def alpha_masks(reading: Reading, name: str) -> Values:
    """Return masks of the loss that are made of the pictures' opacity."""
    return _if_on(reading, name, {"data.masks": "alpha"})


def prior_weight(reading: Reading, name: str) -> Values:
    """Return the weight of regularisation images."""
    value = reading.number(name)
    if value == 1:
        return {}
    _require_images(reading)
    return {"data.prior_loss_weight": value}


def shuffle(reading: Reading, name: str) -> Values:
    """Return several captions with shuffled tags."""
    return _if_on(reading, name, dict(zip(SHUFFLED, (True, CAPTIONS), strict=True)))


def dropout(reading: Reading, name: str) -> Values:
    """Return several captions without some tags."""
    rate = reading.number(name)
    if rate == 0:
        return {}
    _require_images(reading)
    return dict(zip(DROPPED, (rate, CAPTIONS), strict=True))


def setting(path: str, read: Callable[[Reading, str], object]) -> Convert:
    """Return the conversion of a setting of images to the field at ``path``, unless it asks for nothing."""

    def convert(reading: Reading, name: str) -> Values:
        value = read(reading, name)
        if not value:
            return {}
        _require_images(reading)
        return {path: value}

    return convert


def _if_on(reading: Reading, name: str, values: Values) -> Values:
    if not reading.flag(name):
        return {}
    _require_images(reading)
    return values
