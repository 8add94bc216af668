"""Reads kohya's data set config, TOML or JSON: general options, data sets, and their folders of pictures.

An option of a folder wins over that of its data set, which wins over the general one. Options that would
change what is computed, and have no counterpart here, are refused unless they are off.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fluxtrain.contract.run.data import ALPHA, DataConfig
from fluxtrain.contract.run.download import is_url, url_fault
from fluxtrain.contract.validation import near_miss
from fluxtrain.data.pictures.captions import EXTENSIONS
from fluxtrain.data.pictures.kohya_sizes import BUCKET_OPTIONS, resolution_of, sizes_of
from fluxtrain.data.pictures.kohya_variants import VARIANT_OPTIONS, variants_of
from fluxtrain.data.pictures.source_path import source_of
from fluxtrain.data.pictures.subset_options import Subset
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.redaction import redacted
from fluxtrain.toml_text import parse_toml

SUFFIXES = (".toml", ".json")
Options = Mapping[str, Any]
_MAX_BYTES = 1 << 20
_ONCE = "pictures are encoded once, before training; add changed copies of them to the folder"
_CAPTIONS_ONCE = "captions are encoded once, before training; set it to false"
_REFUSED: Mapping[str, tuple[object, str]] = {
    "enable_wildcard": (False, _CAPTIONS_ONCE),
    "keep_tokens_separator": ("", "set keep_tokens to a number of tags"),
    "secondary_separator": ("", "tags have one separator here, caption_separator"),
    "token_warmup_step": (0, "captions are encoded once, before training; set it to 0"),
    "caption_dropout_rate": (0, "set it to 0 and use spec.run.flow.prompt_dropout"),
    "caption_dropout_every_n_epochs": (0, "set it to 0 and use spec.run.flow.prompt_dropout"),
    "color_aug": (False, _ONCE),
    "face_crop_aug_range": (None, _ONCE),
    "validation_split": (0, "set it to 0 and use spec.run.data.validation_split"),
    "metadata_file": (None, "put captions into metadata.jsonl in the folder, or into text files"),
}
"""Options with their value that is off, and what to do instead."""
_READ = {
    *("image_dir", "num_repeats", "class_tokens", "caption_prefix", "caption_suffix"),
    *("caption_extension", "is_reg", "resolution", *BUCKET_OPTIONS),
    *VARIANT_OPTIONS,
    *("alpha_mask", "conditioning_data_dir"),
}
_ELSEWHERE = {"batch_size": "spec.run.schedule.global_batch_size"}
_WITHOUT_EFFECT = {
    *("token_warmup_min", "cache_info", "custom_attributes", "validation_seed"),
    *("resize_interpolation", "skip_image_resolution", "network_multiplier"),
}
"""Options that change nothing as long as those above are off."""


def is_dataset_config(path: Path) -> bool:
    """Return whether ``path`` is a data set config by its name."""
    return path.suffix.lower() in SUFFIXES


def read_dataset_config(path: Path, data: DataConfig, data_root: Path) -> list[Subset]:
    """Return the folders of the config ``path`` of ``data``; relative ones are below ``data_root``.

    Raises DataError if it cannot be read, ConfigError, naming the option, if it asks for what is not done.
    """
    content = _parse(path)
    _require_known(path, "", content, {"general", "datasets"})
    general = _table(path, "general", content.get("general", {}))
    found = list[Subset]()
    for number, entry in enumerate(_tables(path, "datasets", content.get("datasets"))):
        at = f"datasets[{number}]"
        shared = {**general, **{k: v for k, v in entry.items() if k != "subsets"}}
        for index, own in enumerate(_tables(path, f"{at}.subsets", entry.get("subsets"))):
            place = f"{at}.subsets[{index}]"
            found.append(_subset(path, place, {**shared, **own}, data, data_root))
    if all(subset.is_reg for subset in found):
        raise ConfigError(f"{path}: datasets", "is_reg in all subsets", "one must be trained")
    return _with_different_labels(found)


def own_sizes(path: Path) -> dict[str, Any]:
    """Return the fields of ``data`` for the sizes that the config ``path`` asks for, {} if it names none.

    Raises DataError or ConfigError if it cannot be read.
    """
    return sizes_of(_every_table(_parse(path), path))


def own_batch_sizes(path: Path) -> list[int]:
    """Return the batch sizes that the config ``path`` names, which the run's global batch size replaces.

    Raises DataError or ConfigError if it cannot be read.
    """
    tables = _every_table(_parse(path), path)
    return sorted({each["batch_size"] for each in tables if type(each.get("batch_size")) is int})


def _every_table(content: Options, path: Path) -> list[Options]:
    """Return the tables of data sets and of their subsets, with the options above them."""
    general = _table(path, "general", content.get("general", {}))
    tables = [{**general, **table} for table in _tables(path, "datasets", content.get("datasets"))]
    listed = [(table, table.get("subsets")) for table in tables]
    subsets = [
        (table, each) for table, found in listed if isinstance(found, list) for each in found
    ]
    return [*tables, *({**table, **each} for table, each in subsets if isinstance(each, dict))]


def _with_different_labels(subsets: list[Subset]) -> list[Subset]:
    """Return ``subsets``; of those that have the same folder, the second has a label with #2, and so on."""
    seen, labelled = Counter[str](), list[Subset]()
    for subset in subsets:
        seen[subset.label] += 1
        number = seen[subset.label]
        label = subset.label if number == 1 else f"{subset.label[:-1]}#{number}/"
        labelled.append(replace(subset, label=label))
    return labelled


