"""The sizes in kohya's data set config, which must be those of the run: its model and plan depend on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fluxtrain.contract.run.data import DataConfig
from fluxtrain.errors import ConfigError

BUCKET_OPTIONS = (
    *("enable_bucket", "bucket_reso_steps", "min_bucket_reso", "max_bucket_reso"),
    "bucket_no_upscale",
)
"""Options that are fields of ``data.buckets``."""


_SIDES = {"bucket_reso_steps": "step", "min_bucket_reso": "min_side", "max_bucket_reso": "max_side"}


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
    own = {
        "bucket_reso_steps": (buckets.step, "step"),
        "min_bucket_reso": (shortest, "min_side"),
        "max_bucket_reso": (longest, "max_side"),
        "bucket_no_upscale": (not buckets.upscale, "upscale"),
    }
    for name, value in given.items():
        expected, field = own[name]
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
    """Return the value of ``data.buckets`` that is the same as ``options``."""
    fields = {
        "step": options.get("bucket_reso_steps", 64),
        "min_side": options.get("min_bucket_reso", 256),
        "max_side": options.get("max_bucket_reso", 1024),
        "upscale": str(not options.get("bucket_no_upscale", False)).lower(),
    }
    return "{" + ", ".join(f"{name}: {value}" for name, value in fields.items()) + "}"
