"""Reads kohya's data set config, TOML or JSON: general options, data sets, and their folders of pictures.

An option of a folder wins over that of its data set, which wins over the general one. Options that would
change what is computed, and have no counterpart here, are refused unless they are off.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fluxtrain.contract.model_base import near_miss, validate
from fluxtrain.contract.run.data import (
    ALPHA,
    AS_THEY_ARE,
    DataConfig,
    VariantsConfig,
    is_url,
    url_fault,
)
from fluxtrain.data.pictures.encodings import EXTENSIONS
from fluxtrain.data.pictures.folder import (
    METADATA,
    PictureFile,
    is_hidden,
    is_sheet_among_pictures,
)
from fluxtrain.data.pictures.folder import SUFFIXES as FOLDER_SUFFIXES
from fluxtrain.data.pictures.tables import SHARD, TABLE
from fluxtrain.errors import ConfigError, DataError, redacted
from fluxtrain.runtime.files import parse_toml

_NAME = re.compile(r"(\d+)_(.*)", re.ASCII | re.DOTALL)
_MOST = 50
"""Folders that are written out."""


def repeats_note(config: DataConfig, data_root: Path) -> str:
    """Return what to write for folders whose names have repeats, as kohya reads them, "" if there are none.

    ``repeats`` of ``config`` settles it. A folder with 0 repeats is left out, as there.
    """
    folder = data_root / str(config.images)
    if config.repeats != 1 or is_url(str(config.images)) or not folder.is_dir():
        return ""
    names = sorted(each.name for each in folder.iterdir() if each.is_dir())
    matches = filter(None, map(_NAME.fullmatch, names))
    found = [match for match in matches if int(match[1])]
    if not found:
        return ""
    subsets = [{"image_dir": f"{config.images}/{match[0]}", **_options(match)} for match in found]
    text = f"numbers in names of folders, such as {found[0][0]!r:.60}, are no repeats here"
    return f"{config.images}: {text}; {_advice(str(config.images), subsets)}"


def _options(match: re.Match[str]) -> Mapping[str, Any]:
    return {"num_repeats": int(match[1])} | ({"class_tokens": match[2]} if match[2] else {})


def _advice(images: str, subsets: Sequence[Mapping[str, Any]]) -> str:
    """Return what has these ``subsets``: fields of the run for one, kohya's data set config for several."""
    if len(subsets) == 1:
        return f"set spec.run.data to {_in_yaml(subsets[0])}"
    more = f", and the same for {len(subsets) - _MOST} more" if len(subsets) > _MOST else ""
    content = json.dumps({"datasets": [{"subsets": subsets[:_MOST]}]})
    file = f"{images.rstrip('/')}.json" if Path(images).name else "pictures.json"
    return f"set spec.run.data.images to {json.dumps(file)}, a file with {content}{more}"


def _in_yaml(subset: Mapping[str, Any]) -> str:
    names = {"image_dir": "images", "num_repeats": "repeats"}
    pairs = (f"{names.get(key, key)}: {json.dumps(value)}" for key, value in subset.items())
    return f"{{{', '.join(pairs)}}}"


_SIDES = {"bucket_reso_steps": "step", "min_bucket_reso": "min_side", "max_bucket_reso": "max_side"}
BUCKET_OPTIONS = ("enable_bucket", *_SIDES, "bucket_no_upscale")
"""Options that are fields of ``data.buckets``."""


def resolution_of(path: Path, at: str, options: Mapping[str, Any], data: DataConfig) -> int | None:
    """Return the resolution of a folder with ``options``; None: all those of the run.

    Raises ConfigError, naming the option and the field, if they are not those of ``data``.
    """
    _require_buckets(path, at, options, data)
    given = options.get("resolution")
    if given is None:
        return None
    sides = given if isinstance(given, list) else [given, given]
    if len(sides) != 2 or sides[0] != sides[1] or sides[0] not in data.resolutions:
        field = "data.buckets.resolutions" if len(data.resolutions) > 1 else "data.image_size"
        known = " or ".join(map(str, data.resolutions))
        text = f"must be {known}, the spec.run.{field} of the run"
        raise ConfigError(f"{path}: {at}.resolution", given, text)
    return int(sides[0]) if len(data.resolutions) > 1 else None