def _subset(path: Path, at: str, options: Options, data: DataConfig, data_root: Path) -> Subset:
    known = _READ | _REFUSED.keys() | _ELSEWHERE.keys() | _WITHOUT_EFFECT
    _require_known(path, at, options, known)
    for name, (off, instead) in _REFUSED.items():
        if options.get(name, off) not in (off, None):
            raise ConfigError(f"{path}: {at}.{name}", options[name], instead)
    resolution = resolution_of(path, at, options, data)
    extension = _value(path, at, options, "caption_extension", EXTENSIONS[0])
    if extension not in EXTENSIONS:
        text = f"must be one of {', '.join(EXTENSIONS)}"
        raise ConfigError(f"{path}: {at}.caption_extension", extension, text)
    folder = _value(path, at, options, "image_dir", "")
    if not folder:
        raise ConfigError(f"{path}: {at}.image_dir", folder, "must name a folder of pictures")
    url = source_of(folder, data_root / folder)
    if is_url(folder) and (fault := url_fault(url)):
        raise ConfigError(f"{path}: {at}.image_dir", url, fault)
    repeats = _value(path, at, options, "num_repeats", 1)
    if not 1 <= repeats <= 100_000:
        raise ConfigError(f"{path}: {at}.num_repeats", repeats, "must be from 1 to 100000")
    is_reg = _value(path, at, options, "is_reg", False)
    masks = _value(path, at, options, "conditioning_data_dir", "")
    if is_url(masks) and (fault := url_fault(masks)):
        raise ConfigError(f"{path}: {at}.conditioning_data_dir", masks, fault)
    masks_field = f"{path}: {at}.conditioning_data_dir" if masks else "spec.run.data.masks"
    run_masks = None if data.masks in (None, ALPHA) else str(data.masks)
    has_alpha = _value(path, at, options, "alpha_mask", data.masks == ALPHA) and not masks
    folder_of_masks = None if has_alpha else masks or run_masks
    return Subset(
        data_root / folder,
        repeats,
        _value(path, at, options, "caption_prefix", ""),
        _value(path, at, options, "class_tokens", ""),
        _value(path, at, options, "caption_suffix", ""),
        label=f"{redacted(folder)}/",
        url=url,
        field=f"{path}: {at}.image_dir",
        is_reg=is_reg,
        resolution=resolution,
        variants=variants_of(path, at, options, data),
        masks=data_root / folder_of_masks if folder_of_masks else None,
        masks_url=source_of(folder_of_masks, data_root / folder_of_masks)
        if folder_of_masks
        else "",
        masks_field=masks_field,
        has_alpha_masks=has_alpha,
        weight=data.prior_loss_weight if is_reg else 1.0,
    )


def _value(path: Path, at: str, options: Options, name: str, default: Any) -> Any:
    """Return the option ``name``, which must be of the type of ``default``."""
    value = options.get(name)
    if value is None:
        return default
    if type(value) is not type(default):
        kinds = {str: "a text", int: "a whole number", bool: "true or false"}
        raise ConfigError(f"{path}: {at}.{name}", value, f"must be {kinds[type(default)]}")
    return value


def _parse(path: Path) -> Options:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DataError(f"{path}: has more than {_MAX_BYTES} bytes")
        text = path.read_text(encoding="utf-8-sig")
        content = parse_toml(text) if path.suffix.lower() == ".toml" else json.loads(text)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        kind = path.suffix[1:].upper()
        raise DataError(f"{path}: is not {kind} ({str(error)[:100]})") from None
    return _table(path, "the file", content)


def _table(path: Path, at: str, value: object) -> Options:
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: {at}", value, "must be a table of options")
    return value


def _tables(path: Path, at: str, value: object) -> list[Options]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{path}: {at}", value, "must be a list of at least one table")
    return [_table(path, f"{at}[{number}]", entry) for number, entry in enumerate(value)]


def _require_known(path: Path, at: str, options: Options, known: set[str]) -> None:
    for name in options:
        if name not in known:
            place = f"{at}.{name}" if at else name
            text = f"no option that is read here{near_miss(name, known)}"
            raise ConfigError(f"{path}: {place}", options[name], text)
