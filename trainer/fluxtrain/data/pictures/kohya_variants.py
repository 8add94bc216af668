"""The options of kohya's data set config that change pictures and captions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fluxtrain.contract.run.data import DataConfig
from fluxtrain.contract.run.variants import AS_THEY_ARE, VariantsConfig
from fluxtrain.contract.validation import validate
from fluxtrain.errors import ConfigError

VARIANT_OPTIONS: Mapping[str, str] = {
    "flip_aug": "flip",
    "shuffle_caption": "shuffle_caption",
    "keep_tokens": "keep_tokens",
    "caption_tag_dropout_rate": "tag_dropout",
    "caption_separator": "separator",
    "random_crop": "crops",
}
"""Options with their fields of ``data.variants``."""


def variants_of(
    path: Path, at: str, options: Mapping[str, Any], data: DataConfig
) -> VariantsConfig:
    """Return what is made of the pictures of a folder with ``options``; those not given are the run's.

    Raises ConfigError, naming the option, if its value is wrong, or the run does not say how many copies of
    pictures or captions are encoded.
    """
    own = data.variants or AS_THEY_ARE
    values = own.model_dump()
    for option, field in VARIANT_OPTIONS.items():
        given = options.get(option)
        if given is None:
            continue
        if option == "random_crop":
            _require_flag(path, f"{at}.{option}", given)
            given = values["crops"] if given else 1
        values[field] = given
    if options.get("random_crop") and own.crops < 2:
        raise _uncounted(path, f"{at}.random_crop", True, "crops", 4)
    for option in ("shuffle_caption", "caption_tag_dropout_rate"):
        if options.get(option) and own.captions < 2:
            raise _uncounted(path, f"{at}.{option}", options[option], "captions", 8)
    try:
        return validate(VariantsConfig, values, "variants")
    except ConfigError as error:
        names = {f"variants.{field}": option for option, field in VARIANT_OPTIONS.items()}
        name = names.get(error.path, error.path)
        raise ConfigError(f"{path}: {at}.{name}", options.get(name), error.allowed) from None


def _uncounted(path: Path, place: str, given: object, field: str, number: int) -> ConfigError:
    text = (
        f"copies are encoded before training: set spec.run.data.variants.{field} to how many, "
        f"such as {number}"
    )
    return ConfigError(f"{path}: {place}", given, text)


def _require_flag(path: Path, place: str, given: object) -> None:
    if not isinstance(given, bool):
        raise ConfigError(f"{path}: {place}", given, "must be true or false")
