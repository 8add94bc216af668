"""Read another trainer's file, and recognise whose it is by its content."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fluxtrain.contract.resource.document import parse_yaml, read_text
from fluxtrain.contract.validation import join_errors
from fluxtrain.errors import UNSET, ConfigError, JoinedConfigError
from fluxtrain.other_trainers.imported import Imported, Trainer, import_options
from fluxtrain.other_trainers.kohya import KOHYA
from fluxtrain.other_trainers.reading import Reading

_DEEPEST = 32


def read_options(path: Path) -> tuple[Trainer, dict[str, object]]:
    """Return whose options ``path`` holds, and them by name, with dots for nested ones.

    Raises ConfigError for a file that cannot be read, or is of no trainer that is known here.
    """
    document = _parse(path)
    if not isinstance(document, dict):
        raise ConfigError(str(path), document, "must be a mapping of options")
    return _recognise(document, path)


def _recognise(document: Mapping[str, Any], path: Path) -> tuple[Trainer, dict[str, object]]:
    if "apiVersion" in document:
        raise ConfigError(
            str(path), UNSET, "is a FluxTraining already, or another resource of Kubernetes"
        )
    if path.suffix == ".toml":
        if isinstance(document.get("job"), dict) or isinstance(document.get("training"), dict):
            text = "is torchtitan's; docs/coming-from.md has what replaces its keys"
            raise ConfigError(str(path), UNSET, text)
        if "datasets" in document:
            text = (
                "is kohya's data set config; import the training's options, then see docs/data.md"
            )
            raise ConfigError(str(path), UNSET, text)
        return KOHYA, _without_sections(document, path)
    raise ConfigError(str(path), UNSET, "must be kohya's TOML with options of a training")


def _without_sections(document: Mapping[str, Any], path: Path) -> dict[str, object]:
    """Return the options of kohya's TOML, in which sections have no meaning."""
    options: dict[str, object] = {}
    for key, value in document.items():
        for name, below in value.items() if isinstance(value, dict) else [(key, value)]:
            if name in options:
                raise ConfigError(f"{path}: {name}", below, "is given twice")
            options[name] = below
    return options


def _parse(path: Path) -> object:
    readers = {".toml": _toml, ".json": _json, ".yaml": parse_yaml, ".yml": parse_yaml}
    read = readers.get(path.suffix.lower())
    if read is None:
        raise ConfigError(str(path), UNSET, f"must end in one of {', '.join(readers)}")
    return read(read_text(path), str(path))


def _toml(text: str, source: str) -> object:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError
        raise ConfigError(source, UNSET, f"invalid TOML: {_reason(error)}") from None


def _json(text: str, source: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:  # JSONDecodeError is a ValueError
        raise ConfigError(source, UNSET, f"invalid JSON: {_reason(error)}") from None


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"duplicate key {key[:60]!r}")
        found[key] = value
    return found


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not a number of JSON")


def _reason(error: Exception) -> str:
    is_deep = isinstance(error, RecursionError)
    return "nested too deeply" if is_deep else str(error).splitlines()[0][:200]


def import_file(
    path: Path, overrides: Mapping[str, Any], processes: int = 1, epoch_samples: int | None = None
) -> Imported:
    """Return ``spec.run`` for the options in ``path``; errors name the file and the option."""
    trainer, options = read_options(path)
    try:
        return import_options(trainer, Reading(options, {}, processes, epoch_samples), overrides)
    except ConfigError as error:
        errors = error.errors if isinstance(error, JoinedConfigError) else [error]
        named = (ConfigError(f"{path}: {e.path}", e.given, e.allowed) for e in errors)
        raise join_errors(named) from None