def _require_buckets(path: Path, at: str, options: Mapping[str, Any], data: DataConfig) -> None:
    given = {name: options[name] for name in BUCKET_OPTIONS if options.get(name) is not None}
    is_on = given.pop("enable_bucket", None)
    buckets = data.buckets
    if is_on and buckets is None:
        text = f"set spec.run.data.buckets to {_fields(given)}"
        raise ConfigError(f"{path}: {at}.enable_bucket", is_on, text)
    if is_on is False and buckets is not None:
        text = "must be true, as spec.run.data.buckets is set"
        raise ConfigError(f"{path}: {at}.enable_bucket", is_on, text)
    if not is_on or buckets is None:
        return
    shortest, longest = buckets.sides(max(data.resolutions))
    sides = {"step": buckets.step, "min_side": shortest, "max_side": longest}
    for name, value in given.items():
        field = _SIDES.get(name, "upscale")
        expected = sides.get(field, not buckets.upscale)
        if value != expected and (name, buckets.upscale) != ("min_bucket_reso", False):
            shown = str(expected).lower()
            text = f"must be {shown}, by the spec.run.data.buckets.{field} of the run"
            raise ConfigError(f"{path}: {at}.{name}", value, text)


def sizes_of(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of ``data`` for the resolutions and the buckets of ``tables``; {} if none has any.

    Values that are no sizes are left to the checks of the fields, and of each table.
    """
    given = [table["resolution"] for table in tables if table.get("resolution") is not None]
    firsts = [each[0] if isinstance(each, list) and each else each for each in given]
    if not firsts or not all(type(side) is int for side in firsts):
        return {}
    sides = sorted(set(firsts))
    largest = sides[-1]
    fields: dict[str, Any] = {"image_size": largest}
    with_buckets = next((table for table in tables if table.get("enable_bucket")), None)
    if with_buckets is not None:
        fields["buckets"] = {"resolutions": sides if len(sides) > 1 else []} | {
            field: with_buckets[option]
            for option, field in _SIDES.items()
            if with_buckets.get(option) is not None
        }
        fields["buckets"]["upscale"] = not with_buckets.get("bucket_no_upscale", False)
    return fields


def _fields(options: Mapping[str, Any]) -> str:
    fields = {
        "step": options.get("bucket_reso_steps", 64),
        "min_side": options.get("min_bucket_reso", 256),
        "max_side": options.get("max_bucket_reso", 1024),
        "upscale": str(not options.get("bucket_no_upscale", False)).lower(),
    }
    return "{" + ", ".join(f"{name}: {value}" for name, value in fields.items()) + "}"


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
            if not isinstance(given, bool):
                raise ConfigError(f"{path}: {at}.{option}", given, "must be true or false")
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
    # of those that have the same folder, the second has a label with #2, and so on
    seen, labelled = Counter[str](), list[Subset]()
    for subset in found:
        seen[subset.label] += 1
        number = seen[subset.label]
        label = subset.label if number == 1 else f"{subset.label[:-1]}#{number}/"
        labelled.append(replace(subset, label=label))
    return labelled


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
    general = _table(path, "general", content.get("general", {}))
    tables = [{**general, **table} for table in _tables(path, "datasets", content.get("datasets"))]
    listed = [(table, table.get("subsets")) for table in tables]
    subsets = [
        (table, each) for table, found in listed if isinstance(found, list) for each in found
    ]
    return [*tables, *({**table, **each} for table, each in subsets if isinstance(each, dict))]


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
    has_alpha = _value(path, at, options, "alpha_mask", data.masks == ALPHA) and not masks
    folder_of_masks = "" if has_alpha else masks or masks_of_run(data)
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
        **masks_at(folder_of_masks, data_root),
        masks_field=masks_field,
        has_alpha_masks=has_alpha,
        weight=data.prior_loss_weight if is_reg else 1.0,
    )


def masks_of_run(data: DataConfig) -> str:
    """Return the folder or the URL of masks that ``data`` names, "" if none."""
    return "" if data.masks in (None, ALPHA) else str(data.masks)


def masks_at(given: str, data_root: Path) -> dict[str, Any]:
    """Return the fields of a `Subset` whose masks are at ``given``, {} if it has none."""
    path = data_root / given
    return {"masks": path, "masks_url": source_of(given, path)} if given else {}


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
    content = _table(path, "the file", content)
    return _of_easy_training(path, content) if "subsets" in content else content


def _of_easy_training(path: Path, content: Options) -> Options:
    """Return the data set config that LoRA_Easy_Training_Scripts makes of its TOML; what is 0 is left out."""
    parts = [it.get("dataset_args", {}) for it in content.values() if isinstance(it, dict)]
    tables = _tables(path, "subsets", content["subsets"])
    subsets = [{k: v for k, v in it.items() if v and k != "name"} for it in tables]
    given = (_table(path, "dataset_args", part) for part in parts)
    general = {k: v for part in given for k, v in part.items() if v}
    return {"general": general, "datasets": [{"subsets": subsets}]}


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


def source_of(given: str, path: Path) -> str:
    """Return ``given`` if it is a URL, ``path`` if it is of shards or tables, "" if it is of pictures.

    Shards may be one file, a range in braces, or a folder without pictures.
    """
    if is_url(given):
        return given
    is_packed = _is_packed(path.name) and not path.is_dir()
    return str(path) if is_packed or _holds_packed_only(path) else ""


def _is_packed(name: str) -> bool:
    return name.lower().endswith((SHARD, TABLE)) and name not in METADATA


def _holds_packed_only(folder: Path) -> bool:
    has_packed = False
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not is_hidden(name)]
        files = [name for name in files if not is_hidden(name)]
        pictures = (name for name in files if Path(name).suffix.lower() in FOLDER_SUFFIXES)
        if not all(is_sheet_among_pictures(Path(parent) / name) for name in pictures):
            return False
        has_packed |= any(map(_is_packed, files))
    return has_packed


@dataclass(frozen=True)
class Subset:
    """One folder of pictures."""

    folder: Path
    repeats: int = 1
    caption_prefix: str = ""
    class_tokens: str = ""
    """Caption of pictures that have none."""
    caption_suffix: str = ""
    label: str = ""
    """Put before the names of its files in reports, if there are several folders."""
    url: str = ""
    """Where the folder is fetched from; "" if it is given as a path."""
    field: str = dataclasses.field(default="spec.run.data.images", compare=False)
    """What names it, for messages."""
    is_reg: bool = False
    """Regularisation images: they are repeated until they are as many as the others."""

    resolution: int | None = None
    """Square root of the number of pixels; None: those of the run."""

    variants: VariantsConfig = AS_THEY_ARE
    """What is made of its pictures and captions."""
    masks: Path | None = None
    """Folder of masks of the loss."""
    masks_url: str = ""
    """Where that folder is fetched from; "" if it is given as a path."""
    masks_field: str = dataclasses.field(default="spec.run.data.masks", compare=False)
    """What names it, for messages."""
    has_alpha_masks: bool = False
    """Whether the pictures' opacity is their mask."""
    weight: float = 1.0
    """Of the loss."""

    @property
    def masks_place(self) -> str:
        """Return where the masks are, for messages."""
        return redacted(self.masks_url) or str(self.masks)

    def caption(self, picture: PictureFile) -> str:
        """Return the prompt that ``picture`` is trained with."""
        own = picture.caption or self.class_tokens.strip()
        words = self.caption_prefix.strip(), own, self.caption_suffix.strip()
        return " ".join(word for word in words if word)
